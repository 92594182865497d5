"""The driver's view of a store: the queues of a query and their bounds, as of the last refresh.

If the store has not changed, a refresh is cheap, whatever the number of queues. A topic or queue is treated as missing
only if a second scan, for which all files are opened again, does not find it either. One scan is not enough, because a
broker overwrites its configuration files in place.
"""

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from rmq_spark.datasource.limits import QueueRange
from rmq_spark.datasource.read_options import ReadOptions
from rmq_spark.store import StoreReader
from rmq_spark.store.errors import NotFoundError, OffsetRangeError, StoreChangedError, StoreError
from rmq_spark.store.model import QueueBounds, QueueKey, RecordProof

T = TypeVar("T")
_PLANS_MAX = 3  # a file that disappears every time is not a coincidence


class StoreView:
    """The driver's view of the store of one query, which is opened at its first use. For one thread at a time."""

    def __init__(self, options: ReadOptions) -> None:
        self.path, self._subscription = options.check_complete()
        self.commit_log_path = ",".join(options.commit_log_path) if options.commit_log_path else None
        self._read_mode = options.read_mode
        self._store: StoreReader | None = None
        self._moved = False  # whether the store has changed since `bounds` were read
        self.has_bounds = False
        self._seen: set[QueueKey] = set()
        self.bounds: Mapping[QueueKey, QueueBounds] = {}
        self.registry_stamp: tuple[int, int, int] | None = None  # not newer than `bounds`

    @property
    def store(self) -> StoreReader:
        """The store, which is opened if it is not open. Raises StorePathError if it is missing or cannot be read."""
        if self._store is None:
            self._store = StoreReader(self.path, commit_log_path=self.commit_log_path, read_mode=self._read_mode)
        return self._store

    def has_moved(self) -> bool:
        """Return whether `bounds` may be outdated. Cheap if they are not. Raises DamageError if a file is damaged."""
        self._moved = self.store.refresh() or self._moved
        return self._moved

    def refresh(self, known: Collection[QueueKey] = ()) -> None:
        """Update `bounds`, which are sorted by queue.

        `known` are queues that existed earlier. If they or their topics do not exist any more, they are left out of
        `bounds`. Raises NotFoundError for a topic or queue that the query names and that has never existed. Raises
        StorePathError if the store is missing or cannot be read, and DamageError if a file is damaged.
        """
        # The last scan may have missed a queue that the caller knows and this view does not.
        unknown = set(known) - self._seen
        if not self._moved and not self.has_moved() and not self._misses(unknown):
            return
        self._seen |= unknown
        try:
            if not self._read_all_bounds():
                self.close()
                self.store.refresh()
                self._read_bounds()
        except StoreError:
            self.close()  # the store remembers queues that it could not read; the next refresh must retry them
            raise
        self._moved = False
        self.has_bounds = True

    def _read_all_bounds(self) -> bool:
        """Read the bounds. Return whether all queues seen before and all topics that the query names exist."""
        try:
            self._read_bounds()
        except NotFoundError:
            return False
        return not self._misses(self._seen)

    def _misses(self, queues: Collection[QueueKey]) -> bool:
        return any(queue not in self.bounds and self._subscription.covers(queue) for queue in queues)

    def _read_bounds(self) -> None:
        queues = self._subscription.find_queues(self.store, self._seen)
        self.bounds = {queue: self.store.bounds(queue) for queue in queues}
        self.registry_stamp = self.store.registry_stamp
        self._seen.update(queues)

    def unsubscribed(self, queues: Collection[QueueKey]) -> set[QueueKey]:
        """Return those of `queues` to which the query does not subscribe, whether or not they exist."""
        return {queue for queue in queues if queue not in self.bounds and not self._subscription.covers(queue)}

    def measure(self, part: QueueRange) -> int:
        """Return the size of the records of a range in bytes."""
        return self.store.record_bytes(part.queue, part.begin, part.end)

    def fit(self, part: QueueRange, max_bytes: int) -> int:
        """Return the end (a queue offset) of the longest prefix of a range whose records have at most `max_bytes`."""
        return self.store.offset_within_bytes(part.queue, part.begin, part.end, max_bytes)

    def proof(self, queue: QueueKey, offset: int) -> RecordProof | None:
        """Return the position and store time of a message, or None if it has expired since the last refresh."""
        try:
            return self.store.proof(queue, offset)
        except (OffsetRangeError, StoreChangedError):
            return None

    def plan(self, work: Callable[[], T]) -> T:
        """Call `work` and return its result.

        Retention may delete a file that is being read. In that case all files are opened again and `work` is repeated.
        Raises StoreChangedError if that happens three times in a row.
        """
        for _ in range(_PLANS_MAX - 1):
            try:
                return work()
            except StoreChangedError:
                self.close()
        return work()

    def close(self) -> None:
        """Close the store. The next use opens it again."""
        if self._store is not None:
            self._store.close()
        self._store = None
        self._moved = self.has_bounds = False
