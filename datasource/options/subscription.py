"""Subscriptions: topics by name, topics by pattern, or single queues."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from rmq_spark.store.errors import NotFoundError
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import is_system_topic


class Catalog(Protocol):
    """The topics and queues of a place, as a `Backend` lists them."""

    def topics(self) -> list[str]:
        """Return the names of all topics."""

    def queues(self, topics: Collection[str], *, missing_ok: Collection[str] = ()) -> dict[str, list[QueueKey]]:
        """Return each topic's queues. Raises NotFoundError for a missing topic that is not in `missing_ok`."""


@dataclass(frozen=True, slots=True)
class Topics:
    """All queues of the named topics."""

    names: tuple[str, ...]

    def covers(self, queue: QueueKey) -> bool:
        """Return whether the query reads this queue, if it exists."""
        return queue.topic in self.names

    def find_queues(self, catalog: Catalog, known: Collection[QueueKey] = ()) -> list[QueueKey]:
        """Return the existing queues of the topics, sorted.

        Raises NotFoundError for a topic that does not exist, unless a queue of the topic is in `known`. In that case
        the topic has vanished, and the caller handles this.
        """
        found = catalog.queues(self.names, missing_ok={queue.topic for queue in known})
        return sorted(queue for queues in found.values() for queue in queues)

    def __str__(self) -> str:
        return f'subscribe="{",".join(sorted(self.names))}"'  # the same for all members of a group that read the same


@dataclass(frozen=True, slots=True)
class Pattern:
    """All queues of the topics whose whole name matches the regular expression `text`.

    A system topic is read only if its name is one of the alternatives that `|` separates.
    """

    text: str

    def covers(self, queue: QueueKey) -> bool:
        """Return whether the query reads this queue, if it exists."""
        return self._matches(queue.topic)

    def find_queues(self, catalog: Catalog, known: Collection[QueueKey] = ()) -> list[QueueKey]:
        """Return the existing queues of matching topics, sorted; [] if no topic matches."""
        topics = [topic for topic in catalog.topics() if self._matches(topic)]
        return sorted(queue for queues in catalog.queues(topics).values() for queue in queues)

    def _matches(self, topic: str) -> bool:
        if is_system_topic(topic) and topic not in self.text.split("|"):
            return False
        return re.fullmatch(self.text, topic) is not None

    def __str__(self) -> str:
        return f'subscribePattern="{self.text}"'


@dataclass(frozen=True, slots=True)
class Assignment:
    """The given queues and no others."""

    queues: tuple[QueueKey, ...]

    def covers(self, queue: QueueKey) -> bool:
        """Return whether the query reads this queue, if it exists."""
        return queue in self.queues

    def find_queues(self, catalog: Catalog, known: Collection[QueueKey] = ()) -> list[QueueKey]:
        """Return those of the given queues that exist, sorted.

        Raises NotFoundError for a queue that does not exist, unless it is in `known` (see `Topics.find_queues`).
        """
        topics = Topics(tuple(dict.fromkeys(queue.topic for queue in self.queues)))
        existing = set(topics.find_queues(catalog, known))
        for queue in self.queues:
            if queue not in existing and queue not in known:
                ids = ", ".join(other.id_text for other in sorted(existing) if other.topic == queue.topic)
                raise NotFoundError(
                    f'assign: topic "{queue.topic}" has no queue {queue.id_text}. Its queues are: {ids}.'
                )
        return [queue for queue in self.queues if queue in existing]

    def __str__(self) -> str:
        return f"assign={', '.join(map(str, self.queues))}"


@dataclass(frozen=True, slots=True)
class WithRetry:
    """A subscription (`chosen`) together with the retry topic of the query's group.

    The retry topic exists only after a message of the group has failed for the first time.
    """

    chosen: Topics | Pattern | Assignment
    retry_topic: str

    def covers(self, queue: QueueKey) -> bool:
        """Return whether the query reads this queue, if it exists."""
        return queue.topic == self.retry_topic or self.chosen.covers(queue)

    def find_queues(self, catalog: Catalog, known: Collection[QueueKey] = ()) -> list[QueueKey]:
        """Return the existing queues, sorted. Raises NotFoundError as the `find_queues` of `chosen` does."""
        found = self.chosen.find_queues(catalog, known)
        retries = catalog.queues([self.retry_topic], missing_ok=[self.retry_topic])
        return sorted({*found, *retries.get(self.retry_topic, ())})

    def __str__(self) -> str:
        return f"{self.chosen} with {self.retry_topic}"


Subscription = Topics | Pattern | Assignment | WithRetry


def named_topics(subscription: Subscription | None) -> tuple[str, ...] | None:
    """Return the topics that a query names. Return None if it has a pattern."""
    chosen = subscription.chosen if isinstance(subscription, WithRetry) else subscription
    if isinstance(chosen, Topics):
        return chosen.names
    return tuple({queue.topic for queue in chosen.queues}) if isinstance(chosen, Assignment) else None


def spelled_topics(subscription: Subscription | None) -> tuple[str, ...]:
    """Return the topics that a query names. For a pattern return its alternatives, which may be expressions."""
    chosen = subscription.chosen if isinstance(subscription, WithRetry) else subscription
    return tuple(chosen.text.split("|")) if isinstance(chosen, Pattern) else named_topics(chosen) or ()
