"""Entries of consume queues: plain (20 bytes), batch and extended ones; and the items of inner batches.

A plain entry contains the physical offset and the size of one message's record. The entry of queue offset k is at byte
20·k of the concatenated files, so a queue can be read like an array. The first file may begin with entries for queue
offsets below the first message. These entries are blank fill (physical offset 0, size 2147483647). Blank fill passes
every check of a valid entry, so test for it with `is_blank_fill`. `tags_code` is one of three values:
- In SCHEDULE_TOPIC_XXXX it is the time at which the message is due, in ms.
- If it is at most MAX_ADDRESS, it is the address of an extended entry.
- In all other cases it is the Java hash of the TAGS property, sign-extended, or 0 if the message has no tags.
Source: ConsumeQueue#putMessagePositionInfo, #fillPreBlank (4.9, 5.3).

A batch entry (5.x, topics with `queue.type=BatchCQ`) belongs to one record with one or more messages. The position of
an entry cannot be computed from the queue offset, so search for it by `base_offset`. The queue ends at the base offset
plus the message count of its last entry. Source: BatchConsumeQueue#putBatchMessagePositionInfo (5.3).

An extended entry (`enableConsumeQueueExt`, off by default) contains the tags code, the store time and a Bloom filter.
The plain entry then has an address in place of its tags code. The address is the position of the extended entry in the
concatenated extension files plus the least value of a long, so an address is smaller than every hash. RocketMQ does not
fsync extension files, so an address may refer to no valid entry. The tags are then unknown, and a filter must let the
message pass. Extended entries follow each other without gaps, and the mark -1 follows the last entry of a file. If an
entry would not leave 4 bytes free for this mark, it goes to the next file. Source: ConsumeQueueExt (4.9, 5.3).

An inner batch (5.x) is the body of a record that holds several messages, one after the other, as items:

    header (20) | body | properties length (2) | properties

An item has its own flag, body and properties. All other fields are those of the record. The record's queue offset is
that of the first item, and each further item has the next offset. RocketMQ writes 0 as magic and CRC of an item and
does not check the item's length. Like its readers, this module uses only the lengths of body and properties.
Source: MessageDecoder#encodeMessage, #decodeMessage, #decodeMessages (5.3).
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rmq_spark.store.format.byte_ranges import Bytes, Positions
from rmq_spark.store.format.properties import INNER_NUM, parse
from rmq_spark.store.format.record import INNER_BATCH, Blank, Record, Torn
from rmq_spark.store.format.record_headers import gather

ITEM_HEAD = np.dtype(
    [
        ("item_size", ">i4"),  # the whole item
        ("magic", ">i4"),  # 0
        ("body_crc", ">i4"),  # 0
        ("flag", ">i4"),  # set by the producer
        ("body_size", ">i4"),
    ]
)


assert ITEM_HEAD.itemsize == 20
ITEM_TAIL = np.dtype([("properties_size", ">i2")])  # between body and properties


assert ITEM_TAIL.itemsize == 2
_HEAD = struct.Struct(">iiiii")
_PROPERTIES_SIZE = struct.Struct(">h")


assert _HEAD.size == ITEM_HEAD.itemsize
_FEW_RECORDS = 8  # for fewer batches than this, a loop over items is faster than numpy


@dataclass(frozen=True, slots=True)
class Item:
    """One message of an inner batch: the producer's flag, the body and the properties string."""

    flag: int
    body: bytes
    properties: bytes


@dataclass(frozen=True, slots=True)
class ItemFault:
    """Batch number `row` has an incomplete item at `position` (bytes in the buffer). `what` describes the fault."""

    row: int
    position: int
    what: str


@dataclass(frozen=True, slots=True)
class ItemPositions:
    """Positions of the items of many batches (bytes in the buffer), in the order of the batches.

    All arrays are int64 and have one element per item. `rows` has for each item the number of its batch. `fault` is the
    fault in the first damaged batch, or None. Items after a fault in the same batch are not in the arrays.
    """

    rows: NDArray[np.int64]
    flags: NDArray[np.int64]
    body_begins: Positions
    body_ends: Positions
    properties_begins: Positions
    properties_ends: Positions
    fault: ItemFault | None


