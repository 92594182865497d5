"""Text tables that fit the terminal; in a pipe or file they have their full width.

A table that is too wide first drops optional columns and names them on stderr. Then it folds long texts. If that is
not enough, it prints one value per line. Numbers are never folded.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from rmq_spark.command.output import cell, print_json, say

if TYPE_CHECKING:
    from rich.console import Console

_GAP = 2
_FOLDED_CHARS = 16  # the minimum width of a folded column
_STYLES = {
    "damage": "bold red",
    "repairable": "yellow",
    "expired": "bold red",
    "gone": "bold red",
    "ahead": "yellow",
    "leave": "yellow",
    "cut": "bold red",
}


def show(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    *,
    as_json: bool,
    nothing: str,
    optional: Sequence[str] = (),
) -> None:
    """Print rows as a table of `columns`, or as JSON with all fields. Without rows print `nothing` to stderr, or [].

    A narrow terminal omits the columns `optional`, in that order, until the table fits.
    """
    if as_json:
        print_json(rows)
    elif rows:
        print_table(rows, columns, optional)
    elif nothing:
        say(nothing)


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Print rows as a table of `columns`; see `show` for `optional`."""
    table = _Table(rows, columns)
    if not sys.stdout.isatty():
        click.echo("\n".join(table.lines()))
        return
    from rich.console import Console  # not imported for output to a pipe or file

    console = Console(highlight=False)
    dropped = table.drop_columns(optional, console.width)
    if table.width(_FOLDED_CHARS) <= console.width:
        table.print_across(console)
    else:
        table.print_down(console)
    if dropped:
        say(f"Columns that do not fit: {', '.join(dropped)}. --json prints all.")


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
        # Times, offsets and ids are useless in pieces.
        self._unfolded = self._numbers | {name for name in columns if name.endswith(("Timestamp", "Offset", "Id"))}

    def _width_of(self, name: str, folded_chars: int | None = None) -> int:
        chars = max(len(name), *map(len, self._texts[name]))
        if folded_chars is None or name in self._unfolded:
            return chars
        return max(len(name), min(chars, folded_chars))

    def width(self, folded_chars: int | None = None) -> int:
        """Return the width in characters; with `folded_chars`, if texts are folded to that number of characters."""
        chars = [self._width_of(name, folded_chars) for name in self._texts]
        return sum(chars) + _GAP * (len(chars) - 1)

    def drop_columns(self, optional: Sequence[str], max_width: int) -> list[str]:
        """Drop optional columns until the table fits, and return their names."""
        dropped = []
        for name in optional:
            if self.width() <= max_width:
                break
            if self._texts.pop(name, None) is not None:
                dropped.append(name)
        return dropped

    def lines(self) -> list[str]:
        """Return the lines of the table, unfolded."""
        chars = {name: self._width_of(name) for name in self._texts}

        def line(texts: Sequence[str]) -> str:
            padded = (
                text.rjust(chars[name]) if name in self._numbers else text.ljust(chars[name])
                for name, text in zip(self._texts, texts, strict=True)
            )
            return (" " * _GAP).join(padded).rstrip()

        return [line(list(self._texts)), *(line(texts) for texts in zip(*self._texts.values(), strict=True))]

    def print_across(self, console: "Console") -> None:
        """Print one row per line, with long texts folded."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for name in self._texts:
            table.add_column(
                Text(name, no_wrap=True),
                justify="right" if name in self._numbers else "left",
                overflow="fold",
                no_wrap=name in self._unfolded,
                min_width=self._width_of(name, _FOLDED_CHARS),
            )
        for texts in zip(*self._texts.values(), strict=True):
            table.add_row(*(Text(text, style=_STYLES.get(text, "")) for text in texts))
        console.print(table)

    def print_down(self, console: "Console") -> None:
        """Print one value per line after its name, and an empty line between rows."""
        from rich.table import Table
        from rich.text import Text

        for at, texts in enumerate(zip(*self._texts.values(), strict=True)):
            grid = Table.grid(padding=(0, _GAP, 0, 0))
            grid.add_column(style="bold", no_wrap=True)
            grid.add_column(overflow="fold")
            for name, text in zip(self._texts, texts, strict=True):
                if text:
                    grid.add_row(name, Text(text, style=_STYLES.get(text, "")))
            if at:
                console.print()
            console.print(grid)
