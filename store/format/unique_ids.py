"""UNIQ_KEYs for many messages at once: ids as a producer's client gives them, of which bulk writing repeats none.

A RocketMQ client counts to 65536 and begins again, whatever the clock says, and clients differ by address, process
and a class loader's hash. Here milliseconds and counter advance together as one number of 48 bits, and 32 random
bits stand for the hash. Who reads such a key finds the same things in it: address, process, and about when it was
made (MessageClientIDSetter#getNearlyTimeFromID).

Layout of a key: `message_id`. Source: MessageClientIDSetter#createUniqID (4.9, 5.3).
"""

import datetime
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.message_id import make_unique_key
from rmq_spark.store.format.ragged import Bytes
from rmq_spark.store.format.text_hashes import Hashes, powers_of_31

NUMBER_CHARS = 12  # at a key's end: ms since the month began, then the counter
_WORD_CHARS = 4  # the digits of 16 bits; three such words make the number
_COUNTER_BITS = 16
_NUMBER_BITS = 48


@dataclass(frozen=True, slots=True)
class UniqueIdRun:
    """Keys that follow each other: `prefix` and the numbers from `first` on, in 12 upper-case hex digits."""

    prefix: str  # address, process and random bits: the same in all keys of a task
    first: int
    count: int  # at least 1

    @property
    def width(self) -> int:
        """The characters of a key: 32, or 56 with an IPv6 address."""
        return len(self.prefix) + NUMBER_CHARS

    def texts(self) -> Bytes:
        """Return the keys as ASCII, one a row."""
        texts = np.empty((self.count, self.width), np.uint8)
        texts[:, :-NUMBER_CHARS] = np.frombuffer(self.prefix.encode(), np.uint8)
        self.write_numbers(texts[:, -NUMBER_CHARS:])
        return texts

    def write_numbers(self, out: Bytes) -> None:
        """Write what differs from key to key, the last 12 characters, into the rows of `out`."""
        assert out.shape == (self.count, NUMBER_CHARS), out.shape
        digits, _ = _words()
        for place, words in enumerate(self._number_words()):
            out[:, place * _WORD_CHARS : (place + 1) * _WORD_CHARS].view("<u4")[:, 0] = digits[words]

    def hashes(self) -> Hashes:
        """Return the Java hash of each key, as unsigned numbers."""
        fixed = string_hash(self.prefix + "\0" * NUMBER_CHARS) & 0xFFFFFFFF
        hashes = np.full(self.count, fixed, np.uint32)
        _, word_hashes = _words()
        for place, words in enumerate(self._number_words()):
            behind = NUMBER_CHARS - (place + 1) * _WORD_CHARS
            hashes += word_hashes[words] * powers_of_31(behind)
        return hashes

    def _number_words(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the three words of every number, high ones first; one element, for all rows, where they share it."""
        numbers = np.arange(self.first, self.first + self.count)
        highs = numbers[[0, -1]] >> _COUNTER_BITS
        highs = highs[:1] if highs[0] == highs[1] else numbers >> _COUNTER_BITS
        return highs >> _COUNTER_BITS, highs & 0xFFFF, numbers & 0xFFFF


class UniqueIds:
    """Gives out keys, each only once. For one thread.

    `random_bits` (32) keep apart what several tasks and attempts give out at the same time: draw them for each
    instance. `zone` is the time zone whose month the keys count from: the machine's own (None), as clients do.
    """

    def __init__(self, ip: str, pid: int, random_bits: int, zone: datetime.tzinfo | None = None) -> None:
        self._prefix = str(make_unique_key(ip, pid, random_bits, 0))[:-NUMBER_CHARS]
        self._zone = zone
        self._next = 0

    def take(self, count: int, now_ms: int) -> UniqueIdRun:
        """Return the next `count` keys, made at `now_ms` since the epoch.

        Keys only ever advance: where the clock steps back, or a month begins, they go on from the last one.
        """
        first = max(self._next, _month_ms(now_ms, self._zone) << _COUNTER_BITS)
        self._next = first + count
        assert self._next <= 1 << _NUMBER_BITS, (self._next, count, now_ms)
        return UniqueIdRun(self._prefix, first, count)


def _month_ms(now_ms: int, zone: datetime.tzinfo | None) -> int:
    """Return the milliseconds since the month began (MessageClientIDSetter#setStartTime)."""
    now = datetime.datetime.fromtimestamp(now_ms // 1000, zone)
    begin = now.replace(day=1, hour=0, minute=0, second=0, fold=0)
    return now_ms - int(begin.timestamp()) * 1000


@cache
def _words() -> tuple[NDArray[np.uint32], Hashes]:
    """Return the four digits of each number of 16 bits (as one little-endian number) and their Java hash."""
    digits = np.frombuffer(b"0123456789ABCDEF", np.uint8)
    numbers = np.arange(1 << 16)
    texts = np.stack([digits[numbers >> shift & 0xF] for shift in (12, 8, 4, 0)], axis=1)
    powers = np.array([31**3, 31**2, 31, 1], np.uint32)
    return texts.view("<u4").ravel(), (texts * powers).sum(axis=1, dtype=np.uint32)
