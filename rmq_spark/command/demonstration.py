"""`rmq demo`: a store with something in it, to try the other commands on."""

import tempfile
import time
from pathlib import Path
from typing import Any

import click
import pyarrow as pa

import rmq_spark
from rmq_spark.command.output import console, print_json
from rmq_spark.command.words import as_json as as_json_option

_ORDERS = 1000
_COLOURS = ("red", "green", "blue")
_TAGS = ("new", "paid", "shipped")


@click.command(short_help="Make a small store, and show what can be done with it.")
@as_json_option
def demo(as_json: bool) -> None:
    """Make a store in a new temporary folder: orders, a delayed message, a group that is behind, a dead letter.

    It needs no Spark and takes a second. The folder stays: the commands that are printed can be tried on it.
    """
    path = Path(tempfile.mkdtemp(prefix="rmq-demo-")) / "store"
    _fill(path)
    with rmq_spark.open_reader(path) as store:
        summary = store.summary()
    if as_json:
        print_json([{"path": str(path), **row} for row in summary.to_arrow().to_pylist()])
        return
    out = console()
    out.print(repr(summary), markup=False)
    out.print("\nTry:", style="bold")
    for line in (
        f"rmq topics {path}",
        f"rmq cat {path} orders --last 3 --columns storeTimestamp,topic,queueId,queueOffset,tags,keys,body",
        f"rmq cat {path} orders --sql92 \"colour = 'red' AND amount > 95\"",
        f"rmq get {path} --key order-42",
        f"rmq lag {path} billing",
        f"rmq dlq list {path} billing",
        f"rmq check {path}",
        f"rmq serve {path}      # delivers the message that waits; Ctrl-C ends it",
    ):
        out.print("  " + line, markup=False)
    out.print(f"\nWhen you are done: rm -r {path.parent}", markup=False)


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
        store.send("payments", "cash", keys="order-42", deliver_at_ms=int(time.time() * 1000) + 30_000)
    with rmq_spark.open_consumer(path, "billing") as consumer:
        for queue in consumer.queues("orders"):
            bounds = consumer.max_offset(queue)
            consumer.update_consume_offset(queue, bounds - bounds // 10)
        queue = consumer.queues("orders")[0]
        failed = consumer.pull(queue, consumer.min_offset(queue)).messages.slice(0, 1)
    with rmq_spark.open_store(path) as store:
        store.send_back(failed, "billing", delay_level=-1)
