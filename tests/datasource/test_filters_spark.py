"""Filters through real Spark: batch and stream return only matches, and streams advance past the rest."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import rmq_spark
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

MESSAGES = 40


def tag_of(number: int) -> str:
    return ["A", "B", "Aa", "BB"][number % 4]


@pytest.fixture
def path(tmp_path: Path) -> str:
    """40 messages each of orders and payments, and 3 that the group billing failed to consume."""
    messages = [
        SampleMessage(topic, number % 2, b"%d" % number, tags=tag_of(number), properties={"amount": str(number)})
        for topic in ("orders", "payments")
        for number in range(MESSAGES)
    ]
    retried = {"RETRY_TOPIC": "orders"}
    failed = [SampleMessage("%RETRY%billing", 0, b"again %d" % n, tags="B", properties=retried) for n in range(3)]
    return str(build_store(tmp_path / "store", messages + failed).path)


def bodies(frame: "DataFrame") -> set[tuple[str, int]]:
    rows = [(row["topic"], int(row["body"])) for row in frame.collect()]
    assert len(rows) == len(set(rows))
    return set(rows)


def numbers(topic: str, *tags: str) -> set[tuple[str, int]]:
    return {(topic, number) for number in range(MESSAGES) if tag_of(number) in tags}


@pytest.mark.slow
def test_a_batch_query_gives_what_matches(spark: "SparkSession", path: str) -> None:
    def load(**given: str) -> "DataFrame":
        options = {"subscribe": "orders,payments", "columns": "topic,body"} | given
        return spark.read.format("rmq").options(**options).load(path)

    of_tags = load(tags="A || Aa", minPartitions="7")
    assert bodies(of_tags) == numbers("orders", "A", "Aa") | numbers("payments", "A", "Aa")
    by_topic = load(subExpression='{"orders": "BB"}', sql92='{"payments": "amount > 37 AND TAGS <> \'B\'"}')
    assert bodies(by_topic) == numbers("orders", "BB") | {("payments", 38), ("payments", 39)}
    assert load(tags="nobody").count() == 0
    both = load(tags='{"orders": "A || Aa"}', sql92='{"payments": "amount > 36"}', columns="topic,body,tags")
    assert bodies(both.where("tags in ('Aa', 'BB')")) == numbers("orders", "Aa") | {("payments", 38), ("payments", 39)}
    with pytest.raises(Exception, match=r"(?s)sql92, .*amount >\n.*\^"):
        load(sql92="amount >")


@pytest.mark.slow
def test_a_stream_gives_what_matches_and_its_progress_counts_the_rest(
    spark: "SparkSession", path: str, tmp_path: Path
) -> None:
    options = {
        "subscribe": "orders",
        "tags": "A",
        "consumerGroup": "billing",
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": "9",
        "columns": "topic,physicalTopic,body",
    }
    found: list[set[tuple[str, str]]] = []

    def keep(frame: "DataFrame", batch_id: int) -> None:
        found.append({(row["physicalTopic"], row["body"].decode()) for row in frame.collect()})

    def run() -> None:
        frame = spark.readStream.format("rmq").options(**options).load(path)
        writer = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(60)
        finally:
            query.stop()

    run()
    assert len(found) == 5, "limits count messages before the filter"
    of_orders = {("orders", str(number)) for _, number in numbers("orders", "A")}
    retried = {("%RETRY%billing", f"again {n}") for n in range(3)}
    assert set().union(*found) == of_orders | retried, "what failed is not filtered again"
    # No message matches: the query still advances past them, with an empty batch.
    found.clear()
    with rmq_spark.open_store(path) as store:
        for number in range(4):
            store.send("orders", b"%d" % number, tags="B", queue_id=0)
    run()
    assert found == [set()]
    held = json.loads(sorted((tmp_path / "checkpoint" / "offsets").glob("[0-9]*"))[-1].read_text().splitlines()[-1])
    assert held["orders"] == {"0": 24, "1": 20}
