"""What Spark hands to a task, as Arrow -> the columns that the engine's encoder takes.

Invariants:
- texts and bytes have 32-bit offsets, whatever Spark was told (spark.sql.execution.arrow.useLargeVarTypes);
- a piece holds at most PIECE_ROWS rows, and at most PIECE_BYTES unless it is one row: Spark cuts its batches by
  rows alone, and ten thousand bodies may be forty gigabytes.
"""

from collections.abc import Iterator

import pyarrow as pa

PIECE_BYTES = 16 << 20
PIECE_ROWS = 1 << 15

_STRINGS = pa.list_(pa.string())
_TYPES = {
    "topic": pa.string(),
    "body": pa.binary(),
    "tags": pa.string(),
    "properties": pa.map_(pa.string(), pa.string()),
    "queueId": pa.int32(),
    "shardingKey": pa.string(),
    "flag": pa.int32(),
    "delayLevel": pa.int32(),
    "deliverTimestamp": pa.timestamp("us", tz="UTC"),
}


def cut_pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a batch in order, in pieces that are small enough to work on; nothing is copied."""
    if batch.num_rows == 0:
        return
    if batch.num_rows == 1 or (batch.num_rows <= PIECE_ROWS and batch.nbytes <= PIECE_BYTES):
        yield batch
        return
    middle = batch.num_rows // 2
    yield from cut_pieces(batch.slice(0, middle))
    yield from cut_pieces(batch.slice(middle))


def normalise_columns(rows: pa.RecordBatch, topic: str | None) -> pa.RecordBatch:
    """Return the rows as the encoder takes them: every column in its one type, `topic`, if given, as their topic.

    The columns were checked by `sink_schema` when the write was planned.
    """
    columns = {name: _cast(name, column) for name, column in zip(rows.schema.names, rows.columns, strict=True)}
    if topic is not None:
        columns["topic"] = pa.repeat(pa.scalar(topic, pa.string()), rows.num_rows)
    return pa.RecordBatch.from_pydict(columns)


def _cast(name: str, column: pa.Array) -> pa.Array:
    """Return a column in the type that the encoder takes; free where it has that type, or the same bytes."""
    if name == "keys":
        is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        return column.cast(_STRINGS if is_list else pa.string())
    return column.cast(_TYPES[name])
