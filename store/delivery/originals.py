"""Whole records at given places of the log, by few reads: the originals of messages that are to come again."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.format.ragged import Bytes, Positions, take_ranges
from rmq_spark.store.format.record import MAGIC_V1, MAGIC_V2, MAX_RECORD_BYTES, MIN_RECORD_BYTES, RECORD_HEAD
from rmq_spark.store.format.whole_records import are_whole, numbers_at
from rmq_spark.store.log.commit_log import CommitLog

_GAP_BYTES = 16 << 10  # records nearer than this are read together: a call costs about as much
_RUN_BYTES = 4 << 20  # of log, read at once: bounds memory
_MAX_PLACE = 1 << 62  # no log is as long; beyond it sums of places and lengths would wrap around
_GUESS_BYTES = 4096  # of the last record of a run, where nobody knows how long it is


class Originals(NamedTuple):
    """Records, one for each place that was asked for: bytes [positions, ends) of `data`.

    A place without a whole record has an empty range; `is_whole` tells.
    """

    data: Bytes
    positions: Positions
    ends: Positions

    @property
    def is_whole(self) -> NDArray[np.bool_]:
        """Say for each place whether a whole record stands there."""
        return self.ends > self.positions


def read_originals(
    log: CommitLog, physical_offsets: NDArray[np.int64], sizes: NDArray[np.int64] | None = None
) -> Originals:
    """Return the records at these physical offsets, in any order and maybe the same ones again.

    Whole is a record that decodes, says of itself that it lies there, and, where its unit's `sizes` are given, is as
    long. What is no such record is told in the answer, never raised: damage, a place that expired or never held a
    record. `data` holds each record once and nothing between them, so it is for the caller to ask for so much as goes
    into memory, less than 2 GiB. Body CRCs are not compared.
    """
    places, lengths, inverse = _distinct(physical_offsets, sizes)
    parts, done = [np.zeros(0, np.uint8)], 0
    begins, ends = np.zeros(len(places), np.int64), np.zeros(len(places), np.int64)
    reads = _read_guessed(log, places) if lengths is None else _read_known(log, places, lengths)
    for first, data, positions, until in reads:
        kept = np.flatnonzero(until > positions)
        if not len(kept):
            continue
        found = take_ranges(data, positions[kept], until[kept])
        records = np.frombuffer(found.buffers()[2], np.uint8)[: int((until - positions)[kept].sum())]
        stops = done + np.cumsum((until - positions)[kept])
        begins[first + kept], ends[first + kept] = stops - (until - positions)[kept], stops
        parts.append(records)
        done += len(records)
    return Originals(np.concatenate(parts), begins[inverse], ends[inverse])


def _distinct(
    places: NDArray[np.int64], sizes: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None, NDArray[np.int64]]:
    """Return each place, with each length that is said of it, once, ascending; and which of them each one asked for is.

    Where units disagree on the length at a place, one of them is damaged, and the other one's record is there.
    """
    if sizes is None:
        found, inverse = np.unique(places, return_inverse=True)
        return found, None, inverse
    order = np.lexsort((sizes, places))
    places, sizes = places[order], sizes[order]
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = (places[1:] != places[:-1]) | (sizes[1:] != sizes[:-1])
    number = np.empty(len(order), np.int64)
    number[order] = np.cumsum(is_new) - 1
    return places[is_new], sizes[is_new], number


def _read_guessed(log: CommitLog, places: NDArray[np.int64]) -> Iterator[tuple[int, Bytes, Positions, Positions]]:
    """Yield the number of a first place, bytes, and the range of the record at each place from there on."""
    for first, last, end in _runs(log, places, None):
        yield first, *_read_run(log, places[first:last], end)


def _read_known(
    log: CommitLog, places: NDArray[np.int64], lengths: NDArray[np.int64]
) -> Iterator[tuple[int, Bytes, Positions, Positions]]:
    """Yield the same for records whose lengths are known: of many runs at once, as a look costs more than a read."""
    parts: list[bytes] = []
    positions, limits = np.zeros(len(places), np.int64), np.zeros(len(places), np.int64)
    size = begun = 0

    def whole(last: int) -> tuple[int, Bytes, Positions, Positions]:
        data, rows = np.frombuffer(b"".join(parts), np.uint8), slice(begun, last)
        found = _sizes(data, places[rows], positions[rows])
        # One that is cut is not gone on with by what was read behind it.
        found[(found != lengths[rows]) | (positions[rows] + found > limits[rows])] = 0
        return begun, *_only_whole(data, positions[rows], found)

    for first, last, end in _runs(log, places, lengths):
        begin = int(places[first])
        if size and size + end - begin > _RUN_BYTES:
            yield whole(first)
            parts, size, begun = [], 0, first
        parts.append(log.bytes_at(begin, end - begin) if 0 <= begin < _MAX_PLACE else b"")
        positions[first:last] = places[first:last] - begin + size
        size += len(parts[-1])
        limits[first:last] = size
    if len(places):
        yield whole(len(places))


def _only_whole(data: Bytes, positions: Positions, found: NDArray[np.int64]) -> tuple[Bytes, Positions, Positions]:
    some = np.flatnonzero(found)
    whole = are_whole(data, positions[some], positions[some] + found[some])
    found[some[~whole]] = 0
    return data, positions, positions + found


def _runs(
    log: CommitLog, places: NDArray[np.int64], lengths: NDArray[np.int64] | None
) -> Iterator[tuple[int, int, int]]:
    """Cut ascending places into runs [first, last) that are read together, up to the physical offset `end`."""
    segment_bytes = max(log.segments.size, 1)
    guesses = np.full(len(places), _GUESS_BYTES, np.int64)
    if lengths is not None:  # a length that no record has is not believed, and finds none either
        guesses = np.clip(lengths, 0, min(MAX_RECORD_BYTES, segment_bytes))
    reach = places + guesses
    is_far = (places[1:] - reach[:-1] > _GAP_BYTES) | (places[1:] // segment_bytes != places[:-1] // segment_bytes)
    # Also where a run would grow beyond what is read at once: at the latest there the next one begins.
    is_far |= places[1:] // _RUN_BYTES != places[:-1] // _RUN_BYTES
    edges = [0, *(np.flatnonzero(is_far) + 1).tolist(), len(places)]
    for first, last in pairwise(edges):
        if last > first:
            yield first, last, int(reach[first:last].max())


def _read_run(log: CommitLog, places: NDArray[np.int64], end: int) -> tuple[Bytes, Positions, Positions]:
    """Return the bytes of a run and the range of the whole record at each place, an empty one where there is none."""
    begin = int(places[0])
    data = np.frombuffer(log.bytes_at(begin, end - begin) if 0 <= begin < _MAX_PLACE else b"", np.uint8)
    positions = places - begin
    found = _sizes(data, places, positions)
    beyond = np.flatnonzero(positions + found > len(data))
    if len(beyond):
        # The last record is longer than was guessed. Its head has said so, and that it is of this place.
        need = int((positions + found).max())
        data = np.frombuffer(log.bytes_at(begin, need), np.uint8)
        found[positions + found > len(data)] = 0
    return _only_whole(data, positions, found)


def _sizes(data: Bytes, places: NDArray[np.int64], positions: Positions) -> NDArray[np.int64]:
    """Return the length that the head at each position says, 0 where no head of that place stands."""
    fields: Any = RECORD_HEAD.fields
    inside = np.flatnonzero(positions + MIN_RECORD_BYTES <= len(data))
    found = np.zeros(len(places), np.int64)
    if not len(inside):
        return found
    values = {
        name: numbers_at(data, positions[inside] + fields[name][1], fields[name][0])
        for name in ("total_size", "magic", "physical_offset")
    }
    sizes, magics = values["total_size"].astype(np.int64), values["magic"]
    good = (magics == MAGIC_V1) | (magics == MAGIC_V2)
    good &= (values["physical_offset"] == places[inside]) & (sizes >= MIN_RECORD_BYTES) & (sizes <= MAX_RECORD_BYTES)
    found[inside[good]] = sizes[good]
    return found
