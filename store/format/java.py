"""What RocketMQ takes from Java itself: a text's hash, and how an address and a port become bytes.

Source: String#hashCode, IndexFile#indexKeyHashMethod, MessageExt#socketAddress2ByteBuffer (4.9, 5.3).
"""

import ipaddress
import struct
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_FEW_ROWS = 16  # below this, going text by text is cheaper than numpy over what is left of them


def string_hash(text: str) -> int:
    """Return String#hashCode: h = 31·h + unit over the UTF-16 units, as a signed 32-bit number.

    Sign-extended to 64 bits it is the tags code of a queue's unit.
    """
    data = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for unit in struct.unpack(f">{len(data) // 2}H", data):
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def index_key_hash(key: str) -> int:
    """Return a key's hash as the key index has it, from 0 to 2^31-1. `key` is `topic#key`."""
    value = abs(string_hash(key))
    return value if value < 1 << 31 else 0  # |-2^31| does not fit; Java's abs leaves it negative, the index says 0


def string_hashes(texts: pa.Array) -> NDArray[np.int32]:
    """Return `string_hash` of every text of a string or binary (UTF-8) array; 0 for nulls.

    Bytes that are no UTF-8 count as the replacement characters that a Java String would have.
    """
    if len(texts) == 0:
        return np.zeros(0, np.int32)
    if texts.type not in (pa.string(), pa.binary()):
        texts = texts.cast(pa.binary())
    _, offset_bytes, data_bytes = texts.buffers()
    offsets = np.frombuffer(offset_bytes, np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    data = np.frombuffer(data_bytes, np.uint8) if data_bytes else np.zeros(0, np.uint8)
    begins, sizes = offsets[:-1], np.diff(offsets)
    if texts.null_count:
        sizes = np.where(texts.is_null().to_numpy(zero_copy_only=False), 0, sizes)
    hashes = np.zeros(len(texts), np.uint32)
    others = _rows_beyond_ascii(data, offsets, sizes)
    sizes[others] = 0
    _hash_ascii(data, begins, sizes, hashes)
    for row in others.tolist():
        text = data[begins[row] : offsets[row + 1]].tobytes().decode("utf-8", "replace")
        hashes[row] = string_hash(text) & 0xFFFFFFFF
    return hashes.view(np.int32)


def index_key_hashes(keys: pa.Array) -> NDArray[np.int32]:
    """Return `index_key_hash` of every key of a string or binary (UTF-8) array; 0 for nulls."""
    hashes = np.abs(string_hashes(keys))  # numpy's abs leaves -2^31 as it is, like Java's
    return np.maximum(hashes, 0)


def _rows_beyond_ascii(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.intp]:
    first, last = int(offsets[0]), int(offsets[-1])
    high = np.flatnonzero(data[first:last] & 0x80) + first
    if not len(high):
        return np.zeros(0, np.intp)
    rows = np.unique(np.searchsorted(offsets, high, "right") - 1)
    return rows[sizes[rows] > 0]


def _hash_ascii(
    data: NDArray[np.uint8],
    begins: NDArray[np.int64],
    sizes: NDArray[np.int64],
    hashes: NDArray[np.uint32],
) -> None:
    """Hash rows of ASCII into `hashes`, one character of all rows at a time; the longest rows come first."""
    order = np.argsort(-sizes, kind="stable")
    begins, ends_at = begins[order], np.sort(sizes)
    values = np.zeros(len(order), np.uint32)
    at = 0
    while True:
        left = len(order) - int(np.searchsorted(ends_at, at, "right"))  # rows with a character at `at`
        if left < _FEW_ROWS:
            break
        values[:left] = values[:left] * np.uint32(31) + data[begins[:left] + at]
        at += 1
    for rank in range(left):
        value = int(values[rank])
        begin = int(begins[rank])
        for unit in data[begin + at : begin + int(sizes[order[rank]])].tolist():
            value = (31 * value + unit) & 0xFFFFFFFF
        values[rank] = value
    hashes[order] = values


@dataclass(frozen=True, slots=True)
class Host:
    """An address and a port, as records keep them of producer and broker. str() -> "10.0.0.1:9" or "[::1]:9"."""

    ip: str
    port: int

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


def decode_host(field: bytes) -> Host:
    """Read a host field: the address (4 or 16 bytes), then a port of four bytes."""
    assert len(field) in (8, 20), len(field)
    (port,) = struct.unpack(">i", field[-4:])
    return Host(str(ipaddress.ip_address(field[:-4])), port)


def encode_host(host: Host) -> bytes:
    """Write a host field of 8 or 20 bytes. Raises ValueError for what is no IP address."""
    return ipaddress.ip_address(host.ip).packed + struct.pack(">i", host.port)
