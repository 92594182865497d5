"""The reader of a stream whose options are invalid."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit

from rmq_spark.datasource.spark.worker_errors import without_frames
from rmq_spark.store.errors import RmqError


@without_frames
class RefusedStream(DataSourceStreamReader):
    """A reader that raises the error of invalid options at Spark's first call.

    If the constructor of a reader raised this error, Spark would show an error of its own first, and hide this one.
    """

    def __init__(self, error: RmqError) -> None:
        self._error = error

    def initialOffset(self) -> dict[str, Any]:
        raise self._error

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        raise self._error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        raise self._error
