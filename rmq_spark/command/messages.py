"""`rmq cat`: messages of several queues in their stored order. Read-only.

`MessageRanges` finds the queue offsets to print, and with `--follow` waits for new ones. A view of the place
(`queue_views`) merges the batches of all queues.
"""

import difflib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import click
import pyarrow as pa

import rmq_spark
from rmq_spark.command.completion import complete_topics
from rmq_spark.command.message_output import FORMATS, is_file, open_output
from rmq_spark.command.output import is_csv, progress, say
from rmq_spark.command.parameters import TIMES, begin_time, end_time, examples, message_filters
from rmq_spark.command.place import (
    Place,
    PlaceCommand,
    QueueName,
    queue_names_option,
    reads_place,
    spell_limits,
)
from rmq_spark.command.queue_views import BROKER_NAME, Beginning, ClusterView, StoreView, expand_topics, open_view
from rmq_spark.store import count_text
from rmq_spark.store.model import QueueKey

_OFFSET = "queueOffset"
_BUFFERED_MESSAGES = 65_536  # of all queues together
_FIRST_BATCH, _SMALLEST_BATCH = 256, 64  # messages


class MessageRanges:
    """Messages of topics, each once. `on_progress` is called with (read, total) of a round, in messages.

    `list_topics` is called for each round, so that a topic that a pattern matches later is read too.
    """

    def __init__(
        self,
        view: StoreView | ClusterView,
        list_topics: Callable[[], Sequence[str]],
        names: Sequence[QueueName],
        filters: Mapping[str, str | None],
        limit: int | None,
    ) -> None:
        self._view, self._list_topics, self._names, self._filters = view, list_topics, names, filters
        self._buffered = min(_BUFFERED_MESSAGES, max(limit, _SMALLEST_BATCH)) if limit else _BUFFERED_MESSAGES
        self._next: dict[QueueKey, int] = {}
        self._limit = None if any(filters.values()) else limit  # a filter makes the number of reads unknown
        self._read_count = self._total = 0
        self.on_progress: Callable[[int, int], None] = lambda done, total: None

    def rounds(
        self, columns: Sequence[str], begin: Beginning, end_ms: int | None, *, follow: bool
    ) -> Iterator[Iterator[Any]]:
        """Yield the stored messages as tables in their stored order; with `follow`, then new messages forever."""
        columns = list(dict.fromkeys([*columns, *self._view.order_columns, _OFFSET]))
        self._view.refresh()
        ranges = self._first_ranges(begin, end_ms)
        while True:
            self._next |= {queue: end for queue, (_, end) in ranges.items()}
            self._read_count, self._total = 0, sum(end - begin for begin, end in ranges.values())
            if self._limit is not None:
                self._total = min(self._total, self._limit)
            batch_size = max(_SMALLEST_BATCH, self._buffered // max(1, len(ranges)))
            yield self._view.merge({queue: self._read(queue, *ranges[queue], columns, batch_size) for queue in ranges})
            if not follow:
                return
            while not self._view.wait(self._next):
                pass
            ranges = self._new_ranges(begin)

    def _first_ranges(self, begin: Beginning, end_ms: int | None) -> dict[QueueKey, tuple[int, int]]:
        """Return the queue offsets [begin, end) to print, by queue."""
        queues = [queue for topic in self._list_topics() for queue in choose_queues(self._view, topic, self._names)]
        ranges = find_ranges(self._view, queues, begin, end_ms)
        return ranges if begin.last is None else self._last_of(ranges, begin.last)

    def _new_ranges(self, begin: Beginning) -> dict[QueueKey, tuple[int, int]]:
        """Return the offsets that were appended to each queue since the last round; of a new queue or topic all."""
        queues = [queue for topic in self._list_topics() for queue in choose_queues(self._view, topic, self._names)]
        new = [queue for queue in queues if queue not in self._next]
        ranges = find_ranges(self._view, new, self._view.late_beginning(begin), None) if new else {}
        for queue, bounds in self._view.bounds(queues).items():
            if queue in self._next:
                first = self._next[queue]
                if first < bounds.min_offset:
                    say(f"rmq cat: {queue}: {bounds.min_offset - first} messages were deleted before they were printed")
                ranges[queue] = max(first, bounds.min_offset), max(first, bounds.max_offset)
        return ranges

    def _last_of(self, ranges: dict[QueueKey, tuple[int, int]], count: int) -> dict[QueueKey, tuple[int, int]]:
        """Return the ranges shortened to the last `count` messages that match the filters, over all queues."""
        offsets: list[tuple[Any, QueueKey, int]] = []
        for queue, (begin, end) in ranges.items():
            offsets += [(place, queue, offset) for place, offset in self._last_offsets(queue, begin, end, count)]
        kept = sorted(offsets, key=lambda one: (one[0], one[2]), reverse=True)[:count]
        first: dict[QueueKey, int] = {}
        for _, queue, offset in kept:
            first[queue] = min(offset, first.get(queue, offset))
        return {queue: (first.get(queue, end), end) for queue, (_, end) in ranges.items()}

    def _last_offsets(self, queue: QueueKey, begin: int, end: int, count: int) -> list[tuple[Any, int]]:
        """Return place in the order and queue offset of a queue's last `count` messages, reading back from its end."""
        found: list[tuple[Any, int]] = []
        columns = [*self._view.order_columns, _OFFSET]
        batch_size = max(count, _FIRST_BATCH)
        while end > begin and len(found) < count:
            first = max(begin, end - batch_size)
            rows: list[tuple[Any, int]] = []
            try:
                for batch in self._view.read(queue, first, end, columns, **self._filters):
                    *places, offsets = (column.cast(pa.int64()).to_pylist() for column in batch.columns)
                    rows += zip(zip(*places, strict=True), offsets, strict=True)
            except rmq_spark.BackendUnavailableError as error:
                self._view.note_failure(queue, error)
                return found
            found = rows + found
            end, batch_size = first, min(batch_size * 4, _BUFFERED_MESSAGES)
        return _ascending(found[max(0, len(found) - count) :])

    def _read(self, queue: QueueKey, begin: int, end: int, columns: list[str], batch_size: int) -> Iterator[Any]:
        """Yield a queue's messages in batches. The first is small, because the reader may stop early.

        If the broker of the queue goes away, the next round begins after the last message.
        """
        count = min(_FIRST_BATCH, batch_size)
        while begin < end:
            first, stop = begin, min(begin + count, end)
            try:
                for batch in self._view.read(queue, begin, stop, columns, **self._filters):
                    if batch.num_rows:
                        begin = batch.column(_OFFSET)[-1].as_py() + 1
                    yield batch
            except rmq_spark.BackendUnavailableError as error:
                self._next[queue] = begin
                self._view.note_failure(queue, error)
                return
            self._read_count += stop - first
            self.on_progress(min(self._read_count, self._total), self._total)
            begin, count = stop, min(count * 4, batch_size)


def _ascending(found: list[tuple[Any, int]]) -> list[tuple[Any, int]]:
    """Return the messages with places that ascend: the place of each is at most that of the next one."""
    for at in range(len(found) - 2, -1, -1):
        found[at] = min(found[at][0], found[at + 1][0]), found[at][1]
    return found


def choose_queues(view: StoreView | ClusterView, topic: str, names: Sequence[QueueName]) -> list[QueueKey]:
    """Return the queues of a topic with one of these names, or all if there are none.

    Raises UsageError for a name that no queue has.
    """
    queues = view.queues(topic)
    for name in names:
        if not any(name.fits(queue) for queue in queues):
            existing = ", ".join(queue.id_text for queue in queues)
            raise click.UsageError(f"--queue {name} does not exist in topic {topic}. Its queues: {existing}.")
    return [queue for queue in queues if not names or any(name.fits(queue) for name in names)]


def find_ranges(
    view: StoreView | ClusterView, queues: Sequence[QueueKey], begin: Beginning, end_ms: int | None
) -> dict[QueueKey, tuple[int, int]]:
    """Return the queue offsets [begin, end) of each queue that can be read; `begin.last` is ignored."""
    bounds = view.bounds(queues)
    ends = {queue: one.max_offset for queue, one in bounds.items()}
    if end_ms is not None:
        ends = view.offsets_at(bounds, end_ms)
    firsts = dict.fromkeys(bounds, begin.offset or 0)
    if begin.time_ms is not None:
        firsts = view.offsets_at(bounds, begin.time_ms)
    return {queue: (min(max(firsts[queue], one.min_offset), ends[queue]), ends[queue]) for queue, one in bounds.items()}


DEFAULT_COLUMNS = "topic,queueId,queueOffset,commitLogOffset,tags,keys,body,bornTimestamp,storeTimestamp,reconsumeTimes"
_EXAMPLES = examples(
    "rmq cat store orders --last 10",
    "rmq cat store orders --from now-15m --tags 'paid || shipped'",
    "rmq cat store orders payments 'invoice*' --last 10",
    "rmq cat store orders --follow --last 0 --columns keys,body",
    "rmq cat store orders --format parquet --output orders.parquet",
    "rmq cat -n ns1:9876 orders --queue broker-a:0 --limit 10",
)


class _Cat(PlaceCommand):
    """The command, in which `-n NUMBER` is short for `--limit NUMBER`, and `-n HOST:PORT` for `--name-server`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments."""
        spell_limits(args)
        return super().parse_args(ctx, args)


@click.command(cls=_Cat, epilog=f"{TIMES}\n\n{_EXAMPLES}")
@reads_place("topics", are_required=True)
@click.argument("topics", metavar="TOPIC...", nargs=-1, shell_complete=complete_topics)
@queue_names_option
@begin_time
@end_time
@click.option("--offset", type=click.IntRange(min=0), help="First queue offset to print, in each queue.")
@click.option("--last", type=click.IntRange(min=0), metavar="N", help="Only the last N matching messages.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Maximum number of messages; -n N is short for it if N is a number.  [default: unlimited]",
)
@message_filters
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
    place: Place,
    as_data: bool,
    topics: tuple[str, ...],
    queue_names: tuple[QueueName, ...],
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
) -> int:
    """Print the messages of topics in stored order, starting with the oldest.

    TOPIC is a name, a list with commas, or a pattern of a shell in quotes, such as 'order*'.

    Each line contains store time (UTC), topic/queue@offset, tags, keys and body. Bodies that are not UTF-8 are in hex.

    In a cluster the messages of each broker are in stored order, and those of several brokers are ordered by store
    time. A queue that cannot be read is named on stderr; the others are printed, and the exit status is 1. With
    --output no file is written then.
    """
    begin = Beginning(begin_ms, offset, last)
    if sum(one is not None for one in begin) > 1:
        raise click.UsageError("--from, --offset and --last cannot be combined. Give one of them.")
    if follow and end_ms is not None:
        raise click.UsageError("--follow and --to cannot be combined. Give one of them.")
    data = "csv" if is_csv() else "json"
    if as_data and form not in (None, data):
        raise click.UsageError(f"--{data} and --format {form} cannot be combined. Give one of them.")
    form = form or (data if as_data else "text")
    names = _column_names(columns, has_brokers=place.is_cluster)
    filters = {"tags": tags, "sql92": sql92}
    file = None if output == "-" else output
    is_interactive = file is None and not is_file(sys.stdout)
    with ExitStack() as bar, place.open() as reader:
        if file is not None and not place.is_cluster:
            reader.refuse_inside(file)
        view = open_view(place, reader, is_strict=file is not None)
        reader.refresh()
        list_topics = functools.partial(expand_topics, topics, reader.topics, view.readable)
        ranges = MessageRanges(view, list_topics, queue_names, filters, limit)
        with open_output(form, file, names, is_endless=follow, is_plain=columns is not None) as out:
            if not (is_interactive and follow):
                ranges.on_progress = bar.enter_context(progress("reading", "messages"))
            for table in chain.from_iterable(ranges.rounds(names, begin, end_ms, follow=follow)):
                if is_interactive:
                    bar.close()  # the bar and the messages may be on the same terminal
                out.write((table if limit is None else table.slice(0, limit - out.messages)).select(names))
                if limit is not None and out.messages >= limit:
                    break
    if view.is_incomplete:
        return 1
    _print_summary(out.messages, form, file)
    return 0


