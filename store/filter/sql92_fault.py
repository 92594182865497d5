"""The error for an expression that is wrong: what is expected where, what is there, and what to do about it.

It shows the line of the text with a caret below the place. The text itself is left to the lexer and the parser.
"""

import re
import unicodedata

from rmq_spark.store.errors import OptionError

_LINE_ENDS = re.compile("\r\n|\r|\n")
_SHOWN_CHARACTERS = 100  # of a long line, so that the caret stays below its place on most screens


def fault(text: str, position: int, *, expected: str, found: str, advice: str) -> OptionError:
    """Return the error for the place `position` (characters from the text's begin). The caller raises it."""
    before = _LINE_ENDS.split(text[:position])
    column = len(before[-1])
    line = before[-1] + _LINE_ENDS.split(text[position:])[0]
    place = f"character {position + 1}"
    if _LINE_ENDS.search(text):
        place = f"line {len(before)}, character {column + 1}"
    shown, caret = _excerpt(line, column)
    return OptionError(f"sql92, {place}: expected {expected}, found {found}.\n    {shown}\n    {caret}^\n{advice}")


def _excerpt(line: str, column: int) -> tuple[str, str]:
    """Return what is shown of the line, and the blanks in front of the caret."""
    first = max(0, min(column - _SHOWN_CHARACTERS // 2, len(line) - _SHOWN_CHARACTERS))
    last = first + _SHOWN_CHARACTERS
    front = ("…" if first else "") + line[first:column]
    shown = front + line[column:last] + ("…" if last < len(line) else "")
    # A lone surrogate cannot be printed at all.
    return shown.encode("utf-8", "replace").decode(), "".join(map(_blank, front))


def _blank(character: str) -> str:
    """Return blanks as wide as the character is in a terminal."""
    if character == "\t":
        return "\t"
    if unicodedata.combining(character):
        return ""
    return "  " if unicodedata.east_asian_width(character) in "WF" else " "
