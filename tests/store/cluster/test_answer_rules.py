"""What response codes mean, on the remarks of real brokers and name servers."""

import pickle

import pytest
from support.remoting_frames import SAMPLE_OF, read_frames

from rmq_spark.store.cluster.answer_rule import UnknownGroupError
from rmq_spark.store.cluster.answer_rules import Retry, find_rule, make_error, shorten_remark
from rmq_spark.store.cluster.codes import RequestCode as Code
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.errors import (
    BackendUnavailableError,
    BrokerError,
    NoPermissionError,
    NotFoundError,
    OptionError,
    RmqError,
    UnknownOutcomeError,
)

ILLEGAL_QUEUE = "queueId[99] is illegal, topic:[GT] topicConfig.readQueueNums:[4] consumer:[/127.0.0.1:40152]"
ACL_4 = "org.apache.rocketmq.acl.common.AclException: {}, org.apache.rocketmq.acl.plain.PlainPermissionManager"
CASES = [
    (11, 2, "[REJECTREQUEST]system busy, start flow control for a while", BackendUnavailableError, Retry.NEW_ROUTE),
    (11, 2, "[TIMEOUT_CLEAN_QUEUE]broker busy", BackendUnavailableError, Retry.LATER),
    (30, 2, "[REJECTREQUEST]system busy", BackendUnavailableError, Retry.LATER),
    (202, 2, None, BackendUnavailableError, Retry.LATER),
    (30, 1500, "", BackendUnavailableError, Retry.LATER),
    (11, 14, "service not available now", BackendUnavailableError, Retry.NEW_ROUTE),
    (351, 3, " request type 351 not supported", BrokerError, Retry.NEVER),
    (206, 3, " request type 206 not supported", BrokerError, Retry.NEVER),
    (204, 3, " request type 204 not supported", BrokerError, Retry.NEVER),
    (204, 1, "java.lang.NullPointerException", BrokerError, Retry.NEVER),
    (204, 16, "User:a has no permission to access Cluster:c from 1.2.3.4", NoPermissionError, Retry.NEVER),
    (11, 16, "the topic[GT] pulling message is forbidden", NoPermissionError, Retry.NEVER),
    (
        11,
        16,
        "User:reader has no permission to access Topic:GT from 1.2.3.4, no matched policies.",
        NoPermissionError,
        Retry.NEVER,
    ),
    (11, 16, "username cannot be null.", OptionError, Retry.NEW_KEYS),
    (11, 16, "User:reader is not found.", OptionError, Retry.NEW_KEYS),
    (11, 16, "check signature failed.", OptionError, Retry.NEW_KEYS),
    (11, 1, ACL_4.format("No accessKey is configured"), OptionError, Retry.NEW_KEYS),
    (33, 1, ACL_4.format("No acl config for reader"), OptionError, Retry.NEW_KEYS),
    (38, 1, ACL_4.format("Check signature failed for accessKey=reader"), OptionError, Retry.NEW_KEYS),
    (11, 1, ACL_4.format("No default permission for topic:GT"), NoPermissionError, Retry.NEVER),
    (17, 1, ACL_4.format("Need admin permission for request code=17"), NoPermissionError, Retry.NEVER),
    (11, 26, "subscription group [g] does not exist", UnknownGroupError, Retry.NEVER),
    (105, 17, "No topic route info in name server for the topic: T", NotFoundError, Retry.ELSEWHERE),
    (202, 17, "topic[Nope] not exist", NotFoundError, Retry.NEW_ROUTE),
    (11, 29, ILLEGAL_QUEUE, NotFoundError, Retry.NEW_ROUTE),
    (11, 1, ILLEGAL_QUEUE, NotFoundError, Retry.NEW_ROUTE),
    (11, 1, "java.lang.NullPointerException", BrokerError, Retry.NEVER),
    (17, 29, "The specified topic contains illegal characters", BrokerError, Retry.NEVER),
    (46, 23, "Parse failed", OptionError, Retry.NEVER),
    (11, 1, "The broker does not support consumer to filter message by SQL92", BrokerError, Retry.NEVER),
    (11, 24, "the consumer's group info not exist", BrokerError, Retry.NEVER),
    (11, 501, None, BrokerError, Retry.NEVER),
    (105, 1, "name server not ready", BackendUnavailableError, Retry.ELSEWHERE),
    (206, 1, "disable", BrokerError, Retry.ELSEWHERE),
    (11, 22, "", BrokerError, Retry.NEVER),
    (30, 4711, "?", BrokerError, Retry.NEVER),
    (310, 13, "timer message illegal, the delay time should not be bigger", BrokerError, Retry.NEVER),
    (310, 2, "[REJECTREQUEST]system busy", BackendUnavailableError, Retry.NEW_ROUTE),
    (320, 1, "[PC_SYNCHRONIZED]broker busy", BackendUnavailableError, Retry.LATER),
    (310, 2, "[PC_SYNCHRONIZED]broker busy", BackendUnavailableError, Retry.LATER),
    (320, 1, "in-sync replicas not enough", BackendUnavailableError, Retry.NEW_ROUTE),
    (320, 1, "UNKNOWN_ERROR", UnknownOutcomeError, Retry.NEVER),
    # The names of PutMessageStatus in 4.9 and 5.3.
    (36, 1, "SERVICE_NOT_AVAILABLE", BackendUnavailableError, Retry.NEW_ROUTE),
    (36, 1, "OS_PAGECACHE_BUSY", BackendUnavailableError, Retry.NEW_ROUTE),
    (36, 1, "OS_PAGE_CACHE_BUSY", BackendUnavailableError, Retry.NEW_ROUTE),
    (36, 1, "CREATE_MAPEDFILE_FAILED", BackendUnavailableError, Retry.NEW_ROUTE),
    (36, 1, "CREATE_MAPPED_FILE_FAILED", BackendUnavailableError, Retry.NEW_ROUTE),
    (36, 1, "IN_SYNC_REPLICAS_NOT_ENOUGH", BackendUnavailableError, Retry.NEW_ROUTE),
    (36, 1, "LMQ_CONSUME_QUEUE_NUM_EXCEEDED", BackendUnavailableError, Retry.NEW_ROUTE),
    (36, 1, "WHEEL_TIMER_FLOW_CONTROL", BackendUnavailableError, Retry.NEW_ROUTE),
    (36, 1, "No master available along with 10.0.0.1", BackendUnavailableError, Retry.NEW_ROUTE),
    (36, 1, "MESSAGE_ILLEGAL", BrokerError, Retry.NEVER),
    (36, 1, "PROPERTIES_SIZE_EXCEEDED", BrokerError, Retry.NEVER),
    (36, 1, "WHEEL_TIMER_MSG_ILLEGAL", BrokerError, Retry.NEVER),
    (36, 1, "WHEEL_TIMER_NOT_ENABLE", BrokerError, Retry.NEVER),
    (36, 1, "UNKNOWN_ERROR", UnknownOutcomeError, Retry.NEVER),
    (36, 1, "PUT_TO_REMOTE_BROKER_FAIL", UnknownOutcomeError, Retry.NEVER),
    (36, 1, "putMessageResult is null", UnknownOutcomeError, Retry.NEVER),
]


