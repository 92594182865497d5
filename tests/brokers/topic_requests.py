"""Requests that create and delete topics at one broker.

Source: AdminBrokerProcessor#updateAndCreateTopic, #deleteTopic (4.9, 5.3).
"""

import re
from typing import TYPE_CHECKING

from brokers.server import HandlerTable
from brokers.wire import Answer, Call, Refusal
from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.names import CLOSED_TOPICS

if TYPE_CHECKING:
    from brokers.broker import Broker

HANDLERS = HandlerTable()
_NAME = re.compile(r"[%|a-zA-Z0-9_-]{1,127}")


@HANDLERS.on(RequestCode.UPDATE_AND_CREATE_TOPIC)
def create_topic(broker: "Broker", call: Call) -> Answer:
    """Create a topic, or replace its settings."""
    name = call.text("topic")
    if not _NAME.fullmatch(name) or name in CLOSED_TOPICS:
        code = ResponseCode.INVALID_PARAMETER if broker.release.is_5 else ResponseCode.SYSTEM_ERROR
        raise Refusal(code, f"The specified topic is not allowed: {name}")
    attributes = {}
    for change in filter(None, call.text("attributes", "").split(",")):
        key, _, value = change.removeprefix("+").partition("=")
        attributes[key] = value
    broker.set_topic(
        name,
        read_queues=call.number("readQueueNums"),
        write_queues=call.number("writeQueueNums"),
        perm=call.number("perm"),
        sys_flag=call.number("topicSysFlag", 0),
        filter_type=call.text("topicFilterType"),
        order=call.flag("order", default=False),
        attributes=attributes,
    )
    return Answer(remark="not set any response code")


@HANDLERS.on(RequestCode.DELETE_TOPIC_IN_BROKER)
def delete_topic(broker: "Broker", call: Call) -> Answer:
    """Delete a topic at this broker. The name servers keep its route."""
    broker.delete_topic(call.text("topic"))
    return Answer()
