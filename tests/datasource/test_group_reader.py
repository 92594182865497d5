"""The stream reader as a member of a consumer group: published offsets, start offsets and owned queues."""

import errno
import json
import logging
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rmq_spark
from rmq_spark.store.arrival import Polling
from rmq_spark.store.disk.locks import FileLock
from rmq_spark.store.errors import GroupConflictError, LockTimeoutError, OptionError, StoreError
from rmq_spark.store.group import group_session as query_group
from rmq_spark.store.model import QueueKey

GROUP = {"consumerGroup": "billing"}
SHARED = GROUP | {"assignment": "shared", "groupFallback": "earliest"}


class OurStore:
    """A store to which our program appends; it is not locked between two appends."""

    def __init__(self, path: Path, queues: int) -> None:
        self.path = path
        self._writer = rmq_spark.open_store(path, segment_bytes=1 << 20)
        self._writer.create_topic("orders", queues)

    def append(self, topic: str, queue_id: int = 0, count: int = 1) -> None:
        for number in range(count):
            self._writer.send(topic, f"{topic}/{queue_id}/{number}", queue_id=queue_id)

    def close(self) -> None:
        self._writer.close()


@pytest.fixture
def grow(tmp_path: Path) -> Iterator[Callable[..., OurStore]]:
    """A function that makes a store with the topic orders."""
    stores = []

    def make(queues: int = 1) -> OurStore:
        stores.append(OurStore(tmp_path / "ours", queues))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def store(grow) -> OurStore:
    """A store of the topic orders, with 3 messages in queue 0 and none in queue 1."""
    store = grow(queues=2)
    store.append("orders", 0, 3)
    return store


def offsets(store) -> dict[int, int]:
    """Return the group's offsets in the topic orders."""
    return rmq_spark.group_offsets(str(store.path), "billing").get("orders", {})


@pytest.fixture
def join(query_on) -> Iterator[Callable]:
    """A function that starts a query of the group on the store; all leave in the end, as processes do that die."""
    queries = []

    def start(path: Path, **options: str):
        queries.append(query_on(path, **options))
        return queries[-1]

    yield start
    for query in queries:
        leave(query)


def leave(query) -> None:
    """Let a query's process die, as far as others see it."""
    query.reader._group.query._membership.lease._lock.release()


def wait_until_death_shows() -> None:
    """Wait for as long as a member that died may still count as living."""
    time.sleep(0.25)


def test_what_a_batch_finished_is_published_by_the_next_trigger_and_never_what_it_only_planned(store, join) -> None:
    query = join(store.path, **GROUP, startingOffsets="earliest")
    query.plan()
    assert offsets(store) == {}
    query.trigger()
    assert offsets(store) == {}
    query.plan()
    assert offsets(store) == {0: 3, 1: 0}
    store.append("orders", 1, 2)
    query.plan()
    assert offsets(store) == {0: 3, 1: 0}


def test_an_available_now_run_publishes_its_last_batch_too(store, join) -> None:
    query = join(store.path, **GROUP, startingOffsets="earliest", available_now=True)
    query.drain()
    assert offsets(store) == {0: 3, 1: 0}


def test_a_group_begins_where_it_stands_and_a_new_one_at_the_first_message_of_a_young_topic(store, join) -> None:
    first = join(store.path, **GROUP, startingOffsets="group")
    assert first.drain() == [[(0, 0), (0, 1), (0, 2)]]
    leave(first)
    store.append("orders", 0, 2)
    second = join(store.path, **GROUP, startingOffsets="group")
    assert second.drain() == [[(0, 3), (0, 4)]]


def test_nothing_is_published_where_the_user_says_so(store, join) -> None:
    join(store.path, **GROUP, startingOffsets="earliest", commitOffsets="off").drain()
    assert offsets(store) == {}


def test_broadcasting_publishes_nothing_and_minds_nobody(store, query_on) -> None:
    options = GROUP | {"messageModel": "broadcasting", "startingOffsets": "earliest"}
    assert (
        query_on(store.path, **options).drain() == query_on(store.path, **options).drain() == [[(0, 0), (0, 1), (0, 2)]]
    )
    assert offsets(store) == {}


def test_a_second_query_that_reads_all_queues_is_refused_by_name(store, join, monkeypatch) -> None:
    monkeypatch.setattr("rmq_spark.store.group.membership.DYING_MS", 100)
    join(store.path, **GROUP, queryName="first").trigger()
    with pytest.raises(GroupConflictError, match='query "first"'):
        join(store.path, **GROUP).trigger()


