"""For which part of the log each file of the key index is to be believed, and why some are not.

Nothing in these files has a checksum, and nothing says what they lack: a broker that ran for a while without
messageIndexEnable leaves out its messages, one that crashed drops its newest file, and somebody may delete any. So:

- a file vouches for the records strictly between its first and its last one. Keys of these two may stand in another
  file, and what lies between two files may have stood in one that is gone;
- its header, its two ends and units sampled all over it must agree, else it vouches for nothing;
- after a crash of a broker, or of a machine, only what the checkpoint vouches for counts (IndexService#load).

Holes within a file are for `message_search`, which asks for the keys of some records.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rmq_spark.store.disk import files
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.format import filenames
from rmq_spark.store.format.index_file import INDEX_SLOT, INDEX_UNIT, ChainFault, IndexFile, IndexShape

MAX_STEPS = 20_000  # of one walk: what has so many candidates is found sooner by reading the messages in order
_SAMPLE_UNITS = 64


@dataclass(slots=True)
class Reach:
    """A believed file: it has all keys of the records that lie strictly between `begin` and `end` (bytes of the log).

    `fault` says why it is not believed any more, "" while it is.
    """

    path: str
    begin: int
    end: int
    index: IndexFile
    fault: str = ""

    def places(self, key_hash: int, most: int = MAX_STEPS) -> list[int] | None:
        """Return where records lie that may have the key, None where the chain is broken or too long: see `fault`.

        Every unit on the way must be of this slot, and lie in the log before the one that is newer.
        """
        shape = self.index.shape
        assert shape is not None  # else the file would not be believed
        slot, newer, found = key_hash % shape.slot_count, 1 << 63, []
        for step, unit in enumerate(self.index.walk(key_hash)):
            if isinstance(unit, ChainFault):
                self.fault = f"{unit.what} at position {unit.position}"
                return None
            if unit.key_hash < 0 or unit.key_hash % shape.slot_count != slot:
                self.fault = f"unit {unit.number} has the hash {unit.key_hash}, which is not of slot {slot}"
            elif not self.begin <= unit.physical_offset <= newer:
                self.fault = f"unit {unit.number} has the physical offset {unit.physical_offset}, which is out of order"
            elif step >= most:
                self.fault = f"more than {most} keys have the slot {slot}"
            if self.fault:
                return None
            newer = unit.physical_offset
            if unit.key_hash == key_hash:
                found.append(unit.physical_offset)
        return found


@dataclass(slots=True)
class _Opened:
    """An index file that is open, and what is known of it as of so many units."""

    file: OpenFile
    shape: IndexShape | None = None
    unit_count: int = -1
    fault: str = ""

    def look(self) -> IndexFile:
        """Return the file with its header as it is now; a file that is written goes on growing."""
        index = IndexFile(self.file.read, self.file.size(), self.shape)
        if self.shape is None and index.header.next_unit != self.unit_count:
            self.shape = index.shape
        return index


@dataclass(slots=True)
class Reaches:
    """What the index vouches for: believed files, oldest first, and why others are not believed."""

    files: list[Reach]
    faults: list[str] = field(default_factory=list)
    stamp: tuple[tuple[str, int], ...] = ()  # which files there were, and how many units they had

    def refuse(self, reach: Reach) -> None:
        """Believe a file no more, for its fault."""
        self.faults.append(f"{reach.path}: {reach.fault}")
        self.files = [other for other in self.files if other is not reach]


class IndexFolder:
    """The index files of a store, for looking up keys: opened, and their shapes learned, once for all keys.

    One thread at a time. `close` it; it can be used again.
    """

    def __init__(self, root: str) -> None:
        self._folder = files.join(root, filenames.INDEX)
        self._opened: dict[str, _Opened] = {}  # by name

    def close(self) -> None:
        """Close every file."""
        for opened in self._opened.values():
            opened.file.close()
        self._opened.clear()

    def look(self, safe_until_ms: int | None) -> Reaches:
        """Return what the files that are there now vouch for; other names are passed over, as IndexService#load does.

        `safe_until_ms` is given after a crash: the store time of the last key that is on disk for good.
        """
        found = [(opened, opened.look()) for opened in self._open_all()]
        # A file that is nearly empty proves no shape of its own, but a broker makes all files alike.
        shapes = {opened.file.size(): opened.shape for opened, _ in found if opened.shape}
        reaches = Reaches([], stamp=tuple((opened.file.path, index.header.next_unit) for opened, index in found))
        for opened, index in found:
            shape = opened.shape or shapes.get(opened.file.size())
            if index.header.is_empty:
                continue
            if shape is not None and opened.shape is None:
                index = IndexFile(opened.file.read, opened.file.size(), shape)
            if opened.unit_count != index.header.next_unit:
                opened.fault, opened.unit_count = _fault_of(opened.file, index, shape), index.header.next_unit
            header = index.header
            reach = Reach(opened.file.path, header.begin_physical_offset, header.end_physical_offset, index)
            reach.fault = opened.fault
            if safe_until_ms is not None and header.end_timestamp > safe_until_ms:
                reach.fault = reach.fault or "the store was not closed, and its checkpoint does not vouch for this file"
            if reaches.files and reach.begin < reaches.files[-1].end:
                reach.fault = reach.fault or "it begins before the end of the one before"
            reaches.files.append(reach)
            if reach.fault:
                reaches.refuse(reach)
        return reaches

    def _open_all(self) -> Iterator[_Opened]:
        listed = files.list_folder(self._folder)
        names = [name for name, is_folder in listed if not is_folder and filenames.is_index_name(name)]
        for gone in self._opened.keys() - set(names):
            self._opened.pop(gone).file.close()
        for name in names:
            if name not in self._opened:
                self._opened[name] = _Opened(OpenFile(files.join(self._folder, name)))
            yield self._opened[name]


def last_indexed_place(root: str) -> int:
    """Return the physical offset of the last message that a store's key index knows, -1 if it knows none."""
    folder = files.join(root, filenames.INDEX)
    names = [name for name, is_folder in files.list_folder(folder) if not is_folder and filenames.is_index_name(name)]
    for name in reversed(names):
        file = OpenFile(files.join(folder, name))
        header = IndexFile(file.read, file.size()).header
        file.close()
        if not header.is_empty:
            return header.end_physical_offset
    return -1


