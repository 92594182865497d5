"""`df.write` through real Spark: rows are read back, from their queues, and either all or none."""

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F

import rmq_spark
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

# Values that the store assigns, so they differ in a copy.
GIVEN = ("queueOffset", "commitLogOffset", "bornTimestamp", "storeTimestamp", "reconsumeTimes", "msgId", "offsetMsgId")
GIVEN += ("bornHost", "storeHost", "sysFlag", "physicalTopic", "brokerName")


def read(spark: "SparkSession", path: Path, topics: str = "orders", **given: str) -> "DataFrame":
    return spark.read.format("rmq").options(**({"subscribe": topics, "columns": "*"} | given)).load(str(path))


def write(frame: "DataFrame", path: Path, **given: Any) -> None:
    frame.write.format("rmq").mode("append").options(**given).save(str(path))


def contents(frame: "DataFrame") -> list[dict[str, Any]]:
    """Return the rows in the order of their queues, without the values that the store assigns."""
    rows = sorted(frame.collect(), key=lambda row: (row["topic"], row["queueId"], row["queueOffset"]))
    found = []
    for row in rows:
        kept = {name: value for name, value in row.asDict().items() if name not in GIVEN}
        kept["properties"] = {name: value for name, value in row["properties"].items() if name != "UNIQ_KEY"}
        found.append(kept | {"body": bytes(row["body"])})
    return found


@pytest.fixture
def original(tmp_path: Path) -> Path:
    messages = [
        SampleMessage(
            topic,
            number % 3,
            f"{topic} {number}".encode() * (number % 5),
            tags=("red", None, "blue")[number % 3],
            keys=f"key-{number} shared" if number % 2 else None,
            properties={"number": str(number), "text": "grün €"} if number % 4 else {},
            flag=number % 7,
        )
        for number in range(200)
        for topic in ("orders", "payments")
    ]
    build_store(tmp_path / "original", messages)
    return tmp_path / "original"


def test_a_copy_is_equal_but_for_ids_hosts_and_times(spark: "SparkSession", original: Path, tmp_path: Path) -> None:
    messages = read(spark, original, "orders,payments")
    copy = tmp_path / "copy"
    write(messages.drop(*GIVEN), copy)
    copied = read(spark, copy, "orders,payments")
    assert contents(copied) == contents(messages)
    assert len(contents(copied)) == 400
    assert copied.select("msgId").distinct().count() == 400
    with rmq_spark.open_reader(str(copy)) as store:
        assert store.topics() == ["orders", "payments"]
        assert [len(store.queues(topic)) for topic in store.topics()] == [4, 4]


