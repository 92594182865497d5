"""The requests that store messages in a cluster, in the manner of `requests`, and their responses.

None of them is repeatable: a broker stores a message again that is sent again, and a copy for each time that a message
is sent back. A response with the code SUCCESS is read without errors, even if its fields are invalid, because the
message is stored.

A send must not create its topic: a broker that has taken over the address of another one would get a topic of its own,
with its own number of queues. Missing topics are created by a request of their own (`CreateTopicRequest`). A broker
that creates topics at their first message inherits from the topic in the field `c`, which is TBW102 in Java. Here it is
the topic itself: a broker that does not have it has nothing to inherit, and refuses the message
(TopicConfigManager#createTopicInSendMessageMethod). Only the retry topic of a group is created nevertheless.

Source: SendMessageRequestHeaderV2, SendMessageResponseHeader, ConsumerSendMsgBackRequestHeader, MQClientAPIImpl
(4.9, 5.3).
"""

from dataclasses import dataclass
from functools import lru_cache
from json.encoder import encode_basestring
from typing import ClassVar, Self

from rmq_spark.store.cluster.answer_fields import Question
from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.cluster.frame import MAX_FRAME_BYTES, Command, encode_command, frame_words
from rmq_spark.store.cluster.requests import Request
from rmq_spark.store.cluster.responses import DoneResponse, Response
from rmq_spark.store.model import QueueKey

PRODUCER_GROUP = "rmq-spark"  # brokers check nothing of it
_DEFAULT_QUEUES = "4"
_MAX_DIGITS = 18  # this many digits are always a number of 64 bits
STORED_LATE = (ResponseCode.FLUSH_DISK_TIMEOUT, ResponseCode.FLUSH_SLAVE_TIMEOUT, ResponseCode.SLAVE_NOT_AVAILABLE)


@dataclass(frozen=True, slots=True)
class SendResponse(Response):
    """A message or batch that the broker has stored (SendResult).

    `queue_offset` is that of the first message; the others follow. None: the answer has no valid one. `ids` are the
    offsetMsgIds, joined by commas. `status` is SUCCESS, or one of STORED_LATE if the copy on disk or at a slave that
    the broker is configured to wait for was late.
    """

    queue_offset: int | None
    ids: str
    status: ResponseCode

    @classmethod
    def of(cls, command: Command, request: Question) -> Self:
        text = command.fields.get("queueOffset", "")
        is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
        return cls(int(text) if is_number else None, command.fields.get("msgId", ""), ResponseCode(command.code))


@dataclass(frozen=True, slots=True)
class SendRequest(Request[SendResponse]):
    """One message for a queue (SEND_MESSAGE_V2). `queue` has the cluster's name of the topic.

    `content` is the body, compressed as `sys_flag` says. `properties` is a properties string. `born_ms` is in ms since
    the epoch. `reconsume_times` and `max_reconsume_times` are for retry topics: with more retries than that the broker
    stores the message in the dead letters (4.9: with as many). None means the group's own limit.
    """

    queue: QueueKey
    content: bytes
    properties: str
    born_ms: int
    flag: int = 0
    sys_flag: int = 0
    reconsume_times: int = 0
    max_reconsume_times: int | None = None
    code = RequestCode.SEND_MESSAGE_V2
    response = SendResponse
    is_repeatable: ClassVar[bool] = False

    @property
    def purpose(self) -> str:
        return f"send a message to queue {self.queue}"

    @property
    def body(self) -> bytes:
        return self.content

    def fields(self) -> dict[str, str]:
        fields = _send_fields(self.queue, self.born_ms, self.properties, self.flag, self.sys_flag, is_batch="false")
        fields["j"] = str(self.reconsume_times)
        if self.max_reconsume_times is not None:
            fields["l"] = str(self.max_reconsume_times)
        return fields

    def frame(self, opaque: int) -> bytes:
        if self.reconsume_times or self.max_reconsume_times is not None:
            return encode_command(self.command(opaque))
        queue = self.queue
        before, between, after, end = _send_header(queue.topic, queue.queue_id, queue.broker, self.flag, self.sys_flag)
        header = b'%b"g":"%d"%b"i":%b%b"opaque":%d%b' % (
            before, self.born_ms, between, encode_basestring(self.properties).encode(), after, opaque, end,
        )  # fmt: skip
        frame = frame_words(len(header), len(self.content)) + header + self.content
        return frame if len(frame) <= MAX_FRAME_BYTES else encode_command(self.command(opaque))


