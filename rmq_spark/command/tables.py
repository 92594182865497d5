"""Text tables that fit the terminal; in a pipe or file they have their full width.

A table that is too wide first folds lists between their items. Then it drops optional columns, and names them on stderr
unless they are empty. Then it folds long texts, if possible between the words of a name, and drops the columns that it
may spare for that. If that is not enough, it prints one value per line. Numbers are never folded.
"""

import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import click

from rmq_spark.command.colours import has_colours, meaning_of
from rmq_spark.command.output import cell, print_data, say

if TYPE_CHECKING:
    from rich.console import Console


class _Fold(Enum):
    """What a table folds."""

    NOTHING = "nothing"
    LISTS = "lists, between their items"
    TEXTS = "every text"


PIPE_CHARS = 10_000  # the width of texts in a pipe: no folding, for grep
_GAP = 2
_FOLDED_CHARS = 14  # the minimum width of a folded column
_BODY_CHARS = 24  # that of a column with bodies
_ITEM = re.compile(r"\S+\s*|\s+")
_PART = re.compile(r"[^_,./:@|-]+[_,./:@|-]*|[_,./:@|-]+")  # a part of a name, with what separates it from the next one
_HEADERS = {"secondsBehind": "behind"}  # where cells have other units than the name of the column


def show(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    *,
    as_data: bool,
    nothing: str,
    optional: Sequence[str | tuple[str, ...]] = (),
    spared: Sequence[str] = (),
) -> None:
    """Print rows as a table of `columns`, or as JSON or CSV with all fields.

    Without rows print `nothing` to stderr, the JSON list [], or the header of the CSV.

    A narrow terminal omits the columns `optional`, in that order, until the table fits; those of a tuple together. If
    it does not even fit with folded texts, it omits the columns `spared`.
    """
    if as_data:
        print_data(rows, columns)
    elif rows:
        print_table(rows, columns, optional, spared)
    elif nothing:
        say(nothing)


def print_table(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    optional: Sequence[str | tuple[str, ...]] = (),
    spared: Sequence[str] = (),
) -> None:
    """Print rows as a table of `columns`; see `show` for `optional` and `spared`."""
    table = _Table(rows, columns)
    if not sys.stdout.isatty():
        click.echo("\n".join(table.lines()))
        return
    from rich.console import Console  # not imported for output to a pipe or file

    width = terminal_width()
    # rich takes a dumb terminal to have 80 columns.
    console = Console(highlight=False, width=width, color_system="auto" if has_colours(sys.stdout) else None)
    together = [(one,) if isinstance(one, str) else one for one in optional]
    table.drop_empty_columns([*chain.from_iterable(together), *spared], width)
    dropped = table.drop_columns(together, width, _Fold.LISTS)
    dropped += table.drop_columns([(name,) for name in spared], width, _Fold.TEXTS)
    if table.width(_Fold.TEXTS) <= width:
        table.print_across(console, width)
    else:
        _Table(rows, columns).print_down(console)
        return
    if dropped:
        note = f"Columns that do not fit: {', '.join(dropped)}. --json prints all."
        say("\n".join(textwrap.wrap(note, max(width, 20))))


def terminal_width() -> int:
    """Return the number of columns of the terminal."""
    return shutil.get_terminal_size().columns


