"""The offsets that a member has published as those of its group, and the rule for the next ones. Pure.

A member publishes only offsets that moved, all together, and at most every 5 s, as a Java consumer does
(MQClientInstance#persistAllConsumerOffset). It publishes at once where others wait for an offset.

For each queue it remembers the last offsets that the broker has acknowledged, because a broker that was killed forgets
those of its last 5 s. It remembers those that it wanted to publish, too, because the query's driver may have committed
one of them (`final_commit`). A group's offset that is among them is the member's own.
"""

from collections import deque
from collections.abc import Collection, Mapping

from rmq_spark.store.model import QueueKey

INTERVAL_MS = 5000.0  # ClientConfig#persistConsumerOffsetInterval
_KEPT_OFFSETS = 16  # those of 80 s
_KEPT_WANTED = 128  # at ten batches a second more than the driver leaves out between two commits


class PublishedOffsets:
    """The offsets that a member has published in its queues. For one thread at a time.

    Times are in ms, by the caller's monotonic clock.
    """

    def __init__(self) -> None:
        self._acknowledged: dict[QueueKey, deque[int]] = {}
        self._wanted: dict[QueueKey, int] = {}
        self._recent: dict[QueueKey, deque[int]] = {}  # the last offsets that were wanted
        self._moved: dict[QueueKey, int] = {}  # the wanted offsets that are not the last acknowledged ones
        self._published_ms: float | None = None

    def last(self) -> dict[QueueKey, int]:
        """Return the last offset of each queue that its broker has acknowledged."""
        return {queue: offsets[-1] for queue, offsets in self._acknowledged.items()}

    def note_acknowledged(self, queue: QueueKey, offset: int) -> None:
        """Note that an offset is the group's, because the broker has accepted or told it."""
        offsets = self._acknowledged.setdefault(queue, deque(maxlen=_KEPT_OFFSETS))
        if not offsets or offsets[-1] != offset:
            offsets.append(offset)
        wanted = self._wanted.get(queue)
        if wanted is None or wanted == offset:
            self._moved.pop(queue, None)
        else:
            self._moved[queue] = wanted

    def is_own(self, queue: QueueKey, offset: int | None) -> bool:
        """Return whether the group's offset may come from this member: published, or about to be. So is None: none."""
        return (
            offset is None
            or offset in self._acknowledged.get(queue, ())
            or offset in self._recent.get(queue, ())
            or self.is_wanted(queue, offset)
        )

    def is_wanted(self, queue: QueueKey, offset: int) -> bool:
        """Return whether the member wants to publish an offset, or has published it and wants no later one."""
        return self._wanted.get(queue) == offset

    def forget(self, queues: Collection[QueueKey]) -> None:
        """Forget queues that the member does not own any more."""
        for queue in queues:
            self._acknowledged.pop(queue, None)
            self._wanted.pop(queue, None)
            self._moved.pop(queue, None)
            self._recent.pop(queue, None)

    def want(self, finished: Mapping[QueueKey, int]) -> None:
        """Set the offsets that the member wants to publish. For other queues it has none."""
        self._wanted = dict(finished)
        known = self._acknowledged
        self._moved = {queue: at for queue, at in finished.items() if queue not in known or known[queue][-1] != at}
        for queue, at in self._moved.items():
            recent = self._recent.setdefault(queue, deque(maxlen=_KEPT_WANTED))
            if recent and at < recent[-1]:  # after a reset, what is beyond it belongs to nobody
                recent.clear()
            if not recent or recent[-1] != at:
                recent.append(at)

    def unpublished(self, held_back: Collection[QueueKey]) -> dict[QueueKey, int]:
        """Return the wanted offsets that are not the last acknowledged ones. Queues in `held_back` are left out."""
        return {queue: offset for queue, offset in self._moved.items() if queue not in held_back}

    def is_due(self, now_ms: float) -> bool:
        """Return whether the member may publish again."""
        return self._published_ms is None or now_ms - self._published_ms >= INTERVAL_MS

    def note_published(self, now_ms: float) -> None:
        """Note that the member has published now, with success or not."""
        self._published_ms = now_ms
