"""What the name servers answer, and what they know of brokers that come and go."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.format import fastjson
from rmq_spark.store.testing.brokers import RunningCluster
from rmq_spark.store.testing.brokers.raw_client import RawClient

RunCluster = Callable[..., RunningCluster]
NOBODY_ANSWERS_S = 0.2


def ask(cluster: RunningCluster, code: int, number: int = 0, **fields: Any) -> Command:
    version = fields.pop("version", 407)
    with RawClient(cluster.name_servers[number].address) as client:
        return client.call(code, fields, version=version)


def route(cluster: RunningCluster, topic: str, number: int = 0) -> dict[str, dict[str, Any]]:
    """Return the route's objects of queues by broker name, with the addresses as "addresses"; {} for code 17."""
    answer = ask(cluster, RequestCode.GET_ROUTEINFO_BY_TOPIC, number, topic=topic)
    if answer.code == ResponseCode.TOPIC_NOT_EXIST:
        return {}
    body = json.loads(bytes(answer.body))
    addresses = {one["brokerName"]: one["brokerAddrs"] for one in body["brokerDatas"]}
    return {one["brokerName"]: {**one, "addresses": addresses[one["brokerName"]]} for one in body["queueDatas"]}


def test_a_route_has_the_queues_and_the_address_of_each_broker(run_cluster: RunCluster) -> None:
    cluster = run_cluster(brokers=2)
    cluster.create_topic("orders", 3)
    cluster.brokers["broker-b"].set_topic("orders", 5, write_queues=2, perm=4)
    found = route(cluster, "orders")
    assert {name: (one["readQueueNums"], one["writeQueueNums"], one["perm"]) for name, one in found.items()} == {
        "broker-a": (3, 3, 6),
        "broker-b": (5, 5, 4),
    }
    assert found["broker-a"]["addresses"] == {"0": cluster.brokers["broker-a"].address}


