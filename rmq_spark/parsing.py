"""`parse`: decode message bodies to typed columns, with Spark's functions for JSON and CSV, and fastavro for Avro.

`parse` also detects corrupt bodies that Spark's functions accept: empty bodies, invalid UTF-8, and text after the JSON
value.
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
# Intermediate columns, which are dropped from the result.
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
    """Decode the bodies of `df`: return `df` with the struct column `value` in place of the column `column`.

    All other columns are unchanged. `df` may be a batch or a stream. `format` is "json", "csv" or "avro". `schema` is a
    StructType or DDL text for json and csv, and an Avro schema (JSON text or a dict) for avro. `options` are passed to
    Spark's from_json or from_csv; avro accepts none.

    `on_corrupt_record` says what happens to a corrupt body:

    - "fail": the query fails with an error that names the row, but only if it uses the column `value`;
    - "null": `value` is null;
    - "drop": the row is left out;
    - "split": the result is a pair of DataFrames. The first has the good rows. The second has the corrupt rows with all
      columns of `df` and the reason in `error`; it can be written with mode=sendBack.

    A body is corrupt if it is null or empty, if a value does not match its field's type, or if there is text after the
    value. A JSON or CSV body is also corrupt if it is not valid UTF-8, and a CSV body if it has too few or too many
    columns. A field that is missing in JSON is null, which is not an error.

    Raises OptionError if an argument is invalid, or if `format` is avro and fastavro is not installed.
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
    """Return the schema of JSON or CSV bodies as a StructType. Raises OptionError unless it has at least one field."""
    found: object = schema
    if isinstance(schema, str):
        try:
            found = StructType.fromDDL(schema)
        except Exception as error:  # Spark's parser; its message marks the position
            raise OptionError(
                f'parse: schema="{schema}" is not DDL such as "id bigint, name string". {error}'
            ) from None
    if not isinstance(found, StructType) or not found.fields:
        raise OptionError(
            f'parse: schema={schema!r}: {format} takes a StructType, or DDL such as "id bigint, name string".'
        )
    return found


def _stage_text(
    df: "DataFrame", bodies: "Column", format: str, struct: StructType, options: dict[str, str]
) -> "DataFrame":
    """Return `df` with two intermediate columns: the parsed struct, and the reason why a body is corrupt, else null."""
    bare = F.when(F.substring(bodies, 1, 3) == F.lit(_BOM), F.substring(bodies, 4, 2**31 - 1)).otherwise(bodies)
    text = bare.cast("string")
    asked = StructType([*struct.fields, StructField(_CORRUPT, StringType())])
    given = {**options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    if format == JSON:
        parsed = F.from_json(text, asked, given)
        # from_json ignores text after the value. So the body is also parsed as the first element of an array, whose
        # second element is an object that no body can guess. If the array does not have exactly these two elements,
        # there is text after the value. The line break ends a comment, which options may allow.
        end = uuid.uuid4().int >> 66
        wrapped = F.concat(F.lit("["), text, F.lit(f'\n,{{"{_END_FIELD}":{end}}}]'))
        elements = F.from_json(wrapped, f"array<struct<`{_END_FIELD}`:bigint>>", options or None)  # Connect refuses {}
        last = F.try_element_at(elements, F.lit(2))[_END_FIELD]
        whole = (F.size(elements) == 2) & F.coalesce(last == F.lit(end), F.lit(False))
    else:
        # A body that was a line of a file may end with a line break, which does not belong to the last column.
        parsed = F.from_csv(F.regexp_replace(text, r"\r?\n\z", ""), asked.toDDL(), given)
        whole = F.lit(True)
    staged = df.withColumns({_PARSED: parsed, _WHOLE: F.coalesce(whole, F.lit(False))})
    done, shown = F.col(_PARSED), "JSON" if format == JSON else "CSV"
    reason = (
        F.when(bodies.isNull(), F.lit("the body is null"))
        .when(~F.is_valid_utf8(text), F.lit("the body is not UTF-8"))
        .when(F.btrim(text, F.lit(" \t\r\n")) == "", F.lit("the body is empty"))
        .when(done.isNull() | done[_CORRUPT].isNotNull(), F.lit(f"the body is not {shown} of the schema"))
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
    """Return the error text of a corrupt row: its topic, queue and offset, the reason, and what the user can do."""
    places = [F.concat(F.lit(f"{name} "), F.col(name).cast("string")) for name in _PLACE_COLUMNS if name in df.columns]
    where = F.concat_ws(", ", *places) if places else F.lit("a row")
    remedy = 'To continue, use parse(…, on_corrupt_record="null", "drop" or "split").'
    return F.concat(F.lit(f"rmq: parse {format}: "), where, F.lit(": "), F.col(_REASON), F.lit(f". {remedy}"))
