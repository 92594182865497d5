"""Cost of a query as a member of its consumer group: idle, waking up, and publishing offsets.

Idle and waking: a query that waits with `longPollingMs`, against the same query polled at the rate of the default
trigger. Processor time is that of the driver's JVM and of its Python workers, from /proc. A wake is the time from just
before another process sends a message until the source reports it to Spark. After that Spark takes equally long in both
cases; the time until `foreachBatch` has the row is shown for information. A trigger with a backlog: the time that it
spends on the group, with publishing, over the time that Spark spends on its own two commits (`walCommit` and
`commitOffsets` of the same batches).
"""

import math
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from figures import Figure, ratio_figure, take_turns
from plain_sources import read_noted
from processor_time import family_cpu_seconds
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from sample_stores import TOPIC, SampleStores, Shape
from timed_group import GroupTimes, read_group_times

import rmq_spark

GROUP = "benchmark"
MANY_QUEUES = 1000
_LONG_POLLING = {"longPollingMs": "15s"}
_POLLING = {"longPollingMs": "0"}
_IDLE_SECONDS = 20.0  # of a round; three are a minute
_SETTLE_SECONDS = 5.0
_WAKES = 40  # of a turn
_PAUSES_SECONDS = (0.3, 1.0)  # before a message: as many of them as of a trigger's phases
_WARM_UP, _BATCHES = 15, 80  # micro-batches; Spark keeps the progress of the last 100
_LIMIT_SECONDS = 120
_SENDER = """
import sys, time, rmq_spark
with rmq_spark.open_store(sys.argv[1], flush="async") as store:
    for line in sys.stdin:
        begin = time.monotonic_ns()
        store.send(sys.argv[2], line.strip(), queue_id=0)
        print(begin, flush=True)
"""


