"""A figure: the measured value, its limit, and the table of a run's figures.

A figure is either a ratio of two things measured alternately in one run, so that a busy machine slows both, or a
plain number that does not depend on a clock. The value is the median over the rounds; `low` and `high` are the
extremes, which show how quiet the machine was.
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
        """Return "pass" or "miss", "" without a limit."""
        if self.required is None:
            return ""
        good = self.value <= self.required if self.at_most else self.value >= self.required
        return "pass" if good else "miss"

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        fields = {name: getattr(self, name) for name in ("name", "value", "low", "high", "unit", "required")}
        return {**fields, "at_most": self.at_most, "verdict": self.verdict, "note": self.note, **self.detail}


def take_turns(repeats: int, *measures: Callable[[], float]) -> list[list[float]]:
    """Call each measure once per round, in `repeats` rounds, and return the results of each measure in order.

    Every other round runs backwards (A B, B A, …), so that a drift of the machine affects both alike.
    """
    results: list[list[float]] = [[] for _ in measures]
    for turn in range(repeats):
        order = range(len(measures)) if turn % 2 == 0 else reversed(range(len(measures)))
        for index in order:
            results[index].append(measures[index]())
    return results


def ratio_figure(name: str, over: Sequence[float], under: Sequence[float], **about: Any) -> Figure:
    """Return the figure over / under, round by round."""
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
