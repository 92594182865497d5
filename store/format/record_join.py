"""The parts of many records -> the records' bytes, one after the other, in one call to Arrow.

    head | body | topic with its length | properties' length, UNIQ_KEY | the other properties, part by part

What has the same width in all rows is written as a table of bytes first, a field of all rows at a time; what is the
same in all rows and stands beside it becomes part of it. Arrow joins those tables and the columns row by row.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.format.filenames import MAX_TOPIC_CHARS
from rmq_spark.store.format.message_columns import Topics, join_rows
from rmq_spark.store.format.outgoing_bodies import OutgoingBodies
from rmq_spark.store.format.properties import UNIQ_KEY
from rmq_spark.store.format.ragged import Bytes
from rmq_spark.store.format.record import MAGIC_V1, MAGIC_V2, RECORD_HEAD
from rmq_spark.store.format.unique_ids import NUMBER_CHARS, UniqueIdRun

_UNIQUE_BEFORE, _UNIQUE_AFTER = f"{UNIQ_KEY}\x01".encode(), b"\x02"
_LENGTH = np.dtype(">i2")  # of the properties


@dataclass(frozen=True, slots=True)
class RecordParts:
    """What the records of a batch are made of. Rows go with rows; at least one."""

    head: NDArray[np.void]  # RECORD_HEAD, one element: what is the same in all records
    topics: Topics
    bodies: OutgoingBodies
    ids: UniqueIdRun
    properties: list[bytes | pa.BinaryArray]  # behind UNIQ_KEY
    properties_sizes: NDArray[np.int64] | int  # of those, bytes
    queue_ids: NDArray[np.int64]
    flags: NDArray[np.int64] | None

    def __len__(self) -> int:
        return self.ids.count

    @property
    def text_sizes(self) -> NDArray[np.int64]:
        """The bytes of each record's properties, UNIQ_KEY among them."""
        unique = len(_UNIQUE_BEFORE) + self.ids.width + len(_UNIQUE_AFTER)
        return np.broadcast_to(self.properties_sizes + np.int64(unique), len(self))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The bytes of each record (TOTALSIZE)."""
        fixed = RECORD_HEAD.itemsize + _LENGTH.itemsize
        sizes: NDArray[np.int64] = self.bodies.stored.sizes + self.text_sizes
        sizes += self.topics.per_row([len(_topic_field(name)) + fixed for name in self.topics.names], np.int64)
        return sizes


def join_records(parts: RecordParts, sizes: NDArray[np.int64]) -> Bytes:
    """Return the records, `sizes` bytes each. The caller has seen to it that every part fits its length field.

    All of them take less than 2 GiB, which is what the offsets of Arrow's columns can say.
    """
    total = int(sizes.sum())
    assert total < 1 << 31, f"{total} bytes of records: encode fewer rows at once"
    pieces: list[bytes | pa.BinaryArray] = [_heads(parts, sizes), parts.bodies.stored.array()]
    fields = [_topic_field(name) for name in parts.topics.names]
    before = b""  # what stands before the properties' length and is the same in all rows
    if parts.topics.numbers is None:
        before = fields[0]
    else:
        pieces.append(pa.array(fields, pa.binary()).take(pa.array(parts.topics.numbers)))
    others = list(parts.properties)
    after = others.pop(0) if others and isinstance(others[0], bytes) else b""
    pieces.append(_unique_keys(parts, before, after))
    joined = join_rows(*pieces, *others)
    _, offsets, data = joined.buffers()
    end = np.frombuffer(offsets, np.int32)[len(parts)]
    assert end == total, (end, total)
    return np.frombuffer(data, np.uint8, total)


def _is_long(topic: str) -> bool:
    """Say whether a record with this topic is of version 2 (MessageVersion, 5.1)."""
    return len(topic) > MAX_TOPIC_CHARS


def _topic_field(topic: str) -> bytes:
    """Return the topic with its length before it."""
    return len(topic).to_bytes(2 if _is_long(topic) else 1, "big") + topic.encode()


def _heads(parts: RecordParts, sizes: NDArray[np.int64]) -> pa.BinaryArray:
    data = bytearray(parts.head.tobytes()) * len(parts)
    heads = np.frombuffer(data, RECORD_HEAD)
    heads["total_size"] = sizes
    if any(_is_long(name) for name in parts.topics.names):
        magics = [MAGIC_V2 if _is_long(name) else MAGIC_V1 for name in parts.topics.names]
        heads["magic"] = parts.topics.per_row(magics, np.uint32)
    heads["body_crc"] = parts.bodies.crcs & np.uint32(0x7FFFFFFF)
    heads["queue_id"] = parts.queue_ids
    heads["body_size"] = parts.bodies.stored.sizes
    if parts.flags is not None:
        heads["flag"] = parts.flags
    if parts.bodies.sys_flags is not None:
        heads["sys_flag"] = parts.bodies.sys_flags
    return _equal_widths(data, RECORD_HEAD.itemsize)


def _unique_keys(parts: RecordParts, before: bytes, after: bytes) -> pa.BinaryArray:
    """Return `before`, the length of the properties, UNIQ_KEY, and `after`, for each row."""
    length_at = len(before)
    fixed = before + bytes(_LENGTH.itemsize) + _UNIQUE_BEFORE + parts.ids.prefix.encode()
    number_at = len(fixed)
    template = fixed + bytes(NUMBER_CHARS) + _UNIQUE_AFTER + after
    data = bytearray(template) * len(parts)
    rows = np.frombuffer(data, np.uint8).reshape(len(parts), len(template))
    rows[:, length_at : length_at + _LENGTH.itemsize].view(_LENGTH)[:, 0] = parts.text_sizes
    parts.ids.write_numbers(rows[:, number_at : number_at + NUMBER_CHARS])
    return _equal_widths(data, len(template))


def _equal_widths(data: bytearray, width: int) -> pa.BinaryArray:
    offsets = np.arange(0, len(data) + 1, width, dtype=np.int32)
    return pa.BinaryArray.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
