"""Messages that a consumer group sends back: a copy waits for the group's retry topic, or is a dead letter.

The engine makes the copies from the records in the broker's directory, as a broker makes them.
Source: AbstractSendMessageProcessor#consumerSendMsgBack (5.3), SendMessageProcessor#asyncConsumerSendMsgBack (4.9).
"""

from typing import TYPE_CHECKING

from rmq_spark.store.cluster.codes import ResponseCode
from rmq_spark.store.names import dlq_topic, retry_topic
from rmq_spark.store.testing.brokers import faults
from rmq_spark.store.testing.brokers.send_requests import check_group
from rmq_spark.store.testing.brokers.server import HandlerTable
from rmq_spark.store.testing.brokers.wire import Answer, Call, Refusal

if TYPE_CHECKING:
    from rmq_spark.store.testing.brokers.broker import Broker

HANDLERS = HandlerTable()
CONSUMER_SEND_MSG_BACK = 36


@HANDLERS.on(CONSUMER_SEND_MSG_BACK)
def send_back(broker: "Broker", call: Call) -> Answer:
    """Store a copy of a message at its delay level, or in the dead letters of the group."""
    if broker.is_slave and broker.release.is_5:
        raise Refusal(ResponseCode.SYSTEM_BUSY, faults.REJECTED)
    offset, group, level = call.number("offset"), call.text("group"), call.number("delayLevel")
    most = call.number("maxReconsumeTimes") if "maxReconsumeTimes" in call.command.fields else None
    check_group(broker, group, {})
    for topic in (retry_topic(group), dlq_topic(group)):
        if topic not in broker.topics:
            broker.set_topic(topic, 1)
    original = broker.find_original(offset)
    if original is None:
        raise Refusal(ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {offset}")
    if broker.is_slave:
        raise Refusal(ResponseCode.SYSTEM_ERROR, "SERVICE_NOT_AVAILABLE")
    broker.send_back(original, group, level, most)
    return Answer()
