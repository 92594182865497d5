"""Dumps of files of entries: consume queues, their extension, key index, timer log and timer wheel.

Each field of an entry becomes a column with the stored value. Parts of a file that were never written are skipped.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.consume_queue_entry import (
    BATCH_UNIT,
    MAX_UNIT_BYTES,
    QUEUE_UNIT,
    UNIT_EXT_HEAD,
    ExtendedEntry,
    decode_extended_entry,
    is_blank_fill,
)
from rmq_spark.store.format.file_names import parse_segment_name
from rmq_spark.store.format.index_file import (
    INDEX_HEADER,
    INDEX_SLOT,
    INDEX_UNIT,
    decode_header,
    encode_header,
    learn_shape,
)
from rmq_spark.store.format.timer import BLANK_MAGIC, TIMER_SLOT, TIMER_UNIT, are_entries
from rmq_spark.store.tools.check_index import read_entries

_CHUNK_ENTRIES = 1 << 16


def _column_name(field: str) -> str:
    first, *others = field.split("_")
    return first + "".join(word.capitalize() for word in others)


def _schema_of(more: dict[str, pa.DataType], *layouts: np.dtype[np.void]) -> pa.Schema:
    """Return the columns of a dump: `position`, `entry` (its kind), those in `more`, and the fields of the layouts.

    If a name in `more` is also the name of a field, the field's column has the type that `more` gives.
    """
    types = {8: pa.int64(), 4: pa.int32(), 2: pa.int16()}
    fields = [(_column_name(name), types[layout[name].itemsize]) for layout in layouts for name in layout.names or ()]
    fields = [(name, more.get(name, kind)) for name, kind in fields]
    first = [("position", pa.int64()), ("entry", pa.string())]
    return pa.schema([*first, *(item for item in more.items() if item[0] not in dict(fields)), *fields])


_TIME = pa.timestamp("ms", tz="UTC")
QUEUE_SCHEMA = _schema_of({"queueOffset": pa.int64()}, QUEUE_UNIT)
BATCH_SCHEMA = _schema_of({}, BATCH_UNIT)
TIMER_LOG_SCHEMA = _schema_of({"logPosition": pa.int64()}, TIMER_UNIT)
WHEEL_SCHEMA = _schema_of({}, TIMER_SLOT)
EXT_SCHEMA = _schema_of({"address": pa.int64(), "bitmap": pa.binary()}, UNIT_EXT_HEAD)
INDEX_SCHEMA = _schema_of(
    {"number": pa.int64(), "beginTimestamp": _TIME, "endTimestamp": _TIME}, INDEX_SLOT, INDEX_UNIT, INDEX_HEADER
)


def dump_index(path: str, position: int) -> Iterator[pa.RecordBatch]:
    """Yield the header, the used slots and the entries of an index file, at and after `position` (bytes).

    Raises DamageError if the numbers of slots and entries of the file cannot be determined.
    """
    with OpenFile(path) as file:
        header = decode_header(file.read(0, INDEX_HEADER.itemsize))
        if position == 0:
            entries = np.frombuffer(encode_header(header), INDEX_HEADER)
            yield _batch(INDEX_SCHEMA, np.zeros(1, np.int64), "header", entries)
        if header.is_empty:
            return
        shape = learn_shape(file.read, file.size())
        if shape is None:
            what = "the numbers of slots and entries, which neither its length nor its contents determine"
            raise DamageError(what, path, 32, "a header that agrees with the entries", f"{header.next_unit} entries")
        entries_at = shape.unit_position(1)
        for first in range(0, shape.slot_count if position < entries_at else 0, _CHUNK_ENTRIES):
            count = min(_CHUNK_ENTRIES, shape.slot_count - first)
            slots = np.frombuffer(file.read(shape.slot_position(first), count * INDEX_SLOT.itemsize), INDEX_SLOT)
            numbers = first + np.flatnonzero(slots["newest_unit"])
            kept = INDEX_HEADER.itemsize + numbers * INDEX_SLOT.itemsize >= position
            numbers = numbers[kept]
            positions = INDEX_HEADER.itemsize + numbers * INDEX_SLOT.itemsize
            yield _batch(INDEX_SCHEMA, positions, "slot", slots[numbers - first], number=numbers)
        least = 1 + max(position - entries_at + INDEX_UNIT.itemsize - 1, 0) // INDEX_UNIT.itemsize
        for first in range(least, min(header.next_unit, shape.unit_count), _CHUNK_ENTRIES):
            end = min(first + _CHUNK_ENTRIES, header.next_unit, shape.unit_count)
            entries = read_entries(file, shape, first, end)
            numbers = first + np.arange(len(entries))
            positions = shape.unit_position(0) + numbers * INDEX_UNIT.itemsize
            yield _batch(INDEX_SCHEMA, positions, "unit", entries, number=numbers)


def dump_queue(path: str, position: int) -> Iterator[pa.RecordBatch]:
    """Yield the entries of one file of a plain consume queue (20-byte entries), at and after `position` (bytes)."""
    begin = parse_segment_name(path.rpartition("/")[2]) or 0
    for positions, entries in _read(path, position, QUEUE_UNIT):
        kinds = np.where(is_blank_fill(entries), "fill", "unit")
        offsets = (positions + begin) // QUEUE_UNIT.itemsize
        yield _batch(QUEUE_SCHEMA, positions, kinds, entries, queueOffset=offsets)


def dump_batch_queue(path: str, position: int) -> Iterator[pa.RecordBatch]:
    """Yield the entries of one file of a batch consume queue (46-byte entries), at and after `position` (bytes)."""
    for positions, entries in _read(path, position, BATCH_UNIT):
        yield _batch(BATCH_SCHEMA, positions, "unit", entries)


def dump_timer_log(path: str, position: int) -> Iterator[pa.RecordBatch]:
    """Yield the entries and the filler of one file of the timer log, at and after `position` (bytes)."""
    begin = parse_segment_name(path.rpartition("/")[2]) or 0
    for positions, entries in _read(path, position, TIMER_UNIT):
        others = np.where(entries["magic"] == BLANK_MAGIC, "filler", "damage")
        kinds = np.where(are_entries(entries), "unit", others)
        yield _batch(TIMER_LOG_SCHEMA, positions, kinds, entries, logPosition=positions + begin)


def dump_timer_wheel(path: str, position: int) -> Iterator[pa.RecordBatch]:
    """Yield the slots of the timer wheel that are not empty, at and after `position` (bytes)."""
    for positions, slots in _read(path, position, TIMER_SLOT):
        yield _batch(WHEEL_SCHEMA, positions, "slot", slots)


def dump_ext(path: str, position: int) -> Iterator[pa.RecordBatch]:
    """Yield the entries of one file of a queue's extension, at and after `position` (bytes).

    Entries have different sizes, and each begins where the previous one ends. So `position` must be the begin of one.
    """
    begin = parse_segment_name(path.rpartition("/")[2]) or 0
    with OpenFile(path) as file:
        rows = []
        at, size = position, file.size()
        while at < size:
            data = file.read(at, MAX_UNIT_BYTES)
            entry = decode_extended_entry(data, 0)
            if not isinstance(entry, ExtendedEntry):
                if data.strip(b"\0"):
                    rows.append({"position": at, "entry": entry.why})
                break
            rows.append(
                {
                    "position": at,
                    "entry": "unit",
                    "address": at + begin - (1 << 63),
                    "bitmap": entry.bitmap,
                    "unitSize": entry.size,
                    "tagsCode": entry.tags_code,
                    "storeTimestamp": entry.store_timestamp,
                    "bitmapSize": len(entry.bitmap),
                }
            )
            at += entry.size
            if len(rows) == _CHUNK_ENTRIES:
                yield pa.RecordBatch.from_pylist(rows, EXT_SCHEMA)
                rows = []
        if rows:
            yield pa.RecordBatch.from_pylist(rows, EXT_SCHEMA)


def _batch(
    schema: pa.Schema,
    positions: NDArray[np.int64],
    kind: str | NDArray[np.str_],
    entries: NDArray[np.void],
    **more: NDArray[np.int64],
) -> pa.RecordBatch:
    """Return one row for each entry. Columns of the schema that these entries do not have are null.

    `kind` is the value of the column `entry`, or an array with a value for each row. `more` are further columns.
    """
    count = len(entries)
    kinds = np.full(count, kind) if isinstance(kind, str) else kind
    columns = {"position": pa.array(positions, pa.int64()), "entry": pa.array(kinds.tolist(), pa.string())}
    columns |= {name: pa.array(values) for name, values in more.items()}
    for name in entries.dtype.names or ():
        columns[_column_name(name)] = pa.array(entries[name].astype(entries.dtype[name].newbyteorder("=")))
    return pa.RecordBatch.from_arrays(
        [columns[one.name].cast(one.type) if one.name in columns else pa.nulls(count, one.type) for one in schema],
        schema=schema,
    )


def _read(path: str, position: int, layout: np.dtype[np.void]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.void]]]:
    """Yield pairs of arrays: the positions (bytes) of entries, and the entries.

    Only entries that begin at or after `position` and are not all zeros are included.
    """
    size, step = max(files.file_size(path), 0), layout.itemsize
    first, end = -(-position // step), size // step
    with OpenFile(path) as file:
        done = first
        for begin, until in files.data_extents(path, first * step, size):
            at, stop = max(begin // step, done), min(-(-until // step), end)
            for one in range(at, stop, _CHUNK_ENTRIES):
                other = min(one + _CHUNK_ENTRIES, stop)
                raw = file.read(one * step, (other - one) * step)
                entries = np.frombuffer(raw, layout, len(raw) // step)
                written = entries.view((np.uint8, step)).any(axis=1)
                numbers = one + np.flatnonzero(written)
                if len(numbers):
                    yield numbers * step, entries[written]
            done = max(done, stop)
