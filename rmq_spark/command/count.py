"""`rmq count`: numbers of messages. Read-only."""

from collections.abc import Mapping

import click

from rmq_spark.command.messages import choose_queues, find_ranges
from rmq_spark.command.output import progress
from rmq_spark.command.parameters import TIMES, begin_time, end_time, examples, message_filters
from rmq_spark.command.place import Place, PlaceCommand, QueueName, queue_names_option, reads_place
from rmq_spark.command.queue_views import Beginning, ClusterView, StoreView, open_view
from rmq_spark.command.tables import show
from rmq_spark.store.model import QueueKey

_EXAMPLES = examples(
    "rmq count store orders --from now-1h",
    "rmq count store orders --tags 'paid || shipped'",
    "rmq count -n ns1:9876 orders --queue broker-a:0",
)


@click.command(cls=PlaceCommand, epilog=f"{TIMES}\n\n{_EXAMPLES}")
@reads_place("topics")
@click.argument("topics", metavar="[TOPIC]...", nargs=-1)
@queue_names_option
@begin_time
@end_time
@message_filters
def count(
    place: Place,
    as_json: bool,
    topics: tuple[str, ...],
    queue_names: tuple[QueueName, ...],
    begin_ms: int | None,
    end_ms: int | None,
    tags: str | None,
    sql92: str | None,
) -> int:
    """Count the messages of topics. Without TOPIC: of all topics, and those without messages are left out.

    Messages are only read for --tags and --sql92; otherwise the numbers follow from the queue offsets.

    A queue of a cluster that cannot be read is named on stderr and not counted, and the exit status is 1.
    """
    if queue_names and not topics:
        raise click.UsageError("--queue requires TOPIC.")
    filters = {"tags": tags, "sql92": sql92}
    rows = []
    with place.open() as reader, progress("counting", "messages") as on_progress:
        reader.refresh()
        view = open_view(place, reader)
        queues = {topic: choose_queues(view, topic, queue_names) for topic in topics or view.topics()}
        chosen = [queue for found in queues.values() for queue in found]
        ranges = find_ranges(view, chosen, Beginning(time_ms=begin_ms), end_ms)
        counts = {queue: end - begin for queue, (begin, end) in ranges.items()}
        if any(filters.values()):
            total, done = sum(counts.values()), 0
            for queue, (begin, end) in ranges.items():
                counts[queue] = _count_matching(view, queue, begin, end, filters)
                done += end - begin
                on_progress(done, total)
        for topic, found in queues.items():
            readable = [queue for queue in found if queue in counts]
            row = {"topic": topic, "queues": len(readable), "messages": sum(counts[queue] for queue in readable)}
            if topics or row["messages"]:
                rows.append(row)
    show(rows, ("topic", "queues", "messages"), as_json=as_json, nothing="No messages.")
    return 1 if view.is_incomplete else 0


def _count_matching(
    view: StoreView | ClusterView, queue: QueueKey, begin: int, end: int, filters: Mapping[str, str | None]
) -> int:
    batches = view.read(queue, begin, end, ["queueOffset"], **filters)
    return sum(batch.num_rows for batch in batches)
