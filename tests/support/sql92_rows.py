"""SQL92 filter on one message, step by step like RocketMQ's classes.

The slow twin of the column evaluator, which tests compare with it. It shares only the tree and the grammars of numbers.
Follows ComparisonExpression, LogicExpression and UnaryExpression#evaluate (5.3).
"""

from collections.abc import Callable, Mapping
from typing import Any

from rmq_spark.store.filter.sql92_filter import Sql92Filter
from rmq_spark.store.filter.sql92_lexer import (
    INTEGER_BITS,
    LONG_BITS,
    And,
    Constant,
    Equal,
    Has,
    In,
    IsNull,
    JavaValue,
    Long,
    Negation,
    Node,
    Not,
    Or,
    Order,
    Property,
    Truth,
    read_boolean,
    read_double,
    read_integer,
)


class EvaluationError(Exception):
    """RocketMQ throws while it evaluates, and the message does not match. Never leaves the filter."""


def evaluate_row(tree: Node, properties: Mapping[str, JavaValue]) -> JavaValue:
    """Evaluate the tree for one message: for a condition True, False or None, which means unknown.

    A broker's properties are texts; Integer (int), Long, Double (float) and Boolean (bool) are taken as RocketMQ's
    own tests give them. Raises EvaluationError where RocketMQ throws.
    """
    return _EVALUATED[type(tree)](tree, properties)


def matches_row(wanted: Sql92Filter, properties: Mapping[str, JavaValue]) -> bool:
    """Return whether one message matches the compiled filter: the slow twin of `Sql92Filter.matches`."""
    try:
        return evaluate_row(wanted._tree, properties) is True
    except EvaluationError:
        return False


_Properties = Mapping[str, JavaValue]


def _constant(node: Constant, _: _Properties) -> JavaValue:
    return node.value


def _property(node: Property, properties: _Properties) -> JavaValue:
    return properties.get(node.name)


def _negation(node: Negation, properties: _Properties) -> JavaValue:
    value = evaluate_row(node.operand, properties)
    if type(value) is int:
        return value if value == -(2**31) else -value  # the smallest number has no opposite
    if type(value) is Long:
        return value if value == -(2**63) else Long(-value)
    return -value if type(value) is float else None


def _truth(node: Truth, properties: _Properties) -> JavaValue:
    value = evaluate_row(node.operand, properties)
    return None if value is None else value is True


def _not(node: Not, properties: _Properties) -> JavaValue:
    value = evaluate_row(node.operand, properties)
    return None if value is None else not value


def _and(node: And, properties: _Properties) -> JavaValue:
    is_unknown = False
    for part in node.parts:
        value = evaluate_row(part, properties)
        if value is False:
            return False
        is_unknown |= value is None
    return None if is_unknown else True


def _or(node: Or, properties: _Properties) -> JavaValue:
    is_unknown = False
    for part in node.parts:
        value = evaluate_row(part, properties)
        if value is True:
            return True
        is_unknown |= value is None
    return None if is_unknown else False


def _order(node: Order, properties: _Properties) -> JavaValue:
    left = evaluate_row(node.left, properties)
    if left is None:
        return None
    right = evaluate_row(node.right, properties)
    if right is None:
        return None
    if isinstance(left, str) and isinstance(right, str):
        left, right = _number(left, float), _number(right, float)
    answer = _compare(left, right)
    return {">": answer > 0, ">=": answer >= 0, "<": answer < 0, "<=": answer <= 0}[node.sign]


def _equal(node: Equal, properties: _Properties) -> JavaValue:
    left = evaluate_row(node.left, properties)
    right = evaluate_row(node.right, properties)
    if left is None:
        return True if right is None else None
    return False if right is None else _compare(left, right) == 0


def _is_null(node: IsNull, properties: _Properties) -> JavaValue:
    return evaluate_row(node.operand, properties) is None


def _in(node: In, properties: _Properties) -> JavaValue:
    value = evaluate_row(node.operand, properties)
    return (value in node.texts) is not node.negated if isinstance(value, str) else None


def _has(node: Has, properties: _Properties) -> JavaValue:
    if not node.text:
        return False
    value = evaluate_row(node.operand, properties)
    if not isinstance(value, str):
        return False
    if node.how == "CONTAINS":
        return (node.text in value) is not node.negated
    found = value.startswith(node.text) if node.how == "STARTSWITH" else value.endswith(node.text)
    return found is not node.negated


_EVALUATED: dict[type, Callable[[Any, _Properties], JavaValue]] = {
    Constant: _constant,
    Property: _property,
    Negation: _negation,
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

_NUMBERS = (int, Long, float)  # from narrow to wide


def _compare(left: JavaValue, right: JavaValue) -> int:
    """Return compareTo after RocketMQ's conversions: below, at or above 0. Neither side is null."""
    left_type, right_type = type(left), type(right)
    if left_type is str and right_type is bool:
        left = read_boolean(str(left))
    elif left_type is bool and right_type is str:
        raise EvaluationError(f"a Boolean cannot be compared with the String {right!r}")
    elif left_type is str and right_type in _NUMBERS:
        left = _number(str(left), right_type)
    elif right_type is str and left_type in _NUMBERS:
        right = _number(str(right), left_type)
    elif left_type is not right_type and bool in (left_type, right_type):
        return -1
    if float in (type(left), type(right)):
        assert not isinstance(left, str | None), left
        assert not isinstance(right, str | None), right
        return _compare_doubles(float(left), float(right))
    return (left > right) - (left < right)  # type: ignore[operator]


def _compare_doubles(left: float, right: float) -> int:
    """Return Double#compareTo: NaN is above all and equal to itself, -0.0 is below 0.0."""
    if left != left or right != right:
        return (left != left) - (right != right)
    if left == right == 0.0:
        return (str(left) == "0.0") - (str(right) == "0.0")
    return (left > right) - (left < right)


def _number(text: str, kind: type) -> int | float:
    if kind is float:
        value: int | float | None = read_double(text)
    else:
        value = read_integer(text, LONG_BITS if kind is Long else INTEGER_BITS)
    if value is None:
        raise EvaluationError(f"{text!r} is not a number of the kind {kind.__name__}")
    return value
