"""One message as the commit log keeps it: its layout, and its slow and obvious encoder and decoder.

    head (88 to 112 bytes, fixed fields) | body | topic length (1 or 2) | topic | 2: properties length | properties

The head is declared once, as a dtype for each pair of host kinds, because the two hosts in the middle take
8 bytes (IPv4) or 20 (IPv6) and shift what follows. `columns.py` reads many records at once by the same dtypes.

Invariants: everything is big-endian; TOTALSIZE counts itself; BODYCRC covers the body as stored, that is
compressed; a record never crosses the end of its segment, where a BLANK of at least 8 bytes stands.

Source: CommitLog#checkMessageAndReturnSize, MessageExtEncoder#encode, MessageDecoder#decode (4.9, 5.3).
"""

import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

MAGIC_V1 = 0xDAA320A7  # the topic's length takes one byte
MAGIC_V2 = 0xDAA320AB  # two bytes, since 5.1, for topics over 127 characters
MAGIC_BLANK = 0xCBD43194  # fills a segment whose rest is too short for the next record
BODY_CRC_MASK = 0x7FFFFFFF  # of a body's CRC-32 a head keeps these bits
BLANK_BYTES = 8  # length and magic; a record moves on when it would leave less than this

COMPRESSED = 0x1
TRANSACTION_MASK = 0xC
TRANSACTION_PREPARED = 0x4
TRANSACTION_COMMIT = 0x8
TRANSACTION_ROLLBACK = 0xC
BORN_HOST_V6 = 0x10
STORE_HOST_V6 = 0x20
NEED_UNWRAP = 0x40
INNER_BATCH = 0x80


