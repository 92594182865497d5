"""What programs hand to a `MessageStore`, looked at before anything is changed: numbers, words, topics, rows.

Every function raises OptionError for what is not acceptable, with what was given and what is accepted.
"""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.config_json import PERM_READ, PERM_WRITE
from rmq_spark.store.format.delay_levels import DelayLevels
from rmq_spark.store.format.encoding import MESSAGE_COLUMNS
from rmq_spark.store.format.filenames import check_sent_topic, check_topic_name
from rmq_spark.store.format.store_settings import BROKER_VERSIONS, DelayTerms
from rmq_spark.store.log.topics import MAX_QUEUES
from rmq_spark.store.units import LAST_SECONDS_MS, describe_unit, is_in_another_unit

FLUSHES = ("async", "sync")
COMPRESSIONS = ("none", "zlib", "lz4", "zstd")
PERMS = (PERM_WRITE, PERM_READ, PERM_READ | PERM_WRITE)
MAX_SEGMENT_BYTES = (1 << 31) - 1  # mappedFileSizeCommitLog is a Java int
MAX_TIME_MS = (1 << 53) - 1  # exact in every language that may read it, and far enough
MAX_TIMER_DELAY_S = (1 << 31) - 1  # timerMaxDelaySec is a Java int
_MIN_SEGMENT_BYTES = 1024  # a record without a body takes a tenth of it

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
    "deliverTimestamp": pa.timestamp("ms", tz="UTC"),  # or another unit, or ms as whole numbers
}
assert tuple(MESSAGE_TYPES) == MESSAGE_COLUMNS
_KEYS_AS_LISTS = pa.list_(pa.string())  # the encoder joins them as a client does
_SCHEMA = pa.schema(list(MESSAGE_TYPES.items()))
_SCHEMA_WITH_KEYS_AS_LISTS = pa.schema(list({**MESSAGE_TYPES, "keys": _KEYS_AS_LISTS}.items()))
_WHOLE = ("queueId", "flag", "delayLevel")
_TYPES_ARE = f"Types are: {', '.join(f'{name} {kind}' for name, kind in MESSAGE_TYPES.items())}."
_NOT_ARROW = (pa.ArrowException, TypeError, ValueError, OverflowError)  # a text that is no UTF-8 is a ValueError


def check_opening(
    *,
    flush: object,
    queues: object,
    create_topic: object,
    compression: str | None,
    compress_over: object,
    commit_log_path: object,
    lock_timeout_ms: object,
    allow_network_store: object,
    segment_bytes: object,
) -> str | None:
    """Look at what `open_store` was given, but for the path; return the name of a compression, None for none."""
    check_word("flush", flush, FLUSHES)
    check_queue_count(queues)
    check_number("compress_over", compress_over, 0)
    check_number("lock_timeout_ms", lock_timeout_ms, 0)
    check_number("segment_bytes", segment_bytes, _MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES)
    check_flags(create_topic=create_topic, allow_network_store=allow_network_store)
    if commit_log_path is not None and not isinstance(commit_log_path, str):
        raise OptionError(f"commit_log_path={commit_log_path!r} is no str: a folder, or several joined by commas.")
    if compression is not None:
        check_word("compression", compression, COMPRESSIONS)
    return None if compression == "none" else compression


def check_delays(message_delay_level: object, timer_max_delay_sec: object, broker_version: object) -> DelayTerms:
    """Return what `open_store` was given of delays; None is nothing."""
    if timer_max_delay_sec is not None:
        check_number("timer_max_delay_sec", timer_max_delay_sec, 0, MAX_TIMER_DELAY_S)
    if broker_version is not None:
        check_word("broker_version", broker_version, BROKER_VERSIONS)
    levels = None if message_delay_level is None else DelayLevels.parse(message_delay_level)
    assert timer_max_delay_sec is None or isinstance(timer_max_delay_sec, int)
    assert broker_version is None or isinstance(broker_version, str)
    return DelayTerms(levels, timer_max_delay_sec, broker_version)


