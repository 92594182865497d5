"""What of a query's queues is its own in the next batch, and where it goes on in them: the group's part of planning.

A query without a group, or a broadcasting one, has all queues and nothing moves. What is said here of offsets goes
into the offset of the batch (`seek`, `start`, `reset`, `suspended`), so that a repeated batch reads the same. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rmq_spark.datasource.offsets import StreamOffset, encode_offset
from rmq_spark.datasource.planning import Bounds, Loss
from rmq_spark.datasource.suspension import Hold
from rmq_spark.store.units import QueueKey


@dataclass(frozen=True, slots=True)
class Share:
    """The queues that the next batch reads; None: all. Offsets in queues that the offset before it names (`seeks`) or
    does not name (`starts`), where they are not to go on as that offset says; `moves` are those in queues of others.

    `group` is the one of which the query is a member, `reset` the last of its resets, `suspended` the number of the
    last change of its queues that an orderly listener stopped; `holds` are those. A run that is no member keeps what
    the offset says of these, so that the next one that is does not apply them again. `losses` are what the group has
    not, and was to have, at the places in `seeks` and `starts`, which lie in the queues.

    Why others' queues move: a reset is applied once. Whoever gets the queue later goes on from where the group stands,
    if that is further than its own offset says, and its own one may lie behind a reset that sent the queue back.
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

    def has(self, queue: QueueKey) -> bool:
        """Say whether the next batch may read the queue."""
        return self.owned is None or queue in self.owned

    def moved(self, before: StreamOffset, bounds: Bounds) -> StreamOffset:
        """Return the offset from which the next batch is planned: of its queues alone, moved to where they go on.

        Of those in `bounds`: queues that are gone are nobody's, and each query that knows them is to miss them.
        """
        if before.is_initial():
            return before
        positions = {
            queue: self.seeks.get(queue, at)
            for queue, at in before.positions.items()
            if self.has(queue) or queue not in bounds
        }
        return replace(before, positions=positions, starts=before.starts or {})  # never the initial one

    def marked(
        self, before: StreamOffset, after: StreamOffset, begins: Mapping[QueueKey, int], bounds: Bounds
    ) -> StreamOffset:
        """Return the end of the batch, whose queues begin at `begins`, with what the share says.

        Its text is not that of `before`. Queues of others that are in `bounds` stay where they were, or were sent to:
        they begin there, and end.
        """
        others = {
            queue: self.moves.get(queue, at)
            for queue, at in before.positions.items()
            if not self.has(queue) and queue in bounds
        }
        seeks = {
            queue: place
            for queue, place in {
                **{queue: begins[queue] for queue in self.seeks if queue in begins},
                **self.moves,
            }.items()
            if before.positions.get(queue) not in (None, place)
        }
        known = self if self.group else before
        end = replace(
            after,
            positions={**others, **after.positions},
            seeks=seeks,
            group=known.group,
            reset=known.reset,
            suspended=known.suspended,
        )
        if seeks and encode_offset(end) == encode_offset(before):
            # The same move as in the batch before, to the same end: Spark, which compares texts, would see no news.
            # So this batch moves and reads nothing; the next one reads.
            return replace(end, positions={**end.positions, **seeks})
        return end
