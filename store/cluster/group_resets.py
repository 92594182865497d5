"""The resets of a group's offsets by administrators, as one member knows them. Pure.

Resets have no numbers in a cluster. A member counts those that it sees in its queues, from the number on that its query
has applied before, so that the query applies each of them once:

1. A reset is noted, with the offset that it sets (`note`).
2. The query learns of it, with a number (`report`), and seeks, as soon as it can read the queue.
3. When the query's checkpoint has the number, the reset is applied (`note_applied`), and only then taken from the
   broker. A broker of 5.x accepts no offset of the group until then, so the reset survives whatever happens before.
4. It is forgotten (`forget`). From then on the member commits its own offsets again.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from rmq_spark.store.model import QueueKey


@dataclass(slots=True)
class _Reset:
    """A reset of a queue to `target`. `number` is None until the query was told of it."""

    target: int
    number: int | None = None
    is_applied: bool = False


class GroupResets:
    """The resets that a member has seen and not finished. For one thread at a time."""

    def __init__(self) -> None:
        self._resets: dict[QueueKey, _Reset] = {}
        self._last = 0

    @property
    def number(self) -> int:
        """The number of the last reset that the query was told of, or that an earlier run of it has applied."""
        return self._last

    @property
    def queues(self) -> Collection[QueueKey]:
        """The queues with a reset. Nobody must commit another offset in them."""
        return self._resets.keys()

    def note(self, queue: QueueKey, target: int) -> None:
        """Note a reset to the offset `target`. It replaces an earlier one of the queue, unless it is the same."""
        known = self._resets.get(queue)
        if known is None or known.target != target:
            self._resets[queue] = _Reset(target)

    def note_applied(self, number: int | None) -> None:
        """Note that the checkpoint has all resets up to `number`. None: the query ignores all that are known."""
        self._last = max(self._last, number or 0)
        for reset in self._resets.values():
            if number is None or (reset.number is not None and reset.number <= number):
                reset.is_applied = True

    def note_applied_before(self, has_applied: Callable[[QueueKey, int], bool], queues: Collection[QueueKey]) -> None:
        """Note the resets in `queues` that an earlier run of the query has applied, by queue and target."""
        for queue in self._resets.keys() & set(queues):
            reset = self._resets[queue]
            reset.is_applied = reset.is_applied or has_applied(queue, reset.target)

    def applied(self) -> dict[QueueKey, int]:
        """Return the resets that the query has applied: they must be taken from the broker, and forgotten."""
        return {queue: reset.target for queue, reset in self._resets.items() if reset.is_applied}

    def report(self, readable: Collection[QueueKey]) -> Mapping[QueueKey, int]:
        """Return the resets in the `readable` queues that the query has not applied. New ones get the next number.

        A reset in another queue waits, and gets its number when the queue can be read: the query applies all resets up
        to a number with one batch, and must not take one for applied that it could not see.
        """
        waiting: dict[QueueKey, _Reset] = {}
        known = frozenset(readable)
        for queue, reset in self._resets.items():
            if reset.is_applied:
                continue
            if queue in known:
                waiting[queue] = reset
            else:
                reset.number = None
        new = [reset for reset in waiting.values() if reset.number is None]
        if new:
            self._last += 1
        for reset in new:
            reset.number = self._last
        return {queue: reset.target for queue, reset in waiting.items()}

    def forget(self, queues: Collection[QueueKey]) -> None:
        """Forget resets: they were taken from the broker, or another member owns the queue."""
        for queue in queues:
            self._resets.pop(queue, None)
