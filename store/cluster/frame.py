"""Frames of RocketMQ's remoting protocol: bytes from a connection to commands, and commands to bytes.

A frame has a size, a word with the kind and the size of the header, the header, and the body. Headers are JSON, or
RocketMQ's binary format. `FrameReader` reads both, by the kind in each frame. `encode_command` writes JSON. Nothing in
this module reads from a connection or waits.

Source: RemotingCommand, RocketMQSerializable, NettyDecoder (4.9, 5.3).
"""

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from rmq_spark.store.cluster.codes import LANGUAGES
from rmq_spark.store.errors import OptionError

MAX_FRAME_BYTES = 16 << 20  # a broker closes the connection after a larger one (NettyDecoder#FRAME_MAX_LENGTH)
# A broker's longest header belongs to a batch: 33 bytes for each of at most some 40,000 messages. The limit bounds the
# memory that a header's JSON can take.
MAX_HEADER_BYTES = 2 << 20
# The fields of an account in signed requests (SessionCredentials).
ACCESS_KEY, SECURITY_TOKEN, SIGNATURE = ACCOUNT_FIELDS = ("AccessKey", "SecurityToken", "Signature")
VERSION = 407  # MQVersion of 4.9.7; with older versions, routes are not strict JSON

_JSON, _BINARY = 0, 1
_WORDS = struct.Struct(">iI")  # bytes after this field; kind of header (8 bits) and its bytes (24 bits)
_CHUNK_BYTES = 256 << 10
_MIN_ROOM_BYTES = 32 << 10
_INT32 = range(-(1 << 31), 1 << 31)
_IS_RESPONSE, _IS_ONE_WAY = 1, 2


class FrameError(ValueError):
    """The bytes of a connection are not frames of the remoting protocol. The connection cannot be used any more."""


@dataclass(frozen=True, slots=True)
class Command:
    """One request or response (RemotingCommand).

    `code` is a request code, or the response code if the command is a response. `opaque` is a number that the sender of
    the request has chosen; the response repeats it. `fields` are extFields. `remark` is a text for people, and the
    store's status in the answer to a pull. A `body` that was received is a read-only memoryview, or b"" if it is empty.
    `repr` hides an account and the body.
    """

    code: int
    opaque: int
    fields: Mapping[str, str] = field(default_factory=dict)
    body: bytes | memoryview = b""
    flag: int = 0
    remark: str | None = None
    language: str = "PYTHON"
    version: int = VERSION

    def __repr__(self) -> str:
        fields = {name: "…" if name in ACCOUNT_FIELDS else text for name, text in self.fields.items()}
        return (
            f"Command(code={self.code}, opaque={self.opaque}, flag={self.flag}, fields={fields}, "
            f"remark={self.remark!r}, body of {len(self.body)} bytes)"
        )

    @property
    def is_response(self) -> bool:
        """Whether the command answers a request (RemotingCommand#isResponseType)."""
        return self.flag & _IS_RESPONSE != 0

    @property
    def is_one_way(self) -> bool:
        """Whether the command is a request that is never answered (RemotingCommand#isOnewayRPC)."""
        return self.flag & _IS_ONE_WAY != 0


_encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def encode_command(command: Command) -> bytes:
    """Return the frame of a command, with a JSON header (RemotingCommand#encode).

    Raises OptionError if the frame is larger than a broker accepts, or if a text contains a single surrogate.
    """
    header: dict[str, Any] = {"code": command.code}
    if command.fields:
        header["extFields"] = dict(command.fields)
    header |= {"flag": command.flag, "language": command.language, "opaque": command.opaque}
    if command.remark is not None:
        header["remark"] = command.remark
    header |= {"serializeTypeCurrentRPC": "JSON", "version": command.version}
    try:
        data = _encode_json(header).encode()
    except UnicodeEncodeError as error:
        found = ascii(error.object[error.start : error.end])
        raise OptionError(
            f"request {command.code} cannot be sent: a text in it contains {found}; expected Unicode text without "
            "single surrogates. Correct the text."
        ) from None
    size = _WORDS.size - 4 + len(data) + len(command.body)
    if size + 4 > MAX_FRAME_BYTES:
        raise OptionError(
            f"request {command.code} cannot be sent: its frame has {size + 4} bytes; expected at most "
            f"{MAX_FRAME_BYTES}. Send less in one request."
        )
    return b"".join((frame_words(len(data), len(command.body)), data, command.body))


