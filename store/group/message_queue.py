"""A queue as RocketMQ's clients name it, and the order in which they put queues and clients before they share them.

All members of a group must see the same order, those written in Java too: theirs goes by UTF-16 units, Python's by
code points. The two differ beyond the basic plane only.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rmq_spark.store.units import QueueKey


@dataclass(frozen=True, slots=True)
class MessageQueue:
    """One queue of one broker (MessageQueue, 4.9 and 5.3). A store is one broker's, so its queues share the name."""

    topic: str
    broker_name: str
    queue_id: int

    @classmethod
    def of(cls, queue: QueueKey, broker_name: str) -> "MessageQueue":
        """Return the queue of a store that belongs to the broker of that name."""
        return cls(queue.topic, broker_name, queue.queue_id)

    @property
    def key(self) -> QueueKey:
        """Return the queue as everything else here names it, without the broker."""
        return QueueKey(self.topic, self.queue_id)

    def __str__(self) -> str:
        """Return MessageQueue#toString, which consistent hashing hashes."""
        return f"MessageQueue [topic={self.topic}, brokerName={self.broker_name}, queueId={self.queue_id}]"


def java_order(text: str) -> bytes:
    """Return the key by which texts sort as by String#compareTo: by their UTF-16 units."""
    return text.encode("utf-16-be", "surrogatepass")


def sort_queues(queues: Iterable[MessageQueue]) -> list[MessageQueue]:
    """Return the queues by topic, then broker's name, then number (MessageQueue#compareTo)."""
    return sorted(queues, key=lambda queue: (java_order(queue.topic), java_order(queue.broker_name), queue.queue_id))


def sort_client_ids(client_ids: Iterable[str]) -> list[str]:
    """Return the clients' ids in the order in which they take their shares (RebalanceImpl#rebalanceByTopic)."""
    return sorted(client_ids, key=java_order)
