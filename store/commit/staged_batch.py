"""Encoded records as an Arrow record batch, over the same memory, and back.

| column | type | holds |
| --- | --- | --- |
| record | binary | the record; all values together are EncodedRecords.data |
| queue | int32 | index into the batch's `queues` |
| tagsCode | int64 | Java hash of the tags |
| keys | list<int32> | hashes for the key index |

The schema's metadata has `rmq` = `{"v": 1}`. A batch's metadata has `queues`, a JSON list of [topic, queue id], and
`sum`, a checksum of its arrays and that list.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.commit.side_file import digest_text
from rmq_spark.store.format.encoding import EncodedRecords
from rmq_spark.store.format.side_json import parse_json
from rmq_spark.store.units import QueueKey

VERSION = 1
SCHEMA = pa.schema(
    [
        pa.field("record", pa.binary(), nullable=False),
        pa.field("queue", pa.int32(), nullable=False),
        pa.field("tagsCode", pa.int64(), nullable=False),
        pa.field("keys", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
    ],
    metadata={"rmq": json.dumps({"v": VERSION})},
)
_QUEUES, _SUM = b"queues", b"sum"
# Odd factors: a word in another column's place changes the sum.
_COLUMN_FACTORS = (1, 3, 5, 7, 11, 13, 17)


def version_of(schema: pa.Schema) -> object:
    """Return the version that a file's schema names. Raises KeyError or ValueError where it names none."""
    return parse_json((schema.metadata or {})[b"rmq"])["v"]


def to_batch(records: EncodedRecords) -> tuple[pa.RecordBatch, dict[bytes, bytes]]:
    """Return the records, less than 2 GiB, as a batch and its metadata. Their digest is not kept."""
    count = len(records)
    ends = np.zeros(count + 1, np.int32)
    np.cumsum(records.sizes, out=ends[1:])
    key_ends = np.searchsorted(records.key_rows, np.arange(count + 1)).astype(np.int32)
    data = np.ascontiguousarray(records.data)
    keys = pa.array(records.key_hashes, pa.int32())
    columns = [
        pa.BinaryArray.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(data)]),
        pa.array(records.queue_numbers, pa.int32()),
        pa.array(records.tags_codes, pa.int64()),
        pa.ListArray.from_arrays(pa.array(key_ends), keys, type=SCHEMA.field("keys").type),
    ]
    queues = json.dumps([[key.topic, key.queue_id] for key in records.queues]).encode()
    return pa.record_batch(columns, schema=SCHEMA), {_QUEUES: queues, _SUM: _checksum(records, queues).encode()}


def from_batch(batch: pa.RecordBatch, metadata: Mapping[bytes, bytes]) -> EncodedRecords:
    """Return the records over the batch's memory, with the digest 0.

    Raises ValueError, KeyError, TypeError or ArrowInvalid for anything but what `to_batch` made.
    """
    batch.validate(full=True)  # offsets that point out of their buffer would not end in an error below
    count = batch.num_rows
    record, queue, tags, keys = batch.columns
    _, offsets, data = record.buffers()
    ends = np.frombuffer(offsets, np.int32, count + 1)
    key_ends = keys.offsets.to_numpy()
    queues = parse_json(metadata[_QUEUES])
    records = EncodedRecords(
        np.frombuffer(data, np.uint8)[int(ends[0]) : int(ends[-1])],
        np.diff(ends).astype(np.int64),
        tuple(QueueKey(str(topic), int(queue_id)) for topic, queue_id in queues),
        queue.to_numpy(),
        tags.to_numpy(),
        np.repeat(np.arange(count), np.diff(key_ends)),
        keys.values.to_numpy()[key_ends[0] : key_ends[-1]],
        0,
    )
    wanted, found = metadata[_SUM].decode(), _checksum(records, metadata[_QUEUES])
    if found != wanted:
        raise ValueError(f"checksum of the records: expected {wanted}, found {found}")
    return records


def _checksum(records: EncodedRecords, queues: bytes) -> str:
    """Return a sum over all arrays and the queues' text.

    It finds pages that were never written and any one flipped bit, at a twentieth of a CRC's cost.
    """
    columns: tuple[NDArray[Any], ...] = (
        records.data,
        np.cumsum(records.sizes),  # as they are kept: one wrong end makes two sizes wrong, whose sum is right
        records.queue_numbers,
        records.tags_codes,
        records.key_rows,
        records.key_hashes,
        np.frombuffer(queues, np.uint8),
    )
    total = sum(factor * _word_sum(column) for factor, column in zip(_COLUMN_FACTORS, columns, strict=True))
    return digest_text(total % (1 << 64))


def _word_sum(column: NDArray[Any]) -> int:
    flat = np.ascontiguousarray(column).view(np.uint8)
    whole = len(flat) // 8 * 8
    return int(flat[:whole].view("<u8").sum(dtype=np.uint64)) + int.from_bytes(flat[whole:].tobytes(), "little")
