"""`rmq export` and `rmq import`: write messages to a Parquet file, and append them to a store, each once."""

from pathlib import Path

import click

import rmq_spark
from rmq_spark.command.message_output import is_writable
from rmq_spark.command.output import print_json, progress, say
from rmq_spark.command.parameters import TIMES, appending, begin_time, end_time, examples, reading

_EXPORT_EXAMPLES = examples(
    "rmq export store orders.parquet --topic orders", "rmq export store today.parquet --from now-24h --overwrite"
)
_IMPORT_EXAMPLES = examples("rmq import other-store orders.parquet", "rmq import store orders.parquet --topic again")

# The columns that an import keeps. All others get new values.
_IMPORTED = ("topic", "physicalTopic", "queueId", "tags", "keys", "body", "properties", "flag")


@click.command(epilog=f"{TIMES}\n\n{_EXPORT_EXAMPLES}")
@reading
@click.argument("target", metavar="FILE", type=click.Path(dir_okay=False))
@click.option(
    "--topic", "topics", multiple=True, help="Only this topic. Repeatable.  [default: all except RocketMQ's own]"
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
    """Write messages to FILE (Parquet, zstd). FILE appears only when it is complete."""
    if Path(target).exists() and not overwrite:
        raise click.UsageError(f"{target} exists already. Give another name, or add --overwrite.")
    folder = Path(target).absolute().parent
    if folder.is_dir() and not is_writable(folder):
        raise click.UsageError(f"{target}: the folder {folder} is not writable. Choose another folder.")
    with progress("exporting", "messages") as on_progress:
        done = rmq_spark.export_parquet(
            path,
            target,
            topics=list(topics) or None,
            begin_ms=begin_ms,
            end_ms=end_ms,
            columns=[name.strip() for name in columns.split(",")] if columns else None,
            commit_log_path=commit_log_path,
            overwrite=overwrite,
            progress=on_progress,
        )
    if as_json:
        row = {"path": str(done.path), "messages": done.messages, "bytes": done.bytes, "topics": list(done.topics)}
        print_json([row])
    else:
        say(f"{done.messages:,} messages of {', '.join(done.topics) or 'no topic'} written to {done.path}.")


@click.command("import", epilog=_IMPORT_EXAMPLES)
@appending
@click.argument("source", metavar="FILE", type=click.Path(dir_okay=False, exists=True))
@click.option("--topic", help="Destination topic.  [default: the topics in FILE]")
@click.option(
    "--name", help="Name that identifies the import when it is resumed.  [default: contents of FILE and --topic]"
)
@click.option("--spread", is_flag=True, help="Distribute messages round robin, instead of keeping their queue ids.")
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
    """Append the messages of FILE, a Parquet file such as `rmq export` writes. Missing topics are created.

    Each message is imported once: a repeated call, also after Ctrl-C or a kill, resumes the import. To import a file
    twice, give --name. Messages get new ids, hosts and times.
    """
    missing = _missing_columns(source, topic, spread)
    if missing:
        say(f"{source} lacks columns that `rmq export` writes: {', '.join(missing)}. They are not imported.")
    latest: list[tuple[int, int]] = []
    try:
        with progress("importing", "messages") as show_progress:

            def on_progress(done: int, total: int) -> None:
                latest[:] = [(done, total)]
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
                progress=on_progress,
            )
    except KeyboardInterrupt:
        for count, total in latest:  # a later commit may have succeeded before its progress was reported
            say(f"At least {count:,} of {total:,} messages are in the store. Repeat the command to resume.")
        raise
    if as_json:
        row = {"name": done.name, "messages": done.messages, "skipped": done.skipped, "topics": list(done.topics)}
        print_json([row])
    else:
        topics = f" Topics: {', '.join(done.topics)}." if done.topics else ""
        say(f"{done.messages:,} messages appended, {done.skipped:,} skipped as imported before.{topics}")


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
