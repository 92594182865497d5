"""`parse`: bodies as columns, by Spark's own functions for JSON and CSV and by fastavro for Avro.

What Spark's functions let pass is found here: an empty body, bytes that are no UTF-8, something behind the JSON value.
"""

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from rmq_spark.store.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

FORMATS = JSON, CSV, AVRO = ("json", "csv", "avro")
OUTCOMES = FAIL, NULL, DROP, SPLIT = ("fail", "null", "drop", "split")
VALUE, ERROR = "value", "error"
# Columns of ours on the way, which nobody sees.
_PARSED, _WHOLE, _REASON, _CORRUPT = "__rmq_parsed", "__rmq_whole", "__rmq_reason", "__rmq_corrupt"
_END_FIELD = "rmq-spark: end of the body"
_BOM = b"\xef\xbb\xbf"
_PLACE_COLUMNS = ("topic", "queueId", "queueOffset")
_OURS = ("mode", "columnnameofcorruptrecord")


def parse(
    df: "DataFrame",
    format: str,
    schema: "str | StructType | Mapping[str, Any]",
    *,
    on_corrupt_record: str = FAIL,
    column: str = "body",
    options: Mapping[str, str] | None = None,
) -> "DataFrame | tuple[DataFrame, DataFrame]":
    """Return `df` with the struct column `value` in the place of its bodies; all other columns stay as they are.

    `format` is json, csv or avro. `schema` is a StructType or its DDL for the first two, for avro an Avro schema as
    JSON text or as dict. `options` are those of Spark's from_json and from_csv. `df` may be a batch or a stream.

    `on_corrupt_record` says what becomes of a body that is not what the schema says: fail (the query, naming the
    row), null (in `value`), drop (the row), or split: then the answer is two DataFrames, good rows and bad ones, and
    these have all columns of `df` and `error`, as the sink takes them with mode=sendBack. What is corrupt: a value
    of another type than its field's, something behind the value, an empty body, no UTF-8; in CSV too few or too many
    columns. A field that is missing in JSON is null, and not corrupt. Fails only where `value` is asked for.

    Raises OptionError for what can be refused before the query starts, and where fastavro is not installed.
    """
    _check(df, format, on_corrupt_record, column, options or {})
    bodies = F.col(f"`{column}`").cast("binary")
    if format == AVRO:
        staged = _stage_avro(df, bodies, schema)
    else:
        staged = _stage_text(df, bodies, format, _struct_of(format, schema), dict(options or {}))
    return _outcome(staged, df, column, format, on_corrupt_record)


def _check(df: "DataFrame", format: str, outcome: str, column: str, options: Mapping[str, str]) -> None:
    if format not in FORMATS:
        raise OptionError(f'parse: format="{format}" is none of: {", ".join(FORMATS)}.')
    if outcome not in OUTCOMES:
        raise OptionError(f'parse: on_corrupt_record="{outcome}" is none of: {", ".join(OUTCOMES)}.')
    types = dict(df.dtypes)
    if types.get(column) not in ("binary", "string"):
        there = f"is {types[column]}" if column in types else f"is none of: {', '.join(df.columns)}"
        raise OptionError(f'parse: the column "{column}" {there}. Name one of bytes or text: parse(…, column="…").')
    for name in (VALUE, ERROR) if outcome == SPLIT else (VALUE,):
        if name in df.columns and name != column:
            raise OptionError(f'parse: there is a column "{name}" already. Rename it before: withColumnRenamed.')
    for name in options:
        if format == AVRO or name.lower() in _OURS:
            takes = "takes no options" if format == AVRO else "decides that by on_corrupt_record"
            raise OptionError(f'parse: options has "{name}", and {format} {takes}. Leave it out.')


def _struct_of(format: str, schema: "str | StructType | Mapping[str, Any]") -> StructType:
    """Return the schema of a text format. Raises OptionError for one that is no struct of columns."""
    found: object = schema
    if isinstance(schema, str):
        try:
            found = StructType.fromDDL(schema)
        except Exception as error:  # of Spark's parser: its message has the place marked
            raise OptionError(f'parse: schema="{schema}" is no DDL such as "id bigint, name string". {error}') from None
    if not isinstance(found, StructType) or not found.fields:
        raise OptionError(
            f'parse: schema={schema!r}: {format} takes a StructType, or DDL such as "id bigint, name string".'
        )
    return found


