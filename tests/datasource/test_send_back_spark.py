"""Failed rows through real Spark: sent back once, read again under their own topic, and dead letters in the end."""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import rmq_spark
from rmq_spark.store.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = pytest.mark.spark

WITHIN_S = 180
MESSAGES = 12
GROUP = "billing"
PLACE = ["commitLogOffset", "physicalTopic", "queueId", "queueOffset", "reconsumeTimes"]
SHORT = " ".join(["1s"] * 18)  # all delays


class Pipeline:
    """A store of messages, and streams over it that send some of them back."""

    def __init__(self, spark: "SparkSession", folder: Path) -> None:
        self.spark, self.store, self.checkpoint = spark, folder / "store", folder / "checkpoint"
        with rmq_spark.open_store(self.store, message_delay_level=SHORT) as store:
            store.create_topic("orders", 2)
            for number in range(MESSAGES):
                store.send("orders", f"{number}", queue_id=number % 2)

    def failed(self, rows: "DataFrame") -> "DataFrame":
        """Return the rows that fail: those with even numbers."""
        return rows.where("cast(cast(body as string) as int) % 2 = 0").selectExpr(*PLACE, "'boom' as error")

    def start(self, sink: "Callable[[DataFrame], Any]", **options: str) -> "StreamingQuery":
        reader = self.spark.readStream.format("rmq").options(
            subscribe="orders", columns=",".join([*PLACE, "topic", "body"])
        )
        frame = reader.options(startingOffsets="earliest", consumerGroup=GROUP, **options).load(str(self.store))
        writer = sink(frame).option("checkpointLocation", str(self.checkpoint))
        return writer.trigger(availableNow=True).start()

    def send_back(self, **options: str) -> "StreamingQuery":
        """Run a stream that sends failed rows back."""

        def sink(frame: "DataFrame") -> Any:
            writer = (
                self.failed(frame).writeStream.format("rmq").options(mode="sendBack", consumerGroup=GROUP, **options)
            )
            return writer.option("path", str(self.store))

        return self.wait(self.start(sink))

    def wait(self, query: "StreamingQuery") -> "StreamingQuery":
        try:
            assert query.awaitTermination(WITHIN_S), "does not come to an end"
        finally:
            query.stop()
        return query

    def forget_commit(self) -> None:
        """Make Spark run the last batch again, as after a crash just before it noted the commit."""
        commits = self.checkpoint / "commits"
        last = max(int(file.name) for file in commits.iterdir() if file.name.isdigit())
        for name in (str(last), f".{last}.crc"):
            (commits / name).unlink(missing_ok=True)

    def rows(self, topic: str) -> list[dict[str, Any]]:
        """Return the messages of a topic."""
        found = []
        with rmq_spark.open_reader(self.store) as reader:
            reader.refresh()
            for queue in reader.queues(topic) if topic in reader.topics() else ():
                there = reader.bounds(queue)
                columns = [*PLACE, "topic", "body", "properties"]
                for batch in reader.read(queue, there.min_offset, there.max_offset, columns):
                    found += batch.to_pylist()
        return found


@pytest.fixture
def pipeline(spark: "SparkSession", tmp_path: Path) -> Pipeline:
    return Pipeline(spark, tmp_path)


EVEN = Counter(f"{number}".encode() for number in range(0, MESSAGES, 2))


def bodies(rows: list[dict[str, Any]]) -> Counter[bytes]:
    return Counter(row["body"] for row in rows)


@pytest.mark.slow
def test_failed_rows_of_a_stream_go_back_once_though_their_batch_is_run_again(pipeline: Pipeline) -> None:
    pipeline.send_back()
    waiting = [row for row in pipeline.rows("SCHEDULE_TOPIC_XXXX") if row["reconsumeTimes"] == 1]
    assert bodies(waiting) == EVEN
    assert {dict(row["properties"])["CONSUME_ERROR"] for row in waiting} == {"boom"}
    pipeline.forget_commit()
    pipeline.send_back()
    # Retried messages may have failed again: each failure has one copy.
    copies = Counter((row["body"], row["reconsumeTimes"]) for row in pipeline.rows("SCHEDULE_TOPIC_XXXX"))
    assert set(copies.values()) == {1}
    assert Counter(body for body, times in copies if times == 1) == EVEN
    assert not (pipeline.store / "abort").exists()


