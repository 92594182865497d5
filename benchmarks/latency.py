"""One message a trigger: our stream and a source that only counts, with Spark's configuration and with ours.

A run is one query to `noop`. Its triggers are measured over a backlog, one message each. The latency of a message is
the time from its `send()` until the trigger that delivers it ends; messages are sent one by one to a waiting query.
The configuration that alternates is the checkpoint manager; all workers come from the daemon of `session()`.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from statistics import median, quantiles
from typing import Any

from figures import Figure, ratio_figure
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery
from sample_stores import TOPIC, SampleStores, Shape

import rmq_spark
from rmq_spark.store.disk.clock import wall_clock_ms

CHECKPOINT_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
_ASYNC_PROGRESS = {"asyncProgressTrackingEnabled": "true"}
_PHASES = ("triggerExecution", "walCommit", "addBatch", "commitOffsets")  # of Spark's progress report
_WARM_UP_BATCHES, _BATCHES = 10, 30
_LIMIT_S = 120
_SENDS, _SENDS_WITH_PAUSES = 40, 12
_LONG_PAUSE_S = 10


@dataclass(frozen=True)
class Case:
    """A source with its options, the class name of the checkpoint manager (None: Spark's own), and Spark's options."""

    name: str
    source: str
    options: Mapping[str, str]
    manager: str | None
    writing: Mapping[str, str]


class _Runs:
    """Runs of the cases, one at a time, each from a checkpoint of its own."""

    def __init__(self, spark: SparkSession, stores: SampleStores) -> None:
        self._spark, self._stores = spark, stores

    def start(self, case: Case) -> StreamingQuery:
        """Start the query of a case."""
        if case.manager is None:
            self._spark.conf.unset(CHECKPOINT_MANAGER)
        else:
            self._spark.conf.set(CHECKPOINT_MANAGER, case.manager)
        frame = self._spark.readStream.format(case.source).options(**case.options).load()
        writer = frame.writeStream.format("noop").options(**case.writing).trigger(processingTime="0 seconds")
        return writer.option("checkpointLocation", str(self._stores.scratch("checkpoint"))).start()

    def durations(self, case: Case) -> dict[str, float]:
        """Return the median ms of each phase, over some triggers of one row."""
        query = self.start(case)
        try:
            _wait_for_batch(query, _WARM_UP_BATCHES + _BATCHES)
            measured = [one for one in _batches(query) if one["batchId"] > _WARM_UP_BATCHES]
        finally:
            query.stop()
        return {phase: median(one["durationMs"].get(phase, 0) for one in measured) for phase in _PHASES}

    def latencies_ms(self, case: Case, sends: int, pause_s: float) -> list[float]:
        """Return the latency of each of some messages, in ms, sent with a pause after the end of each trigger."""
        found = []
        with rmq_spark.open_store(case.options["path"], flush="async") as store:
            query = self.start(case)
            try:
                for number in range(_WARM_UP_BATCHES + sends):
                    begun_ms = wall_clock_ms()
                    store.send(TOPIC, f"{number}")
                    _wait_for_batch(query, number)
                    if number >= _WARM_UP_BATCHES:
                        found.append(_end_ms(_batches(query)[-1]) - begun_ms)
                        time.sleep(pause_s)
            finally:
                query.stop()
        return found


def measure_latency(
    spark: SparkSession, stores: SampleStores, messages: int, repeats: int, pause_s: float
) -> Iterable[Figure]:
    """Yield the durations of triggers over the counting source, and the latencies of messages.

    `pause_s` is the time between two messages. After a minute without a task Spark ends its Python workers.
    """
    runs, ours_manager = _Runs(spark, stores), spark.conf.get(CHECKPOINT_MANAGER)
    backlog = {"path": str(stores.path(Shape(messages))), "subscribe": TOPIC, "startingOffsets": "earliest"}
    backlog["maxOffsetsPerTrigger"] = "1"
    cases = [
        Case(f"{source}, {name}", source, options, manager, writing)
        for source, options in (("counting", {}), ("rmq", backlog))
        for name, manager, writing in (
            ("as Spark ships", None, {}),
            ("session()", ours_manager, {}),
            ("session() and async progress", ours_manager, _ASYNC_PROGRESS),
        )
    ]
    try:
        found = _in_turns(runs, cases, repeats)
        trigger = {name: [one["triggerExecution"] for one in rounds] for name, rounds in found.items()}
        shipped, tuned = trigger["counting, as Spark ships"], trigger["counting, session()"]
        ours = trigger["rmq, session()"]
        yield _figure("one message a trigger with session(), over counting as Spark ships", ours, shipped, 0.20)
        yield _figure("the same, both with session()", ours, tuned, 0.60)
        for name, rounds in found.items():
            yield _phases_figure(name, rounds)
        sends = _SENDS if pause_s < _LONG_PAUSE_S else _SENDS_WITH_PAUSES
        for case in (_live(case, stores) for case in cases if case.source == "rmq"):
            yield _latency_figure(case.name, runs.latencies_ms(case, sends, pause_s))
    finally:
        spark.conf.set(CHECKPOINT_MANAGER, ours_manager)


def _live(case: Case, stores: SampleStores) -> Case:
    """Return a case whose query waits for messages that are sent to a new store."""
    path = str(stores.scratch("live") / "store")
    with rmq_spark.open_store(path, queues=1) as store:
        store.create_topic(TOPIC, 1)
    options = {"path": path, "subscribe": TOPIC, "startingOffsets": "earliest", "longPollingMs": "15s"}
    return Case(case.name, case.source, options, case.manager, case.writing)


def _in_turns(runs: _Runs, cases: list[Case], repeats: int) -> dict[str, list[dict[str, float]]]:
    """Return the durations of each case in each round. Every other round runs backwards."""
    found: dict[str, list[dict[str, float]]] = {case.name: [] for case in cases}
    for turn in range(repeats):
        for case in cases if turn % 2 == 0 else reversed(cases):
            found[case.name].append(runs.durations(case))
    return found


def _figure(name: str, ours: list[float], counting: list[float], required: float) -> Figure:
    note = f"{median(ours):.0f} ms, counting {median(counting):.0f} ms"
    return ratio_figure(name, ours, counting, required=required, at_most=True, note=note)


def _phases_figure(name: str, rounds: list[dict[str, float]]) -> Figure:
    """Return the median of the triggers of a case, with those of the phases as a note."""
    medians = {phase: median(one[phase] for one in rounds) for phase in _PHASES}
    whole = [one["triggerExecution"] for one in rounds]
    note = ", ".join(f"{phase} {medians[phase]:.0f}" for phase in _PHASES[1:])
    return Figure(f"a trigger of {name}", median(whole), min(whole), max(whole), unit="ms", note=note, detail=medians)


def _latency_figure(name: str, latencies_ms: list[float]) -> Figure:
    """Return p95 over p50 of the latencies."""
    p50, p95 = median(latencies_ms), quantiles(latencies_ms, n=20)[-1]
    about: dict[str, Any] = {"required": 1.5, "at_most": True, "detail": {"p50_ms": p50, "p95_ms": p95}}
    note = f"p50 {p50:.0f} ms, p95 {p95:.0f} ms"
    return Figure(f"send to end of trigger, p95 over p50, {name}", p95 / p50, p95 / p50, p95 / p50, note=note, **about)


def _batches(query: StreamingQuery) -> list[Any]:
    """Return the reports of the last triggers that had a row. Raises RuntimeError if one had several."""
    found = [one for one in query.recentProgress if one["numInputRows"]]
    if any(one["numInputRows"] != 1 for one in found):
        raise RuntimeError("a trigger delivered several messages; expected one")
    return found


def _end_ms(progress: Any) -> float:
    """Return when a trigger ended, in ms since the epoch."""
    begun = datetime.fromisoformat(progress["timestamp"])
    return begun.timestamp() * 1e3 + progress["durationMs"]["triggerExecution"]


def _wait_for_batch(query: StreamingQuery, batch_id: int) -> None:
    """Wait until Spark has reported the batch. Raises what the query failed with.

    While a query is idle, Spark reports its next batch every ten seconds, without rows.
    """
    give_up = time.monotonic() + _LIMIT_S
    while not (found := _batches(query)) or found[-1]["batchId"] < batch_id:
        if (failure := query.exception()) is not None:
            raise failure
        if time.monotonic() > give_up:
            raise RuntimeError(f"the stream does not get on: {query.status}")
        time.sleep(0.005)
