"""Cost of a trigger of a stream, over that of a Python source that only counts.

An idle trigger: Spark asks for the latest offset as fast as it can, nothing is new, and the answers in some seconds
are counted. A micro-batch: a backlog is read one message at a time, and Spark reports the duration of each trigger.
"""

import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

from figures import Figure, ratio_figure, take_turns
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery
from sample_stores import TOPIC, SampleStores, Shape

IDLE_QUEUES = 1000
_WARM_UP_BATCHES = 10
_START_LIMIT_SECONDS = 120
_IDLE_SECONDS = 2.0
_POLLING_DELAY = "spark.sql.streaming.pollingDelay"
_STAGES = ("triggerExecution", "addBatch", "queryPlanning")
_COUNTED_RMQ, _COUNTING = "counted_rmq", "counting"


class _Queries:
    """Streams to `noop`, one at a time, each from a checkpoint of its own."""

    def __init__(self, spark: SparkSession, stores: SampleStores, looks_file: Path) -> None:
        self._spark, self._stores, self._looks_file = spark, stores, looks_file

    def run(
        self,
        source: str,
        options: Mapping[str, str],
        measure: Callable[[StreamingQuery], float],
        *,
        sink: str = "noop",
        columns: Sequence[str] = ("*",),
    ) -> float:
        """Start a stream of some columns into a sink, measure it and stop it."""
        self._looks_file.write_bytes(bytes(8))
        query = (
            self._spark.readStream.format(source)
            .options(**options)
            .load()
            .select(*columns)
            .writeStream.format(sink)
            .option("path", str(self._stores.scratch("sink") / "store"))
            .option("checkpointLocation", str(self._stores.scratch("checkpoint")))
            .trigger(processingTime="0 seconds")
            .start()
        )
        try:
            return measure(query)
        finally:
            query.stop()

    def looks(self) -> int:
        """Return how often Spark asked the running stream for its latest offset."""
        return int(struct.unpack("<q", self._looks_file.read_bytes())[0])

    def idle_trigger_seconds(self, query: StreamingQuery, seconds: float) -> float:
        """Return the seconds of one idle trigger, from the number of polls in some seconds."""
        _wait(query, lambda: self.looks() > 200)  # after the first batch, if any, and with warm code
        begin, first = time.perf_counter(), self.looks()
        time.sleep(seconds)
        last, end = self.looks(), time.perf_counter()
        _raise_failure(query)
        return (end - begin) / (last - first)


def measure_triggers(
    spark: SparkSession, stores: SampleStores, looks_file: Path, messages: int, repeats: int
) -> Iterable[Figure]:
    """Yield the figure of idle triggers and that of micro-batches; each at most 1.5."""
    queries = _Queries(spark, stores, looks_file)
    yield from _measure_idle(spark, queries, stores, repeats)
    backlog = {
        "path": str(stores.path(Shape(messages))),
        "subscribe": TOPIC,
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": "1",
    }
    batches = max(10 * repeats, 20)
    ours, counting = take_turns(
        repeats,
        lambda: queries.run(_COUNTED_RMQ, backlog, lambda query: _batch_seconds(query, batches)),
        lambda: queries.run(_COUNTING, {}, lambda query: _batch_seconds(query, batches)),
    )
    yield _figure("micro-batch of one message, over a counting source", ours, counting, 1.5)
    yield _measure_hand_over(queries, backlog, batches, repeats)
    copied, counting = take_turns(
        repeats,
        lambda: queries.run(
            "rmq",
            backlog,
            lambda query: _batch_seconds(query, batches),
            sink="rmq",
            columns=("topic", "body", "tags", "keys"),
        ),
        lambda: queries.run(_COUNTING, {}, lambda query: _batch_seconds(query, batches)),
    )
    yield _figure("micro-batch of one message from store to store, over counting to noop", copied, counting, None)


