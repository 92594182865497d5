"""A query of a group in a store that cannot be written now: it reads, and publishes when it can again."""

import errno
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark.store.disk.locks import FileLock
from rmq_spark.store.disk.system_calls import SystemCalls
from rmq_spark.store.errors import DiskFullError, LockTimeoutError, StoreError, StorePathError
from rmq_spark.store.group import group_files as group_paths
from rmq_spark.store.group.group_files import GroupPaths

GROUP = {"consumerGroup": "billing"}


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next trigger, even an idle one, retries an offset that could not be published."""
    monkeypatch.setattr("rmq_spark.store.group.group_session._RETRY_S", 0.0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """A store with 3 messages in queue 0 of the topic orders."""
    path = tmp_path / "store"
    with rmq_spark.open_store(path, segment_bytes=1 << 20) as writer:
        writer.create_topic("orders", 1)
        for _ in range(3):
            writer.send("orders", "x", queue_id=0)
    return path


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that has all that makes files in a group's folder and in config/ fail, with 0 no more."""
    real, why = SystemCalls.create, [0]

    def create(self: SystemCalls, path: str, size_bytes: int, **owner: Any) -> None:
        if why[0] and ("groups" in path or "config" in path):
            raise OSError(why[0], os.strerror(why[0]))
        real(self, path, size_bytes, **owner)

    monkeypatch.setattr(SystemCalls, "create", create)
    return lambda code: why.__setitem__(0, code)


def offsets(store: Path) -> dict[int, int]:
    return rmq_spark.group_offsets(store, "billing").get("orders", {})