def _stage_text(
    df: "DataFrame", bodies: "Column", format: str, struct: StructType, options: dict[str, str]
) -> "DataFrame":
    """Return `df` with what was parsed, and why it was not: what only these columns tell is told apart here."""
    bare = F.when(F.substring(bodies, 1, 3) == F.lit(_BOM), F.substring(bodies, 4, 2**31 - 1)).otherwise(bodies)
    text = bare.cast("string")
    asked = StructType([*struct.fields, StructField(_CORRUPT, StringType())])
    given = {**options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    if format == JSON:
        parsed = F.from_json(text, asked, given)
        # from_json reads one value and leaves what is behind it. In an array with an end that nobody can guess it
        # may be followed by nothing but that. The line break ends a comment, where options allow them.
        end = uuid.uuid4().int >> 66
        wrapped = F.concat(F.lit("["), text, F.lit(f'\n,{{"{_END_FIELD}":{end}}}]'))
        elements = F.from_json(wrapped, f"array<struct<`{_END_FIELD}`:bigint>>", options)
        last = F.try_element_at(elements, F.lit(2))[_END_FIELD]
        whole = (F.size(elements) == 2) & F.coalesce(last == F.lit(end), F.lit(False))
    else:
        # The line break behind the last line of a file that was sent line by line is no part of its last column.
        parsed = F.from_csv(F.regexp_replace(text, r"\r?\n\z", ""), asked.toDDL(), given)
        whole = F.lit(True)
    staged = df.withColumns({_PARSED: parsed, _WHOLE: F.coalesce(whole, F.lit(False))})
    done, shown = F.col(_PARSED), "JSON" if format == JSON else "CSV"
    reason = (
        F.when(bodies.isNull(), F.lit("there is no body"))
        .when(~F.is_valid_utf8(text), F.lit("the body is no UTF-8"))
        .when(F.btrim(text, F.lit(" \t\r\n")) == "", F.lit("the body is empty"))
        .when(done.isNull() | done[_CORRUPT].isNotNull(), F.lit(f"the body is no {shown} of the schema"))
        .when(~F.col(_WHOLE), F.lit(f"the body is more than one {shown} value"))
    )
    staged = staged.withColumn(_REASON, reason).withColumn(_PARSED, done.dropFields(_CORRUPT))
    return staged.drop(_WHOLE)


def _stage_avro(df: "DataFrame", bodies: "Column", schema: "str | StructType | Mapping[str, Any]") -> "DataFrame":
    from rmq_spark.avro_bodies import avro_decoder

    if isinstance(schema, StructType):
        raise OptionError("parse: avro takes an Avro schema, as JSON text or as dict, and no StructType.")
    decoded = df.withColumn(_PARSED, avro_decoder(schema)(bodies))
    return decoded.withColumns({_REASON: F.col(_PARSED)[ERROR], _PARSED: F.col(_PARSED)[VALUE]})


def _outcome(
    staged: "DataFrame", df: "DataFrame", column: str, format: str, outcome: str
) -> "DataFrame | tuple[DataFrame, DataFrame]":
    is_good, value = F.col(_REASON).isNull(), F.col(_PARSED)
    if outcome == FAIL:
        value = F.when(is_good, value).otherwise(F.raise_error(_complaint(df, format)))
    elif outcome == NULL:
        value = F.when(is_good, value)
    others = [value.alias(VALUE) if name == column else F.col(f"`{name}`") for name in df.columns]
    if outcome in (FAIL, NULL):
        return staged.select(*others)
    good = staged.where(is_good).select(*others)
    if outcome == DROP:
        return good
    columns = [F.col(f"`{name}`") for name in df.columns]
    return good, staged.where(~is_good).select(*columns, F.col(_REASON).alias(ERROR))


def _complaint(df: "DataFrame", format: str) -> "Column":
    """Return what a query fails with: which row, why, and what else can be done."""
    places = [F.concat(F.lit(f"{name} "), F.col(name).cast("string")) for name in _PLACE_COLUMNS if name in df.columns]
    where = F.concat_ws(", ", *places) if places else F.lit("a row")
    remedy = 'parse(…, on_corrupt_record="null", "drop" or "split") goes on.'
    return F.concat(F.lit(f"rmq: parse {format}: "), where, F.lit(": "), F.col(_REASON), F.lit(f". {remedy}"))
