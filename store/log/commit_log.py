"""The commit log for readers: bytes by physical offset, one record, many records at once.

Windows of the segments are mapped, or copied where the file system or the user forbids mapping. What leaves
here as `Stretch.buffer` may be such a window: `Stretch.check` must be asked before anything computed from it
is believed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.disk.window import WINDOW_BYTES, Window
from rmq_spark.store.errors import DamageError, StoreChangedError
from rmq_spark.store.format.filenames import segment_name
from rmq_spark.store.format.record import (
    BLANK_BYTES,
    MAX_RECORD_BYTES,
    MIN_RECORD_BYTES,
    RECORD_HEAD,
    Blank,
    Record,
    Torn,
    decode_record,
)
from rmq_spark.store.log.segments import Segment, SegmentRun, list_segments

_COPY_BYTES = 16 << 20  # of one stretch where nothing is mapped: bounds memory
_SPARSE = 32  # records that fill less than one part in so many of their stretch leave most pages untouched
_GAP_BYTES = 64 << 10  # records nearer than this are copied together: a seek costs about as much
_NEAR_BYTES = 4 << 10  # the same where files are local: what lies between is on the pages of one of the two anyway
_READ_BYTES = 32 << 10  # of a mapped file are looked through in the time that one more read takes
_FEW_READS = 16  # are done sooner than a window is mapped


@dataclass(frozen=True, slots=True)
class Stretch:
    """Records [first, last) of those asked for: they lie at `positions` (bytes) in `buffer`."""

    first: int
    last: int
    buffer: NDArray[np.uint8]
    positions: NDArray[np.int64]
    window: Window | None

    def check(self) -> None:
        """Raise StoreChangedError if the file shrank since: then the buffer may be zeros."""
        if self.window is not None:
            self.window.check()


class CommitLog:
    """The segments of a commit log. One thread at a time; `close` it.

    Raises StoreChangedError for bytes that no file has: retention, or a broker's truncation, took them.
    """

    def __init__(self, folders: tuple[str, ...], *, mapped: bool) -> None:
        self._folders, self._mapped = folders, mapped
        self._gap_bytes = _NEAR_BYTES if mapped else _GAP_BYTES
        self._file: OpenFile | None = None
        self._window: tuple[Segment, Window] | None = None
        self.segments = SegmentRun((), 0)
        self.look()

    def look(self) -> None:
        """List the segments again; files that were open are opened anew, for their names may mean others now."""
        self.close()
        self.segments = list_segments(*self._folders)

    def is_begin_there(self) -> bool:
        """Say whether the oldest segment is still there, or where there was none, still none is."""
        if not self.segments.segments:
            return not list_segments(*self._folders).segments
        return files.file_size(self.segments.segments[0].path) >= 0

    def has_file_at(self, begin: int) -> bool:
        """Say whether there is by now a segment that begins at a physical offset, and is more than just being made."""
        name = segment_name(begin)
        return any(files.file_size(files.join(folder, name)) > 0 for folder in self._folders)

    def _lacks(self, physical_offset: int) -> bool:
        """Say whether a segment between the others is missing there."""
        run = self.segments
        return run.begin <= physical_offset < run.end and run.holding(physical_offset) is None

    def missing_segment(self, physical_offset: int) -> str:
        """Return the path that the segment of a physical offset between the segments should have."""
        before = [segment for segment in self.segments.segments if segment.begin <= physical_offset][-1]
        name = segment_name(physical_offset - (physical_offset - before.begin) % self.segments.size)
        return files.join(files.parent(before.path), name)

    def close(self) -> None:
        """Close what is open; reading opens it again."""
        if self._window is not None:
            self._window[1].close()
            self._window = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def bytes_at(self, physical_offset: int, size: int) -> bytes:
        """Return up to `size` bytes: fewer at the end of the segment, none where there is no segment."""
        segment = self.segments.holding(physical_offset)
        if segment is None:
            return b""
        position = physical_offset - segment.begin
        return self._open(segment).read(position, min(size, segment.size - position))

    def record_at(self, physical_offset: int) -> Record | Blank | Torn:
        """Decode what stands at a physical offset, and compare its own physical offset with it."""
        head = self.bytes_at(physical_offset, 4096)
        if not head and self._lacks(physical_offset):
            return Torn(f"nothing: {self.missing_segment(physical_offset)} is missing, rmq_spark.check says more")
        size = int.from_bytes(head[:4], "big", signed=True) if len(head) >= BLANK_BYTES else 0
        if len(head) < size <= MAX_RECORD_BYTES and int.from_bytes(head[4:8], "big"):
            head = self.bytes_at(physical_offset, size)
        found = decode_record(head)
        if isinstance(found, Record) and found.physical_offset != physical_offset:
            return Torn(f"a record that says of itself that it lies at {found.physical_offset}")
        return found

    def stretches(
        self,
        physical_offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
        *,
        are_scattered: bool = False,
    ) -> Iterator[Stretch]:
        """Cut ascending records into stretches that lie in one buffer each.

        Where they `are_scattered`, some of many, and lie far apart, what is between them is left alone. Raises
        DamageError for a record that crosses its segment's end or whose size no record can have.
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
        """Return how many of the records, all of one segment, make a stretch, and whether they lie far apart."""
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
            self.look()  # it may have been made since
            segment = self.segments.holding(physical_offset)
        if segment is None and self._lacks(physical_offset):
            raise StoreChangedError(
                f"no segment holds physical offset {physical_offset}, though there are segments before and behind it: "
                f"{self.missing_segment(physical_offset)} is missing. Put it back from a copy of the store; "
                "rmq_spark.check says what else is concerned."
            )
        if segment is None:
            raise StoreChangedError(
                f"no segment of {', '.join(self._folders)} holds physical offset {physical_offset}: they hold "
                f"[{self.segments.begin}, {self.segments.end}). Retention deleted it, or the store was moved, "
                "rebuilt or is another one than the plan was made for."
            )
        return segment

    def _bad_size(self, segment: Segment, begin: int, size: int) -> DamageError:
        room = segment.end - begin
        expected = f"{MIN_RECORD_BYTES} to {room} bytes"
        return DamageError("the size of a record in its unit", segment.path, begin - segment.begin, expected, size)

    def _map(self, segment: Segment, begin: int, end: int) -> Window:
        """Return a mapped window with the bytes [begin, end) of the log: the last one if it has them."""
        begin, end = begin - segment.begin, end - segment.begin
        if self._window is not None:
            held, window = self._window
            if held.path == segment.path and window.begin <= begin and end <= window.end:
                return window
            window.close()
            self._window = None
        file = self._open(segment)
        # A head is gathered whole even from the shortest record, which never reaches past its segment's BLANK.
        window = Window(file, begin, min(max(begin + WINDOW_BYTES, end), segment.size), mapped=True)
        self._window = segment, window
        return window

    def _copy(
        self,
        segment: Segment,
        physical_offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
        first: int,
    ) -> Stretch:
        """Copy records that lie far apart without what is between them."""
        begins, ends = physical_offsets - segment.begin, physical_offsets - segment.begin + sizes
        heads = np.flatnonzero(np.append(True, begins[1:] - ends[:-1] > self._gap_bytes))
        run_begins, run_ends = begins[heads], ends[np.append(heads[1:], len(ends)) - 1]
        run_sizes = run_ends - run_begins
        starts = np.cumsum(run_sizes) - run_sizes
        buffer = np.empty(int(run_sizes.sum()), np.uint8)
        target, file = buffer.data, self._open(segment)
        for at, start, size in zip(run_begins.tolist(), starts.tolist(), run_sizes.tolist(), strict=True):
            file.read_into(at, target[start : start + size])
        counts = np.diff(np.append(heads, len(ends)))
        positions = begins + np.repeat(starts - run_begins, counts)
        return Stretch(first, first + len(begins), buffer, positions, None)

    def _open(self, segment: Segment) -> OpenFile:
        if self._file is None or self._file.path != segment.path:
            self.close()
            self._file = OpenFile(segment.path)
        return self._file


assert RECORD_HEAD.itemsize <= MIN_RECORD_BYTES  # a gathered head lies in its record
