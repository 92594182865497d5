"""`rmq dlq`: list and republish the dead letters of consumer groups."""

import functools
import operator
import re
from datetime import UTC, datetime
from typing import Any

import click
import pyarrow as pa
import pyarrow.compute as pc

import rmq_spark
from rmq_spark.command.output import print_json, rows_of, say, waiting
from rmq_spark.command.parameters import (
    DEAD_LETTERS_OF_CLUSTERS,
    TIMES,
    appending,
    begin_time,
    end_time,
    examples,
    reading,
)
from rmq_spark.command.tables import show

_PREFIX = "%DLQ%"
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
_LIST_EXAMPLES = examples("rmq dlq list store", "rmq dlq list store billing -n 20")
_REPUBLISH_EXAMPLES = examples(
    "rmq dlq republish store billing",
    "rmq dlq republish store billing --topic orders --key order-42 --progress order-42",
    "rmq dlq republish store billing --from now-1d --to-topic orders-again",
)


class _Limit(click.IntRange):
    """A number of messages. An address is given by users who know -n from other commands."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number."""
        if isinstance(value, str) and ":" in value:
            self.fail(
                f"{value!r} is an address, and -n is the number of messages here: `rmq dlq` needs PATH, the files of a "
                f"store. {DEAD_LETTERS_OF_CLUSTERS}.",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


@click.group(subcommand_metavar="list|republish PATH ...")
def dlq() -> None:
    """List or republish dead letters: messages that a consumer group failed to consume."""


@dlq.command("list", short_help="List groups with dead letters, or the dead letters of one.", epilog=_LIST_EXAMPLES)
@reading
@click.argument("group", required=False)
@click.option("-n", "--limit", type=_Limit(min=1), default=100, show_default=True, help="Maximum number of messages.")
def list_(path: str, commit_log_path: str | None, as_json: bool, group: str | None, limit: int) -> None:
    """List the groups that have dead letters, or GROUP's dead letters, the newest last.

    The column error contains the last error of the listener or query. `rmq get PATH --topic %DLQ%GROUP --queue 0
    --offset N` shows the whole message.
    """
    with waiting("reading"), rmq_spark.open_reader(path, commit_log_path=commit_log_path) as store:
        if group is not None:
            _require_group(store, path, commit_log_path, group)
            rows, count = _dead_letters(store, _PREFIX + group, limit)
        else:
            store.refresh()
            found = [store.topic(topic) for topic in store.topics() if topic.startswith(_PREFIX)]
            rows = [_group_row(one) for one in found if one.messages]
    if group is None:
        names: tuple[str, ...] = ("group", "messages", "bytes", "firstTimestamp", "lastTimestamp")
        show(rows, names, as_json=as_json, nothing="No dead letters.", optional=("firstTimestamp", "bytes"))
        return
    several = ("queueId",) if any(row["queueId"] for row in rows) else ()
    names = (*several, "queueOffset", "topic", "keys", "tags", "reconsumeTimes", "storeTimestamp", "error", "body")
    optional = ("reconsumeTimes", "tags", "storeTimestamp")
    show(rows, names, as_json=as_json, nothing=f"{group} has no dead letters.", optional=optional)
    if count > len(rows) and not as_json:
        say(f"These are the last {len(rows)} of {count:,}. --limit {count} shows all.")


def _require_group(store: Any, path: str, commit_log_path: str | None, group: str) -> None:
    """Raise NotFoundError for a group that has neither dead letters nor offsets: its name is mistyped."""
    store.refresh()
    if _PREFIX + group not in store.topics():
        rmq_spark.group_lag(path, group, commit_log_path=commit_log_path)


def _group_row(topic: Any) -> dict[str, Any]:
    """Return the row of a dead-letter topic, summed over its queues. Brokers create one queue."""
    queues = rows_of(topic.to_arrow())
    return {
        "group": topic.topic.removeprefix(_PREFIX),
        "topic": topic.topic,
        "messages": topic.messages,
        "bytes": topic.bytes,
        "firstTimestamp": min((row["firstTimestamp"] for row in queues if row["firstTimestamp"]), default=None),
        "lastTimestamp": max((row["lastTimestamp"] for row in queues if row["lastTimestamp"]), default=None),
    }


def _dead_letters(store: Any, topic: str, limit: int) -> tuple[list[dict[str, Any]], int]:
    """Return the last `limit` messages of a dead-letter topic and its number of messages; ([], 0) if it is missing."""
    rows: list[dict[str, Any]] = []
    count = 0
    for queue in store.queues(topic) if topic in store.topics() else []:
        bounds = store.bounds(queue)
        count += bounds.max_offset - bounds.min_offset
        begin = max(bounds.min_offset, bounds.max_offset - limit)
        for batch in store.read(queue, begin, bounds.max_offset, _COLUMNS):
            for row in rows_of(batch):
                properties = row["properties"]
                origin = properties.get(_ORIGINAL_TOPIC, row["physicalTopic"])
                rows.append({"topic": origin, **row, "error": properties.get(_ERROR)})
    return rows[-limit:], count


@dlq.command(
    short_help="Send dead letters to their original topics again, each once.",
    epilog=f"{TIMES}\n\n{_REPUBLISH_EXAMPLES}",
)
@appending
@click.argument("group")
@click.option("--topic", "topics", multiple=True, help="Only dead letters of this original topic. Repeatable.")
@click.option("--tags", multiple=True, help="Only dead letters with this tag. Repeatable.")
@click.option("--key", help="Only dead letters with this key.")
@begin_time
@end_time
@click.option("--to-topic", help="Destination topic.  [default: the original topics]")
@click.option(
    "--progress",
    "name",
    default="default",
    show_default=True,
    help="Name of a progress marker. A call with the same name resumes where the last one ended.",
)
def republish(
    path: str,
    commit_log_path: str | None,
    lock_timeout_s: float,
    allow_network_store: bool,
    as_json: bool,
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
    """
    with waiting("sending"):
        with rmq_spark.open_reader(path, commit_log_path=commit_log_path) as store:
            _require_group(store, path, commit_log_path, group)
        done = rmq_spark.republish_dead_letters(
            path,
            group,
            _filter(topics, tags, key, begin_ms, end_ms),
            topic=to_topic,
            progress=name,
            commit_log_path=commit_log_path,
            lock_timeout_ms=round(lock_timeout_s * 1000),
            allow_network_store=allow_network_store,
        )
    if as_json:
        row = {"group": group, "sent": done.sent, "passedOver": done.passed_over, "nextOffset": done.next_offset}
        print_json([row])
    else:
        say(f"{done.sent:,} sent, {done.passed_over:,} skipped. The next call resumes at offset {done.next_offset}.")


def _filter(
    topics: tuple[str, ...], tags: tuple[str, ...], key: str | None, begin_ms: int | None, end_ms: int | None
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
