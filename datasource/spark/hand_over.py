"""Small batches that travel with the plan, so that Spark starts no Python task for them.

A Python task costs about 40 ms, and more than a second if Spark must start a worker for it. Spark's own
`SimpleDataSourceStreamReader` has no such task: its rows are read in the planning process, the Python process on the
driver that has the stream reader. They go to the JVM with the partitions, and the JVM keeps them as a block for the
executors. This module does the same for a batch of a `DataSourceStreamReader`.

That is private API of PySpark, and only this module knows it. In the planning process PySpark runs `partitions_func` of
pyspark.sql.streaming.python_streaming_source_runner for each batch:

1. It calls `reader.partitions(start, end)`.
2. If `isinstance(reader, _SimpleStreamReaderWrapper)`, it calls `reader.getCache(start, end)`. If the result is not
   None, it sends these Arrow batches to the JVM.

PySpark makes the same isinstance test in other places: to ask for features of the reader, and to leave out
`reportLatestOffset`. There the answer must remain False. Python's isinstance also believes the attribute `__class__` of
an object. So `HandingOver.__class__` is PySpark's class between the end of `partitions` and `getCache`, and the true
class otherwise. A subclass would not do, and PySpark's module cannot be patched because it runs as `__main__`.

What the JVM does with the rows (PythonMicroBatchStreamBase, PythonStreamingPartitionReaderFactory):

- It asserts that the batch has exactly one partition.
- It fails the query if the Arrow schema, as a Spark schema, is not equal to the query's schema. Arrow has no
  metadata of fields, such as the comments of a `schema()`. So such a query is left to tasks.
- No Arrow batch means a block without rows. The batch still has one partition, and no Python task.
- If an executor lacks the block, it runs the Python task. So what is handed over must be readable by a task too.
- It drops the block when the next batch is handed over, and when the query stops.

If PySpark is not as described, or a batch cannot be handed over, tasks read it as usual.
"""

import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import MapType, StructType

from rmq_spark.datasource.options.read_options import ReadSettings
from rmq_spark.datasource.spark.partition import RmqPartition
from rmq_spark.datasource.spark.partition_reader import read_partition
from rmq_spark.datasource.spark.source_view import SourceView
from rmq_spark.datasource.spark.worker_errors import without_frames

_LOG = logging.getLogger("rmq_spark")

_RECORD_BYTES_MIN = 88  # the smallest record is a little larger
_ARROW_BYTES_PER_RECORD_BYTE = 16  # decompressed bodies may be much larger than their records
# The names in `partitions_func` of PySpark, in the order of their use.
_EXPECTED_STEPS = ("partitions", "isinstance", "_SimpleStreamReaderWrapper", "getCache", "send_batch_func")


def make_hand_over(max_bytes: int, settings: ReadSettings, schema: StructType) -> "HandOver | None":
    """Return the hand-over of a stream that reads `schema`, or None if tasks must read all its batches.

    None is returned if `max_bytes` is 0, if the JVM would refuse the rows, and outside of PySpark's planning process.
    """
    if not max_bytes or not _is_same_in_arrow(schema):
        return None
    wrapper = find_wrapper(sys.modules.get("__main__"))
    return None if wrapper is None else HandOver(max_bytes, settings, wrapper)


def find_wrapper(runner: object) -> type | None:
    """Return the class that a reader must appear to have, or None if PySpark is not as this module expects.

    `runner` is the main module of the process; only in the planning process it is PySpark's runner.
    """
    wrapper: type | None = getattr(runner, "_SimpleStreamReaderWrapper", None)
    code = getattr(getattr(runner, "partitions_func", None), "__code__", None)
    steps = tuple(name for name in getattr(code, "co_names", ()) if name in _EXPECTED_STEPS)
    if callable(getattr(wrapper, "getCache", None)) and steps == _EXPECTED_STEPS:
        return wrapper
    _LOG.debug("rmq: no batch travels with the plan, because %r is not the runner of PySpark 4.3", runner)
    return None


def _is_same_in_arrow(schema: StructType) -> bool:
    """Return whether Arrow can express the schema, which `check_schema` has checked, without a difference."""
    return not any(
        field.metadata or (isinstance(field.dataType, MapType) and not field.dataType.valueContainsNull)
        for field in schema
    )


class HandOver:
    """The batches of one stream reader that travel with the plan.

    A batch is handed over if its records have at most `max_bytes` bytes in the log, and its rows at most 16 times that
    in memory. `wrapper` is the class that `find_wrapper` returns.
    """

    def __init__(self, max_bytes: int, settings: ReadSettings, wrapper: type) -> None:
        self._max_bytes = max_bytes
        self._settings = settings
        self._wrapper = wrapper
        self._offered: RmqPartition | None = None

    @property
    def shown_class(self) -> type | None:
        """The class that the reader appears to have; None for its true class."""
        return None if self._offered is None else self._wrapper

    def offer(self, planned: Sequence[InputPartition]) -> None:
        """Offer the partitions of a batch to PySpark, if they may be handed over as far as the plan shows.

        A batch with a fence is left to tasks, because a task checks the fence after it has read the rows.
        """
        self._offered = None
        if len(planned) != 1 or not isinstance(planned[0], RmqPartition) or planned[0].fences:
            return
        if sum(piece.count for piece in planned[0].pieces) * _RECORD_BYTES_MIN <= self._max_bytes:
            self._offered = planned[0]

    def withdraw(self) -> None:
        """Forget the partition that was offered last."""
        self._offered = None

    def take(self, view: SourceView) -> Iterator[pa.RecordBatch] | None:
        """Read and return the rows of the partition that was offered last, or None if a task must read them.

        If the read fails, a task repeats it and reports the error.
        """
        partition, self._offered = self._offered, None
        if partition is None:
            return None
        try:
            found = self._read(partition, view)
        except Exception as error:
            _LOG.debug("rmq: a task reads the batch, because the driver could not: %s", error)
            view.reopen()  # the backend may not know what it had read when the error was raised
            return None
        return None if found is None else iter(found)

    def _read(self, partition: RmqPartition, view: SourceView) -> list[pa.RecordBatch] | None:
        """Return the rows of the partition, or None if they are too large or of unknown size."""
        sizes = view.backend.sizes
        if sizes is None or sum(sizes.measure(partition.pieces).values()) > self._max_bytes:
            return None
        found, found_bytes = [], 0
        for batch in read_partition(partition, self._settings, view.backend):
            found_bytes += batch.nbytes
            if found_bytes > _ARROW_BYTES_PER_RECORD_BYTE * self._max_bytes:
                _LOG.debug("rmq: a task reads the batch, because its rows have more than %d bytes", found_bytes)
                return None
            found.append(batch)
        return found


@without_frames
class HandingOver:
    """The part of a stream reader that PySpark calls to get the rows of a batch. See the docstring of the module."""

    _hand_over: HandOver | None = None
    _view: SourceView

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that isinstance sees."""
        shown = None if self._hand_over is None else self._hand_over.shown_class
        return type(self) if shown is None else shown

    def getCache(self, start: dict[str, Any], end: dict[str, Any]) -> Iterator[pa.RecordBatch] | None:
        """Return the rows of the batch that was planned last, or None if a task must read them."""
        return None if self._hand_over is None else self._hand_over.take(self._view)
