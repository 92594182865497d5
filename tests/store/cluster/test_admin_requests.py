"""Resets of an administrator: the request has the fields of the official client's, and answers are read as recorded."""

from typing import Any

import pytest
from support.remoting_frames import SAMPLE_OF, RecordedFrame, read_frames

from rmq_spark.store.cluster.admin_requests import ResetOffsetRequest, ResetResponse
from rmq_spark.store.cluster.answer_fields import AnswerError
from rmq_spark.store.cluster.answer_rule import UnknownGroupError
from rmq_spark.store.cluster.answer_rules import find_rule, make_error
from rmq_spark.store.cluster.codes import RequestCode as Code
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.errors import BrokerError, NoPermissionError, NotFoundError, RmqError
from rmq_spark.store.model import QueueKey

QUEUE = QueueKey("orders", 3, "broker-a")
REQUEST = ResetOffsetRequest("billing", QUEUE, 41)


def recorded(kind: str) -> list[RecordedFrame]:
    frames = [frame for frame in read_frames() if frame.line["kind"] == kind]
    return [frame for frame in frames if frame.line["name"] == "INVOKE_BROKER_TO_RESET_OFFSET"]


def answer(code: int, remark: str | None = None, body: bytes = b"") -> Command:
    return Command(code, 1, {}, memoryview(body), 1, remark)


def test_the_request_has_the_fields_of_the_official_client() -> None:
    frames = recorded("request")
    assert {frame.file for frame in frames} == {"4.9.7", "5.3.3", "5.3.3-client-side-reset"}
    for frame in frames:
        added = {"bname"} if frame.file.startswith("5") else {"bname", "queueId", "offset"}
        assert REQUEST.fields().keys() == frame.command().fields.keys() | added, frame


def test_the_request_names_one_queue_and_leaves_the_others_of_a_topic_where_they_are() -> None:
    fields = REQUEST.fields()
    assert (fields["topic"], fields["group"], fields["queueId"], fields["offset"]) == ("orders", "billing", "3", "41")
    # With these a broker that ignores queue and offset sends what is committed (Broker2Client#resetOffset).
    assert (fields["timestamp"], fields["isForce"]) == ("-1", "false")


def test_recorded_answers_have_the_offset_of_each_queue() -> None:
    frames = recorded("response")
    assert len(frames) == 3
    for frame in frames:
        found = SAMPLE_OF[Code.INVOKE_BROKER_TO_RESET_OFFSET].read(frame.command())
        assert found == ResetResponse({QueueKey("GT", number, "broker-a"): 0 for number in range(4)})


@pytest.mark.parametrize(
    ("code", "remark", "expected"),
    [
        (206, "Consumer not online, so can not reset offset, Group: g Topic: t", ResetResponse(is_online=False)),
        (1, "THe consumer group <billing> not exist", ResetResponse(lacks_offsets=True)),
    ],
)
def test_a_broker_that_sent_nothing_says_why(code: int, remark: str, expected: ResetResponse) -> None:
    assert find_rule(REQUEST.code, code, remark).is_answer
    assert REQUEST.read(answer(code, remark)) == expected


@pytest.mark.parametrize(
    ("code", "remark", "error", "said"),
    [
        (1, "[reset-offset] reset offset failed, no topic in this broker. topic=t", NotFoundError, "have the topic"),
        (17, "Topic t does not exist", NotFoundError, "does not have the topic"),
        (26, "Group billing does not exist", UnknownGroupError, "the group does not exist"),
        (1, "Target offset 41 not in consume queue range [0-6]", BrokerError, "Target offset 41"),
        (1, "Can not reset offset in slave broker", BrokerError, "slave broker"),
        (
            16,
            "User:u has no permission to access Topic:orders from 1.2.3.4, no matched policies.",
            NoPermissionError,
            "Update of the topic and of the group",
        ),
    ],
)
def test_a_refused_reset_is_an_error(code: int, remark: str, error: type[RmqError], said: str) -> None:
    assert not find_rule(REQUEST.code, code, remark).is_answer
    found = make_error(REQUEST, answer(code, remark), "broker broker-a")
    assert type(found) is error
    assert str(found).startswith("cannot reset group billing to offset 41 in queue orders/broker-a:3: broker broker-a ")
    assert said in str(found)


@pytest.mark.parametrize(("code", "right"), [(208, "Get of the group"), (203, "Get of the group"), (43, "the cluster")])
def test_a_missing_right_on_groups_is_named(code: int, right: str) -> None:
    request: Any = SAMPLE_OF[Code(code)]
    error = make_error(request, answer(16, "User:u has no permission to access Group:billing from 1.2.3.4"), "x")
    assert isinstance(error, NoPermissionError)
    assert right in str(error)


@pytest.mark.parametrize(
    "body", [b"[]", b'{"offsetTable":[]}', b'{"offsetTable":{"x":1}}', b'{"offsetTable":{1:true}}']
)
def test_a_wrong_answer_is_an_error(body: bytes) -> None:
    with pytest.raises(AnswerError, match="INVOKE_BROKER_TO_RESET_OFFSET is invalid"):
        REQUEST.read(answer(0, None, body))
