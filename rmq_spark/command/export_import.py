"""`rmq export` and `rmq import`: write messages to a Parquet file, and send them to a store or a cluster."""

from pathlib import Path
from typing import Any

import click

import rmq_spark
from rmq_spark.command.completion import complete_topics
from rmq_spark.command.message_output import is_writable
from rmq_spark.command.output import STOPPED, print_data, progress, say, typed
from rmq_spark.command.parameters import TIMES, appending_options, begin_time, end_time, examples
from rmq_spark.command.place import PathFirstCommand, Place, takes_place
from rmq_spark.command.queue_views import expand_topics, has_patterns, split_topics
from rmq_spark.store import count_text

_EXPORT_EXAMPLES = examples(
    "rmq export store orders.parquet --topic orders",
    "rmq export store today.parquet --from now-24h --overwrite",
    "rmq export -n ns1:9876 orders.parquet --topic orders",
)
_IMPORT_EXAMPLES = examples(
    "rmq import other-store orders.parquet",
    "rmq import store orders.parquet --topic again",
    "rmq import -n ns1:9876 orders.parquet --spread",
)

_BROKER_DOWN_MS = 60_000  # how long an import waits for a broker that stores nothing: it may be restarting
# The columns that an import keeps, in a cluster with brokerName. All others get new values.
_IMPORTED = ("topic", "physicalTopic", "queueId", "tags", "keys", "body", "properties", "flag")


@click.command(cls=PathFirstCommand, epilog=f"{TIMES}\n\n{_EXPORT_EXAMPLES}")
@takes_place()
@click.argument("target", metavar="FILE", type=click.Path(dir_okay=False))
@click.option(
    "--topic",
    "topics",
    multiple=True,
    shell_complete=complete_topics,
    help="Only this topic, a list with commas, or a pattern of a shell. Repeatable.  "
    "[default: all except RocketMQ's own]",
)
@begin_time
@end_time
@click.option(
    "--columns",
    metavar="NAMES",
    help="Only these columns, separated by commas. `rmq import` needs some of them.  [default: all]",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
def export(
    place: Place,
    as_data: bool,
    target: str,
    topics: tuple[str, ...],
    begin_ms: int | None,
    end_ms: int | None,
    columns: str | None,
    overwrite: bool,
) -> None:
    """Write messages to FILE (Parquet, zstd). FILE appears only when it is complete.

    The file of a cluster has the column brokerName. A queue that cannot be read is an error, and then no file is
    written.
    """
    if Path(target).exists() and not overwrite:
        raise click.UsageError(f"{target} exists already. Give another name, or add --overwrite.")
    folder = Path(target).absolute().parent
    if folder.is_dir() and not is_writable(folder):
        raise click.UsageError(f"{target}: the folder {folder} is not writable. Choose another folder.")
    names = split_topics(topics)
    if has_patterns(names):
        with place.open() as reader:
            reader.refresh()
            names = expand_topics(names, reader.topics)
    with progress("exporting", "messages") as on_progress:
        done = rmq_spark.export_parquet(
            target=target,
            topics=list(dict.fromkeys(names)) or None,
            begin_ms=begin_ms,
            end_ms=end_ms,
            columns=[name.strip() for name in columns.split(",")] if columns else None,
            overwrite=overwrite,
            progress=on_progress,
            **place.arguments,
        )
    if as_data:
        row = {"path": str(done.path), "messages": done.messages, "bytes": done.bytes, "topics": list(done.topics)}
        print_data([row])
    else:
        say(f"{count_text(done.messages, 'message')} of {', '.join(done.topics) or 'no topic'} written to {done.path}.")


@click.command("import", cls=PathFirstCommand, epilog=_IMPORT_EXAMPLES)
@takes_place(appending_options, pulls=False)
@click.argument("source", metavar="FILE", type=click.Path(dir_okay=False, exists=True))
@click.option("--topic", shell_complete=complete_topics, help="Destination topic.  [default: the topics in FILE]")
@click.option(
    "--name", help="Name that identifies the import when it is resumed.  [default: contents of FILE and --topic]"
)
@click.option("--spread", is_flag=True, help="Distribute messages round robin, instead of keeping their queues.")
@click.option(
    "--skip",
    "skip_rows",
    type=click.IntRange(min=0),
    metavar="ROWS",
    help="Leave out this number of rows at the beginning, which an import into a cluster has certainly stored.",
)
def import_(
    place: Place,
    as_data: bool,
    source: str,
    topic: str | None,
    name: str | None,
    spread: bool,
    skip_rows: int | None,
) -> None:
    """Append the messages of FILE, a Parquet file such as `rmq export` writes. Missing topics are created.

    Each message is imported once: a repeated call, also after Ctrl-C or a kill, resumes the import. To import a file
    twice, give --name. Messages get new ids, hosts and times.

    A cluster does not recognise an import, so there each message is sent at least once: a repeated call sends all
    messages again, with the same ids, or those after --skip. An import that stops prints the number for --skip.
    """
    if skip_rows is not None and not place.is_cluster:
        raise click.UsageError("--skip is for a cluster: an import into a store resumes by itself. Leave it out.")
    missing = _missing_columns(source, topic, spread)
    if missing:
        say(f"{source} lacks columns that `rmq export` writes: {', '.join(missing)}. They are not imported.")
    arguments = {**place.arguments, "source": source, "topic": topic, "name": name, "keep_queues": not spread}
    if place.is_cluster:
        arguments |= {"broker_down_timeout_ms": _BROKER_DOWN_MS, "skip_rows": skip_rows or 0}
    done = _import(place, arguments)
    if as_data:
        row = {"name": done.name, "messages": done.messages, "skipped": done.skipped, "topics": list(done.topics)}
        print_data([row])
        return
    topics = f" Topics: {', '.join(done.topics)}." if done.topics else ""
    if place.is_cluster:
        skipped = f", {done.skipped:,} skipped" if done.skipped else ""
        say(f"{count_text(done.messages, 'message')} sent{skipped}.{topics}")
    else:
        say(f"{count_text(done.messages, 'message')} appended, {done.skipped:,} skipped as imported before.{topics}")


def _import(place: Place, arguments: dict[str, Any]) -> Any:
    """Import a file, and show the progress. After Ctrl-C say how many messages are stored."""
    latest: list[tuple[int, int]] = []
    try:
        with progress("importing", "messages") as show_progress:

            def on_progress(done: int, total: int) -> None:
                latest[:] = [(done, total)]
                show_progress(done, total)

            return rmq_spark.import_parquet(**arguments, progress=on_progress)
    except KeyboardInterrupt as stop:
        if place.is_cluster:
            for note in getattr(stop, "__notes__", ()):
                say(typed(note.replace("rmq: ", "rmq import: stopped: ", 1)))
            raise click.exceptions.Exit(STOPPED) from None
        for count, total in latest:  # a later commit may have succeeded before its progress was reported
            say(f"At least {count:,} of {total:,} messages are in the store. Repeat the command to resume.")
        raise


def _missing_columns(source: str, topic: str | None, spread: bool) -> list[str]:
    """Return the columns that an import would use and the file does not have."""
    from pyarrow import ArrowException, parquet  # slow to import, so only where it is used

    try:
        columns = set(parquet.read_schema(source).names)
    except (ArrowException, OSError):  # the import reports the error
        return []
    if "properties" in columns:  # they contain tags and keys
        columns |= {"tags", "keys"}
    if topic is not None:
        columns |= {"topic", "physicalTopic"}
    if spread:
        columns.add("queueId")
    return [name for name in _IMPORTED if name not in columns]
