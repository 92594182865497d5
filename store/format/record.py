"""A commit-log record: its layout, and a simple encoder and decoder of one record.

    header (88 to 112 bytes) | body | topic length (1 or 2) | topic | properties length (2) | properties

Numbers in parentheses are bytes. The header contains the hosts of producer and broker, each with 8 bytes (IPv4) or 20
(IPv6). The position of the later fields depends on these sizes, so each pair of host sizes has its own dtype.
`record_headers` and `columns` read many records at once with the same dtypes.

Invariants:
- All numbers are big-endian.
- TOTALSIZE, the size of the record, includes the bytes of TOTALSIZE itself.
- BODYCRC covers the body as stored, which may be compressed.
- A record never crosses the end of its segment. A BLANK of at least 8 bytes fills the rest of the segment.

Source: CommitLog#checkMessageAndReturnSize, MessageExtEncoder#encode, MessageDecoder#decode (4.9, 5.3).
"""

import struct
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

MAGIC_V1 = 0xDAA320A7  # the topic's length takes one byte
MAGIC_V2 = 0xDAA320AB  # the topic's length takes two bytes; written since 5.1 if the topic has over 127 characters
MAGIC_BLANK = 0xCBD43194  # the filler at the end of a segment that has no room for the next record
BODY_CRC_MASK = 0x7FFFFFFF  # the bits of a body's CRC-32 that the header stores
BLANK_BYTES = 8  # length and magic; a record that would leave less room than this goes to the next segment

COMPRESSED = 0x1
TRANSACTION_MASK = 0xC
TRANSACTION_PREPARED = 0x4
TRANSACTION_COMMIT = 0x8
TRANSACTION_ROLLBACK = 0xC
BORN_HOST_V6 = 0x10
STORE_HOST_V6 = 0x20
NEED_UNWRAP = 0x40
INNER_BATCH = 0x80


def _header_dtype(born_host_bytes: int, store_host_bytes: int) -> np.dtype[np.void]:
    """Return the dtype of a record header whose hosts have the given sizes (8 or 20 bytes)."""
    return np.dtype(
        [
            ("total_size", ">i4"),  # the whole record, this field included
            ("magic", ">u4"),  # MAGIC_V1 or MAGIC_V2
            ("body_crc", ">u4"),  # CRC-32 of the stored body, sign bit cleared
            ("queue_id", ">i4"),
            ("flag", ">i4"),  # set by the producer
            ("queue_offset", ">i8"),  # 0 for prepared and rolled back transactions
            ("physical_offset", ">i8"),  # of this record's first byte in the commit log
            ("sys_flag", ">i4"),
            ("born_timestamp", ">i8"),  # ms, the producer's clock
            ("born_host", f"V{born_host_bytes}"),  # address, then a four-byte port
            ("store_timestamp", ">i8"),  # ms, the broker's clock
            ("store_host", f"V{store_host_bytes}"),
            ("reconsume_times", ">i4"),
            ("prepared_transaction_offset", ">i8"),  # physical offset of the half message, else 0
            ("body_size", ">i4"),
        ]
    )


RECORD_HEAD = _header_dtype(8, 8)
RECORD_HEAD_BORN_V6 = _header_dtype(20, 8)
RECORD_HEAD_STORE_V6 = _header_dtype(8, 20)
RECORD_HEAD_BOTH_V6 = _header_dtype(20, 20)
assert (RECORD_HEAD.itemsize, RECORD_HEAD_BOTH_V6.itemsize) == (88, 112)

# sysFlag's two host bits -> the dtype of the header.
HEADS = {
    0: RECORD_HEAD,
    BORN_HOST_V6: RECORD_HEAD_BORN_V6,
    STORE_HOST_V6: RECORD_HEAD_STORE_V6,
    BORN_HOST_V6 | STORE_HOST_V6: RECORD_HEAD_BOTH_V6,
}
HOST_BITS = BORN_HOST_V6 | STORE_HOST_V6

