"""The properties string of a message, `name 0x01 value 0x02` repeated: parse it, encode it, edit it.

Parsing rules (MessageDecoder#string2messageProperties, 5.3):
- 0x02 ends a pair. After the last pair it may be missing, as 4.9 does not write it there.
- The first 0x01 of a pair separates name and value. Further 0x01 belong to the value.
- A pair with an empty name or an empty value is ignored.
- If two pairs have the same decoded name, the value of the later pair is used.

`parse` reads one message. `PropertyPairs` reads many messages at once. `edit_properties` removes and sets properties of
many messages. Its results have the same properties as RocketMQ would write, but in another order. They do not contain
ignored pairs, and end with 0x02. Source: MessageDecoder#messageProperties2String (4.9, 5.3).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.format.byte_ranges import Bytes, as_text, is_text, take_ranges
from rmq_spark.store.format.message_columns import Texts, join_rows

NAME_VALUE_SEPARATOR = 1
PROPERTY_SEPARATOR = 2
MAX_PROPERTIES_BYTES = 32767  # the largest signed number of two bytes
TAGS = "TAGS"
KEYS = "KEYS"
UNIQ_KEY = "UNIQ_KEY"
RETRY_TOPIC = "RETRY_TOPIC"
INNER_NUM = "INNER_NUM"
INNER_BASE = "INNER_BASE"
WAIT = "WAIT"
RECORD_CRC = "__CRC32#"  # a CRC of the record with this property, so it is not valid in a copy of the record
_WORD_BYTES = 8  # names are compared in words of eight bytes
_LOW_BYTES = np.array([(1 << 8 * n) - 1 for n in range(_WORD_BYTES)] + [2**64 - 1], np.uint64)
_MANY_NAMES = 24  # with this many names in a row or more, comparing each two names is slower than a loop over rows


def parse(text: bytes) -> dict[str, str]:
    """Return the properties of one message, as a dict from names to values in the order of the string. Never raises."""
    properties = {}
    for part in text.split(b"\x02"):
        name, separator, value = part.partition(b"\x01")
        if name and separator and value:
            properties[name.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
    return properties


def encode(properties: dict[str, str]) -> bytes:
    """Return the properties string of one message. It ends with 0x02, as in 5.2 and later.

    Raises ValueError if a name is empty or contains 0x01 or 0x02, or if a value contains 0x02.
    Source: MessageDecoder#messageProperties2String.
    """
    for name, value in properties.items():
        if not name or "\x01" in name or "\x02" in name or "\x02" in value:
            raise ValueError(f"property {name!r}={value!r} has an empty name or contains a separator")
    return "".join(f"{name}\x01{value}\x02" for name, value in properties.items()).encode()


@dataclass(slots=True)
class PropertyPairs:
    """All name-value pairs of many messages, as positions (bytes) in `text`.

    Pairs are in the order of the messages and of their strings. Arrays have one element per pair, except `pair_ends`:
    `pair_ends[row]` is the number of pairs in all rows up to and including `row`.
    """

    text: Bytes
    name_begins: NDArray[np.int64]
    name_ends: NDArray[np.int64]
    value_ends: NDArray[np.int64]
    pair_ends: NDArray[np.int64]
    _words: NDArray[np.uint64]
    width: int = 0  # the number of names in each row if all rows have the same names in the same order, otherwise 0
    is_text: bool = False  # whether all of `text` is valid UTF-8

    @classmethod
    def split(cls, texts: pa.BinaryArray) -> "PropertyPairs":
        """Return the pairs of all rows. `texts` has the properties string of each row, and must not contain nulls."""
        data, ends = _terminated(texts)
        separators = np.flatnonzero((data - 1) < 2)  # 0 wraps to 255, so one comparison finds 1 and 2
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
            # A part between two 0x02 has no 0x01 or several ones, or an empty name or value. So search the first 0x01
            # of each part.
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
        """Return the number of names in each row if all rows have the same names in the same order, otherwise 0.

        Messages of one producer nearly always have the same names. Then `find` only searches the names of the first
        row.
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
        """Return two arrays: the begin and the end of the property's value in `text`, for each row (bytes).

        Both are -1 if the row does not have the property.
        """
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
        # If a row occurs twice in `rows`, numpy keeps the last value, so the later pair is used.
        begins[rows] = self.name_ends[pairs] + 1
        ends[rows] = self.value_ends[pairs]
        return begins, ends

    def column(self, name: str) -> pa.StringArray:
        """Return the value of the property `name` in every row, as text. It is null if the row does not have it."""
        begins, ends = self.find(name)
        missing = begins < 0
        if missing.any():
            begins, ends = np.where(missing, 0, begins), np.where(missing, 0, ends)
        return as_text(take_ranges(self.text, begins, ends), missing, checked=self.is_text)

    def maps(self) -> pa.MapArray:
        """Return all properties of every row as map<string, string>.

        If a row has the same name several times, only the last one is returned.
        """
        begins, ends, value_ends = self.name_begins, self.name_ends, self.value_ends
        row_ends = self.pair_ends
        first_names = self._first_names()
        if self.width and len(set(map(_decode_name, first_names))) == self.width:
            values = as_text(take_ranges(self.text, ends + 1, value_ends), checked=self.is_text)
            offsets = np.arange(0, len(ends) + 1, self.width, dtype=np.int32)
            return pa.MapArray.from_arrays(pa.array(offsets), tiled_names(tuple(first_names), len(row_ends)), values)
        shadowed = self._shadowed()
        if not self.is_text:
            self._shadow_invalid_rows(shadowed)
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
        """Return a mask of the pairs whose name is repeated later in the row."""
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
            if len(rows) == len(widths):  # all rows have this width, so the arrays need no indexing
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

    def _shadow_invalid_rows(self, shadowed: NDArray[np.bool_]) -> None:
        """Correct the mask `shadowed` in the rows that have a name with invalid UTF-8.

        Such names may have different bytes and be decoded to the same text, so decoded names are compared.
        """
        names = take_ranges(self.text, self.name_begins, self.name_ends)
        invalid = np.flatnonzero(pc.not_equal(names, as_text(names).cast(pa.binary())).to_numpy(zero_copy_only=False))
        for row in np.unique(np.searchsorted(self.pair_ends, invalid, side="right")).tolist():
            first = int(self.pair_ends[row - 1]) if row else 0
            self._shadow_row(range(first, int(self.pair_ends[row])), shadowed)

    def _shadow_row(self, pairs: range, shadowed: NDArray[np.bool_]) -> None:
        """Set the mask `shadowed` for the pairs of one row, by comparing their decoded names."""
        seen = set()
        for pair in reversed(pairs):
            name = _decode_name(self.text[self.name_begins[pair] : self.name_ends[pair]].tobytes())
            shadowed[pair] = name in seen
            seen.add(name)


