"""Rows through Spark into a store, exactly once and synced, over a Python sink that discards its Arrow batches.

Both get the same rows (bodies of 200 bytes, a tag, a key) from the same source on two cores. Streams read a store
with `Trigger.AvailableNow`; a micro-batch of one message goes from store to store, over Spark's own `rate`-less pair
of a counting source and `noop`.
"""

import time
from collections.abc import Callable, Iterable
from statistics import median

from figures import Figure, ratio_figure, take_turns
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sample_stores import TOPIC, SampleStores, Shape


def measure_sinks(spark: SparkSession, stores: SampleStores, messages: int, repeats: int) -> Iterable[Figure]:
    """Yield the figures of batch and stream, each seconds of the sink that discards over seconds of ours."""
    rows = _rows(spark, messages)
    ours, discarded = take_turns(
        max(repeats // 2, 2),
        _timed(lambda: _write_batch(rows, "rmq", stores)),
        _timed(lambda: _write_batch(rows, "discard", stores)),
    )
    yield _figure("sink, batch, over one that discards", ours, discarded, messages)
    source = str(stores.path(Shape(messages)))
    ours, discarded = take_turns(
        max(repeats // 2, 2),
        _timed(lambda: _write_stream(spark, source, "rmq", stores)),
        _timed(lambda: _write_stream(spark, source, "discard", stores)),
    )
    yield _figure("sink, stream, over one that discards", ours, discarded, messages)


def _rows(spark: SparkSession, messages: int) -> DataFrame:
    """Return rows that the JVM generates, at the same cost for both sinks."""
    number = F.col("id").cast("string")
    return spark.range(messages, numPartitions=4).select(
        F.lit(TOPIC).alias("topic"),
        F.lpad(number, 200, "message body of some length ").cast("binary").alias("body"),
        F.concat(F.lit("Tag"), F.col("id") % 8).alias("tags"),
        F.concat(F.lit("key"), number).alias("keys"),
    )


def _write_batch(rows: DataFrame, name: str, stores: SampleStores) -> None:
    rows.write.format(name).mode("append").option("path", str(stores.scratch("sink") / "store")).save()


def _write_stream(spark: SparkSession, source: str, name: str, stores: SampleStores) -> None:
    stream = spark.readStream.format("rmq").options(path=source, subscribe=TOPIC, startingOffsets="earliest").load()
    query = (
        stream.select("topic", "body", "tags", "keys")
        .writeStream.format(name)
        .option("path", str(stores.scratch("sink") / "store"))
        .option("checkpointLocation", str(stores.scratch("checkpoint")))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def _timed(work: Callable[[], None]) -> Callable[[], float]:
    def seconds() -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    return seconds


def _figure(name: str, ours: list[float], discarded: list[float], messages: int) -> Figure:
    return ratio_figure(
        name,
        discarded,
        ours,
        required=0.40,
        note=f"{messages / median(ours) / 1e6:.2f} million messages a second",
        detail={"seconds": median(ours), "discarding_seconds": median(discarded)},
    )
