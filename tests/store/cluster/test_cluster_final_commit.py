"""The commit of a query's last offsets by its driver, and fences of orderly queries, in a cluster."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rmq_spark.store.backend import Fence, FinalCommit
from rmq_spark.store.cluster.address import ClusterAddress, parse_name_servers
from rmq_spark.store.cluster.backend import ClusterBackend
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.errors import BackendUnavailableError, BrokerError, GroupConflictError
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import RunningCluster, faults
from rmq_spark.store.testing.brokers.wire import QueueId

A, B, GROUP = "broker-a", "broker-b", "billing"
ONE, TWO = QueueKey("orders", 0, A), QueueKey("orders", 0, B)


@pytest.fixture(params=["5.3", "4.9"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningCluster]:
    """Two brokers with one queue of the topic orders each, which is not young: its first message has expired."""
    with RunningCluster(tmp_path / "cluster", release=request.param, brokers=2, is_light=True) as cluster:
        cluster.create_topic("orders", queues=1)
        for name, broker in cluster.brokers.items():
            cluster.advance("orders", 3, broker=name)
            broker.expire("orders", 0, 1)
            broker.groups.add(GROUP)
        yield cluster


@pytest.fixture
def backend(cluster: RunningCluster) -> Iterator[ClusterBackend]:
    backend = ClusterBackend(ClusterAddress(parse_name_servers(cluster.address), request_timeout_ms=500))
    yield backend
    backend.close()


def commit(cluster: RunningCluster, queue: QueueKey, offset: int) -> None:
    cluster.loop.run(cluster.brokers[queue.broker].offsets.commit, GROUP, QueueKey("orders", 0), offset)


def offsets(cluster: RunningCluster) -> list[int | None]:
    return [cluster.brokers[name].offsets.find(GROUP, QueueKey("orders", 0)) for name in (A, B)]


def final(expected: dict[QueueKey, tuple[int, ...]], one: int = 6, two: int = 7) -> FinalCommit:
    return FinalCommit(GROUP, "member", {ONE: one, TWO: two}, 0, expected=expected)


def test_offsets_are_committed_where_the_group_is_as_expected(cluster: RunningCluster, backend: ClusterBackend) -> None:
    commit(cluster, ONE, 3)
    commit(cluster, TWO, 5)
    assert backend.commit_final(final({ONE: (3, 4), TWO: (4, 6)}))
    assert offsets(cluster) == [6, 5]


def test_queues_that_are_not_expected_are_left_out(cluster: RunningCluster, backend: ClusterBackend) -> None:
    commit(cluster, TWO, 5)
    assert not backend.commit_final(final({}))
    assert backend.commit_final(final({ONE: ()}))
    assert offsets(cluster) == [6, 5], "nobody has set the first one"


def test_an_offset_never_moves_back(cluster: RunningCluster, backend: ClusterBackend) -> None:
    commit(cluster, ONE, 8)
    commit(cluster, TWO, 8)
    assert not backend.commit_final(final({ONE: (8,), TWO: (8,)}))
    assert offsets(cluster) == [8, 8]


def test_an_offset_that_is_there_already_counts_as_committed(cluster: RunningCluster, backend: ClusterBackend) -> None:
    commit(cluster, ONE, 6)
    commit(cluster, TWO, 9)
    cluster.clear_requests()
    assert backend.commit_final(final({ONE: (3,), TWO: (3,)}))
    assert cluster.brokers[A].requests[RequestCode.UPDATE_CONSUMER_OFFSET] == 0


def test_a_reset_is_not_overwritten(cluster: RunningCluster, backend: ClusterBackend) -> None:
    if not cluster.brokers[A].release.is_5:
        pytest.skip("a broker of 4.9 keeps no resets")
    commit(cluster, ONE, 3)
    commit(cluster, TWO, 3)
    cluster.loop.run(cluster.brokers[A].offsets.reset, GROUP, QueueKey("orders", 0), 3)  # to the offset that it has
    backend.commit_final(final({ONE: (3,), TWO: (3,)}))
    assert offsets(cluster) == [3, 7]


def test_a_broker_that_is_away_is_an_error_after_all_others(cluster: RunningCluster, backend: ClusterBackend) -> None:
    backend.require_bounds([ONE, TWO])
    cluster.brokers[A].freeze()
    with pytest.raises(BackendUnavailableError, match="broker-a"):
        backend.commit_final(final({ONE: (3,), TWO: (3,)}))
    cluster.brokers[A].thaw()
    assert offsets(cluster) == [None, 7]


def test_a_refused_commit_is_an_error(cluster: RunningCluster, backend: ClusterBackend) -> None:
    cluster.brokers[B].fail(RequestCode.UPDATE_CONSUMER_OFFSET, faults.with_code(1, "a planted fault"))
    with pytest.raises(BrokerError, match="a planted fault"):
        backend.commit_final(final({ONE: (3,), TWO: (3,)}))
    assert offsets(cluster) == [6, None]


def test_a_fence_renews_the_lock_of_its_member(cluster: RunningCluster, backend: ClusterBackend) -> None:
    broker = cluster.brokers[A]
    fence, queue = Fence(GROUP, "member", 0), QueueId("orders", A, 0)
    for _ in range(3):
        backend.check_fence(fence, ONE)
        broker.pass_time(50)
    assert broker.locks.owner(GROUP, queue) == "member"
    with pytest.raises(GroupConflictError, match=r"orders/broker-a:0 to another of consumer group billing"):
        backend.check_fence(fence._replace(member_id="another"), ONE)
    broker.pass_time(11)
    backend.check_fence(fence._replace(member_id="another"), ONE)


def test_a_fence_whose_broker_is_away_is_unavailable(
    cluster: RunningCluster, backend: ClusterBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmq_spark.store.cluster.member_locks.LIFE_S", 1)
    backend.require_bounds([ONE])
    cluster.brokers[A].kill()
    with pytest.raises(BackendUnavailableError):
        backend.check_fence(Fence(GROUP, "member", 0), ONE)
