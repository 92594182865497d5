"""Records that have different contents but equal lengths, encoded thousands at a time.

One record is encoded in the usual way, and copied into every row of a matrix. Then the parts that differ between
records are overwritten, for all rows at once.
"""

import zlib

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.record import RECORD_HEAD, encode_record
from rmq_spark.store.testing.sample_message import SampleMessage

TAGS = [f"Tag{letter}" for letter in "ABCDEFGH"]
KEY_DIGITS = 12
COUNTER_DIGITS = 16  # digits at the end of the UNIQ_KEY, which contain the message's number
_UNIQUE_HEAD = "0A010203000F7C6B"  # begin of the UNIQ_KEY: the address 10.1.2.3, a process id and a hash
_CHUNK_BYTES = 24 << 20


class UniformRecords:
    """Encodes records of `topic` with bodies of `body_bytes` bytes and the properties UNIQ_KEY, KEYS and TAGS.

    `size` is the size of each record (bytes), and `chunk` is how many records should be encoded in one call. The same
    seed and the same calls give the same bytes.
    """

    def __init__(self, topic: str, body_bytes: int, seed: int, first_ms: int, messages_per_ms: int) -> None:
        self._body_bytes, self._first_ms, self._per_ms = body_bytes, first_ms, messages_per_ms
        self._random = np.random.default_rng(seed)
        message = SampleMessage(
            topic,
            body=bytes(body_bytes),
            properties={
                "UNIQ_KEY": _UNIQUE_HEAD + "0" * COUNTER_DIGITS,
                "KEYS": "k" + "0" * KEY_DIGITS,
                "TAGS": TAGS[0],
            },
        )
        data = encode_record(message.as_record(0, 0, first_ms))
        self.size = len(data)
        self.chunk = max(_CHUNK_BYTES // self.size, 1)
        self._template = np.frombuffer(data, np.uint8)
        self._unique_at = data.index(b"UNIQ_KEY\x01") + len("UNIQ_KEY\x01") + len(_UNIQUE_HEAD)
        self._key_at = data.index(b"KEYS\x01k") + len("KEYS\x01k")
        self._tag_at = data.index(b"TAGS\x01") + len("TAGS\x01") + len(TAGS[0]) - 1
        self._last_letters = np.frombuffer("".join(tag[-1] for tag in TAGS).encode(), np.uint8)
        self._hashes = np.array([string_hash(tag) for tag in TAGS], np.int64)

    def tags_codes(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tags code of the message with each of these numbers."""
        codes: NDArray[np.int64] = self._hashes[_shuffled(numbers) % len(TAGS)]
        return codes

    def encode(
        self,
        numbers: NDArray[np.int64],
        queue_ids: NDArray[np.int64],
        queue_offsets: NDArray[np.int64],
        physical_offsets: NDArray[np.int64],
    ) -> memoryview:
        """Return the encoded records of the messages with these numbers, one after the other.

        The arguments are arrays of equal length, with one value for each message.
        """
        count = len(numbers)
        rows = np.empty((count, self.size), np.uint8)
        rows[:] = self._template
        bodies = self._bodies(count)
        body_at = RECORD_HEAD.itemsize
        rows[:, body_at : body_at + self._body_bytes] = bodies
        rows[:, self._unique_at : self._unique_at + COUNTER_DIGITS] = _digits(numbers, COUNTER_DIGITS)
        rows[:, self._key_at : self._key_at + KEY_DIGITS] = _digits(numbers, KEY_DIGITS)
        rows[:, self._tag_at] = self._last_letters[_shuffled(numbers) % len(TAGS)]
        heads = np.ndarray((count,), RECORD_HEAD, rows.data, strides=(self.size,))
        stored_ms = self._first_ms + numbers // self._per_ms
        heads["body_crc"] = _crcs(bodies)
        heads["queue_id"] = queue_ids
        heads["queue_offset"] = queue_offsets
        heads["physical_offset"] = physical_offsets
        heads["born_timestamp"] = stored_ms - 7
        heads["store_timestamp"] = stored_ms
        return rows.data.cast("B")

    def _bodies(self, count: int) -> NDArray[np.uint8]:
        """Return random bodies, one in each row, of the 64 ASCII characters from 0x20 (space) to 0x5F."""
        size = count * self._body_bytes
        noise = np.frombuffer(self._random.bytes(size), np.uint8)
        return ((noise & np.uint8(0x3F)) + np.uint8(0x20)).reshape(count, self._body_bytes)


def _shuffled(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return scattered numbers, with which tags are chosen. The factor is Knuth's constant.

    Because the numbers have no regular order, every queue gets messages with every tag.
    """
    scattered: NDArray[np.int64] = numbers * 2654435761 >> 16 & 0xFFFF
    return scattered


def _digits(numbers: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """Return the decimal digits of each number as ASCII, with leading zeros: one row of `width` digits for each."""
    text = np.empty((len(numbers), width), np.uint8)
    rest = numbers.copy()
    for column in range(width - 1, -1, -1):
        rest, digit = np.divmod(rest, 10)
        text[:, column] = digit + ord("0")
    return text


def _crcs(bodies: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return the CRC of each body, as it is stored in the header of a record."""
    count, size = bodies.shape
    if not size:
        return np.zeros(count, np.uint32)
    data = memoryview(np.ascontiguousarray(bodies).data).cast("B")
    crcs = np.fromiter((zlib.crc32(data[at : at + size]) for at in range(0, count * size, size)), np.uint32, count)
    return crcs & np.uint32(0x7FFFFFFF)
