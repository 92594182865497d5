"""The three files of RocketMQ's timer: timer log, timer wheel and timer check. `timer.py` interprets their contents.

Any process may read these files. Only the holder of the store's lock may write them, because a broker reads all three
when it starts. Entries and slots are read by position, and those close together in one call, so a waiting message costs
nothing until it is due.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, StoreChangedError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.timer import (
    BLANK_MAGIC,
    MAX_MAGIC,
    SECOND_MS,
    SLOT_COUNT,
    TIMER_BLANK,
    TIMER_CHECK,
    TIMER_CHECK_FILE_BYTES,
    TIMER_FILE_BYTES,
    TIMER_SLOT,
    TIMER_SLOT_BYTES,
    TIMER_UNIT,
    TIMER_UNIT_BYTES,
    WHEEL_BYTES,
    EntryPlaces,
    TimerCheck,
    are_entries,
    decode_timer_check,
    encode_timer_blank,
    encode_timer_check,
)
from rmq_spark.store.log.commit_log_writer import write_again
from rmq_spark.store.log.segments import SegmentRun, list_segments

TIMER_LOG, TIMER_WHEEL, TIMER_CHECK_NAME = "timerlog", "timerwheel", "timercheck"

_NEAR_BYTES = 4096  # items with smaller gaps are read together, because a call costs as much as reading this
_SCAN_ENTRIES = 1 << 16  # entries that are read at once
_LINK_BYTES = 16  # the first bytes of an entry: size, previous position, magic


class TimerLog:
    """The timer log. Positions of entries count bytes from the begin of the whole log. Not thread-safe.

    No file stays open between two calls.
    """

    def __init__(self, root: str, disk: Disk) -> None:
        self._folder, self._disk = files.join(root, TIMER_LOG), disk
        self.run = SegmentRun((), 0)
        self._unsynced: set[str] = set()
        self.refresh()

    def refresh(self) -> None:
        """List the files again.

        Raises DamageError if the files have different lengths, and StorePathError if the folder has other names.
        """
        self.run = list_segments(self._folder)

    @property
    def file_bytes(self) -> int:
        """The length of each file of the log, in bytes."""
        return self.run.size or TIMER_FILE_BYTES

    def units_at(self, positions: NDArray[np.int64]) -> NDArray[np.void]:
        """Return the entries at `positions`, which must ascend. An entry whose position is in no file is all zeros."""
        found, file, opened = np.zeros(len(positions), TIMER_UNIT), None, None
        try:
            for first, last in _near(positions, TIMER_UNIT_BYTES, self.file_bytes):
                begin, size = int(positions[first]), int(positions[last - 1] - positions[first]) + TIMER_UNIT_BYTES
                segment = self.run.holding(begin)
                if segment is None:
                    continue
                if file is None or opened is not segment:
                    if file is not None:
                        file.close()
                    file, opened = OpenFile(segment.path), segment
                data = np.frombuffer(file.read(begin - segment.begin, size).ljust(size, b"\0"), np.uint8)
                view: NDArray[np.void] = np.ndarray((size - TIMER_UNIT_BYTES + 1,), TIMER_UNIT, data, strides=(1,))
                found[first:last] = view[positions[first:last] - begin]
        finally:
            if file is not None:
                file.close()
        return found

    def walk(self, position: int) -> list[int]:
        """Return the positions of the entries of a chain, newest first, starting with its last entry at `position`.

        Ends at the first entry of the chain, or where there is no valid entry. Each entry contains the position of the
        previous one, so this reads them one after the other. For a few long chains, this is faster than `units_at`.
        """
        found: list[int] = []
        file, opened = None, None
        try:
            while position >= 0:
                segment = self.run.holding(position)
                if segment is None:
                    break
                if file is None or opened is not segment:
                    if file is not None:
                        file.close()
                    file, opened = OpenFile(segment.path), segment
                link = file.read(position - segment.begin, _LINK_BYTES)
                magic = int.from_bytes(link[_LINK_BYTES - 4 :], "big")
                if int.from_bytes(link[:4], "big") != TIMER_UNIT_BYTES or magic > MAX_MAGIC:
                    break
                found.append(position)
                previous = int.from_bytes(link[4:12], "big", signed=True)
                if previous >= position:
                    break  # damage: each link must lead back, otherwise the chain might never end
                position = previous
        finally:
            if file is not None:
                file.close()
        return found

    def scan(self, begin: int, end: int | None = None) -> Iterator[tuple[NDArray[np.int64], NDArray[np.void]]]:
        """Yield blocks of (positions, entries) from position `begin` to `end`; None means the end of the log.

        Stops at the first bytes that are not an entry, except that after a filler the next file follows, as in
        TimerMessageStore#recoverAndRevise (5.3).
        """
        segment = self.run.holding(begin)
        while segment is not None:
            at = max(begin, segment.begin)
            while at + TIMER_UNIT_BYTES <= segment.end:
                count = min(_SCAN_ENTRIES, (segment.end - at) // TIMER_UNIT_BYTES)
                with OpenFile(segment.path) as file:
                    entries = np.frombuffer(file.read(at - segment.begin, count * TIMER_UNIT_BYTES), TIMER_UNIT)
                positions = at + np.arange(len(entries), dtype=np.int64) * TIMER_UNIT_BYTES
                good = are_entries(entries) if end is None else are_entries(entries) & (positions < end)
                stop = int(np.argmin(good)) if not good.all() else len(entries)
                if stop:
                    yield positions[:stop], entries[:stop]
                if stop < len(entries):
                    if int(entries["magic"][stop]) != BLANK_MAGIC:
                        return
                    break  # the rest of the file is a filler
                at += count * TIMER_UNIT_BYTES
            segment = self.run.after(segment)

    def goes_on(self, position: int) -> bool:
        """Return whether the log has an entry at `position`.

        If a filler or the end of the file is at `position`, looks at the begin of the next file instead.
        """
        segment = self.run.holding(position)
        if segment is not None and position + TIMER_UNIT_BYTES <= segment.end:
            entry = self.units_at(np.array([position]))
            if int(entry["magic"][0]) != BLANK_MAGIC:
                return bool(are_entries(entry)[0])
        following = self.run.after(segment) if segment is not None else None
        return following is not None and bool(are_entries(self.units_at(np.array([following.begin])))[0])

    def write_entries(self, places: EntryPlaces, entries: NDArray[np.void]) -> None:
        """Write `entries` at the positions in `places`, with the fillers at the ends of files.

        Syncs only new files. A new file is created with its first entries, so that no power cut leaves a file without
        them.
        """
        entries = entries.astype(TIMER_UNIT)
        fillers = {position // self.file_bytes: position for position in places.blanks.tolist()}
        file_numbers = places.positions // self.file_bytes
        for number in sorted({*file_numbers.tolist(), *fillers}):
            chosen = np.flatnonzero(file_numbers == number)
            if len(chosen):
                self._write(int(places.positions[chosen[0]]), entries[chosen[0] : chosen[-1] + 1].tobytes())
            if number in fillers:
                self._write(fillers[number], encode_timer_blank(fillers[number], self.file_bytes))

    def expire(self, log_begin: int) -> None:
        """Delete files of which all messages have expired from the commit log, which begins at offset `log_begin`.

        Looks only at the last entry of each file, as MappedFileQueue#deleteExpiredFileByOffsetForTimerLog (5.3) does.
        The last file is always kept.
        """
        for segment in self.run.segments[:-1]:
            count = (segment.size - TIMER_BLANK.itemsize) // TIMER_UNIT_BYTES
            last = self.units_at(np.array([segment.begin + (count - 1) * TIMER_UNIT_BYTES]))
            if not are_entries(last)[0] or int(last["physical_offset"][0]) >= log_begin:
                break
            self._disk.remove(segment.path)
        self.refresh()

    def discard(self) -> None:
        """Delete all files durably, oldest first, so that after a crash the newest entries remain."""
        for segment in self.run.segments:
            self._disk.remove(segment.path)
            self._disk.sync_folder(self._folder)
        self._unsynced.clear()
        self.refresh()

    def unlink_before(self, position: int) -> None:
        """Make the entry at `position` the first one of its chain, by removing its link to the previous entry."""
        assert TIMER_UNIT.fields is not None
        at = TIMER_UNIT.fields["previous_position"][1]
        self._write(position + at, (-1).to_bytes(8, "big", signed=True))

    def clear_from(self, end: int) -> None:
        """Zero everything from position `end`, the end of the log.

        Otherwise the rest of a write that a power cut ended might later be taken for entries.
        """
        for segment in self.run.segments:
            begin = max(end - segment.begin, 0)
            parts = list(files.data_extents(segment.path, begin, segment.size)) if begin < segment.size else []
            if parts:
                with self._disk.open(segment.path) as file:
                    for first, last in parts:
                        file.write(first, bytes(last - first))
                self._unsynced.add(segment.path)

    def write_again_from(self, position: int, heartbeat: Callable[[], None]) -> None:
        """Write the same bytes again from `position`. This is needed if a sync of them may have failed."""
        for segment in self.run.segments:
            if segment.end > position:
                write_again(self._disk, segment.path, max(position - segment.begin, 0), heartbeat)
                self._unsynced.add(segment.path)

    def sync(self) -> None:
        """Sync the files. When this returns, everything that was written survives a power cut."""
        for path in sorted(self._unsynced):
            with self._disk.open(path) as file:
                file.sync()
        self._unsynced.clear()

    def _write(self, position: int, data: bytes) -> None:
        segment = self.run.holding(position)
        if segment is None:
            self._create_file(position, data)
            return
        with self._disk.open(segment.path) as file:
            file.write(position - segment.begin, data)
        self._unsynced.add(segment.path)

    def _create_file(self, position: int, data: bytes) -> None:
        size = self.file_bytes
        begin = position // size * size
        assert position == begin, (position, size)
        self.sync()  # a power cut must not keep entries of the new file and lose earlier ones
        self._disk.make_folder(self._folder)
        path = files.join(self._folder, filenames.segment_name(begin))
        if files.file_size(path) == 0:
            self._disk.remove(path)  # a process died while creating it
        self._disk.create_filled(path, size, 0, data)
        self._disk.sync_folder(self._folder)
        self._disk.sync_folder(files.parent(self._folder))
        self.refresh()


class TimerWheel:
    """The timer wheel: a file of slots, one per second. Not thread-safe. No file stays open between two calls."""

    def __init__(self, root: str, disk: Disk) -> None:
        self._path, self._disk = files.join(root, TIMER_WHEEL), disk
        self._is_unsynced = False

    def is_there(self) -> bool:
        """Return whether the file of the wheel exists with its full length.

        Returns False for an empty file, which a broker is about to fill. Raises DamageError if the file has another
        length, because a broker would not start with it.
        """
        size = files.file_size(self._path)
        if size not in (-1, 0, WHEEL_BYTES):
            raise DamageError(
                "the timer wheel has another length",
                self._path,
                0,
                f"{WHEEL_BYTES} bytes",
                size,
                "Restore the file from a copy, or remove it: it is rebuilt from the timer log.",
            )
        return size == WHEEL_BYTES

    def make(self) -> None:
        """Create a wheel without messages, as a sparse file, if there is no wheel."""
        if not self.is_there():
            if files.file_size(self._path) == 0:
                self._disk.remove(self._path)
            self._disk.create(self._path, WHEEL_BYTES)
            self._disk.sync_folder(files.parent(self._path))

    def discard(self) -> None:
        """Delete the wheel durably."""
        self._disk.remove(self._path)
        self._disk.sync_folder(files.parent(self._path))
        self._is_unsynced = False

    def slots_at(self, numbers: NDArray[np.int64]) -> NDArray[np.void]:
        """Return the slots with these `numbers`, which must ascend. If there is no wheel, they are all zeros."""
        found = np.zeros(len(numbers), TIMER_SLOT)
        if not self.is_there():
            return found
        with OpenFile(self._path) as file:
            for first, last in _near(numbers * TIMER_SLOT_BYTES, TIMER_SLOT_BYTES, WHEEL_BYTES):
                begin = int(numbers[first])
                found[first:last] = _read_slots(file, begin, int(numbers[last - 1]) + 1)[numbers[first:last] - begin]
        return found

    def slots_from(self, begin_ms: int, end_ms: int | None = None) -> NDArray[np.void]:
        """Return the slots that have messages due in the seconds [begin, end), in the order of the seconds.

        If `end_ms` is None, there is no end. A second that is more than one round of the wheel after `begin` cannot
        have a slot.
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
        """Write `slots` with these `numbers`, which must ascend. Other slots remain unchanged.

        Slots close together are written in one call, together with the slots between them.
        """
        self.make()
        slots = slots.astype(TIMER_SLOT)  # back to the file's byte order: numpy concatenates in the machine's
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

    def write_again(self, heartbeat: Callable[[], None]) -> None:
        """Write the same slots again. This is needed if a sync of them may have failed."""
        write_again(self._disk, self._path, 0, heartbeat)
        self._is_unsynced = True

    def sync(self) -> None:
        """Sync the file. When this returns, everything that was written survives a power cut."""
        if self._is_unsynced:
            with self._disk.open(self._path) as file:
                file.sync()
            self._is_unsynced = False


