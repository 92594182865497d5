"""`rmq send`: one message, or one per line of standard input. Printed messages are durable."""

import sys
from collections.abc import Iterator
from typing import Any

import click
import pyarrow as pa

import rmq_spark
from rmq_spark.command.output import say, waiting
from rmq_spark.command.parameters import Moment, appending, examples
from rmq_spark.command.tables import show

_READ_BYTES = 1 << 20
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
@click.option("--lines", is_flag=True, help="Send each line of standard input as a message, as it arrives.")
@click.option("--tags", help="The message's tag.")
@click.option("--key", "keys", multiple=True, help="A key for searching the message. Repeatable.")
@click.option("--property", "properties", multiple=True, metavar="NAME=VALUE", help="A user property. Repeatable.")
@click.option("--queue", "queue_id", type=int, help="Queue id.  [default: round robin]")
@click.option("--sharding-key", help="Messages with the same sharding key go to the same queue, in order.")
@click.option("--delay-level", type=int, help="Deliver after the delay of this level: 1 is 1 s, 2 is 5 s … 18 is 2 h.")
@click.option("--deliver-at", "deliver_at_ms", type=Moment(), metavar="TIME", help="Deliver at this time.")
@click.option("--create-topic", is_flag=True, help="Create the topic, with 4 queues, if it does not exist.")
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
    """Send BODY to TOPIC; print the message's queue, offset and id. Without BODY, standard input is the body.

    Delayed messages are delivered by `rmq serve`, a query of a consumer group, or a broker.
    """
    if lines and body is not None:
        raise click.UsageError("--lines and BODY cannot be combined. Give one of them.")
    row = {
        "tags": tags,
        "keys": list(keys) or None,
        "properties": list(_parse_properties(properties).items()) or None,
        "queueId": queue_id,
        "shardingKey": sharding_key,
        "delayLevel": delay_level,
        "deliverTimestamp": deliver_at_ms,
    }
    given = {name: value for name, value in row.items() if value is not None}
    with waiting("opening"):
        _require_store(path, commit_log_path, None if create_topic else topic)
    if body is not None:
        parts = iter([[body.encode(errors="surrogateescape")]])  # arbitrary bytes are allowed
    else:
        stream = sys.stdin.buffer
        if stream.isatty():
            say("Reading the message from the terminal. Ctrl-D ends it.")
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
                    sent.append(store.send_many(_message_table(bodies, given), topic=topic))
    except BaseException:
        if sent:
            say(f"{sum(map(len, sent)):,} messages were sent before.")
        raise
    results = pa.concat_tables(sent).to_pylist() if sent else []
    nothing = "Nothing was sent: standard input has no lines."
    if lines and not as_json:
        names = ("topic", "queueId", "messages", "firstOffset", "lastOffset")
        show(_by_queue(results), names, as_json=False, nothing=nothing)
        return
    with rmq_spark.open_reader(path, commit_log_path=commit_log_path) as reader:
        rows = _with_ids(reader, results)
    show(rows, ("topic", "queueId", "queueOffset", "msgId"), as_json=as_json, nothing=nothing)


def _require_store(path: str, commit_log_path: str | None, topic: str | None) -> None:
    """Raise StorePathError or NotFoundError unless store and topic exist: a mistyped name must not create them."""
    with rmq_spark.open_reader(path, commit_log_path=commit_log_path) as store:
        if topic is not None:
            try:
                store.queues(topic)
            except rmq_spark.NotFoundError as error:
                raise rmq_spark.NotFoundError(f"{error} Add --create-topic to create it.") from None


def _parse_properties(texts: tuple[str, ...]) -> dict[str, str]:
    """Return the properties given as NAME=VALUE. Raises UsageError for other texts."""
    pairs = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise click.UsageError(f"--property {text!r} is not of the form NAME=VALUE, such as colour=red.")
        pairs[name] = value
    return pairs


def _line_parts(stream: Any) -> Iterator[list[bytes]]:
    """Yield lists of complete lines as they arrive, at most 1 MiB at a time. The last line may lack its line end."""
    rest = b""
    while read := stream.read1(_READ_BYTES):
        *whole, rest = (rest + read).split(b"\n")
        if whole:
            yield [line.removesuffix(b"\r") for line in whole]
    if rest:
        yield [rest]


def _message_table(bodies: list[bytes], given: dict[str, Any]) -> pa.Table:
    """Return a message for each body; all have the `given` values."""
    columns = {name: pa.array([value] * len(bodies), _TYPES[name]) for name, value in given.items()}
    return pa.table({"body": pa.array(bodies, pa.binary()), **columns})


def _by_queue(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per queue with the number of messages and their first and last offset."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for result in results:
        key = result["topic"], result["queueId"]
        row = rows.setdefault(key, {"topic": key[0], "queueId": key[1], "messages": 0})
        row["messages"] += 1
        row.setdefault("firstOffset", result["queueOffset"])
        row["lastOffset"] = result["queueOffset"]
    return [rows[key] for key in sorted(rows)]


def _with_ids(reader: Any, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results with message ids, which are read back from the store in one range per queue."""
    ids: dict[tuple[str, int, int], str] = {}
    reader.refresh()
    topics = {result["topic"] for result in results}
    for queue in [queue for topic in topics for queue in reader.queues(topic)]:
        key = queue.topic, queue.queue_id
        offsets = [result["queueOffset"] for result in results if (result["topic"], result["queueId"]) == key]
        if offsets:
            for batch in reader.read(queue, min(offsets), max(offsets) + 1, ["queueOffset", "msgId"]):
                for offset, message_id in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    ids[*key, offset] = message_id
    keys = [(result["topic"], result["queueId"], result["queueOffset"]) for result in results]
    return [{**result, "msgId": ids.get(key)} for result, key in zip(results, keys, strict=True)]
