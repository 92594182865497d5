"""The machine's clock and its randomness: the one place where the engine asks for either.

Everything below the door takes them as arguments, so that a test may choose.
"""

import os
import time


def wall_clock_ms() -> int:
    """Return the time, in ms since the epoch. It may be set back."""
    return time.time_ns() // 1_000_000  # noqa: TID251


def random_bits() -> int:
    """Return 32 bits that nobody can guess: they keep apart what several processes name at the same time."""
    return int.from_bytes(os.urandom(4), "big")
