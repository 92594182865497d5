"""`rmq dlq`: list and republish the dead letters of consumer groups."""

import functools
import operator
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click
import pyarrow as pa
import pyarrow.compute as pc

import rmq_spark
from rmq_spark.command.completion import complete_groups, complete_topics
from rmq_spark.command.output import print_data, rows_of, say, waiting
from rmq_spark.command.parameters import TIMES, appending_options, begin_time, end_time, examples
from rmq_spark.command.place import PathFirstCommand, Place, spell_limits, takes_place
from rmq_spark.command.queue_views import BROKER_NAME, expand_topics, look_at, open_view, report_problems
from rmq_spark.command.tables import show
from rmq_spark.store.names import DLQ_TOPIC_PREFIX, dlq_topic, retry_topic

_COLUMNS = [
    "physicalTopic",
    "queueId",
    "queueOffset",
    "reconsumeTimes",
    "storeTimestamp",
    "tags",
    "keys",
    "body",
    "properties",
    "msgId",
]
_ERROR, _ORIGINAL_TOPIC = "CONSUME_ERROR", "RETRY_TOPIC"  # properties
_LIST_EXAMPLES = examples(
    "rmq dlq list store", "rmq dlq list store billing --limit 20", "rmq dlq list -n ns1:9876 billing"
)
_REPUBLISH_EXAMPLES = examples(
    "rmq dlq republish store billing",
    "rmq dlq republish store billing --topic orders --key o-42 --progress o-42",
    "rmq dlq republish store billing --from now-1d --to-topic orders-again",
    "rmq dlq republish -n ns1:9876 billing",
)


class _List(PathFirstCommand):
    """The command, in which `-n NUMBER` is short for `--limit NUMBER`, and `-n HOST:PORT` for `--name-server`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments."""
        spell_limits(args)
        return super().parse_args(ctx, args)


