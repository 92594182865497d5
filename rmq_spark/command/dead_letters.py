"""`rmq dlq`: what consumer groups have given up, and sending it again."""

import re
from datetime import UTC, datetime
from typing import Any

import click
import pyarrow as pa
import pyarrow.compute as pc

import rmq_spark
from rmq_spark.command.output import print_json, say, show
from rmq_spark.command.words import begin_time, end_time, reading, writing

_PREFIX = "%DLQ%"
_READ = ["topic", "queueOffset", "reconsumeTimes", "storeTimestamp", "tags", "keys", "body", "properties", "msgId"]
_ERROR = "CONSUME_ERROR"
_AT_ONCE = 1000


@click.group()
def dlq() -> None:
    """Dead letters: list them, or send them again."""


@dlq.command("list", short_help="Groups with dead letters, or the dead letters of one.")
@reading
@click.argument("group", required=False)
@click.option("-n", "--limit", type=click.IntRange(min=1), default=100, show_default=True, help="At most so many.")
def list_(path: str, commit_log_path: str | None, as_json: bool, group: str | None, limit: int) -> None:
    """List the groups that have dead letters, or GROUP's dead letters, the newest last.

    The error is what the listener or query said of the last failure. `rmq get --topic %DLQ%GROUP` shows one whole.
    """
    with rmq_spark.open_reader(path, commit_log_path=commit_log_path) as store:
        store.refresh()
        if group is None:
            found = [store.topic(topic) for topic in store.topics() if topic.startswith(_PREFIX)]
            rows = [
                {"group": one.topic.removeprefix(_PREFIX), **one.to_arrow().to_pylist()[0], "messages": one.messages}
                for one in found
                if one.messages
            ]
            names: tuple[str, ...] = ("group", "messages", "bytes", "firstTimestamp", "lastTimestamp")
        else:
            rows = _letters(store, _PREFIX + group, limit)
            names = ("queueOffset", "topic", "keys", "tags", "reconsumeTimes", "storeTimestamp", "error", "body")
    show(rows, names, as_json=as_json, nothing="No dead letters.")


def _letters(store: Any, topic: str, limit: int) -> list[dict[str, Any]]:
    """Return a topic's last messages. Its topic may not be there yet: then there are none."""
    if topic not in store.topics():
        return []
    rows: list[dict[str, Any]] = []
    for queue in store.queues(topic):
        bounds = store.bounds(queue)
        first = max(bounds.min_offset, bounds.max_offset - limit)
        for batch in store.read(queue, first, bounds.max_offset, _READ):
            for row in batch.to_pylist():
                row["properties"] = dict(row["properties"] or [])
                rows.append({**row, "error": row["properties"].get(_ERROR)})
    return rows[-limit:]


@dlq.command(short_help="Send dead letters to the topics that they came from, each once.")
@writing
@click.argument("group")
@click.option("--tags", multiple=True, help="Only messages with this tag. May be given repeatedly.")
@click.option("--key", help="Only messages with this key.")
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
    as_json: bool,
    group: str,
    tags: tuple[str, ...],
    key: str | None,
    begin_ms: int | None,
    end_ms: int | None,
    to_topic: str | None,
    name: str,
) -> None:
    """Send GROUP's dead letters to their topics again, to be consumed anew, with reconsumeTimes 0.

    What is not chosen is passed over: calls with other filters need a --progress of their own to look at it.
    """
    done = rmq_spark.republish_dead_letters(
        path,
        group,
        _chooser(tags, key, begin_ms, end_ms),
        topic=to_topic,
        progress=name,
        commit_log_path=commit_log_path,
        lock_timeout_ms=round(lock_timeout_s * 1000),
    )
    if as_json:
        row = {"group": group, "sent": done.sent, "passedOver": done.passed_over, "nextOffset": done.next_offset}
        print_json([row])
    else:
        say(
            f"{done.sent} dead letters sent, {done.passed_over} passed over. The next call goes on at {done.next_offset}."
        )


def _chooser(tags: tuple[str, ...], key: str | None, begin_ms: int | None, end_ms: int | None) -> Any:
    """Return the filter that the options make together; None for all."""
    wanted = []
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
