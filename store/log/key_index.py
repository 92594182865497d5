"""The key index for a writer: keys put into its newest file, a dead writer's keys taken back, old files deleted.

Every byte comes out as a broker's writer leaves it. One thread, under the store's lock; readers may look things up
meanwhile (`lookup.py`). No file stays open between calls.

The order of writes, for each file: units, slots, header. Until a slot is written no reader and no broker sees its
unit; until the header is written a broker would put its own units over them. A crash before the header leaves slots
that point at units which the header does not count: `abort` is there then, so a broker drops the file, and our next
writer calls `repair`. After a power cut any of it may be there: repair to the state that was synced, or `drop_unsafe`.

Source: IndexService#load, #buildIndex, #flush, #deleteExpiredFile, IndexFile#putKey (4.9, 5.3).
"""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import StoreChangedError
from rmq_spark.store.format.index_file import INDEX_UNIT, IndexShape, encode_header
from rmq_spark.store.format.index_keys import SlotGroups, encode_keys
from rmq_spark.store.format.index_state import IndexState, state_of
from rmq_spark.store.log.changes import Changes, write_again
from rmq_spark.store.log.index_files import IndexFiles, KnownFile
from rmq_spark.store.log.index_repair import holds_still, take_back
from rmq_spark.store.log.index_slots import SlotRuns

_PIECE_KEYS = 1 << 20  # put at once: bounds memory, some 100 bytes a key
_LOOK_BACK_UNITS = 256


