"""The offsets at which a group may be in a queue if only this query has moved it. Pure.

In a place whose resets have no numbers, a query sees only the group's offset. If it is one that the query itself has
published, or may have published, then nobody else has moved the group, and the query continues at its own position. Any
other offset is that of another consumer or of a reset, and the query follows it.

A query publishes only positions at which a batch begins or ends, but seldom all of them: its reader and its driver both
publish, and each leaves out most of them. A running query remembers the positions of its last batches (`OwnOffsets`),
because a broker that crashes goes back to an earlier commit. The offset of a batch records only the group's offset as
the query knew it, and the begin of the batch (`published_of`). To a restarted query, each offset from the first to the
second counts as its own, and so does its position, the end of the batch. It has delivered everything below, so it loses
nothing by that. An orderly query may have left messages out (`batch_locks`), so there only the three count.
"""

from collections import deque
from collections.abc import Collection, Mapping

from rmq_spark.datasource.plan.offsets import StreamOffset
from rmq_spark.store.model import QueueKey

_REMEMBERED = 128  # positions of each queue: at ten batches a second, more than a broker loses when it crashes


def published_of(
    published: Mapping[QueueKey, int],
    begins: Mapping[QueueKey, int],
    ends: Mapping[QueueKey, int],
    earlier: Mapping[QueueKey, tuple[int, ...]],
) -> dict[QueueKey, tuple[int, ...]]:
    """Return the field `published` of the offset at the end of a batch.

    `published` are the group's offsets as far as they are known, `begins` and `ends` the positions before and after the
    batch in the queues of the query. At the end of the batch, the group may be at each of the three, or between the
    first two.
    `earlier` is the field in the offset before the batch, for the queues that continue at their position in it. It
    counts where the group's offset is not known, as while every commit fails.
    """
    found: dict[QueueKey, tuple[int, ...]] = {}
    for queue, end in ends.items():
        begin = begins.get(queue, end)
        known = published.get(queue, earlier.get(queue, (begin,))[0])
        if known != end or begin != end:
            found[queue] = (known,) if known == begin else (known, begin)
    return found


class OwnOffsets:
    """The last positions of a running query in each queue that it has owned. For one thread at a time.

    A queue stays known when the query loses it, because a broker that comes back does not know its members at first.
    When another member gets the queue, it must be forgotten: that member may set any offset.
    """

    def __init__(self) -> None:
        self._of: dict[QueueKey, deque[int]] = {}

    def note(self, positions: Mapping[QueueKey, int]) -> None:
        """Add the positions before a batch in the queues of the query. One that goes back replaces all others."""
        for queue, position in positions.items():
            known = self._of.setdefault(queue, deque(maxlen=_REMEMBERED))
            if known and position < known[-1]:
                known.clear()
            if not known or position != known[-1]:
                known.append(position)

    def of(self, queue: QueueKey) -> tuple[int, ...] | None:
        """Return the last positions in the queue, or None if there are none."""
        known = self._of.get(queue)
        return None if known is None else tuple(known)

    def forget(self, queues: Collection[QueueKey]) -> None:
        """Forget queues that another member has."""
        for queue in self._of.keys() & set(queues):
            del self._of[queue]


def is_own(committed: int, position: int, own: Collection[int], *, has_between: bool) -> bool:
    """Return whether only the query may have set the group's offset, if it is at `position` and has set the `own` ones.

    `has_between` is whether it may have set any offset between the own ones, too.
    """
    return committed in (position, *own) or (has_between and bool(own) and min(own) <= committed <= max(own))


class QueryHistory:
    """What a query knows of its own offsets before it plans a batch. It implements `store.backend.OffsetHistory`.

    `before` is the offset from which it plans, in the same group. `run` has the positions of this run. `known` are the
    queues that this run has owned, or seen with another member: the checkpoint tells nothing of them any more. In the
    first plan of a run (`is_first`) the last batch is that of an earlier run. That of an orderly query may have left
    messages out.
    """

    def __init__(
        self,
        before: StreamOffset,
        run: OwnOffsets,
        known: Collection[QueueKey],
        *,
        is_first: bool = False,
        is_orderly: bool = False,
    ) -> None:
        self._before, self._run, self._known = before, run, known
        self._is_first, self._is_orderly = is_first, is_orderly

    def of(self, queue: QueueKey) -> tuple[int, ...]:
        """Return the offsets at which the group may be if only this query has moved it, besides its position."""
        if queue in self._known:
            return self._run.of(queue) or ()
        return self._before.published.get(queue, ())

    def has_between(self, queue: QueueKey) -> bool:
        """Return whether the group may also be between these offsets: a checkpoint does not have all."""
        return queue not in self._known and not self._is_orderly

    def is_own(self, queue: QueueKey, committed: int) -> bool:
        """Return whether a group's offset may be one that only this query has set."""
        position = self._before.positions.get(queue)
        return position is not None and is_own(committed, position, self.of(queue), has_between=self.has_between(queue))

    def has_applied(self, queue: QueueKey, target: int) -> bool:
        """Return whether the last batch of an earlier run has begun at the target of a reset."""
        return self._is_first and self._before.seeks.get(queue) == target
