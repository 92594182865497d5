"""What of a query's queues is its own in the next batch, and where it goes on in them: the group's part of planning.

A query without a group, or a broadcasting one, has all queues and nothing moves. What is said here of offsets goes
into the offset of the batch (`seek`, `start`, `reset`), so that a repeated batch reads the same. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rmq_spark.datasource.offsets import StreamOffset
from rmq_spark.store.units import QueueKey


@dataclass(frozen=True, slots=True)
class Share:
    """The queues that the next batch reads; None: all. Offsets in queues that the offset before it names (`seeks`) or
    does not name (`starts`), where they are not to go on as that offset says."""

    owned: frozenset[QueueKey] | None = None
    seeks: Mapping[QueueKey, int] = field(default_factory=dict)
    starts: Mapping[QueueKey, int] = field(default_factory=dict)
    reset: int = 0

    def has(self, queue: QueueKey) -> bool:
        """Say whether the next batch may read the queue."""
        return self.owned is None or queue in self.owned

    def moved(self, before: StreamOffset) -> StreamOffset:
        """Return the offset from which the next batch is planned: of its queues alone, moved to where they go on."""
        if before.is_initial():
            return before
        positions = {queue: self.seeks.get(queue, at) for queue, at in before.positions.items() if self.has(queue)}
        return replace(before, positions=positions, starts=before.starts or {})  # never the initial one

    def marked(self, before: StreamOffset, after: StreamOffset, begins: Mapping[QueueKey, int]) -> StreamOffset:
        """Return the end of the batch, whose queues begin at `begins`, with what the share says.

        Queues of others stay where they were.
        """
        others = {queue: at for queue, at in before.positions.items() if not self.has(queue)}
        seeks = {
            queue: begins[queue]
            for queue in self.seeks
            if queue in begins and before.positions.get(queue) not in (None, begins[queue])
        }
        return replace(after, positions={**others, **after.positions}, seeks=seeks, reset=self.reset)
