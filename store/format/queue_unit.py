"""The unit of a consume queue: 20 bytes that say where the record of one message lies.

The unit of queue offset k stands at byte 20·k of the queue's run of files, so a queue is an array. Fill stands
before a queue's first message where its first file begins earlier (physical offset 0, size 2147483647): it
passes every test for a good unit and must be left out by name.

`tags_code` is the Java hash of the TAGS property, sign-extended, 0 without one; in SCHEDULE_TOPIC_XXXX the time
of delivery in ms; and at or below unit_ext.MAX_ADDRESS an address in the queue's extension.

Source: ConsumeQueue#putMessagePositionInfo, #fillPreBlank (4.9, 5.3).
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

QUEUE_UNIT = np.dtype(
    [
        ("physical_offset", ">i8"),  # where the record starts in the commit log, in bytes
        ("record_size", ">i4"),  # the whole record, TOTALSIZE
        ("tags_code", ">i8"),  # see above
    ]
)
assert QUEUE_UNIT.itemsize == 20

BLANK_FILL_OFFSET = 0
BLANK_FILL_SIZE = 0x7FFFFFFF


def unit_position(queue_offset: int) -> int:
    """Return where the unit starts, in bytes from the first unit that its queue ever had."""
    return queue_offset * QUEUE_UNIT.itemsize


def is_blank_fill(units: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return for each unit whether it is fill, no message."""
    fill: NDArray[np.bool_] = (units["physical_offset"] == BLANK_FILL_OFFSET) & (
        units["record_size"] == BLANK_FILL_SIZE
    )
    return fill


def decode_units(data: bytes | memoryview | NDArray[np.uint8]) -> NDArray[np.void]:
    """Return the whole units of `data` as a view of it; a cut one at the end is left out."""
    return np.frombuffer(data, QUEUE_UNIT, len(data) // QUEUE_UNIT.itemsize)


def encode_units(physical_offsets: ArrayLike, record_sizes: ArrayLike, tags_codes: ArrayLike) -> bytes:
    """Write units from arrays of one length."""
    offsets: NDArray[Any] = np.asarray(physical_offsets, np.int64)
    units = np.empty(len(offsets), QUEUE_UNIT)
    units["physical_offset"] = offsets
    units["record_size"] = record_sizes
    units["tags_code"] = tags_codes
    return units.tobytes()


def encode_blank_fill(count: int) -> bytes:
    """Write the fill for `count` units before a queue's first message."""
    return encode_units(np.full(count, BLANK_FILL_OFFSET), np.full(count, BLANK_FILL_SIZE), np.zeros(count, np.int64))
