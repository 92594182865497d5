"""Writers of `df.write` and `df.writeStream`: tasks stage rows, the driver commits or aborts them.

A `df.write` is applied completely or not at all. Every write has a key. The key of a `df.write` is a new uuid, or the
user's txnAppId and txnVersion; with these, a repeated write is applied only once. The key of a micro-batch of
`df.writeStream` is the query id and the batch id, so the batch is applied once, however often Spark runs it. Spark
creates one writer for the tasks of a batch and another one for its commit. The two share only the options and the
messages of the tasks.
"""

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from rmq_spark.datasource.task_writer import (
    BATCH_ID_PROPERTY,
    QUERY_ID_PROPERTY,
    SinkTask,
    StagedRows,
    key_of_commit,
    key_of_task,
    stage_rows,
    staged_files,
    staged_keys,
)
from rmq_spark.datasource.write_options import SinkOptions
from rmq_spark.store import (
    CommitKey,
    StagedCopies,
    StagedFile,
    StoreReader,
    abort_copies,
    abort_sink,
    check_send_back_sink,
    check_sent_topic,
    commit_copies,
    commit_sink,
    open_store,
)


def ensure_store(options: SinkOptions) -> str | None:
    """Create the store if the folder is empty or missing. Return the id of the store. Takes no lock.

    The id is None until one of rmq-spark's writers has appended to the store. Raises StorePathError if the path is not
    a store or cannot be written, and OptionError if clients must not send to the topic.
    """
    if options.is_sending_back:
        return check_send_back_sink(options.send_back_settings())
    settings = options.sink_settings()
    if options.topic is not None:
        check_sent_topic(options.topic)
    open_store(
        settings.path,
        commit_log_path=settings.record_builder.commit_log_path,
        allow_network_store=settings.allow_network_store,
    )
    with StoreReader(settings.path, commit_log_path=settings.record_builder.commit_log_path) as store:
        return store.store_id()


def commit_files(
    options: SinkOptions,
    key: CommitKey,
    files: Sequence[StagedFile | StagedCopies],
    before_intent: Callable[[], None] | None = None,
) -> None:
    """Append the rows of all files to the store, and log their number. Any number of writers may commit at once.

    The rows are appended once, even if the call is repeated with the same key. If the batch is new, `before_intent` is
    called first, under the store's lock, before the intent (the record of the planned append) is written.

    Raises BatchConflictError if the batch does not follow its query's earlier ones, LockTimeoutError if another process
    holds the store, DiskFullError if the disk is full, and other errors of the store.
    """
    application = f"rmq-spark sink, {key}"
    if options.is_sending_back:
        copies = [one for one in files if isinstance(one, StagedCopies)]
        commit_copies(replace(options.send_back_settings(), application=application), key, copies, before_intent)
    else:
        rows = [one for one in files if isinstance(one, StagedFile)]
        commit_sink(replace(options.sink_settings(), application=application), key, rows, before_intent)


def discard_files(options: SinkOptions, key: CommitKey, files: Sequence[StagedFile | StagedCopies]) -> None:
    """Delete staged files after a write was aborted. A later cleanup deletes what cannot be deleted now.

    Files of a commit that has begun (its intent is written) are kept, because the commit will be finished.
    """
    if options.is_sending_back:
        copies = [one for one in files if isinstance(one, StagedCopies)]
        abort_copies(options.send_back_settings(), key, copies)
    else:
        abort_sink(options.sink_settings(), key, [one for one in files if isinstance(one, StagedFile)])


class RmqBatchWriter(DataSourceArrowWriter):
    """The writer of one `df.write`."""

    def __init__(self, options: SinkOptions, store_id: str | None) -> None:
        self._options, self._store_id = options, store_id
        self._key = write_key(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        file = stage_rows(iterator, self._options, self._store_id, self._key, this_task())
        return StagedRows(self._key, file)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        key = key_of_commit(staged_keys(messages), len(messages), None)
        assert key == self._key, (key, self._key)  # Spark pickles the writer with its messages
        commit_files(self._options, key, staged_files(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        discard_files(self._options, self._key, staged_files(messages))


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


class RmqStreamWriter(DataSourceStreamArrowWriter):
    """The writer of one batch of `df.writeStream`. A batch that was committed before is not appended again."""

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
