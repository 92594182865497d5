"""Tables for people, as wide as the terminal lets them be; where nobody looks, as wide as they are.

A table that does not fit leaves out columns that can be spared, and says so; then it folds long texts; and if that is
not enough each row is written down the page. A number is never folded.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from rmq_spark.command.output import cell, print_json, say

if TYPE_CHECKING:
    from rich.console import Console

_GAP = 2
_FOLDED_CHARS = 16  # a text is not folded narrower
# Words that are to be seen at once.
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
    spared: Sequence[str] = (),
) -> None:
    """Print rows: a table of these columns, or JSON of all that they have. Without a row: `nothing`, or [].

    `spared` are columns that a narrow terminal does without, the first one first.
    """
    if as_json:
        print_json(rows)
    elif rows:
        print_table(rows, columns, spared)
    elif nothing:
        say(nothing)


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], spared: Sequence[str] = ()) -> None:
    """Print rows as a table of these columns."""
    table = _Table(rows, columns)
    if not sys.stdout.isatty():
        click.echo("\n".join(table.lines()))
        return
    from rich.console import Console  # where nobody looks it is not loaded

    console = Console(highlight=False)
    left_out = table.leave_out(spared, console.width)
    if table.width(_FOLDED_CHARS) <= console.width:
        table.print_across(console)
    else:
        table.print_down(console)
    if left_out:
        say(f"Left out, for want of room: {', '.join(left_out)}. --json has all.")


class _Table:
    """Texts in columns."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
        self._texts = {name: [cell(name, row.get(name)) for row in rows] for name in columns}
        values = {name: [row[name] for row in rows if row.get(name) is not None] for name in columns}
        self._numbers = {
            name
            for name in columns
            if values[name] and all(isinstance(value, int | float) and value is not True for value in values[name])
        }
        # A time is a word of its own length, and no use in pieces.
        self._stiff = self._numbers | {name for name in columns if name.endswith(("Timestamp", "Offset", "Id"))}

    def _chars(self, name: str) -> int:
        return max(len(name), *map(len, self._texts[name]))

    def width(self, folded_chars: int | None = None) -> int:
        """Return how wide it is: at least, if its texts may be folded to so many characters."""
        chars = [
            self._chars(name)
            if folded_chars is None or name in self._stiff
            else max(len(name), min(self._chars(name), folded_chars))
            for name in self._texts
        ]
        return sum(chars) + _GAP * (len(chars) - 1)

    def leave_out(self, spared: Sequence[str], room: int) -> list[str]:
        """Leave columns out until it fits, or there is no more to be spared; return them."""
        gone = []
        for name in spared:
            if self.width() <= room:
                break
            if self._texts.pop(name, None) is not None:
                gone.append(name)
        return gone

    def lines(self) -> list[str]:
        """Return it as text, each column as wide as its longest value."""
        chars = {name: self._chars(name) for name in self._texts}

        def line(texts: Sequence[str]) -> str:
            padded = (
                text.rjust(chars[name]) if name in self._numbers else text.ljust(chars[name])
                for name, text in zip(self._texts, texts, strict=True)
            )
            return (" " * _GAP).join(padded).rstrip()

        return [line(list(self._texts)), *(line(texts) for texts in zip(*self._texts.values(), strict=True))]

    def print_across(self, console: "Console") -> None:
        """Print a row a line; long texts are folded."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for name in self._texts:
            is_stiff = name in self._stiff
            table.add_column(
                Text(name, no_wrap=True),
                justify="right" if name in self._numbers else "left",
                overflow="fold",
                no_wrap=is_stiff,
                min_width=self._chars(name) if is_stiff else max(len(name), min(self._chars(name), _FOLDED_CHARS)),
            )
        for texts in zip(*self._texts.values(), strict=True):
            table.add_row(*(Text(text, style=_STYLES.get(text, "")) for text in texts))
        console.print(table)

    def print_down(self, console: "Console") -> None:
        """Print a value a line, its name before it, and an empty line between rows."""
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
