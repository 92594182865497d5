"""Units of a queue that stand for all of them, and the times in the heads of their records.

A queue of millions of messages is known well enough for a picture by some thousands of its units, 20 bytes each, that
lie evenly in it; a small one by all of them. What was estimated says so (`UnitSample.is_whole`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.heads import gather
from rmq_spark.store.format.record import (
    BORN_HOST_V6,
    MAX_RECORD_BYTES,
    MIN_RECORD_BYTES,
    RECORD_HEAD,
    RECORD_HEAD_BORN_V6,
)
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.queues import ConsumeQueue, Units
from rmq_spark.store.log.segments import SegmentRun

Numbers = NDArray[np.int64]
NO_TIME = -1  # of a record that is not what its unit says

_CHUNK_UNITS = 1 << 20  # read at once: 20 MiB


@dataclass(frozen=True, slots=True)
class SampleSize:
    """How much of a queue is looked at: all of up to `whole_count` units, else `run_count` runs of `run_units`."""

    whole_count: int
    run_count: int
    run_units: int


@dataclass(frozen=True, slots=True)
class UnitSample:
    """Units of one queue in order, its first and last among them, and how many messages each of them stands for.

    `messages` adds up to what the queue holds.
    """

    units: Units
    messages: NDArray[np.float64]
    is_whole: bool

    def record_bytes(self, among: NDArray[np.bool_] | None = None) -> int:
        """Return the bytes of all records of the queue, estimated where the sample is not whole.

        With `among`, a mask, only those of some of the units.
        """
        chosen = np.ones(len(self.units), np.bool_) if among is None else among
        sizes = np.where(chosen, self.units.sizes, 0)
        if self.is_whole:
            return int(sizes.sum())
        counts = self.units.message_counts
        return round(float((sizes * self.messages / (1 if counts is None else counts)).sum()))


def sample_units(queue: ConsumeQueue, first: int, end: int, max_offset: int, size: SampleSize) -> UnitSample:
    """Return units among [first, end), unit numbers, of a queue whose next message will get `max_offset`."""
    count = end - first
    if count <= max(size.whole_count, size.run_count * size.run_units + 1):
        units = _joined([queue.read(at, min(at + _CHUNK_UNITS, end)) for at in range(first, end, _CHUNK_UNITS)])
        counts = units.message_counts
        return UnitSample(units, np.ones(len(units)) if counts is None else counts.astype(np.float64), True)
    # The last unit is a run of its own, so that the times of the first and the last message are known.
    begins = [first + at * (count - 1) // size.run_count for at in range(size.run_count)]
    if count <= _CHUNK_UNITS:  # one read costs less than hundreds
        everything = queue.read(first, end)
        runs = [everything.part(begin - first, begin - first + size.run_units) for begin in begins]
        runs.append(everything.part(len(everything) - 1, len(everything)))
    else:
        runs = [queue.read(begin, begin + size.run_units) for begin in begins] + [queue.read(end - 1, end)]
    lengths = np.array([len(run) for run in runs])
    offsets = np.array([*(run.queue_offsets[0] for run in runs if len(run)), max_offset], np.int64)
    stands_for = np.diff(offsets) / lengths[lengths > 0]
    return UnitSample(_joined(runs), np.repeat(stands_for, lengths[lengths > 0]), False)


@dataclass(frozen=True, slots=True)
class UnitFaults:
    """Which of some units, as masks, cannot be right: by the files of the log alone, no record is read."""

    wrong_size: NDArray[np.bool_]  # that no record has, or that reaches beyond its segment
    without_segment: NDArray[np.bool_]  # between segments, where one is missing

    @property
    def good(self) -> NDArray[np.bool_]:
        """The units that are neither."""
        return ~(self.wrong_size | self.without_segment)


def find_faults(run: SegmentRun, places: Numbers, sizes: Numbers) -> UnitFaults:
    """Return which units cannot be right. What lies before or behind all segments may be expired, or be new: it is."""
    if not run.segments:
        return UnitFaults((sizes < MIN_RECORD_BYTES) | (sizes > MAX_RECORD_BYTES), np.zeros(len(places), np.bool_))
    begins = np.array([segment.begin for segment in run.segments], np.int64)
    at = np.searchsorted(begins, places, side="right") - 1
    ends = begins[at] + run.size
    is_within = (places >= run.begin) & (places < run.end)
    without_segment = is_within & (places >= ends)
    crosses = is_within & ~without_segment & (sizes > ends - places)
    return UnitFaults((sizes < MIN_RECORD_BYTES) | (sizes > MAX_RECORD_BYTES) | crosses, without_segment)


def head_times(log: CommitLog, places: Numbers, sizes: Numbers) -> tuple[Numbers, Numbers]:
    """Return when records were born and stored (ms), by physical offset and size; NO_TIME where no such record is.

    In any order, and of any queues. Only heads are read. Raises StoreChangedError for files that are gone.
    """
    places, first, which = np.unique(places, return_index=True, return_inverse=True)  # a queue's first may be its last
    born, stored = _unique_head_times(log, places, sizes[first])
    return born[which], stored[which]


def _unique_head_times(log: CommitLog, places: Numbers, sizes: Numbers) -> tuple[Numbers, Numbers]:
    """Return the same of places that are sorted, none twice."""
    born, stored = np.full(len(places), NO_TIME, np.int64), np.full(len(places), NO_TIME, np.int64)
    order = np.arange(len(places))
    order = order[find_faults(log.segments, places, sizes).good & (places >= log.segments.begin)]
    order = order[places[order] + sizes[order] <= log.segments.end]
    keep = np.append(True, places[order][1:] >= (places[order] + sizes[order])[:-1])[: len(order)]
    order = order[keep]  # what overlaps is damage, and not for pictures
    try:
        for stretch in log.stretches(places[order], sizes[order]):
            chosen = order[stretch.first : stretch.last]
            heads = gather(stretch.buffer, stretch.positions, RECORD_HEAD)
            good = (heads["physical_offset"] == places[chosen]) & (heads["total_size"] == sizes[chosen])
            times = heads["store_timestamp"].astype(np.int64)
            long = np.flatnonzero(good & (heads["sys_flag"] & BORN_HOST_V6 != 0))
            if len(long):
                times[long] = gather(stretch.buffer, stretch.positions[long], RECORD_HEAD_BORN_V6)["store_timestamp"]
            stretch.check()
            stored[chosen[good]] = times[good]
            born[chosen[good]] = heads["born_timestamp"][good]
    except DamageError:
        pass  # a unit with a size that no record can have: what was not read has no time
    return born, stored


def _joined(parts: Sequence[Units]) -> Units:
    """Return the units of several reads as one, none of none."""
    parts = [part for part in parts if len(part)]
    if len(parts) == 1:
        return parts[0]
    none = np.zeros(0, np.int64)
    if not parts:
        return Units(none, none, none, none, None)
    counts = [part.message_counts for part in parts]
    return Units(
        np.concatenate([part.physical_offsets for part in parts]),
        np.concatenate([part.sizes for part in parts]),
        np.concatenate([part.tags_codes for part in parts]),
        np.concatenate([part.queue_offsets for part in parts]),
        None if counts[0] is None else np.concatenate([part for part in counts if part is not None]),
    )
