"""The key index for a writer: adds keys to the newest file, removes a crashed writer's keys, deletes old files.

The name of an index file is the local time of its creation, and newer files have higher names. Every file except the
newest is full, or a writer abandoned it. The files have the same bytes that a broker would write. For one thread that
holds the store's lock. Readers may search at the same time (`key_search`). No file stays open between calls.

Each file is written in this order: entries, slots, header. A reader or broker finds an entry only after its slot is
written. Until the header is written, a broker would overwrite the entry with its own. A crash before the header leaves
slots that point to entries after the end that the header gives. In this case `abort` exists, so a broker drops the
file, and our next writer calls `repair`. After a power cut, any part of the writes may be missing. Then call `repair`
with the state of the last sync, or `drop_unsafe`.

Source: IndexService#load, #buildIndex, #flush, #deleteExpiredFile, #getAndCreateLastIndexFile, IndexFile#putKey (4.9,
5.3).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.write import Disk, WritableFile
from rmq_spark.store.errors import StoreChangedError, StorePathError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.index_file import (
    INDEX_HEADER,
    INDEX_SLOT,
    INDEX_UNIT,
    IndexHeader,
    IndexShape,
    IndexState,
    decode_header,
    decode_slot,
    encode_header,
    encode_slot,
    encode_unit,
    learn_shape,
    seconds_since,
    state_of,
)
from rmq_spark.store.format.index_keys import SlotGroups, encode_keys, seeded_header
from rmq_spark.store.log.commit_log_writer import DirtyFiles, write_again
from rmq_spark.store.log.key_index_slots import SlotRuns, is_same_file, restore_file


@dataclass(slots=True)
class KnownFile:
    """An index file as it is on disk. `shape` is None if it is unknown; such a file gets no more keys."""

    name: str
    path: str
    size: int  # bytes
    header: IndexHeader
    shape: IndexShape | None = None

    @property
    def room(self) -> int:
        """Return the number of keys that still fit into the file. Return 0 if its shape is unknown."""
        return self.shape.unit_count - max(self.header.next_unit, 1) if self.shape else 0


class IndexFiles:
    """The index files of the store at `root`. Each file is read when it is first needed, and cached until `refresh`.

    `shape` (the numbers of slots and entries) is used if the store has no file that shows it. `now_ms` is the clock for
    the names of files (ms since the epoch). `shapes` has the shapes of files by name, and gets those that are found:
    the shape of a file never changes.
    """

    def __init__(
        self,
        root: str,
        disk: Disk,
        shape: IndexShape,
        now_ms: Callable[[], int],
        changes: DirtyFiles,
        shapes: dict[str, IndexShape],
    ) -> None:
        assert shape.slot_count > 0, shape
        assert shape.unit_count > 1, shape
        self.folder = files.join(root, filenames.INDEX)
        self._root, self._disk, self._changes = root, disk, changes
        self._shape, self._now_ms = shape, now_ms
        self._shapes = shapes
        self._known: dict[str, KnownFile] = {}
        self._names: list[str] | None = None
        self._highest_name = ""

    def refresh(self) -> None:
        """Clear the cache."""
        self._names = None

    @property
    def names(self) -> list[str]:
        """The names of the index files, oldest first. Files whose names a broker would not use are skipped."""
        if self._names is None:
            entries = [entry for entry in files.list_folder(self.folder) if filenames.is_index_name(entry[0])]
            self._highest_name = entries[-1][0] if entries else ""
            self._names, self._known = [name for name, is_folder in entries if not is_folder], {}
        return self._names

    def path(self, name: str) -> str:
        """Return the path of the file with this name."""
        return files.join(self.folder, name)

    def file(self, name: str) -> KnownFile:
        """Return the file with this name. Its shape may still be unknown: `learn` sets it."""
        file = self._known.get(name)
        if file is None:
            with files.OpenFile(self.path(name)) as opened:
                header = decode_header(opened.read(0, INDEX_HEADER.itemsize))
                shape, size = self._shapes.get(name), opened.size()
                file = KnownFile(name, opened.path, size, header, shape if shape and shape.file_bytes == size else None)
            self._known[name] = file
        return file

    def last(self) -> KnownFile | None:
        """Return the newest file, with its shape if it can be determined. Return None if there is no file."""
        if not self.names:
            return None
        file = self.file(self.names[-1])
        self.learn(file)
        return file

    def learn(self, file: KnownFile) -> None:
        """Determine a file's shape and set it. It stays None if it cannot be determined.

        An empty file does not show its shape, so the shape of the newest non-empty file of the same size is used.
        """
        if file.shape is None and file.header.is_empty:
            for other in map(self.file, reversed(self.names)):
                if file.shape is None and other.size == file.size and not other.header.is_empty:
                    self.learn(other)
                    file.shape = other.shape
        if file.shape is None:
            with files.OpenFile(file.path) as opened:
                file.shape = learn_shape(opened.read, file.size, self._shape)
        if file.shape is not None:
            self._shapes[file.name] = file.shape

    def make(self, last: KnownFile | None) -> KnownFile:
        """Create the next file after `last`, with the same shape. Its header begins where `last` ends.

        A crash during the call leaves an empty file. The next writer adds its keys to this file, or `repair` deletes
        it.
        """
        shape = (last.shape if last else None) or self._shape
        header = seeded_header(last.header) if last else IndexHeader()
        name = self._new_name()
        if last is None:  # if a writer crashed, the folder may exist and its name may not be synced
            self._disk.make_folder(self.folder)
            self._changes.note_new_folder(self.folder, self._root)
        path = self.path(name)
        self._disk.create(path, shape.file_bytes)
        self._changes.note_new_file(path)
        self.names.append(name)
        file = self._known[name] = KnownFile(name, path, shape.file_bytes, header, shape)
        self._highest_name, self._shapes[name] = name, shape
        if header != IndexHeader():
            with self._disk.open(path) as opened:
                opened.write(0, encode_header(header))
        return file

    def forget(self, name: str) -> None:
        """Remove the name of a deleted file from the list."""
        del self.names[self.names.index(name)]

    def _new_name(self) -> str:
        """Return a name that is higher than all existing names.

        It is the local time. If the clock was set back, it is the highest existing name plus one.
        """
        seconds, ms = divmod(self._now_ms(), 1000)
        name = f"{datetime.fromtimestamp(seconds):%Y%m%d%H%M%S}{ms:03d}"
        if name > self._highest_name:
            return name
        name = f"{int(self._highest_name) + 1:0{filenames.INDEX_NAME_DIGITS}d}"
        if not filenames.is_index_name(name):
            raise StorePathError(
                f"cannot create a file of the key index: {self.path(self._highest_name)} has the highest possible "
                "name; expected a time. Move that file away: it is not a broker's."
            )
        return name


_PART_KEYS = 1 << 20  # the maximum number of keys to add at once, because each needs about 100 bytes of memory
_LOOK_BACK_ENTRIES = 256


class KeyIndex:
    """The key index of the store at `root`. Files are read when they are first needed.

    `shape` (the numbers of slots and entries) is used if the store has no file that shows it. `now_ms` is the clock for
    the names of files (ms since the epoch). Changed files are added to `changes`, and the caller must sync these. If
    `changes` is not given, call `sync` instead. `shapes` is that of `IndexFiles`: give it to several objects for the
    same store.
    """

    def __init__(
        self,
        root: str,
        disk: Disk,
        shape: IndexShape,
        now_ms: Callable[[], int],
        changes: DirtyFiles | None = None,
        shapes: dict[str, IndexShape] | None = None,
    ) -> None:
        self._disk = disk
        self._changes = changes or DirtyFiles(disk, (root,))
        self._files = IndexFiles(root, disk, shape, now_ms, self._changes, {} if shapes is None else shapes)
        self._unfinished: IndexState | None = None  # the state before a `put_many` that failed
        self._open_file: KnownFile | None = None
        self._opened: WritableFile | None = None

    def refresh(self) -> None:
        """Clear the cache, because another process may have written."""
        self.close()
        self._files.refresh()
        self._unfinished = None

    def state(self) -> IndexState:
        """Return the current state, which `repair` can restore. First remove the keys of a `put_many` that failed.

        Raises StoreChangedError if they cannot be removed, because a file was replaced meanwhile.
        """
        if self._unfinished is not None and not self.repair(self._unfinished):
            raise StoreChangedError(
                f"cannot add keys to {self._files.folder}: a file of the key index was replaced meanwhile. Open the "
                "store again: the next writer adds the missing keys."
            )
        last = self._files.last()
        return state_of(last.name, last.shape, last.header) if last else IndexState()

    def indexed_end(self) -> int:
        """Return the physical offset of the newest record that has a key in the index. Return 0 if the index is empty.

        The index has all keys of earlier records. After a crash, some keys of this newest record may be missing.
        """
        ends = (file.header.end_physical_offset for file in map(self._files.file, reversed(self._files.names)))
        return next((end for end in ends if end > 0), 0)

    def full_until_ms(self) -> int:
        """Return the store time (ms) of the last key in the newest file that is full. Return 0 if no file is full.

        After a sync of the index, the checkpoint's indexMsgTimestamp may be set to this time (IndexService#flush).
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
        """Add keys of records to the index, in the order of the log. Return the number of added keys.

        The arrays have one element per key: its hash (see java.index_key_hash), and the physical offset and store time
        (ms) of its record. With `skip_known`, keys that the index already has are skipped. These are all keys of
        records below `indexed_end`, as in IndexService#buildIndex, and those keys of the record at `indexed_end` that
        the index contains. After an error (such as DiskFullError) none of the keys is treated as added, and the next
        call first removes those that were written.
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
            part = slice(begin, min(begin + file.room, begin + _PART_KEYS, count))
            self._put(file, key_hashes[part], physical_offsets[part], store_times[part])
            begin = part.stop
        self._unfinished = None
        return count

    def has_room(self, key_count: int) -> bool:
        """Say whether `put_one` can add this many keys: a file is open, is not empty, and has room for them."""
        file = self._open_file
        is_usable = file is not None and self._opened is not None and self._unfinished is None
        return is_usable and file is not None and not file.header.is_empty and file.room >= key_count

    def put_one(self, key_hashes: Sequence[int], physical_offset: int, store_time_ms: int) -> None:
        """Add the keys of one record, as `put_many` does, if `has_room` is true for them."""
        file, opened = self._open_file, self._opened
        assert file is not None
        assert opened is not None
        assert file.shape is not None
        shape, before = file.shape, file.header
        self._unfinished = state_of(file.name, shape, before)
        self._changes.note_file(file.path)
        number, used, newest, entries = before.next_unit, before.used_slot_count, dict[int, int](), []
        seconds = seconds_since(before.begin_timestamp, store_time_ms)
        for key_hash in key_hashes:
            position = shape.slot_position(key_hash)
            previous = newest.get(position)
            if previous is None:
                previous = decode_slot(opened.read(position, INDEX_SLOT.itemsize))
                if not 0 < previous <= number:  # as in IndexFile#putKey
                    previous, used = 0, used + 1
            entries.append(encode_unit(key_hash, physical_offset, seconds, previous))
            newest[position] = number
            number += 1
        after = replace(
            before,
            end_timestamp=store_time_ms,
            end_physical_offset=physical_offset,
            used_slot_count=used,
            next_unit=number,
        )
        # In the order of `_put`: entries, slots, header.
        opened.write(shape.unit_position(before.next_unit), b"".join(entries))
        for position, value in newest.items():
            opened.write(position, encode_slot(value))
        opened.write(0, encode_header(after))
        file.header, self._unfinished = after, None

    def open(self) -> None:
        """Keep the newest file open for `put_one`, until `close`."""
        last = self._files.last()
        if last is not self._open_file:
            self.close()
            if last is not None and last.shape is not None:
                self._open_file, self._opened = last, self._disk.open(last.path)

    def close(self) -> None:
        """Close the file that `open` keeps open."""
        opened, self._opened, self._open_file = self._opened, None, None
        if opened is not None:
            opened.close()

    def repair(self, state: IndexState) -> bool:
        """Restore the index to `state`, after a later writer crashed. Return whether this was possible.

        The state must have been synced, or must be from after the last start of the machine. Only the crashed writer
        may have added keys since then. If the file of the state is missing or was replaced, that file and all later
        ones are deleted, and the result is False. Then the caller must add the keys of all records at and after
        `indexed_end` again, with `skip_known`.
        """
        # Newest first, here and below, so that a crash leaves no gap between files.
        self._delete(reversed([name for name in self._files.names if name > state.name]))
        is_restored = not state.name or state.name in self._files.names
        if state.name and is_restored and state.shape is not None:
            path = self._files.path(state.name)
            self._changes.note_file(path)
            with self._disk.open(path) as file:
                is_restored = is_same_file(file, state.shape, state.header)
                if is_restored:
                    restore_file(file, state.shape, state.header)
            if not is_restored:
                self._delete([state.name])
        self.refresh()
        return is_restored

    def write_again(self, state: IndexState, heartbeat: Callable[[], None]) -> None:
        """Write the keys that were added since `state` again, after a failed sync and a `repair` to `state`.

        Later files need nothing: `repair` deleted them and they were created again, so no sync of them has failed.
        """
        if state.name not in self._files.names or state.shape is None:
            return
        path, file = self._files.path(state.name), self._files.file(state.name)
        slots_end = state.shape.unit_position(0)
        write_again(self._disk, path, 0, heartbeat, stop=slots_end)
        begin, end = (state.shape.unit_position(one.next_unit) for one in (state.header, file.header))
        write_again(self._disk, path, max(begin, slots_end), heartbeat, end=end)
        self._changes.note_file(path)

    def drop_unsafe(self, index_msg_timestamp: int) -> int:
        """Delete the files that a broker's crash or a power cut may have damaged. Return the new `indexed_end`.

        `index_msg_timestamp` is from the checkpoint: the store time (ms) of the last key in the newest file that is
        full and durable. Newer files are deleted, as IndexService#load does after a crash. If several files end at that
        time, only the first of them is certainly durable, so the others are deleted too. The caller must add the keys
        of all records at and after the returned physical offset again, with `skip_known`.
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
        """Delete the oldest files whose records are all below the physical offset `log_begin`.

        Return how many were deleted.

        The newest file is never deleted, as in IndexService#deleteExpiredFile. For retention.
        """
        expired = []
        for name in self._files.names[:-1]:
            if self._files.file(name).header.end_physical_offset >= log_begin:
                break
            expired.append(name)
        self._delete(expired)
        return len(expired)

    def sync(self) -> None:
        """Sync all changed files, so that they are durable when this returns."""
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
            entries, after = encode_keys(header, key_hashes, physical_offsets, store_times, previous, first_count)
            # Entries are written before slots, because a reader may follow a slot to its entry at once.
            opened.write(shape.unit_position(number), entries.view(np.uint8))
            runs.write(newest)
            # The header is written last. So if this process dies, all entries up to the end in the header exist, and so
            # do their slots. After a power cut, the header may exist and the rest may be lost; nothing is guaranteed
            # before a sync.
            opened.write(0, encode_header(after))
        file.header = after

    def _delete(self, names: Iterable[str]) -> None:
        """Delete files in the given order. If a crash interrupts this, the last of them remain."""
        for name in list(names):
            self._disk.remove(self._files.path(name))
            self._changes.note_folder(self._files.folder)
            self._files.forget(name)

    def _is_new(self, key_hashes: NDArray[np.int32], physical_offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each key whether it must be added: True if the index does not have it."""
        end = self.indexed_end()
        is_new = physical_offsets >= end
        at_end = physical_offsets == end
        if end and at_end.any():
            # A broker would add all keys of this record again. Here only the missing ones are added. Some may be
            # missing, because keys are added one by one, and go to two files if one becomes full in between.
            is_new &= ~(at_end & np.isin(key_hashes, self._hashes_at(end)))
        return is_new

    def _hashes_at(self, physical_offset: int) -> NDArray[np.int32]:
        """Return the hashes of the newest entries, back to the first entry that is for another record.

        Only entries for the record at `physical_offset` are included.
        """
        found = [np.zeros(0, np.int32)]
        for file in map(self._files.file, reversed(self._files.names)):
            self._files.learn(file)
            if (shape := file.shape) is None:
                break
            with files.OpenFile(file.path) as opened:
                for end in range(file.header.next_unit, 1, -_LOOK_BACK_ENTRIES):
                    first = max(end - _LOOK_BACK_ENTRIES, 1)
                    raw = opened.read(shape.unit_position(first), (end - first) * INDEX_UNIT.itemsize)
                    entries = np.frombuffer(raw, INDEX_UNIT)
                    is_other = entries["physical_offset"] != physical_offset
                    found.append(entries["key_hash"][~is_other].astype(np.int32))
                    if is_other.any():
                        return np.concatenate(found)
        return np.concatenate(found)
