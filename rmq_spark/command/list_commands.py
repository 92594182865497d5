"""`rmq topics`, `queues`, `groups` and `lag`: contents of a store and progress of its groups. Read-only.

All of them show a cluster too. A broker tells no bytes, and no times without a read of messages.
"""

import shlex
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import click

import rmq_spark
from rmq_spark.command.completion import complete_groups, complete_topics
from rmq_spark.command.output import printable, rows_of, say, typed, waiting
from rmq_spark.command.parameters import examples
from rmq_spark.command.place import PathFirstCommand, Place, PlaceCommand, reads_place, takes_place
from rmq_spark.command.queue_views import ListedTopic, cause_of, describe, expand_topics, look_at, report_problems
from rmq_spark.command.tables import show
from rmq_spark.store import sum_lag
from rmq_spark.store.model import QueueAnswer, QueueBounds, QueueKey

_TIMES = ("firstTimestamp", "lastTimestamp")
_MAX_PROBLEMS = 10  # after the loss of a disk every queue has one


@click.command(
    cls=PlaceCommand,
    epilog=examples("rmq topics /data/rocketmq/store", "rmq topics store --all --json", "rmq topics -n ns1:9876"),
)
@reads_place()
@click.option("--all", "with_all", is_flag=True, help="Include RocketMQ's own topics that are empty.")
def topics(place: Place, as_data: bool, with_all: bool) -> None:
    """List the topics of the store at PATH, or of a cluster.

    Bytes are the size of the records in the commit log, estimated for very many records. Times are UTC. Queues that
    cannot be read completely are named on stderr. A queue without a folder counts as empty, as it is before its first
    message; `rmq check` finds lost folders.

    A cluster tells no bytes and times. Its queues that cannot be read count as empty and are named on stderr.
    """
    if place.is_cluster:
        _list_cluster_topics(place, as_data=as_data, with_all=with_all)
        return
    with waiting("reading queues"), place.open() as store:
        summary = store.summary()
    rows = rows_of(summary.to_arrow())
    rows = [row for row in rows if with_all or row["messages"] or not row["isSystem"]]
    columns = ("topic", "queues", "messages", "bytes", *_TIMES)
    nothing = "The store has no topics. Create one with `rmq create PATH TOPIC`."
    show(rows, columns, as_data=as_data, nothing=nothing, optional=_TIMES)
    _report_problems(str(place.path), summary.topics)


def _list_cluster_topics(place: Place, *, as_data: bool, with_all: bool) -> None:
    """Print a row for each topic of a cluster."""
    with waiting("asking brokers"), place.open() as reader:
        listed = look_at(reader, reader.topics())
        rows = [
            {
                "topic": topic.name,
                "isSystem": reader.is_system(topic.name),
                "brokers": len({queue.broker for queue in topic.answers}),
                "queues": len(topic.answers),
                "messages": topic.messages,
            }
            for topic in listed
        ]
    rows = [row for row in rows if with_all or row["messages"] or not row["isSystem"]]
    nothing = "The cluster has no topics. Create one with `rmq create -n HOST:PORT TOPIC`."
    show(rows, ("topic", "brokers", "queues", "messages"), as_data=as_data, nothing=nothing)
    _report_cluster_problems(listed)


