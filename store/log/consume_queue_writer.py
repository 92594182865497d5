"""Consume-queue writer: finds the ends of queues, and appends entries.

Only the holder of the store's lock may use it. An entry points to a record, so the entry is written after the record.
Entries that are appended to one queue together need one write per file.

Source: ConsumeQueue#putMessagePositionInfo, #fillPreBlank, BatchConsumeQueue#putBatchMessagePositionInfo (5.3).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.write import Disk, WritableFile
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.consume_queue_entry import (
    BLANK_FILL_SIZE,
    QUEUE_UNIT,
    encode_batch_entries,
    encode_blank_fill,
    encode_entries,
    encode_entry,
)
from rmq_spark.store.log.commit_log_writer import DirtyFiles, write_again
from rmq_spark.store.log.consume_queue import BatchConsumeQueue, ConsumeQueue
from rmq_spark.store.log.queue_registry import QueueRegistry
from rmq_spark.store.log.segments import Segment
from rmq_spark.store.model import QueueKey

_MAX_OPEN = 64  # queues whose files stay open between two entries


@dataclass(frozen=True, slots=True)
class NewEntries:
    """Entries to append, in the order of their records. Each array is int64 and has one element per record."""

    physical_offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    tags_codes: NDArray[np.int64]
    queue_offsets: NDArray[np.int64]
    store_times: NDArray[np.int64]  # ms
    message_counts: NDArray[np.int64] | None = None  # messages in each record; None if each record has one

    def __len__(self) -> int:
        return len(self.sizes)

    def part(self, begin: int, end: int) -> "NewEntries":
        """Return the entries [begin, end) of these, counted from 0."""
        counts = self.message_counts
        return NewEntries(
            self.physical_offsets[begin:end],
            self.sizes[begin:end],
            self.tags_codes[begin:end],
            self.queue_offsets[begin:end],
            self.store_times[begin:end],
            None if counts is None else counts[begin:end],
        )


@dataclass(slots=True)
class _End:
    """The end of a queue: its files, the number of its next entry (`number`), and its next queue offset (`offset`).

    If the last entry is damaged, `last_record` is the physical offset of the queue's last record. Otherwise it is None.
    """

    queue: ConsumeQueue
    number: int
    offset: int
    last_record: int | None = None


class ConsumeQueueWriter:
    """Appends to queues. The end of a queue is found when it is first needed, and cached until `forget`.

    For one thread that holds the store's lock.
    """

    def __init__(
        self,
        disk: Disk,
        root: str,
        changes: DirtyFiles,
        file_bytes: Callable[[np.dtype[np.void]], int],
        is_batch: Callable[[str], bool],
        sync_with_log: Callable[[str], None],
        heartbeat: Callable[[], None],
        registry: QueueRegistry,
    ) -> None:
        self._disk, self._root, self._changes, self._registry = disk, root, changes, registry
        self._file_bytes, self._is_batch, self._sync_with_log = file_bytes, is_batch, sync_with_log
        self._heartbeat = heartbeat
        self._ends: dict[QueueKey, _End] = {}
        self._files: dict[QueueKey, tuple[WritableFile, Segment]] = {}
        self._new_bytes: dict[np.dtype[np.void], int] = {}  # size (bytes) of the first file of a new queue, by layout

    def forget(self) -> None:
        """Clear the cache, because another process may have written."""
        self.close()
        self._ends.clear()
        self._new_bytes.clear()

    def next_offset(self, key: QueueKey) -> int:
        """Return the queue offset that the queue's next message will get."""
        return self._end(key).offset

    def last_place(self, key: QueueKey) -> int:
        """Return the physical offset of the queue's last record. Return -1 if the queue has none."""
        end = self._end(key)
        if end.last_record is not None:
            return end.last_record
        run = end.queue.run
        last = end.queue.read(max(end.number - 1, run.begin), end.number) if run.segments else None
        run.close()
        return int(last.physical_offsets[-1]) if last is not None and len(last) else -1

    def cut(
        self, key: QueueKey, number: int, physical_offset: int = 0, is_of: Callable[[int, int], bool] = lambda *_: False
    ) -> None:
        """Truncate the queue to the entries with numbers below `number`, for recovery.

        But if a later entry points to an existing record below `physical_offset`, the queue is truncated after the last
        such entry. `is_of` is the same as in `rewind`.
        """
        end = self._end(key)
        number = self._settled_end(end.queue, number, physical_offset, is_of)
        end.number, end.offset = number, end.queue.offset_of(number, number)
        self.clear_behind(key)

    def clear_behind(self, key: QueueKey) -> None:
        """Overwrite the bytes after the queue's end with zeros, and delete the files that begin there.

        Recovery uses this.

        A broker leaves such bytes, and a later recovery may read them as entries again. The queue's first file stays if
        its name does not start at entry 0, because only this name records the queue's next offset.
        """
        end = self._end(key)
        run = end.queue.run
        end_position = end.number * run.layout.itemsize
        for segment in reversed(run.segments):
            if segment.begin >= end_position and (segment is not run.segments[0] or not segment.begin):
                self._registry.forget_roll(key)
                self._disk.remove(segment.path)
                self._changes.note_folder(run.folder)
                continue
            begin = max(end_position - segment.begin, 0)
            parts = list(files.data_extents(segment.path, begin, segment.size)) if begin < segment.size else []
            if parts:
                with self._disk.open(segment.path) as file:
                    for first, last in parts:
                        file.write(first, bytes(last - first))
                self._changes.note_file(segment.path)
        run.refresh()

    def write_again_from(self, key: QueueKey, physical_offset: int) -> None:
        """Write a queue's entries for records at or after `physical_offset` again, after a failed sync.

        The bytes that were cleared after the queue's end are written again too.
        """
        end = self._end(key)
        run = end.queue.run
        begin = end.queue.first_from(physical_offset, end.number) * run.layout.itemsize
        for segment in run.segments:
            if segment.end > begin:
                first, last = max(begin - segment.begin, 0), max(end.number * run.layout.itemsize - segment.begin, 0)
                write_again(self._disk, segment.path, first, self._heartbeat, end=last)
                self._changes.note_file(segment.path)
        run.close()

    def rewind(
        self, key: QueueKey, physical_offset: int, is_of: Callable[[int, int], bool], log_begin: int
    ) -> int | None:
        """Set the queue's end after its last valid entry for a record below `physical_offset`.

        `is_of` takes a queue offset and a physical offset, and returns whether the record at that physical offset is
        the queue's message with that queue offset. `log_begin` is the physical offset where the log begins.

        Return None if only entries for later records, or none, follow the new end. Otherwise the entry after the new
        end is damaged, so the log may have more of the queue's records below `physical_offset`. Then return the
        physical offset in the last valid entry, or -1 if there is no valid entry.
        """
        end = self._end(key)
        queue, run = end.queue, end.queue.run
        number = run.first_where(
            run.begin,
            run.end if run.segments else run.begin,
            lambda one: one["record_size"] <= 0 or one["physical_offset"] >= physical_offset,
        )
        number, last_valid = self._settled_end(queue, number, physical_offset, is_of), -1
        while number > run.begin:
            before = queue.read(number - 1, number)
            last_valid = int(before.physical_offsets[0])
            if last_valid == 0 and int(before.sizes[0]) == BLANK_FILL_SIZE:
                last_valid = -1
                break
            if last_valid < log_begin or is_of(int(before.queue_offsets[0]), last_valid):
                break
            number, last_valid = number - 1, -1
        end.number, end.offset, end.last_record = number, queue.offset_of(number, number), None
        found = queue.read(number, number + 1)
        is_sound = not len(found) or int(found.sizes[0]) <= 0 or is_of(end.offset, int(found.physical_offsets[0]))
        run.close()
        return None if is_sound else last_valid

    def pass_over(self, key: QueueKey, count: int, offset: int, physical_offset: int) -> None:
        """Skip `count` damaged entries, so that the queue continues at queue offset `offset`.

        `physical_offset` is the position of the record of the last skipped entry.
        """
        end = self._end(key)
        end.number, end.offset, end.last_record = end.number + count, offset, physical_offset

    def refuse_hole(self, key: QueueKey, physical_offset: int) -> None:
        """Raise DamageError if entries for records below `physical_offset` follow the queue's end.

        The queue's end is before an entry that was not written, so such entries show that the queue has a hole.
        """
        end = self._end(key)
        if self._settled_end(end.queue, end.number, physical_offset, lambda *_: True) == end.number:
            return
        path, position = end.queue.run.path_of(end.number)
        raise DamageError(
            f"the entry of queue offset {end.offset} of queue {key}",
            path,
            position,
            "an entry, because later ones follow",
            "none",
            "Run rmq_spark.repair, or `rmq repair`: it rebuilds the queue from the log.",
        )

    @staticmethod
    def _settled_end(queue: ConsumeQueue, number: int, physical_offset: int, is_of: Callable[[int, int], bool]) -> int:
        """Return the number after the last written entry that points below `physical_offset`, but at least `number`.

        `is_of` decides whether the record at the entry's physical offset is the entry's. This is a scan and not a
        binary search, because a damaged entry would hide later ones from a binary search.
        """
        run, size = queue.run, queue.run.layout.itemsize
        last = number
        for segment in run.segments:
            if segment.end <= number * size:
                continue
            for begin, end in files.data_extents(segment.path, max(number * size - segment.begin, 0), segment.size):
                first = max((segment.begin + begin) // size, number)
                raw = run.read(first, -(-(segment.begin + end) // size))
                entries = queue.read(first, first + len(raw))
                for at in np.flatnonzero(queue.are_written(raw) & (entries.physical_offsets < physical_offset))[::-1]:
                    if is_of(int(entries.queue_offsets[at]), int(entries.physical_offsets[at])):
                        last = first + int(at) + 1
                        break
        run.close()
        return last

    def has_files(self, key: QueueKey) -> bool:
        """Return whether the queue has a file."""
        return bool(self._end(key).queue.run.segments)

    def newest_unit(self, key: QueueKey) -> int | None:
        """Return the first entry number of the queue's newest file if that file is full. Return None if it has room.

        Return -1 if the queue has no file. If a queue has lost its newest file, the result is also a number, because
        its older files are full.
        """
        end = self._end(key)
        segments, size = end.queue.run.segments, end.queue.run.layout.itemsize
        if not segments:
            return -1
        return segments[-1].begin // size if end.number * size >= segments[-1].end else None

    def queue(self, key: QueueKey) -> ConsumeQueue:
        """Return the queue's files, for reading."""
        return self._end(key).queue

    def begin_at(self, key: QueueKey, offset: int) -> None:
        """Set the first queue offset of a queue that has no files.

        `offset` is above 0, because earlier messages expired.
        """
        end = self._end(key)
        assert not end.queue.run.segments, key
        end.offset = offset
        end.number = offset if end.queue.layout is QUEUE_UNIT else 0

    def put(self, key: QueueKey, entries: NewEntries) -> None:
        """Append entries to the queue. Their queue offsets must begin at the queue's next offset.

        After a crash, only some of the entries may exist, the last of them partly. But their records exist, so the next
        writer writes the same bytes again.
        """
        end = self._end(key)
        assert int(entries.queue_offsets[0]) == end.offset, (key, end.offset, entries.queue_offsets[0])
        run = end.queue.run
        per_file = self._bytes_of(end.queue) // run.layout.itemsize
        first = 0
        while first < len(entries):
            number = end.number + first
            last = min(len(entries), first + per_file - number % per_file)
            self._write(end, number, entries.part(first, last))
            first = last
        run.close()
        end.number, end.last_record = end.number + len(entries), None
        counts = entries.message_counts
        end.offset = int(entries.queue_offsets[-1]) + (1 if counts is None else int(counts[-1]))

    def open(self, key: QueueKey) -> bool:
        """Keep the queue's newest file open for `put_one`, until `close`. Say whether this was possible.

        Only plain queues can be open, and only _MAX_OPEN at a time.
        """
        end = self._end(key)
        if key in self._files:
            return True
        segments = end.queue.run.segments
        if end.queue.layout is not QUEUE_UNIT or not segments or len(self._files) >= _MAX_OPEN:
            return False
        self._files[key] = self._disk.open(segments[-1].path), segments[-1]
        return True

    def next_of_open(self, key: QueueKey) -> int | None:
        """Return the next queue offset of a queue. Return None if it is not open, or if its newest file is full."""
        known = self._files.get(key)
        if known is None:
            return None
        end, segment = self._ends[key], known[1]
        return end.offset if segment.begin <= end.number * QUEUE_UNIT.itemsize < segment.end else None

    def put_one(self, key: QueueKey, physical_offset: int, size: int, tags_code: int) -> None:
        """Append one entry to a queue for which `next_of_open` has returned an offset."""
        end, (file, segment) = self._ends[key], self._files[key]
        position = end.number * QUEUE_UNIT.itemsize - segment.begin
        file.write(position, encode_entry(physical_offset, size, tags_code))
        self._changes.note_file(segment.path)
        end.number, end.offset, end.last_record = end.number + 1, end.offset + 1, None

    def close(self) -> None:
        """Close the files that `open` keeps open."""
        while self._files:
            self._files.popitem()[1][0].close()

    def _write(self, end: _End, number: int, entries: NewEntries) -> None:
        run = end.queue.run
        position, data = number * run.layout.itemsize, self._encode(end.queue, entries)
        segment = next((one for one in reversed(run.segments) if one.begin <= position < one.end), None)
        if segment is None:
            is_first, physical_offset = not run.segments, int(entries.physical_offsets[0])
            self._create_file(end, position, data)
            if is_first:
                self._registry.note_queue(end.queue.key, physical_offset)
            else:
                self._registry.note_roll(end.queue.key, number, physical_offset)
            return
        with self._disk.open(segment.path) as file:
            file.write(position - segment.begin, data)
        self._changes.note_file(segment.path)

    def _create_file(self, end: _End, position: int, data: bytes) -> None:
        """Create the file that contains `position`, together with its first entries.

        In the first file of a queue, fill (entries without a message) precedes the entries. A power cut must never
        leave the file without its first entry, because the queue would then have a permanent hole. The reason is that
        when a broker truncates its log, it treats the first entry of a queue's last file as valid, whatever its bytes
        are (ConsumeQueue#truncateDirtyLogicFiles, 4.9 and 5.3).
        """
        self._heartbeat()  # creating a file takes one or more syncs, and one append may need thousands of files
        run = end.queue.run
        size = self._bytes_of(end.queue)
        begin = position // size * size
        if not run.segments:
            self._disk.make_folder(run.folder)
            self._changes.note_new_folder(run.folder, self._root)
            if position > begin and run.layout is QUEUE_UNIT:
                data = encode_blank_fill((position - begin) // QUEUE_UNIT.itemsize) + data
                position = begin
        else:
            # When a broker opens the store after a power cut, it reads only a queue's last three files
            # (ConsumeQueue#recover). So earlier files must be complete on disk. But the log is synced first: if entries
            # survived and their records did not, every later recovery of a broker would truncate all queues.
            self._sync_with_log(run.segments[-1].path)
        path = files.join(run.folder, filenames.segment_name(begin))
        if files.file_size(path) == 0:
            self._disk.remove(path)  # left by a writer that crashed; MappedFileQueue#doLoad deletes it too
        # This call makes the file and its entries visible at the same moment. A crash before that leaves neither.
        self._disk.create_filled(path, size, position - begin, data)
        self._changes.note_new_file(path)
        run.refresh()

    @staticmethod
    def _encode(queue: ConsumeQueue, entries: NewEntries) -> bytes:
        if queue.layout is QUEUE_UNIT:
            return encode_entries(entries.physical_offsets, entries.sizes, entries.tags_codes)
        counts = np.ones(len(entries), np.int64) if entries.message_counts is None else entries.message_counts
        return encode_batch_entries(
            entries.physical_offsets,
            entries.sizes,
            entries.tags_codes,
            entries.store_times,
            entries.queue_offsets,
            counts,
        )

    def _bytes_of(self, queue: ConsumeQueue) -> int:
        """Return the size (bytes) of each of the queue's files."""
        if queue.run.segments:
            return queue.run.segments[0].size
        # Cached, because finding the size may read every topic, and an append may create a thousand queues.
        if queue.layout not in self._new_bytes:
            self._new_bytes[queue.layout] = self._file_bytes(queue.layout)
        return self._new_bytes[queue.layout]

    def _end(self, key: QueueKey) -> _End:
        known = self._ends.get(key)
        if known is None:
            self._heartbeat()  # the queue's files are read, and one append may have thousands of queues
            kind, tree = (
                (BatchConsumeQueue, filenames.BATCH_CONSUME_QUEUE)
                if self._is_batch(key.topic)
                else (ConsumeQueue, filenames.CONSUME_QUEUE)
            )
            queue = kind(key, files.join(self._root, filenames.queue_folder(key.topic, key.queue_id, tree)))
            number = queue.search_written_end()
            known = self._ends[key] = _End(queue, number, queue.offset_of(number, number))
            queue.run.close()
        return known
