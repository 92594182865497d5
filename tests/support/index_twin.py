"""The key index written one key at a time, like a broker: the slow twin of adding many keys at once."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.format.index_file import IndexFileWriter, IndexHeader, IndexShape


class IndexKey(NamedTuple):
    """A key of a record: its hash, the record's physical offset (bytes) and store time (ms)."""

    key_hash: int
    physical_offset: int
    store_time: int


def key_columns(keys: Sequence[IndexKey]) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Return keys as `KeyIndex.put_many` takes them."""
    table = np.array(keys, np.int64).reshape(-1, 3)
    return table[:, 0].astype(np.int32), table[:, 1].copy(), table[:, 2].copy()


def write_one_by_one(keys: Sequence[IndexKey], shape: IndexShape, begin: Sequence[bytes] = ()) -> list[bytes]:
    """Return the index files, oldest first, after these keys are added to `begin`."""
    buffers = [np.frombuffer(bytearray(data), np.uint8) for data in begin]
    writer = IndexFileWriter(buffers[-1], shape) if buffers else None
    for key in keys:
        if writer is None or not writer.put(*key):
            before = writer.header if writer else IndexHeader()
            buffers.append(np.zeros(shape.file_bytes, np.uint8))
            writer = IndexFileWriter(buffers[-1], shape, before)
            written = writer.put(*key)
            assert written, shape
    return [buffer.tobytes() for buffer in buffers]


def read_index(root: Path) -> list[bytes]:
    """Return the index files of a store, oldest first."""
    return [path.read_bytes() for path in sorted((root / "index").glob("*"))]
