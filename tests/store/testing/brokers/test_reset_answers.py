"""Answers of brokers to resets of a group's offsets, and their requests to its members."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from rmq_spark.store.cluster.codes import BrokerRequestCode, RequestCode, ResponseCode
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.format import fastjson
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import ConsumerData, RunningCluster
from rmq_spark.store.testing.brokers.raw_client import RawClient

RunCluster = Callable[..., RunningCluster]
GROUP = {"consumerGroup": "billing"}
FIRST = QueueKey("orders", 0)
NOW = -1


def filled(run_cluster: RunCluster, release: str = "5.3", **settings: Any) -> RunningCluster:
    """Start a broker whose topic has 4 and 2 messages; the group is at 3 and 2."""
    cluster = run_cluster(release=release, is_light=True)
    cluster.create_topic("orders", 2)
    cluster.advance("orders", 4, queue_id=0)
    cluster.advance("orders", 2, queue_id=1)
    cluster.broker.groups.add("billing")
    cluster.broker.offsets.commit("billing", FIRST, 3)
    cluster.broker.offsets.commit("billing", QueueKey("orders", 1), 2)
    for name, value in settings.items():
        setattr(cluster.broker.settings, name, value)
    return cluster


def ask(cluster: RunningCluster, code: int, **fields: Any) -> Command:
    with RawClient(cluster.broker.address) as client:
        return client.call(code, fields)


def reset(cluster: RunningCluster, timestamp: int, **fields: Any) -> Command:
    terms = {"topic": "orders", "group": "billing", "isForce": True, "timestamp": timestamp, **fields}
    return ask(cluster, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, **terms)


def table(command: Command) -> dict[int, int]:
    """Return the offsets in a body by queue id."""
    rows = fastjson.parse(bytes(command.body).decode())["offsetTable"]
    queues = {key: fastjson.parse(key) for key in rows}
    assert all((queue["topic"], queue["brokerName"]) == ("orders", "broker-a") for queue in queues.values())
    return {queue["queueId"]: rows[key] for key, queue in queues.items()}


def committed(cluster: RunningCluster, queue_id: int = 0) -> int:
    answer = ask(cluster, RequestCode.QUERY_CONSUMER_OFFSET, topic="orders", queueId=queue_id, **GROUP)
    return int(answer.fields["offset"])


def commit(cluster: RunningCluster, offset: int) -> Command:
    fields = {"topic": "orders", "queueId": 0, "commitOffset": offset}
    return ask(cluster, RequestCode.UPDATE_CONSUMER_OFFSET, **fields, **GROUP)


def pull(cluster: RunningCluster, offset: int) -> Command:
    numbers = {"queueOffset": offset, "maxMsgNums": 1, "commitOffset": 0, "suspendTimeoutMillis": 0, "sysFlag": 4}
    return ask(cluster, RequestCode.PULL_MESSAGE, topic="orders", queueId=0, subscription="*", **numbers, **GROUP)


def test_5_stores_a_reset_and_tells_no_member(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster)
    with RawClient(cluster.broker.address) as client:
        client.heartbeat("one", ConsumerData.of("billing", {"orders": "*"}))
        client.requests.clear()
        answer = reset(cluster, 0)
        assert (answer.code, table(answer)) == (0, {0: 0, 1: 0})
        client.call(RequestCode.GET_MAX_OFFSET, {"topic": "orders", "queueId": 0})
        assert client.requests == []
    assert [committed(cluster, 0), committed(cluster, 1)] == [0, 0]


def test_a_reset_of_5_holds_off_commits_until_a_pull_takes_it(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster)
    assert table(reset(cluster, NOW)) == {0: 4, 1: 2}
    refused = commit(cluster, 3)
    assert (refused.code, refused.remark, committed(cluster)) == (0, "Offset has been previously reset", 4)
    taken = pull(cluster, 3)
    assert (taken.code, taken.remark) == (ResponseCode.PULL_OFFSET_MOVED, "OFFSET_RESET")
    assert taken.fields["nextBeginOffset"] == "4"
    assert pull(cluster, 3).code == 0
    assert (commit(cluster, 3).remark, committed(cluster)) == (None, 3)


def test_a_pull_that_is_held_takes_a_reset_when_it_is_answered(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster)
    numbers = {"queueOffset": 4, "maxMsgNums": 1, "commitOffset": 0, "suspendTimeoutMillis": 600_000, "sysFlag": 6}
    fields = {"topic": "orders", "queueId": 0, "subscription": "*", **numbers, **GROUP}

    def held() -> int:
        return cluster.broker.loop.run(len, cluster.broker.held)

    with RawClient(cluster.broker.address) as client:
        client.send(RequestCode.PULL_MESSAGE, fields)
        while not held():
            time.sleep(0.001)
        reset(cluster, 0)
        assert held() == 1
        cluster.advance("orders", 1, queue_id=0)
        assert (client.receive().remark, commit(cluster, 1).remark) == ("OFFSET_RESET", None)


def test_a_broker_that_ends_forgets_that_a_reset_waits(run_cluster: RunCluster) -> None:
    cluster = filled(run_cluster)
    reset(cluster, 0)
    cluster.broker.kill()
    cluster.broker.restart()
    assert (committed(cluster), pull(cluster, 3).code) == (0, 0)
    assert (commit(cluster, 3).remark, committed(cluster)) == (None, 3)


@pytest.mark.parametrize(
    ("fields", "code", "found"),
    [
        ({"queueId": 0, "offset": 1}, 0, {0: 1}),
        ({"queueId": 0, "offset": 5}, 0, {0: 5}),  # one more than the end is allowed
        ({"queueId": 0, "offset": 6}, ResponseCode.SYSTEM_ERROR, None),
        ({"queueId": 1, "offset": -1}, 0, {1: 0}),
        ({"queueId": -1, "offset": 1}, 0, {0: 0, 1: 0}),
        ({"topic": "nothing"}, ResponseCode.TOPIC_NOT_EXIST, None),
        ({"group": "nobody"}, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, None),
    ],
)
def test_5_resets_one_queue_or_all(
    run_cluster: RunCluster, fields: dict[str, Any], code: int, found: dict[int, int] | None
) -> None:
    answer = reset(filled(run_cluster), 0, **fields)
    assert (answer.code, table(answer) if answer.code == 0 else None) == (code, found)


def test_a_slave_resets_nothing(run_cluster: RunCluster) -> None:
    cluster = run_cluster()
    cluster.create_topic("orders", 2)
    slave = cluster.add_slave("broker-a")
    slave.groups.add("billing")
    with RawClient(slave.address) as client:
        fields = {"topic": "orders", "group": "billing", "isForce": True, "timestamp": 0}
        assert client.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, fields).code == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize(("release", "settings"), [("4.9", {}), ("5.3", {"resets_at_broker": False})])
def test_members_are_told_of_a_reset_that_the_broker_does_not_store(
    run_cluster: RunCluster, release: str, settings: dict[str, Any]
) -> None:
    cluster = filled(run_cluster, release, **settings)
    cluster.broker.members.add("billing", "java-1", {"orders": "*"})
    with RawClient(cluster.broker.address) as one, RawClient(cluster.broker.address) as two:
        for client_id, client in (("one", one), ("two", two)):
            client.heartbeat(client_id, ConsumerData.of("billing", {"orders": "*"}))
        one.receive_request()
        answer = reset(cluster, 0)
        assert (answer.code, table(answer)) == (0, {0: 0, 1: 0})
        for client in (one, two):
            client.receive_request()  # of the members
            told = client.receive_request()
            assert (told.code, told.is_one_way, table(told)) == (
                BrokerRequestCode.RESET_CONSUMER_CLIENT_OFFSET,
                True,
                {0: 0, 1: 0},
            )
            assert (told.fields["topic"], told.fields["group"], told.fields["timestamp"]) == ("orders", "billing", "0")
    assert (committed(cluster), commit(cluster, 1).remark, committed(cluster)) == (3, None, 1)


@pytest.mark.parametrize(("is_forced", "found"), [(True, {0: 4, 1: 2}), (False, {0: 3, 1: 2})])
def test_no_offset_grows_unless_a_reset_is_forced(
    run_cluster: RunCluster, is_forced: bool, found: dict[int, int]
) -> None:
    cluster = filled(run_cluster, "4.9")
    cluster.broker.members.add("billing", "java-1", {"orders": "*"})
    assert table(reset(cluster, NOW, isForce=is_forced)) == found
    assert cluster.broker.sent_resets == [("billing", "orders", found)]


@pytest.mark.parametrize(
    ("fields", "code", "remark"),
    [
        ({}, ResponseCode.CONSUMER_NOT_ONLINE, "Consumer not online, so can not reset offset, "),
        ({"group": "nobody"}, ResponseCode.SYSTEM_ERROR, "THe consumer group <nobody> not exist"),
        ({"topic": "nothing"}, ResponseCode.SYSTEM_ERROR, "[reset-offset] reset offset failed, no topic in this"),
    ],
)
def test_4_resets_only_groups_with_members_and_offsets(
    run_cluster: RunCluster, fields: dict[str, Any], code: int, remark: str
) -> None:
    cluster = filled(run_cluster, "4.9")
    answer = reset(cluster, 0, **fields)
    assert (answer.code, (answer.remark or "").startswith(remark)) == (code, True), answer
    assert cluster.broker.sent_resets == []