def _head(born_host_bytes: int, store_host_bytes: int) -> np.dtype[np.void]:
    """Lay out a record's head for hosts of the given sizes (8 or 20 bytes)."""
    return np.dtype(
        [
            ("total_size", ">i4"),  # the whole record, this field included
            ("magic", ">u4"),  # MAGIC_V1 or MAGIC_V2
            ("body_crc", ">u4"),  # CRC-32 of the stored body, sign bit cleared
            ("queue_id", ">i4"),
            ("flag", ">i4"),  # the producer's own
            ("queue_offset", ">i8"),  # 0 for prepared and rolled back transactions
            ("physical_offset", ">i8"),  # where this record itself starts in the commit log
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


RECORD_HEAD = _head(8, 8)
RECORD_HEAD_BORN_V6 = _head(20, 8)
RECORD_HEAD_STORE_V6 = _head(8, 20)
RECORD_HEAD_BOTH_V6 = _head(20, 20)
assert (RECORD_HEAD.itemsize, RECORD_HEAD_BOTH_V6.itemsize) == (88, 112)

# sysFlag's two host bits -> the head that they announce.
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
# A length beyond this is damage, not a message: bounds what a flipped bit can make us read. RocketMQ's own
# limit is maxMessageSize + 64 KiB, and brokers raise maxMessageSize, at most to a segment.
MAX_RECORD_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Record:
    """One decoded record. Body as stored (maybe compressed), topic and properties as bytes, times in ms."""

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
        """Say whether the stored body has the CRC that the head names (an empty body always does)."""
        return not self.body or body_crc(self.body) == self.body_crc


@dataclass(frozen=True, slots=True)
class Blank:
    """The rest of the segment is filler: the next record starts the next segment.

    Where that is the segment's end says. `remaining_size` says the same in a filler that was written whole; of one
    that a power cut tore it may say anything.
    """

    remaining_size: int


@dataclass(frozen=True, slots=True)
class Torn:
    """No whole record starts here; `why` says what spoke against it. Not an error: a log ends like this."""

    why: str


def body_crc(body: bytes | memoryview) -> int:
    """Return the CRC that a head keeps for these stored bytes (UtilAll#crc32, 4.9: the sign bit cleared)."""
    return zlib.crc32(body) & BODY_CRC_MASK


def decode_record(view: bytes | memoryview) -> Record | Blank | Torn:
    """Decode what starts at the first byte of `view`, field by field. Never raises: damage is an answer.

    `view` may hold more than the record. The length is recomputed from the parts and must agree. The CRC is
    not compared here (`Record.crc_matches`).
    """
    view = memoryview(view)
    if len(view) < BLANK_BYTES:
        return Torn(f"{len(view)} bytes left, a record takes at least {MIN_RECORD_BYTES}")
    total_size, magic = struct.unpack_from(">iI", view)
    if magic == MAGIC_BLANK:
        return Blank(int(np.frombuffer(view, BLANK, 1)[0]["remaining_size"]))
    if magic not in (MAGIC_V1, MAGIC_V2):
        return Torn(f"magic {magic:#010x}")
    if not MIN_RECORD_BYTES <= total_size <= len(view):
        return Torn(f"length {total_size}, {len(view)} bytes left")
    view = view[:total_size]
    (sys_flag,) = struct.unpack_from(">i", view, 36)
    layout = HEADS[sys_flag & HOST_BITS]
    if total_size < layout.itemsize + 3:
        return Torn(f"length {total_size} is too short for its own head")
    head = np.frombuffer(view, layout, 1)[0]
    position = layout.itemsize
    body_size = int(head["body_size"])
    topic_length_bytes = 1 if magic == MAGIC_V1 else 2
    if body_size < 0 or position + body_size + topic_length_bytes + 2 > total_size:
        return Torn(f"body of {body_size} bytes in a record of {total_size}")
    body = bytes(view[position : position + body_size])
    position += body_size
    (topic_size,) = struct.unpack_from(">b" if magic == MAGIC_V1 else ">h", view, position)
    position += topic_length_bytes
    if topic_size < 0 or position + topic_size + 2 > total_size:
        return Torn(f"topic of {topic_size} bytes in a record of {total_size}")
    topic = bytes(view[position : position + topic_size])
    position += topic_size
    (properties_size,) = struct.unpack_from(">h", view, position)
    position += 2
    if properties_size < 0 or position + properties_size != total_size:
        return Torn(f"the parts add up to {position + properties_size}, the length says {total_size}")
    fields: dict[str, Any] = {
        name: head[name].tobytes() if "host" in name else int(head[name])
        for name in layout.names or ()
        if name != "body_size"
    }
    return Record(body=body, topic=topic, properties=bytes(view[position:]), **fields)


def encode_record(record: Record) -> bytes:
    """Write one record; TOTALSIZE, magic and CRC are taken from `record` as they are.

    Raises ValueError where a part does not fit its length field or a host its bit in sysFlag.
    """
    layout = HEADS[record.sys_flag & HOST_BITS]
    wanted = (layout["born_host"].itemsize, layout["store_host"].itemsize)
    if (len(record.born_host), len(record.store_host)) != wanted:
        raise ValueError(
            f"hosts of {len(record.born_host)} and {len(record.store_host)} bytes, sysFlag "
            f"{record.sys_flag:#x} announces {wanted[0]} and {wanted[1]}"
        )
    topic_format = ">b" if record.magic == MAGIC_V1 else ">h"
    limit = 127 if record.magic == MAGIC_V1 else 32767
    if len(record.topic) > limit or len(record.properties) > 32767:
        raise ValueError(
            f"topic of {len(record.topic)} bytes (at most {limit}) or properties of "
            f"{len(record.properties)} bytes (at most 32767) are too long"
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
    """Return the bytes that `record` takes on disk: what TOTALSIZE must say."""
    parts = len(record.body) + len(record.topic) + len(record.properties)
    topic_length_bytes = 1 if record.magic == MAGIC_V1 else 2
    return HEADS[record.sys_flag & HOST_BITS].itemsize + parts + topic_length_bytes + 2


def encode_blank(remaining_size: int) -> bytes:
    """Write the filler's first 8 bytes for a segment with `remaining_size` bytes left (at least 8)."""
    assert remaining_size >= BLANK_BYTES, remaining_size
    return np.array((remaining_size, MAGIC_BLANK), BLANK).tobytes()
