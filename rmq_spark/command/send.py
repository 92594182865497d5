"""`rmq send`: one message, or one per line of standard input. Printed messages are stored, in a store durably."""

import sys
from collections.abc import Iterator
from typing import Any

import click
import pyarrow as pa

import rmq_spark
from rmq_spark.command.output import STOPPED, say, waiting
from rmq_spark.command.parameters import Moment, appending_options, examples
from rmq_spark.command.place import PathFirstCommand, Place, QueueParameter, takes_place
from rmq_spark.command.queue_views import BROKER_NAME
from rmq_spark.command.tables import show

_READ_BYTES = 1 << 20
_DEFAULT_QUEUES = 4
_TYPES = {
    "tags": pa.string(),
    "keys": pa.list_(pa.string()),
    "properties": pa.map_(pa.string(), pa.string()),
    "queueId": pa.int32(),
    BROKER_NAME: pa.string(),
    "shardingKey": pa.string(),
    "delayLevel": pa.int32(),
    "deliverTimestamp": pa.int64(),
}
_EXAMPLES = examples(
    "rmq send store orders '{\"order\": 42}' --tags paid --key order-42",
    "rmq send store orders 'a reminder' --deliver-at now+1h",
    "tail -f app.log | rmq send store logs --lines",
    "rmq send -n ns1:9876 orders hello --queue broker-a:0",
)


@click.command(cls=PathFirstCommand, epilog=_EXAMPLES)
@takes_place(appending_options, pulls=False)
@click.argument("topic")
@click.argument("body", required=False)
@click.option("--lines", is_flag=True, help="Send each line of standard input as a message, as it arrives.")
@click.option("--tags", help="The message's tag.")
@click.option("--key", "keys", multiple=True, help="A key for searching the message. Repeatable.")
@click.option("--property", "properties", multiple=True, metavar="NAME=VALUE", help="A user property. Repeatable.")
@click.option(
    "--queue", type=QueueParameter(), metavar="ID", help="Queue id, or in a cluster BROKER:ID.  [default: round robin]"
)
@click.option("--broker", metavar="NAME", help="Broker of the queue, in a cluster.")
@click.option("--sharding-key", help="Messages with the same sharding key go to the same queue, in order.")
@click.option("--delay-level", type=int, help="Deliver after the delay of this level: 1 is 1 s, 2 is 5 s … 18 is 2 h.")
@click.option("--deliver-at", "deliver_at_ms", type=Moment(), metavar="TIME", help="Deliver at this time.")
@click.option("--create-topic", is_flag=True, help="Create the topic if it does not exist.")
@click.option(
    "--queues",
    type=click.IntRange(min=1),
    metavar="N",
    help="Queues of a topic that is created, in a cluster on each broker.  [default: 4]",
)
def send(
    place: Place,
    as_json: bool,
    topic: str,
    body: str | None,
    lines: bool,
    create_topic: bool,
    queues: int | None,
    **fields: Any,
) -> None:
    """Send BODY to TOPIC; print the message's queue, offset and id. Without BODY, standard input is the body.

    Delayed messages are delivered by `rmq serve`, a query of a consumer group, or a broker. queueOffset is where they
    wait until then.

    If a broker may have stored a message and its answer is missing, the exit status is 1. The id of the message is
    printed, so that you can look for it with `rmq get`.
    """
    if lines and body is not None:
        raise click.UsageError("--lines and BODY cannot be combined. Give one of them.")
    if queues is not None and not create_topic:
        raise click.UsageError("--queues requires --create-topic.")
    given = _given_columns(place, fields)
    if not place.is_cluster:
        with waiting("opening"):
            _require_store(place, None if create_topic else topic)
    sent = _Sent(topic, given)
    try:
        settings: dict[str, Any] = {"create_topic": create_topic, "queues": queues or _DEFAULT_QUEUES}
        if not place.is_cluster:
            settings["flush"] = "sync"
        with rmq_spark.open_store(**place.arguments, **settings) as store:
            for bodies in _body_parts(body, lines):
                with waiting(f"sending to {topic}"):
                    sent.add(store, bodies)
    except BaseException as error:
        if sent.count:
            say(f"{sent.count:,} messages were sent before.")
        if place.is_cluster and isinstance(error, KeyboardInterrupt):
            say("rmq send: stopped. Messages that were being sent may be stored.")
            raise click.exceptions.Exit(STOPPED) from None
        raise
    sent.show(place, by_queue=lines and not as_json, as_json=as_json)


def _given_columns(place: Place, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the columns that the options give. Raises UsageError for options that do not fit."""
    queue, broker = fields["queue"], fields["broker"]
    if broker is not None and queue is None:
        raise click.UsageError("--broker requires --queue.")
    brokers = {name for name in (broker, queue.broker if queue else None) if name}
    if len(brokers) > 1:
        raise click.UsageError(f"--queue {queue} and --broker {broker} name two brokers. Give one of them.")
    if brokers and not place.is_cluster:
        raise click.UsageError(f"the broker {brokers.pop()} was given, but PATH is a store. Leave it out.")
    row = {
        "tags": fields["tags"],
        "keys": list(fields["keys"]) or None,
        "properties": list(_parse_properties(fields["properties"]).items()) or None,
        "queueId": None if queue is None else queue.queue_id,
        BROKER_NAME: brokers.pop() if brokers else None,
        "shardingKey": fields["sharding_key"],
        "delayLevel": fields["delay_level"],
        "deliverTimestamp": fields["deliver_at_ms"],
    }
    return {name: value for name, value in row.items() if value is not None}


class _Sent:
    """Messages of one call, and where they were stored."""

    def __init__(self, topic: str, given: dict[str, Any]) -> None:
        self._topic, self._given = topic, given
        self._tables: list[pa.Table] = []

    @property
    def count(self) -> int:
        """The number of messages that were stored."""
        return sum(map(len, self._tables))

    def add(self, store: Any, bodies: list[bytes]) -> None:
        """Send a message for each body."""
        self._tables.append(store.send_many(_message_table(bodies, self._given), topic=self._topic))

    def show(self, place: Place, *, by_queue: bool, as_json: bool) -> None:
        """Print a row for each message, or for each queue."""
        results = pa.concat_tables(self._tables).to_pylist() if self._tables else []
        nothing = "Nothing was sent: standard input has no lines."
        names = ["topic", *([BROKER_NAME] if place.is_cluster else []), "queueId"]
        if by_queue:
            names += ["messages", "firstOffset", "lastOffset"]
            show(_by_queue(results), names, as_json=False, nothing=nothing)
            return
        if not place.is_cluster:
            with place.open() as reader:
                results = _with_ids(reader, results)
        show(results, [*names, "queueOffset", "msgId"], as_json=as_json, nothing=nothing)


def _body_parts(body: str | None, lines: bool) -> Iterator[list[bytes]]:
    """Yield lists of bodies: BODY, standard input, or its lines."""
    if body is not None:
        yield [body.encode(errors="surrogateescape")]  # arbitrary bytes are allowed
        return
    stream = sys.stdin.buffer
    if stream.isatty():
        say("Reading the message from the terminal. Ctrl-D ends it.")
    if lines:
        yield from _line_parts(stream)
    else:
        yield [stream.read()]


def _require_store(place: Place, topic: str | None) -> None:
    """Raise StorePathError or NotFoundError unless store and topic exist: a mistyped name must not create them."""
    with place.open() as store:
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
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for result in results:
        key = result["topic"], result.get(BROKER_NAME, ""), result["queueId"]
        row = rows.setdefault(key, {"topic": key[0], BROKER_NAME: key[1], "queueId": key[2], "messages": 0})
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
