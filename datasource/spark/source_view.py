"""The driver's view of a place: the queues of a query and their bounds, as of the last refresh.

If the place has not changed, a refresh is cheap, whatever the number of queues. A topic or queue is treated as missing
only if a second scan, which looks at everything again, does not find it either. One scan is not enough, because a
broker overwrites its configuration files in place.

In a place with broker names a queue that is not listed may only be away. So the view asks the place about every queue
that the query has ever known, and believes only its answer.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from rmq_spark.datasource.options.read_options import ReadOptions
from rmq_spark.datasource.plan.absence import AwayBroker, describe_changes, group_by_broker
from rmq_spark.datasource.plan.broker_names import unnamed_topics, with_brokers
from rmq_spark.datasource.spark.broker_wait import BrokerWait
from rmq_spark.store.backend import Away, Capability, Forbidden, Gone, QueueAnswer
from rmq_spark.store.errors import (
    BackendUnavailableError,
    NoPermissionError,
    NotFoundError,
    StoreChangedError,
    StoreError,
)
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.places import with_wait

_LOG = logging.getLogger("rmq_spark")

T = TypeVar("T")
_PLANS_MAX = 3  # a file that disappears every time is not a coincidence


class SourceView:
    """The driver's view of what one query reads. `backend` is opened at its first use. For one thread at a time.

    `has_brokers` is whether the place has broker names.
    """

    def __init__(self, options: ReadOptions) -> None:
        location, self._subscription = options.check_complete()
        self.has_brokers = Capability.BROKERS in location.capabilities
        self._retired = frozenset(options.retired_brokers or ())
        self._logged_away: frozenset[str] = frozenset()
        self.backend = location.open()
        self._moved = False  # whether the place has changed since `bounds` were read
        self._has_looked = False  # whether `has_moved` was called since the last refresh
        self.has_bounds = False
        self._seen: set[QueueKey] = set()
        self.bounds: Mapping[QueueKey, QueueBounds] = {}
        self._ends_of: Mapping[QueueKey, QueueBounds] | None = None  # the bounds of which `_ends` has the ends
        self._ends: Mapping[QueueKey, int] = {}
        self.away: Mapping[QueueKey, Away] = {}
        self.gone: Mapping[QueueKey, str] = {}  # why each queue is gone that the query has known

    @property
    def brokers_away(self) -> dict[str, AwayBroker]:
        """The brokers that are away and have queues of the query, as of the last refresh."""
        return group_by_broker(self.away) if self.away else {}

    def change_wait(self, wait_ms: int) -> None:
        """Let tasks wait for a broker that is away for `wait_ms`; 0 means for ever. Call it before anything is read."""
        location = with_wait(self.backend.location, wait_ms)
        if location != self.backend.location:
            self.backend.close()
            self.backend = location.open()

    def name_brokers(self, options: ReadOptions, *, is_new: bool) -> ReadOptions:
        """Return the options with the broker's name in each queue that they name.

        `is_new` is whether the query begins now. Raises OptionError if several brokers have the topic of such a queue.
        """
        topics = unnamed_topics(options, is_new=is_new) if self.has_brokers else set()
        if not topics:
            return options
        self.has_moved()
        named = with_brokers(options, self.backend.queues(topics, missing_ok=topics))
        _, self._subscription = named.check_complete()
        return named

    def has_moved(self) -> bool:
        """Return whether `bounds` may be outdated. Cheap if they are not. Raises DamageError if a file is damaged."""
        self._moved = self.backend.refresh() or self._moved
        self._has_looked = True
        return self._moved

    def wait(self, timeout_ms: float) -> bool:
        """Wait for new messages, and return whether `bounds` may be outdated. See `Backend.wait_for_messages`."""
        if self._ends_of is not self.bounds:
            self._ends_of = self.bounds
            self._ends = {queue: available.max_offset for queue, available in self.bounds.items()}
        self._moved = self.backend.wait_for_messages(self._ends, timeout_ms) or self._moved
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
        return any(
            queue not in self.bounds
            and queue not in self.away
            and queue not in self.gone
            and queue.broker not in self._retired
            and self._subscription.covers(queue)
            for queue in queues
        )

    def _read_bounds(self) -> None:
        queues = self._subscription.find_queues(self.backend, self._seen)
        if self.has_brokers:
            known = (queue for queue in self._seen if self._subscription.covers(queue))
            queues = sorted(queue for queue in {*queues, *known} if queue.broker not in self._retired)
        answers = self.backend.bounds(queues)
        _require_rights(answers)
        self.bounds = {queue: found for queue, found in answers.items() if isinstance(found, QueueBounds)}
        self._seen.update(queues)
        if self.has_brokers:
            self.away = {queue: found for queue, found in answers.items() if isinstance(found, Away)}
            self.gone = {queue: found.reason for queue, found in answers.items() if isinstance(found, Gone)}
            self._log_away()

    def _log_away(self) -> None:
        """Log the brokers that went away or came back since the last refresh."""
        brokers = self.brokers_away
        for line in describe_changes(sorted(self._logged_away), brokers):
            _LOG.warning("rmq: %s", line)
        self._logged_away = frozenset(brokers)

    def refresh_all(self, wait: BrokerWait, known: Collection[QueueKey] = ()) -> None:
        """Refresh again and again until no broker is away.

        A queue in `known` that was gone at any time is gone after the wait too, because the caller has not seen it yet.
        Raises BackendUnavailableError if the wait takes longer than `wait` allows.
        """
        self.refresh(known)
        gone: dict[QueueKey, str] = {}
        while self.away:
            gone |= {queue: self.gone[queue] for queue in self.gone.keys() & known}
            try:
                wait.pause(self.brokers_away)
            except BackendUnavailableError:
                self.reopen()  # so that `plan` does not begin another wait
                raise
            self.refresh(known)
        if gone:
            self.bounds = {queue: found for queue, found in self.bounds.items() if queue not in gone}
            self.gone = {**gone, **self.gone}
            self._moved = True  # the next refresh finds those that exist again

    def retired(self, queues: Collection[QueueKey]) -> set[QueueKey]:
        """Return those of `queues` whose broker the option retiredBrokers names."""
        return {queue for queue in queues if queue.broker in self._retired} if self._retired else set()

    def find_last_bounds(self, queues: Collection[QueueKey]) -> dict[QueueKey, QueueBounds]:
        """Return the bounds of retired queues, as far as their broker still answers."""
        try:
            answers = self.backend.bounds(queues)
        except StoreError:
            return {}
        return {queue: found for queue, found in answers.items() if isinstance(found, QueueBounds)}

    def unsubscribed(self, queues: Collection[QueueKey]) -> set[QueueKey]:
        """Return those of `queues` to which the query does not subscribe, whether or not they exist."""
        return {queue for queue in queues if queue not in self.bounds and not self._subscription.covers(queue)}

    def plan(self, work: Callable[[], T]) -> T:
        """Call `work` and return its result.

        Retention may delete a file that is being read, and a broker may go away after it answered for its queues. In
        these cases the place is opened again and `work` is repeated. Raises the error if that happens three times in a
        row, and BackendUnavailableError at once if nobody has answered for the queues.
        """
        for _ in range(_PLANS_MAX - 1):
            try:
                return work()
            except StoreChangedError:
                self.reopen()
            except BackendUnavailableError:
                if not self.has_bounds:
                    raise
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


def _require_rights(answers: Mapping[QueueKey, QueueAnswer]) -> None:
    """Raise NoPermissionError if the place refuses to answer for a queue."""
    for queue, answer in answers.items():
        if not isinstance(answer, Forbidden):
            continue
        text = f"the queue {queue} cannot be read: {answer.reason}"
        if not answer.reason.endswith("."):
            text += (
                f"; expected the right {answer.right}. Ask an administrator of the cluster to grant it, to the topic "
                "or to the account of accessKey, or subscribe to other topics."
            )
        raise NoPermissionError(text)
