"""The start offset of a group in each queue: its committed offset, or else the offset that RocketMQ would choose.

If a group has no committed offset in a queue, RocketMQ chooses the start in two steps. First the broker checks whether
the queue is young: it still has its first message, and that message is so new that it should be in memory. Then the
group starts at offset 0. Only if the queue is not young, the client's choice (ConsumeFromWhere) is used. So a new group
reads a young topic from its first message, even if it asked for the newest messages. RocketMQ 4.9 and 5.3 do this, and
users rely on it, because messages that were sent just before the first start of a group are not lost.

All functions are pure except `resolve_start_offsets`, which reads what it needs from a store.

Source: ConsumerManageProcessor#queryConsumerOffset, RebalancePushImpl#computePullFromWhere (4.9, 5.3).
"""

from collections.abc import Callable, Mapping
from enum import StrEnum

from rmq_spark.store.disk.host import memory_bytes
from rmq_spark.store.errors import OffsetRangeError, OptionError, StoreChangedError
from rmq_spark.store.group.pull_limits import UNKNOWN_MEMORY_BYTES
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.names import RETRY_TOPIC_PREFIX

# MessageStoreConfig#accessMessageInMemoryMaxRatio: the share of the memory that the newest messages are assumed to use.
MEMORY_PERCENT = 40


class ConsumeFrom(StrEnum):
    """Where a group without a committed offset wants to start (ConsumeFromWhere)."""

    LATEST = "latest"
    EARLIEST = "earliest"
    TIMESTAMP = "timestamp"


# RocketMQ's names. The second, third and fourth name are deprecated since 4.0 and mean the same as the first.
_ROCKETMQ_NAMES = {
    "consume_from_last_offset": ConsumeFrom.LATEST,
    "consume_from_last_offset_and_from_min_when_boot_first": ConsumeFrom.LATEST,
    "consume_from_min_offset": ConsumeFrom.LATEST,
    "consume_from_max_offset": ConsumeFrom.LATEST,
    "consume_from_first_offset": ConsumeFrom.EARLIEST,
    "consume_from_timestamp": ConsumeFrom.TIMESTAMP,
}


def parse_consume_from(text: str) -> ConsumeFrom:
    """Return the start position with the name `text`, which is one of our names or of RocketMQ's names.

    Raises OptionError if the name is unknown. The error lists all names.
    """
    word = text.strip().lower()
    if word in _ROCKETMQ_NAMES:
        return _ROCKETMQ_NAMES[word]
    try:
        return ConsumeFrom(word)
    except ValueError:
        accepted = ", ".join([*ConsumeFrom, *(name.upper() for name in _ROCKETMQ_NAMES)])
        raise OptionError(f"start position of the group: found {text!r}; expected one of {accepted}") from None


def is_young(
    min_offset: int,
    first_position: int | None,
    log_end: int,
    memory_bytes: int,
    *,
    memory_percent: int = MEMORY_PERCENT,
) -> bool:
    """Say whether a queue is young: it still has its first message, and that is new enough to be in memory.

    `min_offset` is the smallest offset of the queue. `first_position` is the physical offset of the message with the
    queue offset 0, or None if there is no such message. `log_end` is the physical offset of the end of the log.
    `memory_bytes` is the size of the machine's memory, of which the newest messages may use `memory_percent`. As in a
    broker, only the distance in the log decides (bytes), not what is actually in memory
    (DefaultMessageStore#checkInDiskByConsumeOffset).
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
    """Return the queue offset where a group starts to read a queue. It may be outside the queue's bounds.

    Use `correct_offset` to limit the result to the bounds. `stored` is the committed offset. It is None, or negative as
    in a broker's file, if the group has none. `is_young` is the result of the function `is_young` for the queue.
    `offset_by_time` returns the offset of the first message at or after the wanted time. It is called only if
    `consume_from` is TIMESTAMP.

    In a retry topic, a group starts at the first message, so that no failed message is lost. But with TIMESTAMP it
    starts at the end, because a time has no meaning in a retry topic.

    If the committed offset cannot be read, do not pass None, because the group may have an offset. Fail instead.
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
    """Return the offset within the bounds that is nearest to `offset`. There a broker lets a consumer continue.

    (A broker corrects an offset outside the bounds by the answers OFFSET_TOO_SMALL or, since 4.9.4,
    OFFSET_OVERFLOW_BADLY.) If a committed offset is below the minimum, the messages in between are lost, and the caller
    must report that.
    """
    return max(bounds.min_offset, min(offset, bounds.max_offset))


def resolve_start_offsets(
    reader: StoreReader,
    bounds: Mapping[QueueKey, QueueBounds],
    committed: Mapping[QueueKey, int],
    fallback: str,
    time_of: Callable[[QueueKey], int | None],
) -> dict[QueueKey, int]:
    """Return the start offset of a group in each queue of `bounds`.

    `committed` are all committed offsets of the group. In a queue with a committed offset, the group starts at that
    offset, even if it is outside the bounds. All other start offsets are within the bounds. If the group has committed
    offsets only in other queues of the topic, the queue was created later, so the group starts at its first message. In
    topics without any committed offset, the group starts for the first time, as RocketMQ would start it. The caller
    must then commit the start offsets of all queues of such a topic, so that later calls return the same offsets, and
    new queues of the topic are recognized as new.

    `fallback` is the name of a start position (`parse_consume_from`). If it is timestamp, `time_of` returns the time
    for a queue in ms since the epoch, or None to start at the end of the queue. Raises OptionError if `fallback` is
    unknown, and DamageError if a file is damaged.
    """
    consume_from, memory = parse_consume_from(fallback), memory_bytes() or UNKNOWN_MEMORY_BYTES
    topics = {queue.topic for queue in committed}
    found = {}
    for queue, queue_bounds in bounds.items():
        if queue.topic in topics:
            found[queue] = committed.get(queue, queue_bounds.min_offset)
            continue

        def by_time(queue: QueueKey = queue, queue_bounds: QueueBounds = queue_bounds) -> int:
            time_ms = time_of(queue)
            return queue_bounds.max_offset if time_ms is None else reader.offset_at_time(queue, time_ms)

        first_position = _first_position(reader, queue, queue_bounds)
        young = is_young(queue_bounds.min_offset, first_position, reader.log_end, memory)
        begin = start_offset(
            queue.topic, queue_bounds, None, is_young=young, consume_from=consume_from, offset_by_time=by_time
        )
        found[queue] = correct_offset(begin, queue_bounds)
    return found


def _first_position(reader: StoreReader, queue: QueueKey, bounds: QueueBounds) -> int | None:
    """Return the physical offset of the message with the queue offset 0, or None if there is no such message."""
    if bounds.min_offset > 0 or bounds.max_offset == 0:
        return None
    try:
        return reader.proof(queue, 0).physical_offset
    except (OffsetRangeError, StoreChangedError):
        return None  # retention has deleted the message during the call
