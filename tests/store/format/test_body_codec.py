"""Body codec: bodies of Java's clients, cut bodies, bodies with trailing bytes, and bodies that are too large."""

import gzip
import pickle
import zlib

import pyarrow as pa
import pytest

from rmq_spark.store.format.body_codec import (
    BodyError,
    Compression,
    compress_body,
    compression_of,
    decompress_body,
)

BODY = b"The same words again and again. " * 40
LIMIT = 1 << 20
every_kind = pytest.mark.parametrize("kind", Compression)


def streamed_zstd(body: bytes) -> bytes:
    """A frame without its content's size, as ZstdOutputStream writes it."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(body)
    return bytes(sink.getvalue().to_pybytes())


@pytest.mark.parametrize(
    ("sys_flag", "kind"),
    [(0, None), (0x700, None), (1, Compression.ZLIB), (0x301, Compression.ZLIB), (0x101, Compression.LZ4),
     (0x201, Compression.ZSTD), (0xFF | 0x200, Compression.ZSTD)],
)  # fmt: skip
def test_compression_of_reads_three_bits(sys_flag: int, kind: Compression | None) -> None:
    assert compression_of(sys_flag) == kind


@pytest.mark.parametrize("bits", [4, 5, 6, 7])
def test_compression_of_refuses_an_unknown_type(bits: int) -> None:
    with pytest.raises(BodyError, match=f"compression type {bits} .*expected 0 or 3"):
        decompress_body(BODY, bits << 8 | 1, LIMIT)


@every_kind
@pytest.mark.parametrize("size", [0, 1, 63, 4096, 70_000, (4 << 20) + 1])
def test_decompress_body_restores_a_compressed_body(kind: Compression, size: int) -> None:
    body = (BODY * (size // len(BODY) + 1))[:size]
    assert decompress_body(compress_body(body, kind), kind.sys_flag, size) == body


@every_kind
def test_decompress_body_restores_an_incompressible_body(kind: Compression) -> None:
    body = b"".join(zlib.crc32(bytes([n & 255, n >> 8])).to_bytes(4, "big") for n in range(5000))
    stored = compress_body(body, kind)
    assert len(stored) > len(body) * 0.9
    assert decompress_body(stored, kind.sys_flag, len(body)) == body


def test_compress_body_stores_an_lz4_block_that_would_grow() -> None:
    assert compress_body(b"abc", Compression.LZ4)[7:] == bytes.fromhex("03000080") + b"abc" + bytes(4)


def test_decompress_body_returns_uncompressed_and_empty_bodies() -> None:
    assert decompress_body(b"x", 0x300, 0) == b"x"
    assert decompress_body(b"", 0x301, 0) == b""


def test_compress_body_begins_like_java() -> None:
    assert compress_body(BODY, Compression.ZLIB)[:2] == b"\x78\x5e"
    assert compress_body(BODY, Compression.LZ4)[:7] == bytes.fromhex("04224d18607073")
    assert compress_body(BODY, Compression.LZ4)[-4:] == bytes(4)
    assert compress_body(BODY, Compression.ZSTD)[:4] == bytes.fromhex("28b52ffd")


def test_decompress_body_reads_a_frame_without_content_size() -> None:
    assert decompress_body(streamed_zstd(BODY), Compression.ZSTD.sys_flag, LIMIT) == BODY


@every_kind
def test_decompress_body_refuses_a_body_cut_anywhere(kind: Compression) -> None:
    stored = compress_body(BODY, kind)
    for size in range(1, len(stored)):
        with pytest.raises(BodyError, match=f"^{kind.name} body of {size} bytes, beginning .* does not decompress"):
            decompress_body(stored[:size], kind.sys_flag, LIMIT)


@every_kind
@pytest.mark.parametrize("garbage", [b"garbage, and more of it", bytes(64), b"\xff" * 8])
def test_body_error_survives_pickling(kind: Compression, garbage: bytes) -> None:
    with pytest.raises(BodyError, match="does not decompress") as caught:
        decompress_body(garbage, kind.sys_flag, LIMIT)
    assert garbage[:4].hex(" ") in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_decompress_body_refuses_other_formats_as_zlib() -> None:
    with pytest.raises(BodyError, match="ZLIB body"):
        decompress_body(gzip.compress(BODY), 0x301, LIMIT)


def test_decompress_body_ignores_bytes_after_a_zlib_stream() -> None:
    stored = compress_body(BODY, Compression.ZLIB)
    assert decompress_body(stored + b"garbage", 1, LIMIT) == BODY
    assert decompress_body(stored + stored, 1, LIMIT) == BODY


@pytest.mark.parametrize("kind", [Compression.LZ4, Compression.ZSTD])
def test_decompress_body_reads_further_frames_and_refuses_garbage(kind: Compression) -> None:
    stored = compress_body(BODY, kind)
    assert decompress_body(stored + stored, kind.sys_flag, LIMIT) == BODY * 2
    with pytest.raises(BodyError, match="does not decompress"):
        decompress_body(stored + b"garbage", kind.sys_flag, LIMIT)


@every_kind
def test_decompress_body_stops_at_the_limit(kind: Compression) -> None:
    stored = compress_body(BODY, kind)
    assert decompress_body(stored, kind.sys_flag, len(BODY)) == BODY
    for limit in (0, 1, len(BODY) - 1):
        with pytest.raises(BodyError, match=f"more than {limit} bytes. .* set maxDecompressedBytes higher"):
            decompress_body(stored, kind.sys_flag, limit)


@every_kind
def test_decompress_body_does_not_unpack_a_bomb(kind: Compression) -> None:
    stored = compress_body(bytes(64 << 20), kind)
    before = pa.total_allocated_bytes()
    with pytest.raises(BodyError, match="more than 1000 bytes"):
        decompress_body(stored, kind.sys_flag, 1000)
    assert pa.total_allocated_bytes() - before < 1 << 20
