"""Orderly queries that are members of a consumer group in a cluster in this process: locks, and what waits for them."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from group_queries import GROUP, OTHER, Query, add_other, commit, remove_other, two_brokers

from rmq_spark.store.cluster.backend import ClusterBackend
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.group_session import ClusterGroupSession
from rmq_spark.store.errors import BackendUnavailableError, GroupConflictError
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import RunningCluster, faults
from rmq_spark.store.testing.brokers.wire import QueueId

RETRY = f"%RETRY%{GROUP}"


@pytest.fixture(params=["5.3", "4.9"])
def cluster(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunningCluster]:
    with two_brokers(tmp_path, request.param, monkeypatch) as cluster:
        yield cluster


def test_orderly_AvailableNow_leaves_no_locks(cluster: RunningCluster) -> None:
    with Query(cluster, orderly="true") as query:
        query.reader.prepareForTriggerAvailableNow()
        assert query.trigger() == {"a": (0, 10), "b": (0, 10)}
        assert query.trigger() == {}
        assert [cluster.loop.run(broker.locks.is_orderly, GROUP) for broker in cluster.brokers.values()] == [False] * 2


@pytest.mark.parametrize("is_locked", [True, False], ids=["another member has the lock", "nobody has the lock"])
def test_orderly_query_plans_only_queues_that_it_has_locked(cluster: RunningCluster, is_locked: bool) -> None:
    if is_locked:
        cluster.loop.run(cluster.brokers["broker-b"].locks.lock, GROUP, [QueueId("orders", "broker-b", 0)], OTHER)
    with Query(cluster, orderly="true") as query:
        found = query.trigger()
        assert found == ({"a": (0, 10)} if is_locked else {"a": (0, 10), "b": (0, 10)})


def test_fences_of_a_batch_ask_for_the_owned_queues_once(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Query(cluster, orderly="true") as query:
        query.trigger()
        asked, epochs = [], ClusterGroupSession.epochs
        monkeypatch.setattr(
            ClusterGroupSession, "epochs", property(lambda own: (asked.append(own), epochs.fget(own))[1])
        )
        queues = [QueueKey("orders", 0, broker) for broker in ("broker-a", "broker-b")]
        fences = query.reader._group.fences(queues)
        assert {queue: fence.epoch for queue, fence in fences.items()} == dict.fromkeys(queues, 0)
        assert len(asked) == 1, "each look at the epochs of a member copies them all"


def expire_locks(cluster: RunningCluster, query: Query) -> list[float]:
    """Let the locks of others expire at the third pause of the query for them. Return the pauses, which follow."""
    pauses: list[float] = []

    def sleep(duration_s: float) -> None:
        pauses.append(duration_s)
        if len(pauses) == 3:
            for broker in cluster.brokers.values():
                cluster.loop.run(broker.locks.held.clear)

    query.reader._sleep = query.reader._group._lock_wait._sleep = sleep
    return pauses


def test_task_of_an_orderly_query_fails_if_another_member_has_the_lock(cluster: RunningCluster) -> None:
    with Query(cluster, orderly="true") as query:
        start = json.loads(query.committed)
        end = query.reader.latestOffset(start, query.reader.getDefaultReadLimit())
        assert len(read(query.reader, start, end)) == 20
        locks = cluster.brokers["broker-b"].locks
        cluster.loop.run(locks.held.clear)
        cluster.loop.run(locks.lock, GROUP, [QueueId("orders", "broker-b", 0)], OTHER)
        with pytest.raises(GroupConflictError, match="does not give the lock of queue orders/broker-b:0 to "):
            read(query.reader, start, end)


@pytest.mark.parametrize("is_back", [True, False], ids=["the broker answers again", "it does not"])
def test_task_of_an_orderly_query_waits_for_a_broker_as_long_as_a_lock_lives(
    cluster: RunningCluster, is_back: bool
) -> None:
    with Query(cluster, orderly="true") as query:
        query.trigger()
        queue = QueueKey("orders", 0, "broker-b")
        fence = query.reader._group.fences([queue])[queue]
        cluster.brokers["broker-b"].fail(
            RequestCode.LOCK_BATCH_MQ, faults.with_code(14, "service not available"), times=3 if is_back else None
        )
        pauses: list[float] = []
        address = query.reader._view.backend.location
        backend = ClusterBackend(address, monotonic_ms=lambda: sum(pauses) * 1000, sleep=pauses.append)
        with closing(backend):
            backend.refresh()
            backend.queues(["orders"])
            if is_back:
                backend.check_fence(fence, queue)
                assert pauses == [1.0] * 3
                return
            with pytest.raises(BackendUnavailableError, match="cannot lock queue orders/broker-b:0 for "):
                backend.check_fence(fence, queue)
            assert pauses == [1.0] * 60


def test_orderly_query_that_repeats_a_batch_waits_for_the_locks_of_its_earlier_run(cluster: RunningCluster) -> None:
    with Query(cluster, orderly="true") as query:
        start = json.loads(query.committed)
        end = query.reader.latestOffset(start, query.reader.getDefaultReadLimit())
    with Query(cluster, orderly="true") as query:
        pauses = expire_locks(cluster, query)
        assert len(read(query.reader, start, end)) == 20
        assert pauses == [1.0] * 3


def test_orderly_AvailableNow_waits_for_locks(cluster: RunningCluster, caplog: pytest.LogCaptureFixture) -> None:
    for broker in ("broker-a", "broker-b"):
        cluster.loop.run(cluster.brokers[broker].locks.lock, GROUP, [QueueId("orders", broker, 0)], OTHER)
    with Query(cluster, orderly="true") as query:
        query.reader.prepareForTriggerAvailableNow()
        pauses = expire_locks(cluster, query)
        assert query.trigger() == {"a": (0, 10), "b": (0, 10)}
        assert pauses == [1.0] * 3
        lines = [line for line in caplog.messages if "are locked by another member, or by an earlier run" in line]
        assert len(lines) == 1


def lock_for_other(cluster: RunningCluster, broker: str) -> None:
    """Give the lock of the broker's queue to the other member, and no lock of another queue to anybody."""
    unlock_all(cluster)
    assert cluster.loop.run(cluster.brokers[broker].locks.lock, GROUP, [QueueId("orders", broker, 0)], OTHER)


