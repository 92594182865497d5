"""`rmq topics`, `queues`, `groups`, `lag`: what a store holds, and how far its groups are. They change nothing."""

from collections import defaultdict
from typing import Any

import click

import rmq_spark
from rmq_spark.command.output import show
from rmq_spark.command.words import reading

_TIMES = ("firstTimestamp", "lastTimestamp")


@click.command(short_help="The topics of a store: queues, messages, bytes, time span.")
@reading
@click.option("--all", "with_all", is_flag=True, help="RocketMQ's own topics too, which are left out while empty.")
def topics(path: str, commit_log_path: str | None, as_json: bool, with_all: bool) -> None:
    """List the topics of the store at PATH. Bytes are those of records in the commit log; times are UTC."""
    with rmq_spark.open_reader(path, commit_log_path=commit_log_path) as store:
        rows = store.summary().to_arrow().to_pylist()
    rows = [row for row in rows if with_all or row["messages"] or not row["isSystem"]]
    columns = ("topic", "queues", "messages", "bytes", *_TIMES)
    show(rows, columns, as_json=as_json, nothing="There are no topics yet. `rmq create PATH TOPIC` makes one.")


@click.command(short_help="The queues of topics: offsets, messages, bytes, time span.")
@reading
@click.argument("names", metavar="[TOPIC]...", nargs=-1)
def queues(path: str, commit_log_path: str | None, as_json: bool, names: tuple[str, ...]) -> None:
    """List the queues of topics, of all that hold messages if none is named. Offsets are [min, max)."""
    with rmq_spark.open_reader(path, commit_log_path=commit_log_path) as store:
        if names:
            found = [store.topic(name) for name in names]
        else:
            found = [one for one in store.summary().topics if one.messages or not one.is_system]
    rows = [row for one in found for row in one.to_arrow().to_pylist()]
    columns = ["topic", "queueId", "minOffset", "maxOffset", "messages", "bytes", *_TIMES]
    if any(row["problem"] for row in rows):
        columns.append("problem")
    show(rows, columns, as_json=as_json, nothing="There are no queues yet.")


@click.command(short_help="The consumer groups of a store, and how far each is behind.")
@reading
def groups(path: str, commit_log_path: str | None, as_json: bool) -> None:
    """List the consumer groups: their topics, how many messages and seconds they are behind, and who is in them."""
    names = rmq_spark.groups(path, commit_log_path=commit_log_path)
    table = rmq_spark.group_lag(path, commit_log_path=commit_log_path).to_pylist()
    of_group: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in table:
        of_group[row["group"]].append(row)
    rows = [
        {
            "group": name,
            "topics": sorted({row["topic"] for row in of_group[name]}),
            "queues": len(of_group[name]),
            "lagMessages": sum(row["lagMessages"] or 0 for row in of_group[name]),
            "lagBytes": sum(row["lagBytes"] or 0 for row in of_group[name]),
            "secondsBehind": max((row["secondsBehind"] or 0 for row in of_group[name]), default=None),
            "members": sorted({row["member"] for row in of_group[name]} - {None}),
        }
        for name in names
    ]
    columns = ("group", "topics", "queues", "lagMessages", "lagBytes", "secondsBehind", "members")
    shown = [{**row, "topics": ", ".join(row["topics"]), "members": len(row["members"])} for row in rows]
    show(rows if as_json else shown, columns, as_json=as_json, nothing="There are no consumer groups yet.")


@click.command(short_help="How far a group is behind, queue by queue.")
@reading
@click.argument("group", required=False)
def lag(path: str, commit_log_path: str | None, as_json: bool, group: str | None) -> None:
    """Show how far GROUP, or each group, is behind: a row for each queue.

    state: ok; none, it has no offset there; expired, unread messages were deleted; ahead, the queue ends before it; gone.
    """
    rows = rmq_spark.group_lag(path, group, commit_log_path=commit_log_path).to_pylist()
    columns = [
        "topic",
        "queueId",
        "state",
        "groupOffset",
        "maxOffset",
        "lagMessages",
        "lagBytes",
        "secondsBehind",
        "member",
    ]
    if group is None:
        columns.insert(0, "group")
    show(rows, columns, as_json=as_json, nothing="No group has an offset yet.")
