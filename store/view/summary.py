"""Summaries of a store, a topic and a group's lag. Each can be shown as text, as HTML, or as a table.

A summary is a snapshot: it does not change, and reads nothing from the disk. Bytes are those of records in the commit
log. Times are in ms since the epoch, by the clock of the writer that stored the messages.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

import pyarrow as pa

from rmq_spark.store.group_tables import queue_of, sum_lag
from rmq_spark.store.names import is_system_topic
from rmq_spark.store.view import summary_html
from rmq_spark.store.view.summary_text import bytes_text, count_text, span_text, time_text

_TIME = pa.timestamp("ms", tz="UTC")

# The columns of a topic's table, which has a row for each queue.
QUEUES = pa.schema(
    [
        ("topic", pa.string()),
        ("queueId", pa.int32()),
        ("minOffset", pa.int64()),
        ("maxOffset", pa.int64()),
        ("messages", pa.int64()),
        ("bytes", pa.int64()),
        ("firstTimestamp", _TIME),  # store time of the first message that has not expired
        ("lastTimestamp", _TIME),
        ("problem", pa.string()),  # the error or the damage of the queue; null if the queue is sound
    ]
)

# The columns of a store's table, which has a row for each topic.
TOPICS = pa.schema(
    [
        ("topic", pa.string()),
        ("isSystem", pa.bool_()),  # whether it is one of RocketMQ's own topics, such as for retries or delays
        ("queues", pa.int32()),
        ("messages", pa.int64()),
        ("bytes", pa.int64()),
        ("firstTimestamp", _TIME),
        ("lastTimestamp", _TIME),
    ]
)


def as_pandas(table: pa.Table) -> Any:
    """Return the table as a pandas DataFrame.

    Raises ModuleNotFoundError if pandas is not installed. The error contains the pip command that installs it.
    """
    try:
        import_module("pandas")
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        raise ModuleNotFoundError(
            f"to_pandas() needs pandas: it is not installed for {sys.executable}; expected the extra pandas. "
            'Install it: pip install "rmq-spark[pandas]". Without it, to_arrow() has the same table.',
            name="pandas",
        ) from None
    return table.to_pandas()


def _earliest(times: Iterable[int | None]) -> int | None:
    return min((time for time in times if time is not None), default=None)


def _latest(times: Iterable[int | None]) -> int | None:
    return max((time for time in times if time is not None), default=None)


@dataclass(frozen=True, slots=True)
class QueueSummary:
    """Summary of one queue, which has the queue offsets [min_offset, max_offset).

    `bytes` is the size of its records. `first_ms` and `last_ms` are the store times of its first and last message, or
    None if they are not known. `problem` is None if the queue is sound. If the queue cannot be read, `problem` is the
    error, and all numbers are 0. If some entries are damaged, `problem` describes the damage, and `bytes` does not
    include their records.
    """

    queue_id: int
    min_offset: int = 0
    max_offset: int = 0
    bytes: int = 0
    first_ms: int | None = None
    last_ms: int | None = None
    problem: str | None = None

    @property
    def messages(self) -> int:
        """Number of messages that can be read."""
        return self.max_offset - self.min_offset


@dataclass(frozen=True, slots=True, repr=False)
class TopicSummary:
    """Summary of one topic and its queues, in the order of their ids. `bytes` is an estimate if `is_exact` is False."""

    topic: str
    queues: tuple[QueueSummary, ...]
    is_exact: bool = True

    @property
    def is_system(self) -> bool:
        """Whether this is one of RocketMQ's own topics."""
        return is_system_topic(self.topic)

    @property
    def messages(self) -> int:
        """Number of messages that can be read."""
        return sum(queue.messages for queue in self.queues)

    @property
    def bytes(self) -> int:
        """Number of bytes of the records of these messages."""
        return sum(queue.bytes for queue in self.queues)

    @property
    def first_ms(self) -> int | None:
        """Store time of the first message that has not expired, or None if the topic has no messages."""
        return _earliest(queue.first_ms for queue in self.queues)

    @property
    def last_ms(self) -> int | None:
        """Store time of the last message, or None if the topic has no messages."""
        return _latest(queue.last_ms for queue in self.queues)

    @property
    def problems(self) -> dict[int, str]:
        """A dict from queue id to the problem of that queue. It is empty if all queues are sound."""
        return {queue.queue_id: queue.problem for queue in self.queues if queue.problem is not None}

    def to_arrow(self) -> pa.Table:
        """Return a table with a row for each queue, and the columns of QUEUES."""
        rows = [
            {
                "topic": self.topic,
                "queueId": queue.queue_id,
                "minOffset": queue.min_offset,
                "maxOffset": queue.max_offset,
                "messages": queue.messages,
                "bytes": queue.bytes,
                "firstTimestamp": queue.first_ms,
                "lastTimestamp": queue.last_ms,
                "problem": queue.problem,
            }
            for queue in self.queues
        ]
        return pa.Table.from_pylist(rows, QUEUES)

    def to_pandas(self) -> Any:
        """Return the table as a pandas DataFrame. Raises ModuleNotFoundError if pandas is not installed."""
        return as_pandas(self.to_arrow())

    def __repr__(self) -> str:
        content = f"{count_text(self.messages, 'message')}, {bytes_text(self.bytes, self.is_exact)}"
        lines = [f"topic {self.topic}: {count_text(len(self.queues), 'queue')}, {content}"]
        if self.first_ms is not None:
            lines.append(f"stored from {time_text(self.first_ms)} to {time_text(self.last_ms)} UTC")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return summary_html.topic_html(self)


