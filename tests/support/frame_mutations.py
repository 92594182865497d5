"""Seeded changes of frames: of bytes, sizes, headers and bodies. Half of them leave a frame whose sizes are right.

Those reach the parsers of headers and bodies. The others test how a reader cuts its input into frames.
"""

import re
from collections.abc import Callable
from random import Random

from support.remoting_frames import RecordedFrame, frame_of

_NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    4,
    5,
    7,
    8,
    127,
    128,
    255,
    256,
    32767,
    65535,
    1 << 20,
    (1 << 24) - 4,
    (1 << 24) - 3,
    1 << 24,
)
_NUMBERS += (2**31 - 1, -(2**31), 2**63 - 1, 2**63, -(2**63))
_VALUES = (
    *(str(number).encode() for number in _NUMBERS),
    *(b'"', b'""', b"null", b"true", b"{}", b"[]", b"NaN", b"-", b"1.5", b"1e9", b"1e999", b"[[1]]", b'{"a":{}}'),
    *(
        b"9" * 30,
        b"9" * 5000,
        b"[" * 2000,
        b'{"a":' * 2000,
        b"{{",
        b"{" * 200,
        b"\\ud800",
        b'"\\ud800"',
        b"\\",
        b"\xff",
    ),
    *('"ü"'.encode(), "\u2028".encode(), b"\x00", b"\n", b'{"brokerName":"b","queueId":1,"topic":"t"}', b"0:", b","),
)
_JSON_VALUES = (*(str(number).encode() for number in _NUMBERS), b'""', b"null", b"true", b"{}", b"[]", b'"7"', b"1.5")
_TEXTS = (*(str(number).encode() for number in _NUMBERS), b"", b"a", b"1.5", b" 1", b"1_0", "٣".encode(), b"9" * 5000)
_VALUE = re.compile(rb'(?<=[:\[,])(?:("[^"]*"|-?\d+|true|false)(?!\s*:)|\{[^{}]*\}(?!:)|\[[^\[\]]*\])')
_TOKEN = re.compile(rb'"[^"]*"|-?\d+|true|false|null|[{}\[\],:]')


def mutate_frame(frame: RecordedFrame, random: Random) -> bytes:
    """Return the frame with one to three changes."""
    header, body, kind = bytearray(frame.header), bytearray(frame.data[8 + frame.header_size :]), frame.data[4]
    if random.random() < 0.5:
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            change = random.choice((_change_value, _change_value, _change_value, _change_token, _change_bytes))
            change = _change_number if kind == 1 and random.random() < 0.3 else change
            change(body if body and random.random() < 0.5 else header, random)
        if random.random() < 0.03:
            kind = 1 - kind
        return frame_of(bytes(header), bytes(body), kind)
    data = bytearray(frame.data)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        random.choice(_CHANGES)(data, random)
    return bytes(data)


def _change_value(data: bytearray, random: Random) -> None:
    """Replace a value of JSON by another one, so that the text stays JSON."""
    values = list(_VALUE.finditer(bytes(data)))
    if not values:
        return _change_bytes(data, random)
    begin, end = (value := random.choice(values)).span()
    if value[0][:1] == b'"' and random.random() < 0.7:
        data[begin + 1 : end - 1] = random.choice(_TEXTS)
    else:
        data[begin:end] = random.choice(_JSON_VALUES)
    return None


def _change_token(data: bytearray, random: Random) -> None:
    """Replace, remove or repeat a token of JSON."""
    tokens = list(_TOKEN.finditer(bytes(data)))
    if not tokens:
        return _change_bytes(data, random)
    token = random.choice(tokens)
    begin, end = token.span()
    choice = random.random()
    if choice < 0.5:
        data[begin:end] = random.choice(_VALUES)
    elif choice < 0.65 and token[0][:1] == b'"':
        data[begin + 1 : end - 1] = random.choice(_VALUES)
    elif choice < 0.8:
        del data[begin:end]
    else:
        data[begin:begin] = random.choice(tokens)[0]
    return None


def _change_bytes(data: bytearray, random: Random) -> None:
    """Flip a bit, write over bytes, or insert or remove some."""
    at, size = random.randrange(len(data) + 1), random.choice((1, 1, 2, 4, 8, 100))
    choice = random.randrange(4)
    if choice == 0 and at < len(data):
        data[at] ^= 1 << random.randrange(8)
    elif choice == 1:
        data[at : at + size] = random.randbytes(min(size, len(data) - at))
    elif choice == 2:
        data[at:at] = random.randbytes(size)
    else:
        del data[at : at + size]


def _change_number(data: bytearray, random: Random) -> None:
    """Write a number of 1 to 8 bytes over the bytes at a random place, which may be a size in a binary header."""
    width = random.choice((1, 2, 4, 4, 8))
    if len(data) >= width:
        at = random.randrange(len(data) - width + 1)
        data[at : at + width] = _number(random, width)


def _change_size(data: bytearray, random: Random) -> None:
    """Write a number over the frame's size or its header's size and kind, or add to one of them."""
    at = random.choice((0, 4))
    if len(data) < 8:
        return
    if random.random() < 0.5:
        data[at : at + 4] = _number(random, 4)
    else:
        value = int.from_bytes(data[at : at + 4], "big") + random.choice((-5, -1, 1, 2, 1000))
        data[at : at + 4] = (value % (1 << 32)).to_bytes(4, "big")


def _cut(data: bytearray, random: Random) -> None:
    """Cut the frame."""
    del data[random.randrange(len(data) + 1) :]


def _number(random: Random, width: int) -> bytes:
    return (random.choice(_NUMBERS) % (1 << (8 * width))).to_bytes(width, "big")


_CHANGES: tuple[Callable[[bytearray, Random], None], ...] = (
    _change_size,
    _change_size,
    _change_bytes,
    _change_number,
    _change_token,
    _cut,
)
