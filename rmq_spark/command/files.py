"""`rmq dump`: any file of a store, entry by entry, with the positions of their bytes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import rmq_spark
from rmq_spark.command.output import print_json, rows_of, say
from rmq_spark.command.tables import show
from rmq_spark.command.words import as_json as as_json_option
from rmq_spark.command.words import examples

_FEW = 100
# Of a record of the log, which has more than a terminal has room for.
_SPARED = (
    *("preparedTransactionOffset", "magic", "bodyCrc", "flag", "sysFlag", "bodyPosition", "bornHost", "storeHost"),
    *("reconsumeTimes", "bornTimestamp", "crcMatches", "properties", "keys", "storeTimestamp", "bodySize"),
)
_EXAMPLES = examples(
    "rmq dump store/commitlog/00000000000000000000 --position 4096 -n 20",
    "rmq dump store/consumequeue/orders/0/00000000000000000000",
    "rmq dump store/checkpoint --json",
)


@click.command(epilog=_EXAMPLES)
@click.argument("path", metavar="PATH", type=click.Path(exists=True, dir_okay=False))
@as_json_option
@click.option("--position", type=click.IntRange(min=0), default=0, show_default=True, help="Begin at this byte.")
@click.option("-n", "--limit", type=click.IntRange(min=1), help="At most so many entries.  [default: 100; JSON: all]")
@click.option("--kind", help="What the file is, where its path does not say it; a wrong one lists them.")
def dump(path: str, as_json: bool, position: int, limit: int | None, kind: str | None) -> None:
    """Show the file at PATH: a segment of the commit log, a queue's file, an index, a checkpoint, any other of a store.

    Positions are in bytes from the begin of the file. Damage is shown as what it is; nothing is believed or changed.
    """
    if as_json:
        print_json(_rows(rmq_spark.dump(path, kind=kind, position=position, limit=limit)))
        return
    limit = limit or _FEW
    table = rmq_spark.dump(path, kind=kind, position=position, limit=limit + 1).to_arrow()
    shown = table.slice(0, limit)
    columns = [name for name in shown.column_names if shown[name].null_count < len(shown)]
    nothing = "There is no entry from there on." if Path(path).stat().st_size else "The file is empty."
    show(rows_of(shown), columns, as_json=False, nothing=nothing, spared=_SPARED)
    if len(table) > limit:
        say(f"There is more: --position {table['position'][limit].as_py()}, or --limit.")


def _rows(found: Any) -> Iterator[dict[str, Any]]:
    for batch in found:
        yield from rows_of(batch)
