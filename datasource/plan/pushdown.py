"""Pushdown of a batch query's conditions to queues, queue offsets, times, tags and keys. Pure arithmetic.

A condition on one of these columns reduces what is read. Spark checks the rows again where the effect is approximate:

| column | effect | Spark checks the rows again |
| --- | --- | --- |
| queueId, physicalTopic | selects queues | no |
| queueOffset | clips ranges of queue offsets | no |
| topic | selects queues; does not apply to the queues of retry topics | yes |
| storeTimestamp | clips ranges by store time, with a margin | yes |
| tags | in tasks, skips consume-queue entries by tag hash, then messages by tag | yes |
| msgId, keys | looks messages up in the key index | yes |

Conditions on other columns have no effect here; Spark applies them to the rows. As in SQL, a comparison with null is
true for no row, and the negation of such a comparison is true for no row either.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from rmq_spark.store.model import QueueKey, QueueRange

Interval = tuple[int, int]  # half-open
NO_LIMIT = 1 << 63
ALL: list[Interval] = [(0, NO_LIMIT)]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ONE_US = timedelta(microseconds=1)


class Predicate(NamedTuple):
    """One of Spark's filters: a condition on one column.

    `op` is the name of the filter's class in Spark, such as "GreaterThan". `value` is the value that the column is
    compared with; for "In" it is a list.
    """

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
    """Return whether the predicate has an operator known here, and only values of the type `kind` or null."""
    if predicate.op in ("IsNull", "IsNotNull"):
        return True
    if predicate.op == "In":
        values: Sequence[Any] = predicate.value
    elif predicate.op in _ORDER or (kind is str and predicate.op in _TEXT):
        values = [predicate.value]
    else:
        return False
    return all(value is None or type(value) is kind for value in values)  # isinstance accepts bool as int


def holds(predicate: Predicate, value: int | str) -> bool:
    """Return whether a row whose column has this value passes the predicate.

    The value must not be null, and the predicate's values must be of the same type (`is_of`).
    """
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
    """Return the queue offsets (numbers ≥ 0) for which a predicate holds, as intervals in ascending order."""
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
    """Return the first and the last time (ms since the epoch) for which a predicate may hold; None for no limit."""
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
    """Return the values of an equality or an In: a row that passes the predicate has one of them.

    Returns None for every other predicate.
    """
    if predicate.is_negated or predicate.op not in ("EqualTo", "EqualNullSafe", "In"):
        return None
    values = predicate.value if predicate.op == "In" else [predicate.value]
    if predicate.op == "EqualNullSafe" and None in values:
        return None  # rows with null pass
    return [value for value in values if value is not None]


def micros(time: datetime) -> int:
    """Return a datetime with a time zone in microseconds since the epoch, without rounding."""
    return (time - _EPOCH) // _ONE_US


def intersect(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the numbers that are in both lists of ascending intervals, as ascending intervals, none empty.

    Adjacent intervals are joined.
    """
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
    """Return the numbers ≥ 0 that are in none of the ascending intervals, as ascending intervals."""
    edges = [0, *(edge for interval in intervals for edge in interval), NO_LIMIT]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]


MAX_LOOK_UPS = 1000  # the maximum number of values in an IN that are looked up; a longer list is left to Spark
_RETRY = "%RETRY%"
_EXACT = {"queueId": int, "physicalTopic": str, "queueOffset": int}
_KINDS = _EXACT | {"topic": str, "storeTimestamp": datetime, "keys": str, "msgId": str, "tags": str}


