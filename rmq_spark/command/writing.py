"""`rmq send`, `create`, `reset`, `close`: what changes a store on purpose. Each is whole, or has not happened."""

import json
from datetime import UTC, datetime
from typing import Any

import click
import pyarrow as pa

import rmq_spark
from rmq_spark.command.output import print_json, say, show
from rmq_spark.command.words import Moment, Size, writing

_PLACE = ("topic", "queueId", "queueOffset", "commitLogOffset", "msgId")
_WORDS = ("earliest", "latest")


@click.command(short_help="Send a message, or one for each line of standard input.")
@writing
@click.argument("topic")
@click.argument("body", required=False)
@click.option(
    "--lines", is_flag=True, help="A message for each line of standard input. Without it, all of it is one body."
)
@click.option("--tags", help="The message's tag.")
@click.option("--key", "keys", multiple=True, help="A key by which it is found. May be given repeatedly.")
@click.option("--property", "properties", multiple=True, metavar="NAME=VALUE", help="May be given repeatedly.")
@click.option("--queue", "queue_id", type=int, help="The queue's id; else they take turns.")
@click.option("--sharding-key", help="Messages with the same one go to the same queue, in order.")
@click.option("--delay-level", type=int, help="Deliver after the delay of this level: 1 is 1 s, 2 is 5 s … 18 is 2 h.")
@click.option("--deliver-at", "deliver_at_ms", type=Moment(), metavar="TIME", help="Deliver at this time.")
@click.option("--create-topic", is_flag=True, help="Make the topic, with 4 queues, if it is not there.")
def send(
    path: str,
    commit_log_path: str | None,
    lock_timeout_s: float,
    as_json: bool,
    topic: str,
    body: str | None,
    lines: bool,
    tags: str | None,
    keys: tuple[str, ...],
    properties: tuple[str, ...],
    queue_id: int | None,
    sharding_key: str | None,
    delay_level: int | None,
    deliver_at_ms: int | None,
    create_topic: bool,
) -> None:
    """Send BODY to TOPIC, or what standard input has, and print where it went. It is on disk for good then."""
    if lines and body is not None:
        raise click.UsageError("--lines reads standard input, and BODY is a message. Give one of them.")
    if lines:
        bodies = [line.rstrip(b"\r\n") for line in click.get_binary_stream("stdin")]
    else:
        bodies = [click.get_binary_stream("stdin").read() if body is None else body.encode()]
    row = {
        "tags": tags,
        "keys": list(keys) or None,
        "properties": list(_pairs(properties).items()),
        "queueId": queue_id,
        "shardingKey": sharding_key,
        "delayLevel": delay_level,
        "deliverTimestamp": deliver_at_ms,
    }
    messages = pa.table(
        {"body": pa.array(bodies, pa.binary())}
        | {
            name: pa.array([value] * len(bodies), _TYPES[name])
            for name, value in row.items()
            if value is not None and value != []
        }
    )
    _refuse_no_store(path, commit_log_path)
    with rmq_spark.open_store(
        path,
        commit_log_path=commit_log_path,
        lock_timeout_ms=round(lock_timeout_s * 1000),
        create_topic=create_topic,
        flush="sync",
    ) as store:
        places = store.send_many(messages, topic=topic)
    with rmq_spark.open_reader(path, commit_log_path=commit_log_path) as reader:
        rows = [_with_id(reader, place) for place in places.to_pylist()]
    show(rows, _PLACE, as_json=as_json, nothing="Standard input had no line, so nothing was sent.")


_TYPES = {
    "tags": pa.string(),
    "keys": pa.list_(pa.string()),
    "properties": pa.map_(pa.string(), pa.string()),
    "queueId": pa.int32(),
    "shardingKey": pa.string(),
    "delayLevel": pa.int32(),
    "deliverTimestamp": pa.int64(),
}


def _pairs(texts: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise click.UsageError(f"--property {text!r} is no NAME=VALUE, as in --property colour=red.")
        pairs[name] = value
    return pairs


def _with_id(reader: Any, place: dict[str, Any]) -> dict[str, Any]:
    reader.refresh()
    (queue,) = [queue for queue in reader.queues(place["topic"]) if queue.queue_id == place["queueId"]]
    return {**place, "msgId": reader.message(queue, place["queueOffset"]).message_id}


def _refuse_no_store(path: str, commit_log_path: str | None) -> None:
    """Raise StorePathError where there is no store: a path with a typing error must not become one."""
    rmq_spark.open_reader(path, commit_log_path=commit_log_path).close()


@click.command(short_help="Make a store, or topics in one.")
@writing
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
    as_json: bool,
    topics: tuple[str, ...],
    queues: int,
    segment_bytes: int,
    message_delay_level: str | None,
    timer_max_delay_sec: int | None,
    broker_version: str | None,
) -> None:
    """Make a store at PATH if nothing is there, and the topics that are missing. What is there stays as it is."""
    rmq_spark.create_store(
        path,
        topics={topic: queues for topic in topics},
        segment_bytes=segment_bytes,
        message_delay_level=message_delay_level,
        timer_max_delay_sec=timer_max_delay_sec,
        broker_version=broker_version,
        commit_log_path=commit_log_path,
        lock_timeout_ms=round(lock_timeout_s * 1000),
    )
    with rmq_spark.open_reader(path, commit_log_path=commit_log_path) as store:
        store.refresh()
        rows = [{"topic": topic, "queues": len(store.queues(topic))} for topic in topics]
    show(rows, ("topic", "queues"), as_json=as_json, nothing=f"The store at {path} is there.")


@click.command(short_help="Send a consumer group to earliest, latest, a time or offsets.")
@writing
@click.argument("group")
@click.argument("to", metavar="WHERE")
@click.option("--topic", "topics", multiple=True, help="Only these topics, also new ones. May be given repeatedly.")
def reset(
    path: str,
    commit_log_path: str | None,
    lock_timeout_s: float,
    as_json: bool,
    group: str,
    to: str,
    topics: tuple[str, ...],
) -> None:
    """Have GROUP go on at WHERE: earliest, latest, a time, or offsets as JSON: '{"orders": {"0": 12}}'.

    Queries that run go there with their next batch. Before GROUP write `--` if WHERE begins with a minus, as in -10m.
    """
    wanted: Any = to if to in _WORDS else json.loads(to) if to.startswith("{") else None
    if wanted is None:
        wanted = datetime.fromtimestamp(Moment().convert(to, None, None) / 1000, UTC)
    found = rmq_spark.reset_offsets(
        path,
        group,
        wanted,
        list(topics) or None,
        commit_log_path=commit_log_path,
        lock_timeout_ms=round(lock_timeout_s * 1000),
    )
    rows = [
        {"group": group, "topic": topic, "queueId": queue_id, "groupOffset": offset}
        for topic, queues in found.items()
        for queue_id, offset in queues.items()
    ]
    show(rows, ("topic", "queueId", "groupOffset"), as_json=as_json, nothing="The group has no queue to go to.")


@click.command(short_help="Leave a store as one that was closed in order.")
@writing
def close(path: str, commit_log_path: str | None, lock_timeout_s: float, as_json: bool) -> None:
    """Bring all to disk, write the checkpoint, and take `abort` away: a broker starts without a recovery then."""
    _refuse_no_store(path, commit_log_path)
    rmq_spark.close(path, commit_log_path=commit_log_path, lock_timeout_ms=round(lock_timeout_s * 1000))
    if as_json:
        print_json([{"path": path, "state": "closed"}])
    else:
        say(f"The store at {path} is closed in order.")
