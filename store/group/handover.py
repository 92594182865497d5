"""Handover: how a query gives queues to other members between two of its triggers.

A query rebalances only at its triggers. Other members that wait for its queues would have to wait for the end of a long
batch or of a long trigger interval. So a thread of the query's process also polls the group, as RocketMQ's
RebalanceService does. If other members are entitled to queues, its action depends on the state of the query:

| state of the query | action of the thread |
| --- | --- |
| it plans a batch | none, because the trigger itself rebalances |
| it runs no batch, or its driver has recorded the end of the batch | release these queues at once |
| it runs a batch | fence these queues when others have been entitled to them for `handoverTimeout` |

A released queue keeps its epoch, because all its offsets are committed. Fencing also releases a queue, but increments
its epoch and commits nothing. So tasks of the running batch that check their epoch fail, and the next owner starts
where that batch started. In both cases the query reads the claims at its next trigger, and sees that it has lost the
queues.

The thread never claims queues. It also sends no heartbeats, because a heartbeat must not wait for a lock.
"""

import threading
import weakref
from collections.abc import Callable, Collection
from typing import Protocol

from rmq_spark.store.group.assignment import Assignment
from rmq_spark.store.model import QueueKey

LOOK_EVERY_S = 0.5  # a poll takes some ten system calls, and four for each other member


class HandoverTimer:
    """Records since when other members are entitled to queues of this query.

    Pure. All times are in seconds, by any clock.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since: dict[QueueKey, float] = {}

    def note(self, surplus: Collection[QueueKey], now_s: float) -> None:
        """Record that, at the time `now_s`, other members are entitled to exactly the queues in `surplus`."""
        self._since = {queue: self._since.get(queue, now_s) for queue in surplus}

    def overdue(self, now_s: float) -> list[QueueKey]:
        """Return the queues, sorted, that other members have been entitled to without a break for the timeout."""
        return sorted(queue for queue, since in self._since.items() if now_s - since >= self._timeout_s)


class Handover:
    """The handover of one query's queues between its triggers. For one thread at a time.

    The query calls `begin` and `plan`, and the handover thread calls `refresh`. `finished_batch` returns the number of
    the last batch whose end the driver has recorded. `monotonic` is a clock in seconds.
    """

    def __init__(
        self,
        assignment: Assignment,
        timeout_s: float,
        finished_batch: Callable[[], int],
        monotonic: Callable[[], float],
    ) -> None:
        self._assignment, self._finished_batch, self._monotonic = assignment, finished_batch, monotonic
        self._timer = HandoverTimer(timeout_s)
        self._is_idle = False
        self._batch: int | None = None  # the number of the batch that runs, None if it is unknown
        self.batches = 0  # the number of batches planned so far

    def begin(self) -> None:
        """Record that a trigger has begun to rebalance. From now on a batch may run."""
        self._is_idle, self._batch = False, None
        self._timer.note((), self._monotonic())

    def plan(self, *, is_batch: bool) -> None:
        """Record whether the trigger has planned a batch. If it has not, no batch runs until the next trigger."""
        self._is_idle = not is_batch
        self.batches += is_batch
        self._batch = self.batches if is_batch else None

    def refresh(self) -> tuple[tuple[QueueKey, ...], tuple[QueueKey, ...]]:
        """Release or fence the queues that other members are entitled to, as described in the module.

        Returns (released queues, fenced queues). At most one of the two is not empty. Raises the errors of
        `Assignment.surplus` and `Assignment.give_up`. After an error, the next call tries again.
        """
        surplus, now_s = self._assignment.surplus(), self._monotonic()
        self._timer.note(surplus, now_s)
        if not surplus:
            return (), ()
        is_finished = self._is_idle or (self._batch is not None and self._finished_batch() == self._batch)
        if is_finished:
            return self._assignment.give_up(surplus, is_fenced=False), ()
        overdue = self._timer.overdue(now_s)
        return (), self._assignment.give_up(overdue, is_fenced=True) if overdue else ()


class _Owner(Protocol):
    def hand_over(self) -> None: ...


def start_handover_thread(owner: _Owner) -> threading.Event:
    """Start a thread that calls `owner.hand_over()` regularly. Return an event: set it to end the thread.

    The thread holds no strong reference to `owner`, and also ends when `owner` is garbage-collected.
    """
    stop = threading.Event()
    arguments = weakref.ref(owner), stop
    threading.Thread(target=_run, args=arguments, name="rmq-spark handover", daemon=True).start()
    return stop


def _run(owner: "weakref.ref[_Owner]", stop: threading.Event) -> None:
    while not stop.wait(LOOK_EVERY_S):
        alive = owner()
        if alive is None:
            return
        alive.hand_over()
        del alive  # a strong reference would keep the owner alive while the thread waits
