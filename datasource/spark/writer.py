"""Writers of `df.write` and `df.writeStream`: tasks write rows through the sink, the driver commits or aborts them.

Every write has a key. The key of a `df.write` is a new uuid, or the user's txnAppId and txnVersion. The key of a
micro-batch of `df.writeStream` is the query id and the batch id. By the key the sink recognises a repeated write. A
sink that is exactly once applies a write completely or not at all, and once. A sink that is at least once stores a
repeated write again, with the same message ids.

Spark creates one writer for the tasks of a batch of a stream and another one for its commit. The two share only the
options and the messages of the tasks.
"""

import uuid
from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from rmq_spark.datasource.options.write_options import SinkOptions
from rmq_spark.datasource.spark.task_writer import (
    BATCH_ID_PROPERTY,
    QUERY_ID_PROPERTY,
    SinkTask,
    StagedRows,
    key_of_commit,
    key_of_task,
    receipts_of,
    stage_rows,
    staged_keys,
)
from rmq_spark.datasource.spark.worker_errors import without_frames
from rmq_spark.store.errors import RmqError
from rmq_spark.store.model import CommitKey


@without_frames
class RmqBatchWriter(DataSourceArrowWriter):
    """The writer of one `df.write`."""

    def __init__(self, options: SinkOptions, token: str | None) -> None:
        self._options, self._token = options, token
        self._key = write_key(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        receipt = stage_rows(iterator, self._options, self._token, self._key, this_task())
        return StagedRows(self._key, receipt)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        key = key_of_commit(staged_keys(messages), len(messages), None)
        assert key == self._key, (key, self._key)  # Spark pickles the writer with its messages
        self._options.sink().commit(key, receipts_of(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self._options.sink().abort(self._key, receipts_of(messages))


def write_key(options: SinkOptions) -> CommitKey:
    """Return the key of one df.write: txnAppId and txnVersion if they are given, else a unique key."""
    if options.txn_app_id is None:
        return CommitKey(str(uuid.uuid4()))
    return CommitKey(f"txn:{options.txn_app_id}", options.txn_version)


def this_task() -> SinkTask:
    """Return the attempt of a task that runs now. Its file name differs from that of every other attempt."""
    context = TaskContext.get()
    assert context is not None, "called in a task"
    return SinkTask(context.partitionId(), context.taskAttemptId(), uuid.uuid4().int & 0xFFFFFFFF)


@without_frames
class RmqStreamWriter(DataSourceStreamArrowWriter):
    """The writer of one batch of `df.writeStream`.

    `away` is the error of the place if it could not be prepared; `write` raises it. A commit needs no prepared place:
    its tasks have stored all rows, or it finds the place itself.
    """

    def __init__(self, options: SinkOptions, token: str | None, away: RmqError | None = None) -> None:
        self._options, self._token, self._away = options, token, away

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        if self._away is not None:
            raise self._away
        context = TaskContext.get()
        assert context is not None, "called in a task"
        key = key_of_task(context.getLocalProperty(QUERY_ID_PROPERTY), context.getLocalProperty(BATCH_ID_PROPERTY))
        receipt = stage_rows(iterator, self._options, self._token, key, this_task())
        return StagedRows(key, receipt)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        key = key_of_commit(staged_keys(messages), len(messages), batchId)
        self._options.sink().commit(key, receipts_of(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        for message in messages:
            if isinstance(message, StagedRows):
                self._options.sink().abort(message.key, [message.receipt])
