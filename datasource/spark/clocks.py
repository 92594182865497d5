"""Clocks of the data source, and its log lines of level INFO.

Only this module reads the clock. Other modules get a clock as an argument.
"""

import logging
import sys
import time


def wall_clock_ms() -> int:
    """Return the current time in ms since the epoch. It may go backwards, because clocks can be set."""
    return time.time_ns() // 1_000_000  # noqa: TID251


def monotonic_ms() -> float:
    """Return a time in ms of a clock that never goes backwards. Only differences between its times are meaningful."""
    return time.monotonic() * 1000


def sleep(seconds: float) -> None:
    """Wait for a number of seconds."""
    time.sleep(seconds)


_LOG = logging.getLogger("rmq_spark")


def is_info_logged() -> bool:
    """Return whether `log_info` would write its line. Callers use it before they compute an expensive line."""
    return _LOG.isEnabledFor(logging.INFO) or not _LOG.hasHandlers()


def log_info(line: str, **fields: object) -> None:
    """Log a line at level INFO, with fields for JSON.

    If logging is not configured, print it to stderr: Python would show only warnings.
    """
    if _LOG.hasHandlers():
        _LOG.info(line, extra=fields)
    else:
        print(line, file=sys.stderr)
