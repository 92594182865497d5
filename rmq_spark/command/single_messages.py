"""`rmq get`: single messages with all properties and the body. Read-only."""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

import click

import rmq_spark
from rmq_spark.command.completion import complete_topics
from rmq_spark.command.output import print_data, printable, rows_of, say, waiting
from rmq_spark.command.parameters import examples
from rmq_spark.command.place import Place, PlaceCommand, QueueName, QueueParameter, reads_place
from rmq_spark.command.queue_views import expand_topics, open_view

NOT_FOUND = 3
_EXAMPLES = examples(
    "rmq get store --key order-42",
    "rmq get store --id 7F00000100002A9F0000000000083C01",
    "rmq get store --topic orders --queue 3 --offset 17 --json",
    "rmq get -n ns1:9876 --topic orders --queue broker-a:3 --offset 17",
)


@click.command(cls=PlaceCommand, epilog=_EXAMPLES, context_settings={"allow_extra_args": True})
@reads_place()
@click.option("--id", "message_id", help="Message id: the producer's msgId, or the broker's offsetMsgId.")
@click.option("--key", help="One of the message's keys.")
@click.option(
    "--topic",
    "topics",
    multiple=True,
    shell_complete=complete_topics,
    help="Search only this topic, a list with commas, or a pattern of a shell. Repeatable.  [default: all]",
)
@click.option(
    "--queue",
    type=QueueParameter(),
    metavar="ID",
    help="Queue id, or in a cluster BROKER:ID; requires --topic and --offset.",
)
@click.option("--offset", type=click.IntRange(min=0), help="Queue offset; requires --topic and --queue.")
def get(
    place: Place,
    as_data: bool,
    message_id: str | None,
    key: str | None,
    topics: tuple[str, ...],
    queue: QueueName | None,
    offset: int | None,
) -> int:
    """Show all messages with an id or a key, or the message at a queue offset, with all properties and the body.

    Ids and keys are searched in RocketMQ's index. If a broker wrote no index (messageIndexEnable), or lost its end in
    a crash, use `rmq cat`. Exit status 3 if no message is found.

    In a cluster the brokers search their own indexes. Without --topic every topic is searched.
    """
    if words := click.get_current_context().args:
        raise click.UsageError(f"unexpected argument {words[0]!r}. Give --key {words[0]} or --id {words[0]}.")
    if sum(one is not None for one in (message_id, key, offset)) != 1:
        raise click.UsageError("Give one of --id, --key, or --offset with --topic and --queue.")
    if offset is not None and (queue is None or len(topics) != 1):
        raise click.UsageError("--offset requires one --topic and --queue.")
    if offset is None and queue is not None:
        raise click.UsageError("--queue requires --topic and --offset.")
    with waiting("searching"), place.open() as store:
        store.refresh()
        positions: list[Any]  # (queue, queue offset)
        names = expand_topics(topics, store.topics)
        if queue is not None and offset is not None:
            positions = _find_offset(store, names, queue, offset)
        else:
            names = names or open_view(place, store).topics()
            if message_id is not None:
                positions = store.find_message_id(message_id, names)
            else:
                positions = _find_key(store, names, key, must_exist=bool(topics))
        found = [store.message(*position) for position in positions]
        for position in positions:
            _report_wrong_crc(store, *position)
    if as_data:
        print_data(row for one in found for row in rows_of(one.to_arrow()))
    elif found:
        texts = (repr(one).replace("\t", "    ").split("\n") for one in found)
        click.echo("\n\n".join("\n".join(map(printable, lines)) for lines in texts))
    else:
        say("No message found.")
    return 0 if found else NOT_FOUND


def _find_offset(store: Any, topics: Sequence[str], name: QueueName, offset: int) -> list[Any]:
    """Return [(queue, offset)], or [] outside of the queue's offsets. Raises UsageError unless one queue is named."""
    if len(topics) != 1:
        raise click.UsageError(f"--offset requires one topic: found {', '.join(topics)}. Name one with --topic.")
    (topic,) = topics
    queues = store.queues(topic)
    chosen = [queue for queue in queues if name.fits(queue)]
    if len(chosen) != 1:
        found = "names several queues" if chosen else "does not exist"
        existing = ", ".join(queue.id_text for queue in queues)
        raise click.UsageError(f"--queue {name} {found} in topic {topic}. Its queues: {existing}.")
    bounds = store.bounds(chosen[0])
    if bounds.min_offset <= offset < bounds.max_offset:
        return [(chosen[0], offset)]
    say(f"{chosen[0]} contains the queue offsets [{bounds.min_offset}, {bounds.max_offset}).")
    return []


def _find_key(store: Any, topics: Sequence[str], key: str | None, *, must_exist: bool) -> list[Any]:
    """Return (queue, queue offset) of the messages with a key. Unless topics `must_exist`, missing ones are skipped."""
    positions: list[Any] = []
    for topic in topics:
        with nullcontext() if must_exist else suppress(rmq_spark.NotFoundError):
            positions += store.find_key(topic, key)
    return positions


def _report_wrong_crc(store: Any, queue: Any, offset: int) -> None:
    """Print a warning if a body does not match its CRC. The message is shown nevertheless."""
    try:
        for _ in store.read(queue, offset, offset + 1, ["body"], check_crc=True):
            pass
    except rmq_spark.DamageError:
        advice = "The broker's disk or memory may be damaged." if queue.broker else "Run `rmq check` for details."
        say(f"{queue}@{offset}: the body's CRC does not match. {advice}")
