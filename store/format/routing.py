"""Which queue of its topic a message goes to.

In this order: the queue id that the row names; the hash of its sharding key, as SelectMessageQueueByHash (4.9, 5.3)
chooses; else the topic's queues in turn. In the hash's rule the sign is dropped after the division, so Java's
smallest int needs no rule of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.message_columns import Given, RowFault, Topics
from rmq_spark.store.units import QueueKey

_FEW_QUEUES = 1 << 16  # up to here the queues that messages went to are found by counting, else by sorting


@dataclass(frozen=True, slots=True)
class Routes:
    """Where the rows go: each to queue `queue_ids[row]` of its topic, which is `queues[queue_numbers[row]]`."""

    queue_ids: NDArray[np.int64]
    queues: tuple[QueueKey, ...]  # distinct
    queue_numbers: NDArray[np.int32]


class QueueRouter:
    """Chooses queues, batch after batch; the turns of each topic go on from one batch to the next. For one thread.

    `write_queues` says how many queues of a topic are written to (topics.json: writeQueueNums), or raises; it is
    asked once a topic, until `forget_counts`. Turns begin at `start`: draw it, or the messages of many small batches
    pile up in queue 0.
    """

    def __init__(self, write_queues: Callable[[str], int], start: int) -> None:
        self._write_queues = write_queues
        self._start = start
        self._counts: dict[str, int] = {}
        self._turns: dict[str, int] = {}

    def forget_counts(self) -> None:
        """Ask for the queues of each topic again; the turns go on."""
        self._counts.clear()

    def route(
        self,
        topics: Topics,
        row_count: int,
        queue_ids: Given | None = None,
        key_hashes: Given | None = None,
    ) -> Routes:
        """Choose a queue for each row, by queue ids and Java hashes of sharding keys where they were given.

        Raises RowFault for a queue id that its topic does not have, and what `write_queues` raises.
        """
        counts = [self._queue_count(topic) for topic in topics.names]
        per_row = topics.per_row(counts, np.int64)
        if key_hashes is None and queue_ids is None:
            return number_queues(topics, counts, self._in_turn(topics, counts, np.arange(row_count)))
        chosen = np.zeros(row_count, np.int64)
        rest = np.ones(row_count, np.bool_)
        if key_hashes is not None:
            # The remainder of the number without its sign is Java's remainder without its sign.
            chosen = np.abs(key_hashes.values.view(np.int32).astype(np.int64)) % per_row
            rest &= ~key_hashes.mask
        if queue_ids is not None:
            chosen = np.where(queue_ids.mask, queue_ids.values, chosen)
            rest &= ~queue_ids.mask
        if rest.any():
            rows = np.flatnonzero(rest)
            chosen[rows] = self._in_turn(topics, counts, rows)
        wrong = (chosen < 0) | (chosen >= per_row)
        if wrong.any():
            row = int(np.argmax(wrong))
            count = counts[0 if topics.numbers is None else topics.numbers[row]]
            raise RowFault(
                row,
                f"queueId {chosen[row]} is not one of the {count} queues of topic {topics.name(row)} that are written "
                f"to: accepted are 0 to {count - 1}, or null for any",
            )
        return number_queues(topics, counts, chosen)

    def _queue_count(self, topic: str) -> int:
        if topic not in self._counts:
            count = self._write_queues(topic)
            if count < 1:
                raise OptionError(f"topic {topic} has {count} queues to write to: give it some (writeQueueNums)")
            self._counts[topic] = count
        return self._counts[topic]

    def _in_turn(self, topics: Topics, counts: list[int], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Deal the rows out to the queues of their topics, each topic in its own turns."""
        turns = np.arange(len(rows))
        begins = [self._turns.get(topic, self._start) for topic in topics.names]
        if topics.numbers is None:
            self._turns[topics.names[0]] = (begins[0] + len(rows)) % counts[0]
            turns += begins[0]
            turns %= counts[0]
            return turns
        numbers = topics.numbers[rows]
        sizes = np.bincount(numbers, minlength=len(counts))
        order = np.argsort(numbers, kind="stable")
        turns[order] = np.arange(len(rows)) - (np.cumsum(sizes) - sizes)[numbers[order]]
        for topic, begin, size, count in zip(topics.names, begins, sizes.tolist(), counts, strict=True):
            self._turns[topic] = (begin + size) % count
        turns += np.array(begins)[numbers]
        turns %= np.array(counts)[numbers]
        return turns


def number_queues(topics: Topics, counts: list[int], queue_ids: NDArray[np.int64]) -> Routes:
    """Number the queues that rows go to, by topic and then by queue id; `counts` are the queues of each topic."""
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
    """Return the distinct codes, ascending, and the place of each row's code among them; all are in [0, limit)."""
    if limit > _FEW_QUEUES:
        found, inverse = np.unique(codes, return_inverse=True)
        return found, inverse.astype(np.int32)
    used = np.flatnonzero(np.bincount(codes, minlength=limit))
    places = np.zeros(limit, np.int32)
    places[used] = np.arange(len(used))
    return used, places[codes]
