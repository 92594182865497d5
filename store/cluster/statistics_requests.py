"""The requests for what a broker has counted, in the manner of `requests`, and their responses.

A broker counts the messages of each topic and of each pair of topic and group, and tells rates of the last minute, hour
and day. It begins to count at its start, and it answers with an error for what was not counted yet.

Source: AdminBrokerProcessor#getBrokerRuntimeInfo, #queryTopicConsumeByWho, #viewBrokerStatsData, BrokerStatsManager,
StoreStatsService#getRuntimeInfo (4.9, 5.3).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from rmq_spark.store.cluster.answer_fields import Answer, Question
from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.cluster.requests import Request
from rmq_spark.store.cluster.responses import Response

# Names of statistics (Stats). The key of the first two is a topic, that of the last one topic@group.
TOPIC_PUT_NUMS, TOPIC_PUT_SIZE, GROUP_GET_NUMS = "TOPIC_PUT_NUMS", "TOPIC_PUT_SIZE", "GROUP_GET_NUMS"


@dataclass(frozen=True, slots=True)
class BrokerRuntimeResponse(Response):
    """What a broker tells about itself, as texts by name (KVTable)."""

    values: Mapping[str, str]

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        answer = Answer(command, request)
        table = answer.object(answer.json().get("table") or {}, "table")
        return cls({name: answer.text(table, name, "") for name in table})


@dataclass(frozen=True, slots=True)
class BrokerRuntimeRequest(Request[BrokerRuntimeResponse]):
    """What a broker tells about itself: version, rates, totals, disk. A slave answers too."""

    broker: str
    code = RequestCode.GET_BROKER_RUNTIME_INFO
    response = BrokerRuntimeResponse

    @property
    def purpose(self) -> str:
        return f"get the state of broker {self.broker}"


@dataclass(frozen=True, slots=True)
class TopicGroupsResponse(Response):
    """The groups that consume a topic, sorted: those with members, and those with offsets (GroupList)."""

    groups: tuple[str, ...]

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        answer = Answer(command, request)
        return cls(tuple(sorted(answer.texts(answer.json(), "groupList"))))


@dataclass(frozen=True, slots=True)
class TopicGroupsRequest(Request[TopicGroupsResponse]):
    """The groups that consume a topic, as one broker knows them (QueryTopicConsumeByWhoRequestHeader)."""

    topic: str
    broker: str
    code = RequestCode.QUERY_TOPIC_CONSUME_BY_WHO
    response = TopicGroupsResponse

    @property
    def purpose(self) -> str:
        return f"list the groups of topic {self.topic} on broker {self.broker}"

    def fields(self) -> dict[str, str]:
        return {"topic": self.topic, "bname": self.broker}


@dataclass(frozen=True, slots=True)
class StatisticResponse(Response):
    """One statistic of a broker (BrokerStatsData). Everything is 0 if the broker has not counted anything yet.

    `per_second` is the rate of the last minute. `day_sum` is the sum of the last day, or of the last hour or minute
    while there is no sum of a longer time, as RocketMQ's tools show it (StatsAllSubCommand#compute24HourSum).
    """

    per_second: float = 0.0
    day_sum: int = 0

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        if command.code != ResponseCode.SUCCESS:
            return cls()
        answer = Answer(command, request)
        value = answer.json()
        day, hour, minute = (
            answer.object(value.get(name) or {}, name) for name in ("statsDay", "statsHour", "statsMinute")
        )
        sums = [answer.integer(one, "sum", 0) for one in (day, hour, minute)]
        return cls(_rate(answer, minute), next((one for one in sums if one), 0))


def _rate(answer: Answer, minute: Mapping[str, Any]) -> float:
    value = minute.get("tps", 0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        answer.refuse("tps", str(value), "a number")
    return float(value)


@dataclass(frozen=True, slots=True)
class StatisticRequest(Request[StatisticResponse]):
    """One statistic of a broker by its name and key (ViewBrokerStatsDataRequestHeader)."""

    name: str
    key: str
    broker: str
    code = RequestCode.VIEW_BROKER_STATS_DATA
    response = StatisticResponse

    @property
    def purpose(self) -> str:
        return f"get the statistic {self.name} of {self.key} on broker {self.broker}"

    def fields(self) -> dict[str, str]:
        return {"statsName": self.name, "statsKey": self.key, "bname": self.broker}
