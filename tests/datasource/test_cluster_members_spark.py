"""Queries of a consumer group in a cluster in this process through real Spark: shares, restarts and resets."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from group_queries import reset

from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import RunningCluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = pytest.mark.spark

GROUP, COUNT = "billing", 10
WITHIN_S = 120


class Sink:
    """The rows that a query has delivered: broker and queue offset of each."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int]] = []

    def __call__(self, frame: "DataFrame", batch_id: int) -> None:
        self.rows += [(row["brokerName"], row["queueOffset"]) for row in frame.collect()]


class Group:
    """A cluster with ten messages on each of two brokers, and queries that are members of a group."""

    def __init__(self, spark: "SparkSession", cluster: RunningCluster, folder: Path) -> None:
        self._spark, self.cluster, self._folder = spark, cluster, folder
        self.queries: list[StreamingQuery] = []

    def start(self, sink: Sink, name: str, *, is_run: bool = False, **given: str) -> "StreamingQuery":
        """Start a query. If `is_run`, it ends when all is read."""
        options = {"subscribe": "orders", "consumerGroup": GROUP, "groupFallback": "earliest", **given}
        stream = self._spark.readStream.format("rmq").options(nameServer=self.cluster.address, **options).load()
        trigger: dict[str, Any] = {"availableNow": True} if is_run else {"processingTime": "50 milliseconds"}
        writer = stream.writeStream.foreachBatch(sink).queryName(name).trigger(**trigger)
        query = writer.option("checkpointLocation", str(self._folder / name)).start()
        self.queries.append(query)
        return query

    def stop(self, query: "StreamingQuery") -> None:
        """Stop a query between two batches: Spark would repeat a batch that it stops."""
        folder = self._folder / query.name
        self.until(lambda: len({*(folder / "offsets").glob("[0-9]*")}) == len({*(folder / "commits").glob("[0-9]*")}))
        query.stop()
        self.until(lambda: self.members() == len([one for one in self.queries if one.isActive]))

    def until(self, holds: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + WITHIN_S
        while not holds():
            for query in self.queries:
                assert not query.exception(), query.exception()
            assert time.monotonic() < ends_s, "does not happen"
            time.sleep(0.02)

    def members(self) -> int:
        """Return how many members both brokers know. -1 if they know different ones."""
        known = {tuple(broker.members.ids(GROUP)) for broker in self.cluster.brokers.values()}
        return len(known.pop()) if len(known) == 1 else -1

    def offsets(self) -> set[int | None]:
        key = QueueKey("orders", 0)
        return {self.cluster.loop.run(broker.offsets.find, GROUP, key) for broker in self.cluster.brokers.values()}

    def send(self) -> None:
        for broker in self.cluster.brokers:
            self.cluster.send("orders", *[b"x"] * COUNT, broker=broker)

    def rows(self, begin: int, end: int) -> list[tuple[str, int]]:
        """Return the rows of these queue offsets on both brokers."""
        return [(broker, offset) for broker in self.cluster.brokers for offset in range(begin, end)]


@pytest.fixture
def group(spark: "SparkSession", tmp_path: Path) -> Iterator[Group]:
    with RunningCluster(tmp_path / "cluster", brokers=2) as cluster:
        cluster.create_topic("orders", queues=1)
        group = Group(spark, cluster, tmp_path)
        group.send()
        try:
            yield group
        finally:
            for query in group.queries:
                query.stop()


def test_two_queries_share_the_queues_and_one_takes_over_when_the_other_stops(group: Group) -> None:
    one, two = Sink(), Sink()
    group.start(one, "one")
    group.until(lambda: len(one.rows) == 2 * COUNT)
    assert sorted(one.rows) == group.rows(0, COUNT)
    second = group.start(two, "two")
    group.until(lambda: group.members() == 2)
    group.until(lambda: group.offsets() == {COUNT})  # the first query has published what it gave up
    group.send()
    group.until(lambda: len(one.rows) + len(two.rows) >= 4 * COUNT)
    assert sorted(one.rows + two.rows) == group.rows(0, 2 * COUNT)
    assert {broker for broker, _ in two.rows} in ({"broker-a"}, {"broker-b"})
    group.until(lambda: group.offsets() == {2 * COUNT})
    group.stop(second)
    group.send()
    group.until(lambda: len(one.rows) + len(two.rows) >= 6 * COUNT)
    assert sorted(one.rows + two.rows) == group.rows(0, 3 * COUNT)


@pytest.mark.slow
def test_query_continues_at_its_checkpoint_and_follows_resets(group: Group) -> None:
    sink = Sink()
    query = group.start(sink, "one")
    group.until(lambda: len(sink.rows) == 2 * COUNT)
    group.stop(query)
    group.send()
    query = group.start(sink, "one")
    group.until(lambda: len(sink.rows) >= 4 * COUNT)
    assert sorted(sink.rows) == group.rows(0, 2 * COUNT)
    group.until(lambda: group.offsets() == {2 * COUNT})

    reset(group.cluster, "broker-a")
    group.until(lambda: len(sink.rows) >= 6 * COUNT)
    again = [("broker-a", offset) for offset in range(2 * COUNT)]
    assert sorted(sink.rows) == sorted([*group.rows(0, 2 * COUNT), *again])
    group.until(lambda: group.offsets() == {2 * COUNT})

    group.stop(query)
    broker, queue = group.cluster.brokers["broker-b"], QueueKey("orders", 0)
    group.cluster.loop.run(broker.offsets.commit, GROUP, queue, 3)  # as mqadmin does where nobody is connected (4.9)
    group.start(sink, "one")
    again += [("broker-b", offset) for offset in range(3, 2 * COUNT)]
    group.until(lambda: len(sink.rows) >= 4 * COUNT + len(again))
    assert sorted(sink.rows) == sorted([*group.rows(0, 2 * COUNT), *again])


def test_orderly_runs_publish_everything_and_begin_without_a_wait(group: Group) -> None:
    sink = Sink()
    for run in (1, 2):
        query = group.start(sink, "one", is_run=True, orderly="true")
        assert query.awaitTermination(WITHIN_S)
        assert sink.rows == [row for end in range(1, run + 1) for row in group.rows((end - 1) * COUNT, end * COUNT)]
        assert group.offsets() == {run * COUNT}
        assert group.members() == 0
        group.send()
