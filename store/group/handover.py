"""Hand queues over to other members between two triggers of a query.

A query moves its queues at its triggers. A long batch or a long trigger interval would keep other members waiting for
just as long, so a thread of the query's process looks after the members too, as RocketMQ's RebalanceService does:

| the query | the thread |
| --- | --- |
| is planning a batch | does nothing: the trigger itself moves the queues |
| has nothing in flight, or its driver recorded the end of the batch | releases what others are entitled to, at once |
| runs a batch | waits for `handoverTimeout` from when the others became entitled, then fences the queues |

A released queue keeps its epoch: all offsets of it are published. A fenced queue gets the next epoch, and nothing is
published: the next owner begins where the running batch began, and tasks that check their epoch fail. In both cases the
claims show the query at its next trigger that the queues are not its own, as after a takeover by another member.

The thread never claims a queue. It is not the thread that beats: a sign of life must not wait for a lock.
"""

import threading
import weakref
from collections.abc import Callable, Collection
from typing import Protocol

from rmq_spark.store.group.assignment import Assignment
from rmq_spark.store.units import QueueKey

HANDOVER_TIMEOUT_MS = 60_000
LOOK_EVERY_S = 0.5  # a look takes some ten system calls, and four for each other member


class HandoverTimer:
    """Since when others have been entitled to queues that this query keeps. Pure: times are seconds of any clock."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since: dict[QueueKey, float] = {}

    def note(self, surplus: Collection[QueueKey], now_s: float) -> None:
        """Note that others are entitled to these queues now, and to no others of this query."""
        self._since = {queue: self._since.get(queue, now_s) for queue in surplus}

    def overdue(self, now_s: float) -> list[QueueKey]:
        """Return the queues, sorted, that others have been entitled to for the timeout."""
        return sorted(queue for queue, since in self._since.items() if now_s - since >= self._timeout_s)


class Handover:
    """What of a query's queues is handed over between its triggers. For one thread at a time.

    The query's own calls are `begin` and `plan`, the handover thread's is `look`. `finished_batch` returns the number
    of the last batch whose end was recorded, `monotonic` is a clock in seconds.
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
        self._batch: int | None = None  # the one in flight, if its number is known
        self.batches = 0  # planned so far

    def begin(self) -> None:
        """Note that a trigger moves the queues: from now on a batch may be in flight."""
        self._is_idle, self._batch = False, None
        self._timer.note((), self._monotonic())

    def plan(self, *, is_batch: bool) -> None:
        """Note what the trigger has planned: a batch, or nothing, and then nothing is in flight until the next one."""
        self._is_idle = not is_batch
        self.batches += is_batch
        self._batch = self.batches if is_batch else None

    def look(self) -> tuple[tuple[QueueKey, ...], tuple[QueueKey, ...]]:
        """Give up what others are entitled to and is due; return the queues that were released, and those fenced.

        Raises what `Assignment.give_up` raises; the next look tries again.
        """
        surplus, now_s = self._assignment.surplus(), self._monotonic()
        self._timer.note(surplus, now_s)
        if not surplus:
            return (), ()
        if self._is_finished():
            return self._assignment.give_up(surplus, is_fenced=False), ()
        overdue = self._timer.overdue(now_s)
        return (), self._assignment.give_up(overdue, is_fenced=True) if overdue else ()

    def _is_finished(self) -> bool:
        return self._is_idle or (self._batch is not None and self._finished_batch() == self._batch)


class _Owner(Protocol):
    def hand_over(self) -> None: ...


def start_looking(owner: _Owner) -> threading.Event:
    """Start the handover thread of `owner`, which calls its `hand_over`; return the event that ends the thread.

    The thread ends with its owner too: an object that nobody refers to any more is not kept alive.
    """
    stop = threading.Event()
    arguments = weakref.ref(owner), stop
    threading.Thread(target=_look_on, args=arguments, name="rmq-spark handover", daemon=True).start()
    return stop


def _look_on(owner: "weakref.ref[_Owner]", stop: threading.Event) -> None:
    while not stop.wait(LOOK_EVERY_S):
        held = owner()
        if held is None:
            return
        held.hand_over()
        del held  # while the thread waits, it must not keep the owner alive
