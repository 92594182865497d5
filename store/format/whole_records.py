"""Whole records of any kind, anywhere in a buffer: where the parts of each lie, found for all of them at once.

`record.decode_record` is the slow twin: what it takes for a record is whole here, and nothing else is.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.format.heads import gather
from rmq_spark.store.format.properties import PropertyPairs
from rmq_spark.store.format.ragged import Bytes, Positions, take_ranges
from rmq_spark.store.format.record import (
    BORN_HOST_V6,
    HOST_BITS,
    MAGIC_V1,
    MAGIC_V2,
    MIN_RECORD_BYTES,
    RECORD_HEAD,
    RECORD_HEAD_BORN_V6,
    RECORD_HEAD_BOTH_V6,
    STORE_HOST_V6,
)
from rmq_spark.store.format.shaped_properties import ShapedPairs

_FIELDS: Any = RECORD_HEAD.fields
_BEHIND_BORN_HOST = {"store_timestamp", "store_host"}
_BEHIND_STORE_HOST = {"reconsume_times", "prepared_transaction_offset", "body_size"}
_V6_BYTES = RECORD_HEAD_BORN_V6.itemsize - RECORD_HEAD.itemsize  # that a host of IPv6 takes more
assert RECORD_HEAD_BOTH_V6.itemsize == RECORD_HEAD.itemsize + 2 * _V6_BYTES


def born_host_shift(sys_flags: NDArray[Any]) -> NDArray[np.int64]:
    """Return by how many bytes what follows the born host lies further back than in a head of IPv4."""
    return np.where(sys_flags & BORN_HOST_V6, _V6_BYTES, 0)


def field_shift(name: str, sys_flags: NDArray[Any]) -> NDArray[np.int64] | int:
    """Return by how many bytes a field of heads lies further back than in a head of IPv4."""
    if name in _BEHIND_BORN_HOST:
        return born_host_shift(sys_flags)
    if name in _BEHIND_STORE_HOST:
        return born_host_shift(sys_flags) + np.where(sys_flags & STORE_HOST_V6, _V6_BYTES, 0)
    return 0


class NotWholeError(ValueError):
    """Record number `row` is none that `record.decode_record` would take, or is another place's."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


@dataclass(frozen=True, slots=True)
class WholeRecords:
    """Where the parts of records lie in `data`, in bytes; one element a record.

    Its own physical offset and queue offset are not compared with anything, and no CRC is.
    """

    data: Bytes
    positions: Positions
    ends: Positions
    heads: NDArray[np.void]  # as if of IPv4: right up to the born host
    sys_flags: NDArray[np.int64]
    body_begins: Positions
    body_ends: Positions
    topic_begins: Positions
    topic_ends: Positions

    @classmethod
    def of(cls, data: Bytes, positions: Positions, ends: Positions) -> "WholeRecords":
        """Find the parts of the records [positions, ends). Raises NotWholeError for the first that is none."""
        found, is_whole = _locate(data, positions, ends)
        if not is_whole.all():
            raise NotWholeError(int(np.argmin(is_whole)))
        return found

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def text_begins(self) -> Positions:
        """Where the properties begin."""
        return self.topic_ends + 2

    def field(self, name: str) -> NDArray[Any]:
        """Return one field of all heads, a number, in native byte order."""
        return _field(self.data, self.positions, self.heads, self.sys_flags, name)

    def topics(self) -> pa.BinaryArray:
        """Return the topic of each record."""
        return take_ranges(self.data, self.topic_begins, self.topic_ends)

    def are_of(self, topic: str, queue_id: int) -> NDArray[np.bool_]:
        """Say of each record whether it says of itself that it is of this queue."""
        same_topic = pc.equal(self.topics(), pa.scalar(topic.encode(), pa.binary()))
        are_its: NDArray[np.bool_] = same_topic.to_numpy(zero_copy_only=False) & (self.field("queue_id") == queue_id)
        return are_its

    def texts(self) -> pa.BinaryArray:
        """Return the text of the properties of each record."""
        return take_ranges(self.data, self.text_begins, self.ends)

    def pairs(self) -> ShapedPairs | PropertyPairs:
        """Return the properties of each record."""
        return pairs_of(self.texts())


