"""What a consumer group in a cluster costs a trigger: over a trigger without a group, and over Spark's own two commits.

A stream over two real brokers reads a backlog, one message of every queue in each trigger, so every queue has an offset
to publish. As the only member of its group it takes all queues. The same stream without a group, alternately, is the
comparison. The averages of triggers are compared, because a member publishes and looks for resets every 5 s, and looks
at the members every 20 s, at whichever trigger that is.

The group's part of a trigger is the time of all calls that only a member makes (`timed_group`): planning, and waiting
for the requests 38 (members), 14 (offsets) and 15 (commits). Spark's own commits are `walCommit` and `commitOffsets` of
the same batches. Beside the triggers, a thread sends heartbeats (34), and the session's listener commits the end of a
batch every 5 s; their times are in the notes.
"""

import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pyarrow as pa
from compat_kit.rocketmq import Java
from figures import Figure, ratio_figure, take_turns
from grouping import Triggers, run_triggers
from pyspark.sql import SparkSession
from real_broker import new_folder, two_brokers
from sample_stores import BODY_BYTES

import rmq_spark

_CASES = ((16, 1200), (1000, 200))  # queues on two brokers, and messages of each: more than the triggers of a turn
_TURNS = 2
_WARM_UP = 8  # triggers
_TURN_SECONDS = 20.0  # four publications, and a look at the members
_STAGES = ("latestOffset", "getBatch", "queryPlanning", "addBatch", "walCommit", "commitOffsets")
_KEPT_PROGRESS = "spark.sql.streaming.numRecentProgressUpdates"
_LIMIT_SECONDS = 120


