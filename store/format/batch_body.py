"""The body of an inner batch (5.x): messages one after the other, each with flag, body and properties of its own.

    head (20) | body | 2: properties length | properties

All else a message has comes from the record around it; the record's queue offset is the first message's, the
next ones count on. A reader goes by the lengths of body and properties: RocketMQ's does not look at an item's
own length, magic and CRC either, and writes 0 for the last two.

`decode_items` is the obvious one-batch reader, `item_positions` reads the batches of many records at once.
Source: MessageDecoder#encodeMessage, #decodeMessage, #decodeMessages (5.3).
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.format.heads import gather
from rmq_spark.store.format.properties import INNER_NUM, parse
from rmq_spark.store.format.ragged import Bytes, Positions
from rmq_spark.store.format.record import INNER_BATCH, Blank, Record, Torn

ITEM_HEAD = np.dtype(
    [
        ("item_size", ">i4"),  # the whole item
        ("magic", ">i4"),  # 0
        ("body_crc", ">i4"),  # 0
        ("flag", ">i4"),  # the producer's own
        ("body_size", ">i4"),
    ]
)
assert ITEM_HEAD.itemsize == 20

ITEM_TAIL = np.dtype([("properties_size", ">i2")])  # between body and properties
assert ITEM_TAIL.itemsize == 2

_HEAD = struct.Struct(">iiiii")
_PROPERTIES_SIZE = struct.Struct(">h")
assert _HEAD.size == ITEM_HEAD.itemsize
_FEW_RECORDS = 8  # below this, going item by item is cheaper than numpy over one item of each


@dataclass(frozen=True, slots=True)
class Item:
    """One message of a batch: the producer's flag, the body and the properties text."""

    flag: int
    body: bytes
    properties: bytes


@dataclass(frozen=True, slots=True)
class ItemFault:
    """Batch number `row` ends in no whole item: what is wrong with the one at `position` (bytes in the buffer)."""

    row: int
    position: int
    what: str


@dataclass(frozen=True, slots=True)
class ItemPositions:
    """Where the items of many batches lie, in the order of the batches and within each in its own order.

    `rows` says whose batch an item is of; positions are bytes in the buffer. All are int64 of one length. With a
    `fault` (the first by batch) the whole items before it are there, those behind it are not.
    """

    rows: NDArray[np.int64]
    flags: NDArray[np.int64]
    body_begins: Positions
    body_ends: Positions
    properties_begins: Positions
    properties_ends: Positions
    fault: ItemFault | None


def encode_items(items: Iterable[Item]) -> bytes:
    """Write a batch's body. Raises ValueError for properties of more than 32767 bytes."""
    parts = []
    for item in items:
        if len(item.properties) > 32767:
            raise ValueError(f"properties of {len(item.properties)} bytes, at most 32767 fit")
        size = _HEAD.size + len(item.body) + _PROPERTIES_SIZE.size + len(item.properties)
        parts += [_HEAD.pack(size, 0, 0, item.flag, len(item.body)), item.body]
        parts += [_PROPERTIES_SIZE.pack(len(item.properties)), item.properties]
    return b"".join(parts)


def decode_items(body: bytes) -> tuple[list[Item], ItemFault | None]:
    """Read one batch's body: its whole items, and what is wrong behind them. Never raises."""
    items: list[Item] = []
    position = 0
    while position < len(body):
        places = _item_at(body, position, len(body))
        if isinstance(places, str):
            return items, ItemFault(0, position, places)
        flag, body_begin, body_end, properties_begin, position = places
        items.append(Item(flag, body[body_begin:body_end], body[properties_begin:position]))
    return items, None


def _item_at(data: bytes | memoryview, position: int, end: int) -> tuple[int, int, int, int, int] | str:
    """Return flag, body begin and end, properties begin and end of one item, or what is wrong with it."""
    if position + _HEAD.size > end:
        return f"{end - position} bytes left, an item's head takes {_HEAD.size}"
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
    """Find the items of the batches whose bodies are [begins, ends) of `buffer` (bytes, each within it).

    One step for the first items of all batches, one for the second ones, and so on: as many as the longest batch
    has. The last few batches that still go on are read item by item.
    """
    columns: list[list[NDArray[np.int64]]] = [[] for _ in range(6)]
    faults: list[ItemFault] = []
    alive = np.flatnonzero(begins < ends)
    at = begins[alive].astype(np.int64)
    while len(alive) >= _FEW_RECORDS:
        alive, found, fault = _step(buffer, alive, at, ends[alive])
        faults += fault
        for column, values in zip(columns, found, strict=True):
            column.append(values)
        at = found[-1]
        going = at < ends[alive]
        alive, at = alive[going], at[going]
    if len(alive):
        few = _read_few(buffer, alive, at, ends[alive], faults)
        for column, values in zip(columns, few, strict=True):
            column.append(values)
    whole = [np.concatenate(column) if column else np.zeros(0, np.int64) for column in columns]
    order = np.argsort(whole[0], kind="stable")
    first = min(faults, key=lambda fault: fault.row, default=None)
    rows, flags, body_begins, body_ends, properties_begins, properties_ends = (values[order] for values in whole)
    return ItemPositions(rows, flags, body_begins, body_ends, properties_begins, properties_ends, first)


def _step(
    buffer: Bytes, rows: NDArray[np.intp], at: Positions, ends: Positions
) -> tuple[NDArray[np.intp], list[NDArray[np.int64]], list[ItemFault]]:
    """Read the item at `at` of every row: the rows that have a whole one, its columns, and the first fault."""
    headed = at + ITEM_HEAD.itemsize <= ends
    heads = gather(buffer, at[headed], ITEM_HEAD)
    body_begins = at[headed] + ITEM_HEAD.itemsize
    body_sizes = heads["body_size"].astype(np.int64)
    bodied = (body_sizes >= 0) & (body_begins + body_sizes + ITEM_TAIL.itemsize <= ends[headed])
    body_begins = body_begins[bodied]
    body_ends = body_begins + body_sizes[bodied]
    properties_begins = body_ends + ITEM_TAIL.itemsize
    sizes = gather(buffer, body_ends, ITEM_TAIL)["properties_size"].astype(np.int64)
    properties_ends = properties_begins + sizes
    whole = (sizes >= 0) & (properties_ends <= ends[headed][bodied])
    good = np.flatnonzero(headed)[bodied][whole]
    flags = heads["flag"].astype(np.int64)[bodied][whole]
    columns = [rows[good].astype(np.int64), flags]
    columns += [values[whole] for values in (body_begins, body_ends, properties_begins, properties_ends)]
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
    """Read the rest of a few batches item by item; adds to `faults`."""
    data = buffer.data
    found = []
    for row, position, end in zip(rows.tolist(), at.tolist(), ends.tolist(), strict=True):
        while position < end:
            places = _item_at(data, position, end)
            if isinstance(places, str):
                faults.append(ItemFault(row, position, places))
                break
            found.append((row, *places))
            position = places[-1]
    return list(np.array(found, np.int64).reshape(-1, 6).T)


def message_count(record: Record | Blank | Torn) -> int:
    """Return how many messages a record says that it holds: INNER_NUM of an inner batch, else 1; 0 for no record."""
    if not isinstance(record, Record):
        return 0
    if not record.sys_flag & INNER_BATCH:
        return 1
    text = parse(record.properties).get(INNER_NUM, "1")
    return int(text) if text.isascii() and text.isdigit() else 1
