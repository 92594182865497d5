"""A file of the key index as a table: its header, the slots that name a unit, the units."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.errors import DamageError
from rmq_spark.store.explore.index_check import read_units
from rmq_spark.store.format.index_file import INDEX_HEADER, INDEX_SLOT, INDEX_UNIT, decode_header, learn_shape

_CHUNK = 1 << 16
SCHEMA = pa.schema(
    [
        ("position", pa.int64()),
        ("entry", pa.string()),  # header, slot, unit
        ("number", pa.int64()),  # of the slot or the unit
        ("newestUnit", pa.int32()),
        ("keyHash", pa.int32()),
        ("physicalOffset", pa.int64()),
        ("seconds", pa.int32()),
        ("previousUnit", pa.int32()),
        ("beginTimestamp", pa.timestamp("ms", tz="UTC")),
        ("endTimestamp", pa.timestamp("ms", tz="UTC")),
        ("beginPhysicalOffset", pa.int64()),
        ("endPhysicalOffset", pa.int64()),
        ("usedSlotCount", pa.int32()),
        ("nextUnit", pa.int32()),
    ]
)


def dump_index(path: str, position: int) -> Iterator[pa.RecordBatch]:
    """Yield the entries of an index file from a position on. Raises DamageError where its shape cannot be told."""
    with OpenFile(path) as file:
        header = decode_header(file.read(0, INDEX_HEADER.itemsize))
        if position == 0:
            row = {
                "position": 0,
                "entry": "header",
                "beginTimestamp": header.begin_timestamp,
                "endTimestamp": header.end_timestamp,
                "beginPhysicalOffset": header.begin_physical_offset,
                "endPhysicalOffset": header.end_physical_offset,
                "usedSlotCount": header.used_slot_count,
                "nextUnit": header.next_unit,
            }
            yield pa.RecordBatch.from_pylist([row], SCHEMA)
        if header.is_empty:
            return
        shape = learn_shape(file.read, file.size())
        if shape is None:
            what = "the numbers of slots and units, which neither its length nor its contents tell"
            raise DamageError(what, path, 32, "a header that its units agree with", f"{header.next_unit} units")
        units_at = shape.unit_position(1)
        for first in range(0, shape.slot_count if position < units_at else 0, _CHUNK):
            count = min(_CHUNK, shape.slot_count - first)
            raw = file.read(shape.slot_position(first), count * INDEX_SLOT.itemsize)
            slots = np.frombuffer(raw, INDEX_SLOT)["newest_unit"].astype(np.int32)
            numbers = first + np.flatnonzero(slots)
            positions = INDEX_HEADER.itemsize + numbers * INDEX_SLOT.itemsize
            kept = positions >= position
            yield _batch("slot", positions[kept], numbers[kept], newestUnit=slots[slots != 0][kept])
        least = 1 + max(position - units_at + INDEX_UNIT.itemsize - 1, 0) // INDEX_UNIT.itemsize
        for first in range(least, min(header.next_unit, shape.unit_count), _CHUNK):
            units = read_units(file, shape, first, min(first + _CHUNK, header.next_unit, shape.unit_count))
            numbers = first + np.arange(len(units))
            yield _batch(
                "unit",
                shape.unit_position(0) + numbers * INDEX_UNIT.itemsize,
                numbers,
                keyHash=units["key_hash"].astype(np.int32),
                physicalOffset=units["physical_offset"].astype(np.int64),
                seconds=units["seconds"].astype(np.int32),
                previousUnit=units["previous_unit"].astype(np.int32),
            )


def _batch(entry: str, positions: np.ndarray, numbers: np.ndarray, **fields: np.ndarray) -> pa.RecordBatch:
    count = len(positions)
    given = {"position": positions.astype(np.int64), "number": numbers.astype(np.int64), **fields}
    columns = [
        pa.repeat(pa.scalar(entry), count)
        if field.name == "entry"
        else pa.array(given[field.name], field.type)
        if field.name in given
        else pa.nulls(count, field.type)
        for field in SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
