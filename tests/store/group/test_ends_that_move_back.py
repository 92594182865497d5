"""A repair cuts the log between a look at the queues and the publication of offsets: none is beyond its queue's end."""

import logging
import shutil
from pathlib import Path

import pytest

import rmq_spark
from rmq_spark.store.backend import GroupTerms
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import StoreChangedError
from rmq_spark.store.format.own_files import Rebuild
from rmq_spark.store.format.record import Record
from rmq_spark.store.group import admin
from rmq_spark.store.group import final_commit as last_words
from rmq_spark.store.group.final_commit import commit_final_offsets
from rmq_spark.store.group.group_session import GroupSession
from rmq_spark.store.group.offset_file import SeenEnds, stamp_of_ends
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.rebuild import write_rebuild
from rmq_spark.store.model import QueueKey

A, B = QueueKey("orders", 0), QueueKey("orders", 1)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with 10 messages in each of two queues."""
    path = tmp_path / "store"
    with rmq_spark.open_store(path, segment_bytes=1 << 16, queues=2) as messages:
        for number in range(20):
            messages.send("orders", f"{number:03d}", queue_id=number % 2)
    return path


def cut(path: Path) -> None:
    """Damage the seventh message of each queue, and have a repair cut the log there: 6 of each stay."""
    log = CommitLog((str(path / "commitlog"),), mapped=False)
    place = 0
    for _ in range(12):
        record = log.record_at(place)
        assert isinstance(record, Record)
        place += record.total_size
    log.close()
    segment = path / "commitlog" / f"{0:020d}"
    data = bytearray(segment.read_bytes())
    data[place : place + 100] = b"\x7f" * 100
    segment.write_bytes(data)
    plan = rmq_spark.plan_repair(path, cut_log=True)
    assert rmq_spark.repair(plan, accept_loss=True).report.is_healthy
    with rmq_spark.open_reader(path) as reader:
        assert [reader.bounds(queue).max_offset for queue in (A, B)] == [6, 6]


def offsets(store: Path) -> dict[int, int]:
    return rmq_spark.group_offsets(store, "g").get("orders", {})


def test_query_publishes_the_end_of_a_queue_that_became_shorter(store: Path) -> None:
    query = GroupSession(str(store), GroupTerms("g"), lambda: stamp_of_ends(str(store)))
    query.rebalance([A, B], {}, None)
    query.publish({A: 4, B: 5})
    cut(store)
    query.publish({A: 10, B: 6})
    assert offsets(store) == {0: 6, 1: 6}
    query.rebalance([A, B], {}, None)
    query.publish({A: 5, B: 6})
    assert offsets(store) == {0: 5, 1: 6}
    query.leave({})


def test_queue_that_is_let_go_is_published_within_its_end(store: Path) -> None:
    query = GroupSession(str(store), GroupTerms("g"), lambda: stamp_of_ends(str(store)))
    query.rebalance([A, B], {}, None)
    cut(store)
    query.leave({A: 10, B: 3})
    assert offsets(store) == {0: 6, 1: 3}


def test_beginning_of_a_group_is_within_the_end(store: Path) -> None:
    query = GroupSession(str(store), GroupTerms("g"), lambda: stamp_of_ends(str(store)))
    query.rebalance([A, B], {}, None)
    cut(store)
    query.begin({A: 10, B: 10})
    assert offsets(store) == {0: 6, 1: 6}
    query.leave({})


def test_pull_consumer_commits_the_end_of_a_queue_that_became_shorter(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with rmq_spark.open_consumer(store, "g") as consumer:
        consumer.update_consume_offset(A, 10)
        consumer.update_consume_offset(B, 2)
        cut(store)
        with caplog.at_level(logging.WARNING):
            assert consumer.commit() == {A: 6, B: 2}
        assert "the offset 10 of consumer group g in queue orders/0 is beyond the queue's end" in caplog.text
        assert consumer.fetch_consume_offset(A) == 6
        assert offsets(store) == {0: 6, 1: 2}
        consumer.update_consume_offset(A, 100)
        assert consumer.commit() == {A: 100}, "as in RocketMQ"


def test_last_offsets_are_published_within_the_end(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query = GroupSession(str(store), GroupTerms("g"))
    query.rebalance([A, B], {}, None)
    reached = last_words._reached

    def look_and_cut(*given: object) -> object:
        found = reached(*given)  # type: ignore[arg-type]
        cut(store)
        return found

    monkeypatch.setattr(last_words, "_reached", look_and_cut)
    assert not commit_final_offsets(store, "g", query.member_id, {A: 10, B: 4}, 0)
    assert offsets(store) == {0: 6, 1: 4}
    query.leave({})


def test_reset_to_an_end_that_moved_back_changes_nothing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = admin.find_targets

    def look_and_cut(*given: object) -> object:
        found = find(*given)  # type: ignore[arg-type]
        cut(store)
        return found

    monkeypatch.setattr(admin, "find_targets", look_and_cut)
    with pytest.raises(StoreChangedError, match="Call it again"):
        rmq_spark.reset_offsets(store, "g", "latest", "orders")
    assert offsets(store) == {}
    monkeypatch.undo()
    assert rmq_spark.reset_offsets(store, "g", "latest", "orders") == {"orders": {0: 6, 1: 6}}


def test_queue_whose_end_nobody_knows_is_left_out(store: Path) -> None:
    ends = SeenEnds(str(store), None)
    assert ends.within({A: 10, B: 7}) == {A: 10, B: 7}
    assert not ends.corrected
    write_rebuild(Disk(), str(store), Rebuild(frozenset([A])))
    assert ends.within({A: 10, B: 17}) == {B: 10}
    assert ends.corrected == {A, B}
    shutil.rmtree(store / "consumequeue/orders/1")
    assert ends.within({A: 0, B: 1, QueueKey("other", 0): 0}) == {A: 0, QueueKey("other", 0): 0}
    assert ends.corrected == {B}


def test_unchanged_store_is_not_looked_at(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = stamp_of_ends(str(store))
    with rmq_spark.open_store(store) as messages:
        messages.send("orders", "more", queue_id=0)
    monkeypatch.setattr("rmq_spark.store.group.offset_file._end_of", lambda *_: pytest.fail("a queue is looked at"))
    assert SeenEnds(str(store), stamp).within({A: 11}) == {A: 11}
