"""Conditions on columns as Spark hands them to a reader, and what they say of queues, queue offsets and times.

Pure arithmetic: a `Predicate` is one of Spark's filters by the name of its class. Null is never true: what compares
with it holds for no row, and neither does its opposite.
"""

import operator
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

Interval = tuple[int, int]  # half-open

NO_LIMIT = 1 << 63
ALL: list[Interval] = [(0, NO_LIMIT)]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ONE_US = timedelta(microseconds=1)


class Predicate(NamedTuple):
    """One condition on a column. `op` is the name of Spark's class for it; the value of In is a list."""

    column: str
    op: str
    value: Any = None
    is_negated: bool = False

    def __str__(self) -> str:
        text = f"{self.column} {_SHOWN.get(self.op, self.op)}"
        if self.op not in ("IsNull", "IsNotNull"):
            many = self.op == "In" and len(self.value) > 5
            text += f" {[*self.value[:5], '…'] if many else self.value!r}"
        return f"not {text}" if self.is_negated else text


_SHOWN = {
    "EqualTo": "=",
    "EqualNullSafe": "<=>",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "In": "in",
    "IsNull": "is null",
    "IsNotNull": "is not null",
}
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "EqualTo": operator.eq,
    "EqualNullSafe": operator.eq,
    "GreaterThan": operator.gt,
    "GreaterThanOrEqual": operator.ge,
    "LessThan": operator.lt,
    "LessThanOrEqual": operator.le,
}
_TEXT: dict[str, Callable[[str, str], bool]] = {
    "StringStartsWith": str.startswith,
    "StringEndsWith": str.endswith,
    "StringContains": operator.contains,
}


def is_of(kind: type, predicate: Predicate) -> bool:
    """Say whether a predicate compares with values of one type (or null) in a way that is known here."""
    if predicate.op in ("IsNull", "IsNotNull"):
        return True
    if predicate.op == "In":
        values: Sequence[Any] = predicate.value
    elif predicate.op in _ORDER or (kind is str and predicate.op in _TEXT):
        values = [predicate.value]
    else:
        return False
    return all(value is None or type(value) is kind for value in values)  # type: a bool is an int, too


def holds(predicate: Predicate, value: int | str) -> bool:
    """Say whether a row with this value, which is not null, passes. The predicate is of the value's type."""
    truth = _truth(predicate, value)
    return truth is not None and truth is not predicate.is_negated


def _truth(predicate: Predicate, value: int | str) -> bool | None:
    op, wanted = predicate.op, predicate.value
    if op in ("IsNull", "IsNotNull"):
        return op == "IsNotNull"
    if op == "In":
        return True if value in [one for one in wanted if one is not None] else (None if None in wanted else False)
    if wanted is None:
        return False if op == "EqualNullSafe" else None
    if op in _TEXT:
        return _TEXT[op](str(value), wanted)
    return _ORDER[op](value, wanted)


def offsets_where(predicate: Predicate) -> list[Interval]:
    """Return the numbers from 0 on for which a predicate of int holds, as ascending intervals."""
    op, value = predicate.op, predicate.value
    if op in ("IsNull", "IsNotNull"):
        found = ALL if op == "IsNotNull" else []
    elif op == "In":
        if None in value and predicate.is_negated:
            return []
        found = [(one, one + 1) for one in sorted({one for one in value if one is not None})]
    elif value is None:
        if op != "EqualNullSafe":
            return []
        found = []
    else:
        found = {
            "EqualTo": [(value, value + 1)],
            "EqualNullSafe": [(value, value + 1)],
            "GreaterThan": [(value + 1, NO_LIMIT)],
            "GreaterThanOrEqual": [(value, NO_LIMIT)],
            "LessThan": [(0, value)],
            "LessThanOrEqual": [(0, value + 1)],
        }[op]
    found = intersect(ALL, found)
    return complement(found) if predicate.is_negated else found


def times_where(predicate: Predicate) -> tuple[int | None, int | None]:
    """Return first and last ms that a row may have for which a predicate of time holds; None is no limit."""
    op, value = predicate.op, predicate.value
    if predicate.is_negated:
        return None, None
    if op == "In":
        times = [micros(one) for one in value if one is not None]
        return (-(-min(times) // 1000), max(times) // 1000) if times else (None, None)
    if op not in _ORDER or value is None:
        return None, None
    time_us = micros(value)
    if op in ("EqualTo", "EqualNullSafe"):
        return -(-time_us // 1000), time_us // 1000
    if op in ("GreaterThan", "GreaterThanOrEqual"):
        return (time_us // 1000 + 1 if op == "GreaterThan" else -(-time_us // 1000)), None
    return None, ((time_us - 1) // 1000 if op == "LessThan" else time_us // 1000)


def equals_one_of(predicate: Predicate) -> list[Any] | None:
    """Return the values of which a row must have one to pass, None where the predicate is of another kind."""
    if predicate.is_negated or predicate.op not in ("EqualTo", "EqualNullSafe", "In"):
        return None
    values = predicate.value if predicate.op == "In" else [predicate.value]
    if predicate.op == "EqualNullSafe" and None in values:
        return None  # rows without a value pass
    return [value for value in values if value is not None]


def micros(time: datetime) -> int:
    """Return a time with a zone in microseconds since the epoch, exactly."""
    return (time - _EPOCH) // _ONE_US


def intersect(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return what is in both, ascending, none empty; intervals that touch become one."""
    found: list[Interval] = []
    first = 0
    for begin, end in one:
        while first < len(other) and other[first][1] <= begin:
            first += 1
        at = first
        while at < len(other) and other[at][0] < end:
            part = max(begin, other[at][0]), min(end, other[at][1])
            if found and found[-1][1] == part[0]:
                part = found.pop()[0], part[1]
            if part[0] < part[1]:
                found.append(part)
            at += 1
    return found


def complement(intervals: Sequence[Interval]) -> list[Interval]:
    """Return the numbers from 0 on that are in none of the ascending intervals."""
    edges = [0, *(edge for interval in intervals for edge in interval), NO_LIMIT]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]
