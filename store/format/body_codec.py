"""A compressed body -> its bytes, and back. Which of three formats it is stands in the record's sysFlag.

| bits of sysFlag (0x700) | format |
| --- | --- |
| 0x000, 0x300 | zlib stream (RFC 1950); clients before 4.9.4 set no type |
| 0x100 | LZ4 frame |
| 0x200 | Zstandard frame, without its content's size |

None says how large the body becomes. So it is unpacked piece by piece, and one that grows beyond what the
caller allows stops there. Bytes behind the end are treated as RocketMQ's streams treat them: a zlib stream ends
where it ends and the rest is not looked at; LZ4 and Zstandard read on, further frames belong to the body and
anything else is an error.

Source: CompressionType, ZlibCompressor, Lz4Compressor, ZstdCompressor, MessageSysFlag (4.9.4, 5.3).
"""

import enum
import zlib

import pyarrow as pa

from rmq_spark.store.format.record import COMPRESSED

COMPRESSION_TYPE_MASK = 0x700
DEFAULT_LEVEL = 5  # DefaultMQProducer#zipCompressLevel; for zlib and Zstandard
_STEP_BYTES = 1 << 20  # what is unpacked at once, at most

_LZ4_BLOCK_BYTES = 4 << 20
# Version 1, independent blocks, no checksums, no content size; blocks up to 4 MiB; check byte of these two.
# Java's reader takes no frame whose blocks depend on each other, which is what Arrow's own writer makes.
_LZ4_HEADER = bytes.fromhex("04224d18 6070 73")
_LZ4_STORED = 1 << 31  # in a block's length: the block is not compressed
_LZ4_END = bytes(4)


class BodyError(ValueError):
    """A body does not decompress, or grows too large. The message has the evidence; the caller knows the place."""


class Compression(enum.Enum):
    """How a body is compressed. The value are the type bits that a writer sets, beside COMPRESSED."""

    LZ4 = 0x100
    ZSTD = 0x200
    ZLIB = 0x300

    @property
    def sys_flag(self) -> int:
        """Return the bits that a record with such a body has in its sysFlag."""
        return COMPRESSED | self.value


def compression_of(sys_flag: int) -> Compression | None:
    """Return how a body with this sysFlag is compressed, None for one that is not.

    Raises BodyError for a type that RocketMQ does not know (CompressionType#findByValue).
    """
    if not sys_flag & COMPRESSED:
        return None
    bits = sys_flag & COMPRESSION_TYPE_MASK
    try:
        return Compression(bits) if bits else Compression.ZLIB
    except ValueError:
        raise BodyError(
            f"compression type {bits >> 8} in sysFlag {sys_flag:#x}, known are 0 and 3 (zlib), 1 (LZ4), 2 (Zstandard)"
        ) from None


def decompress_body(stored: bytes, sys_flag: int, max_decompressed_bytes: int) -> bytes:
    """Return the body as the producer gave it; one that is not compressed, or empty, comes back as it is.

    Raises BodyError for damage, and as soon as the body exceeds `max_decompressed_bytes`.
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
        raise _broken(stored, compression, str(error)) from error
    if body is None:
        raise BodyError(
            f"{compression.name} body of {len(stored)} bytes decompresses to more than {max_decompressed_bytes} "
            "bytes: set maxDecompressedBytes higher if that is meant"
        )
    return body


def compress_body(body: bytes, compression: Compression, level: int = DEFAULT_LEVEL) -> bytes:
    """Compress one body so that every RocketMQ client reads it. LZ4 knows no levels."""
    if compression is Compression.ZLIB:
        return zlib.compress(body, level)
    if compression is Compression.ZSTD:
        return bytes(pa.Codec("zstd", level).compress(body, asbytes=True))
    return _pack_lz4(body)


def _unpack_zlib(stored: bytes, limit: int) -> bytes | None:
    """Return the body, None when it is larger than `limit`."""
    stream = zlib.decompressobj()
    body = stream.decompress(stored, limit + 1)
    if len(body) > limit:
        return None
    if not stream.eof:
        raise EOFError(f"the stream is cut after {len(body)} bytes of body")
    return body


def _unpack_frames(stored: bytes, compression: Compression, limit: int) -> bytes | None:
    """Return the body, None when it is larger than `limit`."""
    pieces, total = [], 0
    with pa.CompressedInputStream(pa.BufferReader(stored), compression.name.lower()) as stream:
        while piece := stream.read(min(_STEP_BYTES, limit + 1 - total)):
            total += len(piece)
            if total > limit:
                return None
            pieces.append(piece)
    return b"".join(pieces)


def _pack_lz4(body: bytes) -> bytes:
    """Write a frame as LZ4FrameOutputStream writes it: independent blocks of at most 4 MiB."""
    codec = pa.Codec("lz4_raw")
    parts = [_LZ4_HEADER]
    for begin in range(0, len(body), _LZ4_BLOCK_BYTES):
        block = body[begin : begin + _LZ4_BLOCK_BYTES]
        packed = bytes(codec.compress(block, asbytes=True))
        stored = len(packed) >= len(block)
        size = len(block) | _LZ4_STORED if stored else len(packed)
        parts += [size.to_bytes(4, "little"), block if stored else packed]
    return b"".join([*parts, _LZ4_END])


def _broken(stored: bytes, compression: Compression, why: str) -> BodyError:
    begin = stored[:16].hex(" ")
    return BodyError(f"{compression.name} body of {len(stored)} bytes, beginning {begin}, does not decompress: {why}")
