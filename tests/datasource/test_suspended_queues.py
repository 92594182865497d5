"""Suspended queues of an orderly listener in the plans of a stream: they go back and wait; the others continue."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark.datasource.plan.batch_assignment import Held, Hold, held_queues
from rmq_spark.store import commit_final_offsets
from rmq_spark.store.group.resets import read_suspended, write_outcomes
from rmq_spark.store.model import CommitKey, QueueKey, Suspension

ONE, OTHER = QueueKey("orders", 0), QueueKey("orders", 1)
GROUP = {"consumerGroup": "billing", "orderly": "true"}
EARLIEST = {"startingOffsets": "earliest"}


class Store:
    """A store of the topic orders with 4 messages in each of two queues, its group, and who commits a batch."""

    def __init__(self, path: Path, query_on: Callable[..., Any]) -> None:
        self.path, self._query_on = path, query_on
        self.store = rmq_spark.open_store(path, segment_bytes=1 << 20)
        self.store.create_topic("orders", 2)
        self.append(4)
        self.batch_id = 0
        self.queries: list[Any] = []

    def append(self, count: int) -> None:
        for number in range(2 * count):
            self.store.send("orders", "x", queue_id=number % 2)

    def query(self, checkpoint: str | None = None, available_now: bool = False, **options: str) -> Any:
        if self.queries:
            die(self.queries[-1])
        self.queries.append(self._query_on(self.path, checkpoint, available_now, **GROUP, **EARLIEST, **options))
        return self.queries[-1]

    def stop(self, resume: int, until_ms: int = 0, queue: QueueKey = ONE) -> None:
        """Commit the outcome of a batch that stopped the queue."""
        self.batch_id += 1
        key = CommitKey("query", self.batch_id)
        write_outcomes(str(self.path), "billing", key, {queue: Suspension(resume, until_ms, {resume: 1})})

    def offsets(self) -> dict[int, int]:
        return rmq_spark.group_offsets(self.path, "billing").get("orders", {})


@pytest.fixture
def orders(tmp_path: Path, query_on: Callable[..., Any]) -> Iterator[Store]:
    made = Store(tmp_path / "ours", query_on)
    yield made
    for query in made.queries:
        die(query)
    made.store.close()


def die(query: Any) -> None:
    """Let a query's process die, as far as others see it."""
    query.reader._group.query._membership.lease._lock.release()


def rows(queue_id: int, *offsets: int) -> list[tuple[int, int]]:
    return [(queue_id, offset) for offset in offsets]


@pytest.mark.parametrize(
    ("begin", "until_ms", "run_began", "held"),
    [
        (13, 100, None, Held(frozenset({ONE}), 100)),
        (12, 100, None, Held(frozenset({ONE}), 100)),
        (14, 100, None, Held()),
        (13, 99, None, Held()),
        (13, 0, None, Held()),
        (13, 100, 5, Held(frozenset({ONE}))),
        (13, 50, 5, Held()),
        (13, 50, 4, Held(frozenset({ONE}))),
        (13, 0, 4, Held()),
    ],
)
def test_a_queue_waits_until_its_time_and_a_run_of_available_now_waits_for_none(
    begin: int, until_ms: int, run_began: int | None, held: Held
) -> None:
    assert held_queues({ONE: Hold(13, until_ms, 5)}, {ONE: begin}, 99, run_began) == held


def test_a_queue_that_was_stopped_goes_back_and_waits_while_others_go_on(orders: Store) -> None:
    query = orders.query()
    assert query.trigger() == rows(0, 0, 1, 2, 3) + rows(1, 0, 1, 2, 3)
    orders.stop(1, query.clock.now_ms + 1_000)
    orders.append(1)
    assert query.trigger() == rows(1, 4)
    assert query.offset().positions == {ONE: 1, OTHER: 5}
    assert (query.offset().seeks, query.offset().suspended) == ({ONE: 1}, 1)
    assert query.trigger() is None
    query.clock.now_ms += 999
    assert query.trigger() is None
    query.clock.now_ms += 1
    assert query.trigger() == rows(0, 1, 2, 3, 4)
    assert query.offset().suspended == 1
    assert query.trigger() is None


def test_nothing_behind_the_row_that_failed_is_published(orders: Store) -> None:
    query = orders.query()
    query.trigger()
    orders.stop(1, query.clock.now_ms + 1_000)
    query.trigger()
    assert orders.offsets() == {0: 1, 1: 4}
    query.trigger()
    assert orders.offsets() == {0: 1, 1: 4}
    query.clock.now_ms += 1_000
    query.drain()
    assert orders.offsets() == {0: 4, 1: 4}


