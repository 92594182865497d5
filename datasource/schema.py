"""The columns of the source as Spark types, and which of them a query asks for. No Spark is imported here."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from rmq_spark.store import COLUMNS
from rmq_spark.store.errors import OptionError

# What a query gets that asks for nothing: what nearly all want, and nothing that is dear to decode.
DEFAULT_COLUMNS = (
    "topic",
    "queueId",
    "queueOffset",
    "commitLogOffset",
    "tags",
    "keys",
    "body",
    "bornTimestamp",
    "storeTimestamp",
    "reconsumeTimes",
)
assert set(DEFAULT_COLUMNS) <= COLUMNS.keys()


def _spark_type(arrow: pa.DataType) -> str:
    """Return Spark's name of a type, as StructType#simpleString has it."""
    if pa.types.is_map(arrow):
        return f"map<{_spark_type(arrow.key_type)},{_spark_type(arrow.item_type)}>"
    if pa.types.is_timestamp(arrow):
        return "timestamp"
    return {"string": "string", "binary": "binary", "int32": "int", "int64": "bigint"}[str(arrow)]


SPARK_TYPES = {name: _spark_type(arrow) for name, arrow in COLUMNS.items()}


@dataclass(frozen=True, slots=True)
class Field:
    """A column of a schema that the user gave: name, Spark's name of the type, whether null is allowed."""

    name: str
    spark_type: str
    nullable: bool


def resolve_columns(asked: Sequence[str] | None) -> tuple[str, ...]:
    """Return the columns that the option `columns` asks for. Raises OptionError for one that does not exist."""
    if asked is None:
        return DEFAULT_COLUMNS
    if tuple(asked) == ("*",):
        return tuple(COLUMNS)
    for name in asked:
        if name == "*":
            raise OptionError(f'columns="{",".join(asked)}": * is all of them, so nothing can stand beside it.')
        if name not in COLUMNS:
            raise OptionError(_no_column(f'columns="{",".join(asked)}"', name))
    return tuple(asked)


def columns_ddl(columns: Iterable[str]) -> str:
    """Return the schema of these columns as Spark's DDL text; every column may be null."""
    return ", ".join(f"{name} {SPARK_TYPES[name]}" for name in columns)


def check_schema(given: Sequence[Field], asked: Sequence[str] | None) -> tuple[str, ...]:
    """Return the columns of a schema, which is the user's or what `columns_ddl` gave.

    Raises OptionError for a column that does not exist, a type that it does not have, a column that may not be
    null, and a schema other than the option `columns` (None where it was not given) names.
    """
    for column in given:
        expected = SPARK_TYPES.get(column.name)
        if expected is None:
            raise OptionError(_no_column("schema()", column.name))
        if column.spark_type != expected:
            raise OptionError(
                f"schema(): column {column.name} is {column.spark_type}, expected {expected}. Give its own type and "
                "cast it in a select."
            )
        if not column.nullable:
            raise OptionError(f"schema(): column {column.name} is NOT NULL, expected nullable, as every column is.")
    names = tuple(column.name for column in given)
    if not names:
        raise OptionError(f"schema() has no column. Accepted: any of {', '.join(COLUMNS)}.")
    if asked is not None and names != resolve_columns(asked):
        raise OptionError(
            f'schema() names the columns {", ".join(names)}, columns="{",".join(asked)}" others. Give one of them.'
        )
    return names


def _no_column(where: str, name: str) -> str:
    lowered = {column.lower(): column for column in COLUMNS}
    near = difflib.get_close_matches(name.lower(), lowered, 1)
    hint = f" Did you mean {lowered[near[0]]}?" if near else ""
    return f'{where}: there is no column "{name}".{hint} Columns are: {", ".join(COLUMNS)}.'
