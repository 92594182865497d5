"""`rmq cat` and `rmq get`: messages, many and single ones. They change nothing."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import click
import pyarrow as pa

import rmq_spark
from rmq_spark.command.merged import PLACE, merge
from rmq_spark.command.message_output import FORMATS, open_output
from rmq_spark.command.output import print_json, say
from rmq_spark.command.words import begin_time, end_time, reading

_COLUMNS = "topic,queueId,queueOffset,commitLogOffset,tags,keys,body,bornTimestamp,storeTimestamp,reconsumeTimes"
_AT_ONCE = 65_536  # messages that are held of all queues, so that their order can be told
_LOOK_S = 0.1
NOT_FOUND = 3


@click.command(short_help="Messages in the order in which they were stored; --follow.")
@reading
@click.argument("topics", metavar="TOPIC...", nargs=-1, required=True)
@click.option("--queue", "queue_ids", type=int, multiple=True, help="Only these queue ids. May be given repeatedly.")
@begin_time
@end_time
@click.option("--offset", type=click.IntRange(min=0), help="From this queue offset on, in each queue.")
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the last N messages of each queue.")
@click.option("-n", "--limit", type=click.IntRange(min=1), help="End after so many messages.")
@click.option("--tags", help='Only messages with one of these tags: "A || B".')
@click.option("--sql92", help="Only messages whose properties say so: \"colour = 'red' AND size > 3\".")
@click.option("--columns", default=_COLUMNS, metavar="NAMES", help="Columns, joined by commas, or * for all.")
@click.option("--format", "form", type=click.Choice(FORMATS), help="How messages are written.  [default: text]")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="A file, instead of the terminal or a pipe.")
@click.option(
    "-f", "--follow", is_flag=True, help="Wait for more, until Ctrl-C or --limit. JSON is an object a line then."
)
def cat(
    path: str,
    commit_log_path: str | None,
    as_json: bool,
    topics: tuple[str, ...],
    queue_ids: tuple[int, ...],
    begin_ms: int | None,
    end_ms: int | None,
    offset: int | None,
    last: int | None,
    limit: int | None,
    tags: str | None,
    sql92: str | None,
    columns: str,
    form: str | None,
    output: str | None,
    follow: bool,
) -> None:
    """Print the messages of topics, from the first one that is there unless something else is said."""
    if sum(one is not None for one in (begin_ms, offset, last)) > 1:
        raise click.UsageError("--from, --offset and --last each say where to begin. Give one of them.")
    if follow and end_ms is not None:
        raise click.UsageError("--follow has no end, and --to is one. Leave one of them out.")
    if as_json and form not in (None, "json"):
        raise click.UsageError(f"--json and --format {form} are two formats. Give one of them.")
    names = list(rmq_spark.COLUMNS) if columns == "*" else [name.strip() for name in columns.split(",")]
    with rmq_spark.open_reader(path, commit_log_path=commit_log_path) as store:
        run = _Run(store, topics, queue_ids, {"tags": tags, "sql92": sql92})
        with open_output(form or ("json" if as_json else "text"), output, is_endless=follow) as out:
            for table in run.tables(names, (begin_ms, end_ms), offset, last, follow=follow):
                left = table if limit is None else table.slice(0, limit - out.messages)
                out.write(left.select(names))
                if limit is not None and out.messages >= limit:
                    return


class _Run:
    """One `cat`: which queues, and how far each was printed."""

    def __init__(
        self, store: Any, topics: Sequence[str], queue_ids: Sequence[int], wanted: dict[str, str | None]
    ) -> None:
        self._store, self._topics, self._queue_ids, self._wanted = store, topics, queue_ids, wanted
        self._next: dict[Any, int] = {}

    def tables(
        self,
        names: Sequence[str],
        times: tuple[int | None, int | None],
        offset: int | None,
        last: int | None,
        *,
        follow: bool,
    ) -> Iterator[pa.Table]:
        """Yield messages by their place in the log, then, with `follow`, those that come."""
        columns = list(dict.fromkeys([*names, PLACE]))
        is_first = True
        while is_first or follow:
            if self._store.refresh() or is_first:
                sources = {}
                queues = [queue for topic in self._topics for queue in self._chosen(topic)]
                for queue in queues:
                    begin, end = self._range(queue, times, offset, last)
                    self._next[queue] = end
                    sources[queue] = self._read(queue, begin, end, columns, max(64, _AT_ONCE // len(queues)))
                yield from merge(sources)
            else:
                time.sleep(_LOOK_S)
            is_first = False

    def _chosen(self, topic: str) -> list[Any]:
        queues = [q for q in self._store.queues(topic) if not self._queue_ids or q.queue_id in self._queue_ids]
        if not queues:
            there = ", ".join(str(queue.queue_id) for queue in self._store.queues(topic))
            raise click.UsageError(f"topic {topic} has no such queue. Its queues are: {there}.")
        return queues

    def _range(
        self, queue: Any, times: tuple[int | None, int | None], offset: int | None, last: int | None
    ) -> tuple[int, int]:
        """Return the queue offsets [begin, end) that are to be printed next."""
        bounds, (begin_ms, end_ms) = self._store.bounds(queue), times
        end = bounds.max_offset if end_ms is None else self._store.offset_at_time(queue, end_ms)
        if queue in self._next:
            begin = self._next[queue]
            if begin < bounds.min_offset:
                say(f"rmq cat: {queue}: {bounds.min_offset - begin} messages were deleted before they were printed")
        elif begin_ms is not None:
            begin = self._store.offset_at_time(queue, begin_ms)
        elif last is not None:
            begin = end - last
        else:
            begin = offset or 0
        return min(max(begin, bounds.min_offset), end), end

    def _read(self, queue: Any, begin: int, end: int, columns: list[str], at_once: int) -> Iterator[pa.RecordBatch]:
        for first in range(begin, end, at_once):
            yield from self._store.read(queue, first, min(first + at_once, end), columns, **self._wanted)


@click.command(short_help="Show single messages: by id, by key, or by queue and offset.")
@reading
@click.option("--id", "message_id", help="The producer's msgId, or the broker's offsetMsgId.")
@click.option("--key", help="One of the message's keys.")
@click.option("--topic", "topics", multiple=True, help="Look only in these topics. May be given repeatedly.")
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

    Exit status 3 if there is none.
    """
    if sum(one is not None for one in (message_id, key, offset)) != 1:
        raise click.UsageError("One of --id, --key, and --offset with --topic and --queue says which message.")
    if offset is not None and (queue_id is None or len(topics) != 1):
        raise click.UsageError("--offset counts in one queue. Give --topic and --queue too.")
    with rmq_spark.open_reader(path, commit_log_path=commit_log_path) as store:
        store.refresh()
        names = topics or tuple(store.topics())
        if offset is not None:
            places = [(queue, offset) for queue in store.queues(names[0]) if queue.queue_id == queue_id]
        elif message_id is not None:
            places = store.find_message_id(message_id, names)
        else:
            assert key is not None
            places = [place for topic in names for place in _keyed(store, topic, key, is_named=bool(topics))]
        found = [store.message(*place) for place in places]
    if as_json:
        print_json([row for one in found for row in _rows(one.to_arrow())])
    else:
        click.echo("\n\n".join(repr(one) for one in found) or "no such message", err=not found)
    return 0 if found else NOT_FOUND


def _keyed(store: Any, topic: str, key: str, *, is_named: bool) -> list[Any]:
    """Return the places of a topic's messages with a key. A topic that went meanwhile has none, unless it was named."""
    if is_named:
        return list(store.find_key(topic, key))
    with suppress(rmq_spark.NotFoundError):
        return list(store.find_key(topic, key))
    return []


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    return [{**row, "properties": dict(row["properties"] or [])} for row in table.to_pylist()]
