"""Requests that brokers relay between administrators and the members of a group."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import pytest

from rmq_spark.store.cluster.codes import BrokerRequestCode, RequestCode, ResponseCode
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.format import fastjson
from rmq_spark.store.format.record import Record, decode_record
from rmq_spark.store.testing.brokers import ConsumerData, RunningCluster
from rmq_spark.store.testing.brokers.raw_client import RawClient
from rmq_spark.store.testing.brokers.relay_requests import INVOKE_BROKER_TO_GET_CONSUMER_STATUS

RunCluster = Callable[..., RunningCluster]
BOTH = pytest.mark.parametrize("release", ["4.9", "5.3"])
GROUP = {"consumerGroup": "billing"}
RUNNING_INFO = BrokerRequestCode.GET_CONSUMER_RUNNING_INFO
CONSUME = BrokerRequestCode.CONSUME_MESSAGE_DIRECTLY
STATUS = INVOKE_BROKER_TO_GET_CONSUMER_STATUS
AT_ONCE_S, LONG_S = 0.05, 60


@contextmanager
def connect(cluster: RunningCluster, *client_ids: str) -> Iterator[list[RawClient]]:
    """Yield an administrator's connection, and those of members with these client ids. All members were notified."""
    clients = [RawClient(cluster.broker.address) for _ in ["admin", *client_ids]]
    try:
        for number, client in enumerate(clients[1:]):
            client.heartbeat(client_ids[number], ConsumerData.of("billing", {"orders": "*"}))
            for earlier in clients[1 : number + 1]:
                earlier.receive_request()
            client.requests.clear()
        yield clients
    finally:
        for client in clients:
            client.close()


def offsets(**by_queue: int) -> bytes:
    """Return a member's answer about its queues `q0`, `q1` and so on."""
    rows = (f'{{"brokerName":"broker-a","queueId":{name[1:]},"topic":"orders"}}:{at}' for name, at in by_queue.items())
    return f'{{"consumerTable":{{}},"messageQueueTable":{{{",".join(rows)}}}}}'.encode()


@BOTH
def test_a_member_answers_an_administrator(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release, is_light=True)
    with connect(cluster, "one", "two") as (admin, one, two):
        fields = {**GROUP, "clientId": "two", "jstackEnable": False}
        opaque = admin.send(RUNNING_INFO, fields, b"question")
        asked = two.receive_request()
        assert (asked.code, asked.is_one_way, bytes(asked.body)) == (RUNNING_INFO, False, b"question")
        assert asked.fields == {**GROUP, "clientId": "two", "jstackEnable": "false"}
        two.respond(asked, 0, b'{"properties":{}}', "well")
        answer = admin.receive()
        assert (answer.opaque, answer.code, bytes(answer.body)) == (opaque, 0, b'{"properties":{}}')
        assert answer.remark == "well"
        assert one.requests == []
        admin.send(RUNNING_INFO, fields)
        two.respond(two.receive_request(), ResponseCode.SYSTEM_ERROR, remark="no")
        answer = admin.receive()
        assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "no")


@BOTH
def test_nobody_can_be_asked(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release, is_light=True)
    with connect(cluster, "one") as (admin, one):
        for fields in ({**GROUP, "clientId": "two"}, {"consumerGroup": "others", "clientId": "one"}):
            answer = admin.call(RUNNING_INFO, fields)
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert answer.remark == f"The Consumer <{fields['consumerGroup']}> <{fields['clientId']}> not online"
        assert one.requests == []


@BOTH
def test_the_time_of_a_member_that_does_not_answer_is_over(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release, is_light=True)
    cluster.broker.settings.member_answer_s = AT_ONCE_S
    cluster.broker.members.add("billing", "java-1", {"orders": "*"})
    with connect(cluster, "one") as (admin, one):
        for client_id in ("one", "java-1"):
            answer = admin.call(RUNNING_INFO, {**GROUP, "clientId": client_id})
            assert (answer.code, "Timeout" in (answer.remark or "")) == (ResponseCode.CONSUME_MSG_TIMEOUT, True)
        one.respond(one.receive_request())  # too late: nobody gets it
        assert admin.call(RUNNING_INFO, {**GROUP, "clientId": "java-1"}).code == ResponseCode.CONSUME_MSG_TIMEOUT


def test_a_broker_that_ends_waits_no_longer(run_cluster: RunCluster) -> None:
    cluster = run_cluster(is_light=True)
    cluster.broker.settings.member_answer_s = LONG_S
    with connect(cluster, "one") as (admin, one), ThreadPoolExecutor(1) as threads:
        asking = threads.submit(cluster.broker.ask_member, "billing", "one", RUNNING_INFO)
        one.receive_request()
        cluster.broker.kill()
        assert wait([asking], timeout=LONG_S / 2).done == {asking}
        with pytest.raises(TimeoutError):
            asking.result()
        with pytest.raises(ConnectionError):
            admin.receive()


