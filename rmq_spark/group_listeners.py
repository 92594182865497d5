"""Spark listeners for consumer groups: one commits the final offsets of queries, one reports the groups' lag."""

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from rmq_spark.datasource.plan.offsets import decode_published, decode_reported, read_reported
from rmq_spark.datasource.plan.own_offsets import OwnOffsets
from rmq_spark.datasource.spark.clocks import log_info, monotonic_ms
from rmq_spark.store import lag_at, sum_lag
from rmq_spark.store.backend import Capability, FinalCommit
from rmq_spark.store.errors import NoPermissionError, NotFoundError, OptionError, RmqError
from rmq_spark.store.model import CommitKey
from rmq_spark.store.places import from_mark

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
        StreamingQueryProgress,
    )

_LOG = logging.getLogger("rmq_spark")

_ACCOUNT_OF_LISTENER = (
    " The listener gives up, so the end of the last batch is not published. It uses the account of the query's "
    "credentialsFile, or the one in RMQ_ACCESS_KEY and RMQ_SECRET_KEY in the environment of the driver"
)
_INTERVAL_MS = 5000.0  # between two commits of a query in a cluster (ClientConfig#persistConsumerOffsetInterval)


class _GroupSource:
    """A source of a query that is a member of a consumer group, with the end of its last finished batch.

    Its attributes come from Spark's progress report: `mark` is the metadata of the source's latest offset, `end` is the
    offset at the end of the batch, and `batch` is the query id and batch id. In a cluster `expected` has the queues in
    which the group may be at another offset than the end of the batch, unless their broker was away (`latest` is the
    source's latest offset).
    """

    def __init__(self, latest: Mapping[str, Any], end: Mapping[str, Any], batch: CommitKey) -> None:
        self.batch = batch
        mark = latest["@"]
        self.location, self.group, self.member_id = from_mark(mark), str(mark["group"]), str(mark["member"])
        self.is_published = mark.get("commit") != "off"  # commitOffsets
        self.member_batch = int(mark["batch"]) if "batch" in mark else None
        self.is_shared = bool(mark.get("shared"))
        self.has_leases = Capability.LEASES in self.location.capabilities
        metadata = end.get("@", {})
        self.reset = int(metadata.get("reset", 0))
        self.suspended = int(metadata.get("suspended", 0))
        answering = decode_reported(latest)
        published = decode_published(metadata.get("published", {}))
        self.expected = {queue: some for queue, some in published.items() if queue in answering}
        self.offsets = decode_reported(end)


class _Listener(StreamingQueryListener):
    """A Spark listener that ignores all events, as a base class."""

    def onQueryStarted(self, event: "QueryStartedEvent") -> None:
        """Do nothing."""

    def onQueryIdle(self, event: "QueryIdleEvent") -> None:
        """Do nothing."""

    def onQueryProgress(self, event: "QueryProgressEvent") -> None:
        """Do nothing."""

    def onQueryTerminated(self, event: "QueryTerminatedEvent") -> None:
        """Do nothing."""


@dataclass(slots=True)
class _Run:
    """What a listener knows of one run of a query: the ends of its last batch, and what it has committed of them.

    `own` has what it has committed in a cluster, by member, and `committed_ms` is the time of its last commit there.
    """

    last: list[_GroupSource] = field(default_factory=list)
    own: dict[str, OwnOffsets] = field(default_factory=dict)
    committed_ms: float = -math.inf
    is_warned: bool = False  # whether the commit of a batch has failed
    is_refused: bool = False  # whether the account lacks the right to commit


