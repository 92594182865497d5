"""The requests that brokers send to a member of a consumer group, and the answers to them. Pure.

| code | request | the member |
| --- | --- | --- |
| 40 | members have joined or left | rebalances |
| 220 | an administrator has reset the group's offsets (4.9) | seeks, and commits the new offsets |
| 221 | where the group is in a topic | answers with the offsets of its queues |
| 307 | what the member does | answers with its queues, subscriptions and properties |
| 309, 326 | consume this message now; the reply to a message | refuses |

40 and 220 are not answered. Topics and groups are the cluster's names, with the namespace.

Source: ClientRemotingProcessor, ConsumerRunningInfo, GetConsumerStatusBody, ResetOffsetBody (4.9, 5.3).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rmq_spark.store.cluster.answer_fields import Answer
from rmq_spark.store.cluster.codes import BrokerRequestCode, ResponseCode
from rmq_spark.store.cluster.frame import VERSION, Command
from rmq_spark.store.cluster.member_requests import PASSIVELY, describe_subscription
from rmq_spark.store.cluster.requests import write_json
from rmq_spark.store.cluster.responses import Subscription
from rmq_spark.store.model import QueueKey

_VERSION_NAME = "V4_9_7"  # MQVersion's name of VERSION
assert VERSION == 407


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """Members of a group have joined or left (NotifyConsumerIdsChangedRequestHeader)."""

    group: str


@dataclass(frozen=True, slots=True)
class OffsetsReset:
    """An administrator has reset the offsets of a group in a topic (ResetOffsetRequestHeader).

    `offsets` are the new ones of all queues of one broker, also of those of other members.
    """

    group: str
    topic: str
    offsets: Mapping[QueueKey, int]


@dataclass(frozen=True, slots=True)
class StatusQuestion:
    """The question for the offsets of a member in a topic (GetConsumerStatusRequestHeader)."""

    group: str
    topic: str


@dataclass(frozen=True, slots=True)
class RunningInfoQuestion:
    """The question for what a member does (GetConsumerRunningInfoRequestHeader)."""

    group: str
    client_id: str


@dataclass(frozen=True, slots=True)
class UnsupportedDemand:
    """A request that only a consumer or a producer in Java can carry out. `what` names it."""

    what: str


BrokerRequest: TypeAlias = MembersChanged | OffsetsReset | StatusQuestion | RunningInfoQuestion | UnsupportedDemand


def read_broker_request(command: Command) -> BrokerRequest | None:
    """Return what a broker asks, or None for a request that is not known here.

    Raises AnswerError if a field is missing or invalid.
    """
    fields = command.fields
    if command.code == BrokerRequestCode.NOTIFY_CONSUMER_IDS_CHANGED:
        return MembersChanged(fields.get("consumerGroup", ""))
    if command.code == BrokerRequestCode.RESET_CONSUMER_CLIENT_OFFSET:
        return OffsetsReset(fields.get("group", ""), fields.get("topic", ""), _read_offsets(command))
    if command.code == BrokerRequestCode.GET_CONSUMER_STATUS_FROM_CLIENT:
        return StatusQuestion(fields.get("group", ""), fields.get("topic", ""))
    if command.code == BrokerRequestCode.GET_CONSUMER_RUNNING_INFO:
        return RunningInfoQuestion(fields.get("consumerGroup", ""), fields.get("clientId", ""))
    if command.code == BrokerRequestCode.CONSUME_MESSAGE_DIRECTLY:
        return UnsupportedDemand("consume a message that an administrator chooses")
    if command.code == BrokerRequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT:
        return UnsupportedDemand("receive the reply to a message")
    return None


class _ResetQuestion:
    """The request, for the errors of `Answer`."""

    code = BrokerRequestCode.RESET_CONSUMER_CLIENT_OFFSET


def _read_offsets(command: Command) -> dict[QueueKey, int]:
    """Return the table in the body (ResetOffsetBody#offsetTable)."""
    answer = Answer(command, _ResetQuestion())
    table = answer.object(answer.json().get("offsetTable") or {}, "offsetTable")
    return {answer.queue(text): answer.integer(table, text) for text in table}


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """The state of one queue of a member (ProcessQueueInfo). Times are in ms since the epoch.

    `offset` is the group's offset that the member has committed last, -1 if it has committed none. `begun_ms` is when
    the member got the queue, and `locked_ms` when it renewed the lock last, 0 if it has none.
    """

    offset: int
    begun_ms: int
    locked_ms: int = 0


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """The state of a member, which it tells brokers. Times are in ms since the epoch.

    `joined_ms` is when it joined and subscribed. `name_servers` is the text of its option nameServer, and `fallback`
    is where it begins without an offset of the group.
    """

    client_id: str
    group: str
    subscriptions: tuple[Subscription, ...]
    joined_ms: int
    name_servers: str
    is_orderly: bool = False
    fallback: str = "latest"
    queues: Mapping[QueueKey, QueueStatus] = field(default_factory=dict)


def answer_status(status: MemberStatus, topic: str) -> Command:
    """Return the answer to a StatusQuestion: the offsets of the member's queues of a topic (GetConsumerStatusBody)."""
    offsets = {
        queue: str(one.offset).encode()
        for queue, one in sorted(status.queues.items())
        if queue.topic == topic and one.offset >= 0
    }
    return Command(ResponseCode.SUCCESS, 0, body=b'{"consumerTable":{},"messageQueueTable":%b}' % _write_table(offsets))


def answer_running_info(status: MemberStatus) -> Command:
    """Return the answer to a RunningInfoQuestion, with what `mqadmin consumerStatus` demands (ConsumerRunningInfo)."""
    properties = {
        "PROP_CLIENT_VERSION": _VERSION_NAME,
        "PROP_CONSUMEORDERLY": "true" if status.is_orderly else "false",
        "PROP_CONSUMER_START_TIMESTAMP": str(status.joined_ms),
        "PROP_CONSUME_TYPE": PASSIVELY,
        "PROP_NAMESERVER_ADDR": status.name_servers,
        "PROP_THREADPOOL_CORE_SIZE": "1",
    }
    others = {
        "mqPopTable": {},
        "properties": properties,
        "statusTable": {},
        "subscriptionSet": [describe_subscription(one, status.joined_ms) for one in status.subscriptions],
        "userConsumerInfo": {},
    }
    queues = {queue: write_json(_describe_queue(one)) for queue, one in sorted(status.queues.items())}
    body = b'{"mqTable":%b,%b' % (_write_table(queues), write_json(others)[1:])
    return Command(ResponseCode.SUCCESS, 0, body=body)


def refuse_demand(demand: UnsupportedDemand, group: str) -> Command:
    """Return the answer to an UnsupportedDemand."""
    remark = f"the member is a Spark query (rmq-spark) of group {group}, which cannot {demand.what}"
    return Command(ResponseCode.SYSTEM_ERROR, 0, remark=remark)


def _describe_queue(status: QueueStatus) -> dict[str, Any]:
    """Return a queue as JSON (ProcessQueueInfo). A query keeps no messages between its batches."""
    return {
        "cachedMsgCount": 0,
        "cachedMsgMaxOffset": 0,
        "cachedMsgMinOffset": 0,
        "cachedMsgSizeInMiB": 0,
        "commitOffset": status.offset,
        "droped": False,  # the spelling of ProcessQueueInfo
        "lastConsumeTimestamp": status.begun_ms,
        "lastLockTimestamp": status.locked_ms or status.begun_ms,
        "lastPullTimestamp": status.begun_ms,
        "locked": status.locked_ms > 0,
        "transactionMsgCount": 0,
        "transactionMsgMaxOffset": 0,
        "transactionMsgMinOffset": 0,
        "tryUnlockTimes": 0,
    }


def _write_table(values: Mapping[QueueKey, bytes]) -> bytes:
    """Return a JSON object whose keys are queues, as fastjson writes it: the keys are objects without quotes."""
    items = (
        write_json({"brokerName": queue.broker, "queueId": queue.queue_id, "topic": queue.topic}) + b":" + value
        for queue, value in values.items()
    )
    return b"{%b}" % b",".join(items)
