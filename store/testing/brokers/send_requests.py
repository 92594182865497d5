"""Sends: single messages, batches, messages that wait, and the halves of transactions.

The messages are appended to the broker's store, so pulls return them. Limits, properties that a broker adds, answers
and remarks are those of the release. Two things are simpler than in a broker:

- From an item of a batch whose properties are too long on, the items are answered and not stored. A broker stores them
  in a form that nobody can read.
- Nothing ends a transaction. A half stays in its topic.

Source: SendMessageProcessor, AbstractSendMessageProcessor#msgCheck, HookUtils, MessageExtEncoder (5.3), CommitLog
#asyncPutMessage (4.9).
"""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rmq_spark.store.cluster.codes import ResponseCode
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.format.config_json import PERM_INHERIT
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS
from rmq_spark.store.format.java import encode_host
from rmq_spark.store.format.message_ids import UniqueIds
from rmq_spark.store.format.properties import MAX_PROPERTIES_BYTES, UNIQ_KEY, WAIT, parse
from rmq_spark.store.format.record import TRANSACTION_MASK
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import (
    AUTO_CREATE_TOPIC,
    CLOSED_TOPICS,
    RETRY_TOPIC_PREFIX,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    dlq_topic,
)
from rmq_spark.store.testing.brokers import faults
from rmq_spark.store.testing.brokers.faults import REGION
from rmq_spark.store.testing.brokers.sent_message import (
    SEND_BATCH_MESSAGE,
    SEND_MESSAGE,
    SEND_MESSAGE_V2,
    Item,
    SendRequest,
    host_of,
    joined_text,
    message_of,
    no_items,
    properties_text,
    read_items,
)
from rmq_spark.store.testing.brokers.server import HandlerTable
from rmq_spark.store.testing.brokers.topics import Topic
from rmq_spark.store.testing.brokers.wire import Answer, Call, Refusal
from rmq_spark.store.testing.sample_message import SampleMessage

if TYPE_CHECKING:
    from rmq_spark.store.testing.brokers.broker import Broker

HANDLERS = HandlerTable()
MAX_RECONSUME_TIMES = 16  # retryMaxTimes of a group
TIMER_MAX_DELAY_MS = 3 * 24 * 3600 * 1000  # timerMaxDelaySec
TIMER_PRECISION_MS = 1000
_TIMER_WISHES = ("TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS")  # in the order in which a broker looks
_HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
_MAX_TOPIC_CHARS = 127
_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")


@HANDLERS.on(SEND_MESSAGE, SEND_MESSAGE_V2, SEND_BATCH_MESSAGE)
def send_message(broker: "Broker", call: Call) -> Answer | None:
    """Store a message or a batch, now or when the broker's order of sends says so."""
    if broker.is_slave and broker.release.is_5:
        raise Refusal(ResponseCode.SYSTEM_BUSY, faults.REJECTED)
    request = SendRequest.of(call)
    queue = QueueKey(request.topic, request.queue_id)
    return broker.sends.run(queue, call, lambda: _store(broker, call, request))


def refuse(code: int, remark: str) -> Refusal:
    """Return a refusal with the fields that each answer of the processor has."""
    return Refusal(code, remark, REGION)


def _store(broker: "Broker", call: Call, request: SendRequest) -> Answer:
    """Check a send, store it, and return the answer."""
    topic = check_topic(broker, call, request)
    queue_id = request.queue_id
    if queue_id < 0:
        if not topic.write_queues:
            raise Refusal(ResponseCode.SYSTEM_ERROR, "java.lang.ArithmeticException: / by zero, java.lang")
        queue_id = broker.sends.choose(topic.write_queues)
    if request.is_batch:
        return _store_batch(broker, call, request, queue_id)
    return _store_single(broker, call, request, queue_id)


