"""Requests about the offsets of queues: bounds, positions by time, and a topic's settings.

Source: AdminBrokerProcessor (4.9, 5.3).
"""

import json
from typing import TYPE_CHECKING

from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.testing.brokers.server import HandlerTable
from rmq_spark.store.testing.brokers.wire import Answer, Call, Refusal, loose_json

if TYPE_CHECKING:
    from rmq_spark.store.testing.brokers.broker import Broker

HANDLERS = HandlerTable()


def queue_of(call: Call) -> QueueKey:
    """Return the queue that a request names."""
    return QueueKey(call.text("topic"), call.number("queueId"))


def known_bounds(broker: "Broker", queue: QueueKey) -> QueueBounds:
    """Return the bounds of a queue, which are 0 if the broker does not know its topic."""
    return broker.store.bounds(queue) if queue.topic in broker.topics else QueueBounds(0, 0)


@HANDLERS.on(RequestCode.GET_MAX_OFFSET)
def get_max_offset(broker: "Broker", call: Call) -> Answer:
    """Answer with the next offset of a queue, and 0 for one that does not exist (#getMaxOffset)."""
    return Answer(fields={"offset": str(known_bounds(broker, queue_of(call)).max_offset)})


@HANDLERS.on(RequestCode.GET_MIN_OFFSET)
def get_min_offset(broker: "Broker", call: Call) -> Answer:
    """Answer with the first offset of a queue, and 0 for one that does not exist (#getMinOffset)."""
    offset = known_bounds(broker, queue_of(call)).min_offset
    return Answer(fields={"offset": str(offset)}, remark="" if broker.release.is_5 else None)


@HANDLERS.on(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP)
def search_offset(broker: "Broker", call: Call) -> Answer:
    """Answer with the offset for a time (#searchOffsetByTimestamp). 4.9 answers a neighbour."""
    queue, time_ms = queue_of(call), call.number("timestamp")
    if queue.topic not in broker.topics:
        return Answer(fields={"offset": "0"})
    rule = "nearest"
    if broker.release.is_5:
        rule = "upper" if call.command.fields.get("boundaryType", "LOWER").upper() == "UPPER" else "lower"
    return Answer(fields={"offset": str(broker.store.offset_at_time(queue, time_ms, rule))})


@HANDLERS.on(RequestCode.GET_EARLIEST_MSG_STORETIME)
def get_earliest_time(broker: "Broker", call: Call) -> Answer:
    """Answer with the store time of a queue's first message, or -1 (#getEarliestMsgStoretime)."""
    queue = queue_of(call)
    bounds = known_bounds(broker, queue)
    return Answer(fields={"timestamp": str(broker.store.store_time(queue, bounds.min_offset))})


@HANDLERS.on(RequestCode.GET_TOPIC_STATS_INFO)
def get_topic_stats(broker: "Broker", call: Call) -> Answer:
    """Answer with the bounds of all queues of a topic (#getTopicStatsInfo)."""
    name = call.text("topic")
    topic = broker.topics.get(name)
    if topic is None:
        raise Refusal(ResponseCode.TOPIC_NOT_EXIST, f"topic[{name}] not exist")
    # The keys are objects (MessageQueue). Written here and not by `loose_json`, because a topic may have 1000 queues.
    before, after = f'"brokerName":{json.dumps(broker.name)},"queueId":', f',"topic":{json.dumps(name)}'
    rows = []
    for number in range(topic.queue_count):
        queue = QueueKey(name, number)
        bounds, last_ms = broker.store.bounds(queue), broker.store.last_store_time(queue)
        stats = f'"lastUpdateTimestamp":{last_ms},"maxOffset":{bounds.max_offset},"minOffset":{bounds.min_offset}'
        rows.append(f"{{{before}{number}{after}}}:{{{stats}}}")
    rate = ',"topicPutTps":0.0' if broker.release.is_5 else ""
    return Answer(body=f'{{"offsetTable":{{{",".join(rows)}}}{rate}}}'.encode())


@HANDLERS.on(RequestCode.GET_TOPIC_CONFIG)
def get_topic_config(broker: "Broker", call: Call) -> Answer:
    """Answer with the settings of a topic (#getTopicConfig, 5.x)."""
    name = call.text("topic")
    topic = broker.topics.get(name)
    if topic is None:
        raise Refusal(ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {name}")
    body = {
        "attributes": dict(topic.attributes),
        "order": topic.order,
        "perm": topic.perm,
        "readQueueNums": topic.read_queues,
        "topicFilterType": topic.filter_type,
        "topicName": topic.name,
        "topicSysFlag": topic.sys_flag,
        "writeQueueNums": topic.write_queues,
    }
    return Answer(body=loose_json(body).encode())
