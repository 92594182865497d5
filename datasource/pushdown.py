"""Which queues, offsets, times and keys the conditions of a batch query leave: what need not be read, planned.

    queueId, physicalTopic   choose queues, and topic does but in retry queues     \\
    queueOffset              cuts ranges of queue offsets                          / answered exactly: not asked again
    topic                    as above, and asked again
    storeTimestamp           cuts by the messages' store times, a little generously, and is asked again
    tags                     leaves out units by their tag's hash, then messages, in the tasks, and is asked again
    msgId, keys              are looked up in the key index, and asked again; so is every other condition

No store and no Spark here: numbers in, numbers out. A condition that is not understood is left to Spark whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from rmq_spark.datasource.limits import QueueRange
from rmq_spark.datasource.predicates import (
    ALL,
    Interval,
    Predicate,
    equals_one_of,
    holds,
    intersect,
    is_of,
    offsets_where,
    times_where,
)
from rmq_spark.store.units import QueueKey

MAX_LOOK_UPS = 1000  # values of one IN that are looked up, or tags: a longer list is left to Spark
_RETRY = "%RETRY%"
_EXACT = {"queueId": int, "physicalTopic": str, "queueOffset": int}
_KINDS = _EXACT | {"topic": str, "storeTimestamp": datetime, "keys": str, "msgId": str, "tags": str}


@dataclass(frozen=True, slots=True)
class Pushdown:
    """What a query needs of its queues. `used` are the predicates that say so; `exact` those that Spark need not ask.

    `keys` are words of which a message must have one, `message_ids` ids; None where nothing is said of them, and at
    most one of the two is given. `tags` are those of which a message must have one. Times are in ms.
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
        """Say whether a message of the queue may pass, by what all its messages have in common."""
        columns: dict[str, int | str] = {"queueId": queue.queue_id, "physicalTopic": queue.topic}
        if not queue.topic.startswith(_RETRY):  # there each message has the topic that it was first sent to
            columns["topic"] = queue.topic
        return all(holds(test, columns[test.column]) for test in self.queue_tests if test.column in columns)

    def cut(self, ranges: Sequence[QueueRange]) -> list[QueueRange]:
        """Return what of the ranges is in the queues and queue offsets that are wanted, in order, none empty."""
        return [
            QueueRange(part.queue, begin, end)
            for part in ranges
            if self.wants(part.queue)
            for begin, end in intersect([(part.begin, part.end)], self.offsets)
        ]


def plan_pushdown(predicates: Sequence[Predicate | None]) -> Pushdown:
    """Return what predicates that all must hold leave to be read; None stands for one that nobody understands."""
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
        return None, None  # of which zone nobody knows
    return times_where(predicate)


def _values(predicate: Predicate) -> tuple[str, ...] | None:
    """Return the texts of which a row must have one, None where that is not said or they cannot be looked up."""
    values = equals_one_of(predicate)
    if values is None or len(values) > MAX_LOOK_UPS:
        return None
    if predicate.column == "keys" and not all(value.strip(" ") for value in values):
        return None  # no word of which the index would know
    # What is no UTF-8 in a record shows so in a column; the index may have been made of something else.
    return None if any("\ufffd" in value for value in values) else tuple(dict.fromkeys(values))


def _words(values: Sequence[str]) -> tuple[str, ...]:
    """Return a word of each text: a column `keys` that equals it has them all. The longest is the rarest, mostly."""
    return tuple(dict.fromkeys(max(value.split(" "), key=len) for value in values))