def frame_words(header_bytes: int, body_bytes: int) -> bytes:
    """Return the first 8 bytes of a frame with a JSON header."""
    return _WORDS.pack(_WORDS.size - 4 + header_bytes + body_bytes, header_bytes)


class FrameReader:
    """The receiving end of one connection: bytes in, commands out.

    Receive into `get_buffer()` and report the number of bytes to `received`. The bytes of a body stay where they were
    received, or are copied once if their frame did not fit there. They are never overwritten. The memory of a reader is
    at most the larger one of 256 KiB and the frame that is incomplete. After a FrameError every method raises it again.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._chunk = memoryview(b"")
        self._begin = 0  # of the incomplete frame
        self._end = 0  # of the received bytes
        self._has_bodies = False  # whether bodies before `_begin` were returned, so that the chunk cannot be used again
        self._failure: FrameError | None = None

    def get_buffer(self) -> memoryview:
        """Return the memory for the next received bytes, which is never empty. It is valid until `received`."""
        self._check_usable()
        self._make_room()
        return self._chunk[self._end :]

    def received(self, size: int) -> list[Command]:
        """Return the commands that are complete after `size` more bytes in the buffer.

        Raises FrameError if the bytes are not a frame. Commands that were completed by the same bytes are lost.
        """
        self._check_usable()
        assert 0 <= size <= len(self._chunk) - self._end, size
        self._end += size
        commands = []
        try:
            while (command := self._next_command()) is not None:
                commands.append(command)
        except FrameError as error:
            self._failure = error
            raise
        return commands

    def feed(self, data: bytes) -> list[Command]:
        """Return the commands that are complete after `data`, like `received`."""
        commands = []
        rest = memoryview(data)
        while rest:
            buffer = self.get_buffer()
            size = min(len(buffer), len(rest))
            buffer[:size] = rest[:size]
            commands += self.received(size)
            rest = rest[size:]
        return commands

    def at_end(self) -> None:
        """Accept that the peer has closed the connection. Raises FrameError if it did so inside of a frame."""
        self._check_usable()
        have = self._end - self._begin
        if have:
            total = f"{self._frame_bytes()} bytes" if have >= _WORDS.size else "a frame"
            self._failure = FrameError(f"the connection was closed after {have} bytes; expected {total}")
            raise self._failure

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _make_room(self) -> None:
        """Make room for the whole incomplete frame, or for some bytes if its size is not known."""
        have = self._end - self._begin
        if not have and not self._has_bodies and self._chunk:
            self._begin = self._end = 0
        wanted = self._frame_bytes() if have >= _WORDS.size else _MIN_ROOM_BYTES
        if self._begin + wanted <= len(self._chunk):
            return
        # The system gives memory to a page of such an array when the page is written for the first time.
        chunk = np.empty(max(wanted, _CHUNK_BYTES), np.uint8).data
        chunk[:have] = self._chunk[self._begin : self._end]
        self._chunk, self._begin, self._end, self._has_bodies = chunk, 0, have, False

    def _frame_bytes(self) -> int:
        """Return the size of the incomplete frame, which was checked."""
        size: int = _WORDS.unpack_from(self._chunk, self._begin)[0]
        return size + 4

    def _next_command(self) -> Command | None:
        """Return the next complete command, or None. The sizes of an incomplete frame are checked when they arrive."""
        have = self._end - self._begin
        if have < _WORDS.size:
            if have >= 4:
                self._check_size(int.from_bytes(self._chunk[self._begin : self._begin + 4], "big", signed=True))
            return None
        size, word = _WORDS.unpack_from(self._chunk, self._begin)
        self._check_size(size)
        header_bytes = word & 0xFFFFFF
        if header_bytes > min(size - 4, MAX_HEADER_BYTES):
            raise FrameError(
                f"found a header of {header_bytes} bytes in a frame of {size + 4}; expected at most "
                f"{min(size - 4, MAX_HEADER_BYTES)} bytes"
            )
        if word >> 24 > _BINARY:
            raise FrameError(f"found the header kind {word >> 24}; expected 0 (JSON) or 1 (binary)")
        if have < size + 4:
            return None
        begin = self._begin + _WORDS.size
        middle, end = begin + header_bytes, self._begin + 4 + size
        body: bytes | memoryview = b""
        if middle < end:
            body = self._chunk[middle:end].toreadonly()
            self._has_bodies = True
        header = self._chunk[begin:middle]
        command = _read_json(header, body) if word >> 24 == _JSON else _read_binary(header, body)
        self._begin = end
        return command

    def _check_size(self, size: int) -> None:
        if not 4 <= size <= self._max_frame_bytes - 4:
            first = bytes(self._chunk[self._begin : min(self._begin + 16, self._end)])
            raise FrameError(
                f"found the frame size {size + 4} (first bytes {first!r}); expected 8 to {self._max_frame_bytes} bytes"
            )


# A JSON header as fastjson writes it: fields in alphabetical order, no escapes. Each text that matches is valid JSON.
_TEXT = r'"[^"\\\x00-\x1f]*+"'
_NUMBER = r"(0|[1-9][0-9]{0,8}+)"
_PLAIN = re.compile(
    rf'\{{"code":{_NUMBER}'
    rf'(?:,"extFields":\{{({_TEXT}:{_TEXT}(?:,{_TEXT}:{_TEXT})*+)?+\}})?+'
    rf',"flag":{_NUMBER},"language":"([A-Z_]++)","opaque":{_NUMBER}'
    rf'(?:,"remark":({_TEXT}))?+'
    rf',"serializeTypeCurrentRPC":"JSON","version":{_NUMBER}\}}'
)
# The header of an answer to a pull, as 4.9 and 5.3 write it; only 5.3 has the two flags. Each also matches _PLAIN.
_DIGITS = '"([0-9]++)"'
_PULL_ANSWER = re.compile(
    rf'\{{"code":{_NUMBER},"extFields":\{{"suggestWhichBrokerId":{_DIGITS},(?:"groupSysFlag":{_DIGITS},)?+'
    rf'"nextBeginOffset":{_DIGITS},"maxOffset":{_DIGITS},"minOffset":{_DIGITS}(?(3),"topicSysFlag":{_DIGITS})\}}'
    rf',"flag":1,"language":"JAVA","opaque":{_NUMBER},"remark":"([A-Z_]++)"'
    rf',"serializeTypeCurrentRPC":"JSON","version":{_NUMBER}\}}'
)


def _read_json(header: memoryview, body: bytes | memoryview) -> Command:
    """Return the command with a JSON header. Most headers match a pattern, which is faster than a JSON parser."""
    text = _decode_text(header)
    if (match := _PULL_ANSWER.fullmatch(text)) is not None:
        code, broker, group_flag, following, top, bottom, topic_flag, opaque, remark, version = match.groups()
        fields = {"suggestWhichBrokerId": broker, "nextBeginOffset": following, "maxOffset": top, "minOffset": bottom}
        if group_flag is not None:
            fields["groupSysFlag"], fields["topicSysFlag"] = group_flag, topic_flag
        return Command(int(code), int(opaque), fields, body, _IS_RESPONSE, remark, "JAVA", int(version))
    match = _PLAIN.fullmatch(text)
    if match is None:
        return _read_any_json(text, body)
    code, inside, flag, language, opaque, remark, version = match.groups()
    fields = {}
    if inside:
        parts = inside.split('"')  # no text contains a quote: "", key, ":", value, ",", key, …
        fields = dict(zip(parts[1::4], parts[3::4], strict=True))
    return Command(
        int(code),
        int(opaque),
        fields,
        body,
        int(flag),
        remark[1:-1] if remark is not None else None,
        language,
        int(version),
    )


def _read_any_json(text: str, body: bytes | memoryview) -> Command:
    """Return the command with a JSON header, parsed by Python's parser (RemotingSerializable#decode)."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"found a header that is not JSON ({error}): {shorten_value(text)}") from None
    if not isinstance(values, dict):
        raise FrameError(f"found a header that is not a JSON object: {shorten_value(text)}")
    fields = values.get("extFields")
    if fields is None:
        fields = {}
    if not isinstance(fields, dict):
        _refuse("extFields", fields, "an object")
    for name, value in fields.items():
        _check_text(name, name)
        _check_text(name, value)
    remark, language = values.get("remark"), values.get("language", "OTHER")
    if remark is not None:
        _check_text("remark", remark)
    _check_text("language", language)
    return Command(
        _check_number("code", values.get("code")),
        _check_number("opaque", values.get("opaque")),
        fields,
        body,
        _check_number("flag", values.get("flag")),
        remark,
        language,
        _check_number("version", values.get("version", 0)),
    )


