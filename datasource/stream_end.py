"""Where a stream ends: endingOffsets and endingTimestamp, as far as they are known by now.

An offset is known at once; `latest` is what the first look of this run saw, and queues that appear later do not
belong to it. A time is known for a queue once a message was stored at or after it, or once the clock is past it:
until then the queue is open.
"""

from collections.abc import Mapping

from rmq_spark.datasource.options import ReadOptions
from rmq_spark.datasource.planning import Bounds, check_named
from rmq_spark.datasource.timestamps import find_offset
from rmq_spark.store import StoreReader
from rmq_spark.store.units import QueueKey

# What a broker stored just before the time may become visible a little later: it dispatches every few ms.
_VISIBLE_AFTER_MS = 1000


class StreamEnd:
    """The bounds of one run of a stream. One thread at a time."""

    def __init__(self, options: ReadOptions) -> None:
        self._offsets = options.ending_offsets
        self._times = options.ending_times
        self.is_wanted = self._offsets is not None or self._times is not None
        self._bounds: dict[QueueKey, int] | None = None  # None before the first look
        self._open: set[QueueKey] = set()
        self.closes_at_ms: int | None = None  # when the clock alone will close an open queue

    def look(self, store: StoreReader, bounds: Bounds, now_ms: int) -> None:
        """Learn the bounds of the queues that are there. Raises NotFoundError for a named queue that is not."""
        if not self.is_wanted:
            return
        if self._bounds is None:
            named = dict(self._offsets.queues) if self._offsets else {}
            check_named(named, bounds, "endingOffsets")
            self._bounds = {}
            for queue, there in bounds.items():
                if self._times is None or self._times.of(queue) is None:
                    offset = named.get(queue, -1)
                    self._bounds[queue] = there.max_offset if offset < 0 else offset
        if self._times is None:
            return
        self._open.clear()
        self.closes_at_ms = None
        for queue, there in bounds.items():
            time_ms = self._times.of(queue)
            if time_ms is None or queue in self._bounds:
                continue
            offset = find_offset(store, queue, there, time_ms)
            if offset < there.max_offset or now_ms >= time_ms + _VISIBLE_AFTER_MS:
                self._bounds[queue] = offset
            else:
                self._open.add(queue)
                self.closes_at_ms = min(self.closes_at_ms or time_ms + _VISIBLE_AFTER_MS, time_ms + _VISIBLE_AFTER_MS)

    def covers(self, queue: QueueKey) -> bool:
        """Say whether the queue belongs to what this run reads."""
        return not self.is_wanted or queue in self._open or queue in (self._bounds or {})

    def limit(self, queue: QueueKey, offset: int) -> int:
        """Return the offset, or the queue's bound where that lies before it."""
        return min(offset, (self._bounds or {}).get(queue, offset))

    def is_reached(self, positions: Mapping[QueueKey, int]) -> bool:
        """Say whether every queue with a bound stands at it, and none is open."""
        known = self._bounds
        if known is None or self._open:
            return False
        return all(positions.get(queue, bound) >= bound for queue, bound in known.items())
