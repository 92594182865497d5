"""`rmq cat`: messages of several queues in the order of their physical offsets. Read-only.

`MessageRanges` finds the queue offsets to print, and with `--follow` polls for new ones. `merge` sorts the batches of
all queues by physical offset: messages up to the smallest last offset of the current batches are complete, and every
queue whose batch is used up reads the next one.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any, NamedTuple

import click
import pyarrow as pa
import pyarrow.compute as pc

import rmq_spark
from rmq_spark.command.message_output import FORMATS, is_file, open_output
from rmq_spark.command.output import progress, say
from rmq_spark.command.parameters import TIMES, begin_time, end_time, examples, reading

PHYSICAL_OFFSET = "commitLogOffset"
_BUFFERED_MESSAGES = 65_536  # of all queues together
_FIRST_BATCH, _SMALLEST_BATCH = 256, 64  # messages
_POLL_S = 0.1


def merge(sources: Mapping[object, Iterator[pa.RecordBatch]]) -> Iterator[pa.Table]:
    """Yield the rows of all sources in ascending order of `commitLogOffset`, by which each source is sorted already.

    It buffers one batch per source, and the table that it yields.
    """
    buffered: dict[object, pa.Table] = {}
    unfinished = dict(sources)
    while True:
        for key in [key for key in unfinished if key not in buffered]:
            batch = next((batch for batch in unfinished[key] if batch.num_rows), None)
            if batch is None:
                del unfinished[key]
            else:
                buffered[key] = pa.Table.from_batches([batch])
        if not buffered:
            return
        # A later batch of a source cannot contain an offset up to this one.
        end = min(table[PHYSICAL_OFFSET][-1].as_py() for table in buffered.values())
        parts = []
        for key, table in list(buffered.items()):
            count = pc.sum(pc.less_equal(table[PHYSICAL_OFFSET], end)).as_py() or 0
            parts.append(table.slice(0, count))
            if count < table.num_rows:
                buffered[key] = table.slice(count)
            else:
                del buffered[key]
        found = pa.concat_tables(parts)
        yield found.take(pc.sort_indices(found[PHYSICAL_OFFSET])) if len(parts) > 1 else found


class Beginning(NamedTuple):
    """The first message to print: at most one field is set; if none is, the first stored message."""

    time_ms: int | None
    offset: int | None
    last: int | None  # this number of messages before the end, counted over all queues


class MessageRanges:
    """Messages of topics, each once. `on_progress` is called with (read, total) of a round, in messages."""

    def __init__(
        self,
        store: Any,
        topics: Sequence[str],
        queue_ids: Sequence[int],
        filters: Mapping[str, str | None],
        limit: int | None,
    ) -> None:
        self._store, self._topics, self._queue_ids, self._filters = store, topics, queue_ids, filters
        self._buffered = min(_BUFFERED_MESSAGES, max(limit, _SMALLEST_BATCH)) if limit else _BUFFERED_MESSAGES
        self._next: dict[Any, int] = {}
        self._limit = None if any(filters.values()) else limit  # a filter makes the number of reads unknown
        self._read_count = self._total = 0
        self.on_progress: Callable[[int, int], None] = lambda done, total: None

    def rounds(
        self, names: Sequence[str], begin: Beginning, end_ms: int | None, *, follow: bool
    ) -> Iterator[Iterator[Any]]:
        """Yield the stored messages as tables sorted by physical offset; with `follow`, then new messages forever."""
        columns = list(dict.fromkeys([*names, PHYSICAL_OFFSET]))
        self._store.refresh()
        ranges = self._first_ranges(begin, end_ms)
        while True:
            self._next |= {queue: end for queue, (_, end) in ranges.items()}
            self._read_count, self._total = 0, sum(end - begin for begin, end in ranges.values())
            if self._limit is not None:
                self._total = min(self._total, self._limit)
            batch_size = max(_SMALLEST_BATCH, self._buffered // max(1, len(ranges)))
            yield merge({queue: self._read(queue, *ranges[queue], columns, batch_size) for queue in ranges})
            if not follow:
                return
            while not self._store.refresh():
                time.sleep(_POLL_S)
            ranges = dict(self._new_ranges())

    def _chosen_queues(self) -> Iterator[Any]:
        """Yield the queues to print. Raises UsageError for a queue id that a topic does not have."""
        for topic in self._topics:
            queues = self._store.queues(topic)
            wrong = set(self._queue_ids) - {queue.queue_id for queue in queues}
            if wrong:
                existing = ", ".join(str(queue.queue_id) for queue in queues)
                raise click.UsageError(f"--queue {min(wrong)} does not exist in topic {topic}. Its queues: {existing}.")
            yield from (queue for queue in queues if not self._queue_ids or queue.queue_id in self._queue_ids)

    def _first_ranges(self, begin: Beginning, end_ms: int | None) -> dict[Any, tuple[int, int]]:
        """Return the queue offsets [begin, end) to print, by queue."""
        ranges = {}
        for queue in self._chosen_queues():
            bounds = self._store.bounds(queue)
            end = bounds.max_offset if end_ms is None else self._store.offset_at_time(queue, end_ms)
            first = begin.offset or 0
            if begin.time_ms is not None:
                first = self._store.offset_at_time(queue, begin.time_ms)
            ranges[queue] = min(max(first, bounds.min_offset), end), end
        return ranges if begin.last is None else self._last_of(ranges, begin.last)

    def _new_ranges(self) -> Iterator[tuple[Any, tuple[int, int]]]:
        """Yield each queue with the offsets that were appended since the last round; a new queue with all."""
        for queue in self._chosen_queues():
            bounds = self._store.bounds(queue)
            first = self._next.get(queue, bounds.min_offset)
            if first < bounds.min_offset:
                say(f"rmq cat: {queue}: {bounds.min_offset - first} messages were deleted before they were printed")
            yield queue, (max(first, bounds.min_offset), max(first, bounds.max_offset))

    def _last_of(self, ranges: dict[Any, tuple[int, int]], count: int) -> dict[Any, tuple[int, int]]:
        """Return the ranges shortened to the last `count` messages that match the filters, over all queues."""
        offsets: list[tuple[int, Any, int]] = []
        for queue, (begin, end) in ranges.items():
            offsets += [(physical, queue, offset) for physical, offset in self._last_offsets(queue, begin, end, count)]
        kept = sorted(offsets, key=lambda one: (one[0], one[2]), reverse=True)[:count]
        first: dict[Any, int] = {}
        for _, queue, offset in kept:
            first[queue] = min(offset, first.get(queue, offset))
        return {queue: (first.get(queue, end), end) for queue, (_, end) in ranges.items()}

    def _last_offsets(self, queue: Any, begin: int, end: int, count: int) -> list[tuple[int, int]]:
        """Return physical and queue offset of a queue's last `count` messages, reading backwards from its end."""
        found: list[tuple[int, int]] = []
        batch_size = max(count, _FIRST_BATCH)
        while end > begin and len(found) < count:
            first = max(begin, end - batch_size)
            rows: list[tuple[int, int]] = []
            for batch in self._store.read(queue, first, end, [PHYSICAL_OFFSET, "queueOffset"], **self._filters):
                rows += zip(*(column.to_pylist() for column in batch.columns), strict=True)
            found = rows + found
            end, batch_size = first, min(batch_size * 4, _BUFFERED_MESSAGES)
        return found[max(0, len(found) - count) :]

    def _read(self, queue: Any, begin: int, end: int, columns: list[str], batch_size: int) -> Iterator[Any]:
        """Yield a queue's messages in batches. The first is small, because the reader may stop early."""
        count = min(_FIRST_BATCH, batch_size)
        while begin < end:
            stop = min(begin + count, end)
            yield from self._store.read(queue, begin, stop, columns, **self._filters)
            self._read_count += stop - begin
            self.on_progress(min(self._read_count, self._total), self._total)
            begin, count = stop, min(count * 4, batch_size)


