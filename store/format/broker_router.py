"""Router among brokers: chooses the queue of each message among the queues that a topic has on several brokers.

The first of these rules that applies determines the queue:
1. If the row has a queue id, the queue with this id on the row's broker is chosen. The name of the broker may be
   missing if all queues of the topic are on one broker.
2. If the row has a sharding key, its Java hash chooses from the list of all queues (SelectMessageQueueByHash).
3. Otherwise the queues of the list are chosen one after the other (round-robin). If no row of a batch has a queue id
   or a key, each queue gets a block of adjacent rows, because the rows of a queue are sent together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.format.message_columns import Given, RowFault, Topics
from rmq_spark.store.format.queue_router import QueueRouter
from rmq_spark.store.model import QueueKey


@dataclass(frozen=True, slots=True)
class RowQueues:
    """The queue of each row, `queues[numbers[row]]`, and whether it was chosen by round-robin (`are_free`)."""

    queues: tuple[QueueKey, ...]
    numbers: NDArray[np.int32]
    are_free: NDArray[np.bool_]


class BrokerRouter:
    """Chooses queues for one batch after another. Round-robin continues across batches. Not thread-safe.

    `queues_of` returns the queues to which messages of a topic are sent, or raises an error. Those of a broker follow
    each other, with ids from 0. Round-robin begins at queue `start` modulo their number. Use a random number, so that
    many routers together use all queues.
    """

    def __init__(self, queues_of: Callable[[str], Sequence[QueueKey]], start: int) -> None:
        self._queues_of = queues_of
        self._queues: dict[str, tuple[QueueKey, ...]] = {}
        self._router = QueueRouter(lambda topic: len(self.queues(topic)), start)

    def queues(self, topic: str) -> tuple[QueueKey, ...]:
        """Return the queues of a topic. They are asked for once, until `forget`."""
        if topic not in self._queues:
            self._queues[topic] = tuple(self._queues_of(topic))
        return self._queues[topic]

    def forget(self) -> None:
        """Ask for the queues of each topic again. Round-robin continues."""
        self._queues.clear()
        self._router.forget_counts()

    def route(
        self,
        topics: Topics,
        row_count: int,
        queue_ids: Given | None,
        brokers: pa.Array | None,
        key_hashes: Given | None,
    ) -> RowQueues:
        """Return the queue of each row. `brokers` are names of brokers, `key_hashes` Java hashes of sharding keys.

        Raises RowFault for a queue that the topic does not have, and passes on the errors of `queues_of`.
        """
        chosen = _choose(topics, [self.queues(name) for name in topics.names], row_count, queue_ids, brokers)
        if chosen is None and key_hashes is None and topics.numbers is None:
            return self._route_blocks(topics.names[0], row_count)
        routes = self._router.route(topics, row_count, chosen, key_hashes)
        queues = tuple(self._queues[key.topic][key.queue_id] for key in routes.queues)
        are_free = np.ones(row_count, np.bool_)
        for given in (chosen, key_hashes):
            if given is not None:
                are_free &= ~given.mask
        return RowQueues(queues, routes.queue_numbers, are_free)

    def _route_blocks(self, topic: str, row_count: int) -> RowQueues:
        """Return the queues of rows of one topic that any queue may take: a block of rows for each."""
        queues = self.queues(topic)
        block = -(-row_count // len(queues))
        used = -(-row_count // block)
        begin = self._router.advance(topic, used)
        chosen = tuple(queues[(begin + number) % len(queues)] for number in range(used))
        return RowQueues(
            chosen, np.repeat(np.arange(used, dtype=np.int32), block)[:row_count], np.ones(row_count, np.bool_)
        )

    def route_one(self, topic: str, queue_id: object, broker: object, key_hash: int | None) -> QueueKey | None:
        """Return the queue of one message, as `route` does. Return None if `route` must choose or refuse it.

        Round-robin continues at once.
        """
        queues = self.queues(topic)
        if queue_id is not None or broker is not None:
            is_clear = broker is not None or len({one.broker for one in queues}) == 1
            found = [one for one in queues if one.queue_id == queue_id and broker in (None, one.broker)]
            return found[0] if found and is_clear and type(queue_id) is int else None  # True == 1 is not a queue id
        number = self._router.route_one(topic, None, key_hash)
        if number is None:
            return None
        if key_hash is None:
            self._router.advance(topic)
        return queues[number]


def _choose(
    topics: Topics,
    queues: Sequence[tuple[QueueKey, ...]],
    row_count: int,
    queue_ids: Given | None,
    brokers: pa.Array | None,
) -> Given | None:
    """Return for each row with a queue id the number of its queue in the list of its topic. None if no row has one."""
    numbers, names = np.zeros(row_count, np.int64), [None]
    if brokers is not None and brokers.null_count < row_count:
        encoded = brokers.cast(pa.string()).dictionary_encode()
        names = [None, *encoded.dictionary.to_pylist()]
        numbers = encoded.indices.fill_null(-1).to_numpy().astype(np.int64) + 1
        lonely = (numbers > 0) & (~queue_ids.mask if queue_ids is not None else True)
        if lonely.any():
            raise RowFault(
                int(np.argmax(lonely)),
                "it has a brokerName and no queueId; expected both, or neither. Give the queueId, or leave brokerName "
                "out",
            )
    if queue_ids is None or not queue_ids.mask.any():
        return None
    topic_numbers = np.zeros(row_count, np.int64) if topics.numbers is None else topics.numbers
    firsts, counts = np.zeros((2, len(queues), len(names)), np.int64)
    for topic, of_topic in enumerate(queues):
        held = [one.broker for one in of_topic]
        for number, name in enumerate(names):
            broker = held[0] if name is None and len(set(held)) == 1 else name
            if broker in held:
                firsts[topic, number], counts[topic, number] = held.index(broker), held.count(broker)
    wrong = queue_ids.mask & ((queue_ids.values < 0) | (queue_ids.values >= counts[topic_numbers, numbers]))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise RowFault(row, _missing_queue(queues[topic_numbers[row]], int(queue_ids.values[row]), names[numbers[row]]))
    return Given(np.where(queue_ids.mask, firsts[topic_numbers, numbers] + queue_ids.values, 0), queue_ids.mask)


def _missing_queue(queues: Sequence[QueueKey], queue_id: int, broker: str | None) -> str:
    held = [one.broker for one in queues]
    shown = ", ".join(f"{name} ({held.count(name)} queues)" for name in dict.fromkeys(held))
    if broker is None and len(set(held)) > 1:
        return (
            f"it has queueId {queue_id} and no brokerName, and the topic has queues on several brokers: {shown}; "
            "expected both. Add the column brokerName, or leave queueId out"
        )
    if broker is not None and broker not in held:
        return (
            f"broker {broker or repr(broker)} is not listed with the topic now: it is down, or the name is wrong; "
            f"expected one of: {shown}. Wait until it is back (mqadmin clusterList), or leave out queueId and "
            "brokerName for any queue"
        )
    place = "" if broker is None else f" of broker {broker}"
    return (
        f"queueId {queue_id}{place} is not a queue to which messages of the topic are sent; expected one of: {shown}, "
        "with ids from 0. Leave out queueId and brokerName for any queue"
    )