def _check_number(name: str, value: Any) -> int:
    if type(value) is not int or value not in _INT32:
        _refuse(name, value, "a whole number of 32 bits")
    return value


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        _refuse(name, value, "a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        _refuse(name, value, "Unicode text without single surrogates")


def _refuse(name: str, value: Any, expected: str) -> NoReturn:
    raise FrameError(f"found {shorten_value(value)} as {shorten_value(name)} in a header; expected {expected}")


def shorten_value(value: Any) -> str:
    """Return a value of JSON for an error: ASCII, at most 101 characters."""
    if value is None:
        return "nothing"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = ascii(value[:100] if isinstance(value, str) else value)
    return text if len(text) <= 100 else f"{text[:100]}…"


_FIXED = struct.Struct(">hBhii")  # code, language, version, opaque, flag


def _read_binary(header: memoryview, body: bytes | memoryview) -> Command:
    """Return the command with a binary header (RocketMQSerializable#rocketMQProtocolDecode)."""
    if len(header) < _FIXED.size:
        raise FrameError(f"found a binary header of {len(header)} bytes; expected at least {_FIXED.size + 8}")
    code, language, version, opaque, flag = _FIXED.unpack_from(header)
    remark, at = _take(header, _FIXED.size, 4)
    packed, end = _take(header, at, 4)
    if end < len(header):
        raise FrameError(f"found {len(header) - end} bytes after the fields of a binary header; expected none")
    fields = {}
    at = 0
    while at < len(packed):
        name, at = _take(packed, at, 2)
        value, at = _take(packed, at, 4)
        fields[_decode_text(name)] = _decode_text(value)
    return Command(
        code,
        opaque,
        fields,
        body,
        flag,
        _decode_text(remark) if len(remark) else None,
        LANGUAGES[language] if language < len(LANGUAGES) else "OTHER",
        version,
    )


def _take(data: memoryview, at: int, width: int) -> tuple[memoryview, int]:
    """Return the bytes whose size is in `width` bytes at `at`, and the position after them."""
    begin = at + width
    size = int.from_bytes(data[at:begin], "big", signed=True) if begin <= len(data) else -1
    if not 0 <= size <= len(data) - begin:
        raise FrameError(
            f"found a binary header whose part at byte {at} of {len(data)} does not fit; expected a size and so many "
            "bytes"
        )
    return data[begin : begin + size], begin + size


def _decode_text(data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise FrameError(
            f"found a header that is not UTF-8 text at byte {error.start}: {bytes(data[:40])!r}; expected a header of "
            "the remoting protocol"
        ) from None
