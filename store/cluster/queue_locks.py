"""The locks that a member of a group holds on queues, for orderly consumption. Pure: times are monotonic, in s.

A broker gives the lock of a queue to one member, for 60 s from its last renewal. It measures from the arrival of the
request, so a member that measures from the sending never believes in a lock for too long. A lock is lost if the broker
refuses to renew it, or if it was not renewed in time.

Source: RebalanceLockManager, ConsumeMessageOrderlyService#lockMQPeriodically (4.9, 5.3).
"""

from collections.abc import Collection
from math import inf

from rmq_spark.store.model import QueueKey

RENEWAL_S = 20.0  # rocketmq.client.rebalance.lockInterval
LIFE_S = 60.0  # rocketmq.broker.rebalance.lockMaxLiveTime
_RETRY_S = 2.0  # between two attempts to renew locks of which one has failed


class QueueLocks:
    """The locks of a member, and when they were renewed. For one thread at a time."""

    def __init__(self) -> None:
        self._renewed_s: dict[QueueKey, float] = {}
        self._due_s = inf

    @property
    def queues(self) -> Collection[QueueKey]:
        """The locked queues, those with an expired lock included."""
        return self._renewed_s.keys()

    def add(self, queues: Collection[QueueKey], sent_s: float) -> None:
        """Note that a broker has locked queues, by a request that was sent at `sent_s`."""
        for queue in queues:
            self._renewed_s[queue] = sent_s
        if queues:
            self._due_s = min(self._due_s, sent_s + RENEWAL_S)

    def drop(self, queues: Collection[QueueKey]) -> None:
        """Note that the member has given up locks, or lost them."""
        for queue in queues:
            self._renewed_s.pop(queue, None)
        if not self._renewed_s:
            self._due_s = inf

    def next_s(self) -> float:
        """Return when the locks must be renewed; infinity if there are none."""
        return self._due_s

    def note_renewal(
        self, granted: Collection[QueueKey], refused: Collection[QueueKey], sent_s: float, now_s: float
    ) -> set[QueueKey]:
        """Note the answers to a renewal that was sent at `sent_s`. Forget the locks that are lost, and return these.

        A queue that is neither granted nor refused has no answer; its lock lives until it expires.
        """
        for queue in granted:
            if queue in self._renewed_s:
                self._renewed_s[queue] = sent_s
        lost = {queue for queue in refused if queue in self._renewed_s} | self.expired(now_s)
        self.drop(lost)
        is_complete = all(renewed_s == sent_s for renewed_s in self._renewed_s.values())
        self._due_s = (sent_s + RENEWAL_S if is_complete else now_s + _RETRY_S) if self._renewed_s else inf
        return lost

    def expired(self, now_s: float) -> set[QueueKey]:
        """Return the queues whose locks were not renewed for 60 s."""
        return {queue for queue, renewed_s in self._renewed_s.items() if now_s - renewed_s > LIFE_S}

    def renewed_ago_s(self, queue: QueueKey, now_s: float) -> float | None:
        """Return how long ago the lock of a queue was renewed, None if there is none."""
        renewed_s = self._renewed_s.get(queue)
        return None if renewed_s is None else now_s - renewed_s
