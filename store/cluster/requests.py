"""The requests that reading a cluster needs, as typed values with the fields of the remoting protocol.

Topics and groups are the cluster's names, with the namespace (`namespace.wrap_name`). A queue's `broker` is sent as
`bname`, because a proxy finds the broker by it. All times are in ms, points in time in ms since the epoch.

Source: the classes *RequestHeader and MQClientAPIImpl (4.9, 5.3).
"""

import json
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, ClassVar, Generic, TypeVar, cast

from rmq_spark.store.cluster.answer_rule import AnswerRule
from rmq_spark.store.cluster.codes import RequestCode, SystemFlag
from rmq_spark.store.cluster.frame import MAX_FRAME_BYTES, Command, encode_command, frame_words
from rmq_spark.store.cluster.responses import (
    CheckFilterResponse,
    ClusterInfoResponse,
    DoneResponse,
    OffsetResponse,
    PullResponse,
    RecordsResponse,
    Response,
    RouteResponse,
    StoreTimeResponse,
    TopicConfigResponse,
    TopicListResponse,
    TopicStatsResponse,
)
from rmq_spark.store.format.config_json import TopicConfig
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import AUTO_CREATE_TOPIC

ResponseT = TypeVar("ResponseT", bound=Response)


class Deadline(Enum):
    """How long a request may take. The client chooses the times."""

    QUICK = "quick"
    PULL = "pull"
    HELD = "held"  # the broker answers when a message arrives, or after `hold_ms`, which it rounds up to 5 s


class Request(Generic[ResponseT]):
    """A request to a broker or a name server, and the way to read its response.

    `is_repeatable` says that the request has the same effect if it is executed twice. `rules` are rules for its
    responses that come before those for all requests (`answer_rules`).
    """

    __slots__ = ()
    code: ClassVar[RequestCode]
    response: ClassVar[type[Response]]
    is_repeatable: ClassVar[bool] = True
    rules: ClassVar[tuple[AnswerRule, ...]] = ()

    @property
    def purpose(self) -> str:
        """What the request is for, as a verb and its object, for errors."""
        raise NotImplementedError(type(self))

    @property
    def deadline(self) -> Deadline:
        """How long the request may take."""
        return Deadline.QUICK

    @property
    def hold_ms(self) -> int:
        """How long the broker may hold the request until a message arrives. 0 if it answers at once."""
        return 0

    def fields(self) -> dict[str, str]:
        """Return extFields."""
        return {}

    @property
    def body(self) -> bytes | memoryview:
        """The body."""
        return b""

    def command(self, opaque: int) -> Command:
        """Return the request as a command with the number `opaque`. It is not signed."""
        return Command(self.code, opaque, self.fields(), self.body)

    def frame(self, opaque: int) -> bytes:
        """Return the frame of `command`, as `encode_command` does."""
        return encode_command(self.command(opaque))

    def read(self, command: Command) -> ResponseT:
        """Return the response that `command` contains. Raises AnswerError if a value is missing or invalid."""
        return cast(ResponseT, self.response.of(command, self))


def queue_fields(queue: QueueKey) -> dict[str, str]:
    """Return the fields of a request that name a queue."""
    return {"topic": queue.topic, "queueId": str(queue.queue_id), "bname": queue.broker}


