"""The extension of a consume queue (`enableConsumeQueueExt`, off by default): what 20 bytes have no room for.

A unit of the queue then has an address in place of its tags code: the extension unit's position in the run of
extension files plus the least long, so that it is far below every hash. An address may point at nothing (the
extension is written without care): the tags are then unknown, and a filter must let the message pass.

Units follow each other without a gap; one that does not fit with 4 bytes to spare starts the next file, and -1
stands in its place. Source: ConsumeQueueExt (4.9, 5.3).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

UNIT_EXT_HEAD = np.dtype(
    [
        ("unit_size", ">i2"),  # this head and the bit map; -1: the rest of the file is empty
        ("tags_code", ">i8"),  # the tags code that the queue's unit has no room for
        ("store_timestamp", ">i8"),  # ms, as in the record
        ("bitmap_size", ">i2"),  # bytes of the bit map that follows
    ]
)
assert UNIT_EXT_HEAD.itemsize == 20

MAX_ADDRESS = -(1 << 31) - 1  # below every tags code that is a hash
_ADDRESS_BASE = -(1 << 63)
MAX_POSITION = MAX_ADDRESS - _ADDRESS_BASE
MAX_UNIT_BYTES = 32767
END_OF_FILE_SIZE = -1
END_OF_FILE_BYTES = 4  # kept free at the end of a file, for the mark


@dataclass(frozen=True, slots=True)
class UnitExt:
    """One extension unit: the real tags code, the store time (ms), and the bit map of a Bloom filter."""

    tags_code: int
    store_timestamp: int
    bitmap: bytes = b""

    @property
    def size(self) -> int:
        """Return the bytes that it takes in its file."""
        return UNIT_EXT_HEAD.itemsize + len(self.bitmap)


@dataclass(frozen=True, slots=True)
class NoUnit:
    """No unit stands there; `why` says what does. Not an error: extensions are written without care."""

    why: str


def is_address(tags_code: int) -> bool:
    """Say whether a queue unit's tags code is an address in the extension."""
    return tags_code <= MAX_ADDRESS


def to_address(position: int) -> int:
    """Return the address of the extension unit at a position (bytes in the run of extension files)."""
    assert 0 <= position <= MAX_POSITION, position
    return position + _ADDRESS_BASE


def to_position(address: int) -> int:
    """Return the position (bytes in the run of extension files) that an address names."""
    assert is_address(address), address
    return address - _ADDRESS_BASE


def decode_unit_ext(data: bytes | memoryview, position: int) -> UnitExt | NoUnit:
    """Read the unit at `position` of one file. Never raises: what is no unit is an answer."""
    head_end = position + UNIT_EXT_HEAD.itemsize
    if position < 0 or head_end > len(data):
        left = len(data) - position
        return NoUnit(f"{left} bytes left, a unit takes at least {UNIT_EXT_HEAD.itemsize}")
    head = np.frombuffer(data, UNIT_EXT_HEAD, 1, position)[0]
    size, bitmap_size = int(head["unit_size"]), int(head["bitmap_size"])
    if size == END_OF_FILE_SIZE:
        return NoUnit("the file's units end here")
    if size == 0:
        return NoUnit("nothing is written here")
    if bitmap_size < 0 or size != UNIT_EXT_HEAD.itemsize + bitmap_size:
        return NoUnit(f"unit of {size} bytes with a bit map of {bitmap_size}")
    if head_end + bitmap_size > len(data):
        return NoUnit(f"unit of {size} bytes, {len(data) - position} left")
    bitmap = bytes(data[head_end : head_end + bitmap_size])
    return UnitExt(int(head["tags_code"]), int(head["store_timestamp"]), bitmap)


def iter_units_ext(data: bytes | memoryview) -> Iterator[tuple[int, UnitExt]]:
    """Yield position and unit of every unit of one file, in order, up to the first place without one."""
    position = 0
    while isinstance(unit := decode_unit_ext(data, position), UnitExt):
        yield position, unit
        position += unit.size


def fits(unit: UnitExt, position: int, file_bytes: int) -> bool:
    """Say whether a unit may be written at a position of a file, or the file ends there (#put)."""
    return position + unit.size + END_OF_FILE_BYTES <= file_bytes


def encode_unit_ext(unit: UnitExt) -> bytes:
    """Write one unit; its bit map has at most 32747 bytes."""
    assert unit.size <= MAX_UNIT_BYTES, unit.size
    head = np.zeros(1, UNIT_EXT_HEAD)
    head["unit_size"] = unit.size
    head["tags_code"] = unit.tags_code
    head["store_timestamp"] = unit.store_timestamp
    head["bitmap_size"] = len(unit.bitmap)
    return head.tobytes() + unit.bitmap


def encode_end_of_file() -> bytes:
    """Write the mark after a file's last unit."""
    return END_OF_FILE_SIZE.to_bytes(2, "big", signed=True)
