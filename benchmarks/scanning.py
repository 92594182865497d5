"""A complete Spark scan, over the limit of Spark's transport from Python to its rows.

The limit is a source that returns one ready-made Arrow batch again and again: the first batch of a task of the real
source, so that schema, rows per batch, body sizes, and the numbers of partitions and rows are equal.
"""

import time
from collections.abc import Callable, Iterable
from statistics import median

from decoding import DEFAULT_COLUMNS
from figures import Figure, ratio_figure, take_turns
from plain_sources import write_batch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sample_stores import TOPIC, SampleStores, Shape

from rmq_spark.store import open_reader

COLUMN_SETS: list[tuple[str, list[str], float]] = [("body", ["body"], 0.75), ("default columns", DEFAULT_COLUMNS, 0.60)]


def measure_scans(spark: SparkSession, stores: SampleStores, messages: int, repeats: int) -> Iterable[Figure]:
    """Yield a figure for each set of columns: seconds of the limit over seconds of the real source."""
    shape = Shape(messages)
    store = str(stores.path(shape))
    batch_file = stores.scratch("ready") / "batch.arrow"
    for name, columns, required in COLUMN_SETS:
        options = {"path": store, "subscribe": TOPIC, "columns": ",".join(columns)}
        real = spark.read.format("rmq").options(**options).load()
        with open_reader(store) as reader:
            queue = reader.queues(TOPIC)[0]
            batch = next(reader.read(queue, 0, shape.messages // shape.queues, columns))
            write_batch(str(batch_file), batch)
        ready = (
            spark.read.format("ready")
            .schema(real.schema)
            .options(batch=str(batch_file), rows=str(messages), partitions=str(shape.queues))
            .load()
        )
        scan, limit = _timed_scan(real, messages), _timed_scan(ready, messages)
        for warm_up in (scan, limit, scan, limit):
            warm_up()
        real_seconds, limit_seconds = take_turns(repeats, scan, limit)
        yield ratio_figure(
            f"Spark scan of {name}, over the transport's limit",
            limit_seconds,
            real_seconds,
            required=required,
            note=f"{messages / median(real_seconds) / 1e6:.2f} million messages a second",
            detail={
                "seconds": median(real_seconds),
                "limit_seconds": median(limit_seconds),
                "batch_rows": batch.num_rows,
            },
        )


def _timed_scan(frame: DataFrame, messages: int) -> Callable[[], float]:
    def seconds() -> float:
        begin = time.perf_counter()
        # A frame of its own each time: one that was collected before keeps its shuffled rows and reads nothing again.
        summary = frame.agg(F.count("*"), F.sum(F.length("body")))
        (row,) = summary.collect()
        elapsed = time.perf_counter() - begin
        if row[0] != messages:
            raise RuntimeError(f"{row[0]} messages came out of {messages}")
        return elapsed

    return seconds
