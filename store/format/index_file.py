"""One file of the key index: which records have a key, by the key's hash.

    header (40) | slots (4 each) | units (20 each; unit 0 is never used)

A key's hash modulo the number of slots names a slot; the slot holds the number of the newest unit of its keys, each
unit the number of the one before it, 0 for none. A unit says seconds since the file's first message: a hit is a
candidate, and its record decides. Rules:

- the header counts units from 1, so the last one written is `next_unit` - 1; a file is full at its unit count;
- how many slots and units a file has is not written in it: `learn_shape` finds out;
- a file that follows a full one starts with that one's end in its header, and its first unit's seconds count
  from there, while every reader adds them to the file's own begin. Here unit 1 has the header's begin as its time.

Chains come from disk and may be damaged: every step must go to a lower number, so no walk is endless.
Source: IndexFile#putKey, #selectPhyOffset, IndexHeader, IndexService (4.9, 5.3).
"""

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
        ("used_slot_count", ">i4"),  # slots with at least one unit
        ("next_unit", ">i4"),  # number of the unit to be written next; 0 in a new file means 1
    ]
)
assert INDEX_HEADER.itemsize == 40

INDEX_SLOT = np.dtype([("newest_unit", ">i4")])  # 0: no key has this slot
assert INDEX_SLOT.itemsize == 4

INDEX_UNIT = np.dtype(
    [
        ("key_hash", ">i4"),  # java.index_key_hash of `topic#key`
        ("physical_offset", ">i8"),  # of the record
        ("seconds", ">i4"),  # since the file's begin, see above
        ("previous_unit", ">i4"),  # the next older one of this slot; 0: none
    ]
)
assert INDEX_UNIT.itemsize == 20

MAX_SECONDS = (1 << 31) - 1  # what a unit's `seconds` can say
_SAMPLE_UNITS = 64  # looked at to confirm a guessed shape
_CHUNK_UNITS = 1 << 18
_MAX_GUESSES = 256
Read: TypeAlias = Callable[[int, int], bytes]  # position, size -> bytes, fewer at the end of the file


@dataclass(frozen=True, slots=True)
class IndexShape:
    """How many slots and units (unit 0 included) a file has: maxHashSlotNum and maxIndexNum."""

    slot_count: int = 5_000_000
    unit_count: int = 20_000_000

    @property
    def file_bytes(self) -> int:
        """Return the length of a file of this shape: 420000040 for a broker's default."""
        return self.unit_position(self.unit_count)

    def slot_position(self, key_hash: int) -> int:
        """Return where the slot of a hash stands, in bytes."""
        return INDEX_HEADER.itemsize + key_hash % self.slot_count * INDEX_SLOT.itemsize

    def unit_position(self, number: int) -> int:
        """Return where a unit stands, in bytes."""
        units = INDEX_HEADER.itemsize + self.slot_count * INDEX_SLOT.itemsize
        return units + number * INDEX_UNIT.itemsize


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """The header's fields as they are on disk: times in ms, offsets in bytes of the commit log."""

    begin_timestamp: int = 0
    end_timestamp: int = 0
    begin_physical_offset: int = 0
    end_physical_offset: int = 0
    used_slot_count: int = 0
    next_unit: int = 0

    @property
    def is_empty(self) -> bool:
        """Say whether the file has no unit yet."""
        return self.next_unit <= 1

    def may_hold(self, begin_ms: int, end_ms: int) -> bool:
        """Say whether messages stored in [begin_ms, end_ms] may be in the file (#isTimeMatched)."""
        return not self.is_empty and begin_ms <= self.end_timestamp and end_ms >= self.begin_timestamp


@dataclass(frozen=True, slots=True)
class IndexUnit:
    """A unit met on a walk. `time_ms` is its message's store time, rounded down by less than a second."""

    number: int
    key_hash: int
    physical_offset: int
    time_ms: int


@dataclass(frozen=True, slots=True)
class ChainFault:
    """A walk ended where no chain should: what is wrong with the bytes at `position`."""

    position: int
    what: str