def _print_summary(count: int, form: str, file: str | None) -> None:
    """Print to stderr the number of messages written to a file, or that no message matches."""
    if file is not None:
        say(f"{count_text(count, 'message')} written to {file}.")
    elif not count and form == "text":
        say("No messages match.")


def _column_names(columns: str | None, *, has_brokers: bool) -> list[str]:
    """Return the column names in a list separated by commas. Raises UsageError for unknown or repeated ones.

    `has_brokers` says that there is a column brokerName.
    """
    known = [*rmq_spark.COLUMNS, *([BROKER_NAME] if has_brokers else [])]
    if columns is None:
        first, *others = DEFAULT_COLUMNS.split(",")
        return [first, *known[len(rmq_spark.COLUMNS) :], *others]
    if columns == "*":
        return known
    names = [name.strip() for name in columns.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown or len(set(names)) < len(names):
        what = f"unknown column {', '.join(unknown)}" if unknown else "a column is repeated"
        lowered = {name.lower(): name for name in known}
        near = [lowered[one] for name in unknown for one in difflib.get_close_matches(name.lower(), lowered, 1)]
        hint = f" Did you mean {' and '.join(near)}?" if near else ""
        raise click.UsageError(f"--columns {columns}: {what}; expected some of: {', '.join(known)}.{hint}")
    return names
