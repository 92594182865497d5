"""Messages as programs pass them: a table, or the arguments of `send`; their check, and their columns in Arrow types.

The checks raise OptionError before anything is stored.
"""

import difflib
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.store.argument_checks import check_setting
from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.batch_items import BROKER_NAME
from rmq_spark.store.format.config_json import PERM_READ, PERM_WRITE
from rmq_spark.store.format.message_encoder import MESSAGE_COLUMNS
from rmq_spark.store.model import LAST_SECONDS_MS, describe_unit, is_in_another_unit
from rmq_spark.store.names import MAX_QUEUES, check_sent_topic, check_topic_name

PERMS = (PERM_WRITE, PERM_READ, PERM_READ | PERM_WRITE)
MAX_TIME_MS = (1 << 53) - 1  # readers in any language may use doubles, which represent integers up to this exactly
MESSAGE_TYPES = {
    "topic": pa.string(),
    "body": pa.binary(),
    "tags": pa.string(),
    "keys": pa.string(),
    "properties": pa.map_(pa.string(), pa.string()),
    "shardingKey": pa.string(),
    "queueId": pa.int32(),
    "flag": pa.int32(),
    "delayLevel": pa.int32(),
    "deliverTimestamp": pa.timestamp("ms", tz="UTC"),  # or another unit, or integers (ms)
}
assert tuple(MESSAGE_TYPES) == MESSAGE_COLUMNS
_TYPES = {**MESSAGE_TYPES, BROKER_NAME: pa.string()}
_KEYS_AS_LISTS = pa.list_(pa.string())  # the encoder joins the keys of a list as a client does
_SCHEMA = pa.schema(list(MESSAGE_TYPES.items()))
_SCHEMA_WITH_KEYS_AS_LISTS = pa.schema(list({**MESSAGE_TYPES, "keys": _KEYS_AS_LISTS}.items()))
_INTEGER_FIELDS = ("queueId", "flag", "delayLevel")
_SHOWN_CHARS = 80  # of a wrong value in an error
_TYPES_ARE = f"Types are: {', '.join(f'{name} {kind}' for name, kind in MESSAGE_TYPES.items())}."
_CONVERSION_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError)  # ValueError: a text is not UTF-8


def check_topic(topic: object) -> str:
    """Return the name of a topic. Raises OptionError unless it is a str and a broker accepts it."""
    if not isinstance(topic, str):
        raise OptionError(f"topic={topic!r} is not a str.")
    return check_topic_name(topic)


def check_new_topic(topic: object, queues: object, perm: object) -> None:
    """Raise OptionError unless a topic can be created with this name, number of queues and permission (4, 2 or 6)."""
    check_sent_topic(check_topic(topic))
    check_setting("queues", queues, 1, MAX_QUEUES)
    if type(perm) is not int or perm not in PERMS:
        raise OptionError(f"perm={perm!r} is none of: 6 (read and write), 4 (read), 2 (write).")


def message_of(row: dict[str, Any]) -> pa.RecordBatch:
    """Return one message as a batch of one row for the encoder. Raises OptionError if a value is invalid.

    `row` must have all of MESSAGE_COLUMNS, and may have brokerName; properties is a mapping or None. The call may
    change values in `row`.
    """
    schema = _SCHEMA_WITH_KEYS_AS_LISTS if isinstance(row["keys"], list | tuple) else _SCHEMA
    if BROKER_NAME in row:
        schema = schema.append(pa.field(BROKER_NAME, pa.string()))
    try:
        properties, body = row["properties"], row["body"]
        if properties is not None:
            row["properties"] = list(dict(properties).items())
        if isinstance(body, str):
            row["body"] = body.encode()
        time_ms = row["deliverTimestamp"]
        if time_ms is not None:
            check_setting("deliver_at_ms", time_ms, 0, MAX_TIME_MS)
            if is_in_another_unit(time_ms):
                raise OptionError(f"deliver_at_ms={time_ms} {describe_unit(time_ms)}.")
        for name in _INTEGER_FIELDS:  # Arrow would truncate a fraction
            if isinstance(row[name], float) and not row[name].is_integer():
                raise ValueError(f"{name}: {row[name]!r} is not an integer")
        return pa.RecordBatch.from_pylist([row], schema=schema)
    except _CONVERSION_ERRORS as error:
        wrong = _describe_wrong(row, schema, str(error).removesuffix("."))
        raise OptionError(f"invalid message: {wrong} {_TYPES_ARE} Nothing was appended.") from None


