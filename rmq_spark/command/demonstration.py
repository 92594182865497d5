"""`rmq demo`: a store with something in it, to try the other commands on."""

import tempfile
from pathlib import Path
from typing import Any

import click
import pyarrow as pa

import rmq_spark
from rmq_spark.command.output import print_json, rows_of
from rmq_spark.command.progress import waiting
from rmq_spark.command.words import Moment, examples
from rmq_spark.command.words import as_json as as_json_option

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
    "rmq serve {path}    # delivers what waits for its time; Ctrl-C ends it",
)


@click.command(epilog=examples("rmq demo"))
@as_json_option
def demo(as_json: bool) -> None:
    """Make a store in a new temporary folder: orders, a delayed message, a group that is behind, a dead letter.

    It needs no Spark and takes a second. The folder stays: the commands that are printed can be tried on it.
    """
    path = Path(tempfile.mkdtemp(prefix="rmq-demo-")) / "store"
    with waiting("making a store"):
        _fill(path)
    with rmq_spark.open_reader(path) as store:
        summary = store.summary()
    if as_json:
        print_json({"path": str(path), **row} for row in rows_of(summary.to_arrow()))
        return
    click.echo(repr(summary))
    click.echo("\nTry:")
    for line in _TRY:
        click.echo("  " + line.format(path=path))
    click.echo(f"\nWhen you are done: rm -r {path.parent}")


def _fill(path: Path) -> None:
    """Write the store: whole columns, as a program would."""
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
    consumer = rmq_spark.open_consumer(path, "billing")
    with consumer:
        for queue in consumer.queues("orders"):
            bounds = consumer.max_offset(queue)
            consumer.update_consume_offset(queue, bounds - bounds // 10)
        queue = consumer.queues("orders")[0]
        failed = consumer.pull(queue, consumer.min_offset(queue)).messages.slice(0, 1)
        consumer.send_back(failed, delay_level=-1)
