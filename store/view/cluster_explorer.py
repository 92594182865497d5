"""A cluster reader that also answers for many queues at once, waits for messages, and shows one message.

The methods of `ClusterReader` raise an error for a queue that cannot be read. `answers` says instead what is known
about each queue, so that a program can list a cluster of which a part is away.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from rmq_spark.store.backend import COLUMNS
from rmq_spark.store.cluster.reader import ClusterReader
from rmq_spark.store.errors import OptionError, RmqError
from rmq_spark.store.html_tables import MAX_ROWS, bar_column, box, number_column, table, text_column
from rmq_spark.store.model import QueueAnswer, QueueBounds, QueueKey
from rmq_spark.store.names import check_group_name, is_system_topic
from rmq_spark.store.view.summary_text import count_text

if TYPE_CHECKING:
    from rmq_spark.store.view.message import Message
    from rmq_spark.store.view.summary import GroupLag


class ClusterExplorer(ClusterReader):
    """A ClusterReader that also has `answers`, `all_queues`, `wait_for_messages`, `message` and `lag`.

    Like a ClusterReader, an instance must not be used by two threads at the same time.
    """

    def is_system(self, topic: str) -> bool:
        """Return whether a topic is one of RocketMQ's own, such as for retries or delays."""
        return is_system_topic(topic)

    def all_queues(self, topics: Collection[str]) -> dict[str, list[QueueKey]]:
        """Return the sorted queues of each topic, by requests that are sent together.

        A topic that no name server lists is left out. Raises OptionError if one of the topics is of a kind that cannot
        be read, such as a static topic.
        """
        return self._opened.queues(topics, missing_ok=topics)

    def answers(self, queues: Collection[QueueKey]) -> dict[QueueKey, QueueAnswer]:
        """Return what is known about each queue: its bounds, or why it cannot be read, as of the last `refresh`.

        Raises OptionError if one of the topics is of a kind that cannot be read.
        """
        return self._opened.bounds(queues)

    def wait_for_messages(self, after: Mapping[QueueKey, int], timeout_ms: float) -> bool:
        """Wait until a queue has a message at or above its offset in `after`, but at most `timeout_ms`.

        Brokers hold the requests, so a message is noticed at once. Then look at the cluster again, as `refresh` does.
        Return whether topics, queues or bounds may have changed. Without messages the cluster is looked at every 5 s.
        """
        return self._opened.wait_for_messages(after, timeout_ms)

    def estimate_bytes(self, ranges: Mapping[QueueKey, tuple[int, int]]) -> dict[str, int | None]:
        """Estimate the size in bytes of the records with queue offsets [begin, end), by topic.

        It is the number of messages times the average size of the records of the topic that were pulled, of which the
        last one of each topic is pulled now. None for a topic whose broker does not answer.
        """
        last: dict[str, tuple[QueueKey, int]] = {}
        counts: dict[str, int] = {}
        for queue, (begin, end) in ranges.items():
            if begin < end:
                last[queue.topic] = queue, end - 1
                counts[queue.topic] = counts.get(queue.topic, 0) + end - begin
        catalog = self._opened.catalog
        catalog.looks.look(last.values())
        averages = {topic: catalog.sizes.average_bytes(topic) for topic in last}
        return {topic: None if size is None else round(size * counts[topic]) for topic, size in averages.items()}

    def lag(self, group: str | None = None) -> "GroupLag":
        """Return the current lag of a consumer group, or of each group if `group` is None.

        The result contains the table of `rmq_spark.group_lag`, and can also be shown as text or HTML. Raises the same
        errors as `rmq_spark.group_lag`.
        """
        # Imported here, because most programs measure no lag, and these modules are not needed for reading.
        from rmq_spark.store.cluster.group_lag import measure_lag
        from rmq_spark.store.disk.clock import wall_clock_ms
        from rmq_spark.store.view.summary import GroupLag

        if group is not None:
            check_group_name(group)
        backend, now_ms = self._opened, wall_clock_ms()
        backend.reopen()
        return GroupLag(backend.location.describe(), group, now_ms, measure_lag(backend, group, now_ms))

    def message(self, queue: QueueKey, queue_offset: int) -> "Message":
        """Return the message at a queue offset, with all columns.

        Raises NotFoundError if the queue does not exist, BackendUnavailableError if its broker does not answer, and
        OffsetRangeError if the queue has no message at this offset; the error has the offsets that exist. Raises
        DamageError if the message is damaged.
        """
        # Imported here, because most programs show no message, and this module loads the readers of files.
        from rmq_spark.store.view.message import message_of

        if isinstance(queue_offset, bool) or not isinstance(queue_offset, int):
            raise OptionError(f"queue_offset={queue_offset!r} must be an integer. Queue offsets count messages from 0.")
        (batch,) = self.read(queue, queue_offset, queue_offset + 1, list(COLUMNS))
        return message_of(pa.Table.from_batches([batch]))

    def _repr_html_(self) -> str:
        name = self._backend.location.describe()
        if self._is_closed:
            return box("RocketMQ cluster", name, {"reader": "closed"})
        try:
            self.refresh()
            topics = [topic for topic in self.topics() if not is_system_topic(topic)]
            rows = self._topic_rows(topics[:MAX_ROWS])
        except RmqError as error:  # an object must show itself, also when no broker answers
            return box("RocketMQ cluster", name, {"problem": str(error)})
        columns = [
            text_column("topic", [row.topic for row in rows]),
            number_column("queues", [row.queues for row in rows]),
            number_column("messages", [row.messages for row in rows]),
            bar_column([row.messages for row in rows]),
        ]
        if any(row.problem for row in rows):
            columns.append(text_column("problem", [row.problem or "" for row in rows], is_long=True))
        more = f"… and {len(topics) - MAX_ROWS:,} more: topics() has all" if len(topics) > MAX_ROWS else ""
        return box("RocketMQ cluster", name, {"topics": f"{len(topics):,}"}, table(columns, more) if rows else "")

    def _topic_rows(self, topics: Collection[str]) -> list["_TopicRow"]:
        """Return what is known about each topic, also if some of its queues or the whole topic cannot be read."""
        rows = []
        for topic in topics:
            try:
                answers = self.answers(self.all_queues([topic]).get(topic, []))
            except RmqError as error:
                rows.append(_TopicRow(topic, None, None, str(error)))
                continue
            held = [answer for answer in answers.values() if isinstance(answer, QueueBounds)]
            left = len(answers) - len(held)
            problem = f"{count_text(left, 'queue')} cannot be read" if left else None
            rows.append(_TopicRow(topic, len(answers), sum(one.max_offset - one.min_offset for one in held), problem))
        return rows


class _TopicRow(NamedTuple):
    """A row of the table that a notebook shows: how many queues and messages a topic has. None means not known."""

    topic: str
    queues: int | None
    messages: int | None
    problem: str | None
