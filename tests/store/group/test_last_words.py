"""What is published for a query that has ended: what it finished, and nothing that somebody else has said since."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import rmq_spark
from rmq_spark.store.disk.file_lock import FileLock
from rmq_spark.store.group.group_paths import GroupPaths
from rmq_spark.store.group.last_words import publish_last_offsets
from rmq_spark.store.group.query_group import GroupTerms, QueryGroup
from rmq_spark.store.group.resets import read_resets
from rmq_spark.store.units import QueueKey

A, B = QueueKey("orders", 0), QueueKey("orders", 1)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with ten messages in each of two queues of the topic orders."""
    with rmq_spark.open_store(tmp_path / "store", segment_bytes=1 << 16) as messages:
        messages.create_topic("orders", 2)
        for number in range(20):
            messages.send("orders", "x", queue_id=number % 2)
    return tmp_path / "store"


@pytest.fixture
def ended(store: Path) -> Iterator[QueryGroup]:
    """A query that had both queues, and published that it finished 4 messages of each."""
    query = QueryGroup(str(store), GroupTerms("g"))
    query.step([A, B], {}, None)
    query.publish({A: 4, B: 4})
    yield query
    query.leave({})


def offsets(store: Path) -> dict[int, int]:
    return rmq_spark.group_offsets(store, "g")["orders"]


def test_what_was_finished_last_is_published(store: Path, ended: QueryGroup) -> None:
    assert publish_last_offsets(store, "g", ended.member_id, {A: 6, B: 4}, 0)
    assert offsets(store) == {0: 6, 1: 4}


def test_a_group_that_stands_further_stays_there(store: Path, ended: QueryGroup) -> None:
    with rmq_spark.open_consumer(store, "g") as consumer:
        consumer.update_consume_offset(A, 9)
    assert publish_last_offsets(store, "g", ended.member_id, {A: 6, B: 6}, 0)
    assert offsets(store) == {0: 9, 1: 6}


def test_a_reset_that_the_query_did_not_apply_stays(store: Path, ended: QueryGroup) -> None:
    rmq_spark.reset_offsets(store, "g", {"orders": {0: 1}})
    number = read_resets(GroupPaths(str(store), "g").resets).number
    assert publish_last_offsets(store, "g", ended.member_id, {A: 6, B: 6}, number - 1)
    assert offsets(store) == {0: 1, 1: 6}
    assert publish_last_offsets(store, "g", ended.member_id, {A: 3, B: 6}, number), "it applied that one"
    assert offsets(store) == {0: 3, 1: 6}


def test_queues_that_are_anothers_by_now_are_left_out(store: Path, ended: QueryGroup) -> None:
    ended.leave({A: 4, B: 4})
    other = QueryGroup(str(store), GroupTerms("g"))
    other.step([A], {}, None)
    assert not publish_last_offsets(store, "g", ended.member_id, {A: 6, B: 6}, 0)
    assert offsets(store) == {0: 4, 1: 4}
    other.leave({})


def test_queues_that_end_before_are_left_out(store: Path, ended: QueryGroup) -> None:
    assert publish_last_offsets(store, "g", ended.member_id, {A: 16, B: 10}, 0)
    assert offsets(store) == {0: 4, 1: 10}, "messages that come to be stored up to 16 are not passed over"
    shutil.rmtree(store / "consumequeue" / "orders" / "0")
    publish_last_offsets(store, "g", ended.member_id, {A: 6, B: 10}, 0)
    assert offsets(store) == {0: 4, 1: 10}, "where A ends cannot be told"


def test_what_was_finished_last_is_published_where_the_log_lies_elsewhere(
    store: Path, ended: QueryGroup, tmp_path: Path
) -> None:
    (store / "commitlog").rename(tmp_path / "log")
    log = str(tmp_path / "log")
    assert publish_last_offsets(store, "g", ended.member_id, {A: 6, B: 4}, 0, commit_log_path=log)


def test_beside_a_broker_nothing_is_published(store: Path, ended: QueryGroup) -> None:
    lock = FileLock(str(store / "lock"))
    assert lock.try_take(), "as a broker does"
    assert not publish_last_offsets(store, "g", ended.member_id, {A: 6, B: 6}, 0)
    lock.release()
    assert offsets(store) == {0: 4, 1: 4}