DEFAULT_COLUMNS = "topic,queueId,queueOffset,commitLogOffset,tags,keys,body,bornTimestamp,storeTimestamp,reconsumeTimes"
_EXAMPLES = examples(
    "rmq cat store orders --last 10",
    "rmq cat store orders --from now-15m --tags 'paid || shipped'",
    "rmq cat store orders --follow --last 0 --columns keys,body",
    "rmq cat store orders --format parquet --output orders.parquet",
)


@click.command(epilog=f"{TIMES}\n\n{_EXAMPLES}")
@reading
@click.argument("topics", metavar="TOPIC...", nargs=-1, required=True)
@click.option("--queue", "queue_ids", type=int, multiple=True, help="Only this queue id. Repeatable.  [default: all]")
@begin_time
@end_time
@click.option("--offset", type=click.IntRange(min=0), help="First queue offset to print, in each queue.")
@click.option("--last", type=click.IntRange(min=0), metavar="N", help="Only the last N matching messages.")
@click.option(
    "-n", "--limit", type=click.IntRange(min=1), metavar="N", help="Maximum number of messages.  [default: unlimited]"
)
@click.option("--tags", help='Only messages with one of these tags: "A || B".')
@click.option("--sql92", help="Only messages whose properties match: \"colour = 'red' AND size > 3\".")
@click.option(
    "--columns",
    metavar="NAMES",
    help="Columns to print, separated by commas, or * for all. Text output separates them by tabs.",
)
@click.option("--format", "form", type=click.Choice(FORMATS), help="Output format.  [default: text]")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Output file, or - for stdout. An existing file is replaced atomically.  [default: -]",
)
@click.option(
    "-f", "--follow", is_flag=True, help="Wait for new messages until Ctrl-C or --limit. JSON: one object per line."
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
    columns: str | None,
    form: str | None,
    output: str | None,
    follow: bool,
) -> None:
    """Print the messages of topics in stored order, starting with the oldest.

    Each line contains store time (UTC), topic/queue@offset, tags, keys and body. Bodies that are not UTF-8 are in hex.
    """
    begin = Beginning(begin_ms, offset, last)
    if sum(one is not None for one in begin) > 1:
        raise click.UsageError("--from, --offset and --last cannot be combined. Give one of them.")
    if follow and end_ms is not None:
        raise click.UsageError("--follow and --to cannot be combined. Give one of them.")
    if as_json and form not in (None, "json"):
        raise click.UsageError(f"--json and --format {form} cannot be combined. Give one of them.")
    form = form or ("json" if as_json else "text")
    names = _column_names(columns or DEFAULT_COLUMNS)
    filters = {"tags": tags, "sql92": sql92}
    file = None if output == "-" else output
    is_interactive = file is None and not is_file(sys.stdout)
    with ExitStack() as bar, rmq_spark.open_reader(path, commit_log_path=commit_log_path) as store:
        if file is not None:
            store.refuse_inside(file)
        ranges = MessageRanges(store, topics, queue_ids, filters, limit)
        with open_output(form, file, names, is_endless=follow, is_plain=columns is not None) as out:
            if not (is_interactive and follow):
                ranges.on_progress = bar.enter_context(progress("reading", "messages"))
            for table in chain.from_iterable(ranges.rounds(names, begin, end_ms, follow=follow)):
                if is_interactive:
                    bar.close()  # the bar and the messages may be on the same terminal
                out.write((table if limit is None else table.slice(0, limit - out.messages)).select(names))
                if limit is not None and out.messages >= limit:
                    break
    _print_summary(out.messages, form, file)


def _print_summary(count: int, form: str, file: str | None) -> None:
    """Print to stderr the number of messages written to a file, or that no message matches."""
    if file is not None:
        say(f"{count:,} messages written to {file}.")
    elif not count and form == "text":
        say("No messages match.")


def _column_names(columns: str) -> list[str]:
    """Return the column names in a list separated by commas. Raises UsageError for unknown or repeated ones."""
    if columns == "*":
        return list(rmq_spark.COLUMNS)
    names = [name.strip() for name in columns.split(",")]
    unknown = [name for name in names if name not in rmq_spark.COLUMNS]
    if unknown or len(set(names)) < len(names):
        what = f"unknown column {', '.join(unknown)}" if unknown else "a column is repeated"
        raise click.UsageError(f"--columns {columns}: {what}; expected some of: {', '.join(rmq_spark.COLUMNS)}.")
    return names
