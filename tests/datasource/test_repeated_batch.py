"""The batch that a query will repeat, as real checkpoints of Spark show it, whole and damaged."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rmq_spark.datasource.spark.clocks import wall_clock_ms
from rmq_spark.datasource.spark.repeated_batch import find_repeated_batch
from rmq_spark.store.backend import RepeatedBatch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

PLANNED_MS = 1_795_000_000_123
OFFSETS = f'v1\n{{"batchWatermarkMs":0,"batchTimestampMs":{PLANNED_MS},"conf":{{}}}}\n{{"orders":{{"0":4}}}}'


def checkpoint_of(folder: Path, offsets: list[int], commits: list[int]) -> Path:
    """Write a checkpoint with these batches, as Spark writes it."""
    checkpoint = folder / "check point"
    for name, numbers, text in (("offsets", offsets, OFFSETS), ("commits", commits, 'v1\n{"nextBatchWatermarkMs":0}')):
        (checkpoint / name).mkdir(parents=True)
        for number in numbers:
            (checkpoint / name / str(number)).write_text(text)
    return checkpoint


@pytest.mark.parametrize(
    ("offsets", "commits", "batch_id"),
    [([], [], None), ([0], [], 0), ([0], [0], None), ([8, 9, 10], [8, 9], 10), ([8, 9, 10], [8, 9, 10], None)],
)
def test_batch_that_was_planned_and_has_not_ended(
    spark: "SparkSession", tmp_path: Path, offsets: list[int], commits: list[int], batch_id: int | None
) -> None:
    found = find_repeated_batch(spark, str(checkpoint_of(tmp_path, offsets, commits)))
    assert found == (None if batch_id is None else RepeatedBatch(batch_id, PLANNED_MS))


def test_files_of_a_write_that_did_not_end_do_not_count(spark: "SparkSession", tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, [0], [0])
    (checkpoint / "offsets" / ".1.0a0c.tmp").write_text("v1")
    assert find_repeated_batch(spark, str(checkpoint)) is None


def test_new_checkpoint_has_none(spark: "SparkSession", tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert find_repeated_batch(spark, str(tmp_path / "new")) is None
    assert find_repeated_batch(spark, f"file:{tmp_path}/new") is None
    assert not caplog.messages


@pytest.mark.parametrize("text", ["", "v1\n", "v1\nno json\n{}", 'v1\n{"conf":{}}\n{}'])
def test_checkpoint_that_cannot_be_read_has_none_and_is_told(
    spark: "SparkSession", tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    checkpoint = checkpoint_of(tmp_path, [0], [])
    (checkpoint / "offsets" / "0").write_text(text)
    with caplog.at_level(logging.WARNING):
        assert find_repeated_batch(spark, str(checkpoint)) is None
    assert "may send failed messages of it back twice" in caplog.text


def test_checkpoint_in_an_unknown_file_system_has_none_and_is_told(
    spark: "SparkSession", caplog: pytest.LogCaptureFixture
) -> None:
    assert find_repeated_batch(spark, "nowhere://host/checkpoint") is None
    assert "nowhere" in caplog.text


@pytest.mark.slow
def test_checkpoint_of_spark(spark: "SparkSession", tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    before_ms = wall_clock_ms()
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 2).load()
    writer = rows.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    writer.trigger(once=True).start().awaitTermination()
    assert find_repeated_batch(spark, str(checkpoint)) is None
    (checkpoint / "commits" / "0").unlink()
    found = find_repeated_batch(spark, str(checkpoint))
    assert found is not None
    assert found.batch_id == 0
    assert before_ms <= found.planned_ms <= wall_clock_ms()
