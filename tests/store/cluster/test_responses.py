"""Responses: those of real brokers, and wrong ones."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.remoting_frames import SAMPLE_OF, read_frames

from rmq_spark.store.cluster.answer_fields import AnswerError, parse_json
from rmq_spark.store.cluster.answer_rules import find_rule
from rmq_spark.store.cluster.codes import GetMessageStatus, PullStatus
from rmq_spark.store.cluster.codes import RequestCode as Code
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.cluster.responses import (
    BrokerData,
    GroupQueueStats,
    MemberConnection,
    PullResponse,
    QueueData,
    QueueStats,
    Subscription,
)
from rmq_spark.store.format import fastjson
from rmq_spark.store.model import QueueKey

ANSWERS = [
    frame
    for frame in read_frames()
    if frame.line["kind"] == "response" and frame.request is not None and frame.request["code"] in SAMPLE_OF
]


def read(code: int, fields: dict[str, str] | None = None, body: Any = b"", answer: int = 0) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return SAMPLE_OF[Code(code)].read(Command(answer, 1, fields or {}, memoryview(data), 1))


def test_every_golden_answer_is_read_as_recorded() -> None:
    read_answers = 0
    for frame in ANSWERS:
        assert frame.request is not None
        request, command = SAMPLE_OF[Code(frame.request["code"])], frame.command()
        if not find_rule(request.code, command.code, command.remark).is_answer:
            continue
        read_answers += 1
        response: Any = request.read(command)
        fields = frame.line.get("ext") or {}
        if request.code == Code.PULL_MESSAGE:
            check_pull(response, command, fields)
        elif "offset" in fields:
            assert response.offset == int(fields["offset"]), frame
        elif request.code == Code.GET_TOPIC_STATS_INFO:
            table = frame.line["body"]["json"]["offsetTable"]
            assert response.queues == {
                QueueKey(queue["topic"], queue["queueId"], queue["brokerName"]): QueueStats(
                    one["minOffset"], one["maxOffset"], one["lastUpdateTimestamp"]
                )
                for queue, one in table
            }
    assert read_answers == 284


def check_pull(response: PullResponse, command: Command, fields: dict[str, str]) -> None:
    assert response.status == command.code
    assert response.reason == command.remark
    assert response.reason in set(GetMessageStatus)
    assert response.next_offset == int(fields["nextBeginOffset"])
    assert (response.min_offset, response.max_offset) == (int(fields["minOffset"]), int(fields["maxOffset"]))
    assert response.records == command.body
    assert isinstance(response.records, memoryview) == (response.status is PullStatus.FOUND)


def golden(code: int, file: str = "5.3.3") -> Any:
    """Return the response that the first successful golden answer to a request gives."""
    for frame in ANSWERS:
        assert frame.request is not None
        if (frame.file, frame.request["code"], frame.line["code"]) == (file, code, 0):
            return SAMPLE_OF[Code(code)].read(frame.command())
    raise AssertionError(code)


def test_a_route_has_queues_and_addresses() -> None:
    broker = BrokerData("broker-a", "c1", {0: "127.0.0.1:25100"})
    assert golden(105).queues == (QueueData("broker-a", 6, 4, 4),)
    assert golden(105).brokers == (broker,)
    assert golden(105, "4.9.7").queues == (QueueData("broker-a", 7, 8, 8),)
    assert golden(105, "5.3.3-ours").brokers[0].addresses == {0: "127.0.0.1:25600"}, "keys without quotes"
    assert golden(106).brokers == {"broker-a": broker}
    assert golden(106).clusters == {"c1": ("broker-a",)}


def test_a_route_is_sorted_and_keeps_what_is_special() -> None:
    value = {
        "queueDatas": [{"brokerName": name, "perm": 4, "readQueueNums": 1, "writeQueueNums": 0} for name in "ba"],
        "brokerDatas": [
            {"brokerName": "b", "cluster": "c", "brokerAddrs": {"1": "h:2", "0": "h:1"}, "enableActingMaster": True}
        ],
        "orderTopicConf": "b:8",
        "topicQueueMappingByBroker": {"b": {"topic": "t"}},
    }
    route = read(105, body=value)
    assert [one.broker for one in route.queues] == ["a", "b"]
    assert list(route.brokers[0].addresses.items()) == [(0, "h:1"), (1, "h:2")]
    assert (route.brokers[0].enables_acting_master, route.order_config, route.is_static) == (True, "b:8", True)
    assert read(105, body={}) == read(
        105, body={"queueDatas": None, "brokerDatas": [], "topicQueueMappingByBroker": {}}
    )


def test_the_answers_about_groups() -> None:
    assert golden(38).client_ids == ("192.0.2.2@lite@STREAM",)
    connections = golden(203)
    assert connections.connections[0] == MemberConnection("192.0.2.2@one", "127.0.0.1:51914", "JAVA", 479)
    assert (connections.consume_type, connections.message_model) == ("CONSUME_PASSIVELY", "CLUSTERING")
    assert connections.consume_from == "CONSUME_FROM_FIRST_OFFSET"
    assert connections.subscriptions["GT"] == Subscription("GT", "*", "TAG")
    stats = golden(208).queues
    assert stats[QueueKey("GT", 0, "broker-a")] == GroupQueueStats(7, 6, 1795336239881)
    assert golden(351).config.read_queue_count == 4
    assert golden(32).time_ms == 1795336238806


def test_the_answers_to_a_member() -> None:
    assert golden(34).server_version == 479
    assert golden(34, "4.9.7").server_version == 407
    assert golden(41).locked == {QueueKey("GT", 1, "broker-a")}
    assert read(41, body={"lockOKMQSet": []}).locked == read(41, body={}).locked == frozenset()


def test_the_producers_of_a_group_are_read() -> None:
    assert golden(204).addresses == {"192.0.2.2@i7033679776211": "127.0.0.1:38706"}
    assert golden(204, "4.9.7").addresses == {"192.0.2.2@i7122181832519": "127.0.0.1:46976"}
    assert read(204, body={"connectionSet": []}).addresses == read(204, answer=1).addresses == {}


def test_the_mode_of_a_group_is_read() -> None:
    queue = {"brokerName": "broker-a", "queueId": -1, "topic": "T"}
    assignments = [{"messageQueue": queue, "mode": mode} for mode in ("POP", "PULL", "POP")]
    assert read(400, body={"messageQueueAssignments": assignments}).modes == {"POP", "PULL"}
    assert read(400, body={}).modes == frozenset()


def test_answers_without_contents_are_empty() -> None:
    assert read(38, answer=1).client_ids == ()
    assert read(203, answer=206).connections == ()
    assert read(14, answer=22).offset is None
    assert read(12, body=b"x", answer=22).records == b""
    assert read(33, body=b"x", answer=1).records == b""
    assert read(43, answer=1).offsets == {}
    assert not read(46, answer=1).is_supported
    assert read(46).is_supported
    assert read(33, body=b"record").records == b"record"


def test_the_offsets_of_all_groups_come_by_topic_and_group() -> None:
    body = b'{"dataVersion":{"counter":1},"offsetTable":{"orders@billing":{0:12,1:34}}}'
    assert read(43, body=body).offsets == {"orders@billing": {0: 12, 1: 34}}


PULL = {"nextBeginOffset": "5", "minOffset": "0", "maxOffset": "9"}


@pytest.mark.parametrize("code", [0, 19, 20, 21])
def test_only_a_pull_that_found_messages_has_records(code: int) -> None:
    response = read(11, PULL, b"x", code)
    assert response.records == (b"x" if code == 0 else b"")
    assert (response.next_offset, response.min_offset, response.max_offset) == (5, 0, 9)
    assert (response.suggested_broker, response.offset_delta, response.reason) == (0, 0, "")
    assert read(11, {**PULL, "suggestWhichBrokerId": "1", "offsetDelta": "-3"}).suggested_broker == 1
    assert read(11, {**PULL, "suggestWhichBrokerId": "1", "offsetDelta": "-3"}).offset_delta == -3


WRONG = [
    (11, {"minOffset": "0", "maxOffset": "9"}, b"", 0, "nextBeginOffset: found no such field; expected a whole number"),
    (11, {**PULL, "minOffset": ""}, b"", 0, "field minOffset: found ''; expected a whole number of 64 bits"),
    (11, {**PULL, "minOffset": "1_0"}, b"", 0, "found '1_0'"),
    (11, {**PULL, "minOffset": "٣"}, b"", 0, r"found '\\u0663'"),
    (11, {**PULL, "minOffset": " 1"}, b"", 0, "found ' 1'"),
    (11, {**PULL, "minOffset": "1\n"}, b"", 0, r"found '1\\n'"),
    (11, {**PULL, "minOffset": "9223372036854775808"}, b"", 0, "found '9223372036854775808'"),
    (11, {**PULL, "maxOffset": "1" * 10_000}, b"", 0, "field maxOffset"),
    (11, PULL, b"", 17, "PULL_MESSAGE is invalid in its code: found 17; expected a status of a pull: 0, 19, 20 or 21"),
    (30, {}, b"", 0, "GET_MAX_OFFSET is invalid in its field offset"),
    (14, {"offset": "null"}, b"", 0, "field offset: found 'null'"),
    (32, {}, b"", 0, "field timestamp: found no such field"),
    (105, {}, b"", 0, r"body: found no JSON \(character 0: expected a value, the text ends\); expected JSON"),
    (105, {}, b"\xff", 0, "body: found a byte that is not UTF-8 at position 0"),
    (105, {}, b"[]", 0, "body: found a list; expected an object"),
    (105, {}, b'{"queueDatas":{}}', 0, "queueDatas: found an object; expected a list"),
    (105, {}, b'{"queueDatas":[1]}', 0, r"queueDatas\[0\]: found 1; expected an object"),
    (105, {}, b'{"queueDatas":[{"perm":6}]}', 0, "brokerName: found nothing; expected a text"),
    (105, {}, b'{"queueDatas":[{"brokerName":"b","perm":true}]}', 0, "perm: found True; expected a whole number"),
    (
        105,
        {},
        b'{"queueDatas":[{"brokerName":"b","perm":6,"readQueueNums":"2","writeQueueNums":1}]}',
        0,
        "readQueueNums: found '2'; expected a whole number",
    ),
    (105, {}, b'{"brokerDatas":[{"brokerName":"b","brokerAddrs":{"x":"h:1"}}]}', 0, "brokerAddrs: found 'x'"),
    (105, {}, b'{"brokerDatas":[{"brokerName":"b","brokerAddrs":{"0":7}}]}', 0, "address: found 7; expected a text"),
    (105, {}, b'{"brokerDatas":[{"brokerName":"\\ud800","brokerAddrs":{}}]}', 0, "without single surrogates"),
    (105, {}, b"[" * 1_000_000, 0, "no JSON"),
    (106, {}, b'{"brokerAddrTable":{"b":3}}', 0, r"brokerAddrTable.b: found 3"),
    (202, {}, b'{"offsetTable":{"x":{"minOffset":0,"maxOffset":1}}}', 0, "a queue: found no JSON"),
    (
        202,
        {},
        b'{"offsetTable":{{"topic":"t","queueId":0,"brokerName":"b"}:{"minOffset":0}}}',
        0,
        "maxOffset: found nothing",
    ),
    (
        202,
        {},
        b'{"offsetTable":{{"topic":"t","brokerName":"b"}:{"minOffset":0,"maxOffset":1}}}',
        0,
        "queueId: found nothing",
    ),
    (41, {}, b"", 0, "LOCK_BATCH_MQ is invalid in its body: found no JSON"),
    (41, {}, b'{"lockOKMQSet":[{"topic":"t","queueId":1}]}', 0, "brokerName: found nothing; expected a text"),
    (206, {}, b'{"topicList":["a",1]}', 0, r"topicList\[1\]: found 1; expected a text"),
    (202, {}, b'{"offsetTable":{"a' + b"b" * 5000 + b'":3}}', 0, "offsetTable.ab+…: found 3"),
    (202, {}, b'{"offsetTable":{"a\\u0015":3}}', 0, r"offsetTable.a\?: found 3"),
    (43, {}, b'{"offsetTable":{"a' + b"b" * 5000 + b'":3}}', 0, "found offsetTable.ab+…; expected the offsets"),
    (43, {}, b'{"offsetTable":{"a@b":{"x":1}}}', 0, "the offsets of all groups"),
]


@pytest.mark.parametrize(("code", "fields", "body", "answer", "message"), WRONG)
def test_a_wrong_answer_is_an_error_that_names_the_value(
    code: int, fields: dict[str, str], body: bytes, answer: int, message: str
) -> None:
    with pytest.raises(AnswerError, match=message) as caught:
        read(code, fields, body, answer)
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


names = st.text(max_size=6) | st.sampled_from(["broker-a", '","queueId":0,"topic":"', '{"brokerName":"b"', "a,{", "}:"])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(names, st.integers(0, 1 << 31), names, names), max_size=4))
def test_a_table_by_queue_is_parsed_as_the_loose_parser_does(rows: list[tuple[str, int, str, str]]) -> None:
    def quote(text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    queues = [f'{{"brokerName":{quote(b)},"queueId":{q},"topic":{quote(t)}}}:{quote(v)}' for b, q, t, v in rows]
    text = f'{{"offsetTable":{{{",".join(queues)}}},"more":[{{"brokerName":"b","queueId":1,"topic":"t"}}]}}'
    assert parse_json(text) == fastjson.parse(text)
    for wrong in (text[:-1], text.replace("}:", "},"), text.replace(":", ":{", 1)):
        try:
            expected = fastjson.parse(wrong)
        except fastjson.FastjsonError:
            with pytest.raises(fastjson.FastjsonError):
                parse_json(wrong)
        else:
            assert parse_json(wrong) == expected
