"""Stores that a real RocketMQ wrote, through Spark: every column of every row, and no file is touched."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

STORES = ("basic", "propcrc", "crashed", "preblank", "truncated-stale", "batchcq-cqext", "timer")
WITHIN_S = 180
BATCHES = 4  # at least; each takes its time


def stat_all(path: Path) -> dict[str, tuple[int, ...]]:
    found = {}
    for file in (path, *path.rglob("*")):
        stat = file.lstat()
        found[str(file)] = (stat.st_ino, stat.st_mode, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return found


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, golden: Path) -> Iterator[Path]:
    path = golden / request.param
    before = stat_all(path)
    yield path
    assert stat_all(path) == before, "reading has changed a file"


def expected_rows(path: Path) -> list[dict[str, Any]]:
    expected = json.loads((path.parent / "expected" / f"{path.name}.json").read_text())
    rows = [row for queues in expected["topics"].values() for queue in queues.values() for row in queue["rows"]]
    return sorted((row | {"body": base64.b64decode(row["body"])} for row in rows), key=place)


def topics(path: Path) -> str:
    expected = json.loads((path.parent / "expected" / f"{path.name}.json").read_text())
    return ",".join(expected["topics"])


def place(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["physicalTopic"], row["queueId"], row["queueOffset"]


def rows_of(frame: "DataFrame") -> list[dict[str, Any]]:
    """Return the rows like the expected ones: times in ms, independent of time zones."""
    for name in ("bornTimestamp", "storeTimestamp"):
        frame = frame.withColumn(name, F.unix_millis(name))
    assert "brokerName" in frame.columns
    rows = [{**row.asDict(), "body": bytes(row["body"])} for row in frame.collect()]
    assert [row.pop("brokerName") for row in rows] == [None] * len(rows)
    return rows


def test_a_batch_query_gives_every_column_of_every_row(spark: "SparkSession", store: Path) -> None:
    frame = spark.read.format("rmq").option("subscribe", topics(store)).option("columns", "*").load(str(store))
    rows = rows_of(frame)
    assert sorted(rows, key=place) == expected_rows(store)


@pytest.mark.slow
def test_a_stream_that_dies_and_starts_again_gives_every_row_once(
    spark: "SparkSession", store: Path, tmp_path: Path
) -> None:
    batches: dict[int, list[dict[str, Any]]] = {}
    expected = expected_rows(store)
    batch_messages = len(expected) // BATCHES

    def start(dies_at: int | None) -> None:
        def keep(frame: "DataFrame", batch_id: int) -> None:
            batches[batch_id] = rows_of(frame)  # a repeated batch replaces the first
            if batch_id == dies_at:
                raise RuntimeError("the sink dies")

        query = (
            spark.readStream.format("rmq")
            .option("subscribe", topics(store))
            .option("columns", "*")
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", batch_messages)
            .load(str(store))
            .writeStream.foreachBatch(keep)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(WITHIN_S), "does not come to an end"

    with pytest.raises(Exception, match="the sink dies"):
        start(dies_at=1)
    assert sorted(batches) == [0, 1]
    dead = batches[1]
    start(dies_at=None)
    assert batches[1] == dead, "the batch that died came back with other rows"
    rows = [row for batch in batches.values() for row in batch]
    assert sorted(rows, key=place) == expected
    assert [len(batch) for _, batch in sorted(batches.items())][:-1] == [batch_messages] * (len(batches) - 1)
    assert len(batches) >= BATCHES
