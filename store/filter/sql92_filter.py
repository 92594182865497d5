"""SQL92 filters, evaluated over columns of message properties as a RocketMQ broker does.

Each node of the syntax tree is evaluated once for all rows. The result of a condition has a state for each row: false,
true, null (unknown), or error if RocketMQ would throw an exception. AND and OR combine the states of their left and
right side by a table. For example, if the left side of an AND is false, an error on its right side has no effect, as in
Java. A value has a Java class, which is the same for all rows, and its data. Rows without data have the state null or
error. A scalar represents a column whose values are all equal.

The tests compare this evaluator with a second one that works row by row. Both use the same parser and number grammars,
and share nothing else.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.filter.sql92_lexer import (
    INTEGER_BITS,
    LONG_BITS,
    And,
    Constant,
    Equal,
    Has,
    In,
    IsNull,
    Long,
    Negation,
    Node,
    Not,
    Or,
    Order,
    Property,
    Truth,
    children,
    read_boolean,
    read_double,
    read_integer,
)
from rmq_spark.store.filter.sql92_parser import parse_sql92
from rmq_spark.store.filter.sql92_values import Flags, TextColumn, text_column

FALSE, TRUE, NULL, ERROR = map(np.uint8, range(4))
_PRESENT = FALSE  # the state of a value that is neither null nor error

# Indexed by left * 4 + right.
_AND = np.array([0, 0, 0, 0, 0, 1, 2, 3, 0, 2, 2, 3, 3, 3, 3, 3], np.uint8)
_OR = np.array([0, 1, 2, 3, 1, 1, 1, 1, 2, 1, 2, 3, 3, 3, 3, 3], np.uint8)
_NOT = np.array([1, 0, 2, 3], np.uint8)

# AND and OR evaluate only the undecided rows if there are at least 1024 rows, of which at most a quarter is undecided.
# Otherwise selecting the rows costs more than it saves.
_PICKED_ROWS_MIN = 1024
_PICKED_SHARE = 4
States: TypeAlias = Any  # an NDArray[np.uint8] by row, or one np.uint8 for all rows


class Kind(Enum):
    """The Java class of a value."""

    STRING = auto()
    BOOLEAN = auto()
    INTEGER = auto()
    LONG = auto()
    DOUBLE = auto()
    NOTHING = auto()  # null in every row, or an error


_NUMBERS = (Kind.INTEGER, Kind.LONG, Kind.DOUBLE)


@dataclass(frozen=True, slots=True)
class _Value:
    kind: Kind
    data: Any  # a TextColumn, a str, or numpy's: an array by row or one scalar for all rows
    missing: States = _PRESENT


@dataclass(frozen=True, slots=True)
class Rows:
    """The properties of `count` messages as columns.

    A column has null for a message that does not have the property. If no message has the property, the column may be
    missing. At a broker all properties are texts. Columns of int32, int64, double and bool represent Java's Integer,
    Long, Double and Boolean, which occur only in RocketMQ's own tests.
    """

    columns: Mapping[str, pa.Array]
    count: int
    _picked: NDArray[np.int64] | None = None
    _values: dict[str, _Value] = field(default_factory=dict)

    def pick(self, rows: NDArray[np.int64]) -> "Rows":
        """Return the rows with these numbers. Each column is reduced to them when it is first used."""
        return Rows(self.columns, len(rows), rows if self._picked is None else self._picked[rows])

    def value(self, name: str) -> _Value:
        """Return the column of the property `name`. It is converted once and then kept."""
        if name not in self._values:
            self._values[name] = self._read(name)
        return self._values[name]

    def _read(self, name: str) -> _Value:
        array = self.columns.get(name)
        if array is None or array.null_count == len(array):
            return _Value(Kind.NOTHING, 0, NULL)
        if self._picked is not None:
            array = array.take(pa.array(self._picked))
        kind = _KINDS.get(array.type)
        if kind is None:
            texts, is_null = text_column(array)
            return _Value(Kind.STRING, texts, _missing(is_null))
        is_null = array.is_null().to_numpy(zero_copy_only=False)
        return _Value(
            kind, array.fill_null(kind is not Kind.BOOLEAN and 0).to_numpy(zero_copy_only=False), _missing(is_null)
        )


_KINDS = {pa.bool_(): Kind.BOOLEAN, pa.int32(): Kind.INTEGER, pa.int64(): Kind.LONG, pa.float64(): Kind.DOUBLE}


def _missing(is_null: Flags | None) -> States:
    return _PRESENT if is_null is None else is_null * NULL


def evaluate_columns(tree: Node, rows: Rows) -> NDArray[np.uint8]:
    """Return the state of the condition `tree` for each message: FALSE, TRUE, NULL or ERROR."""
    return np.broadcast_to(_states(tree, rows), (rows.count,))


def _states(node: Node, rows: Rows) -> States:
    match node:
        case Constant():
            return NULL if node.value is None else TRUE if node.value else FALSE
        case Truth():
            value = rows.value(node.operand.name)
            return _or_missing(value.data * TRUE if value.kind is Kind.BOOLEAN else FALSE, value.missing)
        case Not():
            return _NOT[_states(node.operand, rows)]
        case And():
            return _join(node.parts, rows, _AND, FALSE)
        case Or():
            return _join(node.parts, rows, _OR, TRUE)
        case IsNull():
            missing = _value(node.operand, rows).missing
            return np.where(missing == ERROR, ERROR, (missing == NULL) * TRUE)
    return _COMPARISONS[type(node)](node, rows)


def _join(parts: tuple[Node, ...], rows: Rows, table: NDArray[np.uint8], decided: np.uint8) -> States:
    """Return the states of a chain of AND or OR, by combining the states of its parts with `table`.

    A row with the state `decided` needs no further part. Once only a few rows are undecided, the remaining parts are
    evaluated for those rows only.
    """
    states = _states(parts[0], rows)
    for number, part in enumerate(parts[1:], start=1):
        if np.ndim(states) and rows.count >= _PICKED_ROWS_MIN:
            is_open = (states != decided) & (states != ERROR)
            if np.count_nonzero(is_open) * _PICKED_SHARE <= rows.count:
                open_rows = np.flatnonzero(is_open)
                if len(open_rows):
                    few = _join(parts[number:], rows.pick(open_rows), table, decided)
                    states[open_rows] = table[states[open_rows] * 4 + few]
                return states
        states = table[states * np.uint8(4) + _states(part, rows)]
    return states


def _in(node: In, rows: Rows) -> States:
    value = rows.value(node.operand.name)
    if value.kind is not Kind.STRING:
        return NULL
    return _or_missing((value.data.is_in(node.texts) != node.negated) * TRUE, value.missing)


def _has(node: Has, rows: Rows) -> States:
    if not node.text:
        return FALSE
    value = _value(node.operand, rows)
    if value.kind is not Kind.STRING:
        return (value.missing == ERROR) * ERROR
    if isinstance(value.data, str):
        found: Any = np.bool_(_TEXT_HAS[node.how](value.data, node.text))
    else:
        found = value.data.has(node.how, node.text)
    return ((found != node.negated) & (value.missing == _PRESENT)) * TRUE


_TEXT_HAS: dict[str, Callable[[str, str], bool]] = {
    "CONTAINS": lambda text, part: part in text,
    "STARTSWITH": str.startswith,
    "ENDSWITH": str.endswith,
}


def _order(node: Order, rows: Rows) -> States:
    left, right = _value(node.left, rows), _value(node.right, rows)
    states: States = NULL
    if Kind.NOTHING not in (left.kind, right.kind):
        states = _compare(node.sign, left, right)
    # Java does not evaluate the right side if the left one is null, so its error does not surface.
    return _or_missing(_or_missing(states, right.missing), left.missing)


def _equal(node: Equal, rows: Rows) -> States:
    left, right = _value(node.left, rows), _value(node.right, rows)
    states: States = NULL
    if Kind.NOTHING not in (left.kind, right.kind):
        states = _compare("=", left, right)
    if left.missing is _PRESENT and right.missing is _PRESENT:
        return states
    by_nulls = np.where(left.missing == NULL, np.where(right.missing == NULL, TRUE, NULL), FALSE)
    states = np.where((left.missing == NULL) | (right.missing == NULL), by_nulls, states)
    return np.where((left.missing == ERROR) | (right.missing == ERROR), ERROR, states)


_COMPARISONS: dict[type, Callable[[Any, Rows], States]] = {In: _in, Has: _has, Order: _order, Equal: _equal}


def _or_missing(states: States, missing: States) -> States:
    return states if missing is _PRESENT else np.where(missing == _PRESENT, states, missing)


def _value(node: Node, rows: Rows) -> _Value:
    if isinstance(node, Property):
        return rows.value(node.name)
    if isinstance(node, Negation):
        value = _value(node.operand, rows)
        if value.kind in _NUMBERS:
            return _Value(value.kind, -value.data, value.missing)  # the least integer stays itself, as in Java
        return _Value(Kind.NOTHING, 0, np.where(value.missing == ERROR, ERROR, NULL))
    if isinstance(node, Constant) and node.value is not None:
        kind, scalar = _CONSTANTS[type(node.value)]
        return _Value(kind, scalar(node.value))
    states = _states(node, rows)
    return _Value(Kind.BOOLEAN, states == TRUE, np.where(states < NULL, _PRESENT, states))


_CONSTANTS: dict[type, tuple[Kind, Callable[[Any], Any]]] = {
    str: (Kind.STRING, str),
    bool: (Kind.BOOLEAN, np.bool_),
    int: (Kind.INTEGER, np.int64),
    Long: (Kind.LONG, np.int64),
    float: (Kind.DOUBLE, np.float64),
}


_SIGNS: dict[str, Callable[[Any, Any], Any]] = {
    ">": np.greater,
    ">=": np.greater_equal,
    "<": np.less,
    "<=": np.less_equal,
    "=": np.equal,
}


def _compare(sign: str, left: _Value, right: _Value) -> States:
    """Return the states of the comparison of two values, neither of which has the kind NOTHING.

    Where a row is missing on either side, the returned state is meaningless, and the caller replaces it.
    """
    kinds = (left.kind, right.kind)
    if kinds == (Kind.STRING, Kind.STRING) and sign == "=":
        return _same_text(left.data, right.data)
    if kinds == (Kind.BOOLEAN, Kind.STRING):
        return ERROR  # Java cannot cast a Boolean to a String
    if kinds == (Kind.STRING, Kind.BOOLEAN):
        booleans = left.data.booleans() if isinstance(left.data, TextColumn) else read_boolean(left.data)
        return _SIGNS[sign](booleans, right.data) * TRUE
    if Kind.BOOLEAN in kinds and kinds != (Kind.BOOLEAN, Kind.BOOLEAN):
        return _SIGNS[sign](-1, 0) * TRUE  # RocketMQ compares as if the left one were less
    kind = _common_kind(*kinds)
    numbers, is_wrong = _numbers(left, kind)
    others, is_other_wrong = _numbers(right, kind)
    if Kind.DOUBLE in (kind, *kinds):
        numbers, others = _ordered(numbers), _ordered(others)
    states: States = _SIGNS[sign](numbers, others) * TRUE
    for wrong in (is_wrong, is_other_wrong):
        if wrong is not None:
            states = np.where(wrong, ERROR, states)
    return states


def _same_text(left: TextColumn | str, right: TextColumn | str) -> States:
    if isinstance(left, str) and isinstance(right, str):
        return TRUE if left == right else FALSE
    if isinstance(left, str):
        left, right = right, left
    assert isinstance(left, TextColumn), left
    return (left.is_in([right]) if isinstance(right, str) else left.equals(right)) * TRUE


def _common_kind(left: Kind, right: Kind) -> Kind:
    """Return the class in which two sides are compared.

    If the left side is a text, this is the class of the right side, or Double if the right side is a text too.
    Otherwise it is the class of the left side.
    """
    if left is Kind.STRING:
        return Kind.DOUBLE if right is Kind.STRING else right
    return left


def _numbers(value: _Value, kind: Kind) -> tuple[Any, Flags | np.bool_ | None]:
    """Return the numbers of a value, and for each row whether its text is not a number of this kind.

    The second result is None if every text is a number.
    """
    if value.kind is not Kind.STRING:
        return value.data, None
    if isinstance(value.data, str):
        bits = LONG_BITS if kind is Kind.LONG else INTEGER_BITS
        number = read_double(value.data) if kind is Kind.DOUBLE else read_integer(value.data, bits)
        return 0 if number is None else number, np.bool_(True) if number is None else None
    if kind is Kind.DOUBLE:
        numbers, is_number = value.data.doubles()
    else:
        numbers, is_number = value.data.integers(LONG_BITS if kind is Kind.LONG else INTEGER_BITS)
    return numbers, None if is_number.all() else ~is_number


def _ordered(numbers: Any) -> NDArray[np.int64]:
    """Return an integer for each number, so that the integers sort as Double#compareTo sorts the numbers.

    In that order -0.0 is less than 0.0, and NaN is greater than every number and equal to itself.
    """
    doubles = np.asarray(numbers, np.float64)
    if np.isnan(doubles).any():
        doubles = np.where(np.isnan(doubles), np.nan, doubles)  # every NaN as the same positive one
    bits = doubles.view(np.int64)
    return bits ^ ((bits >> 63) & np.int64(2**63 - 1))


class Sql92Filter:
    """A compiled SQL92 expression. Immutable and thread-safe; can be pickled.

    `text` is the expression. `property_names` are the names of the properties in it, in the order of their first use.
    No other properties need to be decoded.
    """

    __slots__ = ("_tree", "property_names", "text")

    def __init__(self, text: str, tree: Node) -> None:
        self.text = text
        self._tree = tree
        names: dict[str, None] = {}
        nodes = [tree]
        while nodes:
            node = nodes.pop()
            if isinstance(node, Property):
                names[node.name] = None
            nodes.extend(reversed(children(node)))
        self.property_names = tuple(names)

    def __repr__(self) -> str:
        return f"Sql92Filter({self.text!r})"

    def matches(self, columns: Mapping[str, pa.Array], count: int) -> NDArray[np.bool_]:
        """Return, for each of `count` messages, whether it matches.

        `columns` maps the name of a property to its values: an array of type string, large_string or dictionary, with
        one value for each message, null where a message does not have the property. If no message has a property, its
        column may be missing. Columns of other properties are ignored. A message does not match if the condition is
        unknown (null) for it, or if RocketMQ would fail to evaluate it, for example because a text is not a number.
        """
        arrays = {}
        for name in self.property_names:
            array = columns.get(name)
            if array is not None:
                assert len(array) == count, (name, len(array), count)
                arrays[name] = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
        if count == 0:
            return np.zeros(0, np.bool_)
        is_match: NDArray[np.bool_] = evaluate_columns(self._tree, Rows(arrays, count)) == TRUE
        return is_match


def compile_sql92(text: str, *, strict_end: bool = True) -> Sql92Filter:
    """Compile an SQL92 expression such as `region IN ('eu', 'us') AND price BETWEEN 0 AND 3`.

    Raises OptionError for a syntax error; the error's message shows where it is. RocketMQ parses the longest valid
    beginning of a text and ignores the rest, so it reads `a LIKE 'x%'` as `a`, and `a > 01` as `a > 0`. Here such a
    text is a syntax error, unless `strict_end` is False. Otherwise follows SelectorParser#parse (5.3).
    """
    return Sql92Filter(text, parse_sql92(text, strict_end=strict_end))
