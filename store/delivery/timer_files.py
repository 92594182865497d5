"""The files of RocketMQ's timer as they lie on disk: timer log, wheel, check. What they mean is for `timer_store`.

Reading is for anybody; changing for who holds the store's lock, as a broker reads all three while it starts. All reads
are by position, near ones together, so a message that waits costs nothing until it is due.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.errors import DamageError, StoreChangedError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.timer_check import (
    TIMER_CHECK,
    TIMER_CHECK_FILE_BYTES,
    TimerCheck,
    decode_timer_check,
    encode_timer_check,
)
from rmq_spark.store.format.timer_log import (
    BLANK_MAGIC,
    MAX_MAGIC,
    TIMER_BLANK,
    TIMER_FILE_BYTES,
    TIMER_UNIT,
    TIMER_UNIT_BYTES,
    UnitPlaces,
    are_units,
    encode_timer_blank,
    place_units,
)
from rmq_spark.store.format.timer_wheel import (
    SECOND_MS,
    SLOT_COUNT,
    TIMER_SLOT,
    TIMER_SLOT_BYTES,
    WHEEL_BYTES,
)
from rmq_spark.store.log.changes import write_again
from rmq_spark.store.log.segments import SegmentRun, list_segments

TIMER_LOG, TIMER_WHEEL, TIMER_CHECK_NAME = "timerlog", "timerwheel", "timercheck"

_NEAR_BYTES = 4096  # a read costs about as much
_SCAN_UNITS = 1 << 16  # looked at together
_LINK_BYTES = 16  # of a unit: size, previous position, magic


class TimerLog:
    """The units of the timer log by position in the whole log. One thread; keeps no file open."""

    def __init__(self, root: str, disk: Disk) -> None:
        self._folder, self._disk = files.join(root, TIMER_LOG), disk
        self.run = SegmentRun((), 0)
        self._unsynced: set[str] = set()
        self.look()

    def look(self) -> None:
        """List the files again. Raises DamageError for lengths that differ, StorePathError for other names."""
        self.run = list_segments(self._folder)

    @property
    def file_bytes(self) -> int:
        """Return the length of a file."""
        return self.run.size or TIMER_FILE_BYTES

    def units_at(self, positions: NDArray[np.int64]) -> NDArray[np.void]:
        """Return the units at ascending positions; zeros for one that no file has."""
        found, file, held = np.zeros(len(positions), TIMER_UNIT), None, None
        try:
            for first, last in _near(positions, TIMER_UNIT_BYTES, self.file_bytes):
                begin, size = int(positions[first]), int(positions[last - 1] - positions[first]) + TIMER_UNIT_BYTES
                segment = self.run.holding(begin)
                if segment is None:
                    continue
                if file is None or held is not segment:
                    if file is not None:
                        file.close()
                    file, held = OpenFile(segment.path), segment
                data = np.frombuffer(file.read(begin - segment.begin, size).ljust(size, b"\0"), np.uint8)
                view: NDArray[np.void] = np.ndarray((size - TIMER_UNIT_BYTES + 1,), TIMER_UNIT, data, strides=(1,))
                found[first:last] = view[positions[first:last] - begin]
        finally:
            if file is not None:
                file.close()
        return found

    def walk(self, position: int) -> list[int]:
        """Return the positions of a chain, from that of its last unit back, up to where none stands.

        A unit says where the one before it is, so one after the other is read: of a few long chains this is faster than
        what looks at many at once.
        """
        found: list[int] = []
        file, held = None, None
        try:
            while position >= 0:
                segment = self.run.holding(position)
                if segment is None:
                    break
                if file is None or held is not segment:
                    if file is not None:
                        file.close()
                    file, held = OpenFile(segment.path), segment
                head = file.read(position - segment.begin, _LINK_BYTES)
                magic = int.from_bytes(head[_LINK_BYTES - 4 :], "big")
                if int.from_bytes(head[:4], "big") != TIMER_UNIT_BYTES or magic > MAX_MAGIC:
                    break
                found.append(position)
                previous = int.from_bytes(head[4:12], "big", signed=True)
                if previous >= position:
                    break  # a chain leads back, else it would never end
                position = previous
        finally:
            if file is not None:
                file.close()
        return found

    def scan(self, begin: int, end: int | None = None) -> Iterator[tuple[NDArray[np.int64], NDArray[np.void]]]:
        """Yield position and unit of what stands from `begin` on, in blocks, up to the first that is no unit, or `end`.

        As TimerMessageStore#recoverAndRevise (5.3) goes: a filler leads to the next file.
        """
        segment = self.run.holding(begin)
        while segment is not None:
            at = max(begin, segment.begin)
            while at + TIMER_UNIT_BYTES <= segment.end:
                count = min(_SCAN_UNITS, (segment.end - at) // TIMER_UNIT_BYTES)
                with OpenFile(segment.path) as file:
                    units = np.frombuffer(file.read(at - segment.begin, count * TIMER_UNIT_BYTES), TIMER_UNIT)
                good = (
                    are_units(units)
                    if end is None
                    else are_units(units) & (at + np.arange(len(units)) * TIMER_UNIT_BYTES < end)
                )
                stop = int(np.argmin(good)) if not good.all() else len(units)
                if stop:
                    yield at + np.arange(stop, dtype=np.int64) * TIMER_UNIT_BYTES, units[:stop]
                if stop < len(units):
                    if int(units["magic"][stop]) != BLANK_MAGIC:
                        return
                    break  # the rest is filler
                at += count * TIMER_UNIT_BYTES
            segment = self.run.after(segment)

    def goes_on(self, position: int) -> bool:
        """Say whether a unit stands at a position, or behind a filler there."""
        segment = self.run.holding(position)
        if segment is not None and position + TIMER_UNIT_BYTES <= segment.end:
            unit = self.units_at(np.array([position]))
            if int(unit["magic"][0]) != BLANK_MAGIC:
                return bool(are_units(unit)[0])
        following = self.run.after(segment) if segment is not None else None
        return following is not None and bool(are_units(self.units_at(np.array([following.begin])))[0])

    def place(self, end: int, count: int) -> UnitPlaces:
        """Return where `count` units go behind position `end`."""
        return place_units(end, count, self.file_bytes)

    def write_units(self, places: UnitPlaces, units: NDArray[np.void]) -> None:
        """Write units to their places. Nothing is synced.

        A new file appears with its first units, synced, so no power cut leaves its name without them.
        """
        units = units.astype(TIMER_UNIT)
        fillers = {position // self.file_bytes: position for position in places.blanks.tolist()}
        file_numbers = places.positions // self.file_bytes
        for number in sorted({*file_numbers.tolist(), *fillers}):
            chosen = np.flatnonzero(file_numbers == number)
            if len(chosen):
                self._write(int(places.positions[chosen[0]]), units[chosen[0] : chosen[-1] + 1].tobytes())
            if number in fillers:
                self._write(fillers[number], encode_timer_blank(fillers[number], self.file_bytes))

    def expire(self, log_begin: int) -> None:
        """Delete files all of whose messages have left the commit log, which begins there, but for the last file.

        Source: MappedFileQueue#deleteExpiredFileByOffsetForTimerLog (5.3), which looks at a file's last unit, too.
        """
        for segment in self.run.segments[:-1]:
            count = (segment.size - TIMER_BLANK.itemsize) // TIMER_UNIT_BYTES
            last = self.units_at(np.array([segment.begin + (count - 1) * TIMER_UNIT_BYTES]))
            if not are_units(last)[0] or int(last["physical_offset"][0]) >= log_begin:
                break
            self._disk.remove(segment.path)
        self.look()

    def discard(self) -> None:
        """Delete all files, for good, the oldest first: as long as there is one, the last unit is the newest."""
        for segment in self.run.segments:
            self._disk.remove(segment.path)
            self._disk.sync_folder(self._folder)
        self._unsynced.clear()
        self.look()

    def unlink_before(self, position: int) -> None:
        """Have the unit at a position be the first of its chain."""
        assert TIMER_UNIT.fields is not None
        at = TIMER_UNIT.fields["previous_position"][1]
        self._write(position + at, (-1).to_bytes(8, "big", signed=True))

    def clear_from(self, end: int) -> None:
        """Make zero what stands behind the log's end: what a torn write left may look like units later."""
        for segment in self.run.segments:
            begin = max(end - segment.begin, 0)
            parts = list(files.data_extents(segment.path, begin, segment.size)) if begin < segment.size else []
            if parts:
                with self._disk.open(segment.path) as file:
                    for first, last in parts:
                        file.write(first, bytes(last - first))
                self._unsynced.add(segment.path)

    def write_again_from(self, position: int, note_progress: Callable[[], None]) -> None:
        """Write again the log from a position on: a sync of it may have failed."""
        for segment in self.run.segments:
            if segment.end > position:
                write_again(self._disk, segment.path, max(position - segment.begin, 0), note_progress)
                self._unsynced.add(segment.path)

    def sync(self) -> None:
        """Return when all that was written survives a power cut."""
        for path in sorted(self._unsynced):
            with self._disk.open(path) as file:
                file.sync()
        self._unsynced.clear()

    def _write(self, position: int, data: bytes) -> None:
        segment = self.run.holding(position)
        if segment is None:
            self._make_file(position, data)
            return
        with self._disk.open(segment.path) as file:
            file.write(position - segment.begin, data)
        self._unsynced.add(segment.path)

    def _make_file(self, position: int, data: bytes) -> None:
        size = self.file_bytes
        begin = position // size * size
        assert position == begin, (position, size)
        self.sync()  # units of a later file must not outlive those before them
        self._disk.make_folder(self._folder)
        path = files.join(self._folder, filenames.segment_name(begin))
        if files.file_size(path) == 0:
            self._disk.remove(path)  # somebody died while making it
        self._disk.create_filled(path, size, 0, data)
        self._disk.sync_folder(self._folder)
        self._disk.sync_folder(files.parent(self._folder))
        self.look()