def test_a_restart_goes_on_from_its_checkpoint_whatever_the_group_says(store, join, caplog) -> None:
    query = join(store.path, **GROUP, startingOffsets="earliest", maxOffsetsPerQueue="2")
    query.trigger()
    leave(query)
    rmq_spark.reset_offsets(store.path, "other", {"orders": {0: 3}})
    set_behind_the_back(store, 3)
    with caplog.at_level(logging.WARNING):
        again = join(store.path, **GROUP, checkpoint=query.committed)
        assert again.drain() == [[(0, 2)]]
    assert "is at 3 in queue orders/0" in caplog.text
    assert offsets(store) == {0: 3, 1: 0}


def set_behind_the_back(store, offset: int) -> None:
    """Set the group's offset as a RocketMQ tool does, of which our queries hear nothing."""
    path = store.path / "config" / "consumerOffset.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"offsetTable": {"orders@billing": {"0": offset, "1": 0}}}))


@pytest.mark.parametrize(("stands", "rows"), [(3, []), (1, [[(0, 1), (0, 2)]]), (2, [[(0, 2)]])])
def test_a_restart_goes_where_the_group_stands_if_asked(store, join, stands, rows) -> None:
    query = join(store.path, **GROUP, startingOffsets="earliest", maxOffsetsPerQueue="2")
    query.trigger()
    leave(query)
    set_behind_the_back(store, stands)
    again = join(store.path, **GROUP, checkpoint=query.committed, onOffsetConflict="group")
    assert [batch for batch in again.drain() if batch] == rows
    assert again.offset().positions == {QueueKey("orders", 0): 3, QueueKey("orders", 1): 0}


def test_a_restart_fails_if_asked_where_the_group_is_ahead(store, join) -> None:
    query = join(store.path, **GROUP, startingOffsets="earliest", maxOffsetsPerQueue="2")
    query.trigger()
    leave(query)
    set_behind_the_back(store, 3)
    with pytest.raises(GroupConflictError, match="is at 3 in queue orders/0, and this query's checkpoint at 2"):
        join(store.path, **GROUP, checkpoint=query.committed, onOffsetConflict="fail").trigger()


def test_a_reset_reaches_a_running_query_once_and_a_replay_reads_the_same(store, join) -> None:
    query = join(store.path, **GROUP, startingOffsets="earliest")
    query.drain()
    rmq_spark.reset_offsets(store.path, "billing", {"orders": {0: 1}})
    start, end = query.committed, query.plan()
    assert query.rows(start, end) == query.rows(start, end) == [(0, 1), (0, 2)]
    query.committed = end
    assert query.drain() == []
    assert offsets(store) == {0: 3, 1: 0}


def test_a_reset_forward_leaves_out_what_lies_between(store, join) -> None:
    query = join(store.path, **GROUP, startingOffsets="earliest", maxOffsetsPerQueue="1")
    assert query.trigger() == [(0, 0)]
    rmq_spark.reset_offsets(store.path, "billing", "latest", topics="orders")
    store.append("orders", 0, 1)
    assert [row for batch in query.drain() for row in batch] == [(0, 3)]


def test_a_reset_to_where_the_last_batch_ended_is_read_all_the_same(store, join) -> None:
    query = join(store.path, **GROUP, startingOffsets="earliest", maxOffsetsPerQueue="2")
    assert query.trigger() == [(0, 0), (0, 1)]
    rmq_spark.reset_offsets(store.path, "billing", "earliest", topics="orders")
    assert query.drain() == [[(0, 0), (0, 1)], [(0, 2)]]


def test_a_reset_is_applied_by_a_query_that_was_stopped_and_not_again_by_its_next_run(store, join) -> None:
    query = join(store.path, **GROUP, startingOffsets="earliest")
    query.drain()
    leave(query)
    rmq_spark.reset_offsets(store.path, "billing", "earliest", topics="orders")
    again = join(store.path, **GROUP, checkpoint=query.committed)
    assert again.drain() == [[(0, 0), (0, 1), (0, 2)]]
    leave(again)
    assert join(store.path, **GROUP, checkpoint=again.committed).drain() == []


@pytest.mark.parametrize("conflict", ["checkpoint", "group", "fail"])
def test_a_reset_counts_whatever_is_said_of_offsets_that_differ(store, join, caplog, conflict) -> None:
    query = join(store.path, **GROUP, startingOffsets="earliest", maxOffsetsPerQueue="1")
    query.trigger()
    leave(query)
    rmq_spark.reset_offsets(store.path, "billing", {"orders": {0: 2}}, None)
    again = join(store.path, **GROUP, checkpoint=query.committed, onOffsetConflict=conflict)
    assert [batch for batch in again.drain() if batch] == [[(0, 2)]]
    assert "is at" not in caplog.text


