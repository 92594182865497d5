"""Message ids: parse and encode offsetMsgId and UNIQ_KEY, create UNIQ_KEYs in bulk, and hash many texts at once.

| id | its bytes, which are written as hex digits |
| --- | --- |
| offsetMsgId | store host: address (4 or 16), port (4); physical offset (8) |
| UNIQ_KEY | address (4 or 16), process id (2), class loader's hash (4), ms since the month's begin (4), counter (2) |

Both ids have 32 upper-case hex digits, or 56 if the address is an IPv6 address. So the text alone does not show which
of them it is. Clients other than RocketMQ's may write other texts as UNIQ_KEY.

`UniqueIds` creates UNIQ_KEYs that never repeat. In RocketMQ's clients the counter restarts at 0 after 65535, even in
the same millisecond. Here milliseconds and counter form one number of 48 bits, so an overflow of the counter increases
the milliseconds. 32 random bits replace the class loader's hash. Address, process id and approximate time can still be
read from such a key (MessageClientIDSetter#getNearlyTimeFromID).

`TextHashes` computes Java's hash and a 64-bit digest of many texts. It splits each text into words of eight bytes, so
that the last word ends at the end of the text. The first word is filled with zeros at its begin, which do not change
Java's hash. So all texts are hashed word by word, even if their sizes differ. If a text is not ASCII, the texts are
converted to UTF-16 first, so that a word has four units. The tests compare the hashes with `java.string_hash`.

Source: MessageDecoder#createMessageId, #decodeMessageId, MessageClientIDSetter#createUniqID (4.9, 5.3).
"""

import datetime
import ipaddress
import struct
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.byte_ranges import Bytes, Positions
from rmq_spark.store.format.java import Host, decode_host, encode_host, string_hash

_V4_DIGITS, _V6_DIGITS = 32, 56
_UNIQUE_TAIL = struct.Struct(">HIIH")  # process id, hash, ms, counter

_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class OffsetMessageId:
    """An offsetMsgId: the host of the broker that stored the message, and the record's physical offset (bytes).

    str() returns the id as text.
    """

    store_host: Host
    physical_offset: int

    def __str__(self) -> str:
        return (encode_host(self.store_host) + struct.pack(">q", self.physical_offset)).hex().upper()


@dataclass(frozen=True, slots=True)
class UniqueKey:
    """The parts of a UNIQ_KEY. The numbers are unsigned, with 16, 32, 32 and 16 bits. str() returns the key as text.

    `month_ms` is the time since the begin of the month in the producer's time zone. The key contains neither the month
    nor the time zone.
    """

    ip: str
    pid: int
    class_hash: int
    month_ms: int
    counter: int

    def __str__(self) -> str:
        tail = _UNIQUE_TAIL.pack(self.pid, self.class_hash, self.month_ms, self.counter)
        return (ipaddress.ip_address(self.ip).packed + tail).hex().upper()

    def advance(self, count: int) -> "UniqueKey":
        """Return the key whose counter is greater by `count`. An overflow of the counter increases the milliseconds.

        The keys repeat after 2^48 steps. RocketMQ's own keys repeat after 65536 in the same millisecond.
        """
        number = ((self.month_ms << 16 | self.counter) + count) & ((1 << _NUMBER_BITS) - 1)
        return replace(self, month_ms=number >> 16, counter=number & 0xFFFF)


def make_unique_key(ip: str, pid: int, class_hash: int, month_ms: int, counter: int = 0) -> UniqueKey:
    """Return a key from numbers of any size. Each number is truncated to its low bits, as by Java's casts."""
    bits16, bits32 = 0xFFFF, 0xFFFFFFFF
    return UniqueKey(ip, pid & bits16, class_hash & bits32, month_ms & bits32, counter & bits16)