def _decode_name(name: bytes) -> str:
    return name.decode("utf-8", "replace")


def tiled_names(names: tuple[bytes, ...], count: int) -> pa.StringArray:
    """Return a column with the sequence of names, repeated `count` times."""
    return _power_of_two_times(names, max(count - 1, 0).bit_length()).slice(0, len(names) * count)


@lru_cache(maxsize=2)  # batches of one producer have the same names, so they share one array
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
    """Return for each row the number of pairs in all rows up to its end. A row ends with its last 0x02."""
    width, rest = divmod(len(value_ends), max(len(ends), 1))
    if width and not rest and np.array_equal(value_ends[width - 1 :: width], ends - 1):
        return np.arange(width, len(value_ends) + 1, width)  # all rows have `width` pairs, so no search is needed
    return np.searchsorted(value_ends, ends)


def _terminated(texts: pa.BinaryArray) -> tuple[Bytes, NDArray[np.int64]]:
    """Return the bytes of all rows as one array, and the end of each row in it.

    If a row is not empty and does not end with 0x02, it gets one. After the last row the array has eight zeros.
    """
    data, ends = _flat(texts)
    is_terminated = np.zeros(len(texts), np.bool_)
    filled = np.diff(ends, prepend=0) > 0
    is_terminated[filled] = data[ends[filled] - 1] == PROPERTY_SEPARATOR
    if not is_terminated.all() and filled.any():
        joined = pc.binary_join_element_wise(texts, pa.scalar(_ENDING, pa.binary()), pa.scalar(b"", pa.binary()))
        data, ends = _flat(pc.if_else(pa.array(filled & ~is_terminated), joined, texts))
    return np.concatenate([data, np.zeros(_WORD_BYTES, np.uint8)]), ends


