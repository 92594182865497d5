"""Columns of property texts for SQL92 filters, and their numbers as Java parses them.

A column has null for a message that does not have the property. In a dictionary column each distinct value is tested
once.

`read_integers` and `read_doubles` return, for each text of a column, the number that `read_integer` and `read_double`
of the lexer return. Digits are parsed eight at a time, from the last bytes of each text as one 64-bit word. The digits
before and after a decimal point are parsed in the same way. If the integer of all digits and the power of ten are exact
as doubles, their quotient is rounded only once, so it is the nearest double, as in Java. Arrow casts the other texts
that are plain decimal numbers. The remaining texts are parsed one by one, each distinct text once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.filter.sql92_lexer import INTEGER_BITS, LONG_BITS, read_double, read_integer

Words: TypeAlias = NDArray[np.uint64]
Positions: TypeAlias = NDArray[np.int64]
Doubles: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]
_BLOCK_ROWS = 16384  # the arrays of one block fit into a core's cache
_WORD_BYTES = 8
_DIGITS_MAX = 19  # the number of digits that always fit into an unsigned 64-bit integer
_EXACT_DOUBLE = 2**53  # integers up to this one are exact as doubles
_EXACT_POWER = 22  # powers of ten up to this one are exact as doubles
_TEN_POWERS = np.array([10**power for power in range(_DIGITS_MAX + 1)], np.uint64)
_TEN_POWERS_DOUBLE = np.array([float(10**power) for power in range(_EXACT_POWER + 1)])

# Indexed by the number of digits in a word: the mask of their bytes, which are the highest bytes of the word.
_KEPT = np.array([2**64 - 2 ** (64 - 8 * count) for count in range(_WORD_BYTES + 1)], np.uint64)
_ZEROS = np.uint64(0x3030303030303030)
_ABOVE_NINE = np.uint64(0x7676767676767676)  # added to a byte above 9, it sets the byte's highest bit
_HIGHEST_BITS = np.uint64(0x8080808080808080)

# The texts that every version of Arrow casts to the same double as Java: without a plus before the number, a type
# suffix, or an exponent that may be out of range.
_ARROW_DOUBLE = r"^-?(?:[0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,2})?$"


def _byte_table(characters: str, others: range) -> Flags:
    table = np.zeros(256, np.bool_)
    table[[ord(character) for character in characters]] = True
    table[others] = True
    return table


# The bytes with which a number can begin (after its sign) and end. A text with other bytes there is not a number.
_DIGITS = "0123456789"
_INTEGER_BYTES = _byte_table(_DIGITS, range(0x80, 0x100))
_DOUBLE_BEGINS = _byte_table(_DIGITS + ".NI+-", range(0x21))
_DOUBLE_ENDS = _byte_table(_DIGITS + ".NydfDF", range(0x21))


def read_integers(texts: pa.Array, bits: int) -> tuple[Positions, Flags]:
    """Parse each text as `read_integer` does. Return the integers, and for each text whether it is valid.

    An invalid text and a null have the integer 0.
    """
    assert bits in (INTEGER_BITS, LONG_BITS), bits
    return _by_blocks(texts, np.dtype(np.int64), lambda block: _read_integer_block(block, bits))


def read_doubles(texts: pa.Array) -> tuple[Doubles, Flags]:
    """Parse each text as `read_double` does. Return the doubles, and for each text whether it is valid.

    An invalid text and a null have the double 0.
    """
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
    values = sizes.view(np.int64)  # 2^63 becomes -2^63, which is its own negative
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
    """Parse those of `rows` that are digits with one decimal point. The results go to `values`, without the sign.

    Return the rows that are not parsed, and for each of them whether Arrow can cast it, because it is such a number and
    only has too many digits.
    """
    if not len(rows):
        return rows, np.zeros(0, np.bool_)
    found = pc.fill_null(pc.find_substring(_take(texts, rows), "."), -1).to_numpy()
    begins, ends = layout.begins[rows], layout.ends[rows]
    points = np.where(found < 0, ends, layout.starts[rows] + found)  # the end of the text if it has no point
    part_begins = np.minimum(points + 1, ends)
    whole, is_whole = layout.read(begins, points)
    part, is_part = layout.read(part_begins, ends)
    # Either side of the point may be empty, but not both.
    is_plain = (is_whole | (begins == points)) & (is_part | (part_begins == ends)) & (is_whole | is_part)
    part_counts = np.where(is_plain, ends - part_begins, 0)
    is_plain &= (found >= 0) & (points - begins + part_counts <= _DIGITS_MAX)
    numbers = whole * _TEN_POWERS[part_counts] + part
    is_exact = is_plain & (numbers <= _EXACT_DOUBLE)
    read_rows = rows[is_exact]
    values[read_rows] = (numbers / _TEN_POWERS_DOUBLE[part_counts])[is_exact]
    is_number[read_rows] = True
    # Not every version of Arrow accepts a plus sign.
    is_decimal = is_plain & ((begins == layout.starts[rows]) | layout.is_negative[rows])
    return rows[~is_exact], is_decimal[~is_exact]


def _read_each(
    texts: pa.Array,
    rows: NDArray[np.intp],
    values: NDArray[Any],
    is_number: Flags,
    read: Callable[[str], int | float | None],
) -> None:
    """Parse the texts of `rows` one by one with `read`, but equal texts only once. Sets `values` and `is_number`."""
    if not len(rows):
        return
    coded = _take(texts, rows).dictionary_encode()
    read_texts = [read(text) for text in coded.dictionary.to_pylist()]
    codes = coded.indices.to_numpy()
    is_number[rows] = np.array([value is not None for value in read_texts])[codes]
    values[rows] = np.array([0 if value is None else value for value in read_texts], values.dtype)[codes]


class _Layout:
    """The bytes of all texts of a column, and the position of each text in them.

    A text is at `bytes[starts:ends]`, and without its sign at `bytes[begins:ends]`. A null is an empty text.
    """

    def __init__(self, texts: pa.Array) -> None:
        _, offset_bytes, data_bytes = texts.buffers()
        offset_type = np.int64 if pa.types.is_large_string(texts.type) else np.int32
        offsets = np.frombuffer(offset_bytes, offset_type)[texts.offset : texts.offset + len(texts) + 1]
        data = np.frombuffer(data_bytes, np.uint8) if data_bytes else np.zeros(0, np.uint8)
        # There are eight bytes before the first text, so that eight bytes can be read before the end of every text, and
        # one byte after the last text.
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
        """Parse the bytes of the ranges `[begins, ends)`. Return the numbers, and for each range whether it is valid.

        A valid range has 1 to 19 ASCII digits and nothing else.
        """
        counts = ends - begins
        is_number = (counts > 0) & (counts <= _DIGITS_MAX)
        values = np.zeros(len(counts), np.uint64)
        for done in range(0, _DIGITS_MAX, _WORD_BYTES):
            more = counts > done
            more_count = np.count_nonzero(more)
            if not more_count:
                break
            # If most texts are longer, selecting their rows costs more than reading all rows.
            rows = np.flatnonzero(more) if more_count * 4 < len(counts) else slice(None)
            words = self._words[np.maximum(ends[rows] - (done + _WORD_BYTES), 0)]
            part, is_part = _read_words(words, np.clip(counts[rows] - done, 0, _WORD_BYTES))
            values[rows] += part * np.uint64(10**done)
            is_number[rows] &= is_part
        return values, is_number

    def other_rows(self, is_number: Flags, first_bytes: Flags, last_bytes: Flags) -> NDArray[np.intp]:
        """Return the rows that are not parsed yet and may be numbers, judging by their first and last bytes.

        `first_bytes` and `last_bytes` have, for each byte, whether a number may begin or end with it.
        """
        rows: NDArray[np.intp] = np.flatnonzero(~is_number & (self.ends > self.begins))
        is_open: Flags = first_bytes[self.bytes[self.begins[rows]]] & last_bytes[self.bytes[self.ends[rows] - 1]]
        return rows[is_open]


def _read_words(words: Words, counts: Positions) -> tuple[Words, Flags]:
    """Parse the last `counts` bytes (0 to 8) of each word.

    Return the numbers, and for each word whether those bytes are all digits. The last byte of a text is the highest
    byte of its word. The bytes before the number are replaced by zeros.
    """
    digits = (words ^ _ZEROS) & _KEPT[counts]
    is_number = (((digits + _ABOVE_NINE) | digits) & _HIGHEST_BITS) == 0
    # Adjacent groups are combined in three steps: 8 digits, 4 pairs, 2 groups of four digits, the number.
    digits = ((digits * np.uint64(10 << 8 | 1)) >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
    digits = ((digits * np.uint64(100 << 16 | 1)) >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
    return (digits * np.uint64(10000 << 32 | 1)) >> np.uint64(32), is_number


def _take(texts: pa.Array, rows: NDArray[np.intp]) -> pa.Array:
    return texts if len(rows) == len(texts) else texts.take(pa.array(rows))


def as_flags(array: pa.Array) -> Flags:
    """Return an Arrow boolean array as a numpy array, with False for nulls."""
    if array.null_count:
        array = pc.fill_null(array, False)
    flags: Flags = array.to_numpy(zero_copy_only=False)
    return flags


_Item = TypeVar("_Item", bound=np.generic)
_FOUND_BY = {"CONTAINS": pc.match_substring, "STARTSWITH": pc.starts_with, "ENDSWITH": pc.ends_with}


@dataclass(frozen=True, slots=True)
class TextColumn:
    """A column of texts, created by `text_column`. Its methods return an array with a flag or number for each row.

    The texts are `values[codes]`, or `values` if `codes` is None. Where the property is null, the text is arbitrary.
    """

    values: pa.Array
    codes: NDArray[np.int64] | None = None
    _numbers: dict[int, tuple[NDArray[np.generic], Flags]] = field(default_factory=dict)

    def is_in(self, texts: Sequence[str]) -> Flags:
        """Return, for each row, whether it equals one of the texts."""
        if len(texts) == 1:
            return self._spread(as_flags(pc.equal(self.values, pa.scalar(texts[0], self.values.type))))
        return self._spread(as_flags(pc.is_in(self.values, value_set=pa.array(texts, self.values.type))))

    def equals(self, other: "TextColumn") -> Flags:
        """Return, for each row, whether it equals the same row of the other column."""
        left, right = self._decoded(), other._decoded()
        if left.type != right.type:
            left, right = left.cast(pa.large_string()), right.cast(pa.large_string())
        return as_flags(pc.equal(left, right))

    def has(self, how: str, text: str) -> Flags:
        """Return, for each row, whether it contains, starts with or ends with the text.

        `how` is CONTAINS, STARTSWITH or ENDSWITH.
        """
        return self._spread(as_flags(_FOUND_BY[how](self.values, pattern=text)))

    def booleans(self) -> Flags:
        """Return the Boolean#valueOf of each row."""
        return self._spread(as_flags(pc.equal(pc.ascii_lower(self.values), pa.scalar("true", self.values.type))))

    def integers(self, bits: int) -> tuple[NDArray[np.int64], Flags]:
        """Parse each row as Integer#valueOf (32 `bits`) or Long#valueOf (64) does.

        Return the integers, and for each row whether it is valid.
        """
        values, is_number = self._read(bits, lambda texts: read_integers(texts, bits))
        return self._spread(values.astype(np.int64, copy=False)), self._spread(is_number)

    def doubles(self) -> tuple[NDArray[np.float64], Flags]:
        """Parse each row as Double#valueOf does. Return the doubles, and for each row whether it is valid."""
        values, is_number = self._read(0, read_doubles)
        return self._spread(values.astype(np.float64, copy=False)), self._spread(is_number)

    def _read(
        self, key: int, read: Callable[[pa.Array], tuple[NDArray[np.generic], Flags]]
    ) -> tuple[NDArray[np.generic], Flags]:
        """Parse the column and keep the result, because BETWEEN and similar conditions need it twice."""
        if key not in self._numbers:
            self._numbers[key] = read(self.values)
        return self._numbers[key]

    def _spread(self, by_value: NDArray[_Item]) -> NDArray[_Item]:
        return by_value if self.codes is None else by_value[self.codes]

    def _decoded(self) -> pa.Array:
        return self.values if self.codes is None else self.values.take(pa.array(self.codes))


def text_column(array: pa.Array) -> tuple[TextColumn, Flags | None]:
    """Return the column of a string, large_string or dictionary array, and for each row whether it is null.

    The second result is None if no row is null.
    """
    is_null = as_flags(pc.is_null(array)) if array.null_count else None
    if not pa.types.is_dictionary(array.type):
        return TextColumn(_as_texts(array)), is_null
    values = _as_texts(array.dictionary)
    if values.null_count or not len(values):  # rare, so the array is simply decoded
        return text_column(array.cast(values.type))
    codes = pc.fill_null(array.indices, 0) if array.indices.null_count else array.indices
    return TextColumn(values, codes.to_numpy().astype(np.int64, copy=False)), is_null


def _as_texts(array: pa.Array) -> pa.Array:
    return array if pa.types.is_string(array.type) or pa.types.is_large_string(array.type) else array.cast(pa.string())