@pytest.mark.slow
def test_what_failed_comes_again_and_is_a_dead_letter_in_the_end(pipeline: Pipeline) -> None:
    give_up = time.monotonic() + WITHIN_S
    while bodies(pipeline.rows(f"%DLQ%{GROUP}")) != EVEN:
        assert time.monotonic() < give_up
        pipeline.send_back(maxReconsumeTimes="2")
    retried = pipeline.rows(f"%RETRY%{GROUP}")
    assert Counter((row["body"], row["reconsumeTimes"]) for row in retried) == Counter(
        (body, times) for body in EVEN for times in (1, 2)
    )
    assert {row["topic"] for row in retried} == {"orders"}
    assert {row["reconsumeTimes"] for row in pipeline.rows(f"%DLQ%{GROUP}")} == {3}


@pytest.mark.slow
def test_a_batch_write_sends_back_each_time_and_once_with_a_transaction(pipeline: Pipeline) -> None:
    reader = pipeline.spark.read.format("rmq").options(subscribe="orders", columns=",".join([*PLACE, "body"]))
    failed = pipeline.failed(reader.load(str(pipeline.store)))
    writer = failed.write.format("rmq").mode("append").options(mode="sendBack", consumerGroup=GROUP)
    for _ in range(2):
        writer.save(str(pipeline.store))
    assert bodies(pipeline.rows("SCHEDULE_TOPIC_XXXX")) == EVEN + EVEN
    writer = failed.write.format("rmq").mode("append").options(mode="sendBack", consumerGroup=GROUP)
    for _ in range(2):
        writer.options(txnAppId="job", txnVersion="1").save(str(pipeline.store))
    assert bodies(pipeline.rows("SCHEDULE_TOPIC_XXXX")) == EVEN + EVEN + EVEN


def test_levels_are_a_column_and_below_zero_is_a_dead_letter(pipeline: Pipeline) -> None:
    reader = pipeline.spark.read.format("rmq").options(subscribe="orders", columns="*")
    rows = reader.load(str(pipeline.store)).selectExpr(
        "*", "if(body = '0', -1, if(body = '2', 99, null)) as delayLevel"
    )
    failed = rows.where("body in ('0', '2', '4')")
    failed.write.format("rmq").mode("append").options(mode="sendBack", consumerGroup=GROUP).save(str(pipeline.store))
    assert bodies(pipeline.rows(f"%DLQ%{GROUP}")) == Counter([b"0"])
    waiting = pipeline.rows("SCHEDULE_TOPIC_XXXX")
    assert {(row["body"], row["queueId"]) for row in waiting} == {(b"2", 17), (b"4", 2)}


def test_a_row_that_was_never_in_the_store_fails_the_write_and_sends_nothing_back(pipeline: Pipeline) -> None:
    reader = pipeline.spark.read.format("rmq").options(subscribe="orders", columns=",".join(PLACE))
    rows = reader.load(str(pipeline.store)).selectExpr("commitLogOffset + 1 as commitLogOffset", *PLACE[1:])
    writer = rows.write.format("rmq").mode("append").options(mode="sendBack", consumerGroup=GROUP)
    with pytest.raises(Exception, match=r"partition \d+, row 0: .* was never in this store"):
        writer.save(str(pipeline.store))
    assert not pipeline.rows("SCHEDULE_TOPIC_XXXX")
    assert not list((pipeline.store / "rmq" / "staging").glob("*/*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "options", "why"),
    [
        (PLACE[1:], {}, "without commitLogOffset"),
        ([*PLACE, "'x' as note"], {}, r'no column "note" to send back.*\.drop\("note"\)'),
        (["cast(commitLogOffset as string) as commitLogOffset", *PLACE[1:]], {}, "commitLogOffset is string, expected"),
        (PLACE, {"consumerGroup": "%RETRY%billing"}, "is the name of a topic of the group"),
        (PLACE, {"topic": "payments"}, "topic has no effect with mode=sendBack"),
        (PLACE, {"mode": "send"}, "consumerGroup requires mode=sendBack"),
        (PLACE, {"mode": "back"}, "expected one of: send, sendBack"),
        (PLACE, {"maxReconsumeTimes": "-1"}, "expected an integer from 0 to"),
    ],
)
def test_what_cannot_be_sent_back_is_refused_before_a_task_runs(
    pipeline: Pipeline, columns: list[str], options: dict[str, str], why: str
) -> None:
    reader = pipeline.spark.read.format("rmq").options(subscribe="orders", columns=",".join(PLACE))
    rows = reader.load(str(pipeline.store)).selectExpr(*columns)
    given = {"mode": "sendBack", "consumerGroup": GROUP} | options
    with pytest.raises(Exception, match=f"(?s){why}"):
        rows.write.format("rmq").mode("append").options(**given).save(str(pipeline.store))


def test_the_group_is_needed(pipeline: Pipeline) -> None:
    from support.parsed_options import parse_sink_options

    with pytest.raises(OptionError, match="requires consumerGroup"):
        parse_sink_options({"path": str(pipeline.store), "mode": "sendBack"})
