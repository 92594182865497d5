"""How Java reads the numbers of a whole column of texts: the same answers as `sql92_numbers`, by the column.

Plain digits are read eight at a time: the last bytes of every text in one gather, as one 64-bit word, and then a few
operations on words. Decimal points are found by Arrow and both sides read in this way; the quotient of two numbers
below 2^53 is rounded once, so it is the nearest double, as Java's is. Other decimal forms that Arrow knows are cast by
it, and what then remains is read text by text, each distinct one once.
"""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.filter.sql92_numbers import INTEGER_BITS, LONG_BITS, read_double, read_integer

Words = NDArray[np.uint64]
Integers = NDArray[np.int64]
Doubles = NDArray[np.float64]
Flags = NDArray[np.bool_]

_WORD_BYTES = 8
_LONG_DIGITS = 18  # as many always fit into 64 bits
_DOUBLE_DIGITS = 15  # as many are below 2^53, so that each is a double exactly
_ZEROS = 0x3030303030303030
_TEN_POWERS = 10.0 ** np.arange(_DOUBLE_DIGITS + 1)
# What Arrow casts to the same double as Java, and never refuses: no plus sign, no suffix, no exponent out of range.
_ARROW_DOUBLE = r"^-?(?:[0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,2})?$"


def read_integers(texts: pa.Array, bits: int) -> tuple[Integers, Flags]:
    """Return the numbers, and which texts are one, as `read_integer` decides. Where there is none, or a null, it is 0."""
    assert bits in (INTEGER_BITS, LONG_BITS), bits
    plain = _Plain(texts)
    values, is_number = plain.read(plain.begins, plain.ends, _LONG_DIGITS)
    values = np.where(plain.is_negative, -values, values)
    if bits == INTEGER_BITS:
        is_number &= (values >= -(2**31)) & (values < 2**31)
    # An ASCII text that is neither that nor long is none, so that a column of other things is not read one by one.
    rest = np.flatnonzero(~is_number & (plain.ends > plain.begins))
    if len(rest):
        is_short = (plain.ends - plain.begins)[rest] <= _LONG_DIGITS
        rest = rest[~(is_short & _flags(pc.string_is_ascii(texts.take(pa.array(rest)))))]
        _read_each(texts, rest, values, is_number, lambda text: read_integer(text, bits))
    values[~is_number] = 0
    return values, is_number


def read_doubles(texts: pa.Array) -> tuple[Doubles, Flags]:
    """Return the numbers, and which texts are one, as `read_double` decides. Where there is none, or a null, it is 0."""
    plain = _Plain(texts)
    whole, is_number = plain.read(plain.begins, plain.ends, _DOUBLE_DIGITS)
    values = whole.astype(np.float64)
    rest = np.flatnonzero(~is_number & (plain.ends > plain.begins))
    if len(rest):
        _read_points(texts, plain, rest, values, is_number)
    values = np.where(plain.is_negative, -values, values)
    rest = rest[~is_number[rest]]
    if len(rest):
        odd = texts.take(pa.array(rest))
        is_known = _flags(pc.match_substring_regex(odd, _ARROW_DOUBLE))
        values[rest[is_known]] = pc.cast(odd.filter(pa.array(is_known)), pa.float64()).to_numpy()
        is_number[rest[is_known]] = True
        _read_each(texts, rest[~is_known], values, is_number, read_double)
    values[~is_number] = 0.0
    return values, is_number


def _read_points(texts: pa.Array, plain: "_Plain", rows: NDArray[np.intp], values: Doubles, is_number: Flags) -> None:
    """Read those of the rows that are digits with one decimal point, unsigned."""
    points = pc.fill_null(pc.find_substring(texts.take(pa.array(rows)), "."), -1).to_numpy()
    rows, points = rows[points >= 0], points[points >= 0]
    first, behind = plain.begins[rows], plain.ends[rows]
    point = plain.starts[rows] + points
    digit_count = behind - first - 1
    # Before and behind the point may be nothing, but not both.
    whole, has_whole = plain.read(first, point, _DOUBLE_DIGITS)
    part, has_part = plain.read(point + 1, behind, _DOUBLE_DIGITS)
    is_plain = (has_whole | (first == point)) & (has_part | (point + 1 == behind))
    is_plain &= (digit_count > 0) & (digit_count <= _DOUBLE_DIGITS)
    part_count = np.where(is_plain, behind - point - 1, 0)
    power = _TEN_POWERS[part_count]
    values[rows[is_plain]] = ((whole * power + part) / power)[is_plain]
    is_number[rows[is_plain]] = True


