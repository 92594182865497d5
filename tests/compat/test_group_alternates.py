"""A real consumer and our query alternate in one consumer group: each resumes where the other stopped."""

import base64
import logging
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from compat_kit import our_stores
from compat_kit.dispatch import await_units, queue_ends
from compat_kit.rocketmq import Broker, Client, Java
from compat_kit.writers import QUEUES, TOPIC
from pyspark.sql.types import StructType

import rmq_spark
from rmq_spark.datasource.spark.source import RmqDataSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytestmark = [pytest.mark.compat, pytest.mark.spark]

GROUP = "alternating"
READ = {"subscribe": TOPIC, "columns": "body", "consumerGroup": GROUP}
# Each round: how the consumer reads, how its broker ends, the checkpoint of our query, and its options. If the
# checkpoint is an old one, the consumer has read more since; the group's offset decides then.
# The first consumer pulls, and commits queue by queue. If the first offsets of a group come at the same time, each of
# the broker's threads creates the map of the group, and the offsets in all but one are lost
# (ConsumerOffsetManager#commitOffset).
ROUNDS: tuple[tuple[str, str, str, Mapping[str, str]], ...] = (
    ("pull", "stop", "first", {"startingOffsets": "group", "commitOffsets": "required"}),
    ("push", "kill", "second", {"startingOffsets": "group", "maxOffsetsPerTrigger": "5"}),
    ("push", "stop", "second", {"startingOffsets": "group", "onOffsetConflict": "group"}),
)
CONF = our_stores.broker_conf() | {"flushConsumerOffsetInterval": 200}  # of ms, once it has lived for ten seconds
COUNT = 9  # messages sent before each of them reads, spread over all queues
LIMIT_SECONDS = 60


class Shared:
    """A store, the messages sent to it, and the messages delivered to each consumer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sent: list[str] = []
        self.delivered: list[tuple[str, str]] = []
        with our_stores.open_small(path) as writer:
            writer.create_topic(TOPIC, QUEUES)

    def we_send(self, name: str) -> None:
        """Append with our writer, while no broker runs."""
        with our_stores.open_small(self.path) as writer:
            for number in range(COUNT):
                self.sent.append(f"{name} {number}")
                writer.send(TOPIC, self.sent[-1], queue_id=number % QUEUES)

    def they_send(self, client: Client, name: str) -> None:
        """Append by a producer, and wait until consumers can see it."""
        before = sum(self.ends().values())
        for number in range(COUNT):
            self.sent.append(f"{name} {number}")
            client("produce", topic=TOPIC, text=self.sent[-1], queueId=number % QUEUES)
        await_units(self.path, TOPIC, before + COUNT)

    def waiting(self) -> list[str]:
        """Return the messages that were not delivered yet."""
        known = {text for _, text in self.delivered}
        return [text for text in self.sent if text not in known]

    def offsets(self) -> dict[int, int]:
        """Return the group's offsets, as our side reads them."""
        return rmq_spark.group_offsets(str(self.path), GROUP).get(TOPIC, {})

    def ends(self) -> dict[int, int]:
        """Return where the queues end."""
        return queue_ends(self.path, TOPIC)

    def consume(self, client: Client, how: str) -> None:
        """Have the real consumer read and commit the waiting messages."""
        wanted = self.waiting()
        if how == "push":
            lines = client(
                "push", topic=TOPIC, group=GROUP, count=len(wanted), timeoutMs=LIMIT_SECONDS * 1000, body=True
            )
        else:
            lines = []
            for queue_id, offset in their_offsets(client).items():
                place = {"queueId": queue_id, "from": max(offset, 0)}
                lines += client("pull", topic=TOPIC, group=GROUP, commit=True, body=True, **place)
        self.delivered += [("theirs", text_of(line)) for line in lines if line["event"] == "message"]


def text_of(line: Mapping[str, Any]) -> str:
    """Return the body of a message that a client printed."""
    return base64.b64decode(line["body"]).decode()


def their_offsets(client: Client) -> dict[int, int]:
    """Return the group's offsets, as a broker reports them."""
    lines = client("offsets", topic=TOPIC, group=GROUP)
    return {line["queueId"]: line["committed"] for line in lines if line["event"] == "group"}


def start(
    spark: "SparkSession", shared: Shared, checkpoint: Path, options: Mapping[str, str], name: str
) -> "StreamingQuery":
    """Start our query; messages of its batches are noted as delivered to `name`."""

    def note(batch: "DataFrame", _: int) -> None:
        shared.delivered += [(name, bytes(row.body).decode()) for row in batch.collect()]

    frame = spark.readStream.format("rmq").options(**READ, **options).load(str(shared.path))
    return frame.writeStream.foreachBatch(note).option("checkpointLocation", str(checkpoint)).start()


