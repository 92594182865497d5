"""Byte ranges of one buffer, copied into an Arrow array with one call. Ranges may overlap and be in any order.

`take_ranges` uses the first of these methods that is possible, because they are sorted from fast to slow:
- If all ranges have the same size, they are elements of a numpy array of overlapping items, and indexing copies them.
- If all ranges are longer than 12 bytes, an Arrow array of views refers to them, and a cast copies them.
- In all other cases, a binary array over the buffer gets the offsets [begin0, end0, begin1, end1, …]. Its elements 0,
  2, 4, … are the ranges, and one call of `take` copies these.
"""

from functools import lru_cache
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

# Successive copies have similar sizes. malloc reuses the memory of earlier copies, and Arrow's default pool takes more.
_POOL = pa.system_memory_pool()
_INLINE_BYTES = 12  # Arrow stores values up to this size inside the view, so the view does not refer to the buffer
_MAX_BYTES = 1 << 31  # limit of the values of one binary array

Bytes: TypeAlias = NDArray[np.uint8]
Positions: TypeAlias = NDArray[np.int64]


@lru_cache(maxsize=4)
def _even_indices(size_class: int) -> pa.Array:
    return pa.array(np.arange(0, 2 << size_class, 2, dtype=np.int32))


def gather_bytes(buffer: Bytes, positions: Positions, size: int) -> NDArray[np.void]:
    """Return a copy of the `size` bytes at each position. `size` is at least 1. All bytes must be inside the buffer."""
    if not len(positions):
        return np.empty(0, f"V{size}")
    view: NDArray[np.void] = np.ndarray((len(buffer) - size + 1,), f"V{size}", buffer, strides=(1,))
    return view[positions]


def of_one_size(values: NDArray[np.void]) -> pa.BinaryArray:
    """Return an array of values as an Arrow binary array that shares its memory.

    `values` must be contiguous and smaller than 2 GiB in total.
    """
    size = values.dtype.itemsize
    offsets = np.arange(0, (len(values) + 1) * size, size, dtype=np.int32)
    return pa.BinaryArray.from_buffers(
        pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(values.view(np.uint8))]
    )


def take_ranges(buffer: Bytes, begins: Positions, ends: Positions) -> pa.BinaryArray:
    """Return the ranges [begins, ends) of `buffer` (bytes) as a binary array that has its own copy of them.

    The buffer must be smaller than 2 GiB. The caller must have checked that every range is inside the buffer.
    """
    count = len(begins)
    sizes = ends - begins
    least = int(sizes.min()) if count else 0
    if 0 < least * count < _MAX_BYTES and (sizes == least).all():
        return of_one_size(gather_bytes(buffer, begins, least))
    if least > _INLINE_BYTES:
        views = np.zeros((count, 2), np.int64)
        views[:, 0] = sizes  # the upper half is a prefix of the value, which the cast does not use
        np.left_shift(begins, 32, out=views[:, 1])  # the lower half is the number of the buffer, 0
        parts = [None, pa.py_buffer(views), pa.py_buffer(buffer)]
        return pa.Array.from_buffers(pa.binary_view(), count, parts).cast(pa.binary(), memory_pool=_POOL)
    offsets = np.empty(2 * count + 1, np.int32)
    offsets[0:-1:2] = begins
    offsets[1::2] = ends
    offsets[-1] = len(buffer)  # Arrow requires last offset >= first offset
    everything = pa.BinaryArray.from_buffers(
        pa.binary(), 2 * count, [None, pa.py_buffer(offsets), pa.py_buffer(buffer)]
    )
    size_class = max(count - 1, 0).bit_length()
    return pc.take(everything, _even_indices(size_class)[:count], boundscheck=False, memory_pool=_POOL)


def is_text(data: Bytes) -> bool:
    """Return whether the bytes are valid UTF-8. If they are, every part between two ASCII characters is valid too."""
    offsets = pa.py_buffer(np.array([0, len(data)], np.int32))
    try:
        pa.StringArray.from_buffers(1, offsets, pa.py_buffer(data)).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def as_text(
    array: pa.BinaryArray, missing: NDArray[np.bool_] | None = None, *, checked: bool = False
) -> pa.StringArray:
    """Return an array of bytes as an array of strings. Rows that are marked in `missing` become null.

    Invalid UTF-8 becomes replacement characters, as in Java's String constructor. Set `checked` if the bytes are known
    to be valid UTF-8, so that they are not validated again.
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
