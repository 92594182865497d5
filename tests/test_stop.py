"""stop_at_end uses only the reports of finished batches."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import rmq_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass
class FakeSource:
    endOffset: object


@dataclass
class FakeProgress:
    sources: list[FakeSource]
    batchId: int


@dataclass
class FakeJava:
    """The Java object of a query of Spark Classic, with the two methods that are called."""

    name: str

    def streamingQuery(self) -> "FakeJava":
        return self

    def trigger(self) -> str:
        return self.name


@dataclass
class FakeQuery:
    """A query that reports one entry of `batches` after each wait, and after the last one stays idle."""

    batches: list[list[object]]
    ends_by_itself: bool = False
    trigger: str = "ProcessingTimeTrigger(0)"
    fails: Exception | None = None
    stopped: bool = False
    waits: list[float] = field(default_factory=list)

    def awaitTermination(self, timeout: float) -> bool:
        assert timeout > 0
        self.waits.append(timeout)
        if len(self.waits) < len(self.batches):
            return False
        if self.fails:
            raise self.fails
        return self.ends_by_itself

    @property
    def recentProgress(self) -> list[FakeProgress]:
        done = enumerate(self.batches[: len(self.waits)])
        return [FakeProgress([FakeSource(offset) for offset in offsets], number) for number, offsets in done if offsets]

    @property
    def lastProgress(self) -> FakeProgress | None:
        return self.recentProgress[-1] if self.recentProgress else None

    @property
    def status(self) -> dict[str, bool]:
        return {"isDataAvailable": len(self.waits) <= len(self.batches), "isTriggerActive": False}

    @property
    def _jsq(self) -> FakeJava:
        return FakeJava(self.trigger)

    def stop(self) -> None:
        self.stopped = True


def offset(**mark: object) -> str:
    return json.dumps({"orders": {"0": 5}, "@": {"v": 1, **mark}})


AT_WORK = offset(ending=True, ended=False)
ENDED = offset(ending=True, ended=True)


def test_it_waits_for_the_batch_that_ends_and_then_stops_the_query() -> None:
    query = FakeQuery([[], [None], [AT_WORK], [ENDED]])
    assert rmq_spark.stop_at_end(query) is True
    assert query.stopped
    assert len(query.waits) == 4


def test_the_first_batch_may_be_of_an_earlier_run_and_does_not_count_until_the_next_trigger() -> None:
    query = FakeQuery([[ENDED], [AT_WORK], [ENDED]])
    assert rmq_spark.stop_at_end(query) is True
    assert len(query.waits) == 3
    query = FakeQuery([[offset()], [ENDED]])
    assert rmq_spark.stop_at_end(query) is True
    query = FakeQuery([[ENDED]])
    assert rmq_spark.stop_at_end(query) is True
    assert len(query.waits) == 2, "it stopped before a trigger of this run had said that nothing is left"


@pytest.mark.parametrize("trigger", ["AvailableNowTrigger", "OneTimeTrigger"])
def test_a_query_without_a_bound_that_ends_by_itself_is_waited_for(trigger: str) -> None:
    query = FakeQuery([[], [offset()], [offset()], [offset()]], ends_by_itself=True, trigger=trigger)
    assert rmq_spark.stop_at_end(query) is True
    assert len(query.waits) == 4
    assert rmq_spark.stop_at_end(FakeQuery([[offset()]], trigger=trigger), timeout=0.01) is False


def test_an_offset_may_come_as_a_dict() -> None:
    query = FakeQuery([[json.loads(ENDED)]])
    assert rmq_spark.stop_at_end(query) is True


def test_every_bounded_source_must_have_ended_and_others_do_not_count() -> None:
    query = FakeQuery([[ENDED, AT_WORK, "7"], [ENDED, ENDED, "9"]])
    assert rmq_spark.stop_at_end(query) is True
    assert len(query.waits) == 2


@pytest.mark.parametrize("other", [offset(), "17", '"text"', "not json", '{"topic":{"0":1}}'])
def test_a_query_without_a_bound_is_an_error_and_goes_on(other: str) -> None:
    query = FakeQuery([[other]])
    with pytest.raises(rmq_spark.OptionError, match="endingOffsets"):
        rmq_spark.stop_at_end(query)
    assert not query.stopped


def test_spark_connect_does_not_tell_the_trigger_so_the_end_of_the_query_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(FakeQuery, "_jsq")
    query = FakeQuery([[], [offset()], [offset()], [offset()]], ends_by_itself=True)
    assert rmq_spark.stop_at_end(query) is True
    assert len(query.waits) == 4
    assert not query.stopped
    assert len(caplog.messages) == 1
    assert "stop_at_end waits until the query terminates" in caplog.text


def test_after_the_timeout_the_query_goes_on() -> None:
    query = FakeQuery([[AT_WORK]])
    begun = time.monotonic()
    assert rmq_spark.stop_at_end(query, timeout=0.0) is False
    assert time.monotonic() - begun < 60
    assert not query.stopped


def test_a_query_that_ends_by_itself_at_the_bound_has_ended() -> None:
    assert rmq_spark.stop_at_end(FakeQuery([[AT_WORK], [ENDED]], ends_by_itself=True)) is True


def test_a_query_that_somebody_stopped_before_the_bound_has_not() -> None:
    assert rmq_spark.stop_at_end(FakeQuery([[AT_WORK]], ends_by_itself=True)) is False


def test_the_error_of_a_failed_query_comes_through() -> None:
    with pytest.raises(RuntimeError, match="disk on fire"):
        rmq_spark.stop_at_end(FakeQuery([[AT_WORK]], fails=RuntimeError("disk on fire")))


# How long a query on a slow and busy machine may take; not waited for when all is well.
PATIENCE_S = 120


TRIGGERS: dict[str, dict[str, Any]] = {
    "processingTime": {"processingTime": "0 seconds"},
    "availableNow": {"availableNow": True},
    "once": {"once": True},
}


def start(spark: "SparkSession", golden: Path, checkpoint: Path, trigger: str, **options: str) -> "StreamingQuery":
    """Start a query over the topic of the demo store with 1,170 messages."""
    stream = spark.readStream.format("rmq").option("path", str(golden / "demo")).options(**options)
    return (
        stream.options(subscribe="orders", startingOffsets="earliest", maxOffsetsPerTrigger="500")
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(checkpoint))
        .trigger(**TRIGGERS[trigger])
        .start()
    )


@pytest.mark.slow
@pytest.mark.spark
def test_a_real_query_delivers_all_and_stops_and_does_so_again_where_nothing_is_left(
    spark: "SparkSession", golden: Path, tmp_path: Path
) -> None:
    query = start(spark, golden, tmp_path, "processingTime", endingOffsets="latest")
    assert rmq_spark.stop_at_end(query, timeout=PATIENCE_S) is True
    assert not query.isActive
    assert [batch.numInputRows for batch in query.recentProgress if batch.numInputRows] == [500, 500, 170]
    again = start(spark, golden, tmp_path, "processingTime", endingOffsets="latest")
    assert rmq_spark.stop_at_end(again, timeout=PATIENCE_S) is True
    assert sum(batch.numInputRows for batch in again.recentProgress) == 0


@pytest.mark.spark
def test_a_real_query_without_a_bound_is_an_error(spark: "SparkSession", golden: Path, tmp_path: Path) -> None:
    query = start(spark, golden, tmp_path, "processingTime")
    try:
        with pytest.raises(rmq_spark.OptionError, match="no rmq source with endingOffsets"):
            rmq_spark.stop_at_end(query, timeout=PATIENCE_S)
        assert query.isActive
        query.processAllAvailable()  # to stop a query in the middle of a batch makes Spark noisy
    finally:
        query.stop()


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("trigger", ["availableNow", "once"])
def test_a_real_query_without_a_bound_that_ends_by_itself_is_waited_for(
    spark: "SparkSession", golden: Path, tmp_path: Path, trigger: str
) -> None:
    query = start(spark, golden, tmp_path, trigger)
    assert rmq_spark.stop_at_end(query, timeout=PATIENCE_S) is True
    assert sum(batch.numInputRows for batch in query.recentProgress) == 1170
    assert rmq_spark.stop_at_end(start(spark, golden, tmp_path, trigger), timeout=PATIENCE_S) is True


@pytest.mark.spark
def test_the_failure_of_a_real_query_comes_through(spark: "SparkSession", golden: Path, tmp_path: Path) -> None:
    from pyspark.errors import StreamingQueryException

    query = start(spark, golden, tmp_path, "processingTime", endingOffsets='{"orders": {"77": 1}}')
    with pytest.raises(StreamingQueryException, match="orders"):
        rmq_spark.stop_at_end(query, timeout=PATIENCE_S)
