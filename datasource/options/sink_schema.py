"""Columns that can be written or sent back, the checks of a DataFrame's schema, and the conversion for the encoder.

Does not import Spark. Rows are converted for the engine's encoder so that these invariants hold:

- Strings and bytes have 32-bit offsets, whatever spark.sql.execution.arrow.useLargeVarTypes is.
- A piece of rows has at most PIECE_ROWS rows and at most PIECE_BYTES bytes, or is a single row. This limits memory,
  because Spark limits only the number of rows in a batch, and ten thousand bodies may have forty gigabytes.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from rmq_spark.datasource.options.schema import SPARK_TYPES, Field
from rmq_spark.store.backend import BROKER_NAME, failed_column_type, refuse_missing_places
from rmq_spark.store.errors import OptionError

# The types that each column may have, by Spark's names. `remedy` casts to the first one.
SINK_COLUMNS: dict[str, tuple[str, ...]] = {
    "body": ("string", "binary"),
    "topic": ("string",),
    "tags": ("string",),
    "keys": ("string", "array<string>"),
    "properties": ("map<string,string>",),
    "queueId": ("int",),
    BROKER_NAME: ("string",),
    "shardingKey": ("string",),
    "flag": ("int",),
    "delayLevel": ("int",),
    "deliverTimestamp": ("timestamp",),
}
COLLATION = re.compile(r"(?<=string) collate \w+")
_NESTED = ("struct", "array", "map")
_ONE_TEXT = ("tags", "topic", "shardingKey")


def check_sink_schema(given: Sequence[Field], topic: str | None) -> tuple[str, ...]:
    """Check that a DataFrame with these columns can be written, and return their names.

    `topic` is the option topic, or None. Raises OptionError for an unknown or repeated column, a wrong type, and a
    missing body or topic. The error's message contains the call that corrects the DataFrame.
    """
    names = tuple(column.name for column in given)
    _check_known([column for column in given if column.name not in SINK_COLUMNS], names)
    check_distinct(names)
    for column in given:
        spark_type = COLLATION.sub("", column.spark_type)
        accepted = SINK_COLUMNS[column.name]
        if spark_type not in accepted:
            raise OptionError(
                f"column {column.name} is {spark_type}, expected {' or '.join(accepted)}. "
                f"{remedy(column.name, spark_type, accepted[0])}"
            )
    if "body" not in names:
        raise _no_body(names)
    if topic is None and "topic" not in names:
        raise OptionError(
            "found neither a column topic nor the option topic; expected one of them. Give the option, as in "
            '.option("topic", "orders"), or the column, as in .withColumn("topic", lit("orders")).'
        )
    return names


def check_distinct(names: Sequence[str]) -> None:
    """Raise OptionError if a name occurs twice."""
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f'column "{name}" exists twice. Rename one of them, or leave it out in a select.')


def _check_known(unknown: Sequence[Field], names: Sequence[str]) -> None:
    if not unknown:
        return
    renamed = _renamed(unknown, names)
    if not renamed and "body" not in names:
        raise _no_body(names)  # without the unknown columns the body would still be missing
    dropped = list(dict.fromkeys(column.name for column in unknown if column.name not in renamed))
    calls = "".join(f'.withColumnRenamed("{name}", "{meant}")' for name, meant in renamed.items())
    if dropped:
        calls += f".drop({_quoted(dropped)})"
    if all(column.name in SPARK_TYPES for column in unknown) and not renamed:
        raise OptionError(
            f"{', '.join(dropped)}: given by the store when a message is written, not by a column. Leave these out: "
            f"{calls}."
        )
    hint = "Leave out the other columns"
    if renamed:
        hint = f"Did you mean {' and '.join(renamed.values())}? Rename {'it' if len(renamed) == 1 else 'them'}"
        hint += ", and leave out the other columns" if dropped else ""
    raise OptionError(
        f"there is no column {_quoted(dict.fromkeys(column.name for column in unknown))} to write; expected some of: "
        f"{', '.join(SINK_COLUMNS)}. {hint}: {calls}."
    )


def _no_body(names: Sequence[str]) -> OptionError:
    return OptionError(
        f"there is no column body, which every message needs. Columns are: {', '.join(names)}. Make one, as in "
        '.select(to_json(struct("*")).alias("body")) or .withColumnRenamed("value", "body").'
    )


def _renamed(unknown: Sequence[Field], names: Sequence[str]) -> dict[str, str]:
    """Return the unknown columns that probably have a wrong name, each with the name that was probably meant.

    A column is included if its name is similar to that of a missing column. If the column body is missing, a column
    that may be the body is included too: `value`, the name in Spark's text and Kafka sources, or the only column of a
    possible type.
    """
    missing = {column.lower(): column for column in SINK_COLUMNS if column not in names}
    renamed = {}
    for column in unknown:
        if column.name in SPARK_TYPES:
            continue  # a column of the source with another meaning: bornTimestamp is not deliverTimestamp
        for near in difflib.get_close_matches(column.name.lower(), missing, 1):
            renamed[column.name] = missing.pop(near)
    bodies = [
        column.name
        for column in unknown
        if column.name not in renamed
        and column.name not in SPARK_TYPES
        and COLLATION.sub("", column.spark_type) in SINK_COLUMNS["body"]
    ]
    if "body" in missing and (len(bodies) == 1 or "value" in bodies):
        renamed["value" if "value" in bodies else bodies[0]] = "body"
    return renamed


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def remedy(name: str, found: str, wanted: str) -> str:
    """Return advice with the call that converts the column `name` from the type `found` to the type `wanted`."""
    if found.startswith("array") and name == "keys":
        return f'Cast it: .withColumn("{name}", col("{name}").cast("array<string>")).'
    if found.startswith("array") and name in _ONE_TEXT:
        return f'A message has one: take one of the strings, as in .withColumn("{name}", get("{name}", 0)).'
    if found.startswith(_NESTED) and wanted == "string":
        return f'Make text of it: .withColumn("{name}", to_json("{name}")).'
    if wanted.startswith("map") and not found.startswith("map"):
        return f'Make a map of it: .withColumn("{name}", create_map(lit("name"), col("value"))).'
    return f'Cast it: .withColumn("{name}", col("{name}").cast("{wanted}")).'


# The columns that rows to send back may have in addition to the columns of the source.
SEND_BACK_COLUMNS = {"delayLevel": "int", "error": "string"}


def check_send_back_schema(given: Sequence[Field]) -> tuple[str, ...]:
    """Check that the rows of a DataFrame with these columns can be sent back, and return the columns' names.

    Raises OptionError for a column that is not one of the source, delayLevel or error; for a repeated column; for a
    column that has another type than in the source; and if a column that identifies the message is missing.
    """
    accepted = {**SPARK_TYPES, **SEND_BACK_COLUMNS}
    names = tuple(column.name for column in given)
    unknown = list(dict.fromkeys(name for name in names if name not in accepted))
    if unknown:
        quoted = ", ".join(f'"{name}"' for name in unknown)
        raise OptionError(
            f"there is no column {quoted} to send back; expected the columns of the source, delayLevel and error. "
            f"Leave the others out: .drop({quoted})."
        )
    check_distinct(names)
    refuse_missing_places(names)
    for column in given:
        spark_type = COLLATION.sub("", column.spark_type)
        if spark_type != accepted[column.name]:
            raise OptionError(
                f"column {column.name} is {spark_type}, expected {accepted[column.name]}. "
                f"{remedy(column.name, spark_type, accepted[column.name])}"
            )
    return names


def normalise_failed(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows to send back, with each column in the one type that the engine expects.

    Spark's types depend on useLargeVarTypes.
    """
    columns = {
        name: column.cast(failed_column_type(name, column.type))
        for name, column in zip(rows.schema.names, rows.columns, strict=True)
    }
    return pa.RecordBatch.from_pydict(columns)


