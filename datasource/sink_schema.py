"""The columns that can be written, as Spark types, and whether a DataFrame has them. No Spark is imported here."""

import difflib
import re
from collections.abc import Iterable, Sequence

from rmq_spark.datasource.schema import SPARK_TYPES, Field
from rmq_spark.store.errors import OptionError

# Each with the types that it may have, Spark's names for them.
SINK_COLUMNS: dict[str, tuple[str, ...]] = {
    "body": ("string", "binary"),
    "topic": ("string",),
    "tags": ("string",),
    "keys": ("string", "array<string>"),
    "properties": ("map<string,string>",),
    "queueId": ("int",),
    "shardingKey": ("string",),
    "flag": ("int",),
    "delayLevel": ("int",),
    "deliverTimestamp": ("timestamp",),
}

COLLATION = re.compile(r"(?<=string) collate \w+")
_NESTED = ("struct", "array", "map")
_ONE_TEXT = ("tags", "topic", "shardingKey")


def check_sink_schema(given: Sequence[Field], topic: str | None) -> tuple[str, ...]:
    """Return the names of the columns of a DataFrame that can be written; `topic` is the option, if it was given.

    Raises OptionError for a column that the sink does not know, one that is there twice, a type that a column
    cannot have, and a body or a topic that is missing. Every message says which call puts it right.
    """
    names = tuple(column.name for column in given)
    _refuse_unknown([column for column in given if column.name not in SINK_COLUMNS], names)
    refuse_twice(names)
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
            "neither a column topic nor the option topic says where to write. Give the option, as in "
            '.option("topic", "orders"), or make the column, as in .withColumn("topic", lit("orders")).'
        )
    return names


def refuse_twice(names: Sequence[str]) -> None:
    """Raise OptionError for a column that is there twice."""
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f'column "{name}" is there twice. Rename one of them, or leave it out in a select.')


def _refuse_unknown(unknown: Sequence[Field], names: Sequence[str]) -> None:
    if not unknown:
        return
    renamed = _renamed(unknown, names)
    if not renamed and "body" not in names:
        raise _no_body(names)  # to leave out the unknown ones would help nobody
    dropped = list(dict.fromkeys(column.name for column in unknown if column.name not in renamed))
    calls = "".join(f'.withColumnRenamed("{name}", "{meant}")' for name, meant in renamed.items())
    if dropped:
        calls += f".drop({_quoted(dropped)})"
    if all(column.name in SPARK_TYPES for column in unknown) and not renamed:
        raise OptionError(
            f"{', '.join(dropped)}: given by the store when a message is written, not by a column. Leave out what is "
            f"not to be written: {calls}."
        )
    hint = "Leave out what is not to be written"
    if renamed:
        hint = f"Did you mean {' and '.join(renamed.values())}? Rename {'it' if len(renamed) == 1 else 'them'}"
        hint += ", and leave out what is not to be written" if dropped else ""
    raise OptionError(
        f"there is no column {_quoted(dict.fromkeys(column.name for column in unknown))} to write. Columns that can be "
        f"written are: {', '.join(SINK_COLUMNS)}. {hint}: {calls}."
    )


def _no_body(names: Sequence[str]) -> OptionError:
    return OptionError(
        f"there is no column body, which every message has. Columns are: {', '.join(names)}. Make one, as in "
        '.select(to_json(struct("*")).alias("body")) or .withColumnRenamed("value", "body").'
    )


def _renamed(unknown: Sequence[Field], names: Sequence[str]) -> dict[str, str]:
    """Return which columns have only a wrong name, and the right one.

    That is a name that is nearly right; and where there is no body, the one column that could be it: what Spark's
    text and Kafka sources call `value`.
    """
    missing = {column.lower(): column for column in SINK_COLUMNS if column not in names}
    renamed = {}
    for column in unknown:
        if column.name in SPARK_TYPES:
            continue  # the source's own name for something else: bornTimestamp is no deliverTimestamp
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
    """Return the call that turns a column of one type into a column of another."""
    if found.startswith("array") and name == "keys":
        return f'Cast it: .withColumn("{name}", col("{name}").cast("array<string>")).'
    if found.startswith("array") and name in _ONE_TEXT:
        return f'A message has one: take one of the texts, as in .withColumn("{name}", get("{name}", 0)).'
    if found.startswith(_NESTED) and wanted == "string":
        return f'Make text of it: .withColumn("{name}", to_json("{name}")).'
    if wanted.startswith("map") and not found.startswith("map"):
        return f'Make a map of it: .withColumn("{name}", create_map(lit("name"), col("value"))).'
    return f'Cast it: .withColumn("{name}", col("{name}").cast("{wanted}")).'
