"""The queues to which a sender sends, the topics that it creates, and what it says if it may do neither."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.sent_messages import address_of

from rmq_spark.store.cluster.address import Credentials
from rmq_spark.store.cluster.client import ClusterClient, monotonic_ms
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.responses import BrokerData, QueueData, RouteResponse
from rmq_spark.store.cluster.sink import refuse_timers
from rmq_spark.store.cluster.write_routes import NewTopics, WriteRoutes, list_write_queues
from rmq_spark.store.errors import (
    BackendUnavailableError,
    BrokerError,
    NoPermissionError,
    NotFoundError,
    OptionError,
    RmqError,
)
from rmq_spark.store.format.config_json import TopicConfig
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import Account, AccountTable, RunningCluster, faults

CREATE, ROUTE = RequestCode.UPDATE_AND_CREATE_TOPIC, RequestCode.GET_ROUTEINFO_BY_TOPIC
NAMESPACES = pytest.mark.parametrize("namespace", ["", "shop"])


@pytest.fixture(params=["5.3", "4.9"])
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningCluster]:
    with RunningCluster(tmp_path / "cluster", release=request.param, brokers=2) as cluster:
        yield cluster


@contextmanager
def write_routes(
    cluster: RunningCluster,
    *,
    new: NewTopics | None = None,
    clock: Callable[[], float] = monotonic_ms,
    fixed: dict[str, tuple[QueueKey, ...]] | None = None,
    **address: Any,
) -> Iterator[WriteRoutes]:
    """Yield what a sender knows. `address` are fields of `ClusterAddress`."""
    client = ClusterClient(address_of(cluster, request_timeout_ms=1000, **address))
    try:
        yield WriteRoutes(client, clock, new or NewTopics(), fixed)
    finally:
        client.close()


def stored(namespace: str, topic: str = "orders") -> str:
    return f"{namespace}%{topic}" if namespace else topic


def ids_of(queues: tuple[QueueKey, ...]) -> list[str]:
    return [queue.id_text for queue in queues]


def counts_of(cluster: RunningCluster, topic: str) -> dict[str, int]:
    """Return the number of write queues of a topic on each broker that has it."""
    brokers = cluster.brokers.items()
    return {name: broker.topics[topic].write_queues for name, broker in brokers if topic in broker.topics}


@NAMESPACES
def test_queues_are_the_write_queues_of_all_masters(cluster: RunningCluster, namespace: str) -> None:
    topic = stored(namespace)
    cluster.create_topic(topic, read_queues=1, write_queues=2, queues=None)  # type: ignore[arg-type]
    cluster.brokers["broker-b"].set_topic(topic, read_queues=9, write_queues=1)
    with write_routes(cluster, namespace=namespace) as routes:
        found = routes.queues("orders")
        assert ids_of(found) == ["broker-a:0", "broker-a:1", "broker-b:0"]
        assert {queue.topic for queue in found} == {"orders"}
        assert routes.address("broker-b") == cluster.brokers["broker-b"].address
        assert routes.is_listed("orders", "broker-a")


@NAMESPACES
def test_queues_leave_out_brokers_that_accept_no_messages(cluster: RunningCluster, namespace: str) -> None:
    topic = stored(namespace)
    cluster.create_topic(topic, queues=2)
    with write_routes(cluster, namespace=namespace) as routes:
        cluster.brokers["broker-a"].set_topic(topic, perm=4)
        assert ids_of(routes.queues("orders")) == ["broker-b:0", "broker-b:1"]
        cluster.brokers["broker-b"].set_topic(topic, perm=4)
        assert len(routes.queues("orders")) == 2, "until forget"
        routes.forget()
        with pytest.raises(NoPermissionError, match=r"topic orders accepts no messages.*broker-a has perm 4, 2 write"):
            routes.queues("orders")
        cluster.brokers["broker-a"].set_topic(topic, perm=2)
        assert ids_of(routes.queues("orders")) == ["broker-a:0", "broker-a:1"]
        cluster.brokers["broker-a"].set_topic(topic, write_queues=0)
        routes.forget()
        with pytest.raises(NoPermissionError, match="0 write queues"):
            routes.queues("orders")


def test_queues_leave_out_a_broker_of_which_only_a_slave_is_listed(cluster: RunningCluster) -> None:
    cluster.create_topic("orders", queues=1)
    slave = cluster.add_slave("broker-a")
    cluster.brokers["broker-a"].kill()
    with write_routes(cluster) as routes:
        assert ids_of(routes.queues("orders")) == ["broker-b:0"]
        assert not routes.is_listed("orders", "broker-a")
        if cluster.release.is_5:
            slave.act_as_master()
            routes.forget()
            assert ids_of(routes.queues("orders")) == ["broker-b:0"]
        with pytest.raises(BackendUnavailableError, match="no name server lists its master"):
            routes.address("broker-x")
        cluster.brokers["broker-b"].kill()
        routes.forget()
        with pytest.raises(BackendUnavailableError, match=r"broker-a has perm ., 1 write queues and (no|a) master"):
            routes.queues("orders")


def test_queues_follow_the_order_configuration_as_in_java(cluster: RunningCluster) -> None:
    """Also the queues of a broker that is away, and in the order of the text."""
    cluster.create_topic("orders", queues=4, perm=6)
    cluster.name_servers[0].add_to_route("orders", orderTopicConf="broker-b:2;broker-a:1")
    with write_routes(cluster) as routes:
        assert ids_of(routes.queues("orders")) == ["broker-b:0", "broker-b:1", "broker-a:0"]
        cluster.brokers["broker-b"].kill()
        routes.forget()
        assert ids_of(routes.queues("orders")) == ["broker-b:0", "broker-b:1", "broker-a:0"]
        assert not routes.is_listed("orders", "broker-b")


def route_of(queues: list[tuple[str, int, int]], masters: list[str], order: str = "") -> RouteResponse:
    """Return a route with brokers of these names, permissions and numbers of write queues."""
    names = {name for name, _, _ in queues} | set(masters)
    return RouteResponse(
        tuple(QueueData(name, perm, 9, count, 0) for name, perm, count in queues),
        tuple(BrokerData(name, "c", {0 if name in masters else 1: "127.0.0.1:1"}, False) for name in sorted(names)),
        order,
    )


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        (route_of([("a", 6, 2), ("b", 2, 1)], ["a", "b"]), ["a:0", "a:1", "b:0"]),
        (route_of([("a", 6, 2), ("b", 4, 1)], ["a", "b"]), ["a:0", "a:1"]),
        (route_of([("a", 6, 2), ("b", 6, 1)], ["b"]), ["b:0"]),
        (route_of([("a", 7, 1)], ["a"]), ["a:0"]),
        (route_of([("a", 0, 1)], ["a"]), []),
        (RouteResponse((QueueData("a", 6, 1, 1, 0),), ()), []),
        (route_of([("a", 6, 5)], ["a"], "b:2;a:1"), ["b:0", "b:1", "a:0"]),
        (route_of([("a", 4, 5)], [], " b-1:1 ;; a:0; c:1;"), ["b-1:0", "c:0"]),
    ],
)
def test_list_write_queues(route: RouteResponse, expected: list[str]) -> None:
    assert ids_of(list_write_queues("orders", route)) == expected


@pytest.mark.parametrize("text", ["broker-a", "broker-a:x", "broker-a:-1", "a:1,b:2", "a:\u0661", "a:99999999"])
def test_list_write_queues_refuses_a_wrong_order_configuration(text: str) -> None:
    with pytest.raises(BrokerError, match=r"order configuration of topic orders is .*expected broker:queues"):
        list_write_queues("orders", route_of([("a", 6, 1)], ["a"], text))


@NAMESPACES
def test_queues_create_a_missing_topic_on_each_master(
    cluster: RunningCluster, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add_slave("broker-a")
    caplog.set_level(logging.INFO, "rmq_spark")
    with write_routes(cluster, new=NewTopics(queue_count=3), namespace=namespace) as routes:
        assert len(routes.queues("orders")) == 6
        assert counts_of(cluster, stored(namespace)) == {"broker-a": 3, "broker-b": 3}
        topic = cluster.brokers["broker-b"].topics[stored(namespace)]
        assert (topic.perm, topic.read_queues, topic.order) == (6, 3, False)
        assert routes.queues("orders") == routes.queues("orders")
    created = "rmq: created topic orders with 3 queues on each of the brokers broker-a, broker-b"
    assert [one for one in caplog.messages if "created" in one] == [created]


@NAMESPACES
def test_a_missing_topic_is_an_error_if_it_must_not_be_created(cluster: RunningCluster, namespace: str) -> None:
    stem = rf"topic orders does not exist.*rmq create -n NAMESERVER {stored(namespace)}\. "
    expected = rf"{stem}Or let it be created: create_topic=True \(createTopic=true"
    with (
        write_routes(cluster, new=NewTopics(is_allowed=False), namespace=namespace) as routes,
        pytest.raises(NotFoundError, match=expected),
    ):
        routes.queues("orders")
    assert counts_of(cluster, stored(namespace)) == {}


@NAMESPACES
def test_create_leaves_a_master_that_has_the_topic_alone(cluster: RunningCluster, namespace: str) -> None:
    """Also if the name server was restarted, and the broker with the topic has not registered it yet."""
    topic = stored(namespace)
    cluster.brokers["broker-a"].set_topic(topic, 7, perm=2)
    server = cluster.name_servers[0]
    server.routes.delete_topic(topic)
    cluster.clear_requests()
    with write_routes(cluster, new=NewTopics(queue_count=3), namespace=namespace) as routes:
        assert ids_of(routes.queues("orders")) == [f"broker-b:{number}" for number in range(3)]
        assert counts_of(cluster, topic) == {"broker-a": 7, "broker-b": 3}
        assert cluster.brokers["broker-a"].topics[topic].perm == 2
        cluster.register_all()
        routes.forget()
        assert len(routes.queues("orders")) == 10
    requests = cluster.clear_requests()
    assert (requests["broker-a"][CREATE], requests["broker-b"][CREATE]) == (0, 1)


def test_create_after_a_restart_of_the_name_server_creates_at_brokers_that_are_back(cluster: RunningCluster) -> None:
    server = cluster.name_servers[0]
    cluster.create_topic("orders", queues=7)
    server.restart()
    with write_routes(cluster) as routes:
        with pytest.raises(
            BackendUnavailableError, match="cannot create topic orders: the name servers list no master"
        ):
            routes.queues("orders")
        cluster.brokers["broker-b"].register()
        assert ids_of(routes.queues("orders")) == [f"broker-b:{number}" for number in range(7)]
    assert counts_of(cluster, "orders") == {"broker-a": 7, "broker-b": 7}


@pytest.mark.slow
def test_wait_for_a_topic_that_no_broker_registers_ends(cluster: RunningCluster) -> None:
    """All brokers have the topic, and the name server does not list it."""
    cluster.create_topic("orders", queues=7)
    cluster.name_servers[0].routes.delete_topic("orders")
    with write_routes(cluster) as routes, pytest.raises(NotFoundError, match="orders"):
        routes.queues("orders")
    assert counts_of(cluster, "orders") == {"broker-a": 7, "broker-b": 7}


def test_create_leaves_out_a_broker_of_which_only_a_slave_is_listed(cluster: RunningCluster) -> None:
    cluster.add_slave("broker-a")
    cluster.brokers["broker-a"].kill()
    with write_routes(cluster, new=NewTopics(queue_count=1)) as routes:
        assert ids_of(routes.queues("orders")) == ["broker-b:0"]
    assert counts_of(cluster, "orders") == {"broker-b": 1}
    assert "orders" not in cluster.slaves["broker-a", 1].topics


def test_create_uses_the_settings(cluster: RunningCluster) -> None:
    with write_routes(cluster) as routes:
        masters = routes.create(TopicConfig("orders", 5, 4, 2))
        assert masters == ["broker-a", "broker-b"]
        assert len(routes.wait_for("orders", masters)) == 8
    for broker in cluster.brokers.values():
        topic = broker.topics["orders"]
        assert (topic.read_queues, topic.write_queues, topic.perm) == (5, 4, 2)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (faults.closes_connection(executes=False), BackendUnavailableError),
        (faults.with_code(1, "java.lang.NullPointerException"), BrokerError),
        (faults.with_code(16, "forbidden"), NoPermissionError),
    ],
    ids=["closed", "failed", "forbidden"],
)
def test_create_raises_the_error_of_a_master(
    cluster: RunningCluster, fault: faults.Fault, error: type[RmqError]
) -> None:
    cluster.brokers["broker-b"].fail(CREATE, fault)
    expected = r"topic orders does not exist and cannot be created: .*broker-b.*rmq create"
    with write_routes(cluster) as routes, pytest.raises(error, match=expected):
        routes.queues("orders")


def test_create_without_the_right_names_the_command(cluster: RunningCluster) -> None:
    for broker in cluster.brokers.values():
        broker.accounts = AccountTable(Account("writer", "secret", topics={"*": "PUB|GET"}))
    credentials = Credentials("writer", "secret")
    with (
        write_routes(cluster, credentials=credentials) as routes,
        pytest.raises(NoPermissionError, match=r"topic orders does not exist.*the account lacks.*updateTopic") as no,
    ):
        routes.queues("orders")
    assert "secret" not in str(no.value)
    assert counts_of(cluster, "orders") == {}


def test_a_static_topic_is_refused(cluster: RunningCluster) -> None:
    cluster.create_topic("orders", queues=1)
    cluster.name_servers[0].add_to_route("orders", topicQueueMappingByBroker={"broker-a": {}})
    with write_routes(cluster) as routes, pytest.raises(OptionError, match="topic orders is a static topic"):
        routes.queues("orders")


def test_renew_asks_at_most_once_a_second(cluster: RunningCluster) -> None:
    cluster.create_topic("orders", queues=1)
    cluster.create_topic("other", queues=1)
    now_ms = 0.0
    with write_routes(cluster, clock=lambda: now_ms) as routes:
        queues = routes.queues("orders")
        cluster.clear_requests()
        cluster.brokers["broker-b"].kill()
        cluster.brokers["broker-b"].restart(new_port=True)
        cluster.brokers["broker-b"].set_topic("orders", 5)
        for now_ms, expected in ((0.0, 0), (999.0, 0), (1000.0, 1), (1500.0, 1), (1999.0, 1), (2000.0, 2)):
            routes.renew("orders")
            assert cluster.name_servers[0].requests[ROUTE] == expected, now_ms
        routes.renew("other")
        assert cluster.name_servers[0].requests[ROUTE] == 3
        assert routes.address("broker-b") == cluster.brokers["broker-b"].address
        assert routes.queues("orders") == queues, "the list of queues stays"


@pytest.mark.parametrize("fault", [faults.with_code(1, "x"), faults.closes_connection(), faults.garbage()])
def test_renew_keeps_what_is_known_if_no_name_server_answers(cluster: RunningCluster, fault: faults.Fault) -> None:
    cluster.create_topic("orders", queues=1)
    fixed = {"orders": (QueueKey("orders", 0, "broker-a"),)}
    with write_routes(cluster, fixed=fixed) as routes:
        assert routes.queues("orders") == fixed["orders"]
        routes.renew("orders")
        address = routes.address("broker-a")
        cluster.name_servers[0].fail(ROUTE, fault)
        routes.forget()
        routes._asked_ms.clear()
        routes.renew("orders")
        assert routes.address("broker-a") == address


def test_queues_at_the_addresses_of_the_option(cluster: RunningCluster) -> None:
    cluster.create_topic("orders", queues=1)
    with write_routes(cluster, broker_addresses=(("broker-a", "127.0.0.1:9"),)) as routes:
        assert len(routes.queues("orders")) == 2
        assert routes.address("broker-a") == "127.0.0.1:9"


def test_timers_are_refused_for_brokers_of_4(cluster: RunningCluster) -> None:
    cluster.create_topic("orders", queues=1)
    with write_routes(cluster) as routes:
        refusal = refuse_timers(routes, ["orders"])
        assert (refusal is None) == cluster.release.is_5
        assert refusal is None or "broker-a, broker-b; expected brokers of 5.x. Use delayLevel" in refusal
        assert routes.fetch_versions("orders").keys() == {"broker-a", "broker-b"}
        cluster.brokers["broker-b"].kill()
        with pytest.raises(BackendUnavailableError, match="the version of a broker of topic orders"):
            routes.fetch_versions("orders")
