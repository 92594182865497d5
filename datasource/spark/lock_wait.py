"""The wait of a query for queues that an earlier owner has locked, as in a cluster an earlier run of an orderly query.

A broker gives a lock to another member 60 s after its last renewal (RebalanceLockManager, 4.9, 5.3). A process that
Spark ends does not unlock. A stream reads its other queues meanwhile. But a batch that is repeated needs its queues.
So does a run with the trigger AvailableNow, which would end without the new messages of its queues.
"""

import logging
from collections.abc import Callable, Sequence

from rmq_spark.datasource.spark import clocks
from rmq_spark.store.model import QueueKey

_LOG = logging.getLogger("rmq_spark")

_TIMEOUT_MS = 70_000.0  # a lock lasts 60 s, and brokers look at their clocks only
_PAUSE_MS = 1000.0


class LockWait:
    """The wait of one run, which is at most 70 s in all. `is_over` says that nobody needs the result any more."""

    def __init__(
        self,
        monotonic_ms: Callable[[], float] = clocks.monotonic_ms,
        sleep: Callable[[float], None] = clocks.sleep,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._monotonic_ms, self._sleep, self._is_over = monotonic_ms, sleep, is_over
        self._begun_ms: float | None = None
        self._has_ended = False

    def pause(self, queues: Sequence[QueueKey]) -> bool:
        """Wait a second for the locks of `queues`. Return False, at once, if the time is over. Logs begin and end."""
        now_ms = self._monotonic_ms()
        if self._begun_ms is None:
            self._begun_ms = now_ms
            _LOG.warning(
                "rmq: %s locked by another member, or by an earlier run of this query, whose locks expire 60 s after "
                "its end. The query waits for them, at most 70 s",
                _describe(queues, "is", "are"),
            )
        if now_ms - self._begun_ms >= _TIMEOUT_MS or self._is_over():
            if not self._has_ended:
                _LOG.warning("rmq: %s locked by another member", _describe(queues, "stays", "stay"))
            self._has_ended = True
            return False
        self._sleep(_PAUSE_MS / 1000)
        return True


def _describe(queues: Sequence[QueueKey], verb_of_one: str, verb: str) -> str:
    """Return the subject and the verb of a sentence about queues."""
    if len(queues) == 1:
        return f"queue {queues[0]} {verb_of_one}"
    return f"{len(queues)} queues, such as {queues[0]}, {verb}"