class IndexFile:
    """An index file to look things up in. `data` is its bytes, or a function that reads some of them.

    Any number of walks at a time. Without `shape` it is learned when it is first needed; where it cannot be, nothing
    is found. Reads only what a walk needs: of a whole file a few hundred bytes.
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
            self._read, self._file_bytes = _reader_of(data), len(data)
        self.header = decode_header(self._read(0, INDEX_HEADER.itemsize))
        self._shape = shape

    @property
    def shape(self) -> IndexShape | None:
        """The file's shape, None where length and contents leave it open (see `learn_shape`)."""
        if self._shape is None:
            self._shape = learn_shape(self._read, self._file_bytes)
        return self._shape

    def find(self, key_hash: int, begin_ms: int, end_ms: int) -> Iterator[int]:
        """Yield the physical offsets of records that may have the key and lie in [begin_ms, end_ms], newest first.

        None that qualifies is left out for the sake of its rounded time, as IndexFile#selectPhyOffset would;
        the caller compares key and time with the record. A damaged chain ends at the damage (`walk` tells).
        """
        if not self.header.may_hold(begin_ms, end_ms):
            return
        for unit in self.walk(key_hash):
            if isinstance(unit, ChainFault) or unit.time_ms <= begin_ms - 1000:
                return  # store times do not fall, so all that is older is too old as well
            if unit.key_hash == key_hash and unit.time_ms <= end_ms:
                yield unit.physical_offset

    def walk(self, key_hash: int) -> Iterator[IndexUnit | ChainFault]:
        """Yield the units in the slot of a hash, newest first, those of other hashes too. A fault comes last."""
        if self.header.is_empty or (shape := self.shape) is None:
            return
        position, limit = shape.slot_position(key_hash), shape.unit_count
        number = int.from_bytes(self._read(position, INDEX_SLOT.itemsize), "big", signed=True)
        while number:
            # A slot may be newer than the header we read; the units of a chain go strictly down.
            if not 0 < number < limit:
                yield ChainFault(position, f"unit number {number}, expected 0 to {limit - 1}")
                return
            position, limit = shape.unit_position(number), number
            raw = self._read(position, INDEX_UNIT.itemsize)
            if len(raw) < INDEX_UNIT.itemsize:
                yield ChainFault(position, f"{len(raw)} bytes of a unit of {INDEX_UNIT.itemsize}")
                return
            unit = np.frombuffer(raw, INDEX_UNIT)[0]
            seconds = 0 if number == 1 else int(unit["seconds"])
            if seconds < 0:
                yield ChainFault(position, f"time difference of {seconds} seconds")
                return
            time_ms = self.header.begin_timestamp + seconds * 1000
            yield IndexUnit(number, int(unit["key_hash"]), int(unit["physical_offset"]), time_ms)
            number = int(unit["previous_unit"])


def decode_header(data: bytes) -> IndexHeader:
    """Read a header. A file too short for one reads as an empty index. Never raises."""
    if len(data) < INDEX_HEADER.itemsize:
        return IndexHeader()
    fields = np.frombuffer(data, INDEX_HEADER, 1)[0]
    return IndexHeader(*(int(fields[name]) for name in INDEX_HEADER.names or ()))


def encode_header(header: IndexHeader) -> bytes:
    """Write a header."""
    return np.array([tuple(getattr(header, name) for name in INDEX_HEADER.names or ())], INDEX_HEADER).tobytes()