def unlock_all(cluster: RunningCluster) -> None:
    for broker in cluster.brokers.values():
        cluster.loop.run(broker.locks.held.clear)


def plan(cluster: RunningCluster, count: int = 4) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return begin and end of the second batch of a query that dies after it has planned the batch."""
    with Query(cluster, orderly="true", maxOffsetsPerQueue=str(count)) as query:
        assert query.trigger() == {"a": (0, count), "b": (0, count)}
        start = json.loads(query.committed)
        end = query.reader.latestOffset(start, query.reader.getDefaultReadLimit())
    assert end["orders"] == {"broker-a:0": 2 * count, "broker-b:0": 2 * count}
    unlock_all(cluster)  # 60 s later
    return start, end


def count_pauses(query: Query) -> list[float]:
    """Let the query pause without a wait. Return the pauses in s, which follow."""
    pauses: list[float] = []
    wait = query.reader._group._lock_wait
    wait._sleep = pauses.append
    wait._monotonic_ms = lambda: sum(pauses) * 1000
    return pauses


def left_out(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "the repeated batch leaves out" in line]


@pytest.mark.parametrize("offset", [5, 8, 10], ids=["within the batch", "its end", "after it"])
def test_orderly_query_repeats_a_batch_without_the_queue_that_another_member_reads(
    cluster: RunningCluster, caplog: pytest.LogCaptureFixture, offset: int
) -> None:
    start, end = plan(cluster)
    add_other(cluster)
    lock_for_other(cluster, "broker-b")
    commit(cluster, "broker-b", offset)
    with Query(cluster, json.dumps(end), orderly="true") as query:
        pauses = count_pauses(query)
        assert ranges(query, start, end) == {"a": (4, 8)}
        assert ranges(query, start, end) == {"a": (4, 8)}
        assert pauses == []  # the other member has the right to the queue
        (line,) = left_out(caplog)
        assert "4 messages of 1 queue that other members of consumer group billing have locked: " in line
        assert f"orders/broker-b:0 [4, 8) where the group is at {offset}." in line
        assert query.until("a") == {"a": (8, 10)}
        remove_other(cluster)
        unlock_all(cluster)
        cluster.advance("orders", 1, broker="broker-b")
        assert query.until("b") == {"b": (offset, 11)}


def test_orderly_query_that_stops_after_such_a_batch_begins_at_the_groups_offset(cluster: RunningCluster) -> None:
    start, end = plan(cluster)
    add_other(cluster)
    lock_for_other(cluster, "broker-b")
    commit(cluster, "broker-b", 5)
    with Query(cluster, json.dumps(end), orderly="true") as query:
        assert ranges(query, start, end) == {"a": (4, 8)}
    remove_other(cluster)
    unlock_all(cluster)
    with Query(cluster, json.dumps(end), orderly="true") as query:
        assert query.trigger() == {"a": (8, 10), "b": (5, 10)}


def test_orderly_query_waits_for_a_queue_of_its_share_and_leaves_it_out_then(
    cluster: RunningCluster, caplog: pytest.LogCaptureFixture
) -> None:
    start, end = plan(cluster)
    lock_for_other(cluster, "broker-b")
    commit(cluster, "broker-b", 6)
    with Query(cluster, json.dumps(end), orderly="true") as query:
        pauses = count_pauses(query)
        assert ranges(query, start, end) == {"a": (4, 8)}
        assert len(pauses) == 70
        assert len(left_out(caplog)) == 1


@pytest.mark.parametrize("offset", [0, 3, 4], ids=["published", "before the batch", "its begin"])
def test_orderly_query_does_not_leave_out_what_nobody_else_is_known_to_read(
    cluster: RunningCluster, caplog: pytest.LogCaptureFixture, offset: int
) -> None:
    start, end = plan(cluster)
    add_other(cluster)
    lock_for_other(cluster, "broker-b")
    commit(cluster, "broker-b", offset)
    with Query(cluster, json.dumps(end), orderly="true") as query:
        pauses = count_pauses(query)
        text = f"begins in queue orders/broker-b:0 at 4, .*The group is at {offset} there; expected an offset after 4"
        with pytest.raises(GroupConflictError, match=text):
            query.reader.partitions(start, end)
        assert len(pauses) == 70
        with pytest.raises(GroupConflictError, match=text):
            query.reader.partitions(start, end)
        assert left_out(caplog) == []
    lock_for_other(cluster, "broker-b")
    commit(cluster, "broker-b", 7)
    with Query(cluster, json.dumps(end), orderly="true") as query:
        assert ranges(query, start, end) == {"a": (4, 8)}


def test_orderly_query_leaves_nothing_out_for_an_offset_that_it_has_published_itself(cluster: RunningCluster) -> None:
    start, end = plan(cluster)
    end["@"]["published"]["orders"]["broker-b:0"] = [9, 4]  # the batch follows a reset from 9 to 4
    lock_for_other(cluster, "broker-b")
    commit(cluster, "broker-b", 9)
    with Query(cluster, json.dumps(end), orderly="true") as query:
        count_pauses(query)
        with pytest.raises(GroupConflictError, match="The group is at 9 there"):
            query.reader.partitions(start, end)


def test_orderly_query_that_repeats_a_batch_takes_a_free_queue_of_another_share(cluster: RunningCluster) -> None:
    start, end = plan(cluster)
    add_other(cluster)
    commit(cluster, "broker-b", 7)
    with Query(cluster, json.dumps(end), orderly="true") as query:
        assert ranges(query, start, end) == {"a": (4, 8), "b": (4, 8)}


def ranges(query: Query, start: dict[str, Any], end: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Plan a batch, read it as tasks do, and return the range of each broker's queue in it."""
    parts = query.reader.partitions(start, end)
    for part in parts:
        assert sum(batch.num_rows for batch in query.reader.read(part)) == sum(one.count for one in part.pieces)
    return {one.queue.broker[-1]: (one.begin, one.end) for part in parts for one in part.pieces}


