"""Streams through real Spark: restarts, replays and triggers; no row is lost or duplicated."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import rmq_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from tests.datasource.conftest import GrowingStore

pytestmark = pytest.mark.spark

Grow = Callable[..., "GrowingStore"]
NOW = {"availableNow": True}
WITHIN_S = 180


class Sink:
    """Keeps the rows of each batch by its number; can fail in a given batch, or call a function in it."""

    def __init__(self) -> None:
        self.batches: dict[int, list[tuple[int, int]]] = {}
        self.dies_at: int | None = None
        self.during: Callable[[int], object] = lambda batch_id: None

    def __call__(self, frame: "DataFrame", batch_id: int) -> None:
        rows = [(row["queueId"], row["queueOffset"]) for row in frame.collect()]
        self.batches[batch_id] = sorted(rows)
        self.during(batch_id)
        if batch_id == self.dies_at:
            raise RuntimeError("the sink dies")

    @property
    def rows(self) -> list[tuple[int, int]]:
        return sorted(row for rows in self.batches.values() for row in rows)


class Streams:
    """Starts queries over one store with one checkpoint."""

    def __init__(self, spark: "SparkSession", folder: Path) -> None:
        self._spark, self._checkpoint = spark, folder / "checkpoint"
        self.sink = Sink()
        self.queries: list[StreamingQuery] = []

    def start(self, path: Path, trigger: dict[str, Any], **given: str) -> "StreamingQuery":
        options = {"subscribe": "orders"} | given
        reader = self._spark.readStream.format("rmq").options(**options)
        writer = reader.load(str(path)).writeStream.foreachBatch(self.sink)
        query = writer.option("checkpointLocation", str(self._checkpoint)).trigger(**trigger).start()
        self.queries.append(query)
        return query

    def run(self, path: Path, trigger: dict[str, Any] = NOW, **given: str) -> "StreamingQuery":
        query = self.start(path, trigger, **given)
        assert query.awaitTermination(WITHIN_S), "does not come to an end"
        return query

    def offsets(self) -> list[dict[str, Any]]:
        """Return the source's offset of every batch that Spark planned."""
        files = sorted((self._checkpoint / "offsets").glob("[0-9]*"), key=lambda file: int(file.name))
        return [json.loads(file.read_text().splitlines()[-1]) for file in files]


@pytest.fixture
def streams(spark: "SparkSession", tmp_path: Path):
    made = Streams(spark, tmp_path)
    yield made
    for query in made.queries:
        query.stop()


def queue(number: int, begin: int, end: int) -> list[tuple[int, int]]:
    return [(number, offset) for offset in range(begin, end)]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "rows"), [("earliest", queue(0, 0, 5)), ("latest", queue(0, 3, 5))])
def test_a_first_batch_that_fails_begins_again_where_it_first_began(
    streams: Streams, grow: Grow, first: str, rows: list[tuple[int, int]]
) -> None:
    store = grow()
    store.append("orders", 0, 3)
    streams.sink.dies_at = 0
    with pytest.raises(Exception, match="the sink dies"):
        streams.run(store.path, startingOffsets=first)
    store.append("orders", 0, 2)
    streams.sink.dies_at = None
    streams.run(store.path, startingOffsets="latest")
    assert streams.sink.rows == rows


@pytest.mark.slow
def test_an_idle_latest_query_that_ends_before_its_first_row_loses_nothing(streams: Streams, grow: Grow) -> None:
    store = grow()
    store.append("orders", 0, 3)
    query = streams.start(store.path, {"processingTime": "50 milliseconds"})
    query.processAllAvailable()
    query.stop()
    assert streams.sink.rows == []
    assert streams.offsets() == [{"orders": {"0": 3}, "@": {"v": 1}}]
    store.append("orders", 0, 2)
    streams.run(store.path)
    assert streams.sink.rows == queue(0, 3, 5)


@pytest.mark.slow
def test_a_committed_checkpoint_goes_on_where_it_stood(streams: Streams, grow: Grow) -> None:
    store = grow(queues=2)
    store.append("orders", 0, 3)
    streams.run(store.path, startingOffsets="earliest")
    store.append("orders", 1, 2)
    streams.run(store.path, startingOffsets="earliest")
    assert streams.sink.batches == {0: queue(0, 0, 3), 1: queue(1, 0, 2)}


