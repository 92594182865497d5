"""Requests of brokers to a member: those of real brokers, and the answers to them."""

import json
from typing import Any

import pytest
from support.remoting_frames import read_frames

from rmq_spark.store.cluster.answer_fields import AnswerError
from rmq_spark.store.cluster.broker_requests import (
    MembersChanged,
    MemberStatus,
    OffsetsReset,
    QueueStatus,
    RunningInfoQuestion,
    StatusQuestion,
    UnsupportedDemand,
    answer_running_info,
    answer_status,
    read_broker_request,
    refuse_demand,
)
from rmq_spark.store.cluster.codes import BrokerRequestCode as Code
from rmq_spark.store.cluster.frame import Command, FrameReader, encode_command
from rmq_spark.store.cluster.responses import Subscription
from rmq_spark.store.format import fastjson
from rmq_spark.store.model import QueueKey

QUEUES = {
    QueueKey("GT", 2, "broker-a"): QueueStatus(2, 1_795_342_233_411, 1_795_342_233_453),
    QueueKey("GT", 3, "broker-b"): QueueStatus(-1, 1_795_342_233_411),
    QueueKey("other", 0, "broker-a"): QueueStatus(9, 1_795_342_233_411),
}
STATUS = MemberStatus(
    "192.0.2.2@7#rmq-spark#-#00000000",
    "gc",
    (Subscription("%RETRY%gc", "*"), Subscription("GT", "A || B")),
    1_795_342_223_746,
    "127.0.0.1:25001;127.0.0.1:25002",
    is_orderly=True,
    queues=QUEUES,
)


def recorded(code: int, file: str, kind: str = "") -> Command:
    """Return the first request of a broker with this code, or the first answer of a client to one."""
    for frame in read_frames():
        is_answer = kind == "response" and frame.request is not None and frame.request["from"] == "broker"
        asked = frame.request if is_answer else frame.line
        if frame.file == file and asked is not None and asked["code"] == code:
            if is_answer and frame.line["kind"] == "response" and frame.line["from"] == "client":
                return frame.command()
            if not kind and frame.line["from"] == "broker" and frame.line["kind"] != "response":
                return frame.command()
    raise AssertionError(code)


@pytest.mark.parametrize("file", ["4.9.7", "5.3.3"])
def test_requests_of_real_brokers_are_read(file: str) -> None:
    assert read_broker_request(recorded(40, file)) == MembersChanged("gpull")
    assert read_broker_request(recorded(221, file)) == StatusQuestion("gc", "GT")
    question = read_broker_request(recorded(307, file))
    assert isinstance(question, RunningInfoQuestion)
    assert question.group == "gc"
    assert question.client_id.startswith("192.0.2.2@")


@pytest.mark.parametrize("file", ["4.9.7", "5.3.3-client-side-reset"])
def test_a_reset_of_a_real_broker_is_read(file: str) -> None:
    expected = {QueueKey("GT", number, "broker-a"): 0 for number in range(4)}
    assert read_broker_request(recorded(220, file)) == OffsetsReset("gc", "GT", expected)


@pytest.mark.parametrize(
    ("code", "what"),
    [(Code.CONSUME_MESSAGE_DIRECTLY, "consume a message"), (Code.PUSH_REPLY_MESSAGE_TO_CLIENT, "receive the reply")],
)
def test_what_a_query_cannot_do_is_refused_by_name(code: int, what: str) -> None:
    demand = read_broker_request(Command(code, 1))
    assert isinstance(demand, UnsupportedDemand)
    answer = refuse_demand(demand, "gc")
    assert answer.code == 1
    assert what in (answer.remark or "")
    assert "gc" in (answer.remark or "")


