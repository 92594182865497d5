"""`writeStream` and `foreachBatch` through real Spark: every batch once, also when Spark repeats work."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = pytest.mark.spark

WITHIN_S = 180
MESSAGES = 20
ROWS_A_BATCH = 8
LAST = 2  # batch, which takes the rest


class Pipeline:
    """A stream from one store into another, that can be run again and again with one checkpoint."""

    def __init__(self, spark: "SparkSession", folder: Path) -> None:
        self.spark, self.folder = spark, folder
        self.source, self.store, self.checkpoint = folder / "source", folder / "store", folder / "checkpoint"
        messages = [SampleMessage("orders", number % 3, f"{number}".encode()) for number in range(MESSAGES)]
        build_store(self.source, messages)

    def run(self, checkpoint: Path | None = None, **given: Any) -> "StreamingQuery":
        reader = self.spark.readStream.format("rmq").options(subscribe="orders", columns="topic,queueId,tags,keys,body")
        reader = reader.options(startingOffsets="earliest", maxOffsetsPerTrigger=ROWS_A_BATCH)
        writer = reader.load(str(self.source)).writeStream.format("rmq").options(**given)
        writer = writer.option("checkpointLocation", str(checkpoint or self.checkpoint)).trigger(availableNow=True)
        return self.wait(writer.start(str(self.store)))

    def run_each(self, write: "Callable[[DataFrame, int], None]") -> "StreamingQuery":
        reader = self.spark.readStream.format("rmq").options(subscribe="orders", columns="topic,body")
        reader = reader.options(startingOffsets="earliest", maxOffsetsPerTrigger=ROWS_A_BATCH)
        writer = reader.load(str(self.source)).writeStream.foreachBatch(write)
        return self.wait(writer.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True).start())

    def wait(self, query: "StreamingQuery") -> "StreamingQuery":
        try:
            assert query.awaitTermination(WITHIN_S), "does not come to an end"
        finally:
            query.stop()
        return query

    def forget_commit(self) -> int:
        """Make Spark run the last batch again, as after a crash just before it noted the commit; return its number."""
        commits = self.checkpoint / "commits"
        last = max(int(file.name) for file in commits.iterdir() if file.name.isdigit())
        for name in (str(last), f".{last}.crc"):
            (commits / name).unlink(missing_ok=True)
        return last

    def bodies(self, path: Path | None = None) -> list[int]:
        options = {"subscribe": "orders", "columns": "body"}
        rows = self.spark.read.format("rmq").options(**options).load(str(path or self.store)).collect()
        return sorted(int(bytes(row["body"])) for row in rows)

    def ledger(self) -> dict[str, Any]:
        (file,) = (self.store / "rmq" / "ledger").iterdir()
        return json.loads(file.read_text())


@pytest.fixture
def pipeline(spark: "SparkSession", tmp_path: Path) -> Pipeline:
    return Pipeline(spark, tmp_path)


ALL = list(range(MESSAGES))


def test_a_stream_from_store_to_store_copies_every_message_once(pipeline: Pipeline) -> None:
    query = pipeline.run()
    assert pipeline.bodies() == ALL
    ledger = pipeline.ledger()
    assert (ledger["queryId"], ledger["batchId"]) == (str(query.id), LAST)
    assert not list((pipeline.store / "rmq" / "staging").iterdir())
    assert not (pipeline.store / "abort").exists(), "between two commits a store is one that was closed in order"
    assert query.lastProgress["sink"]["numOutputRows"] == MESSAGES - LAST * ROWS_A_BATCH


@pytest.mark.slow
def test_a_batch_that_spark_runs_again_is_written_once(pipeline: Pipeline) -> None:
    pipeline.run()
    for _ in range(2):
        assert pipeline.forget_commit() == LAST
        pipeline.run()
        assert pipeline.bodies() == ALL
        assert pipeline.ledger()["batchId"] == LAST
    assert not list((pipeline.store / "rmq" / "staging").iterdir())


@pytest.mark.slow
def test_a_stream_goes_on_after_a_restart(pipeline: Pipeline) -> None:
    pipeline.run()
    shutil.rmtree(pipeline.source)
    build_store(
        pipeline.source,
        [SampleMessage("orders", number % 3, f"{number}".encode()) for number in range(MESSAGES + 20)],
    )
    pipeline.run()
    assert pipeline.bodies() == list(range(MESSAGES + 20))
    assert pipeline.ledger()["batchId"] == LAST + 3


@pytest.mark.slow
def test_a_new_checkpoint_is_a_new_query_that_writes_everything_again(pipeline: Pipeline, tmp_path: Path) -> None:
    pipeline.run()
    pipeline.run(tmp_path / "other-checkpoint")
    assert pipeline.bodies() == sorted(ALL * 2)


@pytest.mark.slow
def test_a_query_may_begin_to_write_to_a_store_at_any_batch(pipeline: Pipeline) -> None:
    pipeline.run()
    pipeline.forget_commit()
    shutil.rmtree(pipeline.store)
    pipeline.run()
    assert len(pipeline.bodies()) == MESSAGES - LAST * ROWS_A_BATCH
    assert pipeline.ledger()["batchId"] == LAST


@pytest.mark.slow
def test_another_batch_of_the_same_number_is_skipped_where_the_user_says_so(pipeline: Pipeline) -> None:
    pipeline.run()
    shutil.rmtree(pipeline.source)
    build_store(pipeline.source, [SampleMessage("orders", n % 3, f"{1000 + n}".encode()) for n in range(MESSAGES)])
    pipeline.forget_commit()
    with pytest.raises(Exception, match=f"batch {LAST} of query .* cannot be written"):
        pipeline.run()
    assert pipeline.bodies() == ALL
    pipeline.run(onBatchConflict="skip")
    assert pipeline.bodies() == ALL


@pytest.mark.slow
def test_missing_batches_are_passed_over_where_the_user_says_so(pipeline: Pipeline) -> None:
    query = pipeline.run()
    (ledger,) = (pipeline.store / "rmq" / "ledger").iterdir()
    ledger.write_text(ledger.read_text().replace('"batchId": 2', '"batchId": 0'))  # as in an older copy
    pipeline.forget_commit()
    with pytest.raises(Exception, match=f"batch {LAST} of query {query.id} .* so 1 would be missing"):
        pipeline.run()
    pipeline.run(onBatchGap="continue")
    assert len(pipeline.bodies()) == 2 * MESSAGES - LAST * ROWS_A_BATCH
    assert pipeline.ledger()["batchId"] == LAST


@pytest.mark.slow
def test_in_foreach_batch_a_write_with_a_transaction_is_done_once_and_one_without_again(pipeline: Pipeline) -> None:
    dies = [True]

    def write(batch: "DataFrame", batch_id: int) -> None:
        writer = batch.write.format("rmq").mode("append")
        writer.option("txnAppId", "copy").option("txnVersion", batch_id).save(str(pipeline.store))
        writer = batch.write.format("rmq").mode("append")
        writer.save(str(pipeline.folder / "without"))
        if batch_id == 1 and dies:
            dies.clear()
            raise RuntimeError("the batch dies after its writes")

    with pytest.raises(Exception, match="the batch dies"):
        pipeline.run_each(write)
    pipeline.run_each(write)
    assert pipeline.bodies() == ALL
    assert len(pipeline.bodies(pipeline.folder / "without")) == MESSAGES + ROWS_A_BATCH


@pytest.mark.slow
def test_two_streams_write_to_one_store_at_the_same_time(spark: "SparkSession", tmp_path: Path) -> None:
    pipeline = Pipeline(spark, tmp_path)
    queries = []
    for number in range(2):
        reader = spark.readStream.format("rmq").options(subscribe="orders", columns="topic,body")
        reader = reader.options(startingOffsets="earliest", maxOffsetsPerTrigger=9)
        frame = reader.load(str(pipeline.source))
        writer = frame.writeStream.format("rmq").option("checkpointLocation", str(tmp_path / f"checkpoint-{number}"))
        queries.append(writer.trigger(availableNow=True).start(str(pipeline.store)))
    for query in queries:
        pipeline.wait(query)
    assert pipeline.bodies() == sorted(ALL * 2)
    assert len(list((pipeline.store / "rmq" / "ledger").iterdir())) == 2
