"""Which units of each queue were met, as half-open ranges of unit numbers."""

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.units import QueueKey


class UnitRanges:
    """Ranges of unit numbers by queue. Grows by what comes in order at next to no cost. One thread."""

    def __init__(self) -> None:
        self._begins: dict[QueueKey, list[int]] = {}
        self._ends: dict[QueueKey, list[int]] = {}
        self.count = 0

    def add(self, key: QueueKey, numbers: NDArray[np.int64]) -> None:
        """Add units of a queue; numbers that were there before count once."""
        if not len(numbers):
            return
        first, last = int(numbers[0]), int(numbers[-1])
        if last - first + 1 == len(numbers) and (numbers[1:] > numbers[:-1]).all():  # mostly they follow each other
            self.count += len(numbers)
            self._add(key, first, last + 1)
            return
        numbers = np.unique(numbers)
        self.count += len(numbers)
        edges = np.flatnonzero(np.diff(numbers) != 1) + 1
        for piece in np.split(numbers, edges):
            self._add(key, int(piece[0]), int(piece[-1]) + 1)

    def _add(self, key: QueueKey, begin: int, end: int) -> None:
        begins, ends = self._begins.setdefault(key, []), self._ends.setdefault(key, [])
        if not ends or begin > ends[-1]:
            begins.append(begin)
            ends.append(end)
            return
        first = bisect_right(ends, begin - 1)  # the first range that touches or lies behind
        last = first
        while last < len(begins) and begins[last] <= end:
            begin, end = min(begin, begins[last]), max(end, ends[last])
            last += 1
        begins[first:last], ends[first:last] = [begin], [end]

    def holds(self, key: QueueKey, number: int) -> bool:
        """Say whether a unit was met."""
        begins = self._begins.get(key, [])
        at = bisect_right(begins, number) - 1
        return at >= 0 and number < self._ends[key][at]

    def end(self, key: QueueKey) -> int:
        """Return the number behind the last unit that was met, 0 for none."""
        return self._ends.get(key, [0])[-1]

    def begin(self, key: QueueKey) -> int | None:
        """Return the number of the first unit that was met, None for none."""
        return next(iter(self._begins.get(key, [])), None)

    def gaps(self, key: QueueKey, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges within [begin, end) that were not met."""
        found, at = [], begin
        for first, last in zip(self._begins.get(key, []), self._ends.get(key, []), strict=True):
            if first > at:
                found.append((at, min(first, end)))
            at = max(at, last)
        if at < end:
            found.append((at, end))
        return [(first, last) for first, last in found if first < last]
