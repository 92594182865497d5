"""The responses of brokers and name servers that reading a cluster needs, as typed values.

Each class has `of`, which reads the response to a request and raises AnswerError for a missing or invalid value. `of`
is for the response codes that are an answer to the request. All others are errors (`answer_rules`). Topics and groups
are the cluster's names, with the namespace. All times are in ms since the epoch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from rmq_spark.store.cluster.answer_fields import Answer, Question
from rmq_spark.store.cluster.codes import PullStatus, ResponseCode
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.format.config_json import TopicConfig, decode_consumer_offsets
from rmq_spark.store.model import QueueKey

MAX_QUEUE_COUNT = 1 << 20  # more than any broker has


class Response:
    """A response with the contents that its request asked for."""

    __slots__ = ()

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        """Return the response that `command` contains. Raises AnswerError if a value is missing or invalid."""
        raise NotImplementedError(cls)


@dataclass(frozen=True, slots=True)
class DoneResponse(Response):
    """The request was executed. There is no other content."""

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        return cls()


@dataclass(frozen=True, slots=True)
class CommitResponse(Response):
    """The answer to a commit. A broker of 5.x drops it if the group `is_reset` by an administrator.

    That ends with the next pull of the group from the queue, which takes the reset.
    """

    is_reset: bool

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        return cls("previously reset" in (command.remark or ""))


@dataclass(frozen=True, slots=True)
class QueueData:
    """The queues of a topic on one broker (QueueData). `perm` is a sum of the constants PERM_* of `config_json`.

    Brokers accept any numbers of queues from an administrator, so the numbers may be impossible.
    """

    broker: str
    perm: int
    read_queue_count: int
    write_queue_count: int
    topic_sys_flag: int = 0

    @property
    def is_possible(self) -> bool:
        """Whether the numbers of queues are from 0 to a limit, so that a wrong number cannot exhaust the memory."""
        return all(0 <= count <= MAX_QUEUE_COUNT for count in (self.read_queue_count, self.write_queue_count))


@dataclass(frozen=True, slots=True)
class BrokerData:
    """The addresses of a broker by broker id, where 0 is the master (BrokerData).

    `enables_acting_master` says that a slave may act as master without write permission (5.x).
    """

    broker: str
    cluster: str
    addresses: Mapping[int, str]
    enables_acting_master: bool = False


@dataclass(frozen=True, slots=True)
class RouteResponse(Response):
    """The route of a topic (TopicRouteData), both lists sorted by broker.

    A broker can be missing in one of the lists while it registers. `order_config` is orderTopicConf, "" if there is
    none. A topic that `is_static` has its queues mapped between brokers (TopicQueueMappingInfo).
    """

    queues: tuple[QueueData, ...]
    brokers: tuple[BrokerData, ...]
    order_config: str = ""
    is_static: bool = False

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        answer = Answer(command, request)
        route = answer.json()
        queues = [
            QueueData(
                answer.text(one, "brokerName"),
                answer.integer(one, "perm"),
                answer.integer(one, "readQueueNums"),
                answer.integer(one, "writeQueueNums"),
                answer.integer(one, "topicSysFlag", 0),
            )
            for one in answer.objects(route, "queueDatas")
        ]
        brokers = [_read_broker(answer, one) for one in answer.objects(route, "brokerDatas")]
        return cls(
            tuple(sorted(queues, key=lambda one: one.broker)),
            tuple(sorted(brokers, key=lambda one: one.broker)),
            answer.text(route, "orderTopicConf", ""),
            bool(answer.table(route, "topicQueueMappingByBroker")),
        )


def _read_broker(answer: Answer, one: Mapping[str, object]) -> BrokerData:
    addresses = {}
    for broker_id, address in answer.object(one.get("brokerAddrs") or {}, "brokerAddrs").items():
        if not (broker_id.isascii() and broker_id.isdigit() and len(broker_id) < 19):
            answer.refuse("brokerAddrs", ascii(broker_id[:100]), "broker ids")
        addresses[int(broker_id)] = answer.text({"address": address}, "address")
    return BrokerData(
        answer.text(one, "brokerName"),
        answer.text(one, "cluster", ""),
        dict(sorted(addresses.items())),
        answer.boolean(one, "enableActingMaster"),
    )


@dataclass(frozen=True, slots=True)
class ClusterInfoResponse(Response):
    """The brokers of a cluster by name, and the names of the brokers of each cluster, sorted (ClusterInfo).

    `server_version` is the number of the name server's version (MQVersion).
    """

    brokers: Mapping[str, BrokerData]
    clusters: Mapping[str, tuple[str, ...]]
    server_version: int = field(default=0, compare=False)

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        answer = Answer(command, request)
        info = answer.json()
        table = answer.table(info, "brokerAddrTable")
        clusters = answer.object(info.get("clusterAddrTable") or {}, "clusterAddrTable")
        return cls(
            {name: _read_broker(answer, {"brokerName": name, **table[name]}) for name in sorted(table)},
            {name: tuple(sorted(answer.texts(clusters, name))) for name in sorted(clusters)},
            command.version,
        )


@dataclass(frozen=True, slots=True)
class TopicListResponse(Response):
    """The names of all topics of a cluster, sorted (TopicList). The brokers' own topics are among them."""

    topics: tuple[str, ...]

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        answer = Answer(command, request)
        return cls(tuple(sorted(set(answer.texts(answer.json(), "topicList")))))


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The bounds of one queue, and the store time of its last message (0 if it has none) (TopicOffset)."""

    min_offset: int
    max_offset: int
    last_update_ms: int


@dataclass(frozen=True, slots=True)
class TopicStatsResponse(Response):
    """The bounds of all queues of a topic on one broker (TopicStatsTable).

    `server_version` is the number of the broker's version (MQVersion).
    """

    queues: Mapping[QueueKey, QueueStats]
    server_version: int = field(default=0, compare=False)

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        answer = Answer(command, request)
        table = answer.table(answer.json(), "offsetTable")
        return cls(
            {
                answer.queue(text): QueueStats(
                    answer.integer(one, "minOffset"),
                    answer.integer(one, "maxOffset"),
                    answer.integer(one, "lastUpdateTimestamp", 0),
                )
                for text, one in table.items()
            },
            command.version,
        )


@dataclass(frozen=True, slots=True)
class OffsetResponse(Response):
    """A queue offset."""

    offset: int

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        return cls(Answer(command, request).number("offset"))


@dataclass(frozen=True, slots=True)
class CommittedOffsetResponse(Response):
    """The committed offset of a group in a queue, or None if it has none. A broker of 4.9 may answer 0 for none."""

    offset: int | None

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        if command.code == ResponseCode.QUERY_NOT_FOUND:
            return cls(None)
        return cls(Answer(command, request).number("offset"))


@dataclass(frozen=True, slots=True)
class StoreTimeResponse(Response):
    """The store time of the first message of a queue. -1 if it is empty or unknown, and for a while after expiry."""

    time_ms: int

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        return cls(Answer(command, request).number("timestamp"))


@dataclass(frozen=True, slots=True)
class TopicConfigResponse(Response):
    """The settings of a topic on one broker (TopicConfig). Only brokers of 5.x answer."""

    config: TopicConfig

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        answer = Answer(command, request)
        value = answer.json()
        attributes = answer.object(value.get("attributes") or {}, "attributes")
        return cls(
            TopicConfig(
                answer.text(value, "topicName"),
                answer.integer(value, "readQueueNums"),
                answer.integer(value, "writeQueueNums"),
                answer.integer(value, "perm"),
                answer.boolean(value, "order"),
                answer.text(value, "topicFilterType", "SINGLE_TAG"),
                answer.integer(value, "topicSysFlag", 0),
                {name: answer.text(attributes, name, "") for name in attributes},
            )
        )


@dataclass(frozen=True, slots=True)
class PullResponse(Response):
    """The answer to a pull (PullMessageResponseHeader, PullResult).

    `next_offset` is where the next pull begins. `min_offset` and `max_offset` are the bounds of the queue at the time
    of the answer. `records` are whole records of the commit log, one after the other, and empty unless the status is
    FOUND. `reason` is the status of the broker's store, a name of GetMessageStatus, or another text. `suggested_broker`
    is the id of the broker to ask next. `offset_delta` is not 0 in static topics.
    """

    status: PullStatus
    next_offset: int
    min_offset: int
    max_offset: int
    records: bytes | memoryview = b""
    reason: str = ""
    suggested_broker: int = 0
    offset_delta: int = 0

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        answer = Answer(command, request)
        status = _PULL_STATUSES.get(command.code)
        if status is None:
            answer.refuse("code", str(command.code), "a status of a pull: 0, 19, 20 or 21")
        return cls(
            status,
            answer.number("nextBeginOffset"),
            answer.number("minOffset"),
            answer.number("maxOffset"),
            command.body if status is PullStatus.FOUND else b"",
            command.remark or "",
            answer.optional_number("suggestWhichBrokerId") or 0,
            answer.optional_number("offsetDelta") or 0,
        )


_PULL_STATUSES = {int(status): status for status in PullStatus}


@dataclass(frozen=True, slots=True)
class CheckFilterResponse(Response):
    """Whether the broker evaluates expressions of the type. If so, the expression is valid."""

    is_supported: bool

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        return cls(command.code == ResponseCode.SUCCESS)


@dataclass(frozen=True, slots=True)
class RecordsResponse(Response):
    """Whole records of the commit log, one after the other. Empty if the broker found none."""

    records: bytes | memoryview = b""

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        return cls(command.body if command.code == ResponseCode.SUCCESS else b"")


@dataclass(frozen=True, slots=True)
class GroupQueueStats:
    """The end of one queue, the group's offset in it, and the store time of the last consumed message (OffsetWrapper).

    `consumer_offset` is -1 if the group has no offset.
    """

    broker_offset: int
    consumer_offset: int
    last_time_ms: int


@dataclass(frozen=True, slots=True)
class GroupStatsResponse(Response):
    """The progress of a group in the queues of one broker (ConsumeStats)."""

    queues: Mapping[QueueKey, GroupQueueStats]

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        answer = Answer(command, request)
        table = answer.table(answer.json(), "offsetTable")
        return cls(
            {
                answer.queue(text): GroupQueueStats(
                    answer.integer(one, "brokerOffset"),
                    answer.integer(one, "consumerOffset"),
                    answer.integer(one, "lastTimestamp", 0),
                )
                for text, one in table.items()
            }
        )


@dataclass(frozen=True, slots=True)
class GroupMembersResponse(Response):
    """The client ids of a group's members, sorted. Empty if nobody is a member (GetConsumerListByGroupResponseBody)."""

    client_ids: tuple[str, ...]

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        if command.code != ResponseCode.SUCCESS:
            return cls(())
        answer = Answer(command, request)
        return cls(tuple(sorted(answer.texts(answer.json(), "consumerIdList"))))


