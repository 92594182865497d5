"""The timer log of 5.x, `timerlog/<20 digits>`: for each message that waits for a time, where it lies and until when.

Units of 52 bytes, in the order in which messages were taken from the queue of `rmq_sys_wheel_timer`. Those that are due
in one second are a chain, from the newest, which the timer wheel names, back to the first. A unit does not cross the
end of its file: where it and a filler of 16 bytes would not fit, a filler takes the rest.

Source: TimerLog, TimerMessageStore#doEnqueue, #recoverAndRevise (5.3).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TIMER_UNIT = np.dtype(
    [
        ("unit_size", ">i4"),  # 52
        ("previous_position", ">i8"),  # in the whole log, of the unit before it in its chain; -1 in the first
        ("magic", ">i4"),  # DEFAULT, with ROLL and DELETE where they hold
        ("write_time", ">i8"),  # ms, a whole second: when it was taken from the queue
        ("delay", ">i4"),  # ms from then to the second of the wheel whose chain it is in
        ("physical_offset", ">i8"),  # where the record that waits starts in the commit log
        ("record_size", ">i4"),  # the whole record
        ("topic_hash", ">i4"),  # Java's hash of REAL_TOPIC, 0 without; for counting only
        ("reserved", ">i8"),  # 0
    ]
)
assert TIMER_UNIT.itemsize == 52
TIMER_UNIT_BYTES = TIMER_UNIT.itemsize

TIMER_BLANK = np.dtype(
    [
        ("remaining_size", ">i4"),  # bytes up to the file's end
        ("previous_position", ">i8"),  # 0
        ("magic", ">i4"),  # BLANK_MAGIC
    ]
)
assert TIMER_BLANK.itemsize == 16

DEFAULT, ROLL, DELETE = 1, 2, 4
MAX_MAGIC = 0xF  # of what RocketMQ takes for a unit
BLANK_MAGIC = 0xCBD43194 - (1 << 32)  # the commit log's, as a signed number

TIMER_FILE_BYTES = 100 << 20  # mappedFileSizeTimerLog, where nobody set another


@dataclass(frozen=True, slots=True)
class UnitPlaces:
    """Where new units go: their positions in the whole log, and those of the fillers before files that they begin."""

    positions: NDArray[np.int64]
    blanks: NDArray[np.int64]
    end: int  # the position behind the last unit


def place_units(end: int, count: int, file_bytes: int) -> UnitPlaces:
    """Return where `count` units go behind position `end` of a log of files of `file_bytes`."""
    room = file_bytes - TIMER_BLANK.itemsize
    assert room >= TIMER_UNIT_BYTES, file_bytes
    first_file, at = divmod(end, file_bytes)
    per_file = room // TIMER_UNIT_BYTES
    here = max((room - at) // TIMER_UNIT_BYTES, 0)  # that fit into the file where the log ends
    numbers = np.arange(count, dtype=np.int64)
    later = numbers - here
    files = first_file + 1 + later // per_file
    positions = np.where(
        later < 0, end + numbers * TIMER_UNIT_BYTES, files * file_bytes + later % per_file * TIMER_UNIT_BYTES
    )
    heads = np.flatnonzero(positions % file_bytes == 0)
    before = np.where(heads > 0, positions[heads - 1] + TIMER_UNIT_BYTES, end)
    blanks = before[before % file_bytes > 0]
    return UnitPlaces(positions, blanks, int(positions[-1]) + TIMER_UNIT_BYTES if count else end)


def encode_timer_blank(position: int, file_bytes: int) -> bytes:
    """Return the first bytes of a filler at a position."""
    return np.array((file_bytes - position % file_bytes, 0, BLANK_MAGIC), TIMER_BLANK).tobytes()


def are_units(units: NDArray[np.void]) -> NDArray[np.bool_]:
    """Say of each whether a broker takes it for a unit (TimerMessageStore#isMagicOK)."""
    whole: NDArray[np.bool_] = (units["unit_size"] == TIMER_UNIT_BYTES) & ((units["magic"] | MAX_MAGIC) == MAX_MAGIC)
    return whole


def due_times(units: NDArray[np.void]) -> NDArray[np.int64]:
    """Return the second of the wheel that each unit waits for, in ms."""
    times: NDArray[np.int64] = (units["write_time"].astype(np.int64) + units["delay"]) // 1000 * 1000
    return times
