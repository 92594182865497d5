"""`df.write`: one write, all of it or nothing. Made on the driver, it travels to tasks, to the commit and to the abort.

Every write has a key of its own: a new uuid, so that two writes are two writes, or the user's txnAppId and txnVersion,
so that a repeated one is written once.
"""

import uuid
from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from rmq_spark.datasource.batch_ids import key_of_commit
from rmq_spark.datasource.commit_message import StagedRows, staged_files, staged_keys
from rmq_spark.datasource.sink_commit import commit_files, discard_files
from rmq_spark.datasource.sink_options import SinkOptions
from rmq_spark.datasource.sink_task import SinkTask, stage_rows
from rmq_spark.store import CommitKey


class RmqBatchWriter(DataSourceArrowWriter):
    """Stages in the tasks, appends when Spark commits."""

    def __init__(self, options: SinkOptions, store_id: str | None) -> None:
        self._options, self._store_id = options, store_id
        self._key = write_key(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        file = stage_rows(iterator, self._options, self._store_id, self._key, this_task())
        return StagedRows(self._key, file)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        key = key_of_commit(staged_keys(messages), len(messages), None)
        assert key == self._key, (key, self._key)  # the writer and its messages travel together
        commit_files(self._options, key, staged_files(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        discard_files(self._options, self._key, staged_files(messages))


def write_key(options: SinkOptions) -> CommitKey:
    """Return a key for one write: the transaction's, if the options name one, else one that no other write has."""
    if options.txn_app_id is None:
        return CommitKey(str(uuid.uuid4()))
    return CommitKey(f"txn:{options.txn_app_id}", options.txn_version)


def this_task() -> SinkTask:
    """Return the attempt of a task in which this runs. Its name is its own, whatever else was started when."""
    context = TaskContext.get()
    assert context is not None, "called in a task"
    return SinkTask(context.partitionId(), context.taskAttemptId(), uuid.uuid4().int & 0xFFFFFFFF)