@BOTH
def test_a_test_may_ask_a_member(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release, is_light=True)

    def ask(**fields: Any) -> Command:
        return cluster.broker.ask_member("billing", "one", 221, fields, b"body")

    with connect(cluster, "one") as (_, one), ThreadPoolExecutor(2) as threads:
        asking = [threads.submit(ask, number=number, flag=True) for number in range(2)]
        asked = [one.receive_request() for _ in asking]
        assert {(command.code, command.fields["flag"], bytes(command.body)) for command in asked} == {
            (221, "true", b"body")
        }
        assert len({command.opaque for command in asked}) == 2
        for command in reversed(asked):
            one.respond(command, 0, command.fields["number"].encode())
        assert [bytes(future.result().body) for future in asking] == [b"0", b"1"]
        cluster.broker.settings.member_answer_s = AT_ONCE_S
        with pytest.raises(TimeoutError):
            ask()


@BOTH
def test_a_member_gets_the_message_that_it_must_consume(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release)
    cluster.create_topic("orders", 1)
    cluster.send("orders", b"x", b"y")
    with connect(cluster, "one") as (admin, one):
        record = decode_record(bytes(admin.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": 0}).body))
        assert isinstance(record, Record)
        fields = {**GROUP, "clientId": "one", "msgId": f"7F00000100002A9F{record.total_size:016X}", "topic": "orders"}
        admin.send(CONSUME, fields)
        asked = one.receive_request()
        second = decode_record(bytes(asked.body))
        assert isinstance(second, Record)
        assert (second.queue_offset, second.body) == (1, b"y")
        added = {"groupSysFlag": "0", "topicSysFlag": "0"} if release == "5.3" else {}
        assert asked.fields == {**fields, "brokerName": "broker-a", **added}
        one.respond(asked, 1, remark="not supported")
        assert admin.receive().remark == "not supported"
        for message_id in (f"7F00000100002A9F{1 << 40:016X}", "short"):
            answer = admin.call(CONSUME, {**fields, "msgId": message_id})
            assert (answer.code, "Exception" in (answer.remark or "")) == (ResponseCode.SYSTEM_ERROR, True)


def status(command: Command) -> dict[str, dict[int, int]]:
    """Return the offsets in the answer to a question for the status of members, by client id and queue id."""
    table = fastjson.parse(bytes(command.body).decode())["consumerTable"]
    return {
        client_id: {fastjson.parse(queue)["queueId"]: at for queue, at in rows.items()}
        for client_id, rows in table.items()
    }


@BOTH
def test_the_status_of_a_group_is_that_of_the_members_that_answer(run_cluster: RunCluster, release: str) -> None:
    cluster = run_cluster(release=release, is_light=True)
    fields = {"topic": "orders", "group": "billing", "clientAddr": ""}
    bodies = {"one": offsets(q0=3, q2=4), "two": offsets(q1=5), "three": b"", "four": b'{"messageQueueTable":[1]}'}
    with connect(cluster, *bodies) as (admin, *members):
        admin.send(STATUS, fields)
        for member, body in zip(members, bodies.values(), strict=True):
            asked = member.receive_request()
            assert (asked.code, asked.fields) == (221, {"topic": "orders", "group": "billing"})
            member.respond(asked, 0, body)
        assert status(admin.receive()) == {"one": {0: 3, 2: 4}, "two": {1: 5}}
        admin.send(STATUS, {**fields, "clientAddr": "two"})
        asked = members[1].receive_request()
        members[1].respond(asked, ResponseCode.SYSTEM_ERROR, bodies["two"])
        assert status(admin.receive()) == {}
        admin.send(STATUS, fields)
        members[1].respond(members[1].receive_request(), 0, bodies["two"])
        members[1].call(RequestCode.GET_MAX_OFFSET, {"topic": "orders", "queueId": 0})
        cluster.broker.loop.run(cluster.broker.calls.clear)  # the time of the others is over
        assert status(admin.receive()) == {"two": {1: 5}}
        assert status(admin.call(STATUS, {**fields, "clientAddr": "nobody"})) == {}
        nobody = admin.call(STATUS, {**fields, "group": "nobody"})
        assert (nobody.code, "Exception" in (nobody.remark or "")) == (ResponseCode.SYSTEM_ERROR, True)


def test_a_frozen_broker_relays_when_it_continues(run_cluster: RunCluster) -> None:
    cluster = run_cluster(is_light=True)
    with connect(cluster, "one") as (admin, one):
        cluster.broker.freeze()
        admin.send(RUNNING_INFO, {**GROUP, "clientId": "one"})
        cluster.broker.thaw()
        one.respond(one.receive_request(), 0, b"running")
        assert bytes(admin.receive().body) == b"running"