def check_topic(broker: "Broker", call: Call, request: SendRequest) -> Topic:
    """Return the topic of a send, created if the broker may do that. Refuses a wrong name or queue (#msgCheck).

    Write permission is not asked for, as in a broker.
    """
    name = request.topic
    invalid = ResponseCode.INVALID_PARAMETER if broker.release.is_5 else ResponseCode.SYSTEM_ERROR
    fault = topic_fault(name)
    if fault is not None:
        raise refuse(invalid, fault)
    if name in CLOSED_TOPICS:
        raise refuse(ResponseCode.NO_PERMISSION, f"Sending message to topic[{name}] is forbidden.")
    topic = broker.topics.get(name) or _create_topic(broker, request)
    if topic is None:
        remark = broker.release.with_faq(f"topic[{name}] not exist, apply first please!")
        raise refuse(ResponseCode.TOPIC_NOT_EXIST, remark)
    if request.queue_id >= topic.queue_count:
        producer = call.connection.peer
        remark = f"request queueId[{request.queue_id}] is illegal, {config_text(broker, topic)} Producer: {producer}"
        raise refuse(invalid, remark)
    return topic


def topic_fault(name: str) -> str | None:
    """Return why a name cannot be a topic's, or None (TopicValidator#validateTopic)."""
    if not name.strip():
        return "The specified topic is blank."
    if not _NAME.fullmatch(name):
        return "The specified topic contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"
    return "The specified topic is longer than topic max length." if len(name) > _MAX_TOPIC_CHARS else None


def config_text(broker: "Broker", topic: Topic) -> str:
    """Return a topic's settings as they are in remarks (TopicConfig#toString)."""
    perm = "".join(letter if topic.perm & bit else "-" for letter, bit in (("R", 4), ("W", 2), ("X", 1)))
    order = str(topic.order).lower()
    attributes = ", attributes={}" if broker.release.is_5 else ""
    return (
        f"TopicConfig [topicName={topic.name}, readQueueNums={topic.read_queues}, "
        f"writeQueueNums={topic.write_queues}, perm={perm}, topicFilterType={topic.filter_type}, "
        f"topicSysFlag={topic.sys_flag}, order={order}{attributes}]"
    )


def _create_topic(broker: "Broker", request: SendRequest) -> Topic | None:
    """Create the topic of a send, if the topic that it names as the default may be inherited.

    Source: TopicConfigManager#createTopicInSendMessageMethod, #createTopicInSendMessageBackMethod.
    """
    if request.topic.startswith(RETRY_TOPIC_PREFIX):
        return broker.set_topic(request.topic, 1)
    default = broker.topics.get(request.default_topic)
    if default is None or not default.perm & PERM_INHERIT:
        return None
    if default.name == AUTO_CREATE_TOPIC and not broker.settings.creates_topics:
        return None
    count = max(min(request.default_queues, default.write_queues), 0)
    return broker.set_topic(request.topic, count, perm=default.perm & ~PERM_INHERIT)


def _store_single(broker: "Broker", call: Call, request: SendRequest, queue_id: int) -> Answer:
    properties = parse(request.properties.encode())
    kept = dict(properties)  # 4.9 leaves WAIT out of what it stores, unless it writes the properties again
    if broker.release.is_5:
        kept |= REGION
        if not kept.get(UNIQ_KEY):
            kept[UNIQ_KEY] = new_unique_key(request.born_ms)
    else:
        kept.pop(WAIT, None)
    kept["CLUSTER"] = broker.cluster
    topic = _topic_after_retries(broker, request, kept)
    sys_flag, level = request.sys_flag, _number(properties.get("DELAY", "0"))
    is_half = properties.get("TRAN_MSG", "").lower() == "true" and not (request.reconsume_times > 0 and level > 0)
    _check_single(broker, call, is_half=is_half, sys_flag=sys_flag)
    stored = topic, (queue_id if topic == request.topic else 0)
    moved: tuple[str, int] | None = None
    if is_half:
        moved, sys_flag = (_HALF_TOPIC, 0), sys_flag & ~TRANSACTION_MASK
        if broker.release.is_5:
            kept["__transactionId__"] = kept[UNIQ_KEY]
    else:
        moved = _waiting_queue(broker, kept)
    if moved is not None:
        if WAIT in properties:
            kept[WAIT] = properties[WAIT]
        kept |= {"REAL_TOPIC": stored[0], "REAL_QID": str(stored[1])}
    text = properties_text(kept, ends=broker.release.is_5)
    if len(text) > MAX_PROPERTIES_BYTES:
        raise illegal(broker)
    message = message_of(replace(request, sys_flag=sys_flag), call, *(moved or stored), text)
    answer = _append(broker, call, [message], queue_id, kept.get(UNIQ_KEY))
    if moved is not None and not is_half:
        broker.deliveries.look()
    if "TIMER_OUT_MS" in kept and not request.topic.startswith(RETRY_TOPIC_PREFIX):
        answer = replace(answer, fields={**answer.fields, "recallHandle": _recall_handle(broker, kept)})
    return answer


