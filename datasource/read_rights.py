"""What of its queues a query may read: a consumer group is refused what RocketMQ refuses it, another reader nothing."""

import logging
from collections.abc import Collection, Mapping

from rmq_spark.datasource.options import ReadOptions
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
from rmq_spark.store.units import QueueKey

_LOG = logging.getLogger("rmq_spark")


class ReadRights:
    """What one run of a query may read, as of the last `look`. One thread at a time."""

    def __init__(self, path: str, options: ReadOptions) -> None:
        group, read = options.group, options.subscription
        self._group = None if group is None else group.group
        self._rights = None
        if group is not None:
            self._rights = GroupRights(path, group.group, is_broadcasting=group.is_broadcasting)
        self._chosen = read.chosen if isinstance(read, WithRetry) else read
        self._unread: frozenset[QueueKey] = frozenset()
        self._seen: tuple[object, object] | None = None  # the topics and queues of the last look
        self._told: set[str] = set()

    def look(self, store: StoreReader, queues: Collection[QueueKey]) -> None:
        """Find out what of `queues` may be read. Cheap where neither they nor topics.json have changed.

        For a group raises NoPermissionError where it may not consume, or a topic that the query names is closed, and
        NotFoundError for a queue that `assign` names and consumers are not given. What a pattern or a topic's name
        brings in beside that is left out, with a warning. Without a group all is read, and that is said once.
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
            self._tell(barred, "Consumer groups may not read it; this query has no group, and does")
        else:
            self._refuse(configs, barred, self._group)
            self._unread = frozenset(barred)
            self._tell(barred, f"The consumer group {self._group} does not read it, as RocketMQ's consumers do not")
        self._seen = configs, queues

    def allows(self, queue: QueueKey) -> bool:
        """Say whether the query reads the queue."""
        return queue not in self._unread

    def _refuse(self, configs: Mapping[str, TopicConfig], barred: Collection[QueueKey], group: str) -> None:
        """Raise the error for the first of the barred queues that the query asks for by its name or its topic's."""
        for queue in barred:
            if isinstance(self._chosen, Assignment) and self._chosen.covers(queue):
                refuse_queue(configs, queue, group)
            if not (isinstance(self._chosen, Pattern) and self._chosen.covers(queue)):
                refuse_topic(configs, queue.topic, group)

    def _tell(self, barred: dict[QueueKey, str], what: str) -> None:
        for said in dict.fromkeys(barred.values()):
            if said not in self._told:
                self._told.add(said)
                _LOG.warning("rmq: %s. %s", said, what)


def _barred(configs: Mapping[str, TopicConfig], queues: Collection[QueueKey]) -> dict[QueueKey, str]:
    """Return the queues that consumers may not read, and why."""
    barred = {}
    for queue in queues:
        if is_closed(configs, queue.topic):
            barred[queue] = describe_closed(configs, queue.topic)
        elif is_beyond(configs, queue):
            barred[queue] = describe_beyond(configs, queue)
    return barred
