"""Queries that are members of a consumer group in a cluster in this process: what each run of a query plans to read."""

import json
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from group_queries import GROUP, OTHER, SCHEMA, Query, add_other, commit, committed, remove_other, reset, two_brokers
from support.cluster_fixtures import reset_offset

import rmq_spark
from rmq_spark.datasource.spark.source import RmqDataSource
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.errors import BackendUnavailableError, GroupConflictError, NoPermissionError, StoreError
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.backend_groups import eventually
from rmq_spark.store.testing.brokers import Account, AccountTable, RunningCluster, faults


@pytest.fixture(params=["5.3", "4.9"])
def cluster(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunningCluster]:
    with two_brokers(tmp_path, request.param, monkeypatch) as cluster:
        yield cluster


def test_query_is_a_member_and_publishes_where_its_batches_begin(cluster: RunningCluster) -> None:
    commit(cluster, "broker-a", 4)
    with Query(cluster, queryName="nightly", maxOffsetsPerQueue="4") as query:
        assert query.trigger() == {"a": (4, 8), "b": (0, 4)}
        assert committed(cluster, "broker-a") == 4
        assert committed(cluster, "broker-b") == (0 if cluster.release.is_5 else None)  # 4.9 answers 0 for none
        assert cluster.brokers["broker-a"].members.groups[GROUP].consume_from_where == "CONSUME_FROM_FIRST_OFFSET"
        (member,) = cluster.brokers["broker-a"].members.ids(GROUP)
        assert "#rmq-spark#nightly#" in member
        mark = query.mark
        assert (mark["group"], mark["member"], mark["shared"], mark["commit"]) == (GROUP, member, True, "auto")
        assert (mark["lagMessages"], mark["nameServer"]) == (8, cluster.address)
        assert query.metadata["published"] == {"orders": {"broker-a:0": 4, "broker-b:0": 0}}
        assert (query.metadata["group"], query.metadata["reset"]) == (GROUP, 0)
    assert cluster.brokers["broker-a"].members.ids(GROUP) == []


def test_query_without_commits_is_no_member(cluster: RunningCluster) -> None:
    commit(cluster, "broker-a", 4)
    with Query(cluster, commitOffsets="off") as query:
        assert query.trigger() == {"a": (4, 10), "b": (0, 10)}
        assert "group" not in query.metadata
    counts = cluster.clear_requests()
    assert not any(count[RequestCode.HEART_BEAT] for count in counts.values())


def test_two_queries_share_the_queues_and_each_message_is_planned_once(cluster: RunningCluster) -> None:
    with Query(cluster, maxOffsetsPerQueue="4") as one:
        read = [("a", 0, 4), ("b", 0, 4)]
        assert one.trigger() == {"a": (0, 4), "b": (0, 4)}
        with Query(cluster) as two:
            two.reader._join()
            for broker in cluster.brokers:
                cluster.advance("orders", 1, broker=broker)
            for _ in range(8):
                for query in (one, two):
                    read += [(name, begin, end) for name, (begin, end) in query.trigger().items()]
            owned = [set(query.reader._group.query.epochs) for query in (one, two)]
            assert [sorted(queue.broker for queue in some if queue.topic == "orders") for some in owned] in (
                [["broker-a"], ["broker-b"]],
                [["broker-b"], ["broker-a"]],
            )
    for name in "ab":
        ranges = sorted((begin, end) for broker, begin, end in read if broker == name)
        assert (ranges[0][0], ranges[-1][1]) == (0, 11), read
        assert all(one[1] == two[0] for one, two in pairwise(ranges)), read


def test_query_gives_up_a_queue_after_publishing_it_and_continues_where_the_other_has_come(
    cluster: RunningCluster,
) -> None:
    with Query(cluster) as query:
        assert query.trigger() == {"a": (0, 10), "b": (0, 10)}
        add_other(cluster)
        cluster.advance("orders", 1, broker="broker-b")
        assert query.trigger() == {}
        assert committed(cluster, "broker-b") == 10
        assert query.positions == {"broker-a:0": 10, "broker-b:0": 10}
        cluster.advance("orders", 4, broker="broker-b")
        commit(cluster, "broker-b", 13)
        remove_other(cluster)
        assert query.until("b") == {"b": (13, 15)}