def parse_offset_message_id(text: str) -> OffsetMessageId:
    """Parse an offsetMsgId in upper or lower case. Raises OptionError if `text` is not a valid one."""
    data = _hex_bytes(text, "offsetMsgId")
    host = decode_host(data[:-8])
    (physical_offset,) = struct.unpack(">q", data[-8:])
    if not 0 <= host.port <= _MAX_PORT or physical_offset < 0:
        raise OptionError(
            f"message id {text!r} is not an offsetMsgId: it has port {host.port} and physical offset "
            f"{physical_offset}; expected a port from 0 to {_MAX_PORT} and an offset >= 0. If it is a UNIQ_KEY, "
            "search for it in its topic."
        )
    return OffsetMessageId(host, physical_offset)


def may_be_offset_message_id(text: str) -> bool:
    """Return whether `text` is a valid offsetMsgId. About one in 65536 UNIQ_KEYs is a valid offsetMsgId too."""
    try:
        parse_offset_message_id(text)
    except OptionError:
        return False
    return True


def parse_unique_key(text: str) -> UniqueKey:
    """Parse a UNIQ_KEY. Raises OptionError if `text` does not have the form that RocketMQ's Java clients write."""
    data = _hex_bytes(text, "UNIQ_KEY")
    head, tail = data[: -_UNIQUE_TAIL.size], data[-_UNIQUE_TAIL.size :]
    return UniqueKey(str(ipaddress.ip_address(head)), *_UNIQUE_TAIL.unpack(tail))


def _hex_bytes(text: str, kind: str) -> bytes:
    digits = text.isascii() and text.isalnum()
    if len(text) in (_V4_DIGITS, _V6_DIGITS) and digits:
        try:
            return bytes.fromhex(text)
        except ValueError:
            pass  # letters after F
    shown = repr(text) if len(text) <= 80 else f"{text[:80]!r}…"
    raise OptionError(
        f"message id {shown} of {len(text)} characters is not a valid {kind}; expected {_V4_DIGITS} hex digits, or "
        f"{_V6_DIGITS} for a host with an IPv6 address"
    )


Hashes: TypeAlias = NDArray[np.uint32]  # Java hashes; Java's int is signed, and these are unsigned for arithmetic
Digests: TypeAlias = NDArray[np.uint64]
_WORD_BYTES = 8
_FEW_ROWS = 64  # if at most this many rows have more words, all their words are split in one step
_ALL_BITS = 2**64 - 1
# How many bytes of a word belong to the text -> mask for them. They are the last bytes of the word, and so the highest
# bytes of a little-endian number.
_LAST_BYTES = np.array([_ALL_BITS << 8 * (_WORD_BYTES - n) & _ALL_BITS for n in range(_WORD_BYTES + 1)], np.uint64)
_EVEN_BYTES = np.uint64(0x00FF00FF00FF00FF)
_EVEN_PAIRS = np.uint64(0x0000FFFF0000FFFF)
_LOW_HALF = np.uint64(0xFFFFFFFF)

# Odd factors with irregular bits: the digits of the golden ratio, and the factors of the random generator SplitMix64.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True, slots=True)
class _Words:
    """Words of the texts of some rows. If `rows` is None, there is one word for each row, in order.

    `positions` are the numbers of the words, counted from the end of their texts. If it is a single number, no row
    occurs twice in `rows`.
    """

    rows: NDArray[np.intp] | None
    positions: NDArray[np.int64] | int
    words: Digests

    def add_to(self, sums: NDArray[Any], values: NDArray[Any]) -> None:
        """Add the value of each word to the sum of its row."""
        if self.rows is None:
            sums += values
        elif isinstance(self.positions, int):
            sums[self.rows] += values
        else:
            np.add.at(sums, self.rows, values)


