"""A file of the key index made again what it was before a writer that died.

The writer wrote units, then slots, then the header. After kill -9 the file holds a beginning of that; after a power
cut any pages of it, each old or new, torn at a sector's edge (512 bytes). What was there before is there still,
because none of it is overwritten but slots and header:

- units below `next_unit` are right, units from it on are garbage;
- a slot holds its old value or the number of a unit from `next_unit` on, never half of each: it is aligned. That unit
  may be lost, and the number of the one before it with it. So the slot's value is looked up among the right units;
- the header is old or new.

The result is the same when a crash breaks the repair off and it is done again.
"""

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.changing import ChangingFile
from rmq_spark.store.format.index_file import INDEX_HEADER, INDEX_UNIT, IndexHeader, IndexShape, encode_header
from rmq_spark.store.log.index_slots import SlotRuns, slots_from

_CHUNK_UNITS = 1 << 18


def holds_still(file: ChangingFile, shape: IndexShape, header: IndexHeader) -> bool:
    """Say whether the file is the one that had this header: by its length, its first and its last unit."""
    if file.size() != shape.file_bytes:
        return False
    return header.is_empty or (
        _unit(file, shape, 1)["physical_offset"] == header.begin_physical_offset
        and _unit(file, shape, header.next_unit - 1)["physical_offset"] == header.end_physical_offset
    )


def take_back(file: ChangingFile, shape: IndexShape, header: IndexHeader) -> None:
    """Make the file what it was when it had this header; what was put into it since is gone.

    The header must be from a moment since which no power cut has lost a part of the file: the last sync, or any
    moment since the machine started. Nothing is synced.
    """
    next_unit = max(header.next_unit, 1)
    spoiled = slots_from(file, shape, next_unit)
    if len(spoiled):
        runs = SlotRuns(file, shape, spoiled)
        runs.read()
        runs.write(_newest_units(file, shape, next_unit, spoiled))
    data = encode_header(header)
    if file.read(0, INDEX_HEADER.itemsize) != data:
        file.write(0, data)
    # Nobody would look at what is left of the units; but zeros are what was there.
    for begin, end in files.data_extents(file.path, shape.unit_position(next_unit), shape.file_bytes):
        file.write(begin, bytes(end - begin))


def _newest_units(file: ChangingFile, shape: IndexShape, next_unit: int, slots: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the newest unit below `next_unit` of each slot, 0 for none."""
    newest = np.zeros(len(slots), np.int32)
    is_wanted = np.zeros(shape.slot_count, np.bool_)
    is_wanted[slots] = True
    left = len(slots)
    for end in range(next_unit, 1, -_CHUNK_UNITS):
        first = max(end - _CHUNK_UNITS, 1)
        raw = file.read(shape.unit_position(first), (end - first) * INDEX_UNIT.itemsize)
        of_unit = np.frombuffer(raw, INDEX_UNIT)["key_hash"].astype(np.int32) % np.int32(shape.slot_count)
        hits = np.flatnonzero(is_wanted[of_unit])[::-1]
        found, at = np.unique(of_unit[hits], return_index=True)  # the first of the newest-first: the newest
        newest[np.searchsorted(slots, found)] = hits[at] + first
        is_wanted[found] = False
        left -= len(found)
        if not left:
            break
    return newest


def _unit(file: ChangingFile, shape: IndexShape, number: int) -> np.void:
    raw = file.read(shape.unit_position(number), INDEX_UNIT.itemsize)
    unit: np.void = np.frombuffer(raw, INDEX_UNIT)[0]
    return unit
