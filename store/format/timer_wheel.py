"""The timer wheel of 5.x, the file `timerwheel`: for each second of fourteen days the chain of messages due in it.

One file of 1,209,600 slots of 32 bytes. The slot of a second is its number since the epoch modulo the number of slots,
and counts only if it names that very second: else it is what another round left, and the second has no messages.

A message is put at most two days ahead. One that is due later is put back into its queue at one of these times, and
from there taken again ("rolled").

Source: TimerWheel, Slot, TimerMessageStore#doEnqueue (5.3, timerPrecisionMs and timerRollWindowSlot as they come).
"""

import numpy as np
from numpy.typing import NDArray

TIMER_SLOT = np.dtype(
    [
        ("second", ">i8"),  # since the epoch
        ("first_position", ">i8"),  # in the timer log, of the oldest unit of the chain
        ("last_position", ">i8"),  # of the newest, where reading begins
        ("message_count", ">i4"),  # of the chain: messages less deletions; for flow control only, and may be off
        ("magic", ">i4"),  # 0
    ]
)
assert TIMER_SLOT.itemsize == 32
TIMER_SLOT_BYTES = TIMER_SLOT.itemsize

SECOND_MS = 1000
SLOT_COUNT = 2 * 7 * 24 * 3600
WHEEL_BYTES = SLOT_COUNT * TIMER_SLOT_BYTES
WINDOW_MS = 2 * 24 * 3600 * SECOND_MS  # timerRollWindowSlot: nothing is put further ahead


def floor_second(time_ms: int) -> int:
    """Return the begin of the time's second, in ms."""
    return time_ms // SECOND_MS * SECOND_MS


def slot_numbers(times_ms: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return in which slot each time's second is."""
    return times_ms // SECOND_MS % SLOT_COUNT


def wheel_times(out_ms: NDArray[np.int64], write_ms: int, read_ms: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return for which second (ms) each message is put into the wheel, and whether that is to roll it.

    `out_ms` are the messages' TIMER_OUT_MS, `read_ms` is the first second that was not delivered, `write_ms` the one
    that it is now, or `read_ms` where that is later because a clock was wrong: nothing is put before it. What is
    overdue goes there: RocketMQ delivers it without a unit, and so forgets at the next start that it did.
    """
    assert write_ms >= read_ms, (write_ms, read_ms)
    times = np.maximum(out_ms // SECOND_MS * SECOND_MS, read_ms)
    beyond = times - write_ms - WINDOW_MS
    rolls = beyond >= 0
    # A little beyond the window: half of it, so that the next roll has time enough.
    ahead = np.where(beyond < WINDOW_MS // 3, WINDOW_MS // 2, WINDOW_MS)
    return np.where(rolls, write_ms + ahead, times), rolls
