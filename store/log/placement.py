"""Where records go that are appended to a log of segments: pure arithmetic."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.format.record import BLANK_BYTES


@dataclass(frozen=True, slots=True)
class Run:
    """The bytes [begin, end) of the records that are appended, which lie from `physical_offset` on in one segment."""

    physical_offset: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Filler:
    """The rest of a segment that is too short for the next record, `remaining` bytes."""

    physical_offset: int
    remaining: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The physical offset of every record, what to write in the order of the log, and the log's new end."""

    physical_offsets: NDArray[np.int64]
    writes: list[Run | Filler]
    end: int


def place_records(sizes: NDArray[np.int64], end: int, segment_bytes: int) -> Placement:
    """Place records of these sizes (bytes) behind `end`.

    A record moves on to the next segment where it would leave less than a filler's 8 bytes behind it
    (CommitLog.DefaultAppendMessageCallback#doAppend, 4.9 and 5.3). The caller has checked that each fits a segment.
    """
    assert not len(sizes) or int(sizes.max()) + BLANK_BYTES <= segment_bytes, (int(sizes.max()), segment_bytes)
    offsets = np.empty(len(sizes), np.int64)
    record_ends = np.cumsum(sizes)
    writes: list[Run | Filler] = []
    first, done, at = 0, 0, end
    while first < len(sizes):
        remaining = segment_bytes - at % segment_bytes
        last = int(np.searchsorted(record_ends, done + remaining - BLANK_BYTES, side="right"))
        if last <= first:
            writes.append(Filler(at, remaining))
            at += remaining
            continue
        upto = int(record_ends[last - 1])
        offsets[first:last] = record_ends[first:last] - sizes[first:last] + (at - done)
        writes.append(Run(at, done, upto))
        at += upto - done
        first, done = last, upto
    return Placement(offsets, writes, at)
