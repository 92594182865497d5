"""Lookup of records by physical offset, with few reads. The records are originals of messages to copy or deliver."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.format.byte_ranges import Bytes, Positions, take_ranges
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS
from rmq_spark.store.format.own_files import StoreSettings
from rmq_spark.store.format.record import MAGIC_V1, MAGIC_V2, MAX_RECORD_BYTES, MIN_RECORD_BYTES, RECORD_HEAD
from rmq_spark.store.format.record_batch import are_whole, numbers_at
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.log.store_state import read_settings

_GAP_BYTES = 16 << 10  # records with smaller gaps are read together, because a call costs as much as reading this
_RUN_BYTES = 4 << 20  # bytes of log that are read at once, to limit memory
_MAX_OFFSET = 1 << 62  # larger offsets are ignored: no log is that long, and sums with them would overflow
_GUESS_BYTES = 4096  # the assumed length of each record, if lengths are unknown


class Originals(NamedTuple):
    """The records at the requested offsets, in the order of the request. Record i is `data[positions[i]:ends[i]]`.

    If there is no complete record at an offset, its range is empty (see `is_whole`).
    """

    data: Bytes
    positions: Positions
    ends: Positions

    @property
    def is_whole(self) -> NDArray[np.bool_]:
        """For each requested offset: whether there is a complete record."""
        return self.ends > self.positions


def read_originals(
    log: CommitLog, physical_offsets: NDArray[np.int64], sizes: NDArray[np.int64] | None = None
) -> Originals:
    """Return the records at these physical offsets, which may be in any order and contain duplicates.

    A record is complete if it can be decoded and contains its own physical offset. If `sizes` are given, the lengths in
    consume-queue entries, the record must also have that length. If there is no complete record at an offset, because
    of damage, because it has expired or because no record ever began there, this is not an error; the range in the
    result is empty. Body CRCs are not checked.

    `data` contains each record once, without gaps. The caller must limit the request so that the records fit into
    memory and take less than 2 GiB.
    """
    offsets, lengths, inverse = _distinct(physical_offsets, sizes)
    parts, done = [np.zeros(0, np.uint8)], 0
    begins, ends = np.zeros(len(offsets), np.int64), np.zeros(len(offsets), np.int64)
    if lengths is None:
        runs = _runs(log, offsets, None)
        reads: Iterator[tuple[int, Bytes, Positions, Positions]] = (
            (first, *_read_run(log, offsets[first:last], end)) for first, last, end in runs
        )
    else:
        reads = _read_known(log, offsets, lengths)
    for first, data, positions, read_ends in reads:
        found_bytes = read_ends - positions
        kept = np.flatnonzero(found_bytes > 0)
        if not len(kept):
            continue
        found = take_ranges(data, positions[kept], read_ends[kept])
        records = np.frombuffer(found.buffers()[2], np.uint8)[: int(found_bytes[kept].sum())]
        stops = done + np.cumsum(found_bytes[kept])
        begins[first + kept], ends[first + kept] = stops - found_bytes[kept], stops
        parts.append(records)
        done += len(records)
    return Originals(np.concatenate(parts), begins[inverse], ends[inverse])


def _distinct(
    offsets: NDArray[np.int64], sizes: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None, NDArray[np.int64]]:
    """Return (offsets, lengths, indices): the distinct pairs of offset and length, ascending, and where to find each.

    `indices` has the index of the pair for each requested offset. If no `sizes` are given, lengths is None. An offset
    may have several lengths: then all but one of the consume-queue entries are damaged, and only one finds the record.
    """
    if sizes is None:
        found, inverse = np.unique(offsets, return_inverse=True)
        return found, None, inverse
    order = np.lexsort((sizes, offsets))
    offsets, sizes = offsets[order], sizes[order]
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = (offsets[1:] != offsets[:-1]) | (sizes[1:] != sizes[:-1])
    number = np.empty(len(order), np.int64)
    number[order] = np.cumsum(is_new) - 1
    return offsets[is_new], sizes[is_new], number


def _read_known(
    log: CommitLog, offsets: NDArray[np.int64], lengths: NDArray[np.int64]
) -> Iterator[tuple[int, Bytes, Positions, Positions]]:
    """Yield (index of an offset, bytes, positions, ends) with the records at this offset and the following ones.

    Reads and checks many runs before it yields, because one check of many runs is faster.
    """
    parts: list[bytes] = []
    positions, limits = np.zeros(len(offsets), np.int64), np.zeros(len(offsets), np.int64)
    size = begun = 0

    def whole(last: int) -> tuple[int, Bytes, Positions, Positions]:
        data, rows = np.frombuffer(b"".join(parts), np.uint8), slice(begun, last)
        found = _sizes(data, offsets[rows], positions[rows])
        # If a run ends inside a record, the bytes of the next run must not be taken for the rest of the record.
        found[(found != lengths[rows]) | (positions[rows] + found > limits[rows])] = 0
        return begun, *_only_whole(data, positions[rows], found)

    for first, last, end in _runs(log, offsets, lengths):
        begin = int(offsets[first])
        if size and size + end - begin > _RUN_BYTES:
            yield whole(first)
            parts, size, begun = [], 0, first
        parts.append(log.bytes_at(begin, end - begin) if 0 <= begin < _MAX_OFFSET else b"")
        positions[first:last] = offsets[first:last] - begin + size
        size += len(parts[-1])
        limits[first:last] = size
    if len(offsets):
        yield whole(len(offsets))


def _only_whole(data: Bytes, positions: Positions, found: NDArray[np.int64]) -> tuple[Bytes, Positions, Positions]:
    some = np.flatnonzero(found)
    whole = are_whole(data, positions[some], positions[some] + found[some])
    found[some[~whole]] = 0
    return data, positions, positions + found


def _runs(
    log: CommitLog, offsets: NDArray[np.int64], lengths: NDArray[np.int64] | None
) -> Iterator[tuple[int, int, int]]:
    """Divide ascending offsets into runs that are read together. Yield (first index, last index, physical end) of each.

    The last index is exclusive.
    """
    segment_bytes = max(log.segments.size, 1)
    guesses = np.full(len(offsets), _GUESS_BYTES, np.int64)
    if lengths is not None:  # limit impossible lengths; they find no record anyway
        guesses = np.clip(lengths, 0, min(MAX_RECORD_BYTES, segment_bytes))
    reach = offsets + guesses
    is_far = (offsets[1:] - reach[:-1] > _GAP_BYTES) | (offsets[1:] // segment_bytes != offsets[:-1] // segment_bytes)
    # A new run also begins after each multiple of the maximum size, so no run is longer.
    is_far |= offsets[1:] // _RUN_BYTES != offsets[:-1] // _RUN_BYTES
    edges = [0, *(np.flatnonzero(is_far) + 1).tolist(), len(offsets)]
    for first, last in pairwise(edges):
        if last > first:
            yield first, last, int(reach[first:last].max())


def _read_run(log: CommitLog, offsets: NDArray[np.int64], end: int) -> tuple[Bytes, Positions, Positions]:
    """Return (bytes, positions, ends) of a run. If there is no complete record at an offset, its range is empty."""
    begin = int(offsets[0])
    data = np.frombuffer(log.bytes_at(begin, end - begin) if 0 <= begin < _MAX_OFFSET else b"", np.uint8)
    positions = offsets - begin
    found = _sizes(data, offsets, positions)
    beyond = np.flatnonzero(positions + found > len(data))
    if len(beyond):
        # By its header, which has the right offset, the last record is longer than assumed. Read the run again.
        need = int((positions + found).max())
        data = np.frombuffer(log.bytes_at(begin, need), np.uint8)
        found[positions + found > len(data)] = 0
    return _only_whole(data, positions, found)


def _sizes(data: Bytes, offsets: NDArray[np.int64], positions: Positions) -> NDArray[np.int64]:
    """Return the record length (bytes) in the header at each position; 0 if the header is not that of this offset."""
    fields: Any = RECORD_HEAD.fields
    inside = np.flatnonzero(positions + MIN_RECORD_BYTES <= len(data))
    found = np.zeros(len(offsets), np.int64)
    if not len(inside):
        return found
    values = {
        name: numbers_at(data, positions[inside] + fields[name][1], fields[name][0])
        for name in ("total_size", "magic", "physical_offset")
    }
    sizes, magics = values["total_size"].astype(np.int64), values["magic"]
    good = (magics == MAGIC_V1) | (magics == MAGIC_V2)
    good &= (values["physical_offset"] == offsets[inside]) & (sizes >= MIN_RECORD_BYTES) & (sizes <= MAX_RECORD_BYTES)
    found[inside[good]] = sizes[good]
    return found


_SIZE = np.dtype(">i4")


class RecordLookup(StoreReader):
    """A StoreReader that also gives access to records by physical offset. For one thread at a time; `close` it."""

    @property
    def log(self) -> CommitLog:
        """The commit log. Its valid part ends at `log_end`."""
        return self._log

    @property
    def log_begin(self) -> int:
        """The physical offset at which the first existing segment of the log begins."""
        return self._log.segments.begin

    def level_count(self) -> int:
        """Return how many delay levels the store has."""
        settings = read_settings(self.path)
        return len(settings.levels if isinstance(settings, StoreSettings) else DEFAULT_DELAY_LEVELS)

    def sizes_at(self, physical_offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the record length (bytes) in the first field at each physical offset.

        The length is 0 if the log has no segment there or no room for such a record. Nothing else is checked.
        """
        offsets, inverse = np.unique(physical_offsets, return_inverse=True)
        sizes = np.zeros(len(offsets), np.int64)
        segment_bytes = max(self._log.segments.size, 1)
        begins = np.array([segment.begin for segment in self._log.segments.segments], np.int64)
        inside = (offsets < self.log_end) & (offsets % segment_bytes + MIN_RECORD_BYTES <= segment_bytes)
        inside &= np.isin(offsets // segment_bytes * segment_bytes, begins)
        chosen = np.flatnonzero(inside)
        least = np.full(len(chosen), MIN_RECORD_BYTES, np.int64)
        for stretch in self._log.stretches(offsets[chosen], least):
            found = numbers_at(stretch.buffer, stretch.positions, _SIZE).astype(np.int64)
            stretch.check()
            sizes[chosen[stretch.first : stretch.last]] = found
        fits = (sizes >= MIN_RECORD_BYTES) & (offsets % segment_bytes + sizes <= segment_bytes)
        fits &= offsets + sizes <= self.log_end
        return np.where(fits, sizes, 0)[inverse]