def await_offsets(shared: Shared, wanted: Mapping[int, int]) -> None:
    """Wait until the group has the wanted offsets: brokers and Spark's listeners write them with a delay."""
    give_up = time.monotonic() + LIMIT_SECONDS
    while shared.offsets() != wanted and time.monotonic() < give_up:
        time.sleep(0.05)
    assert shared.offsets() == wanted


def test_a_consumer_and_our_query_alternate_and_each_message_comes_once(
    spark: "SparkSession", java: Java, tmp_path: Path
) -> None:
    shared = Shared(tmp_path / "store")
    ends = shared.ends()
    for number, (how, end, checkpoint, options) in enumerate(ROUNDS):
        with Broker(java, shared.path, **CONF) as broker, Client(broker) as client:
            if number:
                assert their_offsets(client) == ends, "the broker reads what our query published"
            shared.they_send(client, f"{number} for them")
            wanted = Counter(shared.waiting())
            shared.consume(client, how)
            assert Counter(text for name, text in shared.delivered if text in wanted) == wanted
            shared.they_send(client, f"{number} for us")
            committed = their_offsets(client)
            if end == "kill":
                await_offsets(shared, committed)
                broker.kill()
        assert shared.offsets() == committed, "we read what the broker's consumer committed"
        wanted = Counter(shared.waiting())
        query = start(spark, shared, tmp_path / checkpoint, options, f"ours {number}")
        try:
            query.processAllAvailable()
            assert Counter(text for name, text in shared.delivered if name == f"ours {number}") == wanted
            shared.we_send(f"{number} by us")
            query.processAllAvailable()
            ends = shared.ends()
        finally:
            query.stop()
        await_offsets(shared, ends)
        shared.we_send(f"{number} between")
    assert Counter(text for _, text in shared.delivered) + Counter(shared.waiting()) == Counter(shared.sent)
    assert len(shared.waiting()) == COUNT


def test_beside_a_broker_our_query_reads_on_and_leaves_the_offsets_to_the_broker(
    spark: "SparkSession", java: Java, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = Shared(tmp_path / "store")
    shared.we_send("before")
    first = shared.ends()
    query = start(spark, shared, tmp_path / "checkpoint", {"startingOffsets": "group"}, "ours")
    try:
        query.processAllAvailable()
        await_offsets(shared, first)  # published by the idle trigger after the batch
        with Broker(java, shared.path, **CONF) as broker, Client(broker) as client:
            stood = their_offsets(client)
            assert stood == shared.offsets()
            for name in ("once", "again"):
                shared.they_send(client, name)
                query.processAllAvailable()
            assert shared.waiting() == []
            query.stop()
            assert query.exception() is None
            required = {"startingOffsets": "group", "commitOffsets": "required"}
            refused = start(spark, shared, tmp_path / "refused", required, "refused")
            with pytest.raises(Exception, match="a broker holds the store"):
                refused.processAllAvailable()
            refused.stop()
            assert count_warnings(shared, client, caplog) == 1
            assert their_offsets(client) == stood
            broker.kill()
        assert shared.offsets() == stood
    finally:
        query.stop()
    query = start(spark, shared, tmp_path / "checkpoint", {"startingOffsets": "group"}, "ours, later")
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    await_offsets(shared, shared.ends())
    assert Counter(text for name, text in shared.delivered if name.startswith("ours")) == Counter(shared.sent)


def count_warnings(shared: Shared, client: Client, caplog: pytest.LogCaptureFixture) -> int:
    """Return how often a reader warns in three triggers beside a broker. It runs in this process, which has its log."""
    # In a group of its own: it is a member for as long as this process lives.
    options = READ | {"path": str(shared.path), "startingOffsets": "group", "consumerGroup": "warned"}
    source = RmqDataSource(options)
    reader = source.streamReader(StructType.fromDDL(source.schema()))
    offset = reader.initialOffset()
    with caplog.at_level(logging.WARNING, "rmq_spark"):
        for number in range(3):
            shared.they_send(client, f"warned {number}")
            offset = reader.latestOffset(offset, reader.getDefaultReadLimit())
            assert offset[TOPIC] == {str(queue): end for queue, end in shared.ends().items()}
    reader.stop()
    return sum("are not published" in record.message for record in caplog.records)
