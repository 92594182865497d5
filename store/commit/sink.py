"""A sink's two halves: tasks that stage rows, and the commit on the driver that appends what they staged, once."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from rmq_spark.store.commit.commits import CommitOptions, CommitTotals, commit_staged
from rmq_spark.store.commit.finishing import IntentFinisher
from rmq_spark.store.commit.keys import CommitKey
from rmq_spark.store.commit.outbox import Outbox, OutboxSettings
from rmq_spark.store.commit.staged_file import StagedFile
from rmq_spark.store.commit.staging import StageWriter
from rmq_spark.store.commit.sweeping import abort_staged
from rmq_spark.store.disk import files
from rmq_spark.store.disk.chance import wall_clock_ms
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.log.store_lock import refuse_network
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings


@dataclass(frozen=True, slots=True)
class SinkSettings:
    """What tasks and driver need to know of a sink; small, and pickled into every task."""

    path: str
    outbox: OutboxSettings = field(default_factory=OutboxSettings)
    commit: CommitOptions = field(default_factory=CommitOptions)
    application: str = "rmq-spark sink"
    lock_timeout_ms: int = 60_000
    allow_network_store: bool = False


class TaskStage:
    """One task's rows on their way: encoded as they come, and staged in a file that nobody sees before the commit."""

    def __init__(self, settings: SinkSettings, key: CommitKey, name: str) -> None:
        root = files.absolute(settings.path)
        refuse_network(root, allowed=settings.allow_network_store)
        self._outbox = Outbox(root, settings.outbox)
        self._stage = StageWriter(root, Disk(), key.folder, name)
        self._row_count = 0

    def write(self, messages: pa.RecordBatch) -> None:
        """Stage rows; columns are some of MESSAGE_COLUMNS.

        Raises OptionError for a row that is no message: it names the row, counted from the task's first.
        """
        self._stage.write(self._outbox.encode(messages, self._row_count))
        self._row_count += messages.num_rows

    def finish(self) -> StagedFile:
        """Return what was staged; it is on disk for good."""
        return self._stage.finish()

    def discard(self) -> None:
        """Take the file away: the task failed."""
        self._stage.discard()


def commit_sink(
    settings: SinkSettings,
    key: CommitKey,
    staged: Sequence[StagedFile],
    before_intent: Callable[[], None] | None = None,
) -> CommitTotals:
    """Append what tasks staged, all of it once; the store is made if it is not there. See `commits.commit_staged`."""
    root, disk = files.absolute(settings.path), Disk()
    writer = StoreWriter(
        root,
        disk,
        WriterSettings(
            settings.application,
            settings.lock_timeout_ms,
            settings.allow_network_store,
            settings.outbox.commit_log_path,
            settings.outbox.sizes,
            settings.outbox.delays,
        ),
        wall_clock_ms,
        time.sleep,
        (IntentFinisher(root, disk, wall_clock_ms),),
    )
    with writer:
        return commit_staged(writer, key, staged, settings.commit, before_intent=before_intent)


def abort_sink(settings: SinkSettings, key: CommitKey, staged: Sequence[StagedFile]) -> None:
    """Take away what tasks staged, but for what a commit promised to append. Raises nothing that is in the way."""
    abort_staged(files.absolute(settings.path), Disk(), key.folder, staged)
