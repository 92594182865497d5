"""`rmq send`: a message, or one for each line of standard input. What it has printed is on disk for good."""

import sys
from collections.abc import Iterator
from typing import Any

import click
import pyarrow as pa

import rmq_spark
from rmq_spark.command.output import say
from rmq_spark.command.progress import waiting
from rmq_spark.command.tables import show
from rmq_spark.command.words import Moment, appending, examples

_AT_ONCE_BYTES = 1 << 20
_TYPES = {
    "tags": pa.string(),
    "keys": pa.list_(pa.string()),
    "properties": pa.map_(pa.string(), pa.string()),
    "queueId": pa.int32(),
    "shardingKey": pa.string(),
    "delayLevel": pa.int32(),
    "deliverTimestamp": pa.int64(),
}
_EXAMPLES = examples(
    "rmq send store orders '{\"order\": 42}' --tags paid --key order-42",
    "rmq send store orders 'a reminder' --deliver-at now+1h",
    "tail -f app.log | rmq send store logs --lines",
)


@click.command(epilog=_EXAMPLES)
@appending
@click.argument("topic")
@click.argument("body", required=False)
@click.option("--lines", is_flag=True, help="A message for each line of standard input, as they come.")
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
    allow_network_store: bool,
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
    """Send BODY to TOPIC and print where it went; without BODY all that standard input has is one body.

    What waits for its time is delivered by `rmq serve`, a query of a consumer group, or a broker.
    """
    if lines and body is not None:
        raise click.UsageError("--lines reads standard input, and BODY is a message. Give one of them.")
    row = {
        "tags": tags,
        "keys": list(keys) or None,
        "properties": list(_pairs(properties).items()) or None,
        "queueId": queue_id,
        "shardingKey": sharding_key,
        "delayLevel": delay_level,
        "deliverTimestamp": deliver_at_ms,
    }
    given = {name: value for name, value in row.items() if value is not None}
    with waiting("opening"):
        _refuse_unknown(path, commit_log_path, None if create_topic else topic)
    if body is not None:
        parts = iter([[body.encode(errors="surrogateescape")]])  # it may be no text
    else:
        stream = sys.stdin.buffer
        if stream.isatty():
            say("Reading from the terminal. Ctrl-D ends it.")
        parts = _line_parts(stream) if lines else iter([[stream.read()]])
    sent: list[Any] = []
    try:
        with rmq_spark.open_store(
            path,
            commit_log_path=commit_log_path,
            lock_timeout_ms=round(lock_timeout_s * 1000),
            allow_network_store=allow_network_store,
            create_topic=create_topic,
            flush="sync",
        ) as store:
            for bodies in parts:
                with waiting(f"sending to {topic}"):
                    sent.append(store.send_many(_messages(bodies, given), topic=topic))
    except BaseException:
        if sent:
            say(f"{sum(map(len, sent)):,} messages were sent before.")
        raise
    places = pa.concat_tables(sent).to_pylist() if sent else []
    nothing = "Standard input had no line, so nothing was sent."
    if lines and not as_json:
        columns = ("topic", "queueId", "messages", "firstOffset", "lastOffset")
        show(_by_queue(places), columns, as_json=False, nothing=nothing)
        return
    with rmq_spark.open_reader(path, commit_log_path=commit_log_path) as reader:
        rows = _with_ids(reader, places)
    show(rows, ("topic", "queueId", "queueOffset", "msgId"), as_json=as_json, nothing=nothing)


def _refuse_unknown(path: str, commit_log_path: str | None, topic: str | None) -> None:
    """Raise StorePathError where there is no store: a path with a typing error must not become one. So of a topic."""
    with rmq_spark.open_reader(path, commit_log_path=commit_log_path) as store:
        if topic is not None:
            try:
                store.queues(topic)
            except rmq_spark.NotFoundError as error:
                raise rmq_spark.NotFoundError(f"{error} With --create-topic it is made.") from None


def _pairs(texts: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise click.UsageError(f"--property {text!r} is no NAME=VALUE, as in --property colour=red.")
        pairs[name] = value
    return pairs


def _line_parts(stream: Any) -> Iterator[list[bytes]]:
    """Yield lines as they come, up to a MiB of them at a time; the last one may lack its end."""
    rest = b""
    while read := stream.read1(_AT_ONCE_BYTES):
        *whole, rest = (rest + read).split(b"\n")
        if whole:
            yield [line.removesuffix(b"\r") for line in whole]
    if rest:
        yield [rest]


def _messages(bodies: list[bytes], given: dict[str, Any]) -> pa.Table:
    columns = {name: pa.array([value] * len(bodies), _TYPES[name]) for name, value in given.items()}
    return pa.table({"body": pa.array(bodies, pa.binary()), **columns})


def _by_queue(places: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each queue: lines may be many."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for place in places:
        key = place["topic"], place["queueId"]
        row = rows.setdefault(key, {"topic": key[0], "queueId": key[1], "messages": 0})
        row["messages"] += 1
        row.setdefault("firstOffset", place["queueOffset"])
        row["lastOffset"] = place["queueOffset"]
    return [rows[key] for key in sorted(rows)]


def _with_ids(reader: Any, places: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the places with the messages' ids, read where they went: queue by queue, in one range each."""
    ids: dict[tuple[str, int, int], str] = {}
    reader.refresh()
    wanted = {(place["topic"], place["queueId"]) for place in places}
    queues = [queue for topic in {topic for topic, _ in wanted} for queue in reader.queues(topic)]
    for queue in queues:
        key = queue.topic, queue.queue_id
        offsets = [place["queueOffset"] for place in places if (place["topic"], place["queueId"]) == key]
        if offsets:
            for batch in reader.read(queue, min(offsets), max(offsets) + 1, ["queueOffset", "msgId"]):
                for offset, message_id in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    ids[*key, offset] = message_id
    return [{**place, "msgId": ids.get((place["topic"], place["queueId"], place["queueOffset"]))} for place in places]
