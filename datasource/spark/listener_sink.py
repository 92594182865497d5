"""Sink of `rmq_spark.consume`: its tasks call the listener, and its commit sends back the failed rows.

Options of a sink are texts, so a listener cannot be an option. Therefore every call of `consume` makes its own sink
class, and Spark pickles this class together with the listener. Tasks stage the failed rows, and the driver commits them
as with `mode=sendBack`, once per batch even if Spark repeats it. Before that, the commit of an orderly batch records
the positions of the suspended queues in `suspended.json`.

A query with messageModel=broadcasting sends nothing back: failed rows are logged, counted and dropped.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Row
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from rmq_spark.datasource.options.write_options import SendBackOptions
from rmq_spark.datasource.spark.batch_counts import BatchCounts
from rmq_spark.datasource.spark.call_counts import CallCounts, count_text
from rmq_spark.datasource.spark.clocks import wall_clock_ms
from rmq_spark.datasource.spark.listener import ORDERLY, History, Listener, ListenerTerms, QueueOutcome
from rmq_spark.datasource.spark.listener_task import ListenerTask
from rmq_spark.datasource.spark.task_writer import (
    BATCH_ID_PROPERTY,
    QUERY_ID_PROPERTY,
    SinkTask,
    key_of_commit,
    key_of_task,
    stage_rows,
)
from rmq_spark.datasource.spark.worker_errors import without_frames
from rmq_spark.datasource.spark.writer import this_task
from rmq_spark.store.backend import Receipt
from rmq_spark.store.model import CommitKey, QueueKey, Suspension

_LOG = logging.getLogger("rmq_spark")


@dataclass(frozen=True, slots=True)
class ConsumedRows(WriterCommitMessage):
    """The message that a task sends to the commit.

    `key` is the batch, and `receipt` that of the failed rows; None if they are dropped. `outcomes` are the orderly
    queues that were suspended or resumed. `counts` are those of the calls.
    """

    key: CommitKey
    receipt: Receipt | None
    outcomes: tuple[QueueOutcome, ...]
    counts: CallCounts


@dataclass(frozen=True, slots=True)
class ListenerJob:
    """The settings of one call of `consume`, which its tasks and commits need.

    `options` are those of a write with `mode=sendBack`. `drops` is whether failed rows are dropped instead of sent
    back. `is_shared` is whether the queries of the group share its queues. `retry_topic` is the group's retry topic, or
    None if the query does not read it. `listener_id` is a name for this call of `consume`. `batch_counts` takes the
    counts of the tasks to the process that called `consume`.
    """

    listener: Listener
    terms: ListenerTerms
    options: SendBackOptions
    drops: bool = False
    is_shared: bool = False
    retry_topic: str | None = None
    listener_id: str = ""
    batch_counts: BatchCounts | None = None

    @property
    def _suspends_queues(self) -> bool:
        return self.terms.model == ORDERLY and not self.drops

    @property
    def _fate(self) -> str:
        """The end of a log line that says where failed rows go."""
        if self.drops:
            return "are dropped, as the query is broadcasting"
        if self._suspends_queues:
            return "are dead letters"
        return "are sent back to their group, or become dead letters after maxReconsumeTimes"

    def run(self, batches: Iterable[pa.RecordBatch], token: str | None, key: CommitKey, task: SinkTask) -> ConsumedRows:
        """Call the listener with the rows of a task, stage the failed rows, and return the message for the commit.

        Raises OptionError for an invalid answer of the listener, and every error of `stage_rows`. After an error
        nothing is staged. If Spark repeats the task, the listener gets the same rows again. When it has returned or
        raised, no call of the listener runs any more that was not given up.
        """
        calls, receipt = self._calls(key), None
        with contextlib.closing(calls.failed_batches(batches)) as failed:
            if self.drops:
                for _ in failed:
                    pass
            else:
                receipt = stage_rows(failed, self.options, token, key, task)
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
        if self.batch_counts is not None and key.batch_id is not None:
            self.batch_counts.add(key.batch_id, calls.counts)
        return ConsumedRows(key, receipt, tuple(calls.outcomes), calls.counts)

    def commit(self, done: Sequence[ConsumedRows], key: CommitKey, now_ms: int) -> None:
        """Commit a batch: record the suspended queues, then append the failed rows to the store.

        `done` are the messages of the tasks. `now_ms` is the time at which the pauses of suspended queues begin. The
        rows are appended once: a repeated call after an error or a crash completes the commit. Raises every error of
        `BatchSink.commit`.
        """
        found = [one for message in done for one in message.outcomes]
        outcomes, known = suspensions(found, now_ms), {one.queue: one.known for one in found}
        if not self.drops:
            sink = self.options.sink()
            receipts = [message.receipt for message in done if message.receipt is not None]
            record = partial(sink.record, key, outcomes, known) if self._suspends_queues else None
            sink.commit(key, receipts, record)
        counts = sum((message.counts for message in done), CallCounts())
        level = logging.WARNING if counts.failed_rows and self.drops else logging.INFO
        stopped = sum(one is not None for one in outcomes.values())
        _LOG.log(level, "rmq: %s: %s; %s stopped", key, counts, count_text(stopped, "queue"))

    def _calls(self, key: CommitKey) -> ListenerTask:
        """Return the calls of one attempt of a task. Each attempt reads the suspended queues from the store."""
        histories: dict[QueueKey, History] = {}
        if self._suspends_queues:
            found = self.options.sink().suspended(key)
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
            listener_id=self.listener_id,
        )


def make_sink(job: ListenerJob) -> type[DataSource]:
    """Return a new sink class with the name `job.listener_id`. The caller must register it for `format`."""

    @without_frames
    class ListenerSink(DataSource):
        """A sink that calls a listener."""

        @classmethod
        def name(cls) -> str:
            return job.listener_id

        def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
            return ListenerWriter(job, None if job.drops else job.options.sink().prepare())

    return ListenerSink


@without_frames
class ListenerWriter(DataSourceStreamArrowWriter):
    """The writer of one batch. `write` calls the listener in tasks and stages failed rows; `commit` appends them."""

    def __init__(self, job: ListenerJob, token: str | None) -> None:
        self._job, self._token = job, token

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None, "called in a task"
        key = key_of_task(context.getLocalProperty(QUERY_ID_PROPERTY), context.getLocalProperty(BATCH_ID_PROPERTY))
        return self._job.run(iterator, self._token, key, this_task())

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        done = [message for message in messages if isinstance(message, ConsumedRows)]
        key = key_of_commit([message.key for message in done], len(messages), batchId)
        self._job.commit(done, key, wall_clock_ms())

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        for message in messages:
            if isinstance(message, ConsumedRows) and message.receipt is not None:
                self._job.options.sink().abort(message.key, [message.receipt])


def history_of(one: Suspension, key: CommitKey, *, is_settled: bool, is_shared: bool) -> History:
    """Return the history of a suspended queue for a task of the batch `key`.

    `is_settled` is whether the dead letters of the suspension are certainly in the store. `is_shared` is whether the
    queries of the group share its queues.
    """
    sent, pending = (one.sent | one.dead, frozenset[int]()) if is_settled else (one.sent, one.dead)
    is_repeated = (one.query_id, one.batch_id) == (key.query_id, key.batch_id)
    # A shared queue that was handed over begins at the group's offset. This may be smaller than `resume`, but the
    # record applies nevertheless. Only a reset makes a query read a shared queue again, and a reset deletes the record.
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
    """Return the suspension of each queue in `outcomes`, as the store records it; None if the queue is not suspended.

    `now_ms` is the time at which the pauses begin, in ms since the epoch.
    """
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
