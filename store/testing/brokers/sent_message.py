"""Messages as clients send them: the fields of a send, the items of a batch, and the messages that a broker stores.

Source: SendMessageRequestHeaderV2, SendMessageProcessor#sendMessage, #sendBatchMessage, MessageExtEncoder#encode (5.3),
CommitLog.MessageExtEncoder (4.9).
"""

import struct
from dataclasses import dataclass

from rmq_spark.store.cluster.codes import ResponseCode
from rmq_spark.store.format.java import Host
from rmq_spark.store.format.properties import PROPERTY_SEPARATOR, encode
from rmq_spark.store.testing.brokers.wire import Call, Refusal
from rmq_spark.store.testing.sample_message import SampleMessage

SEND_MESSAGE, SEND_MESSAGE_V2, SEND_BATCH_MESSAGE = 10, 310, 320
# The names of the fields in SEND_MESSAGE, and in the other two requests.
_NAMES = {
    "producerGroup": "a",
    "topic": "b",
    "defaultTopic": "c",
    "defaultTopicQueueNums": "d",
    "queueId": "e",
    "sysFlag": "f",
    "bornTimestamp": "g",
    "flag": "h",
    "properties": "i",
    "reconsumeTimes": "j",
    "maxReconsumeTimes": "l",
    "batch": "m",
}
_ITEM = struct.Struct(">iiiii")  # size, magic, CRC, flag, size of the body; a broker reads the last two
_LENGTH = struct.Struct(">h")
_SEPARATOR = bytes([PROPERTY_SEPARATOR])


@dataclass(frozen=True, slots=True)
class SendRequest:
    """The fields of a send. `queue_id` -1 lets the broker choose."""

    group: str
    topic: str
    default_topic: str
    default_queues: int
    queue_id: int
    sys_flag: int
    born_ms: int
    flag: int
    properties: str
    reconsume_times: int
    max_reconsume_times: int | None
    is_batch: bool

    @classmethod
    def of(cls, call: Call) -> "SendRequest":
        """Return the fields of a call. Refuses one without a required field, as a broker does."""
        is_long = call.command.code == SEND_MESSAGE

        def name(long: str) -> str:
            return long if is_long else _NAMES[long]

        most = call.command.fields.get(name("maxReconsumeTimes"))
        return cls(
            call.text(name("producerGroup")),
            call.text(name("topic")),
            call.text(name("defaultTopic"), "TBW102"),
            call.number(name("defaultTopicQueueNums"), 4),
            call.number(name("queueId")),
            call.number(name("sysFlag")),
            call.number(name("bornTimestamp")),
            call.number(name("flag")),
            call.text(name("properties"), ""),
            call.number(name("reconsumeTimes"), 0),
            None if most is None else int(most),
            call.flag(name("batch"), default=False),
        )


@dataclass(frozen=True, slots=True)
class Item:
    """One message of a batch."""

    flag: int
    body: bytes
    properties: bytes

    @property
    def size(self) -> int:
        """The number of bytes that it takes in the batch."""
        return _ITEM.size + len(self.body) + _LENGTH.size + len(self.properties)

    def encode(self) -> bytes:
        """Return it as it is in the body of a batch (MessageDecoder#encodeMessage)."""
        head = _ITEM.pack(self.size, 0, 0, self.flag, len(self.body))
        return head + self.body + _LENGTH.pack(len(self.properties)) + self.properties


def read_items(body: bytes) -> list[Item]:
    """Return the items of a batch. Their own size fields do not count. As a broker, it refuses other bytes.

    Source: MessageExtEncoder#encode(MessageExtBatch).
    """
    items, at = [], 0
    while at < len(body):
        try:
            flag, body_bytes = _ITEM.unpack_from(body, at)[3:]
            body_begin = at + _ITEM.size
            (text_bytes,) = _LENGTH.unpack_from(body, body_begin + body_bytes) if body_bytes >= 0 else (-1,)
        except struct.error:
            raise no_items("java.nio.BufferUnderflowException: null") from None
        body_end = body_begin + body_bytes
        at = body_end + _LENGTH.size + text_bytes
        if text_bytes < 0 or at > len(body):
            raise no_items(f"java.lang.IllegalArgumentException: newPosition > limit: ({at} > {len(body)})")
        items.append(Item(flag, body[body_begin:body_end], body[body_end + _LENGTH.size : at]))
    return items


def no_items(error: str) -> Refusal:
    """Return the refusal of a batch that raises this error in a broker."""
    where = "org.apache.rocketmq.store.MessageExtEncoder.encode(MessageExtEncoder.java:1)"
    return Refusal(ResponseCode.SYSTEM_ERROR, f"{error}, {where}")


def properties_text(properties: dict[str, str], *, ends: bool) -> bytes:
    """Return the properties of a message as a broker writes them. With `ends`, a separator follows the last one (5.3).

    Properties without a value are left out.
    """
    text = encode({name: value for name, value in properties.items() if value})
    return text if ends else text.removesuffix(_SEPARATOR)


def joined_text(item: bytes, of_batch: bytes) -> bytes:
    """Return the properties of an item, followed by those of its batch."""
    needs_separator = item and of_batch and not item.endswith(_SEPARATOR)
    return item + (_SEPARATOR if needs_separator else b"") + of_batch


def host_of(address: str) -> Host:
    """Return the host of an address host:port."""
    ip, _, port = address.rpartition(":")
    return Host(ip, int(port))


def message_of(
    request: SendRequest, call: Call, topic: str, queue_id: int, properties: bytes, *, item: Item | None = None
) -> SampleMessage:
    """Return the message that a broker stores for a send, or for one item of a batch. It keeps what the client set."""
    return SampleMessage(
        topic,
        queue_id,
        body=call.body if item is None else item.body,
        properties=properties,
        flag=request.flag if item is None else item.flag,
        sys_flag=request.sys_flag,
        born_timestamp=request.born_ms,
        born_host=host_of(call.connection.peer),
        store_host=host_of(call.server.address),
        reconsume_times=request.reconsume_times,
    )