def test_two_queries_share_the_queues_and_hand_them_over(grow, query_on, join) -> None:
    store = grow(queues=4)
    for queue_id in range(4):
        store.append("orders", queue_id, 2)
    first = join(store.path, **SHARED)
    assert len([row for batch in first.drain() for row in batch]) == 8
    second = join(store.path, **SHARED)
    assert second.drain() == [[]]  # the first query still owns all queues
    for queue_id in range(4):
        store.append("orders", queue_id, 1)
    seen = [sorted(row for query in pair for batch in query.drain() for row in batch)
            for pair in ([first], [second])]  # fmt: skip
    assert sorted(seen[0] + seen[1]) == [(queue_id, 2) for queue_id in range(4)]
    assert len(seen[1]) == 2
    assert offsets(store) == dict.fromkeys(range(4), 3)


def test_who_dies_is_followed_from_where_it_published(grow, join) -> None:
    store = grow(queues=2)
    store.append("orders", 0, 5)
    store.append("orders", 1, 5)
    first, second = join(store.path, **SHARED, maxOffsetsPerQueue="2"), None
    first.trigger()
    first.plan()  # publishes 2 and 2
    leave(first)
    second = join(store.path, **SHARED)
    assert sorted(row for batch in second.drain() for row in batch) == [(q, n) for q in (0, 1) for n in (2, 3, 4)]


def test_a_queue_that_came_back_goes_on_where_the_other_left_it(grow, join) -> None:
    store = grow(queues=2)
    store.append("orders", 0, 1)
    store.append("orders", 1, 1)
    first = join(store.path, **SHARED)
    first.drain()
    second = join(store.path, **SHARED)
    second.trigger()
    first.drain()
    store.append("orders", 1, 2)
    theirs = [row for query in (second, first) for batch in query.drain() for row in batch]
    assert sorted(theirs) == [(1, 1), (1, 2)]
    second.drain()
    leave(second)
    store.append("orders", 0, 1)
    store.append("orders", 1, 1)
    wait_until_death_shows()
    assert sorted(row for batch in first.drain() for row in batch) == [(0, 1), (1, 3)]


def test_members_of_different_subscriptions_are_refused(store, join, monkeypatch) -> None:
    monkeypatch.setattr("rmq_spark.store.group.membership.DYING_MS", 100)
    store.append("payments", 0, 1)
    join(store.path, **SHARED).trigger()
    with pytest.raises(GroupConflictError, match=r'subscription is subscribe="orders,payments"'):
        join(store.path, **SHARED, subscribe="orders,payments").trigger()


def test_a_fenced_task_fails_when_its_queue_is_anothers(grow, join) -> None:
    store = grow(queues=1)
    store.append("orders", 0, 3)
    first = join(store.path, **SHARED, fenceLostQueues="true")
    start, end = first.committed, first.plan()
    assert first.rows(start, end) == [(0, 0), (0, 1), (0, 2)]
    leave(first)
    second = join(store.path, **SHARED)
    second.trigger()
    with pytest.raises(GroupConflictError, match="not the member"):
        first.rows(start, end)


def test_a_task_of_several_queues_in_order_checks_the_owner_of_each(grow, join, monkeypatch) -> None:
    monkeypatch.setattr("rmq_spark.datasource.spark.stream_reader.usable_cores", lambda: 1)
    store = grow(queues=2)
    for queue_id in (0, 1):
        store.append("orders", queue_id, 3)
    query = join(store.path, **SHARED, orderly="true")
    [planned] = query.reader.partitions(json.loads(query.committed), json.loads(query.plan()))
    partition = pickle.loads(pickle.dumps(planned))
    assert sorted(partition.fences) == [QueueKey("orders", 0), QueueKey("orders", 1)]
    assert sum(batch.num_rows for batch in query.reader.read(partition)) == 6
    for queue, fence in planned.fences.items():
        partition.fences = planned.fences | {queue: fence._replace(epoch=fence.epoch + 1)}
        with pytest.raises(GroupConflictError, match=f"{queue}"):
            list(query.reader.read(partition))


def test_a_repeated_batch_of_a_fenced_query_claims_its_queues_first(grow, join) -> None:
    store = grow(queues=2)
    store.append("orders", 0, 3)
    first = join(store.path, **SHARED, orderly="true")
    start, end = first.committed, first.plan()
    leave(first)
    again = join(store.path, **SHARED, orderly="true", checkpoint=start)
    assert again.rows(start, end) == [(0, 0), (0, 1), (0, 2)]
    again.committed = end
    store.append("orders", 1, 1)
    assert again.drain() == [[(1, 0)]]
    assert offsets(store) == {0: 3, 1: 1}


