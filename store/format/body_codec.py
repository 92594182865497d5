"""Body codec: decompresses stored bodies, and compresses the bodies of messages to store.

| bits of sysFlag (0x700) | format |
| --- | --- |
| 0x000, 0x300 | zlib stream (RFC 1950); clients before 4.9.4 set 0x000 |
| 0x100 | LZ4 frame |
| 0x200 | Zstandard frame, without its content's size |

No format stores the size of the decompressed body. So a body is decompressed piece by piece, until it is complete or
exceeds the caller's limit. Bytes after the end of a stream or frame are treated as RocketMQ's streams treat them. After
a zlib stream they are ignored. After an LZ4 or Zstandard frame they must be further frames, which belong to the body.

The CRC of each body needs its own call. Small bodies are first copied into bytes objects, 1,024 at a time, so that they
are still in the processor's cache when their CRC is computed. Large bodies are not copied.

Source: CompressionType, ZlibCompressor, Lz4Compressor, ZstdCompressor, MessageSysFlag (4.9.4, 5.3).
"""

import enum
import zlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.format.message_columns import RowFault, Texts
from rmq_spark.store.format.message_ids import Digests
from rmq_spark.store.format.record import COMPRESSED

COMPRESSION_TYPE_MASK = 0x700
DEFAULT_LEVEL = 5  # level for zlib and Zstandard (DefaultMQProducer#zipCompressLevel)
_STEP_BYTES = 1 << 20  # maximum size of a decompressed piece
_LZ4_BLOCK_BYTES = 4 << 20
# The magic of an LZ4 frame; version 1, independent blocks, no checksums, no content size; blocks up to 4 MiB; and the
# check byte of the last two fields. Arrow's own writer cannot be used, because it writes dependent blocks, which Java's
# reader refuses.
_LZ4_HEADER = bytes.fromhex("04224d18 6070 73")
_LZ4_STORED = 1 << 31  # in a block's length: the block is not compressed
_LZ4_END = bytes(4)


class BodyError(ValueError):
    """A body cannot be decompressed, or is larger than the limit. The caller adds the position of the record."""


class Compression(enum.Enum):
    """The compression of a body. A member's value is the type bits that a writer sets in addition to COMPRESSED."""

    LZ4 = 0x100
    ZSTD = 0x200
    ZLIB = 0x300

    @property
    def sys_flag(self) -> int:
        """Return the bits to set in the sysFlag of a record whose body has this compression."""
        return COMPRESSED | self.value


def compression_of(sys_flag: int) -> Compression | None:
    """Return the compression that a record's sysFlag gives for its body. Returns None if the body is not compressed.

    Raises BodyError if the type of compression is unknown (CompressionType#findByValue).
    """
    if not sys_flag & COMPRESSED:
        return None
    bits = sys_flag & COMPRESSION_TYPE_MASK
    try:
        return Compression(bits) if bits else Compression.ZLIB
    except ValueError:
        raise BodyError(
            f"compression type {bits >> 8} in sysFlag {sys_flag:#x}; expected 0 or 3 (zlib), 1 (LZ4), 2 (Zstandard)"
        ) from None


def decompress_body(stored: bytes, sys_flag: int, max_decompressed_bytes: int) -> bytes:
    """Return the body as the producer sent it. If the stored body is not compressed, or empty, return it unchanged.

    Raises BodyError if the stored body is damaged, or if the result would exceed `max_decompressed_bytes`.
    """
    compression = compression_of(sys_flag)
    if compression is None or not stored:
        return stored
    try:
        if compression is Compression.ZLIB:
            body = _unpack_zlib(stored, max_decompressed_bytes)
        else:
            body = _unpack_frames(stored, compression, max_decompressed_bytes)
    except (zlib.error, OSError, EOFError) as error:
        raise BodyError(
            f"{compression.name} body of {len(stored)} bytes, beginning {stored[:16].hex(' ')}, does not decompress: "
            f"{error}"
        ) from error
    if body is None:
        raise BodyError(
            f"{compression.name} body of {len(stored)} bytes decompresses to more than {max_decompressed_bytes} "
            "bytes. If this is intended, set maxDecompressedBytes higher"
        )
    return body


def compress_body(body: bytes, compression: Compression, level: int = DEFAULT_LEVEL) -> bytes:
    """Return a compressed body in a format that every RocketMQ client can read. LZ4 ignores `level`."""
    if compression is Compression.ZLIB:
        return zlib.compress(body, level)
    if compression is Compression.ZSTD:
        return bytes(pa.Codec("zstd", level).compress(body, asbytes=True))
    return _pack_lz4(body)


def _unpack_zlib(stored: bytes, limit: int) -> bytes | None:
    """Return the decompressed body. Returns None if it is larger than `limit` (bytes)."""
    stream = zlib.decompressobj()
    body = stream.decompress(stored, limit + 1)
    if len(body) > limit:
        return None
    if not stream.eof:
        raise EOFError(f"the stream is truncated after {len(body)} bytes of body")
    return body


def _unpack_frames(stored: bytes, compression: Compression, limit: int) -> bytes | None:
    """Return the decompressed body. Returns None if it is larger than `limit` (bytes)."""
    pieces, total = [], 0
    with pa.CompressedInputStream(pa.BufferReader(stored), compression.name.lower()) as stream:
        while piece := stream.read(min(_STEP_BYTES, limit + 1 - total)):
            total += len(piece)
            if total > limit:
                return None
            pieces.append(piece)
    return b"".join(pieces)


