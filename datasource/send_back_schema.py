"""The columns of rows that are sent back (mode=sendBack), as Spark types, and whether a DataFrame has them."""

from collections.abc import Sequence

import pyarrow as pa

from rmq_spark.datasource.schema import SPARK_TYPES, Field
from rmq_spark.datasource.sink_schema import COLLATION, refuse_twice, remedy
from rmq_spark.store import failed_column_type, refuse_missing_places
from rmq_spark.store.errors import OptionError

# What a row may have beside the source's columns.
SEND_BACK_COLUMNS = {"delayLevel": "int", "error": "string"}


def check_send_back_schema(given: Sequence[Field]) -> tuple[str, ...]:
    """Return the names of the columns of a DataFrame whose rows can be sent back.

    Raises OptionError for a column that the source does not have, one that is there twice, another type than the
    source's, and for what is missing to say which message a row is.
    """
    accepted = {**SPARK_TYPES, **SEND_BACK_COLUMNS}
    names = tuple(column.name for column in given)
    unknown = list(dict.fromkeys(name for name in names if name not in accepted))
    if unknown:
        quoted = ", ".join(f'"{name}"' for name in unknown)
        raise OptionError(
            f"there is no column {quoted} to send back. With mode=sendBack columns are those of the source, delayLevel "
            f"and error. Leave out what is not to be sent: .drop({quoted})."
        )
    refuse_twice(names)
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
    """Return rows as they are sent back: every column in its one type, whatever Spark was told of large ones."""
    columns = {
        name: column.cast(failed_column_type(name, column.type))
        for name, column in zip(rows.schema.names, rows.columns, strict=True)
    }
    return pa.RecordBatch.from_pydict(columns)
