"""Slots of a key-index file: reads and writes groups of nearby slots, and repairs a file after a crash.

The slots of a default file take 20 MB, and a few keys change only a few of their pages. So nearby slots form a run,
which is read and written at once. The slots between runs are not touched. If there are many keys, the runs cover all
slots.

`restore_file` restores a file to its state before a crashed writer began. The writer wrote entries, then slots, then
the header. After kill -9, the file contains the first part of these writes. After a power cut, it contains any of their
pages, each old, new, or torn at the edge of a sector (512 bytes). The earlier contents can still be recovered, because
the writer overwrites only slots and the header:

- Entries with numbers below `next_unit` are right. Later ones are garbage.
- A slot has either its old value, or the number of an entry >= `next_unit`. It is never a mixture, because slots are
  aligned. That entry may be lost, and with it the number of the slot's previous entry. So the old value of the slot is
  searched among the entries that are right.
- The header is either old or new.

If a crash interrupts the repair, repeating it gives the same result.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.write import WritableFile
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.index_file import (
    INDEX_HEADER,
    INDEX_SLOT,
    INDEX_UNIT,
    IndexHeader,
    IndexShape,
    encode_header,
)
from rmq_spark.store.format.index_keys import group_edges

# Slots that are at most a page apart form one run, because writing the run changes only pages that change anyway.
_RUN_GAP_SLOTS = 4096 // INDEX_SLOT.itemsize
# The maximum size of a run, and roughly of a buffer. The page faults of larger buffers cost more than the saved calls.
_RUN_SLOTS = 1 << 16
_CHUNK_SLOTS = 1 << 18


@dataclass(slots=True)
class _Stretch:
    """Runs that are read into one buffer, and where their wanted slots are in the buffer."""

    positions: list[int]  # position of each run in the file (bytes)
    sizes: list[int]  # size of each run (bytes)
    part: slice  # which of all wanted slots are in these runs
    indices: NDArray[np.int64]  # index of each of these slots in the buffer, in slots
    buffer: bytes = b""


class SlotRuns:
    """The slots with the given numbers in an open file, grouped into runs. The numbers must ascend and be unique."""

    def __init__(self, file: WritableFile, shape: IndexShape, slots: NDArray[np.int32]) -> None:
        self._file, self._count = file, len(slots)
        windows = slots // _RUN_SLOTS
        edges = group_edges((slots[1:] - slots[:-1] > _RUN_GAP_SLOTS) | (windows[1:] != windows[:-1]))
        firsts = slots[edges[:-1]].astype(np.int64)
        counts = slots[edges[1:] - 1] - firsts + 1
        begins = counts.cumsum() - counts  # where each run would begin if all were in one buffer
        of_slots = slots - (firsts - begins).repeat(edges[1:] - edges[:-1])
        positions = (firsts * INDEX_SLOT.itemsize + shape.slot_position(0)).tolist()
        sizes = (counts * INDEX_SLOT.itemsize).tolist()
        buffers = begins // _RUN_SLOTS
        self._stretches = [
            _Stretch(
                positions[first:last],
                sizes[first:last],
                part := slice(edges[first], edges[last]),
                of_slots[part] - begins[first],
            )
            for first, last in pairwise(group_edges(buffers[1:] != buffers[:-1]).tolist())
        ]

    def read(self) -> NDArray[np.int32]:
        """Return the value of each slot, which is the number of its newest entry.

        Raises DamageError if the file is too short.
        """
        values = np.empty(self._count, np.int32)
        for stretch in self._stretches:
            stretch.buffer = b"".join(map(self._read, stretch.positions, stretch.sizes))
            np.frombuffer(stretch.buffer, np.int32).take(stretch.indices, out=values[stretch.part])
        return values.view(INDEX_SLOT)["newest_unit"].astype(np.int32)

    def write(self, values: NDArray[np.int32]) -> None:
        """Write the value of each slot. Call `read` first. A crash leaves each slot with its old or its new value."""
        encoded = values.astype(INDEX_SLOT["newest_unit"])
        for stretch in self._stretches:
            buffer, at = bytearray(stretch.buffer), 0
            np.frombuffer(buffer, encoded.dtype)[stretch.indices] = encoded[stretch.part]
            view = memoryview(buffer)
            for position, size in zip(stretch.positions, stretch.sizes, strict=True):
                self._file.write(position, view[at : at + size])
                at += size

    def _read(self, position: int, size: int) -> bytes:
        piece = self._file.read(position, size)
        if len(piece) < size:
            what = "key-index file that ends among its slots"
            raise DamageError(what, self._file.path, position, f"{size} bytes", len(piece))
        return piece


def slots_from(file: WritableFile, shape: IndexShape, first_unit: int) -> NDArray[np.int32]:
    """Return the numbers of all slots that point to an entry with number `first_unit` or higher, in ascending order."""

    def found() -> Iterator[NDArray[np.int64]]:
        for first in range(0, shape.slot_count, _CHUNK_SLOTS):
            count = min(_CHUNK_SLOTS, shape.slot_count - first)
            raw = file.read(shape.slot_position(first), count * INDEX_SLOT.itemsize)
            yield np.flatnonzero(np.frombuffer(raw, INDEX_SLOT)["newest_unit"] >= first_unit) + first

    return np.concatenate(list(found())).astype(np.int32)


_CHUNK_ENTRIES = 1 << 18


def is_same_file(file: WritableFile, shape: IndexShape, header: IndexHeader) -> bool:
    """Return whether the file is the one that had this header.

    Compares the file's size, its first entry and its last entry.
    """
    if file.size() != shape.file_bytes:
        return False
    return header.is_empty or (
        _entry(file, shape, 1)["physical_offset"] == header.begin_physical_offset
        and _entry(file, shape, header.next_unit - 1)["physical_offset"] == header.end_physical_offset
    )


def restore_file(file: WritableFile, shape: IndexShape, header: IndexHeader) -> None:
    """Restore the file to its state when it had this header. Keys that were added since then are removed.

    The header must be from the last sync, or from after the last start of the machine, so that no power cut has removed
    a part of the file since then. Nothing is synced.
    """
    next_unit = max(header.next_unit, 1)
    changed = slots_from(file, shape, next_unit)
    if len(changed):
        runs = SlotRuns(file, shape, changed)
        runs.read()
        runs.write(_newest_entries(file, shape, next_unit, changed))
    data = encode_header(header)
    if file.read(0, INDEX_HEADER.itemsize) != data:
        file.write(0, data)
    # No reader uses these bytes. But they were zeros when the file had this header, and the restored file must be the
    # same.
    for begin, end in files.data_extents(file.path, shape.unit_position(next_unit), shape.file_bytes):
        file.write(begin, bytes(end - begin))


def _newest_entries(
    file: WritableFile, shape: IndexShape, next_unit: int, slots: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Return the number of the newest entry below `next_unit` of each slot. It is 0 if the slot has none."""
    newest = np.zeros(len(slots), np.int32)
    is_wanted = np.zeros(shape.slot_count, np.bool_)
    is_wanted[slots] = True
    left = len(slots)
    for end in range(next_unit, 1, -_CHUNK_ENTRIES):
        first = max(end - _CHUNK_ENTRIES, 1)
        raw = file.read(shape.unit_position(first), (end - first) * INDEX_UNIT.itemsize)
        entry_slots = np.frombuffer(raw, INDEX_UNIT)["key_hash"].astype(np.int32) % np.int32(shape.slot_count)
        hits = np.flatnonzero(is_wanted[entry_slots])[::-1]
        found, at = np.unique(entry_slots[hits], return_index=True)  # hits are newest first: this is the newest one
        newest[np.searchsorted(slots, found)] = hits[at] + first
        is_wanted[found] = False
        left -= len(found)
        if not left:
            break
    return newest


def _entry(file: WritableFile, shape: IndexShape, number: int) -> np.void:
    raw = file.read(shape.unit_position(number), INDEX_UNIT.itemsize)
    entry: np.void = np.frombuffer(raw, INDEX_UNIT)[0]
    return entry
