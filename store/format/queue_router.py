"""Queue router: chooses the queue of each message in its topic.

The first of these rules that applies determines the queue:
1. If the row has a queue id, this queue is chosen.
2. If the row has a sharding key, the queue id is the absolute value of the key's Java hash modulo the number of queues,
   with Java's remainder. Source: SelectMessageQueueByHash (4.9, 5.3).
3. Otherwise the queues of the topic are chosen one after the other (round-robin).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.message_columns import Given, RowFault, Topics
from rmq_spark.store.model import QueueKey

_FEW_QUEUES = 1 << 16  # with at most this many queues, the used ones are found by counting, otherwise by sorting


@dataclass(frozen=True, slots=True)
class Routes:
    """The queue of each row. Its queue id is `queue_ids[row]`, and its key is `queues[queue_numbers[row]]`."""

    queue_ids: NDArray[np.int64]
    queues: tuple[QueueKey, ...]  # each queue once
    queue_numbers: NDArray[np.int32]


class QueueRouter:
    """Chooses queues for one batch after another. Round-robin continues across batches. Not thread-safe.

    `write_queues` returns the number of write queues of a topic (topics.json: writeQueueNums), or raises an error. It
    is called once for each topic, and again after `forget_counts`. Round-robin begins at queue `start` modulo the
    number of queues. Use a random number. If many routers with small batches all begin at 0, most messages go to queue
    0.
    """

    def __init__(self, write_queues: Callable[[str], int], start: int) -> None:
        self._write_queues = write_queues
        self._start = start
        self._counts: dict[str, int] = {}
        self._next: dict[str, int] = {}  # topic -> the next queue in round-robin

    def forget_counts(self) -> None:
        """Forget the number of queues of each topic, so that `write_queues` is called again. Round-robin continues."""
        self._counts.clear()

    def route(
        self,
        topics: Topics,
        row_count: int,
        queue_ids: Given | None = None,
        key_hashes: Given | None = None,
    ) -> Routes:
        """Return the queue of each row. `key_hashes` are the Java hashes of sharding keys.

        Raises RowFault if a row's topic does not have the given queue id, and OptionError if a topic has no write
        queue. Errors of `write_queues` are passed on.
        """
        counts = [self._queue_count(topic) for topic in topics.names]
        per_row = topics.per_row(counts, np.int64)
        if key_hashes is None and queue_ids is None:
            return number_queues(topics, counts, self._round_robin(topics, counts, np.arange(row_count)))
        chosen = np.zeros(row_count, np.int64)
        rest = np.ones(row_count, np.bool_)
        if key_hashes is not None:
            # |hash| % n equals |hash % n| with Java's remainder.
            chosen = np.abs(key_hashes.values.view(np.int32).astype(np.int64)) % per_row
            rest &= ~key_hashes.mask
        if queue_ids is not None:
            chosen = np.where(queue_ids.mask, queue_ids.values, chosen)
            rest &= ~queue_ids.mask
        if rest.any():
            rows = np.flatnonzero(rest)
            chosen[rows] = self._round_robin(topics, counts, rows)
        wrong = (chosen < 0) | (chosen >= per_row)
        if wrong.any():
            row = int(np.argmax(wrong))
            count = counts[0 if topics.numbers is None else topics.numbers[row]]
            raise RowFault(
                row,
                f"queueId {chosen[row]} is not one of the {count} queues of topic {topics.name(row)}; expected 0 to "
                f"{count - 1}, or null for any",
            )
        return number_queues(topics, counts, chosen)

    def route_one(self, topic: str, queue_id: object, key_hash: int | None) -> int | None:
        """Return the queue id of one message, as `route` does. Return None if `queue_id` is not a queue of the topic.

        `queue_id` and `key_hash` (the Java hash of a sharding key) may be None. Round-robin does not continue before
        `advance` is called. Raises the errors of `route` that concern the topic.
        """
        count = self._queue_count(topic)
        if queue_id is not None:
            return queue_id if type(queue_id) is int and 0 <= queue_id < count else None
        if key_hash is not None:
            return abs(key_hash) % count
        return self._next.get(topic, self._start) % count

    def advance(self, topic: str, count: int = 1) -> int:
        """Take the next `count` queues of round-robin, such as the one that `route_one` chose. Return the first one."""
        queue_count = self._queue_count(topic)
        first = self._next.get(topic, self._start) % queue_count
        self._next[topic] = (first + count) % queue_count
        return first

    def _queue_count(self, topic: str) -> int:
        if topic not in self._counts:
            count = self._write_queues(topic)
            if count < 1:
                raise OptionError(f"topic {topic} has {count} write queues; expected at least 1. Set writeQueueNums")
            self._counts[topic] = count
        return self._counts[topic]

    def _round_robin(self, topics: Topics, counts: list[int], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a queue id for each of `rows`, by round-robin over the queues of the row's topic."""
        queue_ids = np.arange(len(rows))
        begins = [self._next.get(topic, self._start) for topic in topics.names]
        if topics.numbers is None:
            self._next[topics.names[0]] = (begins[0] + len(rows)) % counts[0]
            queue_ids += begins[0]
            queue_ids %= counts[0]
            return queue_ids
        numbers = topics.numbers[rows]
        sizes = np.bincount(numbers, minlength=len(counts))
        order = np.argsort(numbers, kind="stable")
        queue_ids[order] = np.arange(len(rows)) - (np.cumsum(sizes) - sizes)[numbers[order]]
        for topic, begin, size, count in zip(topics.names, begins, sizes.tolist(), counts, strict=True):
            self._next[topic] = (begin + size) % count
        queue_ids += np.array(begins)[numbers]
        queue_ids %= np.array(counts)[numbers]
        return queue_ids


def number_queues(topics: Topics, counts: list[int], queue_ids: NDArray[np.int64]) -> Routes:
    """Return the routes of rows with these queue ids.

    `counts` has the number of queues of each of `topics.names`. In the result, `queues` is sorted by the order of these
    names, and then by queue id.
    """
    firsts = np.cumsum([0, *counts])
    codes = queue_ids if topics.numbers is None else queue_ids + firsts[topics.numbers]
    used, numbers = number_codes(codes, int(firsts[-1]))
    of_topic = np.searchsorted(firsts, used, "right") - 1
    queues = tuple(
        QueueKey(topics.names[topic], code - int(firsts[topic]))
        for topic, code in zip(of_topic.tolist(), used.tolist(), strict=True)
    )
    return Routes(queue_ids, queues, numbers)


def number_codes(codes: NDArray[np.int64], limit: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return each code once, ascending, and for each row the index of its code in that array.

    All codes must be in [0, limit).
    """
    if limit > _FEW_QUEUES:
        found, inverse = np.unique(codes, return_inverse=True)
        return found, inverse.astype(np.int32)
    used = np.flatnonzero(np.bincount(codes, minlength=limit))
    indices = np.zeros(limit, np.int32)
    indices[used] = np.arange(len(used))
    return used, indices[codes]
