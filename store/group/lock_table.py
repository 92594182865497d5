"""Whose a queue is for the next minute: the lock table by which a broker keeps consumption in order.

An owner keeps a queue by locking it again in time. Others get it when it lets go or has been silent for longer than a
minute. Time is an argument, milliseconds of a clock that must not go back: one process' monotonic clock.

Every lock has an epoch, which RocketMQ has not: it counts up whenever a queue is granted anew and never goes back,
so that what an owner does late, after it lost the queue, can be told from what the next one does.

Source: RebalanceLockManager (4.9, 5.3).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rmq_spark.store.units import QueueKey

LOCK_LIVE_MS = 60_000  # RebalanceLockManager.REBALANCE_LOCK_MAX_LIVE_TIME
# A client renews its locks every 20 s and stops consuming after 30 s without an answer, half a minute before any
# other can have the queue (RebalanceImpl#lockAll, ProcessQueue#isLockExpired).
RENEW_INTERVAL_MS = 20_000
CLIENT_LIVE_MS = 30_000


@dataclass(frozen=True, slots=True)
class QueueLock:
    """Who holds a queue, since which grant, and when it last said so. An empty owner let go: the epoch stays."""

    owner: str
    epoch: int
    renewed_ms: int

    def is_held_by(self, owner: str, now_ms: int, live_ms: int = LOCK_LIVE_MS) -> bool:
        """Say whether the lock is this owner's, and not expired. At the exact age of `live_ms` it is not."""
        return bool(owner) and self.owner == owner and not self.is_expired(now_ms, live_ms)

    def is_expired(self, now_ms: int, live_ms: int = LOCK_LIVE_MS) -> bool:
        """Say whether the owner was silent for longer than `live_ms`."""
        return now_ms - self.renewed_ms > live_ms


class LockTable:
    """The locks of all queues of some groups. Groups know nothing of each other. One thread at a time."""

    def __init__(self, live_ms: int = LOCK_LIVE_MS) -> None:
        assert live_ms > 0, live_ms
        self.live_ms = live_ms
        self._locks: dict[str, dict[QueueKey, QueueLock]] = {}

    def find(self, group: str, queue: QueueKey) -> QueueLock | None:
        """Return the queue's lock, whether or not it is expired or let go; None if nobody ever had one."""
        return self._locks.get(group, {}).get(queue)

    def try_lock(self, group: str, queue: QueueKey, owner: str, now_ms: int) -> int | None:
        """Return the epoch of the lock that `owner` now has; None when it is another's.

        An owner that comes in time keeps its epoch. Whoever gets the queue anew has the next one, and so has an owner
        that comes after its own lock expired: it cannot know who held the queue meanwhile.
        """
        assert owner, "who lets go has no name"
        locks = self._locks.setdefault(group, {})
        lock = locks.get(queue)
        if lock is None:
            locks[queue] = QueueLock(owner, 1, now_ms)
        elif lock.is_held_by(owner, now_ms, self.live_ms):
            locks[queue] = replace(lock, renewed_ms=now_ms)
        elif not lock.owner or lock.is_expired(now_ms, self.live_ms):
            locks[queue] = QueueLock(owner, lock.epoch + 1, now_ms)
        else:
            return None
        return locks[queue].epoch

    def try_lock_batch(self, group: str, queues: Iterable[QueueKey], owner: str, now_ms: int) -> dict[QueueKey, int]:
        """Return the epochs of those queues that `owner` now has; the others are left out."""
        epochs = {queue: self.try_lock(group, queue, owner, now_ms) for queue in queues}
        return {queue: epoch for queue, epoch in epochs.items() if epoch is not None}

    def unlock(self, group: str, queue: QueueKey, owner: str) -> bool:
        """Let go of a queue, and say whether it was the caller's; another's lock stays as it is."""
        lock = self.find(group, queue)
        if lock is None or not owner or lock.owner != owner:
            return False
        self._locks[group][queue] = replace(lock, owner="")
        return True

    def unlock_batch(self, group: str, queues: Iterable[QueueKey], owner: str) -> None:
        """Let go of those queues that are the caller's."""
        for queue in queues:
            self.unlock(group, queue, owner)
