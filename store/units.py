"""The small values that every layer speaks in: which queue, which of its messages, where a record lies.

Two kinds of number meet everywhere in this project and must never be mixed: a *queue offset* counts
messages in one queue and always names the next one to consume, a *physical offset* counts bytes in the
commit log. Ranges are half-open, `[begin, end)`.
"""

from dataclasses import dataclass
from datetime import UTC, datetime

LAST_SECONDS_MS = 978_307_200_000  # 2001-01-01: no RocketMQ message is older, and seconds of this century are less
LAST_MS = 253_402_300_799_999  # the end of 9999: microseconds and nanoseconds of this century are more


def is_in_another_unit(time_ms: int) -> bool:
    """Say whether a number given as ms since the epoch cannot be meant so. 0 is the beginning."""
    return 0 < time_ms <= LAST_SECONDS_MS or time_ms > LAST_MS


def describe_unit(time_ms: int) -> str:
    """Return what is wrong with a time that `is_in_another_unit`, as the rest of a sentence that begins with it."""
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
