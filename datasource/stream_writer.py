"""`df.writeStream`: every micro-batch once, however often Spark runs it.

Spark makes a writer anew for every batch, and another for its commit: what they share are the options and the
messages of the tasks.
"""

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from rmq_spark.datasource.batch_ids import BATCH_ID_PROPERTY, QUERY_ID_PROPERTY, key_of_commit, key_of_task
from rmq_spark.datasource.batch_writer import this_task
from rmq_spark.datasource.commit_message import StagedRows, staged_files, staged_keys
from rmq_spark.datasource.sink_commit import commit_files, discard_files
from rmq_spark.datasource.sink_options import SinkOptions
from rmq_spark.datasource.sink_task import stage_rows


class RmqStreamWriter(DataSourceStreamArrowWriter):
    """Stages in the tasks, appends when Spark commits a batch, unless the ledger says that it did so before."""

    def __init__(self, options: SinkOptions, store_id: str | None) -> None:
        self._options, self._store_id = options, store_id

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None, "called in a task"
        key = key_of_task(context.getLocalProperty(QUERY_ID_PROPERTY), context.getLocalProperty(BATCH_ID_PROPERTY))
        file = stage_rows(iterator, self._options, self._store_id, key, this_task())
        return StagedRows(key, file)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        key = key_of_commit(staged_keys(messages), len(messages), batchId)
        commit_files(self._options, key, staged_files(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        for message in messages:
            if isinstance(message, StagedRows):
                discard_files(self._options, message.key, [message.file])