@pytest.mark.slow
def test_a_batch_that_failed_comes_again_with_the_same_rows(streams: Streams, grow: Grow) -> None:
    store = grow()
    store.append("orders", 0, 6)
    streams.sink.dies_at = 1
    with pytest.raises(Exception, match="the sink dies"):
        streams.run(store.path, startingOffsets="earliest", maxOffsetsPerTrigger="2")
    assert streams.sink.batches[1] == queue(0, 2, 4)
    store.append("orders", 0, 1)
    streams.sink.dies_at = None
    streams.sink.batches.clear()
    streams.run(store.path, startingOffsets="earliest")  # without a limit, but the planned batch does not change
    assert streams.sink.batches == {1: queue(0, 2, 4), 2: queue(0, 4, 7)}


def test_an_idle_query_plans_no_empty_batches(streams: Streams, grow: Grow) -> None:
    store = grow(queues=3)
    store.append("orders", 0, 3)
    streams.sink.dies_at = 3  # ends an endless sequence of empty batches
    query = streams.start(store.path, {"processingTime": "10 milliseconds"}, startingOffsets="earliest")
    for _ in range(5):
        query.processAllAvailable()  # each sees at least one more trigger
    assert list(streams.sink.batches) == [0]
    store.append("payments", 0, 1)
    query.processAllAvailable()
    assert list(streams.sink.batches) == [0]


@pytest.mark.slow
def test_available_now_ends_and_leaves_what_came_meanwhile_to_the_next_run(streams: Streams, grow: Grow) -> None:
    store = grow(queues=1)
    store.append("orders", 0, 4)

    def append_more(batch_id: int) -> None:
        if batch_id == 0:
            store.append("orders", 0, 3)
            store.append("orders", 2, 3)  # a new queue

    streams.sink.during = append_more
    streams.run(store.path, startingOffsets="earliest", maxOffsetsPerTrigger="2")
    assert streams.sink.batches == {0: queue(0, 0, 2), 1: queue(0, 2, 4)}
    streams.run(store.path)
    assert streams.sink.rows == queue(0, 0, 7) + queue(2, 0, 3)


def test_a_queue_and_a_topic_that_appear_are_read_from_their_beginning(streams: Streams, grow: Grow) -> None:
    store = grow(queues=1)
    store.append("orders", 0, 2)
    given = {"subscribePattern": "orders.*"}
    reader = streams._spark.readStream.format("rmq").options(**given).load(str(store.path))
    query = reader.writeStream.foreachBatch(streams.sink).option("checkpointLocation", str(streams._checkpoint)).start()
    streams.queries.append(query)
    query.processAllAvailable()
    assert streams.sink.rows == []
    store.append("orders", 7, 2)
    query.processAllAvailable()
    store.append("orders-eu", 0, 2)
    query.processAllAvailable()
    assert streams.sink.rows == queue(0, 0, 2) + queue(7, 0, 2)


@pytest.mark.slow
def test_retention_that_overtakes_fails_with_the_lost_range_or_counts_it(streams: Streams, grow: Grow) -> None:
    store = grow()
    store.append("orders", 0, 30, size=300)
    streams.sink.dies_at = 1
    with pytest.raises(Exception, match="the sink dies"):
        streams.run(store.path, startingOffsets="earliest", maxOffsetsPerTrigger="2")
    streams.sink.dies_at = None
    store.expire_segment()
    with pytest.raises(
        Exception, match=r"rmq_spark.DataLossError: data loss in queue orders/0: 2 messages, .*\[2, 4\)"
    ):
        streams.run(store.path)
    streams.run(store.path, failOnDataLoss="false")
    offsets = [offset for _, offset in streams.sink.rows]
    first = offsets[2]
    assert first > 4
    assert offsets == [0, 1, *range(first, 30)]
    lost = streams.offsets()[-1]["@"]["lost"]["orders"]["0"]
    assert lost == first - 4  # the replayed batch skipped two more, when it was read


