"""Failed rows: the rows of messages to send back, as the caller passes them; their check, and their columns as arrays.

A row identifies its message in three ways: by the physical offset of the record, by queue and queue offset, and by the
number of retries. All three must agree with the log, so that an invented row sends no message back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.columns import COLUMNS
from rmq_spark.store.format.failed_columns import (
    COPY_TIMES,
    FAILED_COLUMNS,
    PLACE_TYPES,
    TOPICS,
    failed_column_type,
    refuse_missing_places,
)
from rmq_spark.store.format.message_columns import RowFault, Texts
from rmq_spark.store.format.message_ids import scatter
from rmq_spark.store.format.property_encoder import name_digest

_NOT_ARROW = (pa.ArrowException, TypeError, ValueError, OverflowError)
_MAX_TIMES = (1 << 31) - 1
_OF_LEVEL = np.uint64(0x6A09E667F3BCC909)  # digits of sqrt(2): keeps level and retries apart from offsets in a digest


def failed_rows_of(given: object) -> pa.RecordBatch:
    """Return the caller's rows as one RecordBatch with the right column types.

    `given` is a pyarrow Table or RecordBatch, or a list of mappings from column name to value. Raises OptionError if it
    is something else, or if columns are missing, unknown, duplicate, or of a type that cannot be converted.
    """
    try:
        if isinstance(given, pa.RecordBatch):
            given = pa.Table.from_batches([given])
        elif isinstance(given, list | tuple) and all(isinstance(row, Mapping) for row in given):
            given = pa.Table.from_pylist(list(given)) if given else _NONE
        if not isinstance(given, pa.Table):
            raise OptionError(
                f"rows cannot be sent back: expected a pyarrow Table or RecordBatch, or a list of mappings by column, "
                f"not {type(given).__name__}. For rows of Spark use row.asDict()."
            )
        names = given.column_names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise OptionError(f"duplicate columns: {', '.join(twice)}. Rename one, or leave it out.")
        unknown = [name for name in names if name not in FAILED_COLUMNS]
        if unknown:
            raise OptionError(
                f"no such column: {', '.join(unknown)}. Expected are the columns of the source, delayLevel and error."
            )
        refuse_missing_places(names)
        columns = {name: given[name].cast(failed_column_type(name, given[name].type)) for name in names}
        if "properties" in columns:
            columns["properties"] = _as_maps(columns["properties"])
        table = pa.table(columns)
        batches = table.combine_chunks().to_batches()
        return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)
    except _NOT_ARROW as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"rows cannot be sent back: {error}. Nothing was sent back.") from None


def _as_maps(properties: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return properties as maps. Arrow makes structs of dicts, and lists of the pairs into which it turns maps."""
    kind = properties.type
    if not (pa.types.is_struct(kind) or pa.types.is_list(kind)):
        return properties
    maps = [
        None if row is None else [pair for pair in dict(row).items() if pair[1] is not None]
        for row in properties.to_pylist()
    ]
    return pa.chunked_array([pa.array(maps, COLUMNS["properties"])])


_NONE = pa.Table.from_pylist([], pa.schema([*PLACE_TYPES.items(), ("topic", pa.string())]))


