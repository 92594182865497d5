"""The locks of queues by members of groups that consume in order, at one broker.

Source: RebalanceLockManager (4.9, 5.3).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from rmq_spark.store.testing.brokers.wire import QueueId

LOCK_S = 60  # rocketmq.broker.rebalance.lockMaxLiveTime


@dataclass(slots=True)
class QueueLocks:
    """Which client holds which queue for which group, and since when. Nothing checks that these exist.

    `now_s` is the broker's clock. `held` maps (group, queue) to the client id and the time of its last renewal.
    """

    now_s: Callable[[], float]
    held: dict[tuple[str, QueueId], tuple[str, float]] = field(default_factory=dict)

    def lock(self, group: str, queues: Collection[QueueId], client_id: str) -> list[QueueId]:
        """Lock the queues that are free, and renew the client's own locks. Return the queues that it holds now."""
        mine = [queue for queue in queues if self.owner(group, queue) in (None, client_id)]
        for queue in mine:
            self.held[group, queue] = client_id, self.now_s()
        return mine

    def unlock(self, group: str, queues: Collection[QueueId], client_id: str) -> None:
        """Free the queues that the client holds."""
        for queue in queues:
            if self.held.get((group, queue), ("", 0))[0] == client_id:
                del self.held[group, queue]

    def owner(self, group: str, queue: QueueId) -> str | None:
        """Return the id of the client that holds a queue."""
        client_id, renewed_s = self.held.get((group, queue), (None, 0))
        return client_id if self.now_s() - renewed_s <= LOCK_S else None

    def is_orderly(self, group: str) -> bool:
        """Return whether any queue is locked for a group."""
        return any(self.owner(group, queue) is not None for name, queue in self.held if name == group)
