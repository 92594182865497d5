"""The requests of the product are what the tests' servers expect, and their answers can be read."""

from collections.abc import Callable
from typing import Any

import pytest

from rmq_spark.store.cluster import group_requests, requests, statistics_requests
from rmq_spark.store.cluster.codes import PullStatus
from rmq_spark.store.cluster.requests import Request
from rmq_spark.store.cluster.responses import Response
from rmq_spark.store.format.config_json import GroupConfig, TopicConfig
from rmq_spark.store.format.record import Record, decode_record
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import RunningCluster
from rmq_spark.store.testing.brokers.raw_client import RawClient

RunCluster = Callable[..., RunningCluster]
BOTH = pytest.mark.parametrize("release", ["4.9", "5.3"])
A = "broker-a"
QUEUE = QueueKey("orders", 1, A)


def kinds(module: Any) -> list[type[Request[Any]]]:
    found = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, Request)]
    return [one for one in found if one is not Request]


def make(kind: type[Request[Any]]) -> Request[Any]:
    """Return a request of a class, about the queue that `filled` fills."""
    values: dict[str, Any] = {
        "queue": QUEUE,
        "topic": QUEUE.topic,
        "broker": A,
        "group": "billing",
        "offset": 1,
        "max_messages": 32,
        "time_ms": 0,
        "physical_offset": 0,
        "key": "k",
        "name": "TOPIC_PUT_NUMS",
        "expression": "a > 1",
        "config": TopicConfig("new", 2, 2) if kind is requests.CreateTopicRequest else GroupConfig("billing"),
    }
    return kind(**{name: values[name] for name in kind.__match_args__ if name in values})  # type: ignore[attr-defined]


@pytest.fixture
def filled(run_cluster: RunCluster) -> Callable[[str], RunningCluster]:
    """A function that starts a cluster with five messages and a committed offset in one queue."""

    def start(release: str) -> RunningCluster:
        cluster = run_cluster(release=release, cluster="c1")
        cluster.create_topic("orders", 2)
        cluster.send("orders", *([b"x"] * 5), queue_id=1, keys="k")
        cluster.broker.groups.add("billing")
        cluster.broker.offsets.commit("billing", QueueKey("orders", 1), 2)
        return cluster

    return start


def ask(cluster: RunningCluster, request: Request[Any], *, is_for_name_server: bool = False) -> tuple[int, Response]:
    server = cluster.name_servers[0] if is_for_name_server else cluster.broker
    with RawClient(server.address) as client:
        answer = client.call(request.code, request.fields(), request.body)
    return answer.code, request.read(answer)


@BOTH
def test_every_request_for_a_broker_is_answered(filled: Callable[[str], RunningCluster], release: str) -> None:
    cluster = filled(release)
    answers: dict[str, Response] = {}
    every = [*kinds(requests), *kinds(group_requests), *kinds(statistics_requests)]
    every.sort(key=lambda kind: kind is requests.DeleteTopicRequest)  # it comes last
    for kind in every:
        with RawClient(cluster.broker.address) as client:
            request = make(kind)
            answer = client.call(request.code, request.fields(), request.body)
        if answer.code == 0:
            answers[kind.__name__] = request.read(answer)
    of_others = {"RouteRequest", "ClusterInfoRequest", "TopicListRequest", "DeleteRouteRequest"}
    without_members = {"GroupMembersRequest", "GroupConnectionsRequest", "StatisticRequest"}  # nothing was counted
    unknown = {"TopicConfigRequest"} if release == "4.9" else set()
    assert {kind.__name__ for kind in every} - answers.keys() == of_others | without_members | unknown


@BOTH
def test_answers_of_a_broker_are_read(filled: Callable[[str], RunningCluster], release: str) -> None:
    cluster = filled(release)
    _, stats = ask(cluster, make(requests.TopicStatsRequest))
    bounds = {queue: (one.min_offset, one.max_offset) for queue, one in stats.queues.items()}  # type: ignore[attr-defined]
    assert bounds == {QueueKey("orders", 0, A): (0, 0), QUEUE: (0, 5)}
    _, end = ask(cluster, make(requests.MaxOffsetRequest))
    assert end.offset == 5  # type: ignore[attr-defined]
    _, pulled = ask(cluster, make(requests.PullRequest))
    assert isinstance(pulled, requests.PullResponse)
    assert (pulled.status, pulled.next_offset, pulled.reason) == (PullStatus.FOUND, 5, "FOUND")
    first = decode_record(bytes(pulled.records))
    assert isinstance(first, Record)
    assert first.queue_offset == 1
    _, committed = ask(cluster, make(group_requests.CommittedOffsetRequest))
    assert committed.offset == 2  # type: ignore[attr-defined]
    _, everything = ask(cluster, make(group_requests.AllGroupOffsetsRequest))
    assert everything.offsets == {"orders@billing": {1: 2}}  # type: ignore[attr-defined]
    _, progress = ask(cluster, make(group_requests.GroupStatsRequest))
    assert progress.queues[QUEUE].consumer_offset == 2  # type: ignore[attr-defined]


@BOTH
def test_answers_of_a_name_server_are_read(filled: Callable[[str], RunningCluster], release: str) -> None:
    cluster = filled(release)
    _, route = ask(cluster, make(requests.RouteRequest), is_for_name_server=True)
    assert isinstance(route, requests.RouteResponse)
    assert [(one.broker, one.read_queue_count) for one in route.queues] == [(A, 2)]
    assert route.brokers[0].addresses == {0: cluster.broker.address}
    _, info = ask(cluster, make(requests.ClusterInfoRequest), is_for_name_server=True)
    assert info.clusters == {"c1": (A,)}  # type: ignore[attr-defined]
    _, names = ask(cluster, make(requests.TopicListRequest), is_for_name_server=True)
    assert "orders" in names.topics  # type: ignore[attr-defined]
