"""The columns of failed rows, which are the rows of messages to send back: their types, and which are required."""

from collections.abc import Sequence

import pyarrow as pa

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.columns import COLUMNS

# The columns that every row must have. It also needs its topic, in physicalTopic or, if that is missing, in topic.
PLACE_TYPES = {
    "commitLogOffset": pa.int64(),
    "queueId": pa.int32(),
    "queueOffset": pa.int64(),
    "reconsumeTimes": pa.int32(),
}
OWN_TYPES = {
    "delayLevel": pa.int32(),
    "error": pa.string(),
    "brokerName": pa.string(),
}  # optional columns that rows from the source do not have
TOPICS = ("physicalTopic", "topic")
FAILED_COLUMNS = (*COLUMNS, *OWN_TYPES)
# The column of the copy's reconsumeTimes. Null means one more than in the row. Only orderly listeners set another
# value, because they count retries outside of the row.
COPY_TIMES = "copyReconsumeTimes"
_INNER_TYPES = {COPY_TIMES: pa.int32()}

_EXAMPLE = '.select("commitLogOffset", "physicalTopic", "queueId", "queueOffset", "reconsumeTimes")'


def missing_columns(names: Sequence[str]) -> list[str]:
    """Return which of the columns needed to send rows back are missing in `names`; an empty list if none is."""
    missing = [name for name in PLACE_TYPES if name not in names]
    return missing if set(TOPICS) & set(names) else [*missing, "physicalTopic (or topic)"]


def refuse_missing_places(names: Sequence[str]) -> None:
    """Raise OptionError if the column `names` lack one that is needed to identify the messages."""
    missing = missing_columns(names)
    if missing:
        raise OptionError(
            f"rows cannot be sent back without {', '.join(missing)}, which identify the message. The source has these "
            f'columns; physicalTopic is optional: .option("columns", "*") and then {_EXAMPLE}.'
        )


def failed_column_type(name: str, given: pa.DataType) -> pa.DataType:
    """Return the type to which the column `name` of type `given` is cast.

    Properties keep their type, and so do keys that are not strings, unless all values are null.
    """
    if name == "properties" or (name == "keys" and not pa.types.is_string(given)):
        return given if not pa.types.is_null(given) else COLUMNS[name]
    return {**COLUMNS, **OWN_TYPES, **_INNER_TYPES}[name]
