"""Copying many byte ranges of one buffer into an Arrow array in one call.

Ranges of one size are elements of an array of overlapping items, which numpy copies faster than anything that
looks at sizes. Where all are longer than a dozen bytes, they become Arrow's views of the buffer, and a cast copies
them out. Else a binary array over the buffer with the offsets [begin0, end0, begin1, end1, …] has the wanted ranges as
its even elements, and one `take` copies those; its odd elements are never looked at. In all three ways the ranges may
lie in any order and overlap.
"""

from functools import lru_cache
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

# Copies of one size come and go: malloc keeps their room, where Arrow's own pool takes new room beside it.
_POOL = pa.system_memory_pool()
_INLINE_BYTES = 12  # a view holds shorter values itself

_MAX_BYTES = 1 << 31  # of one binary array

Bytes: TypeAlias = NDArray[np.uint8]
Positions: TypeAlias = NDArray[np.int64]


@lru_cache(maxsize=4)
def _even_indices(size_class: int) -> pa.Array:
    return pa.array(np.arange(0, 2 << size_class, 2, dtype=np.int32))


def gather_bytes(buffer: Bytes, positions: Positions, size: int) -> NDArray[np.void]:
    """Copy `size` bytes, at least one, from each position. Every one must lie whole in the buffer."""
    if not len(positions):
        return np.empty(0, f"V{size}")
    view: NDArray[np.void] = np.ndarray((len(buffer) - size + 1,), f"V{size}", buffer, strides=(1,))
    return view[positions]


def of_one_size(values: NDArray[np.void]) -> pa.BinaryArray:
    """Return contiguous values of one size, together below 2 GiB, as a binary array over the same memory."""
    size = values.dtype.itemsize
    offsets = np.arange(0, (len(values) + 1) * size, size, dtype=np.int32)
    return pa.BinaryArray.from_buffers(
        pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(values.view(np.uint8))]
    )


def take_ranges(buffer: Bytes, begins: Positions, ends: Positions) -> pa.BinaryArray:
    """Return the ranges [begins, ends) of `buffer` (bytes) as a binary array that owns its memory.

    The caller has checked that every range lies in the buffer, which is below 2 GiB.
    """
    count = len(begins)
    sizes = ends - begins
    least = int(sizes.min()) if count else 0
    if 0 < least * count < _MAX_BYTES and (sizes == least).all():
        return of_one_size(gather_bytes(buffer, begins, least))
    if least > _INLINE_BYTES:
        # As views of the buffer, which Arrow casts to a copy faster than it takes: nothing is looked up twice.
        views = np.zeros((count, 2), np.int64)
        views[:, 0] = sizes  # the first four bytes of the value, above them, are not needed here
        np.left_shift(begins, 32, out=views[:, 1])  # above the number of the buffer, 0
        parts = [None, pa.py_buffer(views), pa.py_buffer(buffer)]
        return pa.Array.from_buffers(pa.binary_view(), count, parts).cast(pa.binary(), memory_pool=_POOL)
    offsets = np.empty(2 * count + 1, np.int32)
    offsets[0:-1:2] = begins
    offsets[1::2] = ends
    offsets[-1] = len(buffer)  # Arrow wants the last offset not below the first
    everything = pa.BinaryArray.from_buffers(
        pa.binary(), 2 * count, [None, pa.py_buffer(offsets), pa.py_buffer(buffer)]
    )
    size_class = max(count - 1, 0).bit_length()
    return pc.take(everything, _even_indices(size_class)[:count], boundscheck=False, memory_pool=_POOL)


def is_text(data: Bytes) -> bool:
    """Say whether all the bytes together are UTF-8; if they are, so is every part between ASCII characters."""
    offsets = pa.py_buffer(np.array([0, len(data)], np.int32))
    try:
        pa.StringArray.from_buffers(1, offsets, pa.py_buffer(data)).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def as_text(
    array: pa.BinaryArray, missing: NDArray[np.bool_] | None = None, *, checked: bool = False
) -> pa.StringArray:
    """Return the same bytes as a string array; rows marked `missing` become null.

    `checked` says that the bytes are known to be UTF-8. Others come out with replacement characters, as Java's
    String constructor makes them.
    """
    validity = None
    if missing is not None and missing.any():
        validity = pa.py_buffer(np.packbits(~missing, bitorder="little"))
    _, offsets, data = array.buffers()
    text = pa.StringArray.from_buffers(len(array), offsets, data, validity, -1, array.offset)
    if checked:
        return text
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        gone = missing if missing is not None else np.zeros(len(array), np.bool_)
        values = (None if g else v.as_py().decode("utf-8", "replace") for v, g in zip(array, gone, strict=True))
        text = pa.array(list(values), pa.string())
    return text
