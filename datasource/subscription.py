"""Which queues a query reads: topics by name, topics by pattern, or queues one by one."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from rmq_spark.store import is_system_topic
from rmq_spark.store.errors import NotFoundError
from rmq_spark.store.units import QueueKey


class Catalog(Protocol):
    """Where topics and queues are listed: a StoreReader."""

    def topics(self) -> list[str]:
        """Return the names of all topics."""

    def queues(self, topic: str) -> list[QueueKey]:
        """Return the topic's queues; raises NotFoundError for a topic that is not there."""


@dataclass(frozen=True, slots=True)
class Topics:
    """All queues of the topics with these names."""

    names: tuple[str, ...]

    def covers(self, queue: QueueKey) -> bool:
        """Say whether the query reads this queue, if it is there."""
        return queue.topic in self.names

    def find_queues(self, catalog: Catalog, known: Collection[QueueKey] = ()) -> list[QueueKey]:
        """Return the queues that are there, sorted.

        Raises NotFoundError for a topic that is not there, unless a queue of it is `known`: then it has
        vanished, and the caller decides about it.
        """
        found = []
        for name in self.names:
            try:
                found += catalog.queues(name)
            except NotFoundError:
                if not any(queue.topic == name for queue in known):
                    raise
        return sorted(found)

    def __str__(self) -> str:
        return f'subscribe="{",".join(sorted(self.names))}"'  # alike for all members of a group that read the same


@dataclass(frozen=True, slots=True)
class Pattern:
    """All queues of the topics whose whole name matches; system topics only where it spells them out."""

    text: str

    def covers(self, queue: QueueKey) -> bool:
        """Say whether the query reads this queue, if it is there."""
        return self._matches(queue.topic)

    def find_queues(self, catalog: Catalog, known: Collection[QueueKey] = ()) -> list[QueueKey]:
        """Return the queues that are there, sorted: none if no topic matches."""
        topics = [topic for topic in catalog.topics() if self._matches(topic)]
        return sorted(queue for topic in topics for queue in catalog.queues(topic))

    def _matches(self, topic: str) -> bool:
        if is_system_topic(topic) and topic not in self.text.split("|"):
            return False
        return re.fullmatch(self.text, topic) is not None

    def __str__(self) -> str:
        return f'subscribePattern="{self.text}"'


@dataclass(frozen=True, slots=True)
class Assignment:
    """These queues and no others."""

    queues: tuple[QueueKey, ...]

    def covers(self, queue: QueueKey) -> bool:
        """Say whether the query reads this queue, if it is there."""
        return queue in self.queues

    def find_queues(self, catalog: Catalog, known: Collection[QueueKey] = ()) -> list[QueueKey]:
        """Return the queues that are there, sorted.

        Raises NotFoundError for a queue that is not there and not `known`, as `Topics.find_queues` does.
        """
        topics = Topics(tuple(dict.fromkeys(queue.topic for queue in self.queues)))
        there = set(topics.find_queues(catalog, known))
        for queue in self.queues:
            if queue not in there and queue not in known:
                ids = ", ".join(str(other.queue_id) for other in sorted(there) if other.topic == queue.topic)
                raise NotFoundError(
                    f'topic "{queue.topic}" has no queue {queue.queue_id}, which assign names. Its queues are: {ids}.'
                )
        return [queue for queue in self.queues if queue in there]

    def __str__(self) -> str:
        return f"assign={', '.join(map(str, self.queues))}"


@dataclass(frozen=True, slots=True)
class WithRetry:
    """What a query subscribes to, and beside it the retry topic of its group, which appears with the first failure."""

    chosen: Topics | Pattern | Assignment
    retry_topic: str

    def covers(self, queue: QueueKey) -> bool:
        """Say whether the query reads this queue, if it is there."""
        return queue.topic == self.retry_topic or self.chosen.covers(queue)

    def find_queues(self, catalog: Catalog, known: Collection[QueueKey] = ()) -> list[QueueKey]:
        """Return the queues that are there, sorted; raises what the query's own subscription raises."""
        found = self.chosen.find_queues(catalog, known)
        retries = catalog.queues(self.retry_topic) if self.retry_topic in catalog.topics() else []
        return sorted({*found, *retries})

    def __str__(self) -> str:
        return f"{self.chosen} with {self.retry_topic}"


Subscription = Topics | Pattern | Assignment | WithRetry


def named_topics(subscription: Subscription | None) -> tuple[str, ...] | None:
    """Return the topics that a query names, None where a pattern finds them."""
    chosen = subscription.chosen if isinstance(subscription, WithRetry) else subscription
    if isinstance(chosen, Topics):
        return chosen.names
    return tuple({queue.topic for queue in chosen.queues}) if isinstance(chosen, Assignment) else None


def spelled_topics(subscription: Subscription | None) -> tuple[str, ...]:
    """Return the topics that a query spells out: of a pattern its alternatives, which may be expressions."""
    chosen = subscription.chosen if isinstance(subscription, WithRetry) else subscription
    return tuple(chosen.text.split("|")) if isinstance(chosen, Pattern) else named_topics(chosen) or ()
