"""`rmq dlq`: what consumer groups have given up, and sending it again."""

import re
from datetime import UTC, datetime
from typing import Any

import click
import pyarrow as pa
import pyarrow.compute as pc

import rmq_spark
from rmq_spark.command.output import print_json, rows_of, say
from rmq_spark.command.progress import waiting
from rmq_spark.command.tables import show
from rmq_spark.command.words import TIMES, appending, begin_time, end_time, examples, reading

_PREFIX = "%DLQ%"
_READ = [
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
_ERROR, _CAME_FROM = "CONSUME_ERROR", "RETRY_TOPIC"
_LIST_EXAMPLES = examples("rmq dlq list store", "rmq dlq list store billing -n 20")
_REPUBLISH_EXAMPLES = examples(
    "rmq dlq republish store billing",
    "rmq dlq republish store billing --topic orders --key order-42 --progress order-42",
    "rmq dlq republish store billing --from now-1d --to-topic orders-again",
)


@click.group(subcommand_metavar="list|republish PATH ...")
def dlq() -> None:
    """Dead letters, which a consumer group has given up: list them, or republish them."""


@dlq.command("list", short_help="Groups with dead letters, or the dead letters of one.", epilog=_LIST_EXAMPLES)
@reading
@click.argument("group", required=False)
@click.option("-n", "--limit", type=click.IntRange(min=1), default=100, show_default=True, help="At most so many.")
def list_(path: str, commit_log_path: str | None, as_json: bool, group: str | None, limit: int) -> None:
    """List the groups that have dead letters, or GROUP's dead letters, the newest last.

    The error is what the listener or query said of the last failure. `rmq get PATH --topic %DLQ%GROUP --queue 0
    --offset N` shows one whole.
    """
    with waiting("reading"), rmq_spark.open_reader(path, commit_log_path=commit_log_path) as store:
        if group is not None:
            _refuse_unknown(store, path, commit_log_path, group)
            rows, count = _letters(store, _PREFIX + group, limit)
        else:
            store.refresh()
            found = [store.topic(topic) for topic in store.topics() if topic.startswith(_PREFIX)]
            rows = [_group_row(one) for one in found if one.messages]
    if group is None:
        names: tuple[str, ...] = ("group", "messages", "bytes", "firstTimestamp", "lastTimestamp")
        show(rows, names, as_json=as_json, nothing="No dead letters.", spared=("firstTimestamp", "bytes"))
        return
    several = ("queueId",) if any(row["queueId"] for row in rows) else ()
    names = (*several, "queueOffset", "topic", "keys", "tags", "reconsumeTimes", "storeTimestamp", "error", "body")
    spared = ("reconsumeTimes", "tags", "storeTimestamp")
    show(rows, names, as_json=as_json, nothing=f"{group} has no dead letters.", spared=spared)
    if count > len(rows) and not as_json:
        say(f"These are the last {len(rows)} of {count:,}. --limit {count} shows all.")


def _refuse_unknown(store: Any, path: str, commit_log_path: str | None, group: str) -> None:
    """Raise NotFoundError for a group of which there is no trace: its name has a typing error."""
    store.refresh()
    if _PREFIX + group not in store.topics():
        rmq_spark.group_lag(path, group, commit_log_path=commit_log_path)


def _group_row(topic: Any) -> dict[str, Any]:
    """Return a row for a topic of dead letters: they are in one queue, as brokers have it, or in several."""
    queues = rows_of(topic.to_arrow())
    return {
        "group": topic.topic.removeprefix(_PREFIX),
        "topic": topic.topic,
        "messages": topic.messages,
        "bytes": topic.bytes,
        "firstTimestamp": min((row["firstTimestamp"] for row in queues if row["firstTimestamp"]), default=None),
        "lastTimestamp": max((row["lastTimestamp"] for row in queues if row["lastTimestamp"]), default=None),
    }


def _letters(store: Any, topic: str, limit: int) -> tuple[list[dict[str, Any]], int]:
    """Return a topic's last messages, and how many it has. Its topic may not be there yet: then there are none."""
    rows: list[dict[str, Any]] = []
    count = 0
    for queue in store.queues(topic) if topic in store.topics() else []:
        held = store.bounds(queue)
        count += held.max_offset - held.min_offset
        for batch in store.read(queue, max(held.min_offset, held.max_offset - limit), held.max_offset, _READ):
            rows += [_letter(row) for row in rows_of(batch)]
    return rows[-limit:], count


def _letter(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the topic that the message came from, as `cat` has it of one that is tried again."""
    held = row["properties"]
    return {"topic": held.get(_CAME_FROM, row["physicalTopic"]), **row, "error": held.get(_ERROR)}


@dlq.command(
    short_help="Send dead letters to the topics that they came from, each once.",
    epilog=f"{TIMES}\n\n{_REPUBLISH_EXAMPLES}",
)
@appending
@click.argument("group")
@click.option("--topic", "topics", multiple=True, help="Only those that came from it. May be given repeatedly.")
@click.option("--tags", multiple=True, help="Only those with this tag. May be given repeatedly.")
@click.option("--key", help="Only those with this key.")
@begin_time
@end_time
@click.option("--to-topic", help="Send them to this topic instead.")
@click.option(
    "--progress", "name", default="default", show_default=True, help="Calls of one name go on where the last one ended."
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
    """Send GROUP's dead letters to their topics again, to be consumed anew, with reconsumeTimes 0.

    Every group that subscribes to a topic gets them. What is not chosen is passed over: calls with other filters need a
    --progress of their own to look at it.
    """
    with waiting("sending"):
        with rmq_spark.open_reader(path, commit_log_path=commit_log_path) as store:
            _refuse_unknown(store, path, commit_log_path, group)
        done = rmq_spark.republish_dead_letters(
            path,
            group,
            _chooser(topics, tags, key, begin_ms, end_ms),
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
        say(f"{done.sent:,} sent, {done.passed_over:,} passed over. The next call goes on at {done.next_offset}.")


def _chooser(
    topics: tuple[str, ...], tags: tuple[str, ...], key: str | None, begin_ms: int | None, end_ms: int | None
) -> Any:
    """Return the filter that the options make together; None for all."""
    wanted = []
    if topics:
        wanted.append(pc.map_lookup(pc.field("properties"), _CAME_FROM, "first").isin(list(topics)))
    if tags:
        wanted.append(pc.field("tags").isin(list(tags)))
    if key is not None:
        wanted.append(pc.match_substring_regex(pc.field("keys"), rf"(^|\s){re.escape(key)}(\s|$)"))
    if begin_ms is not None:
        wanted.append(pc.field("storeTimestamp") >= pa.scalar(_moment(begin_ms)))
    if end_ms is not None:
        wanted.append(pc.field("storeTimestamp") < pa.scalar(_moment(end_ms)))
    if not wanted:
        return None
    chosen = wanted[0]
    for one in wanted[1:]:
        chosen = chosen & one
    return chosen


def _moment(time_ms: int) -> datetime:
    return datetime.fromtimestamp(time_ms / 1000, UTC)
