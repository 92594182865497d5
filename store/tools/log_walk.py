"""Scan of the commit log that continues after damage. It returns blocks of complete records, and faults.

A walk goes from record to record by their lengths, as recovery does. If it finds bytes that are not a record, it
searches for the next certain position, and continues there. A position is certain if it has a complete record that
contains its own physical offset, or a filler that ends at the end of its segment. The bytes that are skipped are a
fault. A walk does not use store times or consume-queue entries, so its caller must determine where the log ends.

`TolerantCommitLog` lists the segments. Readers, writers and brokers refuse a log that has a foreign file, or files of
different lengths. `TolerantCommitLog` lists such files in `odd`, and reads the others. `TolerantTopics` lists queues
even if topics.json cannot be read.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.errors import StoreChangedError, StoreError
from rmq_spark.store.format.delay_levels import DelayLevels
from rmq_spark.store.format.file_names import parse_segment_name, segment_name
from rmq_spark.store.format.record import (
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    RECORD_HEAD,
    Blank,
    Record,
    Torn,
    decode_record,
)
from rmq_spark.store.format.record_batch import NotWholeError, RecordColumns, WholeRecords, split_records, walk_records
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.segments import Segment, SegmentRun
from rmq_spark.store.log.topics import FoundTopics, TopicTable
from rmq_spark.store.tools.finding import field_position


@dataclass(frozen=True, slots=True)
class OddFile:
    """A file in a folder of segments that keeps a broker from starting. `expected` and `found` say why."""

    path: str
    expected: str
    found: str


def list_tolerantly(*folders: str) -> tuple[SegmentRun, list[OddFile]]:
    """Return the segments in `folders` that can be read, in order, and the files that do not belong there.

    Such a file is foreign, or has another length than most segments, or a name that does not fit. A segment with
    another length is in both results, and is read up to its end. An empty last file is in neither, because a writer is
    creating it.
    """
    named, odd = _list_files(folders)
    lengths = Counter(segment.size for segment in named if segment.size)
    usual = max(lengths, key=lambda size: (lengths[size], size)) if lengths else 0
    sound: list[Segment] = []
    for segment in named:
        if segment.size != usual:
            odd.append(OddFile(segment.path, f"{usual} bytes, like its neighbours", str(segment.size)))
        if sound and segment.begin < sound[-1].end:
            odd.append(OddFile(segment.path, f"a name of at least {sound[-1].end}", str(segment.begin)))
            continue
        if usual and segment.begin % usual:
            odd.append(OddFile(segment.path, f"a name that is a multiple of {usual}", str(segment.begin)))
            continue
        if segment.size:
            sound.append(Segment(segment.begin, min(segment.size, usual), segment.path))
    return SegmentRun(tuple(sound), usual), odd


def _list_files(folders: tuple[str, ...]) -> tuple[list[Segment], list[OddFile]]:
    """Return the files that have the name of a segment, in order, and the files and folders that do not belong there.

    An empty last file is not included.
    """
    named: list[Segment] = []
    odd = []
    for folder in folders:
        for name, is_folder in files.list_folder(folder):
            path = files.join(folder, name)
            begin = parse_segment_name(name)
            if is_folder:  # a broker ignores all folders; report only one that has the name of a segment
                odd += [] if begin is None else [OddFile(path, "a file", "a folder")]
            elif begin is None:
                odd.append(OddFile(path, "a name of 20 digits", name))
            elif (size := files.file_size(path)) >= 0:
                named.append(Segment(begin, size, path))
    named.sort(key=lambda segment: segment.begin)
    if named and named[-1].size == 0:
        named.pop()
    return named, odd


class TolerantCommitLog(CommitLog):
    """A commit log with the segments that can be read. `odd` lists the files that do not belong there.

    Not thread-safe. Segments are not mapped into memory. Call `close` when done.
    """

    def __init__(self, folders: tuple[str, ...]) -> None:
        self.odd: list[OddFile] = []
        super().__init__(folders, mapped=False)

    def refresh(self) -> None:
        """List the files again, and set `segments` and `odd`."""
        self.close()
        self.segments, self.odd = list_tolerantly(*self._folders)

    def missing_path(self, physical_offset: int) -> str:
        """Return the path of the missing segment that would contain `physical_offset`."""
        run = self.segments
        neighbour = next((one for one in reversed(run.segments) if one.end <= physical_offset), None)
        neighbour = neighbour or next(iter(run.segments), None)
        folder = files.parent(neighbour.path) if neighbour else self._folders[0]
        return files.join(folder, segment_name(physical_offset - physical_offset % max(run.size, 1)))


_BLOCK_BYTES = 8 << 20  # bytes that are read at once; bounds memory
_WINDOW_BYTES = 1 << 20  # bytes that are searched at once for the next record
_OFFSET_AT = field_position(RECORD_HEAD, "physical_offset")
_MAGIC_AT = field_position(RECORD_HEAD, "magic")
_MAGICS = tuple(magic.to_bytes(4, "big") for magic in (MAGIC_V1, MAGIC_V2, MAGIC_BLANK))


@dataclass(frozen=True, slots=True)
class LogBlock:
    """Consecutive complete records. `columns` has their fields, `whole` the bytes and the positions of their parts."""

    columns: RecordColumns
    whole: WholeRecords
    begin: int  # physical offset of the first byte of `whole.data`
    end: int  # physical offset after the last record; `whole.data` may continue with a part of the next one


@dataclass(frozen=True, slots=True)
class LogFault:
    """Bytes of the log that are not records, at the physical offsets [begin, end).

    `expected` and `found` describe what should be at `begin`, and what is there.
    """

    begin: int
    end: int
    expected: str
    found: str


class LogWalk:
    """One scan of the commit log. Not thread-safe.

    `physical_offset` is the position that the scan has reached, and `records` is how many records it has read.
    """

    def __init__(self, log: TolerantCommitLog, levels: DelayLevels) -> None:
        self._log, self._levels = log, levels
        self.physical_offset = 0
        self.records = 0
        self._is_over = False  # set if the scan has no given end and no more records follow

    def run(self, begin: int, end: int | None) -> Iterator[LogBlock | LogFault]:
        """Yield the blocks and faults at the physical offsets [begin, end), in order.

        If `end` is None, the scan ends where no more records follow. Segments that retention deletes meanwhile are
        skipped. Raises StoreChangedError if a segment becomes shorter meanwhile.
        """
        self.physical_offset = begin
        while not self._is_over and (end is None or self.physical_offset < end):
            segment = self._log.segments.holding(self.physical_offset)
            if segment is None:
                segments = self._log.segments.segments
                later = next((one for one in segments if one.begin >= self.physical_offset), None)
                if later is None or (end is not None and later.begin >= end):
                    return
                yield LogFault(self.physical_offset, later.begin, "a segment", "none")
                self.physical_offset = later.begin
                continue
            try:
                yield from self._step(segment, segment.end if end is None else min(end, segment.end), end is None)
            except StoreChangedError:
                self._log.refresh()
                if self._log.segments.begin <= segment.begin:
                    raise
                self.physical_offset = self._log.segments.begin

    def _step(self, segment: Segment, stop: int, is_open: bool) -> Iterator[LogBlock | LogFault]:
        begin = self.physical_offset
        data = self._log.bytes_at(begin, min(_BLOCK_BYTES, stop - begin))
        positions, size = walk_records(data)
        if len(positions):
            yield from self._blocks(segment, stop, data, positions, size, is_open)
            return
        record = self._log.record_at(begin)
        if isinstance(record, Blank):
            if record.remaining_size != segment.end - begin:
                yield LogFault(begin, begin, f"a filler of {segment.end - begin} bytes", f"{record.remaining_size}")
            self.physical_offset = segment.end
        elif isinstance(record, Record) and record.total_size <= stop - begin:  # larger than a block
            data = self._log.bytes_at(begin, record.total_size)
            yield from self._blocks(segment, stop, data, np.zeros(1, np.int64), record.total_size, is_open)
        else:
            found = record.why if isinstance(record, Torn) else "a record that extends past the log's end"
            yield from self._skip_fault(segment, begin, stop, found, is_open)

    def _blocks(
        self, segment: Segment, stop: int, data: bytes, positions: NDArray[np.int64], size: int, is_open: bool
    ) -> Iterator[LogBlock | LogFault]:
        """Yield a block of the records at `positions` in `data`, which end at `size`.

        If one of them is not complete, yields a block of the records before it, and then the fault.
        """
        count, end = len(positions), size
        begin = self.physical_offset
        while count:
            try:
                part = positions[:count]
                columns = split_records(data, part, end, begin, self._levels)
                whole = WholeRecords.of(np.frombuffer(data, np.uint8), part, np.append(part[1:], end))
            except NotWholeError as fault:  # its row is the first with one kind of fault; earlier rows may have others
                count, end = fault.row, int(positions[fault.row])
                continue
            self.records += count
            yield LogBlock(columns, whole, begin, begin + end)
            break
        self.physical_offset = begin + end
        if count < len(positions):
            record = decode_record(data[end:])
            if isinstance(record, Record) and record.physical_offset != self.physical_offset:
                found = f"a record with physical offset {record.physical_offset}"
            else:
                found = record.why if isinstance(record, Torn) else "another record"
            yield from self._skip_fault(segment, self.physical_offset, stop, found, is_open)

    def _skip_fault(self, segment: Segment, begin: int, stop: int, found: str, is_open: bool) -> Iterator[LogFault]:
        """Move to the next certain position, and yield the fault before it.

        If the scan has no given end (`is_open`) and no record follows, these bytes are after the log's end. Then yields
        nothing, and the scan ends at `begin`.
        """
        self.physical_offset = self._next_record(segment, begin + 1, stop)
        if is_open and self.physical_offset == segment.end:
            later = (one for one in self._log.segments.segments if one.begin > segment.begin)
            if not any(isinstance(self._log.record_at(one.begin), Record) for one in later):
                self.physical_offset, self._is_over = begin, True
                return
        yield LogFault(begin, self.physical_offset, "a record", found)

    def _next_record(self, segment: Segment, begin: int, stop: int) -> int:
        """Return the physical offset of the first certain record or filler in [begin, stop), or `stop`."""
        at = begin
        while at < stop:
            window = self._log.bytes_at(at, min(_WINDOW_BYTES, stop - at))
            found = [self._find_certain(window, at, segment, magic) for magic in _MAGICS]
            first = min((one for one in found if one is not None), default=None)
            if first is not None:
                return first
            at += max(len(window) - RECORD_HEAD.itemsize, 1) if len(window) == _WINDOW_BYTES else len(window)
            if not window:
                return stop
        return stop

    def _find_certain(self, window: bytes, begin: int, segment: Segment, magic: bytes) -> int | None:
        """Return the physical offset of the first certain record or filler with this magic in a window of bytes.

        `begin` is the physical offset of the window. Returns None if the window has no such record or filler.
        """
        at = window.find(magic)
        while at >= 0:
            position, physical_offset = at - _MAGIC_AT, begin + at - _MAGIC_AT
            if position >= 0:
                if int.from_bytes(magic, "big") == MAGIC_BLANK:
                    size = int.from_bytes(window[position : position + 4], "big", signed=True)
                    is_certain = size == segment.end - physical_offset
                else:
                    own = int.from_bytes(window[position + _OFFSET_AT : position + _OFFSET_AT + 8], "big")
                    is_certain = own == physical_offset and isinstance(self._log.record_at(physical_offset), Record)
                if is_certain:
                    return physical_offset
            at = window.find(magic, at + 1)
        return None


def written_bytes(segment: Segment, physical_offset: int) -> int:
    """Return how many bytes of a segment were written at or above a physical offset.

    Bytes are counted by the file's extents that have data, so zeros beside other data are counted, too. Returns 0 if
    retention deletes the segment meanwhile.
    """
    first = max(physical_offset - segment.begin, 0)
    if first >= segment.size:
        return 0
    try:
        return sum(end - begin for begin, end in files.data_extents(segment.path, first, segment.size))
    except StoreChangedError:
        return 0


class TolerantTopics(TopicTable):
    """The queues that have a folder, even if topics.json cannot be read. `check_config` reports such a topics.json."""

    def look_at_configs(self) -> None:
        """Read topics.json again if it has changed. If it cannot be read, treat it as missing."""
        try:
            super().look_at_configs()
        except StoreError:
            self._found = FoundTopics()