class TextHashes:
    """Computes hashes of the texts [begins, ends) in `data`. The texts must be ascending and must not overlap."""

    def __init__(self, data: Bytes, begins: Positions, ends: Positions) -> None:
        self._data, self._begins, self._ends = data, begins, ends
        self._parts = _split(data, begins, ends)

    def java(self, before: Hashes | None = None) -> Hashes:
        """Return Java's String#hashCode of each text (UTF-8), as unsigned numbers.

        Invalid UTF-8 is treated as replacement characters, as in a Java String. To hash a prefix together with each
        text, give the hashes of the prefixes as `before`, or one hash if the prefix is the same for all texts.
        """
        if not len(self._data) or self._data.view(np.int8).min() >= 0:
            parts, unit_bytes, hash_words = self._parts, 1, _hash_of_bytes
            begins, ends = self._begins, self._ends
        else:
            data, begins, ends = _as_utf16(self._data, self._begins, self._ends)
            parts, unit_bytes, hash_words = _split(data, begins, ends), 2, _hash_of_units
        hashes = np.zeros(len(begins), np.uint32)
        for part in parts:
            part.add_to(hashes, hash_words(part.words) * powers_of_31(part.positions, _WORD_BYTES // unit_bytes))
        if before is not None:
            hashes += before * powers_of_31((ends - begins) // unit_bytes)
        return hashes

    def digests(self) -> Digests:
        """Return a 64-bit digest of each text.

        If two texts of the same size differ in only one word of eight bytes, their digests differ.
        """
        sums = (self._ends - self._begins).view(np.uint64) * _GOLDEN
        for part in self._parts:
            # The position is added to each word, so that the same words in another order have another sum.
            words = part.words + np.array(part.positions, np.int64).view(np.uint64) * _FACTORS[1]
            words ^= words >> np.uint64(32)
            words *= _FACTORS[0]
            words ^= words >> np.uint64(29)
            part.add_to(sums, words)
        return sums


def scatter(numbers: Digests) -> Digests:
    """Mix the bits of each number in place, and return the same array. These are the last steps of SplitMix64."""
    numbers ^= numbers >> np.uint64(30)
    numbers *= _FACTORS[0]
    numbers ^= numbers >> np.uint64(27)
    numbers *= _FACTORS[1]
    numbers ^= numbers >> np.uint64(31)
    return numbers


def powers_of_31(counts: NDArray[np.int64] | int, units: int = 1) -> Any:
    """Return 31 to the power of `counts * units`, modulo 2^32.

    If `counts * units` characters are appended to a text, its Java hash is multiplied by this number, and then the hash
    of the appended characters is added.
    """
    largest = counts if isinstance(counts, int) else int(counts.max(initial=0))
    return _power_table(largest.bit_length(), units)[counts]


@cache
def _power_table(bits: int, units: int) -> Hashes:
    factors = np.full(1 << bits, pow(31, units, 1 << 32), np.uint32)
    factors[0] = 1
    return np.multiply.accumulate(factors, dtype=np.uint32)


def _split(data: Bytes, begins: Positions, ends: Positions) -> list[_Words]:
    """Split all texts into words.

    The first element of the result has the last words of all texts, the next element the words before them, and so on.
    """
    padded = np.concatenate([np.zeros(_WORD_BYTES, np.uint8), data])
    # view[p] is the word that ends at position p of `data`.
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
        if is_regular:  # the ends are equidistant, so a strided view replaces indexing
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
    """Split a few texts into words, except for their last `done` bytes, which are already split. They may be long."""
    counts = (sizes - done + _WORD_BYTES - 1) // _WORD_BYTES
    which = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(which)) - (np.cumsum(counts) - counts)[which] + done // _WORD_BYTES
    following = positions * _WORD_BYTES  # bytes of the text after the word
    words = view[ends[which] - following] & _LAST_BYTES[np.minimum(sizes[which] - following, _WORD_BYTES)]
    return _Words(rows[which], positions, words)


def _hash_of_bytes(words: Digests) -> Hashes:
    """Return the Java hash of the eight characters in each word. Each is one byte, the first one the lowest.

    Characters are combined to pairs, pairs to fours, and fours to eights. Each sum fits into its part of the word.
    """
    pairs = (words & _EVEN_BYTES) * np.uint64(31)
    pairs += (words >> np.uint64(8)) & _EVEN_BYTES
    fours = (pairs & _EVEN_PAIRS) * np.uint64(31**2)
    fours += (pairs >> np.uint64(16)) & _EVEN_PAIRS
    return _combine_halves(fours, 31**4)


def _hash_of_units(words: Digests) -> Hashes:
    """Return the Java hash of the four UTF-16 units in each word. The first unit is in the lowest bytes."""
    pairs = (words & _EVEN_PAIRS) * np.uint64(31)
    pairs += (words >> np.uint64(16)) & _EVEN_PAIRS
    return _combine_halves(pairs, 31**2)


def _combine_halves(halves: Digests, power: int) -> Hashes:
    hashes = (halves & _LOW_HALF) * np.uint64(power)
    hashes += halves >> np.uint64(32)
    return hashes.astype(np.uint32)


def _as_utf16(data: Bytes, begins: Positions, ends: Positions) -> tuple[Bytes, Positions, Positions]:
    """Return the texts as little-endian UTF-16 in one array, and the begins and ends of the texts in it (bytes)."""
    raw = data.tobytes()
    try:
        units = raw.decode("utf-8").encode("utf-16-le")
    except UnicodeDecodeError:
        # Decode each text separately, so that invalid bytes at its end do not affect the next one.
        texts = (raw[begin:end].decode("utf-8", "replace") for begin, end in zip(begins, ends, strict=True))
        parts = [text.encode("utf-16-le") for text in texts]
        last = np.cumsum([len(part) for part in parts], dtype=np.int64)
        return np.frombuffer(b"".join(parts), np.uint8), np.concatenate([[0], last[:-1]]), last
    # A character has two units if its first byte in UTF-8 is 0xF0 or more, otherwise one.
    before = np.zeros(len(data) + 1, np.int64)
    np.cumsum(((data & 0xC0) != 0x80).astype(np.int8) + (data >= 0xF0), out=before[1:])
    return np.frombuffer(units, np.uint8), before[begins] * 2, before[ends] * 2


NUMBER_CHARS = 12  # the last characters of a key: ms since the begin of the month, then the counter
_WORD_CHARS = 4  # the hex digits of 16 bits; the number has three such words
_COUNTER_BITS = 16
_NUMBER_BITS = 48


@dataclass(frozen=True, slots=True)
class UniqueIdRun:
    """Consecutive keys. Each is `prefix` and a number in 12 upper-case hex digits. The first number is `first`."""

    prefix: str  # address, process and random bits: the same in all keys of a task
    first: int
    count: int  # at least 1

    @property
    def width(self) -> int:
        """The number of characters of a key: 32, or 56 if the address is an IPv6 address."""
        return len(self.prefix) + NUMBER_CHARS

    def texts(self) -> Bytes:
        """Return the keys in ASCII, as an array of bytes with one row per key."""
        texts = np.empty((self.count, self.width), np.uint8)
        texts[:, :-NUMBER_CHARS] = np.frombuffer(self.prefix.encode(), np.uint8)
        self.write_numbers(texts[:, -NUMBER_CHARS:])
        return texts

    def write_numbers(self, out: Bytes) -> None:
        """Write the number of each key, its last 12 characters, into `out`, an array with one row per key."""
        assert out.shape == (self.count, NUMBER_CHARS), out.shape
        digits, _ = _words()
        for column, words in enumerate(self._number_words()):
            out[:, column * _WORD_CHARS : (column + 1) * _WORD_CHARS].view("<u4")[:, 0] = digits[words]

    def hashes(self) -> Hashes:
        """Return the Java hash of each key, as unsigned numbers."""
        fixed = string_hash(self.prefix + "\0" * NUMBER_CHARS) & 0xFFFFFFFF
        hashes = np.full(self.count, fixed, np.uint32)
        _, word_hashes = _words()
        for column, words in enumerate(self._number_words()):
            following = NUMBER_CHARS - (column + 1) * _WORD_CHARS  # characters after the word
            hashes += word_hashes[words] * powers_of_31(following)
        return hashes

    def _number_words(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return three arrays, the words of 16 bits of each number, the highest words first.

        If a word is the same in all rows, its array may have a single element.
        """
        numbers = np.arange(self.first, self.first + self.count)
        highs = numbers[[0, -1]] >> _COUNTER_BITS
        highs = highs[:1] if highs[0] == highs[1] else numbers >> _COUNTER_BITS
        return highs >> _COUNTER_BITS, highs & 0xFFFF, numbers & 0xFFFF


class UniqueIds:
    """Creates UNIQ_KEYs, each only once. Not thread-safe.

    `random_bits` is a random number of 32 bits. Draw a new one for each instance, so that concurrent tasks and attempts
    have different keys. Keys contain the time since the begin of the month in the time zone `zone`. None means the time
    zone of the machine, as in RocketMQ's clients.
    """

    def __init__(self, ip: str, pid: int, random_bits: int, zone: datetime.tzinfo | None = None) -> None:
        self._prefix = str(make_unique_key(ip, pid, random_bits, 0))[:-NUMBER_CHARS]
        self._prefix_hash, self._prefix_power = string_hash(self._prefix), pow(31, len(self._prefix), 1 << 32)
        self._zone = zone
        self._next = 0
        self._second: int | None = None  # the second for which `_month_begin_ms` was computed
        self._month_begin_ms = 0

    def take(self, count: int, now_ms: int) -> UniqueIdRun:
        """Return the next `count` keys. `now_ms` is the current time in ms since the epoch.

        The numbers in the keys always increase. If the clock is set back, or a new month begins, they continue after
        the last number.
        """
        return UniqueIdRun(self._prefix, self._take(count, now_ms), count)

    def take_one(self, now_ms: int) -> str:
        """Return the next key, as `take` with a count of 1 does."""
        return f"{self._prefix}{self._take(1, now_ms):0{NUMBER_CHARS}X}"

    @property
    def width(self) -> int:
        """The number of characters of a key: 32, or 56 if the address is an IPv6 address."""
        return len(self._prefix) + NUMBER_CHARS

    def hash_of(self, key: str, before: int) -> int:
        """Return the Java hash, modulo 2^32, of a text that ends with one of these keys.

        `before` is the hash of the text before the key.
        """
        value = before * self._prefix_power + self._prefix_hash & 0xFFFFFFFF
        for digit in key[-NUMBER_CHARS:].encode():
            value = 31 * value + digit
        return value & 0xFFFFFFFF

    def _take(self, count: int, now_ms: int) -> int:
        """Return the number of the next key, and advance by `count`."""
        second = now_ms // 1000
        if second != self._second:
            now = datetime.datetime.fromtimestamp(second, self._zone)
            month_begin = now.replace(day=1, hour=0, minute=0, second=0, fold=0)  # MessageClientIDSetter#setStartTime
            self._second, self._month_begin_ms = second, int(month_begin.timestamp()) * 1000
        first = max(self._next, now_ms - self._month_begin_ms << _COUNTER_BITS)
        self._next = first + count
        assert self._next <= 1 << _NUMBER_BITS, (self._next, count, now_ms)
        return first


@cache
def _words() -> tuple[NDArray[np.uint32], Hashes]:
    """Return two arrays with an element for each 16-bit number.

    The first has its four hex digits, as the bytes of a little-endian number. The second has the Java hash of these
    digits.
    """
    digits = np.frombuffer(b"0123456789ABCDEF", np.uint8)
    numbers = np.arange(1 << 16)
    texts = np.stack([digits[numbers >> shift & 0xF] for shift in (12, 8, 4, 0)], axis=1)
    powers = np.array([31**3, 31**2, 31, 1], np.uint32)
    return texts.view("<u4").ravel(), (texts * powers).sum(axis=1, dtype=np.uint32)
