"""A real broker appends to the store of a live stream between two of its commits: nothing is written over."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from compat_kit import our_stores
from compat_kit.rocketmq import Broker, Client, Java, Request, Verifier
from compat_kit.rows import differences, our_rows, their_rows
from compat_kit.writers import QUEUES, TOPIC, Notes

import rmq_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.compat, pytest.mark.spark]


def note_new(store: Path, notes: Notes, texts: list[str]) -> None:
    """Note where messages of ours went: behind all that were known, in order."""
    ends = notes.ends()
    for number, text in enumerate(texts):
        queue = number % QUEUES
        notes.add(queue, ends[queue], text)
        ends[queue] += 1
    assert notes.problems(store) == []
    rows = {queue: held for queue, held in our_rows(store).items() if queue.topic == TOPIC}
    assert sum(map(len, rows.values())) == len(notes.places)


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_broker_between_two_commits_of_a_live_query(
    spark: "SparkSession",
    java: Java,
    verifier: Verifier,
    tmp_path: Path,
    copied: Callable[[Path], Path],
    end: str,
) -> None:
    source, target, notes = tmp_path / "source", tmp_path / "target", Notes()
    for path in (source, target):
        with our_stores.open_small(path) as writer:
            writer.create_topic(TOPIC, QUEUES)
            if path == target:  # from here its files have the small sizes
                notes.add(0, writer.send(TOPIC, "seed", queue_id=0).queue_offset, "seed")
    reader = spark.readStream.format("rmq").options(subscribe=TOPIC, columns="topic,queueId,keys,body")
    frame = reader.option("startingOffsets", "earliest").load(str(source))
    stream = frame.writeStream.format("rmq").option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = stream.start(str(target))
    try:
        for name in ("first", "second"):
            texts = [f"{name} {number}" for number in range(10)]
            with rmq_spark.open_store(str(source)) as writer:
                for number, text in enumerate(texts):
                    writer.send(TOPIC, text, queue_id=number % QUEUES)
            query.processAllAvailable()
            note_new(target, notes, texts)
            if name == "first":
                broker = Broker(java, target, **our_stores.broker_conf())
                broker.start()
                with Client(broker) as client:
                    for number in range(10):
                        (sent,) = client("produce", topic=TOPIC, text=f"theirs {number}", queueId=number % QUEUES)
                        notes.add(sent["queueId"], sent["queueOffset"], f"theirs {number}")
                broker.stop() if end == "stop" else broker.kill()
        assert query.isActive
    finally:
        query.stop()
    ours = {queue: rows for queue, rows in our_rows(target).items() if queue.topic == TOPIC}
    (report,) = verifier.verify([Request(copied(target), our_stores.index_conf(our_stores.SMALL))])
    assert report["recovered"]["truncated"] == 0
    theirs = {queue: rows for queue, rows in their_rows(report["messages"]).items() if queue.topic == TOPIC}
    assert differences(ours, theirs) == []