@dataclass(frozen=True, slots=True)
class MemberConnection:
    """The connection of one member of a group (Connection)."""

    client_id: str
    address: str
    language: str
    version: int


@dataclass(frozen=True, slots=True)
class Subscription:
    """The filter of a group for one topic (SubscriptionData)."""

    topic: str
    expression: str
    expression_type: str = "TAG"


@dataclass(frozen=True, slots=True)
class GroupConnectionsResponse(Response):
    """The members of a group and what they agreed on (ConsumerConnection). Everything is empty if nobody is a member.

    `consume_type` is CONSUME_ACTIVELY, CONSUME_PASSIVELY or CONSUME_POP, and `message_model` is CLUSTERING or
    BROADCASTING.
    """

    connections: tuple[MemberConnection, ...] = ()
    consume_type: str = ""
    message_model: str = ""
    consume_from: str = ""
    subscriptions: Mapping[str, Subscription] = field(default_factory=dict)

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        if command.code != ResponseCode.SUCCESS:
            return cls()
        answer = Answer(command, request)
        value = answer.json()
        connections = [
            MemberConnection(
                answer.text(one, "clientId"),
                answer.text(one, "clientAddr", ""),
                answer.text(one, "language", ""),
                answer.integer(one, "version", 0),
            )
            for one in answer.objects(value, "connectionSet")
        ]
        return cls(
            tuple(sorted(connections, key=lambda one: (one.client_id, one.address))),
            answer.text(value, "consumeType", ""),
            answer.text(value, "messageModel", ""),
            answer.text(value, "consumeFromWhere", ""),
            {
                topic: Subscription(topic, answer.text(one, "subString", ""), answer.text(one, "expressionType", "TAG"))
                for topic, one in sorted(answer.table(value, "subscriptionTable").items())
            },
        )


@dataclass(frozen=True, slots=True)
class AllGroupOffsetsResponse(Response):
    """The committed offsets of all groups on one broker, by `topic@group` and queue id (ConsumerOffsetManager)."""

    offsets: Mapping[str, Mapping[int, int]]

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        if command.code != ResponseCode.SUCCESS:
            return cls({})
        try:
            return cls(decode_consumer_offsets(bytes(command.body)).offsets)
        except ValueError as error:
            Answer(command, request).refuse("body", str(error), "the offsets of all groups")
