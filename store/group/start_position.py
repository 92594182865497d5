"""Where a group begins in a queue: at its own offset if it has one, else where RocketMQ would begin.

Pure: every function is given what it needs to know. Two steps, as a broker and its client take them: the broker says 0
for a group without an offset where the queue is young, and only if it does not the client's wish counts. So a new group
reads a young topic from its first message even if it asked for the newest ones. 4.9 and 5.3 do this; RocketMQ's users
rely on it, because messages that were sent just before a group's first start are not lost to it.

Source: ConsumerManageProcessor#queryConsumerOffset, RebalancePushImpl#computePullFromWhere (4.9, 5.3).
"""

from collections.abc import Callable
from enum import StrEnum

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.filenames import RETRY_TOPIC_PREFIX
from rmq_spark.store.units import QueueBounds

# MessageStoreConfig#accessMessageInMemoryMaxRatio: how much of the memory the newest messages are thought to fill.
MEMORY_PERCENT = 40


class ConsumeFrom(StrEnum):
    """Where a group without an offset wants to begin (ConsumeFromWhere)."""

    LATEST = "latest"
    EARLIEST = "earliest"
    TIMESTAMP = "timestamp"


# What RocketMQ's users write, the values included that are deprecated since 4.0 and mean the same as the first.
_ROCKETMQ_NAMES = {
    "consume_from_last_offset": ConsumeFrom.LATEST,
    "consume_from_last_offset_and_from_min_when_boot_first": ConsumeFrom.LATEST,
    "consume_from_min_offset": ConsumeFrom.LATEST,
    "consume_from_max_offset": ConsumeFrom.LATEST,
    "consume_from_first_offset": ConsumeFrom.EARLIEST,
    "consume_from_timestamp": ConsumeFrom.TIMESTAMP,
}


def parse_consume_from(text: str) -> ConsumeFrom:
    """Return where to begin, from our word for it or RocketMQ's. Raises OptionError that lists both."""
    word = text.strip().lower()
    if word in _ROCKETMQ_NAMES:
        return _ROCKETMQ_NAMES[word]
    try:
        return ConsumeFrom(word)
    except ValueError:
        accepted = ", ".join([*ConsumeFrom, *(name.upper() for name in _ROCKETMQ_NAMES)])
        raise OptionError(f"found {text!r} as the place where a group begins; accepted are {accepted}") from None


def is_young(
    min_offset: int,
    first_position: int | None,
    log_end: int,
    memory_bytes: int,
    *,
    memory_percent: int = MEMORY_PERCENT,
) -> bool:
    """Say whether a queue still has its first message, and that one is so new that it should be in memory.

    `min_offset` is the queue's, `first_position` the physical offset of its message 0 (None when there is none),
    `log_end` where the log ends, both in bytes; `memory_bytes` is the machine's. A broker judges by the distance alone
    (DefaultMessageStore#checkInDiskByConsumeOffset), it does not look into its memory.
    """
    if min_offset > 0:
        return False
    return first_position is None or log_end - first_position <= int(memory_bytes * (memory_percent / 100))


def start_offset(
    topic: str,
    bounds: QueueBounds,
    stored: int | None,
    *,
    is_young: bool,
    consume_from: ConsumeFrom,
    offset_by_time: Callable[[], int],
) -> int:
    """Return the queue offset where a group begins; it may lie outside the bounds (`correct_offset`).

    `stored` is the group's offset, None (or, in a broker's file, negative) when it has none. `is_young` is what the
    function of that name says, `offset_by_time` finds the first message from the wanted time on and is called only if
    the time decides. Retry topics are read whole, so that no failed message is forgotten; only a wish for a time, which
    makes no sense there, begins at their end.

    An offset that cannot be read is no offset that is missing: then the caller fails, and does not come here.
    """
    if stored is not None and stored >= 0:
        return stored
    if is_young:
        return 0
    is_retry = topic.startswith(RETRY_TOPIC_PREFIX)
    match consume_from:
        case ConsumeFrom.LATEST:
            return 0 if is_retry else bounds.max_offset
        case ConsumeFrom.EARLIEST:
            return 0
        case ConsumeFrom.TIMESTAMP:
            return bounds.max_offset if is_retry else offset_by_time()


def correct_offset(offset: int, bounds: QueueBounds) -> int:
    """Return where reading from `offset` really begins: a broker moves what lies outside to the nearer bound.

    As the answers OFFSET_TOO_SMALL and OFFSET_OVERFLOW_BADLY do since 4.9.4. What a group had and is gone below the
    queue's begin is lost, which the caller reports.
    """
    return max(bounds.min_offset, min(offset, bounds.max_offset))
