"""Tokens and syntax tree of SQL92 expressions, syntax errors, and Java's number grammars.

The lexer follows SelectorParser.jj (5.3). It produces a token only when the parser asks for one, because RocketMQ
ignores any text after the longest valid expression, even if that text has no valid tokens.

The nodes of the syntax tree are the dataclasses below. A condition (RocketMQ's BooleanExpression) is true, false,
unknown (null) or an error for each message. A chain of AND or OR is one node with all its parts, so that a long chain
does not make the tree deep. BETWEEN, <> and IS NOT NULL have no nodes: the parser expresses them with other nodes, as
RocketMQ does.

`read_integer`, `read_double` and `read_boolean` parse one text as Java's valueOf methods do (Java 8 to 21). Python's
int() and float() are not used for unchecked texts, because they accept texts that Java refuses: underscores, blanks
around integers, `inf`, and digits of other scripts in floats.
"""

import re
import unicodedata
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from rmq_spark.store.errors import OptionError

_LINE_ENDS = re.compile("\r\n|\r|\n")
_SHOWN_OF_LINE = 100  # characters of a long line, so that the caret stays below its position on most screens


def fault(text: str, position: int, *, expected: str, found: str, advice: str) -> OptionError:
    """Return the error for a syntax error in `text`, with an excerpt and a caret that marks the position.

    `position` is in characters from the beginning of the text.
    """
    before = _LINE_ENDS.split(text[:position])
    column = len(before[-1])
    line = before[-1] + _LINE_ENDS.split(text[position:])[0]
    place = f"character {position + 1}"
    if _LINE_ENDS.search(text):
        place = f"line {len(before)}, character {column + 1}"
    shown, caret = _excerpt(line, column)
    return OptionError(f"sql92, {place}: expected {expected}, found {found}.\n    {shown}\n    {caret}^\n{advice}")


