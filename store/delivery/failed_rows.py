"""Rows of messages that were not consumed, as who sends them back hands them over: checked, and as numbers.

A row names its message three times: by the physical offset of its record, by its queue and queue offset, and by how
often it was consumed anew. All three must agree with what the log has: a row that was made up sends nothing back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.delivery.retry_decision import next_times
from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.columns import COLUMNS
from rmq_spark.store.format.message_columns import RowFault, Texts
from rmq_spark.store.format.outgoing_properties import name_digest
from rmq_spark.store.format.text_hashes import scatter

# What every row has; the topic comes as physicalTopic, or, where that is not there, as topic.
PLACE_TYPES = {
    "commitLogOffset": pa.int64(),
    "queueId": pa.int32(),
    "queueOffset": pa.int64(),
    "reconsumeTimes": pa.int32(),
}
OWN_TYPES = {"delayLevel": pa.int32(), "error": pa.string()}  # what the source does not have, and a row may
TOPICS = ("physicalTopic", "topic")
FAILED_COLUMNS = (*COLUMNS, *OWN_TYPES)
# What the copy's reconsumeTimes is to be; null: one more. Nobody but an orderly listener counts apart from the row.
COPY_TIMES = "copyReconsumeTimes"
_INNER_TYPES = {COPY_TIMES: pa.int32()}

_NOT_ARROW = (pa.ArrowException, TypeError, ValueError, OverflowError)
_EXAMPLE = '.select("commitLogOffset", "physicalTopic", "queueId", "queueOffset", "reconsumeTimes")'
_OF_LEVEL = np.uint64(0x6A09E667F3BCC909)  # keeps level and times apart from the place: digits of the root of 2


def missing_columns(names: Sequence[str]) -> list[str]:
    """Return what rows with these columns lack to be sent back, in words."""
    missing = [name for name in PLACE_TYPES if name not in names]
    return missing if set(TOPICS) & set(names) else [*missing, "physicalTopic (or topic)"]


def refuse_missing_places(names: Sequence[str]) -> None:
    """Raise OptionError, which names what is missing, unless rows with these columns say which messages they are."""
    missing = missing_columns(names)
    if missing:
        raise OptionError(
            f"rows cannot be sent back without {', '.join(missing)}: they say which message failed. The source has "
            f'these columns; physicalTopic is there on request: .option("columns", "*") and then {_EXAMPLE}.'
        )


def failed_rows_of(given: object) -> pa.RecordBatch:
    """Return what a program gave as one batch of rows: a table, a batch, or a list of mappings by column.

    Raises OptionError for columns that are missing, unknown, there twice, or of another type.
    """
    try:
        if isinstance(given, pa.RecordBatch):
            given = pa.Table.from_batches([given])
        elif isinstance(given, list | tuple) and all(isinstance(row, Mapping) for row in given):
            given = pa.Table.from_pylist(list(given)) if given else _NONE
        if not isinstance(given, pa.Table):
            raise OptionError(
                f"rows are sent back from a pyarrow Table or RecordBatch, or a list of mappings by column, not "
                f"{type(given).__name__}. For rows of Spark: row.asDict()."
            )
        names = given.column_names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise OptionError(f"columns that are there twice: {', '.join(twice)}. Rename one, or leave it out.")
        unknown = [name for name in names if name not in FAILED_COLUMNS]
        if unknown:
            raise OptionError(
                f"no such column: {', '.join(unknown)}. Columns are those of the source, delayLevel and error."
            )
        refuse_missing_places(names)
        table = pa.table({name: given[name].cast(failed_column_type(name, given[name].type)) for name in names})
        batches = table.combine_chunks().to_batches()
        return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)
    except _NOT_ARROW as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"no rows to send back: {error}. Nothing was sent back.") from None


def failed_column_type(name: str, given: pa.DataType) -> pa.DataType:
    """Return the type in which a column is worked on; those that are only looked at in passing stay as they are."""
    if name == "properties" or (name == "keys" and not pa.types.is_string(given)):
        return given if not pa.types.is_null(given) else COLUMNS[name]
    return {**COLUMNS, **OWN_TYPES, **_INNER_TYPES}[name]


_NONE = pa.Table.from_pylist([], pa.schema([*PLACE_TYPES.items(), ("topic", pa.string())]))


@dataclass(frozen=True, slots=True)
class FailedRows:
    """The rows of one batch, by columns. `asked_levels` is 0 where none was asked for; `errors` may hold nulls.

    `copy_times` are the reconsumeTimes of the copies.
    """

    physical_offsets: NDArray[np.int64]
    queue_ids: NDArray[np.int64]
    queue_offsets: NDArray[np.int64]
    reconsume_times: NDArray[np.int64]
    asked_levels: NDArray[np.int64]
    physical_topics: pa.StringArray | None
    topics: pa.StringArray | None  # what a consumer sees, where physical_topics has nothing
    errors: pa.StringArray | None
    copy_times: NDArray[np.int64]

    @classmethod
    def of(cls, rows: pa.RecordBatch, delay_level: int = 0) -> "FailedRows":
        """Take rows with these columns in their types; `delay_level` is for those that ask for none.

        Raises RowFault for a row that does not say which message it is.
        """
        columns: dict[str, Any] = dict(zip(rows.schema.names, rows.columns, strict=True))
        numbers = {name: _numbers(name, columns[name]) for name in PLACE_TYPES}
        for name in ("commitLogOffset", "queueId", "queueOffset"):
            values = numbers[name]
            for row in np.flatnonzero(values < 0)[:1].tolist():
                raise RowFault(row, f"its {name} is {values[row]}: no message has that")
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
        )

    def __len__(self) -> int:
        return len(self.physical_offsets)

    def digest(self, group: str) -> int:
        """Return a number that tells whether two batches send the same messages back, in the same way, in any order."""
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
        """Return some of the rows, in this order."""
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
        )

    def describe(self, row: int) -> str:
        """Return in words which message a row names."""
        given = next(one for one in (self.physical_topics, self.topics) if one is not None and one[row].is_valid)
        return (
            f"{given[row].as_py()}/{self.queue_ids[row]} at queue offset {self.queue_offsets[row]}, "
            f"commitLogOffset {self.physical_offsets[row]}"
        )


def row_keys(rows: FailedRows) -> NDArray[np.uint64]:
    """Return a number for each row by which it is known again: other rows of a store have others, but by chance."""
    return scatter(rows.physical_offsets.astype(np.int64).view(np.uint64).copy()) ^ rows.queue_offsets.view(np.uint64)


def _numbers(name: str, column: pa.Array) -> NDArray[np.int64]:
    if column.null_count:
        raise RowFault(column.is_null().index(True).as_py(), f"its {name} is null: it says which message failed")
    numbers: NDArray[np.int64] = column.cast(pa.int64()).to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers
