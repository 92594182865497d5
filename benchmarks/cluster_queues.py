"""Triggers of a stream over many queues of a cluster: requests, processor time, memory, and the text of the offset.

The brokers are simulated, in another process. The stream reader is called as PySpark calls it on the driver. An idle
trigger is one without new messages. A full trigger plans new messages in every queue, up to the pickled partitions.
"""

import json
import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
from decoding import DEFAULT_COLUMNS
from figures import Figure
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable
from simulated_cluster import SimulatedCluster

from rmq_spark.datasource.spark.source import RmqDataSource
from rmq_spark.store import COLUMNS

_MESSAGES = 3  # in each queue, for each full trigger
_TRIGGERS = 5
# Brokers, topics, and the queues of each topic at each broker.
_SMALL, _LARGE = (5, 1, 400), (50, 1, 400)
_ONE_TOPIC, _MANY_TOPICS = (2, 1, 500), (2, 500, 4)
_GROWTH = 12.0  # the most that ten times the queues may cost


def measure_cluster_queues() -> Iterable[Figure]:
    """Yield the figures of each cluster, the largest one first, because freed memory is used again."""
    large = _Driver(_LARGE).run()
    small = _Driver(_SMALL).run()
    yield from _growth_figures(small, large)
    for shape, what, required in (
        (_ONE_TOPIC, "1,000 queues of one topic on two brokers", 2.0),
        (_MANY_TOPICS, "a pattern over 500 topics on two brokers", None),
    ):
        found = _Driver(shape).run()
        note = f"{found.idle_note()}; text {found.text_bytes >> 10} KiB, driver {found.driver_mib:.0f} MiB"
        yield _plain(f"requests for each broker of an idle trigger, {what}", found.requests, "", required, note)
        yield _plain(
            f"memory of a task, {what}", found.task_mib, "MiB", None, f"{found.rows} rows of {found.parts} tasks"
        )


class _Driver:
    """A stream reader over a simulated cluster, and what was measured."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self._shape = shape
        self.queues = shape[0] * shape[1] * shape[2]
        self.idle_s: list[float] = []
        self.idle_wall_s: list[float] = []
        self.full_s: list[float] = []
        self.requests = 0.0  # of an idle trigger, for each broker
        self.text_bytes = self.parts = self.rows = 0
        self.driver_mib = self.task_mib = 0.0

    def run(self) -> "_Driver":
        """Measure."""
        with SimulatedCluster(*self._shape) as cluster:
            cluster.advance(_MESSAGES)
            subscription = {"subscribe": "topic-0"} if self._shape[1] == 1 else {"subscribePattern": "topic-.*"}
            options = {"nameServer": cluster.address, "startingOffsets": "earliest", **subscription}
            before_mib = _memory_mib()
            schema = from_arrow_schema(pa.schema([(name, COLUMNS[name]) for name in DEFAULT_COLUMNS]))
            reader: Any = RmqDataSource(options).streamReader(schema)
            start = json.dumps(reader.initialOffset())
            start, planned = self._full(reader, start)
            for _ in range(_TRIGGERS):
                cluster.advance(_MESSAGES)
                start, planned = self._full(reader, start)
            self.driver_mib = _memory_mib() - before_mib
            self.text_bytes = len(start)
            self._idle(reader, start)
            cluster.clear_requests()
            for _ in range(_TRIGGERS):
                self._idle(reader, start)
            counts = cluster.clear_requests()
            counts.pop("name servers", None)
            self.requests = max(sum(count.values()) for count in counts.values()) / _TRIGGERS
            if self.queues <= 2000:
                self._read(reader, planned)
            reader.stop()
        return self

    def idle_note(self) -> str:
        """Say how long an idle trigger takes."""
        return f"{median(self.idle_s) * 1e3:.2f} ms of processor time, {median(self.idle_wall_s) * 1e3:.1f} ms in all"

    def _full(self, reader: Any, start: str) -> tuple[str, Sequence[Any]]:
        begin = time.process_time()
        end = json.dumps(reader.latestOffset(json.loads(start), ReadAllAvailable()))
        json.dumps(reader.reportLatestOffset())
        planned = reader.partitions(json.loads(start), json.loads(end))
        self.parts = len(planned)
        pickle.dumps(planned)
        self.full_s.append(time.process_time() - begin)
        if sum(piece.count for one in planned for piece in one.pieces) != self.queues * _MESSAGES:
            raise RuntimeError(f"the plan of {self.queues} queues is not complete")
        return end, planned

    def _idle(self, reader: Any, start: str) -> None:
        begin, begin_wall = time.process_time(), time.perf_counter()
        end = json.dumps(reader.latestOffset(json.loads(start), ReadAllAvailable()))
        self.idle_s.append(time.process_time() - begin)
        self.idle_wall_s.append(time.perf_counter() - begin_wall)
        if end != start:
            raise RuntimeError("an idle trigger returned another offset")

    def _read(self, reader: Any, planned: Sequence[Any]) -> None:
        """Read the partitions, as one task after another."""
        before_mib = _memory_mib()
        self.rows = sum(batch.num_rows for one in planned for batch in reader.read(one))
        self.task_mib = _memory_mib() - before_mib
        if self.rows != self.queues * _MESSAGES:
            raise RuntimeError(f"{self.rows} rows came out of {self.queues * _MESSAGES}")


def _growth_figures(small: _Driver, large: _Driver) -> Iterable[Figure]:
    counts = f"{large.queues:,} queues on {_LARGE[0]} brokers"
    measures: list[tuple[str, Callable[[_Driver], float], str]] = [
        ("processor time of an idle trigger", lambda one: median(one.idle_s) * 1e3, "ms"),
        ("processor time of a full trigger", lambda one: median(one.full_s) * 1e3, "ms"),
        ("text of the offset", lambda one: one.text_bytes / 1024, "KiB"),
        ("memory of the driver", lambda one: one.driver_mib, "MiB"),
    ]
    for name, measure, unit in measures:
        much, little = measure(large), measure(small)
        note = f"{much:.1f} {unit}, with {small.queues:,} queues {little:.1f} {unit}"
        yield _plain(f"{name}, {counts}, over a tenth", much / little, "", _GROWTH, note)


def _plain(name: str, value: float, unit: str, required: float | None, note: str) -> Figure:
    return Figure(name, value, value, value, required=required, at_most=True, unit=unit, note=note)


def _memory_mib() -> float:
    """Return the anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))
