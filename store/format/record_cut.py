"""Records of one size, cut into head, body and the rest: each part of all of them in a row.

The log is far from the processor, so every byte of it is best fetched once: a block of records at a time is copied
next to each other, and what is copied on from there comes from the nearest caches.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.format.heads import RecordRun
from rmq_spark.store.format.ragged import gather_bytes
from rmq_spark.store.format.record import HOST_BITS, RECORD_HEAD

_MIN_RECORDS = 64  # fewer are not worth a look
_MAX_RECORD_BYTES = 1024  # larger ones come from memory piece by piece as fast as whole
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RecordParts:
    """The parts of all records of a run, as items of one size each. `tails` are empty where only bodies were asked for.

    Cut as the first record's head says: only with the heads compared is it known whether that was right.
    """

    heads: NDArray[np.void]
    bodies: NDArray[np.void]
    tails: NDArray[np.void]  # topic and properties, with their lengths

    @property
    def body_size(self) -> int:
        """Return the size of each body (bytes)."""
        return self.bodies.dtype.itemsize


def cut_records(run: RecordRun, *, with_tails: bool) -> RecordParts | None:
    """Return the parts of the run's records; None where they are not of one size, or this would not pay."""
    if len(run) < _MIN_RECORDS:
        return None
    size = int(run.sizes[0])
    if size > _MAX_RECORD_BYTES or not (run.sizes == size).all() or not (with_tails or _mostly_adjacent(run, size)):
        return None
    first = gather_bytes(run.buffer, run.positions[:1], RECORD_HEAD.itemsize).view(RECORD_HEAD)[0]
    body_size = int(first["body_size"])
    rest = size - RECORD_HEAD.itemsize - body_size
    if body_size <= 0 or rest <= 0 or int(first["sys_flag"]) & HOST_BITS:
        return None
    widths = [RECORD_HEAD.itemsize, body_size, *([rest] if with_tails else [])]
    parts = [np.empty(len(run), f"V{width}") for width in widths]
    step, taken = max(_BLOCK_BYTES // size, 1), sum(widths)
    for begin in range(0, len(run), step):
        block = gather_bytes(run.buffer, run.positions[begin : begin + step], taken)
        at = 0
        for part, width in zip(parts, widths, strict=True):
            part[begin : begin + step] = np.ndarray(len(block), f"V{width}", block, at, taken)
            at += width
    return RecordParts(parts[0].view(RECORD_HEAD), parts[1], parts[2] if with_tails else np.empty(0, "V1"))


def _mostly_adjacent(run: RecordRun, size: int) -> bool:
    """Say whether most records follow the one before: then body and head are near anyway, and are fetched together."""
    return int(np.count_nonzero(np.diff(run.positions) == size)) * 2 > len(run)