class GroupOffsetListener(_Listener):
    """Commits the offsets of a query's last finished batch to its consumer group when the query ends.

    A query commits the end of a batch only at its next trigger. If the query is stopped before that, and there is no
    such listener, the offsets of its last batch are not committed. A later query of the group that does not use the
    same checkpoint then reads that batch again. `rmq_spark.session()` adds the listener. In other sessions add it with
    `spark.streams.addListener(rmq_spark.GroupOffsetListener())`. Nothing is committed for queries with
    commitOffsets=off.

    For a query with assignment=shared the listener commits each batch as soon as the batch has ended. So the query can
    hand over queues to other members before its next trigger, without a message being delivered twice. Without the
    listener a handover waits for the next trigger.

    In a cluster it commits the end of a batch if it has committed none of this query for 5 s, and the last one. It
    commits in a queue only if nobody but the query has moved the group's offset: the reader, by what the checkpoint
    says, or the listener itself. It connects with the account in the query's credentialsFile, or in the environment of
    the driver (RMQ_ACCESS_KEY, RMQ_SECRET_KEY), because Spark's reports contain no secrets. Where the account lacks the
    right, it gives up for this query. A broker that does not answer delays a commit by up to four times 3 s, and with
    it the events of all queries of the session, because Spark has one thread for its listeners.

    `monotonic_ms` is a clock that never runs back. Thread-safe. Failures are logged, not raised.
    """

    def __init__(self, monotonic_ms: Callable[[], float] = monotonic_ms) -> None:
        self._monotonic_ms = monotonic_ms
        self._lock = threading.Lock()
        self._runs: dict[str, _Run] = {}

    def onQueryProgress(self, event: "QueryProgressEvent") -> None:
        """Record the end of the batch. If the query shares its queues, commit it, in a cluster at most every 5 s."""
        found = [source for source in _group_sources(event.progress) if source.is_published]
        if not found:
            return
        with self._lock:
            run = self._runs.setdefault(str(event.progress.runId), _Run())
            if run.is_refused:
                return
            run.last = found
            now_ms = self._monotonic_ms()
            is_due = now_ms - run.committed_ms >= _INTERVAL_MS
            if is_due:
                run.committed_ms = now_ms
        for source in found:
            if source.is_shared and (is_due or source.has_leases):
                self._commit_batch(source, run)

    def onQueryTerminated(self, event: "QueryTerminatedEvent") -> None:
        """Commit the end of the query's last batch."""
        with self._lock:
            run = self._runs.pop(str(event.runId), _Run())
        for source in run.last:
            try:
                self._commit(source, run)
            except RmqError as error:
                _LOG.warning("rmq: the last offsets of consumer group %s are not published: %s", source.group, error)

    def _commit_batch(self, source: _GroupSource, run: _Run) -> None:
        """Commit the end of a batch. Log only the first failure of a run, because the next trigger commits it too."""
        try:
            self._commit(source, run)
        except RmqError as error:
            with self._lock:
                is_first, run.is_warned = not run.is_warned, True
                is_refused = isinstance(error, NoPermissionError | OptionError) and not source.has_leases
                if is_refused:
                    run.is_refused, run.last = True, []
            if is_first or is_refused:
                _LOG.warning(
                    "rmq: the end of a batch is not published before the next trigger of the query, in the consumer "
                    "group %s: %s%s",
                    source.group,
                    error,
                    _ACCOUNT_OF_LISTENER if is_refused else "",
                )

    def _commit(self, source: _GroupSource, run: _Run) -> None:
        """Commit the offsets of a source. In a cluster remember them, because the checkpoint does not have them."""
        with self._lock:
            own = run.own.setdefault(source.member_id, OwnOffsets())
            # What is below the offset that the reader knows as the group's is older. Only a reset returns to it.
            expected = {
                queue: (*some, *(at for at in own.of(queue) or () if at > some[0]))
                for queue, some in source.expected.items()
            }
            own.note({queue: source.offsets[queue] for queue in expected if queue in source.offsets})
        final = FinalCommit(
            source.group,
            source.member_id,
            source.offsets,
            source.reset,
            source.suspended,
            source.batch,
            source.member_batch,
            expected,
        )
        with contextlib.closing(source.location.open()) as backend:
            backend.commit_final(final)


class GroupLagListener(_Listener):
    """Reports, after each batch of a query in the session, the lag of the query's consumer groups.

    `report` is called with the name of a group and the table that `rmq_spark.group_lag` returns for it. The table has a
    row for each queue, and is empty if the group has no offsets. If `report` is None, a line is logged at level INFO,
    or printed to stderr if logging is not configured. `report` runs on Spark's listener thread, so it must be fast. Its
    exceptions are logged.

    In a cluster the driver asks all brokers after each batch. Spark's progress has no secrets: the account is that of
    the query's `credentialsFile`, or the one in the environment variables RMQ_ACCESS_KEY and RMQ_SECRET_KEY of the
    driver. A broker that does not answer delays each report by 3 s, and its queues have the state "away".
    """

    def __init__(self, report: "Callable[[str, pa.Table], None] | None" = None) -> None:
        self._report = report or _log_lag

    def onQueryProgress(self, event: "QueryProgressEvent") -> None:
        """Report the lag of each consumer group that the query reads with."""
        for source in _group_sources(event.progress):
            try:
                self._report(source.group, lag_at(source.location, source.group))
            except NotFoundError:
                pass  # the group has neither members nor offsets, as in a store that is not writable
            except Exception as error:  # raised by `report` or by the place; the query must not fail
                _LOG.warning("rmq: the lag of consumer group %s was not reported: %s", source.group, error)


def _log_lag(group: str, table: "pa.Table") -> None:
    """Log the lag of all queues of a group in one line, or print it to stderr if logging is not configured.

    Messages and bytes are sums over the queues; the seconds are the maximum. The bytes of a cluster are an estimate.
    """
    rows = table.select(["lagMessages", "lagBytes", "secondsBehind", "state"]).to_pylist()
    if not rows:
        log_info(f"rmq: consumer group {group} has no offsets yet, so its lag is unknown", group=group)
        return
    total = sum_lag(rows)
    away = total.unknown_queues
    if total.messages is None:
        log_info(
            f"rmq: the lag of consumer group {group} is unknown: the brokers of all its queues are away",
            group=group,
        )
        return
    size_bytes, seconds = total.bytes or 0, total.seconds_behind or 0
    about = "about " if "brokerName" in table.column_names else ""
    log_info(
        f"rmq: consumer group {group} is {'at least ' if away else ''}{total.messages} messages, {about}{size_bytes} "
        f"bytes, {seconds:.1f} s behind in {len(rows)} queues{f', of which {away} are away' if away else ''}",
        group=group,
        lagMessages=total.messages,
        lagBytes=size_bytes,
        secondsBehind=seconds,
        unknownQueues=away,
    )


def _group_sources(progress: "StreamingQueryProgress") -> Iterator[_GroupSource]:
    """Yield the sources of a query that are members of consumer groups.

    The latest offset of such a source contains the names of the group and of the member.
    """
    batch = CommitKey(str(progress.id), int(progress.batchId))
    for source in progress.sources:
        latest, end = read_reported(source.latestOffset), read_reported(source.endOffset)
        mark = latest.get("@", {})
        if isinstance(mark, Mapping) and "group" in mark and "member" in mark and isinstance(end.get("@"), Mapping):
            yield _GroupSource(latest, end, batch)
