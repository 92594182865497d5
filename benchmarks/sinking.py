"""Rows through Spark into a store, exactly once and synced, over a Python sink that only counts rows.

Both get the same rows (bodies of 200 bytes, a tag, a key) from the same source on two cores. Streams read a store
with `Trigger.AvailableNow`.

The bytes that a batch writes to the disk are measured without Spark: this process stages the rows as four tasks and
commits them. Linux counts a page of a file for a process when the process changes the page and the page is clean
(`write_bytes` in /proc/self/io). It counts the page back if the file is removed before the page reaches the disk
(`cancelled_write_bytes`). The difference is what is written to the disk once everything is synced.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

import pyarrow as pa
from figures import Figure, ratio_figure, take_turns
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sample_stores import TOPIC, SampleStores, Shape

from rmq_spark.store import CommitKey, SinkSettings, TaskStage, commit_sink

_TASKS, _BATCH_ROWS = 4, 10_000  # Spark's Arrow batches have this many rows


def measure_sinks(spark: SparkSession, stores: SampleStores, messages: int, repeats: int) -> Iterable[Figure]:
    """Yield the figures of batch and stream, each seconds of the sink that discards over seconds of ours."""
    rows = _rows(spark, messages)
    ours, discarded = take_turns(
        max(repeats // 2, 2),
        _timed(lambda: _write_batch(rows, "rmq", stores)),
        _timed(lambda: _write_batch(rows, "discard", stores)),
    )
    yield _figure("sink, batch, over one that only counts", ours, discarded, messages, required=0.60)
    source = str(stores.path(Shape(messages)))
    ours, discarded = take_turns(
        max(repeats // 2, 2),
        _timed(lambda: _write_stream(spark, source, "rmq", stores)),
        _timed(lambda: _write_stream(spark, source, "discard", stores)),
    )
    yield _figure("sink, stream, over one that only counts", ours, discarded, messages, required=0.40)
    yield from _measure_bytes(stores, messages)


def _measure_bytes(stores: SampleStores, messages: int) -> Iterable[Figure]:
    """Yield the bytes to disk for each byte of log. Yields nothing on a system that does not count them."""
    if not _IO.exists():
        return
    settings = SinkSettings(str(stores.scratch("sink") / "store"))
    key, share = CommitKey("bytes", 0), messages // _TASKS
    begin = _written_bytes()
    staged = []
    for task in range(_TASKS):
        stage = TaskStage(settings, key, f"{task}")
        for first in range(task * share, (task + 1) * share, _BATCH_ROWS):
            stage.write(_batch(first, min(_BATCH_ROWS, (task + 1) * share - first)))
        staged.append(stage.finish())
    of_tasks = _written_bytes() - begin
    log_bytes = commit_sink(settings, key, staged).bytes
    ratio = (_written_bytes() - begin) / log_bytes
    yield Figure(
        "sink, bytes to disk for each byte of log",
        ratio,
        ratio,
        ratio,
        required=1.20,
        at_most=True,
        note=f"{of_tasks / log_bytes:.2f} staged by the tasks; write_bytes of /proc/self/io",
        detail={"log_bytes": log_bytes, "staged_bytes": of_tasks},
    )


_IO = Path("/proc/self/io")


def _written_bytes() -> int:
    counts = {name: int(count) for name, count in (line.split(": ") for line in _IO.read_text().splitlines())}
    return counts["write_bytes"] - counts["cancelled_write_bytes"]


def _batch(first: int, count: int) -> pa.RecordBatch:
    """Return the rows that `_rows` makes from the numbers [first, first + count)."""
    numbers = [str(number) for number in range(first, first + count)]
    padding = "message body of some length " * 8
    return pa.RecordBatch.from_pydict(
        {
            "topic": pa.array([TOPIC] * count),
            "body": pa.array([padding[: 200 - len(number)] + number for number in numbers]).cast(pa.binary()),
            "tags": pa.array([f"Tag{number % 8}" for number in range(first, first + count)]),
            "keys": pa.array(["key" + number for number in numbers]),
        }
    )


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


def _figure(name: str, ours: list[float], discarded: list[float], messages: int, *, required: float) -> Figure:
    return ratio_figure(
        name,
        discarded,
        ours,
        required=required,
        note=f"{messages / median(ours) / 1e6:.2f} million messages a second",
        detail={"seconds": median(ours), "discarding_seconds": median(discarded)},
    )