def test_query_publishes_what_it_gives_up_though_its_driver_has_committed_an_earlier_batch(
    cluster: RunningCluster,
) -> None:
    with Query(cluster, maxOffsetsPerQueue="2") as query:
        for begin in (0, 2, 4, 6):
            assert query.trigger() == {"a": (begin, begin + 2), "b": (begin, begin + 2)}
        commit(cluster, "broker-b", 4)  # by the listener, at the end of the second batch
        add_other(cluster)
        query.trigger()
        assert committed(cluster, "broker-b") == 8


@pytest.mark.parametrize("is_known", [False, True], ids=["a new queue", "a queue that it had"])
def test_query_that_gains_a_queue_looks_again_before_the_group_is_beyond_its_end(
    cluster: RunningCluster, is_known: bool
) -> None:
    if not is_known:
        add_other(cluster)
    with Query(cluster) as query:
        assert query.trigger() == ({"a": (0, 10), "b": (0, 10)} if is_known else {"a": (0, 10)})
        if is_known:
            add_other(cluster)
            query.trigger()
        session = query.reader._group.query
        rebalance = session.rebalance

        def rebalance_late(*arguments: Any) -> Any:
            session.rebalance = rebalance
            cluster.advance("orders", 3, broker="broker-b")
            commit(cluster, "broker-b", 12)
            remove_other(cluster)
            return rebalance(*arguments)

        session.rebalance = rebalance_late
        cluster.advance("orders", 1, broker="broker-a")
        assert query.until("b")["b"] == (12, 13)


def test_query_that_gains_a_queue_reports_a_group_beyond_its_end(
    cluster: RunningCluster, caplog: pytest.LogCaptureFixture
) -> None:
    commit(cluster, "broker-b", 14)
    with Query(cluster, failOnDataLoss="false") as query:
        assert query.trigger() == {"a": (0, 10)}
    (line,) = [line for line in caplog.messages if "skipped, failOnDataLoss=false" in line]
    assert "[10, 14)" in line


RESTARTS = {  # the group's offset in the queue of broker-a at a restart, and the begin of the next batch there
    "where the query has published": (2, 10),
    "where its driver has published": (3, 10),
    "where its last batch began": (4, 10),
    "within its last batch": (7, 7),
    "where its last batch ended": (10, 10),
    "set back": (1, 1),
    "another member has advanced": (11, 11),
}


@pytest.mark.parametrize(("offset", "begin"), RESTARTS.values(), ids=RESTARTS)
def test_restarted_query_follows_the_group_unless_it_is_at_its_own_offset(
    cluster: RunningCluster, caplog: pytest.LogCaptureFixture, offset: int, begin: int
) -> None:
    with Query(cluster, maxOffsetsPerQueue="4") as query:
        assert query.trigger()["a"] == (0, 4)
    with Query(cluster, query.committed) as query:
        commit(cluster, "broker-a", 0)  # nothing of the run above but its first offset was published
        assert query.trigger()["a"] == (4, 10)
        assert query.metadata["published"]["orders"]["broker-a:0"] in ([0, 4], 4)
    checkpoint = json.loads(query.committed)
    checkpoint["@"]["published"]["orders"]["broker-a:0"] = [2, 4]
    cluster.advance("orders", 2, broker="broker-a")
    commit(cluster, "broker-a", offset)
    caplog.clear()
    with Query(cluster, json.dumps(checkpoint)) as query:
        assert query.until("a")["a"] == (begin, 12)
    lines = [line for line in caplog.messages if "The query follows the group" in line]
    assert len(lines) == (begin < 10)
    if lines:
        assert f"is at {offset} in queue orders/broker-a:0, and this query at 10: " in lines[0]