def learn_shape(read: Read, file_bytes: int, expected: IndexShape | None = None) -> IndexShape | None:
    """Return a file's shape: the expected or the default one where the length is theirs, else what its contents prove.

    Many shapes have one length. But the header knows the offsets in the first and the last unit, and each unit's
    slot leads to it: that leaves one. None where it does not (a file without units): take the shape of a
    neighbour, or the broker's settings maxHashSlotNum and maxIndexNum.
    """
    header = decode_header(read(0, INDEX_HEADER.itemsize))
    for guess in (expected or IndexShape(), IndexShape()):
        if file_bytes == guess.file_bytes and (header.is_empty or _agrees(read, header, guess)):
            return guess
    words, odd = divmod(file_bytes - INDEX_HEADER.itemsize, INDEX_SLOT.itemsize)
    if header.is_empty or odd or words < 6:
        return None
    per_unit = INDEX_UNIT.itemsize // INDEX_SLOT.itemsize
    # All shapes of this length have their units at the same positions modulo 20: read it all as units.
    shift = words % per_unit
    count = words // per_unit
    begins, ends = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    for first in range(0, count, _CHUNK_UNITS):
        position = INDEX_HEADER.itemsize + shift * INDEX_SLOT.itemsize + first * INDEX_UNIT.itemsize
        raw = read(position, min(_CHUNK_UNITS, count - first) * INDEX_UNIT.itemsize)
        units = np.frombuffer(raw, INDEX_UNIT, len(raw) // INDEX_UNIT.itemsize)
        part = slice(first, first + len(units))
        begins[part] = (units["physical_offset"] == header.begin_physical_offset) & (units["key_hash"] > 0)
        ends[part] = (units["physical_offset"] == header.end_physical_offset) & (units["key_hash"] > 0)
    # Place q for unit 0 puts the first unit at q + 1 and the last one at q + next_unit - 1.
    last = header.next_unit - 1
    guesses = np.flatnonzero(begins[1 : max(count - last + 1, 1)] & ends[last:])
    shapes = [IndexShape(shift + per_unit * q, count - q) for q in guesses[:_MAX_GUESSES].tolist() if shift + q]
    proven = [shape for shape in shapes if _agrees(read, header, shape)]
    return proven[0] if len(proven) == 1 and len(guesses) <= _MAX_GUESSES else None


def _agrees(read: Read, header: IndexHeader, shape: IndexShape) -> bool:
    """Say whether units, looked at here and there, are as a writer leaves them if the file has this shape."""
    last = header.next_unit - 1
    if last >= shape.unit_count:
        return False
    numbers = np.unique(np.linspace(1, last, _SAMPLE_UNITS).astype(np.int64))
    raw = b"".join(read(shape.unit_position(number), INDEX_UNIT.itemsize) for number in numbers.tolist())
    if len(raw) < len(numbers) * INDEX_UNIT.itemsize:
        return False
    units = np.frombuffer(raw, INDEX_UNIT)
    slots = b"".join(read(shape.slot_position(key), INDEX_SLOT.itemsize) for key in units["key_hash"].tolist())
    newest, previous = np.frombuffer(slots, INDEX_SLOT)["newest_unit"], units["previous_unit"]
    is_good = (units["key_hash"] >= 0) & (units["seconds"] >= 0) & (previous >= 0) & (previous < numbers)
    return bool((is_good & (numbers <= newest) & (newest < shape.unit_count)).all())


class IndexFileWriter:
    """Puts keys into an index file. `buffer` is the whole file, writable; it is changed in place.

    One thread. Every byte comes out as RocketMQ's own writer leaves it. Without `previous` the file goes on where
    its header says; a new file is all zeros, and `previous` is the header of the full file before it.
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
        """The header as it is now."""
        return decode_header(self._header.tobytes())

    @property
    def is_full(self) -> bool:
        """Say whether the next key needs the next file."""
        return self.header.next_unit >= self.shape.unit_count

    def put(self, key_hash: int, physical_offset: int, store_time_ms: int) -> bool:
        """Add a key of a record; False, and nothing changed, in a full file. Puts come in the order of the log."""
        assert 0 <= key_hash < 1 << 31, key_hash
        header = self.header
        number = max(header.next_unit, 1)
        if number >= self.shape.unit_count:
            return False
        slot = key_hash % self.shape.slot_count
        newest = int(self._slots[slot])
        previous = newest if 0 < newest <= number else 0
        seconds = 0
        if header.begin_timestamp > 0:  # before the first key it is the previous file's end: the quirk above
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


def _reader_of(data: bytes | NDArray[np.uint8]) -> Read:
    return lambda position, size: bytes(data[position : position + size])