def write_json(value: dict[str, Any]) -> bytes:
    """Return the body of a request, as compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class RouteRequest(Request[RouteResponse]):
    """The route of a topic, from a name server (GetRouteInfoRequestHeader)."""

    topic: str
    code = RequestCode.GET_ROUTEINFO_BY_TOPIC
    response = RouteResponse

    @property
    def purpose(self) -> str:
        return f"get the route of topic {self.topic}"

    def fields(self) -> dict[str, str]:
        return {"topic": self.topic, "acceptStandardJsonOnly": "true"}


@dataclass(frozen=True, slots=True)
class ClusterInfoRequest(Request[ClusterInfoResponse]):
    """All brokers, from a name server (MQClientAPIImpl#getBrokerClusterInfo)."""

    code = RequestCode.GET_BROKER_CLUSTER_INFO
    response = ClusterInfoResponse

    @property
    def purpose(self) -> str:
        return "list the brokers"


@dataclass(frozen=True, slots=True)
class TopicListRequest(Request[TopicListResponse]):
    """The names of all topics, from a name server (MQClientAPIImpl#getTopicListFromNameServer)."""

    code = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER
    response = TopicListResponse

    @property
    def purpose(self) -> str:
        return "list the topics"


@dataclass(frozen=True, slots=True)
class TopicStatsRequest(Request[TopicStatsResponse]):
    """The bounds of all queues of a topic on one broker (GetTopicStatsInfoRequestHeader)."""

    topic: str
    broker: str
    code = RequestCode.GET_TOPIC_STATS_INFO
    response = TopicStatsResponse

    @property
    def purpose(self) -> str:
        return f"get the bounds of topic {self.topic} on broker {self.broker}"

    def fields(self) -> dict[str, str]:
        return {"topic": self.topic, "bname": self.broker}


@dataclass(frozen=True, slots=True)
class MaxOffsetRequest(Request[OffsetResponse]):
    """The offset of the next message of a queue (GetMaxOffsetRequestHeader). 0 if the queue does not exist."""

    queue: QueueKey
    code = RequestCode.GET_MAX_OFFSET
    response = OffsetResponse

    @property
    def purpose(self) -> str:
        return f"get the end of queue {self.queue}"

    def fields(self) -> dict[str, str]:
        return {**queue_fields(self.queue), "committed": "true"}


@dataclass(frozen=True, slots=True)
class MinOffsetRequest(Request[OffsetResponse]):
    """The offset of the first message of a queue (GetMinOffsetRequestHeader). 0 if the queue does not exist."""

    queue: QueueKey
    code = RequestCode.GET_MIN_OFFSET
    response = OffsetResponse

    @property
    def purpose(self) -> str:
        return f"get the beginning of queue {self.queue}"

    def fields(self) -> dict[str, str]:
        return queue_fields(self.queue)


@dataclass(frozen=True, slots=True)
class OffsetAtRequest(Request[OffsetResponse]):
    """The offset of the first message stored at or after a time (SearchOffsetRequestHeader).

    If there is none, a broker of 5.3 answers the end. A broker of 4.9 answers the nearest message, before or after.
    """

    queue: QueueKey
    time_ms: int
    code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
    response = OffsetResponse

    @property
    def purpose(self) -> str:
        return f"find the time {self.time_ms} in queue {self.queue}"

    def fields(self) -> dict[str, str]:
        return {**queue_fields(self.queue), "timestamp": str(self.time_ms), "boundaryType": "LOWER"}


@dataclass(frozen=True, slots=True)
class EarliestTimeRequest(Request[StoreTimeResponse]):
    """The store time of the first message of a queue (GetEarliestMsgStoretimeRequestHeader)."""

    queue: QueueKey
    code = RequestCode.GET_EARLIEST_MSG_STORETIME
    response = StoreTimeResponse

    @property
    def purpose(self) -> str:
        return f"get the time of the first message of queue {self.queue}"

    def fields(self) -> dict[str, str]:
        return queue_fields(self.queue)


@dataclass(frozen=True, slots=True)
class TopicConfigRequest(Request[TopicConfigResponse]):
    """The settings of a topic on one broker (GetTopicConfigRequestHeader). Only brokers of 5.x know the request."""

    topic: str
    broker: str
    code = RequestCode.GET_TOPIC_CONFIG
    response = TopicConfigResponse

    @property
    def purpose(self) -> str:
        return f"get the settings of topic {self.topic} on broker {self.broker}"

    def fields(self) -> dict[str, str]:
        return {"topic": self.topic, "lo": "true", "bname": self.broker}


@dataclass(frozen=True, slots=True)
class PullRequest(Request[PullResponse]):
    """Messages of a queue from `offset` (PullMessageRequestHeader).

    `subscription` is an expression of the type `expression_type` (TAG or SQL92); the broker needs no heartbeat then. A
    broker ignores an invalid SQL92 expression and returns all messages, so check it with CheckFilterRequest. If there
    is no message, the broker waits for one for `hold_ms`.
    """

    queue: QueueKey
    offset: int
    max_messages: int
    group: str
    subscription: str = "*"
    expression_type: str = "TAG"
    hold_ms: int = 0
    code = RequestCode.PULL_MESSAGE
    response = PullResponse

    @property
    def purpose(self) -> str:
        return f"pull from queue {self.queue} at offset {self.offset}"

    @property
    def deadline(self) -> Deadline:
        return Deadline.HELD if self.hold_ms else Deadline.PULL

    def fields(self) -> dict[str, str]:
        flags = SystemFlag.SUBSCRIPTION | (SystemFlag.SUSPEND if self.hold_ms else 0)
        return {
            "consumerGroup": self.group,
            **queue_fields(self.queue),
            "queueOffset": str(self.offset),
            "maxMsgNums": str(self.max_messages),
            "sysFlag": str(int(flags)),
            "commitOffset": "0",
            "suspendTimeoutMillis": str(self.hold_ms),
            "subscription": self.subscription,
            "subVersion": "0",
            "expressionType": self.expression_type,
        }

    def frame(self, opaque: int) -> bytes:
        queue = self.queue
        before, between, after = _pull_header(
            queue.topic, queue.queue_id, queue.broker, self.group, self.subscription, self.expression_type, self.hold_ms
        )
        header = b'%b"queueOffset":"%d","maxMsgNums":"%d"%b"opaque":%d%b' % (
            before, self.offset, self.max_messages, between, opaque, after,
        )  # fmt: skip
        frame = frame_words(len(header), 0) + header
        return frame if len(frame) <= MAX_FRAME_BYTES else encode_command(self.command(opaque))


@lru_cache(maxsize=64)
def _pull_header(
    topic: str, queue_id: int, broker: str, group: str, subscription: str, expression_type: str, hold_ms: int
) -> tuple[bytes, bytes, bytes]:
    """Return the JSON header of pulls before, between and after the three numbers that differ from pull to pull.

    A quote in a text is escaped, so each name below with its colon is found only where it is the name of a field.
    """
    request = PullRequest(QueueKey(topic, queue_id, broker), 0, 0, group, subscription, expression_type, hold_ms)
    header = encode_command(request.command(0))[8:]
    before, _, rest = header.partition(b'"queueOffset":"0","maxMsgNums":"0"')
    between, _, after = rest.partition(b'"opaque":0')
    return before, between, after


@dataclass(frozen=True, slots=True)
class CheckFilterRequest(Request[CheckFilterResponse]):
    """Whether a broker accepts a filter expression (CheckClientRequestBody)."""

    topic: str
    group: str
    expression: str
    expression_type: str = "SQL92"
    client_id: str = "rmq-spark"
    code = RequestCode.CHECK_CLIENT_CONFIG
    response = CheckFilterResponse

    @property
    def purpose(self) -> str:
        return f"check the filter of topic {self.topic}"

    @property
    def body(self) -> bytes:
        subscription = {
            "classFilterMode": False,
            "codeSet": [],
            "expressionType": self.expression_type,
            "subString": self.expression,
            "subVersion": 0,
            "tagsSet": [],
            "topic": self.topic,
        }
        return write_json({"clientId": self.client_id, "group": self.group, "subscriptionData": subscription})


@dataclass(frozen=True, slots=True)
class RecordAtRequest(Request[RecordsResponse]):
    """The record at a physical offset of a broker's commit log (ViewMessageRequestHeader).

    An offset inside of a record may give garbage, so check the record.
    """

    physical_offset: int
    topic: str
    broker: str
    code = RequestCode.VIEW_MESSAGE_BY_ID
    response = RecordsResponse

    @property
    def purpose(self) -> str:
        return f"read the record at physical offset {self.physical_offset} of broker {self.broker}"

    def fields(self) -> dict[str, str]:
        return {"offset": str(self.physical_offset), "topic": self.topic, "bname": self.broker}


@dataclass(frozen=True, slots=True)
class KeySearchRequest(Request[RecordsResponse]):
    """Messages of a topic on one broker by key or id, newest file first (QueryMessageRequestHeader).

    The broker compares hashes, so compare the keys of the messages. It returns at most 64 messages. `begin_ms` and
    `end_ms` bound the store time.
    """

    topic: str
    broker: str
    key: str
    max_messages: int = 64
    begin_ms: int = 0
    end_ms: int = (1 << 63) - 1
    code = RequestCode.QUERY_MESSAGE
    response = RecordsResponse

    @property
    def purpose(self) -> str:
        return f"search topic {self.topic} by key on broker {self.broker}"

    def fields(self) -> dict[str, str]:
        return {
            "topic": self.topic,
            "key": self.key,
            "maxNum": str(self.max_messages),
            "beginTimestamp": str(self.begin_ms),
            "endTimestamp": str(self.end_ms),
            "bname": self.broker,
        }


@dataclass(frozen=True, slots=True)
class CreateTopicRequest(Request[DoneResponse]):
    """Create a topic on one broker, or replace its settings (CreateTopicRequestHeader). Send it to each master."""

    config: TopicConfig
    code = RequestCode.UPDATE_AND_CREATE_TOPIC
    response = DoneResponse

    @property
    def purpose(self) -> str:
        return f"create topic {self.config.name}"

    def fields(self) -> dict[str, str]:
        config = self.config
        return {
            "topic": config.name,
            "defaultTopic": AUTO_CREATE_TOPIC,
            "readQueueNums": str(config.read_queue_count),
            "writeQueueNums": str(config.write_queue_count),
            "perm": str(config.perm),
            "topicFilterType": config.topic_filter_type,
            "topicSysFlag": str(config.topic_sys_flag),
            "order": "true" if config.order else "false",
            "attributes": ",".join(f"+{name}={value}" for name, value in config.attributes.items()),
            "force": "false",
        }


@dataclass(frozen=True, slots=True)
class DeleteTopicRequest(Request[DoneResponse]):
    """Delete a topic from one broker (DeleteTopicRequestHeader). The name servers keep its route."""

    topic: str
    code = RequestCode.DELETE_TOPIC_IN_BROKER
    response = DoneResponse

    @property
    def purpose(self) -> str:
        return f"delete topic {self.topic}"

    def fields(self) -> dict[str, str]:
        return {"topic": self.topic}


@dataclass(frozen=True, slots=True)
class DeleteRouteRequest(Request[DoneResponse]):
    """Delete the route of a topic from one name server (DeleteTopicFromNamesrvRequestHeader)."""

    topic: str
    code = RequestCode.DELETE_TOPIC_IN_NAMESRV
    response = DoneResponse

    @property
    def purpose(self) -> str:
        return f"delete the route of topic {self.topic}"

    def fields(self) -> dict[str, str]:
        return {"topic": self.topic}
