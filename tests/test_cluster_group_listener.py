"""GroupOffsetListener for queries of a cluster in this process, with the events that Spark sends it."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rmq_spark
from rmq_spark.store.cluster import client
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import Account, AccountTable, RunningCluster

A, B = QueueKey("orders", 0, "broker-a"), QueueKey("orders", 0, "broker-b")


@pytest.fixture(params=["5.3", "4.9"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningCluster]:
    """Two brokers, each with one queue of the topic orders, in which the group is at 4."""
    with RunningCluster(tmp_path / "cluster", release=request.param, brokers=2, is_light=True) as cluster:
        cluster.create_topic("orders", queues=1)
        for broker in cluster.brokers.values():
            broker.groups.add("billing")
            commit(cluster, broker.name, 4)
        yield cluster
        client._idle.forget()


class Clock:
    now_ms = 0.0

    def __call__(self) -> float:
        return self.now_ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


def commit(cluster: RunningCluster, broker: str, offset: int) -> None:
    cluster.loop.run(cluster.brokers[broker].offsets.commit, "billing", QueueKey("orders", 0), offset)


def offsets(cluster: RunningCluster) -> list[int | None]:
    return [
        cluster.loop.run(broker.offsets.find, "billing", QueueKey("orders", 0)) for broker in cluster.brokers.values()
    ]


def progress(cluster: RunningCluster, ends: dict[QueueKey, int], published: dict[QueueKey, Any], **marks: str) -> Any:
    """Return the event of a batch that ended at `ends`, with the `published` of its end."""

    def texts(values: dict[QueueKey, Any]) -> dict[str, Any]:
        return {"orders": {queue.id_text: value for queue, value in values.items()}}

    mark = {"v": 2, "group": "billing", "member": "m", "nameServer": cluster.address, "shared": True, "commit": "auto"}
    metadata = {"v": 2, "group": "billing", "reset": 0, "published": texts(published)}
    source = SimpleNamespace(
        latestOffset=json.dumps({**texts(ends), "@": mark | marks}),
        endOffset=json.dumps({**texts(ends), "@": metadata}),
    )
    return SimpleNamespace(progress=SimpleNamespace(sources=[source], runId="r", id="query", batchId=3))


ENDED: Any = SimpleNamespace(runId="r")


def test_end_of_a_batch_is_committed_at_most_every_5_s_and_the_last_one_in_any_case(
    cluster: RunningCluster, clock: Clock
) -> None:
    listener = rmq_spark.GroupOffsetListener(clock)
    listener.onQueryProgress(progress(cluster, {A: 7, B: 4}, {A: 4}))
    assert offsets(cluster) == [7, 4]
    clock.now_ms = 4999
    listener.onQueryProgress(progress(cluster, {A: 8, B: 6}, {A: [4, 7], B: 4}))
    assert offsets(cluster) == [7, 4]
    clock.now_ms = 5000
    listener.onQueryProgress(progress(cluster, {A: 9, B: 6}, {A: [4, 7], B: [4, 6]}))
    assert offsets(cluster) == [9, 6]
    listener.onQueryProgress(progress(cluster, {A: 10, B: 6}, {A: [4, 9], B: 6}))
    listener.onQueryTerminated(SimpleNamespace(runId="another"))
    assert offsets(cluster) == [9, 6]
    listener.onQueryTerminated(ENDED)
    assert offsets(cluster) == [10, 6]


def test_offset_of_another_member_or_a_reset_stays(cluster: RunningCluster, clock: Clock) -> None:
    listener = rmq_spark.GroupOffsetListener(clock)
    commit(cluster, "broker-a", 12)
    commit(cluster, "broker-b", 2)
    listener.onQueryProgress(progress(cluster, {A: 9, B: 9}, {A: [4, 6], B: [4, 6]}))
    listener.onQueryTerminated(ENDED)
    assert offsets(cluster) == [12, 2]


def test_queue_whose_end_is_published_costs_no_request(cluster: RunningCluster, clock: Clock) -> None:
    listener = rmq_spark.GroupOffsetListener(clock)
    cluster.clear_requests()
    listener.onQueryProgress(progress(cluster, {A: 9, B: 9}, {}))
    listener.onQueryTerminated(ENDED)
    assert not any(cluster.clear_requests().values())
    assert offsets(cluster) == [4, 4]


@pytest.mark.parametrize("cluster", ["5.3"], indirect=True)
def test_reset_that_the_broker_keeps_stays(cluster: RunningCluster, clock: Clock) -> None:
    cluster.loop.run(cluster.brokers["broker-a"].offsets.reset, "billing", QueueKey("orders", 0), 4)
    listener = rmq_spark.GroupOffsetListener(clock)
    listener.onQueryProgress(progress(cluster, {A: 9, B: 9}, {A: 4, B: 4}))
    listener.onQueryTerminated(ENDED)
    assert offsets(cluster) == [4, 9]


def test_account_of_the_environment_commits_and_one_without_the_right_is_told_once(
    cluster: RunningCluster, clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for broker in cluster.brokers.values():
        broker.accounts = AccountTable(Account("a", "secret", topics={"orders": "SUB"}, groups={"billing": "SUB"}))
    listener = rmq_spark.GroupOffsetListener(clock)
    for clock.now_ms in (0.0, 5000.0):
        listener.onQueryProgress(progress(cluster, {A: 7}, {A: 4}))
    listener.onQueryTerminated(ENDED)
    assert offsets(cluster) == [4, 4]
    (line,) = [line for line in caplog.messages if "is not published" in line and "billing" in line]
    assert line.endswith(
        "The listener gives up, so the end of the last batch is not published. It uses the account of "
        "the query's credentialsFile, or the one in RMQ_ACCESS_KEY and RMQ_SECRET_KEY in the environment of the driver"
    )
    monkeypatch.setenv("RMQ_ACCESS_KEY", "a")
    monkeypatch.setenv("RMQ_SECRET_KEY", "secret")
    listener.onQueryProgress(progress(cluster, {A: 7}, {A: 4}))
    assert offsets(cluster) == [7, 4]
