"""Settling: waiting until all that brokers had read from other sessions is stored and visible.

A *barrier* is a message to the stage topic of a broker. It passes the same thread pool as batches, and a broker puts
messages into their queues in the order of its log, over all topics. So when the barrier is visible, all requests that
the broker has executed before are visible too. Only a request that a thread has taken, and not executed yet, may come
later; after the time to settle, a second barrier covers it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from rmq_spark.store.cluster.exactly_once.target_calls import TargetCalls, call_all, pause
from rmq_spark.store.cluster.requests import MaxOffsetRequest
from rmq_spark.store.cluster.responses import OffsetResponse
from rmq_spark.store.cluster.send_requests import SendRequest, SendResponse
from rmq_spark.store.errors import BackendUnavailableError, RmqError, UnknownOutcomeError
from rmq_spark.store.model import QueueKey

_BODY = b"rmq-spark barrier"
_FIRST_PAUSE_MS, _LAST_PAUSE_MS = 5.0, 500.0


class Barriers:
    """Sends barriers in one session. For one thread.

    `patience_ms` is how long a broker may take to store a barrier and to show it. `now_ms` returns ms since the epoch,
    `monotonic_ms` a time that never runs back.
    """

    def __init__(
        self,
        calls: TargetCalls,
        patience_ms: float,
        monotonic_ms: Callable[[], float],
        now_ms: Callable[[], int],
    ) -> None:
        self._calls, self._patience_ms = calls, patience_ms
        self._monotonic_ms, self._now_ms = monotonic_ms, now_ms

    def settle(self, queues: Sequence[QueueKey], settle_ms: float) -> None:
        """Return when all that the brokers of `queues` had read before this call is stored and visible, or refused.

        `queues` has one queue of the stage topic for each broker, with the cluster's name of the topic. A broker takes
        at most `settle_ms` to execute a request that one of its threads has taken.

        Raises SessionOverError if a registered connection was lost, BackendUnavailableError if a barrier is not visible
        in time, and the RmqError of a broker that refuses it.
        """
        for _ in range(2):
            self.send(queues)
            pause(self._calls, settle_ms, self._monotonic_ms)

    def send(self, queues: Sequence[QueueKey]) -> None:
        """Send one barrier to each of the queues, and wait until all are visible. Raises the errors of `settle`."""
        until_ms = self._monotonic_ms() + self._patience_ms
        places: dict[QueueKey, int] = {}

        def store(queue: QueueKey, outcome: Any) -> bool:
            # After an unknown outcome another one is sent: barriers may be stored several times.
            if isinstance(outcome, SendResponse) and outcome.queue_offset is not None:
                places[queue] = outcome.queue_offset
                return True
            if isinstance(outcome, RmqError) and not isinstance(outcome, UnknownOutcomeError | BackendUnavailableError):
                raise outcome
            return False

        def is_visible(queue: QueueKey, outcome: Any) -> bool:
            if isinstance(outcome, OffsetResponse):
                return outcome.offset > places[queue]
            if not isinstance(outcome, BackendUnavailableError):
                raise outcome
            return False

        self._repeat(queues, lambda queue: SendRequest(queue, _BODY, "", self._now_ms()), store, until_ms, "stored")
        self._repeat(queues, MaxOffsetRequest, is_visible, until_ms, "visible")

    def _repeat(
        self,
        queues: Sequence[QueueKey],
        make: Callable[[QueueKey], Any],
        is_done: Callable[[QueueKey, Any], bool],
        until_ms: float,
        goal: str,
    ) -> None:
        """Send requests to the brokers of queues, again and again, until each has an outcome that is the last one."""
        left, pause_ms = list(queues), _FIRST_PAUSE_MS
        while True:
            outcomes = call_all(self._calls, [(queue.broker, make(queue)) for queue in left])
            failed = [(queue, one) for queue, one in zip(left, outcomes, strict=True) if not is_done(queue, one)]
            if not failed:
                return
            if self._monotonic_ms() >= until_ms:
                queue, last = failed[0]
                raise BackendUnavailableError(
                    f"cannot settle broker {queue.broker}: a message to queue {queue} is not {goal} after "
                    f"{self._patience_ms / 1000:g} s; expected it at once. Last answer: {last}. Check the load of the "
                    "broker and its log."
                )
            left = [queue for queue, _ in failed]
            pause(self._calls, pause_ms, self._monotonic_ms)
            pause_ms = min(2 * pause_ms, _LAST_PAUSE_MS)
