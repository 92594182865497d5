"""The seconds for which messages wait in the timer's wheel, known from look to look.

The wheel is read as a whole once; after that only what changed is: a look costs what is due, not what waits.
"""

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.delivery.timer_files import TimerWheel
from rmq_spark.store.format.timer_check import TimerCheck
from rmq_spark.store.format.timer_wheel import SECOND_MS, WINDOW_MS

_OTHER_CLOCK_MS = 3600 * SECOND_MS  # that the clock of another ticker may be ahead


class PendingSeconds:
    """The seconds (ms, ascending) that have messages, as of the check that they were read with. For one thread."""

    def __init__(self, wheel: TimerWheel) -> None:
        self._wheel = wheel
        self._known: tuple[TimerCheck, NDArray[np.int64]] | None = None

    def times(self, check: TimerCheck, now_ms: int) -> NDArray[np.int64]:
        """Return the seconds that have messages while `check` is the timer's; some before what it has read, too."""
        if self._known is None or check.read_time < self._known[0].read_time:
            slots = self._wheel.slots_from(check.read_time)
            self._known = check, slots["second"].astype(np.int64) * SECOND_MS
        elif self._known[0] != check:
            # Others delivered, or took messages: these are in the window, and the wheel is seven times as long.
            end_ms = max(check.read_time, now_ms) + WINDOW_MS + _OTHER_CLOCK_MS
            slots = self._wheel.slots_from(check.read_time, end_ms)
            beyond = self._known[1][int(np.searchsorted(self._known[1], end_ms)) :]
            self._known = check, np.concatenate([slots["second"].astype(np.int64) * SECOND_MS, beyond])
        return self._known[1]

    def follow(self, check: TimerCheck, new_times: list[NDArray[np.int64]] | None) -> None:
        """Take note that `check` was written, and which seconds got messages; None: that is not known."""
        if new_times is None or self._known is None:
            self._known = None
        else:
            times = _merged([self._known[1], *new_times])
            self._known = check, times[int(np.searchsorted(times, check.read_time)) :]


def _merged(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the distinct numbers, ascending, of parts that are so themselves: sorted runs sort fast."""
    if len(parts) == 1:
        return parts[0]
    times: NDArray[np.int64] = np.sort(np.concatenate(parts), kind="stable")
    is_new = np.ones(len(times), np.bool_)
    is_new[1:] = times[1:] != times[:-1]
    return times[is_new]
