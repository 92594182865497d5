"""Task of a write: writes its rows through the sink, and returns a message with the receipt for the commit.

- Every attempt of a task has its own writer, so attempts that Spark repeats or starts twice do not interfere. The
  commit gets only the receipts of the attempts that Spark accepts.
- Memory depends on the size of a piece of rows (`sink_schema`), not on the number of rows.

Spark passes the query id and the batch id to the tasks of a streaming query, as local properties. To a writer's commit
it passes only the batch id. So the messages of the tasks contain both, and `key_of_commit` checks that they agree.
"""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from rmq_spark.datasource.options.sink_schema import cut_pieces
from rmq_spark.datasource.options.write_options import SinkOptions
from rmq_spark.datasource.spark.log_lines import configure_from_environment
from rmq_spark.store.backend import Receipt, TaskWriter
from rmq_spark.store.errors import BatchConflictError, NotFoundError, OptionError, RmqError
from rmq_spark.store.model import CommitKey

configure_from_environment()  # a task may load no other module of ours before this one


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
    def name(self) -> str:
        """The name of this attempt, which no other attempt has."""
        return f"{self.partition:05d}-{self.attempt}-{self.random_bits:08x}"


def stage_rows(
    batches: Iterable[pa.RecordBatch], options: SinkOptions, token: str | None, key: CommitKey, task: SinkTask
) -> Receipt:
    """Write all rows of a task. Return the receipt for the commit. Any number of tasks may write at once.

    With mode=sendBack copies of the messages are written that the rows identify, except those that the batch has
    already sent back. `token` is the result of `BatchSink.prepare` on the driver.

    Raises OptionError if a row is not a valid message, or not a message of the store; the error names the partition and
    the row. Raises NotFoundError if a topic is missing and must not be created, or if a message has expired. Raises
    StoreChangedError if this machine does not see the place of the driver, StoreError if the disk fails, and the errors
    of brokers. After an error nothing of the task remains, except rows that were sent to a cluster.
    """
    writer = options.sink().open_task(token, key, task.name, task.partition)
    try:
        for batch in batches:
            for piece in cut_pieces(batch):
                _write(writer, options.normalise(piece), task.partition)
        return writer.finish()
    except BaseException:
        # BaseException, because Spark may end a task that it no longer needs. A later cleanup deletes what remains.
        with contextlib.suppress(RmqError):
            writer.discard()
        raise


def _write(writer: TaskWriter, rows: pa.RecordBatch, partition: int) -> None:
    try:
        writer.write(rows)
    except (OptionError, NotFoundError) as error:  # the message names the row, counted from the task's first row
        raise type(error)(f"partition {partition}, {error}") from None


@dataclass(frozen=True, slots=True)
class StagedRows(WriterCommitMessage):
    """The message that a task sends to the commit: the key of its batch, and the receipt for its rows."""

    key: CommitKey
    receipt: Receipt


def staged_keys(messages: Sequence[WriterCommitMessage | None]) -> list[CommitKey]:
    """Return the keys in the messages of tasks. The message of a failed task is None and is left out."""
    return [message.key for message in messages if isinstance(message, StagedRows)]


def receipts_of(messages: Sequence[WriterCommitMessage | None]) -> list[Receipt]:
    """Return the receipts in the messages, in the order of the tasks."""
    return [message.receipt for message in messages if isinstance(message, StagedRows)]


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
            "committed. Start it again."
        )
    different = sorted({str(key) for key in keys})
    if len(different) > 1 or batch_id not in (None, keys[0].batch_id):
        raise BatchConflictError(
            f"{what} cannot be committed: its tasks staged rows of {' and of '.join(different)}. Nothing was "
            "committed. Start it again."
        )
    return keys[0]
