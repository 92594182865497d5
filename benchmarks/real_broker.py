"""A real broker that is measured, or two: the store, the processor time, and the Java client.

The broker has the settings of a default installation, except for its memory. Its store is written by `send_many` before
it starts, so that all clients read the same bytes. It may count all messages as old: then it returns at most 8 for a
pull, as it does for messages that are further from the log's end than 40 % of the machine's memory.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
from processor_time import cpu_seconds
from sample_stores import BODY_BYTES

import rmq_spark

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "compat"))

from compat_kit.build import UnavailableError
from compat_kit.clusters import TwoBrokers
from compat_kit.network import Network
from compat_kit.rocketmq import Broker, Java, Line

VERSION = "5.3.3"
WAKE_TOPICS = ("wake-ours", "wake-theirs")
_FLAGS = ("-Xms1g", "-Xmx1g", "-XX:MaxDirectMemorySize=1g", "-XX:+UseG1GC")
_CONF = {
    "mappedFileSizeCommitLog": 1 << 30,
    "mappedFileSizeConsumeQueue": 300_000 * 20,
    "maxHashSlotNum": 5_000_000,
    "maxIndexNum": 20_000_000,
    "timerWheelEnable": False,
}
_OLD = {"accessMessageInMemoryMaxRatio": 0}
_PART = 100_000  # messages of one send_many


def reading_topic(queues: int) -> str:
    """Return the topic with this number of queues."""
    return f"speed-{queues}"


def write_store(path: Path, messages: int, queue_counts: tuple[int, ...]) -> None:
    """Write a store with `messages` in the topic of each number of queues, and with empty topics for latency."""
    with rmq_spark.open_store(str(path), flush="async") as store:
        for topic in WAKE_TOPICS:
            store.create_topic(topic, 1)
        for queues in queue_counts:
            store.create_topic(reading_topic(queues), queues)
            for begin in range(0, messages, _PART):
                numbers = range(begin, min(begin + _PART, messages))
                table = pa.table(
                    {
                        "body": [f"{number}".encode().ljust(BODY_BYTES, b".") for number in numbers],
                        "tags": pa.array([f"tag{number % 10}" for number in numbers]),
                        "keys": pa.array([f"key{number}" for number in numbers]),
                        # A producer's batches go to one queue each.
                        "queueId": pa.array([number // 32 % queues for number in numbers], pa.int32()),
                    }
                )
                store.send_many(table, topic=reading_topic(queues))


class RealBroker:
    """A broker and a name server on a store. Entered: it serves. `is_old`: it counts all messages as old."""

    def __init__(self, java: Java, store: Path, *, is_old: bool = False) -> None:
        conf: dict[str, object] = {**_CONF, **(_OLD if is_old else {})}
        self._java, self._broker = java, Broker(java, store, **conf)

    def __enter__(self) -> Self:
        self._broker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._broker.kill()

    @property
    def address(self) -> str:
        """The value of the option nameServer."""
        return self._broker.namesrv

    def cpu_seconds(self) -> float:
        """Return the processor time of broker and name server since their start."""
        return cpu_seconds(self._broker.pid)

    def client(self) -> "JavaClient":
        """Return a Java client of the broker."""
        return JavaClient(self._java, self.address)


def two_brokers(java: Java, folder: Path) -> TwoBrokers:
    """Return a cluster of two masters without messages, with the settings of a default installation."""
    return TwoBrokers(java, folder, **_CONF)


class JavaClient:
    """The official Java client in a process of its own, for one operation at a time. Entered and left."""

    def __init__(self, java: Java, address: str) -> None:
        self._program = java.start("speed", ["--namesrv", address])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._program.kill()

    def cpu_seconds(self) -> float:
        """Return the processor time of the process since its start."""
        return cpu_seconds(self._program.process.pid)

    def ask(self, op: str, topic: str, **fields: Any) -> Line:
        """Do an operation, and return its answer. Raises RuntimeError if the client failed."""
        self.begin(op, topic, **fields)
        return self.next_line()

    def begin(self, op: str, topic: str, **fields: Any) -> None:
        """Begin an operation. Its answer is the next line."""
        self._program.write({"op": op, "topic": topic, **fields})

    def next_line(self) -> Line:
        """Return the next line, such as a message that was listened to."""
        return self._program.read()


def find_java(home: Path) -> Java:
    """Return how RocketMQ is run in this process's network. See `enter_network`."""
    return Java(VERSION, Network(VERSION, home), home, _FLAGS)


def enter_network(home: Path) -> int | None:
    """Repeat this program in a network in which RocketMQ starts, and return its exit code.

    Return None if this process is in such a network. Raises UnavailableError if there is none.
    """
    network = Network(VERSION, home)
    try:
        if not network.prefix:
            return None
        return subprocess.run([*network.prefix, sys.executable, *sys.argv], check=False).returncode
    finally:
        network.close()


def new_folder(path: Path) -> Path:
    """Return an empty folder."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


__all__ = [
    "WAKE_TOPICS",
    "JavaClient",
    "RealBroker",
    "UnavailableError",
    "enter_network",
    "find_java",
    "new_folder",
    "reading_topic",
    "two_brokers",
    "write_store",
]
