"""Complete records of any topics and queues in a buffer: their parts, and the values for their entries.

`WholeRecords` finds the parts of many records at once. `split_records` returns the values from which recovery builds
consume-queue and index entries. Both accept the same records as `record.decode_record`. The tests compare them with
functions that read one record: `record.decode_record`, `index_keys.tags_code_of` and
`consume_queue_entry.message_count`.
"""

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.format.byte_ranges import Bytes, Positions, take_ranges
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS, DelayLevels
from rmq_spark.store.format.index_keys import DELAY, key_entries, level_of
from rmq_spark.store.format.message_columns import Texts
from rmq_spark.store.format.properties import INNER_NUM, TAGS, PropertyPairs
from rmq_spark.store.format.property_encoder import UniformPairs
from rmq_spark.store.format.record import (
    BORN_HOST_V6,
    HOST_BITS,
    INNER_BATCH,
    MAGIC_V1,
    MAGIC_V2,
    MIN_RECORD_BYTES,
    RECORD_HEAD,
    RECORD_HEAD_BORN_V6,
    RECORD_HEAD_BOTH_V6,
    STORE_HOST_V6,
)
from rmq_spark.store.format.record_headers import gather
from rmq_spark.store.names import SCHEDULE_TOPIC

_FIELDS: Any = RECORD_HEAD.fields
_AFTER_BORN_HOST = {"store_timestamp", "store_host"}
_AFTER_STORE_HOST = {"reconsume_times", "prepared_transaction_offset", "body_size"}
_V6_BYTES = RECORD_HEAD_BORN_V6.itemsize - RECORD_HEAD.itemsize  # additional bytes of an IPv6 host


assert RECORD_HEAD_BOTH_V6.itemsize == RECORD_HEAD.itemsize + 2 * _V6_BYTES


def born_host_shift(sys_flags: NDArray[Any]) -> NDArray[np.int64]:
    """Return for each record how many bytes its born host is longer than an IPv4 host: 12 for IPv6, else 0."""
    return np.where(sys_flags & BORN_HOST_V6, _V6_BYTES, 0)


def field_shift(name: str, sys_flags: NDArray[Any]) -> NDArray[np.int64] | int:
    """Return for each record how many bytes later the field `name` begins than in a header with two IPv4 hosts.

    The result is the number 0 if no host precedes the field.
    """
    if name in _AFTER_BORN_HOST:
        return born_host_shift(sys_flags)
    if name in _AFTER_STORE_HOST:
        return born_host_shift(sys_flags) + np.where(sys_flags & STORE_HOST_V6, _V6_BYTES, 0)
    return 0


class NotWholeError(ValueError):
    """Range number `row` is not a complete record, or the record's physical offset is not that of its position."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


@dataclass(frozen=True, slots=True)
class WholeRecords:
    """Positions of the parts of complete records in `data` (bytes). Each array has one element per record.

    Physical offsets, queue offsets and CRCs of the records are not checked.
    """

    data: Bytes
    positions: Positions
    ends: Positions
    headers: NDArray[np.void]  # read as if all hosts were IPv4 hosts, so use `field` for fields after the born host
    sys_flags: NDArray[np.int64]
    body_begins: Positions
    body_ends: Positions
    topic_begins: Positions
    topic_ends: Positions

    @classmethod
    def of(cls, data: Bytes, positions: Positions, ends: Positions) -> "WholeRecords":
        """Find the parts of the records in the ranges [positions, ends) of `data`.

        Raises NotWholeError for the first range that is not one complete record.
        """
        found, is_whole = _locate(data, positions, ends)
        if not is_whole.all():
            raise NotWholeError(int(np.argmin(is_whole)))
        return found

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def text_begins(self) -> Positions:
        """The position in `data` where each record's properties string begins."""
        return self.topic_ends + 2

    def field(self, name: str) -> NDArray[Any]:
        """Return the numeric header field `name` of all records, in native byte order."""
        layout, at = _FIELDS[name][:2]
        if name in _AFTER_BORN_HOST | _AFTER_STORE_HOST and (self.sys_flags & HOST_BITS).any():
            values = numbers_at(self.data, self.positions + at + field_shift(name, self.sys_flags), layout)
        else:
            values = self.headers[name]
        return values.astype(layout.newbyteorder("="))

    def topics(self) -> pa.BinaryArray:
        """Return the topic of each record, as the stored bytes."""
        return take_ranges(self.data, self.topic_begins, self.topic_ends)

    def are_of(self, topic: str, queue_id: int) -> NDArray[np.bool_]:
        """Return for each record whether it has this topic and queue id."""
        same_topic = pc.equal(self.topics(), pa.scalar(topic.encode(), pa.binary()))
        are_its: NDArray[np.bool_] = same_topic.to_numpy(zero_copy_only=False) & (self.field("queue_id") == queue_id)
        return are_its

    def texts(self) -> pa.BinaryArray:
        """Return the properties string of each record."""
        return take_ranges(self.data, self.text_begins, self.ends)

    def pairs(self) -> UniformPairs | PropertyPairs:
        """Return the properties of all records as name-value pairs."""
        return pairs_of(self.texts())


