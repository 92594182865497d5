"""The columns of the source with their Spark types, and the columns of a query. Does not import Spark."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from rmq_spark.store.backend import BROKER_NAME, COLUMNS
from rmq_spark.store.errors import OptionError

# The columns of a query if neither the option `columns` nor a schema is given. Most queries need them, and they are
# cheap to decode.
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
    """Return the name of the Spark type for an Arrow type, in the form of DataType#simpleString."""
    if pa.types.is_map(arrow):
        return f"map<{_spark_type(arrow.key_type)},{_spark_type(arrow.item_type)}>"
    if pa.types.is_timestamp(arrow):
        return "timestamp"
    return {"string": "string", "binary": "binary", "int32": "int", "int64": "bigint"}[str(arrow)]


SPARK_TYPES = {name: _spark_type(arrow) for name, arrow in COLUMNS.items()}


@dataclass(frozen=True, slots=True)
class Field:
    """A column of a schema: its name, Spark's name of its type, and whether it may be null."""

    name: str
    spark_type: str
    nullable: bool


def resolve_columns(asked: Sequence[str] | None, *, has_brokers: bool = False) -> tuple[str, ...]:
    """Return the columns that the option `columns` asks for; `asked` is None if it is not given.

    `has_brokers` is whether the place has broker names, which are a default column then. Raises OptionError for a
    column that does not exist.
    """
    if asked is None:
        return (DEFAULT_COLUMNS[0], BROKER_NAME, *DEFAULT_COLUMNS[1:]) if has_brokers else DEFAULT_COLUMNS
    if tuple(asked) == ("*",):
        return tuple(COLUMNS)
    for name in asked:
        if name == "*":
            raise OptionError(f'columns="{",".join(asked)}": found * and other names; expected * alone, or names.')
        if name not in COLUMNS:
            raise OptionError(_no_column(f'columns="{",".join(asked)}"', name))
    return tuple(asked)


def columns_ddl(columns: Iterable[str]) -> str:
    """Return the schema of the columns as DDL text for Spark, in which every column may be null."""
    return ", ".join(f"{name} {SPARK_TYPES[name]}" for name in columns)


def check_schema(given: Sequence[Field], asked: Sequence[str] | None) -> tuple[str, ...]:
    """Check the schema of a query, and return the names of its columns.

    The schema comes from the user's call of schema(), or from `columns_ddl`. `asked` is the option `columns`, or None.
    Raises OptionError for a column that does not exist, has another type than the source's, or is NOT NULL, and if the
    schema has other columns than `asked`.
    """
    for column in given:
        expected = SPARK_TYPES.get(column.name)
        if expected is None:
            raise OptionError(_no_column("schema()", column.name))
        if column.spark_type != expected:
            raise OptionError(
                f"schema(): column {column.name} is {column.spark_type}, expected {expected}. Give that type, and "
                "cast it in a select."
            )
        if not column.nullable:
            raise OptionError(f"schema(): column {column.name} is NOT NULL, expected nullable. Leave NOT NULL out.")
    names = tuple(column.name for column in given)
    if not names:
        raise OptionError(f"schema(): found no column; expected any of: {', '.join(COLUMNS)}.")
    if asked is not None and names != resolve_columns(asked):
        raise OptionError(
            f'schema() and columns="{",".join(asked)}" differ: schema() has {", ".join(names)}. Give one of them.'
        )
    return names


def _no_column(where: str, name: str) -> str:
    lowered = {column.lower(): column for column in COLUMNS}
    near = difflib.get_close_matches(name.lower(), lowered, 1)
    hint = f" Did you mean {lowered[near[0]]}?" if near else ""
    return f'{where}: there is no column "{name}".{hint} Expected one of: {", ".join(COLUMNS)}.'
