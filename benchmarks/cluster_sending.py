"""Speed of sending to a cluster: our producer and our sink, the official Java producer, and Spark's Kafka sink.

All send messages with bodies of 200 bytes, alternately: to a topic with 8 queues on two real masters, or to a topic
with 8 partitions on a Kafka node. The Java producer sends synchronous batches of 32 messages, from one thread and from
four, batches as large as the broker takes, and single messages. Its bodies are ready, and so are the columns that
`send_many` gets. Both sinks write the same rows, which the JVM generates; ours does with both deliveries. All servers
flush as they do by default, after answering.

The reference is one thread of the Java producer with batches of 32. The processor times are those of the client's
processes (of Spark: the driver and its Python workers) and of the servers, from /proc.
"""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pyarrow as pa
from compat_kit.clusters import TwoBrokers
from compat_kit.rocketmq import Java
from figures import Figure, ratio_figure, take_turns
from kafka_node import KafkaNode
from processor_time import cpu_seconds, family_cpu_seconds
from pyspark.sql import DataFrame, SparkSession
from real_broker import JavaClient, new_folder, two_brokers
from sample_stores import BODY_BYTES

import rmq_spark

_TOPIC = "sent"
_QUEUES = 4  # on each of two brokers
_SHARE = 0.4  # of the messages asked for: each way sends them in each round
_SINGLE_SHARE = 0.01
_FEW = 1000
_PART = 100_000  # messages of one send_many
_DISPATCH_SECONDS = 60
_WARM_UPS = 3  # of each program, because Java compiles while it runs
_ROW = f"cast(lpad(cast(id as string), {BODY_BYTES}, 'message body of some length ') as binary)"
# The ways of the Java producer: messages of a batch (0: as many as the broker takes), and threads.
_THEIRS = {"java-32": (32, 1), "java-32-4": (32, 4), "java-largest": (0, 1)}
_NAMES = {
    "send-many": "send_many",
    "sink": "Spark sink, at least once",
    "exact": "Spark sink, exactly once",
    "kafka": "Spark's Kafka sink",
    "java-32": "Java producer, batches of 32",
    "java-32-4": "Java producer, batches of 32, 4 threads",
    "java-largest": "Java producer, largest batches",
}
_COMPARED: tuple[tuple[str, str, float | None], ...] = (
    ("send-many", "java-32", 2.0),
    ("send-many", "java-32-4", None),
    ("send-many", "java-largest", None),
    ("sink", "java-32", 2.0),
    ("sink", "java-32-4", None),
    ("sink", "java-largest", None),
    ("sink", "kafka", 1.0),
    ("exact", "sink", None),
    ("exact", "java-32", None),
    ("exact", "kafka", 0.8),
)


class Sent(NamedTuple):
    """The time that sending took, and the processor time of client and servers."""

    seconds: float
    client_seconds: float
    server_seconds: float
    messages: int


class _Case:
    """The ways to send, each a method that sends once."""

    def __init__(
        self, cluster: TwoBrokers, client: JavaClient, kafka: KafkaNode, spark: SparkSession, messages: int
    ) -> None:
        self._cluster, self._client, self._kafka, self._spark = cluster, client, kafka, spark
        self._messages = int(messages * _SHARE)
        self._singles = max(int(messages * _SINGLE_SHARE), 1)
        assert spark.sparkContext._jvm is not None
        self._driver = int(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())
        self._bodies = pa.table({"body": [f"{number}".encode().rjust(BODY_BYTES, b".") for number in range(_PART)]})
        self._to_kafka = 0  # messages

    def send_many(self) -> Sent:
        """Send tables with our producer, in this process."""
        with rmq_spark.open_store(name_server=self._cluster.address) as producer:

            def send() -> None:
                for begin in range(0, self._messages, _PART):
                    producer.send_many(self._bodies.slice(0, min(_PART, self._messages - begin)), topic=_TOPIC)

            return self._measure(self._messages, send, self._own_seconds)

    def send(self) -> Sent:
        """Send single messages with our producer, in this process."""
        body = b"." * BODY_BYTES
        with rmq_spark.open_store(name_server=self._cluster.address) as producer:

            def send() -> None:
                for _ in range(self._singles):
                    producer.send(_TOPIC, body)

            return self._measure(self._singles, send, self._own_seconds)

    def sink(self, delivery: str) -> Sent:
        """Write rows with our sink."""
        writer = self._rows("body").write.format("rmq").mode("append")
        writer = writer.options(nameServer=self._cluster.address, topic=_TOPIC, delivery=delivery)
        return self._measure(self._messages, writer.save, self._spark_seconds)

    def kafka(self, messages: int | None = None) -> Sent:
        """Write the same rows with Spark's Kafka sink, or fewer of them."""
        count = messages or self._messages
        rows = self._rows("value").limit(count) if messages else self._rows("value")
        writer = rows.write.format("kafka").options(**self._kafka.sink_options(_TOPIC))
        self._to_kafka += count
        return _measured(count, writer.save, self._spark_seconds, self._kafka.cpu_seconds, lambda: None)

    def theirs(self, batch: int, threads: int) -> Sent:
        """Send batches with the Java producer, which measures the time itself, without its start."""
        return self._theirs(self._messages, batch, threads)

    def theirs_singly(self) -> Sent:
        """Send single messages with the Java producer, one after the other."""
        return self._theirs(self._singles, 1, 1)

    def check_kafka(self) -> None:
        """Compare the number of messages in the Kafka node. Raises RuntimeError at fewer than were sent."""
        reader = self._spark.read.format("kafka").option("kafka.bootstrap.servers", self._kafka.address)
        found = reader.option("subscribe", _TOPIC).load().count()
        if found < self._to_kafka:
            raise RuntimeError(f"{found} messages are in the Kafka node; expected {self._to_kafka}")

    def _theirs(self, messages: int, batch: int, threads: int) -> Sent:
        seconds = 0.0

        def send() -> None:
            nonlocal seconds
            answer = self._client.ask("send-all", _TOPIC, messages=messages, batch=batch, threads=threads)
            seconds = answer["seconds"]

        found = self._measure(messages, send, self._client.cpu_seconds)
        return found._replace(seconds=seconds)

    def _rows(self, column: str) -> DataFrame:
        return self._spark.range(self._messages, numPartitions=4).selectExpr(f"{_ROW} as {column}")

    def _measure(self, messages: int, send: Callable[[], object], client_seconds: Callable[[], float]) -> Sent:
        expected = self._stored() + messages
        return _measured(messages, send, client_seconds, self._broker_seconds, lambda: self._await_stored(expected))

    def _await_stored(self, expected: int) -> None:
        """Wait until the queues have had this many messages. A broker answers before a message is in its queue."""
        give_up = time.monotonic() + _DISPATCH_SECONDS
        while (stored := self._stored()) < expected:
            if time.monotonic() > give_up:
                raise RuntimeError(f"the queues have had {stored} messages; expected {expected}")
            time.sleep(0.1)

    def _stored(self) -> int:
        """Return how many messages the topic's queues have had."""
        with rmq_spark.open_reader(name_server=self._cluster.address) as reader:
            return sum(bounds.max_offset for bounds in reader.all_bounds(reader.queues(_TOPIC)).values())

    def _own_seconds(self) -> float:
        return cpu_seconds(os.getpid())

    def _spark_seconds(self) -> float:
        return family_cpu_seconds(self._driver)

    def _broker_seconds(self) -> float:
        return sum(cpu_seconds(broker.pid) for broker in self._cluster.brokers.values())


