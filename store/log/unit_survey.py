"""What the units of a range tell, with no look at a record: how long its messages are, how many a filter lets by."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.filter.row_filter import RowFilter
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.log.unit_scan import asks_units

_FEW_UNITS, _MANY_UNITS = 1 << 7, 1 << 16  # whose sizes are read at once
_SAMPLED_UNITS = 64  # side by side, at each place that is looked at


class UnitSurvey:
    """The units of the queue offsets [begin, end) of one queue, which it has; `units_end` is as for `read_range`.

    What is read is held against nothing: these are numbers to plan by. Each method lets go of the queue's files.
    """

    def __init__(self, queue: ConsumeQueue, begin: int, end: int, units_end: int) -> None:
        self._queue, self._begin, self._end = queue, begin, end
        self._first, self._last = queue.unit_of(begin, units_end), queue.unit_of(end - 1, units_end) + 1

    def record_bytes(self) -> int:
        """Return the bytes of the records that begin in the range, as they lie in the log."""
        return sum(int(sizes.sum()) for _, sizes in self._sizes())

    def offset_within_bytes(self, max_bytes: int) -> int:
        """Return the largest queue offset up to the end such that the records before it take at most `max_bytes`."""
        left = max_bytes
        for offsets, sizes in self._sizes():
            total = np.cumsum(sizes)
            if int(total[-1]) > left:
                return max(self._begin, int(offsets[int(np.searchsorted(total, left, side="right"))]))
            left -= int(total[-1])
        return self._end

    def wanted_share(self, wanted: RowFilter, places: int) -> float:
        """Return about which part of the units a filter lets by, 1.0 where units are not asked; some are looked at.

        `places` says in how many places of the range, spread evenly; in a short one all units are looked at.
        """
        if not asks_units(self._queue, wanted):
            return 1.0
        count = let_by = 0
        starts = np.linspace(self._first, max(self._last - _SAMPLED_UNITS, self._first), places).astype(np.int64)
        unit = self._first
        for start in starts.tolist():
            unit = max(unit, start)
            units = self._queue.read(unit, min(start + _SAMPLED_UNITS, self._last))
            unit += len(units)
            count += len(units)
            let_by += int(wanted.may_match(units.tags_codes).sum())
        self._queue.run.close()
        return let_by / count if count else 1.0

    def _sizes(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield queue offsets and record sizes, a few and then many at a time: a limit may be near."""
        unit, step = self._first, _FEW_UNITS
        while unit < self._last:
            units = self._queue.read(unit, min(unit + step, self._last))
            step = min(step * 8, _MANY_UNITS)
            # A batch that the range begins inside of was counted where its first message was.
            yield units.queue_offsets, np.where(units.queue_offsets < self._begin, 0, units.sizes)
            unit += len(units)
        self._queue.run.close()
