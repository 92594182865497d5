"""Queries of a consumer group through real Spark: published offsets, restarts, and several at once."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import rmq_spark

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = pytest.mark.spark

GROUP = {"consumerGroup": "billing"}
SHARED = GROUP | {"assignment": "shared", "groupFallback": "earliest"}
NOW = {"availableNow": True}
BUSY = {"processingTime": "10 milliseconds"}
WITHIN_S = 120


class Sink:
    """Keeps each batch's rows by its number, after it called `before`; calls `during` with the number then."""

    def __init__(self) -> None:
        self.batches: dict[int, list[tuple[int, int]]] = {}
        self.before: Callable[[], object] = lambda: None
        self.during: Callable[[int], object] = lambda batch_id: None

    def __call__(self, frame: "DataFrame", batch_id: int) -> None:
        self.before()
        self.batches[batch_id] = sorted((row["queueId"], row["queueOffset"]) for row in frame.collect())
        self.during(batch_id)

    @property
    def rows(self) -> list[tuple[int, int]]:
        return sorted(row for rows in list(self.batches.values()) for row in rows)


class Groups:
    """A store that a program of ours appends to, and queries over it, each with a checkpoint and a sink of its own."""

    def __init__(self, spark: "SparkSession", folder: Path) -> None:
        self._spark, self._folder = spark, folder
        self.path = folder / "store"
        self.store = rmq_spark.open_store(self.path, segment_bytes=1 << 20)
        self.queries: list[StreamingQuery] = []

    def append(self, queue_id: int, count: int) -> None:
        for _ in range(count):
            self.store.send("orders", "x", queue_id=queue_id)

    def start(
        self,
        sink: Sink,
        trigger: dict[str, Any] = NOW,
        name: str = "a",
        spark: "SparkSession | None" = None,
        **given: str,
    ) -> "StreamingQuery":
        reader = (spark or self._spark).readStream.format("rmq").options(subscribe="orders", **given)
        writer = reader.load(str(self.path)).writeStream.foreachBatch(sink).queryName(name)
        query = writer.option("checkpointLocation", str(self._folder / f"checkpoint-{name}")).trigger(**trigger).start()
        self.queries.append(query)
        return query

    def run(self, sink: Sink, **given: Any) -> "StreamingQuery":
        query = self.start(sink, **given)
        assert query.awaitTermination(WITHIN_S), "does not come to an end"
        return query

    def offsets(self) -> dict[int, int]:
        return rmq_spark.group_offsets(self.path, "billing").get("orders", {})

    def read(self, **given: str) -> list[tuple[int, int]]:
        reader = self._spark.read.format("rmq").options(subscribe="orders", **given)
        return sorted((row["queueId"], row["queueOffset"]) for row in reader.load(str(self.path)).collect())


@pytest.fixture
def groups(spark: "SparkSession", tmp_path: Path) -> Iterator[Groups]:
    """A store of the topic orders, with 3 messages in queue 0 and none in queue 1."""
    made = Groups(spark, tmp_path)
    made.store.create_topic("orders", 2)
    made.append(0, 3)
    yield made
    for query in made.queries:
        query.stop()
    made.store.close()


def wait_until(holds: Callable[[], object], query: "StreamingQuery | None" = None) -> None:
    """Wait until a condition holds; raise the error of a query that failed meanwhile."""
    until = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < until, "does not come true"
        assert query is None or query.isActive, query.exception()  # type: ignore[union-attr]
        time.sleep(0.01)


def queue(number: int, begin: int, end: int) -> list[tuple[int, int]]:
    return [(number, offset) for offset in range(begin, end)]


@pytest.mark.slow
def test_after_available_now_the_group_stands_where_the_snapshot_ended(groups: Groups) -> None:
    sink = Sink()
    sink.during = lambda batch_id: groups.append(1, 2) if batch_id == 0 else None
    groups.run(sink, **GROUP, startingOffsets="earliest", maxOffsetsPerTrigger="2")
    assert sink.batches == {0: queue(0, 0, 2), 1: queue(0, 2, 3)}
    assert groups.offsets() == {0: 3, 1: 0}
    groups.run(sink, **GROUP)
    assert groups.offsets() == {0: 3, 1: 2}


def test_a_query_that_is_stopped_publishes_its_last_batch_with_the_listener_that_a_session_has(groups: Groups) -> None:
    sink = Sink()
    query = groups.start(sink, {"processingTime": "1 hour"}, **GROUP, startingOffsets="earliest")
    wait_until(lambda: query.lastProgress, query)
    assert groups.offsets() == {}, "no trigger came after the batch, so nothing could be published yet"
    query.stop()
    wait_until(lambda: groups.offsets() == {0: 3, 1: 0})
    assert sink.batches == {0: queue(0, 0, 3)}


