"""Hashes of many texts at once: Java's, and numbers of 64 bits that tell texts apart.

A text is taken as words of eight bytes that end where it ends, zeros before its first byte: a zero in front changes
no Java hash. So all rows are hashed a word at a time, whatever their lengths, without a look at single characters.
A text in UTF-8 beyond ASCII is hashed as Java sees it, by its UTF-16 units, four to a word.

`java.string_hash` is the slow twin of the first.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.format.ragged import Bytes, Positions

Hashes: TypeAlias = NDArray[np.uint32]  # Java's int, as it is added and multiplied
Digests: TypeAlias = NDArray[np.uint64]

_WORD_BYTES = 8
_FEW_ROWS = 64  # when no more have a further word, all words that are left are taken at once
_ALL_BITS = 2**64 - 1
# How many bytes of a word belong to the text -> these bits: the last bytes are a little-endian word's highest.
_LAST_BYTES = np.array([_ALL_BITS << 8 * (_WORD_BYTES - n) & _ALL_BITS for n in range(_WORD_BYTES + 1)], np.uint64)

_EVEN_BYTES = np.uint64(0x00FF00FF00FF00FF)
_EVEN_PAIRS = np.uint64(0x0000FFFF0000FFFF)
_LOW_HALF = np.uint64(0xFFFFFFFF)

# Odd numbers without a pattern: the golden ratio's digits, and the factors of the SplitMix64 generator.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True, slots=True)
class _Words:
    """Words of some rows. `rows` None: one of every row, in order. `places` count from a text's last word.

    Where the place is one number no row comes twice.
    """

    rows: NDArray[np.intp] | None
    places: NDArray[np.int64] | int
    words: Digests

    def add_to(self, sums: NDArray[Any], values: NDArray[Any]) -> None:
        """Add the value of each word to its row's sum."""
        if self.rows is None:
            sums += values
        elif isinstance(self.places, int):
            sums[self.rows] += values
        else:
            np.add.at(sums, self.rows, values)


