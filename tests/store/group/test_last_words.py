"""What is published for a query that has ended: what it finished, and nothing that somebody else has said since."""

import errno
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import rmq_spark
from rmq_spark.store.commit.keys import CommitKey
from rmq_spark.store.disk.file_lock import FileLock
from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.format.config_json import ConsumerOffsets, decode_consumer_offsets
from rmq_spark.store.group import last_words, offset_file
from rmq_spark.store.group.finished_batch import read_finished_batch, read_planned_batch
from rmq_spark.store.group.group_paths import GroupPaths
from rmq_spark.store.group.last_words import publish_last_offsets
from rmq_spark.store.group.query_group import GroupTerms, QueryGroup
from rmq_spark.store.group.resets import read_resets
from rmq_spark.store.group.suspended import Suspension, write_outcomes
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.testing.failing_disk import FailingDisk
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


def test_a_group_that_went_further_meanwhile_stays_there_and_its_offsets_are_decoded_once_each(
    store: Path, ended: QueryGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = (store / "config/consumerOffset.json").read_bytes()
    decoded, reached = [], last_words._reached

    def count(data: bytes) -> ConsumerOffsets:
        decoded.append(data)
        return decode_consumer_offsets(data)

    with monkeypatch.context() as patch:
        patch.setattr(offset_file, "decode_consumer_offsets", count)
        assert publish_last_offsets(store, "g", ended.member_id, {A: 5, B: 4}, 0)
        assert decoded.count(held) == 1, "the file was the same at the second look"

    def look(root: str, log: str | None, moved: Mapping[QueueKey, int]) -> set[QueueKey]:
        with rmq_spark.open_consumer(store, "g") as consumer:
            consumer.update_consume_offset(A, 9)
        return reached(root, log, moved)

    monkeypatch.setattr(last_words, "_reached", look)
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


@pytest.fixture(params=["all", "shared"])
def planned(store: Path, request: pytest.FixtureRequest) -> Iterator[QueryGroup]:
    """A query whose second batch reads A again from 2, where a listener stopped the first one. Both have ended."""
    query = QueryGroup(str(store), GroupTerms("g", request.param))
    for begin in ({A: 0, B: 0}, {A: 2, B: 10}):
        query.step([A, B], begin, None)
        query.publish(begin)
        query.settle(is_batch=True)
        outcome = Suspension(2) if begin[A] == 0 else None
        write_outcomes(str(store), "g", CommitKey("query", query.batches - 1), {A: outcome})
    yield query
    query.leave({})


def test_a_late_event_of_an_older_batch_publishes_and_records_nothing(store: Path, planned: QueryGroup) -> None:
    member, root = planned.member_id, str(store)
    first, second = CommitKey("query", 0), CommitKey("query", 1)
    assert not publish_last_offsets(root, "g", member, {A: 10, B: 10}, 0, 0, first, finished_batch=1)
    assert offsets(store) == {0: 2, 1: 10}
    assert read_finished_batch(planned.paths, member) == 0
    assert publish_last_offsets(root, "g", member, {A: 5, B: 10}, 0, 1, second, finished_batch=2)
    assert offsets(store) == {0: 5, 1: 10}
    assert read_finished_batch(planned.paths, member) == 2


def test_the_end_of_a_batch_is_not_recorded_while_the_group_stands_further(store: Path, planned: QueryGroup) -> None:
    with rmq_spark.open_consumer(store, "g") as consumer:
        consumer.update_consume_offset(A, 9)
    batch = CommitKey("query", 1)
    publish_last_offsets(str(store), "g", planned.member_id, {A: 5, B: 10}, 0, 1, batch, finished_batch=2)
    assert offsets(store) == {0: 9, 1: 10}
    assert read_finished_batch(planned.paths, planned.member_id) == 0


def test_the_end_of_a_batch_is_recorded_where_a_reset_sent_a_queue_elsewhere(store: Path, planned: QueryGroup) -> None:
    rmq_spark.reset_offsets(store, "g", {"orders": {0: 1}})
    batch = CommitKey("query", 1)
    publish_last_offsets(str(store), "g", planned.member_id, {A: 5, B: 10}, 0, 1, batch, finished_batch=2)
    assert offsets(store) == {0: 1, 1: 10}
    assert read_finished_batch(planned.paths, planned.member_id) == 2


def test_the_number_of_the_planned_batch_goes_with_its_member(store: Path) -> None:
    query = QueryGroup(str(store), GroupTerms("g"))
    query.step([A, B], {}, None)
    assert read_planned_batch(query.paths, query.member_id) == 0
    query.settle(is_batch=False)
    assert read_planned_batch(query.paths, query.member_id) == 0
    query.settle(is_batch=True)
    assert read_planned_batch(query.paths, query.member_id) == 1
    query.leave({})
    assert list(Path(query.paths.members).iterdir()) == []


def test_a_number_that_cannot_be_read_is_damage_and_one_that_cannot_be_written_is_reported(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for kind in ("all", "shared"):
        query = QueryGroup(str(store), GroupTerms(f"of-{kind}", kind))  # type: ignore[arg-type]
        query.step([A, B], {}, None)
        query._disk = FailingDisk(0, errno.ENOSPC)
        if kind == "all":
            query.settle(is_batch=True)
            assert "group offsets are not published" in caplog.text
        else:
            with pytest.raises(StoreError):
                query.settle(is_batch=True)
        Path(query.paths.planned_batch(query.member_id)).write_text("{")
        with pytest.raises(DamageError, match="planned batch"):
            publish_last_offsets(store, f"of-{kind}", query.member_id, {A: 6}, 0, finished_batch=1)
        query.leave({})


def test_only_the_named_queues_that_moved_are_looked_at(
    store: Path, ended: QueryGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[QueueKey] = []
    find = TopicTable.find

    def noted(self: TopicTable, key: QueueKey) -> object:
        seen.append(key)
        return find(self, key)

    def refuse(_: object) -> None:
        raise AssertionError("lists all queues of the store")

    monkeypatch.setattr(TopicTable, "find", noted)
    monkeypatch.setattr(TopicTable, "look", refuse)
    monkeypatch.setattr(StoreReader, "refresh", refuse)
    assert publish_last_offsets(store, "g", ended.member_id, {A: 6, B: 4}, 0)
    assert set(seen) == {A}
    assert offsets(store) == {0: 6, 1: 4}
