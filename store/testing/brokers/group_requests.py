"""Requests about consumer groups: offsets, lag, settings, and the check of an expression.

Source: ConsumerManageProcessor, AdminBrokerProcessor, ClientManageProcessor (4.9, 5.3).
"""

import json
from typing import TYPE_CHECKING, Any

from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.errors import OptionError
from rmq_spark.store.filter.row_filter import SQL92, TAG, Expression, compile_filter
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers.offset_requests import queue_of
from rmq_spark.store.testing.brokers.server import HandlerTable
from rmq_spark.store.testing.brokers.wire import Answer, Call, QueueId, Refusal, loose_json

if TYPE_CHECKING:
    from rmq_spark.store.testing.brokers.broker import Broker

HANDLERS = HandlerTable()


@HANDLERS.on(RequestCode.QUERY_CONSUMER_OFFSET)
def query_offset(broker: "Broker", call: Call) -> Answer:
    """Answer with a group's offset. If it has none, with 0 or with code 22, which depends on release and queue."""
    group, queue = call.text("consumerGroup"), queue_of(call)
    offset = broker.offsets.find(group, queue)
    if offset is not None:
        return Answer(fields={"offset": str(offset)})
    bounds = broker.store.bounds(queue)
    if broker.release.is_5 and not call.flag("setZeroIfNotFound", default=True):
        remark = "Not found, do not set to zero, maybe this group boot first"
        raise Refusal(ResponseCode.QUERY_NOT_FOUND, remark)
    if bounds.min_offset == 0 and (bounds.max_offset or not broker.release.is_5) and not broker.settings.on_disk:
        return Answer(fields={"offset": "0"})
    raise Refusal(ResponseCode.QUERY_NOT_FOUND, "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first")


@HANDLERS.on(RequestCode.UPDATE_CONSUMER_OFFSET)
def update_offset(broker: "Broker", call: Call) -> Answer:
    """Store a group's offset. Its number is not checked."""
    group, queue, offset = call.text("consumerGroup"), queue_of(call), call.number("commitOffset")
    if broker.release.is_5:
        if group not in broker.groups:
            raise Refusal(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {group} not exist!")
        if queue.topic not in broker.topics:
            raise Refusal(ResponseCode.TOPIC_NOT_EXIST, f"Topic {queue.topic} not exist!")
        if broker.offsets.has_reset(group, queue):
            return Answer(remark="Offset has been previously reset")
    broker.offsets.commit(group, queue, offset)
    return Answer()


@HANDLERS.on(RequestCode.GET_ALL_CONSUMER_OFFSET)
def get_all_offsets(broker: "Broker", call: Call) -> Answer:
    """Answer with the offsets of all groups."""
    body: dict[str, Any] = {"offsetTable": broker.offsets.table()}
    if broker.release.is_5:
        body["dataVersion"] = {"counter": 1, "stateVersion": 0, "timestamp": 0}
    return Answer(body=loose_json(body).encode())


@HANDLERS.on(RequestCode.GET_CONSUME_STATS)
def get_consume_stats(broker: "Broker", call: Call) -> Answer:
    """Answer with the offsets of a group and of the queues it reads (#getConsumeStats).

    If it has members, only with those of the topics that they subscribe to.
    """
    group, topic = call.text("consumerGroup"), call.command.fields.get("topic")
    names = [topic] if topic else broker.offsets.topics_of(group)
    members = broker.members.groups.get(group)
    subscribed = broker.topics if members is None or not members.subscriptions else members.subscriptions
    table = {}
    for name in names:
        if name not in broker.topics or name not in subscribed:
            continue
        for number in range(broker.topics[name].read_queues):
            queue = QueueKey(name, number)
            offset = broker.offsets.find(group, queue) or 0
            stats = {
                "brokerOffset": broker.store.bounds(queue).max_offset,
                "consumerOffset": offset,
                "lastTimestamp": max(broker.store.store_time(queue, offset - 1), 0),
            }
            table[QueueId(name, broker.name, number)] = {
                **stats,
                **({"pullOffset": offset} if broker.release.is_5 else {}),
            }
    return Answer(body=loose_json({"consumeTps": 0.0, "offsetTable": table}).encode())


@HANDLERS.on(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP)
def create_group(broker: "Broker", call: Call) -> Answer:
    """Create a group, or change whether it may consume."""
    config = json.loads(call.body)
    name = config["groupName"]
    broker.groups.add(name)
    forbidden = broker.settings.forbidden_groups - {name}
    broker.settings.forbidden_groups = forbidden if config.get("consumeEnable", True) else forbidden | {name}
    return Answer()


@HANDLERS.on(RequestCode.CHECK_CLIENT_CONFIG)
def check_client(broker: "Broker", call: Call) -> Answer:
    """Compile the expression of a subscription (ClientManageProcessor#checkClientConfig)."""
    subscription = json.loads(call.body or b"{}").get("subscriptionData")
    if subscription is None or subscription.get("expressionType", TAG) == TAG:
        return Answer()
    if not broker.settings.filters_by_properties:
        remark = "The broker does not support consumer to filter message by " + subscription["expressionType"]
        raise Refusal(ResponseCode.SYSTEM_ERROR, remark)
    try:
        compile_filter(Expression(SQL92, subscription["subString"]))
    except OptionError as error:
        raise Refusal(ResponseCode.SUBSCRIPTION_PARSE_FAILED, str(error)) from None
    return Answer()
