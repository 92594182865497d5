"""Index file: a file of the key index, which finds records by the hash of a key.

    header (40) | slots (4 each) | index entries (20 each; entry 0 is never used)

Numbers in parentheses are bytes. The hash of a key modulo the number of slots is the number of the key's slot. The slot
contains the number of its newest index entry. Each entry contains the number of the previous entry of the same slot, or
0 if there is none. These entries are the chain of the slot. Different keys may have the same hash, so a lookup returns
candidates, and the caller compares the key with that of the record.

- Entries are numbered from 1. The last one has the number `next_unit` - 1. A file is full when it has `unit_count` - 1
  entries. `unit` is RocketMQ's word for an entry.
- The file does not contain the number of its slots and entries. `learn_shape` determines both.
- The header of a new file first contains the end time and end offset of the full file before it. The first entry's
  `seconds` count from that time. The `seconds` of all other entries count from the first message of their own file,
  because adding the first entry replaces the times in the header. So for entry 1, readers in this module ignore
  `seconds` and use the begin time in the header.
- In a chain, each entry must have a smaller number than the entry before it. So a walk ends even in a damaged chain.

Source: IndexFile#putKey, #selectPhyOffset, IndexHeader, IndexService (4.9, 5.3).

`IndexState` is the copy of the newest file's shape and header in the watermark. This copy is needed after a crash,
because the header in the file may then be newer than the slots, and `learn_shape` cannot use such a file.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

INDEX_HEADER = np.dtype(
    [
        ("begin_timestamp", ">i8"),  # ms: store time of the first message
        ("end_timestamp", ">i8"),  # ms: store time of the last message
        ("begin_physical_offset", ">i8"),  # bytes in the commit log
        ("end_physical_offset", ">i8"),
        ("used_slot_count", ">i4"),  # slots with at least one entry
        ("next_unit", ">i4"),  # number of the next entry to write; 0 in a new file means 1
    ]
)


assert INDEX_HEADER.itemsize == 40
INDEX_SLOT = np.dtype([("newest_unit", ">i4")])  # 0: the slot has no entry


assert INDEX_SLOT.itemsize == 4
INDEX_UNIT = np.dtype(
    [
        ("key_hash", ">i4"),  # java.index_key_hash of `topic#key`
        ("physical_offset", ">i8"),  # of the record
        ("seconds", ">i4"),  # from the file's begin time to the record's store time; entry 1 differs, see the module
        ("previous_unit", ">i4"),  # number of the previous (older) entry of this slot; 0 if there is none
    ]
)


assert INDEX_UNIT.itemsize == 20
_HEADER = struct.Struct(">qqqqii")  # the fields of INDEX_HEADER
_UNIT = struct.Struct(">iqii")  # the fields of INDEX_UNIT
assert (_HEADER.size, _UNIT.size) == (INDEX_HEADER.itemsize, INDEX_UNIT.itemsize)
MAX_SECONDS = (1 << 31) - 1  # maximum of an entry's `seconds`
_SAMPLE_UNITS = 64  # number of entries that are read to confirm a guessed shape
_CHUNK_UNITS = 1 << 18
_MAX_GUESSES = 256
Read: TypeAlias = Callable[[int, int], bytes]  # (position, size) -> bytes of the file; fewer if the file ends before


@dataclass(frozen=True, slots=True)
class IndexShape:
    """How many slots and entries a file has room for: a broker's maxHashSlotNum and maxIndexNum.

    `unit_count` includes entry 0.
    """

    slot_count: int = 5_000_000
    unit_count: int = 20_000_000

    @property
    def file_bytes(self) -> int:
        """Return the size of a file with this shape (bytes). With a broker's defaults it is 420000040."""
        return self.unit_position(self.unit_count)

    def slot_position(self, key_hash: int) -> int:
        """Return the position in the file (bytes) of the slot for `key_hash`."""
        return INDEX_HEADER.itemsize + key_hash % self.slot_count * INDEX_SLOT.itemsize

    def unit_position(self, number: int) -> int:
        """Return the position in the file (bytes) of the entry with this number."""
        units = INDEX_HEADER.itemsize + self.slot_count * INDEX_SLOT.itemsize
        return units + number * INDEX_UNIT.itemsize


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """The header's fields as stored: times in ms, offsets in bytes of the commit log."""

    begin_timestamp: int = 0
    end_timestamp: int = 0
    begin_physical_offset: int = 0
    end_physical_offset: int = 0
    used_slot_count: int = 0
    next_unit: int = 0

    @property
    def is_empty(self) -> bool:
        """Return whether the file has no entries."""
        return self.next_unit <= 1


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """An index entry. `time_ms` is the store time of its message, earlier than the exact time by less than a second."""

    number: int
    key_hash: int
    physical_offset: int
    time_ms: int


