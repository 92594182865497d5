"""Segments: a row of files of one size, each named by the position of its first byte in the row.

The commit log, the consume queues and their side files are such rows. A `SegmentRun` is the list of segments in one
folder, or in several, at one moment. It contains names and sizes, and opens no file. `list_segments` makes a new list.
Source: MappedFileQueue#load (5.3), which also deletes files. This module never deletes any.

`place_records` computes the physical offsets of records that are appended to a commit log. `FileSizes` has the sizes of
new files.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.errors import DamageError, StorePathError
from rmq_spark.store.format.consume_queue_entry import BATCH_UNIT, QUEUE_UNIT
from rmq_spark.store.format.file_names import parse_segment_name
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.format.record import BLANK_BYTES


@dataclass(frozen=True, slots=True)
class FileSizes:
    """Sizes of the files of a new store. The defaults are RocketMQ's. Segments and queue files are in bytes."""

    segment_bytes: int = 1 << 30
    queue_file_bytes: int = 300_000 * QUEUE_UNIT.itemsize
    batch_queue_file_bytes: int = 300_000 * BATCH_UNIT.itemsize
    index: IndexShape = field(default_factory=IndexShape)

    def by_name(self) -> dict[str, int]:
        """Return the sizes by the names that they have in the store's settings."""
        return {
            "segmentBytes": self.segment_bytes,
            "queueFileBytes": self.queue_file_bytes,
            "batchQueueFileBytes": self.batch_queue_file_bytes,
            "indexSlots": self.index.slot_count,
            "indexUnits": self.index.unit_count,
        }

    def or_those(self, named: Mapping[str, int]) -> "FileSizes":
        """Return a copy of these sizes, with those in `named` replaced. The names are those of `by_name`."""
        sizes = {**self.by_name(), **named}
        index = IndexShape(sizes["indexSlots"], sizes["indexUnits"])
        return FileSizes(sizes["segmentBytes"], sizes["queueFileBytes"], sizes["batchQueueFileBytes"], index)


@dataclass(frozen=True, slots=True)
class Run:
    """One write of records: bytes [begin, end) of the appended data, written at `physical_offset` in one segment."""

    physical_offset: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Filler:
    """The rest of a segment from `physical_offset`, `remaining` bytes, which is too short for the next record."""

    physical_offset: int
    remaining: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where records go: the physical offset of each, the writes in the order of the log, and the log's new end."""

    physical_offsets: NDArray[np.int64]
    writes: list[Run | Filler]
    end: int


def place_records(sizes: NDArray[np.int64], end: int, segment_bytes: int) -> Placement:
    """Return where records of these sizes (bytes) go if they are appended to a log that ends at `end`.

    A record goes to the next segment if less than 8 bytes, the size of a filler, would stay free after it in its
    segment (CommitLog.DefaultAppendMessageCallback#doAppend, 4.9 and 5.3). Every record must fit into a segment.
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
        run_end = int(record_ends[last - 1])
        offsets[first:last] = record_ends[first:last] - sizes[first:last] + (at - done)
        writes.append(Run(at, done, run_end))
        at += run_end - done
        first, done = last, run_end
    return Placement(offsets, writes, at)


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of a row. It contains the bytes [begin, begin + size) of the row."""

    begin: int
    size: int
    path: str

    @property
    def end(self) -> int:
        """Return the position in the row after the file's last byte."""
        return self.begin + self.size


@dataclass(frozen=True, slots=True)
class SegmentRun:
    """The segments of a row, in order. `size` is the size of each in bytes, and 0 if there are no segments."""

    segments: tuple[Segment, ...]
    size: int

    @property
    def begin(self) -> int:
        """Return the position of the first byte that has a file. Return 0 if there are no segments."""
        return self.segments[0].begin if self.segments else 0

    @property
    def end(self) -> int:
        """Return the position after the last byte that has a file. Return 0 if there are no segments."""
        return self.segments[-1].end if self.segments else 0

    def holding(self, position: int) -> Segment | None:
        """Return the segment that contains the byte at `position`. Return None if no file contains it."""
        at = bisect_right(self.segments, position, key=lambda segment: segment.begin) - 1
        if at < 0 or position >= self.segments[at].end:
            return None
        return self.segments[at]

    def after(self, segment: Segment) -> Segment | None:
        """Return the segment that begins where `segment` ends. Return None if it does not exist."""
        return self.holding(segment.end)


def list_segments(*folders: str) -> SegmentRun:
    """Return the segments in the folders, ordered by position. A missing folder has no segments.

    Raises StorePathError if a file's name is not that of a segment. Raises DamageError if the files have different
    sizes or overlap. A broker refuses to start in these cases too. An empty last file is ignored, because a process is
    just creating it.
    """
    found = []
    for folder in folders:
        for name, is_folder in files.list_folder(folder):
            if is_folder:
                continue
            begin = parse_segment_name(name)
            path = files.join(folder, name)
            if begin is None:
                raise StorePathError(
                    f"{path} does not belong there: expected only files named by 20 digits. A broker refuses to load "
                    "any other. Move it away and read again."
                )
            found.append(Segment(begin, files.file_size(path), path))
    found.sort(key=lambda segment: segment.begin)
    found = [segment for segment in found if segment.size >= 0]  # -1 if it was deleted after it was listed
    if found and found[-1].size == 0:
        found.pop()
    size = found[0].size if found else 0
    for before, segment in pairwise(found):
        if segment.size != size:
            smaller = min(segment, before, key=lambda one: one.size)
            raise DamageError(
                "segments of one folder have one size", smaller.path, 0, max(size, segment.size), smaller.size
            )
        if segment.begin < before.end:
            raise DamageError("segments overlap", segment.path, 0, f"a name from {before.end} on", segment.begin)
    return SegmentRun(tuple(found), size)