def test_limits_are_shared_over_queues(streams: Streams, grow: Grow) -> None:
    store = grow(queues=3)
    store.append("orders", 0, 100)
    store.append("orders", 1, 10)
    streams.run(store.path, startingOffsets="earliest", maxOffsetsPerTrigger="55")
    assert {number: len(rows) for number, rows in streams.sink.batches.items()} == {0: 55, 1: 55}
    assert streams.sink.batches[0] == queue(0, 0, 50) + queue(1, 0, 5)
    assert streams.sink.rows == queue(0, 0, 100) + queue(1, 0, 10)


def test_trigger_once_passes_over_the_limits(streams: Streams, grow: Grow) -> None:
    store = grow()
    store.append("orders", 0, 9)
    streams.run(store.path, {"once": True}, startingOffsets="earliest", maxOffsetsPerTrigger="2")
    assert streams.sink.batches == {0: queue(0, 0, 9)}


@pytest.mark.slow
def test_one_checkpoint_serves_different_triggers(streams: Streams, grow: Grow) -> None:
    store = grow()
    store.append("orders", 0, 3)
    streams.run(store.path, startingOffsets="earliest")
    query = streams.start(store.path, {"processingTime": "10 milliseconds"})
    store.append("orders", 0, 3)
    query.processAllAvailable()
    query.stop()
    store.append("orders", 0, 3)
    streams.run(store.path, {"once": True})
    assert streams.sink.rows == queue(0, 0, 9)
    assert sum(map(len, streams.sink.batches.values())) == 9


def test_the_offsets_in_the_checkpoint_are_the_canonical_text(streams: Streams, grow: Grow) -> None:
    store = grow(queues=11)
    store.append("orders", 10, 1)
    store.append("orders", 9, 1)
    streams.run(store.path, startingOffsets="earliest", subscribe="orders")
    (offset,) = streams.offsets()
    assert list(offset) == ["orders", "@"]
    assert list(offset["orders"]) == [str(number) for number in range(11)]
    assert offset["@"] == {"v": 1, "start": {"orders": {"9": 0, "10": 0}}}


def test_what_progress_shows_can_be_pasted_into_starting_offsets(
    streams: Streams, grow: Grow, spark: "SparkSession"
) -> None:
    store = grow()
    store.append("orders", 0, 3)
    query = streams.run(store.path, startingOffsets="earliest")
    source = query.lastProgress.sources[0]  # type: ignore[union-attr]
    assert json.loads(source.latestOffset) == {"orders": {"0": 3}, "@": {"v": 1}}  # type: ignore[arg-type]
    store.append("orders", 0, 2)
    reader = spark.read.format("rmq").options(subscribe="orders", startingOffsets=source.endOffset)
    assert [row["queueOffset"] for row in reader.load(str(store.path)).collect()] == [3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("ending_before", [{}, {"endingOffsets": "latest"}])
def test_stop_at_end_is_not_misled_by_a_batch_that_an_earlier_run_planned(
    streams: Streams, grow: Grow, ending_before: dict[str, str]
) -> None:
    store = grow()
    store.append("orders", 0, 3)
    streams.sink.dies_at = 0
    trigger = {"processingTime": "10 milliseconds"}
    with pytest.raises(Exception, match="the sink dies"):
        streams.run(store.path, trigger, startingOffsets="earliest", **ending_before)
    streams.sink.dies_at = None
    store.append("orders", 0, 2)
    query = streams.start(store.path, trigger, endingOffsets="latest")
    assert rmq_spark.stop_at_end(query, timeout=WITHIN_S)
    assert streams.sink.rows == queue(0, 0, 5)


def test_ending_offsets_let_stop_at_end_stop_the_query(streams: Streams, grow: Grow) -> None:
    store = grow()
    store.append("orders", 0, 5)
    query = streams.start(
        store.path,
        {"processingTime": "10 milliseconds"},
        startingOffsets="earliest",
        endingOffsets="latest",
        maxOffsetsPerTrigger="2",
    )
    assert rmq_spark.stop_at_end(query, timeout=WITHIN_S)
    assert not query.isActive
    assert streams.sink.rows == queue(0, 0, 5)
