"""`commit_final_offsets`: it commits the last offsets of a query and no offset of another consumer."""

import errno
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import rmq_spark
from rmq_spark.store.backend import GroupTerms
from rmq_spark.store.disk.locks import FileLock
from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.format.config_json import ConsumerOffsets, decode_consumer_offsets
from rmq_spark.store.group import final_commit as last_words
from rmq_spark.store.group import offset_file
from rmq_spark.store.group.final_commit import commit_final_offsets
from rmq_spark.store.group.group_files import GroupPaths, read_finished_batch, read_planned_batch
from rmq_spark.store.group.group_session import GroupSession
from rmq_spark.store.group.resets import read_resets, write_outcomes
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.model import CommitKey, QueueKey, Suspension
from rmq_spark.store.testing.failing_disk import FailingDisk

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
def ended(store: Path) -> Iterator[GroupSession]:
    """A query that had both queues, and published that it finished 4 messages of each."""
    query = GroupSession(str(store), GroupTerms("g"))
    query.rebalance([A, B], {}, None)
    query.publish({A: 4, B: 4})
    yield query
    query.leave({})


def offsets(store: Path) -> dict[int, int]:
    return rmq_spark.group_offsets(store, "g")["orders"]


def test_commit_final_offsets_commits_the_last_batch(store: Path, ended: GroupSession) -> None:
    assert commit_final_offsets(store, "g", ended.member_id, {A: 6, B: 4}, 0)
    assert offsets(store) == {0: 6, 1: 4}


def test_commit_final_offsets_keeps_higher_committed_offsets(store: Path, ended: GroupSession) -> None:
    with rmq_spark.open_consumer(store, "g") as consumer:
        consumer.update_consume_offset(A, 9)
    assert commit_final_offsets(store, "g", ended.member_id, {A: 6, B: 6}, 0)
    assert offsets(store) == {0: 9, 1: 6}