class _DeadLetters(click.Group):
    """The group of the commands. Options follow the command's name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(
                f"{error.option_name}: found an option before the command; expected list or republish first. Options "
                "follow it: rmq dlq list -n HOST:PORT.",
                ctx,
            ) from None


@click.group(cls=_DeadLetters, subcommand_metavar="list|republish (PATH | -n HOST:PORT) ...")
def dlq() -> None:
    """List or republish dead letters: messages that a consumer group failed to consume."""


@dlq.command(
    "list", cls=_List, short_help="List groups with dead letters, or the dead letters of one.", epilog=_LIST_EXAMPLES
)
@takes_place()
@click.argument("group", required=False, shell_complete=complete_groups)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    metavar="N",
    help="Maximum number of messages; -n N is short for it if N is a number.",
)
def list_(place: Place, as_data: bool, group: str | None, limit: int) -> None:
    """List the groups that have dead letters, or GROUP's dead letters, the newest last.

    The column error contains the last error of the listener or query. `rmq get PATH --topic %DLQ%GROUP --queue 0
    --offset N` shows the whole message.

    In a cluster each broker has dead letters of its own, and stores no errors. Queues that cannot be read are named on
    stderr.
    """
    with waiting("reading"), place.open() as store:
        store.refresh()
        if group is not None:
            _require_group(place, store, group)
            rows, count = _dead_letters(place, store, group, limit)
        elif place.is_cluster:
            rows = _cluster_groups(store)
        else:
            found = [store.topic(topic) for topic in store.topics() if topic.startswith(DLQ_TOPIC_PREFIX)]
            rows = [_group_row(one) for one in found if one.messages]
    if group is None:
        names: tuple[str, ...] = ("group", "messages", "bytes", "firstTimestamp", "lastTimestamp")
        names = ("group", "brokers", "messages") if place.is_cluster else names
        show(rows, names, as_data=as_data, nothing="No dead letters.", optional=("firstTimestamp", "bytes"))
        return
    brokers = (BROKER_NAME,) if place.is_cluster else ()
    several = ("queueId",) if any(row["queueId"] for row in rows) else ()
    names = (*brokers, *several, "queueOffset", "topic", "keys", "tags", "reconsumeTimes", "storeTimestamp", "error")
    spared = ("reconsumeTimes", "tags", "storeTimestamp")
    show(rows, (*names, "body"), as_data=as_data, nothing=f"{group} has no dead letters.", spared=spared)
    if count > len(rows) and not as_data:
        say(f"These are the last {len(rows)} of {count:,}. --limit {count} shows all.")


def _require_group(place: Place, store: Any, group: str) -> None:
    """Raise NotFoundError for a group that has neither dead letters nor offsets: its name is mistyped."""
    own = (dlq_topic(group), retry_topic(group))
    is_known = bool(store.all_queues(own)) if place.is_cluster else own[0] in store.topics()
    if not is_known:
        rmq_spark.group_lag(**place.reading, group=group)


def _cluster_groups(reader: Any) -> list[dict[str, Any]]:
    """Return a row for each group of a cluster that has dead letters. Name on stderr what cannot be read."""
    listed = look_at(reader, [topic for topic in reader.topics() if topic.startswith(DLQ_TOPIC_PREFIX)])
    for topic in listed:
        if topic.problem is not None:
            say(f"{topic.name}: {topic.problem}")
    report_problems({queue: text for topic in listed for queue, text in topic.problems.items()})
    return [
        {
            "group": topic.name.removeprefix(DLQ_TOPIC_PREFIX),
            "topic": topic.name,
            "brokers": len({queue.broker for queue in topic.answers}),
            "messages": topic.messages,
        }
        for topic in listed
        if topic.messages
    ]


def _group_row(topic: Any) -> dict[str, Any]:
    """Return the row of a dead-letter topic, summed over its queues. Brokers create one queue."""
    queues = rows_of(topic.to_arrow())
    return {
        "group": topic.topic.removeprefix(DLQ_TOPIC_PREFIX),
        "topic": topic.topic,
        "messages": topic.messages,
        "bytes": topic.bytes,
        "firstTimestamp": min((row["firstTimestamp"] for row in queues if row["firstTimestamp"]), default=None),
        "lastTimestamp": max((row["lastTimestamp"] for row in queues if row["lastTimestamp"]), default=None),
    }


def _dead_letters(place: Place, store: Any, group: str, limit: int) -> tuple[list[dict[str, Any]], int]:
    """Return the last `limit` dead letters of a group, in stored order, and their number; ([], 0) if there are none."""
    topic = dlq_topic(group)
    if place.is_cluster:
        queues = store.all_queues([topic]).get(topic, [])
    else:
        queues = store.queues(topic) if topic in store.topics() else []
    view = open_view(place, store)
    rows: list[dict[str, Any]] = []
    count = 0
    columns = [*_COLUMNS, BROKER_NAME] if place.is_cluster else _COLUMNS
    for queue, bounds in view.bounds(queues).items():
        count += bounds.max_offset - bounds.min_offset
        begin = max(bounds.min_offset, bounds.max_offset - limit)
        for batch in view.read(queue, begin, bounds.max_offset, columns):
            for row in rows_of(batch):
                properties = row["properties"]
                origin = properties.get(_ORIGINAL_TOPIC, row["physicalTopic"])
                rows.append({"topic": origin, **row, "error": properties.get(_ERROR)})
    if place.is_cluster:
        rows.sort(key=lambda row: row["storeTimestamp"])
    return rows[-limit:], count


@dlq.command(
    cls=PathFirstCommand,
    short_help="Send dead letters to their original topics again, each once.",
    epilog=f"{TIMES}\n\n{_REPUBLISH_EXAMPLES}",
)
@takes_place(appending_options)
@click.argument("group", shell_complete=complete_groups)
@click.option(
    "--topic",
    "topics",
    multiple=True,
    shell_complete=complete_topics,
    help="Only dead letters of this original topic, a list with commas, or a pattern of a shell. Repeatable.",
)
@click.option("--tags", multiple=True, help="Only dead letters with this tag. Repeatable.")
@click.option("--key", help="Only dead letters with this key.")
@begin_time
@end_time
@click.option("--to-topic", shell_complete=complete_topics, help="Destination topic.  [default: the original topics]")
@click.option(
    "--progress",
    "name",
    default="default",
    show_default=True,
    help="Name of a progress marker. A call with the same name resumes where the last one ended.",
)
def republish(
    place: Place,
    as_data: bool,
    group: str,
    topics: tuple[str, ...],
    tags: tuple[str, ...],
    key: str | None,
    begin_ms: int | None,
    end_ms: int | None,
    to_topic: str | None,
    name: str,
) -> None:
    """Send GROUP's dead letters to their original topics again, with reconsumeTimes 0.

    All groups that subscribe to these topics receive them. The progress moves past dead letters that do not match:
    to reach them with other filters, give another --progress.

    In a cluster they are sent at least once: if a call dies, the next one may send some again, with the same ids.
    """
    with waiting("sending"):
        with place.open() as store:
            store.refresh()
            _require_group(place, store, group)
            names = expand_topics(topics, store.topics)
        done = rmq_spark.republish_dead_letters(
            **place.arguments,
            group=group,
            filter=_filter(names, tags, key, begin_ms, end_ms),
            topic=to_topic,
            progress=name,
        )
    row = {"group": group, "sent": done.sent, "passedOver": done.passed_over}
    if place.is_cluster:
        offsets = {queue.broker: offset for queue, offset in sorted(done.next_offsets.items())}
        row["nextOffsets"] = offsets
        resumes = ", ".join(f"{broker}: {offset}" for broker, offset in offsets.items())
        end = f"The next call resumes at these offsets: {resumes}." if offsets else "There are none."
    else:
        row["nextOffset"] = done.next_offset
        end = f"The next call resumes at offset {done.next_offset}."
    if as_data:
        print_data([row])
    else:
        say(f"{done.sent:,} sent, {done.passed_over:,} skipped. {end}")


def _filter(
    topics: Sequence[str], tags: tuple[str, ...], key: str | None, begin_ms: int | None, end_ms: int | None
) -> Any:
    """Return the conjunction of the filters as an Arrow expression; None without a filter."""
    conditions = []
    if topics:
        conditions.append(pc.map_lookup(pc.field("properties"), _ORIGINAL_TOPIC, "first").isin(list(topics)))
    if tags:
        conditions.append(pc.field("tags").isin(list(tags)))
    if key is not None:
        conditions.append(pc.match_substring_regex(pc.field("keys"), rf"(^|\s){re.escape(key)}(\s|$)"))
    if begin_ms is not None:
        conditions.append(pc.field("storeTimestamp") >= pa.scalar(datetime.fromtimestamp(begin_ms / 1000, UTC)))
    if end_ms is not None:
        conditions.append(pc.field("storeTimestamp") < pa.scalar(datetime.fromtimestamp(end_ms / 1000, UTC)))
    return functools.reduce(operator.and_, conditions) if conditions else None