def _check_single(broker: "Broker", call: Call, *, is_half: bool, sys_flag: int) -> None:
    """Refuse a message with a wrong body, and any message if the broker is a slave."""
    body = call.command.body
    if not body and broker.release.is_5:
        remark = "java.lang.NullPointerException: null, org.apache.rocketmq.broker.processor.SendMessageProcessor"
        raise Refusal(ResponseCode.SYSTEM_ERROR, remark)
    if len(body) > broker.settings.max_message_bytes:
        raise illegal(broker)
    if broker.is_slave:
        raise refuse(ResponseCode.SERVICE_NOT_AVAILABLE, faults.NOT_AVAILABLE)
    assert is_half or not sys_flag & TRANSACTION_MASK, "a message of a transaction needs the property TRAN_MSG"


def _store_batch(broker: "Broker", call: Call, request: SendRequest, queue_id: int) -> Answer:
    properties = parse(request.properties.encode())
    if broker.release.is_5:
        if request.topic.startswith(RETRY_TOPIC_PREFIX):
            raise refuse(ResponseCode.MESSAGE_ILLEGAL, "batch request does not support retry group")
        properties |= REGION
    properties["CLUSTER"] = broker.cluster
    body, most = call.body, broker.settings.max_message_bytes
    if not body:
        raise no_items("java.lang.NullPointerException: null")
    if len(body) > most and not broker.release.is_5:
        raise illegal(broker)
    if broker.is_slave:
        raise refuse(ResponseCode.SERVICE_NOT_AVAILABLE, faults.NOT_AVAILABLE)
    if _number(properties.get("DELAY", "0")) > 0 or request.sys_flag & TRANSACTION_MASK:
        raise illegal(broker)
    if len(body) > most:
        raise no_items("java.lang.RuntimeException: message body size exceeded")
    of_batch = properties_text(properties, ends=broker.release.is_5)
    if len(of_batch) > MAX_PROPERTIES_BYTES:
        raise no_items("java.lang.RuntimeException: Properties size of messageExtBatch exceeded!")

    def stored(item: Item) -> SampleMessage:
        text = joined_text(item.properties, of_batch)
        return message_of(request, call, request.topic, queue_id, text, item=item)

    return _append(broker, call, [stored(item) for item in read_items(body)], queue_id, properties.get(UNIQ_KEY))


def _append(
    broker: "Broker", call: Call, messages: Sequence[SampleMessage], queue_id: int, unique_key: str | None
) -> Answer:
    """Store messages, and return the answer with their places."""
    count = len(messages)
    for number, message in enumerate(messages):
        if len(message.properties_text) > MAX_PROPERTIES_BYTES:
            count = number  # from here on nobody can read the batch
            break
    appended = broker.append(messages[:count])
    places = appended.physical_offsets
    places += [places[-1] if places else 0] * (len(messages) - count)
    host = encode_host(host_of(broker.address)).hex().upper()
    fields = {
        "msgId": ",".join(f"{host}{place:016X}" for place in places),
        "queueId": str(queue_id),
        "queueOffset": str(appended.queue_offsets[0] if appended.queue_offsets else 0),
        **REGION,
    }
    if broker.release.is_5 and unique_key is not None:
        fields["transactionId"] = unique_key
    return Answer(fields=fields)