def test_a_repeated_batch_reads_what_it_read_before(orders: Store) -> None:
    query = orders.query()
    query.trigger()
    orders.stop(1)
    start, end = query.committed, query.plan()
    assert json.loads(end)["@"]["seek"] == {"orders": {"0": 1}}
    orders.stop(3)
    again = orders.query(start)
    assert again.rows(start, end) == rows(0, 1, 2, 3)


def test_a_queue_behind_a_dead_letter_goes_on_at_once(orders: Store) -> None:
    query = orders.query()
    query.trigger()
    orders.stop(2)
    assert query.trigger() == rows(0, 2, 3)


def test_a_query_that_starts_again_goes_back_too(orders: Store) -> None:
    query = orders.query()
    query.trigger()
    orders.stop(1)
    again = orders.query(query.committed)
    assert again.trigger() == rows(0, 1, 2, 3)
    assert orders.offsets() == {0: 1, 1: 4}


def test_a_reset_goes_over_a_stopped_queue(orders: Store) -> None:
    query = orders.query()
    query.trigger()
    orders.stop(1)
    rmq_spark.reset_offsets(orders.path, "billing", {"orders": {0: 3}})
    assert query.trigger() == rows(0, 3)
    assert query.trigger() is None
    assert orders.offsets() == {0: 4, 1: 4}


def test_so_it_does_for_a_query_that_starts_again(orders: Store) -> None:
    query = orders.query()
    query.trigger()
    orders.stop(1)
    rmq_spark.reset_offsets(orders.path, "billing", {"orders": {0: 3}})
    again = orders.query(query.committed)
    assert again.drain() == [rows(0, 3)]
    assert orders.offsets() == {0: 4, 1: 4}


@pytest.mark.parametrize("conflict", ["checkpoint", "group", "fail"])
def test_a_stopped_queue_is_no_conflict_of_a_query_that_starts_again(
    orders: Store, conflict: str, caplog: pytest.LogCaptureFixture
) -> None:
    query = orders.query()
    query.trigger()
    query.trigger()  # no new message, but the offsets of all rows read are published
    orders.append(1)
    query.trigger()
    orders.stop(4)
    again = orders.query(query.committed, onOffsetConflict=conflict)
    assert rows(0, 4)[0] in again.trigger()
    assert "is at" not in caplog.text


def test_queues_that_another_group_stopped_before_a_query_joined_it_are_no_business_of_its_checkpoint(
    orders: Store, query_on: Callable[..., Any]
) -> None:
    query = query_on(orders.path, **EARLIEST)
    query.trigger()
    orders.stop(1)
    member = orders.query(query.committed)
    assert member.trigger() in (None, [])
    assert member.offset().positions == {ONE: 4, OTHER: 4}
    orders.stop(2)
    assert member.trigger() == rows(0, 2, 3), "what is stopped since is"


def test_a_query_without_its_checkpoint_goes_on_where_the_group_stands(orders: Store) -> None:
    query = orders.query()
    query.trigger()
    orders.stop(2, query.clock.now_ms + 1_000)
    query.trigger()
    die(query)
    new = orders._query_on(orders.path, **GROUP, startingOffsets="group")
    orders.queries.append(new)
    new.trigger()
    assert new.offset().positions == {ONE: 2, OTHER: 4}
    new.clock.now_ms += 1_000
    assert new.drain() == [rows(0, 2, 3)]


def test_available_now_leaves_a_stopped_queue_to_the_next_run(orders: Store) -> None:
    query = orders.query(available_now=True)
    query.trigger()
    orders.stop(1, query.clock.now_ms)
    assert query.drain() == [[]]
    assert query.offset().positions == {ONE: 1, OTHER: 4}
    assert orders.offsets() == {0: 1, 1: 4}
    following = orders.query(query.committed, available_now=True)
    assert following.drain() == [rows(0, 1, 2, 3)]


def test_available_now_goes_on_behind_a_dead_letter(orders: Store) -> None:
    query = orders.query(available_now=True)
    query.trigger()
    orders.stop(2)
    assert query.drain() == [rows(0, 2, 3)]