def test_a_query_that_dies_in_a_batch_leaves_its_group_where_the_batch_before_ended(groups: Groups) -> None:
    sink, seen = Sink(), []

    def die(batch_id: int) -> None:
        seen.append(groups.offsets())
        if batch_id == 1:
            raise RuntimeError("the sink dies")

    sink.during = die
    with pytest.raises(Exception, match="the sink dies"):
        groups.run(sink, **GROUP, startingOffsets="earliest", maxOffsetsPerTrigger="2")
    assert seen == [{}, {0: 2, 1: 0}]
    assert groups.offsets() == {0: 2, 1: 0}


def test_without_a_listener_a_query_that_is_stopped_leaves_its_group_one_batch_behind(
    groups: Groups, spark: "SparkSession"
) -> None:
    bare = spark.newSession()  # the listeners are a session's
    rmq_spark.register(bare)
    sink = Sink()
    given = GROUP | {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "2"}
    seen = []
    sink.during = lambda batch_id: seen.append((groups.offsets(), groups.append(1, 1)))
    query = groups.start(sink, BUSY, spark=bare, **given)
    wait_until(lambda: len(seen) >= 4, query)
    query.stop()
    # The finished batches of the checkpoint are at most one batch ahead of the group.
    checkpoint = groups._folder / "checkpoint-a"
    done = max(int(file.name) for file in (checkpoint / "commits").glob("[0-9]*"))
    ends = [json.loads((checkpoint / "offsets" / str(n)).read_text().splitlines()[-1]) for n in (done - 1, done)]
    allowed = [{int(queue_id): at for queue_id, at in end["orders"].items()} for end in ends]
    assert groups.offsets() in allowed
    assert [offsets for offsets, _ in seen][:2] == [{}, {0: 2, 1: 0}]


@pytest.mark.slow
def test_without_its_checkpoint_a_query_goes_on_where_its_group_stands(groups: Groups) -> None:
    first, second = Sink(), Sink()
    groups.run(first, **GROUP, startingOffsets="group")
    assert first.rows == queue(0, 0, 3)
    groups.append(0, 2)
    groups.run(second, name="b", **GROUP, startingOffsets="group")
    assert second.rows == queue(0, 3, 5)
    assert groups.offsets() == {0: 5, 1: 0}


def test_a_batch_query_reads_from_where_a_group_stands_and_moves_nothing(groups: Groups) -> None:
    groups.append(1, 1)
    rmq_spark.reset_offsets(groups.path, "billing", {"orders": {0: 2, 1: 0}})
    for _ in range(2):
        assert groups.read(**GROUP, startingOffsets="group") == [(0, 2), (1, 0)]
    assert groups.offsets() == {0: 2, 1: 0}


def test_a_running_query_goes_where_its_group_is_reset_to(groups: Groups) -> None:
    sink = Sink()
    query = groups.start(sink, BUSY, **GROUP, startingOffsets="earliest")
    wait_until(lambda: groups.offsets() == {0: 3, 1: 0}, query)
    rmq_spark.reset_offsets(groups.path, "billing", {"orders": {0: 1}})
    wait_until(lambda: len(sink.rows) == 5, query)
    assert sink.rows == sorted(queue(0, 0, 3) + queue(0, 1, 3))
    wait_until(lambda: groups.offsets() == {0: 3, 1: 0}, query)


@pytest.mark.slow
def test_a_second_query_of_a_group_is_refused_by_name_and_takes_over_when_the_first_is_stopped(groups: Groups) -> None:
    first, second = Sink(), Sink()
    query = groups.start(first, BUSY, name="one", queryName="one", **GROUP, startingOffsets="earliest")
    wait_until(lambda: groups.offsets() == {0: 3, 1: 0}, query)
    other = groups.start(second, name="two", **GROUP, startingOffsets="group")
    with pytest.raises(Exception, match=r'GroupConflictError: .*the consumer group billing .*query "one"'):
        other.awaitTermination(WITHIN_S)
    assert query.isActive
    query.stop()
    groups.append(0, 1)
    groups.run(second, name="two", **GROUP, startingOffsets="group")
    assert (first.rows, second.rows) == (queue(0, 0, 3), queue(0, 3, 4))