def _excerpt(line: str, column: int) -> tuple[str, str]:
    """Return the part of the line that is shown around `column`, and the blanks before the caret."""
    first = max(0, min(column - _SHOWN_OF_LINE // 2, len(line) - _SHOWN_OF_LINE))
    last = first + _SHOWN_OF_LINE
    front = ("…" if first else "") + line[first:column]
    shown = front + line[column:last] + ("…" if last < len(line) else "")
    # A lone surrogate cannot be printed at all.
    return shown.encode("utf-8", "replace").decode(), "".join(map(_blank, front))


def _blank(character: str) -> str:
    """Return blanks that are as wide as `character` in a terminal."""
    if character == "\t":
        return "\t"
    if unicodedata.combining(character):
        return ""
    return "  " if unicodedata.east_asian_width(character) in "WF" else " "


class TokenKind(Enum):
    """The kind of a token."""

    KEYWORD = auto()  # its `value` is in upper case
    NAME = auto()  # the name of a property
    WHOLE = auto()  # digits, optionally with an L
    FLOAT = auto()
    TEXT = auto()  # its `value` includes the quotes
    SIGN = auto()  # an operator, a parenthesis or a comma
    END = auto()  # the end of the text


@dataclass(frozen=True, slots=True)
class Token:
    """A token. `value` is its text (a keyword in upper case), `position` its first character's number, from 0."""

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

# A comment that begins with -- must end with a line end. A backslash has no special meaning in a text.
# The repetitions are possessive, because one that can backtrack uses a hundred bytes of memory per character.
_SKIPPED = re.compile(r"(?:[ \t\n\r\f]++|--[^\n\r]*+(?:\r\n|\n|\r)|/\*.*?\*/)*+", re.DOTALL)
# If two alternatives match the same number of characters, the first one applies, as in RocketMQ. Each alternative finds
# its longest match.
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
    '"': "Write texts in single quotes: 'x', and property names without quotes.",
    "'": "Add the closing quote; a quote within a text is written twice: 'it''s'.",
    "!": "Write <> for not equal, NOT (...) for the opposite.",
    ".": "A property's name has only A-Z, a-z, 0-9, _ and $, so names with other characters cannot be filtered on.",
    "/": "Arithmetic is not supported, and a comment that begins with /* ends with */.",
    **dict.fromkeys("*%^|&~", "Arithmetic is not supported; join conditions by AND, OR and NOT."),
    ";": "Remove the semicolon.",
}
_ANY_ADVICE = (
    "Outside of quoted texts, use only ASCII names (A-Z, a-z, 0-9, _, $), numbers, = <> > >= < <= ( ) , + - and blanks."
)


class Lexer:
    """The tokens of one text, one after the other. Not thread-safe."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._position = 0

    def next(self) -> Token:
        """Return the next token. At the end of the text every call returns a token of the kind END.

        Raises OptionError for a character that cannot begin a token, and for a quoted text or comment that does not
        end.
        """
        skipped = _SKIPPED.match(self.text, self._position)
        assert skipped  # it also matches the empty text
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
            try:
                value.encode()
            except UnicodeEncodeError as error:  # half a surrogate pair, which no property decoded from UTF-8 contains
                raise self._no_token(begin + error.start) from None
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
        expected = "characters" if "\ud800" <= character <= "\udfff" else "a property, a literal or an operator"
        advice = _ADVICE.get(character, _ANY_ADVICE)
        return fault(self.text, position, expected=expected, found=shown, advice=advice)


INTEGER_BITS = 32
LONG_BITS = 64

# The characters that String#trim removes. It keeps a no-break space and an ideographic space.
JAVA_BLANKS = "".join(map(chr, range(0x21)))
_LAST_OF_BMP = "\uffff"  # Integer#valueOf reads UTF-16 units, so no character after this one is a digit
_DECIMAL = re.compile(r"([+-]?)(?:(NaN|Infinity)|((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[fFdD]?)")
_HEX = re.compile(r"([+-]?0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?")


def read_integer(text: str, bits: int) -> int | None:
    """Parse a text as Integer#valueOf (32 `bits`) or Long#valueOf (64) does. Return None if Java refuses the text.

    A sign and decimal digits of any script are valid. Blanks, decimal points and numbers out of range are not.
    """
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not digits or digits[0] in ("+", "-"):
        return None
    limit = 2 ** (bits - 1)
    value = 0
    for character in digits:
        digit = unicodedata.decimal(character, None) if character <= _LAST_OF_BMP else None
        if digit is None:
            return None
        value = value * 10 + digit
        if value > limit:
            return None
    if text[0] == "-":
        return -value
    return value if value < limit else None


def read_double(text: str) -> float | None:
    """Parse a text as Double#valueOf does. Return None if Java refuses the text.

    Blanks around the number, a type suffix (d, f), NaN, Infinity and hexadecimal numbers are valid. A number that is
    too large becomes an infinity. A number that is too close to zero becomes 0.0 or -0.0.
    """
    text = text.strip(JAVA_BLANKS)
    decimal = _DECIMAL.fullmatch(text)
    if decimal:
        sign, name, number = decimal.groups()
        value = float(name or number)
        return -value if sign == "-" else value
    hexadecimal = _HEX.fullmatch(text)
    if hexadecimal is None:
        return None
    try:
        return float.fromhex(hexadecimal[1])
    except OverflowError:
        return float("-inf" if text[0] == "-" else "inf")


def read_boolean(text: str) -> bool:
    """Parse a text as Boolean#valueOf does: "true" in upper or lower case is True, any other text is False."""
    return text.isascii() and text.lower() == "true"


class Long(int):
    """An integer that is a Long in Java. A plain int is an Integer."""


JavaValue: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Constant:
    """A literal. The literals TRUE, FALSE and NULL can also be used as conditions."""

    value: JavaValue


@dataclass(frozen=True, slots=True)
class Property:
    """The value of the property `name`: a text, or null if the message does not have the property."""

    name: str


@dataclass(frozen=True, slots=True)
class Negation:
    """The negative of a number. Null if the operand is not a number, for example a property, whose value is a text."""

    operand: "Node"


@dataclass(frozen=True, slots=True)
class Truth:
    """A property name used as a condition. It is never true: null if the message lacks the property, else false."""

    operand: Property


@dataclass(frozen=True, slots=True)
class Not:
    """The opposite of a condition. The opposite of unknown is unknown."""

    operand: "Node"


@dataclass(frozen=True, slots=True)
class And:
    """AND. False if a part is false. Parts are evaluated from left to right, up to the first false part."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Or:
    """OR. True if a part is true. Parts are evaluated from left to right, up to the first true part."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Order:
    """A comparison with `>`, `>=`, `<` or `<=`. Unknown if a side is null."""

    sign: str
    left: "Node"
    right: "Node"


@dataclass(frozen=True, slots=True)
class Equal:
    """A comparison with `=`. True if both sides are null, unknown if only the left is, false if only the right is."""

    left: "Node"
    right: "Node"


@dataclass(frozen=True, slots=True)
class IsNull:
    """IS NULL. The result is true or false, never unknown."""

    operand: "Node"


@dataclass(frozen=True, slots=True)
class In:
    """IN, or NOT IN if `negated`: whether the property equals one of the texts. Unknown if the property is null."""

    operand: Property
    texts: tuple[str, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class Has:
    """CONTAINS, STARTSWITH or ENDSWITH, as named by `how`; with NOT if `negated`.

    False if the operand is null or not a text, or if `text` is empty, even if `negated`.
    """

    how: str
    operand: "Node"
    text: str
    negated: bool


Condition: TypeAlias = Truth | Not | And | Or | Order | Equal | IsNull | In | Has
Node: TypeAlias = Constant | Property | Negation | Condition


def is_condition(node: Node) -> bool:
    """Return whether the node is a condition. A property is none; the parser wraps it in a Truth to make it one."""
    return isinstance(node, Condition) or (isinstance(node, Constant) and isinstance(node.value, bool | None))


def children(node: Node) -> tuple[Node, ...]:
    """Return the operands of a node, from left to right."""
    match node:
        case Constant() | Property():
            return ()
        case And(parts) | Or(parts):
            return parts
        case Order(_, left, right) | Equal(left, right):
            return (left, right)
        case _:
            return (node.operand,)


def height(node: Node) -> int:
    """Return the number of levels of the tree below and including `node`."""
    level, count = [node], 0
    while level:
        level, count = [below for above in level for below in children(above)], count + 1
    return count