def test_what_a_query_finished_last_ends_where_its_queue_was_stopped(orders: Store) -> None:
    query = orders.query()
    query.trigger()
    orders.stop(1)
    member, ends = query.reader._group.query.member_id, {ONE: 4, OTHER: 4}
    batch = CommitKey("query", orders.batch_id)
    assert commit_final_offsets(orders.path, "billing", member, ends, 0, 0, batch)
    assert orders.offsets() == {0: 1, 1: 4}
    assert commit_final_offsets(orders.path, "billing", member, ends, 0, 1, batch), "it went back, and came there again"
    assert orders.offsets() == {0: 4, 1: 4}


@pytest.mark.parametrize("resume", [2, 4])
@pytest.mark.parametrize("batch", [CommitKey("query", 1), CommitKey("other", 9), None])
def test_what_a_batch_says_of_a_queue_that_was_not_committed_is_not_published(
    orders: Store, batch: CommitKey | None, resume: int
) -> None:
    query = orders.query()
    query.trigger()
    orders.stop(1)
    query.trigger()
    assert orders.offsets() == {0: 1, 1: 4}
    orders.stop(resume)  # a failed batch recorded the previous row as a dead letter before it was stored
    member = query.reader._group.query.member_id
    commit_final_offsets(orders.path, "billing", member, {ONE: 4, OTHER: 4}, 0, 1, batch)
    assert orders.offsets() == {0: 1, 1: 4}


def test_a_reset_forgets_what_was_known_of_its_queues(orders: Store) -> None:
    query = orders.query()
    query.trigger()
    orders.stop(1)
    orders.stop(2, queue=OTHER)
    rmq_spark.reset_offsets(orders.path, "billing", {"orders": {0: 0}})
    left = read_suspended(str(orders.path), "billing")
    assert (left.number, list(left.queues)) == (3, [OTHER])
    assert query.trigger() == rows(0, 0, 1, 2, 3) + rows(1, 2, 3)
    rmq_spark.reset_offsets(orders.path, "billing", {"orders": {0: 0}})
    assert read_suspended(str(orders.path), "billing") == left


def test_a_queue_that_another_member_takes_is_handed_over_where_it_was_stopped(
    query_on: Callable[..., Any], orders: Store
) -> None:
    shared = {"consumerGroup": "billing", "assignment": "shared", "groupFallback": "earliest", "orderly": "true"}
    first = query_on(orders.path, **shared)
    orders.queries.append(first)
    first.trigger()
    second = query_on(orders.path, **shared)
    orders.queries.append(second)
    second.trigger()
    orders.stop(1, queue=ONE)
    orders.stop(2, queue=OTHER)
    [[(kept, begin), *_]] = first.drain()
    ((lost, place),) = {(0, 1), (1, 2)} - {(kept, begin)}
    assert first.offset().positions[QueueKey("orders", lost)] == place
    assert orders.offsets()[lost] == place
    assert second.drain()[-1] == rows(lost, *range(place, 4))


@pytest.mark.parametrize("checkpoint_is_kept", [False, True])
@pytest.mark.parametrize("publishes", [True, False])
def test_a_queue_goes_back_though_the_group_stood_further_before(
    orders: Store, publishes: bool, checkpoint_is_kept: bool
) -> None:
    orders.query().drain()
    orders.append(1)
    orders.query(orders.queries[-1].committed).drain()
    assert orders.offsets() == {0: 5, 1: 5}
    off = {} if publishes else {"commitOffsets": "off"}
    again = orders.query(**off)
    assert again.trigger() == rows(0, *range(5)) + rows(1, *range(5))
    orders.stop(1)
    if checkpoint_is_kept:  # the driver dies before it reports its progress
        again = orders.query(again.committed, **off)
    assert again.trigger() == rows(0, *range(1, 5))
    assert again.trigger() is None
    assert orders.offsets() == {0: 5, 1: 5}


def test_a_shared_queue_goes_back_though_the_group_stood_further_before(
    query_on: Callable[..., Any], orders: Store
) -> None:
    shared = {"consumerGroup": "billing", "assignment": "shared", "groupFallback": "earliest", "orderly": "true"}
    first = query_on(orders.path, **shared)
    assert first.trigger() == rows(0, 0, 1, 2, 3) + rows(1, 0, 1, 2, 3)
    orders.stop(1)
    die(first)
    with rmq_spark.open_consumer(orders.path, "billing") as consumer:
        consumer.update_consume_offset(ONE, 4)
    again = query_on(orders.path, first.committed, **shared)
    orders.queries.append(again)
    assert again.trigger() == rows(0, 1, 2, 3)