@pytest.mark.slow
def test_two_queries_of_one_session_share_a_group(groups: Groups) -> None:
    sinks = Sink(), Sink()
    queries = [groups.start(sink, BUSY, name=f"q{number}", **SHARED) for number, sink in enumerate(sinks)]
    appended = {0: 3, 1: 0}

    def both_read() -> bool:
        for queue_id in appended:
            groups.append(queue_id, 1)
            appended[queue_id] += 1
        return {queue_id for sink in sinks for queue_id, _ in sink.rows} == {0, 1} and all(sink.rows for sink in sinks)

    wait_until(both_read, queries[0])
    for query in queries:
        query.processAllAvailable()
    wait_until(lambda: groups.offsets() == appended, queries[1])
    rows = [row for sink in sinks for row in sink.rows]
    assert sorted(rows) == queue(0, 0, appended[0]) + queue(1, 0, appended[1])


@pytest.mark.slow
def test_listeners_hear_how_far_a_group_is_behind(groups: Groups, spark: "SparkSession") -> None:
    heard: list[tuple[str, pa.Table]] = []
    listener = rmq_spark.GroupLagListener(lambda group, table: heard.append((group, table)))
    spark.streams.addListener(listener)
    own = {"consumerGroup": "listened-to"}  # progress events of earlier tests may still arrive
    try:
        query = groups.run(Sink(), **own, startingOffsets="earliest", maxOffsetsPerTrigger="2")
        wait_until(lambda: [group for group, _ in heard].count(own["consumerGroup"]) >= 2)
    finally:
        spark.streams.removeListener(listener)
    told = [table for group, table in heard if group == own["consumerGroup"]]
    assert told[-1].column("topic").to_pylist()[:1] == ["orders"]
    marks = [json.loads(progress.sources[0].latestOffset)["@"] for progress in query.recentProgress]
    assert [mark["lagMessages"] for mark in marks][:2] == [1, 0]
    assert {mark["group"] for mark in marks} == {own["consumerGroup"]}
    assert {mark["path"] for mark in marks} == {str(groups.path)}


def take_away(groups: Groups) -> None:
    """Give the group's queues to another member, as happens to a query that is stopped for longer than its lease."""
    (path,) = (groups.path / "rmq" / "groups").glob("*/claims.json")
    claims = json.loads(path.read_text())
    claims["change"] += 1
    claims["owners"] = ["elsewhere@1#0"]
    claims["queues"]["orders"] = {
        queue_id: [0, epoch + 1] for queue_id, (_, epoch) in claims["queues"]["orders"].items()
    }
    path.write_text(json.dumps(claims))


@pytest.mark.slow
def test_a_task_reads_a_queue_only_while_it_is_the_querys(groups: Groups) -> None:
    sink = Sink()
    given = GROUP | {"startingOffsets": "earliest"}
    sink.before = lambda: take_away(groups)
    with pytest.raises(Exception, match=r"orders/0: not the member .* any more in the consumer group billing"):
        groups.run(sink, **given, fenceLostQueues="true")
    assert sink.rows == []
    assert groups.offsets() == {}
    sink.before = lambda: None
    groups.run(sink, **given, orderly="true")
    assert sink.rows == queue(0, 0, 3)
    assert groups.offsets() == {0: 3, 1: 0}


def test_a_trigger_that_waits_is_woken_by_a_message(groups: Groups) -> None:
    sink = Sink()
    groups.start(sink, {"processingTime": "0 seconds"}, **GROUP, startingOffsets="earliest", longPollingMs="10m")
    wait_until(lambda: sink.rows == queue(0, 0, 3))
    groups.append(1, 1)
    wait_until(lambda: sink.rows == [*queue(0, 0, 3), (1, 0)])


@pytest.mark.slow
def test_a_query_can_be_stopped_while_its_trigger_waits(groups: Groups) -> None:
    sink, second = Sink(), Sink()
    wait_s = 2 * WITHIN_S
    given = GROUP | {"startingOffsets": "earliest", "longPollingMs": f"{wait_s}s"}
    query = groups.start(sink, {"processingTime": "0 seconds"}, **given)
    wait_until(lambda: groups.offsets() == {0: 3, 1: 0}, query)  # published by the trigger that waits from now on
    begun = time.monotonic()
    query.stop()
    assert time.monotonic() - begun < wait_s, "the stop has waited for the trigger"
    assert not query.isActive
    assert query.exception() is None
    assert groups.offsets() == {0: 3, 1: 0}
    groups.append(1, 1)
    groups.run(second, **GROUP)
    assert second.batches.popitem()[1] == [(1, 0)], "the group is free for who starts next"
    assert time.monotonic() - begun < wait_s, "the next query has waited for the first one's trigger"