@lru_cache(maxsize=256)
def _send_header(topic: str, queue_id: int, broker: str, flag: int, sys_flag: int) -> tuple[bytes, bytes, bytes, bytes]:
    """Return the JSON header of single messages around time, properties and number, which differ in each of them.

    A quote in a text is escaped, so each name below with its colon is found only where it is the name of a field.
    """
    header = encode_command(SendRequest(QueueKey(topic, queue_id, broker), b"", "", 0, flag, sys_flag).command(0))[8:]
    before, _, rest = header.partition(b'"g":"0"')
    between, _, rest = rest.partition(b'"i":""')
    after, _, end = rest.partition(b'"opaque":0')
    return before, between, after, end


@dataclass(frozen=True, slots=True)
class SendBatchRequest(Request[SendResponse]):
    """Several messages for a queue, which the broker stores one after the other (SEND_BATCH_MESSAGE).

    `content` has `count` items (`format.batch_items`).
    """

    queue: QueueKey
    content: bytes | memoryview
    count: int
    born_ms: int
    code = RequestCode.SEND_BATCH_MESSAGE
    response = SendResponse
    is_repeatable: ClassVar[bool] = False

    @property
    def purpose(self) -> str:
        return f"send {self.count} messages to queue {self.queue}"

    @property
    def body(self) -> bytes | memoryview:
        return self.content

    def fields(self) -> dict[str, str]:
        return _send_fields(self.queue, self.born_ms, "", 0, 0, is_batch="true")


def _send_fields(
    queue: QueueKey, born_ms: int, properties: str, flag: int, sys_flag: int, *, is_batch: str
) -> dict[str, str]:
    return {
        "a": PRODUCER_GROUP,
        "b": queue.topic,
        "c": queue.topic,
        "d": _DEFAULT_QUEUES,
        "e": str(queue.queue_id),
        "f": str(sys_flag),
        "g": str(born_ms),
        "h": str(flag),
        "i": properties,
        "j": "0",
        "k": "false",
        "m": is_batch,
        "n": queue.broker,
    }


@dataclass(frozen=True, slots=True)
class SendBackRequest(Request[DoneResponse]):
    """A message that a group failed to consume, back to the group (CONSUMER_SEND_MSG_BACK).

    The broker that stores the record at `physical_offset` (bytes) copies it. `delay_level` 0 stands for the level
    3 + reconsumeTimes, and a negative one for the dead letters. `queue` is where the message was read.
    `max_reconsume_times` None means the group's own limit.
    """

    queue: QueueKey
    physical_offset: int
    group: str
    delay_level: int
    origin_id: str
    max_reconsume_times: int | None = None
    code = RequestCode.CONSUMER_SEND_MSG_BACK
    response = DoneResponse
    is_repeatable: ClassVar[bool] = False

    @property
    def purpose(self) -> str:
        return f"send the message at physical offset {self.physical_offset} of queue {self.queue} back"

    def fields(self) -> dict[str, str]:
        fields = {
            "offset": str(self.physical_offset),
            "group": self.group,
            "delayLevel": str(self.delay_level),
            "originMsgId": self.origin_id,
            "originTopic": self.queue.topic,
            "unitMode": "false",
            "bname": self.queue.broker,
        }
        if self.max_reconsume_times is not None:
            fields["maxReconsumeTimes"] = str(self.max_reconsume_times)
        return fields
