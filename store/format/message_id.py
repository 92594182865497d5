"""The two ids of a message as text: where the broker stored it, and what the producer called it.

| id | bytes behind the hex digits |
| --- | --- |
| offsetMsgId | store host: address (4 or 16), port (4); physical offset (8) |
| UNIQ_KEY | address (4 or 16), process id (2), class loader's hash (4), ms since the month began (4), counter (2) |

Both are 32 upper-case hex digits, 56 with an IPv6 address, so a text alone does not say which of the two it is
(`may_be_offset_message_id`). A UNIQ_KEY is the producer's own: other clients write other texts there.

Source: MessageDecoder#createMessageId, #decodeMessageId, MessageClientIDSetter (4.9, 5.3).
"""

import ipaddress
import struct
from dataclasses import dataclass, replace

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.java import Host, decode_host, encode_host

_V4_DIGITS, _V6_DIGITS = 32, 56
_UNIQUE_TAIL = struct.Struct(">HIIH")  # process id, hash, ms, counter
_ADVANCE_BITS = 48  # ms and counter, taken as one number
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class OffsetMessageId:
    """Where a message lies: the broker that stored it and the physical offset (bytes). str() is the id."""

    store_host: Host
    physical_offset: int

    def __str__(self) -> str:
        return (encode_host(self.store_host) + struct.pack(">q", self.physical_offset)).hex().upper()


@dataclass(frozen=True, slots=True)
class UniqueKey:
    """A UNIQ_KEY's parts. Numbers are unsigned: 16, 32, 32 and 16 bits. str() is the key.

    `month_ms` counts from the start of the month in the producer's local time zone, which the key does not name.
    """

    ip: str
    pid: int
    class_hash: int
    month_ms: int
    counter: int

    def __str__(self) -> str:
        tail = _UNIQUE_TAIL.pack(self.pid, self.class_hash, self.month_ms, self.counter)
        return (ipaddress.ip_address(self.ip).packed + tail).hex().upper()

    def advance(self, count: int) -> "UniqueKey":
        """Return the key `count` further: the counter goes up and carries into the milliseconds.

        2^48 keys differ before the first comes again, where RocketMQ's own repeat after 65536 in a millisecond.
        """
        number = ((self.month_ms << 16 | self.counter) + count) & ((1 << _ADVANCE_BITS) - 1)
        return replace(self, month_ms=number >> 16, counter=number & 0xFFFF)


def make_unique_key(ip: str, pid: int, class_hash: int, month_ms: int, counter: int = 0) -> UniqueKey:
    """Return a key of any numbers: each keeps the low bits for which there is room, as Java's casts do."""
    bits16, bits32 = 0xFFFF, 0xFFFFFFFF
    return UniqueKey(ip, pid & bits16, class_hash & bits32, month_ms & bits32, counter & bits16)


def parse_offset_message_id(text: str) -> OffsetMessageId:
    """Read an offsetMsgId. Raises OptionError for a text that cannot be one; lower-case digits are taken."""
    data = _hex_bytes(text, "offsetMsgId")
    host = decode_host(data[:-8])
    (physical_offset,) = struct.unpack(">q", data[-8:])
    if not 0 <= host.port <= _MAX_PORT or physical_offset < 0:
        raise OptionError(
            f"message id {text!r} is no offsetMsgId: port {host.port} and physical offset {physical_offset} "
            f"stand in it, accepted are ports from 0 to {_MAX_PORT} and offsets from 0. It may be a UNIQ_KEY, "
            "by which messages of a topic are found too."
        )
    return OffsetMessageId(host, physical_offset)


def may_be_offset_message_id(text: str) -> bool:
    """Say whether `parse_offset_message_id` reads the text. Of UNIQ_KEYs about one in 65536 passes too."""
    try:
        parse_offset_message_id(text)
    except OptionError:
        return False
    return True


def parse_unique_key(text: str) -> UniqueKey:
    """Read a UNIQ_KEY. Raises OptionError for a text that a Java client would not have made."""
    data = _hex_bytes(text, "UNIQ_KEY")
    head, tail = data[: -_UNIQUE_TAIL.size], data[-_UNIQUE_TAIL.size :]
    return UniqueKey(str(ipaddress.ip_address(head)), *_UNIQUE_TAIL.unpack(tail))


def _hex_bytes(text: str, kind: str) -> bytes:
    digits = text.isascii() and text.isalnum()
    if len(text) in (_V4_DIGITS, _V6_DIGITS) and digits:
        try:
            return bytes.fromhex(text)
        except ValueError:
            pass  # letters beyond F: the same answer
    shown = repr(text) if len(text) <= 80 else f"{text[:80]!r}…"
    raise OptionError(
        f"message id {shown} is no {kind}: accepted are {_V4_DIGITS} hex digits, or {_V6_DIGITS} for a host "
        f"with an IPv6 address; this has {len(text)} characters"
    )
