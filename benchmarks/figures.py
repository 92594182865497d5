"""A figure: what was measured, what is required of it, and how a run's figures are shown.

Every figure is a ratio of two things measured in turns within one run, so that a busy machine hurts both, or a
plain number that no clock has a part in. The value is the median over the turns; `low` and `high` are the
extremes, by which a reader sees how quiet the machine was.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One row of the table. `required` None: for information. `at_most`: the value must not exceed it."""

    name: str
    value: float
    low: float
    high: float
    required: float | None = None
    at_most: bool = False
    unit: str = ""  # empty: a ratio
    note: str = ""
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Say "pass" or "miss"; nothing where nothing is required."""
        if self.required is None:
            return ""
        good = self.value <= self.required if self.at_most else self.value >= self.required
        return "pass" if good else "miss"

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        fields = {name: getattr(self, name) for name in ("name", "value", "low", "high", "unit", "required")}
        return {**fields, "at_most": self.at_most, "verdict": self.verdict, "note": self.note, **self.detail}


def take_turns(repeats: int, *measures: Callable[[], float]) -> list[list[float]]:
    """Call each measure once a turn, `repeats` turns, and return the results of each measure in order.

    Every other turn runs backwards (A B, B A, …), so that a drift of the machine favours nobody.
    """
    results: list[list[float]] = [[] for _ in measures]
    for turn in range(repeats):
        order = range(len(measures)) if turn % 2 == 0 else reversed(range(len(measures)))
        for index in order:
            results[index].append(measures[index]())
    return results


def ratio_figure(name: str, over: Sequence[float], under: Sequence[float], **about: Any) -> Figure:
    """Return the figure over / under, turn by turn."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return Figure(name, median(ratios), min(ratios), max(ratios), **about)


def table(figures: Iterable[Figure]) -> str:
    """Return the figures as aligned text, a line each."""
    rows = [("figure", "value", "required", "", "low .. high", "")]
    for figure in figures:
        digits = 2 if figure.unit == "" else 0
        sign = "<=" if figure.at_most else ">="
        unit = f" {figure.unit}" if figure.unit else ""
        required = "" if figure.required is None else f"{sign} {figure.required:.{digits}f}{unit}"
        rows.append(
            (
                figure.name,
                f"{figure.value:.{digits}f}{unit}",
                required,
                figure.verdict,
                f"{figure.low:.{digits}f} .. {figure.high:.{digits}f}",
                figure.note,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:5], widths[1:], strict=True))]
        )
        + f"  {row[5]}"
        for row in rows
    ]
    lines.insert(1, "-" * max(len(line) for line in lines))
    return "\n".join(line.rstrip() for line in lines)