def test_orderly_query_does_not_wait_for_locks_of_queues_that_it_need_not_read(
    cluster: RunningCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.create_topic(RETRY, queues=1)
    retry = cluster.brokers["broker-a"].locks
    with Query(cluster, orderly="true") as query:
        start = json.loads(query.committed)
        end = query.reader.latestOffset(start, query.reader.getDefaultReadLimit())
    unlock_all(cluster)
    cluster.loop.run(retry.lock, GROUP, [QueueId(RETRY, "broker-a", 0)], "the earlier run")
    with Query(cluster, json.dumps(end), orderly="true") as query:
        pauses = count_pauses(query)
        assert ranges(query, start, end) == {"a": (0, 10), "b": (0, 10)}
        assert pauses == []
    unlock_all(cluster)
    cluster.loop.run(retry.lock, GROUP, [QueueId(RETRY, "broker-a", 0)], "the earlier run")
    cluster.advance("orders", 1, broker="broker-a")
    with Query(cluster, json.dumps(end), orderly="true") as query:
        query.reader.prepareForTriggerAvailableNow()
        pauses = count_pauses(query)
        assert query.trigger() == {"a": (10, 11)}
        assert pauses == []
    assert not [line for line in caplog.messages if "locked" in line]


def read(reader: Any, start: dict[str, Any], end: dict[str, Any]) -> list[bytes]:
    """Plan a batch and read it as tasks do."""
    parts = reader.partitions(start, end)
    return [row for part in parts for batch in reader.read(part) for row in batch.column("body").to_pylist()]