def _measured(
    messages: int,
    send: Callable[[], object],
    client_seconds: Callable[[], float],
    server_seconds: Callable[[], float],
    settle: Callable[[], object],
) -> Sent:
    """Measure. What servers do until they are settled counts as their processor time, and not as time."""
    server_begin, begin, client_begin = server_seconds(), time.perf_counter(), client_seconds()
    send()
    seconds, client = time.perf_counter() - begin, client_seconds() - client_begin
    settle()
    return Sent(seconds, client, server_seconds() - server_begin, messages)


def measure_cluster_sending(
    java: Java, folder: Path, spark: SparkSession, messages: int, repeats: int
) -> Iterable[Figure]:
    """Yield the figures of tables and rows, and of single messages."""
    with ExitStack() as stack:
        cluster = stack.enter_context(two_brokers(java, new_folder(folder / "sending")))
        kafka = stack.enter_context(KafkaNode(new_folder(folder / "kafka"), java.network.prefix))
        kafka.create_topic(_TOPIC, _QUEUES * len(cluster.brokers))
        with cluster.client() as admin:
            admin("create-topic", topic=_TOPIC, queues=_QUEUES)
        client = stack.enter_context(JavaClient(java, cluster.address))
        case = _Case(cluster, client, kafka, spark, messages)
        rmq_spark.prepare_sink(name_server=cluster.address, ledger_broker=next(iter(cluster.brokers)))
        ways: dict[str, Callable[[], Sent]] = {"send-many": case.send_many, "kafka": case.kafka}
        ways |= {"sink": partial(case.sink, "atLeastOnce"), "exact": partial(case.sink, "exactlyOnce")}
        ways |= {name: partial(case.theirs, *how) for name, how in _THEIRS.items()}
        case.kafka(_FEW)  # a large write to a node that has just started may time out
        yield from _table_figures(_run(ways, repeats))
        case.check_kafka()
        yield _single_figure(_run({"send": case.send, "java": case.theirs_singly}, repeats))


def _run(ways: dict[str, Callable[[], Sent]], repeats: int) -> dict[str, list[Sent]]:
    """Return what each way took in each round, by its name."""
    found: dict[str, list[Sent]] = {name: [] for name in ways}

    def measure(name: str) -> Callable[[], float]:
        def run() -> float:
            found[name].append(ways[name]())
            return 0.0

        return run

    measures = [measure(name) for name in ways]
    for _ in range(_WARM_UPS):
        for run in measures:
            run()
    for held in found.values():
        held.clear()
    take_turns(repeats, *measures)
    return found


def _table_figures(found: dict[str, list[Sent]]) -> Iterable[Figure]:
    for ours, other, required in _COMPARED:
        yield _ratio(f"{_NAMES[ours]} over {_NAMES[other]}", found[ours], found[other], required)


def _single_figure(found: dict[str, list[Sent]]) -> Figure:
    return _ratio("send over the Java producer's synchronous send", found["send"], found["java"], 1.0)


def _ratio(name: str, ours: list[Sent], other: list[Sent], required: float | None) -> Figure:
    return ratio_figure(
        name,
        [one.seconds for one in other],
        [one.seconds for one in ours],
        required=required,
        note=f"{_note(ours)}; the other {_note(other)}",
        detail={"ours": ours, "other": other},
    )


def _note(held: list[Sent]) -> str:
    rate = median(one.messages / one.seconds for one in held)
    client = median(one.client_seconds / one.messages for one in held) * 1e6
    server = median(one.server_seconds / one.messages for one in held) * 1e6
    return f"{rate / 1e3:.3g} k/s, processor µs a message: client {client:.3g}, servers {server:.3g}"
