"""Read permissions of a query. RocketMQ's permissions apply to consumer groups; a query without one may read all."""

import logging
from collections.abc import Collection, Mapping

from rmq_spark.datasource.read_options import ReadOptions
from rmq_spark.datasource.subscription import Assignment, Pattern, WithRetry
from rmq_spark.store import (
    GroupRights,
    StoreReader,
    TopicConfig,
    describe_beyond,
    describe_closed,
    is_beyond,
    is_closed,
    refuse_queue,
    refuse_topic,
)
from rmq_spark.store.model import QueueKey

_LOG = logging.getLogger("rmq_spark")


class ReadRights:
    """The read permissions of one run of a query, as of the last `refresh`. For one thread at a time."""

    def __init__(self, path: str, options: ReadOptions) -> None:
        group, read = options.group, options.subscription
        self._group = None if group is None else group.group
        self._rights = None
        if group is not None:
            self._rights = GroupRights(path, group.group, is_broadcasting=group.is_broadcasting)
        self._chosen = read.chosen if isinstance(read, WithRetry) else read
        self._unread: frozenset[QueueKey] = frozenset()
        self._seen: tuple[object, object] | None = None  # the topics and queues of the last refresh
        self._logged: set[str] = set()

    def refresh(self, store: StoreReader, queues: Collection[QueueKey]) -> None:
        """Determine which of `queues` the query may read. Cheap unless the queues or topics.json have changed.

        If the query has a group, raises NoPermissionError if the group must not consume, or if a topic that the query
        names is closed to consumers. Raises NotFoundError if the option `assign` names a queue that RocketMQ's
        consumers do not get. Other queues that a group must not read are left out with a warning. A query without a
        group reads these queues too, and logs this once.
        """
        if self._rights is not None:
            self._rights.check()
        elif self._seen is not None:
            return
        configs = store.topic_configs()
        if self._seen is not None and self._seen[0] is configs and self._seen[1] is queues:
            return
        barred = _barred(configs, queues)
        if self._group is None:
            self._log_once(barred, "Consumer groups must not read it. This query has no group and reads it")
        else:
            self._check_named(configs, barred, self._group)
            self._unread = frozenset(barred)
            self._log_once(barred, f"The consumer group {self._group} does not read it, as RocketMQ's consumers do not")
        self._seen = configs, queues

    def allows(self, queue: QueueKey) -> bool:
        """Return whether the query reads the queue."""
        return queue not in self._unread

    def _check_named(self, configs: Mapping[str, TopicConfig], barred: Collection[QueueKey], group: str) -> None:
        """Raise the error for the first queue of `barred` that the query names in `assign` or whose topic it names."""
        for queue in barred:
            if isinstance(self._chosen, Assignment) and self._chosen.covers(queue):
                refuse_queue(configs, queue, group)
            if not (isinstance(self._chosen, Pattern) and self._chosen.covers(queue)):
                refuse_topic(configs, queue.topic, group)

    def _log_once(self, barred: dict[QueueKey, str], what: str) -> None:
        for reason in dict.fromkeys(barred.values()):
            if reason not in self._logged:
                self._logged.add(reason)
                _LOG.warning("rmq: %s. %s", reason, what)


def _barred(configs: Mapping[str, TopicConfig], queues: Collection[QueueKey]) -> dict[QueueKey, str]:
    """Return the queues that consumers must not read, each with the reason as text."""
    barred = {}
    for queue in queues:
        if is_closed(configs, queue.topic):
            barred[queue] = describe_closed(configs, queue.topic)
        elif is_beyond(configs, queue):
            barred[queue] = describe_beyond(configs, queue)
    return barred
