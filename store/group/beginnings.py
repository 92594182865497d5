"""Where a group begins in queues of a store, with the facts that `start_position` wants, taken from the store."""

from collections.abc import Callable, Mapping

from rmq_spark.store.disk.host import memory_bytes
from rmq_spark.store.errors import OffsetRangeError, StoreChangedError
from rmq_spark.store.group.pull_limits import UNKNOWN_MEMORY_BYTES
from rmq_spark.store.group.start_position import correct_offset, is_young, parse_consume_from, start_offset
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.units import QueueBounds, QueueKey


def find_beginnings(
    reader: StoreReader,
    bounds: Mapping[QueueKey, QueueBounds],
    held: Mapping[QueueKey, int],
    fallback: str,
    time_of: Callable[[QueueKey], int | None],
) -> dict[QueueKey, int]:
    """Return for each queue of `bounds` where the group begins: where it stands by `held`, which are all its offsets.

    An offset of the group is returned as it stands, whether the queue still has it or not; others lie in the bounds.
    A queue without one, of a topic in which the group has some, came after the group began: it is read from its first
    message. In other topics the group begins now, as RocketMQ does; where this is published for all queues of the
    topic, it is settled for who asks later, and for queues that come.

    `fallback` is latest, earliest or timestamp, and `time_of` gives the time for the last one (ms since the epoch).
    Raises DamageError. Source: see `start_position`.
    """
    consume_from, memory = parse_consume_from(fallback), memory_bytes() or UNKNOWN_MEMORY_BYTES
    topics = {queue.topic for queue in held}
    found = {}
    for queue, there in bounds.items():
        if queue.topic in topics:
            found[queue] = held.get(queue, there.min_offset)
            continue

        def by_time(queue: QueueKey = queue, there: QueueBounds = there) -> int:
            time_ms = time_of(queue)
            return there.max_offset if time_ms is None else reader.offset_at_time(queue, time_ms)

        young = is_young(there.min_offset, _first_position(reader, queue, there), reader.log_end, memory)
        begin = start_offset(
            queue.topic, there, None, is_young=young, consume_from=consume_from, offset_by_time=by_time
        )
        found[queue] = correct_offset(begin, there)
    return found


def _first_position(reader: StoreReader, queue: QueueKey, there: QueueBounds) -> int | None:
    """Return the physical offset of the queue's message 0, None if there is none."""
    if there.min_offset > 0 or there.max_offset == 0:
        return None
    try:
        return reader.proof(queue, 0).physical_offset
    except (OffsetRangeError, StoreChangedError):
        return None  # retention was quicker