def test_messages_are_found_by_their_keys_and_ids(spark: "SparkSession", original: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    write(read(spark, original).drop(*GIVEN), copy)
    found = read(spark, copy, keys="key-7").collect()
    assert [bytes(row["body"]) for row in found] == [b"orders 7" * 2]
    assert read(spark, copy, keys="shared").count() == 100
    assert read(spark, copy, msgId=found[0]["msgId"]).collect() == found
    assert read(spark, copy, msgId=found[0]["offsetMsgId"]).collect() == found


def test_every_column_is_written_as_it_was_given(spark: "SparkSession", tmp_path: Path) -> None:
    rows = [("grün €", "red", ["k1", "k2"], {"a": "b", "c": "d"}, 3, "shard", 5), ("", *[None] * 6)]
    frame = spark.createDataFrame(
        rows,
        "body string, tags string, keys array<string>, properties map<string,string>, queueId int, shardingKey string, "
        "flag int",
    )
    write(frame.coalesce(1), tmp_path / "store", topic="orders")
    full, empty = sorted(read(spark, tmp_path / "store").collect(), key=lambda row: row["body"], reverse=True)
    assert (bytes(full["body"]), full["tags"], full["keys"], full["queueId"], full["flag"]) == (
        "grün €".encode(),
        "red",
        "k1 k2",
        3,
        5,
    )
    properties = dict(full["properties"], UNIQ_KEY=None)
    assert properties == {
        "UNIQ_KEY": None,
        "TAGS": "red",
        "KEYS": "k1 k2",
        "__SHARDINGKEY": "shard",
        "a": "b",
        "c": "d",
    }
    assert (bytes(empty["body"]), empty["tags"], empty["keys"], empty["flag"]) == (b"", None, None, 0)
    assert list(empty["properties"]) == ["UNIQ_KEY"]


def test_the_option_topic_overrides_the_column_and_queues_says_how_many_a_new_topic_gets(
    spark: "SparkSession", tmp_path: Path
) -> None:
    frame = spark.range(600).selectExpr("cast(id as string) body", "'elsewhere' topic")
    write(frame, tmp_path / "store", topic="orders", queues=6)
    counts = Counter(row["queueId"] for row in read(spark, tmp_path / "store").select("queueId").collect())
    assert sorted(counts) == list(range(6))
    assert max(counts.values()) - min(counts.values()) <= 2, "each of the two tasks goes round"
    topics = json.loads((tmp_path / "store" / "config" / "topics.json").read_text())["topicConfigTable"]
    assert list(topics) == ["orders"]
    assert (topics["orders"]["readQueueNums"], topics["orders"]["writeQueueNums"]) == (6, 6)


def test_a_topic_that_is_there_keeps_its_queues(spark: "SparkSession", original: Path) -> None:
    write(spark.range(300).selectExpr("'new' body", "'red' tags"), original, topic="orders", queues=8)
    written = read(spark, original).filter(F.col("body") == b"new")
    assert {row["queueId"] for row in written.select("queueId").collect()} == {0, 1, 2}


def test_a_sharding_key_chooses_the_queue_as_rocketmq_does(spark: "SparkSession", tmp_path: Path) -> None:
    frame = spark.range(500).selectExpr("cast(id as string) body", "concat('customer-', id % 50) shardingKey")
    write(frame, tmp_path / "store", topic="orders", queues=7)
    rows = read(spark, tmp_path / "store").collect()
    assert len(rows) == 500
    for row in rows:
        key = f"customer-{int(bytes(row['body'])) % 50}"
        assert row["queueId"] == abs(string_hash(key)) % 7, "SelectMessageQueueByHash"


def test_rows_of_a_partition_keep_their_order_and_partitions_come_one_after_the_other(
    spark: "SparkSession", tmp_path: Path
) -> None:
    frame = spark.range(0, 40_000, 1, 3).selectExpr("cast(id as string) body", "cast(id % 2 as int) queueId")
    write(frame, tmp_path / "store", topic="orders")
    rows = read(spark, tmp_path / "store").select("queueId", "queueOffset", "body").collect()
    for queue_id in (0, 1):
        offsets = sorted((row["queueOffset"], int(bytes(row["body"]))) for row in rows if row["queueId"] == queue_id)
        assert [body for _, body in offsets] == list(range(queue_id, 40_000, 2))


@pytest.mark.parametrize("compression", ["zlib", "lz4", "zstd"])
def test_large_bodies_are_compressed_and_come_out_as_they_were(
    spark: "SparkSession", tmp_path: Path, compression: str
) -> None:
    frame = spark.range(20).selectExpr("repeat(cast(id as string), 1000 * cast(id as int)) body")
    write(frame, tmp_path / "store", topic="orders", compression=compression, compressOver="5k")
    options = {"subscribe": "orders", "columns": "body,sysFlag"}
    rows = spark.read.format("rmq").options(**options).load(str(tmp_path / "store")).collect()
    assert sorted(len(row["body"]) for row in rows) == sorted(len(str(n)) * 1000 * n for n in range(20))
    flags = spark.read.format("rmq").options(**options | {"columns": "queueId,queueOffset,sysFlag"})
    assert Counter(row["sysFlag"] & 1 for row in flags.load(str(tmp_path / "store")).collect()) == {1: 14, 0: 6}


def test_two_writes_are_two_writes(spark: "SparkSession", tmp_path: Path) -> None:
    frame = spark.range(10).selectExpr("cast(id as string) body")
    for _ in range(2):
        write(frame, tmp_path / "store", topic="orders")
    assert read(spark, tmp_path / "store").count() == 20


def test_a_transaction_is_written_once_and_older_versions_not_at_all(spark: "SparkSession", tmp_path: Path) -> None:
    store = tmp_path / "store"
    for version, word in ((3, "three"), (3, "three"), (2, "two"), (7, "seven"), (7, "seven")):
        frame = spark.range(0, 4, 1, 2).selectExpr(f"concat('{word}', id) body")
        write(frame, store, topic="orders", txnAppId="app/1", txnVersion=version)
    write(spark.range(1).selectExpr("'other' body"), store, topic="orders", txnAppId="app/2", txnVersion=3)
    bodies = sorted(bytes(row["body"]).decode() for row in read(spark, store).collect())
    assert bodies == ["other"] + [f"seven{n}" for n in range(4)] + [f"three{n}" for n in range(4)]


def test_a_write_without_rows_makes_a_store_that_can_be_read(spark: "SparkSession", tmp_path: Path) -> None:
    write(spark.range(0).selectExpr("'x' body"), tmp_path / "store", topic="orders")
    with rmq_spark.open_reader(str(tmp_path / "store")) as store:
        assert store.topics() == []


def test_a_task_that_fails_leaves_nothing_behind(spark: "SparkSession", tmp_path: Path) -> None:
    store = tmp_path / "store"
    write(spark.range(5).selectExpr("'before' body"), store, topic="orders")
    failing = spark.range(0, 20_000, 1, 2).selectExpr("if(id = 19999, null, 'x') body")
    with pytest.raises(Exception, match=r"partition 1, row 9999.*body is null"):
        write(failing, store, topic="orders")
    assert read(spark, store).count() == 5
    # A task that Spark ends because another failed may still have a file; the abort removes only files that it knows.
    assert len(list((store / "rmq" / "staging").rglob("*.arrow"))) <= 1
    assert not list((store / "rmq" / "intents").glob("*.json"))


def test_a_stores_own_rows_can_be_written_back_to_it(spark: "SparkSession", original: Path) -> None:
    rows = read(spark, original)
    write(rows.drop(*GIVEN), original, topic="archive")
    assert read(spark, original, "archive").count() == 200
    assert rows.count() == 200