def are_whole(data: Bytes, positions: Positions, ends: Positions) -> NDArray[np.bool_]:
    """Return for each range [positions, ends) whether it is one complete record. All ranges must be inside `data`."""
    return _locate(data, positions, ends)[1]


def pairs_of(texts: pa.BinaryArray) -> UniformPairs | PropertyPairs:
    """Return the name-value pairs of many properties strings. `texts` must not contain nulls."""
    uniform = UniformPairs.of(texts)
    return PropertyPairs.split(texts) if uniform is None else uniform


def numbers_at(data: Bytes, positions: Positions, layout: np.dtype[Any]) -> NDArray[Any]:
    """Return the number of dtype `layout` at each position. Positions may be unaligned.

    All numbers must be inside `data`.
    """
    return unaligned(data, layout)[positions]


def unaligned(data: Bytes, layout: np.dtype[Any]) -> NDArray[Any]:
    """Return a view of `data` whose element `i` is the number of dtype `layout` that begins at byte `i`.

    Through this view numbers at unaligned positions can be read and written.
    """
    view: NDArray[Any] = np.ndarray((max(len(data) - layout.itemsize + 1, 0),), layout, data, strides=(1,))
    return view


def _locate(data: Bytes, positions: Positions, ends: Positions) -> tuple[WholeRecords, NDArray[np.bool_]]:
    """Return the parts of the records, and for each record whether it is complete.

    The positions of an incomplete record's parts have no meaning, but they are inside `data`.
    """
    sizes = ends - positions
    is_whole = sizes >= MIN_RECORD_BYTES
    if not is_whole.all():  # a complete record is read in place of each one that is too short
        if not is_whole.any():
            no_headers = np.zeros(len(positions), RECORD_HEAD)
            return WholeRecords(data, positions, ends, no_headers, *([np.zeros_like(positions)] * 5)), is_whole
        substitute = int(np.argmax(is_whole))
        positions = np.where(is_whole, positions, positions[substitute])
        ends = np.where(is_whole, ends, ends[substitute])
    headers = gather(data, positions, RECORD_HEAD)
    flags = headers["sys_flag"].astype(np.int64)
    header_bytes = RECORD_HEAD.itemsize + field_shift("body_size", flags)
    magics = headers["magic"]
    is_whole &= (headers["total_size"] == ends - positions) & ((magics == MAGIC_V1) | (magics == MAGIC_V2))
    is_whole &= positions + header_bytes + 3 <= ends
    body_begins = positions + np.where(is_whole, header_bytes, RECORD_HEAD.itemsize)
    body_sizes = headers["body_size"].astype(np.int64)
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
    found = WholeRecords(data, positions, ends, headers, flags, body_begins, body_ends, topic_begins, topic_ends)
    return found, is_whole


_SIZE_AND_MAGIC = struct.Struct(">iI")


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """The values of records from which their consume-queue and index entries are built.

    Each array has one element per record. Only `key_rows` and `key_hashes` have one element per key of a record.
    """

    places: NDArray[np.int64]  # physical offsets
    sizes: NDArray[np.int64]  # bytes
    store_times: NDArray[np.int64]  # ms
    sys_flags: NDArray[np.int64]
    queue_ids: NDArray[np.int64]
    queue_offsets: NDArray[np.int64]
    topics: tuple[str, ...]  # each topic once
    topic_numbers: NDArray[np.int64]  # the index of the record's topic in `topics`
    tags_codes: NDArray[np.int64]
    message_counts: NDArray[np.int64]
    key_rows: NDArray[np.int64]  # the index of the record that has this key, ascending
    key_hashes: NDArray[np.int32]  # of each key; a record's UNIQ_KEY comes first, then its KEYS in their order

    def __len__(self) -> int:
        return len(self.places)


