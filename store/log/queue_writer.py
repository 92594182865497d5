"""The queues of a store for a writer: where each ends, and units put behind its end.

Only who holds the store's lock may use it. A unit says where a record lies, so it is written after the record.
Units of one queue that are put together are one write for each file.

Source: ConsumeQueue#putMessagePositionInfo, #fillPreBlank, BatchConsumeQueue#putBatchMessagePositionInfo (5.3).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.batch_unit import encode_batch_units
from rmq_spark.store.format.queue_unit import BLANK_FILL_SIZE, QUEUE_UNIT, encode_blank_fill, encode_units
from rmq_spark.store.log.changes import Changes, write_again
from rmq_spark.store.log.queue_registry import QueueRegistry
from rmq_spark.store.log.queues import BatchConsumeQueue, ConsumeQueue
from rmq_spark.store.log.segments import Segment
from rmq_spark.store.log.unit_run import UnitRun
from rmq_spark.store.units import QueueKey


@dataclass(frozen=True, slots=True)
class NewUnits:
    """Units to be put, in the order of their records; one element a record, all int64."""

    physical_offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    tags_codes: NDArray[np.int64]
    queue_offsets: NDArray[np.int64]
    store_times: NDArray[np.int64]  # ms
    message_counts: NDArray[np.int64] | None = None  # None: one message a record

    def __len__(self) -> int:
        return len(self.sizes)

    def part(self, begin: int, end: int) -> "NewUnits":
        """Return the units [begin, end) of these."""
        counts = self.message_counts
        return NewUnits(
            self.physical_offsets[begin:end],
            self.sizes[begin:end],
            self.tags_codes[begin:end],
            self.queue_offsets[begin:end],
            self.store_times[begin:end],
            None if counts is None else counts[begin:end],
        )


@dataclass(slots=True)
class _End:
    """Where a queue goes on: its files, the number of its next unit and that unit's queue offset.

    `passed` is where its last record begins, if the last unit is damaged and does not say it.
    """

    queue: ConsumeQueue
    unit: int
    offset: int
    passed: int | None = None


class QueueWriter:
    """Ends of queues, found when first asked for and kept until `forget`. One thread, under the store's lock."""

    def __init__(
        self,
        disk: Disk,
        root: str,
        changes: Changes,
        file_bytes: Callable[[np.dtype[np.void]], int],
        is_batch: Callable[[str], bool],
        sync_with_log: Callable[[str], None],
        note_progress: Callable[[], None],
        registry: QueueRegistry,
    ) -> None:
        self._disk, self._root, self._changes, self._registry = disk, root, changes, registry
        self._file_bytes, self._is_batch, self._sync_with_log = file_bytes, is_batch, sync_with_log
        self._note_progress = note_progress
        self._ends: dict[QueueKey, _End] = {}
        self._new_bytes: dict[np.dtype[np.void], int] = {}  # length of a queue's first file, by layout

    def forget(self) -> None:
        """Believe nothing from before: somebody else may have written."""
        self._ends.clear()
        self._new_bytes.clear()

    def next_offset(self, key: QueueKey) -> int:
        """Return the queue offset that the queue's next message gets."""
        return self._end(key).offset

    def last_place(self, key: QueueKey) -> int:
        """Return the physical offset of the record that the queue's last unit names, -1 without one."""
        end = self._end(key)
        if end.passed is not None:
            return end.passed
        run = end.queue.run
        last = end.queue.read(max(end.unit - 1, run.begin), end.unit) if run.segments else None
        run.close()
        return int(last.physical_offsets[-1]) if last is not None and len(last) else -1

    def cut(
        self, key: QueueKey, unit: int, physical_offset: int = 0, is_of: Callable[[int, int], bool] = lambda *_: False
    ) -> None:
        """Take back all units from number `unit` on, for recovery.

        But for those up to the last one for a record before `physical_offset` that is there, see `rewind`.
        """
        end = self._end(key)
        unit = self._settled_end(end.queue, unit, physical_offset, is_of)
        end.unit, end.offset = unit, end.queue.offset_of(unit, unit)
        self.clear_behind(key)

    def clear_behind(self, key: QueueKey) -> None:
        """Make zero what stands behind the queue's end, for recovery; files that begin there go.

        A broker leaves such bytes, and a later recovery may take them for units again. A queue's only file stays where
        its name alone says at which offset the queue goes on.
        """
        end = self._end(key)
        run = end.queue.run
        end_position = end.unit * run.layout.itemsize
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
        run.look()

    def write_again_from(self, key: QueueKey, physical_offset: int) -> None:
        """Write again the units of records from a physical offset on and what follows them, after a failed sync."""
        end = self._end(key)
        run = end.queue.run
        begin = end.queue.first_from(physical_offset, end.unit) * run.layout.itemsize
        for segment in run.segments:
            if segment.end > begin:
                first, last = max(begin - segment.begin, 0), max(end.unit * run.layout.itemsize - segment.begin, 0)
                write_again(self._disk, segment.path, first, self._note_progress, end=last)
                self._changes.note_file(segment.path)
        run.close()

    def rewind(
        self, key: QueueKey, physical_offset: int, is_of: Callable[[int, int], bool], log_begin: int
    ) -> int | None:
        """Go on behind the queue's last unit for a record before `physical_offset` that names it.

        `is_of` says of a queue offset and a physical offset whether that message's record is there. Return None if
        what follows are units of later records, or none; else where the record of the last sound unit begins, -1
        without one: in the log may be more records whose units are damaged.
        """
        end = self._end(key)
        queue, run = end.queue, end.queue.run
        unit = run.first_where(
            run.begin,
            run.end if run.segments else run.begin,
            lambda one: one["record_size"] <= 0 or one["physical_offset"] >= physical_offset,
        )
        unit, place = self._settled_end(queue, unit, physical_offset, is_of), -1
        while unit > run.begin:
            before = queue.read(unit - 1, unit)
            place = int(before.physical_offsets[0])
            if place == 0 and int(before.sizes[0]) == BLANK_FILL_SIZE:
                place = -1
                break
            if place < log_begin or is_of(int(before.queue_offsets[0]), place):
                break
            unit, place = unit - 1, -1
        end.unit, end.offset, end.passed = unit, queue.offset_of(unit, unit), None
        found = queue.read(unit, unit + 1)
        is_sound = not len(found) or int(found.sizes[0]) <= 0 or is_of(end.offset, int(found.physical_offsets[0]))
        run.close()
        return None if is_sound else place

    def pass_over(self, key: QueueKey, units: int, offset: int, place: int) -> None:
        """Go on so many units further, with a queue offset, behind damaged ones; the last record is at `place`."""
        end = self._end(key)
        end.unit, end.offset, end.passed = end.unit + units, offset, place

    def refuse_hole(self, key: QueueKey, physical_offset: int) -> None:
        """Raise DamageError if behind the queue's end units follow for records before `physical_offset`."""
        end = self._end(key)
        if self._settled_end(end.queue, end.unit, physical_offset, lambda *_: True) == end.unit:
            return
        path, position = end.queue.run.path_of(end.unit)
        raise DamageError(
            f"the unit of queue offset {end.offset} of queue {key}",
            path,
            position,
            "a unit, as later ones follow",
            "none",
            "Run rmq_spark.repair, or `rmq repair`: it rebuilds the queue from the log.",
        )

    @staticmethod
    def _settled_end(queue: ConsumeQueue, unit: int, physical_offset: int, is_of: Callable[[int, int], bool]) -> int:
        """Return the number after the last written unit from `unit` on for a record before a physical offset.

        A damaged unit hides those behind it from a binary search. Without such units it is `unit`.
        """
        run, size = queue.run, queue.run.layout.itemsize
        last = unit
        for segment in run.segments:
            if segment.end <= unit * size:
                continue
            for begin, end in files.data_extents(segment.path, max(unit * size - segment.begin, 0), segment.size):
                first = max((segment.begin + begin) // size, unit)
                raw = run.read(first, -(-(segment.begin + end) // size))
                units = queue.read(first, first + len(raw))
                for at in np.flatnonzero(queue.are_written(raw) & (units.physical_offsets < physical_offset))[::-1]:
                    if is_of(int(units.queue_offsets[at]), int(units.physical_offsets[at])):
                        last = first + int(at) + 1
                        break
        run.close()
        return last

    def has_files(self, key: QueueKey) -> bool:
        """Say whether the queue has a file."""
        return bool(self._end(key).queue.run.segments)

    def newest_unit(self, key: QueueKey) -> int | None:
        """Return the first unit of the queue's newest file if that one is full, None if it has room.

        A queue that lost its newest file is such a one: all files before it are full. -1 for a queue without files.
        """
        end = self._end(key)
        segments, size = end.queue.run.segments, end.queue.run.layout.itemsize
        if not segments:
            return -1
        return segments[-1].begin // size if end.unit * size >= segments[-1].end else None

    def queue(self, key: QueueKey) -> ConsumeQueue:
        """Return the queue's files, to be looked at."""
        return self._end(key).queue

    def begin_at(self, key: QueueKey, offset: int) -> None:
        """Have a queue without a file begin at a queue offset above 0: what was before it has expired."""
        end = self._end(key)
        assert not end.queue.run.segments, key
        end.offset = offset
        end.unit = offset if end.queue.layout is QUEUE_UNIT else 0

    def put(self, key: QueueKey, units: NewUnits) -> None:
        """Put units behind the queue's end. Their offsets must go on where it ends.

        A crash on the way leaves some of them, or half of one: the records are there, so the next writer writes
        the same bytes again.
        """
        end = self._end(key)
        assert int(units.queue_offsets[0]) == end.offset, (key, end.offset, units.queue_offsets[0])
        run = end.queue.run
        per_file = self._bytes_of(end.queue) // run.layout.itemsize
        first = 0
        while first < len(units):
            number = end.unit + first
            last = min(len(units), first + per_file - number % per_file)
            self._write(end, number, units.part(first, last))
            first = last
        run.close()
        end.unit, end.passed = end.unit + len(units), None
        counts = units.message_counts
        end.offset = int(units.queue_offsets[-1]) + (1 if counts is None else int(counts[-1]))

    def _write(self, end: _End, number: int, units: NewUnits) -> None:
        run = end.queue.run
        position, data = number * run.layout.itemsize, self._encode(end.queue, units)
        segment = _holding(run, position)
        if segment is None:
            is_first, place = not run.segments, int(units.physical_offsets[0])
            self._make_file(end, position, data)
            if is_first:
                self._registry.note_queue(end.queue.key, place)
            else:
                self._registry.note_roll(end.queue.key, number, place)
            return
        with self._disk.open(segment.path) as file:
            file.write(position - segment.begin, data)
        self._changes.note_file(segment.path)

    def _make_file(self, end: _End, position: int, data: bytes) -> None:
        """Make the file for a position, with its first units; in the first one of a queue, fill stands before them.

        No power cut leaves its name without its first unit: where a broker cuts back its log, it counts the first
        unit of a queue's last file whatever stands there (ConsumeQueue#truncateDirtyLogicFiles, 4.9 and 5.3), and
        the queue would have a hole for ever.
        """
        self._note_progress()  # a file takes a sync or more, and one append may need thousands of them
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
            # A broker that opens the store after a power cut looks at a queue's last three files only
            # (ConsumeQueue#recover): a file before them must not lack units. But first the log: units that outlive
            # their records have every later recovery of a broker cut back all queues.
            self._sync_with_log(run.segments[-1].path)
        path = files.join(run.folder, filenames.segment_name(begin))
        if files.file_size(path) == 0:
            self._disk.remove(path)  # somebody died while making it: MappedFileQueue#doLoad takes it away, too
        # From here readers see the file and its units at once; a crash before leaves neither.
        self._disk.create_filled(path, size, position - begin, data)
        self._changes.note_new_file(path)
        run.look()

    @staticmethod
    def _encode(queue: ConsumeQueue, units: NewUnits) -> bytes:
        if queue.layout is QUEUE_UNIT:
            return encode_units(units.physical_offsets, units.sizes, units.tags_codes)
        counts = np.ones(len(units), np.int64) if units.message_counts is None else units.message_counts
        return encode_batch_units(
            units.physical_offsets, units.sizes, units.tags_codes, units.store_times, units.queue_offsets, counts
        )

    def _bytes_of(self, queue: ConsumeQueue) -> int:
        """Return the length of the queue's files."""
        if queue.run.segments:
            return queue.run.segments[0].size
        # To find it out every topic may have to be looked at: not again for each of a thousand new queues.
        if queue.layout not in self._new_bytes:
            self._new_bytes[queue.layout] = self._file_bytes(queue.layout)
        return self._new_bytes[queue.layout]

    def _end(self, key: QueueKey) -> _End:
        known = self._ends.get(key)
        if known is None:
            self._note_progress()  # its files are looked at, and one append may name thousands of queues
            kind, tree = (
                (BatchConsumeQueue, filenames.BATCH_CONSUME_QUEUE)
                if self._is_batch(key.topic)
                else (ConsumeQueue, filenames.CONSUME_QUEUE)
            )
            queue = kind(key, files.join(self._root, filenames.queue_folder(key.topic, key.queue_id, tree)))
            unit = queue.search_written_end()
            known = self._ends[key] = _End(queue, unit, queue.offset_of(unit, unit))
            queue.run.close()
        return known


def _holding(run: UnitRun, position: int) -> Segment | None:
    return next((segment for segment in reversed(run.segments) if segment.begin <= position < segment.end), None)
