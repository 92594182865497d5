"""How one process waits for the store's lock: how often it looks, when it gives up, and what it then says.

Pure but for what it is told: the caller looks at the lock and at the holder's note, sleeps, and says how long.
"""

from datetime import UTC, datetime

from rmq_spark.store.errors import LockTimeoutError
from rmq_spark.store.format.holder_file import Holder

# With the turn: whoever holds the lock is the only one in front, so look often, then seldom at one that takes long.
_NEXT_POLL_MS = 2
_LONG_POLL_MS = 20
_LONG_AFTER_MS = 1_000
# For the turn: those who wait longest look most often, so that they get it sooner than those who come.
_NEW_POLL_MS = 40
_OLD_POLL_MS = 4
_OLD_AFTER_MS = 4_000
# A process of ours names itself before it passes the turn on and takes the name away just before it releases. So who
# has the turn needs little time to know that the holder has no name. Who has not cannot tell such a holder from one
# that is about to write its name on a disk that is slow.
_NAMELESS_MS = 1_000
_NAMELESS_WITHOUT_TURN_MS = 10_000
# Who has the turn looks every 20 ms at least. A lock that nobody takes for so long means that it was stopped.
_ABANDONED_MS = 2_000


class LockWait:
    """One wait for the lock. All times in ms; time counts only while the holder's note stays as it is."""

    def __init__(self, timeout_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._note: bytes | None = None
        self._waited_ms = self._idle_ms = self._free_ms = 0

    def look(self, slept_ms: int, note: bytes | None, *, is_locked: bool) -> None:
        """Take note of what is seen after `slept_ms`: the holder's note, None without one; whether anybody holds it."""
        self._waited_ms += slept_ms
        self._idle_ms = self._idle_ms + slept_ms if note == self._note else 0
        self._free_ms = self._free_ms + slept_ms if note == self._note and not is_locked else 0
        self._note = note

    @property
    def is_turn_abandoned(self) -> bool:
        """Say whether nobody took the free lock for so long that whoever has the turn is not waiting any more."""
        return self._free_ms >= _ABANDONED_MS

    @property
    def is_over(self) -> bool:
        """Say whether the holder has made no progress for as long as the user wants to wait."""
        return self._idle_ms >= self._timeout_ms

    def is_nameless(self, *, has_turn: bool) -> bool:
        """Say whether the note has been as it is for so long that a holder of ours would have changed it.

        Then a holder whom it does not name, or whom it names and who is dead, is none of ours.
        """
        return self._idle_ms >= (_NAMELESS_MS if has_turn else _NAMELESS_WITHOUT_TURN_MS)

    def pause_ms(self, *, has_turn: bool) -> int:
        """Return how long to sleep before the next look."""
        if has_turn:
            pause = _NEXT_POLL_MS if self._idle_ms < _LONG_AFTER_MS else _LONG_POLL_MS
        else:
            pause = _NEW_POLL_MS - (_NEW_POLL_MS - _OLD_POLL_MS) * min(self._waited_ms, _OLD_AFTER_MS) // _OLD_AFTER_MS
        return max(1, min(pause, self._timeout_ms - self._idle_ms))


def refuse_holder(root: str, holder: Holder, timeout_ms: int) -> LockTimeoutError:
    """Return the error for a lock that a writer of ours holds and does not release."""
    since = datetime.fromtimestamp(holder.since_ms / 1000, UTC).isoformat(timespec="seconds")
    return LockTimeoutError(
        f'{root} is being written by the application "{holder.application}" (process {holder.pid} on host '
        f"{holder.host}, since {since}), which has made no progress for {timeout_ms / 1000:g} s. Nothing was written. "
        "Stop that process if it hangs; the next writer finishes what it began. To wait longer set lockTimeout, now "
        f"{timeout_ms / 1000:g}s."
    )


def refuse_broker(root: str, lock_path: str, pid: int | None) -> LockTimeoutError:
    """Return the error for a lock that is held by none of ours; `pid` is the broker's process id where it is known."""
    who = "a broker" if pid is None else f"a broker (process {pid}, 5.x)"
    return LockTimeoutError(
        f"{root} belongs to {who}, which holds {lock_path} as long as it lives. Nothing was written. Reading works "
        "beside it. To append here stop it (mqshutdown broker), or send the messages to it instead."
    )


def refuse_waiters(root: str, lock_path: str, timeout_ms: int) -> LockTimeoutError:
    """Return the error for a lock whose holder had no time to name itself, or had none that it could name."""
    return LockTimeoutError(
        f"{lock_path} was not to be had within {timeout_ms / 1000:g} s: another process holds it and has not said who "
        f"it is, a broker or a writer. Nothing was written to {root}. To wait longer set lockTimeout, now "
        f"{timeout_ms / 1000:g}s."
    )


def refuse_opener(root: str, lock_path: str, timeout_ms: int) -> LockTimeoutError:
    """Return the error for a lock that nobody holds, and that is not to be had for who has its file open to write."""
    return LockTimeoutError(
        f"{lock_path} is not locked, but was open for writing for {timeout_ms / 1000:g} s: by a broker that is "
        "starting, or by another process, and while it is open a broker may be reading the store. Nothing was written "
        f"to {root}. See who has it open with `fuser -v {lock_path}` (as root, where it belongs to another user). Let "
        "a broker that starts come up, and send the messages to it; have any other process close the file. To wait "
        f"longer set lockTimeout, now {timeout_ms / 1000:g}s."
    )
