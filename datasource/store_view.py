"""What the driver knows of a store: the queues that a query reads and their bounds, as of the last look.

Looking is cheap while nothing moves, whatever the number of queues. A topic or queue counts as gone only if a second
look, with everything opened anew, does not see it either: a broker overwrites its configuration in place.
"""

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from rmq_spark.datasource.limits import QueueRange
from rmq_spark.datasource.options import ReadOptions
from rmq_spark.store import StoreReader, open_reader
from rmq_spark.store.errors import NotFoundError, OffsetRangeError, StoreChangedError, StoreError
from rmq_spark.store.units import QueueBounds, QueueKey, RecordProof

T = TypeVar("T")
_PLANS_MAX = 3  # a file that is gone at every look is no matter of chance


class StoreView:
    """The driver's look at the store of one query. One thread at a time. Nothing is opened before the first look."""

    def __init__(self, options: ReadOptions) -> None:
        self.path, self._subscription = options.check_complete()
        self.commit_log_path = ",".join(options.commit_log_path) if options.commit_log_path else None
        self._read_mode = options.read_mode
        self._store: StoreReader | None = None
        self._moved = False  # seen by a refresh, not yet in the bounds
        self.has_looked = False
        self._seen: set[QueueKey] = set()
        self.bounds: Mapping[QueueKey, QueueBounds] = {}
        self.registry_stamp: tuple[int, int, int] | None = None  # of before the look that `bounds` are of

    @property
    def store(self) -> StoreReader:
        """The store, opened if it is not. Raises StorePathError."""
        if self._store is None:
            self._store = open_reader(self.path, commit_log_path=self.commit_log_path, read_mode=self._read_mode)
        return self._store

    def has_moved(self) -> bool:
        """Say whether `bounds` may be out of date; cheap if they are not. Raises DamageError."""
        self._moved = self.store.refresh() or self._moved
        return self._moved

    def look(self, known: Collection[QueueKey] = ()) -> None:
        """Bring `bounds` up to date, sorted by queue. What is `known` is missing only if it is really gone.

        Raises StorePathError, NotFoundError for a topic that is not there and of which nothing was known, and
        DamageError.
        """
        # What is known now for the first time may be what the last look missed.
        unknown = set(known) - self._seen
        if not self._moved and not self.has_moved() and not self._lacks(unknown):
            return
        self._seen |= unknown
        try:
            if not self._sees_all():
                self.close()
                self.store.refresh()
                self._read_bounds()
        except StoreError:
            self.close()  # the store remembers queues that it could not read: the next look must not
            raise
        self._moved = False
        self.has_looked = True

    def _sees_all(self) -> bool:
        """Read the bounds and say whether nothing is missing. A topic that the query names may be missing too."""
        try:
            self._read_bounds()
        except NotFoundError:
            return False
        return not self._lacks(self._seen)

    def _lacks(self, queues: Collection[QueueKey]) -> bool:
        return any(queue not in self.bounds and self._subscription.covers(queue) for queue in queues)

    def _read_bounds(self) -> None:
        queues = self._subscription.find_queues(self.store, self._seen)
        self.bounds = {queue: self.store.bounds(queue) for queue in queues}
        self.registry_stamp = self.store.registry_stamp
        self._seen.update(queues)

    def unsubscribed(self, queues: Collection[QueueKey]) -> set[QueueKey]:
        """Return those of the queues that the query does not read, whether they are there or not."""
        return {queue for queue in queues if queue not in self.bounds and not self._subscription.covers(queue)}

    def measure(self, part: QueueRange) -> int:
        """Return the bytes of the records in a range."""
        return self.store.record_bytes(part.queue, part.begin, part.end)

    def fit(self, part: QueueRange, max_bytes: int) -> int:
        """Return how far the records of a range go within some bytes, as a queue offset."""
        return self.store.offset_within_bytes(part.queue, part.begin, part.end, max_bytes)

    def proof(self, queue: QueueKey, offset: int) -> RecordProof | None:
        """Return where a message lies, None if it is gone since the last look."""
        try:
            return self.store.proof(queue, offset)
        except (OffsetRangeError, StoreChangedError):
            return None

    def plan(self, work: Callable[[], T]) -> T:
        """Return what `work` returns; do it again, with everything opened anew, if a file went away under it.

        Retention deletes files while they are looked at. What keeps going away is raised as StoreChangedError.
        """
        for _ in range(_PLANS_MAX - 1):
            try:
                return work()
            except StoreChangedError:
                self.close()
        return work()

    def close(self) -> None:
        """Close the store. The next look opens it again."""
        if self._store is not None:
            self._store.close()
        self._store = None
        self._moved = self.has_looked = False