def test_commit_final_offsets_decodes_each_version_of_the_file_once(
    store: Path, ended: GroupSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = (store / "config/consumerOffset.json").read_bytes()
    decoded, reached = [], last_words._reached

    def count(data: bytes) -> ConsumerOffsets:
        decoded.append(data)
        return decode_consumer_offsets(data)

    with monkeypatch.context() as patch:
        patch.setattr(offset_file, "decode_consumer_offsets", count)
        assert commit_final_offsets(store, "g", ended.member_id, {A: 5, B: 4}, 0)
        assert decoded.count(held) == 1, "the file was the same at the second look"

    def look(root: str, log: str | None, moved: Mapping[QueueKey, int]) -> set[QueueKey]:
        with rmq_spark.open_consumer(store, "g") as consumer:
            consumer.update_consume_offset(A, 9)
        return reached(root, log, moved)

    monkeypatch.setattr(last_words, "_reached", look)
    assert commit_final_offsets(store, "g", ended.member_id, {A: 6, B: 6}, 0)
    assert offsets(store) == {0: 9, 1: 6}


def test_commit_final_offsets_keeps_resets_that_were_not_applied(store: Path, ended: GroupSession) -> None:
    rmq_spark.reset_offsets(store, "g", {"orders": {0: 1}})
    number = read_resets(GroupPaths(str(store), "g").resets).number
    assert commit_final_offsets(store, "g", ended.member_id, {A: 6, B: 6}, number - 1)
    assert offsets(store) == {0: 1, 1: 6}
    assert commit_final_offsets(store, "g", ended.member_id, {A: 3, B: 6}, number), "it applied that one"
    assert offsets(store) == {0: 3, 1: 6}


def test_commit_final_offsets_omits_queues_of_other_members(store: Path, ended: GroupSession) -> None:
    ended.leave({A: 4, B: 4})
    other = GroupSession(str(store), GroupTerms("g"))
    other.rebalance([A], {}, None)
    assert not commit_final_offsets(store, "g", ended.member_id, {A: 6, B: 6}, 0)
    assert offsets(store) == {0: 4, 1: 4}
    other.leave({})


def test_commit_final_offsets_omits_queues_that_end_below_the_offset(store: Path, ended: GroupSession) -> None:
    assert commit_final_offsets(store, "g", ended.member_id, {A: 16, B: 10}, 0)
    assert offsets(store) == {0: 4, 1: 10}, "messages that are stored later, up to 16, are not skipped"
    shutil.rmtree(store / "consumequeue" / "orders" / "0")
    commit_final_offsets(store, "g", ended.member_id, {A: 6, B: 10}, 0)
    assert offsets(store) == {0: 4, 1: 10}, "where A ends cannot be told"


def test_commit_final_offsets_uses_commit_log_path(store: Path, ended: GroupSession, tmp_path: Path) -> None:
    (store / "commitlog").rename(tmp_path / "log")
    log = str(tmp_path / "log")
    assert commit_final_offsets(store, "g", ended.member_id, {A: 6, B: 4}, 0, commit_log_path=log)


def test_commit_final_offsets_commits_nothing_while_a_broker_runs(store: Path, ended: GroupSession) -> None:
    lock = FileLock(str(store / "lock"))
    assert lock.try_take(), "as a broker does"
    assert not commit_final_offsets(store, "g", ended.member_id, {A: 6, B: 6}, 0)
    lock.release()
    assert offsets(store) == {0: 4, 1: 4}


@pytest.fixture(params=["all", "shared"])
def planned(store: Path, request: pytest.FixtureRequest) -> Iterator[GroupSession]:
    """A query whose second batch reads A again from 2, where a listener stopped the first one. Both have ended."""
    query = GroupSession(str(store), GroupTerms("g", request.param))
    for begin in ({A: 0, B: 0}, {A: 2, B: 10}):
        query.rebalance([A, B], begin, None)
        query.publish(begin)
        query.settle(is_batch=True)
        outcome = Suspension(2) if begin[A] == 0 else None
        write_outcomes(str(store), "g", CommitKey("query", query.batches - 1), {A: outcome})
    yield query
    query.leave({})


def test_commit_final_offsets_ignores_a_late_event_of_an_older_batch(store: Path, planned: GroupSession) -> None:
    member, root = planned.member_id, str(store)
    first, second = CommitKey("query", 0), CommitKey("query", 1)
    assert not commit_final_offsets(root, "g", member, {A: 10, B: 10}, 0, 0, first, finished_batch=1)
    assert offsets(store) == {0: 2, 1: 10}
    assert read_finished_batch(planned.paths, member) == 0
    assert commit_final_offsets(root, "g", member, {A: 5, B: 10}, 0, 1, second, finished_batch=2)
    assert offsets(store) == {0: 5, 1: 10}
    assert read_finished_batch(planned.paths, member) == 2


def test_commit_final_offsets_does_not_record_a_batch_below_committed_offsets(
    store: Path, planned: GroupSession
) -> None:
    with rmq_spark.open_consumer(store, "g") as consumer:
        consumer.update_consume_offset(A, 9)
    batch = CommitKey("query", 1)
    commit_final_offsets(str(store), "g", planned.member_id, {A: 5, B: 10}, 0, 1, batch, finished_batch=2)
    assert offsets(store) == {0: 9, 1: 10}
    assert read_finished_batch(planned.paths, planned.member_id) == 0


def test_commit_final_offsets_records_a_batch_beside_a_reset(store: Path, planned: GroupSession) -> None:
    rmq_spark.reset_offsets(store, "g", {"orders": {0: 1}})
    batch = CommitKey("query", 1)
    commit_final_offsets(str(store), "g", planned.member_id, {A: 5, B: 10}, 0, 1, batch, finished_batch=2)
    assert offsets(store) == {0: 1, 1: 10}
    assert read_finished_batch(planned.paths, planned.member_id) == 2


def test_planned_batch_is_removed_with_its_member(store: Path) -> None:
    query = GroupSession(str(store), GroupTerms("g"))
    query.rebalance([A, B], {}, None)
    assert read_planned_batch(query.paths, query.member_id) == 0
    query.settle(is_batch=False)
    assert read_planned_batch(query.paths, query.member_id) == 0
    query.settle(is_batch=True)
    assert read_planned_batch(query.paths, query.member_id) == 1
    query.leave({})
    assert list(Path(query.paths.members).iterdir()) == []


def test_planned_batch_reports_read_and_write_errors(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    for kind in ("all", "shared"):
        query = GroupSession(str(store), GroupTerms(f"of-{kind}", kind))  # type: ignore[arg-type]
        query.rebalance([A, B], {}, None)
        query._disk = FailingDisk(0, errno.ENOSPC)
        if kind == "all":
            query.settle(is_batch=True)
            assert "group offsets are not published" in caplog.text
        else:
            with pytest.raises(StoreError):
                query.settle(is_batch=True)
        Path(query.paths.planned_batch(query.member_id)).write_text("{")
        with pytest.raises(DamageError, match="planned batch"):
            commit_final_offsets(store, f"of-{kind}", query.member_id, {A: 6}, 0, finished_batch=1)
        query.leave({})


def test_commit_final_offsets_reads_only_queues_with_new_offsets(
    store: Path, ended: GroupSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[QueueKey] = []
    find = TopicTable.find

    def noted(self: TopicTable, key: QueueKey) -> object:
        seen.append(key)
        return find(self, key)

    def refuse(_: object) -> None:
        raise AssertionError("lists all queues of the store")

    monkeypatch.setattr(TopicTable, "find", noted)
    monkeypatch.setattr(TopicTable, "refresh", refuse)
    monkeypatch.setattr(StoreReader, "refresh", refuse)
    assert commit_final_offsets(store, "g", ended.member_id, {A: 6, B: 4}, 0)
    assert set(seen) == {A}
    assert offsets(store) == {0: 6, 1: 4}
