"""`rmq export` and `rmq import`: messages as a Parquet file, and back, each once."""

from pathlib import Path

import click

import rmq_spark
from rmq_spark.command.message_output import may_write_to
from rmq_spark.command.output import print_json, say
from rmq_spark.command.progress import progress
from rmq_spark.command.words import TIMES, appending, begin_time, end_time, examples, reading

_EXPORT_EXAMPLES = examples(
    "rmq export store orders.parquet --topic orders", "rmq export store today.parquet --from now-24h --overwrite"
)
_IMPORT_EXAMPLES = examples("rmq import other-store orders.parquet", "rmq import store orders.parquet --topic again")

_CARRIED = ("topic", "physicalTopic", "queueId", "tags", "keys", "body", "properties", "flag")  # all else is new


@click.command(epilog=f"{TIMES}\n\n{_EXPORT_EXAMPLES}")
@reading
@click.argument("target", metavar="FILE", type=click.Path(dir_okay=False))
@click.option("--topic", "topics", multiple=True, help="Only these; else all but RocketMQ's own.")
@begin_time
@end_time
@click.option(
    "--columns",
    metavar="NAMES",
    help="Only these columns, joined by commas. Without --columns, all: `rmq import` says which ones it misses.",
)
@click.option("--overwrite", is_flag=True, help="Replace a file that is there.")
def export(
    path: str,
    commit_log_path: str | None,
    as_json: bool,
    target: str,
    topics: tuple[str, ...],
    begin_ms: int | None,
    end_ms: int | None,
    columns: str | None,
    overwrite: bool,
) -> None:
    """Write messages with all their columns to FILE (Parquet, zstd). It gets its name when it is whole."""
    if Path(target).exists() and not overwrite:
        raise click.UsageError(f"{target} is there. Give another name, or --overwrite.")
    folder = Path(target).absolute().parent
    if folder.is_dir() and not may_write_to(folder):
        raise click.UsageError(f"{target}: you may not write to the folder {folder}. Give a file in another one.")
    with progress("exporting", "messages") as note:
        done = rmq_spark.export_parquet(
            path,
            target,
            topics=list(topics) or None,
            begin_ms=begin_ms,
            end_ms=end_ms,
            columns=[name.strip() for name in columns.split(",")] if columns else None,
            commit_log_path=commit_log_path,
            overwrite=overwrite,
            progress=note,
        )
    if as_json:
        row = {"path": str(done.path), "messages": done.messages, "bytes": done.bytes, "topics": list(done.topics)}
        print_json([row])
    else:
        say(f"{done.messages:,} messages of {', '.join(done.topics) or 'no topic'} are in {done.path}.")


@click.command("import", epilog=_IMPORT_EXAMPLES)
@appending
@click.argument("source", metavar="FILE", type=click.Path(dir_okay=False, exists=True))
@click.option("--topic", help="Send all of them to this topic.")
@click.option("--name", help="What the import is known by; else by what the file holds, and --topic.")
@click.option("--spread", is_flag=True, help="Let queues take turns, instead of keeping each message's queue.")
def import_(
    path: str,
    commit_log_path: str | None,
    lock_timeout_s: float,
    allow_network_store: bool,
    as_json: bool,
    source: str,
    topic: str | None,
    name: str | None,
    spread: bool,
) -> None:
    """Append the messages of FILE, as `rmq export` wrote it; missing topics are made.

    Called again, after Ctrl-C or a kill too, it goes on where it ended, and sends nothing twice. To send a file twice
    give --name. Ids, hosts and times are those of this sending.
    """
    missing = _missing(source, topic, spread)
    if missing:
        say(f"{source} lacks columns that `rmq export` writes: {', '.join(missing)}. What they say is not imported.")
    noted: list[tuple[int, int]] = []
    try:
        with progress("importing", "messages") as show_progress:

            def note(done: int, total: int) -> None:
                noted[:] = [(done, total)]
                show_progress(done, total)

            done = rmq_spark.import_parquet(
                path,
                source,
                topic=topic,
                name=name,
                keep_queues=not spread,
                commit_log_path=commit_log_path,
                lock_timeout_ms=round(lock_timeout_s * 1000),
                allow_network_store=allow_network_store,
                progress=note,
            )
    except KeyboardInterrupt:
        for count, total in noted:  # a commit may have come through that nobody was told of
            say(f"{count:,} of {total:,} messages are in the store, or more. Call it again to go on from there.")
        raise
    if as_json:
        row = {"name": done.name, "messages": done.messages, "skipped": done.skipped, "topics": list(done.topics)}
        print_json([row])
    else:
        topics = f" Topics: {', '.join(done.topics)}." if done.topics else ""
        say(f"{done.messages:,} messages appended, {done.skipped:,} were there already.{topics}")


def _missing(source: str, topic: str | None, spread: bool) -> list[str]:
    """Return the columns by which a message would be as it was, and which the file does not have."""
    from pyarrow import ArrowException, parquet  # half as long to load as all of the rest

    try:
        there = set(parquet.read_schema(source).names)
    except (ArrowException, OSError):  # the import says what is wrong with it
        return []
    if "properties" in there:  # has tags and keys too
        there |= {"tags", "keys"}
    if topic is not None:
        there |= {"topic", "physicalTopic"}
    if spread:
        there.add("queueId")
    return [name for name in _CARRIED if name not in there]
