"""The columns that can be written, as Spark types, and whether a DataFrame has them. No Spark is imported here."""

import difflib
import re
from collections.abc import Sequence

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
}

_COLLATION = re.compile(r"(?<=string) collate \w+")
_NESTED = ("struct", "array", "map")


def check_sink_schema(given: Sequence[Field], topic: str | None) -> tuple[str, ...]:
    """Return the names of the columns of a DataFrame that can be written; `topic` is the option, if it was given.

    Raises OptionError for a column that the sink does not know, one that is there twice, a type that a column
    cannot have, and a body or a topic that is missing. Every message says which call puts it right.
    """
    names = tuple(column.name for column in given)
    _refuse_unknown([name for name in names if name not in SINK_COLUMNS], names)
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f'column "{name}" is there twice. Rename one of them, or leave it out in a select.')
    for column in given:
        spark_type = _COLLATION.sub("", column.spark_type)
        accepted = SINK_COLUMNS[column.name]
        if spark_type not in accepted:
            raise OptionError(
                f"column {column.name} is {spark_type}, expected {' or '.join(accepted)}. "
                f"{_remedy(column.name, spark_type, accepted[0])}"
            )
    if "body" not in names:
        raise OptionError(
            f"there is no column body, which every message has. Columns are: {', '.join(names)}. Make one, as in "
            '.withColumn("body", to_json(struct("*"))) or .withColumnRenamed("value", "body").'
        )
    if topic is None and "topic" not in names:
        raise OptionError(
            "neither a column topic nor the option topic says where to write. Give the option, as in "
            '.option("topic", "orders"), or make the column, as in .withColumn("topic", lit("orders")).'
        )
    return names


def _refuse_unknown(unknown: Sequence[str], names: Sequence[str]) -> None:
    if not unknown:
        return
    quoted = ", ".join(f'"{name}"' for name in dict.fromkeys(unknown))
    leave_out = f"Leave out what is not to be written: .drop({quoted})."
    if all(name in SPARK_TYPES for name in unknown):
        raise OptionError(
            f"{', '.join(unknown)}: given by the store when a message is written, not by a column. {leave_out}"
        )
    lowered = {column.lower(): column for column in SINK_COLUMNS if column not in names}
    near = [close for name in unknown for close in difflib.get_close_matches(name.lower(), lowered, 1)]
    hint = f" Did you mean {lowered[near[0]]}?" if near else ""
    raise OptionError(
        f"there is no column {quoted} to write.{hint} Columns that can be written are: {', '.join(SINK_COLUMNS)}. "
        f"{leave_out}"
    )


def _remedy(name: str, found: str, wanted: str) -> str:
    """Return the call that turns a column of one type into a column of another."""
    if found.startswith(_NESTED) and wanted == "string":
        return f'Make text of it: .withColumn("{name}", to_json("{name}")).'
    if wanted.startswith("map"):
        return f'Make a map of it: .withColumn("{name}", create_map(lit("name"), col("value"))).'
    return f'Cast it: .withColumn("{name}", col("{name}").cast("{wanted}")).'