@dataclass(frozen=True, slots=True)
class FailedRows:
    """The columns of a batch of failed rows, as arrays of equal length.

    `asked_levels` are the delay levels asked for, 0 if none. `errors` and `brokers` may contain nulls. `copy_times` are
    the reconsumeTimes of the copies. `physical_topics`, `topics`, `errors` and `brokers` are None if the batch has no
    such column.
    """

    physical_offsets: NDArray[np.int64]
    queue_ids: NDArray[np.int64]
    queue_offsets: NDArray[np.int64]
    reconsume_times: NDArray[np.int64]
    asked_levels: NDArray[np.int64]
    physical_topics: pa.StringArray | None
    topics: pa.StringArray | None  # topics as a consumer sees them; used where physical_topics is null
    errors: pa.StringArray | None
    copy_times: NDArray[np.int64]
    brokers: pa.StringArray | None = None

    @classmethod
    def of(cls, rows: pa.RecordBatch, delay_level: int = 0) -> "FailedRows":
        """Return the columns of `rows`, which must have the types that `failed_rows_of` gives them.

        `delay_level` applies to rows without a delay level of their own. Raises RowFault if a row lacks a value that
        identifies its message, or has a negative one.
        """
        columns: dict[str, Any] = dict(zip(rows.schema.names, rows.columns, strict=True))
        numbers = {name: _numbers(name, columns[name]) for name in PLACE_TYPES}
        for name in ("commitLogOffset", "queueId", "queueOffset"):
            values = numbers[name]
            for row in np.flatnonzero(values < 0)[:1].tolist():
                raise RowFault(row, f"its {name} is {values[row]}; expected 0 or more")
        given = {name: columns[name] for name in TOPICS if name in columns}
        named = pc.coalesce(*given.values())
        if named.null_count:
            raise RowFault(named.is_null().index(True).as_py(), f"its {' and '.join(given)} is null")
        levels = np.full(rows.num_rows, delay_level, np.int64)
        if "delayLevel" in columns:
            levels = pc.fill_null(columns["delayLevel"].cast(pa.int64()), delay_level).to_numpy()
        copy_times = next_times(numbers["reconsumeTimes"])
        if COPY_TIMES in columns:
            copy_times = pc.coalesce(columns[COPY_TIMES].cast(pa.int64()), pa.array(copy_times)).to_numpy()
        return cls(
            numbers["commitLogOffset"],
            numbers["queueId"],
            numbers["queueOffset"],
            numbers["reconsumeTimes"],
            levels,
            given.get("physicalTopic"),
            given.get("topic"),
            columns.get("error"),
            copy_times,
            columns.get("brokerName"),
        )

    def __len__(self) -> int:
        return len(self.physical_offsets)

    def digest(self, group: str) -> int:
        """Return a digest of the rows when they are sent back for `group`.

        Batches that send the same messages back in the same way have the same digest, whatever the order of their rows.
        """
        rows = scatter(self.physical_offsets.view(np.uint64) + name_digest(group))
        rows += scatter(self.queue_offsets.view(np.uint64) ^ _OF_LEVEL)
        extra = (self.asked_levels.astype(np.int32).view(np.uint32).astype(np.uint64) << np.uint64(32)) | (
            self.reconsume_times.astype(np.int32).view(np.uint32).astype(np.uint64)
        )
        rows += scatter(extra * _OF_LEVEL)
        if self.errors is not None:
            texts = Texts.of(self.errors)
            rows += scatter(texts.hashes.digests()) * (texts.sizes > 0)
        return int(scatter(rows).sum())

    def take(self, rows: NDArray[np.intp]) -> "FailedRows":
        """Return the rows with these numbers, in the order of the numbers."""
        chosen = pa.array(rows)

        def some(column: pa.Array | None) -> pa.Array | None:
            return None if column is None else column.take(chosen)

        return FailedRows(
            self.physical_offsets[rows],
            self.queue_ids[rows],
            self.queue_offsets[rows],
            self.reconsume_times[rows],
            self.asked_levels[rows],
            some(self.physical_topics),
            some(self.topics),
            some(self.errors),
            self.copy_times[rows],
            some(self.brokers),
        )

    def describe(self, row: int) -> str:
        """Return a text for errors that names the message of row number `row`."""
        given = next(one for one in (self.physical_topics, self.topics) if one is not None and one[row].is_valid)
        broker = "" if self.brokers is None or not self.brokers[row].is_valid else f"{self.brokers[row].as_py()}/"
        return (
            f"{given[row].as_py()}/{broker}{self.queue_ids[row]} at queue offset {self.queue_offsets[row]}, "
            f"commitLogOffset {self.physical_offsets[row]}"
        )


def next_times(reconsume_times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the reconsumeTimes of the copies: one more than given, but at most Java's largest int."""
    return np.minimum(reconsume_times + 1, _MAX_TIMES)


def row_keys(rows: FailedRows) -> NDArray[np.uint64]:
    """Return a key for each row. Rows of the same message have the same key; others differ, except by rare chance."""
    return scatter(rows.physical_offsets.astype(np.int64).view(np.uint64).copy()) ^ rows.queue_offsets.view(np.uint64)


def _numbers(name: str, column: pa.Array) -> NDArray[np.int64]:
    if column.null_count:
        raise RowFault(column.is_null().index(True).as_py(), f"its {name} is null; expected that of the message")
    numbers: NDArray[np.int64] = column.cast(pa.int64()).to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers
