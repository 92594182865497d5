"""HTML tables that notebooks show: headings, facts and rows of values, all of them escaped.

The HTML needs no scripts, style sheets or images. It inherits colours from the page, so that it is legible on light and
dark pages. A table that is wider than the page scrolls. All text is escaped, because a topic, a key or a body may
contain markup.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

MAX_ROWS = 50  # rows of a table that are shown; about one page
MAX_VALUE_CHARS = 400  # characters of a value that are shown
_NOTHING = "-"  # shown for a missing value

_BOX = "font-size:13px;line-height:1.45;overflow-x:auto;max-width:100%"
_TABLE = "border-collapse:collapse;font-size:inherit;color:inherit;margin:6px 0"
_MONO = "font-family:monospace"
_HEAD = "text-align:{};padding:2px 10px;border-bottom:1px solid rgba(128,128,128,.6);font-weight:600;white-space:nowrap"
_CELL = (
    "text-align:{};padding:1px 10px;border-bottom:1px solid rgba(128,128,128,.2);vertical-align:top;white-space:nowrap"
)
_LONG = "white-space:pre-wrap;overflow-wrap:anywhere;display:inline-block;max-width:60em"
_BAR = "display:inline-block;height:.7em;width:{:.1f}px;background:rgba(0,114,178,.7);vertical-align:baseline"
_BAR_PIXELS = 90
_PRE = (
    "margin:4px 0;padding:6px 10px;border:1px solid rgba(128,128,128,.35);max-height:24em;overflow:auto;"
    "white-space:pre-wrap;overflow-wrap:anywhere;text-align:left;max-width:80em"
)


class Column(NamedTuple):
    """A column of a table: its header, whether it is aligned to the right as numbers are, and its cells as HTML."""

    name: str
    is_number: bool
    cells: Sequence[str]


def text_column(name: str, values: Iterable[object], *, is_long: bool = False) -> Column:
    """Return a column of texts. None is shown as "-". With `is_long` a cell may have several lines.

    A value with more than 400 characters is cut, and the number of its characters is shown.
    """
    cells = [escape(_shortened(_NOTHING if value is None else str(value))) for value in values]
    return Column(name, False, [f'<span style="{_LONG}">{cell}</span>' for cell in cells] if is_long else cells)


def number_column(name: str, values: Iterable[int | str | None]) -> Column:
    """Return a column that is aligned to the right. Integers get separators of thousands; None is shown as "-"."""
    return Column(name, True, [escape(_number_text(value)) for value in values])


def bar_column(numbers: Iterable[int | None]) -> Column:
    """Return a column with a bar for each number. The largest number has the longest bar, and 0 and None have none."""
    counts = [number or 0 for number in numbers]
    most = max(counts, default=0)
    bars = [f'<span style="{_BAR.format(_BAR_PIXELS * one / most)}"></span>' if one else "" for one in counts]
    return Column("", False, bars)


def table(columns: Sequence[Column], more: str = "") -> str:
    """Return a table of these columns, which have equal lengths, and below it the text `more`."""
    sides = ["right" if column.is_number else "left" for column in columns]
    head = "".join(
        f'<th style="{_HEAD.format(side)}">{escape(column.name)}</th>'
        for side, column in zip(sides, columns, strict=True)
    )
    rows = "".join(
        "<tr>"
        + "".join(f'<td style="{_CELL.format(side)}">{cell}</td>' for side, cell in zip(sides, cells, strict=True))
        + "</tr>"
        for cells in zip(*(column.cells for column in columns), strict=True)
    )
    below = f"<div>{escape(more)}</div>" if more else ""
    return f'<table style="{_TABLE};{_MONO}"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{below}'


def box(what: str, name: str, facts: Mapping[str, str], rest: str = "") -> str:
    """Return a heading with `what` and `name`, a table of facts, and `rest`, which is HTML. It scrolls if wide."""
    lines = "".join(
        f'<tr><td style="{_CELL.format("left")};opacity:.75">{escape(label)}</td>'
        f'<td style="{_CELL.format("left")}">{escape(_shortened(value))}</td></tr>'
        for label, value in facts.items()
    )
    title = f'<div style="margin-bottom:4px">{escape(what)} <b style="{_MONO}">{escape(name)}</b></div>'
    return f'<div style="{_BOX}">{title}<table style="{_TABLE}">{lines}</table>{rest}</div>'


def folded(title: str, rest: str) -> str:
    """Return `rest`, which is HTML, below a title that shows and hides it."""
    return f"<details><summary>{escape(title)}</summary>{rest}</details>"


def text_block(title: str, text: str, more: str = "") -> str:
    """Return a text with its line breaks below a title, and below it the text `more`."""
    shown = f'<pre style="{_PRE}">{escape(text)}</pre>' if text else ""
    below = f"<div>{escape(more)}</div>" if more else ""
    return f"<div><b>{escape(title)}</b></div>{shown}{below}"


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}… ({len(text):,} characters)"


def _number_text(value: int | str | None) -> str:
    return _NOTHING if value is None else value if isinstance(value, str) else f"{value:,}"