class TextHashes:
    """Hashes of the texts [begins, ends) of `data`, which come in its order and do not overlap."""

    def __init__(self, data: Bytes, begins: Positions, ends: Positions) -> None:
        self._data, self._begins, self._ends = data, begins, ends
        self._parts = _split(data, begins, ends)

    def java(self, before: Hashes | None = None) -> Hashes:
        """Return String#hashCode of each text (UTF-8), as unsigned numbers.

        Bytes that are no UTF-8 count as the replacement characters that a Java String would have. With `before`, the
        hash of what stands before each text (one element: before all of them), it is that of both together.
        """
        if not len(self._data) or self._data.view(np.int8).min() >= 0:
            parts, unit_bytes, hash_words = self._parts, 1, _hash_of_bytes
            begins, ends = self._begins, self._ends
        else:
            data, begins, ends = _as_utf16(self._data, self._begins, self._ends)
            parts, unit_bytes, hash_words = _split(data, begins, ends), 2, _hash_of_units
        hashes = np.zeros(len(begins), np.uint32)
        for part in parts:
            part.add_to(hashes, hash_words(part.words) * powers_of_31(part.places, _WORD_BYTES // unit_bytes))
        if before is not None:
            hashes += before * powers_of_31((ends - begins) // unit_bytes)
        return hashes

    def digests(self) -> Digests:
        """Return a number for each text, different ones for different texts but by chance.

        Texts that differ in one word of eight bytes never have the same.
        """
        sums = (self._ends - self._begins).view(np.uint64) * _GOLDEN
        for part in self._parts:
            # The place makes a difference, so that the same words in another order have another sum.
            place = np.array(part.places, np.int64).view(np.uint64) * _FACTORS[1]
            words = part.words + place
            words ^= words >> np.uint64(32)
            words *= _FACTORS[0]
            words ^= words >> np.uint64(29)
            part.add_to(sums, words)
        return sums


def scatter(numbers: Digests) -> Digests:
    """Spread every bit of each number over all of its bits, in place (the last steps of SplitMix64); returns them."""
    numbers ^= numbers >> np.uint64(30)
    numbers *= _FACTORS[0]
    numbers ^= numbers >> np.uint64(27)
    numbers *= _FACTORS[1]
    numbers ^= numbers >> np.uint64(31)
    return numbers


def powers_of_31(counts: NDArray[np.int64] | int, units: int = 1) -> Any:
    """Return 31 to the power of `counts * units`, modulo 2^32: what a hash is worth before so many more characters."""
    most = counts if isinstance(counts, int) else int(counts.max(initial=0))
    return _power_table(most.bit_length(), units)[counts]


@cache
def _power_table(bits: int, units: int) -> Hashes:
    factors = np.full(1 << bits, pow(31, units, 1 << 32), np.uint32)
    factors[0] = 1
    return np.multiply.accumulate(factors, dtype=np.uint32)


def _split(data: Bytes, begins: Positions, ends: Positions) -> list[_Words]:
    """Cut all texts into words: the last ones of all rows, the ones before, and so on."""
    padded = np.concatenate([np.zeros(_WORD_BYTES, np.uint8), data])
    # The word at a position of `data` is the one that ends there.
    view: Digests = np.ndarray((len(data) + 1,), "<u8", padded, strides=(1,))
    sizes = ends - begins
    rows: NDArray[np.intp] | None = None
    parts: list[_Words] = []
    done, longest, shortest = 0, int(sizes.max(initial=0)), int(sizes.min(initial=_ALL_BITS >> 1))
    is_regular = longest == shortest and ends[-1] - ends[0] == (len(ends) - 1) * longest  # one size, no gaps
    while done < longest:
        if shortest <= done:
            kept = np.flatnonzero(sizes > done)
            rows = kept if rows is None else rows[kept]
            ends, sizes = ends[kept], sizes[kept]
            shortest = int(sizes.min())
            if len(rows) <= _FEW_ROWS:
                return [*parts, _split_rest(view, rows, ends, sizes, done)]
        if is_regular:  # no need to look up where each text ends
            words: Digests = np.ndarray((len(ends),), "<u8", padded, int(ends[0]) - done, (longest,)).copy()
        else:
            words = view[ends - done]
        if shortest < done + _WORD_BYTES:
            left = longest - done if longest == shortest else sizes - done
            words &= _LAST_BYTES[np.minimum(left, _WORD_BYTES)]
        parts.append(_Words(rows, len(parts), words))
        done += _WORD_BYTES
    return parts


def _split_rest(view: Digests, rows: NDArray[np.intp], ends: Positions, sizes: NDArray[np.int64], done: int) -> _Words:
    """Cut what is left of a few texts, maybe long ones, behind their last `done` bytes."""
    counts = (sizes - done + _WORD_BYTES - 1) // _WORD_BYTES
    which = np.repeat(np.arange(len(counts)), counts)
    places = np.arange(len(which)) - (np.cumsum(counts) - counts)[which] + done // _WORD_BYTES
    behind = places * _WORD_BYTES
    words = view[ends[which] - behind] & _LAST_BYTES[np.minimum(sizes[which] - behind, _WORD_BYTES)]
    return _Words(rows[which], places, words)


def _hash_of_bytes(words: Digests) -> Hashes:
    """Return the Java hash of eight characters below 256 in each word, the first one in the lowest byte.

    Neighbours are joined, then pairs, then fours; every step has room for its sums.
    """
    pairs = (words & _EVEN_BYTES) * np.uint64(31)
    pairs += (words >> np.uint64(8)) & _EVEN_BYTES
    fours = (pairs & _EVEN_PAIRS) * np.uint64(31**2)
    fours += (pairs >> np.uint64(16)) & _EVEN_PAIRS
    return _joined(fours, 31**4)


def _hash_of_units(words: Digests) -> Hashes:
    """Return the Java hash of four UTF-16 units in each word, the first one in the lowest bytes."""
    pairs = (words & _EVEN_PAIRS) * np.uint64(31)
    pairs += (words >> np.uint64(16)) & _EVEN_PAIRS
    return _joined(pairs, 31**2)


def _joined(halves: Digests, power: int) -> Hashes:
    whole = (halves & _LOW_HALF) * np.uint64(power)
    whole += halves >> np.uint64(32)
    return whole.astype(np.uint32)


def _as_utf16(data: Bytes, begins: Positions, ends: Positions) -> tuple[Bytes, Positions, Positions]:
    """Return the texts as little-endian UTF-16 in one run, and where each begins and ends in it, in bytes."""
    raw = data.tobytes()
    try:
        units = raw.decode("utf-8").encode("utf-16-le")
    except UnicodeDecodeError:
        # Decoded one by one: broken bytes at the end of one text must not swallow the beginning of the next.
        texts = (raw[begin:end].decode("utf-8", "replace") for begin, end in zip(begins, ends, strict=True))
        parts = [text.encode("utf-16-le") for text in texts]
        last = np.cumsum([len(part) for part in parts], dtype=np.int64)
        return np.frombuffer(b"".join(parts), np.uint8), np.concatenate([[0], last[:-1]]), last
    # A character takes a unit where its first byte stands, and one more if that is 0xF0 or above.
    before = np.zeros(len(data) + 1, np.int64)
    np.cumsum(((data & 0xC0) != 0x80).astype(np.int8) + (data >= 0xF0), out=before[1:])
    return np.frombuffer(units, np.uint8), before[begins] * 2, before[ends] * 2
