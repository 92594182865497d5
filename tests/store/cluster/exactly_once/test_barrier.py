"""Settling: barriers are visible after all that the broker has stored before."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.staged_runs import STAGE, SessionCalls, Staging

from rmq_spark.store.cluster.client import monotonic_ms, now_ms
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.exactly_once.barrier import Barriers
from rmq_spark.store.cluster.exactly_once.target_calls import SessionOverError
from rmq_spark.store.errors import BackendUnavailableError, NoPermissionError
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import RunningCluster, faults

SEND, END = RequestCode.SEND_MESSAGE_V2, RequestCode.GET_MAX_OFFSET
QUEUES = [QueueKey(STAGE, 0, "broker-a"), QueueKey(STAGE, 0, "broker-b")]


@pytest.fixture(params=["5.3", "4.9"])
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningCluster]:
    with RunningCluster(tmp_path / "cluster", release=request.param, brokers=2) as cluster:
        Staging(cluster)
        yield cluster


@pytest.fixture
def calls(cluster: RunningCluster) -> Iterator[SessionCalls]:
    calls = SessionCalls(cluster)
    yield calls
    calls.close()


def ends(cluster: RunningCluster) -> list[int]:
    return [cluster.brokers[queue.broker].bounds(STAGE)[0].max_offset for queue in QUEUES]


def barriers(calls: SessionCalls, patience_ms: float = 60_000) -> Barriers:
    return Barriers(calls, patience_ms, monotonic_ms, now_ms)


def test_barrier_is_visible_when_the_call_returns(cluster: RunningCluster, calls: SessionCalls) -> None:
    for broker in cluster.brokers.values():
        broker.settings.dispatch_delay_ms = 60
    barriers(calls).send(QUEUES)
    assert ends(cluster) == [1, 1]


def test_settle_sends_two_barriers_and_waits_after_each(cluster: RunningCluster, calls: SessionCalls) -> None:
    waits = []
    take_done = calls.take_done

    def take(done: list, timeout_ms: float) -> list:
        if not done and not any(calls.client._servers[to].pending() for to in calls.client._servers):
            waits.append((timeout_ms, ends(cluster)))
        return take_done(done, timeout_ms)

    calls.take_done = take
    barriers(calls).settle(QUEUES, 40)
    assert ends(cluster) == [2, 2]
    assert [max(ms for ms, seen in waits if seen == at) > 20 for at in ([1, 1], [2, 2])] == [True, True]
    assert calls.beats >= len(waits), "heartbeats are sent meanwhile"


def test_barrier_with_an_unknown_outcome_is_sent_again(cluster: RunningCluster, calls: SessionCalls) -> None:
    cluster.brokers["broker-a"].fail(SEND, faults.with_code(1, "java.lang.NullPointerException"), times=1)
    cluster.brokers["broker-b"].fail(SEND, faults.with_fields(queueOffset=None), times=1)
    barriers(calls).send(QUEUES)
    assert ends(cluster) == [1, 2]


def test_barrier_that_does_not_become_visible_is_an_error(cluster: RunningCluster, calls: SessionCalls) -> None:
    cluster.brokers["broker-b"].settings.dispatch_delay_ms = 600_000
    with pytest.raises(BackendUnavailableError, match=r"cannot settle broker broker-b: .* is not visible after 0\.1 s"):
        barriers(calls, 100).send(QUEUES)


def test_refused_barrier_is_an_error(cluster: RunningCluster, calls: SessionCalls) -> None:
    cluster.brokers["broker-b"].fail(SEND, faults.with_code(16, "sending message is forbidden"))
    with pytest.raises(NoPermissionError):
        barriers(calls).send(QUEUES)


def test_lost_connection_ends_the_session(cluster: RunningCluster, calls: SessionCalls) -> None:
    barriers(calls).send(QUEUES)
    cluster.brokers["broker-b"].kill()
    with pytest.raises(SessionOverError):
        barriers(calls).settle(QUEUES[:1], 60_000)
