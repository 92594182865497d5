"""Requests that create and delete topics at one broker, and the one for its settings.

Source: AdminBrokerProcessor#updateAndCreateTopic, #deleteTopic, #getBrokerConfig (4.9, 5.3).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.names import CLOSED_TOPICS
from rmq_spark.store.testing.brokers.send_requests import topic_fault
from rmq_spark.store.testing.brokers.server import HandlerTable
from rmq_spark.store.testing.brokers.topics import system_topics
from rmq_spark.store.testing.brokers.wire import Answer, Call, Refusal

if TYPE_CHECKING:
    from rmq_spark.store.testing.brokers.broker import Broker

HANDLERS = HandlerTable()
_SYSTEM_PREFIX = "rmq_sys_"


@HANDLERS.on(RequestCode.UPDATE_AND_CREATE_TOPIC)
def create_topic(broker: "Broker", call: Call) -> Answer:
    """Create a topic, or replace its settings without a question."""
    name = call.text("topic")
    call.text("defaultTopic")
    fault = topic_fault(name)
    if fault is None and _is_system_topic(broker, name):
        fault = f"The topic[{name}] is conflict with system topic."
    if fault is not None:
        raise Refusal(ResponseCode.INVALID_PARAMETER if broker.release.is_5 else ResponseCode.SYSTEM_ERROR, fault)
    known = broker.topics.get(name)
    broker.set_topic(
        name,
        read_queues=call.number("readQueueNums"),
        write_queues=call.number("writeQueueNums"),
        perm=call.number("perm"),
        sys_flag=call.number("topicSysFlag", 0),
        filter_type=call.text("topicFilterType"),
        order=call.flag("order", default=False),
        attributes=_changed_attributes({} if known is None else known.attributes, call.text("attributes", "")),
    )
    return Answer(remark="not set any response code")


def _is_system_topic(broker: "Broker", name: str) -> bool:
    """Return whether a topic is one of the broker's own (TopicValidator#isSystemTopic)."""
    own = {topic.name for topic in system_topics(broker.release, broker.cluster, broker.name)}
    return name in own | CLOSED_TOPICS or name.startswith(_SYSTEM_PREFIX)


def _changed_attributes(attributes: Mapping[str, str], changes: str) -> dict[str, str]:
    """Return the attributes of a topic after changes like "+name=value,-name" (AttributeUtil, 5.x)."""
    changed = dict(attributes)
    for change in filter(None, changes.split(",")):
        name, _, value = change[1:].partition("=")
        if change.startswith("-"):
            changed.pop(name, None)
        else:
            changed[name] = value
    return changed


@HANDLERS.on(RequestCode.DELETE_TOPIC_IN_BROKER)
def delete_topic(broker: "Broker", call: Call) -> Answer:
    """Delete a topic at this broker. The name servers keep its route."""
    name = call.text("topic")
    if _is_system_topic(broker, name):
        code = ResponseCode.INVALID_PARAMETER if broker.release.is_5 else ResponseCode.SYSTEM_ERROR
        raise Refusal(code, f"The topic[{name}] is conflict with system topic.")
    broker.delete_topic(name)
    return Answer()


@HANDLERS.on(RequestCode.GET_BROKER_CONFIG)
def get_config(broker: "Broker", call: Call) -> Answer:
    """Tell the settings, one in each line."""
    config = {"brokerName": broker.name, "brokerRole": "ASYNC_MASTER", **broker.settings.config}
    return Answer(body="".join(f"{name}={value}\n" for name, value in config.items()).encode())