def _fault_of(file: OpenFile, index: IndexFile, shape: IndexShape | None) -> str:
    """Return what is wrong with a file that has units, "" for nothing that is seen."""
    if shape is None:
        return f"{file.size()} bytes and what is in them fit no numbers of slots and units"
    header, last = index.header, index.header.next_unit - 1
    if last >= shape.unit_count or file.size() < shape.file_bytes:
        return f"{last} units, there is room for {shape.unit_count - 1} in {file.size()} bytes"
    numbers = np.unique(np.linspace(1, last, _SAMPLE_UNITS).astype(np.int64))
    units = np.frombuffer(_gather(file, [shape.unit_position(number) for number in numbers.tolist()]), INDEX_UNIT)
    places = units["physical_offset"]
    if places[0] != header.begin_physical_offset or places[-1] != header.end_physical_offset:
        return (
            f"the header says that it holds the records from {header.begin_physical_offset} to "
            f"{header.end_physical_offset}, its units say from {places[0]} to {places[-1]}"
        )
    at = [shape.slot_position(key_hash) for key_hash in units["key_hash"].tolist()]
    newest = np.frombuffer(_gather(file, at, INDEX_SLOT.itemsize), INDEX_SLOT)["newest_unit"]
    is_good = (units["key_hash"] >= 0) & (units["previous_unit"] >= 0) & (units["previous_unit"] < numbers)
    is_good &= (numbers <= newest) & (newest < shape.unit_count)
    is_good[1:] &= places[1:] >= places[:-1]
    return "" if is_good.all() else f"unit {numbers[~is_good][0]} and its slot do not belong together"


def _gather(file: OpenFile, positions: Sequence[int], size: int = INDEX_UNIT.itemsize) -> bytes:
    return b"".join(file.read(position, size).ljust(size, b"\0") for position in positions)
