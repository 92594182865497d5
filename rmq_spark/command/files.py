"""`rmq dump`: any file of a store, entry by entry, with the positions of their bytes."""

import click

import rmq_spark
from rmq_spark.command.output import json_line, show
from rmq_spark.command.words import as_json as as_json_option


@click.command(short_help="Any file of a store, entry by entry, with positions.")
@click.argument("path", metavar="PATH", type=click.Path(exists=True, dir_okay=False))
@as_json_option
@click.option("--position", type=click.IntRange(min=0), default=0, show_default=True, help="Begin at this byte.")
@click.option("-n", "--limit", type=click.IntRange(min=1), help="At most so many entries.  [default: 100; JSON: all]")
@click.option("--kind", help="What the file is, where its path does not say it.")
def dump(path: str, as_json: bool, position: int, limit: int | None, kind: str | None) -> None:
    """Show the file at PATH: a segment of the commit log, a queue's file, an index, a checkpoint, any other of a store."""
    if not as_json:
        found = rmq_spark.dump(path, kind=kind, position=position, limit=limit or 100).to_table()
        columns = [name for name in found.column_names if found[name].null_count < len(found)]
        show(found.to_pylist(), columns, as_json=False, nothing="There is no entry from there on.")
        return
    at = 0
    for batch in rmq_spark.dump(path, kind=kind, position=position, limit=limit):
        for row in batch.to_pylist():
            click.echo((",\n  " if at else "[\n  ") + json_line(row), nl=False)
            at += 1
    click.echo("\n]" if at else "[]")
