"""The commit log for readers: reads bytes at a physical offset, one record, or many records at once.

Segments are read through memory-mapped windows. If the file system or the user forbids mapping, their bytes are copied
instead. A `Stretch.buffer` may be a mapped window of a file that shrinks. So call `Stretch.check` after computing a
result from the buffer, and before using the result.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.disk.mapped_window import WINDOW_BYTES, MappedWindow
from rmq_spark.store.errors import DamageError, StoreChangedError
from rmq_spark.store.format.file_names import segment_name
from rmq_spark.store.format.record import (
    BLANK_BYTES,
    MAX_RECORD_BYTES,
    MIN_RECORD_BYTES,
    RECORD_HEAD,
    Blank,
    Record,
    RecordParts,
    Torn,
    decode_record,
    find_parts,
)
from rmq_spark.store.log.segments import Segment, SegmentRun, list_segments
from rmq_spark.store.model import QueueKey

_COPY_BYTES = 16 << 20  # maximum size of a stretch that is copied, to limit memory
_SPARSE = 32  # scattered records that fill less than 1/32 of their stretch leave most of its pages unread
_GAP_BYTES = 64 << 10  # records with smaller gaps are copied together: reading the gap costs about as much as a seek
_NEAR_BYTES = 4 << 10  # the same for local files: such a gap is mostly on the pages of the two records
_READ_BYTES = 32 << 10  # one more read takes as long as scanning this many bytes of a mapped file
_FEW_READS = 16  # this many reads take less time than mapping a window


@dataclass(frozen=True, slots=True)
class Stretch:
    """The requested records number [first, last), at `positions` (bytes) in `buffer`.

    Records are numbered from 0 in the order of the request.
    """

    first: int
    last: int
    buffer: NDArray[np.uint8]
    positions: NDArray[np.int64]
    window: MappedWindow | None

    def check(self) -> None:
        """Raise StoreChangedError if the segment has become shorter: what was read may be zeros."""
        if self.window is not None:
            self.window.check()


class CommitLog:
    """The segments of a commit log. For one thread at a time. Call `close` when done.

    A read of a physical offset that has no file raises StoreChangedError or returns fewer bytes, as each method says.
    Retention may have deleted the file, or a broker may have truncated the log.
    """

    def __init__(self, folders: tuple[str, ...], *, mapped: bool) -> None:
        self._folders, self._mapped = folders, mapped
        self._gap_bytes = _NEAR_BYTES if mapped else _GAP_BYTES
        self._file: OpenFile | None = None
        self._window: tuple[Segment, MappedWindow] | None = None
        self.segments = SegmentRun((), 0)
        self.refresh()

    def refresh(self) -> None:
        """List the segments again. Close the open files, because their names may belong to other files now."""
        self.close()
        self.segments = list_segments(*self._folders)

    def is_begin_there(self) -> bool:
        """Say whether the oldest segment still exists. If the log was empty, say whether it is still empty."""
        if not self.segments.segments:
            return not list_segments(*self._folders).segments
        return files.file_size(self.segments.segments[0].path) >= 0

    def has_file_at(self, begin: int) -> bool:
        """Say whether a segment that begins at the physical offset `begin` exists now and is not empty."""
        name = segment_name(begin)
        return any(files.file_size(files.join(folder, name)) > 0 for folder in self._folders)

    def _lacks(self, physical_offset: int) -> bool:
        """Say whether a physical offset is in a missing segment, between two segments that exist."""
        run = self.segments
        return run.begin <= physical_offset < run.end and run.holding(physical_offset) is None

    def missing_segment(self, physical_offset: int) -> str:
        """Return the path of the missing segment that contained a physical offset.

        The physical offset must be between the first and the last segment.
        """
        before = [segment for segment in self.segments.segments if segment.begin <= physical_offset][-1]
        name = segment_name(physical_offset - (physical_offset - before.begin) % self.segments.size)
        return files.join(files.parent(before.path), name)

    def close(self) -> None:
        """Close the open files. The next read opens them again."""
        if self._window is not None:
            self._window[1].close()
            self._window = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def bytes_at(self, physical_offset: int, size: int) -> bytes:
        """Return up to `size` bytes at a physical offset.

        Return fewer at the end of the segment, and b"" without a segment.
        """
        segment = self.segments.holding(physical_offset)
        if segment is None:
            return b""
        position = physical_offset - segment.begin
        return self._open(segment).read(position, min(size, segment.size - position))

    def record_at(self, physical_offset: int) -> Record | Blank | Torn:
        """Decode the record or filler at a physical offset. Return Torn if there is none that is complete.

        Also return Torn if the record contains another physical offset than its own position.
        """
        data = self._record_bytes(physical_offset)
        if not data and self._lacks(physical_offset):
            return Torn(f"missing segment {self.missing_segment(physical_offset)}; rmq_spark.check shows more")
        found = decode_record(data)
        if isinstance(found, Record) and found.physical_offset != physical_offset:
            return Torn(f"a record that contains another physical offset, {found.physical_offset}")
        return found

    def queue_at(self, physical_offset: int) -> tuple[QueueKey, int] | Blank | None:
        """Return the queue and the size (bytes) of the record at a physical offset.

        Return None where `record_at` returns Torn. This takes a fifth of its time, for a walk over many records.
        """
        data = self._record_bytes(physical_offset)
        parts = find_parts(data)
        if isinstance(parts, Blank):
            return parts
        if not isinstance(parts, RecordParts) or parts.physical_offset != physical_offset:
            return None
        topic = data[parts.topic : parts.topic + parts.topic_size]
        return QueueKey(topic.decode("utf-8", "replace"), parts.queue_id), parts.total_size

    def _record_bytes(self, physical_offset: int) -> bytes:
        """Return at least the bytes of the record at a physical offset, as far as its segment has them."""
        data = self.bytes_at(physical_offset, 4096)
        size = int.from_bytes(data[:4], "big", signed=True) if len(data) >= BLANK_BYTES else 0
        if len(data) < size <= MAX_RECORD_BYTES and int.from_bytes(data[4:8], "big"):
            data = self.bytes_at(physical_offset, size)
        return data

    def stretches(
        self,
        physical_offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
        *,
        are_scattered: bool = False,
    ) -> Iterator[Stretch]:
        """Yield stretches that together contain the requested records, in order. Each stretch has one buffer.

        The records are given by `physical_offsets`, which must ascend, and by `sizes` (bytes). `are_scattered` means
        that they are a few of many: then large gaps between them are not read. Raises DamageError if a record crosses
        the end of its segment, or if its size is not valid for a record. Raises StoreChangedError if a record's segment
        does not exist.
        """
        ends = physical_offsets + sizes
        first, count = 0, len(physical_offsets)
        while first < count:
            segment = self._segment_of(int(physical_offsets[first]))
            begin = int(physical_offsets[first])
            room = WINDOW_BYTES if self._mapped else _COPY_BYTES
            limit = max(segment.end if are_scattered else min(segment.end, begin + room), int(ends[first]))
            last = int(np.searchsorted(ends, limit, side="right"))
            are_far = False
            if are_scattered and last > first:
                taken, are_far = self._scatter(physical_offsets[first:last], ends[first:last])
                last = first + taken
            if last <= first or int(ends[first]) > segment.end:
                raise self._bad_size(segment, begin, int(sizes[first]))
            chosen = slice(first, last)
            if int(sizes[chosen].min()) < MIN_RECORD_BYTES:
                bad = first + int(np.argmin(sizes[chosen]))
                raise self._bad_size(segment, int(physical_offsets[bad]), int(sizes[bad]))
            if self._mapped and not are_far:
                window = self._map(segment, begin, int(ends[last - 1]))
                end = int(ends[last - 1])
                if int(sizes[chosen].sum()) * _SPARSE > end - begin:
                    window.prepare(begin - segment.begin, end - segment.begin)
                positions = physical_offsets[chosen] - (segment.begin + window.begin)
                yield Stretch(first, last, window.data, positions, window)
            else:
                yield self._copy(segment, physical_offsets[chosen], sizes[chosen], first)
            first = last

    def _scatter(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[int, bool]:
        """Return how many of the records form the next stretch, and whether to leave out the gaps between them.

        All of the records are in one segment.
        """
        gaps = begins[1:] - ends[:-1]
        is_apart = gaps > self._gap_bytes
        copied = np.cumsum(ends - begins)
        copied[1:] += np.cumsum(np.where(is_apart, 0, gaps))
        count = max(int(np.searchsorted(copied, _COPY_BYTES, side="right")), 1)
        total, extent = int(copied[count - 1]), int(ends[count - 1] - begins[0])
        reads = 1 + int(np.count_nonzero(is_apart[: count - 1]))
        is_little = reads <= _FEW_READS and total <= reads * _GAP_BYTES
        if not self._mapped or is_little or (total * 2 < extent and reads * _READ_BYTES <= extent):
            return count, True
        return max(int(np.searchsorted(ends[:count], begins[0] + WINDOW_BYTES, side="right")), 1), False

    def _segment_of(self, physical_offset: int) -> Segment:
        segment = self.segments.holding(physical_offset)
        if segment is None:
            self.refresh()  # the segment may be new
            segment = self.segments.holding(physical_offset)
        if segment is None and self._lacks(physical_offset):
            raise StoreChangedError(
                f"no segment has physical offset {physical_offset}, and segments before and after it exist: "
                f"{self.missing_segment(physical_offset)} is missing. Restore it from a copy of the store; "
                "rmq_spark.check shows what else is affected."
            )
        if segment is None:
            raise StoreChangedError(
                f"no segment of {', '.join(self._folders)} has physical offset {physical_offset}: the log has "
                f"[{self.segments.begin}, {self.segments.end}). Retention deleted it, or since the query was planned "
                "the store was moved, rebuilt or replaced."
            )
        return segment

    def _bad_size(self, segment: Segment, begin: int, size: int) -> DamageError:
        room = segment.end - begin
        expected = f"{MIN_RECORD_BYTES} to {room} bytes"
        return DamageError(
            "size of a record in its consume-queue entry", segment.path, begin - segment.begin, expected, size
        )

    def _map(self, segment: Segment, begin: int, end: int) -> MappedWindow:
        """Return a mapped window with the bytes [begin, end) of the log. Reuse the last window if it contains them."""
        begin, end = begin - segment.begin, end - segment.begin
        if self._window is not None:
            mapped, window = self._window
            if mapped.path == segment.path and window.begin <= begin and end <= window.end:
                return window
            window.close()
            self._window = None
        file = self._open(segment)
        # Readers read a full header even if the record is shorter. The read stays within the segment, because a filler
        # of at least 8 bytes ends each segment.
        window = MappedWindow(file, begin, min(max(begin + WINDOW_BYTES, end), segment.size), mapped=True)
        self._window = segment, window
        return window

    def _copy(
        self,
        segment: Segment,
        physical_offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
        first: int,
    ) -> Stretch:
        """Copy records that have large gaps, but not the gaps."""
        begins, ends = physical_offsets - segment.begin, physical_offsets - segment.begin + sizes
        firsts = np.flatnonzero(np.append(True, begins[1:] - ends[:-1] > self._gap_bytes))
        run_begins, run_ends = begins[firsts], ends[np.append(firsts[1:], len(ends)) - 1]
        run_sizes = run_ends - run_begins
        starts = np.cumsum(run_sizes) - run_sizes
        buffer = np.empty(int(run_sizes.sum()), np.uint8)
        target, file = buffer.data, self._open(segment)
        for at, start, size in zip(run_begins.tolist(), starts.tolist(), run_sizes.tolist(), strict=True):
            file.read_into(at, target[start : start + size])
        counts = np.diff(np.append(firsts, len(ends)))
        positions = begins + np.repeat(starts - run_begins, counts)
        return Stretch(first, first + len(begins), buffer, positions, None)

    def _open(self, segment: Segment) -> OpenFile:
        if self._file is None or self._file.path != segment.path:
            self.close()
            self._file = OpenFile(segment.path)
        return self._file


assert RECORD_HEAD.itemsize <= MIN_RECORD_BYTES  # so reading a header never reads beyond its record
