"""Spark listeners for consumer groups: one commits the final offsets of queries, one reports the groups' lag."""

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from rmq_spark.datasource.plan.offsets import decode_queues
from rmq_spark.datasource.spark.clocks import log_info
from rmq_spark.store import group_lag
from rmq_spark.store.backend import FinalCommit
from rmq_spark.store.errors import NotFoundError, RmqError
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


class _GroupSource:
    """A source of a query that is a member of a consumer group, with the end of its last finished batch.

    Its attributes come from Spark's progress report: `mark` is the metadata of the source's latest offset, `end` is the
    offset at the end of the batch, and `batch` is the query id and batch id.
    """

    def __init__(self, mark: Mapping[str, Any], end: Mapping[str, Any], batch: CommitKey) -> None:
        self.batch = batch
        self.location, self.group, self.member_id = from_mark(mark), str(mark["group"]), str(mark["member"])
        self.is_published = mark.get("commit") != "off"  # commitOffsets
        self.member_batch = int(mark["batch"]) if "batch" in mark else None
        self.is_shared = bool(mark.get("shared"))
        self.reset = int(end.get("@", {}).get("reset", 0))
        self.suspended = int(end.get("@", {}).get("suspended", 0))
        self.offsets = decode_queues({topic: queues for topic, queues in end.items() if topic != "@"})


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

    Thread-safe. Failures are logged, not raised.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, list[_GroupSource]] = {}  # by run
        self._warned: set[str] = set()  # runs with a failed commit of a batch

    def onQueryProgress(self, event: "QueryProgressEvent") -> None:
        """Record the end of the batch. If the query has assignment=shared, commit it."""
        run = str(event.progress.runId)
        found = [source for source in _group_sources(event.progress) if source.is_published]
        if not found:
            return
        with self._lock:
            self._last[run] = found
        for source in found:
            if source.is_shared:
                self._commit_batch(source, run)

    def onQueryTerminated(self, event: "QueryTerminatedEvent") -> None:
        """Commit the end of the query's last batch."""
        run = str(event.runId)
        with self._lock:
            found = self._last.pop(run, [])
            self._warned.discard(run)
        for source in found:
            try:
                _commit(source)
            except RmqError as error:
                _LOG.warning("rmq: the last offsets of consumer group %s are not published: %s", source.group, error)

    def _commit_batch(self, source: _GroupSource, run: str) -> None:
        """Commit the end of a batch. Log only the first failure of a run, because the next trigger commits it too."""
        try:
            _commit(source)
        except RmqError as error:
            with self._lock:
                is_first = run not in self._warned
                self._warned.add(run)
            if is_first:
                _LOG.warning(
                    "rmq: the end of a batch is not published before the next trigger of the query, in the consumer "
                    "group %s: %s",
                    source.group,
                    error,
                )


class GroupLagListener(_Listener):
    """Reports, after each batch of a query in the session, the lag of the query's consumer groups.

    `report` is called with the name of a group and the table that `rmq_spark.group_lag` returns for it. The table has a
    row for each queue, and is empty if the group has no offsets. If `report` is None, a line is logged at level INFO,
    or printed to stderr if logging is not configured. `report` runs on Spark's listener thread, so it must be fast. Its
    exceptions are logged.
    """

    def __init__(self, report: "Callable[[str, pa.Table], None] | None" = None) -> None:
        self._report = report or _log_lag

    def onQueryProgress(self, event: "QueryProgressEvent") -> None:
        """Report the lag of each consumer group that the query reads with."""
        for source in _group_sources(event.progress):
            try:
                mark = source.location.mark()
                lag = group_lag(mark["path"], source.group, commit_log_path=mark.get("commitLogPath"))
                self._report(source.group, lag)
            except NotFoundError:
                pass  # the store is not writable, so the group has neither members nor offsets
            except Exception as error:  # raised by `report` or by the store; the query must not fail
                _LOG.warning("rmq: the lag of consumer group %s was not reported: %s", source.group, error)


def _commit(source: _GroupSource) -> None:
    final = FinalCommit(
        source.group,
        source.member_id,
        source.offsets,
        source.reset,
        source.suspended,
        source.batch,
        source.member_batch,
    )
    with contextlib.closing(source.location.open()) as backend:
        backend.commit_final(final)


def _log_lag(group: str, table: "pa.Table") -> None:
    """Log the lag of all queues of a group in one line, or print it to stderr if logging is not configured.

    Messages and bytes are sums over the queues; the seconds are the maximum.
    """
    rows = table.select(["lagMessages", "lagBytes", "secondsBehind"]).to_pylist()
    if not rows:
        log_info(f"rmq: consumer group {group} has no offsets yet, so its lag is unknown")
        return
    messages, size_bytes = (sum(row[name] or 0 for row in rows) for name in ("lagMessages", "lagBytes"))
    seconds = max(row["secondsBehind"] or 0 for row in rows)
    log_info(
        f"rmq: consumer group {group} is {messages} messages, {size_bytes} bytes, {seconds:.1f} s behind in "
        f"{len(rows)} queues"
    )


def _group_sources(progress: "StreamingQueryProgress") -> Iterator[_GroupSource]:
    """Yield the sources of a query that are members of consumer groups.

    The latest offset of such a source contains the names of the group and of the member.
    """
    batch = CommitKey(str(progress.id), int(progress.batchId))
    for source in progress.sources:
        latest, end = _json(source.latestOffset), _json(source.endOffset)
        mark = latest.get("@", {})
        if isinstance(mark, Mapping) and "group" in mark and "member" in mark and isinstance(end.get("@"), Mapping):
            yield _GroupSource(mark, end, batch)


def _json(offset: object) -> Mapping[str, Any]:
    """Return an offset as a mapping. Return {} if it is not one, because it belongs to another kind of source."""
    if isinstance(offset, str):
        try:
            offset = json.loads(offset)
        except ValueError:
            return {}
    return offset if isinstance(offset, Mapping) else {}
