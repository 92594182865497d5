"""The meanings of colours on a terminal, declared once. Other output is without colours.

NO_COLOR set to any text, TERM=dumb, and a pipe or file mean no colours and no bold text.
"""

import os
from enum import StrEnum
from typing import IO, Any

import click


class Meaning(StrEnum):
    """The meaning of a colour. The value is its style, as rich names it."""

    ERROR = "bold red"  # something is lost, missing, or has failed
    WARNING = "yellow"  # look at it: lag, or something that is slower or not as it should be
    GOOD = "green"  # examined, and well
    ZERO = "dim"  # nothing: the number 0


# Words in cells of tables and in front of findings.
_WORDS = {
    **dict.fromkeys(("damage", "missing", "expired", "gone", "cut"), Meaning.ERROR),
    **dict.fromkeys(("repairable", "warning", "ahead", "away", "leave"), Meaning.WARNING),
    "ok": Meaning.GOOD,
}
_WARNING_NUMBERS = ("lagMessages", "lagBytes", "secondsBehind")
_ERROR_COLUMNS = ("problem",)
_NAMES = ("Id", "Offset", "osition", "Code")  # numbers that are not amounts end with these


def has_colours(stream: IO[str]) -> bool:
    """Return whether a stream is a terminal that shows colours, and the user wants them."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def meaning_of(name: str, value: Any) -> Meaning | None:
    """Return the meaning of a value in the column `name` of a table."""
    if isinstance(value, str):
        return _WORDS.get(value) or (Meaning.ERROR if value and name in _ERROR_COLUMNS else None)
    if isinstance(value, bool) or not isinstance(value, int | float) or name.endswith(_NAMES):
        return None
    if value == 0:
        return Meaning.ZERO
    return Meaning.WARNING if name in _WARNING_NUMBERS and value > 0 else None


def paint(text: str, meaning: Meaning | None, stream: IO[str]) -> str:
    """Return a text with the colour of a meaning, if the stream shows colours."""
    if meaning is None or not has_colours(stream):
        return text
    *attributes, last = meaning.value.split()
    colours: dict[str, Any] = dict.fromkeys(attributes, True) | ({"dim": True} if last == "dim" else {"fg": last})
    return click.style(text, **colours)