def _topic_after_retries(broker: "Broker", request: SendRequest, properties: dict[str, str]) -> str:
    """Return the topic where a message is stored: a retry of a group may be a dead letter (#handleRetryAndDLQ).

    While queues are locked for a group, 5.3 makes all its retries dead letters.
    """
    if not request.topic.startswith(RETRY_TOPIC_PREFIX):
        return request.topic
    group = request.topic.removeprefix(RETRY_TOPIC_PREFIX)
    check_group(broker, group, REGION)
    most = MAX_RECONSUME_TIMES if request.max_reconsume_times is None else request.max_reconsume_times
    is_over = request.reconsume_times > most or (request.reconsume_times == most and not broker.release.is_5)
    if not is_over and not (broker.release.is_5 and broker.locks.is_orderly(group)):
        return request.topic
    if broker.release.is_5:
        properties["DELAY"] = "-1"
    if dlq_topic(group) not in broker.topics:
        broker.set_topic(dlq_topic(group), 1)
    return dlq_topic(group)


def check_group(broker: "Broker", group: str, fields: Mapping[str, str]) -> None:
    """Refuse the messages of a group that does not exist and must not be created. `fields` are those of the refusal."""
    if group not in broker.groups and not broker.settings.creates_groups:
        remark = broker.release.with_faq(f"subscription group not exist, {group} ")
        raise Refusal(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark, fields)
    broker.groups.add(group)


def _waiting_queue(broker: "Broker", properties: dict[str, str]) -> tuple[str, int] | None:
    """Return the queue in which a message waits, or None if it does not. Changes its properties.

    Source: HookUtils#handleScheduleMessage (5.3), CommitLog#asyncPutMessage (4.9).
    """
    level = _number(properties.get("DELAY", "0"))
    if level > 0:
        level = DEFAULT_DELAY_LEVELS.clamp(level)
        properties["DELAY"] = str(level)
        if broker.release.is_5:
            for name in _TIMER_WISHES:
                properties.pop(name, None)
        return SCHEDULE_TOPIC, level - 1
    wish = next((name for name in _TIMER_WISHES if name in properties), None)
    if wish is None or not broker.release.is_5 or "TIMER_OUT_MS" in properties:
        return None
    now_ms, number = wall_clock_ms(), _number(properties[wish])
    due_ms = {"TIMER_DELAY_SEC": now_ms + 1000 * number, "TIMER_DELAY_MS": now_ms + number}.get(wish, number)
    if due_ms - now_ms > TIMER_MAX_DELAY_MS or (due_ms <= now_ms and "TIMER_DEL_UNIQKEY" in properties):
        raise refuse(
            ResponseCode.MESSAGE_ILLEGAL,
            f"timer message illegal, the delay time should not be bigger than the max delay {TIMER_MAX_DELAY_MS}ms; or "
            "if set del msg, the delay time should be bigger than the current time",
        )
    if due_ms <= now_ms:
        return None
    properties["TIMER_OUT_MS"] = str((due_ms - 1) // TIMER_PRECISION_MS * TIMER_PRECISION_MS)
    return TIMER_TOPIC, 0


def illegal(broker: "Broker") -> Refusal:
    """Return the refusal of a message that is too long."""
    return refuse(
        ResponseCode.MESSAGE_ILLEGAL,
        "the message is illegal, maybe msg body or properties length not matched. msg body length limit "
        f"{broker.settings.max_message_bytes}B, msg properties length limit 32KB.",
    )


def _recall_handle(broker: "Broker", properties: dict[str, str]) -> str:
    """Return the handle with which a client may recall a timed message (RecallMessageHandle.HandleV1)."""
    due_ms = int(properties["TIMER_OUT_MS"]) + 1
    text = f"v1 {properties['REAL_TOPIC']} {broker.name} {due_ms} {properties[UNIQ_KEY]}"
    return base64.urlsafe_b64encode(text.encode()).decode()


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        remark = f'java.lang.NumberFormatException: For input string: "{text}", java.lang'
        raise Refusal(ResponseCode.SYSTEM_ERROR, remark) from None


_IDS = UniqueIds("127.0.0.1", 1, 0)


def new_unique_key(now_ms: int) -> str:
    """Return a UNIQ_KEY for a message without one (MessageClientIDSetter#createUniqID)."""
    return _IDS.take_one(now_ms)
