"""The tokens of an SQL92 expression, one after the other, as RocketMQ's lexer cuts them.

Lazy: a text is cut only as far as the parser asks, because RocketMQ accepts anything behind the token that ends
an expression. What is no token is an error with its place. Follows SelectorParser.jj (5.3).
"""

import re
from dataclasses import dataclass
from enum import Enum, auto

from rmq_spark.store.errors import OptionError
from rmq_spark.store.filter.sql92_fault import fault


class TokenKind(Enum):
    """What a token is."""

    KEYWORD = auto()  # `value` has it in upper case
    NAME = auto()  # of a property
    WHOLE = auto()  # digits, with or without an L
    FLOAT = auto()
    TEXT = auto()  # with its quotes
    SIGN = auto()  # an operator, a bracket, a comma
    END = auto()  # nothing is left


@dataclass(frozen=True, slots=True)
class Token:
    """One token: `value` as it stands in the text (a keyword in upper case), `position` in characters."""

    kind: TokenKind
    value: str
    position: int

    def __str__(self) -> str:
        if self.kind is TokenKind.END:
            return "the end of the expression"
        value = self.value
        if len(value) > _SHOWN_CHARACTERS:
            value = f"{value[: _SHOWN_CHARACTERS // 2]}…{value[-_SHOWN_CHARACTERS // 2 :]}"
        return f"`{value}`"


TEXT_KEYWORDS = frozenset(["CONTAINS", "STARTSWITH", "ENDSWITH"])
KEYWORDS = TEXT_KEYWORDS | {"NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS"}

# A comment that begins with -- needs the end of its line; a backslash means nothing in a text.
# Possessive: a repetition that can backtrack keeps a hundred bytes for each character.
_SKIPPED = re.compile(r"(?:[ \t\n\r\f]++|--[^\n\r]*+(?:\r\n|\n|\r)|/\*.*?\*/)*+", re.DOTALL)
# In RocketMQ's order of preference where two are equally long; each finds its longest.
_TOKENS = re.compile(
    r"""(?P<FLOAT>[0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)
    |(?P<WHOLE>0|[1-9][0-9]*[lL]?)
    |(?P<TEXT>'[^']*+(?:''[^']*+)*+')
    |(?P<NAME>[A-Za-z_$][A-Za-z0-9_$]*)
    |(?P<SIGN><>|>=|<=|[=<>(),+-])""",
    re.VERBOSE,
)
_SHOWN_CHARACTERS = 80  # of one token in an error
_ADVICE = {
    '"': "Texts stand in single quotes: 'x'. A property's name has none.",
    "'": "A text ends with a single quote; one that belongs to the text is written twice: 'it''s'.",
    "!": "Write <> for not equal, NOT (...) for the opposite.",
    ".": "A property's name has only A-Z, a-z, 0-9, _ and $, so names with other characters cannot be filtered on.",
    "/": "There is no arithmetic in it, and a comment that begins with /* ends with */.",
    **dict.fromkeys("*%^|&~", "There is no arithmetic in it; conditions are joined by AND, OR and NOT."),
    ";": "An expression needs no mark at its end: take it out.",
}
_ANY_ADVICE = (
    "Outside of quoted texts there are only ASCII names (A-Z, a-z, 0-9, _, $), numbers, = <> > >= < <= ( ) , + - "
    "and blanks."
)


class Lexer:
    """Cuts one text. Not for two threads at a time."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._position = 0

    def next(self) -> Token:
        """Return the next token, at the end END again and again.

        Raises OptionError where no token begins, or a text or a comment does not end.
        """
        skipped = _SKIPPED.match(self.text, self._position)
        assert skipped  # it matches nothing, too
        begin = skipped.end()
        if begin == len(self.text):
            self._position = begin
            return Token(TokenKind.END, "", begin)
        found = _TOKENS.match(self.text, begin)
        if found is None:
            raise self._no_token(begin)
        self._position = found.end()
        kind, value = TokenKind[found.lastgroup or ""], found[0]
        if kind is TokenKind.TEXT:
            lone = _first_lone(value)
            if lone is not None:
                raise self._no_token(begin + lone)
        if kind is TokenKind.NAME and value.upper() in KEYWORDS:
            return Token(TokenKind.KEYWORD, value.upper(), begin)
        return Token(kind, value, begin)

    def _no_token(self, position: int) -> OptionError:
        character = self.text[position]
        shown = f"`{character}`" if character.isprintable() else f"the character U+{ord(character):04X}"
        if self.text.startswith("/*", position):
            shown = "a comment without an end"
        elif character == "'":
            shown = "a text without a closing quote"
        expected = "characters" if _is_lone(character) else "a property, a literal or an operator"
        advice = _ADVICE.get(character, _ANY_ADVICE)
        return fault(self.text, position, expected=expected, found=shown, advice=advice)


def _is_lone(character: str) -> bool:
    return "\ud800" <= character <= "\udfff"


def _first_lone(text: str) -> int | None:
    """Return where half a surrogate pair is, None without one: no property that was decoded from UTF-8 has one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None
