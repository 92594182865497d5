"""Others append to the store of a live stream between two of its commits: nothing is written over, nothing is lost."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
from support.appender import Appender
from support.appender_log import AppenderLog
from support.appender_settings import AppenderSettings

import rmq_spark
from rmq_spark.store import Producer, RecordBuilderSettings
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_writer import WriterSettings
from rmq_spark.store.testing.sample_message import SampleMessage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = pytest.mark.spark

QUEUES = 3
BROKER = AppenderSettings(queues=QUEUES, death_chance=0, pause_chance=0)
SIZES = FileSizes(BROKER.segment_bytes, BROKER.queue_file_bytes, BROKER.batch_queue_file_bytes)
ANOTHER_PROCESS = """
import sys
import rmq_spark
store = rmq_spark.open_store(sys.argv[1])
for number in range(30):
    store.send("orders", f"{sys.argv[2]} {number}", queue_id=number % 3)
if sys.argv[3] == "close":
    store.close()
"""


class LiveStream:
    """One query, from one store into another, that lives while others append to the second."""

    def __init__(self, spark: "SparkSession", folder: Path) -> None:
        self.source, self.target, self.expected = folder / "source", folder / "target", list[str]()
        for path in (self.source, self.target):
            with Producer(str(path), WriterSettings(sizes=SIZES), RecordBuilderSettings(sizes=SIZES), "sync") as store:
                store.create_topic("orders", QUEUES)
        reader = spark.readStream.format("rmq").options(subscribe="orders", columns="topic,queueId,body")
        frame = reader.option("startingOffsets", "earliest").load(str(self.source))
        writer = frame.writeStream.format("rmq").option("checkpointLocation", str(folder / "checkpoint"))
        self.query: StreamingQuery = writer.start(str(self.target))

    def commit(self, name: str) -> None:
        """Have the query commit messages of that name."""
        with rmq_spark.open_store(str(self.source)) as store:
            for number in range(20):
                store.send("orders", f"{name} {number}", queue_id=number % QUEUES)
        self.query.processAllAvailable()
        self.expect(name, 20)

    def expect(self, name: str, count: int) -> None:
        """See that the target has these messages too now, behind all there was: once, in order."""
        self.expected += [f"{name} {number}" for number in range(count)]
        found: list[list[str]] = []
        with rmq_spark.open_reader(str(self.target)) as reader:
            reader.refresh()
            for queue in reader.queues("orders"):
                held = reader.bounds(queue)
                batches = reader.read(queue, 0, held.max_offset, ("queueOffset", "body"), check_crc=True)
                rows = [row for batch in batches for row in batch.to_pylist()]
                assert [row["queueOffset"] for row in rows] == list(range(held.max_offset))
                found.append([row["body"].decode() for row in rows])
        assert found == [
            [text for text in self.expected if int(text.split()[1]) % QUEUES == queue] for queue in range(QUEUES)
        ]


def another_process(end: str) -> Callable[[LiveStream, str, Path], None]:
    def append(stream: LiveStream, name: str, folder: Path) -> None:
        subprocess.run([sys.executable, "-c", ANOTHER_PROCESS, str(stream.target), name, end], check=True)

    return append


def broker(end: str) -> Callable[[LiveStream, str, Path], None]:
    """Something that appends as a broker does, and stops in order or dies."""

    def append(stream: LiveStream, name: str, folder: Path) -> None:
        one = Appender(stream.target, AppenderLog(folder / f"history {name}"), Random(name), BROKER)
        one.open()
        for number in range(30):
            one.append([SampleMessage("orders", number % QUEUES, f"{name} {number}".encode())])
        one.close() if end == "close" else one.drop()

    return append


@pytest.fixture
def stream(spark: "SparkSession", tmp_path: Path) -> Iterator[LiveStream]:
    found = LiveStream(spark, tmp_path)
    yield found
    found.query.stop()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["close", "leave"])
@pytest.mark.parametrize("who", [another_process, broker])
def test_what_others_append_between_two_commits_stays_and_is_there_once(
    stream: LiveStream,
    tmp_path: Path,
    who: Callable[[str], Callable[[LiveStream, str, Path], None]],
    end: str,
) -> None:
    query_id = stream.query.runId
    stream.commit("first")
    who(end)(stream, "theirs", tmp_path)
    stream.expect("theirs", 30)
    stream.commit("last")
    assert stream.query.isActive
    assert stream.query.runId == query_id
