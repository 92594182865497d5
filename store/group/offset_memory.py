"""The offsets that a consumer has in mind, and which of them nobody has written down yet.

Pure. Source: RemoteBrokerOffsetStore#updateOffset, #readOffset (4.9.8).
"""

from collections.abc import Iterable

from rmq_spark.store.units import QueueKey


class OffsetMemory:
    """Queue offsets by queue, each the next to consume. One thread at a time."""

    def __init__(self) -> None:
        self._offsets: dict[QueueKey, int] = {}
        self._unwritten: set[QueueKey] = set()

    def get(self, queue: QueueKey) -> int | None:
        """Return the queue's offset, None if there is none in mind."""
        return self._offsets.get(queue)

    def update(self, queue: QueueKey, offset: int, *, increase_only: bool = False) -> None:
        """Have `offset` in mind, to be written; with `increase_only` unless the one in mind is as large."""
        if increase_only and offset <= self._offsets.get(queue, -1):
            return
        self._offsets[queue] = offset
        self._unwritten.add(queue)

    def learn(self, queue: QueueKey, offset: int) -> None:
        """Have in mind what is written."""
        self._offsets[queue] = offset
        self._unwritten.discard(queue)

    def forget(self, queue: QueueKey) -> None:
        """Have no offset of the queue in mind."""
        self._offsets.pop(queue, None)
        self._unwritten.discard(queue)

    def unwritten(self, queues: Iterable[QueueKey] | None = None) -> dict[QueueKey, int]:
        """Return the offsets that are not written yet, of these queues or of all."""
        chosen = self._unwritten if queues is None else self._unwritten.intersection(queues)
        return {queue: self._offsets[queue] for queue in sorted(chosen)}

    def mark_written(self, offsets: dict[QueueKey, int]) -> None:
        """Take note that these offsets are written."""
        for queue, offset in offsets.items():
            if self._offsets.get(queue) == offset:
                self._unwritten.discard(queue)