@click.command(
    cls=PlaceCommand,
    epilog=examples("rmq queues store", "rmq queues store orders payments", "rmq queues -n ns1:9876 orders"),
)
@reads_place("topics")
@click.argument("topics", metavar="[TOPIC]...", nargs=-1, shell_complete=complete_topics)
def queues(place: Place, as_data: bool, topics: tuple[str, ...]) -> None:
    """List the queues of topics. Without TOPIC: all queues that contain messages or cannot be read.

    TOPIC is a name, a list with commas, or a pattern of a shell in quotes, such as 'order*'.

    minOffset is the offset of the oldest message, maxOffset the offset of the next message to be written.

    The queues of a cluster have the name of their broker. The column problem says why one cannot be read, such as
    since when its broker has been away. Brokers that no name server lists are not known.
    """
    if place.is_cluster:
        _list_cluster_queues(place, topics, as_data=as_data)
        return
    with waiting("reading queues"), place.open() as store:
        names = expand_topics(topics, store.topics)
        found = [store.topic(name) for name in names] if topics else store.summary().topics
    rows = [row for one in found for row in rows_of(one.to_arrow()) if topics or row["messages"] or row["problem"]]
    columns = ["topic", "queueId", "minOffset", "maxOffset", "messages", "bytes", *_TIMES]
    if any(row["problem"] for row in rows):
        columns.append("problem")
    show(rows, columns, as_data=as_data, nothing="No queue contains messages.", optional=(*_TIMES, "bytes"))
    _report_problems(str(place.path), found)


def _list_cluster_queues(place: Place, topics: Sequence[str], *, as_data: bool) -> None:
    """Print a row for each queue of topics of a cluster."""
    with waiting("asking brokers"), place.open() as reader:
        topics = expand_topics(topics, reader.topics)
        for topic in topics:
            reader.queues(topic)  # raises if there is no such topic, or if it cannot be read
        listed = look_at(reader, list(dict.fromkeys(topics or reader.topics())))
    rows = [_queue_row(queue, answer) for topic in listed for queue, answer in topic.answers.items()]
    rows = [row for row in rows if topics or row["messages"] or row["problem"]]
    columns = ["topic", "brokerName", "queueId", "minOffset", "maxOffset", "messages"]
    if any(row["problem"] for row in rows):
        columns.append("problem")
    if not as_data:
        rows = [{**row, "problem": row["problem"] and cause_of(row["problem"])} for row in rows]  # stderr has the rest
    show(rows, columns, as_data=as_data, nothing="No queue contains messages.")
    _report_cluster_problems(listed)


def _queue_row(queue: QueueKey, answer: QueueAnswer) -> dict[str, Any]:
    """Return the row of a queue of a cluster. Without bounds its numbers are None."""
    bounds = answer if isinstance(answer, QueueBounds) else None
    return {
        "topic": queue.topic,
        "brokerName": queue.broker,
        "queueId": queue.queue_id,
        "minOffset": bounds and bounds.min_offset,
        "maxOffset": bounds and bounds.max_offset,
        "messages": bounds and bounds.max_offset - bounds.min_offset,
        "problem": describe(answer),
    }


def _report_cluster_problems(listed: Iterable[ListedTopic]) -> None:
    """Name on stderr the topics and queues of a cluster that cannot be read."""
    problems: dict[QueueKey, str] = {}
    for topic in listed:
        problems |= topic.problems
        if topic.problem is not None:
            say(f"{topic.name}: {topic.problem}")
    report_problems(problems)


def _report_problems(path: str, topics: Iterable[Any]) -> None:
    """Name on stderr the queues that could not be read completely, because their numbers are too small."""
    problems = [f"{one.topic}/{queue_id}: {problem}" for one in topics for queue_id, problem in one.problems.items()]
    for problem in problems[:_MAX_PROBLEMS]:
        text = printable(typed(problem))
        if "rmq_spark.check" not in problem:
            text = f"{text.removesuffix('.')}. `rmq check {shlex.quote(path)}` tells more."
        say(text)
    if len(problems) > _MAX_PROBLEMS:
        say(f"… and {len(problems) - _MAX_PROBLEMS} more queues")