def test_an_unknown_request_is_none() -> None:
    assert read_broker_request(Command(39, 1)) is None


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"offsetTable":{{"topic":"t","queueId":0,"brokerName":"b"}:"x"}}', b'{"offsetTable":{"x":1}}'],
)
def test_a_reset_that_cannot_be_read_is_an_error(body: bytes) -> None:
    command = Command(Code.RESET_CONSUMER_CLIENT_OFFSET, 1, {"group": "g", "topic": "t"}, body)
    with pytest.raises(AnswerError, match="RESET_CONSUMER_CLIENT_OFFSET"):
        read_broker_request(command)


def test_a_reset_without_offsets_is_empty() -> None:
    command = Command(Code.RESET_CONSUMER_CLIENT_OFFSET, 1, {"group": "g", "topic": "t"}, b"{}")
    assert read_broker_request(command) == OffsetsReset("g", "t", {})


def table_of(value: dict[str, Any], name: str) -> dict[tuple[str, int, str], Any]:
    """Return a table by queue."""
    rows = {text: fastjson.parse(text) for text in value[name]}
    return {(one["topic"], one["queueId"], one["brokerName"]): value[name][text] for text, one in rows.items()}


@pytest.mark.parametrize("file", ["4.9.7", "5.3.3"])
def test_the_running_info_has_what_a_java_client_answers_to_consumer_status(file: str) -> None:
    answer = answer_running_info(STATUS)
    (sent,) = FrameReader().feed(encode_command(answer))
    ours = fastjson.parse(str(sent.body, "utf-8"))
    theirs = fastjson.parse(str(recorded(307, file, "response").body, "utf-8"))
    assert ours.keys() >= theirs.keys() - {"jstack"}
    needed = {name for name in theirs["properties"] if name.startswith("PROP_")}
    assert ours["properties"].keys() == needed
    assert all(isinstance(text, str) for text in ours["properties"].values())
    assert ours["properties"]["PROP_NAMESERVER_ADDR"] == STATUS.name_servers
    assert ours["properties"]["PROP_CONSUMEORDERLY"] == "true"
    a_queue = next(iter(table_of(theirs, "mqTable").values()))
    queues = table_of(ours, "mqTable")
    assert queues.keys() == {(queue.topic, queue.queue_id, queue.broker) for queue in QUEUES}
    for one in queues.values():
        assert {name: type(value) for name, value in one.items()} == {name: type(a_queue[name]) for name in a_queue}
    assert [queues["GT", 2, "broker-a"][name] for name in ("commitOffset", "locked", "lastLockTimestamp")] == [
        2,
        True,
        1_795_342_233_453,
    ]
    assert [queues["GT", 3, "broker-b"][name] for name in ("commitOffset", "locked")] == [-1, False]
    subscriptions = {one["topic"]: one for one in ours["subscriptionSet"]}
    assert subscriptions["GT"]["tagsSet"] == ["A", "B"]
    assert subscriptions["GT"].keys() == theirs["subscriptionSet"][0].keys()


def test_the_status_of_a_topic_has_the_committed_offsets_of_its_queues() -> None:
    answer = answer_status(STATUS, "GT")
    value = fastjson.parse(bytes(answer.body).decode())
    theirs = fastjson.parse(str(recorded(221, "5.3.3", "response").body, "utf-8"))
    assert value.keys() == theirs.keys()
    assert value["consumerTable"] == {}
    assert table_of(value, "messageQueueTable") == {("GT", 2, "broker-a"): 2}, "no queue without an offset"


def test_the_keys_of_tables_are_written_as_a_broker_reads_them() -> None:
    queue = QueueKey('a"b', 0, "broker\\a")
    answer = answer_status(MemberStatus("c", "g", (), 0, "", queues={queue: QueueStatus(1, 0)}), queue.topic)
    text = bytes(answer.body).decode()
    assert text.startswith('{"consumerTable":{},"messageQueueTable":{{"brokerName":')
    assert table_of(fastjson.parse(text), "messageQueueTable") == {('a"b', 0, "broker\\a"): 1}
    key = text[text.index("{{") + 1 : text.index("}:") + 1]
    assert json.loads(key) == {"topic": 'a"b', "queueId": 0, "brokerName": "broker\\a"}
