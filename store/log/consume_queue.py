"""Consume queue for readers: the entries of one queue, which point to the records of its messages, in queue order.

Entries have a fixed size and fill a row of files (segments). The position of an entry is its number times its size. The
first entry that the queue ever had has number 0, so a queue whose oldest files were deleted begins at a higher number.

The files have one of two layouts, which look the same to callers. In a consume queue (20-byte entries) the number of an
entry is its queue offset. In a batch consume queue (46-byte entries, 5.x) an entry holds one or several messages, and
contains the queue offset of the first.

This module does not verify entries, because that requires reading their records.
Source: ConsumeQueue, BatchConsumeQueue (5.3).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, StoreChangedError, StoreError
from rmq_spark.store.format.consume_queue_entry import BATCH_UNIT, QUEUE_UNIT, is_blank_fill, is_written
from rmq_spark.store.format.record import Record
from rmq_spark.store.log.segments import Segment, SegmentRun, list_segments
from rmq_spark.store.model import QueueKey


class EntryFiles:
    """The files with the entries of one queue. They are listed when they are first needed after a `refresh`.

    Not thread-safe. At most one file is open: the one that was read last.
    """

    def __init__(self, folder: str, layout: np.dtype[np.void]) -> None:
        self.folder, self.layout = folder, layout
        self._file: OpenFile | None = None
        self._listed: SegmentRun | None = None

    def refresh(self) -> None:
        """Discard the list of files.

        It is made again only when it is needed, because a store has thousands of queues.
        """
        self._listed = None
        self.close()

    def fault(self) -> StoreError | None:
        """Return the error if the names or sizes of the files are wrong. Return None if they are valid.

        Also returns the error if the kernel cannot list the folder; `is_unreadable` is true for that error.
        """
        try:
            self._listed = self._run
        except StoreError as error:
            return error
        return None

    def is_damaged(self) -> bool:
        """Return whether the names or sizes of the files are wrong.

        Raises StoreError if the kernel cannot list the folder, because it is then unknown which entries exist.
        """
        fault = self.fault()
        if fault is not None and is_unreadable(fault):
            raise fault
        return fault is not None

    @property
    def _run(self) -> SegmentRun:
        if self._listed is None:
            self._listed = self._list()
        return self._listed

    def _list(self) -> SegmentRun:
        run = list_segments(self.folder)
        if run.size % self.layout.itemsize:
            raise DamageError(
                "length of a consume-queue file",
                run.segments[0].path,
                0,
                f"a multiple of {self.layout.itemsize} bytes",
                run.size,
            )
        return run

    def close(self) -> None:
        """Close the open file, if any. The next read opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Return the files, ordered by the numbers of their entries."""
        return self._run.segments

    @property
    def begin(self) -> int:
        """Return the number of the first entry that has a file."""
        return -(-self._run.begin // self.layout.itemsize)

    @property
    def end(self) -> int:
        """Return the number after the last entry for which the files have room, whether it was written or not."""
        return self._run.end // self.layout.itemsize

    def has_around(self, number: int) -> bool:
        """Return whether the files are listed, and one has room for the entries `number` - 1 and `number`."""
        if self._listed is None:
            return False
        size = self.layout.itemsize
        segment = self._listed.holding((number - 1) * size)
        return segment is not None and (number + 1) * size <= segment.end

    def path_of(self, number: int) -> tuple[str, int]:
        """Return the path of the file that contains an entry, and the entry's position in the file (bytes).

        Error messages use this. If no file contains the entry, return the folder, and the position in the queue.
        """
        position = number * self.layout.itemsize
        segment = self._run.holding(position)
        return (segment.path, position - segment.begin) if segment else (self.folder, position)

    def read(self, begin: int, end: int) -> NDArray[np.void]:
        """Return a copy of the entries with the numbers [begin, end). Entries after the last file are left out.

        Raises StoreChangedError if a file was deleted or truncated.
        """
        size = self.layout.itemsize
        position, stop = begin * size, min(end, self.end) * size
        parts = []
        while position < stop:
            segment = self._run.holding(position)
            if segment is None:
                raise StoreChangedError(
                    f"cannot read entry {position // size} of {self.folder}: its file was deleted. Plan the read again."
                )
            until = min(stop, segment.end)
            data = self._open(segment).read(position - segment.begin, until - position)
            if len(data) < until - position:
                raise StoreChangedError(
                    f"cannot read {segment.path}: it was truncated during the read; expected {segment.size} bytes. "
                    "Plan the read again."
                )
            parts.append(data)
            position = until
        return np.frombuffer(b"".join(parts), self.layout)

    def first_where(self, begin: int, end: int, holds: Any) -> int:
        """Return the number of the first entry in [begin, end) for which `holds(entry)` is true.

        Return `end` if none is.

        This is a binary search, so `holds` must be false up to some entry and true for all later ones. Raises
        StoreChangedError if a file was deleted or truncated.
        """
        while begin < end:
            middle = (begin + end) // 2
            found = self.read(middle, middle + 1)
            if not len(found):
                raise StoreChangedError(
                    f"cannot read entry {middle} of {self.folder}: its file was deleted. Plan the read again."
                )
            if holds(found[0]):
                end = middle
            else:
                begin = middle + 1
        return begin

    def _open(self, segment: Segment) -> OpenFile:
        if self._file is None or self._file.path != segment.path:
            self.close()
            try:
                self._file = OpenFile(segment.path)
            except StoreChangedError:
                self._listed = None  # retention deleted the file: list the others at the next call
                raise
        return self._file


_CHUNK_ENTRIES = 1 << 16
_RECOVERED_FILES = 3  # when a broker starts, it reads this many files at the end of each queue


@dataclass(frozen=True, slots=True)
class Entries:
    """Consecutive or chosen entries of one queue, in order, as int64 arrays of the same length. Sizes are in bytes."""

    physical_offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    tags_codes: NDArray[np.int64]
    queue_offsets: NDArray[np.int64]  # queue offset of each record's first message
    message_counts: NDArray[np.int64] | None  # messages in each record; None if each record has one

    def __len__(self) -> int:
        return len(self.sizes)

    def equals(self, other: "Entries") -> bool:
        """Return whether all columns are equal."""
        return all(np.array_equal(getattr(self, one.name), getattr(other, one.name)) for one in fields(self))

    def part(self, begin: int, end: int) -> "Entries":
        """Return the entries [begin, end) of these, counted from 0."""
        return self.take(slice(begin, end))

    def take(self, chosen: slice | NDArray[np.intp] | NDArray[np.bool_]) -> "Entries":
        """Return the entries that a slice, an array of indexes (from 0) or a mask chooses."""
        counts = self.message_counts
        return Entries(
            self.physical_offsets[chosen],
            self.sizes[chosen],
            self.tags_codes[chosen],
            self.queue_offsets[chosen],
            None if counts is None else counts[chosen],
        )

    @classmethod
    def joined(cls, parts: "Sequence[Entries]") -> "Entries":
        """Return the entries of all parts, in order. There must be at least one part, all from one kind of queue."""
        if len(parts) == 1:
            return parts[0]
        counts = [part.message_counts for part in parts if part.message_counts is not None]
        return cls(
            np.concatenate([part.physical_offsets for part in parts]),
            np.concatenate([part.sizes for part in parts]),
            np.concatenate([part.tags_codes for part in parts]),
            np.concatenate([part.queue_offsets for part in parts]),
            np.concatenate(counts) if counts else None,
        )


class ConsumeQueue:
    """A consume queue with one message per entry. Not thread-safe; `run` keeps at most one file open."""

    layout = QUEUE_UNIT
    are_batches = False  # whether an entry may hold several messages

    def __init__(self, key: QueueKey, folder: str) -> None:
        self.key = key
        self.run = EntryFiles(folder, self.layout)

    def read(self, begin: int, end: int) -> Entries:
        """Return the entries with the numbers [begin, end). Entries after the last file are left out."""
        raw = self.run.read(begin, end)
        return self.entries_of(raw, np.arange(begin, begin + len(raw)))

    @staticmethod
    def entries_of(raw: NDArray[np.void], queue_offsets: NDArray[np.int64]) -> Entries:
        """Return the entries `raw` of 20 bytes, which have these queue offsets, as columns."""
        return Entries(
            raw["physical_offset"].astype(np.int64),
            raw["record_size"].astype(np.int64),
            raw["tags_code"].astype(np.int64),
            queue_offsets,
            None,
        )

    def are_written(self, entries: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return for each entry whether it was written.

        Fill is treated as written. It consists of entries without a message, before a queue's first message.
        """
        written: NDArray[np.bool_] = entries["record_size"] > 0
        return written

    def is_written(self, number: int) -> bool:
        """Return whether the entry with this number was written. False if it has no file."""
        return bool(self.are_written(self.run.read(number, number + 1)).any())

    def written_end(self, known: int) -> int:
        """Return the number after the last written entry. All entries with numbers below `known` must be written.

        Entries are not compared with their records, so the last ones may be stale or partly written.
        """
        step = 64
        while known < self.run.end:
            until = min(known + step, self.run.end)
            unwritten = np.flatnonzero(~self.are_written(self.run.read(known, until)))
            if len(unwritten):
                return known + int(unwritten[0])
            known, step = until, min(step * 8, _CHUNK_ENTRIES)
        return known

    def search_written_end(self) -> int:
        """Return the number after the last written entry, found by binary search.

        After a power cut, a file may be only partly filled although another file follows, with or without entries. The
        queue then ends in the first partly filled file among the last three files (ConsumeQueue#recover, 4.9 and 5.3).
        """
        end = self.run.first_where(self.run.begin, self.run.end, lambda entry: not self.are_written(entry))
        for segment in self.run.segments[-_RECOVERED_FILES:]:
            first, until = -(-segment.begin // self.layout.itemsize), segment.end // self.layout.itemsize
            if first < until < end and not self.are_written(self.run.read(until - 1, until)).all():
                return self.run.first_where(first, until, lambda entry: not self.are_written(entry))
        return end

    def last_place(self) -> int:
        """Return the physical offset in the last written entry. Return -1 if the queue has no entry."""
        end = self.search_written_end()
        last = self.read(max(end - 1, self.run.begin), end).physical_offsets
        self.run.close()
        return int(last[-1]) if len(last) else -1

    def refuse_hole_before(self, first: int, log_begin: int) -> None:
        """Raise DamageError if the entry before the first readable one should be readable too.

        The entry need not be readable if it is fill, or if its message has expired because its record is before
        `log_begin`, the physical offset where the log begins. `first` is the number of the first readable entry. If the
        log has lost nothing (`log_begin` is 0), a queue of 20-byte entries must begin at entry 0.
        """
        if first == self.run.begin:
            if first and not log_begin and self.layout is QUEUE_UNIT:
                raise DamageError(f"first file of queue {self.key}", self.run.folder, 0, "0" * 20, "no such file")
            return
        before = self.run.read(first - 1, first)
        physical_offset, size = int(before["physical_offset"][0]), int(before["record_size"][0])
        if not is_blank_fill(before)[0] and not (size > 0 and 0 <= physical_offset < log_begin):
            path, position = self.run.path_of(first - 1)
            expected = f"fill, or a record below physical offset {log_begin}"
            what = f"the entry before the first readable one of queue {self.key}"
            raise DamageError(what, path, position, expected, (physical_offset, size))

    def refuse_wrong_begin(self, first: int, end: int, log_begin: int, record_at: Callable[[int], object]) -> None:
        """Raise DamageError if the first entry of [first, end) has a queue offset that its queue cannot have.

        `record_at` returns the record at a physical offset. This method never raises for a queue of 20-byte entries,
        because the queue offset of such an entry is its number.
        """

    def end_for(self, offset: int) -> int:
        """Return an entry number up to which all entries are written, enough to read up to queue offset `offset`.

        This is `offset` itself if the entry before it was written. Otherwise it is the number after the last written
        entry.
        """
        return offset if offset > self.run.begin and self.is_written(offset - 1) else self.search_written_end()

    def first_from(self, physical_offset: int, end: int) -> int:
        """Return the number of the first entry below `end` whose record is at or after `physical_offset`.

        Return `end` if there is none. Fill is treated as if it were before every record. Source:
        ConsumeQueue#correctMinOffset (5.3).
        """

        def reached(entry: Any) -> bool:
            return bool(entry["physical_offset"] >= physical_offset and not is_blank_fill(entry))

        first = self.run.read(self.run.begin, min(self.run.begin + 1, end))
        if len(first) and reached(first[0]):
            return self.run.begin  # nothing has expired, so the usual case needs no search
        return self.run.first_where(self.run.begin, end, reached)

    def offset_of(self, number: int, end: int) -> int:
        """Return the queue offset of the first message of entry `number`.

        `end` is the number after the queue's last entry.
        """
        return number

    def unit_of(self, offset: int, end: int) -> int:
        """Return the number of the entry that holds the message at queue offset `offset`.

        `end` is the number after the queue's last entry. `offset` must be below the queue offset of the queue's end.
        """
        return offset

    def offset_behind(self, entries: Entries, number: int) -> int:
        """Return the queue offset after the last of `entries`. `number` is the number after the last scanned entry."""
        return number


class BatchConsumeQueue(ConsumeQueue):
    """The queue of a topic with `queue.type=BatchCQ`, in which an entry may hold many messages."""

    layout = BATCH_UNIT
    are_batches = True

    def read(self, begin: int, end: int) -> Entries:
        """Return the entries with the numbers [begin, end). Entries after the last file are left out."""
        raw = self.run.read(begin, end)
        return Entries(
            raw["physical_offset"].astype(np.int64),
            raw["record_size"].astype(np.int64),
            raw["tags_code"].astype(np.int64),
            raw["base_offset"].astype(np.int64),
            raw["message_count"].astype(np.int64),
        )

    def are_written(self, entries: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return for each entry whether it was written completely."""
        return is_written(entries)

    def refuse_wrong_begin(self, first: int, end: int, log_begin: int, record_at: Callable[[int], object]) -> None:
        """Raise DamageError if the first entry of [first, end) does not have the queue offset of its record.

        If the log has lost nothing (`log_begin` is 0), the entry must have queue offset 0.
        """
        entries = self.read(first, min(first + 1, end))
        record = record_at(int(entries.physical_offsets[0])) if len(entries) else None
        if not isinstance(record, Record):
            return
        # If the log has lost no message, the queue has lost none either, and begins at 0.
        base, expected = int(entries.queue_offsets[0]), record.queue_offset if log_begin else 0
        if base != expected:
            path, position = self.run.path_of(first)
            raise DamageError(f"base offset of the first entry of {self.key}", path, position, expected, base)

    def end_for(self, offset: int) -> int:
        """Return the number after the last written entry. Finding an offset requires a search anyway."""
        return self.search_written_end()

    def offset_of(self, number: int, end: int) -> int:
        """Return the queue offset of the first message of entry `number`.

        If `number` is `end`, the number after the queue's last entry, return the queue offset after the last message.
        """
        if number < end:
            return int(self.run.read(number, number + 1)[0]["base_offset"])
        if number <= self.run.begin:
            return 0
        last = self.run.read(number - 1, number)[0]
        return int(last["base_offset"]) + int(last["message_count"])

    def unit_of(self, offset: int, end: int) -> int:
        """Return the number of the entry that holds the message at queue offset `offset`.

        `end` is the number after the queue's last entry. `offset` must be below the queue offset of the queue's end.
        """

        def beyond(entry: Any) -> bool:
            return bool(entry["base_offset"] > offset)

        return max(self.run.first_where(self.run.begin, end, beyond) - 1, self.run.begin)

    def offset_behind(self, entries: Entries, number: int) -> int:
        """Return the queue offset after the last message of `entries`, which must not be empty."""
        assert entries.message_counts is not None
        return int(entries.queue_offsets[-1] + entries.message_counts[-1])


class EntryTable:
    """Entries of many queues in memory. `parts` has the entries of each queue, and the number of the first.

    Entries of batch queues are left out.
    """

    def __init__(self, parts: Mapping[QueueKey, tuple[int, Entries]]) -> None:
        self._parts = {key: part for key, part in parts.items() if part[1].message_counts is None}
        self._joined: Entries | None = None  # made at the first search
        self._rows: dict[QueueKey, tuple[int, int, int]] = {}  # the numbers [begin, end), and the row of number 0

    def find(self, ranges: Iterable[tuple[QueueKey, int, int]]) -> Entries | None:
        """Return the entries of the ranges (queue, begin, end), one after another. None if any is not in the table."""
        if self._joined is None:
            self._join()
        rows: list[int] = []
        for queue, begin, end in ranges:
            first, last, origin = self._rows.get(queue, (0, -1, 0))
            if begin < first or end > last:
                return None
            rows.extend(range(origin + begin, origin + end))
        return None if self._joined is None else self._joined.take(np.array(rows, np.intp))

    def _join(self) -> None:
        row = 0
        for key, (begin, entries) in self._parts.items():
            self._rows[key] = begin, begin + len(entries), row - begin
            row += len(entries)
        if self._parts:
            self._joined = Entries.joined([entries for _, entries in self._parts.values()])