@dataclass(frozen=True, slots=True)
class Pushdown:
    """The effect of a query's predicates: which parts of the queues, and which messages in them, may match.

    `used` are the predicates that have an effect. `exact` are the numbers (positions in the query's list) of the
    predicates that Spark need not check again. `queue_tests` are conditions on a queue's id and topic. `offsets` are
    the intervals of queue offsets that may match. `first_ms` and `last_ms` limit the store time (ms since the epoch). A
    matching message has one of `keys`, one of `message_ids` and one of `tags`; None means no condition. At most one of
    `keys` and `message_ids` is given.
    """

    used: tuple[Predicate, ...] = ()
    exact: frozenset[int] = frozenset()
    queue_tests: tuple[Predicate, ...] = ()
    offsets: tuple[Interval, ...] = tuple(ALL)
    first_ms: int | None = None
    last_ms: int | None = None
    keys: tuple[str, ...] | None = None
    message_ids: tuple[str, ...] | None = None
    tags: tuple[str, ...] | None = None

    def wants(self, queue: QueueKey) -> bool:
        """Return whether messages of the queue may pass, judging by its queue id and topic."""
        columns: dict[str, int | str] = {"queueId": queue.queue_id, "physicalTopic": queue.topic}
        if not queue.topic.startswith(_RETRY):  # messages in a retry topic have the topic to which they were first sent
            columns["topic"] = queue.topic
        return all(holds(test, columns[test.column]) for test in self.queue_tests if test.column in columns)

    def cut(self, ranges: Sequence[QueueRange]) -> list[QueueRange]:
        """Return the parts of the ranges whose queues and queue offsets may match, in the same order, none empty."""
        return [
            QueueRange(part.queue, begin, end)
            for part in ranges
            if self.wants(part.queue)
            for begin, end in intersect([(part.begin, part.end)], self.offsets)
        ]


def plan_pushdown(predicates: Sequence[Predicate | None]) -> Pushdown:
    """Return the effect of predicates that must all hold. A predicate of an unknown kind is None, and has no effect."""
    used: list[Predicate] = []
    exact: set[int] = set()
    queue_tests: list[Predicate] = []
    offsets: list[Interval] = ALL
    first_ms: list[int] = []
    last_ms: list[int] = []
    found: dict[str, tuple[str, ...]] = {}
    for number, one in enumerate(predicates):
        if one is None or not is_of(_KINDS.get(one.column, type(None)), one):
            continue
        if one.column in _EXACT:
            exact.add(number)
        if one.column in ("queueId", "physicalTopic", "topic"):
            queue_tests.append(one)
        elif one.column == "queueOffset":
            offsets = intersect(offsets, offsets_where(one))
        elif one.column == "storeTimestamp":
            first, last = _times(one)
            first_ms += [] if first is None else [first]
            last_ms += [] if last is None else [last]
            if first is None and last is None:
                continue
        else:
            values = _values(one)
            if values is None or (one.column in found and len(found[one.column]) <= len(values)):
                continue
            found[one.column] = values
        if one.op != "IsNotNull":
            used.append(one)
    message_ids = found.get("msgId")
    return Pushdown(
        tuple(used),
        frozenset(exact),
        tuple(queue_tests),
        tuple(offsets),
        max(first_ms, default=None),
        min(last_ms, default=None),
        _words(found["keys"]) if "keys" in found and message_ids is None else None,
        message_ids,
        found.get("tags"),
    )


def _times(predicate: Predicate) -> tuple[int | None, int | None]:
    values = predicate.value if predicate.op == "In" else [predicate.value]
    if any(isinstance(value, datetime) and value.tzinfo is None for value in values):
        return None, None  # the zone is unknown
    return times_where(predicate)


def _values(predicate: Predicate) -> tuple[str, ...] | None:
    """Return the texts to look up, of which a matching row has one. Return None if no look-up is possible."""
    values = equals_one_of(predicate)
    if values is None or len(values) > MAX_LOOK_UPS:
        return None
    if predicate.column == "keys" and not all(value.strip(" ") for value in values):
        return None  # the index has no empty words
    # A column shows invalid UTF-8 as this character, but the index has the hash of the original bytes.
    return None if any("\ufffd" in value for value in values) else tuple(dict.fromkeys(values))


def _words(values: Sequence[str]) -> tuple[str, ...]:
    """Return one word of each text, the longest one, which is usually the rarest.

    A message whose `keys` equal a text has all words of the text, so one word is enough to find it.
    """
    return tuple(dict.fromkeys(max(value.split(" "), key=len) for value in values))