def measure_cluster_groups(java: Java, folder: Path, spark: SparkSession, looks_file: Path) -> Iterable[Figure]:
    """Yield the figures of each number of queues."""
    spark.conf.set(_KEPT_PROGRESS, "5000")
    home = new_folder(folder / "group")
    with two_brokers(java, home) as cluster:
        for queues, messages in _CASES:
            topic = f"grouped-{queues}"
            with cluster.client() as client:
                client("create-topic", topic=topic, queues=queues // len(cluster.brokers))
            _fill(cluster.address, topic, list(cluster.brokers), queues, messages)
            turns = _Turns(spark, looks_file, home, cluster.address, topic, queues)
            take_turns(_TURNS, turns.run_with, turns.run_without)
            yield from turns.figures()
    new_folder(home).rmdir()
    spark.conf.unset(_KEPT_PROGRESS)


def _fill(address: str, topic: str, brokers: list[str], queues: int, messages: int) -> None:
    """Send this number of messages to each queue."""
    ids = np.arange(queues // len(brokers), dtype=np.int32)
    with rmq_spark.open_store(name_server=address) as producer:
        for broker in brokers:
            queue_ids = pa.array(np.repeat(ids, messages))
            bodies = pa.array([b"x" * BODY_BYTES] * len(queue_ids))
            names = pa.array([broker] * len(queue_ids))
            producer.send_many(pa.table({"body": bodies, "brokerName": names, "queueId": queue_ids}), topic=topic)


class _Turns:
    """Streams over a topic from its begin, with a group and without, each from a checkpoint of its own."""

    def __init__(
        self, spark: SparkSession, looks_file: Path, home: Path, address: str, topic: str, queues: int
    ) -> None:
        self._spark, self._looks_file, self._home, self._queues = spark, looks_file, home, queues
        self._options = {"nameServer": address, "subscribe": topic, "maxOffsetsPerTrigger": str(queues)}
        self._numbers = itertools.count()
        self._with: list[Triggers] = []
        self._without: list[Triggers] = []
        self._listener_ms: list[float] = []  # a trigger, of each turn

    def run_with(self) -> float:
        """Run as the only member of a new group."""
        group = {"consumerGroup": f"group-{self._queues}-{next(self._numbers)}", "groupFallback": "earliest"}
        with _listener_times() as calls_ms:
            self._with.append(self._run(group))
        self._listener_ms.append(sum(calls_ms) / len(self._with[-1].spark_ms))
        return _trigger_ms(self._with[-1])

    def run_without(self) -> float:
        """Run without a group."""
        self._without.append(self._run({"startingOffsets": "earliest"}))
        return _trigger_ms(self._without[-1])

    def _run(self, options: Mapping[str, str]) -> Triggers:
        checkpoint = self._home / f"checkpoint-{self._queues}-{next(self._numbers)}"
        return run_triggers(
            self._spark,
            self._looks_file,
            {**self._options, **options},
            checkpoint,
            lambda seconds, count: seconds >= _TURN_SECONDS,
            _WARM_UP,
        )

    def figures(self) -> Iterator[Figure]:
        """Yield the figures of all turns."""
        with_ms, without_ms = ([_trigger_ms(one) for one in turns] for turns in (self._with, self._without))
        stages = [
            f"{name} {_mean_of(self._with, name):.0f} and {_mean_of(self._without, name):.0f}" for name in _STAGES
        ]
        counts = "+".join(str(len(one.spark_ms)) for one in (*self._with, *self._without))
        yield ratio_figure(
            f"a trigger at {self._queues} queues, with a consumer group over without",
            with_ms,
            without_ms,
            note=f"{mean(with_ms):.0f} and {mean(without_ms):.0f} ms: {', '.join(stages)}; {counts} triggers",
            detail={"seconds": mean(with_ms) / 1e3, "seconds_without": mean(without_ms) / 1e3},
        )
        group_ms = [mean(one.total_ms for one in turn.group) for turn in self._with]
        spark_ms = [mean(turn.spark_commits_ms()) for turn in self._with]
        found = [one for turn in self._with for one in turn.group]
        requests = {
            "38": mean(one.members_ms for one in found),
            "14": mean(one.offsets_ms for one in found),
            "15": mean(one.commits_ms for one in found),
        }
        parts = {**requests, "the rest": mean(group_ms) - sum(requests.values())}
        beside = {"heartbeats": mean(one.heartbeats_ms for one in found), "listener": mean(self._listener_ms)}
        yield ratio_figure(
            f"the group's part of a trigger at {self._queues} queues, over Spark's own commit",
            group_ms,
            spark_ms,
            note=f"{mean(group_ms):.1f} ms: {_listed(parts)}, the longest {max(one.total_ms for one in found):.0f}; "
            f"Spark's commit {mean(spark_ms):.0f} ms; beside the trigger {_listed(beside)}",
            detail={"seconds": mean(group_ms) / 1e3, "spark_seconds": mean(spark_ms) / 1e3},
        )


def _trigger_ms(turn: Triggers) -> float:
    return mean(one["triggerExecution"] for one in turn.spark_ms)


def _mean_of(turns: Iterable[Triggers], stage: str) -> float:
    return mean(one[stage] for turn in turns for one in turn.spark_ms)


def _listed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in parts.items())


@contextmanager
def _listener_times() -> Iterator[list[float]]:
    """Return a list that gets the ms of each batch's call of the session's `GroupOffsetListener` in the block.

    The end of the block waits until the listener has heard of the end of a query.
    """
    listener: Any = rmq_spark.GroupOffsetListener
    on_progress, on_end = listener.onQueryProgress, listener.onQueryTerminated
    calls_ms: list[float] = []
    has_ended = threading.Event()

    def timed(self: Any, event: Any) -> None:
        begin_ns = time.perf_counter_ns()
        on_progress(self, event)
        calls_ms.append((time.perf_counter_ns() - begin_ns) / 1e6)

    def note_end(self: Any, event: Any) -> None:
        on_end(self, event)
        has_ended.set()

    listener.onQueryProgress, listener.onQueryTerminated = timed, note_end
    try:
        yield calls_ms
        if not has_ended.wait(_LIMIT_SECONDS):
            raise RuntimeError("Spark does not tell the listener of the end of the query")
    finally:
        listener.onQueryProgress, listener.onQueryTerminated = on_progress, on_end