class KeyIndex:
    """The index of the store at `root`; what is on disk is read when it is first needed.

    `shape` is for files of a store that has none to learn it from. `now_ms` is the clock that names files. What
    changes is noted in `changes`, for whoever syncs; without them `sync` does it.
    """

    def __init__(
        self,
        root: str,
        disk: Disk,
        shape: IndexShape,
        now_ms: Callable[[], int],
        changes: Changes | None = None,
    ) -> None:
        self._disk = disk
        self._changes = changes or Changes(disk, (root,))
        self._files = IndexFiles(root, disk, shape, now_ms, self._changes)
        self._unfinished: IndexState | None = None  # what was there before a put that failed

    def look(self) -> None:
        """Forget what was known of the disk: somebody else may have written."""
        self._files.look()
        self._unfinished = None

    def state(self) -> IndexState:
        """Return what `repair` needs to come back to this moment. What a put that failed left is taken back first."""
        if self._unfinished is not None and not self.repair(self._unfinished):
            raise StoreChangedError(
                f"{self._files.folder}: a file of the key index was replaced while keys were put into it. Open the "
                "store again: the next writer finds out which keys are missing."
            )
        last = self._files.last()
        return state_of(last.name, last.shape, last.header) if last else IndexState()

    def indexed_end(self) -> int:
        """Return the physical offset of the newest record with a key in the index, 0 without one.

        Keys of records before it are there; of its own keys some may be missing after a crash.
        """
        ends = (file.header.end_physical_offset for file in map(self._files.file, reversed(self._files.names)))
        return next((end for end in ends if end > 0), 0)

    def full_until_ms(self) -> int:
        """Return the store time (ms) of the last key in the newest file that takes no more keys, 0 without one.

        Once the index is synced the checkpoint's indexMsgTimestamp may say so (IndexService#flush).
        """
        last = self._files.last()
        if last is not None and not last.room:
            return last.header.end_timestamp
        return max((self._files.file(name).header.end_timestamp for name in self._files.names[-2:-1]), default=0)

    def put_many(
        self,
        key_hashes: NDArray[np.int32],
        physical_offsets: NDArray[np.int64],
        store_times: NDArray[np.int64],
        *,
        skip_known: bool = False,
    ) -> int:
        """Put keys of records into the index, in the order of the log; return how many were put.

        One element a key: its hash (java.index_key_hash), its record's physical offset and store time (ms). With
        `skip_known` those that the index has are left out: keys of records before `indexed_end`, as
        IndexService#buildIndex does, and those of the record there that it has. After an error (DiskFullError, ...)
        none counts as put, and the next call first takes back what was.
        """
        assert len(key_hashes) == len(physical_offsets) == len(store_times), (len(key_hashes), len(store_times))
        assert not len(key_hashes) or key_hashes.min() >= 0, key_hashes.min()
        assert bool((physical_offsets[1:] >= physical_offsets[:-1]).all()), "not in the order of the log"
        before = self.state()
        if skip_known and len(key_hashes):
            is_new = self._is_new(key_hashes, physical_offsets)
            key_hashes, physical_offsets = key_hashes[is_new], physical_offsets[is_new]
            store_times = store_times[is_new]
        begin, count = 0, len(key_hashes)
        if count:
            self._unfinished = before
        while begin < count:
            file = self._files.last()
            if file is None or not file.room:
                file = self._files.make(file)
            part = slice(begin, min(begin + file.room, begin + _PIECE_KEYS, count))
            self._put(file, key_hashes[part], physical_offsets[part], store_times[part])
            begin = part.stop
        self._unfinished = None
        return count

    def repair(self, state: IndexState) -> bool:
        """Make the index what it was when `state` was asked for, after a writer died since.

        The state must be one that was synced, or from since the machine started; and nobody may have put keys since
        but the one who died. False if the state's file is gone or is not what it was: it and what came after it are
        deleted, and keys of records from `indexed_end` on must be put again, with `skip_known`.
        """
        # Newest first, here and below: a crash on the way leaves no gap between files.
        self._delete(reversed([name for name in self._files.names if name > state.name]))
        is_whole = not state.name or state.name in self._files.names
        if state.name and is_whole and state.shape is not None:
            path = self._files.path(state.name)
            self._changes.note_file(path)
            with self._disk.open(path) as file:
                is_whole = holds_still(file, state.shape, state.header)
                if is_whole:
                    take_back(file, state.shape, state.header)
            if not is_whole:
                self._delete([state.name])
        self.look()
        return is_whole

    def write_again(self, state: IndexState, note_progress: Callable[[], None]) -> None:
        """Write again what was put since `state` was asked for, after a failed sync and a `repair` to that state.

        Files that came later were deleted by that repair, and made anew since: no sync of them has failed.
        """
        if state.name not in self._files.names or state.shape is None:
            return
        path, file = self._files.path(state.name), self._files.file(state.name)
        slots_end = state.shape.unit_position(0)
        write_again(self._disk, path, 0, note_progress, stop=slots_end)
        begin, end = (state.shape.unit_position(one.next_unit) for one in (state.header, file.header))
        write_again(self._disk, path, max(begin, slots_end), note_progress, end=end)
        self._changes.note_file(path)

    def drop_unsafe(self, index_msg_timestamp: int) -> int:
        """Delete the files that a broker's crash, or a power cut, may have spoiled; return `indexed_end` after it.

        `index_msg_timestamp` is the checkpoint's: the store time (ms) of the last key in the newest file that is
        full and on disk for good. What is newer is deleted, as IndexService#load does after a crash. Where several
        files end at that time only the first is sure to be older than the checkpoint. Keys of all records from the
        returned physical offset on must be put again, with `skip_known`.
        """
        safe = 0
        for header in (self._files.file(name).header for name in self._files.names):
            if header.is_empty or header.end_timestamp > index_msg_timestamp:
                break
            safe += 1
            if header.end_timestamp == index_msg_timestamp:
                break
        self._delete(reversed(self._files.names[safe:]))
        self._unfinished = None
        return self.indexed_end()

    def expire(self, log_begin: int) -> int:
        """Delete the oldest files whose records all lie before the physical offset `log_begin`; return how many.

        Never the newest file, as IndexService#deleteExpiredFile. For retention.
        """
        expired = []
        for name in self._files.names[:-1]:
            if self._files.file(name).header.end_physical_offset >= log_begin:
                break
            expired.append(name)
        self._delete(expired)
        return len(expired)

    def sync(self) -> None:
        """Return when everything that `changes` noted survives a power cut."""
        self._changes.sync()

    def _put(
        self,
        file: KnownFile,
        key_hashes: NDArray[np.int32],
        physical_offsets: NDArray[np.int64],
        store_times: NDArray[np.int64],
    ) -> None:
        shape, header = file.shape, file.header
        assert shape is not None, file
        self._changes.note_file(file.path)
        with self._disk.open(file.path) as opened:
            groups = SlotGroups(key_hashes, shape.slot_count)
            runs = SlotRuns(opened, shape, groups.slots)
            number = max(header.next_unit, 1)
            previous, newest, first_count = groups.link(runs.read(), number)
            units, after = encode_keys(header, key_hashes, physical_offsets, store_times, previous, first_count)
            # A reader follows a slot to its unit at once: the unit comes first.
            opened.write(shape.unit_position(number), units.view(np.uint8))
            runs.write(newest)
            # Last, for the death of this process: what the header counts is there, slots included. A power cut may
            # keep the header and lose the rest; nothing was promised before a sync.
            opened.write(0, encode_header(after))
        file.header = after

    def _delete(self, names: Iterable[str]) -> None:
        """Delete files in the given order: a crash on the way leaves those at its end."""
        for name in list(names):
            self._disk.remove(self._files.path(name))
            self._changes.note_folder(self._files.folder)
            self._files.forget(name)

    def _is_new(self, key_hashes: NDArray[np.int32], physical_offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Say of each key whether the index lacks it."""
        end = self.indexed_end()
        is_new = physical_offsets >= end
        at_end = physical_offsets == end
        if end and at_end.any():
            # A broker would put all keys of the record there again. But keys are put one by one, into two files
            # where one is full in between: what is there is left out, what is missing is put.
            is_new &= ~(at_end & np.isin(key_hashes, self._hashes_at(end)))
        return is_new

    def _hashes_at(self, physical_offset: int) -> NDArray[np.int32]:
        """Return the hashes of the newest units, as far as they are of the record at a physical offset."""
        found = [np.zeros(0, np.int32)]
        for file in map(self._files.file, reversed(self._files.names)):
            self._files.learn(file)
            if (shape := file.shape) is None:
                break
            with files.OpenFile(file.path) as opened:
                for end in range(file.header.next_unit, 1, -_LOOK_BACK_UNITS):
                    first = max(end - _LOOK_BACK_UNITS, 1)
                    raw = opened.read(shape.unit_position(first), (end - first) * INDEX_UNIT.itemsize)
                    units = np.frombuffer(raw, INDEX_UNIT)
                    is_other = units["physical_offset"] != physical_offset
                    found.append(units["key_hash"][~is_other].astype(np.int32))
                    if is_other.any():
                        return np.concatenate(found)
        return np.concatenate(found)
