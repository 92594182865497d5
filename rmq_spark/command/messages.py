"""`rmq cat`: messages in the order in which they were stored, and those that come. It changes nothing."""

import sys
from contextlib import ExitStack
from itertools import chain

import click

import rmq_spark
from rmq_spark.command.message_output import FORMATS, is_file, open_output, refuse_output
from rmq_spark.command.message_ranges import Beginning, MessageRanges
from rmq_spark.command.output import say
from rmq_spark.command.progress import progress
from rmq_spark.command.words import TIMES, begin_time, end_time, examples, reading

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
@click.option("--queue", "queue_ids", type=int, multiple=True, help="Only these queue ids. May be given repeatedly.")
@begin_time
@end_time
@click.option("--offset", type=click.IntRange(min=0), help="From this queue offset on, in each queue.")
@click.option("--last", type=click.IntRange(min=0), metavar="N", help="Only the last N messages that are chosen.")
@click.option("-n", "--limit", type=click.IntRange(min=1), metavar="N", help="End after N messages.")
@click.option("--tags", help='Only messages with one of these tags: "A || B".')
@click.option("--sql92", help="Only messages whose properties say so: \"colour = 'red' AND size > 3\".")
@click.option(
    "--columns",
    metavar="NAMES",
    help="Columns, joined by commas, or * for all. As text they come as they are, with tabs between.",
)
@click.option("--format", "form", type=click.Choice(FORMATS), help="How messages are written.  [default: text]")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="A file; one that is there is replaced when the new one is whole. - for stdout.",
)
@click.option("-f", "--follow", is_flag=True, help="Wait for more, until Ctrl-C or --limit. JSON: an object a line.")
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
    """Print the messages of topics as they were stored, from the first one that is there unless told otherwise.

    A line is: when it was stored (UTC), topic/queue@offset, tags, keys, body. A body that is no text is shown in hex.
    """
    if sum(one is not None for one in (begin_ms, offset, last)) > 1:
        raise click.UsageError("--from, --offset and --last each say where to begin. Give one of them.")
    if follow and end_ms is not None:
        raise click.UsageError("--follow has no end, and --to is one. Leave one of them out.")
    if as_json and form not in (None, "json"):
        raise click.UsageError(f"--json and --format {form} are two formats. Give one of them.")
    form = form or ("json" if as_json else "text")
    names = _names(columns or DEFAULT_COLUMNS)
    filters = {"tags": tags, "sql92": sql92}
    is_seen = output in (None, "-") and not is_file(sys.stdout)
    with ExitStack() as shown, rmq_spark.open_reader(path, commit_log_path=commit_log_path) as store:
        refuse_output(output, store)
        ranges = MessageRanges(store, topics, queue_ids, filters, limit)
        begin = Beginning(begin_ms, offset, last)
        with open_output(form, output, names, is_endless=follow, is_plain=columns is not None) as out:
            if not (is_seen and follow):  # who follows knows that it waits
                ranges.note = shown.enter_context(progress("reading", "messages"))
            for table in chain.from_iterable(ranges.rounds(names, begin, end_ms, follow=follow)):
                if is_seen:
                    shown.close()  # messages are to be seen from here on, maybe on the same terminal
                out.write((table if limit is None else table.slice(0, limit - out.messages)).select(names))
                if limit is not None and out.messages >= limit:
                    break
    _say_how_many(out.messages, form, output)


def _say_how_many(count: int, form: str, output: str | None) -> None:
    """Say how many messages went to a file, or that there is none."""
    if output not in (None, "-"):
        say(f"{count:,} messages are in {output}.")
    elif not count and form == "text":
        say("No message.")


def _names(columns: str) -> list[str]:
    """Return the names of columns, which are all known."""
    if columns == "*":
        return list(rmq_spark.COLUMNS)
    names = [name.strip() for name in columns.split(",")]
    unknown = [name for name in names if name not in rmq_spark.COLUMNS]
    if unknown or len(set(names)) < len(names):
        what = f"has no column {', '.join(unknown)}" if unknown else "names a column twice"
        raise click.UsageError(f"--columns {columns} {what}. Columns are: {', '.join(rmq_spark.COLUMNS)}.")
    return names
