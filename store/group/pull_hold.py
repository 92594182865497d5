"""A pull that found nothing and waits: whether it waits at all, and what wakes it.

Pure: the queue's end and the time are told. Source: PullMessageProcessor#processRequest, PullRequestHoldService
(4.9.8). A broker looks every 5 s after all that wait, at a moment that has nothing to do with theirs; here each has
its own 5 s, and its time ends when it is over.
"""

from collections.abc import Callable

CHECK_MS = 5_000  # PullRequestHoldService: how often it looks whatever has arrived
SHORT_POLLING_MS = 1_000  # shortPollingTimeMills: the longest wait without long polling, and how often it looks then


def hold_ms(
    timeout_ms: int,
    *,
    is_not_found: bool,
    may_suspend: bool = True,
    asks_to_suspend: bool = True,
    long_polling: bool = True,
) -> int | None:
    """Return how long a pull is held that was answered, None if it is not held.

    `is_not_found`: the answer is PULL_NOT_FOUND. `may_suspend` is false for a pull that was held before,
    `asks_to_suspend` for one that does not want to wait.
    """
    if not (is_not_found and may_suspend and asks_to_suspend):
        return None
    return timeout_ms if long_polling else SHORT_POLLING_MS


class PullHold:
    """One pull on hold from queue offset `offset` on, since `now_ms`. `max_offset` is the queue's end by then."""

    def __init__(
        self, offset: int, max_offset: int, now_ms: float, held_ms: float, *, long_polling: bool = True
    ) -> None:
        self._offset, self._seen, self._long_polling = offset, max_offset, long_polling
        self._check_every_ms = CHECK_MS if long_polling else SHORT_POLLING_MS
        self._next_check_ms = now_ms + self._check_every_ms
        self.until_ms = now_ms + held_ms

    def is_woken(self, max_offset: int, now_ms: float, has_wanted: Callable[[int, int], bool]) -> bool:
        """Say whether to pull again, given the queue's end and the time.

        A message that the filter wants wakes at once: `has_wanted` is asked for the queue offsets [begin, end) that
        are new. Others wake at the next check only, and so let the client move past them.
        """
        if now_ms >= self.until_ms:
            return True
        begin, self._seen = max(self._seen, self._offset), max(self._seen, max_offset)
        if self._long_polling and begin < max_offset and has_wanted(begin, max_offset):
            return True
        if now_ms < self._next_check_ms:
            return False
        while self._next_check_ms <= now_ms:
            self._next_check_ms += self._check_every_ms
        return max_offset > self._offset
