"""From times to queue offsets: startingTimestamp, endingTimestamp and what to do where nothing fits.

A time is that of storing (storeTimestamp), which never runs back within a queue; the rule is "lower": the first
message at or after the time (ConsumeQueue#getOffsetInQueueByTime, 5.x).
"""

from collections.abc import Mapping
from datetime import UTC, datetime

from rmq_spark.datasource.planning import Bounds
from rmq_spark.datasource.values import Times
from rmq_spark.store import StoreReader
from rmq_spark.store.errors import OptionError
from rmq_spark.store.units import QueueBounds, QueueKey


def find_starts(store: StoreReader, bounds: Bounds, times: Times | None, strategy: str) -> dict[QueueKey, int]:
    """Return where each queue with a startingTimestamp begins; queues without one are left out.

    Where nothing was stored since then, `strategy` decides: error, latest, earliest. An empty queue begins at its
    one possible offset. Raises OptionError.
    """
    starts = {}
    for queue, there in bounds.items():
        time_ms = times.of(queue) if times else None
        if time_ms is None:
            continue
        offset = find_offset(store, queue, there, time_ms)
        if offset == there.max_offset and there.min_offset < there.max_offset:
            if strategy == "error":
                raise OptionError(
                    f"startingTimestamp: nothing was stored in queue {queue} at or after {show_time(time_ms)}. Give an "
                    "earlier time, or set startingOffsetsByTimestampStrategy to latest (begin at the queue's end) or "
                    "earliest."
                )
            offset = there.max_offset if strategy == "latest" else there.min_offset
        starts[queue] = offset
    return starts


def find_ends(store: StoreReader, bounds: Bounds, times: Times | None) -> dict[QueueKey, int]:
    """Return where each queue with an endingTimestamp ends, its end where nothing was stored since then."""
    wanted: Mapping[QueueKey, int | None] = {queue: times.of(queue) if times else None for queue in bounds}
    return {
        queue: find_offset(store, queue, bounds[queue], time_ms)
        for queue, time_ms in wanted.items()
        if time_ms is not None
    }


def find_offset(store: StoreReader, queue: QueueKey, there: QueueBounds, time_ms: int) -> int:
    """Return the offset of the first message stored at or after a time, the queue's end if there is none."""
    offset = store.offset_at_time(queue, time_ms, rule="lower")
    return min(max(offset, there.min_offset), there.max_offset)


def show_time(time_ms: int) -> str:
    """Return a time for people: ISO 8601 in UTC, and the ms that it stands for."""
    try:
        shown = datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, OSError, ValueError):  # beyond the year 9999
        return f"{time_ms} ms"
    return f"{shown} ({time_ms} ms)"
