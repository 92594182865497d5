"""How Java reads the numbers of a whole column of texts: the same answers as `sql92_numbers`, by the column.

Plain digits are read eight at a time: the last bytes of every text in one gather, as one 64-bit word, and then a few
operations on words. Decimal points are found by Arrow and both sides read in this way; the quotient of two whole
numbers that are doubles exactly is rounded once, so it is the nearest double, as Java's is. Other decimal forms that
Arrow knows are cast by it, and what then remains is read text by text, each distinct one once.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.filter.sql92_numbers import INTEGER_BITS, LONG_BITS, read_double, read_integer

Words: TypeAlias = NDArray[np.uint64]
Positions: TypeAlias = NDArray[np.int64]
Doubles: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]

_BLOCK_ROWS = 16384  # what is in work fits into a core's cache
_WORD_BYTES = 8
_DIGITS_MAX = 19  # as many fit into an unsigned 64-bit number
_EXACT_DOUBLE = 2**53  # whole numbers up to it are doubles exactly, and so are
_EXACT_POWER = 22  # the powers of ten up to this one
_TEN_POWERS = np.array([10**power for power in range(_DIGITS_MAX + 1)], np.uint64)
_TEN_POWERS_DOUBLE = np.array([float(10**power) for power in range(_EXACT_POWER + 1)])

# By number of digits: the bytes of a word that they take, which are its highest.
_KEPT = np.array([2**64 - 2 ** (64 - 8 * count) for count in range(_WORD_BYTES + 1)], np.uint64)
_ZEROS = np.uint64(0x3030303030303030)
_ABOVE_NINE = np.uint64(0x7676767676767676)  # added to a byte above 9 it sets the byte's highest bit
_HIGHEST_BITS = np.uint64(0x8080808080808080)

# What every Arrow casts to the same double as Java, and never refuses: no plus, no suffix, no exponent out of range.
_ARROW_DOUBLE = r"^-?(?:[0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,2})?$"


def _byte_table(characters: str, others: range) -> Flags:
    table = np.zeros(256, np.bool_)
    table[[ord(character) for character in characters]] = True
    table[others] = True
    return table


# How a text that is a number can begin (behind its sign) and end; a text of other things is refused by that alone.
_DIGITS = "0123456789"
_INTEGER_BYTES = _byte_table(_DIGITS, range(0x80, 0x100))
_DOUBLE_BEGINS = _byte_table(_DIGITS + ".NI+-", range(0x21))
_DOUBLE_ENDS = _byte_table(_DIGITS + ".NydfDF", range(0x21))


def read_integers(texts: pa.Array, bits: int) -> tuple[Positions, Flags]:
    """Return the numbers, and which texts are one, as `read_integer` decides; 0 where there is none."""
    assert bits in (INTEGER_BITS, LONG_BITS), bits
    return _by_blocks(texts, np.dtype(np.int64), lambda block: _read_integer_block(block, bits))


def read_doubles(texts: pa.Array) -> tuple[Doubles, Flags]:
    """Return the numbers, and which texts are one, as `read_double` decides; 0 where there is none."""
    return _by_blocks(texts, np.dtype(np.float64), _read_double_block)


def _by_blocks(
    texts: pa.Array, number_type: np.dtype[Any], read: Callable[[pa.Array], tuple[NDArray[Any], Flags]]
) -> tuple[NDArray[Any], Flags]:
    values, is_number = np.zeros(len(texts), number_type), np.zeros(len(texts), np.bool_)
    for begin in range(0, len(texts), _BLOCK_ROWS):
        block = slice(begin, begin + _BLOCK_ROWS)
        values[block], is_number[block] = read(texts[block])
    return values, is_number


def _read_integer_block(texts: pa.Array, bits: int) -> tuple[Positions, Flags]:
    layout = _Layout(texts)
    sizes, is_number = layout.read(layout.begins, layout.ends)
    is_number &= sizes <= np.uint64(2 ** (bits - 1) - 1) + layout.is_negative
    values = sizes.view(np.int64)  # 2^63 becomes -2^63, which is meant
    values = np.where(layout.is_negative, -values, values)
    if not is_number.all():
        rest = layout.other_rows(is_number, _INTEGER_BYTES, _INTEGER_BYTES)
        if len(rest):
            is_short = layout.ends[rest] - layout.begins[rest] <= _DIGITS_MAX
            rest = rest[~(is_short & as_flags(pc.string_is_ascii(_take(texts, rest))))]
        _read_each(texts, rest, values, is_number, lambda text: read_integer(text, bits))
        values[~is_number] = 0
    return values, is_number


def _read_double_block(texts: pa.Array) -> tuple[Doubles, Flags]:
    layout = _Layout(texts)
    whole, is_number = layout.read(layout.begins, layout.ends)
    values = whole.astype(np.float64)
    rest, is_decimal = np.zeros(0, np.intp), np.zeros(0, np.bool_)
    if not is_number.all():
        rest = layout.other_rows(is_number, _DOUBLE_BEGINS, _DOUBLE_ENDS)
        rest, is_decimal = _read_points(texts, layout, rest, values, is_number)
    values = np.where(layout.is_negative, -values, values)
    if len(rest):
        odd, is_cast = _take(texts, rest), is_decimal
        if not is_cast.all():
            others = np.flatnonzero(~is_cast)
            is_cast[others] = as_flags(pc.match_substring_regex(_take(odd, others), _ARROW_DOUBLE))
        values[rest[is_cast]] = pc.cast(odd.filter(pa.array(is_cast)), pa.float64()).to_numpy()
        is_number[rest[is_cast]] = True
        _read_each(texts, rest[~is_cast], values, is_number, read_double)
    if not is_number.all():
        values[~is_number] = 0.0
    return values, is_number


def _read_points(
    texts: pa.Array, layout: "_Layout", rows: NDArray[np.intp], values: Doubles, is_number: Flags
) -> tuple[NDArray[np.intp], Flags]:
    """Read those of the rows that are digits with one decimal point, unsigned.

    Returns the other rows, and which of them are only too long for that: Arrow casts these to the nearest double.
    """
    if not len(rows):
        return rows, np.zeros(0, np.bool_)
    found = pc.fill_null(pc.find_substring(_take(texts, rows), "."), -1).to_numpy()
    begins, ends = layout.begins[rows], layout.ends[rows]
    points = np.where(found < 0, ends, layout.starts[rows] + found)  # without one the digits end where the text does
    part_begins = np.minimum(points + 1, ends)
    whole, is_whole = layout.read(begins, points)
    part, is_part = layout.read(part_begins, ends)
    # Before and behind the point may be nothing, but not both.
    is_plain = (is_whole | (begins == points)) & (is_part | (part_begins == ends)) & (is_whole | is_part)
    part_counts = np.where(is_plain, ends - part_begins, 0)
    is_plain &= (found >= 0) & (points - begins + part_counts <= _DIGITS_MAX)
    numbers = whole * _TEN_POWERS[part_counts] + part
    is_exact = is_plain & (numbers <= _EXACT_DOUBLE)
    read_rows = rows[is_exact]
    values[read_rows] = (numbers / _TEN_POWERS_DOUBLE[part_counts])[is_exact]
    is_number[read_rows] = True
    # Not every Arrow takes a plus sign.
    is_decimal = is_plain & ((begins == layout.starts[rows]) | layout.is_negative[rows])
    return rows[~is_exact], is_decimal[~is_exact]


def _read_each(
    texts: pa.Array,
    rows: NDArray[np.intp],
    values: NDArray[Any],
    is_number: Flags,
    read: Callable[[str], int | float | None],
) -> None:
    """Read the texts of these rows one by one, equal ones once."""
    if not len(rows):
        return
    coded = _take(texts, rows).dictionary_encode()
    read_texts = [read(text) for text in coded.dictionary.to_pylist()]
    codes = coded.indices.to_numpy()
    is_number[rows] = np.array([value is not None for value in read_texts])[codes]
    values[rows] = np.array([0 if value is None else value for value in read_texts], values.dtype)[codes]


class _Layout:
    """Where each text lies in `bytes`: `[starts, ends)`, and from `begins` on without its sign. A null is empty."""

    def __init__(self, texts: pa.Array) -> None:
        _, offset_bytes, data_bytes = texts.buffers()
        offset_type = np.int64 if pa.types.is_large_string(texts.type) else np.int32
        offsets = np.frombuffer(offset_bytes, offset_type)[texts.offset : texts.offset + len(texts) + 1]
        data = np.frombuffer(data_bytes, np.uint8) if data_bytes else np.zeros(0, np.uint8)
        # With eight bytes in front, so that a whole word ends at each text's end, and one behind the last.
        self.bytes = np.zeros(_WORD_BYTES + int(offsets[-1] - offsets[0]) + 1, np.uint8)
        self.bytes[_WORD_BYTES:-1] = data[offsets[0] : offsets[-1]]
        self._words: Words = np.ndarray((len(self.bytes) - _WORD_BYTES,), "<u8", self.bytes, strides=(1,))
        positions = offsets.astype(np.int64) + (_WORD_BYTES - int(offsets[0]))
        self.starts, self.ends = positions[:-1], positions[1:]
        if texts.null_count:
            self.ends = np.where(as_flags(pc.is_null(texts)), self.starts, self.ends)
        firsts = self.bytes[self.starts]
        is_text = self.ends > self.starts
        self.is_negative = (firsts == ord("-")) & is_text
        self.begins = self.starts + (self.is_negative | ((firsts == ord("+")) & is_text))

    def read(self, begins: Positions, ends: Positions) -> tuple[Words, Flags]:
        """Return the numbers that the bytes of these ranges write, and which are one: 1 to 19 ASCII digits."""
        counts = ends - begins
        is_number = (counts > 0) & (counts <= _DIGITS_MAX)
        values = np.zeros(len(counts), np.uint64)
        for done in range(0, _DIGITS_MAX, _WORD_BYTES):
            more = counts > done
            more_count = np.count_nonzero(more)
            if not more_count:
                break
            # Where most texts are longer, picking them out costs more than to look at all of them.
            rows = np.flatnonzero(more) if more_count * 4 < len(counts) else slice(None)
            words = self._words[np.maximum(ends[rows] - (done + _WORD_BYTES), 0)]
            part, is_part = _read_words(words, np.clip(counts[rows] - done, 0, _WORD_BYTES))
            values[rows] += part * np.uint64(10**done)
            is_number[rows] &= is_part
        return values, is_number

    def other_rows(self, is_number: Flags, first_bytes: Flags, last_bytes: Flags) -> NDArray[np.intp]:
        """Return the rows that are not read yet and may be a number by their first byte and their last one."""
        rows: NDArray[np.intp] = np.flatnonzero(~is_number & (self.ends > self.begins))
        is_open: Flags = first_bytes[self.bytes[self.begins[rows]]] & last_bytes[self.bytes[self.ends[rows] - 1]]
        return rows[is_open]


def _read_words(words: Words, counts: Positions) -> tuple[Words, Flags]:
    """Return the numbers that the last `counts` bytes (0 to 8) of each word write, and which are all digits.

    The last byte of the text is the highest of the word. What stands in front of the number becomes zeros.
    """
    digits = (words ^ _ZEROS) & _KEPT[counts]
    is_number = (((digits + _ABOVE_NINE) | digits) & _HIGHEST_BITS) == 0
    # Neighbours are joined: 8 digits to 4 pairs, to 2 fours, to the number.
    digits = ((digits * np.uint64(10 << 8 | 1)) >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
    digits = ((digits * np.uint64(100 << 16 | 1)) >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
    return (digits * np.uint64(10000 << 32 | 1)) >> np.uint64(32), is_number


def _take(texts: pa.Array, rows: NDArray[np.intp]) -> pa.Array:
    return texts if len(rows) == len(texts) else texts.take(pa.array(rows))


def as_flags(array: pa.Array) -> Flags:
    """Return an Arrow boolean array as numpy's; nulls are false."""
    if array.null_count:
        array = pc.fill_null(array, False)
    flags: Flags = array.to_numpy(zero_copy_only=False)
    return flags
