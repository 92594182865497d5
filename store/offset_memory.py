"""Offset memory of a consumer: its latest offset in each queue, and which of these offsets are not committed yet.

This module reads and writes no files. Source: RemoteBrokerOffsetStore#updateOffset, #readOffset (4.9.8).
"""

from collections.abc import Iterable

from rmq_spark.store.model import QueueKey


class OffsetMemory:
    """For each queue, the queue offset of the next message to consume. For one thread at a time."""

    def __init__(self) -> None:
        self._offsets: dict[QueueKey, int] = {}
        self._uncommitted: set[QueueKey] = set()

    def get(self, queue: QueueKey) -> int | None:
        """Return the offset of `queue`, or None if the memory has no offset for it."""
        return self._offsets.get(queue)

    def update(self, queue: QueueKey, offset: int, *, increase_only: bool = False) -> None:
        """Set the offset of `queue` and mark it as not committed.

        With `increase_only`, a lower or equal offset than the present one is ignored.
        """
        if increase_only and offset <= self._offsets.get(queue, -1):
            return
        self._offsets[queue] = offset
        self._uncommitted.add(queue)

    def set_committed(self, queue: QueueKey, offset: int) -> None:
        """Set the offset of `queue` to one that was read from the store, and mark it as committed."""
        self._offsets[queue] = offset
        self._uncommitted.discard(queue)

    def forget(self, queue: QueueKey) -> None:
        """Remove the offset of `queue` from the memory."""
        self._offsets.pop(queue, None)
        self._uncommitted.discard(queue)

    def uncommitted(self, queues: Iterable[QueueKey] | None = None) -> dict[QueueKey, int]:
        """Return the offsets that are not committed yet, sorted by queue.

        With `queues`, only the offsets of these queues are returned.
        """
        chosen = self._uncommitted if queues is None else self._uncommitted.intersection(queues)
        return {queue: self._offsets[queue] for queue in sorted(chosen)}

    def mark_committed(self, offsets: dict[QueueKey, int]) -> None:
        """Mark these offsets as committed. A queue whose offset in the memory differs by now stays uncommitted."""
        for queue, offset in offsets.items():
            if self._offsets.get(queue) == offset:
                self._uncommitted.discard(queue)
