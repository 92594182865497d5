"""`rmq topics`, `queues`, `groups`, `lag`: what a store holds, and how far its groups are. They change nothing."""

import shlex
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import click

import rmq_spark
from rmq_spark.command.output import printable, rows_of, say, typed
from rmq_spark.command.progress import waiting
from rmq_spark.command.tables import show
from rmq_spark.command.words import examples, reading

_TIMES = ("firstTimestamp", "lastTimestamp")
_MAX_PROBLEMS = 10  # of a store that lost a disk each queue has one


@click.command(epilog=examples("rmq topics /data/rocketmq/store", "rmq topics store --all --json"))
@reading
@click.option("--all", "with_all", is_flag=True, help="RocketMQ's own topics too, which are left out while empty.")
def topics(path: str, commit_log_path: str | None, as_json: bool, with_all: bool) -> None:
    """List the topics of the store at PATH.

    Bytes are those of their records in the commit log (an estimate where there are very many); times are UTC.
    A queue that cannot be read, or only in part, is named on stderr. One whose folder is missing counts as empty, as it
    is before its first message: whether the log has messages of it is for `rmq check` to say.
    """
    with waiting("reading queues"), rmq_spark.open_reader(path, commit_log_path=commit_log_path) as store:
        summary = store.summary()
    rows = rows_of(summary.to_arrow())
    rows = [row for row in rows if with_all or row["messages"] or not row["isSystem"]]
    columns = ("topic", "queues", "messages", "bytes", *_TIMES)
    nothing = "There are no topics yet. `rmq create PATH TOPIC` makes one."
    show(rows, columns, as_json=as_json, nothing=nothing, spared=_TIMES)
    _say_problems(path, summary.topics)


@click.command(epilog=examples("rmq queues store", "rmq queues store orders payments"))
@reading
@click.argument("topics", metavar="[TOPIC]...", nargs=-1)
def queues(path: str, commit_log_path: str | None, as_json: bool, topics: tuple[str, ...]) -> None:
    """List the queues of topics; if none is named, all queues that hold messages, or cannot be read.

    Offsets are [minOffset, maxOffset): the first one that is there, and the next one to be written.
    """
    with waiting("reading queues"), rmq_spark.open_reader(path, commit_log_path=commit_log_path) as store:
        found = [store.topic(name) for name in topics] if topics else store.summary().topics
    rows = [row for one in found for row in rows_of(one.to_arrow()) if topics or row["messages"] or row["problem"]]
    columns = ["topic", "queueId", "minOffset", "maxOffset", "messages", "bytes", *_TIMES]
    if any(row["problem"] for row in rows):
        columns.append("problem")
    show(rows, columns, as_json=as_json, nothing="No queue holds messages.", spared=(*_TIMES, "bytes"))
    _say_problems(path, found)


def _say_problems(path: str, topics: Iterable[Any]) -> None:
    """Say on stderr which queues the numbers leave out, wholly or in part: the table alone would pass for all."""
    problems = [f"{one.topic}/{queue_id}: {problem}" for one in topics for queue_id, problem in one.problems.items()]
    for problem in problems[:_MAX_PROBLEMS]:
        more = "" if "rmq_spark.check" in problem else f"; `rmq check {shlex.quote(path)}` says more"
        say(printable(typed(problem)) + more)
    if len(problems) > _MAX_PROBLEMS:
        say(f"… and {len(problems) - _MAX_PROBLEMS} more queues")


@click.command(epilog=examples("rmq groups store", "rmq groups store --json | jq '.[] | select(.lagMessages > 1000)'"))
@reading
def groups(path: str, commit_log_path: str | None, as_json: bool) -> None:
    """List the consumer groups: their topics, how many messages and seconds they are behind, and who is in them.

    A group whose queries have not published an offset yet has no queues here. Members are living queries, also those
    that have no queue. `rmq lag` goes queue by queue.
    """
    with waiting("reading offsets"):
        names = rmq_spark.groups(path, commit_log_path=commit_log_path)
        table = rows_of(rmq_spark.group_lag(path, commit_log_path=commit_log_path))
        living = rows_of(rmq_spark.group_members(path, commit_log_path=commit_log_path))
    of_group: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in table:
        of_group[row["group"]].append(row)
    members: dict[str, list[str]] = defaultdict(list)
    for row in living:
        members[row["group"]].append(row["member"])
    rows = [_group_row(name, of_group[name], members[name]) for name in names]
    columns = ("group", "topics", "queues", "lagMessages", "lagBytes", "secondsBehind", "members")
    shown = [{**row, "members": len(row["members"])} for row in rows]
    nothing = "There are no consumer groups yet."
    show(rows if as_json else shown, columns, as_json=as_json, nothing=nothing, spared=("lagBytes", "queues"))


def _group_row(name: str, queues: list[dict[str, Any]], members: list[str]) -> dict[str, Any]:
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
    """Show how far GROUP, or each group, is behind: a row for each queue.

    \b
    state: ok
           none     the group has no offset there
           expired  unread messages were deleted by retention
           ahead    the queue ends before the group's offset: was the store restored?
           gone     the queue is not there any more
    """
    with waiting("reading offsets"):
        rows = rows_of(rmq_spark.group_lag(path, group, commit_log_path=commit_log_path))
    columns = ["topic", "queueId", "state", "groupOffset", "maxOffset", "lagMessages", "lagBytes", "secondsBehind"]
    columns = [*([] if group else ["group"]), *columns, "member"]
    spared = ("member", "lagBytes", "maxOffset", "groupOffset")
    show(rows, columns, as_json=as_json, nothing="No group has an offset yet.", spared=spared)
