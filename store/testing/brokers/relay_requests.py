"""Requests of administrators that a broker relays to members of a group.

Source: AdminBrokerProcessor#callConsumer, Broker2Client#getConsumeStatus (4.9, 5.3).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rmq_spark.store.cluster.codes import BrokerRequestCode, ResponseCode
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.format import fastjson
from rmq_spark.store.testing.brokers.group_members import Member
from rmq_spark.store.testing.brokers.server import HandlerTable
from rmq_spark.store.testing.brokers.wire import Answer, Call, QueueId, Refusal, loose_json

if TYPE_CHECKING:
    from rmq_spark.store.testing.brokers.broker import Broker

HANDLERS = HandlerTable()
INVOKE_BROKER_TO_GET_CONSUMER_STATUS = 223


@HANDLERS.on(BrokerRequestCode.GET_CONSUMER_RUNNING_INFO)
def get_running_info(broker: "Broker", call: Call) -> None:
    """Relay the question for what a member does."""
    call.text("jstackEnable", "false")
    _relay(broker, call, call.command.fields, bytes(call.command.body))


@HANDLERS.on(BrokerRequestCode.CONSUME_MESSAGE_DIRECTLY)
def consume_directly(broker: "Broker", call: Call) -> None:
    """Relay a demand to consume a message, with the message."""
    message_id = call.text("msgId")
    try:
        record = broker.store.record_at(int(message_id[16:], 16))
    except ValueError:
        record = None
    if record is None:
        remark = f"java.lang.NullPointerException: no message {message_id}, org.apache.rocketmq.broker.processor"
        raise Refusal(ResponseCode.SYSTEM_ERROR, remark)
    fields = {**call.command.fields, "brokerName": broker.name}
    if broker.release.is_5:
        topic = broker.topics.get(fields.get("topic", ""))
        fields |= {"groupSysFlag": "0"} | ({} if topic is None else {"topicSysFlag": str(topic.sys_flag)})
    _relay(broker, call, fields, record)


def _relay(broker: "Broker", call: Call, fields: Mapping[str, str], body: bytes) -> None:
    """Ask a member, and answer what it answers."""
    group, client_id = call.text("consumerGroup"), call.text("clientId", "null")
    member = broker.members.find(group, client_id)
    if member is None:
        raise Refusal(ResponseCode.SYSTEM_ERROR, f"The Consumer <{group}> <{client_id}> not online")

    def on_answer(answer: Command | None) -> None:
        if answer is None:
            remark = (
                f"consumer <{group}> <{client_id}> Timeout: org.apache.rocketmq.remoting.exception."
                f"RemotingTimeoutException: wait response on the channel </{member.address}> timeout"
            )
            call.answer(Answer(ResponseCode.CONSUME_MSG_TIMEOUT, remark=remark))
        else:
            call.answer(Answer(answer.code, answer.fields, bytes(answer.body), answer.remark))

    broker.members.ask(member, call.command.code, fields, body, on_answer)


@HANDLERS.on(INVOKE_BROKER_TO_GET_CONSUMER_STATUS)
def get_status(broker: "Broker", call: Call) -> None:
    """Ask all members, or one, for their offsets in a topic. Answer when each has answered or its time is over."""
    topic, name, client_id = call.text("topic"), call.text("group"), call.command.fields.get("clientAddr")
    group = broker.members.groups.get(name)
    if group is None:
        raise Refusal(ResponseCode.SYSTEM_ERROR, "java.lang.NullPointerException, org.apache.rocketmq.broker.client")
    asked = [member for member in group.members.values() if client_id in (None, "", member.client_id)]
    found: dict[str, Any] = {}
    waits = len(asked)

    def finish() -> None:
        body = loose_json({"consumerTable": found, "messageQueueTable": {}}).encode()
        call.answer(Answer(body=body, remark="not set any response code"))

    def ask(member: Member) -> None:
        def on_answer(answer: Command | None) -> None:
            nonlocal waits
            waits -= 1
            offsets = None if answer is None else _read_offsets(answer)
            if offsets is not None:
                found[member.client_id] = offsets
            if not waits:
                finish()

        fields = {"topic": topic, "group": name}
        broker.members.ask(member, BrokerRequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, fields, b"", on_answer)

    for member in asked:
        ask(member)
    if not asked:
        finish()


def _read_offsets(answer: Command) -> dict[QueueId, int] | None:
    """Return the offsets in a member's answer (GetConsumerStatusBody), or None if it has none."""
    if answer.code != ResponseCode.SUCCESS or not answer.body:
        return None
    try:
        rows = fastjson.parse(bytes(answer.body).decode())["messageQueueTable"]
        queues = {text: fastjson.parse(text) for text in rows}
        return {
            QueueId(queue["topic"], queue["brokerName"], queue["queueId"]): rows[text] for text, queue in queues.items()
        }
    except (ValueError, KeyError, TypeError):
        return None
