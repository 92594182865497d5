"""Functions on EncodedRecords: slice them by row, merge them, and convert them to Arrow batches of a staging file.

A slice or a merge has the digest 0, because its digest is unknown. The Arrow batches share the memory of the records,
and have these columns:

| column | type | content |
| --- | --- | --- |
| record | binary | the encoded record; all values joined are EncodedRecords.data |
| queue | int32 | index into the batch's `queues` |
| tagsCode | int64 | Java hash of the tags |
| keys | list<int32> | hashes for the key index |

The schema's metadata has `rmq` = `{"v": 1}`. A batch's metadata has `queues`, a JSON list of [topic, queue id], and
`sum`, a checksum of its arrays and that list.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.format.message_encoder import EncodedRecords
from rmq_spark.store.format.side_file import digest_text, parse_json
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import WAITING_TOPICS

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
# One factor per column, so that the sum changes if two columns swap words; odd, so that it shows any flipped bit.
_COLUMN_FACTORS = (1, 3, 5, 7, 11, 13, 17)


def slice_records(records: EncodedRecords, first: int, last: int) -> EncodedRecords:
    """Return the rows [first, last) without copying them. If they are all rows, returns `records` itself.

    Otherwise the digest is 0.
    """
    if first == 0 and last == len(records):
        return records
    begin = int(records.sizes[:first].sum())
    end = begin + int(records.sizes[first:last].sum())
    first_key, last_key = np.searchsorted(records.key_rows, [first, last]).tolist()
    return EncodedRecords(
        records.data[begin:end],
        records.sizes[first:last],
        records.queues,
        records.queue_numbers[first:last],
        records.tags_codes[first:last],
        records.key_rows[first_key:last_key] - first,
        records.key_hashes[first_key:last_key],
        0,
        records.real_topics,
    )


def split_records(records: EncodedRecords, limit_bytes: int) -> Iterator[EncodedRecords]:
    """Yield the records, in order, in parts of at most `limit_bytes` each. A longer record is a part of its own."""
    ends = np.cumsum(records.sizes)
    first, done = 0, 0
    while first < len(records):
        last = max(int(np.searchsorted(ends, done + limit_bytes, side="right")), first + 1)
        yield slice_records(records, first, last)
        first, done = last, int(ends[last - 1])


def merge_records(parts: Sequence[EncodedRecords]) -> EncodedRecords:
    """Return the records of one or more parts as one, in order. They are a copy that may be modified; digest 0."""
    numbers: dict[QueueKey, int] = {}
    renumbered = []
    for part in parts:
        new_numbers = np.array([numbers.setdefault(key, len(numbers)) for key in part.queues], np.int32)
        renumbered.append(new_numbers[part.queue_numbers])
    firsts = np.cumsum([0, *(len(part) for part in parts[:-1])])
    return EncodedRecords(
        np.concatenate([part.data for part in parts]),
        np.concatenate([part.sizes for part in parts]),
        tuple(numbers),
        np.concatenate(renumbered),
        np.concatenate([part.tags_codes for part in parts]),
        np.concatenate([part.key_rows + first for part, first in zip(parts, firsts, strict=True)]),
        np.concatenate([part.key_hashes for part in parts]),
        0,
        max_queue_counts(part.real_topics for part in parts),
    )


def required_topics(records: EncodedRecords) -> dict[str, int]:
    """Return the topics that must exist before the records are appended, with the number of queues that each needs.

    For delayed messages this includes the system topic in which they wait and the topics to which they are delivered.
    Such a system topic is listed with 1 queue, because its queues are fixed.
    """
    queues = [records.queues[number] for number in np.unique(records.queue_numbers).tolist()]
    counts = ({key.topic: 1 if key.topic in WAITING_TOPICS else key.queue_id + 1} for key in queues)
    return max_queue_counts((records.real_topics, *counts))


def max_queue_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Merge mappings from topic to number of queues; each topic gets its largest number."""
    largest: dict[str, int] = {}
    for some in counts:
        for topic, count in some.items():
            largest[topic] = max(largest.get(topic, 0), count)
    return largest


def version_of(schema: pa.Schema) -> object:
    """Return the format version from the schema of a staging file. Raises KeyError or ValueError if it has none."""
    return parse_json((schema.metadata or {})[b"rmq"])["v"]


def to_batch(records: EncodedRecords) -> tuple[pa.RecordBatch, dict[bytes, bytes]]:
    """Return the records as an Arrow batch, and the metadata of this batch. Their digest is left out.

    The records must take less than 2 GiB.
    """
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
    """Return the records of an Arrow batch that `to_batch` made. They share its memory, and their digest is 0.

    Raises ValueError, KeyError, TypeError or ArrowInvalid if the batch or its metadata is something else or damaged.
    """
    batch.validate(full=True)  # because the code below would not notice offsets outside their buffer
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
    expected, found = metadata[_SUM].decode(), _checksum(records, metadata[_QUEUES])
    if found != expected:
        raise ValueError(f"checksum of the records: expected {expected}, found {found}")
    return records


def _checksum(records: EncodedRecords, queues: bytes) -> str:
    """Return a checksum of all arrays of the records and of `queues`, the JSON list of queues.

    The checksum detects pages that were not written and any single flipped bit. It takes a twentieth of the time of a
    CRC.
    """
    columns: tuple[NDArray[Any], ...] = (
        records.data,
        np.cumsum(records.sizes),  # ends, as they are stored: one wrong end makes two sizes wrong, but not their sum
        records.queue_numbers,
        records.tags_codes,
        records.key_rows,
        records.key_hashes,
        np.frombuffer(queues, np.uint8),
    )
    total = 0
    for factor, column in zip(_COLUMN_FACTORS, columns, strict=True):
        flat = np.ascontiguousarray(column).view(np.uint8)
        whole = len(flat) // 8 * 8
        words = int(flat[:whole].view("<u8").sum(dtype=np.uint64))
        total += factor * (words + int.from_bytes(flat[whole:].tobytes(), "little"))
    return digest_text(total % (1 << 64))
