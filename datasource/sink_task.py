"""What a task of a write does: rows into a staged file, whole, or no file at all.

Invariants:
- nothing in the store changes but its folder `rmq/staging/`;
- every attempt has a file and ids of its own, so that attempts that Spark repeats or starts twice never meet; the
  commit knows only the files of those that Spark believes;
- memory depends on the size of a piece of rows (`sink_columns`), not on how many rows there are.
"""

import contextlib
import platform
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from rmq_spark.datasource.send_back_schema import normalise_failed
from rmq_spark.datasource.sink_columns import cut_pieces, normalise_columns
from rmq_spark.datasource.sink_options import SinkOptions
from rmq_spark.store import CommitKey, SendBackTask, StagedCopies, StagedFile, TaskStage, open_reader
from rmq_spark.store.errors import NotFoundError, OptionError, RmqError, StoreChangedError, StorePathError


@dataclass(frozen=True, slots=True)
class SinkTask:
    """One attempt of one task: which part of the rows, Spark's number of the attempt, and random bits.

    Spark counts attempts from 0 in every application, and one that was given up may still run: the random bits
    keep the files of all of them apart.
    """

    partition: int
    attempt: int
    random_bits: int

    @property
    def file_name(self) -> str:
        """Return a name for what this attempt stages."""
        return f"{self.partition:05d}-{self.attempt}-{self.random_bits:08x}"


def stage_rows(
    batches: Iterable[pa.RecordBatch], options: SinkOptions, store_id: str | None, key: CommitKey, task: SinkTask
) -> StagedFile | StagedCopies:
    """Stage all rows of a task and return what the commit needs to know of them.

    With mode=sendBack those are copies of the rows' messages, but for rows that the batch has sent back before.
    `store_id` is what `ensure_store` said on the driver.
    Raises OptionError, which names partition and row, for a row that cannot become a message or is none of the store's,
    NotFoundError for a topic that is not there and not to be made, or a message that has expired, StoreChangedError
    where this machine sees another store or none, and what the disk raises. Then the file is gone, and nothing else has
    changed. Any number of tasks may stage at once.
    """
    _refuse_other_storage(options, store_id)
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
        # Also when Spark ends a task that it does not need any more. What cannot be taken away is swept up later.
        with contextlib.suppress(RmqError):
            stage.discard()
        raise


def _stage(stage: TaskStage | SendBackTask, rows: pa.RecordBatch, partition: int) -> None:
    try:
        stage.write(rows)
    except (OptionError, NotFoundError) as error:  # it names the row, and rows count from the task's first
        raise type(error)(f"partition {partition}, {error}") from None


def _refuse_other_storage(options: SinkOptions, store_id: str | None) -> None:
    """Raise StoreChangedError unless this machine sees the store that the driver has seen, or made."""
    settings = options.sink_settings()
    try:
        with open_reader(settings.path, commit_log_path=settings.outbox.commit_log_path) as store:
            seen = store.store_id()
    except StorePathError as error:
        raise _other_storage(str(error)) from None
    if store_id not in (None, seen):
        raise _other_storage(f'the id of the one at "{settings.path}" is {seen}, the driver\'s has {store_id}.')


def _other_storage(found: str) -> StoreChangedError:
    return StoreChangedError(
        f"host {platform.node()} does not see the store to which the driver writes: {found} On a cluster the path must "
        "be storage that the driver and all executors share, mounted at the same path."
    )