@pytest.mark.parametrize(("request_code", "code", "remark", "error", "retry"), CASES)
def test_find_rule_knows_every_refusal(
    request_code: int, code: int, remark: str | None, error: type[RmqError], retry: Retry
) -> None:
    rule = find_rule(Code(request_code), code, remark)
    assert (rule.error, rule.retry) == (error, retry)
    request = SAMPLE_OF[Code(request_code)]
    made = make_error(request, Command(code, 1, remark=remark), "broker broker-a (10.0.0.1:10911)")
    assert type(made) is error
    assert str(made).startswith(f"cannot {request.purpose}: broker broker-a (10.0.0.1:10911) answered {code}")
    assert str(made).endswith(f": {rule.meaning}; expected {rule.expected}. {rule.next_step}")


@pytest.mark.parametrize(
    ("request_code", "code", "remark"),
    [
        *[(code, 0, "not set any response code") for code in Code],
        *[(11, code, None) for code in (19, 20, 21)],
        (14, 22, "Not found"),
        (12, 22, "can not find message"),
        (203, 206, "the consumer group[g] not online"),
        (38, 1, "no consumer for this group, g"),
        (204, 1, "the producer group[g] not exist"),
        (33, 1, "can not find message by the offset, 7"),
        (43, 1, "No consumer offset in this broker"),
        (46, 1, "The broker does not support consumer to filter message by SQL92"),
        *[(36, 1, name) for name in ("FLUSH_DISK_TIMEOUT", "FLUSH_SLAVE_TIMEOUT", "SLAVE_NOT_AVAILABLE")],
    ],
)
def test_find_rule_knows_every_answer(request_code: int, code: int, remark: str | None) -> None:
    assert find_rule(Code(request_code), code, remark).is_answer


def test_every_golden_answer_has_a_rule_of_its_own() -> None:
    without = {
        (frame.request["code"], frame.line["code"])
        for frame in read_frames()
        if frame.request
        and frame.line["kind"] == "response"
        and frame.request["code"] in set(Code)
        and find_rule(Code(frame.request["code"]), frame.line["code"], frame.line.get("remark")).code is None
    }
    # A pull without its subscription (24, 25), and one without a required field (1).
    assert without == {(11, 1), (11, 24), (11, 25)}


def test_a_broker_error_has_the_code_of_the_answer() -> None:
    error = make_error(SAMPLE_OF[Code.GET_TOPIC_CONFIG], Command(3, 1, remark="not supported\nmore"), "b:1")
    assert isinstance(error, BrokerError)
    assert error.code == 3
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.code, str(copy)) == (3, str(error))
    assert str(error).startswith(
        "cannot get the settings of topic orders on broker broker-a: b:1 answered 3 REQUEST_CODE_NOT_SUPPORTED "
        "(not supported): the server does not know the request; expected a broker or name server of RocketMQ 4.9.4"
    )


def test_make_error_hides_an_account() -> None:
    remark = ACL_4.format("Check signature failed for accessKey=AKIA7")
    error = make_error(SAMPLE_OF[Code.PULL_MESSAGE], Command(1, 1, remark=remark), "b:1", ["AKIA", "AKIA7", ""])
    assert "AKIA" not in str(error)
    assert "accessKey=***," in str(error)


@pytest.mark.parametrize(
    ("remark", "short"),
    [
        (None, ""),
        ("", ""),
        ("\n \n a b \nc", "a b"),
        ("a\x1b[31m\u202eb", "a?[31m?b"),
        ("x" * 300, "x" * 300),
        ("x" * 301, "x" * 300 + "…"),
    ],
)
def test_shorten_remark_gives_one_printable_line(remark: str | None, short: str) -> None:
    assert shorten_remark(remark) == short
