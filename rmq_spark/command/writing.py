"""`rmq create`, `reset`, `close`: what changes a store on purpose. Each is whole, or has not happened."""

import json
from datetime import UTC, datetime
from typing import Any

import click

import rmq_spark
from rmq_spark.command.output import print_json, say
from rmq_spark.command.progress import waiting
from rmq_spark.command.tables import show
from rmq_spark.command.words import TIMES, Moment, Size, appending, examples, writing
from rmq_spark.store.units import LAST_SECONDS_MS

_WORDS = ("earliest", "latest")
_OFFSETS = '\'{"orders": {"0": 12}}\''


@click.command(epilog=examples("rmq create store orders payments", "rmq create store orders --queues 8"))
@appending
@click.argument("topics", metavar="[TOPIC]...", nargs=-1)
@click.option("--queues", type=click.IntRange(min=1), default=4, show_default=True, help="How many each topic gets.")
@click.option("--segment-bytes", type=Size(), default="1g", show_default=True, help="Of a new store's commit log.")
@click.option("--message-delay-level", metavar="TEXT", help='The table of delays, as in "1s 5s 1m 2h".')
@click.option("--timer-max-delay-sec", type=int, help="How far ahead a message's time may lie.")
@click.option("--broker-version", type=click.Choice(["4.9", "5"]), help="For which brokers the store is.")
def create(
    path: str,
    commit_log_path: str | None,
    lock_timeout_s: float,
    allow_network_store: bool,
    as_json: bool,
    topics: tuple[str, ...],
    queues: int,
    segment_bytes: int,
    message_delay_level: str | None,
    timer_max_delay_sec: int | None,
    broker_version: str | None,
) -> None:
    """Make a store at PATH if nothing is there, and the topics that are missing. What is there stays as it is.

    A new store's files have their full size from the start, and take only the room that is written.
    """
    before = _topics(path, commit_log_path)
    with waiting("making"):
        rmq_spark.create_store(
            path,
            topics={topic: queues for topic in topics},
            segment_bytes=segment_bytes,
            message_delay_level=message_delay_level,
            timer_max_delay_sec=timer_max_delay_sec,
            broker_version=broker_version,
            commit_log_path=commit_log_path,
            lock_timeout_ms=round(lock_timeout_s * 1000),
            allow_network_store=allow_network_store,
        )
    with rmq_spark.open_reader(path, commit_log_path=commit_log_path) as store:
        store.refresh()
        rows = [
            {"topic": topic, "queues": len(store.queues(topic)), "isNew": topic not in (before or ())}
            for topic in dict.fromkeys(topics)
        ]
    if not as_json:
        say(f"The store at {path} {'is new' if before is None else 'was there'}.")
    show(rows, ("topic", "queues", "isNew"), as_json=as_json, nothing="")


def _topics(path: str, commit_log_path: str | None) -> list[str] | None:
    """Return the topics of a store, None where there is none."""
    try:
        with rmq_spark.open_reader(path, commit_log_path=commit_log_path) as store:
            return list(store.topics())
    except rmq_spark.StorePathError:
        return None


_RESET_EXAMPLES = examples(
    "rmq reset store billing earliest",
    "rmq reset store billing now-2h --topic orders",
    'rmq reset store billing \'{"orders": {"0": 12}}\'',
)


@click.command(epilog=f"{TIMES}\n\n{_RESET_EXAMPLES}")
@writing
@click.argument("group")
@click.argument("to", metavar="WHERE")
@click.option("--topic", "topics", multiple=True, help="Only this topic, which may be new. May be given repeatedly.")
def reset(
    path: str,
    commit_log_path: str | None,
    lock_timeout_s: float,
    as_json: bool,
    group: str,
    to: str,
    topics: tuple[str, ...],
) -> None:
    """Have GROUP go on at WHERE: earliest, latest, a TIME, or offsets as JSON.

    Queries that run go there with their next batch. Where each queue stood before is printed too, so that a reset can
    be taken back. The group's retries stay where they are, unless --topic %RETRY%GROUP says so.
    """
    where = _where(to)
    with waiting("resetting"):
        before = rmq_spark.group_offsets(path, group, commit_log_path=commit_log_path)
        found = rmq_spark.reset_offsets(
            path,
            group,
            where,
            list(topics) or None,
            commit_log_path=commit_log_path,
            lock_timeout_ms=round(lock_timeout_s * 1000),
        )
    rows = [
        {
            "group": group,
            "topic": topic,
            "queueId": queue_id,
            "oldGroupOffset": before.get(topic, {}).get(queue_id),
            "groupOffset": offset,
        }
        for topic, queues in found.items()
        for queue_id, offset in queues.items()
    ]
    columns = ("topic", "queueId", "oldGroupOffset", "groupOffset")
    show(rows, columns, as_json=as_json, nothing="The group has no queue to go to.")


def _where(to: str) -> Any:
    """Return what `reset_offsets` takes."""
    if to in _WORDS:
        return to
    if to.lstrip().startswith("{"):
        try:
            return json.loads(to)
        except json.JSONDecodeError as error:
            raise click.UsageError(f"WHERE is no JSON: {error}. It is such as {_OFFSETS}.") from None
    try:
        time_ms = Moment().convert(to, None, None)
    except click.BadParameter:
        raise click.UsageError(f"WHERE {to!r} is none of: earliest, latest, now-2h, {_OFFSETS}. {TIMES}") from None
    # `reset_offsets` refuses a number that looks like seconds. This one comes from a date before 2001.
    return datetime.fromtimestamp(time_ms / 1000, UTC) if time_ms <= LAST_SECONDS_MS else time_ms


@click.command(epilog=examples("rmq close store"))
@appending
def close(
    path: str, commit_log_path: str | None, lock_timeout_s: float, allow_network_store: bool, as_json: bool
) -> None:
    """Bring all to disk, write the checkpoint, and take `abort` away: a broker starts without a recovery then."""
    with waiting("closing"):
        rmq_spark.close(
            path,
            commit_log_path=commit_log_path,
            lock_timeout_ms=round(lock_timeout_s * 1000),
            allow_network_store=allow_network_store,
        )
    if as_json:
        print_json([{"path": path, "state": "closed"}])
    else:
        say(f"The store at {path} is closed in order.")
