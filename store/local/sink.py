"""The sinks of a store directory: tasks stage rows in files of the store, and the commit appends them to the log.

To *stage* rows is to write them to a file in `rmq/staging/` that readers do not see, until the driver commits it. Every
attempt of a task has its own file and message ids, so attempts that Spark repeats or starts twice do not interfere. The
commit gets the files of the attempts that Spark accepts, as receipts (`StagedFile`, `StagedCopies`).
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rmq_spark.store.backend import CommitTerms, CommitTotals, Guarantee, SendBackTerms, SinkTerms
from rmq_spark.store.client.producer import Producer
from rmq_spark.store.delivery.send_back_ledger import read_suspended_queues
from rmq_spark.store.delivery.send_back_sink import (
    SendBackSettings,
    SendBackTask,
    abort_copies,
    check_send_back_sink,
    commit_copies,
)
from rmq_spark.store.errors import StoreChangedError, StorePathError
from rmq_spark.store.group.resets import write_outcomes
from rmq_spark.store.local.paths import StorePaths
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.log.store_writer import WriterSettings
from rmq_spark.store.model import CommitKey, QueueKey, Suspension
from rmq_spark.store.names import check_sent_topic
from rmq_spark.store.transaction.commit import CommitOptions
from rmq_spark.store.transaction.sink import RecordBuilderSettings, SinkSettings, TaskStage, abort_sink, commit_sink


def _commit_options(commit: CommitTerms, terms: SinkTerms) -> CommitOptions:
    return CommitOptions(
        on_conflict=commit.on_conflict,
        on_gap=commit.on_gap,
        is_transaction=commit.is_transaction,
        create_topics=terms.creates_topics,
        queue_count=terms.queue_count,
        flush=commit.flush,
        staging_retention_ms=commit.staging_retention_ms,
    )


def _check_same_store(paths: StorePaths, token: str | None) -> None:
    """Raise StoreChangedError unless this process has the store that the driver opened or created."""
    try:
        with StoreReader(paths.path, commit_log_path=paths.commit_log_path) as store:
            found = store.store_id()
    except StorePathError as error:
        raise _other_store(paths, str(error)) from None
    if token not in (None, found):
        raise _other_store(paths, f'the id of the one at "{paths.path}" is {found}, the driver\'s has {token}.')


def _other_store(paths: StorePaths, found: str) -> StoreChangedError:
    return StoreChangedError(
        f"host {platform.node()} does not see the store to which the driver writes: {found} {paths.sharing_advice()}"
    )


@dataclass(frozen=True, slots=True)
class LocalSink:
    """Writes new messages to a store directory, each batch exactly once."""

    paths: StorePaths
    terms: SinkTerms
    commit_terms: CommitTerms

    @property
    def guarantee(self) -> Guarantee:
        """Exactly once: the ledger in the store has the last batch of every query."""
        return Guarantee.EXACTLY_ONCE

    def prepare(self) -> str | None:
        """Create the store if the folder is empty or missing. Return the id of the store. Takes no lock.

        The id is None until one of our writers has appended to the store. Raises StorePathError if the path is not a
        store or cannot be written, and OptionError if clients must not send to the topic.
        """
        if self.terms.topic is not None:
            check_sent_topic(self.terms.topic)
        commit, log = self.commit_terms, self.paths.commit_log_path
        settings = WriterSettings("rmq-spark", commit.lock_timeout_ms, commit.allow_network_store, log)
        Producer(self.paths.path, settings, RecordBuilderSettings(log), "async")
        with StoreReader(self.paths.path, commit_log_path=self.paths.commit_log_path) as store:
            return store.store_id()

    def open_task(self, token: str | None, key: CommitKey, task: str, partition: int) -> TaskStage:
        """Return the writer of an attempt of a task, which stages rows in one file."""
        _check_same_store(self.paths, token)
        return TaskStage(self._settings("rmq-spark sink"), key, task)

    def commit(
        self, key: CommitKey, receipts: Sequence[Any], before_commit: Callable[[], None] | None = None
    ) -> CommitTotals:
        """Append the rows of all files to the store, once. `before_commit` is called under the store's lock.

        Raises BatchConflictError if the batch does not follow its query's earlier ones, LockTimeoutError if another
        process holds the store, DiskFullError if the disk is full, and other errors of the store.
        """
        return commit_sink(self._settings(f"rmq-spark sink, {key}"), key, receipts, before_commit)

    def abort(self, key: CommitKey, receipts: Sequence[Any]) -> None:
        """Delete staged files, except those of a commit that has begun. A later cleanup deletes what remains."""
        abort_sink(self._settings("rmq-spark sink"), key, receipts)

    def _settings(self, application: str) -> SinkSettings:
        return SinkSettings(
            path=self.paths.path,
            record_builder=RecordBuilderSettings(
                commit_log_path=self.paths.commit_log_path,
                queue_count=self.terms.queue_count,
                creates_topics=self.terms.creates_topics,
                compression=self.terms.compression,
                compress_over=self.terms.compress_over_bytes,
            ),
            commit=_commit_options(self.commit_terms, self.terms),
            application=application,
            lock_timeout_ms=self.commit_terms.lock_timeout_ms,
            allow_network_store=self.commit_terms.allow_network_store,
        )


@dataclass(frozen=True, slots=True)
class LocalSendBackSink:
    """Sends messages back that a group failed to consume, each row of a batch exactly once."""

    paths: StorePaths
    terms: SendBackTerms
    commit_terms: CommitTerms

    @property
    def guarantee(self) -> Guarantee:
        """Exactly once: the ledger in the store has the rows that a batch has sent back."""
        return Guarantee.EXACTLY_ONCE

    def prepare(self) -> str | None:
        """Check that failed rows can be sent back. Return the id of the store. Changes nothing."""
        return check_send_back_sink(self._settings("rmq-spark sink"))

    def open_task(self, token: str | None, key: CommitKey, task: str, partition: int) -> SendBackTask:
        """Return the writer of an attempt of a task. It stages copies of the messages that the rows identify."""
        _check_same_store(self.paths, token)
        return SendBackTask(self._settings("rmq-spark sink"), key, task)

    def commit(
        self, key: CommitKey, receipts: Sequence[Any], before_commit: Callable[[], None] | None = None
    ) -> CommitTotals:
        """Append the staged copies to the store, once. Raises the errors of `LocalSink.commit`."""
        return commit_copies(self._settings(f"rmq-spark sink, {key}"), key, receipts, before_commit)

    def abort(self, key: CommitKey, receipts: Sequence[Any]) -> None:
        """Delete staged files, except those of a commit that has begun. A later cleanup deletes what remains."""
        abort_copies(self._settings("rmq-spark sink"), key, receipts)

    def suspended(self, key: CommitKey) -> Mapping[QueueKey, tuple[Suspension, bool]]:
        """Return each suspended queue of the group, and whether its suspension is settled."""
        return read_suspended_queues(self.paths.path, self.terms.group, key)

    def record(
        self, key: CommitKey, outcomes: Mapping[QueueKey, Suspension | None], known: Mapping[QueueKey, int]
    ) -> None:
        """Record the outcomes of a batch under the store's lock. See `group.resets`."""
        write_outcomes(self.paths.path, self.terms.group, key, outcomes, known)

    def _settings(self, application: str) -> SendBackSettings:
        return SendBackSettings(
            path=self.paths.path,
            terms=self.terms,
            commit_log_path=self.paths.commit_log_path,
            commit=_commit_options(self.commit_terms, SinkTerms()),
            application=application,
            lock_timeout_ms=self.commit_terms.lock_timeout_ms,
            allow_network_store=self.commit_terms.allow_network_store,
        )
