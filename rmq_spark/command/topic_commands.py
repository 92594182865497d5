"""`rmq create` and `rmq delete`: stores and topics. A cluster's topics are created, altered and deleted too."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click
from click.core import ParameterSource

import rmq_spark
from rmq_spark.command.cluster_options import ADMIN_CLUSTER, cluster_arguments
from rmq_spark.command.completion import complete_topics
from rmq_spark.command.output import say, waiting
from rmq_spark.command.parameters import PERMS, Size, as_data, examples, lock_timeout, network_store, perm_text
from rmq_spark.command.place import Place, PlaceCommand, reads_place
from rmq_spark.command.tables import show
from rmq_spark.store import count_text
from rmq_spark.store.names import MAX_QUEUES

_OF_STORES = ("segment_bytes", "message_delay_level", "timer_max_delay_sec", "broker_version")
_OF_CLUSTERS = ("read_queues", "write_queues", "perm", "attributes", "cluster_name", "brokers", "alter")
_NOT_DELETED = 1


@click.command(
    cls=PlaceCommand,
    epilog=examples(
        "rmq create store orders payments",
        "rmq create store orders --queues 8",
        "rmq create -n ns1:9876 orders --queues 8",
        "rmq create -n ns1:9876 orders --alter --perm r",
    ),
)
@reads_place("topics", pulls=False)
@lock_timeout
@network_store
@click.argument("topics", metavar="[TOPIC]...", nargs=-1, shell_complete=complete_topics)
@click.option(
    "--queues", type=click.IntRange(1, MAX_QUEUES), default=4, show_default=True, help="Queues of each new topic."
)
@click.option(
    "--segment-bytes", type=Size(), default="1g", show_default=True, help="Segment size of a new commit log, in bytes."
)
@click.option("--message-delay-level", metavar="TEXT", help='Delay levels, such as "1s 5s 1m 2h".')
@click.option("--timer-max-delay-sec", type=int, help="Maximum delay of a delivery time, in seconds.")
@click.option("--broker-version", type=click.Choice(["4.9", "5"]), help="Version of the brokers that use the store.")
@click.option(
    "--alter", is_flag=True, help="Change the topics of a cluster that exist: only the settings that are given."
)
@click.option(
    "--read-queues", type=click.IntRange(0, MAX_QUEUES), help="Queues for reading on each broker.  [default: --queues]"
)
@click.option(
    "--write-queues", type=click.IntRange(0, MAX_QUEUES), help="Queues for writing on each broker.  [default: --queues]"
)
@click.option(
    "--perm",
    type=click.Choice([*PERMS]),
    help="Whether clients may read (r) and write (w), and new topics inherit it (x).  [default: rw]",
)
@click.option(
    "--attribute", "attributes", multiple=True, metavar="NAME=VALUE", help="Attribute of a topic (5.x). Repeatable."
)
@click.option("--cluster", "cluster_name", metavar="NAME", help="Only on the brokers of this cluster.")
@click.option("--broker", "brokers", multiple=True, metavar="NAME", help="Only on this broker. Repeatable.")
def create(place: Place, as_data: bool, topics: tuple[str, ...], queues: int, **settings: Any) -> None:
    """Create a store at PATH, unless it exists, and the topics that are missing. Existing topics do not change.

    The files of a new store are sparse: they have their full size, but occupy only what is written.

    In a cluster, topics are created on all masters, or on those of --cluster or --broker. --alter also changes existing
    topics. If you lower the number of queues, the messages in the removed queues cannot be read until you raise it
    again.
    """
    given = {
        name
        for name in (*_OF_STORES, *_OF_CLUSTERS, "queues")
        if click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    if place.is_cluster:
        _refuse(given, _OF_STORES, "is for a store at PATH, and cannot be combined with --name-server")
        wanted = {name: settings[name] for name in _OF_CLUSTERS}
        _create_in_cluster(place, topics, queues if "queues" in given else None, wanted, as_data=as_data)
    else:
        _refuse(given, _OF_CLUSTERS, "is for a cluster, but PATH is a store")
        _create_store(place, topics, {name: settings[name] for name in _OF_STORES}, queues, as_data=as_data)


def _refuse(given: set[str], names: tuple[str, ...], why: str) -> None:
    """Raise UsageError if an option was given that is for the other kind of place."""
    options = {one.name: one.opts[0] for one in click.get_current_context().command.params}
    for name in names:
        if name in given:
            raise click.UsageError(f"{options[name]} {why}. Leave it out.")


def _create_store(
    place: Place, topics: tuple[str, ...], settings: dict[str, Any], queues: int, *, as_data: bool
) -> None:
    before: list[str] | None = None
    with suppress(rmq_spark.StorePathError), place.open() as store:
        before = list(store.topics())
    with waiting("creating"):
        rmq_spark.create_store(**place.arguments, topics={topic: queues for topic in topics}, **settings)
    with place.open() as store:
        store.refresh()
        rows = [
            {"topic": topic, "queues": len(store.queues(topic)), "isNew": topic not in (before or ())}
            for topic in dict.fromkeys(topics)
        ]
    if not as_data:
        say(f"The store at {place.path} {'is new' if before is None else 'exists already'}.")
    show(rows, ("topic", "queues", "isNew"), as_data=as_data, nothing="")


def _create_in_cluster(
    place: Place, topics: tuple[str, ...], queues: int | None, wanted: dict[str, Any], *, as_data: bool
) -> None:
    """Create topics in a cluster, or alter them, and print a row for each topic and broker."""
    if not topics:
        raise click.UsageError("Missing argument 'TOPIC...'. Give it after --name-server HOST:PORT.")
    read, write = (queues if wanted[name] is None else wanted[name] for name in ("read_queues", "write_queues"))
    perm = None if wanted["perm"] is None else PERMS[wanted["perm"]]
    attributes = dict(_attribute(text) for text in wanted["attributes"])
    rows: list[dict[str, Any]] = []
    with _shown_at_the_end(rows, ("topic", "brokerName", "change", "readQueues", "writeQueues", "perm"), as_data):
        for topic in dict.fromkeys(topics):
            with waiting("asking brokers"):
                changed = rmq_spark.create_cluster_topic(
                    **place.reading,
                    topic=topic,
                    read_queues=read,
                    write_queues=write,
                    perm=perm,
                    attributes=attributes,
                    cluster=wanted["cluster_name"],
                    brokers=wanted["brokers"],
                    alters=wanted["alter"],
                )
            rows += [_changed_row(topic, one) for one in changed]
    if not as_data and any(row["change"] == "none" for row in rows) and not wanted["alter"]:
        say("Topics that exist were not changed. --alter changes them.")


@contextmanager
def _shown_at_the_end(rows: list[dict[str, Any]], columns: tuple[str, ...], as_data: bool) -> Iterator[None]:
    """Print the rows that are complete at the end of the block, also if a later topic has failed."""
    try:
        yield
    finally:
        if rows:
            show(rows, columns, as_data=as_data, nothing="", optional=("nameServers",))


def _attribute(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise click.UsageError(f"--attribute {text!r}: expected NAME=VALUE, such as message.type=FIFO.")
    return name, value


def _changed_row(topic: str, one: Any) -> dict[str, Any]:
    change = "created" if one.before is None else "none" if one.before == one.after else "altered"
    return {
        "topic": topic,
        "brokerName": one.broker,
        "change": change,
        "readQueues": one.after.read_queue_count,
        "writeQueues": one.after.write_queue_count,
        "perm": perm_text(one.after.perm),
        "attributes": dict(one.after.attributes),
    }


@click.command(epilog=examples("rmq delete -n ns1:9876 orders", "rmq delete -n ns1:9876 orders payments --yes"))
@ADMIN_CLUSTER
@click.argument("topics", metavar="TOPIC...", nargs=-1, required=True, shell_complete=complete_topics)
@click.option("--yes", is_flag=True, help="Delete without confirmation.")
@as_data
def delete(name_server: str, topics: tuple[str, ...], yes: bool, as_data: bool, **cluster: Any) -> int:
    """Delete topics of a cluster with all their messages, after confirmation.

    Each TOPIC is deleted on all masters, and then on all name servers. Without a terminal, --yes is required. A
    deletion cannot be undone.

    Clients that still use the topic may create it again, if a broker creates topics by itself. Exit status 1 if nothing
    was deleted.
    """
    arguments = {"name_server": name_server, **cluster_arguments(cluster)}
    if not yes:
        if as_data or not sys.stdin.isatty():
            raise click.UsageError("found no --yes, and no terminal for a question; expected one of them. Add --yes.")
        for topic in topics:
            with waiting("asking brokers"):
                routes = rmq_spark.cluster_routes(**arguments, topic=topic)
            names = ", ".join(one.broker for one in routes)
            say(f"{topic}: {count_text(sum(one.write_queues for one in routes), 'queue')} on {names}")
        if not click.confirm(f"Delete {', '.join(topics)} with all messages?", err=True):
            say("Nothing was deleted.")
            return _NOT_DELETED
    rows: list[dict[str, Any]] = []
    with _shown_at_the_end(rows, ("topic", "brokers", "nameServers"), as_data):
        for topic in dict.fromkeys(topics):
            with waiting("deleting"):
                done = rmq_spark.delete_cluster_topic(**arguments, topic=topic)
            rows.append({"topic": topic, "brokers": done.brokers, "nameServers": done.name_servers, "away": done.away})
            if done.away:
                say(
                    f"{topic}: {', '.join(done.away)} had no master, and registers the topic again when it is back. "
                    "Repeat the command then."
                )
    return 0