def test_read_and_write_queues_differ_on_request(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.broker.set_topic("orders", read_queues=1, write_queues=3)
    found = route(cluster, "orders")["broker-a"]
    assert (found["readQueueNums"], found["writeQueueNums"]) == (1, 3)


def test_the_order_of_brokers_changes_from_call_to_call(run_cluster: RunCluster) -> None:
    cluster = run_cluster(brokers=2)
    cluster.create_topic("orders")
    bodies = {
        bytes(ask(cluster, RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="orders", acceptStandardJsonOnly=True).body)
        for _ in range(4)
    }
    assert len(bodies) > 1


@pytest.mark.parametrize(("version", "key"), [(0, b"{0:"), (402, b"{0:"), (403, b'{"0":')])
def test_the_keys_of_a_route_are_quoted_for_new_clients(run_cluster: RunCluster, version: int, key: bytes) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders")
    assert key in bytes(ask(cluster, RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="orders", version=version).body)
    strict = ask(cluster, RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="orders", version=0, acceptStandardJsonOnly=True)
    assert b'{"0":' in bytes(strict.body)


def test_strict_routes_escape_what_is_not_ascii(run_cluster: RunCluster) -> None:
    cluster = run_cluster(cluster="größe")
    cluster.create_topic("orders")
    strict, loose = (
        bytes(ask(cluster, RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="orders", version=version).body)
        for version in (407, 0)
    )
    assert b"gr\\u00f6\\u00dfe" in strict
    assert "größe".encode() in loose


def test_the_list_of_brokers_has_numbers_as_keys(run_cluster: RunCluster) -> None:
    cluster = run_cluster(brokers=2, cluster="c1")
    body = bytes(ask(cluster, RequestCode.GET_BROKER_CLUSTER_INFO).body).decode()
    assert '{0:"127.0.0.1:' in body
    parsed = fastjson.parse(body)
    assert parsed["clusterAddrTable"] == {"c1": ["broker-a", "broker-b"]}
    assert parsed["brokerAddrTable"]["broker-b"]["brokerAddrs"] == {"0": cluster.brokers["broker-b"].address}


def test_the_list_of_topics_has_the_system_topics_too(run_cluster: RunCluster) -> None:
    cluster = run_cluster(cluster="c1")
    cluster.create_topic("orders")
    names = json.loads(bytes(ask(cluster, RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER).body))["topicList"]
    assert {"orders", "TBW102", "c1", "broker-a"} <= set(names)


@pytest.mark.parametrize("leave", ["stop", "kill"])
def test_a_broker_that_ends_leaves_the_routes_at_once(run_cluster: RunCluster, leave: str) -> None:
    cluster = run_cluster(brokers=2, name_servers=2)
    cluster.create_topic("orders")
    cluster.create_topic("payments", brokers=["broker-a"])
    getattr(cluster.brokers["broker-a"], leave)()
    assert list(route(cluster, "orders", 1)) == ["broker-b"]
    assert route(cluster, "payments") == {}
    cluster.brokers["broker-a"].restart(new_port=True)
    assert route(cluster, "payments", 1)["broker-a"]["addresses"] == {"0": cluster.brokers["broker-a"].address}


def test_a_frozen_broker_stays_in_the_routes_until_it_is_forgotten(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders")
    cluster.broker.freeze()
    assert "broker-a" in route(cluster, "orders")
    cluster.forget("broker-a")
    assert route(cluster, "orders") == {}
    cluster.broker.thaw()
    assert "broker-a" in route(cluster, "orders")


def test_a_name_server_starts_with_empty_routes(run_cluster: RunCluster) -> None:
    cluster = run_cluster(name_servers=2)
    cluster.create_topic("orders")
    address = cluster.name_servers[0].address
    cluster.name_servers[0].restart()
    assert cluster.name_servers[0].address == address
    assert route(cluster, "orders", 0) == {}
    assert "broker-a" in route(cluster, "orders", 1)
    cluster.register_all()
    assert "broker-a" in route(cluster, "orders", 0)


def test_a_route_may_have_further_fields(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders")
    cluster.create_topic("payments")
    cluster.name_servers[0].add_to_route("orders", orderTopicConf="broker-a:4", topicQueueMappingByBroker={"b": {}})
    bodies = [
        json.loads(bytes(ask(cluster, RequestCode.GET_ROUTEINFO_BY_TOPIC, topic=topic).body))
        for topic in ("orders", "payments")
    ]
    assert (bodies[0]["orderTopicConf"], bodies[0]["topicQueueMappingByBroker"]) == ("broker-a:4", {"b": {}})
    assert "orderTopicConf" not in bodies[1]


def test_a_name_server_that_is_not_ready_says_so(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders")
    cluster.name_servers[0].set_ready(False)
    answer = ask(cluster, RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="orders")
    assert (answer.code, answer.remark) == (1, "name server not ready")


def test_a_topic_that_one_broker_deleted_stays_in_the_routes(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders")
    with RawClient(cluster.broker.address) as client:
        assert client.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "orders"}).code == 0
        assert client.call(RequestCode.GET_TOPIC_STATS_INFO, {"topic": "orders"}).code == 17
    assert "broker-a" in route(cluster, "orders")
    assert ask(cluster, RequestCode.DELETE_TOPIC_IN_NAMESRV, topic="orders").code == 0
    assert route(cluster, "orders") == {}


def test_a_slave_is_shown_with_its_id_and_without_its_queues(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders")
    slave = cluster.add_slave("broker-a")
    assert route(cluster, "orders")["broker-a"]["addresses"] == {"0": cluster.broker.address, "1": slave.address}
    cluster.broker.kill()
    found = route(cluster, "orders")["broker-a"]
    assert (found["addresses"], found["perm"]) == ({"1": slave.address}, 6)


def test_an_acting_master_is_shown_with_id_0_and_without_write_permission(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders")
    slave = cluster.add_slave("broker-a")
    slave.act_as_master()
    assert route(cluster, "orders")["broker-a"]["perm"] == 6
    cluster.broker.kill()
    found = route(cluster, "orders")["broker-a"]
    assert (found["addresses"], found["perm"]) == ({"0": slave.address}, 4)
    cluster.broker.restart()
    found = route(cluster, "orders")["broker-a"]
    assert (found["addresses"], found["perm"]) == ({"0": cluster.broker.address, "1": slave.address}, 6)
    cluster.broker.kill()
    assert route(cluster, "orders")["broker-a"]["addresses"] == {"0": slave.address}


def test_a_topic_that_is_made_while_its_broker_is_away_is_registered_later(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.broker.freeze()
    cluster.create_topic("orders")
    assert route(cluster, "orders") == {}
    cluster.broker.thaw()
    assert "broker-a" in route(cluster, "orders")


def test_an_unknown_request_is_answered_by_5_and_never_by_4(run_cluster: RunCluster) -> None:
    assert ask(run_cluster(release="5.3"), 31999).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    address = run_cluster(release="4.9").name_servers[0].address
    with RawClient(address, timeout_s=NOBODY_ANSWERS_S) as client:
        client.send(31999)
        with pytest.raises(TimeoutError):
            client.receive()