def encode_items(items: Iterable[Item]) -> bytes:
    """Return the body of an inner batch with these items.

    Raises ValueError if the properties of an item take more than 32767 bytes.
    """
    parts = []
    for item in items:
        if len(item.properties) > 32767:
            raise ValueError(f"properties of an item take {len(item.properties)} bytes; expected at most 32767")
        size = _HEAD.size + len(item.body) + _PROPERTIES_SIZE.size + len(item.properties)
        parts += [_HEAD.pack(size, 0, 0, item.flag, len(item.body)), item.body]
        parts += [_PROPERTIES_SIZE.pack(len(item.properties)), item.properties]
    return b"".join(parts)


def decode_items(body: bytes) -> tuple[list[Item], ItemFault | None]:
    """Return the complete items of one batch's body, up to the first incomplete one. Never raises.

    The second result describes the incomplete item. It is None if all items are complete.
    """
    items: list[Item] = []
    position = 0
    while position < len(body):
        parts = _item_at(body, position, len(body))
        if isinstance(parts, str):
            return items, ItemFault(0, position, parts)
        flag, body_begin, body_end, properties_begin, position = parts
        items.append(Item(flag, body[body_begin:body_end], body[properties_begin:position]))
    return items, None


def _item_at(data: bytes | memoryview, position: int, end: int) -> tuple[int, int, int, int, int] | str:
    """Return the flag of the item at `position`, begin and end of its body, and begin and end of its properties.

    If the item is incomplete, return the reason as text. `end` is the end of the batch's body. All are bytes in `data`.
    """
    if position + _HEAD.size > end:
        return f"{end - position} bytes left, an item's header takes {_HEAD.size}"
    _, _, _, flag, body_size = _HEAD.unpack_from(data, position)
    body_begin = position + _HEAD.size
    body_end = body_begin + body_size
    if body_size < 0 or body_end + _PROPERTIES_SIZE.size > end:
        return f"body of {body_size} bytes, {end - body_begin} left for it and the properties"
    (properties_size,) = _PROPERTIES_SIZE.unpack_from(data, body_end)
    properties_begin = body_end + _PROPERTIES_SIZE.size
    properties_end = properties_begin + properties_size
    if properties_size < 0 or properties_end > end:
        return f"properties of {properties_size} bytes, {end - properties_begin} left"
    return flag, body_begin, body_end, properties_begin, properties_end


def item_positions(buffer: Bytes, begins: Positions, ends: Positions) -> ItemPositions:
    """Return the positions of the items of many batches, whose bodies are at [begins, ends) in `buffer` (bytes).

    All bodies must be inside the buffer. The first step reads the first items of all batches, the second step their
    second items, and so on. When only a few batches are unfinished, their remaining items are read one by one.
    """
    columns: list[list[NDArray[np.int64]]] = [[] for _ in range(6)]
    faults: list[ItemFault] = []
    active = np.flatnonzero(begins < ends)
    at = begins[active].astype(np.int64)
    while len(active) >= _FEW_RECORDS:
        active, found, fault = _step(buffer, active, at, ends[active])
        faults += fault
        for column, values in zip(columns, found, strict=True):
            column.append(values)
        at = found[-1]
        is_unfinished = at < ends[active]
        active, at = active[is_unfinished], at[is_unfinished]
    if len(active):
        few = _read_few(buffer, active, at, ends[active], faults)
        for column, values in zip(columns, few, strict=True):
            column.append(values)
    joined = [np.concatenate(column) if column else np.zeros(0, np.int64) for column in columns]
    order = np.argsort(joined[0], kind="stable")
    first = min(faults, key=lambda fault: fault.row, default=None)
    rows, flags, body_begins, body_ends, properties_begins, properties_ends = (values[order] for values in joined)
    return ItemPositions(rows, flags, body_begins, body_ends, properties_begins, properties_ends, first)


