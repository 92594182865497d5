"""Where a group begins in the queues of a cluster."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rmq_spark.store.cluster import client
from rmq_spark.store.cluster.address import ClusterAddress, parse_name_servers
from rmq_spark.store.cluster.backend import ClusterBackend
from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.cluster.group_starts import place_new_group
from rmq_spark.store.errors import BackendUnavailableError, NoPermissionError
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.testing.brokers import RunningCluster, faults

A, B = QueueKey("orders", 0, "broker-a"), QueueKey("orders", 0, "broker-b")
RETRY = QueueKey("%RETRY%billing", 0, "broker-a")


@pytest.fixture(params=["5.3", "4.9"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningCluster]:
    """Two brokers, each with one queue of the topic orders and three messages in it."""
    with RunningCluster(tmp_path / "cluster", release=request.param, brokers=2) as cluster:
        cluster.create_topic("orders", queues=1)
        for broker in cluster.brokers:
            cluster.send("orders", b"0", b"1", b"2", broker=broker)
        yield cluster
        client._idle.forget()


@pytest.fixture
def backend(cluster: RunningCluster) -> Iterator[ClusterBackend]:
    backend = ClusterBackend(ClusterAddress(parse_name_servers(cluster.address)))
    yield backend
    backend.close()


def commit(cluster: RunningCluster, broker: str, offset: int) -> None:
    cluster.loop.run(cluster.brokers[broker].offsets.commit, "billing", QueueKey("orders", 0), offset)


def make_old(cluster: RunningCluster, broker: str) -> None:
    """Let the first message of the broker's queue expire, so that the queue is not young."""
    cluster.brokers[broker].expire("orders", 0, 1)


def starts(backend: ClusterBackend, fallback: str = "latest", times_ms: dict[QueueKey, int] | None = None) -> list[int]:
    bounds = backend.require_bounds([A, B])
    committed = backend.committed_offsets("billing", list(bounds))
    found = backend.start_offsets("billing", bounds, committed, fallback, times_ms or {})
    assert list(found.keys() - {A, B}) == []
    return [found[A], found[B]]


def test_committed_offsets_leave_out_queues_without_one(cluster: RunningCluster, backend: ClusterBackend) -> None:
    commit(cluster, "broker-a", 2)
    make_old(cluster, "broker-b")
    assert backend.committed_offsets("billing", [A, B]) == {A: 2}


def test_committed_offsets_of_a_young_queue(cluster: RunningCluster, backend: ClusterBackend) -> None:
    expected = {} if cluster.release.is_5 else {A: 0, B: 0}
    assert backend.committed_offsets("billing", [A, B]) == expected


def test_committed_offsets_create_nothing_at_the_broker(cluster: RunningCluster, backend: ClusterBackend) -> None:
    before = {name: (set(one.groups), set(one.topics)) for name, one in cluster.brokers.items()}
    starts(backend)
    assert before == {name: (set(one.groups), set(one.topics)) for name, one in cluster.brokers.items()}
    assert [one.offsets.table() for one in cluster.brokers.values()] == [{}, {}]


def test_committed_offsets_are_of_the_namespace(cluster: RunningCluster) -> None:
    cluster.create_topic("team%orders", queues=1)
    cluster.send("team%orders", b"0", b"1", broker="broker-a")
    cluster.loop.run(cluster.brokers["broker-a"].offsets.commit, "team%billing", QueueKey("team%orders", 0), 1)
    backend = ClusterBackend(ClusterAddress(parse_name_servers(cluster.address), namespace="team"))
    assert backend.committed_offsets("billing", [A]) == {A: 1}
    backend.close()


def test_committed_offsets_of_a_broker_that_is_away_are_unknown(
    cluster: RunningCluster, backend: ClusterBackend
) -> None:
    backend.require_bounds([A, B])
    cluster.brokers["broker-b"].kill()
    with pytest.raises(BackendUnavailableError):
        backend.committed_offsets("billing", [A, B])
    backend.refresh()
    with pytest.raises(BackendUnavailableError, match="broker-b"):
        backend.committed_offsets("billing", [A, B])
    assert backend.committed_offsets("billing", [A]) in ({}, {A: 0})


def test_committed_offsets_without_the_right(cluster: RunningCluster, backend: ClusterBackend) -> None:
    backend.require_bounds([A])
    remark = "User:u has no permission to access Group:billing from 127.0.0.1"
    cluster.brokers["broker-a"].fail(
        RequestCode.QUERY_CONSUMER_OFFSET, faults.with_code(ResponseCode.NO_PERMISSION, remark)
    )
    with pytest.raises(NoPermissionError):
        backend.committed_offsets("billing", [A])


def test_start_is_the_committed_offset_else_the_fallback(cluster: RunningCluster, backend: ClusterBackend) -> None:
    commit(cluster, "broker-a", 2)
    make_old(cluster, "broker-b")
    assert starts(backend, "latest") == [2, 3]
    assert starts(backend, "earliest") == [2, 1]


def test_start_in_a_young_queue_is_its_first_message(cluster: RunningCluster, backend: ClusterBackend) -> None:
    assert starts(backend, "latest") == [0, 0]
    cluster.brokers["broker-b"].settings.on_disk = True
    assert starts(backend, "latest") == [0, 3]


def test_start_at_a_time(cluster: RunningCluster, backend: ClusterBackend) -> None:
    for name in cluster.brokers:
        make_old(cluster, name)
    backend.refresh()
    cluster.send("orders", b"3", broker="broker-b")
    backend.refresh()
    time_ms = backend.positions([(B, 3)])[B, 3].store_time_ms
    found = starts(backend, "timestamp", {A: time_ms + 60_000, B: time_ms})
    assert found == [3, backend.offsets_at({B: time_ms})[B]]
    assert starts(backend, "timestamp") == [3, 4], "a queue without a time starts at its end"


def test_start_of_a_group_that_consumed_since_the_look_is_the_end(
    cluster: RunningCluster, backend: ClusterBackend
) -> None:
    backend.require_bounds([A, B])
    backend.refresh()
    cluster.send("orders", b"3", b"4", broker="broker-a")
    commit(cluster, "broker-a", 5)
    commit(cluster, "broker-b", 5)
    assert starts(backend) == [3, 5], "broker-b does not have the message 5"
    assert backend.refresh(), "the new messages are still news"


@pytest.mark.parametrize(
    ("fallback", "expected"),
    [
        ("latest", {A: 9, RETRY: 4}),
        ("earliest", {A: 2, RETRY: 4}),
        ("timestamp", {A: 5, RETRY: 6}),
    ],
)
def test_new_group_in_ordinary_and_retry_topics(fallback: str, expected: dict[QueueKey, int]) -> None:
    bounds = {A: QueueBounds(2, 9), RETRY: QueueBounds(4, 6)}
    assert place_new_group(bounds, fallback, {A: 5, RETRY: 5}) == expected
    assert place_new_group({A: QueueBounds(6, 9)}, "timestamp", {A: 5}) == {A: 6}
