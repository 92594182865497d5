"""The small values that every layer speaks in: which queue, which of its messages, where a record lies.

Two kinds of number meet everywhere in this project and must never be mixed: a *queue offset* counts
messages in one queue and always names the next one to consume, a *physical offset* counts bytes in the
commit log. Ranges are half-open, `[begin, end)`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class QueueKey:
    """One message queue: a physical topic and a queue id in it. Sorts by topic, then by id."""

    topic: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.queue_id}"


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """The queue offsets that can be read, `[min_offset, max_offset)`, in messages.

    `max_offset` is the offset that the next message will get; both are equal when nothing is there.
    Follows ConsumeQueue#getMinOffsetInQueue and #getMaxOffsetInQueue (5.3).
    """

    min_offset: int
    max_offset: int


@dataclass(frozen=True, slots=True)
class RecordProof:
    """Where one record lies in the commit log (bytes) and when it was stored (ms since the epoch).

    A plan carries it to the process that reads, which can tell by it whether it sees the same store.
    """

    physical_offset: int
    store_time_ms: int
