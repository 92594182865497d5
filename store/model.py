"""Message queues, their offset bounds, and the limits and sort orders that several layers share.

Two kinds of offset must never be mixed. A *queue offset* is the number of a message in its queue, starting at 0; as a
position, it is the number of the next message to consume. A *physical offset* is a position in the commit log, in
bytes. Ranges are half-open: `[begin, end)` includes `begin` and excludes `end`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

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


@dataclass(frozen=True, order=True, slots=True)
class QueueKey:
    """A message queue: the topic in whose files it is stored, and a queue id. Sorts by topic, then by queue id."""

    topic: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.queue_id}"


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """The queue offsets that can be read in one queue: `[min_offset, max_offset)`.

    `max_offset` is the offset that the next stored message will get. In an empty queue both are equal. Follows
    ConsumeQueue#getMinOffsetInQueue and #getMaxOffsetInQueue (5.3).
    """

    min_offset: int
    max_offset: int


@dataclass(frozen=True, slots=True)
class RecordProof:
    """A record's physical offset in the commit log (bytes) and its store time (ms since the epoch).

    The driver plans a read with it. The reading process compares it with the record that it finds, to detect that it
    reads another store.
    """

    physical_offset: int
    store_time_ms: int


@dataclass(frozen=True, slots=True)
class MessageQueue:
    """A message queue with the name of its broker, which is the same for all queues of a store.

    Source: MessageQueue (4.9, 5.3).
    """

    topic: str
    broker_name: str
    queue_id: int

    @classmethod
    def of(cls, queue: QueueKey, broker_name: str) -> "MessageQueue":
        """Return `queue` with the name of the broker that owns the store."""
        return cls(queue.topic, broker_name, queue.queue_id)

    @property
    def key(self) -> QueueKey:
        """Return the queue without the broker's name."""
        return QueueKey(self.topic, self.queue_id)

    def __str__(self) -> str:
        """Return MessageQueue#toString, the input of consistent hashing."""
        return f"MessageQueue [topic={self.topic}, brokerName={self.broker_name}, queueId={self.queue_id}]"


def java_order(text: str) -> bytes:
    """Return a sort key that sorts texts as Java's String#compareTo does, by UTF-16 units.

    Group members that are written in Java must get the same order. Python sorts by code points, which gives another
    order for characters beyond the basic plane (U+FFFF).
    """
    return text.encode("utf-16-be", "surrogatepass")


def sort_queues(queues: Iterable[MessageQueue]) -> list[MessageQueue]:
    """Return the queues sorted by topic, broker name and queue id (MessageQueue#compareTo)."""
    return sorted(queues, key=lambda queue: (java_order(queue.topic), java_order(queue.broker_name), queue.queue_id))


def sort_client_ids(client_ids: Iterable[str]) -> list[str]:
    """Return the client ids sorted, in the order in which they get queues (RebalanceImpl#rebalanceByTopic)."""
    return sorted(client_ids, key=java_order)


# How files are read. "auto" maps them, except on network and FUSE file systems.
READ_MODES = ("auto", "mmap", "pread")

# The maximum size of a decompressed body in bytes, so that a compression bomb raises an error. RocketMQ's default
# maximum message size is 4 MiB.
MAX_DECOMPRESSED_BYTES = 64 << 20
