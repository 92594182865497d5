"""Pulls, with the subscription in the request or that of the group's members.

Source: PullMessageProcessor#processRequest, DefaultMessageStore#getMessage (4.9, 5.3).
"""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rmq_spark.store.cluster.codes import RequestCode, ResponseCode, SystemFlag
from rmq_spark.store.errors import OptionError
from rmq_spark.store.filter.row_filter import ALL, SQL92, TAG, Expression, RowFilter, compile_filter, only_tags
from rmq_spark.store.group.pull import response_code
from rmq_spark.store.model import QueueKey
from rmq_spark.store.pull_result import GetMessageStatus
from rmq_spark.store.testing.brokers import faults
from rmq_spark.store.testing.brokers.held_pulls import HeldPull
from rmq_spark.store.testing.brokers.offset_requests import queue_of
from rmq_spark.store.testing.brokers.releases import LITE_PULL_MESSAGE
from rmq_spark.store.testing.brokers.server import HandlerTable
from rmq_spark.store.testing.brokers.topics import Topic
from rmq_spark.store.testing.brokers.wire import Answer, Call, Refusal

if TYPE_CHECKING:
    from rmq_spark.store.testing.brokers.broker import Broker

HANDLERS = HandlerTable()
# What a pull that is forbidden is forbidden for (ForbiddenType, 5.x).
_BY_BROKER, _BY_GROUP, _BY_TOPIC = 1, 2, 3
_JAVA_BLANKS = "".join(map(chr, range(0x21)))


@dataclass(frozen=True, slots=True)
class PullRequest:
    """The fields of a pull (PullMessageRequestHeader)."""

    group: str
    queue: QueueKey
    offset: int
    max_messages: int
    sys_flag: int
    commit_offset: int
    suspend_ms: int

    @classmethod
    def of(cls, call: Call) -> "PullRequest":
        """Return the fields of a call. All are required."""
        return cls(
            call.text("consumerGroup"),
            queue_of(call),
            call.number("queueOffset"),
            call.number("maxMsgNums"),
            call.number("sysFlag"),
            call.number("commitOffset"),
            call.number("suspendTimeoutMillis"),
        )


@HANDLERS.on(RequestCode.PULL_MESSAGE, LITE_PULL_MESSAGE)
def pull_message(broker: "Broker", call: Call) -> Answer | None:
    """Answer a pull, or hold it."""
    return answer_pull(broker, call, may_hold=True)


def answer_pull(broker: "Broker", call: Call, *, may_hold: bool) -> Answer | None:
    """Return the answer to a pull. Hold it and return None if it asks for that and finds no message."""
    request = PullRequest.of(call)
    _check_slave(broker)
    topic = _check_rights(broker, call, request)
    wanted = _filter_of(broker, call, request)
    broker.groups.add(request.group)
    if request.sys_flag & SystemFlag.COMMIT_OFFSET and request.commit_offset >= 0 and not broker.is_slave:
        broker.offsets.commit(request.group, request.queue, request.commit_offset)
    bounds = broker.store.bounds(request.queue)
    status, next_offset, body = _find(broker, request, wanted)
    code = ResponseCode(response_code(GetMessageStatus(status), request.offset))
    if broker.is_slave and (code == ResponseCode.PULL_OFFSET_MOVED or not broker.settings.slave_read):
        code, body = ResponseCode.PULL_RETRY_IMMEDIATELY, b""  # a slave sends the reader to the master
    if status == GetMessageStatus.OFFSET_OVERFLOW_BADLY and not broker.release.is_5 and not broker.is_slave:
        broker.moved_event_count += 1
    if may_hold and code == ResponseCode.PULL_NOT_FOUND and request.sys_flag & SystemFlag.SUSPEND:
        again = functools.partial(answer_pull, broker, call, may_hold=False)
        broker.held.add(
            HeldPull(call, request.queue, request.offset, bounds.max_offset, request.suspend_ms, wanted, again)
        )
        return None
    fields = {
        "suggestWhichBrokerId": "0",
        "nextBeginOffset": str(next_offset),
        "maxOffset": str(bounds.max_offset),
        "minOffset": str(bounds.min_offset),
    }
    if broker.release.is_5:
        fields |= {"groupSysFlag": "0", "topicSysFlag": str(topic.sys_flag)}
    return Answer(code, fields, body, status)


def _check_slave(broker: "Broker") -> None:
    """Refuse a pull from a slave of 5.x that must not serve it. One of 4.9 answers it without messages."""
    if broker.is_slave and not broker.settings.slave_read and broker.release.is_5:
        raise Refusal(ResponseCode.SYSTEM_BUSY, faults.REJECTED)


