"""Resets of a group's offsets by administrators.

4.9 tells the members of the group, who commit the offsets themselves. 5.3 stores the offsets, and holds off commits of
the group until one of its pulls takes the reset. Source: AdminBrokerProcessor#resetOffset, Broker2Client#resetOffset
(4.9, 5.3). Its form for administrators in C++ is left out.
"""

from typing import TYPE_CHECKING

from rmq_spark.store.cluster.codes import BrokerRequestCode, RequestCode, ResponseCode
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers.server import HandlerTable
from rmq_spark.store.testing.brokers.topics import Topic
from rmq_spark.store.testing.brokers.wire import Answer, Call, QueueId, Refusal, loose_json

if TYPE_CHECKING:
    from rmq_spark.store.testing.brokers.broker import Broker

HANDLERS = HandlerTable()
_NO_OFFSET = -1  # of the field `offset`, and of `queueId` for all queues


@HANDLERS.on(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET)
def reset_offsets(broker: "Broker", call: Call) -> Answer:
    """Reset the offsets of a group in a topic to a time, or to the ends of the queues if it is -1.

    5.3 also resets one queue, to a time or to an offset.
    """
    call.text("isForce")
    if broker.release.is_5 and broker.settings.resets_at_broker:
        return _reset_at_broker(broker, call)
    return _tell_members(broker, call)


def _reset_at_broker(broker: "Broker", call: Call) -> Answer:
    """Store the new offsets (#resetOffsetInner, 5.3)."""
    name, group, queue_id = call.text("topic"), call.text("group"), call.number("queueId", _NO_OFFSET)
    if broker.is_slave:
        raise Refusal(ResponseCode.SYSTEM_ERROR, "Can not reset offset in slave broker")
    if name not in broker.topics:
        raise Refusal(ResponseCode.TOPIC_NOT_EXIST, f"Topic {name} does not exist")
    if group not in broker.groups:
        raise Refusal(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {group} does not exist")
    if queue_id < 0:
        queues = [QueueKey(name, number) for number in range(broker.topics[name].read_queues)]
        targets = {queue: _offset_at(broker, queue, call.number("timestamp")) for queue in queues}
    else:
        queue = QueueKey(name, queue_id)
        targets = {queue: _chosen_offset(broker, queue, call)}
    if not targets:
        raise Refusal(ResponseCode.SYSTEM_ERROR, "No queues to reset.")
    for queue, offset in targets.items():
        broker.offsets.reset(group, queue, offset)
    return Answer(body=_offset_table(broker, targets))


def _chosen_offset(broker: "Broker", queue: QueueKey, call: Call) -> int:
    """Return the offset that a request names for one queue, or that of its time."""
    offset = call.number("offset", _NO_OFFSET)
    if offset == _NO_OFFSET:
        return _offset_at(broker, queue, call.number("timestamp"))
    bounds = broker.store.bounds(queue)
    if not bounds.min_offset <= offset <= bounds.max_offset + 1:
        remark = f"Target offset {offset} not in consume queue range [{bounds.min_offset}-{bounds.max_offset}]"
        raise Refusal(ResponseCode.SYSTEM_ERROR, remark)
    return offset


def _tell_members(broker: "Broker", call: Call) -> Answer:
    """Send the new offsets to all members of the group. None of them is stored."""
    name, group, time_ms = call.text("topic"), call.text("group"), call.number("timestamp")
    topic = broker.topics.get(name)
    if topic is None:
        remark = f"[reset-offset] reset offset failed, no topic in this broker. topic={name}"
        raise Refusal(ResponseCode.TOPIC_NOT_EXIST if broker.release.is_5 else ResponseCode.SYSTEM_ERROR, remark)
    targets = _targets(broker, topic, group, call)
    body = _offset_table(broker, targets)
    known = broker.members.groups.get(group)
    if known is None:
        remark = f"Consumer not online, so can not reset offset, Group: {group} Topic: {name} Timestamp: {time_ms}"
        raise Refusal(ResponseCode.CONSUMER_NOT_ONLINE, remark)
    fields = {"topic": name, "group": group, "timestamp": str(time_ms), "isForce": "false"}
    if broker.release.is_5:
        fields["queueId"] = str(_NO_OFFSET)
    broker.sent_resets.append((group, name, {queue.queue_id: offset for queue, offset in targets.items()}))
    for member in known.members.values():
        if member.connection is not None:
            broker.calls.tell(member.connection, BrokerRequestCode.RESET_CONSUMER_CLIENT_OFFSET, fields, body)
    return Answer(body=body, remark="not set any response code")


def _targets(broker: "Broker", topic: Topic, group: str, call: Call) -> dict[QueueKey, int]:
    """Return the new offsets. Without `isForce`, no offset grows. The group must have an offset in every queue."""
    targets = {}
    for queue in (QueueKey(topic.name, number) for number in range(topic.write_queues)):
        known = broker.offsets.find(group, queue)
        if known is None:
            raise Refusal(ResponseCode.SYSTEM_ERROR, f"THe consumer group <{group}> not exist")
        offset = max(_offset_at(broker, queue, call.number("timestamp")), 0)
        targets[queue] = offset if call.flag("isForce", default=False) else min(offset, known)
    return targets


def _offset_at(broker: "Broker", queue: QueueKey, time_ms: int) -> int:
    """Return a queue's offset at a time, or its end for -1 (5.3: for a negative time)."""
    if time_ms == -1 or (time_ms < 0 and broker.release.is_5 and broker.settings.resets_at_broker):
        return broker.store.bounds(queue).max_offset
    return broker.store.offset_at_time(queue, time_ms, "lower" if broker.release.is_5 else "nearest")


def _offset_table(broker: "Broker", offsets: dict[QueueKey, int]) -> bytes:
    table = {QueueId(queue.topic, broker.name, queue.queue_id): offset for queue, offset in offsets.items()}
    return loose_json({"offsetTable": table}).encode()
