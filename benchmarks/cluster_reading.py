"""Speed of reading a cluster: our reader, the official Java client, and Spark scans, alternately at one broker.

All read whole topics of messages with bodies of 200 bytes. The Java programs count messages and bytes of bodies:
DefaultMQPullConsumer with a thread for each queue and 32 messages a pull, and DefaultLitePullConsumer, which pulls
ahead by itself, also 32 at a time. Our reader is one thread, which reads one queue after another into Arrow columns.
The processor times are those of the client's process and of the broker's, from /proc.
"""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

from compat_kit.rocketmq import Java
from decoding import DEFAULT_COLUMNS
from figures import Figure, ratio_figure, take_turns
from processor_time import cpu_seconds, family_cpu_seconds
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from real_broker import JavaClient, RealBroker, new_folder, reading_topic, write_store

import rmq_spark

QUEUE_COUNTS = 4, 16
# How old the messages are, the required speed over the Java client, and how many messages of those asked for are read:
# pulls of old messages take several times as long.
_AGES = (("hot", 2.0, 1.0), ("old", 3.0, 0.4))
_WARM_UPS = 2  # of each program, because Java compiles while it runs
_THEIRS = {"pull": "DefaultMQPullConsumer", "lite": "DefaultLitePullConsumer"}


class Reading(NamedTuple):
    """The time that reading a topic took, and the processor time of client and broker."""

    seconds: float
    client_seconds: float
    broker_seconds: float


class _Case:
    """The ways to read one topic of a broker."""

    def __init__(self, broker: RealBroker, client: JavaClient, topic: str, messages: int) -> None:
        self._broker, self._client, self._topic, self._messages = broker, client, topic, messages

    def ours(self) -> Reading:
        """Read with `open_reader`, in this process."""
        with rmq_spark.open_reader(name_server=self._broker.address) as reader:
            bounds = reader.all_bounds(reader.queues(self._topic))
            return self._measure(
                lambda: sum(
                    batch.num_rows
                    for queue, known in bounds.items()
                    for batch in reader.read(queue, known.min_offset, known.max_offset, DEFAULT_COLUMNS)
                ),
                lambda: cpu_seconds(os.getpid()),
            )

    def theirs(self, op: str) -> Reading:
        """Read with a consumer of the Java client. It measures the time itself, without its start."""
        seconds = 0.0

        def read() -> int:
            nonlocal seconds
            answer = self._client.ask(op, self._topic, messages=self._messages)
            seconds = answer["seconds"]
            return int(answer["messages"])

        found = self._measure(read, self._client.cpu_seconds)
        return found._replace(seconds=seconds)

    def scan(self, spark: SparkSession, options: dict[str, str]) -> Reading:
        """Read with a Spark scan that counts."""
        frame = spark.read.format("rmq").options(**options, subscribe=self._topic).load()
        driver = int(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())

        def read() -> int:
            (row,) = frame.agg(F.count("*"), F.sum(F.length("body"))).collect()
            return int(row[0])

        return self._measure(read, lambda: family_cpu_seconds(driver))

    def _measure(self, read: Callable[[], int], client_seconds: Callable[[], float]) -> Reading:
        begin = time.perf_counter(), client_seconds(), self._broker.cpu_seconds()
        messages = read()
        end = time.perf_counter(), client_seconds(), self._broker.cpu_seconds()
        if messages != self._messages:
            raise RuntimeError(f"{messages} messages came out of {self._messages}")
        return Reading(*(after - before for before, after in zip(begin, end, strict=True)))


def measure_cluster_reading(
    java: Java, folder: Path, spark: SparkSession, messages: int, repeats: int
) -> Iterable[Figure]:
    """Yield the figures of hot and of old messages, at each number of queues."""
    for age, required, share in _AGES:
        count = int(messages * share)
        store = new_folder(folder / age) / "store"
        write_store(store, count, QUEUE_COUNTS)
        with ExitStack() as stack:
            broker = stack.enter_context(RealBroker(java, store, is_old=age == "old"))
            client = stack.enter_context(broker.client())
            for queues in QUEUE_COUNTS:
                case = _Case(broker, client, reading_topic(queues), count)
                what = f"{age}, {queues} queues"
                yield from _figures(what, required, count, _run(case, spark, broker.address, store, repeats))


def _run(case: _Case, spark: SparkSession, address: str, store: Path, repeats: int) -> dict[str, list[Reading]]:
    """Return the readings of each way, by its name."""
    found: dict[str, list[Reading]] = {}

    def measure(name: str, read: Callable[[], Reading]) -> Callable[[], float]:
        held = found.setdefault(name, [])

        def run() -> float:
            held.append(read())
            return 0.0

        return run

    ways = [
        measure("ours", case.ours),
        measure("pull", lambda: case.theirs("pull")),
        measure("lite", lambda: case.theirs("lite")),
        measure("scan", lambda: case.scan(spark, {"nameServer": address})),
        measure("directory", lambda: case.scan(spark, {"path": str(store)})),
    ]
    for _ in range(_WARM_UPS):
        for way in ways:
            way()
    for held in found.values():
        held.clear()
    take_turns(repeats, *ways)
    return found


def _figures(what: str, required: float, messages: int, found: dict[str, list[Reading]]) -> Iterable[Figure]:
    seconds = {name: [one.seconds for one in held] for name, held in found.items()}
    notes = {name: _note(messages, held) for name, held in found.items()}
    for op, consumer in _THEIRS.items():
        yield ratio_figure(
            f"open_reader over {consumer}, {what}",
            seconds[op],
            seconds["ours"],
            required=required,
            note=f"{notes['ours']}; Java {notes[op]}",
            detail={"ours": found["ours"], "java": found[op]},
        )
    for name, other in (("DefaultMQPullConsumer", "pull"), ("a scan of its directory", "directory")):
        yield ratio_figure(
            f"Spark scan of the cluster over {name}, {what}",
            seconds[other],
            seconds["scan"],
            note=f"{notes['scan']}; the other {notes[other]}",
            detail={"scan": found["scan"], "other": found[other]},
        )


def _note(messages: int, held: list[Reading]) -> str:
    rate = messages / median(one.seconds for one in held)
    client, broker = (median(one[field] for one in held) / messages * 1e6 for field in (1, 2))
    return f"{rate / 1e3:.0f} k/s, processor µs a message: client {client:.2f}, broker {broker:.2f}"
