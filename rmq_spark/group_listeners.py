"""Spark listeners for consumer groups: publish what a query finished last, and report how far a group is behind."""

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from rmq_spark.datasource.notices import tell
from rmq_spark.store import CommitKey, group_lag, publish_last_offsets
from rmq_spark.store.errors import NotFoundError, RmqError
from rmq_spark.store.units import QueueKey

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
    """One source of a progress that is a member of a group: who it is, and where its last finished batch ends."""

    def __init__(self, mark: Mapping[str, Any], end: Mapping[str, Any], batch: CommitKey) -> None:
        self.batch = batch
        self.path, self.group, self.member_id = str(mark["path"]), str(mark["group"]), str(mark["member"])
        self.commit_log_path = str(mark["commitLogPath"]) if "commitLogPath" in mark else None
        self.is_published = mark.get("commit") != "off"  # commitOffsets
        self.member_batch = int(mark["batch"]) if "batch" in mark else None
        self.is_shared = bool(mark.get("shared"))
        self.reset = int(end.get("@", {}).get("reset", 0))
        self.suspended = int(end.get("@", {}).get("suspended", 0))
        self.offsets = {
            QueueKey(topic, int(queue_id)): int(offset)
            for topic, queues in end.items()
            if topic != "@"
            for queue_id, offset in queues.items()
        }


class _Listener(StreamingQueryListener):
    """Does nothing at every event, for listeners that mind some."""

    def onQueryStarted(self, event: "QueryStartedEvent") -> None:
        """Do nothing."""

    def onQueryIdle(self, event: "QueryIdleEvent") -> None:
        """Do nothing."""

    def onQueryProgress(self, event: "QueryProgressEvent") -> None:
        """Do nothing."""

    def onQueryTerminated(self, event: "QueryTerminatedEvent") -> None:
        """Do nothing."""


class GroupOffsetListener(_Listener):
    """Publishes the offsets of the last batch that a query of a group finished, when the query ends.

    Without it a query that is stopped between two triggers leaves its group one batch behind, which then is delivered
    again to whoever goes on without its checkpoint. `rmq_spark.session()` adds one; with a session of another make:
    `spark.streams.addListener(rmq_spark.GroupOffsetListener())`. With commitOffsets=off it publishes nothing either.

    Of a query with assignment=shared it publishes each batch as soon as the batch has ended, and records the end. So
    the query hands queues over between two triggers, and none of the batch's messages comes twice. Without the listener
    only the next trigger shows that the batch has ended.

    Safe to call from any thread. What fails is logged.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, list[_GroupSource]] = {}  # by run
        self._warned: set[str] = set()  # runs of which a batch could not be published

    def onQueryProgress(self, event: "QueryProgressEvent") -> None:
        """Remember how far the query has come, and publish it if the query shares queues."""
        run = str(event.progress.runId)
        found = [source for source in _group_sources(event.progress) if source.is_published]
        if not found:
            return
        with self._lock:
            self._last[run] = found
        for source in found:
            if source.is_shared:
                self._publish_batch(source, run)

    def onQueryTerminated(self, event: "QueryTerminatedEvent") -> None:
        """Publish what was remembered."""
        run = str(event.runId)
        with self._lock:
            found = self._last.pop(run, [])
            self._warned.discard(run)
        for source in found:
            try:
                _publish(source)
            except RmqError as error:
                _LOG.warning("rmq: the last offsets of consumer group %s are not published: %s", source.group, error)

    def _publish_batch(self, source: _GroupSource, run: str) -> None:
        try:
            _publish(source)
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
    """Reports how far the groups of a session's queries are behind, after each batch.

    `report` is called with the group's name and a table, a row for each queue, as `rmq_spark.group_lag` returns it,
    none for a group without offsets. Without `report` one line goes to the log at level INFO, and to standard error
    where the program has set up no logging. It runs on Spark's listener thread: be quick. What it raises is logged.
    """

    def __init__(self, report: "Callable[[str, pa.Table], None] | None" = None) -> None:
        self._report = report or _log_lag

    def onQueryProgress(self, event: "QueryProgressEvent") -> None:
        """Report the lag of each of the query's groups."""
        for source in _group_sources(event.progress):
            try:
                lag = group_lag(source.path, source.group, commit_log_path=source.commit_log_path)
                self._report(source.group, lag)
            except NotFoundError:
                pass  # no member, for the store cannot be written, and so without offsets: there is nothing to report
            except Exception as error:  # the user's, or the store's: the query goes on
                _LOG.warning("rmq: the lag of consumer group %s was not reported: %s", source.group, error)


def _publish(source: _GroupSource) -> None:
    publish_last_offsets(
        source.path,
        source.group,
        source.member_id,
        source.offsets,
        source.reset,
        source.suspended,
        source.batch,
        finished_batch=source.member_batch,
        commit_log_path=source.commit_log_path,
    )


def _log_lag(group: str, table: "pa.Table") -> None:
    tell(_lag_line(group, table))  # who adds the listener wants to see something, without a log too


def _lag_line(group: str, table: "pa.Table") -> str:
    rows = table.select(["lagMessages", "lagBytes", "secondsBehind"]).to_pylist()
    if not rows:
        return f"rmq: consumer group {group} has no offsets yet, so how far it is behind is not known"
    messages, size_bytes = (sum(row[name] or 0 for row in rows) for name in ("lagMessages", "lagBytes"))
    seconds = max((row["secondsBehind"] or 0 for row in rows), default=0)
    return (
        f"rmq: consumer group {group} is {messages} messages, {size_bytes} bytes, {seconds:.1f} s behind in "
        f"{len(rows)} queues"
    )


def _group_sources(progress: "StreamingQueryProgress") -> Iterator[_GroupSource]:
    """Yield the sources that are members of groups: they say so in what they report as their latest offset."""
    batch = CommitKey(str(progress.id), int(progress.batchId))
    for source in progress.sources:
        latest, end = _json(source.latestOffset), _json(source.endOffset)
        mark = latest.get("@", {})
        if isinstance(mark, Mapping) and "group" in mark and "member" in mark and isinstance(end.get("@"), Mapping):
            yield _GroupSource(mark, end, batch)


def _json(offset: object) -> Mapping[str, Any]:
    """Return an offset that is an object, {} for another source's."""
    if isinstance(offset, str):
        try:
            offset = json.loads(offset)
        except ValueError:
            return {}
    return offset if isinstance(offset, Mapping) else {}
