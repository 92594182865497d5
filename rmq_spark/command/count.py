"""`rmq count`: numbers of messages. Read-only."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.command.completion import complete_topics
from rmq_spark.command.messages import choose_queues, find_ranges
from rmq_spark.command.output import progress, rows_of, say
from rmq_spark.command.parameters import TIMES, begin_time, end_time, examples, message_filters
from rmq_spark.command.place import Place, PlaceCommand, QueueName, queue_names_option, reads_place
from rmq_spark.command.queue_views import Beginning, ClusterView, StoreView, expand_topics, open_view
from rmq_spark.command.tables import show
from rmq_spark.store import count_text
from rmq_spark.store.model import QueueKey

_EXAMPLES = examples(
    "rmq count store orders --from now-1h",
    "rmq count store orders --tags 'paid || shipped'",
    "rmq count store 'order*' --by minute --from now-1h",
    "rmq count -n ns1:9876 orders --queue broker-a:0",
)

_COLUMNS = {"tag": "tags", "key": "keys", "minute": "storeTimestamp"}
_GROUPED = {"tag": ("tag",), "key": ("key",), "queue": ("brokerName", "queueId"), "minute": ("minute",)}
_RANKED = ("tag", "key")  # the most frequent ones first
_TOP = 100
_MERGED_ROWS = 1 << 20  # the number of counts of batches that are merged at a time


@click.command(cls=PlaceCommand, epilog=f"{TIMES}\n\n{_EXAMPLES}")
@reads_place("topics")
@click.argument("topics", metavar="[TOPIC]...", nargs=-1, shell_complete=complete_topics)
@queue_names_option
@begin_time
@end_time
@message_filters
@click.option(
    "--by",
    type=click.Choice(list(_GROUPED)),
    help="Count by tag, key, queue, or minute of the store time. A message with two keys counts for both.",
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --by tag or key: only the N most frequent values of each topic.  [default: 100; JSON and CSV: all]",
)
def count(
    place: Place,
    as_data: bool,
    topics: tuple[str, ...],
    queue_names: tuple[QueueName, ...],
    begin_ms: int | None,
    end_ms: int | None,
    tags: str | None,
    sql92: str | None,
    by: str | None,
    top: int | None,
) -> int:
    """Count the messages of topics. Without TOPIC: of all topics, and those without messages are left out.

    TOPIC is a name, a list with commas, or a pattern of a shell in quotes, such as 'order*'.

    Messages are only read for --tags, --sql92 and --by; otherwise the numbers follow from the queue offsets.

    A queue of a cluster that cannot be read is named on stderr and not counted, and the exit status is 1.
    """
    if queue_names and not topics:
        raise click.UsageError("--queue requires TOPIC.")
    if top is not None and by not in _RANKED:
        raise click.UsageError("--top requires --by tag or --by key.")
    filters = {"tags": tags, "sql92": sql92}
    others: dict[str, tuple[int, int]] = {}
    with place.open() as reader, progress("counting", "messages") as on_progress:
        reader.refresh()
        view = open_view(place, reader)
        names = expand_topics(topics, reader.topics, view.readable) if topics else view.topics()
        queues = {topic: choose_queues(view, topic, queue_names) for topic in names}
        chosen = [queue for found in queues.values() for queue in found]
        ranges = find_ranges(view, chosen, Beginning(time_ms=begin_ms), end_ms)
        if by is None:
            rows = _count_topics(view, queues, ranges, filters, on_progress)
            rows = [row for row in rows if topics or row["messages"]]
        else:
            most = None if by not in _RANKED else top or (None if as_data else _TOP)
            rows, others = count_groups(view, ranges, by, filters, on_progress, most)
    columns = ("queues",) if by is None else tuple(name for name in _GROUPED[by] if rows and name in rows[0])
    show(rows, ("topic", *columns, "messages"), as_data=as_data, nothing="No messages.")
    for topic, (values, messages) in others.items():
        shown = (most or 0) + values
        say(f"{topic}: {values:,} other {by}s with {count_text(messages, 'message')}. --top {shown} shows all.")
    return 1 if view.is_incomplete else 0


def _count_topics(
    view: StoreView | ClusterView,
    queues: Mapping[str, Sequence[QueueKey]],
    ranges: Mapping[QueueKey, tuple[int, int]],
    filters: Mapping[str, str | None],
    on_progress: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    """Return a row for each topic: the number of its readable queues, and of their messages that match."""
    counts = {queue: end - begin for queue, (begin, end) in ranges.items()}
    if any(filters.values()):
        total, done = sum(counts.values()), 0
        for queue, (begin, end) in ranges.items():
            counts[queue] = _count_matching(view, queue, begin, end, filters)
            done += end - begin
            on_progress(done, total)
    rows = []
    for topic, found in queues.items():
        readable = [queue for queue in found if queue in counts]
        rows.append({"topic": topic, "queues": len(readable), "messages": sum(counts[queue] for queue in readable)})
    return rows


def _count_matching(
    view: StoreView | ClusterView, queue: QueueKey, begin: int, end: int, filters: Mapping[str, str | None]
) -> int:
    batches = view.read(queue, begin, end, ["queueOffset"], **filters)
    return sum(batch.num_rows for batch in batches)


def count_groups(
    view: StoreView | ClusterView,
    ranges: Mapping[QueueKey, tuple[int, int]],
    by: str,
    filters: Mapping[str, str | None],
    on_progress: Callable[[int, int], None],
    top: int | None = None,
) -> tuple[list[dict[str, Any]], dict[str, tuple[int, int]]]:
    """Return a row for each topic and value of `by`, of each topic at most `top`.

    The second result has, by topic, the number of the other values and that of their messages. Memory is needed for a
    batch and for the distinct values.
    """
    counts: dict[str, _Counts] = {}
    rows: list[dict[str, Any]] = []
    total, done = sum(end - begin for begin, end in ranges.values()), 0
    for queue, (begin, end) in sorted(ranges.items()):
        if by == "queue":
            is_filtered = any(filters.values())
            number = _count_matching(view, queue, begin, end, filters) if is_filtered else end - begin
            broker = {"brokerName": queue.broker} if queue.broker else {}
            rows.append({"topic": queue.topic, **broker, "queueId": queue.queue_id, "messages": number})
        else:
            of_topic = counts.setdefault(queue.topic, _Counts())
            for batch in view.read(queue, begin, end, [_COLUMNS[by]], **filters):
                of_topic.add(_values(batch.column(0), by))
        done += end - begin
        on_progress(done, total)
    others = {}
    for topic, of_topic in counts.items():
        table = of_topic.merged()
        order = [("messages", "descending"), ("value", "ascending")] if by in _RANKED else [("value", "ascending")]
        table = table.sort_by(order)
        first = table.slice(0, top)
        rows += [{"topic": topic, by: row["value"], "messages": row["messages"]} for row in rows_of(first)]
        if len(first) < len(table):
            left_out = pc.sum(table["messages"].slice(len(first))).as_py()
            others[topic] = len(table) - len(first), left_out
    return [row for row in rows if row["messages"]], others


class _Counts:
    """Numbers of messages by value. Counts of batches are merged when there are many."""

    def __init__(self) -> None:
        self._parts: list[pa.Table] = []
        self._rows = self._merged_rows = 0

    def add(self, values: pa.Array) -> None:
        """Count the values of a batch."""
        found = pc.value_counts(values)
        columns = {"value": found.field("values"), "messages": found.field("counts")}
        self._parts.append(pa.table(columns))
        self._rows += len(found)
        if self._rows > _MERGED_ROWS + 2 * self._merged_rows:
            self._parts = [self.merged()]
            self._rows = self._merged_rows = len(self._parts[0])

    def merged(self) -> pa.Table:
        """Return a table with the columns `value` and `messages`, each value once."""
        if not self._parts:
            return pa.table({"value": pa.nulls(0), "messages": pa.array([], pa.int64())})
        summed = pa.concat_tables(self._parts).group_by("value").aggregate([("messages", "sum")])
        return pa.table({"value": summed["value"], "messages": summed["messages_sum"]})


def _values(column: pa.Array, by: str) -> pa.Array:
    """Return the values of a column of messages to count: tags, single keys, or minutes."""
    if by == "key":
        lists = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(column))
        found = pa.table({"row": pc.list_parent_indices(lists), "key": pc.list_flatten(lists)})
        found = found.filter(pc.not_equal(found["key"], ""))  # of a text that is only spaces
        once = found.group_by(["row", "key"]).aggregate([])
        none = len(column) - pc.count_distinct(once["row"]).as_py()
        return pa.concat_arrays([*once["key"].chunks, pa.nulls(none, pa.string())])
    return pc.floor_temporal(column, unit="minute") if by == "minute" else column
