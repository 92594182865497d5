"""What a batch of one row costs in a stream to a cluster: exactly once, over at least once, and its parts.

Streams write one row in each batch, to two real masters that are prepared for the sink. They take turns. The time of a
batch is Spark's `triggerExecution`, from one progress to the next; the parts in the notes are those of the sink's
calls (`timed_sink`), and Spark's own.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from compat_kit.rocketmq import Java
from figures import Figure, take_turns
from grouping import quantile, wait_for_batches
from pyspark.sql import SparkSession
from real_broker import new_folder, two_brokers
from timed_sink import read_sink_times

import rmq_spark

_TOPIC = "committed"
_QUEUES = 4  # on each of two brokers
_WARM_UP, _BATCHES = 10, 60  # of each turn; Spark keeps the progress of the last 100
_TURNS = 3
_STAGES = ("addBatch", "walCommit", "commitOffsets")


class _Turn(NamedTuple):
    spark_ms: list[dict[str, int]]  # of each batch
    sink_ms: dict[str, list[dict[str, float]]]


def measure_cluster_commits(java: Java, folder: Path, spark: SparkSession, looks_file: Path) -> Iterable[Figure]:
    """Yield p50 and p95 of a batch of one row, exactly once and at least once."""
    home = new_folder(folder / "committing")
    with two_brokers(java, home) as cluster:
        with cluster.client() as admin:
            admin("create-topic", topic=_TOPIC, queues=_QUEUES)
        rmq_spark.prepare_sink(name_server=cluster.address, ledger_broker=next(iter(cluster.brokers)))
        numbers = itertools.count()
        turns: dict[str, list[_Turn]] = {"exactlyOnce": [], "atLeastOnce": []}

        def run(delivery: str) -> float:
            options = {"nameServer": cluster.address, "topic": _TOPIC, "delivery": delivery}
            turns[delivery].append(_run(spark, looks_file, options, home / f"checkpoint-{next(numbers)}"))
            return 0.0

        take_turns(_TURNS, lambda: run("exactlyOnce"), lambda: run("atLeastOnce"))
    new_folder(home).rmdir()
    for delivery, held in turns.items():
        yield from _figures(delivery, held)


def _run(spark: SparkSession, looks_file: Path, options: dict[str, str], checkpoint: Path) -> _Turn:
    looks_file.write_bytes(b"")
    rows = spark.readStream.format("rate-micro-batch").options(rowsPerBatch="1", numPartitions="1").load()
    query = (
        rows.selectExpr("cast(value as string) as body")
        .writeStream.format("timed_sink")
        .options(**options, checkpointLocation=str(checkpoint))
        .trigger(processingTime="0 seconds")
        .start()
    )
    try:
        wait_for_batches(query, _WARM_UP + _BATCHES)
        spark_ms = [one["durationMs"] for one in query.recentProgress if one["batchId"] > _WARM_UP]
    finally:
        query.stop()
    times = read_sink_times(looks_file)
    return _Turn(spark_ms, {kind: held[_WARM_UP:] for kind, held in times.items()})


def _figures(delivery: str, turns: list[_Turn]) -> Iterable[Figure]:
    batches = [one for turn in turns for one in turn.spark_ms]
    stages = ", ".join(f"{name} {mean(one[name] for one in batches):.0f}" for name in _STAGES)
    note = f"{len(batches)} batches; mean ms of Spark's {stages}; {_parts(turns)}"
    for name, share in (("p50", 0.5), ("p95", 0.95)):
        held = [quantile(share, [one["triggerExecution"] for one in turn.spark_ms]) for turn in turns]
        yield Figure(
            f"{delivery}: a batch of one row, {name}",
            median(held),
            min(held),
            max(held),
            unit=" ms",
            note=note if name == "p50" else "",
        )


def _parts(turns: list[_Turn]) -> str:
    """Return the mean ms of each part of each kind of call."""
    texts = []
    for kind in ("prepare", "task", "commit"):
        found = [one for turn in turns for one in turn.sink_ms[kind]]
        names = dict.fromkeys(name for one in found for name in one)
        parts = ", ".join(f"{name} {mean(one.get(name, 0.0) for one in found):.1f}" for name in names)
        texts.append(f"{kind}: {parts}")
    return "; ".join(texts)
