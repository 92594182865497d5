"""Small batches that travel with the plan, in real Spark: a source whose Python tasks fail delivers all rows."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import rmq_spark
from rmq_spark.datasource.spark.source import RmqDataSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType

pytestmark = pytest.mark.spark

NOW = {"availableNow": True}
WITHIN_S = 180
ALONE = {"assign": '{"orders": [0]}', "startingOffsets": "earliest"}
Row = tuple[Any, ...]


def taskless_source() -> type[RmqDataSource]:
    """Return the source without Python tasks: format("rmq_without_tasks"). A task that runs fails the query.

    The class is local, so that Spark's workers get it by value and need not import this module.
    """

    class WithoutTasks(RmqDataSource):
        @classmethod
        def name(cls) -> str:
            return "rmq_without_tasks"

        def streamReader(self, schema: "StructType") -> "DataSourceStreamReader":
            reader = super().streamReader(schema)

            class Reader(type(reader)):  # type: ignore[misc]
                def __init__(self) -> None:
                    self.__dict__.update(reader.__dict__)

                def read(self, partition: "InputPartition") -> "Iterator[pa.RecordBatch]":
                    raise RuntimeError("a Python task ran")

            return Reader()

    return WithoutTasks


class Streams:
    """Queries over one store. They keep the rows of each batch by its number, in the order in which they came."""

    def __init__(self, spark: "SparkSession", folder: Path) -> None:
        self.spark, self.folder, self.path = spark, folder, folder / "store"
        self.store = rmq_spark.open_store(self.path, segment_bytes=1 << 20)
        self.batches: dict[int, list[Row]] = {}
        self.dies_at: int | None = None
        self.queries: list[StreamingQuery] = []

    def append(self, queue_id: int, count: int, tags: str = "A") -> None:
        for _ in range(count):
            self.store.send("orders", f"{queue_id}/{tags}", queue_id=queue_id, tags=tags)

    def load(self, source: str = "rmq_without_tasks", schema: str = "", **given: str) -> "DataFrame":
        reader = self.spark.readStream.format(source)
        if schema:
            return reader.schema(schema).options(**ALONE | given).load(str(self.path))
        return reader.options(**ALONE | {"columns": "queueId,queueOffset"} | given).load(str(self.path))

    def start(self, frame: "DataFrame", trigger: dict[str, Any] = NOW, name: str = "q") -> "StreamingQuery":
        def keep(rows: "DataFrame", batch_id: int) -> None:
            self.batches[batch_id] = [tuple(row) for row in rows.collect()]
            if batch_id == self.dies_at:
                raise RuntimeError("the sink dies")

        writer = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(self.folder / name))
        self.queries.append(writer.trigger(**trigger).start())
        return self.queries[-1]

    def run(self, frame: "DataFrame", trigger: dict[str, Any] = NOW, name: str = "q") -> "StreamingQuery":
        query = self.start(frame, trigger, name)
        assert query.awaitTermination(WITHIN_S), "does not come to an end"
        return query

    @property
    def rows(self) -> list[Row]:
        return [row for number in sorted(self.batches) for row in self.batches[number]]


@pytest.fixture
def streams(spark: "SparkSession", tmp_path: Path) -> Iterator[Streams]:
    spark.dataSource.register(taskless_source())
    made = Streams(spark, tmp_path)
    yield made
    for query in made.queries:
        query.stop()
    made.store.close()


def queue(number: int, begin: int, end: int) -> list[Row]:
    return [(number, offset) for offset in range(begin, end)]


def source_of(query: "StreamingQuery", number: int = 0) -> Any:
    return query.lastProgress.sources[number]  # type: ignore[union-attr]


def until(is_done: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WITHIN_S
    while not is_done():
        assert time.monotonic() < give_up, "does not happen"
        time.sleep(0.05)


def test_handOverBytes_of_0_and_a_batch_of_two_partitions_need_a_task(streams: Streams) -> None:
    streams.append(0, 4)
    for given in ({"handOverBytes": "0"}, {"minPartitions": "2"}):
        with pytest.raises(Exception, match="a Python task ran"):
            streams.run(streams.load(**given), name=str(given))
    streams.run(streams.load(handOverBytes="1k"))
    assert streams.rows == queue(0, 0, 4)


def test_batches_are_handed_over_in_order_with_all_columns(streams: Streams) -> None:
    streams.append(0, 5)
    query = streams.run(streams.load(columns="*", maxOffsetsPerTrigger="2"))
    assert [len(rows) for rows in streams.batches.values()] == [2, 2, 1]
    batch = streams.spark.read.format("rmq").options(**ALONE, columns="*").load(str(streams.path))
    assert streams.rows == [tuple(row) for row in batch.orderBy("queueOffset").collect()]
    assert query.lastProgress is not None
    assert query.lastProgress.numInputRows == 1
    assert source_of(query).numInputRows == 1
    assert json.loads(source_of(query).latestOffset) == {"orders": {"0": 5}, "@": {"v": 1}}


@pytest.mark.slow
def test_several_arrow_batches_are_handed_over_at_once(streams: Streams) -> None:
    count = 70_000
    numbers = [str(number) for number in range(count)]
    table = {
        "topic": ["orders"] * count,
        "queueId": pa.array([0] * count, pa.int32()),
        "body": numbers,
        "tags": numbers,
    }
    streams.store.send_many(pa.table(table))
    frame = streams.load(columns="queueOffset,body,properties", handOverBytes="64m")
    streams.run(frame)
    assert list(streams.batches) == [0]
    assert [row[0] for row in streams.rows] == list(range(count))
    assert [bytes(row[1]).decode() for row in streams.rows] == numbers
    assert [row[2]["TAGS"] for row in streams.rows] == numbers


def test_filters_apply_to_handed_over_rows_and_may_leave_none(streams: Streams) -> None:
    streams.append(0, 2, "A")
    streams.append(0, 2, "B")
    streams.append(0, 2, "A")
    query = streams.run(streams.load(tags="B", maxOffsetsPerTrigger="3"))
    assert streams.batches == {0: [(0, 2)], 1: [(0, 3)]}
    query = streams.run(streams.load(tags="C"), name="none")
    assert query.lastProgress is not None
    assert (streams.batches[0], query.lastProgress.numInputRows) == ([], 0)


def test_triggers_other_than_availableNow_are_handed_over_too(streams: Streams) -> None:
    streams.append(0, 2)
    streams.run(streams.load(), {"once": True})
    query = streams.start(streams.load(), {"processingTime": "10 milliseconds"})
    streams.append(0, 2)
    query.processAllAvailable()
    streams.append(0, 1)
    query.processAllAvailable()
    assert streams.rows == queue(0, 0, 5)


def test_batch_of_a_query_that_died_is_handed_over_again(streams: Streams) -> None:
    streams.append(0, 4)
    streams.dies_at = 1
    with pytest.raises(Exception, match="the sink dies"):
        streams.run(streams.load(maxOffsetsPerTrigger="2"))
    streams.append(0, 1)
    streams.dies_at = None
    streams.batches.clear()
    streams.run(streams.load())
    assert streams.batches == {1: queue(0, 2, 4), 2: queue(0, 4, 5)}


def test_two_sources_of_one_query_are_handed_over_each(streams: Streams) -> None:
    streams.append(0, 3)
    streams.append(1, 2)
    frame = streams.load().union(streams.load(assign='{"orders": [1]}'))
    query = streams.run(frame)
    assert sorted(streams.rows) == queue(0, 0, 3) + queue(1, 0, 2)
    assert [source_of(query, number).numInputRows for number in (0, 1)] == [3, 2]


@pytest.mark.slow
def test_join_of_two_sources_is_handed_over(streams: Streams) -> None:
    streams.append(0, 3)
    streams.append(1, 2)
    other = streams.load(assign='{"orders": [1]}').selectExpr("queueId AS otherId", "queueOffset")
    streams.run(streams.load().join(other, "queueOffset"))
    assert sorted(streams.rows) == [(0, 0, 1), (1, 0, 1)]


def test_group_publishes_the_offsets_of_handed_over_batches(streams: Streams) -> None:
    streams.append(0, 5)
    given = {"consumerGroup": "billing", "maxOffsetsPerTrigger": "2"}
    query = streams.run(streams.load(**given))
    assert streams.rows == queue(0, 0, 5)
    assert "group" in json.loads(source_of(query).latestOffset)["@"]  # GroupOffsetListener needs it
    until(lambda: rmq_spark.group_offsets(streams.path, "billing")["orders"] == {0: 5})


def test_schema_with_a_comment_is_read_by_tasks(streams: Streams) -> None:
    streams.append(0, 2)
    schema = "queueId int COMMENT 'x', queueOffset bigint"
    with pytest.raises(Exception, match="a Python task ran"):
        streams.run(streams.load(schema=schema), name="taskless")
    streams.run(streams.load("rmq", schema))
    assert streams.rows == queue(0, 0, 2)


def test_error_on_the_driver_is_reported_by_the_task(streams: Streams) -> None:
    streams.append(0, 2)
    (segment,) = (streams.path / "commitlog").iterdir()
    log = bytearray(segment.read_bytes())
    log[log.index(b"0/A")] ^= 1
    segment.write_bytes(log)
    given = {"columns": "queueId,queueOffset,body", "checkCrc": "true"}
    with pytest.raises(Exception, match="a Python task ran"):
        streams.run(streams.load(**given), name="taskless")
    with pytest.raises(Exception, match=r"rmq_spark.DamageError: .*CRC") as failure:
        streams.run(streams.load("rmq", **given))
    assert "Python worker" in str(failure.value)