PIECE_BYTES = 16 << 20
PIECE_ROWS = 1 << 15
_STRINGS = pa.list_(pa.string())
_TYPES = {
    "topic": pa.string(),
    "body": pa.binary(),
    "tags": pa.string(),
    "properties": pa.map_(pa.string(), pa.string()),
    "queueId": pa.int32(),
    BROKER_NAME: pa.string(),
    "shardingKey": pa.string(),
    "flag": pa.int32(),
    "delayLevel": pa.int32(),
    "deliverTimestamp": pa.timestamp("us", tz="UTC"),
}


def cut_pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a batch in order, in pieces of at most PIECE_ROWS rows and PIECE_BYTES bytes.

    A single row may be larger. Nothing is copied.
    """
    if batch.num_rows == 0:
        return
    if batch.num_rows == 1 or (batch.num_rows <= PIECE_ROWS and batch.nbytes <= PIECE_BYTES):
        yield batch
        return
    middle = batch.num_rows // 2
    yield from cut_pieces(batch.slice(0, middle))
    yield from cut_pieces(batch.slice(middle))


def normalise_columns(rows: pa.RecordBatch, topic: str | None, *, has_brokers: bool = False) -> pa.RecordBatch:
    """Return rows to write, with each column in the one type that the encoder expects.

    If `topic` is given, it becomes the topic of all rows. `has_brokers` is whether the place has broker names; if not,
    the column brokerName is left out. `check_sink_schema` must have accepted the columns.
    """
    columns = {
        name: _cast(name, column)
        for name, column in zip(rows.schema.names, rows.columns, strict=True)
        if has_brokers or name != BROKER_NAME
    }
    if topic is not None:
        columns["topic"] = pa.repeat(pa.scalar(topic, pa.string()), rows.num_rows)
    return pa.RecordBatch.from_pydict(columns)


def _cast(name: str, column: pa.Array) -> pa.Array:
    """Return a column in the type that the encoder expects. Nothing is copied if the bytes of both types are equal."""
    if name == "keys":
        is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        return column.cast(_STRINGS if is_list else pa.string())
    return column.cast(_TYPES[name])
