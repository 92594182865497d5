"""The properties of a message: `name 0x01 value 0x02` again and again, one text in each record.

Rules (MessageDecoder#string2messageProperties, 5.3): parts are split at 0x02, and the last one may lack it
(4.9 writes none there); a part counts only with at least one byte on both sides of its first 0x01, so empty
names and values are lost; a value may hold further 0x01; of two names that read the same the later one wins.

`parse` is the obvious one-message reader, `PropertyPairs` reads the texts of many messages at once.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.format.ragged import Bytes, as_text, is_text, take_ranges

NAME_VALUE_SEPARATOR = 1
PROPERTY_SEPARATOR = 2

TAGS = "TAGS"
KEYS = "KEYS"
UNIQ_KEY = "UNIQ_KEY"
RETRY_TOPIC = "RETRY_TOPIC"
INNER_NUM = "INNER_NUM"
INNER_BASE = "INNER_BASE"
WAIT = "WAIT"

_WORD_BYTES = 8  # names are compared in words of eight bytes
_LOW_BYTES = np.array([(1 << 8 * n) - 1 for n in range(_WORD_BYTES)] + [2**64 - 1], np.uint64)
_MANY_NAMES = 24  # from here on comparing each pair of a row's names costs more than going row by row


def parse(text: bytes) -> dict[str, str]:
    """Return the properties of one message, in the order they are written. Never raises."""
    properties = {}
    for part in text.split(b"\x02"):
        name, separator, value = part.partition(b"\x01")
        if name and separator and value:
            properties[name.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
    return properties


def encode(properties: dict[str, str]) -> bytes:
    """Write properties with a trailing 0x02 (MessageDecoder#messageProperties2String, 5.2 and later).

    Raises ValueError for an empty name, a separator in a name, or 0x02 in a value.
    """
    for name, value in properties.items():
        if not name or "\x01" in name or "\x02" in name or "\x02" in value:
            raise ValueError(f"property {name!r}={value!r}: empty name, or a separator in it")
    return "".join(f"{name}\x01{value}\x02" for name, value in properties.items()).encode()


@dataclass(slots=True)
class PropertyPairs:
    """All name-value pairs of many messages: begins and ends (bytes in `text`) of names and values.

    `pair_ends[row]` counts the pairs of the rows up to and including `row`. Pairs keep their written order.
    """

    text: Bytes
    name_begins: NDArray[np.int64]
    name_ends: NDArray[np.int64]
    value_ends: NDArray[np.int64]
    pair_ends: NDArray[np.int64]
    _words: NDArray[np.uint64]
    width: int = 0  # names of every row, where all rows have the same ones in the same order
    is_text: bool = False  # all of it is UTF-8

    @classmethod
    def split(cls, texts: pa.BinaryArray) -> "PropertyPairs":
        """Split the properties texts of all rows. `texts` has no nulls."""
        data, ends = _terminated(texts)
        separators = np.flatnonzero((data - 1) < 2)  # 0 wraps to 255: two compares in one
        name_ends, value_ends = separators[0::2], separators[1::2]
        if (data[name_ends] != NAME_VALUE_SEPARATOR).any() or (data[value_ends] != PROPERTY_SEPARATOR).any():
            name_ends = separators[data[separators] == NAME_VALUE_SEPARATOR]
            value_ends = separators[data[separators] == PROPERTY_SEPARATOR]
        pair_ends = _count_pairs(value_ends, ends)
        name_begins = np.empty(len(value_ends), np.int64)
        if len(value_ends):
            name_begins[0] = 0
            np.add(value_ends[:-1], 1, out=name_begins[1:])
        regular = len(name_ends) == len(value_ends)
        if regular:
            good = (name_ends > name_begins) & (name_ends + 1 < value_ends)
        if not regular or not good.all():
            # Somewhere a part has no 0x01, or several, or an empty side: look for the first one in each.
            padded = np.append(name_ends, len(data))
            name_ends = padded[np.searchsorted(name_ends, name_begins)]
            good = (name_ends > name_begins) & (name_ends + 1 < value_ends)
            pair_ends = np.concatenate([[0], np.cumsum(good)])[pair_ends]
            name_begins, name_ends, value_ends = name_begins[good], name_ends[good], value_ends[good]
        words = _word_at(data, name_begins) & _LOW_BYTES[np.minimum(name_ends - name_begins, _WORD_BYTES)]
        pairs = cls(data, name_begins, name_ends, value_ends, pair_ends, words)
        pairs.width = pairs._common_width()
        pairs.is_text = is_text(data)
        return pairs

    def _common_width(self) -> int:
        """Return how many names every row has if all rows have the same names in the same order, else 0.

        Messages of one producer nearly always do; then one row's names stand for all.
        """
        width, rest = divmod(len(self.name_begins), max(len(self.pair_ends), 1))
        if not width or rest or not np.array_equal(self.pair_ends, np.arange(1, len(self.pair_ends) + 1) * width):
            return 0
        sizes = (self.name_ends - self.name_begins).reshape(-1, width)
        words = self._words.reshape(-1, width)
        for column in range(width):  # column by column: numpy is slow along rows of a few elements
            if not (words[:, column] == words[0, column]).all() or not (sizes[:, column] == sizes[0, column]).all():
                return 0
        for column in np.flatnonzero(sizes[0] > _WORD_BYTES).tolist():
            begins = self.name_begins[column::width]
            for at in range(_WORD_BYTES, int(sizes[0][column]), _WORD_BYTES):
                left = min(int(sizes[0][column]) - at, _WORD_BYTES)
                rest_words = _word_at(self.text, begins + at) & _LOW_BYTES[left]
                if not (rest_words == rest_words[0]).all():
                    return 0
        return width

    def _first_names(self) -> list[bytes]:
        return [self.text[self.name_begins[at] : self.name_ends[at]].tobytes() for at in range(self.width)]

    def find(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return begin and end of the named value for every row, -1 where it is missing."""
        wanted = name.encode()
        if self.width:
            columns = [column for column, first in enumerate(self._first_names()) if first == wanted]
            if not columns:
                missing = np.full(len(self.pair_ends), -1, np.int64)
                return missing, missing
            return self.name_ends[columns[-1] :: self.width] + 1, self.value_ends[columns[-1] :: self.width]
        found = (self._words == _first_word(wanted)) & (self.name_ends - self.name_begins == len(wanted))
        for at in range(_WORD_BYTES, len(wanted), _WORD_BYTES):
            rest = wanted[at : at + _WORD_BYTES]
            words = _word_at(self.text, self.name_begins + at) & _LOW_BYTES[len(rest)]
            found &= words == _first_word(rest)
        pairs = np.flatnonzero(found)
        rows = np.searchsorted(self.pair_ends, pairs, side="right")
        begins = np.full(len(self.pair_ends), -1, np.int64)
        ends = begins.copy()
        begins[rows] = self.name_ends[pairs] + 1  # of equal rows numpy keeps the last: the later one wins
        ends[rows] = self.value_ends[pairs]
        return begins, ends

    def column(self, name: str) -> pa.StringArray:
        """Return the named value of every row as text, null where it is missing."""
        begins, ends = self.find(name)
        missing = begins < 0
        if missing.any():
            begins, ends = np.where(missing, 0, begins), np.where(missing, 0, ends)
        return as_text(take_ranges(self.text, begins, ends), missing, checked=self.is_text)

    def maps(self) -> pa.MapArray:
        """Return all properties of every row as map<string, string>, without shadowed duplicates."""
        begins, ends, value_ends = self.name_begins, self.name_ends, self.value_ends
        row_ends = self.pair_ends
        first_names = self._first_names()
        if self.width and len(set(map(_as_read, first_names))) == self.width:
            values = as_text(take_ranges(self.text, ends + 1, value_ends), checked=self.is_text)
            offsets = np.arange(0, len(ends) + 1, self.width, dtype=np.int32)
            return pa.MapArray.from_arrays(pa.array(offsets), tiled_names(tuple(first_names), len(row_ends)), values)
        shadowed = self._shadowed()
        if not self.is_text:
            self._shadow_odd_rows(shadowed)
        if shadowed.any():
            kept = ~shadowed
            row_ends = np.concatenate([[0], np.cumsum(kept)])[row_ends]
            begins, ends, value_ends = begins[kept], ends[kept], value_ends[kept]
        offsets = np.zeros(len(row_ends) + 1, np.int32)
        offsets[1:] = row_ends
        names = as_text(take_ranges(self.text, begins, ends), checked=self.is_text)
        values = as_text(take_ranges(self.text, ends + 1, value_ends), checked=self.is_text)
        return pa.MapArray.from_arrays(pa.array(offsets), names, values)

    def _shadowed(self) -> NDArray[np.bool_]:
        """Mark every pair whose name comes again later in its row."""
        shadowed = np.zeros(len(self.name_begins), np.bool_)
        firsts = np.concatenate([[0], self.pair_ends[:-1]])
        widths = self.pair_ends - firsts
        sizes = self.name_ends - self.name_begins
        for width in np.unique(widths):
            if width < 2:
                continue
            rows = np.flatnonzero(widths == width)
            if width >= _MANY_NAMES:
                for row in rows:
                    self._shadow_row(range(firsts[row], self.pair_ends[row]), shadowed)
                continue
            if len(rows) == len(widths):  # all rows have as many: no need to gather
                words, lengths = self._words.reshape(-1, width).T, sizes.reshape(-1, width).T
            else:
                pairs = firsts[rows][:, None] + np.arange(width)
                words, lengths = self._words[pairs].T, sizes[pairs].T
            for early in range(width - 1):
                for late in range(early + 1, width):
                    same = words[early] == words[late]
                    if not same.any():
                        continue
                    for row in rows[same & (lengths[early] == lengths[late])]:
                        self._shadow_row(range(firsts[row], self.pair_ends[row]), shadowed)
        return shadowed

    def _shadow_odd_rows(self, shadowed: NDArray[np.bool_]) -> None:
        """Decide the rows with a name that is no UTF-8: names of different bytes may read the same there."""
        names = take_ranges(self.text, self.name_begins, self.name_ends)
        odd = np.flatnonzero(pc.not_equal(names, as_text(names).cast(pa.binary())).to_numpy(zero_copy_only=False))
        for row in np.unique(np.searchsorted(self.pair_ends, odd, side="right")).tolist():
            first = int(self.pair_ends[row - 1]) if row else 0
            self._shadow_row(range(first, int(self.pair_ends[row])), shadowed)

    def _shadow_row(self, pairs: range, shadowed: NDArray[np.bool_]) -> None:
        """Decide one row exactly, by its whole names as they read."""
        seen = set()
        for pair in reversed(pairs):
            name = _as_read(self.text[self.name_begins[pair] : self.name_ends[pair]].tobytes())
            shadowed[pair] = name in seen
            seen.add(name)


def _as_read(name: bytes) -> str:
    return name.decode("utf-8", "replace")


def tiled_names(names: tuple[bytes, ...], count: int) -> pa.StringArray:
    """Return the names again and again, `count` times."""
    return _power_of_two_times(names, max(count - 1, 0).bit_length()).slice(0, len(names) * count)


@lru_cache(maxsize=2)  # one producer's batches are alike: the same array serves them all
def _power_of_two_times(names: tuple[bytes, ...], power: int) -> pa.StringArray:
    count = 1 << power
    joined = np.frombuffer(b"".join(names), np.uint8)
    ends = np.cumsum([len(name) for name in names])
    offsets = np.zeros(len(names) * count + 1, np.int32)
    offsets[1:] = (np.arange(count)[:, None] * len(joined) + ends).ravel()
    data = np.tile(joined, count)
    return as_text(
        pa.BinaryArray.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    )


def _count_pairs(value_ends: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each row how many pairs end before the row's end. A row's last byte is its last 0x02."""
    width, rest = divmod(len(value_ends), max(len(ends), 1))
    if width and not rest and np.array_equal(value_ends[width - 1 :: width], ends - 1):
        return np.arange(width, len(value_ends) + 1, width)  # every row has as many: no search
    return np.searchsorted(value_ends, ends)


def _terminated(texts: pa.BinaryArray) -> tuple[Bytes, NDArray[np.int64]]:
    """Return the rows' bytes, each row ending in 0x02 and eight spare bytes after all, and the rows' ends."""
    data, ends = _flat(texts)
    ends_well = np.zeros(len(texts), np.bool_)
    filled = np.diff(ends, prepend=0) > 0
    ends_well[filled] = data[ends[filled] - 1] == PROPERTY_SEPARATOR
    if not ends_well.all() and filled.any():
        closing = pa.scalar(b"\x02", pa.binary())
        joined = pc.binary_join_element_wise(texts, closing, pa.scalar(b"", pa.binary()))
        kept = pc.if_else(pa.array(filled & ~ends_well), joined, texts)
        data, ends = _flat(kept)
    return np.concatenate([data, np.zeros(_WORD_BYTES, np.uint8)]), ends


def _flat(texts: pa.BinaryArray) -> tuple[Bytes, NDArray[np.int64]]:
    """Return the bytes of all rows in one run, and where each row ends in it."""
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(texts) + 1, texts.offset * 4).astype(np.int64)
    begin, end = int(bounds[0]), int(bounds[-1])
    flat = np.frombuffer(data, np.uint8)[begin:end] if data is not None else np.zeros(0, np.uint8)
    return flat, bounds[1:] - begin


def _word_at(data: Bytes, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the eight bytes at each position as one little-endian number; needs no alignment."""
    view: NDArray[np.uint64] = np.ndarray((len(data) - _WORD_BYTES + 1,), "<u8", data, strides=(1,))
    return view[np.minimum(positions, len(view) - 1)]


def _first_word(name: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(name[:_WORD_BYTES], "little"))
