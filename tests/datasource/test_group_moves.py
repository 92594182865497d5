"""Resets of queues that change members meanwhile: they apply to the new owner, and are read by one member."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark.store.model import QueueKey

SHARED = {"consumerGroup": "billing", "assignment": "shared", "groupFallback": "earliest"}


class Pair:
    """Two queries that share a topic of two queues; each owns one, at random."""

    def __init__(self, query_on: Callable[..., Any], path: Path) -> None:
        self.path = path
        self.store = rmq_spark.open_store(path, segment_bytes=1 << 20)
        self.store.create_topic("orders", 2)
        for queue_id in (0, 1):
            self.append(queue_id, 4)
        self.first = query_on(path, **SHARED)
        self.first.drain()
        self.second = query_on(path, **SHARED, maxOffsetsPerQueue="1")
        self.second.drain()
        self.first.drain()  # lets one go
        self.second.drain()  # takes it
        ((self.its, _),) = self.second.reader._group.query.epochs.items()
        self.mine = 1 - self.its.queue_id

    def append(self, queue_id: int, count: int) -> None:
        for _ in range(count):
            self.store.send("orders", "x", queue_id=queue_id)

    def reset(self, offset: int) -> None:
        """Send the second query's queue elsewhere."""
        rmq_spark.reset_offsets(self.path, "billing", {"orders": {self.its.queue_id: offset}})

    def offset(self) -> int:
        """Return the group's offset in the second query's queue."""
        return rmq_spark.group_offsets(self.path, "billing")["orders"][self.its.queue_id]

    def rows(self, *offsets: int) -> list[tuple[int, int]]:
        return [(self.its.queue_id, offset) for offset in offsets]


@pytest.fixture
def pair(query_on, tmp_path: Path):
    made = Pair(query_on, tmp_path / "store")
    yield made
    for query in (made.first, made.second):
        die(query)
    made.store.close()


def die(query) -> None:
    """Let a query's process die, as far as others see it."""
    query.reader._group.query._membership.lease._lock.release()


def flat(batches: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    return sorted(row for batch in batches for row in batch)


def test_a_reset_back_in_anothers_queue_holds_when_that_one_dies(pair: Pair) -> None:
    pair.reset(1)
    assert flat(pair.first.drain()) == [], "it sees the reset, of a queue that is not its own"
    assert pair.second.trigger() == pair.rows(1)
    die(pair.second)  # before it published that
    time.sleep(0.25)  # for so long it may count as living
    assert flat(pair.first.drain()) == pair.rows(1, 2, 3)
    assert pair.offset() == 4


def test_a_reset_back_in_anothers_queue_holds_after_what_that_one_finished(pair: Pair) -> None:
    pair.reset(1)
    pair.first.drain()
    assert [pair.second.trigger(), pair.second.trigger()] == [pair.rows(1), pair.rows(2)]
    die(pair.second)  # the first of the two is published
    time.sleep(0.25)
    assert flat(pair.first.drain()) == pair.rows(2, 3)
    assert pair.offset() == 4


def test_a_reset_forward_in_anothers_queue_is_read_by_that_one_alone(pair: Pair) -> None:
    pair.append(pair.its.queue_id, 4)
    pair.reset(7)
    assert flat(pair.first.drain()) == []
    assert flat(pair.second.drain()) == pair.rows(7)
    assert pair.offset() == 8
    pair.append(pair.mine, 1)
    assert flat(pair.first.drain()) == [(pair.mine, 4)]


def test_a_reset_seen_by_a_query_that_has_not_read_the_queue_holds_too(pair: Pair, query_on) -> None:
    pair.reset(2)
    pair.first.drain()
    again = pair.first.committed
    for query in (pair.first, pair.second):
        die(query)
    restarted = query_on(pair.path, **SHARED, checkpoint=again)
    assert flat(restarted.drain()) == pair.rows(2, 3)
    die(restarted)


def test_a_reset_in_the_middle_of_a_trigger_is_not_published_over(pair: Pair) -> None:
    query = pair.second.reader._group.query
    pair.append(pair.its.queue_id, 1)
    assert pair.second.trigger() == pair.rows(4)
    read = query._assignment.rebalance

    def reset_and_rebalance(*given: Any) -> Any:
        pair.reset(1)
        return read(*given)

    query._assignment.rebalance = reset_and_rebalance
    pair.second.plan()  # would publish 5
    assert pair.offset() == 1
    query._assignment.rebalance = read
    assert flat(pair.second.drain()) == pair.rows(1, 2, 3, 4)
    assert pair.offset() == 5


def test_a_reset_to_messages_that_come_after_a_trigger_has_looked_skips_them_all(query_on, tmp_path: Path) -> None:
    with rmq_spark.open_store(tmp_path / "store", queues=1) as store:
        store.send("orders", "before")
        query = query_on(tmp_path / "store", consumerGroup="billing", startingOffsets="earliest")
        assert query.drain() == [[(0, 0)]]
        group = query.reader._group
        has_changed, looks = group.has_changed, []

        def send_and_reset() -> bool:
            if not looks:
                store.send("orders", "skipped")
                rmq_spark.reset_offsets(tmp_path / "store", "billing", to="latest")
            looks.append(None)
            return bool(has_changed())

        group.has_changed = send_and_reset
        assert [row for rows in query.drain() for row in rows] == []
        assert query.offset().positions[QueueKey("orders", 0)] == 2
        query.reader.stop()
