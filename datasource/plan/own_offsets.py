"""The offsets at which a group may be in a queue if only this query has moved it. Pure.

In a place whose resets have no numbers, a query sees only the group's offset. If it is one that the query itself has
published, or may have published, then nobody else has moved the group, and the query goes on at its own position. Any
other offset is that of another consumer or of a reset, and the query follows it.

A query publishes only positions at which a batch begins or ends, but seldom all of them. So the offset of a batch
records what the group may be at until the next batch is planned (`published_of`), and a running query remembers the
positions of its last batches (`OwnOffsets`), because a broker that crashes goes back to an earlier commit.
"""

from collections import deque
from collections.abc import Mapping

from rmq_spark.store.model import QueueKey

_REMEMBERED = 128  # positions of each queue: at ten batches a second, more than a broker loses when it crashes


def published_of(
    published: Mapping[QueueKey, int], begins: Mapping[QueueKey, int], ends: Mapping[QueueKey, int]
) -> dict[QueueKey, tuple[int, ...]]:
    """Return the field `published` of the offset at the end of a batch.

    `published` are the group's offsets as far as they are known, `begins` and `ends` the positions before and after the
    batch in the queues of the query. At the end of the batch, the group may be at each of the three.
    """
    found: dict[QueueKey, tuple[int, ...]] = {}
    for queue, end in ends.items():
        begin = begins.get(queue, end)
        known = published.get(queue, begin)
        if known != end or begin != end:
            found[queue] = (known,) if known == begin else (known, begin)
    return found


class OwnOffsets:
    """The last positions of a running query in each queue that it has owned. For one thread at a time.

    A queue stays known when the query loses it, because a broker that comes back does not know its members at first.
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