@click.command(
    cls=PlaceCommand,
    epilog=examples(
        "rmq groups store",
        "rmq groups store --json | jq '.[] | select(.lagMessages > 1000)'",
        "rmq groups -n ns1:9876",
    ),
)
@reads_place()
def groups(place: Place, as_data: bool) -> None:
    """List the consumer groups: topics, queues, lag in messages, bytes and seconds, and members.

    A group that has not committed an offset yet has no queues, and its lag is not known. Members are running queries,
    including those without a queue. `rmq lag` shows the lag by queue.

    In a cluster a group is listed after its first commit, the bytes are an estimate, and members are all clients that
    the brokers list. Groups and queues that cannot be read are named on stderr. unknownQueues counts queues whose
    broker is away. The lag is then that of the others.
    """
    with waiting("reading offsets"):
        names = rmq_spark.groups(**place.arguments)
        table = rows_of(rmq_spark.group_lag(**place.arguments)) if names else []
        living = _members(place, names) if names else {}
    queues: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in table:
        queues[row["group"]].append(row)
    rows = [_group_row(name, queues[name], None if living is None else living[name]) for name in names]
    columns = ["group", "topics", "queues", "lagMessages", "lagBytes", "secondsBehind", "members"]
    if any(row["unknownQueues"] for row in rows):
        columns.insert(3, "unknownQueues")
    shown = [{**row, "members": None if row["members"] is None else len(row["members"])} for row in rows]
    nothing = f"The {'cluster' if place.is_cluster else 'store'} has no consumer groups."
    hidden: dict[str, tuple[str, ...]] = {"optional": ("lagBytes", "queues"), "spared": ("members", "topics")}
    show(rows if as_data else shown, columns, as_data=as_data, nothing=nothing, **hidden)


def _members(place: Place, names: Sequence[str]) -> dict[str, list[str]] | None:
    """Return the members of each group, None if the brokers refuse to list them."""
    members: dict[str, list[str]] = {name: [] for name in names}
    try:
        for row in rows_of(rmq_spark.group_members(**place.arguments)):
            members.setdefault(row["group"], []).append(row["member"])
    except rmq_spark.NoPermissionError as error:
        if not place.is_cluster:
            raise
        say(f"The members are not known: {printable(typed(str(error)))}")
        return None
    return members


def _group_row(name: str, queues: list[dict[str, Any]], members: list[str] | None) -> dict[str, Any]:
    """Return the sums over a group's queues, given as rows of `group_lag`."""
    total = sum_lag(queues)
    return {
        "group": name,
        "topics": sorted({row["topic"] for row in queues}),
        "queues": len(queues),
        "lagMessages": total.messages,
        "lagBytes": total.bytes,
        "secondsBehind": total.seconds_behind,
        "unknownQueues": total.unknown_queues,
        "members": members,
    }


@click.command(
    cls=PathFirstCommand,
    epilog=examples("rmq lag store billing", "watch -n 5 rmq lag store billing", "rmq lag -n ns1:9876 billing"),
)
@takes_place()
@click.argument("group", required=False, shell_complete=complete_groups)
def lag(place: Place, as_data: bool, group: str | None) -> None:
    """Show the lag of GROUP, or of all groups, queue by queue.

    \b
    state: ok
           none     the group has no committed offset in the queue
           expired  retention deleted unread messages
           ahead    the committed offset is beyond the end of the queue
           gone     the queue does not exist any more
           away     the broker of the queue does not answer (in a cluster)

    In a cluster lagBytes is an estimate, and the column member is empty, because brokers do not know who owns a queue.
    """
    with waiting("reading offsets"):
        rows = rows_of(rmq_spark.group_lag(**place.arguments, group=group))
    columns = ["topic", "queueId", "state", "groupOffset", "maxOffset", "lagMessages", "lagBytes", "secondsBehind"]
    if place.is_cluster:
        columns.insert(1, "brokerName")
    else:
        columns.append("member")
    columns = [*([] if group else ["group"]), *columns]
    optional = ("member", "lagBytes", "maxOffset", "groupOffset")
    spared = () if group else ("secondsBehind",)
    show(rows, columns, as_data=as_data, nothing="No group has committed an offset.", optional=optional, spared=spared)