def check_number(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise unless `value` is a whole number from `least` on, and at most `most`."""
    if type(value) is not int or value < least or (most is not None and value > most):
        bounds = f"from {least} on" if most is None else f"from {least} to {most}"
        raise OptionError(f"{name}={value!r} is no whole number {bounds}. Times are ms, sizes are bytes.")


def check_flags(**flags: object) -> None:
    """Raise unless each flag is True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise OptionError(f"{name}={value!r} is neither True nor False.")


def check_limits(**limits: object) -> None:
    """Raise unless each limit is a whole number from 0 on, or None."""
    for name, value in limits.items():
        if value is not None:
            check_number(name, value, 0)


def check_word(name: str, value: object, accepted: tuple[str, ...]) -> None:
    """Raise unless `value` is one of some words."""
    if value not in accepted:
        raise OptionError(f"{name}={value!r} is none of: {', '.join(accepted)}.")


def check_queue_count(queues: object) -> None:
    """Raise unless a topic can have so many queues."""
    check_number("queues", queues, 1, MAX_QUEUES)


def check_topic(topic: object) -> str:
    """Return a topic's name. Raises for one that no broker takes."""
    if not isinstance(topic, str):
        raise OptionError(f"topic={topic!r} is no str.")
    return check_topic_name(topic)


def check_new_topic(topic: object, queues: object, perm: object) -> None:
    """Look at a topic that is to be made."""
    check_sent_topic(check_topic(topic))
    check_queue_count(queues)
    if type(perm) is not int or perm not in PERMS:
        raise OptionError(f"perm={perm!r} is none of: 6 (read and write), 4 (read), 2 (write).")


def message_of(row: dict[str, Any]) -> pa.RecordBatch:
    """Return one message as the encoder takes it; `row` has all of MESSAGE_COLUMNS, properties as a mapping."""
    schema = _SCHEMA_WITH_KEYS_AS_LISTS if isinstance(row["keys"], list | tuple) else _SCHEMA
    try:
        properties, body = row["properties"], row["body"]
        if properties is not None:
            row["properties"] = list(dict(properties).items())
        if isinstance(body, str):
            row["body"] = body.encode()
        time_ms = row["deliverTimestamp"]
        if time_ms is not None:
            check_number("deliver_at_ms", time_ms, 0, MAX_TIME_MS)
            if is_in_another_unit(time_ms):
                raise OptionError(f"deliver_at_ms={time_ms} {describe_unit(time_ms)}. Nothing was appended.")
        for name in _WHOLE:  # Arrow cuts a fraction off
            if isinstance(row[name], float) and not row[name].is_integer():
                raise ValueError(f"{name}: {row[name]!r} is no whole number")
        return pa.RecordBatch.from_pylist([row], schema=schema)
    except _NOT_ARROW as error:
        raise OptionError(
            f"no message: {_wrong_field(row, schema)}{str(error).removesuffix('.')}. {_TYPES_ARE} Nothing was appended."
        ) from None


def _wrong_field(row: Mapping[str, Any], schema: pa.Schema) -> str:
    """Return the name of the first field that is not of its type, with a colon, "" if it is none by itself."""
    for field in schema:
        try:
            pa.array([row[field.name]], field.type)
        except _NOT_ARROW:
            return f"{field.name}: "
    return ""


def messages_of(given: object, topic: str | None) -> pa.Table:
    """Return rows as the encoder takes them, keys as a list included; `topic`, if given, is that of all of them."""
    if not isinstance(given, pa.Table | pa.RecordBatch):
        raise OptionError(
            f"send_many takes a pyarrow Table or RecordBatch, not {type(given).__name__}. For a list of dicts: "
            "pyarrow.Table.from_pylist(rows)."
        )
    table = pa.Table.from_batches([given]) if isinstance(given, pa.RecordBatch) else given
    names = table.column_names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise OptionError(f"columns that are there twice: {', '.join(twice)}. Rename one, or leave it out.")
    if topic is not None:
        table = table.drop_columns(["topic"]) if "topic" in names else table
        table = table.append_column("topic", pa.repeat(pa.scalar(check_topic(topic)), len(table)))
    unknown = set(table.column_names) - set(MESSAGE_COLUMNS)
    missing = {"topic", "body"} - set(table.column_names)
    if unknown or missing:
        wrong = f"no such column: {', '.join(sorted(unknown))}" if unknown else f"no {' and no '.join(sorted(missing))}"
        raise OptionError(f"{wrong}. Columns are: {', '.join(MESSAGE_COLUMNS)}; body and topic are required.")
    return cast_columns(table)


def cast_columns(table: pa.Table) -> pa.Table:
    """Return columns of MESSAGE_COLUMNS, each once, with the types that the encoder takes."""
    columns = []
    for field in table.schema:
        try:
            columns.append(table.column(field.name).cast(_type_of(field)))
        except _NOT_ARROW as error:
            found = str(error).removesuffix(".")
            raise OptionError(
                f"no messages: column {field.name}: {found}. {_TYPES_ARE} Nothing was appended."
            ) from None
        if field.name == "deliverTimestamp" and pa.types.is_integer(field.type):
            _refuse_seconds(columns[-1].cast(pa.int64()))
    return pa.Table.from_arrays(columns, names=table.column_names)


def _refuse_seconds(times_ms: pa.ChunkedArray) -> None:
    are_seconds = pc.and_(pc.greater(times_ms, 0), pc.less_equal(times_ms, LAST_SECONDS_MS))
    row = pc.index(are_seconds, True).as_py()
    if row >= 0:
        raise OptionError(
            f"no messages: column deliverTimestamp: {times_ms[row]} {describe_unit(times_ms[row].as_py())}. Nothing "
            "was appended."
        )


def _type_of(field: pa.Field) -> pa.DataType:
    if field.name == "deliverTimestamp" and pa.types.is_timestamp(field.type):
        return field.type  # in whatever unit: the encoder knows how to round it
    is_list = pa.types.is_list(field.type) or pa.types.is_large_list(field.type)
    return _KEYS_AS_LISTS if field.name == "keys" and is_list else MESSAGE_TYPES[field.name]
