"""A reader that finds originals by physical offset: where the log begins and ends, and how long its records are."""

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS
from rmq_spark.store.format.record import MIN_RECORD_BYTES
from rmq_spark.store.format.store_settings import StoreSettings
from rmq_spark.store.format.whole_records import numbers_at
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.settings_file import read_settings
from rmq_spark.store.log.store_reader import StoreReader

_SIZE = np.dtype(">i4")


class OriginalsReader(StoreReader):
    """A StoreReader for who makes messages again. One thread at a time; `close` it."""

    @property
    def log(self) -> CommitLog:
        """The commit log; what of it is believed ends at `log_end`."""
        return self._log

    @property
    def log_begin(self) -> int:
        """The physical offset of the first segment that is there."""
        return self._log.segments.begin

    def level_count(self) -> int:
        """Return how many delay levels the store has."""
        held = read_settings(self.path)
        return len(held.levels if isinstance(held, StoreSettings) else DEFAULT_DELAY_LEVELS)

    def sizes_at(self, physical_offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what stands at each place as the length of a record, in bytes; 0 where the log has no room for one.

        Nothing else of what stands there is looked at.
        """
        places, inverse = np.unique(physical_offsets, return_inverse=True)
        sizes = np.zeros(len(places), np.int64)
        segment_bytes = max(self._log.segments.size, 1)
        begins = np.array([segment.begin for segment in self._log.segments.segments], np.int64)
        inside = (places < self.log_end) & (places % segment_bytes + MIN_RECORD_BYTES <= segment_bytes)
        inside &= np.isin(places // segment_bytes * segment_bytes, begins)
        chosen = np.flatnonzero(inside)
        least = np.full(len(chosen), MIN_RECORD_BYTES, np.int64)
        for stretch in self._log.stretches(places[chosen], least):
            found = numbers_at(stretch.buffer, stretch.positions, _SIZE).astype(np.int64)
            stretch.check()
            sizes[chosen[stretch.first : stretch.last]] = found
        fits = (sizes >= MIN_RECORD_BYTES) & (places % segment_bytes + sizes <= segment_bytes)
        fits &= places + sizes <= self.log_end
        return np.where(fits, sizes, 0)[inverse]
