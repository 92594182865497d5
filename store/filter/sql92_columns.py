"""What an SQL92 filter says of many messages: each step of the tree at once over whole columns.

A condition is a state by row: false, true, null (unknown) or error, which is where RocketMQ throws. Tables say what
AND and OR make of two states, so that an error behind a false AND does not surface. A value has its kind in Java, which
is the same for all rows, the data, and where it is missing: null or error. Scalars stand for whole columns.
`sql92_rows` is the slow twin; it shares nothing with this but the tree and the grammars of numbers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.filter.sql92_number_columns import Flags
from rmq_spark.store.filter.sql92_numbers import INTEGER_BITS, LONG_BITS, read_boolean, read_double, read_integer
from rmq_spark.store.filter.sql92_text_column import TextColumn, text_column
from rmq_spark.store.filter.sql92_tree import (
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
)

FALSE, TRUE, NULL, ERROR = map(np.uint8, range(4))
_PRESENT = FALSE  # of a value: neither null nor error

# By left * 4 + right.
_AND = np.array([0, 0, 0, 0, 0, 1, 2, 3, 0, 2, 2, 3, 3, 3, 3, 3], np.uint8)
_OR = np.array([0, 1, 2, 3, 1, 1, 1, 1, 2, 1, 2, 3, 3, 3, 3, 3], np.uint8)
_NOT = np.array([1, 0, 2, 3], np.uint8)

# Below this many rows, or above this share of them, looking only at the open rows costs more than it saves.
_PICKED_ROWS_MIN = 1024
_PICKED_SHARE = 4

States: TypeAlias = Any  # by row an NDArray[np.uint8], or one np.uint8 for all rows


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
    data: Any  # a TextColumn or a text, or numpy's: an array by row or one for all
    missing: States = _PRESENT


@dataclass(frozen=True, slots=True)
class Rows:
    """The messages: their properties as columns, null where a message has none of the name; a name may be missing.

    Texts are what a broker has. int32, int64, double and bool columns are taken for Java's Integer, Long, Double and
    Boolean, as RocketMQ's own tests have them.
    """

    columns: Mapping[str, pa.Array]
    count: int
    _picked: NDArray[np.int64] | None = None
    _values: dict[str, _Value] = field(default_factory=dict)

    def pick(self, rows: NDArray[np.int64]) -> "Rows":
        """Return only these rows; a column is cut when it is asked for."""
        return Rows(self.columns, len(rows), rows if self._picked is None else self._picked[rows])

    def value(self, name: str) -> _Value:
        """Return the property's column."""
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
    """Return what the condition says of each message: FALSE, TRUE, NULL or ERROR."""
    return np.broadcast_to(_states(tree, rows), (rows.count,))


def _states(node: Node, rows: Rows) -> States:
    if isinstance(node, Constant):
        return NULL if node.value is None else TRUE if node.value else FALSE
    return _STATES[type(node)](node, rows)


def _truth(node: Truth, rows: Rows) -> States:
    value = rows.value(node.operand.name)
    return _or_missing(value.data * TRUE if value.kind is Kind.BOOLEAN else FALSE, value.missing)


def _not(node: Not, rows: Rows) -> States:
    return _NOT[_states(node.operand, rows)]


def _and(node: And, rows: Rows) -> States:
    return _join(node.parts, rows, _AND, FALSE)


def _or(node: Or, rows: Rows) -> States:
    return _join(node.parts, rows, _OR, TRUE)


def _join(parts: tuple[Node, ...], rows: Rows, table: NDArray[np.uint8], decided: np.uint8) -> States:
    """Go on with the rows that are not decided, in a smaller set of them once these are few."""
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


def _is_null(node: IsNull, rows: Rows) -> States:
    missing = _value(node.operand, rows).missing
    return np.where(missing == ERROR, ERROR, (missing == NULL) * TRUE)


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
    # The right side is not looked at where the left one is null.
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


_STATES: dict[type, Callable[[Any, Rows], States]] = {
    Truth: _truth,
    Not: _not,
    And: _and,
    Or: _or,
    Order: _order,
    Equal: _equal,
    IsNull: _is_null,
    In: _in,
    Has: _has,
}


def _or_missing(states: States, missing: States) -> States:
    return states if missing is _PRESENT else np.where(missing == _PRESENT, states, missing)


def _value(node: Node, rows: Rows) -> _Value:
    if isinstance(node, Property):
        return rows.value(node.name)
    if isinstance(node, Negation):
        return _negative(_value(node.operand, rows))
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


def _negative(value: _Value) -> _Value:
    if value.kind in _NUMBERS:
        return _Value(value.kind, -value.data, value.missing)  # the smallest whole number stays itself, as in Java
    return _Value(Kind.NOTHING, 0, np.where(value.missing == ERROR, ERROR, NULL))


# Comparing: neither side is null. What is computed for missing rows is thrown away by the caller.

_SIGNS: dict[str, Callable[[Any, Any], Any]] = {
    ">": np.greater,
    ">=": np.greater_equal,
    "<": np.less,
    "<=": np.less_equal,
    "=": np.equal,
}


def _compare(sign: str, left: _Value, right: _Value) -> States:
    kinds = (left.kind, right.kind)
    if kinds == (Kind.STRING, Kind.STRING) and sign == "=":
        return _same_text(left.data, right.data)
    if kinds == (Kind.BOOLEAN, Kind.STRING):
        return ERROR  # a Boolean is no String
    if kinds == (Kind.STRING, Kind.BOOLEAN):
        booleans = left.data.booleans() if isinstance(left.data, TextColumn) else read_boolean(left.data)
        return _SIGNS[sign](booleans, right.data) * TRUE
    if Kind.BOOLEAN in kinds and kinds != (Kind.BOOLEAN, Kind.BOOLEAN):
        return _SIGNS[sign](-1, 0) * TRUE  # RocketMQ: the left one is less
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
    """Return what a text is read as: the other side's number, and a Double beside another text."""
    if left is Kind.STRING:
        return Kind.DOUBLE if right is Kind.STRING else right
    return left


def _numbers(value: _Value, kind: Kind) -> tuple[Any, Flags | np.bool_ | None]:
    """Return the numbers, and which are none because the text is no number of the kind (None: all are)."""
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
    """Return whole numbers in the order of Double#compareTo: -0.0 below 0.0, NaN above all and like itself."""
    doubles = np.asarray(numbers, np.float64)
    if np.isnan(doubles).any():
        doubles = np.where(np.isnan(doubles), np.nan, doubles)  # one of all of them, whose sign is plus
    bits = doubles.view(np.int64)
    return bits ^ ((bits >> 63) & np.int64(2**63 - 1))
