"""Queue offsets of startingTimestamp and endingTimestamp, and the end of a stream.

Times are store times (storeTimestamp), which normally do not decrease within a queue. The offset of a time is that of
the first message that was stored at or after it, the rule "lower" of ConsumeQueue#getOffsetInQueueByTime (5.x).

A stream ends at endingOffsets or endingTimestamp. The ends by endingOffsets are known at once: `latest` means the end
of each queue at the first refresh of a run, and queues that appear later are not read. The end by endingTimestamp is
known in a queue as soon as a message was stored at or after the time, or the clock has passed the time. Until then the
queue is *open*.
"""

from collections.abc import Mapping
from datetime import UTC, datetime

from rmq_spark.datasource.option_parsers import Times
from rmq_spark.datasource.planning import Bounds, check_named
from rmq_spark.datasource.read_options import ReadOptions
from rmq_spark.store import StoreReader
from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import QueueBounds, QueueKey


def find_starts(store: StoreReader, bounds: Bounds, times: Times | None, strategy: str) -> dict[QueueKey, int]:
    """Return the start offset of each queue that has a startingTimestamp.

    If no message was stored in a queue at or after the time, `strategy` determines its start: "latest" (its end),
    "earliest" (its minimum), or "error", which raises OptionError. An empty queue begins at its only offset.
    """
    starts = {}
    for queue, available in bounds.items():
        time_ms = times.of(queue) if times else None
        if time_ms is None:
            continue
        offset = find_offset(store, queue, available, time_ms)
        if offset == available.max_offset and available.min_offset < available.max_offset:
            if strategy == "error":
                raise OptionError(
                    f"startingTimestamp: nothing was stored in queue {queue} at or after {show_time(time_ms)}. Give an "
                    "earlier time, or set startingOffsetsByTimestampStrategy to latest (the queue's end) or earliest."
                )
            offset = available.max_offset if strategy == "latest" else available.min_offset
        starts[queue] = offset
    return starts


def find_ends(store: StoreReader, bounds: Bounds, times: Times | None) -> dict[QueueKey, int]:
    """Return the end offset of each queue that has an endingTimestamp.

    If no message was stored at or after the time, this is the end of the queue.
    """
    return {
        queue: find_offset(store, queue, available, time_ms)
        for queue, available in bounds.items()
        if times is not None and (time_ms := times.of(queue)) is not None
    }


def find_offset(store: StoreReader, queue: QueueKey, available: QueueBounds, time_ms: int) -> int:
    """Return the offset of the first message that was stored at or after `time_ms`.

    If there is no such message, returns the end of the queue. `available` are the bounds of the queue.
    """
    offset = store.offset_at_time(queue, time_ms, rule="lower")
    return min(max(offset, available.min_offset), available.max_offset)


def show_time(time_ms: int) -> str:
    """Return a time as text for error messages: in ISO 8601 (UTC), and in ms since the epoch."""
    try:
        shown = datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, OSError, ValueError):  # beyond the year 9999
        return f"{time_ms} ms"
    return f"{shown} ({time_ms} ms)"


# A message stored just before the time becomes visible a few ms later, when the broker dispatches it.
_VISIBLE_AFTER_MS = 1000


class StreamEnd:
    """The end offset of each queue, for one run of a stream. For one thread at a time.

    If `is_wanted` is False, the stream has neither endingOffsets nor endingTimestamp, and never ends.
    """

    def __init__(self, options: ReadOptions) -> None:
        self._offsets = options.ending_offsets
        self._times = options.ending_times
        self.is_wanted = self._offsets is not None or self._times is not None
        self._ends: dict[QueueKey, int] | None = None  # None before the first refresh
        self._open: set[QueueKey] = set()
        self.closes_at_ms: int | None = None  # the first time at which the clock alone determines an open queue's end

    def refresh(self, store: StoreReader, bounds: Bounds, now_ms: int) -> None:
        """Determine the ends of the queues in `bounds` that are not known yet.

        `now_ms` is in ms since the epoch. Raises NotFoundError for a queue of endingOffsets that is not in `bounds`.
        """
        if not self.is_wanted:
            return
        if self._ends is None:
            named = dict(self._offsets.queues) if self._offsets else {}
            check_named(named, bounds, "endingOffsets")
            self._ends = {}
            for queue, available in bounds.items():
                if self._times is None or self._times.of(queue) is None:
                    offset = named.get(queue, -1)
                    self._ends[queue] = available.max_offset if offset < 0 else offset
        if self._times is None:
            return
        self._open.clear()
        self.closes_at_ms = None
        for queue, available in bounds.items():
            time_ms = self._times.of(queue)
            if time_ms is None or queue in self._ends:
                continue
            offset = find_offset(store, queue, available, time_ms)
            if offset < available.max_offset or now_ms >= time_ms + _VISIBLE_AFTER_MS:
                self._ends[queue] = offset
            else:
                self._open.add(queue)
                closes_at_ms = time_ms + _VISIBLE_AFTER_MS
                self.closes_at_ms = min(self.closes_at_ms or closes_at_ms, closes_at_ms)

    def covers(self, queue: QueueKey) -> bool:
        """Return whether this run reads the queue. A run with an end may not read queues that appeared later."""
        return not self.is_wanted or queue in self._open or queue in (self._ends or {})

    def limit(self, queue: QueueKey, offset: int) -> int:
        """Return `offset`, or the end of the queue if that is known and smaller."""
        return min(offset, (self._ends or {}).get(queue, offset))

    def is_reached(self, positions: Mapping[QueueKey, int]) -> bool:
        """Return whether `positions` has reached the end of every queue, and no queue is open."""
        if self._ends is None or self._open:
            return False
        return all(positions.get(queue, end) >= end for queue, end in self._ends.items())