def _step(
    buffer: Bytes, rows: NDArray[np.intp], at: Positions, ends: Positions
) -> tuple[NDArray[np.intp], list[NDArray[np.int64]], list[ItemFault]]:
    """Read one item of each batch in `rows`, at the position `at`.

    Return the batches whose item is complete, the columns of these items in the order of `ItemPositions`, and a list
    with the first fault. The list is empty if all items are complete.
    """
    headed = at + ITEM_HEAD.itemsize <= ends
    headers = gather(buffer, at[headed], ITEM_HEAD)
    body_begins = at[headed] + ITEM_HEAD.itemsize
    body_sizes = headers["body_size"].astype(np.int64)
    bodied = (body_sizes >= 0) & (body_begins + body_sizes + ITEM_TAIL.itemsize <= ends[headed])
    body_begins = body_begins[bodied]
    body_ends = body_begins + body_sizes[bodied]
    properties_begins = body_ends + ITEM_TAIL.itemsize
    sizes = gather(buffer, body_ends, ITEM_TAIL)["properties_size"].astype(np.int64)
    properties_ends = properties_begins + sizes
    complete = (sizes >= 0) & (properties_ends <= ends[headed][bodied])
    good = np.flatnonzero(headed)[bodied][complete]
    flags = headers["flag"].astype(np.int64)[bodied][complete]
    columns = [rows[good].astype(np.int64), flags]
    columns += [values[complete] for values in (body_begins, body_ends, properties_begins, properties_ends)]
    faults = []
    if len(good) < len(rows):
        bad = int(np.setdiff1d(np.arange(len(rows)), good)[0])
        position = int(at[bad])
        what = _item_at(buffer.data, position, int(ends[bad]))
        assert isinstance(what, str), what
        faults.append(ItemFault(int(rows[bad]), position, what))
    return rows[good], columns, faults


def _read_few(
    buffer: Bytes, rows: NDArray[np.intp], at: Positions, ends: Positions, faults: list[ItemFault]
) -> list[NDArray[np.int64]]:
    """Return the columns of the remaining items of a few batches. Faults are appended to the list `faults`."""
    data = buffer.data
    found = []
    for row, position, end in zip(rows.tolist(), at.tolist(), ends.tolist(), strict=True):
        while position < end:
            parts = _item_at(data, position, end)
            if isinstance(parts, str):
                faults.append(ItemFault(row, position, parts))
                break
            found.append((row, *parts))
            position = parts[-1]
    return list(np.array(found, np.int64).reshape(-1, 6).T)


def message_count(record: Record | Blank | Torn) -> int:
    """Return the number of messages in a record. For an inner batch it is the property INNER_NUM, otherwise 1.

    If `record` is Blank or Torn, it is 0.
    """
    if not isinstance(record, Record):
        return 0
    if not record.sys_flag & INNER_BATCH:
        return 1
    text = parse(record.properties).get(INNER_NUM, "1")
    return int(text) if text.isascii() and text.isdigit() else 1


BATCH_UNIT = np.dtype(
    [
        ("physical_offset", ">i8"),  # where the record starts in the commit log, in bytes
        ("record_size", ">i4"),  # the whole record, TOTALSIZE
        ("tags_code", ">i8"),  # Java hash of the TAGS property, sign-extended; 0 if the message has no tags
        ("store_timestamp", ">i8"),  # ms, as in the record
        ("base_offset", ">i8"),  # queue offset of the record's first message
        ("message_count", ">i2"),  # INNER_NUM; 1 if the record is not an inner batch
        ("compacted_offset", ">i4"),  # -1, because only compaction uses this field
        ("reserved", ">i4"),  # 0
    ]
)


assert BATCH_UNIT.itemsize == 46
NOT_COMPACTED = -1