def _flat(texts: pa.BinaryArray) -> tuple[Bytes, NDArray[np.int64]]:
    """Return the bytes of all rows as one array, and the end of each row in it."""
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(texts) + 1, texts.offset * 4).astype(np.int64)
    begin, end = int(bounds[0]), int(bounds[-1])
    flat = np.frombuffer(data, np.uint8)[begin:end] if data is not None else np.zeros(0, np.uint8)
    return flat, bounds[1:] - begin


def _word_at(data: Bytes, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the eight bytes at each position as a little-endian number. Positions may be unaligned."""
    view: NDArray[np.uint64] = np.ndarray((len(data) - _WORD_BYTES + 1,), "<u8", data, strides=(1,))
    return view[np.minimum(positions, len(view) - 1)]


def _first_word(name: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(name[:_WORD_BYTES], "little"))


# The new value of a property: bytes that are the same in all rows, or a column with a value for each row. If the column
# is null in a row, the row keeps its old value.
Put: TypeAlias = bytes | pa.BinaryArray
_ENDING = bytes([PROPERTY_SEPARATOR])


def edit_properties(
    texts: pa.BinaryArray,
    dropped: Collection[str],
    put: Mapping[str, Put],
    dropped_where: Mapping[str, NDArray[np.bool_]] | None = None,
) -> pa.BinaryArray:
    """Return the properties strings without the properties `dropped`, and with the properties in `put`.

    `dropped_where` maps names to masks of the rows from which only these properties are removed. `texts` must not
    contain nulls. The names and values in `put` must not contain separators, and the values must not be empty.
    """
    assert not texts.null_count
    if not len(texts):
        return texts
    masks: dict[str, NDArray[np.bool_] | None] = {**(dropped_where or {})}
    for name, value in put.items():
        given, other = _given_rows(value), masks.get(name)
        masks[name] = given if given is None or other is None else given | other
    kept = _without(texts, {**masks, **dict.fromkeys(dropped)})
    pieces: list[bytes | pa.BinaryArray] = [kept.array()]
    for name, value in put.items():
        prefix = name.encode() + b"\x01"
        pieces.append(prefix + value + _ENDING if isinstance(value, bytes) else _pairs_of(prefix, value))
    return join_rows(*pieces)


def _without(texts: pa.BinaryArray, masks: Mapping[str, NDArray[np.bool_] | None]) -> Texts:
    """Return the properties strings without some pairs.

    `masks` maps the name of each property to a mask of the rows from which it is removed. None means all rows.
    """
    pairs = PropertyPairs.split(texts)
    rows = np.repeat(np.arange(len(texts)), np.diff(pairs.pair_ends, prepend=0))
    names = take_ranges(pairs.text, pairs.name_begins, pairs.name_ends)
    stays = ~_are(names, [name for name, mask in masks.items() if mask is None])
    for name, mask in masks.items():
        if mask is not None and mask.any():
            stays &= ~(_are(names, [name]) & mask[rows])
    begins, ends = pairs.name_begins[stays], pairs.value_ends[stays] + 1
    kept_before = np.concatenate([[0], np.cumsum(stays)])
    bytes_before = np.concatenate([[0], np.cumsum(ends - begins)])
    bounds = bytes_before[kept_before[np.concatenate([[0], pairs.pair_ends])]]
    return Texts(Texts.of(take_ranges(pairs.text, begins, ends)).data, bounds)


def _given_rows(value: Put) -> NDArray[np.bool_] | None:
    """Return a mask of the rows that get a new value. Returns None if all rows get one."""
    if isinstance(value, bytes) or not value.null_count:
        return None
    given: NDArray[np.bool_] = value.is_valid().to_numpy(zero_copy_only=False)
    return given


def _are(names: pa.BinaryArray, wanted: list[str]) -> NDArray[np.bool_]:
    """Return for each name whether it is one of `wanted`."""
    value_set = pa.array([name.encode() for name in wanted], pa.binary())
    found: NDArray[np.bool_] = pc.is_in(names, value_set).to_numpy(zero_copy_only=False)
    return found


def _pairs_of(prefix: bytes, values: pa.BinaryArray) -> pa.BinaryArray:
    """Return the name-value pair of each row. `prefix` is the name and 0x01. If a value is null, the pair is empty."""
    values = values.cast(pa.binary())
    joined = pc.binary_join_element_wise(
        pa.scalar(prefix, pa.binary()), values, pa.scalar(_ENDING, pa.binary()), pa.scalar(b"", pa.binary())
    )  # null where the value is null
    return pc.fill_null(joined, pa.scalar(b"", pa.binary()))
