"""A listener of 50 ms through `rmq_spark.consume`: rows a second with one thread and with 20, in both models.

The rates are of whole triggers, as Spark reports them, with planning, tasks and commit. The listener sleeps, so a rate
depends on the machine only as far as the work between the calls does.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from figures import Figure
from pyspark.sql import SparkSession
from sample_stores import SampleStores

import rmq_spark

_MESSAGES, _QUEUES, _CALL_S = 2_000, 16, 0.05
_REQUIRED = 300.0  # rows a second with 20 threads


def measure_listening(spark: SparkSession, stores: SampleStores, repeats: int) -> Iterable[Figure]:
    """Yield the rates. With one thread, which takes two and a half minutes, they are measured once, else five times."""
    repeats = min(repeats, 5)
    folder = stores.scratch("listening")
    _fill(folder / "store")
    _consume(spark, folder, "concurrently", 20, 2)  # starts Spark's workers
    for model, threads, tasks, rounds, required in (
        ("concurrently", 20, 1, repeats, _REQUIRED),
        ("concurrently", 20, 2, repeats, None),
        ("orderly", 20, 2, repeats, None),
        ("concurrently", 1, 1, 1, None),
        ("orderly", 1, 2, 1, None),
    ):
        rates = [_consume(spark, folder, model, threads, tasks) for _ in range(rounds)]
        note = f"{_MESSAGES} messages, {_QUEUES} queues, {tasks} tasks"
        name = f"listener of {_CALL_S * 1000:.0f} ms, {model}, {threads} threads"
        yield Figure(name, median(rates), min(rates), max(rates), required, unit="rows/s", note=note)


def _fill(path: Path) -> None:
    with rmq_spark.open_store(path, segment_bytes=1 << 24) as store:
        store.create_topic("orders", _QUEUES)
        for number in range(_MESSAGES):
            store.send("orders", b"x" * 200, queue_id=number % _QUEUES)


def _consume(spark: SparkSession, folder: Path, model: str, threads: int, tasks: int) -> float:
    """Consume the topic from its begin in a group of its own. Return the rows per second of the trigger.

    Raises AssertionError if a row is missing, comes twice, or in order comes before the one ahead of it.
    """
    group = f"group-{time.monotonic_ns()}"
    store, notes = str(folder / "store"), folder / f"{group}.notes"
    options = {"subscribe": "orders", "consumerGroup": group, "startingOffsets": "earliest", "columns": "*"}
    options |= {"minPartitions": str(tasks), "orderly": str(model == "orderly").lower()}
    stream = spark.readStream.format("rmq").options(**options).load(store)
    query = rmq_spark.consume(
        stream,
        _listener(str(notes), "SUCCESS" if model == "orderly" else "CONSUME_SUCCESS"),
        path=store,
        group=group,
        checkpoint_location=folder / f"{group}.checkpoint",
        model=model,
        threads=threads,
        trigger={"availableNow": True},
    )
    query.awaitTermination()
    _check([line.split() for line in notes.read_text().splitlines()], is_in_order=model == "orderly")
    [progress] = [one for one in query.recentProgress if one.numInputRows]
    return float(_MESSAGES / progress.durationMs["triggerExecution"] * 1000)


def _listener(notes: str, answer: str) -> Callable[[list[Any], rmq_spark.ConsumeContext], str]:
    """Return a listener that sleeps, and then notes queue and offset of its row."""

    def listen(rows: list[Any], context: rmq_spark.ConsumeContext) -> str:
        time.sleep(_CALL_S)
        descriptor = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{rows[0].queueId} {rows[0].queueOffset}\n".encode())
        os.close(descriptor)
        return answer

    return listen


def _check(noted: Sequence[Sequence[str]], *, is_in_order: bool) -> None:
    found: dict[int, list[int]] = {}
    for queue_id, offset in noted:
        found.setdefault(int(queue_id), []).append(int(offset))
    assert sorted(found) == list(range(_QUEUES))
    for offsets in found.values():
        assert (offsets if is_in_order else sorted(offsets)) == list(range(_MESSAGES // _QUEUES))