def decode_batch_entries(data: bytes | memoryview | NDArray[np.uint8]) -> NDArray[np.void]:
    """Return the complete batch entries in `data`, as a view. An incomplete entry at the end is ignored."""
    return np.frombuffer(data, BATCH_UNIT, len(data) // BATCH_UNIT.itemsize)


def is_written(entries: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return for each batch entry whether a broker's recovery keeps it (BatchConsumeQueue#recover, 5.3)."""
    written: NDArray[np.bool_] = (
        (entries["physical_offset"] >= 0)
        & (entries["record_size"] > 0)
        & (entries["base_offset"] >= 0)
        & (entries["message_count"] > 0)
    )
    return written


def encode_batch_entries(
    physical_offsets: ArrayLike,
    record_sizes: ArrayLike,
    tags_codes: ArrayLike,
    store_timestamps: ArrayLike,
    base_offsets: ArrayLike,
    message_counts: ArrayLike,
) -> bytes:
    """Return the bytes of batch entries. Each array has one element per entry. Message counts are from 1 to 32767."""
    offsets = np.asarray(physical_offsets, np.int64)
    counts = np.asarray(message_counts, np.int64)
    assert not len(counts) or (counts.min() >= 1 and counts.max() <= 32767), counts
    entries = np.zeros(len(offsets), BATCH_UNIT)
    entries["physical_offset"] = offsets
    entries["record_size"] = record_sizes
    entries["tags_code"] = tags_codes
    entries["store_timestamp"] = store_timestamps
    entries["base_offset"] = base_offsets
    entries["message_count"] = counts
    entries["compacted_offset"] = NOT_COMPACTED
    return entries.tobytes()


QUEUE_UNIT = np.dtype(
    [
        ("physical_offset", ">i8"),  # where the record starts in the commit log, in bytes
        ("record_size", ">i4"),  # the whole record, TOTALSIZE
        ("tags_code", ">i8"),  # a hash, a due time or an address, see the beginning of this module
    ]
)


assert QUEUE_UNIT.itemsize == 20
BLANK_FILL_OFFSET = 0
BLANK_FILL_SIZE = 0x7FFFFFFF


def entry_position(queue_offset: int) -> int:
    """Return the position of the entry of `queue_offset`, in bytes from the position of the entry of queue offset 0."""
    return queue_offset * QUEUE_UNIT.itemsize


def is_blank_fill(entries: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return for each entry whether it is blank fill, so that it does not belong to a message."""
    fill: NDArray[np.bool_] = (entries["physical_offset"] == BLANK_FILL_OFFSET) & (
        entries["record_size"] == BLANK_FILL_SIZE
    )
    return fill


def decode_entries(data: bytes | memoryview | NDArray[np.uint8]) -> NDArray[np.void]:
    """Return the complete plain entries in `data`, as a view. An incomplete entry at the end is ignored."""
    return np.frombuffer(data, QUEUE_UNIT, len(data) // QUEUE_UNIT.itemsize)


def encode_entries(physical_offsets: ArrayLike, record_sizes: ArrayLike, tags_codes: ArrayLike) -> bytes:
    """Return the bytes of plain entries. Each array has one element per entry."""
    offsets: NDArray[Any] = np.asarray(physical_offsets, np.int64)
    entries = np.empty(len(offsets), QUEUE_UNIT)
    entries["physical_offset"] = offsets
    entries["record_size"] = record_sizes
    entries["tags_code"] = tags_codes
    return entries.tobytes()


_QUEUE_UNIT = struct.Struct(">qiq")  # the fields of QUEUE_UNIT
assert _QUEUE_UNIT.size == QUEUE_UNIT.itemsize


def encode_entry(physical_offset: int, record_size: int, tags_code: int) -> bytes:
    """Return the bytes of one plain entry."""
    return _QUEUE_UNIT.pack(physical_offset, record_size, tags_code)


def encode_blank_fill(count: int) -> bytes:
    """Return the bytes of `count` entries of blank fill, which precede the entry of a queue's first message."""
    return encode_entries(np.full(count, BLANK_FILL_OFFSET), np.full(count, BLANK_FILL_SIZE), np.zeros(count, np.int64))


UNIT_EXT_HEAD = np.dtype(
    [
        ("unit_size", ">i2"),  # size of this header and the bit map; -1 if the file has no more entries
        ("tags_code", ">i8"),  # the tags code that the address in the plain entry replaced
        ("store_timestamp", ">i8"),  # ms, as in the record
        ("bitmap_size", ">i2"),  # bytes of the bit map that follows
    ]
)


assert UNIT_EXT_HEAD.itemsize == 20
MAX_ADDRESS = -(1 << 31) - 1  # below every tags code that is a hash
_ADDRESS_BASE = -(1 << 63)
MAX_POSITION = MAX_ADDRESS - _ADDRESS_BASE
MAX_UNIT_BYTES = 32767
END_OF_FILE_SIZE = -1
END_OF_FILE_BYTES = 4  # kept free at the end of each file, so that END_OF_FILE_SIZE fits after the last entry


@dataclass(frozen=True, slots=True)
class ExtendedEntry:
    """One extended entry: the message's tags code, its store time (ms), and the bit map of a Bloom filter."""

    tags_code: int
    store_timestamp: int
    bitmap: bytes = b""

    @property
    def size(self) -> int:
        """Return the size of the entry in its file (bytes)."""
        return UNIT_EXT_HEAD.itemsize + len(self.bitmap)


@dataclass(frozen=True, slots=True)
class NoEntry:
    """A position does not have a valid extended entry; `why` is the reason.

    This is not an error, because RocketMQ does not fsync extension files.
    """

    why: str


def is_address(tags_code: int) -> bool:
    """Return whether the tags code of a plain entry is the address of an extended entry."""
    return tags_code <= MAX_ADDRESS


def to_address(position: int) -> int:
    """Return the address of the extended entry at `position` (bytes in the concatenated extension files)."""
    assert 0 <= position <= MAX_POSITION, position
    return position + _ADDRESS_BASE


def to_position(address: int) -> int:
    """Return the position of the extended entry at an address (bytes in the concatenated extension files)."""
    assert is_address(address), address
    return address - _ADDRESS_BASE


def decode_extended_entry(data: bytes | memoryview, position: int) -> ExtendedEntry | NoEntry:
    """Decode the extended entry at `position` in the bytes of one extension file.

    Returns NoEntry if this position does not have a valid entry. Never raises.
    """
    head_end = position + UNIT_EXT_HEAD.itemsize
    if position < 0 or head_end > len(data):
        left = len(data) - position
        return NoEntry(f"{left} bytes left, an extended entry takes at least {UNIT_EXT_HEAD.itemsize}")
    head = np.frombuffer(data, UNIT_EXT_HEAD, 1, position)[0]
    size, bitmap_size = int(head["unit_size"]), int(head["bitmap_size"])
    if size == END_OF_FILE_SIZE:
        return NoEntry("the file's entries end here")
    if size == 0:
        return NoEntry("nothing is written here")
    if bitmap_size < 0 or size != UNIT_EXT_HEAD.itemsize + bitmap_size:
        return NoEntry(f"extended entry of {size} bytes with a bit map of {bitmap_size}")
    if head_end + bitmap_size > len(data):
        return NoEntry(f"extended entry of {size} bytes, {len(data) - position} left")
    bitmap = bytes(data[head_end : head_end + bitmap_size])
    return ExtendedEntry(int(head["tags_code"]), int(head["store_timestamp"]), bitmap)


def iter_extended_entries(data: bytes | memoryview) -> Iterator[tuple[int, ExtendedEntry]]:
    """Yield the position and the value of each extended entry in one file, up to the first invalid entry."""
    position = 0
    while isinstance(entry := decode_extended_entry(data, position), ExtendedEntry):
        yield position, entry
        position += entry.size


def fits(entry: ExtendedEntry, position: int, file_bytes: int) -> bool:
    """Return whether `entry` fits at `position` in a file of `file_bytes` (bytes), with room for the end mark.

    If it does not fit, it belongs at the begin of the next file (ConsumeQueueExt#put).
    """
    return position + entry.size + END_OF_FILE_BYTES <= file_bytes


def encode_extended_entry(entry: ExtendedEntry) -> bytes:
    """Return the bytes of one extended entry. Its bit map must have at most 32747 bytes."""
    assert entry.size <= MAX_UNIT_BYTES, entry.size
    head = np.zeros(1, UNIT_EXT_HEAD)
    head["unit_size"] = entry.size
    head["tags_code"] = entry.tags_code
    head["store_timestamp"] = entry.store_timestamp
    head["bitmap_size"] = len(entry.bitmap)
    return head.tobytes() + entry.bitmap


def encode_end_of_file() -> bytes:
    """Return the two bytes of the mark that follows the last extended entry of a file."""
    return END_OF_FILE_SIZE.to_bytes(2, "big", signed=True)