def _describe_wrong(row: Mapping[str, Any], schema: pa.Schema, error: str) -> str:
    """Return what is wrong with the first field that cannot be converted, and `error` if each one can be."""
    for column in schema:
        value = row[column.name]
        try:
            pa.array([value], column.type)
        except _CONVERSION_ERRORS:
            is_text, is_bytes = pa.types.is_string(column.type), pa.types.is_binary(column.type)
            if isinstance(value, str | bytes) or not (is_text or is_bytes):
                return f"{column.name}: {error}."
            shown = repr(value)
            if len(shown) > _SHOWN_CHARS:
                shown = f"{shown[:_SHOWN_CHARS]}…"
            expected, remedy = "text" if is_text else "bytes or text", ""
            if column.name == "keys":
                expected = "text or a list of texts"
            elif is_text and isinstance(value, list | tuple | set):
                remedy = " A message has one: send one message for each."
            elif is_bytes and isinstance(value, dict | list):
                remedy = " Make text of it: json.dumps(…)."
            return f"{column.name}: found {shown}; expected {expected}.{remedy}"
    return f"{error}."


def messages_of(given: object, topic: str | None, *, has_brokers: bool = False) -> pa.Table:
    """Check the columns of a pyarrow Table or RecordBatch of messages, and return them as a table for the encoder.

    The column keys may contain texts or lists of texts. If `topic` is given, it replaces the column topic. The column
    brokerName is left out unless the place `has_brokers`. Raises OptionError if columns are missing, unknown or
    duplicate, or cannot be converted.
    """
    if not isinstance(given, pa.Table | pa.RecordBatch):
        raise OptionError(
            f"send_many takes a pyarrow Table or RecordBatch, not {type(given).__name__}. For a list of dicts: "
            "pyarrow.Table.from_pylist(rows)."
        )
    table = pa.Table.from_batches([given]) if isinstance(given, pa.RecordBatch) else given
    names = table.column_names
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise OptionError(f"duplicate columns: {', '.join(duplicates)}. Rename one, or drop it.")
    if topic is not None:
        table = table.drop_columns(["topic"]) if "topic" in names else table
        table = table.append_column("topic", pa.repeat(pa.scalar(check_topic(topic)), len(table)))
    if not has_brokers and BROKER_NAME in table.column_names:
        table = table.drop_columns([BROKER_NAME])
    columns = [name for name in _TYPES if has_brokers or name != BROKER_NAME]
    unknown = set(table.column_names) - set(_TYPES)
    missing = {"topic", "body"} - set(table.column_names)
    if unknown or missing:
        wrong = f"no such column: {', '.join(sorted(unknown))}" if unknown else f"no {' and no '.join(sorted(missing))}"
        near = [match for name in sorted(unknown) for match in difflib.get_close_matches(name, columns, 1)]
        hint = f"Did you mean {' and '.join(near)}? " if near else ""
        raise OptionError(f"{wrong}. {hint}Columns are: {', '.join(columns)}; body and topic are required.")
    return cast_columns(table)


def cast_columns(table: pa.Table) -> pa.Table:
    """Return the table with its columns cast to the encoder's types. Each must be one of MESSAGE_COLUMNS or brokerName.

    Raises OptionError if values cannot be converted, or if integers in deliverTimestamp are seconds instead of ms.
    """
    columns = []
    for column in table.schema:
        try:
            columns.append(table.column(column.name).cast(_encoder_type(column)))
        except _CONVERSION_ERRORS as error:
            found = str(error).removesuffix(".")
            raise OptionError(
                f"invalid messages: column {column.name}: {found}. {_TYPES_ARE} Nothing was appended."
            ) from None
        if column.name == "deliverTimestamp" and pa.types.is_integer(column.type):
            times_ms = columns[-1].cast(pa.int64())
            are_seconds = pc.and_(pc.greater(times_ms, 0), pc.less_equal(times_ms, LAST_SECONDS_MS))
            row = pc.index(are_seconds, True).as_py()
            if row >= 0:
                found = describe_unit(times_ms[row].as_py())
                raise OptionError(
                    f"invalid messages: column deliverTimestamp: {times_ms[row]} {found}. Nothing was appended."
                )
    return pa.Table.from_arrays(columns, names=table.column_names)


def _encoder_type(column: pa.Field) -> pa.DataType:
    if column.name == "deliverTimestamp" and pa.types.is_timestamp(column.type):
        return column.type  # keeps its unit, because the encoder rounds the time
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    return _KEYS_AS_LISTS if column.name == "keys" and is_list else _TYPES[column.name]
