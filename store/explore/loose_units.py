"""Units that no record asked for: written, and left over when all records have met theirs.

Most are in order: fill, units of records that have expired, and what a truncation left behind a queue's end. Others
name records that were lost, or records that say of themselves that they are something else.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.errors import StoreChangedError
from rmq_spark.store.explore.unit_ranges import UnitRanges
from rmq_spark.store.format.batch_unit import BATCH_UNIT
from rmq_spark.store.format.queue_unit import is_blank_fill
from rmq_spark.store.log.queues import ConsumeQueue


@dataclass(frozen=True, slots=True)
class LooseUnits:
    """Written units of one queue with their numbers, ascending; fill and expired ones are left out."""

    numbers: NDArray[np.int64]
    units: NDArray[np.void]
    expired: int
    fill: int

    @property
    def places(self) -> NDArray[np.int64]:
        """Where the records are that they name (physical offsets)."""
        return self.units["physical_offset"].astype(np.int64)

    def offsets(self) -> NDArray[np.int64]:
        """Return the queue offset of each."""
        if self.units.dtype == BATCH_UNIT:
            return self.units["base_offset"].astype(np.int64)
        return self.numbers

    def counts(self) -> NDArray[np.int64]:
        """Return how many messages each is for."""
        if self.units.dtype == BATCH_UNIT:
            return np.clip(self.units["message_count"].astype(np.int64), 0, None)
        return np.ones(len(self.numbers), np.int64)


def find_loose(queue: ConsumeQueue, met: UnitRanges, log_begin: int) -> Iterator[LooseUnits]:
    """Yield the written units of a queue that were not met, in pieces. Parts of files that are holes are not read."""
    run, size = queue.run, queue.layout.itemsize
    for begin, end in met.gaps(queue.key, run.begin, run.end):
        for segment in run.segments:
            first, last = max(begin * size, segment.begin), min(end * size, segment.end)
            if first >= last:
                continue
            extents = files.data_extents(segment.path, first - segment.begin, last - segment.begin)
            with contextlib.suppress(StoreChangedError):  # retention took the file meanwhile
                for one, other in extents:
                    number = max((segment.begin + one) // size, begin)
                    stop = min(-(-(segment.begin + other) // size), end)
                    if number < stop:
                        units = run.read(number, stop)
                        yield _loose(number, units, log_begin)
    run.close()


def _loose(number: int, units: NDArray[np.void], log_begin: int) -> LooseUnits:
    numbers = number + np.arange(len(units), dtype=np.int64)
    raw = units.view((np.uint8, units.dtype.itemsize))
    written = raw.any(axis=1)
    fill = is_blank_fill(units)
    ends = units["physical_offset"].astype(np.int64) + units["record_size"]
    expired = ~fill & (units["record_size"] > 0) & (units["physical_offset"] >= 0) & (ends <= log_begin) & written
    kept = written & ~fill & ~expired
    return LooseUnits(numbers[kept], units[kept], int(expired.sum()), int((fill & written).sum()))