BLANK = np.dtype([("remaining_size", ">i4"), ("magic", ">u4")])
assert BLANK.itemsize == BLANK_BYTES

MIN_RECORD_BYTES = RECORD_HEAD.itemsize + 3  # no body, no topic, no properties
# A larger length is treated as damage, so that a flipped bit in a length cannot make a reader read any amount of data.
# RocketMQ's own limit is maxMessageSize + 64 KiB, and maxMessageSize may be configured up to the size of a segment.
MAX_RECORD_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Record:
    """One decoded record. Times are in ms.

    `body` contains the stored bytes, which may be compressed. `topic` and `properties` are not decoded to text.
    """

    total_size: int
    magic: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born_timestamp: int
    born_host: bytes
    store_timestamp: int
    store_host: bytes
    reconsume_times: int
    prepared_transaction_offset: int
    body: bytes
    topic: bytes
    properties: bytes

    @property
    def crc_matches(self) -> bool:
        """Return whether the CRC in the header is that of the stored body. An empty body always matches."""
        return not self.body or body_crc(self.body) == self.body_crc


@dataclass(frozen=True, slots=True)
class Blank:
    """Filler up to the end of the segment. The next record is the first one of the next segment.

    To find the end of the segment, use the size of the segment's file, not `remaining_size`. After a power cut the
    filler may be torn, so `remaining_size` may have any value.
    """

    remaining_size: int


@dataclass(frozen=True, slots=True)
class Torn:
    """No complete record starts at this position; `why` is the reason. This is a normal end of a log, not an error."""

    why: str


def body_crc(body: bytes | memoryview) -> int:
    """Return the CRC-32 of a stored body with the sign bit cleared (UtilAll#crc32, 4.9)."""
    return zlib.crc32(body) & BODY_CRC_MASK


class RecordParts(NamedTuple):
    """Where the parts of a record are, and to which queue it belongs. Positions and sizes are in bytes.

    The body, the topic and the properties begin at `body`, `topic` and `properties`, counted from the record's first
    byte. The properties end with the record.
    """

    layout: np.dtype[np.void]
    total_size: int
    queue_id: int
    physical_offset: int
    body: int
    body_size: int
    topic: int
    topic_size: int
    properties: int


# The numbers at the beginning of a header, which all layouts share.
_FIRST_FIELDS = (RECORD_HEAD.names or ())[: (RECORD_HEAD.names or ()).index("born_timestamp")]
_FIRST_NUMBERS = struct.Struct(
    ">" + "".join({"i4": "i", "u4": "I", "i8": "q"}[RECORD_HEAD[name].str[1:]] for name in _FIRST_FIELDS)
)
_SIZE, _TOPIC_SIZES = struct.Struct(">i"), {MAGIC_V1: struct.Struct(">b"), MAGIC_V2: struct.Struct(">h")}
_PROPERTIES_SIZE = struct.Struct(">h")


def find_parts(view: bytes | memoryview) -> RecordParts | Blank | Torn:
    """Find the parts of the record that starts at the first byte of `view`, as `decode_record` does. Never raises."""
    if len(view) < BLANK_BYTES:
        return Torn(f"{len(view)} bytes left, a record takes at least {MIN_RECORD_BYTES}")
    total_size, magic = struct.unpack_from(">iI", view)
    if magic == MAGIC_BLANK:
        return Blank(int(np.frombuffer(view, BLANK, 1)[0]["remaining_size"]))
    if magic not in _TOPIC_SIZES:
        return Torn(f"magic {magic:#010x}")
    if not MIN_RECORD_BYTES <= total_size <= len(view):
        return Torn(f"length {total_size}, {len(view)} bytes left")
    _, _, _, queue_id, _, _, physical_offset, sys_flag = _FIRST_NUMBERS.unpack_from(view)
    layout = HEADS[sys_flag & HOST_BITS]
    body = layout.itemsize
    if total_size < body + 3:
        return Torn(f"length {total_size} is too short for the header")
    (body_size,) = _SIZE.unpack_from(view, body - _SIZE.size)
    size_of_topic = _TOPIC_SIZES[magic]
    topic = body + body_size + size_of_topic.size
    if body_size < 0 or topic + 2 > total_size:
        return Torn(f"body of {body_size} bytes in a record of {total_size}")
    (topic_size,) = size_of_topic.unpack_from(view, body + body_size)
    properties = topic + topic_size + 2
    if topic_size < 0 or properties > total_size:
        return Torn(f"topic of {topic_size} bytes in a record of {total_size}")
    (properties_size,) = _PROPERTIES_SIZE.unpack_from(view, properties - 2)
    if properties_size < 0 or properties + properties_size != total_size:
        return Torn(f"the parts add up to {properties + properties_size}, the length is {total_size}")
    return RecordParts(
        layout,
        total_size,
        queue_id,
        physical_offset,
        body,
        body_size,
        topic,
        topic_size,
        properties,
    )


