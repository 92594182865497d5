"""Waiting for messages by polling.

Polling is necessary because a broker writes through mapped files, and the kernel does not report such writes. So a poll
must be cheap, as `StoreReader.refresh` is if nothing has changed. The pauses between polls become longer with the time
waited, so that the delay stays a small part of that time. They also become longer if a poll takes long, so that polls
use little CPU time. The functions are pure: they get the clock, the sleep and the poll as arguments.
"""

from collections.abc import Callable

MIN_NAP_MS = 1.0
MAX_NAP_MS = 2.0  # the longest pause. With 4.0, the delay would double, and only 1 % of a core would be saved.
MAX_SLOW_NAP_MS = 200.0  # the longest pause if a poll takes long, on a slow disk or with thousands of queues
_WAITED_SHARE = 1 / 20  # a pause is at most this share of the time waited so far, but at least MIN_NAP_MS
_POLL_SHARE = 1 / 20  # polls take at most this share of the time, unless that needs pauses over MAX_SLOW_NAP_MS


def wait_for_arrival(
    has_moved: Callable[[], bool],
    until_ms: float,
    now_ms: Callable[[], float],
    sleep: Callable[[float], None],
) -> bool:
    """Call `has_moved` again and again until it returns True or the time `until_ms` has come. Return its last result.

    The first call is made immediately, even if `until_ms` has passed already, and the last call at the end. `now_ms` is
    a monotonic clock in ms. If this clock stops or runs backwards nevertheless, the wait becomes longer, but at most by
    the time that the calls take. `sleep` takes seconds. An error of `sleep` or `has_moved` is raised and ends the wait.
    """
    begun = before = now_ms()
    left, waited, last_poll_ms = until_ms - begun, 0.0, 0.0
    while not has_moved():
        after = now_ms()
        left, waited = min(left, until_ms - after), max(waited, after - begun)
        if left <= 0:
            return False
        # A single slow poll is ignored, because it may be the first one, or the machine may have been busy.
        nap = min(nap_ms(waited, min(last_poll_ms, after - before)), left)
        last_poll_ms = after - before
        sleep(nap / 1000)
        left, waited = left - nap, waited + nap
        before = now_ms()
    return True


class Polling:
    """A wait that its caller divides into single polls, to do other work between them. For one thread at a time.

    The pauses depend on the time that was waited since the last poll that returned True.
    """

    def __init__(self, now_ms: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._now_ms, self._sleep = now_ms, sleep
        self._waited_ms = 0.0
        self._polls_ms = (0.0, 0.0)  # the time that the last two polls took. A single slow poll has no effect

    def poll(self, has_moved: Callable[[], bool], longest_ms: float) -> bool:
        """Pause for at most `longest_ms`, then call `has_moved` once and return its result."""
        nap = max(min(nap_ms(self._waited_ms, min(self._polls_ms)), longest_ms), 0.0)
        begun_ms = self._now_ms()
        self._sleep(nap / 1000)
        before_ms = self._now_ms()
        moved = has_moved()
        after_ms = self._now_ms()
        self._polls_ms = (self._polls_ms[1], after_ms - before_ms)
        self._waited_ms = 0.0 if moved else self._waited_ms + max(after_ms - begun_ms, nap)
        return moved


def nap_ms(waited_ms: float, poll_ms: float) -> float:
    """Return the length of the next pause in ms.

    `waited_ms` is the time for which nothing has changed, and `poll_ms` is the time that a poll takes.
    """
    nap = min(max(waited_ms * _WAITED_SHARE, MIN_NAP_MS), MAX_NAP_MS)
    return max(nap, min(poll_ms / _POLL_SHARE, MAX_SLOW_NAP_MS))
