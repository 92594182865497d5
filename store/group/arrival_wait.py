"""How to wait for news of a store: look, nap, look again, until something has moved or the time is over.

A broker writes through mappings, of which the kernel tells nobody: only looking helps. So a look has to be cheap (an
idle `StoreReader.refresh` is). Naps grow with the time waited, so that news is late by a small part of that time, and
with what a look takes, so that looking takes a small part of the processor. Pure: looking, clock and sleep are given.
"""

from collections.abc import Callable

MIN_NAP_MS = 1.0
MAX_NAP_MS = 2.0  # how late news of a store is that was quiet for long; 4.0 is twice as late and saves 1 % of a core
MAX_SLOW_NAP_MS = 200.0  # and of one at which a look takes long: a slow disk, thousands of queues
_WAITED_SHARE = 1 / 20  # of the time waited: the longest nap
_LOOK_SHARE = 1 / 20  # of the time: what looks may take


def wait_for_arrival(
    has_moved: Callable[[], bool],
    until_ms: float,
    now_ms: Callable[[], float],
    sleep: Callable[[float], None],
) -> bool:
    """Return True as soon as a look says that something has moved, False when `until_ms` has come without.

    The first look is made at once, whatever the time, and the last one at the end. `now_ms` is a clock that nobody
    sets, in ms; where it stands still or runs back all the same, the wait is longer by the time of the looks at most.
    `sleep` takes seconds. What it and `has_moved` raise passes through: whoever wants to end the wait raises, or
    says True.
    """
    begun = before = now_ms()
    left, waited, last_look = until_ms - begun, 0.0, 0.0
    while not has_moved():
        after = now_ms()
        left, waited = min(left, until_ms - after), max(waited, after - begun)
        if left <= 0:
            return False
        # One slow look alone says nothing: the first one, or one that the machine had no time for.
        nap = min(nap_ms(waited, min(last_look, after - before)), left)
        last_look = after - before
        sleep(nap / 1000)
        left, waited = left - nap, waited + nap
        before = now_ms()
    return True


def nap_ms(waited_ms: float, look_ms: float) -> float:
    """Return how long to sleep after `waited_ms` without news, where a look takes `look_ms`."""
    nap = min(max(waited_ms * _WAITED_SHARE, MIN_NAP_MS), MAX_NAP_MS)
    return max(nap, min(look_ms / _LOOK_SHARE, MAX_SLOW_NAP_MS))
