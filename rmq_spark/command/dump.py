"""`rmq dump`: show a file of a store, entry by entry, with byte positions."""

from pathlib import Path
from typing import Any

import click

import rmq_spark
from rmq_spark.command.output import print_data, rows_of, say
from rmq_spark.command.parameters import as_data as as_data_option
from rmq_spark.command.parameters import examples
from rmq_spark.command.tables import show

_DEFAULT_LIMIT = 100
# Columns of a record that a narrow terminal omits first.
_OPTIONAL = (
    *("preparedTransactionOffset", "magic", "bodyCrc", "flag", "sysFlag", "bodyPosition", "bornHost", "storeHost"),
    *("reconsumeTimes", "bornTimestamp", "crcMatches", "properties", "keys", "storeTimestamp", "bodySize"),
)
_EXAMPLES = examples(
    "rmq dump store/commitlog/00000000000000000000 --position 4096 -n 20",
    "rmq dump store/consumequeue/orders/0/00000000000000000000",
    "rmq dump store/checkpoint --json",
)


class _Limit(click.IntRange):
    """A number of entries. An address is refused as the name server that -n means in other commands."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number."""
        if isinstance(value, str) and ":" in value:
            raise click.NoSuchOption("--name-server", ctx=ctx)
        return int(super().convert(value, param, ctx))


@click.command(epilog=_EXAMPLES)
@click.argument("path", metavar="PATH", type=click.Path(exists=True))
@as_data_option
@click.option("--position", type=click.IntRange(min=0), default=0, show_default=True, help="First byte to read.")
@click.option("-n", "--limit", type=_Limit(min=1), help="Maximum number of entries.  [default: 100; JSON and CSV: all]")
@click.option("--kind", help="Kind of the file. An unknown kind lists all kinds.  [default: by path]")
def dump(path: str, as_data: bool, position: int, limit: int | None, kind: str | None) -> None:
    """Show the file at PATH: a commit-log segment, a consume-queue file, an index, a checkpoint, or any other file.

    Positions are in bytes from the start of the file. Damaged bytes are shown as damage. The file is not changed.
    """
    if Path(path).is_dir():
        raise click.UsageError(
            f"{path} is a folder; expected one file, such as STORE/commitlog/00000000000000000000 or STORE/checkpoint. "
            "`rmq check STORE` reads all files of a store."
        )
    if as_data:
        batches = rmq_spark.dump(path, kind=kind, position=position, limit=limit)
        print_data(row for batch in batches for row in rows_of(batch))
        return
    limit = limit or _DEFAULT_LIMIT
    table = rmq_spark.dump(path, kind=kind, position=position, limit=limit + 1).to_arrow()
    shown = table.slice(0, limit)
    columns = [name for name in shown.column_names if shown[name].null_count < len(shown)]
    nothing = f"No entries at or after position {position}." if Path(path).stat().st_size else "The file is empty."
    show(rows_of(shown), columns, as_data=False, nothing=nothing, optional=_OPTIONAL)
    if len(table) > limit:
        say(f"More entries follow. Continue with --position {table['position'][limit].as_py()}, or raise --limit.")