def are_whole(data: Bytes, positions: Positions, ends: Positions) -> NDArray[np.bool_]:
    """Say of each range of `data` whether it is one whole record. Every range lies in `data`."""
    return _locate(data, positions, ends)[1]


def pairs_of(texts: pa.BinaryArray) -> ShapedPairs | PropertyPairs:
    """Return the properties in texts that hold no nulls."""
    shaped = ShapedPairs.of(texts)
    return PropertyPairs.split(texts) if shaped is None else shaped


def numbers_at(data: Bytes, positions: Positions, layout: np.dtype[Any]) -> NDArray[Any]:
    """Return the number at each position, which need not be aligned. All of them lie in `data`."""
    return unaligned(data, layout)[positions]


def unaligned(data: Bytes, layout: np.dtype[Any]) -> NDArray[Any]:
    """Return `data` as numbers that begin at every byte: to be read and written by position."""
    view: NDArray[Any] = np.ndarray((max(len(data) - layout.itemsize + 1, 0),), layout, data, strides=(1,))
    return view


def _field(
    data: Bytes, positions: Positions, heads: NDArray[np.void], sys_flags: NDArray[np.int64], name: str
) -> NDArray[Any]:
    """Return one field of all heads, in native byte order; `heads` are those bytes taken for heads of IPv4."""
    layout, at = _FIELDS[name][:2]
    if name in _BEHIND_BORN_HOST | _BEHIND_STORE_HOST and (sys_flags & HOST_BITS).any():
        values = numbers_at(data, positions + at + field_shift(name, sys_flags), layout)
    else:
        values = heads[name]
    return values.astype(layout.newbyteorder("="))


def _locate(data: Bytes, positions: Positions, ends: Positions) -> tuple[WholeRecords, NDArray[np.bool_]]:
    """Return the parts, and which records are whole. Of one that is not the parts mean nothing, but lie in `data`."""
    sizes = ends - positions
    is_whole = sizes >= MIN_RECORD_BYTES
    if not is_whole.all():  # too short to be looked at: another one is, in their place
        if not is_whole.any():
            no_heads = np.zeros(len(positions), RECORD_HEAD)
            return WholeRecords(data, positions, ends, no_heads, *([np.zeros_like(positions)] * 5)), is_whole
        stand_in = int(np.argmax(is_whole))
        positions = np.where(is_whole, positions, positions[stand_in])
        ends = np.where(is_whole, ends, ends[stand_in])
    heads = gather(data, positions, RECORD_HEAD)
    flags = heads["sys_flag"].astype(np.int64)
    head_bytes = RECORD_HEAD.itemsize + field_shift("body_size", flags)
    magics = heads["magic"]
    is_whole &= (heads["total_size"] == ends - positions) & ((magics == MAGIC_V1) | (magics == MAGIC_V2))
    is_whole &= positions + head_bytes + 3 <= ends
    body_begins = positions + np.where(is_whole, head_bytes, RECORD_HEAD.itemsize)
    body_sizes = heads["body_size"].astype(np.int64)
    if (flags & HOST_BITS).any():
        body_sizes = numbers_at(data, body_begins - 4, np.dtype(">i4")).astype(np.int64)
    wide = np.where(magics == MAGIC_V1, 1, 2)
    is_whole &= (body_sizes >= 0) & (body_begins + body_sizes + wide + 2 <= ends)
    body_ends = np.where(is_whole, body_begins + body_sizes, body_begins)
    topic_begins = body_ends + wide
    first, second = data[body_ends].astype(np.int64), data[body_ends + 1].astype(np.int64)
    topic_sizes = np.where(wide == 1, (first ^ 0x80) - 0x80, (first << 8 ^ 0x8000) - 0x8000 + second)
    is_whole &= (topic_sizes >= 0) & (topic_begins + topic_sizes + 2 <= ends)
    topic_ends = np.where(is_whole, topic_begins + topic_sizes, body_ends)
    text_sizes = numbers_at(data, topic_ends, np.dtype(">i2")).astype(np.int64)
    is_whole &= (text_sizes >= 0) & (topic_ends + 2 + text_sizes == ends)
    found = WholeRecords(data, positions, ends, heads, flags, body_begins, body_ends, topic_begins, topic_ends)
    return found, is_whole