def measure_groups(spark: SparkSession, stores: SampleStores, looks_file: Path, repeats: int) -> Iterable[Figure]:
    """Yield the figures of an idle member, of waking it, and of publishing at 1,000 queues."""
    turns = max(repeats // 2, 3)
    store = stores.scratch("group") / "store"
    with rmq_spark.open_store(str(store)) as writer:
        writer.create_topic(TOPIC, 4)
    queries = _Queries(spark, stores, store, looks_file)
    polled, waited = take_turns(
        turns, lambda: queries.idle_cpu_seconds(_POLLING), lambda: queries.idle_cpu_seconds(_LONG_POLLING)
    )
    minute = 60 / _IDLE_SECONDS
    yield ratio_figure(
        "processor time of an idle query, polled over longPollingMs=15s",
        polled,
        waited,
        required=1.0,
        note=f"{median(waited) * minute:.1f} s a minute, polled {median(polled) * minute:.1f}",
        detail={"cpu_seconds": median(waited), "polled_cpu_seconds": median(polled)},
    )
    yield from _measure_wakes(queries, turns)
    yield _measure_publishing(spark, stores, looks_file)


def _measure_wakes(queries: "_Queries", turns: int) -> Iterator[Figure]:
    wakes: dict[str, list[_Wakes]] = {"polled": [], "waited": []}

    def measure(name: str, options: dict[str, str]) -> Callable[[], float]:
        def run() -> float:
            wakes[name].append(queries.wakes(options))
            return 0.0

        return run

    take_turns(turns, measure("polled", _POLLING), measure("waited", _LONG_POLLING))
    for until, required in (("its offset", 1.0), ("its row", None)):
        seconds = [[turn.planned if required else turn.seen for turn in held] for held in wakes.values()]
        for share in (0.50, 0.99):
            turn_by_turn = ratio_figure("", *([quantile(share, turn) for turn in held] for held in seconds))
            polled, waited = (quantile(share, [wake for turn in held for wake in turn]) for held in seconds)
            yield Figure(
                f"from a message to {until}, p{share * 100:.0f}, polled over longPollingMs=15s",
                polled / waited,
                turn_by_turn.low,
                turn_by_turn.high,
                required=required,
                note=f"{waited * 1e3:.1f} ms, polled {polled * 1e3:.1f} ms; {turns * _WAKES} messages each",
                detail={"seconds": waited, "polled_seconds": polled},
            )


class _Wakes(NamedTuple):
    """Seconds from each message until the source reported it to Spark, and until its row arrived."""

    planned: list[float]
    seen: list[float]


class _Queries:
    """Streams of one store into `foreachBatch`, one at a time, each from a checkpoint of its own."""

    def __init__(self, spark: SparkSession, stores: SampleStores, store: Path, looks_file: Path) -> None:
        self._spark, self._stores, self._store, self._looks_file = spark, stores, store, looks_file
        self._seen: dict[str, int] = {}
        self._has_seen = threading.Condition()

    def idle_cpu_seconds(self, options: dict[str, str]) -> float:
        """Return the processor time of the driver and its workers in some seconds without messages."""
        query = self._start(options)
        try:
            with _Sender(self._store) as sender:
                self._wake(query, sender, "warm up")
            time.sleep(_SETTLE_SECONDS)
            driver = int(self._spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())
            begin = family_cpu_seconds(driver)
            time.sleep(_IDLE_SECONDS)
            _raise_failure(query)
            return family_cpu_seconds(driver) - begin
        finally:
            query.stop()

    def wakes(self, options: dict[str, str]) -> _Wakes:
        """Send messages, each to an idle query, and return how long they took."""
        query, pauses, found = self._start(options), random.Random(1), _Wakes([], [])
        try:
            with _Sender(self._store) as sender:
                for number in range(10):
                    self._wake(query, sender, f"warm up {number}")
                for number in range(_WAKES):
                    time.sleep(pauses.uniform(*_PAUSES_SECONDS))
                    planned, seen = self._wake(query, sender, f"{number}")
                    found.planned.append(planned)
                    found.seen.append(seen)
                return found
        finally:
            query.stop()

    def _start(self, options: dict[str, str]) -> StreamingQuery:
        self._seen.clear()
        self._looks_file.write_bytes(b"")
        frame = (
            self._spark.readStream.format("woken_rmq")
            .options(**options, subscribe=TOPIC, columns="body", consumerGroup=GROUP, startingOffsets="latest")
            .load(str(self._store))
        )
        stream = frame.writeStream.foreachBatch(self._note)
        query = stream.option("checkpointLocation", str(self._stores.scratch("checkpoint"))).start()
        _wait(query, lambda: query.lastProgress is not None)  # its first batch, which is empty, fixes its start
        return query

    def _note(self, batch: DataFrame, _: int) -> None:
        rows, now_ns = batch.collect(), time.monotonic_ns()
        with self._has_seen:
            self._seen.update((bytes(row.body).decode(), now_ns) for row in rows)
            self._has_seen.notify_all()

    def _wake(self, query: StreamingQuery, sender: "_Sender", text: str) -> tuple[float, float]:
        """Send a message and return the seconds until the source reported it to Spark, and until its row arrived."""
        sent_ns = sender.send(text)
        with self._has_seen:
            if not self._has_seen.wait_for(lambda: text in self._seen, _LIMIT_SECONDS):
                _raise_failure(query)
                raise RuntimeError(f"the stream does not get on: {query.status}")
        planned_ns = min(noted for noted in read_noted(self._looks_file) if noted > sent_ns)
        return (planned_ns - sent_ns) / 1e9, (self._seen.pop(text) - sent_ns) / 1e9


class _Sender:
    """Another process that sends to the store."""

    def __init__(self, store: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SENDER, str(store), TOPIC],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "_Sender":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def send(self, text: str) -> int:
        """Send a message; return when, in ns of the machine's monotonic clock."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def _measure_publishing(spark: SparkSession, stores: SampleStores, looks_file: Path) -> Figure:
    """Read a backlog one message at a time: each trigger publishes, and the file has 1,000 offsets."""
    shape = Shape(20 * MANY_QUEUES, queues=MANY_QUEUES)
    store = SampleStores(stores.scratch("published")).path(shape)  # its own, for publishing writes to it
    options = {"subscribe": TOPIC, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "1", "path": str(store)}
    triggers = run_triggers(
        spark,
        looks_file,
        {"consumerGroup": GROUP, **options},
        stores.scratch("checkpoint"),
        lambda seconds, count: count >= _BATCHES,
    )
    spark_ms = median(triggers.spark_commits_ms())
    ours_ms = [one.total_ms for one in triggers.group]
    shares = sorted(one / spark_ms for one in ours_ms)
    return Figure(
        f"the group's part of a trigger at {MANY_QUEUES} queues, over Spark's own commit",
        median(shares),
        shares[0],
        shares[-1],
        required=0.5,
        at_most=True,
        note=f"{median(ours_ms):.1f} ms a trigger, on average {mean(ours_ms):.1f}; Spark's commit {spark_ms:.0f} ms",
        detail={"seconds": median(ours_ms) / 1e3, "spark_seconds": spark_ms / 1e3},
    )


class Triggers(NamedTuple):
    """The triggers of a stream with a backlog: what Spark reports, and what a member of a group spends on it."""

    spark_ms: list[Mapping[str, float]]  # durationMs
    group: list[GroupTimes]

    def spark_commits_ms(self) -> list[float]:
        """Return the time of Spark's own two commits of each batch."""
        return [one["walCommit"] + one["commitOffsets"] for one in self.spark_ms]


def run_triggers(
    spark: SparkSession,
    looks_file: Path,
    options: Mapping[str, str],
    checkpoint: Path,
    is_enough: Callable[[float, int], bool],
    warm_up: int = _WARM_UP,
) -> Triggers:
    """Run a stream until `is_enough` of the seconds and the number of the triggers after `warm_up`.

    The backlog must be enough for all of them.
    """
    looks_file.write_bytes(b"")
    query = (
        spark.readStream.format("timed_group")
        .options(**options)
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(checkpoint))
        .trigger(processingTime="0 seconds")
        .start()
    )
    try:
        _wait(query, lambda: _batch_id(query) >= warm_up)
        begin = time.perf_counter()
        _wait(query, lambda: is_enough(time.perf_counter() - begin, _batch_id(query) - warm_up))
        last = _batch_id(query)
        durations = [one["durationMs"] for one in query.recentProgress if warm_up < one["batchId"] <= last]
    finally:
        query.stop()
    group = read_group_times(looks_file)[warm_up + 1 : last + 1]
    if any("addBatch" not in one for one in durations) or {len(durations), len(group or durations)} != {last - warm_up}:
        raise RuntimeError(f"{len(durations)} batches and times of {len(group)}; expected {last - warm_up}")
    return Triggers(durations, group)


def _batch_id(query: StreamingQuery) -> int:
    progress = query.lastProgress
    return -1 if progress is None else progress["batchId"]


def quantile(share: float, values: Sequence[float]) -> float:
    """Return the quantile `share` of the values."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def wait_for_batches(query: StreamingQuery, batch_id: int) -> None:
    """Wait until a batch has ended. Raises the error of the query if it fails, and RuntimeError after two minutes."""
    _wait(query, lambda: _batch_id(query) >= batch_id)


def _wait(query: StreamingQuery, done: Callable[[], bool]) -> None:
    give_up = time.perf_counter() + _LIMIT_SECONDS
    while not done():
        _raise_failure(query)
        if time.perf_counter() > give_up:
            raise RuntimeError(f"the stream does not get on: {query.status}")
        time.sleep(0.05)


def _raise_failure(query: StreamingQuery) -> None:
    failure = query.exception()
    if failure is not None:
        raise failure