def test_a_waiting_trigger_is_woken_by_a_message(store, query_on) -> None:
    query = query_on(store.path, startingOffsets="earliest", longPollingMs="60s")
    query.drain_once = query.trigger()
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            store.append("orders", 1, 1)

    query.reader._view.backend._polling = Polling(lambda: 0.0, sleep)
    assert query.trigger() == [(1, 0)]
    assert len(looks) == 3


def test_a_waiting_trigger_ends_when_its_time_is_over(store, query_on) -> None:
    query = query_on(store.path, startingOffsets="earliest", longPollingMs="500ms")
    query.trigger()
    clock = [0.0]
    query.reader._monotonic_ms = lambda: clock[0]
    query.reader._view.backend._polling = Polling(
        lambda: clock[0], lambda seconds: clock.__setitem__(0, clock[0] + seconds * 1000)
    )
    assert query.trigger() is None
    assert clock[0] == pytest.approx(500)


def test_available_now_does_not_wait(store, query_on) -> None:
    query = query_on(store.path, startingOffsets="earliest", longPollingMs="60s", available_now=True)
    query.reader._view.backend._polling = None
    query.drain()


def test_a_store_that_cannot_be_written_is_read_all_the_same(store, join, caplog, monkeypatch) -> None:
    from rmq_spark.store.errors import StorePathError

    def refuse(self) -> None:
        raise StorePathError("read-only") from OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("rmq_spark.store.group.membership.Membership.join", refuse)
    with caplog.at_level(logging.WARNING):
        assert join(store.path, **GROUP, startingOffsets="earliest").drain() == [[(0, 0), (0, 1), (0, 2)]]
    assert caplog.text.count("does not join the consumer group billing") == 1
    assert join(store.path, **GROUP, startingOffsets="earliest", orderly="true").drain() == [[(0, 0), (0, 1), (0, 2)]]
    with pytest.raises(StorePathError):
        join(store.path, **GROUP, commitOffsets="required").trigger()


def test_queues_are_shared_only_where_their_offsets_can_be_published(store, join) -> None:
    lock = FileLock(str(store.path / "lock"))
    assert lock.try_take(), "as a broker does"
    try:
        with pytest.raises(LockTimeoutError, match="mqshutdown broker"):
            join(store.path, **SHARED).trigger()
        other = join(store.path, consumerGroup="audit", startingOffsets="earliest")
        assert other.drain() == [[(0, 0), (0, 1), (0, 2)]]
    finally:
        lock.release()


def test_who_it_is_and_how_far_behind_is_reported_for_listeners(store, join) -> None:
    query = join(store.path, **GROUP, startingOffsets="earliest", maxOffsetsPerTrigger="1")
    query.trigger()
    mark = query.reader.reportLatestOffset()["@"]
    assert mark["group"] == "billing"
    assert mark["path"] == str(store.path)
    assert mark["lagMessages"] == 2
    assert mark["member"] == query.reader._group.query.member_id
    assert "commitLogPath" not in mark


def test_where_the_log_lies_is_reported_for_listeners(grow, join, tmp_path) -> None:
    store = grow()
    store.append("orders", 0, 3)
    store.close()
    log = (store.path / "commitlog").rename(tmp_path / "log")
    query = join(store.path, **GROUP, startingOffsets="earliest", commitLogPath=str(log))
    query.trigger()
    assert query.reader.reportLatestOffset()["@"]["commitLogPath"] == str(log)


@pytest.mark.parametrize("name", ["a b", "", "x" * 300])
def test_a_group_that_rocketmq_refuses_is_refused(store, query_on, name) -> None:
    with pytest.raises(OptionError):
        query_on(store.path, consumerGroup=name)


def test_a_trigger_that_failed_when_all_was_planned_is_planned_again_from_the_same_offsets(
    store, join, monkeypatch
) -> None:
    with rmq_spark.open_consumer(store.path, "billing") as consumer:
        consumer.update_consume_offset(QueueKey("orders", 0), 2)
        consumer.commit()
    query = join(store.path, **SHARED)

    def refuse(*_: object) -> None:
        raise StoreError("members/x.planned cannot be written: Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(query_group, "write_planned_batch", refuse)
        with pytest.raises(StoreError, match="Cannot allocate memory"):
            query.plan()
    assert query.trigger() == [(0, 2)], "two messages were finished before"
