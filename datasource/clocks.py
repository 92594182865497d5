"""The clocks of the Spark side: the one place where it asks for the time. Everything else is given them."""

import time


def wall_clock_ms() -> int:
    """Return the time, in ms since the epoch. It may be set, and run back."""
    return time.time_ns() // 1_000_000  # noqa: TID251


def monotonic_ms() -> float:
    """Return ms on a clock that only runs forward."""
    return time.monotonic() * 1000


def sleep(seconds: float) -> None:
    """Do nothing for so long."""
    time.sleep(seconds)
