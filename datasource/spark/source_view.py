"""The driver's view of a place: the queues of a query and their bounds, as of the last refresh.

If the place has not changed, a refresh is cheap, whatever the number of queues. A topic or queue is treated as missing
only if a second scan, which looks at everything again, does not find it either. One scan is not enough, because a
broker overwrites its configuration files in place.
"""

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from rmq_spark.datasource.options.read_options import ReadOptions
from rmq_spark.store.errors import NotFoundError, StoreChangedError, StoreError
from rmq_spark.store.model import QueueBounds, QueueKey

T = TypeVar("T")
_PLANS_MAX = 3  # a file that disappears every time is not a coincidence


class SourceView:
    """The driver's view of what one query reads. `backend` is opened at its first use. For one thread at a time."""

    def __init__(self, options: ReadOptions) -> None:
        location, self._subscription = options.check_complete()
        self.backend = location.open()
        self._moved = False  # whether the place has changed since `bounds` were read
        self._has_looked = False  # whether `has_moved` was called since the last refresh
        self.has_bounds = False
        self._seen: set[QueueKey] = set()
        self.bounds: Mapping[QueueKey, QueueBounds] = {}

    def has_moved(self) -> bool:
        """Return whether `bounds` may be outdated. Cheap if they are not. Raises DamageError if a file is damaged."""
        self._moved = self.backend.refresh() or self._moved
        self._has_looked = True
        return self._moved

    def refresh(self, known: Collection[QueueKey] = ()) -> None:
        """Update `bounds`, which are sorted by queue. Looks at the place unless `has_moved` did since the last refresh.

        `known` are queues that existed earlier. If they or their topics do not exist any more, they are left out of
        `bounds`. Raises NotFoundError for a topic or queue that the query names and that has never existed. Raises
        StorePathError if the store is missing or cannot be read, and DamageError if a file is damaged.
        """
        # The last scan may have missed a queue that the caller knows and this view does not.
        unknown = set(known) - self._seen
        has_moved = self._moved if self._has_looked else self.has_moved()
        self._has_looked = False
        if not has_moved and not self._misses(unknown):
            return
        self._seen |= unknown
        try:
            if not self._read_all_bounds():
                self.reopen()
                self.backend.refresh()
                self._read_bounds()
        except StoreError:
            self.reopen()  # the backend remembers queues that it could not read; the next refresh must retry them
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
        queues = self._subscription.find_queues(self.backend, self._seen)
        self.bounds = self.backend.bounds(queues)
        self._seen.update(queues)

    def unsubscribed(self, queues: Collection[QueueKey]) -> set[QueueKey]:
        """Return those of `queues` to which the query does not subscribe, whether or not they exist."""
        return {queue for queue in queues if queue not in self.bounds and not self._subscription.covers(queue)}

    def plan(self, work: Callable[[], T]) -> T:
        """Call `work` and return its result.

        Retention may delete a file that is being read. In that case the place is opened again and `work` is repeated.
        Raises StoreChangedError if that happens three times in a row.
        """
        for _ in range(_PLANS_MAX - 1):
            try:
                return work()
            except StoreChangedError:
                self.reopen()
        return work()

    def reopen(self) -> None:
        """Forget the bounds, and open the place again at its next use."""
        self.backend.reopen()
        self._moved = self._has_looked = self.has_bounds = False

    def close(self) -> None:
        """Release the place at the end of the query."""
        self.backend.close()
        self._moved = self._has_looked = self.has_bounds = False
