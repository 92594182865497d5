"""Compressed bodies: as Java's clients write them, cut, followed by more, and too large."""

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
def test_the_kind_stands_in_three_bits(sys_flag: int, kind: Compression | None) -> None:
    assert compression_of(sys_flag) == kind


@pytest.mark.parametrize("bits", [4, 5, 6, 7])
def test_a_kind_that_nobody_knows_is_an_error(bits: int) -> None:
    with pytest.raises(BodyError, match=f"compression type {bits} .*known are 0 and 3"):
        decompress_body(BODY, bits << 8 | 1, LIMIT)


@every_kind
@pytest.mark.parametrize("size", [0, 1, 63, 4096, 70_000, (4 << 20) + 1])
def test_a_body_comes_back_as_it_was(kind: Compression, size: int) -> None:
    body = (BODY * (size // len(BODY) + 1))[:size]
    assert decompress_body(compress_body(body, kind), kind.sys_flag, size) == body


@every_kind
def test_a_body_that_does_not_shrink_comes_back_as_it_was(kind: Compression) -> None:
    body = b"".join(zlib.crc32(bytes([n & 255, n >> 8])).to_bytes(4, "big") for n in range(5000))
    stored = compress_body(body, kind)
    assert len(stored) > len(body) * 0.9
    assert decompress_body(stored, kind.sys_flag, len(body)) == body


def test_an_lz4_block_that_would_grow_is_stored() -> None:
    assert compress_body(b"abc", Compression.LZ4)[7:] == bytes.fromhex("03000080") + b"abc" + bytes(4)


def test_what_is_not_compressed_or_empty_comes_back_as_it_is() -> None:
    assert decompress_body(b"x", 0x300, 0) == b"x"
    assert decompress_body(b"", 0x301, 0) == b""


def test_bodies_begin_as_javas_do() -> None:
    assert compress_body(BODY, Compression.ZLIB)[:2] == b"\x78\x5e"
    assert compress_body(BODY, Compression.LZ4)[:7] == bytes.fromhex("04224d18607073")
    assert compress_body(BODY, Compression.LZ4)[-4:] == bytes(4)
    assert compress_body(BODY, Compression.ZSTD)[:4] == bytes.fromhex("28b52ffd")


def test_a_frame_without_its_contents_size_is_read() -> None:
    assert decompress_body(streamed_zstd(BODY), Compression.ZSTD.sys_flag, LIMIT) == BODY


@every_kind
def test_a_body_cut_anywhere_is_an_error_with_evidence(kind: Compression) -> None:
    stored = compress_body(BODY, kind)
    for size in range(1, len(stored)):
        with pytest.raises(BodyError, match=f"^{kind.name} body of {size} bytes, beginning .* does not decompress"):
            decompress_body(stored[:size], kind.sys_flag, LIMIT)


@every_kind
@pytest.mark.parametrize("garbage", [b"garbage, and more of it", bytes(64), b"\xff" * 8])
def test_garbage_is_an_error_that_survives_pickling(kind: Compression, garbage: bytes) -> None:
    with pytest.raises(BodyError, match="does not decompress") as caught:
        decompress_body(garbage, kind.sys_flag, LIMIT)
    assert garbage[:4].hex(" ") in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_other_formats_are_not_taken_for_zlib() -> None:
    with pytest.raises(BodyError, match="ZLIB body"):
        decompress_body(gzip.compress(BODY), 0x301, LIMIT)


def test_bytes_behind_a_zlib_stream_are_not_looked_at() -> None:
    stored = compress_body(BODY, Compression.ZLIB)
    assert decompress_body(stored + b"garbage", 1, LIMIT) == BODY
    assert decompress_body(stored + stored, 1, LIMIT) == BODY


@pytest.mark.parametrize("kind", [Compression.LZ4, Compression.ZSTD])
def test_a_frame_behind_a_frame_belongs_to_the_body_and_garbage_is_an_error(kind: Compression) -> None:
    stored = compress_body(BODY, kind)
    assert decompress_body(stored + stored, kind.sys_flag, LIMIT) == BODY * 2
    with pytest.raises(BodyError, match="does not decompress"):
        decompress_body(stored + b"garbage", kind.sys_flag, LIMIT)


@every_kind
def test_a_body_beyond_the_limit_stops_there(kind: Compression) -> None:
    stored = compress_body(BODY, kind)
    assert decompress_body(stored, kind.sys_flag, len(BODY)) == BODY
    for limit in (0, 1, len(BODY) - 1):
        with pytest.raises(BodyError, match=f"more than {limit} bytes: set maxDecompressedBytes higher"):
            decompress_body(stored, kind.sys_flag, limit)


@every_kind
def test_a_bomb_is_not_unpacked(kind: Compression) -> None:
    stored = compress_body(bytes(64 << 20), kind)
    before = pa.total_allocated_bytes()
    with pytest.raises(BodyError, match="more than 1000 bytes"):
        decompress_body(stored, kind.sys_flag, 1000)
    assert pa.total_allocated_bytes() - before < 1 << 20