def decode_record(view: bytes | memoryview) -> Record | Blank | Torn:
    """Decode the record that starts at the first byte of `view`. Bytes after the record are ignored.

    Returns Blank if a filler starts there instead. Returns Torn if the record is incomplete or damaged, or if the sizes
    of its parts do not add up to its length. Never raises. The CRC of the body is not checked; use
    `Record.crc_matches`.
    """
    view = memoryview(view)
    parts = find_parts(view)
    if not isinstance(parts, RecordParts):
        return parts
    names, values = parts.layout.names or (), np.frombuffer(view, parts.layout, 1).item()
    fields: dict[str, Any] = dict(zip(names, values, strict=True))
    del fields["body_size"]
    return Record(
        body=bytes(view[parts.body : parts.body + parts.body_size]),
        topic=bytes(view[parts.topic : parts.topic + parts.topic_size]),
        properties=bytes(view[parts.properties : parts.total_size]),
        **fields,
    )


def encode_record(record: Record) -> bytes:
    """Return the bytes of one record. TOTALSIZE, magic and CRC are copied from `record` without a check.

    Raises ValueError if topic or properties are too long for their length fields, or if the size of a host does not
    match the host bits in `sys_flag`.
    """
    layout = HEADS[record.sys_flag & HOST_BITS]
    expected = (layout["born_host"].itemsize, layout["store_host"].itemsize)
    if (len(record.born_host), len(record.store_host)) != expected:
        raise ValueError(
            f"hosts have {len(record.born_host)} and {len(record.store_host)} bytes; expected "
            f"{expected[0]} and {expected[1]} with sysFlag {record.sys_flag:#x}"
        )
    topic_format = ">b" if record.magic == MAGIC_V1 else ">h"
    limit = 127 if record.magic == MAGIC_V1 else 32767
    if len(record.topic) > limit or len(record.properties) > 32767:
        raise ValueError(
            f"topic of {len(record.topic)} bytes or properties of {len(record.properties)} bytes are too long; "
            f"expected at most {limit} and 32767"
        )
    head = np.zeros(1, layout)
    for name in layout.names or ():
        value = len(record.body) if name == "body_size" else getattr(record, name)
        head[name] = np.void(value) if isinstance(value, bytes) else value
    return b"".join(
        [
            head.tobytes(),
            record.body,
            struct.pack(topic_format, len(record.topic)),
            record.topic,
            struct.pack(">h", len(record.properties)),
            record.properties,
        ]
    )


def record_size(record: Record) -> int:
    """Return the size of `record` in the commit log (bytes). This is the correct value of its TOTALSIZE."""
    parts = len(record.body) + len(record.topic) + len(record.properties)
    topic_length_bytes = 1 if record.magic == MAGIC_V1 else 2
    return HEADS[record.sys_flag & HOST_BITS].itemsize + parts + topic_length_bytes + 2


def encode_blank(remaining_size: int) -> bytes:
    """Return the first 8 bytes of the filler for a segment that has `remaining_size` bytes left (at least 8)."""
    assert remaining_size >= BLANK_BYTES, remaining_size
    return np.array((remaining_size, MAGIC_BLANK), BLANK).tobytes()