def _measure_hand_over(queries: _Queries, backlog: Mapping[str, str], batches: int, repeats: int) -> Figure:
    """Return the figure of micro-batches that travel with the plan, over those that a Python task reads."""
    stages: dict[str, list[dict[str, float]]] = {"1m": [], "0": []}

    def seconds(hand_over_bytes: str) -> float:
        def measure(query: StreamingQuery) -> float:
            found = _batch_stages(query, batches)
            stages[hand_over_bytes].append(found)
            return found["triggerExecution"]

        return queries.run("rmq", {**backlog, "handOverBytes": hand_over_bytes}, measure)

    with_plan, by_task = take_turns(repeats, lambda: seconds("1m"), lambda: seconds("0"))
    shown = {
        size: {name: median(one[name] for one in found) * 1e3 for name in _STAGES} for size, found in stages.items()
    }
    return ratio_figure(
        "micro-batch of one message, with the plan over by a task",
        with_plan,
        by_task,
        note=", ".join(f"{name} {shown['1m'][name]:.0f} and {shown['0'][name]:.0f} ms" for name in _STAGES),
        detail={"with_plan_ms": shown["1m"], "by_task_ms": shown["0"]},
    )


def _measure_idle(spark: SparkSession, queries: _Queries, stores: SampleStores, repeats: int) -> Iterable[Figure]:
    store = stores.path(Shape(20 * IDLE_QUEUES, queues=IDLE_QUEUES))
    options = {"path": str(store), "subscribe": TOPIC}

    def idle_seconds(query: StreamingQuery) -> float:
        return queries.idle_trigger_seconds(query, _IDLE_SECONDS)

    name = f"idle trigger at {IDLE_QUEUES} queues, over a counting source"
    # Spark waits between two idle triggers; the rest is the trigger itself.
    for waits, required in (("0", 1.5), (None, None)):
        if waits is None:
            spark.conf.unset(_POLLING_DELAY)
        else:
            spark.conf.set(_POLLING_DELAY, waits)
        ours, counting = take_turns(
            repeats,
            lambda: queries.run(_COUNTED_RMQ, options, idle_seconds),
            lambda: queries.run(_COUNTING, {"idle": "true"}, idle_seconds),
        )
        yield _figure(name if required else "the same with the wait of 10 ms that Spark adds", ours, counting, required)


def _figure(name: str, ours: list[float], counting: list[float], required: float | None) -> Figure:
    return ratio_figure(
        name,
        ours,
        counting,
        required=required,
        at_most=True,
        note=f"{median(ours) * 1e3:.2f} ms, counting {median(counting) * 1e3:.2f} ms",
        detail={"seconds": median(ours), "counting_seconds": median(counting)},
    )


def _batch_seconds(query: StreamingQuery, batches: int) -> float:
    """Return the median seconds of a trigger, as Spark reports it, over some micro-batches of one row."""
    return _batch_stages(query, batches)["triggerExecution"]


def _batch_stages(query: StreamingQuery, batches: int) -> dict[str, float]:
    """Return the median seconds of the stages of a trigger, over some micro-batches of one row."""
    _wait(query, lambda: _batch_id(query) >= _WARM_UP_BATCHES)
    first = _batch_id(query)
    _wait(query, lambda: _batch_id(query) >= first + min(batches, 90))  # Spark keeps the progress of the last 100
    durations = []
    for progress in query.recentProgress:
        if progress["batchId"] > first and progress["numInputRows"]:
            if progress["numInputRows"] != 1:
                raise RuntimeError(f"a micro-batch of {progress['numInputRows']} rows")
            durations.append(progress["durationMs"])
    return {name: median(one[name] for one in durations) / 1e3 for name in _STAGES}


def _batch_id(query: StreamingQuery) -> int:
    progress = query.lastProgress
    return -1 if progress is None else progress["batchId"]


def _wait(query: StreamingQuery, done: Callable[[], bool]) -> None:
    give_up = time.perf_counter() + _START_LIMIT_SECONDS
    while not done():
        _raise_failure(query)
        if time.perf_counter() > give_up:
            raise RuntimeError(f"the stream does not get on: {query.status}")
        time.sleep(0.1)


def _raise_failure(query: StreamingQuery) -> None:
    failure = query.exception()
    if failure is not None:
        raise failure
