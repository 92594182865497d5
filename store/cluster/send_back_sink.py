"""The sink of failed rows of a live cluster: tasks check the rows, and the commit on the driver sends them back.

A task reads the record of each row at its broker and compares it (`send_back`). Nothing is sent before all tasks have
finished. So a task that is repeated, a zombie task and an aborted batch send nothing back, and of several rows of a
message only one is sent. The commit of a batch that an earlier run may have committed looks for the copies of that run
first (`sent_copies`). Any other repeated commit, and an answer that is lost, copies a message again.

The receipt of a task has about 200 bytes for each row, and the content of rows whose message has expired.
"""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NoReturn

import pyarrow as pa

from rmq_spark.store.backend import CommitTerms, CommitTotals, Guarantee, Receipt, SendBackTerms
from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.broker_calls import BrokerCalls
from rmq_spark.store.cluster.client import borrowed_client, monotonic_ms, now_ms
from rmq_spark.store.cluster.send_back import BackRow, Identity, RowCheck, log_errors, send_checked
from rmq_spark.store.cluster.sent_copies import SentCopies
from rmq_spark.store.cluster.write_routes import NewTopics, WriteRoutes
from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import CommitKey, QueueKey, Suspension
from rmq_spark.store.names import check_retrying_group

_LOG = logging.getLogger("rmq_spark")

_NO_TOPICS = NewTopics(is_allowed=False)


@dataclass(frozen=True, slots=True)
class ClusterSendBackSink:
    """Sends the failed messages of a group back, each at least once."""

    address: ClusterAddress
    terms: SendBackTerms
    commit_terms: CommitTerms

    @property
    def guarantee(self) -> Guarantee:
        """At least once: a broker does not recognise a message that comes back again, and an index may miss a copy."""
        return Guarantee.AT_LEAST_ONCE

    def prepare(self) -> None:
        """Check the name of the group. Raises OptionError if it is not that of a group that gets messages back."""
        check_retrying_group(self.terms.group)

    def open_task(self, token: str | None, key: CommitKey, task: str, partition: int) -> "ClusterSendBackTask":
        """Return the writer of an attempt of a task, which checks the rows."""
        return ClusterSendBackTask(self)

    def commit(
        self, key: CommitKey, receipts: Sequence[Receipt], before_commit: Callable[[], None] | None = None
    ) -> CommitTotals:
        """Send the rows of all receipts back. Raises the first error of a broker, with a note of what was sent back.

        If `key` is the repeated batch of the terms, rows that have a copy are left out, and the totals are those of the
        others. Any other repeated call sends the rows back again.
        """
        rows: dict[Identity, BackRow] = {}
        for receipt in receipts:
            assert isinstance(receipt, tuple), receipt
            for row in receipt:
                rows.setdefault(row.identity, row)
        if before_commit is not None:
            before_commit()
        sent = list(rows.values())
        if rows:
            with ExitStack() as held:
                opened = self.connect(held)
                repeated = self.terms.repeated
                if repeated is not None and repeated.batch_id == key.batch_id:
                    copies = SentCopies(opened.calls, opened.routes, self.terms.group, repeated.planned_ms)
                    sent = copies.missing(sent)
                    _LOG.info("rmq: %s: %d of %d rows were sent back before", key, len(rows) - len(sent), len(rows))
                send_checked(opened.calls, opened.routes, self.terms, sent)
        return CommitTotals(len(sent), sum(row.size for row in sent), len({row.queue for row in sent}))

    def abort(self, key: CommitKey, receipts: Sequence[Receipt]) -> None:
        """Do nothing, because tasks send nothing."""

    def suspended(self, key: CommitKey) -> Mapping[QueueKey, tuple[Suspension, bool]]:
        """Raise OptionError, because this place lacks the capability SUSPENSIONS."""
        self._refuse_suspensions()

    def record(
        self, key: CommitKey, outcomes: Mapping[QueueKey, Suspension | None], known: Mapping[QueueKey, int]
    ) -> None:
        """Raise OptionError, because this place lacks the capability SUSPENSIONS."""
        self._refuse_suspensions()

    def _refuse_suspensions(self) -> NoReturn:
        raise OptionError(
            f"{self.address.describe()} cannot suspend queues for an orderly listener; expected a store directory. Use "
            'model="concurrently".'
        )

    def connect(self, held: ExitStack) -> "Connected":
        """Return a client, and what it calls brokers with, until `held` is closed."""
        client = held.enter_context(borrowed_client(self.address))
        routes = WriteRoutes(client, monotonic_ms, _NO_TOPICS)
        calls = BrokerCalls(client, routes, self.address.write_wait_ms, monotonic_ms)
        return Connected(routes, calls, RowCheck(client, routes, calls, self.terms, now_ms()))


@dataclass(frozen=True, slots=True)
class Connected:
    """A client's routes, its calls, and its check of rows."""

    routes: WriteRoutes
    calls: BrokerCalls
    check: RowCheck


class ClusterSendBackTask:
    """Checks the rows of one task. It connects at the first row."""

    def __init__(self, sink: ClusterSendBackSink) -> None:
        self._sink, self._held = sink, ExitStack()
        self._check: RowCheck | None = None
        self._known: set[Identity] = set()
        self._rows: list[BackRow] = []
        self._row_count = 0

    def write(self, rows: pa.RecordBatch) -> None:
        """Check rows, whose columns have the types of `failed_rows`. The first row of each message counts.

        Raises the errors of `RowCheck.check`; row numbers count from 0 at the first row of the task.
        """
        if self._check is None:
            self._check = self._sink.connect(self._held).check
        self._rows += self._check.check(rows, 0, self._row_count, self._known)
        log_errors(rows, is_first=not self._row_count)
        self._row_count += rows.num_rows

    def finish(self) -> tuple[BackRow, ...]:
        """Return the rows to send back."""
        self._held.close()
        return tuple(self._rows)

    def discard(self) -> None:
        """Forget the rows of a failed task. A client that the present exception interrupted is closed."""
        self._held.__exit__(*sys.exc_info())
        self._rows.clear()
