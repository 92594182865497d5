"""Answers and notices of brokers to the members of a consumer group."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from rmq_spark.store.cluster.codes import BrokerRequestCode, RequestCode, ResponseCode
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.testing.brokers import ConsumerData, RunningCluster
from rmq_spark.store.testing.brokers.group_members import BROADCASTING, CONSUME_POP
from rmq_spark.store.testing.brokers.raw_client import RawClient

RunCluster = Callable[..., RunningCluster]
BOTH = pytest.mark.parametrize("release", ["4.9", "5.3"])
GROUP = {"consumerGroup": "billing"}
ORDERS = ConsumerData.of("billing", {"orders": "*"}, sub_version=1)


def connect(cluster: RunningCluster) -> RawClient:
    return RawClient(cluster.broker.address)


def ask(cluster: RunningCluster, code: int, fields: dict[str, Any], body: bytes = b"") -> Command:
    with connect(cluster) as client:
        return client.call(code, fields, body)


def member_ids(cluster: RunningCluster) -> list[str]:
    answer = ask(cluster, RequestCode.GET_CONSUMER_LIST_BY_GROUP, GROUP)
    if answer.code == ResponseCode.SYSTEM_ERROR:
        assert answer.remark == "no consumer for this group, billing"
        return []
    return sorted(json.loads(answer.body)["consumerIdList"])


def connections(cluster: RunningCluster) -> dict[str, Any]:
    answer = ask(cluster, RequestCode.GET_CONSUMER_CONNECTION_LIST, GROUP)
    assert answer.code == 0, answer
    return json.loads(answer.body)


def notices(client: RawClient) -> int:
    """Return how many notifications have come since the last call. A broker sends them before a later answer."""
    client.call(RequestCode.GET_MAX_OFFSET, {"topic": "orders", "queueId": 0})
    assert all(one.fields == GROUP and one.is_one_way for one in client.requests)
    assert {one.code for one in client.requests} <= {BrokerRequestCode.NOTIFY_CONSUMER_IDS_CHANGED}
    count = len(client.requests)
    client.requests.clear()
    return count


@BOTH
def test_a_heartbeat_makes_a_member_and_notifies_all_before_its_answer(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release, is_light=True)
    with connect(cluster) as one, connect(cluster) as two:
        answer = one.heartbeat("one", ORDERS)
        assert answer.code == 0
        assert answer.fields.get("IS_SUB_CHANGE") == ("true" if release == "5.3" else None)
        (notice,) = one.requests
        assert (notice.code, notice.fields, notice.is_one_way) == (
            BrokerRequestCode.NOTIFY_CONSUMER_IDS_CHANGED,
            GROUP,
            True,
        )
        one.requests.clear()
        two.heartbeat("two", ORDERS)
        assert (len(two.requests), notices(one), member_ids(cluster)) == (1, 1, ["one", "two"])
    assert "billing" in cluster.broker.groups
    assert cluster.broker.topics["%RETRY%billing"].read_queues == 1


@BOTH
def test_a_heartbeat_that_changes_nothing_notifies_nobody(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release, is_light=True)
    newer = ConsumerData.of("billing", {"orders": "A"}, sub_version=2)
    with connect(cluster) as client:
        client.heartbeat("one", ORDERS)
        assert notices(client) == 1
        client.heartbeat("one", ORDERS)
        client.heartbeat("one", newer)  # another expression is no change for others
        client.heartbeat("another", newer)  # the connection is the member
        assert (notices(client), member_ids(cluster)) == (0, ["another"])


@BOTH
def test_the_last_heartbeat_decides_for_the_group(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release, is_light=True)
    other = ConsumerData.of(
        "billing",
        {"bills": "A || B"},
        sub_version=2,
        consume_type=CONSUME_POP,
        message_model="CLUSTERING",
        consume_from_where="CONSUME_FROM_FIRST_OFFSET",
    )
    with connect(cluster) as one, connect(cluster) as two:
        one.heartbeat("one", ORDERS)
        two.heartbeat("two", other)
        assert notices(one) == 2
        body = connections(cluster)
        assert sorted(body["subscriptionTable"]) == ["%RETRY%billing", "bills"]
        assert body["subscriptionTable"]["bills"] == {
            "classFilterMode": False,
            "codeSet": [],
            "expressionType": "TAG",
            "subString": "A || B",
            "subVersion": 2,
            "tagsSet": [],
            "topic": "bills",
        }
        assert (body["consumeType"], body["messageModel"]) == (CONSUME_POP, "CLUSTERING")
        assert body["consumeFromWhere"] == "CONSUME_FROM_FIRST_OFFSET"
        one.heartbeat("one", ORDERS)
        body = connections(cluster)
        assert (sorted(body["subscriptionTable"]), body["consumeType"]) == (
            ["%RETRY%billing", "orders"],
            "CONSUME_PASSIVELY",
        )


@BOTH
def test_an_older_version_of_a_subscription_does_not_replace_it(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release, is_light=True)

    def expression() -> str:
        return str(connections(cluster)["subscriptionTable"]["orders"]["subString"])

    with connect(cluster) as client:
        client.heartbeat("one", ConsumerData.of("billing", {"orders": "A"}, sub_version=5))
        client.heartbeat("one", ConsumerData.of("billing", {"orders": "B"}, sub_version=5))
        assert expression() == "A"
        client.heartbeat("one", ConsumerData.of("billing", {"orders": "C"}, sub_version=6))
        assert expression() == "C"


@BOTH
def test_connections_show_address_language_and_version(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release, is_light=True)
    cluster.broker.members.add("billing", "java-1", {"orders": "*"}, version=400)
    with connect(cluster) as client:
        client.heartbeat("python-1", ORDERS)
        shown = {one["clientId"]: one for one in connections(cluster)["connectionSet"]}
        assert shown["java-1"] == {
            "clientAddr": "192.0.2.1:40000",
            "clientId": "java-1",
            "language": "JAVA",
            "version": 400,
        }
        assert shown["python-1"] == {
            "clientAddr": client.address,
            "clientId": "python-1",
            "language": "PYTHON",
            "version": 407,
        }


@BOTH
@pytest.mark.parametrize("leave", ["unregister", "close", "expire", "remove"])
def test_the_others_are_notified_when_a_member_leaves(run_cluster: RunCluster, release: str, leave: str) -> None:
    cluster = run_cluster(release=release, is_light=True)
    with connect(cluster) as stays, connect(cluster) as leaves:
        stays.heartbeat("stays", ORDERS)
        leaves.heartbeat("leaves", ORDERS)
        assert notices(stays) == 2
        if leave == "unregister":
            answer = leaves.call(RequestCode.UNREGISTER_CLIENT, {"clientID": "ignored", **GROUP})
            assert (answer.code, member_ids(cluster)) == (0, ["stays"])
        elif leave == "close":
            leaves.close()
        else:
            getattr(cluster.broker.members, leave)("billing", "leaves")
        assert stays.receive_request().code == BrokerRequestCode.NOTIFY_CONSUMER_IDS_CHANGED
        assert cluster.broker.members.ids("billing") == ["stays"]
        assert notices(stays) == 0


@BOTH
def test_a_silent_member_is_forgotten(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release, is_light=True)
    with connect(cluster) as stays, connect(cluster) as silent:
        stays.heartbeat("stays", ORDERS)
        silent.heartbeat("silent", ORDERS)
        for _ in range(2):
            cluster.broker.pass_time(50)
            stays.heartbeat("stays", ORDERS)
        assert (notices(stays), member_ids(cluster)) == (2, ["silent", "stays"])
        cluster.broker.pass_time(30)
        assert (notices(stays), member_ids(cluster)) == (1, ["stays"])
        with pytest.raises(ConnectionError):
            silent.receive()


@BOTH
def test_a_member_that_only_sends_other_requests_is_closed_without_notice(
    run_cluster: RunCluster, release: str
) -> None:
    cluster = run_cluster(release=release, is_light=True)
    cluster.create_topic("orders", 1)
    with connect(cluster) as stays, connect(cluster) as busy:
        stays.heartbeat("stays", ORDERS)
        busy.heartbeat("busy", ORDERS)
        cluster.broker.pass_time(100)
        stays.heartbeat("stays", ORDERS)
        busy.call(RequestCode.GET_MAX_OFFSET, {"topic": "orders", "queueId": 0})
        assert notices(stays) == 2
        cluster.broker.pass_time(21)
        assert (notices(stays), member_ids(cluster)) == (0, ["stays"])
        with pytest.raises(ConnectionError):
            busy.receive()


def test_silence_is_noticed_without_help(run_cluster: RunCluster) -> None:
    cluster = run_cluster(is_light=True)
    cluster.broker.settings.member_idle_s = 0.05
    with connect(cluster) as client:
        client.heartbeat("one", ORDERS)
        with pytest.raises(ConnectionError):
            client.receive()
    assert member_ids(cluster) == []


@BOTH
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_broker_that_ends_forgets_its_members(run_cluster: RunCluster, release: str, end: str) -> None:
    cluster = run_cluster(release=release, is_light=True)
    cluster.broker.members.add("billing", "java-1", {"orders": "*"})
    with connect(cluster) as one, connect(cluster) as two:
        one.heartbeat("one", ORDERS)
        two.heartbeat("two", ORDERS)
        getattr(cluster.broker, end)()
        for client in (one, two):
            with pytest.raises(ConnectionError):
                client.receive()
        assert (len(one.requests), len(two.requests)) == (2, 1)  # none about the end of the other
    cluster.broker.restart()
    assert member_ids(cluster) == []
    assert ask(cluster, RequestCode.GET_CONSUMER_CONNECTION_LIST, GROUP).code == ResponseCode.CONSUMER_NOT_ONLINE


def test_a_frozen_broker_notices_no_silence(run_cluster: RunCluster) -> None:
    cluster = run_cluster(is_light=True)
    with connect(cluster) as client:
        client.heartbeat("one", ORDERS)
        cluster.broker.freeze()
        cluster.broker.pass_time(1000)
        assert cluster.broker.members.ids("billing") == ["one"]
        cluster.broker.thaw()
        assert member_ids(cluster) == []


@pytest.mark.parametrize(("release", "ids"), [("4.9", ["one"]), ("5.3", [])])
def test_a_group_that_must_not_be_created(run_cluster: RunCluster, release: str, ids: list[str]) -> None:
    cluster = run_cluster(release=release, is_light=True)
    cluster.broker.settings.creates_groups = False
    with connect(cluster) as client:
        assert client.heartbeat("one", ORDERS).code == 0
        assert member_ids(cluster) == ids
    assert "billing" not in cluster.broker.groups
    assert "%RETRY%billing" not in cluster.broker.topics


@pytest.mark.parametrize(("release", "count"), [("4.9", 1), ("5.3", 0)])
def test_broadcasting_members_are_notified_by_4(run_cluster: RunCluster, release: str, count: int) -> None:
    cluster = run_cluster(release=release, is_light=True)
    with connect(cluster) as client:
        client.heartbeat("one", ConsumerData.of("billing", {"orders": "*"}, message_model=BROADCASTING))
        assert notices(client) == count
        assert sorted(connections(cluster)["subscriptionTable"]) == ["orders"]


def test_notices_can_be_switched_off(run_cluster: RunCluster) -> None:
    cluster = run_cluster(is_light=True)
    cluster.broker.settings.notifies_members = False
    with connect(cluster) as client:
        client.heartbeat("one", ORDERS)
        assert (notices(client), member_ids(cluster)) == (0, ["one"])


@pytest.mark.parametrize("body", [b"", b"not JSON", b'{"clientID": "one", "consumerDataSet": [{}]}'])
def test_a_heartbeat_that_cannot_be_read_is_an_error(run_cluster: RunCluster, body: bytes) -> None:
    cluster = run_cluster(is_light=True)
    answer = ask(cluster, RequestCode.HEART_BEAT, {}, body)
    assert (answer.code, "Exception" in (answer.remark or "")) == (ResponseCode.SYSTEM_ERROR, True)


def mqs(*queue_ids: int, broker: str = "broker-a") -> list[dict[str, Any]]:
    return [{"topic": "orders", "brokerName": broker, "queueId": number} for number in queue_ids]


def lock(
    cluster: RunningCluster,
    client_id: str,
    *queue_ids: int,
    group: str = "billing",
    code: int = RequestCode.LOCK_BATCH_MQ,
) -> list[int]:
    """Lock queues, or unlock them, and return the ids of those that are held."""
    body = {"clientId": client_id, "consumerGroup": group, "mqSet": mqs(*queue_ids), "onlyThisBroker": False}
    answer = ask(cluster, code, {}, json.dumps(body).encode())
    assert answer.code == 0, answer
    held = json.loads(answer.body or b'{"lockOKMQSet": []}')["lockOKMQSet"]
    assert held == mqs(*(one["queueId"] for one in held))
    return sorted(one["queueId"] for one in held)


@BOTH
def test_a_lock_excludes_others_until_it_expires(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release, is_light=True)
    assert lock(cluster, "a", 0) == [0]
    cluster.broker.pass_time(30)
    assert lock(cluster, "a", 0) == [0]  # renewed
    cluster.broker.pass_time(40)
    assert lock(cluster, "b", 0) == []
    assert lock(cluster, "b", 0, group="others") == [0]
    cluster.broker.pass_time(30)
    assert lock(cluster, "b", 0) == [0]
    assert lock(cluster, "a", 0, code=RequestCode.UNLOCK_BATCH_MQ) == []  # it is not a's
    assert lock(cluster, "a", 0, 1) == [1]
    lock(cluster, "b", 0, code=RequestCode.UNLOCK_BATCH_MQ)
    assert lock(cluster, "a", 0, 1) == [0, 1]


@BOTH
def test_a_broker_that_ends_forgets_its_locks(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release, is_light=True)
    assert lock(cluster, "a", 0) == [0]
    cluster.broker.kill()
    cluster.broker.restart()
    assert lock(cluster, "b", 0) == [0]


@BOTH
def test_a_closed_connection_keeps_its_locks(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release, is_light=True)
    with connect(cluster) as client:
        client.heartbeat("a", ORDERS)
        assert lock(cluster, "a", 0) == [0]
    assert lock(cluster, "b", 0) == []


@pytest.mark.parametrize("code", [RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ])
def test_locks_of_nothing_are_an_error(run_cluster: RunCluster, code: int) -> None:
    answer = ask(run_cluster(is_light=True), code, {}, b"{}")
    assert (answer.code, "Exception" in (answer.remark or "")) == (ResponseCode.SYSTEM_ERROR, True)
