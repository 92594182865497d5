"""`rmq topics`, `queues`, `groups` and `lag`: contents of a store and progress of its groups. Read-only."""

import shlex
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import click

import rmq_spark
from rmq_spark.command.output import printable, rows_of, say, typed, waiting
from rmq_spark.command.parameters import examples, reading
from rmq_spark.command.tables import show

_TIMES = ("firstTimestamp", "lastTimestamp")
_MAX_PROBLEMS = 10  # after the loss of a disk every queue has one


@click.command(epilog=examples("rmq topics /data/rocketmq/store", "rmq topics store --all --json"))
@reading
@click.option("--all", "with_all", is_flag=True, help="Include RocketMQ's own topics that are empty.")
def topics(path: str, commit_log_path: str | None, as_json: bool, with_all: bool) -> None:
    """List the topics of the store at PATH.

    Bytes are the size of the records in the commit log, estimated for very many records. Times are UTC. Queues that
    cannot be read completely are named on stderr. A queue without a folder counts as empty, as it is before its first
    message; `rmq check` finds lost folders.
    """
    with waiting("reading queues"), rmq_spark.open_reader(path, commit_log_path=commit_log_path) as store:
        summary = store.summary()
    rows = rows_of(summary.to_arrow())
    rows = [row for row in rows if with_all or row["messages"] or not row["isSystem"]]
    columns = ("topic", "queues", "messages", "bytes", *_TIMES)
    nothing = "The store has no topics. Create one with `rmq create PATH TOPIC`."
    show(rows, columns, as_json=as_json, nothing=nothing, optional=_TIMES)
    _report_problems(path, summary.topics)


@click.command(epilog=examples("rmq queues store", "rmq queues store orders payments"))
@reading
@click.argument("topics", metavar="[TOPIC]...", nargs=-1)
def queues(path: str, commit_log_path: str | None, as_json: bool, topics: tuple[str, ...]) -> None:
    """List the queues of topics. Without TOPIC: all queues that contain messages or cannot be read.

    minOffset is the offset of the oldest message, maxOffset the offset of the next message to be written.
    """
    with waiting("reading queues"), rmq_spark.open_reader(path, commit_log_path=commit_log_path) as store:
        found = [store.topic(name) for name in topics] if topics else store.summary().topics
    rows = [row for one in found for row in rows_of(one.to_arrow()) if topics or row["messages"] or row["problem"]]
    columns = ["topic", "queueId", "minOffset", "maxOffset", "messages", "bytes", *_TIMES]
    if any(row["problem"] for row in rows):
        columns.append("problem")
    show(rows, columns, as_json=as_json, nothing="No queue contains messages.", optional=(*_TIMES, "bytes"))
    _report_problems(path, found)


def _report_problems(path: str, topics: Iterable[Any]) -> None:
    """Name on stderr the queues that could not be read completely, because their numbers are too small."""
    problems = [f"{one.topic}/{queue_id}: {problem}" for one in topics for queue_id, problem in one.problems.items()]
    for problem in problems[:_MAX_PROBLEMS]:
        more = "" if "rmq_spark.check" in problem else f"; run `rmq check {shlex.quote(path)}` for details"
        say(printable(typed(problem)) + more)
    if len(problems) > _MAX_PROBLEMS:
        say(f"… and {len(problems) - _MAX_PROBLEMS} more queues")


@click.command(epilog=examples("rmq groups store", "rmq groups store --json | jq '.[] | select(.lagMessages > 1000)'"))
@reading
def groups(path: str, commit_log_path: str | None, as_json: bool) -> None:
    """List the consumer groups: topics, queues, lag in messages, bytes and seconds, and members.

    A group that has not committed an offset yet has no queues. Members are running queries, including those without a
    queue. `rmq lag` shows the lag by queue.
    """
    with waiting("reading offsets"):
        names = rmq_spark.groups(path, commit_log_path=commit_log_path)
        table = rows_of(rmq_spark.group_lag(path, commit_log_path=commit_log_path))
        living = rows_of(rmq_spark.group_members(path, commit_log_path=commit_log_path))
    queues: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in table:
        queues[row["group"]].append(row)
    members: dict[str, list[str]] = defaultdict(list)
    for row in living:
        members[row["group"]].append(row["member"])
    rows = [_group_row(name, queues[name], members[name]) for name in names]
    columns = ("group", "topics", "queues", "lagMessages", "lagBytes", "secondsBehind", "members")
    shown = [{**row, "members": len(row["members"])} for row in rows]
    nothing = "The store has no consumer groups."
    show(rows if as_json else shown, columns, as_json=as_json, nothing=nothing, optional=("lagBytes", "queues"))


def _group_row(name: str, queues: list[dict[str, Any]], members: list[str]) -> dict[str, Any]:
    """Return the sums over a group's queues, given as rows of `group_lag`."""
    return {
        "group": name,
        "topics": sorted({row["topic"] for row in queues}),
        "queues": len(queues),
        "lagMessages": sum(row["lagMessages"] or 0 for row in queues),
        "lagBytes": sum(row["lagBytes"] or 0 for row in queues),
        "secondsBehind": max((row["secondsBehind"] or 0.0 for row in queues), default=None),
        "members": members,
    }


@click.command(epilog=examples("rmq lag store billing", "watch -n 5 rmq lag store billing"))
@reading
@click.argument("group", required=False)
def lag(path: str, commit_log_path: str | None, as_json: bool, group: str | None) -> None:
    """Show the lag of GROUP, or of all groups, queue by queue.

    \b
    state: ok
           none     the group has no committed offset in the queue
           expired  retention deleted unread messages
           ahead    the committed offset is beyond the end of the queue, as after a restore
           gone     the queue does not exist any more
    """
    with waiting("reading offsets"):
        rows = rows_of(rmq_spark.group_lag(path, group, commit_log_path=commit_log_path))
    columns = ["topic", "queueId", "state", "groupOffset", "maxOffset", "lagMessages", "lagBytes", "secondsBehind"]
    columns = [*([] if group else ["group"]), *columns, "member"]
    optional = ("member", "lagBytes", "maxOffset", "groupOffset")
    show(rows, columns, as_json=as_json, nothing="No group has committed an offset.", optional=optional)