def test_restarted_query_without_its_own_offsets_stays_at_its_checkpoint(
    cluster: RunningCluster, caplog: pytest.LogCaptureFixture
) -> None:
    commit(cluster, "broker-a", 2)
    checkpoint = json.dumps({"orders": {"broker-a:0": 8, "broker-b:0": 8}, "@": {"v": 2}})
    with Query(cluster, checkpoint) as query:
        assert query.trigger() == {"a": (8, 10), "b": (8, 10)}
    assert len([line for line in caplog.messages if "it resumes at its checkpoint" in line]) == 1


def test_running_query_applies_a_reset_and_publishes_again(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmq_spark.store.cluster.member_progress.RESET_LOOK_MS", 50)
    monkeypatch.setattr("rmq_spark.store.cluster.published_offsets.INTERVAL_MS", 0)
    commit(cluster, "broker-a", 0)
    with Query(cluster) as query:
        assert query.trigger() == {"a": (0, 10), "b": (0, 10)}
        assert query.trigger() == {}
        reset(cluster, "broker-a")
        assert query.until("a") == {"a": (0, 10)}
        assert query.metadata["seek"] == {"orders": {"broker-a:0": 0}}
        assert query.metadata["reset"] == 1
        for _ in range(400):
            assert query.trigger() == {}
            if committed(cluster, "broker-a") == 10:
                break
        assert committed(cluster, "broker-a") == 10


def test_reset_of_a_stopped_query_to_an_offset_of_its_own_is_noticed_if_the_broker_keeps_it(
    cluster: RunningCluster,
) -> None:
    with Query(cluster) as query:
        assert query.trigger() == {"a": (0, 10), "b": (0, 10)}
        assert query.metadata["published"]["orders"]["broker-a:0"] == 0
    if cluster.release.is_5:
        reset(cluster, "broker-a")
    else:
        commit(cluster, "broker-a", 0)  # by the tool itself, as nobody is connected
    cluster.advance("orders", 1, broker="broker-a")
    with Query(cluster, query.committed) as query:
        begin = 0 if cluster.release.is_5 else 10
        assert query.until("a") == {"a": (begin, 11)}


def settle(query: Query) -> None:
    """Run triggers until nothing is left to read or to publish."""
    for _ in range(400):
        if not query.trigger() and not query.reader._group.has_changed():
            return
    raise AssertionError(query.committed)


def progress(query: Query, batch: int) -> Any:
    """Return the event that Spark sends to listeners at the end of a batch."""
    latest = json.dumps(query.reader.reportLatestOffset())
    source = SimpleNamespace(latestOffset=latest, endOffset=query.committed)
    return SimpleNamespace(progress=SimpleNamespace(sources=[source], runId="r", id="q", batchId=batch))


def test_driver_that_publishes_other_batches_than_the_reader_publishes_the_end_and_a_restart_reads_nothing_again(
    cluster: RunningCluster, caplog: pytest.LogCaptureFixture
) -> None:
    now_ms = [0.0]
    listener = rmq_spark.GroupOffsetListener(lambda: now_ms[0])
    with Query(cluster, maxOffsetsPerQueue="2") as query:
        for batch in range(4):  # the reader publishes at its second plan, and not again for 5 s
            assert query.trigger()["a"] == (2 * batch, 2 * batch + 2)
            if batch == 1:
                listener.onQueryProgress(progress(query, batch))
                assert committed(cluster, "broker-a") == 4
        listener.onQueryProgress(progress(query, 3))  # too early
        known = query.metadata["published"]["orders"]["broker-a:0"]
        assert known == [0 if cluster.release.is_5 else 2, 6]  # 5.3: its first plan publishes where it begins
    killed = query.committed
    with Query(cluster, killed) as query:
        assert query.trigger()["a"] == (8, 10)
    assert not [line for line in caplog.messages if "follows the group" in line]
    commit(cluster, "broker-a", 4)
    listener.onQueryTerminated(SimpleNamespace(runId="r"))
    assert committed(cluster, "broker-a") == 8


def test_driver_keeps_a_reset_to_an_offset_that_it_has_published_before_the_reader(cluster: RunningCluster) -> None:
    now_ms = [0.0]
    listener = rmq_spark.GroupOffsetListener(lambda: now_ms[0])
    with Query(cluster, maxOffsetsPerQueue="2") as query:
        query.trigger()
        query.trigger()
        listener.onQueryProgress(progress(query, 1))
        assert committed(cluster, "broker-a") == 4
        checkpoint = json.loads(query.committed)
        checkpoint["orders"]["broker-a:0"] = 10
        checkpoint["@"]["published"]["orders"]["broker-a:0"] = [6, 8]  # the reader has published 6 since
        query.committed = json.dumps(checkpoint)
        now_ms[0] = 5000
        listener.onQueryProgress(progress(query, 4))
        assert committed(cluster, "broker-a") == 4, "it was set back"


def test_restarted_query_finds_a_reset_to_one_of_its_own_offsets_where_the_broker_keeps_it(
    cluster: RunningCluster, caplog: pytest.LogCaptureFixture
) -> None:
    with Query(cluster, maxOffsetsPerQueue="4") as query:
        assert query.trigger()["a"] == (0, 4)
        assert query.trigger()["a"] == (4, 8)
    assert eventually(lambda: cluster.brokers["broker-a"].members.ids(GROUP) == [])
    reset_offset(cluster.brokers["broker-a"], GROUP, QueueKey("orders", 0, "broker-a"), 6)
    with Query(cluster, query.committed) as query:
        assert query.trigger()["a"] == (6, 10)
        assert query.metadata["reset"] == cluster.release.is_5
        settle(query)
    assert any("follows the group" in line for line in caplog.messages) != cluster.release.is_5


def test_reset_that_the_last_batch_of_a_stopped_query_has_applied_is_not_applied_again(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmq_spark.store.cluster.member_progress.RESET_LOOK_MS", 50)
    monkeypatch.setattr("rmq_spark.store.cluster.published_offsets.INTERVAL_MS", 0)
    commit(cluster, "broker-a", 0)
    with Query(cluster) as query:
        assert query.trigger() == {"a": (0, 10), "b": (0, 10)}
        settle(query)
        reset(cluster, "broker-a")
        assert query.until("a") == {"a": (0, 10)}
    with Query(cluster, query.committed) as query:
        cluster.advance("orders", 1, broker="broker-b")
        assert query.trigger() == {"b": (10, 11)}
        assert query.metadata["reset"] == 1
        if cluster.release.is_5:
            assert not cluster.loop.run(cluster.brokers["broker-a"].offsets.has_reset, GROUP, QueueKey("orders", 0)), (
                "taken at once, as the next offset does not show any more that it is applied"
            )
        settle(query)
        assert committed(cluster, "broker-a") == 10


def test_reset_whose_broker_is_away_at_the_next_plan_is_applied_when_it_is_back(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmq_spark.store.cluster.member_progress.RESET_LOOK_MS", 50)
    monkeypatch.setattr("rmq_spark.store.cluster.published_offsets.INTERVAL_MS", 0)
    commit(cluster, "broker-a", 0)
    with Query(cluster, requestTimeout="500ms") as query:
        assert query.trigger() == {"a": (0, 10), "b": (0, 10)}
        settle(query)
        broker, session = cluster.brokers["broker-a"], query.reader._group.query
        reset_offset(broker, GROUP, QueueKey("orders", 0, "broker-a"), 5)
        assert eventually(session.has_changed)
        broker.freeze()
        cluster.advance("orders", 1, broker="broker-b")
        assert query.until("b") == {"b": (10, 11)}
        assert query.metadata["reset"] == 0
        broker.thaw()
        assert query.until("a") == {"a": (5, 10)}
        assert query.metadata["reset"] == 1
        settle(query)
        assert committed(cluster, "broker-a") == 10


def test_query_that_gains_a_queue_from_a_member_that_has_applied_a_reset_follows_it(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmq_spark.store.cluster.published_offsets.INTERVAL_MS", 0)
    with Query(cluster, maxOffsetsPerQueue="1") as query:
        for _ in range(10):
            query.trigger()
        add_other(cluster)
        assert query.trigger() == {}
        assert committed(cluster, "broker-b") == 10
        commit(cluster, "broker-b", 4)  # the other member was reset to 2, and has read two messages since
        remove_other(cluster)
        assert query.until("b") == {"b": (4, 5)}


def test_query_whose_commits_are_required_fails_if_one_is_not_answered(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmq_spark.store.cluster.published_offsets.INTERVAL_MS", 0)
    with Query(cluster, commitOffsets="required", maxOffsetsPerQueue="2", requestTimeout="300ms") as query:
        assert query.trigger() == {"a": (0, 2), "b": (0, 2)}
        cluster.brokers["broker-b"].fail(RequestCode.UPDATE_CONSUMER_OFFSET, faults.nothing(executes=False))
        with pytest.raises(
            StoreError, match=r'group "billing" cannot be published.*broker-b.*commitOffsets=auto'
        ) as found:
            query.trigger()
        assert not isinstance(found.value, BackendUnavailableError), "a query would wait for the broker"


def test_query_whose_broker_was_killed_goes_on_though_the_broker_lost_its_last_commits(
    cluster: RunningCluster, caplog: pytest.LogCaptureFixture
) -> None:
    with Query(cluster, maxOffsetsPerQueue="2") as query:
        assert query.trigger()["a"] == (0, 2)
        assert query.trigger()["a"] == (2, 4)
        assert query.trigger()["a"] == (4, 6)
        broker = cluster.brokers["broker-a"]
        broker.kill()
        cluster.forget(broker)
        for _ in range(100):
            query.trigger()
            if query.reader._view.away:
                break
        query.trigger()
        broker.restart()
        commit(cluster, "broker-a", 2)
        assert query.until("a")["a"] == (6, 8)
    assert not [line for line in caplog.messages if "follows the group" in line]


def test_query_refuses_to_join_members_with_another_subscription(cluster: RunningCluster) -> None:
    add_other(cluster, orders="paid")
    with Query(cluster) as query, pytest.raises(GroupConflictError, match=OTHER):
        query.trigger()
    with Query(cluster, tags="paid") as query:
        assert query.trigger() == {"a": (0, 10)}


def test_query_with_a_pattern_joins_with_the_topics_that_it_finds(cluster: RunningCluster) -> None:
    cluster.create_topic("orders-late", queues=1, brokers=["broker-b"])
    cluster.advance("orders-late", 1, broker="broker-b")
    options = {"nameServer": cluster.address, "subscribePattern": "orders.*", "consumerGroup": GROUP, "tags": "A||B"}
    reader: Any = RmqDataSource(options).streamReader(SCHEMA)
    reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    found = cluster.brokers["broker-b"].members.groups[GROUP].subscriptions
    assert {topic: one["subString"] for topic, one in found.items()} == {
        "orders": "A||B",
        "orders-late": "A||B",
        "%RETRY%billing": "*",
    }
    reader.stop()


def test_query_that_waits_for_messages_notices_a_member_that_joins(cluster: RunningCluster) -> None:
    with Query(cluster) as query:
        assert query.trigger() == {"a": (0, 10), "b": (0, 10)}
        for _ in range(400):
            query.trigger()
            if len(json.loads(query.committed).get("%RETRY%billing", ())) == 2:
                break
    with Query(cluster, query.committed, longPollingMs="1h") as query:
        is_waiting = threading.Event()
        view = query.reader._view
        wait = view.wait

        def note_and_wait(timeout_ms: float) -> bool:
            is_waiting.set()
            return bool(wait(timeout_ms))

        view.wait = note_and_wait
        waiting = threading.Thread(target=query.trigger, daemon=True)
        waiting.start()
        assert is_waiting.wait(60)
        add_other(cluster)
        ends_s = time.monotonic() + 60
        while committed(cluster, "broker-b") != 10:  # the query publishes what it gives up
            assert waiting.is_alive()
            assert time.monotonic() < ends_s
        cluster.advance("orders", 1, broker="broker-a")
        waiting.join(60)
        assert query.positions == {"broker-a:0": 11, "broker-b:0": 10}


def test_member_needs_the_rights_of_the_page(cluster: RunningCluster) -> None:
    group = "SUB|GET" if cluster.release.is_5 else "SUB"
    rights = {"topics": {"orders": "SUB", "%RETRY%billing": "SUB"}, "groups": {GROUP: group, f"{GROUP}-reader": "SUB"}}
    for broker in cluster.brokers.values():
        broker.accounts = AccountTable(Account("reader", "secret", **rights))
    with Query(cluster, accessKey="reader", secretKey="secret") as query:
        assert query.trigger() == {"a": (0, 10), "b": (0, 10)}
        assert "secret" not in json.dumps(query.mark)
    rights["groups"] = {f"{GROUP}-reader": "SUB"}
    for broker in cluster.brokers.values():
        broker.accounts = AccountTable(Account("reader", "secret", **rights))
    with Query(cluster, accessKey="reader", secretKey="secret") as query, pytest.raises(NoPermissionError):
        query.trigger()


def test_AvailableNow_is_a_member_until_its_end(cluster: RunningCluster) -> None:
    add_other(cluster)
    with Query(cluster) as query:
        query.reader.prepareForTriggerAvailableNow()
        assert len(cluster.brokers["broker-a"].members.ids(GROUP)) == 2
        cluster.advance("orders", 1, broker="broker-a")
        assert query.trigger() == {"a": (0, 10)}
        assert query.trigger() == {}
        assert [broker.members.ids(GROUP) for broker in cluster.brokers.values()] == [[OTHER]] * 2
        assert committed(cluster, "broker-a") == 10
        assert query.trigger() == {}


def test_query_waits_at_no_trigger_for_a_broker_that_it_knows_to_hang(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmq_spark.store.cluster.heartbeats.INTERVAL_S", 0.2)
    monkeypatch.setattr("rmq_spark.store.cluster.member_progress.RESET_LOOK_MS", 0)
    monkeypatch.setattr("rmq_spark.store.cluster.published_offsets.INTERVAL_MS", 0)
    with Query(cluster, requestTimeout="1s") as query:
        assert query.trigger() == {"a": (0, 10), "b": (0, 10)}
        query.trigger()
        broker = cluster.brokers["broker-b"]
        broker.freeze()
        query.trigger()
        assert query.reader._view.away
        session = query.reader._group.query
        member, driver = session._member, query.reader._view.backend.client
        assert query.reader._view.backend.catalog.book.address("broker-b") == broker.address
        codes, beaten, submit_all, beat = set(), set(), driver.submit_all, member.beat

        def note_and_submit(to: str, requests: Any, *arguments: Any, **more: Any) -> Any:
            codes.update(one.code for one in requests if to == broker.address)
            return submit_all(to, requests, *arguments, **more)

        def note_and_beat(brokers: Any) -> Any:
            beaten.update(brokers)
            return beat(brokers)

        driver.submit_all, member.beat = note_and_submit, note_and_beat
        for number in range(10, 20):
            cluster.advance("orders", 1, broker="broker-a")
            assert query.until("a") == {"a": (number, number + 1)}
        assert codes <= {RequestCode.GET_TOPIC_STATS_INFO}
        assert "broker-b" not in beaten
        broker.thaw()
        cluster.advance("orders", 1, broker="broker-b")
        assert query.until("b") == {"b": (10, 11)}
