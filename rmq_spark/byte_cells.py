"""Bytes drawn one by one in coloured cells, with a list of the fields that they belong to."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rmq_spark import drawing
from rmq_spark.store import count_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_BYTES = 2048  # that have a cell; drawing them takes about a second, and the picture has the height of two pages
_COLUMNS = 4  # of the list of fields
_VALUE_CHARS, _SMALL_COLUMN = 30, 34  # characters of a value that are shown, and of a name and a value in one column
_LINE_INCHES, _REST_INCHES = 0.32, 0.55
_LIST_GAP, _LIST_LINE = 0.3, 0.8  # between cells and list, and a line of the list, in heights of a cell
_PRINTABLE = range(33, 127)
_GAP = 0.06  # between two cells, as part of a cell


def draw(
    ax: "Axes | None",
    data: bytes,
    fields: Sequence[tuple[int, int, str, object]],
    title: str,
    text: Collection[str],
    bytes_per_line: int,
) -> "Axes":
    """Draw the first bytes of the fields, and a list of all fields. The arguments are those of `plots.plot_bytes`."""
    drawn = data[:MAX_BYTES]
    left_out = len(data) - len(drawn)
    lines = -(-len(drawn) // bytes_per_line)
    list_top = lines + (left_out > 0) + _LIST_GAP
    height = list_top + _LIST_LINE * -(-len(fields) // _COLUMNS)
    if ax is None:
        ax = drawing.axes(None, height * _LINE_INCHES + _REST_INCHES)
        ax.figure.set_figwidth(11)
    else:
        drawing.apply_style(ax)
    for number, (begin, size, name, _) in enumerate(fields):
        colour = drawing.CELL_COLOURS[number % len(drawing.CELL_COLOURS)]
        part = drawn[begin : begin + size]
        _draw_cells(ax, part, begin, bytes_per_line, colour, name in text)
        line, column = divmod(begin, bytes_per_line)
        if part:
            ax.text(column + 0.08, line + 0.1, str(number), ha="left", va="top", fontsize=5, color=drawing.CELL_INK)
    if left_out:
        more = f"… {count_text(left_out, 'more byte')}"
        ax.text(0.1, lines + 0.5, more, ha="left", va="center", fontsize=8, color=drawing.INK)
    _list_fields(ax, fields, list_top, bytes_per_line)
    ax.set(xlim=(0, bytes_per_line), ylim=(height, 0))
    if title:
        drawing.title(ax, title)
    ticks = range(0, bytes_per_line, 4)
    ax.set_xticks([tick + 0.5 for tick in ticks], [f"+{tick}" for tick in ticks], fontsize="small")
    ax.xaxis.tick_top()
    ax.set_yticks(
        [line + 0.5 for line in range(lines)], [bytes_per_line * line for line in range(lines)], fontsize="small"
    )
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return ax


def _draw_cells(ax: "Axes", part: bytes, begin: int, bytes_per_line: int, colour: str, is_text: bool) -> None:
    """Draw the cells of one field, which begins at the position `begin`."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    cells = []
    for position, byte in enumerate(part, begin):
        line, column = divmod(position, bytes_per_line)
        cells.append(Rectangle((column + _GAP / 2, line + _GAP / 2), 1 - _GAP, 1 - _GAP))
        shown, weight = (chr(byte), "bold") if is_text and byte in _PRINTABLE else (f"{byte:02x}", "normal")
        look = {"fontsize": 8, "family": "monospace", "weight": weight, "color": drawing.CELL_INK}
        ax.text(column + 0.54, line + 0.57, shown, ha="center", va="center", parse_math=False, **look)
    ax.add_collection(PatchCollection(cells, facecolor=colour, edgecolor="none"))


def _list_fields(ax: "Axes", fields: Sequence[tuple[int, int, str, object]], top: float, bytes_per_line: int) -> None:
    """Write number, name and value of each field below the cells, column by column."""
    rows = -(-len(fields) // _COLUMNS)
    for number, (_, _, name, value) in enumerate(fields):
        column, row = divmod(number, rows)
        begin, middle = column * bytes_per_line / _COLUMNS, top + _LIST_LINE * (row + 0.5)
        colour = drawing.CELL_COLOURS[number % len(drawing.CELL_COLOURS)]
        look = {"va": "center", "fontsize": 8, "parse_math": False}
        box = {"boxstyle": "round,pad=0.25", "facecolor": colour, "edgecolor": "none"}
        ax.text(begin + 0.45, middle, str(number), ha="center", bbox=box, color=drawing.CELL_INK, **look)
        line = f"{name}  {shown_value(value)}"
        line = line if len(line) <= _SMALL_COLUMN else f"{line[: _SMALL_COLUMN - 1]}…"
        ax.text(begin + 1.1, middle, line, ha="left", color=drawing.INK, **look)


def shown_value(value: object) -> str:
    """Return a value as one printable line of at most 30 characters."""
    line = "".join(char if char.isprintable() else " " for char in str(value))
    return line if len(line) <= _VALUE_CHARS else f"{line[: _VALUE_CHARS - 1]}…"
