"""The file `config/timercheck` of 5.x: how far the queue was taken into the timer log, and how far that was delivered.

One page of 4096 bytes: seven longs, then zeros. A broker overwrites it in place every second while it runs, with what
was so before it flushed timer log and wheel. Source: TimerCheckpoint, TimerMessageStore#prepareTimerCheckPoint (5.3).
"""

from dataclasses import asdict, dataclass

import numpy as np

TIMER_CHECK = np.dtype(
    [
        ("read_time", ">i8"),  # ms, a whole second: what waits for an earlier one was delivered
        ("log_position", ">i8"),  # up to which the timer log was flushed
        ("queue_offset", ">i8"),  # of rmq_sys_wheel_timer: what is before it is in the timer log, or was delivered
        ("master_queue_offset", ">i8"),  # a broker that starts goes no further than this: where we work, the same
        ("state_version", ">i8"),  # of the data version: 0 without a controller
        ("version_timestamp", ">i8"),  # ms
        ("version_counter", ">i8"),  # of changes
    ]
)
assert TIMER_CHECK.itemsize == 56
TIMER_CHECK_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TimerCheck:
    """What the page says."""

    read_time: int = 0
    log_position: int = 0
    queue_offset: int = 0
    master_queue_offset: int = 0
    state_version: int = 0
    version_timestamp: int = 0
    version_counter: int = 0


def decode_timer_check(page: bytes) -> TimerCheck:
    """Read the page. What a shorter file lacks reads as 0, as for a broker, which lengthens it. Never raises."""
    fields = np.frombuffer(page[: TIMER_CHECK.itemsize].ljust(TIMER_CHECK.itemsize, b"\0"), TIMER_CHECK)[0]
    return TimerCheck(*(int(fields[name]) for name in TIMER_CHECK.names or ()))


def encode_timer_check(check: TimerCheck) -> bytes:
    """Write what of the page is not zeros."""
    return np.array(tuple(asdict(check).values()), TIMER_CHECK).tobytes()