@dataclass(frozen=True, slots=True, repr=False)
class StoreSummary:
    """Summary of one store: its topics, ordered by name, and its commit log.

    `[log_begin, log_end)` are the physical offsets of the log, and `segment_bytes` is the size of one segment. `state`
    is "closed" if the store was cleanly shut down, "live" if a process writes to it, or "crashed".
    """

    path: str
    topics: tuple[TopicSummary, ...]
    log_begin: int
    log_end: int
    segment_count: int
    segment_bytes: int
    state: str

    @property
    def messages(self) -> int:
        """Number of messages that can be read, including those of RocketMQ's own topics."""
        return sum(topic.messages for topic in self.topics)

    @property
    def bytes(self) -> int:
        """Number of bytes of the commit log, including fillers and records that have no entry."""
        return self.log_end - self.log_begin

    @property
    def queue_count(self) -> int:
        """Number of queues, including empty ones."""
        return sum(len(topic.queues) for topic in self.topics)

    @property
    def used_queue_count(self) -> int:
        """Number of queues with messages that can be read."""
        return sum(queue.messages > 0 for topic in self.topics for queue in topic.queues)

    @property
    def first_ms(self) -> int | None:
        """Store time of the first message that has not expired, or None if the store has no messages."""
        return _earliest(topic.first_ms for topic in self.topics)

    @property
    def last_ms(self) -> int | None:
        """Store time of the last message, or None if the store has no messages."""
        return _latest(topic.last_ms for topic in self.topics)

    def to_arrow(self) -> pa.Table:
        """Return a table with a row for each topic, and the columns of TOPICS."""
        rows = [
            {
                "topic": topic.topic,
                "isSystem": topic.is_system,
                "queues": len(topic.queues),
                "messages": topic.messages,
                "bytes": topic.bytes,
                "firstTimestamp": topic.first_ms,
                "lastTimestamp": topic.last_ms,
            }
            for topic in self.topics
        ]
        return pa.Table.from_pylist(rows, TOPICS)

    def to_pandas(self) -> Any:
        """Return the table as a pandas DataFrame. Raises ModuleNotFoundError if pandas is not installed."""
        return as_pandas(self.to_arrow())

    def __repr__(self) -> str:
        own = sum(not topic.is_system for topic in self.topics)
        lines = [
            f"store {self.path} ({self.state})",
            f"{count_text(own, 'topic')} and {len(self.topics) - own} of RocketMQ's own, "
            f"{count_text(self.messages, 'message')} in {count_text(self.used_queue_count, 'queue')}",
            f"{bytes_text(self.bytes)} of log in {count_text(self.segment_count, 'segment')} of "
            f"{bytes_text(self.segment_bytes)}",
        ]
        if self.first_ms is not None and self.last_ms is not None:
            lines.append(
                f"stored from {time_text(self.first_ms)} to {time_text(self.last_ms)} UTC "
                f"({span_text((self.last_ms - self.first_ms) / 1000)})"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return summary_html.store_html(self)


@dataclass(frozen=True, slots=True, repr=False)
class GroupLag:
    """The lag of a consumer group, or of all groups, at one time.

    `path` is the path of the store, or the name of the cluster. `group` is None if the lag of all groups was requested.
    `table` has a row for each group and queue, and `at_ms` is the time at which it was made (ms since the epoch). A
    notebook displays the lag as a table.

    It can be used like its Arrow table: it has the table's methods and attributes, such as `to_pylist` and `select`,
    and `lag["queueId"]` is a column. `pyarrow.table(lag)` and libraries that read Arrow accept it; for a function that
    accepts only a `pyarrow.Table`, use `to_arrow()`.
    """

    path: str
    group: str | None
    at_ms: int
    table: pa.Table

    @property
    def at(self) -> datetime:
        """When the lag was measured, in UTC."""
        return datetime.fromtimestamp(self.at_ms / 1000, UTC)

    @property
    def messages(self) -> int:
        """Number of messages that the groups have not read yet and that have not expired, in the queues that answer."""
        return sum_lag(self.table.to_pylist()).messages or 0

    @property
    def unknown_queues(self) -> int:
        """Number of rows whose lag is not known, because the broker of the queue is away."""
        return sum_lag(self.table.to_pylist()).unknown_queues

    def to_arrow(self) -> pa.Table:
        """Return the table as a `pyarrow.Table`. It has a row for each group and queue."""
        return self.table

    def to_pandas(self) -> Any:
        """Return the table as a pandas DataFrame. Raises ModuleNotFoundError if pandas is not installed."""
        return as_pandas(self.table)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute or a method of the table."""
        if name.startswith("_") or name == "table":  # not set yet while it is copied or unpickled
            raise AttributeError(f"'GroupLag' object has no attribute {name!r}")
        return getattr(self.table, name)

    def __getitem__(self, key: str | int) -> pa.ChunkedArray:
        """Return a column of the table, by name or position."""
        return self.table[key]

    def __len__(self) -> int:
        """Return the number of rows of the table."""
        return int(self.table.num_rows)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return the table as a stream of Arrow's C interface (Arrow PyCapsule)."""
        return self.table.__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        lines = [f"lag of {self.group or 'all groups'} at {time_text(self.at_ms)} UTC"]
        for row in self.table.to_pylist():
            lag = "not known" if row["lagMessages"] is None else count_text(row["lagMessages"], "message")
            group = "" if self.group else f"{row['group']}: "
            seconds = f", {span_text(row['secondsBehind'])}" if row["secondsBehind"] else ""
            lines.append(f"  {group}{queue_of(row)} {row['state']}, {lag}{seconds}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return summary_html.lag_html(self)
