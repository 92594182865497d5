"""Read permissions of a query. RocketMQ's permissions apply to consumer groups; a query without one may read all."""

import logging
from collections.abc import Collection, Mapping

from rmq_spark.datasource.options.read_options import ReadOptions
from rmq_spark.datasource.options.subscription import Assignment, Pattern, WithRetry
from rmq_spark.store.backend import Backend, Barrier
from rmq_spark.store.model import QueueKey

_LOG = logging.getLogger("rmq_spark")


class ReadRights:
    """The read permissions of one run of a query, as of the last `refresh`. For one thread at a time."""

    def __init__(self, options: ReadOptions) -> None:
        group, read = options.group, options.subscription
        self._group = None if group is None else group.group
        self._is_broadcasting = group is not None and group.is_broadcasting
        self._chosen = read.chosen if isinstance(read, WithRetry) else read
        self._unread: frozenset[QueueKey] = frozenset()
        self._seen: Mapping[QueueKey, Barrier] | None = None  # as of the last refresh
        self._logged: set[str] = set()

    def refresh(self, backend: Backend, queues: Collection[QueueKey]) -> None:
        """Determine which of `queues` the query may read. Cheap unless the queues or the permissions have changed.

        If the query has a group, raises NoPermissionError if the group must not consume, or if a topic that the query
        names is closed to consumers. Raises NotFoundError if the option `assign` names a queue that RocketMQ's
        consumers do not get. Other queues that a group must not read are left out with a warning. A query without a
        group reads these queues too, and logs this once.
        """
        if self._group is None and self._seen is not None:
            return
        barriers = backend.barriers(queues, self._group, is_broadcasting=self._is_broadcasting)
        if barriers is self._seen:
            return
        if self._group is None:
            self._log_once(barriers, "Consumer groups must not read it. This query has no group and reads it")
        else:
            for queue, barrier in barriers.items():
                if barrier.error is not None and self._names(queue, barrier):
                    raise barrier.error
            self._unread = frozenset(barriers)
            self._log_once(
                barriers, f"The consumer group {self._group} does not read it, as RocketMQ's consumers do not"
            )
        self._seen = barriers

    def allows(self, queue: QueueKey) -> bool:
        """Return whether the query reads the queue."""
        return queue not in self._unread

    def _names(self, queue: QueueKey, barrier: Barrier) -> bool:
        """Return whether the query names the queue in `assign`, or names its topic, all of which is closed."""
        if isinstance(self._chosen, Assignment) and self._chosen.covers(queue):
            return True
        return barrier.is_topic and not (isinstance(self._chosen, Pattern) and self._chosen.covers(queue))

    def _log_once(self, barriers: Mapping[QueueKey, Barrier], what: str) -> None:
        for reason in dict.fromkeys(barrier.reason for barrier in barriers.values()):
            if reason not in self._logged:
                self._logged.add(reason)
                _LOG.warning("rmq: %s. %s", reason, what)