class TimerWheel:
    """The slots of the wheel. One thread; keeps no file open."""

    def __init__(self, root: str, disk: Disk) -> None:
        self._path, self._disk = files.join(root, TIMER_WHEEL), disk
        self._is_unsynced = False

    def is_there(self) -> bool:
        """Say whether there is a wheel; one that a broker has just begun to make is none.

        Raises DamageError for one of another length, on which a broker does not start.
        """
        size = files.file_size(self._path)
        if size not in (-1, 0, WHEEL_BYTES):
            raise DamageError(
                "the timer wheel has another length",
                self._path,
                0,
                f"{WHEEL_BYTES} bytes",
                size,
                "Restore the file from a copy, or remove it: it is made anew from the timer log.",
            )
        return size == WHEEL_BYTES

    def make(self) -> None:
        """Make an empty wheel, which takes no room on disk, where there is none."""
        if not self.is_there():
            if files.file_size(self._path) == 0:
                self._disk.remove(self._path)
            self._disk.create(self._path, WHEEL_BYTES)
            self._disk.sync_folder(files.parent(self._path))

    def discard(self) -> None:
        """Delete the wheel, for good."""
        self._disk.remove(self._path)
        self._disk.sync_folder(files.parent(self._path))
        self._is_unsynced = False

    def slots_at(self, numbers: NDArray[np.int64]) -> NDArray[np.void]:
        """Return the slots of ascending numbers; zeros without a wheel."""
        found = np.zeros(len(numbers), TIMER_SLOT)
        if not self.is_there():
            return found
        with OpenFile(self._path) as file:
            for first, last in _near(numbers * TIMER_SLOT_BYTES, TIMER_SLOT_BYTES, WHEEL_BYTES):
                begin = int(numbers[first])
                found[first:last] = _read_slots(file, begin, int(numbers[last - 1]) + 1)[numbers[first:last] - begin]
        return found

    def slots_from(self, begin_ms: int, end_ms: int | None = None) -> NDArray[np.void]:
        """Return the slots that have messages due in the seconds [begin, end), in order; None: all from `begin` on.

        A second counts at most once round the wheel behind `begin`.
        """
        begin = max(begin_ms // SECOND_MS, 0)
        count = SLOT_COUNT if end_ms is None else max(end_ms // SECOND_MS - begin, 0)
        if not count or not self.is_there():
            return np.zeros(0, TIMER_SLOT)
        first = begin % SLOT_COUNT if count < SLOT_COUNT else 0
        end = first + min(count, SLOT_COUNT)
        parts = [_written_slots(self._path, first, min(end, SLOT_COUNT))]
        if end > SLOT_COUNT:
            parts.append(_written_slots(self._path, 0, end - SLOT_COUNT))
        slots = np.concatenate(parts)
        seconds = slots["second"].astype(np.int64)
        kept = (seconds >= begin) & (slots["last_position"] >= 0) & (seconds > 0)
        if end_ms is not None:
            kept &= seconds < end_ms // SECOND_MS
        slots = slots[kept]
        return slots[np.argsort(slots["second"].astype(np.int64), kind="stable")]

    def write_slots(self, numbers: NDArray[np.int64], slots: NDArray[np.void]) -> None:
        """Write slots of ascending numbers; near ones are one write, with what is between them as it was."""
        self.make()
        slots = slots.astype(TIMER_SLOT)  # numpy joins parts in the machine's order of bytes
        with self._disk.open(self._path) as file:
            for first, last in _near(numbers * TIMER_SLOT_BYTES, TIMER_SLOT_BYTES, WHEEL_BYTES):
                begin, end = int(numbers[first]), int(numbers[last - 1]) + 1
                if end - begin == last - first:
                    data = slots[first:last].tobytes()
                else:
                    whole = np.frombuffer(
                        file.read(begin * TIMER_SLOT_BYTES, (end - begin) * TIMER_SLOT_BYTES), TIMER_SLOT
                    ).copy()
                    whole[numbers[first:last] - begin] = slots[first:last]
                    data = whole.tobytes()
                file.write(begin * TIMER_SLOT_BYTES, data)
        self._is_unsynced = True

    def write_again(self, note_progress: Callable[[], None]) -> None:
        """Write again all slots: a sync of them may have failed."""
        write_again(self._disk, self._path, 0, note_progress)
        self._is_unsynced = True

    def sync(self) -> None:
        """Return when all that was written survives a power cut."""
        if self._is_unsynced:
            with self._disk.open(self._path) as file:
                file.sync()
            self._is_unsynced = False


class TimerCheckFile:
    """`config/timercheck`."""

    def __init__(self, root: str, disk: Disk) -> None:
        self._folder, self._disk = files.join(root, filenames.CONFIG), disk
        self.path = files.join(self._folder, TIMER_CHECK_NAME)

    def read(self) -> TimerCheck | None:
        """Return what it says, None without one. Cheap."""
        page = files.read_small(self.path)
        return decode_timer_check(page) if page else None

    def write(self, check: TimerCheck) -> None:
        """Have it say this: for good, and the old or the new one for whoever looks."""
        self._disk.make_folder(self._folder)
        self._disk.replace(self.path, encode_timer_check(check).ljust(TIMER_CHECK_FILE_BYTES, b"\0"))

    def note_coming(self, queue_offset: int) -> None:
        """Let a broker that finds units behind the log's noted end count them as taken from the queue, up to this.

        It goes on behind the message of the last unit, but not beyond `master_queue_offset`
        (TimerMessageStore#recover): were that the old one, it would take those messages again.
        """
        assert TIMER_CHECK.fields is not None
        at = TIMER_CHECK.fields["master_queue_offset"][1]
        with self._disk.open(self.path) as file:
            file.write(at, queue_offset.to_bytes(8, "big"))


def _written_slots(path: str, begin: int, end: int) -> NDArray[np.void]:
    """Return the slots [begin, end) but for those in pages that nobody has written."""
    parts = [np.zeros(0, TIMER_SLOT)]
    with OpenFile(path) as file:
        for first, last in files.data_extents(path, begin * TIMER_SLOT_BYTES, end * TIMER_SLOT_BYTES):
            slots = _read_slots(file, first // TIMER_SLOT_BYTES, -(-last // TIMER_SLOT_BYTES))
            parts.append(slots[slots["second"] > 0])
    return np.concatenate(parts)


def _read_slots(file: OpenFile, begin: int, end: int) -> NDArray[np.void]:
    data = file.read(begin * TIMER_SLOT_BYTES, (end - begin) * TIMER_SLOT_BYTES)
    if len(data) < (end - begin) * TIMER_SLOT_BYTES:
        raise StoreChangedError(
            f"{file.path} has fewer than {WHEEL_BYTES} bytes: it was cut. Deleted, it is made anew."
        )
    return np.frombuffer(data, TIMER_SLOT)


def _near(positions: NDArray[np.int64], size: int, file_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut ascending positions (bytes) of items of one size into runs [first, last) in one file with small gaps."""
    if not len(positions):
        return
    is_far = (positions[1:] - positions[:-1] > _NEAR_BYTES + size) | (
        positions[1:] // file_bytes != positions[:-1] // file_bytes
    )
    edges = np.concatenate([[0], np.flatnonzero(is_far) + 1, [len(positions)]]).tolist()
    yield from pairwise(edges)
