"""The queues of the next batch of a consumer group's member, and the positions that the group sets.

A member of a group reads only the queues that the group assigned to it. For some of them the group sets the position,
for example after a reset or when a queue comes from another member. These positions become part of the batch's offset
(`seek`, `start`, `reset`, `suspended`), so a repeated batch reads the same messages. A query without a group, or with
messageModel=broadcasting, reads all queues, and no position is set.

An orderly listener suspends a queue when a call fails. The next batches skip this queue until its pause is over.

The functions are pure: they use neither disk nor clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rmq_spark.datasource.plan.offsets import StreamOffset, encode_offset
from rmq_spark.datasource.plan.own_offsets import published_of
from rmq_spark.datasource.plan.planning import Bounds, Loss
from rmq_spark.store.model import QueueKey


@dataclass(frozen=True, slots=True)
class Hold:
    """The suspension of a queue. The queue resumes at the queue offset `resume`, not before the time `until_ms`.

    `until_ms` is in ms since the epoch; 0 means that the queue resumes at once. Every change of a group's suspended
    queues has a number, and `number` is that of this suspension.
    """

    resume: int
    until_ms: int
    number: int


@dataclass(frozen=True, slots=True)
class Held:
    """The queues that the next batch skips, and the time at which the first of them resumes.

    `until_ms` is in ms since the epoch. It is None if this run of the query need not wait for any queue.
    """

    queues: frozenset[QueueKey] = frozenset()
    until_ms: int | None = None


def held_queues(
    holds: Mapping[QueueKey, Hold], begins: Mapping[QueueKey, int], now_ms: int, run_began: int | None
) -> Held:
    """Return the queues of `holds` that the next batch must skip, because their suspension is not over.

    `begins` has the queue offset at which the next batch would begin in each queue. A suspension has no effect if the
    batch would begin after the offset where the queue resumes. For a run with the trigger AvailableNow, `run_began` is
    the number of the last change of suspended queues when the run began; otherwise it is None. Such a run does not wait
    for suspended queues: it leaves queues that were suspended during the run, or whose pause is not over, to the next
    run.
    """
    held = [
        (queue, hold.until_ms)
        for queue, hold in holds.items()
        if hold.until_ms
        and begins.get(queue, hold.resume + 1) <= hold.resume
        and (now_ms < hold.until_ms or (run_began is not None and hold.number > run_began))
    ]
    until_ms = min((until_ms for _, until_ms in held), default=None) if run_began is None else None
    return Held(frozenset(queue for queue, _ in held), until_ms)


@dataclass(frozen=True, slots=True)
class BatchAssignment:
    """The queues of the next batch, and the positions (queue offsets) that the group sets.

    - `owned`: the queues that the query may read; None means all queues.
    - `seeks`: new positions of queues that the query owns and that are in the previous offset.
    - `starts`: positions of queues that the query owns and that are not in the previous offset.
    - `moves`: new positions of queues that other members own. They are recorded because a reset is applied only once:
      if this query gets such a queue later, its old position may be larger than the reset, and the query would resume
      there.
    - `group`, `reset`, `suspended`: the name of the group, the number of its last reset, and the number of the last
      change of its suspended queues. If `group` is "", the query runs outside the group. It then keeps the numbers of
      the previous offset, so that a later member does not apply the same changes twice.
    - `holds`: the group's suspended queues.
    - `losses`: messages that are missing because the group's offset is beyond the end of a queue.
    - `others`: the queues that other members have, as far as the place tells.
    """

    owned: frozenset[QueueKey] | None = None
    seeks: Mapping[QueueKey, int] = field(default_factory=dict)
    starts: Mapping[QueueKey, int] = field(default_factory=dict)
    moves: Mapping[QueueKey, int] = field(default_factory=dict)
    group: str = ""
    reset: int = 0
    suspended: int = 0
    holds: Mapping[QueueKey, Hold] = field(default_factory=dict)
    losses: Sequence[Loss] = ()
    others: frozenset[QueueKey] = frozenset()

    def has(self, queue: QueueKey) -> bool:
        """Return whether the next batch may read the queue."""
        return self.owned is None or queue in self.owned

    def moved(self, before: StreamOffset, bounds: Bounds) -> StreamOffset:
        """Return the offset from which the next batch is planned.

        `before` is the previous offset. The result has only the queues that the query owns, at their new positions, and
        the queues of `before` that are not in `bounds`. The latter have no owner, so every query reports their loss.
        """
        if before.is_initial():
            return before
        positions = {
            queue: self.seeks.get(queue, position)
            for queue, position in before.positions.items()
            if self.has(queue) or queue not in bounds
        }
        return replace(before, positions=positions, starts=before.starts or {})  # None would make it the initial offset

    def marked(
        self,
        before: StreamOffset,
        after: StreamOffset,
        begins: Mapping[QueueKey, int],
        bounds: Bounds,
        published: Mapping[QueueKey, int] | None = None,
    ) -> StreamOffset:
        """Return the end of the batch with the group's positions and numbers added.

        `before` is the previous offset, `after` is the planned end, and `begins` has the queue offset where the batch
        begins in each queue. A queue in `bounds` that another member owns begins and ends at its old position, or at
        its position in `moves`. If the group moved a queue, the text of the result differs from that of `before`.
        `published` are the group's offsets as far as they are known; None in a place whose resets have numbers.
        """
        others = {
            queue: self.moves.get(queue, position)
            for queue, position in before.positions.items()
            if not self.has(queue) and queue in bounds
        }
        seeks = {
            queue: position
            for queue, position in {
                **{queue: begins[queue] for queue in self.seeks if queue in begins},
                **self.moves,
            }.items()
            if before.positions.get(queue) not in (None, position)
        }
        # In a place with broker names, a query outside the group gives up the group's offsets, and so the numbers.
        numbers = self if self.group or before.has_brokers else before
        positions = {**others, **after.positions}
        end = replace(
            after,
            positions=positions,
            seeks=seeks,
            group=numbers.group,
            reset=numbers.reset,
            suspended=numbers.suspended,
            published=self._published_of(published, before, begins, positions),
        )
        if seeks and encode_offset(end) == encode_offset(before):
            # The previous batch had the same move and the same end. Spark compares the texts of offsets, so it would
            # start no batch. Therefore this batch only moves the queues and reads nothing; the next batch reads.
            positions = {**end.positions, **seeks}
            own = self._published_of(published, before, begins, positions)
            return replace(end, positions=positions, published=own)
        return end

    def _published_of(
        self,
        published: Mapping[QueueKey, int] | None,
        before: StreamOffset,
        begins: Mapping[QueueKey, int],
        ends: Mapping[QueueKey, int],
    ) -> dict[QueueKey, tuple[int, ...]]:
        """Return the field `published` for the query's queues, and what is known of those that no other member has."""
        if published is None:
            return {}
        earlier = before.published if before.group == self.group else {}
        kept = {queue: some for queue, some in earlier.items() if begins.get(queue) == before.positions.get(queue)}
        own = published_of(published, begins, {queue: end for queue, end in ends.items() if self.has(queue)}, kept)
        free = (earlier.keys() & ends.keys()) - self.others - self.moves.keys()
        return own | {queue: earlier[queue] for queue in free if not self.has(queue)}