class TimerCheckFile:
    """The file of the timer check, `config/timercheck`."""

    def __init__(self, root: str, disk: Disk) -> None:
        self._folder, self._disk = files.join(root, filenames.CONFIG), disk
        self.path = files.join(self._folder, TIMER_CHECK_NAME)

    def read(self) -> TimerCheck | None:
        """Return the contents of the check, or None if the file is missing or empty. Cheap."""
        page = files.read_small(self.path)
        return decode_timer_check(page) if page else None

    def write(self, check: TimerCheck) -> None:
        """Replace the file, durably and atomically."""
        self._disk.make_folder(self._folder)
        self._disk.replace(self.path, encode_timer_check(check).ljust(TIMER_CHECK_FILE_BYTES, b"\0"))

    def announce_taken(self, queue_offset: int) -> None:
        """Write `master_queue_offset`, before messages of the queue up to `queue_offset` get entries in the timer log.

        When a broker starts, it resumes taking messages after the message of the last entry, but not beyond
        `master_queue_offset` (TimerMessageStore#recover). With the old value it would take the new messages again.
        """
        assert TIMER_CHECK.fields is not None
        at = TIMER_CHECK.fields["master_queue_offset"][1]
        with self._disk.open(self.path) as file:
            file.write(at, queue_offset.to_bytes(8, "big"))


def _written_slots(path: str, begin: int, end: int) -> NDArray[np.void]:
    """Return those of the slots [begin, end) that were written at some time. Holes of the sparse file are not read."""
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
            f"{file.path} was truncated while it was read: expected {WHEEL_BYTES} bytes. Remove it: it is rebuilt from "
            "the timer log."
        )
    return np.frombuffer(data, TIMER_SLOT)


def _near(positions: NDArray[np.int64], size: int, file_bytes: int) -> Iterator[tuple[int, int]]:
    """Divide items into runs [first, last) that are read or written together: with small gaps, and in one file.

    The items have `size` bytes each, at ascending `positions` (bytes).
    """
    if not len(positions):
        return
    is_far = (positions[1:] - positions[:-1] > _NEAR_BYTES + size) | (
        positions[1:] // file_bytes != positions[:-1] // file_bytes
    )
    edges = np.concatenate([[0], np.flatnonzero(is_far) + 1, [len(positions)]]).tolist()
    yield from pairwise(edges)
