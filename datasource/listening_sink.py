"""The sink behind `rmq_spark.consume`: its tasks run the listener, and its commit sends back what failed.

Every call of `consume` has a sink of its own, for a listener is no option; Spark pickles the class, and the listener
with it. From there on it is the sink of `mode=sendBack`: the failed rows of a task are staged, and appended with those
of the other tasks once per batch. An orderly batch tells before that where its queues go on (`suspended.json`).

A broadcasting query sends nothing back: what failed is logged, counted and dropped.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Row
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from rmq_spark.datasource.batch_ids import BATCH_ID_PROPERTY, QUERY_ID_PROPERTY, key_of_commit, key_of_task
from rmq_spark.datasource.batch_writer import this_task
from rmq_spark.datasource.clocks import wall_clock_ms
from rmq_spark.datasource.listening import ORDERLY, History, Listener, ListenerTerms, QueueOutcome
from rmq_spark.datasource.listening_task import ListenerTask
from rmq_spark.datasource.sink_commit import commit_files, discard_files, ensure_store
from rmq_spark.datasource.sink_options import SinkOptions
from rmq_spark.datasource.sink_task import SinkTask, stage_rows
from rmq_spark.store import CommitKey, StagedCopies, StagedFile, Suspension, read_stopped_queues, write_outcomes
from rmq_spark.store.units import QueueKey

_LOG = logging.getLogger("rmq_spark")


@dataclass(frozen=True, slots=True)
class ConsumedRows(WriterCommitMessage):
    """What one task came to: its batch, what it staged (None where nothing is sent back), and its counts."""

    key: CommitKey
    file: StagedFile | StagedCopies | None
    outcomes: tuple[QueueOutcome, ...]
    rows: int
    failures: int


@dataclass(frozen=True, slots=True)
class ListenerJob:
    """What tasks and commit of one `consume` need to know. `options` are those of `mode=sendBack`.

    `drops`: what failed is not sent back. `is_shared`: the group's queries share its queues. `retry_topic` is the one
    that the query reads, None for a query that reads none.
    """

    listener: Listener
    terms: ListenerTerms
    options: SinkOptions
    drops: bool = False
    is_shared: bool = False
    retry_topic: str | None = None

    @property
    def _stops_queues(self) -> bool:
        return self.terms.model == ORDERLY and not self.drops

    @property
    def _fate(self) -> str:
        """What becomes of rows that are sent back, in words."""
        if self.drops:
            return "are dropped, as broadcasting has it"
        if self._stops_queues:
            return "are dead letters, for good"
        return "are sent back to their group, or become dead letters after maxReconsumeTimes"

    def run(
        self, batches: Iterable[pa.RecordBatch], store_id: str | None, key: CommitKey, task: SinkTask
    ) -> ConsumedRows:
        """Give the rows of a task to the listener and stage what failed; return what the commit needs to know.

        Raises what `stage_rows` raises, and OptionError for an answer of the listener that means nothing. Then nothing
        is staged. What the listener did stays done: the rows come again.
        """
        calls, file = self._calls(key), None
        failed = calls.failed_batches(batches)
        if self.drops:
            for _ in failed:
                pass
        else:
            file = stage_rows(failed, self.options, store_id, key, task)
        if calls.failures:
            shown = "; ".join(calls.errors)
            _LOG.warning("rmq: %d of %d rows failed and %s: %s", calls.failures, calls.rows, self._fate, shown)
        for one in calls.outcomes:
            if one.error:
                _LOG.warning(
                    "rmq: queue %s stopped at queue offset %s, for %d ms: %s",
                    one.queue,
                    one.resume,
                    one.suspend_ms,
                    one.error,
                )
        return ConsumedRows(key, file, tuple(calls.outcomes), calls.rows, calls.failures)

    def commit(self, done: Sequence[ConsumedRows], key: CommitKey, now_ms: int) -> None:
        """Have what failed in the store, once, and before that where stopped queues go on, and when from `now_ms` on.

        Raises what `commit_files` raises. Called again after that, or after a crash, it does what is left.
        """
        found = [one for message in done for one in message.outcomes]
        outcomes, known = suspensions(found, now_ms), {one.queue: one.known for one in found}
        if not self.drops:
            path, group = self.options.check_complete(), self.options.group
            assert group is not None

            def tell() -> None:
                write_outcomes(path, group, key, outcomes, known)

            files = [message.file for message in done if message.file is not None]
            commit_files(self.options, key, files, tell if self._stops_queues else None)
        rows, failures = sum(message.rows for message in done), sum(message.failures for message in done)
        level = logging.WARNING if failures and self.drops else logging.INFO
        stopped = sum(one is not None for one in outcomes.values())
        _LOG.log(level, "rmq: %s: %d rows, %d failed, %d queues stopped", key, rows, failures, stopped)

    def _calls(self, key: CommitKey) -> ListenerTask:
        """Return one attempt of one task. What the store knows of stopped queues is read anew for each."""
        histories: dict[QueueKey, History] = {}
        if self._stops_queues:
            assert self.options.group is not None
            found = read_stopped_queues(self.options.check_complete(), self.options.group, key)
            histories = {
                queue: history_of(one, key, is_settled=is_settled, is_shared=self.is_shared)
                for queue, (one, is_settled) in found.items()
            }
        resends = self.options.expired_original == "resend"
        return ListenerTask(
            self.listener,
            self.terms,
            lambda names: Row(*names),
            histories,
            drops=self.drops,
            resends=resends,
            retry_topic=self.retry_topic,
        )


def make_sink(name: str, job: ListenerJob) -> type[DataSource]:
    """Return the class of a sink that `format(name)` finds once it is registered."""

    class ListenerSink(DataSource):
        """A sink that gives rows to a listener."""

        @classmethod
        def name(cls) -> str:
            return name

        def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
            return ListenerWriter(job, None if job.drops else ensure_store(job.options))

    return ListenerSink


class ListenerWriter(DataSourceStreamArrowWriter):
    """Runs the listener in the tasks and stages what failed; appends that when Spark commits a batch, once."""

    def __init__(self, job: ListenerJob, store_id: str | None) -> None:
        self._job, self._store_id = job, store_id

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None, "called in a task"
        key = key_of_task(context.getLocalProperty(QUERY_ID_PROPERTY), context.getLocalProperty(BATCH_ID_PROPERTY))
        return self._job.run(iterator, self._store_id, key, this_task())

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        done = [message for message in messages if isinstance(message, ConsumedRows)]
        key = key_of_commit([message.key for message in done], len(messages), batchId)
        self._job.commit(done, key, wall_clock_ms())

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        for message in messages:
            if isinstance(message, ConsumedRows) and message.file is not None:
                discard_files(self._job.options, message.key, [message.file])


def history_of(one: Suspension, key: CommitKey, *, is_settled: bool, is_shared: bool) -> History:
    """Return what the batch `key` has to know of a stopped queue.

    `is_settled`: what was decided of its rows is in the store. `is_shared`: the group's queries share its queues.
    """
    sent, pending = (one.sent | one.dead, frozenset[int]()) if is_settled else (one.sent, one.dead)
    is_repeated = (one.query_id, one.batch_id) == (key.query_id, key.batch_id)
    # A queue that is handed over, or back, begins where the group stands, which may be before the place where it goes
    # on. Nobody reads a shared queue anew but by a reset, which forgets what is known of it.
    counts_from_resume, is_foreign = not (is_repeated or is_shared), one.query_id != key.query_id
    return History(
        one.resume,
        one.attempts,
        sent,
        pending,
        counts_from_resume,
        is_repeated,
        is_foreign=is_foreign,
        number=one.number,
    )


def suspensions(outcomes: Sequence[QueueOutcome], now_ms: int) -> Mapping[QueueKey, Suspension | None]:
    """Return what became of orderly queues as the store keeps it; None for one that goes on as if nothing had been."""
    return {
        one.queue: None
        if one.resume is None
        else Suspension(
            one.resume,
            now_ms + one.suspend_ms if one.suspend_ms else 0,
            dict(one.attempts),
            one.sent,
            one.dead,
        )
        for one in outcomes
    }