def _read_each(
    texts: pa.Array,
    rows: NDArray[np.intp],
    values: Integers | Doubles,
    is_number: Flags,
    read: Callable[[str], int | float | None],
) -> None:
    """Read the texts of these rows one by one, equal ones once."""
    if not len(rows):
        return
    coded = texts.take(pa.array(rows)).dictionary_encode()
    read_texts = [read(text) for text in coded.dictionary.to_pylist()]
    codes = coded.indices.to_numpy()
    is_number[rows] = np.array([value is not None for value in read_texts])[codes]
    values[rows] = np.array([0 if value is None else value for value in read_texts], values.dtype)[codes]


class _Plain:
    """Where each text lies in the column's bytes, its sign taken off: `[begins, ends)`. A null is an empty text."""

    def __init__(self, texts: pa.Array) -> None:
        _, offset_bytes, data_bytes = texts.buffers()
        offset_type = np.int64 if pa.types.is_large_string(texts.type) else np.int32
        offsets = np.frombuffer(offset_bytes, offset_type)[texts.offset : texts.offset + len(texts) + 1]
        offsets = offsets.astype(np.int64)
        self._bytes = np.frombuffer(data_bytes, np.uint8) if data_bytes else np.zeros(0, np.uint8)
        self.starts, self.ends = offsets[:-1], offsets[1:]
        if texts.null_count:
            self.ends = np.where(_flags(pc.is_null(texts)), self.starts, self.ends)
        firsts = self._bytes[np.minimum(self.starts, max(len(self._bytes) - 1, 0))] if len(self._bytes) else self.starts
        is_text = self.ends > self.starts
        self.is_negative = (firsts == ord("-")) & is_text
        self.begins = self.starts + (self.is_negative | ((firsts == ord("+")) & is_text))

    def read(self, begins: Integers, ends: Integers, digits_max: int) -> tuple[Integers, Flags]:
        """Return the numbers that the bytes of these ranges write, and which are one: 1 to `digits_max` ASCII digits."""
        counts = ends - begins
        is_number = (counts > 0) & (counts <= digits_max)
        values = np.zeros(len(counts), np.int64)
        rows = np.flatnonzero(is_number)
        for done in range(0, digits_max, _WORD_BYTES):
            rows = rows[counts[rows] > done]
            if not len(rows):
                break
            words = self._words(ends[rows] - done)
            part, is_part = _read_words(words, np.minimum(counts[rows] - done, _WORD_BYTES))
            values[rows] += part * 10**done
            is_number[rows[~is_part]] = False
        values[~is_number] = 0
        return values, is_number

    def _words(self, ends: Integers) -> Words:
        """Return the eight bytes in front of each end; in front of the first byte are zeros."""
        data = self._bytes
        if len(data) < _WORD_BYTES or ends.min() < _WORD_BYTES:
            data = np.concatenate([np.zeros(_WORD_BYTES, np.uint8), data[: ends.max()]])
            ends = ends + _WORD_BYTES
        words = np.ndarray((len(data) - _WORD_BYTES + 1,), "<u8", data, strides=(1,))
        return words[ends - _WORD_BYTES].astype(np.uint64, copy=False)


def _read_words(words: Words, counts: Integers) -> tuple[Integers, Flags]:
    """Return the numbers that the last `counts` bytes (1 to 8) of each word write, and which are all digits.

    The last byte of the text is the highest of the word. What stands in front of the number becomes zeros.
    """
    shifts = ((_WORD_BYTES - counts) * 8).astype(np.uint64)
    digits = words ^ np.uint64(_ZEROS)
    # Twice, because a shift by all 64 bits is none; counts are at least 1.
    digits = (digits >> shifts) << shifts
    is_number = (((digits + np.uint64(0x7676767676767676)) | digits) & np.uint64(0x8080808080808080)) == 0
    # Neighbours are joined: 8 digits to 4 pairs, to 2 fours, to the number.
    digits = ((digits * np.uint64(2561)) >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
    digits = ((digits * np.uint64(6553601)) >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
    digits = (digits * np.uint64(42949672960001)) >> np.uint64(32)
    return digits.view(np.int64), is_number


def _flags(array: pa.Array) -> Flags:
    """Return an Arrow boolean array as numpy's; nulls are false."""
    if array.null_count:
        array = pc.fill_null(array, False)
    flags: Flags = array.to_numpy(zero_copy_only=False)
    return flags
