"""`rmq demo`: create an example store for the other commands."""

import tempfile
from pathlib import Path
from typing import Any

import click
import pyarrow as pa

import rmq_spark
from rmq_spark.command.output import print_data, rows_of, waiting
from rmq_spark.command.parameters import Moment, examples
from rmq_spark.command.parameters import as_data as as_data_option

_ORDERS = 1000
_COLOURS = ("red", "green", "blue")
_TAGS = ("new", "paid", "shipped")
_TRY = (
    "rmq topics {path}",
    "rmq cat {path} orders --last 3",
    "rmq cat {path} orders --sql92 \"colour = 'red' AND amount > 95\" --columns keys,body",
    "rmq get {path} --key order-42",
    "rmq lag {path} billing",
    "rmq dlq list {path} billing",
    "rmq check {path}",
    "rmq serve {path}    # delivers delayed messages; Ctrl-C ends it",
)


@click.command(epilog=examples("rmq demo"))
@as_data_option
def demo(as_data: bool) -> None:
    """Create a store in a new temporary folder: orders, a delayed message, a group that lags, a dead letter.

    It takes about a second. The printed commands work on this store. Delete the folder afterwards.
    """
    path = Path(tempfile.mkdtemp(prefix="rmq-demo-")) / "store"
    with waiting("creating a store"):
        _fill(path)
    with rmq_spark.open_reader(path) as store:
        summary = store.summary()
    if as_data:
        print_data({"path": str(path), **row} for row in rows_of(summary.to_arrow()))
        return
    click.echo(repr(summary))
    click.echo("\nTry:")
    for line in _TRY:
        click.echo("  " + line.format(path=path))
    click.echo(f"\nDelete it with: rm -r {path.parent}")


def _fill(path: Path) -> None:
    """Create the store with its topics, group and dead letter."""
    numbers = range(_ORDERS)
    orders: dict[str, Any] = {
        "body": [f'{{"order": {n}, "amount": {n % 100}}}' for n in numbers],
        "tags": [_TAGS[n % 3] for n in numbers],
        "keys": [f"order-{n} customer-{n % 50}" for n in numbers],
        "properties": pa.array(
            [[("colour", _COLOURS[n % 3]), ("amount", str(n % 100))] for n in numbers],
            pa.map_(pa.string(), pa.string()),
        ),
        "shardingKey": [f"customer-{n % 50}" for n in numbers],
    }
    with rmq_spark.open_store(path, segment_bytes=1 << 24) as store:
        store.send_many(pa.table(orders), topic="orders")
        store.send("orders", "a reminder, in a minute", tags="reminder", delay_level=5)
        store.send("payments", "cash", keys="order-42", deliver_at_ms=Moment().convert("now+30s", None, None))
    with rmq_spark.open_consumer(path, "billing") as consumer:
        for queue in consumer.queues("orders"):
            end = consumer.max_offset(queue)
            consumer.update_consume_offset(queue, end - end // 10)
        queue = consumer.queues("orders")[0]
        failed = consumer.pull(queue, consumer.min_offset(queue)).messages.slice(0, 1)
        consumer.send_back(failed, delay_level=-1)
