"""`rmq brokers`, `route`, `stats` and `members`: what administrators look at every day. Read-only."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import click

import rmq_spark
from rmq_spark.command.cluster_options import ADMIN_CLUSTER, cluster_arguments
from rmq_spark.command.completion import complete_groups, complete_topics
from rmq_spark.command.output import printable, rows_of, say, typed, waiting
from rmq_spark.command.parameters import as_data, examples, perm_text
from rmq_spark.command.place import PathFirstCommand, Place, takes_place
from rmq_spark.command.queue_views import expand_topics
from rmq_spark.command.tables import show


@click.command(epilog=examples("rmq brokers -n ns1:9876", "rmq brokers -n 'ns1:9876;ns2:9876' --json"))
@ADMIN_CLUSTER
@as_data
def brokers(name_server: str, as_data: bool, **cluster: Any) -> None:
    """List the masters (brokerId 0) and slaves of a cluster.

    Rates are messages per second in the last 10 s. diskUsed is the used share of the commit log's disk, in --json a
    number from 0 to 1. A broker that does not answer is named on stderr. --json also prints messages since midnight,
    and the times of the first message and of the start.
    """
    with waiting("asking brokers"):
        states = rmq_spark.cluster_brokers(name_server, **cluster_arguments(cluster))
    rows = [
        {
            "cluster": one.cluster,
            "brokerName": one.broker,
            "brokerId": one.broker_id,
            "address": one.address,
            "version": one.version,
            "inRate": one.in_rate,
            "outRate": one.out_rate,
            "inToday": one.in_today,
            "outToday": one.out_today,
            "diskUsed": None if one.disk_used is None or one.disk_used < 0 else one.disk_used,
            "earliestTimestamp": _time(one.earliest_ms),
            "bootTimestamp": _time(one.boot_ms),
            "isActive": one.is_active,
            "problem": None if one.problem is None else printable(typed(one.problem)),
        }
        for one in states
    ]
    columns = ("cluster", "brokerName", "brokerId", "address", "version", "inRate", "outRate", "diskUsed")
    nothing = "The name servers list no broker. After a restart of a name server wait 30 s."
    shares = [None if row["diskUsed"] is None else f"{row['diskUsed']:.0%}" for row in rows]
    shown = rows if as_data else [{**row, "diskUsed": share} for row, share in zip(rows, shares, strict=True)]
    show(shown, columns, as_data=as_data, nothing=nothing, optional=("cluster", "diskUsed", "version"))
    for row in rows:
        if row["problem"]:
            say(f"{row['brokerName']} {row['brokerId']}: {row['problem']}")


def _time(time_ms: int | None) -> datetime | None:
    return None if time_ms is None else datetime.fromtimestamp(time_ms / 1000, UTC)


@click.command(epilog=examples("rmq route -n ns1:9876 orders"))
@ADMIN_CLUSTER
@click.argument("topic", shell_complete=complete_topics)
@as_data
def route(name_server: str, topic: str, as_data: bool, **cluster: Any) -> None:
    """Show which brokers have TOPIC, as the name servers list them: queues, permission and addresses.

    perm has the letters r (read), w (write) and x (new topics inherit it), or is none. master is empty while a broker's
    master is away.
    """
    with waiting("asking name servers"):
        entries = rmq_spark.cluster_routes(name_server, topic, **cluster_arguments(cluster))
    rows = [
        {
            "topic": one.topic,
            "cluster": one.cluster,
            "brokerName": one.broker,
            "perm": perm_text(one.perm),
            "readQueues": one.read_queues,
            "writeQueues": one.write_queues,
            "master": one.master,
            "slaves": {str(number): address for number, address in one.slaves.items()},
        }
        for one in entries
    ]
    columns = ["cluster", "brokerName", "perm", "readQueues", "writeQueues", "master"]
    if any(row["slaves"] for row in rows):
        columns.append("slaves")
    show(rows, columns, as_data=as_data, nothing="", optional=("cluster", "slaves"))


@click.command(epilog=examples("rmq stats -n ns1:9876", "rmq stats -n ns1:9876 'orders*' --json"))
@ADMIN_CLUSTER
@click.argument("topics", metavar="[TOPIC]...", nargs=-1, shell_complete=complete_topics)
@click.option("--all", "with_all", is_flag=True, help="Include RocketMQ's own topics.")
@click.option("--active", is_flag=True, help="Only topics with messages of the last day.")
@as_data
def stats(
    name_server: str, topics: tuple[str, ...], with_all: bool, active: bool, as_data: bool, **cluster: Any
) -> None:
    """Show what the brokers have counted, for each topic and each of its groups. Without TOPIC: all topics.

    TOPIC is a name, a list with commas, or a pattern of a shell in quotes, such as 'order*'.

    Rates are messages per second of the last minute: in are sent, out are pulled by the group. A broker counts from its
    start. The day columns are messages of the last day, or since the start. lag counts messages that the group has not
    consumed. A topic, or a broker of it, that is not counted is named on stderr.
    """
    arguments = cluster_arguments(cluster)
    with waiting("asking brokers"):
        with rmq_spark.open_reader(name_server=name_server, **arguments) as reader:
            names = expand_topics(topics, reader.topics)
            if not topics:
                names = [name for name in reader.topics() if with_all or not reader.is_system(name)]
        rates = rmq_spark.cluster_rates(name_server, names, **arguments)
    rows = [
        {
            "topic": one.topic,
            "group": one.group,
            "inRate": one.in_rate,
            "inBytesRate": one.in_bytes_rate,
            "outRate": one.out_rate,
            "inDay": one.in_day,
            "outDay": one.out_day,
            "lagMessages": one.lag,
            "problem": None if one.problem is None else printable(typed(one.problem)),
        }
        for one in rates
        if not active or one.in_day or one.out_day or one.problem is not None
    ]
    columns = ("topic", "group", "inRate", "outRate", "inDay", "outDay", "lagMessages")
    optional = (("inDay", "outDay"),)  # one without the other misleads
    show(rows, columns, as_data=as_data, nothing="No topic has messages.", optional=optional)
    _name_problems({one.topic: one.problem for one in rates if one.problem is not None})


def _name_problems(problems: Mapping[str, str]) -> None:
    """Name topics with their problems on stderr: those with the same problem in one line."""
    alike: dict[str, list[str]] = {}
    for topic, problem in problems.items():
        alike.setdefault(problem.replace(f"topic {topic} ", ""), []).append(topic)
    for found in alike.values():
        others = f" and {len(found) - 1} more topic{'s' * (len(found) > 2)}" if len(found) > 1 else ""
        say(f"{printable(found[0])}{others}: {printable(typed(problems[found[0]]))}")


@click.command(
    cls=PathFirstCommand,
    epilog=examples("rmq members store billing", "rmq members -n ns1:9876 billing", "rmq members -n ns1:9876 --json"),
)
@takes_place(pulls=False)
@click.argument("group", required=False, shell_complete=complete_groups)
def members(place: Place, as_data: bool, group: str | None) -> None:
    """List the living members of GROUP, or of all groups.

    In a store these are running queries, with the number of their queues. In a cluster they are all clients that the
    brokers list, with address, language and version. The column subscription has the topics and filters.
    """
    with waiting("reading members"):
        rows = rows_of(rmq_spark.group_members(**place.arguments, group=group))
    if place.is_cluster:
        columns = ["member", "address", "language", "version", "messageModel", "subscription"]
    else:
        columns = ["member", "queues", "queryName", "host", "processId", "subscription"]
    columns = [*([] if group else ["group"]), *columns]
    optional = ("messageModel", "processId", "host", "language", "address")
    show(rows, columns, as_data=as_data, nothing="No member is connected.", optional=optional)
