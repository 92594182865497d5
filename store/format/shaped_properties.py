"""The properties of many messages whose texts have one shape: the same names in the same places, values as long.

Messages of one producer are mostly like that, for ids and tags have fixed widths. Then one row tells where
everything stands in all of them, nothing is split, and a value of every row is a column of bytes. Other texts are
for `properties.PropertyPairs`, which gives the same for any.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.format.properties import tiled_names
from rmq_spark.store.format.ragged import Bytes, as_text, is_text, of_one_size

_ROWS_TOGETHER = 8  # rows that are compared as words of eight bytes: their bytes are always whole words
_BLOCK_BYTES = 128 << 10  # what is compared and counted while it is in the processor's nearest caches


@dataclass(frozen=True, slots=True)
class ShapedPairs:
    """All name-value pairs of texts of one shape: row after row in `text`, each `row_bytes` long.

    Before a row's text may stand what was skipped.
    """

    text: Bytes
    row_bytes: int
    names: tuple[bytes, ...]  # all different
    values: tuple[tuple[int, int], ...]  # [begin, end) of each value in its row
    is_text: bool  # all of the texts is UTF-8

    @classmethod
    def of(cls, texts: pa.BinaryArray) -> "ShapedPairs | None":
        """Return the pairs of all rows; None where the texts, which hold no nulls, do not have one plain shape."""
        count = len(texts)
        _, offsets, data = texts.buffers()
        if count < _ROWS_TOGETHER or data is None:
            return None
        bounds = np.frombuffer(offsets, np.int32, count + 1, texts.offset * 4)
        begin, size = int(bounds[0]), int(bounds[1] - bounds[0])
        if not size or not np.array_equal(bounds, np.arange(begin, begin + (count + 1) * size, size, dtype=np.int32)):
            return None
        return cls._of_rows(np.frombuffer(data, np.uint8)[begin : begin + count * size], size, 0)

    @classmethod
    def after_topic(cls, tails: NDArray[np.void], topic: bytes) -> "ShapedPairs | None":
        """Return the pairs of the ends of records, all as long: the bytes `topic`, then properties with their length.

        None where they do not have one plain shape, or some end is not like that.
        """
        text, size = tails.view(np.uint8), tails.dtype.itemsize
        before = topic + max(size - len(topic) - 2, 0).to_bytes(2, "big")
        if len(tails) < _ROWS_TOGETHER or size <= len(before) or text[: len(before)].tobytes() != before:
            return None
        return cls._of_rows(text, size, len(before))

    @classmethod
    def _of_rows(cls, text: Bytes, size: int, skipped: int) -> "ShapedPairs | None":
        """Return the pairs of rows of one size, each with some bytes before its text that are the same in all."""
        first = text[:size].tobytes()
        parts = _parts(first[skipped:])
        if parts is None:
            return None
        values = tuple((skipped + end - length, skipped + end) for _, length, end in parts)
        largest = _largest_byte(text, first, values)
        if largest is None:
            return None
        good = largest < 0x80 or is_text(np.ascontiguousarray(text.reshape(-1, size)[:, skipped:]).ravel())
        return cls(text, size, tuple(name for name, _, _ in parts), values, good)

    def __len__(self) -> int:
        return len(self.text) // self.row_bytes

    def column(self, name: str) -> pa.StringArray:
        """Return the named value of every row as text, null where it is missing."""
        wanted = name.encode()
        if wanted not in self.names:
            return pa.nulls(len(self), pa.string())
        begin, end = self.values[self.names.index(wanted)]
        return as_text(of_one_size(self._bytes(begin, end).copy()), checked=self.is_text)

    def maps(self) -> pa.MapArray:
        """Return all properties of every row as map<string, string>."""
        sizes = tuple(end - begin for begin, end in self.values)
        data = np.empty(len(self) * sum(sizes), np.uint8)
        at = 0
        for (begin, end), size in zip(self.values, sizes, strict=True):
            np.ndarray(len(self), f"V{size}", data, at, sum(sizes))[:] = self._bytes(begin, end)
            at += size
        count = len(self) * len(sizes)
        offsets = _ends_again_and_again(sizes, max(len(self) - 1, 0).bit_length())[: count + 1]
        values = pa.BinaryArray.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
        rows = np.arange(0, count + 1, len(sizes), dtype=np.int32)
        names = tiled_names(self.names, len(self))
        return pa.MapArray.from_arrays(pa.array(rows), names, as_text(values, checked=self.is_text))

    def _bytes(self, begin: int, end: int) -> NDArray[np.void]:
        """Return the bytes [begin, end) of every row, as they lie."""
        return np.ndarray(len(self), f"V{end - begin}", self.text, begin, self.row_bytes)


def _parts(text: bytes) -> list[tuple[bytes, int, int]] | None:
    """Return name, size of the value and end of the value of each pair; None where a rule would leave something out."""
    found, at = [], 0
    for part in text.removesuffix(b"\x02").split(b"\x02"):
        name, _, value = part.partition(b"\x01")
        if not name or not value or b"\x01" in value:
            return None
        at += len(part) + 1
        found.append((name, len(value), at - 1))
    spelt = {name.decode("utf-8", "replace") for name, _, _ in found}  # names are equal when they read the same
    return found if len(spelt) == len(found) else None


def _largest_byte(text: Bytes, first: bytes, values: tuple[tuple[int, int], ...]) -> int | None:
    """Return the largest byte of all rows, or None if some row has not the shape of the first.

    All that is not value must be the same in every row. Then each has the separators of the first, and if there
    are no more in all of them together, no value holds one.
    """
    size, separators = len(first), first.count(b"\x01") + first.count(b"\x02")
    mask = np.full(size, 0xFF, np.uint8)
    for begin, end in values:
        mask[begin:end] = 0
    masks = np.tile(mask, _ROWS_TOGETHER).view(np.uint64)
    wanted = np.tile(np.frombuffer(first, np.uint8), _ROWS_TOGETHER).view(np.uint64) & masks
    together = size * _ROWS_TOGETHER
    step = max(_BLOCK_BYTES // together, 1) * together
    largest = 0
    for at in range(0, len(text), step):
        part = text[at : at + step]
        if len(part) % together:
            begin = at + len(part) - len(part) % together
            part = text[at:begin]
            rest = text[-together:]  # some rows again: there are at least as many
            parts = [part, rest] if len(part) else [rest]
        else:
            parts = [part]
        for rows in parts:
            words = rows.view(np.uint64).reshape(-1, size)
            if ((words & masks) != wanted).any():
                return None
            if np.count_nonzero((rows - 1) < 2) != separators * (len(rows) // size):  # 0 wraps to 255
                return None
            largest = max(largest, int(rows.max()))
    return largest


@lru_cache(maxsize=2)  # one producer's batches are alike
def _ends_again_and_again(sizes: tuple[int, ...], power: int) -> NDArray[np.int32]:
    """Return the offsets of values of these sizes, 2**power times over: at most what a text of each row allows."""
    count = 1 << power
    offsets = np.zeros(len(sizes) * count + 1, np.int64)
    ends = np.cumsum(sizes)
    for column, end in enumerate(ends.tolist()):
        offsets[1 + column :: len(sizes)] = np.arange(end, end + count * int(ends[-1]), int(ends[-1]))
    return offsets.astype(np.int32)  # beyond the rows that are asked for they may wrap