def _check_rights(broker: "Broker", call: Call, request: PullRequest) -> Topic:
    """Return the topic. Refuse a pull that the broker, the group or the topic forbids, or that names no queue."""
    name, settings = request.queue.topic, broker.settings
    if not settings.is_readable:
        raise _forbidden(broker, _BY_BROKER, f"the broker[{broker.address}] pulling message is forbidden")
    if request.group not in broker.groups and not settings.creates_groups:
        remark = broker.release.with_faq(f"subscription group [{request.group}] does not exist, ")
        raise Refusal(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark)
    if request.group in settings.forbidden_groups:
        raise _forbidden(broker, _BY_GROUP, f"subscription group no permission, {request.group}")
    topic = broker.topics.get(name)
    if topic is None:
        remark = broker.release.with_faq(f"topic[{name}] not exist, apply first please! ")
        raise Refusal(ResponseCode.TOPIC_NOT_EXIST, remark)
    if not broker.can_read(topic):
        raise _forbidden(broker, _BY_TOPIC, f"the topic[{name}] pulling message is forbidden")
    if not 0 <= request.queue.queue_id < topic.read_queues:
        remark = (
            f"queueId[{request.queue.queue_id}] is illegal, topic:[{name}] "
            f"topicConfig.readQueueNums:[{topic.read_queues}] consumer:[/{call.connection.peer}]"
        )
        code = ResponseCode.INVALID_PARAMETER if broker.release.is_5 else ResponseCode.SYSTEM_ERROR
        raise Refusal(code, remark)
    return topic


def _forbidden(broker: "Broker", by_whom: int, remark: str) -> Refusal:
    fields = {"forbiddenType": str(by_whom)} if broker.release.is_5 else {}
    return Refusal(ResponseCode.NO_PERMISSION, remark, fields)


def _filter_of(broker: "Broker", call: Call, request: PullRequest) -> RowFilter | None:
    """Return the filter of the subscription, or None if every message passes.

    Every message passes a wrong SQL92 expression in the request, and an expression of an unknown type.
    """
    is_inline = bool(request.sys_flag & SystemFlag.SUBSCRIPTION)
    if is_inline:
        text, kind = call.command.fields.get("subscription", ""), call.command.fields.get("expressionType") or TAG
    else:
        text, kind = _registered(broker, request, call.number("subVersion"))
    if kind == TAG:
        return tag_filter(text)
    if not broker.settings.filters_by_properties:
        remark = f"The broker does not support consumer to filter message by {kind}"
        raise Refusal(ResponseCode.SYSTEM_ERROR, remark)
    if kind != SQL92:
        return None
    try:
        return compile_filter(Expression(SQL92, text))
    except OptionError:
        if is_inline:
            return None
        remark = "The broker's consumer filter data is not exist!Your expression may be wrong!"
        raise Refusal(ResponseCode.FILTER_DATA_NOT_EXIST, remark) from None


def _registered(broker: "Broker", request: PullRequest, version: int) -> tuple[str, str]:
    """Return the expression that heartbeats have registered for a topic, and its type. `version` is the client's."""
    if request.group not in broker.members.groups:
        remark = broker.release.with_faq("the consumer's group info not exist")
        raise Refusal(ResponseCode.SUBSCRIPTION_NOT_EXIST, remark)
    found = broker.members.subscription(request.group, request.queue.topic)
    if found is None:
        remark = broker.release.with_faq("the consumer's subscription not exist")
        raise Refusal(ResponseCode.SUBSCRIPTION_NOT_EXIST, remark)
    if found["subVersion"] < version:
        raise Refusal(ResponseCode.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest")
    return found["subString"], found["expressionType"]


def tag_filter(text: str) -> RowFilter | None:
    """Return the filter of a tag expression, or None if every message passes (FilterAPI#buildSubscriptionData).

    Every message passes an expression of separators only.
    """
    parts = [part for part in text.split("||") if part]
    if text == ALL or not parts:
        return None
    return only_tags({tag for part in parts if (tag := part.strip(_JAVA_BLANKS))})


def _find(broker: "Broker", request: PullRequest, wanted: RowFilter | None) -> tuple[str, int, bytes]:
    """Return status, next offset and records for a pull."""
    if broker.release.is_5:
        reset = broker.offsets.take_reset(request.group, request.queue)
        if reset is not None:
            return "OFFSET_RESET", reset, b""
    found = broker.store.get(request.queue, request.offset, request.max_messages, broker.settings.pull_limits, wanted)
    is_corrected = not broker.is_slave or found.status in (GetMessageStatus.FOUND, GetMessageStatus.NO_MATCHED_MESSAGE)
    return str(found.status), found.next_offset if is_corrected else request.offset, found.body