class _Table:
    """A table as columns of texts."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
        self._texts = {name: [cell(name, row.get(name)) for row in rows] for name in columns}
        values = {name: [row[name] for row in rows if row.get(name) is not None] for name in columns}
        self._numbers = {
            name
            for name in columns
            if values[name] and all(isinstance(value, int | float) and value is not True for value in values[name])
        }
        self._styles = {name: [meaning_of(name, row.get(name)) or "" for row in rows] for name in columns}
        # The number of characters of the longest item, with its comma.
        self._items = {
            name: max(_cells(item) for text in self._texts[name] for item in text.split(" "))
            for name in columns
            if any(isinstance(value, list | tuple | Mapping) for value in values[name])
        }
        # Times, offsets and ids are useless in pieces.
        self._unfolded = self._numbers | {
            name for name in columns if name.endswith(("Timestamp", "Offset", "Id")) or name in ("query", "begun")
        }

    def _width_of(self, name: str, fold: _Fold = _Fold.NOTHING) -> int:
        header = len(_HEADERS.get(name, name))
        chars = max(header, *map(_cells, self._texts[name]))
        if fold is _Fold.NOTHING or name in self._unfolded:
            return chars
        if fold is _Fold.TEXTS:
            return max(header, min(chars, _BODY_CHARS if name == "body" else _FOLDED_CHARS))
        return max(header, self._items[name]) if name in self._items else chars

    def width(self, fold: _Fold = _Fold.NOTHING) -> int:
        """Return the least width in characters if the table is folded in this way."""
        chars = [self._width_of(name, fold) for name in self._texts]
        return sum(chars) + _GAP * (len(chars) - 1)

    def drop_empty_columns(self, names: Sequence[str], max_width: int) -> None:
        """Drop those of these columns that are empty in every row, until the table fits."""
        for name in names:
            if self.width() > max_width and not any(self._texts.get(name, "x")):
                del self._texts[name]

    def drop_columns(self, optional: Sequence[tuple[str, ...]], max_width: int, fold: _Fold) -> list[str]:
        """Drop optional columns until the table fits when it is folded in this way, and return their names.

        Those of one tuple are dropped together.
        """
        dropped = []
        for together in optional:
            if self.width(fold) <= max_width:
                break
            dropped += [name for name in together if self._texts.pop(name, None) is not None]
        return dropped

    def _widths(self, max_width: int) -> dict[str, int]:
        """Return the width of each column: lists fold before other texts, and the narrowest get their width first."""
        fold = _Fold.LISTS if self.width(_Fold.LISTS) <= max_width else _Fold.TEXTS
        widths = {name: self._width_of(name, fold) for name in self._texts}
        left = max_width - self.width(fold)
        wanted = sorted(widths, key=lambda name: self._width_of(name) - widths[name])
        for at, name in enumerate(wanted):
            more = min(self._width_of(name) - widths[name], left // (len(wanted) - at))
            widths[name], left = widths[name] + more, left - more
        return widths

    def lines(self) -> list[str]:
        """Return the lines of the table, unfolded."""
        chars = {name: self._width_of(name) for name in self._texts}

        def line(texts: Sequence[str]) -> str:
            padded = (
                text.rjust(chars[name]) if name in self._numbers else text + " " * (chars[name] - _cells(text))
                for name, text in zip(self._texts, texts, strict=True)
            )
            return (" " * _GAP).join(padded).rstrip()

        return [
            line([_HEADERS.get(name, name) for name in self._texts]),
            *(line(texts) for texts in zip(*self._texts.values(), strict=True)),
        ]

    def print_across(self, console: "Console", max_width: int) -> None:
        """Print one row per line, with long texts folded."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        widths = self._widths(max_width)
        for name, chars in widths.items():
            justify: Literal["left", "right"] = "right" if name in self._numbers else "left"
            table.add_column(Text(_HEADERS.get(name, name)), justify=justify, no_wrap=True, width=chars)
        styles = zip(*(self._styles[name] for name in self._texts), strict=True)
        for texts, styles_of_row in zip(zip(*self._texts.values(), strict=True), styles, strict=True):
            folded = (_folded(text, chars) for text, chars in zip(texts, widths.values(), strict=True))
            table.add_row(*map(Text, folded, styles_of_row))
        console.print(table)

    def print_down(self, console: "Console") -> None:
        """Print one value per line after its name, and an empty line between rows."""
        from rich.table import Table
        from rich.text import Text

        most = console.width - _GAP - max(len(_HEADERS.get(name, name)) for name in self._texts)
        for at, texts in enumerate(zip(*self._texts.values(), strict=True)):
            grid = Table.grid(padding=(0, _GAP, 0, 0))
            grid.add_column(style="bold", no_wrap=True)
            grid.add_column(overflow="fold")
            for name, text in zip(self._texts, texts, strict=True):
                if text:
                    grid.add_row(_HEADERS.get(name, name), Text(_folded(text, most), self._styles[name][at]))
            if at:
                console.print()
            console.print(grid)


def _cells(text: str) -> int:
    """Return the number of columns that a text takes on a terminal: a Chinese character takes two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # not imported for most output

    return cell_len(text)


def _folded(text: str, chars: int) -> str:
    """Return a text in lines of at most `chars` characters, if possible without a break inside an item or a word.

    Every line after the first begins with a space, so that it does not look like another row. A line has room for that
    and for one wide character at least.
    """
    chars = max(chars, 3)
    if _cells(text) <= chars:
        return text
    lines = [""]
    for item in _ITEM.findall(text):
        is_long = _cells(item.rstrip()) >= chars
        if is_long and lines[-1].strip():
            lines.append(" ")
        for part in _PART.findall(item) if is_long else [item]:
            if lines[-1].strip() and _cells(lines[-1]) + _cells(part.rstrip()) > chars:
                lines.append(" ")
            lines[-1] += part
            while _cells(lines[-1].rstrip()) > chars:
                kept = next(at for at in range(len(lines[-1]), 0, -1) if _cells(lines[-1][:at]) <= chars)
                lines[-1:] = [lines[-1][:kept], " " + lines[-1][kept:]]
    return "\n".join(map(str.rstrip, lines))
