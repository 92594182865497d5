"""Task of a write: stages its rows in one file, and returns a message with which Spark commits the file.

To *stage* rows is to write them to a file that readers do not see, until the driver commits it. Invariants:

- A task changes only the folder `rmq/staging/` of the store.
- Every attempt of a task has its own file and ids, so attempts that Spark repeats or starts twice do not interfere. The
  commit gets only the files of the attempts that Spark accepts.
- Memory depends on the size of a piece of rows (`sink_schema`), not on the number of rows.

Spark passes the query id and the batch id to the tasks of a streaming query, as local properties. To a writer's commit
it passes only the batch id. So the messages of the tasks contain both, and `key_of_commit` checks that they agree.
"""

import contextlib
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from rmq_spark.datasource.sink_schema import cut_pieces, normalise_columns, normalise_failed
from rmq_spark.datasource.write_options import SinkOptions
from rmq_spark.store import CommitKey, SendBackTask, StagedCopies, StagedFile, StoreReader, TaskStage
from rmq_spark.store.errors import (
    BatchConflictError,
    NotFoundError,
    OptionError,
    RmqError,
    StoreChangedError,
    StorePathError,
)


@dataclass(frozen=True, slots=True)
class SinkTask:
    """One attempt of one task: the number of the partition, Spark's number of the attempt, and random bits.

    Spark counts attempts from 0 in every application, and an attempt of an earlier application may still run. So random
    bits make the file names unique.
    """

    partition: int
    attempt: int
    random_bits: int

    @property
    def file_name(self) -> str:
        """The name of the file that this attempt stages."""
        return f"{self.partition:05d}-{self.attempt}-{self.random_bits:08x}"


def stage_rows(
    batches: Iterable[pa.RecordBatch], options: SinkOptions, store_id: str | None, key: CommitKey, task: SinkTask
) -> StagedFile | StagedCopies:
    """Stage all rows of a task. Return the staged file, for the commit. Any number of tasks may stage at once.

    With mode=sendBack the file contains copies of the messages that the rows identify, except those that the batch has
    already sent back. `store_id` is the result of `ensure_store` on the driver.

    Raises OptionError if a row is not a valid message, or not a message of the store; the error names the partition and
    the row. Raises NotFoundError if a topic is missing and must not be created, or if a message has expired. Raises
    StoreChangedError if this machine has no store at the path or another one, and StoreError if the disk fails. After
    an error the file is deleted.
    """
    _check_same_storage(options, store_id)
    stage: TaskStage | SendBackTask
    if options.is_sending_back:
        stage = SendBackTask(options.send_back_settings(), key, task.file_name)
    else:
        stage = TaskStage(options.sink_settings(), key, task.file_name)
    try:
        for batch in batches:
            for piece in cut_pieces(batch):
                is_new = not options.is_sending_back
                rows = normalise_columns(piece, options.topic) if is_new else normalise_failed(piece)
                _stage(stage, rows, task.partition)
        return stage.finish()
    except BaseException:
        # BaseException, because Spark may end a task that it no longer needs. A later cleanup deletes what remains.
        with contextlib.suppress(RmqError):
            stage.discard()
        raise


def _stage(stage: TaskStage | SendBackTask, rows: pa.RecordBatch, partition: int) -> None:
    try:
        stage.write(rows)
    except (OptionError, NotFoundError) as error:  # the message names the row, counted from the task's first row
        raise type(error)(f"partition {partition}, {error}") from None


def _check_same_storage(options: SinkOptions, store_id: str | None) -> None:
    """Raise StoreChangedError unless this machine has the store that the driver opened or created."""
    settings = options.sink_settings()
    try:
        with StoreReader(settings.path, commit_log_path=settings.record_builder.commit_log_path) as store:
            found_id = store.store_id()
    except StorePathError as error:
        raise _other_storage(str(error)) from None
    if store_id not in (None, found_id):
        raise _other_storage(f'the id of the one at "{settings.path}" is {found_id}, the driver\'s has {store_id}.')


def _other_storage(found: str) -> StoreChangedError:
    return StoreChangedError(
        f"host {platform.node()} does not see the store to which the driver writes: {found} On a cluster the path must "
        "be storage that the driver and all executors share, mounted at the same path."
    )


@dataclass(frozen=True, slots=True)
class StagedRows(WriterCommitMessage):
    """The message that a task sends to the commit: the key of its batch, and the file with its staged rows."""

    key: CommitKey
    file: StagedFile | StagedCopies


def staged_keys(messages: Sequence[WriterCommitMessage | None]) -> list[CommitKey]:
    """Return the keys in the messages of tasks. The message of a failed task is None and is left out."""
    return [message.key for message in messages if isinstance(message, StagedRows)]


def staged_files(messages: Sequence[WriterCommitMessage | None]) -> list[StagedFile | StagedCopies]:
    """Return the staged files in the messages, in the order of the tasks."""
    return [message.file for message in messages if isinstance(message, StagedRows)]


# Local properties of a streaming query's tasks (MicroBatchExecution.BATCH_ID_KEY, StreamExecution.QUERY_ID_KEY; 4.3).
QUERY_ID_PROPERTY = "sql.streaming.queryId"
BATCH_ID_PROPERTY = "streaming.sql.batchId"


def key_of_task(query_id: str | None, batch_id: str | None) -> CommitKey:
    """Return the key of a streaming query's batch, from the two local properties of one of its tasks.

    Raises BatchConflictError if one of the properties is missing, because a repeated batch could not be recognised and
    would be written twice.
    """
    if not query_id or not (batch_id or "").isdecimal():
        raise BatchConflictError(
            f"cannot identify the batch of this task: found {QUERY_ID_PROPERTY}={query_id!r} and "
            f"{BATCH_ID_PROPERTY}={batch_id!r}; expected both, or a repeated batch would be written twice. Nothing was "
            "written. Write with writeStream of PySpark 4.3 or newer, or in foreachBatch with txnAppId and txnVersion."
        )
    return CommitKey(query_id, int(batch_id or ""))


def key_of_commit(keys: Sequence[CommitKey], task_count: int, batch_id: int | None) -> CommitKey:
    """Return the key of the batch to commit, which is the same in the messages of all tasks.

    `keys` are the keys in these messages, and `task_count` is the number of tasks. `batch_id` is the batch that Spark
    commits, or None for a df.write. Raises BatchConflictError if a task sent no message, if the keys differ from each
    other, or if their batch id is not `batch_id`.
    """
    what = "the write" if batch_id is None else f"batch {batch_id}"
    if len(keys) != task_count or not keys:
        raise BatchConflictError(
            f"{what} cannot be committed: found staged rows of {len(keys)} tasks; expected {task_count}. Nothing was "
            "written. Start it again."
        )
    different = sorted({str(key) for key in keys})
    if len(different) > 1 or batch_id not in (None, keys[0].batch_id):
        raise BatchConflictError(
            f"{what} cannot be committed: its tasks staged rows of {' and of '.join(different)}. Nothing was written. "
            "Start it again."
        )
    return keys[0]
