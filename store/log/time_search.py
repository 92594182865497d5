"""The queue offset for a moment: RocketMQ's three answers to "where was the queue at this time?".

A queue's store times never step back (but where a clock was set back), so all of them are binary searches; each
probe reads one unit and one record's head.

Source: ConsumeQueue#getOffsetInQueueByTime: 5.3 with BoundaryType LOWER and UPPER, 4.9 without.
"""

from rmq_spark.store.disk import files
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.record import Record
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.queues import ConsumeQueue

LOWER = "lower"  # the first message stored at or after the time; the queue's end if there is none
UPPER = "upper"  # the last message stored at or before the time; the first one if there is none
NEAREST = "nearest"  # 4.9: some message of just that time, else the nearest in the file chosen by its mtime
RULES = (LOWER, UPPER, NEAREST)


class TimeSearch:
    """Searches in one queue's units [first, end), unit numbers."""

    def __init__(self, log: CommitLog, queue: ConsumeQueue, first: int, end: int) -> None:
        self._log, self._queue, self._first, self._end = log, queue, first, end

    def store_time(self, unit: int) -> int:
        """Return when the unit's record was stored, in ms. Raises DamageError if it points at no record."""
        units = self._queue.read(unit, unit + 1)
        place = int(units.physical_offsets[0])
        record = self._log.record_at(place)
        if not isinstance(record, Record):
            path, position = self._queue.run.path_of(unit)
            raise DamageError("unit", path, position, "the physical offset of a record", place)
        return record.store_timestamp

    def unit_at(self, time_ms: int, rule: str) -> int:
        """Return the unit's number that `rule` gives for a time, within [first, end]."""
        assert rule in RULES, rule
        if self._first >= self._end:
            return self._first
        if rule == NEAREST:
            return self._nearest(time_ms)
        if rule == LOWER:
            return self._first_where_not_before(time_ms)
        return max(self._first_where_not_before(time_ms + 1) - 1, self._first)

    def _first_where_not_before(self, time_ms: int) -> int:
        begin, end = self._first, self._end
        while begin < end:
            middle = (begin + end) // 2
            if self.store_time(middle) >= time_ms:
                end = middle
            else:
                begin = middle + 1
        return begin

    def _nearest(self, time_ms: int) -> int:
        low, high = self._file_by_mtime(time_ms)
        left = right = None
        while low <= high:
            middle = (low + high) // 2
            stored = self.store_time(middle)
            if stored == time_ms:
                return middle
            if stored > time_ms:
                high, right = middle - 1, (middle, stored)
            else:
                low, left = middle + 1, (middle, stored)
        if left is None or right is None:
            chosen = left or right
            assert chosen is not None  # the file has at least one unit
            return chosen[0]
        return right[0] if time_ms - left[1] > right[1] - time_ms else left[0]

    def _file_by_mtime(self, time_ms: int) -> tuple[int, int]:
        """Return first and last unit of the file that 4.9 looks into (MappedFileQueue#getMappedFileByTime)."""
        size = self._queue.layout.itemsize
        chosen = None
        for segment in self._queue.run.segments:
            begin, end = max(segment.begin // size, self._first), min(segment.end // size, self._end)
            if begin >= end:
                continue
            chosen = begin, end - 1
            if files.modified_ms(segment.path) >= time_ms:
                break
        assert chosen is not None  # [first, end) is not empty
        return chosen
