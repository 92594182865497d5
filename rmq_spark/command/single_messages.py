"""`rmq get`: single messages, whole. It changes nothing."""

from contextlib import suppress
from typing import Any

import click

import rmq_spark
from rmq_spark.command.output import print_json, printable, rows_of, say
from rmq_spark.command.progress import waiting
from rmq_spark.command.words import examples, reading

NOT_FOUND = 3
_EXAMPLES = examples(
    "rmq get store --key order-42",
    "rmq get store --id 7F00000100002A9F0000000000083C01",
    "rmq get store --topic orders --queue 3 --offset 17 --json",
)


@click.command(epilog=_EXAMPLES, context_settings={"allow_extra_args": True})
@reading
@click.option("--id", "message_id", help="The producer's msgId, or the broker's offsetMsgId.")
@click.option("--key", help="One of the message's keys.")
@click.option("--topic", "topics", multiple=True, help="Look only in this topic. May be given repeatedly.")
@click.option("--queue", "queue_id", type=int, help="With --topic and --offset: the queue's id.")
@click.option("--offset", type=click.IntRange(min=0), help="With --topic and --queue: the queue offset.")
def get(
    path: str,
    commit_log_path: str | None,
    as_json: bool,
    message_id: str | None,
    key: str | None,
    topics: tuple[str, ...],
    queue_id: int | None,
    offset: int | None,
) -> int:
    """Show every message with an id or a key, or the one at a place, with all properties and the body.

    Ids and keys are found by RocketMQ's index, which a broker may lack (messageIndexEnable) or lose the end of after a
    crash: `rmq cat` reads on. Exit status 3 if there is no such message.
    """
    _refuse_bare(click.get_current_context().args)
    if sum(one is not None for one in (message_id, key, offset)) != 1:
        raise click.UsageError("Say which message: --id, --key, or --offset with --topic and --queue.")
    if offset is not None and (queue_id is None or len(topics) != 1):
        raise click.UsageError("--offset counts in one queue. Give --topic and --queue too.")
    if offset is None and queue_id is not None:
        raise click.UsageError("--queue goes with --topic and --offset.")
    with waiting("looking"), rmq_spark.open_reader(path, commit_log_path=commit_log_path) as store:
        store.refresh()
        names = topics or tuple(store.topics())
        places: list[Any]
        if offset is not None:
            places = _place(store, names[0], queue_id, offset)
        elif message_id is not None:
            places = store.find_message_id(message_id, names)
        else:
            assert key is not None
            places = [place for topic in names for place in _keyed(store, topic, key, is_named=bool(topics))]
        found = [store.message(*place) for place in places]
        for queue, at in places:
            _say_of_crc(store, queue, at)
    if as_json:
        print_json(row for one in found for row in rows_of(one.to_arrow()))
    elif found:
        click.echo("\n\n".join(_shown(repr(one)) for one in found))
    else:
        say("There is no such message.")
    return 0 if found else NOT_FOUND


def _refuse_bare(words: list[str]) -> None:
    """Raise UsageError for words of which nobody can say whether they are ids or keys."""
    if words:
        raise click.UsageError(f"What is {words[0]!r}? A key is given as --key {words[0]}, an id as --id {words[0]}.")


def _place(store: Any, topic: str, queue_id: int | None, offset: int) -> list[Any]:
    """Return the place, if a message is there. Raises UsageError for a queue that is none."""
    queues = store.queues(topic)
    for queue in queues:
        if queue.queue_id == queue_id:
            held = store.bounds(queue)
            if held.min_offset <= offset < held.max_offset:
                return [(queue, offset)]
            say(f"{queue} holds the queue offsets [{held.min_offset}, {held.max_offset}).")
            return []
    there = ", ".join(str(queue.queue_id) for queue in queues)
    raise click.UsageError(f"--queue {queue_id}: topic {topic} has no such queue. Its queues are: {there}.")


def _keyed(store: Any, topic: str, key: str, *, is_named: bool) -> list[Any]:
    """Return the places of a topic's messages with a key. A topic that went meanwhile has none, unless it was named."""
    if is_named:
        return list(store.find_key(topic, key))
    with suppress(rmq_spark.NotFoundError):
        return list(store.find_key(topic, key))
    return []


def _say_of_crc(store: Any, queue: Any, offset: int) -> None:
    """Say so if a body is not the one that was sent: it is shown nevertheless."""
    try:
        for _ in store.read(queue, offset, offset + 1, ["body"], check_crc=True):
            pass
    except rmq_spark.DamageError:
        say(f"{queue}@{offset}: the body's CRC does not match. `rmq check` says more.")


def _shown(text: str) -> str:
    """Return the lines without control characters."""
    return "\n".join(printable(line.replace("\t", "    ")) for line in text.split("\n"))