@dataclass(frozen=True, slots=True)
class ChainFault:
    """The chain of a slot is damaged at `position` (bytes in the file). `what` describes the damage."""

    position: int
    what: str


class IndexFile:
    """An index file for lookups. Several threads may use it at the same time.

    `data` contains the bytes of the file, or is a function that reads a part of it. In the second case `file_bytes` is
    the size of the file. If `shape` is None, the shape is determined when it is first needed. If that fails, lookups
    find nothing. A lookup reads only the slot and the entries of one chain, often a few hundred bytes.
    """

    def __init__(
        self,
        data: bytes | NDArray[np.uint8] | Read,
        file_bytes: int | None = None,
        shape: IndexShape | None = None,
    ) -> None:
        if callable(data):
            assert file_bytes is not None
            self._read, self._file_bytes = data, file_bytes
        else:
            self._read, self._file_bytes = lambda position, size: bytes(data[position : position + size]), len(data)
        self.header = decode_header(self._read(0, INDEX_HEADER.itemsize))
        self._shape = shape

    @property
    def shape(self) -> IndexShape | None:
        """The file's shape, or None if `learn_shape` cannot determine it."""
        if self._shape is None:
            self._shape = learn_shape(self._read, self._file_bytes)
        return self._shape

    def find(self, key_hash: int, begin_ms: int, end_ms: int) -> Iterator[int]:
        """Yield the physical offsets of records that may have the key and a time in [begin_ms, end_ms], newest first.

        The caller must compare key and time with the record. Times are rounded, so some of the yielded records may be
        outside the range. Unlike IndexFile#selectPhyOffset, this method misses no record inside the range. If the chain
        is damaged, it ends there without an error; use `walk` to see the damage.
        """
        header = self.header
        if header.is_empty or begin_ms > header.end_timestamp or end_ms < header.begin_timestamp:  # #isTimeMatched
            return
        for entry in self.walk(key_hash):
            if isinstance(entry, ChainFault) or entry.time_ms <= begin_ms - 1000:
                return  # the store times of older entries are not later, so these are out of range too
            if entry.key_hash == key_hash and entry.time_ms <= end_ms:
                yield entry.physical_offset

    def walk(self, key_hash: int) -> Iterator[IndexEntry | ChainFault]:
        """Yield all entries in the chain of the hash's slot, newest first. Entries of other hashes are included.

        If the chain is damaged, the last element is a ChainFault.
        """
        if self.header.is_empty or (shape := self.shape) is None:
            return
        position, limit = shape.slot_position(key_hash), shape.unit_count
        number = int.from_bytes(self._read(position, INDEX_SLOT.itemsize), "big", signed=True)
        while number:
            # The slot may be newer than the header, so the number is not compared with `next_unit`. It must only be
            # smaller than the number before.
            if not 0 < number < limit:
                yield ChainFault(position, f"entry number {number}, expected 0 to {limit - 1}")
                return
            position, limit = shape.unit_position(number), number
            raw = self._read(position, INDEX_UNIT.itemsize)
            if len(raw) < INDEX_UNIT.itemsize:
                yield ChainFault(position, f"{len(raw)} bytes of an entry of {INDEX_UNIT.itemsize}")
                return
            entry = np.frombuffer(raw, INDEX_UNIT)[0]
            seconds = 0 if number == 1 else int(entry["seconds"])
            if seconds < 0:
                yield ChainFault(position, f"time difference of {seconds} seconds")
                return
            time_ms = self.header.begin_timestamp + seconds * 1000
            yield IndexEntry(number, int(entry["key_hash"]), int(entry["physical_offset"]), time_ms)
            number = int(entry["previous_unit"])


def decode_header(data: bytes) -> IndexHeader:
    """Decode the header at the begin of `data`. If `data` is too short, return the header of an empty file.

    Never raises.
    """
    if len(data) < INDEX_HEADER.itemsize:
        return IndexHeader()
    fields = np.frombuffer(data, INDEX_HEADER, 1)[0]
    return IndexHeader(*(int(fields[name]) for name in INDEX_HEADER.names or ()))


