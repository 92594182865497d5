"""Slots of a file of the key index, read and written where keys fall into them.

The slots of a default file are 20 MB, and few keys touch few of their pages: slots that lie near each other are one
run, read and written at once; between runs nothing is touched. With many keys the runs cover all slots.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk.changing import ChangingFile
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.index_file import INDEX_SLOT, IndexShape
from rmq_spark.store.format.index_keys import group_edges

# Slots no further apart than a page are one run: writing the run changes no page that is not changed anyway.
_RUN_GAP_SLOTS = 4096 // INDEX_SLOT.itemsize
# A run is no longer than that, and a buffer not much: large buffers cost more page faults than they save calls.
_RUN_SLOTS = 1 << 16
_CHUNK_SLOTS = 1 << 18


@dataclass(slots=True)
class _Stretch:
    """Runs that are read into one buffer, and where in it the slots stand."""

    positions: list[int]  # of the runs in the file
    sizes: list[int]  # bytes
    part: slice  # which of the slots
    places: NDArray[np.int64]  # of those in the buffer, counted in slots
    buffer: bytes = b""


class SlotRuns:
    """The slots with the numbers `slots` (ascending, each once) of an open file, in runs."""

    def __init__(self, file: ChangingFile, shape: IndexShape, slots: NDArray[np.int32]) -> None:
        self._file, self._count = file, len(slots)
        windows = slots // _RUN_SLOTS
        edges = group_edges((slots[1:] - slots[:-1] > _RUN_GAP_SLOTS) | (windows[1:] != windows[:-1]))
        firsts = slots[edges[:-1]].astype(np.int64)
        counts = slots[edges[1:] - 1] - firsts + 1
        places = counts.cumsum() - counts  # of the runs, if all stood in one buffer
        of_slots = slots - (firsts - places).repeat(edges[1:] - edges[:-1])
        positions = (firsts * INDEX_SLOT.itemsize + shape.slot_position(0)).tolist()
        sizes = (counts * INDEX_SLOT.itemsize).tolist()
        buffers = places // _RUN_SLOTS
        self._stretches = [
            _Stretch(
                positions[first:last],
                sizes[first:last],
                part := slice(edges[first], edges[last]),
                of_slots[part] - places[first],
            )
            for first, last in pairwise(group_edges(buffers[1:] != buffers[:-1]).tolist())
        ]

    def read(self) -> NDArray[np.int32]:
        """Return the values of the slots: the numbers of their newest units. Raises DamageError for a cut file."""
        values = np.empty(self._count, np.int32)
        for stretch in self._stretches:
            stretch.buffer = b"".join(map(self._read, stretch.positions, stretch.sizes))
            np.frombuffer(stretch.buffer, np.int32).take(stretch.places, out=values[stretch.part])
        return values.view(INDEX_SLOT)["newest_unit"].astype(np.int32)

    def write(self, values: NDArray[np.int32]) -> None:
        """Change the slots to `values`; `read` came before. A crash on the way leaves each slot old or new."""
        encoded = values.astype(INDEX_SLOT["newest_unit"])
        for stretch in self._stretches:
            buffer, at = bytearray(stretch.buffer), 0
            np.frombuffer(buffer, encoded.dtype)[stretch.places] = encoded[stretch.part]
            view = memoryview(buffer)
            for position, size in zip(stretch.positions, stretch.sizes, strict=True):
                self._file.write(position, view[at : at + size])
                at += size

    def _read(self, position: int, size: int) -> bytes:
        piece = self._file.read(position, size)
        if len(piece) < size:
            raise DamageError("the file ends among its slots", self._file.path, position, size, len(piece))
        return piece


def slots_from(file: ChangingFile, shape: IndexShape, first_unit: int) -> NDArray[np.int32]:
    """Return the numbers, ascending, of all slots that point at `first_unit` or behind it."""

    def found() -> Iterator[NDArray[np.int64]]:
        for first in range(0, shape.slot_count, _CHUNK_SLOTS):
            count = min(_CHUNK_SLOTS, shape.slot_count - first)
            raw = file.read(shape.slot_position(first), count * INDEX_SLOT.itemsize)
            yield np.flatnonzero(np.frombuffer(raw, INDEX_SLOT)["newest_unit"] >= first_unit) + first

    return np.concatenate(list(found())).astype(np.int32)
