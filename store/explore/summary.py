"""What a store, a topic and a group hold, as numbers: values that show themselves as text, tables and HTML.

They are as of one look and go on being true of it; nothing is read from the disk by them. Bytes are those of records as
they lie in the log. Times are ms since the epoch, by the clock of who stored the messages.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

import pyarrow as pa

from rmq_spark.store.explore import summary_html
from rmq_spark.store.explore.summary_text import bytes_text, count_text, span_text, time_text
from rmq_spark.store.format.filenames import is_system_topic

_TIME = pa.timestamp("ms", tz="UTC")

# A row for each queue of a topic.
QUEUES = pa.schema(
    [
        ("topic", pa.string()),
        ("queueId", pa.int32()),
        ("minOffset", pa.int64()),
        ("maxOffset", pa.int64()),
        ("messages", pa.int64()),
        ("bytes", pa.int64()),
        ("firstTimestamp", _TIME),  # when the first message that is there was stored
        ("lastTimestamp", _TIME),
        ("problem", pa.string()),  # why nothing is known of it, or not all; null mostly
    ]
)

# A row for each topic of a store.
TOPICS = pa.schema(
    [
        ("topic", pa.string()),
        ("isSystem", pa.bool_()),  # one of RocketMQ's own: retries, delays, transactions
        ("queues", pa.int32()),
        ("messages", pa.int64()),
        ("bytes", pa.int64()),
        ("firstTimestamp", _TIME),
        ("lastTimestamp", _TIME),
    ]
)


def as_pandas(table: pa.Table) -> Any:
    """Return the table as a pandas DataFrame. Raises ModuleNotFoundError with the pip command where pandas is not."""
    try:
        import_module("pandas")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'to_pandas() needs pandas: pip install "rmq-spark[pandas]". Without it, to_arrow() has the same table.',
            name="pandas",
        ) from error
    return table.to_pandas()


def _earliest(times: Iterable[int | None]) -> int | None:
    return min((time for time in times if time is not None), default=None)


def _latest(times: Iterable[int | None]) -> int | None:
    return max((time for time in times if time is not None), default=None)


@dataclass(frozen=True, slots=True)
class QueueSummary:
    """One queue: its queue offsets [min_offset, max_offset), bytes, and when its first and last message were stored.

    `problem` says why a queue cannot be read, the numbers are 0 then, or what is damaged, which `bytes` leaves out.
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
        """How many messages can be read."""
        return self.max_offset - self.min_offset


@dataclass(frozen=True, slots=True, repr=False)
class TopicSummary:
    """One topic and its queues, in order. `bytes` is an estimate unless `is_exact`."""

    topic: str
    queues: tuple[QueueSummary, ...]
    is_exact: bool = True

    @property
    def is_system(self) -> bool:
        """Whether it is one of RocketMQ's own."""
        return is_system_topic(self.topic)

    @property
    def messages(self) -> int:
        """How many messages can be read."""
        return sum(queue.messages for queue in self.queues)

    @property
    def bytes(self) -> int:
        """The bytes of their records."""
        return sum(queue.bytes for queue in self.queues)

    @property
    def first_ms(self) -> int | None:
        """When the first message that is there was stored; None without one."""
        return _earliest(queue.first_ms for queue in self.queues)

    @property
    def last_ms(self) -> int | None:
        """When the last one was stored; None without one."""
        return _latest(queue.last_ms for queue in self.queues)

    @property
    def problems(self) -> dict[int, str]:
        """What is wrong with queues, by queue id; empty mostly."""
        return {queue.queue_id: queue.problem for queue in self.queues if queue.problem is not None}

    def to_arrow(self) -> pa.Table:
        """Return a row for each queue, with the columns of QUEUES."""
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
        """Return the same as a pandas DataFrame. Raises ModuleNotFoundError where pandas is not installed."""
        return as_pandas(self.to_arrow())

    def __repr__(self) -> str:
        held = f"{count_text(self.messages, 'message')}, {bytes_text(self.bytes, self.is_exact)}"
        lines = [f"topic {self.topic}: {count_text(len(self.queues), 'queue')}, {held}"]
        if self.first_ms is not None:
            lines.append(f"stored from {time_text(self.first_ms)} to {time_text(self.last_ms)} UTC")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return summary_html.topic_html(self)


@dataclass(frozen=True, slots=True, repr=False)
class StoreSummary:
    """One store: its topics by name, and the extent of its commit log as physical offsets [log_begin, log_end).

    `state` says how its last writer left it: "closed" (in order), "crashed", "live" (somebody writes).
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
        """How many messages can be read, those of RocketMQ's own topics among them."""
        return sum(topic.messages for topic in self.topics)

    @property
    def bytes(self) -> int:
        """The bytes of the commit log, what no queue names and the filler between segments among them."""
        return self.log_end - self.log_begin

    @property
    def queue_count(self) -> int:
        """How many queues there are, empty ones among them."""
        return sum(len(topic.queues) for topic in self.topics)

    @property
    def used_queue_count(self) -> int:
        """How many queues have messages that can be read."""
        return sum(queue.messages > 0 for topic in self.topics for queue in topic.queues)

    @property
    def first_ms(self) -> int | None:
        """When the first message that is there was stored; None without one."""
        return _earliest(topic.first_ms for topic in self.topics)

    @property
    def last_ms(self) -> int | None:
        """When the last one was stored; None without one."""
        return _latest(topic.last_ms for topic in self.topics)

    def to_arrow(self) -> pa.Table:
        """Return a row for each topic, with the columns of TOPICS."""
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
        """Return the same as a pandas DataFrame. Raises ModuleNotFoundError where pandas is not installed."""
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
    """How far consumer groups were behind at one moment: the table of `rmq_spark.group_lag`, and when it was made.

    `group` is None for all groups of the store.
    """

    path: str
    group: str | None
    at_ms: int
    table: pa.Table

    @property
    def at(self) -> datetime:
        """The moment, in UTC."""
        return datetime.fromtimestamp(self.at_ms / 1000, UTC)

    @property
    def messages(self) -> int:
        """How many messages are unread and still there."""
        return sum(self.table["lagMessages"].drop_null().to_pylist())

    def to_arrow(self) -> pa.Table:
        """Return a row for each group and queue, as `rmq_spark.group_lag` does."""
        return self.table

    def to_pandas(self) -> Any:
        """Return the same as a pandas DataFrame. Raises ModuleNotFoundError where pandas is not installed."""
        return as_pandas(self.table)

    def __repr__(self) -> str:
        lines = [f"lag of {self.group or 'all groups'} at {time_text(self.at_ms)} UTC"]
        for row in self.table.to_pylist():
            behind = "not known" if row["lagMessages"] is None else count_text(row["lagMessages"], "message")
            who = "" if self.group else f"{row['group']}: "
            seconds = f", {span_text(row['secondsBehind'])}" if row["secondsBehind"] else ""
            lines.append(f"  {who}{row['topic']}/{row['queueId']} {row['state']}, {behind}{seconds}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return summary_html.lag_html(self)
