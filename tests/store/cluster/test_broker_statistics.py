"""Requests for what brokers have counted: answers of the releases are read, and odd ones are refused."""

import json
from typing import Any

import pytest
from support.remoting_frames import SAMPLE_OF, read_frames

from rmq_spark.store.cluster.answer_fields import AnswerError
from rmq_spark.store.cluster.answer_rules import find_rule
from rmq_spark.store.cluster.broker_statistics import _version
from rmq_spark.store.cluster.codes import RequestCode as Code
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.cluster.statistics_requests import (
    BrokerRuntimeRequest,
    StatisticRequest,
    StatisticResponse,
    TopicGroupsRequest,
)

STATISTIC = StatisticRequest("TOPIC_PUT_NUMS", "orders", "broker-a")


def answer(value: Any, code: int = 0, remark: str | None = None) -> Command:
    return Command(code, 1, {}, memoryview(json.dumps(value).encode()), 1, remark)


def test_recorded_groups_of_a_topic_are_read() -> None:
    frames = [frame for frame in read_frames() if frame.line["name"] == "QUERY_TOPIC_CONSUME_BY_WHO"]
    answers = [frame for frame in frames if frame.line["kind"] == "response"]
    assert len(answers) == 2
    for frame in answers:
        found = SAMPLE_OF[Code.QUERY_TOPIC_CONSUME_BY_WHO].read(frame.command())
        assert list(found.groups) == sorted(frame.line["body"]["json"]["groupList"])
    for frame in frames:
        if frame.line["kind"] == "request":
            assert TopicGroupsRequest("GT", "b").fields().keys() >= frame.command().fields.keys() - {"n"}


@pytest.mark.parametrize(
    ("day", "hour", "minute", "expected"), [(9, 5, 2, 9), (0, 5, 2, 5), (0, 0, 2, 2), (0, 0, 0, 0)]
)
def test_the_sum_is_that_of_the_longest_time_with_one(day: int, hour: int, minute: int, expected: int) -> None:
    sums = {"statsDay": day, "statsHour": hour, "statsMinute": minute}
    value = {name: {"sum": one, "tps": 0.5} for name, one in sums.items()}
    assert STATISTIC.read(answer(value)) == StatisticResponse(0.5, expected)


def test_a_statistic_that_was_never_counted_is_zero() -> None:
    remark = "The stats <TOPIC_PUT_NUMS> <orders> not exist"
    assert find_rule(Code.VIEW_BROKER_STATS_DATA, 1, remark).is_answer
    assert not find_rule(Code.VIEW_BROKER_STATS_DATA, 1, "out of memory").is_answer
    assert STATISTIC.read(answer(None, 1, remark)) == StatisticResponse()


@pytest.mark.parametrize("tps", [True, "1.0", [1]])
def test_a_rate_that_is_no_number_is_refused(tps: object) -> None:
    with pytest.raises(AnswerError, match="tps"):
        STATISTIC.read(answer({"statsMinute": {"tps": tps}}))


def test_the_state_of_a_broker_has_texts_only() -> None:
    request = BrokerRuntimeRequest("broker-a")
    assert request.read(answer({"table": {"putTps": "1 2 3"}})).values == {"putTps": "1 2 3"}
    with pytest.raises(AnswerError, match="putTps"):
        request.read(answer({"table": {"putTps": 1}}))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("V5_3_3", "5.3.3"),
        ("V4_9_7", "4.9.7"),
        ("V5_3_3_SNAPSHOT", "5.3.3-SNAPSHOT"),
        ("HIGHER_VERSION", "HIGHER_VERSION"),
        (None, None),
    ],
)
def test_the_version_of_a_broker_is_spelt_as_that_of_a_client(name: str | None, expected: str | None) -> None:
    assert _version(name) == expected