@pytest.mark.parametrize("why", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fills_up_or_fails_ends_no_query_that_only_reads(store, query_on, fail, caplog, why) -> None:
    query = query_on(store, **GROUP, startingOffsets="earliest", maxOffsetsPerTrigger="1")
    query.trigger()
    fail(why)
    with caplog.at_level(logging.WARNING):
        assert len(query.drain()) == 2
    assert offsets(store) == {}
    assert caplog.text.count("group offsets are not published, they stay in the checkpoint") == 1
    fail(0)
    query.plan()
    assert offsets(store) == {0: 3}


@pytest.mark.parametrize("why", [errno.ENOSPC, errno.EIO])
def test_a_query_that_cannot_join_for_now_reads_and_is_a_member_later(store, query_on, fail, caplog, why) -> None:
    fail(why)
    query = query_on(store, **GROUP, startingOffsets="earliest", maxOffsetsPerTrigger="2", orderly="true")
    with caplog.at_level(logging.WARNING):
        assert query.drain() == [[(0, 0), (0, 1)], [(0, 2)]]
    assert caplog.text.count("does not join the consumer group billing") == 1
    assert query.reader._group.query.is_outside
    fail(0)
    query.plan()
    assert not query.reader._group.query.is_outside
    assert offsets(store) == {0: 3}
    with pytest.raises(rmq_spark.GroupConflictError):
        query_on(store, **GROUP).reader._group.query._membership.rejoin()


def test_where_a_group_stands_is_where_a_query_begins_that_cannot_join(store, query_on, fail) -> None:
    first = query_on(store, **GROUP, startingOffsets="earliest", maxOffsetsPerTrigger="2")
    first.trigger()
    first.plan()
    assert offsets(store) == {0: 2}
    first.reader._group.query.leave({})
    fail(errno.ENOSPC)
    query = query_on(store, **GROUP, startingOffsets="group")
    assert query.drain() == [[(0, 2)]]
    fail(0)
    query.plan()
    assert offsets(store) == {0: 3}


def test_the_checkpoint_still_wins_when_a_query_joins_late(store, query_on, fail) -> None:
    with rmq_spark.open_consumer(store, "billing") as consumer:
        consumer.update_consume_offset(consumer.queues("orders")[0], 3)
    checkpoint = json.dumps({"orders": {"0": 0}, "@": {"v": 1, "start": {}}})
    fail(errno.ENOSPC)
    query = query_on(store, checkpoint, **GROUP, maxOffsetsPerTrigger="1")
    assert query.trigger() == [(0, 0)]
    fail(0)
    assert query.drain() == [[(0, 1)], [(0, 2)]]


def test_a_claim_that_cannot_be_written_is_made_later(store, query_on, monkeypatch) -> None:
    from rmq_spark.store.group import assignment

    real = assignment.write_claims

    def full(*args: object) -> None:
        raise DiskFullError("no room")

    monkeypatch.setattr(assignment, "write_claims", full)
    query = query_on(store, **GROUP, startingOffsets="earliest", maxOffsetsPerTrigger="2", orderly="true")
    assert query.trigger() == [(0, 0), (0, 1)]
    monkeypatch.setattr(assignment, "write_claims", real)
    assert query.trigger() == [(0, 2)]
    query.plan()
    assert offsets(store) == {0: 3}
    assert list(query.reader._group.query.epochs.values()) == [1]


def test_a_group_whose_turn_is_not_to_be_had_is_read_all_the_same(store, query_on, caplog, monkeypatch) -> None:
    query = query_on(store, **GROUP, startingOffsets="earliest", maxOffsetsPerTrigger="1")
    query.trigger()
    monkeypatch.setattr(query.reader._group.query._membership.lock, "_timeout_ms", 1)
    turn = FileLock(GroupPaths(str(store), "billing").turn)
    assert turn.try_take()
    with caplog.at_level(logging.WARNING):
        assert len(query.drain()) == 2
    assert caplog.text.count(f"another process keeps {turn.path} locked") == 1
    turn.release()
    query.plan()
    assert offsets(store) == {0: 3}


@pytest.mark.parametrize("given", [{"commitOffsets": "required"}, {"assignment": "shared"}])
def test_who_must_publish_fails(store, query_on, fail, monkeypatch, given) -> None:
    options = GROUP | given | ({} if "assignment" in given else {"startingOffsets": "earliest"})
    query = query_on(store, **options, maxOffsetsPerTrigger="1")
    query.trigger()
    fail(errno.ENOSPC)
    with pytest.raises(DiskFullError):
        query.drain()
    fail(0)
    query.reader._group.query.leave({})
    fail(errno.ENOSPC)
    with pytest.raises(DiskFullError):
        query_on(store, **options).trigger()
    monkeypatch.setattr(group_paths, "TURN_TIMEOUT_MS", 1)
    turn = FileLock(GroupPaths(str(store), "billing").turn)
    assert turn.try_take()
    late = query_on(store, **options)
    late.reader._group.query._membership.lock._timeout_ms = 1
    with pytest.raises(LockTimeoutError, match="locked"):
        late.trigger()
    turn.release()


def test_who_must_publish_and_may_not_write_fails_each_time(store, query_on, fail) -> None:
    fail(errno.EACCES)
    query = query_on(store, **GROUP, assignment="shared")
    for _ in range(2):
        with pytest.raises(StorePathError, match="Permission denied"):
            query.trigger()
    fail(0)
    assert query.drain() == [[(0, 0), (0, 1), (0, 2)]]


def test_too_many_open_files_leave_nobody_outside(store, query_on, fail) -> None:
    fail(errno.EMFILE)
    query = query_on(store, **GROUP, startingOffsets="earliest")
    with pytest.raises(StoreError, match="Too many open files"):
        query.trigger()
    fail(0)
    assert query.drain() == [[(0, 0), (0, 1), (0, 2)]]
    assert not query.reader._group.query.is_outside


def test_offsets_that_a_broker_took_back_when_it_ended_are_published_by_the_next_trigger(store, query_on) -> None:
    query = query_on(store, **GROUP, startingOffsets="earliest")
    query.drain()
    assert offsets(store) == {0: 3}
    query.plan()
    (store / "config" / "consumerOffset.json").write_text('{"offsetTable":{"orders@billing":{0:1}}}')
    query.plan()
    assert offsets(store) == {0: 3}
    before = (store / "config" / "consumerOffset.json").stat()
    query.plan()
    after = (store / "config" / "consumerOffset.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns), "once, not at every trigger"
    assert not query.reader._group.has_changed()
