"""The wall clock, and random bits.

Only the outermost functions call these two. All other modules get a clock and random bits as arguments, so that tests
can replace them.
"""

import os
import time


def wall_clock_ms() -> int:
    """Return the current time in ms since the epoch. A later call can return a smaller number."""
    return time.time_ns() // 1_000_000  # noqa: TID251


def random_bits() -> int:
    """Return 32 unpredictable bits as an integer, so that processes that choose names at the same time differ."""
    return int.from_bytes(os.urandom(4), "big")
