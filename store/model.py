"""Message queues, ranges, batches and suspended queues, and the limits and sort orders that several layers share.

Two kinds of offset must never be mixed. A *queue offset* is the number of a message in its queue, starting at 0; as a
position, it is the number of the next message to consume. A *physical offset* is a position in the commit log, in
bytes. Ranges are half-open: `[begin, end)` includes `begin` and excludes `end`.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import NamedTuple, TypeAlias

LAST_SECONDS_MS = 978_307_200_000  # 2001-01-01: every RocketMQ message is newer; seconds of this century are smaller
LAST_MS = 253_402_300_799_999  # the end of 9999: microseconds and nanoseconds of this century are larger


def is_in_another_unit(time_ms: int) -> bool:
    """Return whether `time_ms`, meant as ms since the epoch, was probably given in another unit, such as seconds.

    0 is valid: it means the beginning.
    """
    return 0 < time_ms <= LAST_SECONDS_MS or time_ms > LAST_MS


def describe_unit(time_ms: int) -> str:
    """Return the rest of an error message that begins with a time for which `is_in_another_unit` is true."""
    if time_ms > LAST_MS:
        return (
            "is after the year 9999 in ms since 1970, and the unit is milliseconds; expected an earlier time. Divide "
            "microseconds by 1000, and nanoseconds by 1000000"
        )
    day = datetime.fromtimestamp(time_ms // 1000, UTC).date()
    return (
        f"is the day {day} in ms since 1970, and the unit is milliseconds; expected 0, or a time after 2001. Multiply "
        "seconds by 1000"
    )


@dataclass(frozen=True, order=True, slots=True, init=False)
class QueueKey:
    """A message queue: the topic in whose files it is stored, the name of its broker, and its queue id.

    In a store directory `broker` is "". Sorts by topic, then by broker, then by queue id. Source: MessageQueue (5.3).
    """

    topic: str
    broker: str
    queue_id: int

    def __init__(self, topic: str, queue_id: int, broker: str = "") -> None:
        # Not generated: a queue of a directory is written QueueKey(topic, queue_id).
        object.__setattr__(self, "topic", topic)
        object.__setattr__(self, "broker", broker)
        object.__setattr__(self, "queue_id", queue_id)

    @classmethod
    def of_text(cls, topic: str, text: str) -> "QueueKey":
        """Return the queue of a topic whose `id_text` is `text`. Raises ValueError if it has no queue id."""
        broker, _, queue_id = text.rpartition(":")
        return cls(topic, int(queue_id), broker)

    @property
    def id_text(self) -> str:
        """The queue in offsets and options, below its topic: "0", or "broker-a:0" in a place with broker names."""
        return f"{self.broker}:{self.queue_id}" if self.broker else str(self.queue_id)

    def __str__(self) -> str:
        return f"{self.topic}/{self.id_text}"


@dataclass(frozen=True, order=True, slots=True)
class QueueRange:
    """The messages of one queue at the queue offsets [begin, end)."""

    queue: QueueKey
    begin: int
    end: int

    @property
    def count(self) -> int:
        """The number of messages."""
        return self.end - self.begin


def subtract_ranges(ranges: Iterable[QueueRange], taken: Collection[QueueRange]) -> list[QueueRange]:
    """Return the non-empty parts of `ranges` that are not in any of `taken`."""
    rest = list(ranges)
    for cut in taken:
        rest = [
            part
            for one in rest
            for part in (
                (
                    QueueRange(one.queue, one.begin, min(one.end, cut.begin)),
                    QueueRange(one.queue, max(one.begin, cut.end), one.end),
                )
                if one.queue == cut.queue and one.begin < cut.end and cut.begin < one.end
                else (one,)
            )
            if part.begin < part.end
        ]
    return rest


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """The queue offsets that can be read in one queue: `[min_offset, max_offset)`.

    `max_offset` is the offset that the next stored message will get. In an empty queue both are equal. Follows
    ConsumeQueue#getMinOffsetInQueue and #getMaxOffsetInQueue (5.3).
    """

    min_offset: int
    max_offset: int


class Away(NamedTuple):
    """Nothing is known about a queue at this time, because its broker does not answer, or is not trusted yet.

    `since_ms` is the time from which the broker has been away (ms since the epoch), and `reason` is a text for logs.
    The queue may come back unchanged. So its position is kept, and it is not read meanwhile.
    """

    broker: str
    since_ms: int
    reason: str


class Gone(NamedTuple):
    """A queue was deleted, or replaced by another one under its name. `reason` is a text for errors."""

    reason: str


class Forbidden(NamedTuple):
    """The place refuses to answer for a queue. `right` is the right that the user lacks, `reason` what was refused.

    A reason that ends with a full stop is a whole error text, which says what was expected and what to do next.
    """

    right: str
    reason: str


# What a place answers about the bounds of a queue. A store directory always answers QueueBounds.
QueueAnswer: TypeAlias = QueueBounds | Away | Gone | Forbidden


@dataclass(frozen=True, slots=True)
class RecordProof:
    """A record's physical offset in the commit log (bytes) and its store time (ms since the epoch).

    The driver plans a read with it. The reading process compares it with the record that it finds, to detect that it
    reads another store.
    """

    physical_offset: int
    store_time_ms: int


def java_order(text: str) -> bytes:
    """Return a sort key that sorts texts as Java's String#compareTo does, by UTF-16 units.

    Group members that are written in Java must get the same order. Python sorts by code points, which gives another
    order for characters beyond the basic plane (U+FFFF).
    """
    return text.encode("utf-16-be", "surrogatepass")


def sort_queues(queues: Iterable[QueueKey]) -> list[QueueKey]:
    """Return the queues sorted by topic, broker name and queue id, as Java compares them (MessageQueue#compareTo)."""
    return sorted(queues, key=lambda queue: (java_order(queue.topic), java_order(queue.broker), queue.queue_id))


def sort_client_ids(client_ids: Iterable[str]) -> list[str]:
    """Return the client ids sorted, in the order in which they get queues (RebalanceImpl#rebalanceByTopic)."""
    return sorted(client_ids, key=java_order)


@dataclass(frozen=True, slots=True)
class CommitKey:
    """The identity of one batch of one query. Two commits with the same key are attempts at the same batch.

    For a batch write, `batch_id` is None and `query_id` is a uuid. For a transaction, `query_id` is "txn:" followed by
    the application's name, and `batch_id` is the transaction's version.
    """

    query_id: str
    batch_id: int | None = None

    def __post_init__(self) -> None:
        assert self.query_id, "a query has an id"
        assert self.batch_id is None or self.batch_id >= 0, self.batch_id

    def __str__(self) -> str:
        if self.batch_id is None:
            return f"write {self.query_id}"
        return f"batch {self.batch_id} of query {self.query_id}"


@dataclass(frozen=True, slots=True)
class Suspension:
    """The suspension of one queue.

    The queue resumes at the queue offset `resume`, but not before the time `until_ms` (ms since the epoch; 0 means at
    once). `attempts` maps the queue offset of each row that will be repeated to the number of its failures. `sent` and
    `dead` are queue offsets of rows after the first row of the batch that became dead letters: those in `sent` in an
    earlier batch, those in `dead` in this batch. `number` is the number of the change of the file. `query_id` and
    `batch_id` identify the batch that suspended the queue.
    """

    resume: int
    until_ms: int = 0
    attempts: Mapping[int, int] = field(default_factory=dict)
    sent: frozenset[int] = frozenset()
    dead: frozenset[int] = frozenset()
    number: int = 0
    query_id: str = ""
    batch_id: int = 0

    def is_of(self, key: CommitKey | None) -> bool:
        """Say whether the batch `key`, or an earlier batch of the same query, suspended the queue."""
        return (
            key is not None
            and key.batch_id is not None
            and (self.query_id == key.query_id and self.batch_id <= key.batch_id)
        )


@dataclass(frozen=True, slots=True)
class SuspendedQueues:
    """All suspended queues of a group, and the number of the last change of the file."""

    number: int = 0
    queues: Mapping[QueueKey, Suspension] = field(default_factory=dict)

    def followed_by(self, outcomes: Mapping[QueueKey, Suspension | None], key: CommitKey) -> "SuspendedQueues":
        """Return the suspended queues after the batch `key`.

        `outcomes` contains the new suspension of each queue, or None if the queue resumes. Other queues stay as they
        are. But if an earlier attempt of the same batch suspended a queue that is not in `outcomes`, that queue
        resumes.
        """
        number = self.number + 1
        assert key.batch_id is not None, key
        kept = {
            queue: one
            for queue, one in self.queues.items()
            if queue not in outcomes and (one.query_id, one.batch_id) != (key.query_id, key.batch_id)
        }
        stopped = {
            queue: replace(one, number=number, query_id=key.query_id, batch_id=key.batch_id)
            for queue, one in outcomes.items()
            if one is not None
        }
        return SuspendedQueues(number, {**kept, **stopped})

    def replaceable(
        self, outcomes: Mapping[QueueKey, Suspension | None], key: CommitKey, known: Mapping[QueueKey, int]
    ) -> dict[QueueKey, Suspension | None]:
        """Return the outcomes of the batch `key`, except for queues that another query has suspended in between.

        `known` contains for each queue the number of the last change that the task of the batch knew. A queue without
        an entry is treated like one with the number 0, which means that the task knew of no change.
        """
        return {
            queue: outcome
            for queue, outcome in outcomes.items()
            if (one := self.queues.get(queue)) is None
            or one.query_id == key.query_id
            or one.number <= known.get(queue, 0)
        }

    def without(self, queues: Collection[QueueKey]) -> "SuspendedQueues":
        """Return the suspended queues except `queues`. A reset removes the queues that it resets in this way."""
        kept = {queue: one for queue, one in self.queues.items() if queue not in queues}
        return self if len(kept) == len(self.queues) else SuspendedQueues(self.number + 1, kept)

    def is_changed_by(self, outcomes: Mapping[QueueKey, Suspension | None], key: CommitKey) -> bool:
        """Return whether the outcomes of the batch `key` change these suspended queues. Most change none."""
        if any(one is not None or queue in self.queues for queue, one in outcomes.items()):
            return True
        return any((one.query_id, one.batch_id) == (key.query_id, key.batch_id) for one in self.queues.values())

    def behind(self, positions: Mapping[QueueKey, int], number: int) -> dict[QueueKey, int]:
        """Return the offset where a queue resumes, for each queue that must move back.

        These are the queues that were suspended after the change with the number `number` and resume before their
        offset in `positions`.
        """
        return {
            queue: one.resume
            for queue, one in self.queues.items()
            if one.number > number and one.resume < positions.get(queue, 0)
        }


# How files are read. "auto" maps them, except on network and FUSE file systems.
READ_MODES = ("auto", "mmap", "pread")

# The maximum size of a decompressed body in bytes, so that a compression bomb raises an error. RocketMQ's default
# maximum message size is 4 MiB.
MAX_DECOMPRESSED_BYTES = 64 << 20
