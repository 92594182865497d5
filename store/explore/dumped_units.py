"""Files of entries of one size as tables: queues, timer log, timer wheel; and those of the extension.

Every field that the layout names is a column, as it stands. Where nothing is written nothing is told: parts of a file
that are holes or zeros are passed over, but for those between entries.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.format.batch_unit import BATCH_UNIT
from rmq_spark.store.format.filenames import parse_segment_name
from rmq_spark.store.format.queue_unit import QUEUE_UNIT, is_blank_fill
from rmq_spark.store.format.timer_log import BLANK_MAGIC, TIMER_UNIT, are_units
from rmq_spark.store.format.timer_wheel import TIMER_SLOT
from rmq_spark.store.format.unit_ext import MAX_UNIT_BYTES, UNIT_EXT_HEAD, UnitExt, decode_unit_ext

_CHUNK_ENTRIES = 1 << 16


def camel_case(name: str) -> str:
    """Return a field's name as columns are named."""
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def schema_of(layout: np.dtype[np.void], *more: tuple[str, pa.DataType]) -> pa.Schema:
    """Return the columns of a dump of entries: position, entry, what is said beside the fields, the fields."""
    fields = [(camel_case(name), _arrow_type(layout[name])) for name in layout.names or ()]
    return pa.schema([("position", pa.int64()), ("entry", pa.string()), *more, *fields])


def _arrow_type(kind: np.dtype[np.generic]) -> pa.DataType:
    return {8: pa.int64(), 4: pa.int32(), 2: pa.int16()}[kind.itemsize]


QUEUE_SCHEMA = schema_of(QUEUE_UNIT, ("queueOffset", pa.int64()))
BATCH_SCHEMA = schema_of(BATCH_UNIT)
TIMER_LOG_SCHEMA = schema_of(TIMER_UNIT, ("logPosition", pa.int64()))
WHEEL_SCHEMA = schema_of(TIMER_SLOT)
EXT_SCHEMA = schema_of(UNIT_EXT_HEAD, ("address", pa.int64()), ("bitmap", pa.binary()))


def dump_queue(path: str, position: int) -> Iterator[pa.RecordBatch]:
    """Yield the units of a file of a plain queue."""
    begin = parse_segment_name(path.rpartition("/")[2]) or 0
    for positions, units in _entries(path, position, QUEUE_UNIT):
        words = np.where(is_blank_fill(units), "fill", "unit")
        offsets = pa.array((positions + begin) // QUEUE_UNIT.itemsize)
        yield batch_of(QUEUE_SCHEMA, positions, words, units, [offsets])


def dump_batch_queue(path: str, position: int) -> Iterator[pa.RecordBatch]:
    """Yield the units of a file of a batch queue."""
    for positions, units in _entries(path, position, BATCH_UNIT):
        yield batch_of(BATCH_SCHEMA, positions, np.full(len(units), "unit"), units)


def dump_timer_log(path: str, position: int) -> Iterator[pa.RecordBatch]:
    """Yield the units of a file of the timer log, and its filler."""
    begin = parse_segment_name(path.rpartition("/")[2]) or 0
    for positions, units in _entries(path, position, TIMER_UNIT):
        words = np.where(are_units(units), "unit", np.where(units["magic"] == BLANK_MAGIC, "filler", "damage"))
        yield batch_of(TIMER_LOG_SCHEMA, positions, words, units, [pa.array(positions + begin)])


def dump_timer_wheel(path: str, position: int) -> Iterator[pa.RecordBatch]:
    """Yield the slots of the timer wheel that somebody has written."""
    for positions, slots in _entries(path, position, TIMER_SLOT):
        yield batch_of(WHEEL_SCHEMA, positions, np.full(len(slots), "slot"), slots)


def dump_ext(path: str, position: int) -> Iterator[pa.RecordBatch]:
    """Yield the units of a file of a queue's extension, one after the other."""
    begin = parse_segment_name(path.rpartition("/")[2]) or 0
    with OpenFile(path) as file:
        rows = []
        at, size = position, file.size()
        while at < size:
            data = file.read(at, MAX_UNIT_BYTES)
            unit = decode_unit_ext(data, 0)
            if not isinstance(unit, UnitExt):
                if data.strip(b"\0"):
                    rows.append({"position": at, "entry": unit.why})
                break
            rows.append(
                {
                    "position": at,
                    "entry": "unit",
                    "address": at + begin - (1 << 63),
                    "bitmap": unit.bitmap,
                    "unitSize": unit.size,
                    "tagsCode": unit.tags_code,
                    "storeTimestamp": unit.store_timestamp,
                    "bitmapSize": len(unit.bitmap),
                }
            )
            at += unit.size
            if len(rows) == _CHUNK_ENTRIES:
                yield pa.RecordBatch.from_pylist(rows, EXT_SCHEMA)
                rows = []
        if rows:
            yield pa.RecordBatch.from_pylist(rows, EXT_SCHEMA)


def batch_of(
    schema: pa.Schema,
    positions: NDArray[np.int64],
    words: NDArray[np.str_],
    entries: NDArray[np.void],
    more: list[pa.Array] | None = None,
) -> pa.RecordBatch:
    """Return entries as rows of a schema that `schema_of` made."""
    kinds = pa.array(words.tolist(), pa.string())
    fields = [
        pa.array(entries[name].astype(entries.dtype[name].newbyteorder("="))) for name in entries.dtype.names or ()
    ]
    return pa.RecordBatch.from_arrays([pa.array(positions), kinds, *(more or []), *fields], schema=schema)


def _entries(
    path: str, position: int, layout: np.dtype[np.void]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.void]]]:
    """Yield position and entry of what is written from a position on: entries that are not all zeros."""
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
    tail = size - size // step * step
    if tail and layout is not TIMER_UNIT:
        return  # a file that entries do not fill: `check` tells