def _pack_lz4(body: bytes) -> bytes:
    """Return an LZ4 frame like those of Java's LZ4FrameOutputStream, with independent blocks of at most 4 MiB."""
    codec = pa.Codec("lz4_raw")
    parts = [_LZ4_HEADER]
    for begin in range(0, len(body), _LZ4_BLOCK_BYTES):
        block = body[begin : begin + _LZ4_BLOCK_BYTES]
        packed = bytes(codec.compress(block, asbytes=True))
        stored = len(packed) >= len(block)
        size = len(block) | _LZ4_STORED if stored else len(packed)
        parts += [size.to_bytes(4, "little"), block if stored else packed]
    return b"".join([*parts, _LZ4_END])


_LARGE_BODY_BYTES = 1 << 10  # if bodies have a larger average size, copying them is not faster
_COPIED_ROWS = 1 << 10


@dataclass(frozen=True, slots=True)
class BodyRules:
    """How bodies are compressed (None: not at all), and the maximum size of a stored body (bytes).

    `is_allowed` says whether the place stores compressed bodies.
    """

    compression: Compression | None = None
    compress_over: int = 4096  # the smallest size to compress (bytes; DefaultMQProducer#compressMsgBodyOverHowmuch)
    max_bytes: int = 4 << 20  # of a stored body (MessageStoreConfig#maxMessageSize)
    is_allowed: bool = field(default=True, kw_only=True)

    @classmethod
    def named(cls, compression: str | None, *sizes: int) -> "BodyRules":
        """Return rules from the name of a compression, which may be "none"; `sizes` are the next two fields."""
        return cls(None if compression in (None, "none") else Compression[compression.upper()], *sizes)


class EncodedBodies:
    """The stored bodies of a batch. The constructor raises RowFault if a body is null or too large."""

    def __init__(self, column: pa.Array, rules: BodyRules) -> None:
        given = Texts.of(column)
        if given.given is not None:
            raise RowFault(int(np.argmin(given.given)), "its body is null. Give a body, which may be b''")
        self.stored = given
        self.sys_flags: NDArray[np.int32] | None = None  # None: no body is compressed
        self.given = given  # before compression
        self._replaced: NDArray[np.bool_] | None = None  # which bodies are compressed
        self._packed: list[bytes] = []  # the compressed bodies
        if rules.compression is not None:
            self._compress(rules.compression, rules.compress_over)
        largest = int(np.argmax(self.stored.sizes))
        size = int(self.stored.sizes[largest])
        if size > rules.max_bytes:
            packed = self.sys_flags is not None and self.sys_flags[largest]
            advice = "" if packed or not rules.is_allowed else " or set compression"
            raise RowFault(
                largest,
                f"its body has {size} bytes{' after compression' if packed else ''}; expected at most "
                f"{rules.max_bytes} (maxMessageSize). Split the message{advice}",
            )

    def _compress(self, kind: Compression, over: int) -> None:
        """Compress the bodies of at least `over` bytes. A body that would not become smaller stays uncompressed."""
        given, replaced, packed = self.stored, np.zeros(len(self.stored), np.bool_), []
        for row in np.flatnonzero(given.sizes >= max(over, 1)).tolist():
            body = compress_body(given.bytes(row), kind)
            if len(body) < given.sizes[row]:
                replaced[row] = True
                packed.append(body)
        if not packed:
            return
        mask = pa.array(replaced)
        self.stored = Texts.of(pc.replace_with_mask(given.array(), mask, pa.array(packed, pa.binary())))
        self.sys_flags = np.where(replaced, np.int32(kind.sys_flag), np.int32(0))
        self._replaced, self._packed = replaced, packed

    @cached_property
    def _given_crcs(self) -> NDArray[np.uint32]:
        return _crcs(self.given)

    @property
    def crcs(self) -> NDArray[np.uint32]:
        """The CRC-32 of each stored body, all 32 bits."""
        if self._replaced is None:
            return self._given_crcs
        crcs = self._given_crcs.copy()
        crcs[self._replaced] = [zlib.crc32(body) for body in self._packed]
        return crcs

    def digests(self) -> Digests:
        """Return one 64-bit number for each body, from its CRC and size before compression."""
        return self._given_crcs.astype(np.uint64) | self.given.sizes.view(np.uint64) << np.uint64(32)


def _crcs(bodies: Texts) -> NDArray[np.uint32]:
    """Return the CRC-32 of each body, all 32 bits."""
    count = len(bodies)
    # numpy converts Python's integers to int64 faster than to other types.
    crcs = np.empty(count, np.int64)
    if len(bodies.data) > count * _LARGE_BODY_BYTES:
        bounds, view = bodies.bounds.tolist(), bodies.data.data
        slices = map(view.__getitem__, map(slice, bounds[:-1], bounds[1:]))
        crcs[:] = np.fromiter(map(zlib.crc32, slices), np.int64, count)
    else:
        array = bodies.array()
        for begin in range(0, count, _COPIED_ROWS):
            some = array.slice(begin, _COPIED_ROWS).to_numpy(zero_copy_only=False)
            crcs[begin : begin + len(some)] = np.fromiter(map(zlib.crc32, some), np.int64, len(some))
    return crcs.astype(np.uint32)
