"""`rmq send`: one message, one per line of standard input, or those of JSON lines.

Printed messages are stored, in a store durably.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import click
import pyarrow as pa
import pyarrow.compute as pc

import rmq_spark
from rmq_spark.command.completion import complete_topics
from rmq_spark.command.json_lines import LAST_LEVEL, JsonMessages, Part, line_parts
from rmq_spark.command.output import STOPPED, print_data, say, waiting
from rmq_spark.command.parameters import Moment, appending_options, examples
from rmq_spark.command.place import PathFirstCommand, Place, QueueParameter, takes_place
from rmq_spark.command.queue_views import BROKER_NAME
from rmq_spark.command.tables import show

_DEFAULT_QUEUES = 4
_OF_ONE = "options of one message"
_BROKER_LEVELS = 18  # of a broker whose messageDelayLevel is not set
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
# The error of a queue id, which is the same for all messages of the command line.
_WRONG_QUEUE = re.compile(r"row \d+, topic '.*': queueId (-?\d+ is not one of .*), or null for any\.?", re.DOTALL)
_EXAMPLES = examples(
    "rmq send store orders '{\"order\": 42}' --tags paid --key order-42",
    "rmq send store orders 'a reminder' --deliver-at now+1h",
    "tail -f app.log | rmq send store logs --lines",
    "rmq cat s1 orders --columns '*' --json | rmq send s2 orders --from-json -",
    "rmq send -n ns1:9876 orders hello --queue broker-a:0",
)


@click.command(cls=PathFirstCommand, epilog=_EXAMPLES)
@takes_place(appending_options, pulls=False)
@click.argument("topic", shell_complete=complete_topics)
@click.argument("body", required=False)
@click.option("--lines", is_flag=True, help="Send each line of standard input as a message, as it arrives.")
@click.option(
    "--from-json",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    help="Send a message for each JSON line of FILE, or of standard input for -, such as `rmq cat --json` prints.",
)
@click.option("--keep-queues", is_flag=True, help="Send JSON lines to the queues that they name.")
@click.option("--tags", help="The message's tag.")
@click.option("--key", "keys", multiple=True, help="A key for searching the message. Repeatable.")
@click.option("--property", "properties", multiple=True, metavar="NAME=VALUE", help="A user property. Repeatable.")
@click.option(
    "--queue", type=QueueParameter(), metavar="ID", help="Queue id, or in a cluster BROKER:ID.  [default: round robin]"
)
@click.option("--broker", metavar="NAME", help="Broker of the queue, in a cluster.")
@click.option("--sharding-key", help="Messages with the same sharding key go to the same queue, in order.")
@click.option(
    "--delay-level",
    type=click.IntRange(min=1),
    help="Deliver after the delay of this level: 1 is 1 s, 2 is 5 s … 18 is 2 h.",
)
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
    as_data: bool,
    topic: str,
    body: str | None,
    lines: bool,
    from_json: str | None,
    keep_queues: bool,
    create_topic: bool,
    queues: int | None,
    **fields: Any,
) -> None:
    """Send BODY to TOPIC; print the message's queue, offset and id. Without BODY, standard input is the body.

    Delayed messages are delivered by `rmq serve`, a query of a consumer group, or a broker. queueOffset is where they
    wait until then.

    JSON lines have body (text, or null and bodyBase64), tags, keys, properties, shardingKey, flag, delayLevel,
    deliverTimestamp, and with --keep-queues queueId and brokerName. Other fields of `rmq cat --json` are ignored. A
    wrong line ends the command and is named; those before it were sent.

    If a broker may have stored a message and its answer is missing, the exit status is 1. The id of the message is
    printed, so that you can look for it with `rmq get`.
    """
    given = _given_columns(place, fields)
    _check_words(
        {"--lines": lines, "BODY": body is not None, "--from-json": from_json is not None, _OF_ONE: bool(given)},
        {"--queues": (queues is not None, "--create-topic", create_topic)}
        | {"--keep-queues": (keep_queues, "--from-json", from_json is not None)},
    )
    levels = _BROKER_LEVELS
    if not place.is_cluster:
        with waiting("opening"):
            levels = _check_store(place, None if create_topic else topic, fields["delay_level"])
    elif (fields["delay_level"] or 0) > _BROKER_LEVELS:
        say(LAST_LEVEL.format(what="--delay-level", level=fields["delay_level"]))
    sent = _Sent(topic)
    try:
        settings: dict[str, Any] = {"create_topic": create_topic, "queues": queues or _DEFAULT_QUEUES}
        if not place.is_cluster:
            settings["flush"] = "sync"
        with rmq_spark.open_store(**place.arguments, **settings) as store, ExitStack() as opened:
            parts: Iterator[Part]
            explain = None
            if from_json is None:
                parts = (Part(_message_table(bodies, given), range(len(bodies))) for bodies in _body_parts(body, lines))
            else:
                stream = opened.enter_context(click.open_file(from_json, "rb"))
                messages = JsonMessages(
                    stream,
                    "stdin" if from_json == "-" else from_json,
                    keeps_queues=keep_queues,
                    levels=levels,
                    refuses_others=not place.is_cluster,
                )
                parts, explain = messages.parts(), messages.explain
            results = (result for part in parts for result in sent.send(store, part, explain))
            _show(place, results, by_queue=lines or from_json is not None, as_data=as_data)
    except BaseException as error:
        if sent.count or from_json is not None:
            before = f"{sent.count:,} messages were" if sent.count else "Nothing was"
            is_shown = not isinstance(error, KeyboardInterrupt | BrokenPipeError)
            say(f"{before} sent before{' this error:' if is_shown else '.'}")
        if place.is_cluster and isinstance(error, KeyboardInterrupt):
            say("rmq send: stopped. Messages that were being sent may be stored.")
            raise click.exceptions.Exit(STOPPED) from None
        raise


def _check_words(given: dict[str, bool], needs: dict[str, tuple[bool, str, bool]]) -> None:
    """Raise UsageError for two sources of messages, and for an option without the one that it needs."""
    if given["--from-json"] and any(given[name] for name in ("BODY", "--lines", _OF_ONE)):
        raise click.UsageError(f"--from-json cannot be combined with BODY, --lines, or {_OF_ONE}. Leave them out.")
    if given["--lines"] and given["BODY"]:
        raise click.UsageError("--lines and BODY cannot be combined. Give one of them.")
    for name, (is_given, needed, is_there) in needs.items():
        if is_given and not is_there:
            raise click.UsageError(f"{name} requires {needed}.")


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
    """Sends messages, and counts those that were stored."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self.count = 0

    def send(
        self, store: Any, part: Part, explain: Callable[[Part, rmq_spark.OptionError], rmq_spark.OptionError] | None
    ) -> Iterator[pa.Table]:
        """Send messages, and yield where they were stored.

        If one of them is refused, those before it are sent. Then the error of `explain` is raised, if it is given.
        """
        try:
            with waiting(f"sending to {self._topic}"):
                result = store.send_many(part.messages, topic=self._topic)
        except rmq_spark.OptionError as error:
            if explain is None and (found := _WRONG_QUEUE.fullmatch(str(error))) is not None:
                raise rmq_spark.OptionError(f"--queue {found[1]}. Leave --queue out for any queue.") from None
            # A note says that some are stored.
            if explain is None or getattr(error, "__notes__", None):
                raise
            if len(part.lines) == 1:
                raise explain(part, error) from None
        else:
            self.count += len(result)
            yield result
            return
        count = len(part.lines)
        for first, end in ((0, count // 2), (count // 2, count)):
            yield from self.send(store, Part(part.messages.slice(first, end - first), part.lines[first:end]), explain)


def _show(place: Place, results: Iterator[pa.Table], *, by_queue: bool, as_data: bool) -> None:
    """Print a row for each queue, or for each message: the data of many messages as they are sent."""
    names = ["topic", *([BROKER_NAME] if place.is_cluster else []), "queueId"]
    nothing = "Nothing was sent: the input has no messages."
    if by_queue and not as_data:
        show(_by_queue(results), [*names, "messages", "firstOffset", "lastOffset"], as_data=False, nothing=nothing)
        return
    names += ["queueOffset", "msgId"]
    others = ["commitLogOffset", *([] if place.is_cluster else ["storeTimestamp"])]
    with nullcontext() if place.is_cluster else place.open() as reader:
        rows = (row for result in results for row in _rows(reader, result.to_pylist()))
        if as_data:
            print_data(rows, [*names, *others], has_others=False)
        else:
            show(list(rows), names, as_data=False, nothing=nothing)


def _body_parts(body: str | None, lines: bool) -> Iterator[list[bytes]]:
    """Yield lists of bodies: BODY, standard input, or its lines."""
    if body is not None:
        yield [body.encode(errors="surrogateescape")]  # arbitrary bytes are allowed
        return
    stream = sys.stdin.buffer
    if stream.isatty():
        say("Reading the message from the terminal. Ctrl-D ends it.")
    if lines:
        yield from line_parts(stream)
    else:
        yield [stream.read()]


def _check_store(place: Place, topic: str | None, delay_level: int | None) -> int:
    """Return the number of the store's delay levels.

    Raises StorePathError or NotFoundError unless store and topic exist: a mistyped name must not create them. Raises
    UsageError for a delay level that the store does not have, which RocketMQ would take for the last one.
    """
    with place.open() as store:
        count: int = store.delay_level_count()
        if delay_level is not None and delay_level > count:
            raise click.UsageError(
                f"--delay-level {delay_level}: the store has the levels 1 to {count}; expected one of them. For "
                "another delay give --deliver-at, such as now+3h."
            )
        if topic is not None:
            try:
                store.queues(topic)
            except rmq_spark.NotFoundError as error:
                raise rmq_spark.NotFoundError(f"{error} Add --create-topic to create it.") from None
        return count


def _parse_properties(texts: tuple[str, ...]) -> dict[str, str]:
    """Return the properties given as NAME=VALUE. Raises UsageError for other texts."""
    pairs = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise click.UsageError(f"--property {text!r} is not of the form NAME=VALUE, such as colour=red.")
        pairs[name] = value
    return pairs


def _message_table(bodies: list[bytes], given: dict[str, Any]) -> pa.Table:
    """Return a message for each body; all have the `given` values."""
    columns = {name: pa.array([value] * len(bodies), _TYPES[name]) for name, value in given.items()}
    return pa.table({"body": pa.array(bodies, pa.binary()), **columns})


def _by_queue(results: Iterator[pa.Table]) -> list[dict[str, Any]]:
    """Return one row per queue with the number of messages and their first and last offset."""
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for result in results:
        names = [name for name in ("topic", BROKER_NAME, "queueId") if name in result.column_names]
        all_rows = pc.CountOptions(mode="all")  # a broker's answer may lack the offset
        found = result.group_by(names).aggregate(
            [("queueOffset", "count", all_rows), ("queueOffset", "min"), ("queueOffset", "max")]
        )
        for one in found.to_pylist():
            key = one["topic"], one.get(BROKER_NAME, ""), one["queueId"]
            row = rows.setdefault(key, {"topic": key[0], BROKER_NAME: key[1], "queueId": key[2], "messages": 0})
            row["messages"] += one["queueOffset_count"]
            for name, choose in (("firstOffset", min), ("lastOffset", max)):
                known = [row.get(name), one[f"queueOffset_{choose.__name__}"]]
                row[name] = choose((offset for offset in known if offset is not None), default=None)
    return [rows[key] for key in sorted(rows)]


def _rows(reader: Any, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of a part with message ids, which are read from a store in one range per queue."""
    if reader is None:
        return results
    ids: dict[tuple[str, int, int], str] = {}
    offsets: dict[tuple[str, int], list[int]] = {}
    for result in results:
        offsets.setdefault((result["topic"], result["queueId"]), []).append(result["queueOffset"])
    reader.refresh()
    for queue in [queue for topic in {topic for topic, _ in offsets} for queue in reader.queues(topic)]:
        if found := offsets.get((queue.topic, queue.queue_id)):
            for batch in reader.read(queue, min(found), max(found) + 1, ["queueOffset", "msgId"]):
                for offset, message_id in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    ids[queue.topic, queue.queue_id, offset] = message_id
    keys = [(result["topic"], result["queueId"], result["queueOffset"]) for result in results]
    return [{**result, "msgId": ids.get(key)} for result, key in zip(results, keys, strict=True)]