def encode_header(header: IndexHeader) -> bytes:
    """Return the 40 bytes of a header."""
    return _HEADER.pack(
        header.begin_timestamp,
        header.end_timestamp,
        header.begin_physical_offset,
        header.end_physical_offset,
        header.used_slot_count,
        header.next_unit,
    )


def encode_unit(key_hash: int, physical_offset: int, seconds: int, previous_unit: int) -> bytes:
    """Return the bytes of one entry."""
    return _UNIT.pack(key_hash, physical_offset, seconds, previous_unit)


def encode_slot(newest_unit: int) -> bytes:
    """Return the bytes of one slot."""
    return newest_unit.to_bytes(INDEX_SLOT.itemsize, "big", signed=True)


def decode_slot(data: bytes) -> int:
    """Return the number of the newest entry of a slot. Return 0 if `data` is empty."""
    return int.from_bytes(data, "big", signed=True)


def seconds_since(begin_ms: int, time_ms: int) -> int:
    """Return the field `seconds` of an entry. `begin_ms` is the begin time of its file."""
    return 0 if begin_ms <= 0 else min(max((time_ms - begin_ms) // 1000, 0), MAX_SECONDS)


def learn_shape(read: Read, file_bytes: int, expected: IndexShape | None = None) -> IndexShape | None:
    """Return the shape of a file, or None if it cannot be determined.

    The `expected` shape is tried first, then a broker's default. A shape is returned if it matches the size and the
    entries of the file. If neither matches, all shapes of this size are compared with the contents. The header has the
    physical offsets of the first and the last entry, and the slot of each entry must contain the number of this entry
    or of a newer one. Mostly this leaves one shape. If several shapes are left, or if the file has no entries, the
    result is None. Then use the shape of another file, or the broker's maxHashSlotNum and maxIndexNum.
    """
    header = decode_header(read(0, INDEX_HEADER.itemsize))
    for guess in (expected or IndexShape(), IndexShape()):
        if file_bytes == guess.file_bytes and (header.is_empty or _agrees(read, header, guess)):
            return guess
    words, odd = divmod(file_bytes - INDEX_HEADER.itemsize, INDEX_SLOT.itemsize)
    if header.is_empty or odd or words < 6:
        return None
    per_unit = INDEX_UNIT.itemsize // INDEX_SLOT.itemsize
    # In all shapes of this size, the positions of entries are the same modulo 20. So the whole file can be read as if
    # it consisted of entries.
    shift = words % per_unit
    count = words // per_unit
    begins, ends = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    for first in range(0, count, _CHUNK_UNITS):
        position = INDEX_HEADER.itemsize + shift * INDEX_SLOT.itemsize + first * INDEX_UNIT.itemsize
        raw = read(position, min(_CHUNK_UNITS, count - first) * INDEX_UNIT.itemsize)
        entries = np.frombuffer(raw, INDEX_UNIT, len(raw) // INDEX_UNIT.itemsize)
        part = slice(first, first + len(entries))
        begins[part] = (entries["physical_offset"] == header.begin_physical_offset) & (entries["key_hash"] > 0)
        ends[part] = (entries["physical_offset"] == header.end_physical_offset) & (entries["key_hash"] > 0)
    # If entry 0 is at index q of this array, the first entry is at q + 1, and the last one at q + next_unit - 1.
    last = header.next_unit - 1
    guesses = np.flatnonzero(begins[1 : max(count - last + 1, 1)] & ends[last:])
    shapes = [IndexShape(shift + per_unit * q, count - q) for q in guesses[:_MAX_GUESSES].tolist() if shift + q]
    proven = [shape for shape in shapes if _agrees(read, header, shape)]
    return proven[0] if len(proven) == 1 and len(guesses) <= _MAX_GUESSES else None


def _agrees(read: Read, header: IndexHeader, shape: IndexShape) -> bool:
    """Return whether a sample of the file's entries and their slots is valid if the file has this shape."""
    last = header.next_unit - 1
    if last >= shape.unit_count:
        return False
    numbers = np.unique(np.linspace(1, last, _SAMPLE_UNITS).astype(np.int64))
    raw = b"".join(read(shape.unit_position(number), INDEX_UNIT.itemsize) for number in numbers.tolist())
    if len(raw) < len(numbers) * INDEX_UNIT.itemsize:
        return False
    entries = np.frombuffer(raw, INDEX_UNIT)
    slots = b"".join(read(shape.slot_position(key), INDEX_SLOT.itemsize) for key in entries["key_hash"].tolist())
    newest, previous = np.frombuffer(slots, INDEX_SLOT)["newest_unit"], entries["previous_unit"]
    is_good = (entries["key_hash"] >= 0) & (entries["seconds"] >= 0) & (previous >= 0) & (previous < numbers)
    return bool((is_good & (numbers <= newest) & (newest < shape.unit_count)).all())


class IndexFileWriter:
    """Adds keys to an index file in place. `buffer` is the content of the complete file. Not thread-safe.

    The result has the same bytes as that of RocketMQ's writer. To begin a new file after a full one, give a buffer of
    zeros, and the full file's header as `previous`. If `previous` is None, writing continues after the last entry.
    """

    def __init__(self, buffer: NDArray[np.uint8], shape: IndexShape, previous: IndexHeader | None = None) -> None:
        assert len(buffer) == shape.file_bytes, (len(buffer), shape)
        slots_end = shape.unit_position(0)
        self.shape = shape
        self._header = buffer[: INDEX_HEADER.itemsize].view(INDEX_HEADER)
        self._slots = buffer[INDEX_HEADER.itemsize : slots_end].view(INDEX_SLOT)["newest_unit"]
        self._units = buffer[slots_end:].view(INDEX_UNIT)
        if previous is not None:
            if previous.end_physical_offset > 0:
                self._header["begin_physical_offset"] = previous.end_physical_offset
                self._header["end_physical_offset"] = previous.end_physical_offset
            if previous.end_timestamp > 0:
                self._header["begin_timestamp"] = previous.end_timestamp
                self._header["end_timestamp"] = previous.end_timestamp

    @property
    def header(self) -> IndexHeader:
        """The file's current header."""
        return decode_header(self._header.tobytes())

    @property
    def is_full(self) -> bool:
        """Return whether the file has no room for another key."""
        return self.header.next_unit >= self.shape.unit_count

    def put(self, key_hash: int, physical_offset: int, store_time_ms: int) -> bool:
        """Add a key of the record at `physical_offset`. Call this in the order of the records in the log.

        Returns True if the key was added. If the file is full, returns False and does not change the file.
        """
        assert 0 <= key_hash < 1 << 31, key_hash
        header = self.header
        number = max(header.next_unit, 1)
        if number >= self.shape.unit_count:
            return False
        slot = key_hash % self.shape.slot_count
        newest = int(self._slots[slot])
        previous = newest if 0 < newest <= number else 0
        seconds = 0
        if header.begin_timestamp > 0:  # for the first key this is the end time of the previous file, see the module
            seconds = min(max((store_time_ms - header.begin_timestamp) // 1000, 0), MAX_SECONDS)
        self._units[number] = (key_hash, physical_offset, seconds, previous)
        self._slots[slot] = number
        if number == 1:
            self._header["begin_physical_offset"] = physical_offset
            self._header["begin_timestamp"] = store_time_ms
        self._header["used_slot_count"] += previous == 0
        self._header["next_unit"] = number + 1
        self._header["end_physical_offset"] = physical_offset
        self._header["end_timestamp"] = store_time_ms
        return True


@dataclass(frozen=True, slots=True)
class IndexState:
    """Name, shape and header of the newest index file, as separate fields for JSON.

    If the store has no index file, `name` is "" and all numbers are 0. If the shape of the file is unknown,
    `slot_count` is 0. No key was added to such a file.
    """

    name: str = ""
    slot_count: int = 0
    unit_count: int = 0
    begin_timestamp: int = 0
    end_timestamp: int = 0
    begin_physical_offset: int = 0
    end_physical_offset: int = 0
    used_slot_count: int = 0
    next_unit: int = 0

    @property
    def shape(self) -> IndexShape | None:
        """Return the file's shape, or None if it is unknown."""
        return IndexShape(self.slot_count, self.unit_count) if self.slot_count else None

    @property
    def header(self) -> IndexHeader:
        """Return the file's header."""
        return IndexHeader(
            self.begin_timestamp,
            self.end_timestamp,
            self.begin_physical_offset,
            self.end_physical_offset,
            self.used_slot_count,
            self.next_unit,
        )


def state_of(name: str, shape: IndexShape | None, header: IndexHeader) -> IndexState:
    """Return the state of a key index whose newest file has this name, shape and header."""
    slot_count, unit_count = (shape.slot_count, shape.unit_count) if shape else (0, 0)
    return IndexState(
        name,
        slot_count,
        unit_count,
        header.begin_timestamp,
        header.end_timestamp,
        header.begin_physical_offset,
        header.end_physical_offset,
        header.used_slot_count,
        header.next_unit,
    )