def walk_records(data: bytes) -> tuple[Positions, int]:
    """Return the positions of the consecutive records from the begin of `data`, and the end of the last one (bytes).

    Stops at the first position where no record starts that is completely inside `data`. Only lengths and magics of the
    records are checked.
    """
    positions: list[int] = []
    position, last = 0, len(data) - MIN_RECORD_BYTES
    unpack = _SIZE_AND_MAGIC.unpack_from
    while position <= last:
        size, magic = unpack(data, position)
        if (magic != MAGIC_V1 and magic != MAGIC_V2) or not MIN_RECORD_BYTES <= size <= len(data) - position:
            break
        positions.append(position)
        position += size
    return np.array(positions, np.int64), position


def split_records(
    data: bytes,
    positions: Positions,
    end: int,
    physical_offset: int,
    levels: DelayLevels = DEFAULT_DELAY_LEVELS,
) -> RecordColumns:
    """Return the values for the entries of the records that `walk_records` found in `data`.

    `positions` and `end` are the results of `walk_records`. `physical_offset` is that of the first byte of `data`.
    `levels` is the store's table of delay levels. Raises NotWholeError if a record is not complete, or if its physical
    offset is not that of its position. All records are checked for the first fault and then for the second, so a record
    before the one in the error may have the second fault.
    """
    ends = np.append(positions[1:], end)
    whole = WholeRecords.of(np.frombuffer(data, np.uint8), positions, ends)
    physical_offsets = whole.field("physical_offset").astype(np.int64)
    is_misplaced = physical_offsets != positions + physical_offset
    if is_misplaced.any():
        raise NotWholeError(int(np.argmax(is_misplaced)))
    store_times = whole.field("store_timestamp").astype(np.int64)
    topics, topic_numbers = _topics(whole.topics())
    pairs = whole.pairs()
    tags_codes = Texts.of(pairs.column(TAGS)).java_hashes()
    if SCHEDULE_TOPIC in topics:
        waiting = np.flatnonzero(topic_numbers == topics.index(SCHEDULE_TOPIC))
        delays_ms = _delays_ms(pairs, waiting, levels)
        waiting, delays_ms = waiting[delays_ms >= 0], delays_ms[delays_ms >= 0]
        tags_codes[waiting] = store_times[waiting] + delays_ms
    key_rows, key_hashes = key_entries(pairs, topics, topic_numbers)
    return RecordColumns(
        places=physical_offsets,
        sizes=ends - positions,
        store_times=store_times,
        sys_flags=whole.sys_flags,
        queue_ids=whole.field("queue_id").astype(np.int64),
        queue_offsets=whole.field("queue_offset").astype(np.int64),
        topics=topics,
        topic_numbers=topic_numbers,
        tags_codes=tags_codes,
        message_counts=_message_counts(pairs, whole.sys_flags),
        key_rows=key_rows,
        key_hashes=key_hashes,
    )


def _topics(names: pa.BinaryArray) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    encoded = names.dictionary_encode()
    read = [name.decode("utf-8", "replace") for name in encoded.dictionary.to_pylist()]
    numbers: dict[str, int] = {}  # invalid UTF-8: two names may be decoded to the same text
    by_name = np.array([numbers.setdefault(name, len(numbers)) for name in read], np.int64)
    return tuple(numbers), by_name[encoded.indices.to_numpy()]


def _delays_ms(pairs: UniformPairs | PropertyPairs, rows: NDArray[np.intp], levels: DelayLevels) -> NDArray[np.int64]:
    """Return the delay of each of the given `rows` in ms. A row without a valid delay level gets -1."""
    texts = pairs.column(DELAY).take(pa.array(rows)).fill_null("").dictionary_encode()
    named = [levels.clamp(level_of(text)) for text in texts.dictionary.to_pylist()]
    delays_ms = np.array([levels.due_after_ms(level) if level else -1 for level in named], np.int64)
    of_rows: NDArray[np.int64] = delays_ms[texts.indices.to_numpy()]
    return of_rows


def _message_counts(pairs: UniformPairs | PropertyPairs, flags: NDArray[np.int64]) -> NDArray[np.int64]:
    counts = np.ones(len(flags), np.int64)
    batches = np.flatnonzero(flags & INNER_BATCH)
    if len(batches):
        texts = pairs.column(INNER_NUM).take(pa.array(batches)).to_pylist()
        counts[batches] = [int(text) if text and text.isascii() and text.isdigit() else 1 for text in texts]
    return counts
