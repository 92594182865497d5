"""The remoting protocol in the server's direction: bytes to calls, and answers to bytes.

The product's own `frame` module decodes requests and encodes JSON answers. A server must also know the kind of header
of each request, because 4.9 answers in the kind that it was asked in, so this module adds that and binary answers.
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from json import dumps
from typing import TYPE_CHECKING, Any

from rmq_spark.store.cluster.codes import LANGUAGES, ResponseCode
from rmq_spark.store.cluster.frame import MAX_FRAME_BYTES, Command, FrameError, FrameReader, encode_command

if TYPE_CHECKING:
    from rmq_spark.store.testing.brokers.connection import Connection
    from rmq_spark.store.testing.brokers.server import Server

RESPONSE, ONE_WAY = 1, 2  # bits of `flag`
_BINARY = 1
_FIXED = struct.Struct(">hBhii")  # code, language, version, opaque, flag


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answers to a request: a response code, fields (extFields), a body and a remark."""

    code: int = ResponseCode.SUCCESS
    fields: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    remark: str | None = None


class Refusal(Exception):
    """Ends a handler with an answer that has a code and a remark, and may have fields."""

    def __init__(self, code: int, remark: str | None, fields: Mapping[str, str] | None = None) -> None:
        super().__init__(code, remark)
        self.answer = Answer(code, fields or {}, remark=remark)


@dataclass(slots=True)
class Call:
    """One request that a server has received, and the way to answer it.

    A fault may replace `send`, which gets the bytes of the answer, and `change`, which gets the answer before it is
    encoded.
    """

    server: "Server"
    connection: "Connection"
    command: Command
    is_binary: bool
    send: Callable[[bytes], None]
    change: Callable[[Answer], Answer] = lambda answer: answer

    def text(self, name: str, default: str | None = None) -> str:
        """Return a field. If it is missing, return `default`, or refuse the request as a broker does if that is None.

        Source: RemotingCommand#decodeCommandCustomHeader.
        """
        value = self.command.fields.get(name, default)
        if value is None:
            raise Refusal(
                ResponseCode.SYSTEM_ERROR,
                "org.apache.rocketmq.remoting.exception.RemotingCommandException: the custom field "
                f"<{name}> is null, org.apache.rocketmq.remoting.protocol.RemotingCommand."
                "decodeCommandCustomHeader(RemotingCommand.java:1)",
            )
        return value

    @property
    def body(self) -> bytes:
        """The body of the request."""
        return bytes(self.command.body)

    def number(self, name: str, default: int | None = None) -> int:
        """Return a field that is a decimal number, or refuse the request as a broker does."""
        value = self.text(name, None if default is None else str(default))
        try:
            return int(value)
        except ValueError:
            raise Refusal(
                ResponseCode.SYSTEM_ERROR, f'java.lang.NumberFormatException: For input string: "{value}", java.lang'
            ) from None

    def flag(self, name: str, default: bool) -> bool:
        """Return a field that is true or false."""
        return self.command.fields.get(name, str(default)).lower() == "true"

    def answer(self, answer: Answer) -> None:
        """Send the answer, unless the request is one-way or its connection is closed."""
        if not self.command.is_one_way and not self.connection.is_closed:
            self.send(self.encode(self.change(answer)))

    def encode(self, answer: Answer) -> bytes:
        """Return the frame of an answer to this request, in the kind of header that the server's release uses."""
        release = self.server.release
        command = Command(
            int(answer.code),
            self.command.opaque,
            answer.fields,
            answer.body,
            flag=RESPONSE,
            remark=answer.remark,
            language="JAVA",
            version=release.number,
        )
        return encode_binary(command) if self.is_binary and release.mirrors_headers else encode_command(command)


def encode_binary(command: Command) -> bytes:
    """Return the frame of a command, with a binary header (RocketMQSerializable#rocketMQProtocolEncode)."""
    remark = (command.remark or "").encode()
    packed = b"".join(
        struct.pack(">h", len(name)) + name + struct.pack(">i", len(value)) + value
        for name, value in ((name.encode(), value.encode()) for name, value in command.fields.items())
    )
    fixed = _FIXED.pack(command.code, LANGUAGES.index(command.language), command.version, command.opaque, command.flag)
    header = b"".join(
        [fixed, struct.pack(">i", len(remark)), remark, struct.pack(">i", len(packed)), packed],
    )
    word = _BINARY << 24 | len(header)
    return struct.pack(">iI", 4 + len(header) + len(command.body), word) + header + bytes(command.body)


class RequestReader:
    """The receiving end of a server's connection: bytes in; commands out, each with whether its header is binary."""

    def __init__(self) -> None:
        self._waiting = bytearray()
        self._frames = FrameReader()

    def feed(self, data: bytes) -> Iterator[tuple[Command, bool]]:
        """Yield the commands that are complete after `data`. Raises FrameError if the bytes are not a frame."""
        self._waiting += data
        while len(self._waiting) >= 4:
            size = 4 + int.from_bytes(self._waiting[:4], "big", signed=True)
            if not 8 <= size <= MAX_FRAME_BYTES:
                raise FrameError(f"found the frame size {size}")
            if len(self._waiting) < size:
                return
            frame = bytes(self._waiting[:size])
            del self._waiting[:size]
            for command in self._frames.feed(frame):
                yield replace(command, body=bytes(command.body)), frame[4] == _BINARY


def text_of(value: object) -> str:
    """Return the value of a field as it travels."""
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True)
class QueueId:
    """A queue as a value in a body, or as the key of an object (MessageQueue)."""

    topic: str
    broker: str
    queue_id: int


def loose_json(value: Any, *, is_ascii: bool = False) -> str:
    """Return JSON as fastjson writes it: keys that are numbers or queues stay without quotes.

    Keys that are texts are sorted, as fastjson sorts the fields of an object. With `is_ascii`, other characters are
    escaped.
    """
    if isinstance(value, QueueId):
        value = {"brokerName": value.broker, "queueId": value.queue_id, "topic": value.topic}
    if isinstance(value, Mapping):
        items = sorted(value.items()) if all(isinstance(key, str) for key in value) else value.items()
        parts = [f"{_loose_key(key, is_ascii)}:{loose_json(one, is_ascii=is_ascii)}" for key, one in items]
        return "{" + ",".join(parts) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(loose_json(one, is_ascii=is_ascii) for one in value) + "]"
    return dumps(value, ensure_ascii=is_ascii)


def _loose_key(key: Any, is_ascii: bool) -> str:
    return loose_json(key, is_ascii=is_ascii) if isinstance(key, QueueId) else dumps(key, ensure_ascii=is_ascii)
