"""`df.write` and `df.writeStream` to a cluster in this process: what is stored, and what Spark doubles."""

import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.cluster_fixtures import address_of

import rmq_spark
from rmq_spark.store.backend import Location
from rmq_spark.store.cluster import client
from rmq_spark.store.local.directory import StoreDirectory
from rmq_spark.store.testing.backend_fixtures import stored_rows
from rmq_spark.store.testing.brokers import RunningCluster
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [pytest.mark.spark, pytest.mark.slow]

WITHIN_S = 180
COPIED = ("topic", "queueId", "tags", "keys", "body", "properties", "flag")
AT_LEAST_ONCE = {"delivery": "atLeastOnce", "brokerDownTimeout": "5s"}


@pytest.fixture
def cluster(run_cluster: Callable[..., RunningCluster]) -> Iterator[RunningCluster]:
    """Two brokers with two queues each of the topic orders."""
    cluster = run_cluster(brokers=2)
    cluster.create_topic("orders", queues=2)
    yield cluster
    client._idle.forget()


def options_of(cluster: RunningCluster, **given: Any) -> dict[str, Any]:
    return {"nameServer": cluster.address} | AT_LEAST_ONCE | given


def write(frame: "DataFrame", cluster: RunningCluster, **given: Any) -> None:
    frame.write.format("rmq").mode("append").options(**options_of(cluster, **given)).save()


def run_stream(frame: "DataFrame", checkpoint: Path, **options: Any) -> "StreamingQuery":
    """Write everything that the source has, and wait for the end."""
    writer = frame.writeStream.format("rmq").options(**options, checkpointLocation=str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(WITHIN_S), "does not come to an end"
    finally:
        query.stop()
    return query


def stream_of(spark: "SparkSession", **options: Any) -> "DataFrame":
    return spark.readStream.format("rmq").options(**{"startingOffsets": "earliest"} | options).load()


def forget_commit(checkpoint: Path) -> None:
    """Make Spark run the last batch again, as after a crash just before it noted the commit."""
    last = max(int(file.name) for file in (checkpoint / "commits").iterdir() if file.name.isdigit())
    for name in (str(last), f".{last}.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)


def columns_of(location: Location, topic: str, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in columns) for row in stored_rows(location, topic, columns)]


def test_write_stores_all_columns_of_rows_for_several_topics(spark: "SparkSession", cluster: RunningCluster) -> None:
    schema = (
        "topic string, body binary, tags string, keys array<string>, properties map<string,string>, queueId int, "
        "brokerName string, shardingKey string, flag int, delayLevel int, deliverTimestamp timestamp"
    )
    frame = spark.createDataFrame(
        [
            ("orders", b"\xff\x00", "red", ["k1", "k2"], {"a": "b"}, 1, "broker-b", None, 7, None, None),
            ("payments", b"p", None, None, None, None, None, "customer", None, None, None),
            ("payments", b"q", None, None, None, None, None, "customer", None, None, None),
            ("late", b"l", "blue", None, None, None, None, None, None, 18, None),
        ],
        schema,
    )
    write(frame, cluster, queues=2, compression="zlib", compressOver="1")
    location = address_of(cluster)
    (order,) = stored_rows(location, "orders", ["brokerName", "queueId", "body", "tags", "keys", "properties", "flag"])
    properties = dict(order.pop("properties"))
    assert (properties["a"], len(properties["UNIQ_KEY"])) == ("b", 32)
    assert order == {
        "brokerName": "broker-b",
        "queueId": 1,
        "body": b"\xff\x00",
        "tags": "red",
        "keys": "k1 k2",
        "flag": 7,
    }
    payments = columns_of(location, "payments", "brokerName", "queueId", "properties", "body")
    assert len({place[:2] for place in payments}) == 1, "one sharding key, one queue"
    assert sorted((dict(place[2])["__SHARDINGKEY"], place[3]) for place in payments) == [
        ("customer", b"p"),
        ("customer", b"q"),
    ]
    assert columns_of(location, "late", "body") == []
    for broker in cluster.brokers.values():
        broker.deliver_due(4_000_000_000_000)
    assert columns_of(location, "late", "body", "tags") == [(b"l", "blue")]


class Copy:
    """A stream of a store directory with 40 messages in 4 queues, into the topic orders of a cluster."""

    def __init__(self, spark: "SparkSession", cluster: RunningCluster, folder: Path) -> None:
        self.spark, self.cluster = spark, cluster
        self.source, self.checkpoint = folder / "source", folder / "checkpoint"
        keys = [f"key-{number % 3}" for number in range(40)]
        build_store(
            self.source,
            [
                SampleMessage("orders", number % 4, f"{number:02d}".encode(), properties={"__SHARDINGKEY": key})
                for number, key in enumerate(keys)
            ],
        )

    def run(self, columns: str = "body", **given: Any) -> "StreamingQuery":
        limits = {"maxOffsetsPerTrigger": 16, "minPartitions": 2}
        frame = stream_of(self.spark, path=str(self.source), subscribe="orders", columns=columns, **limits)
        return run_stream(frame, self.checkpoint, **options_of(self.cluster, topic="orders"), **given)

    def stored(self, *columns: str) -> list[tuple[Any, ...]]:
        return columns_of(address_of(self.cluster), "orders", *columns)


@pytest.fixture
def copy(spark: "SparkSession", cluster: RunningCluster, tmp_path: Path) -> Copy:
    return Copy(spark, cluster, tmp_path)


ALL = [b"%02d" % number for number in range(40)]


def test_stream_stores_every_row_and_goes_on_after_a_restart(copy: Copy) -> None:
    query = copy.run()
    assert sorted(body for (body,) in copy.stored("body")) == ALL
    progress = query.lastProgress
    assert progress is not None
    assert progress.sink.numOutputRows == 8
    assert copy.cluster.address not in progress.sink.description
    assert {broker for (broker,) in copy.stored("brokerName")} == {"broker-a", "broker-b"}
    shutil.rmtree(copy.source)
    build_store(copy.source, [SampleMessage("orders", number % 4, f"{number:02d}".encode()) for number in range(50)])
    copy.run()
    assert sorted(body for (body,) in copy.stored("body")) == [b"%02d" % number for number in range(50)]


def test_batch_that_spark_runs_again_is_dropped_by_dropDuplicates(spark: "SparkSession", copy: Copy) -> None:
    copy.run()
    once = copy.stored("msgId", "body")
    assert len(dict(once)) == 40
    copy.cluster.create_topic("orders", queues=5)  # the rows go to other queues
    forget_commit(copy.checkpoint)
    copy.run()
    twice = Counter(copy.stored("msgId", "body"))
    assert sorted(twice) == sorted(once)
    assert sorted(Counter(twice.values()).items()) == [(1, 32), (2, 8)], "the last batch had 8 rows"
    frame = spark.read.format("rmq").options(nameServer=copy.cluster.address, subscribe="orders", columns="msgId,body")
    found = frame.load().dropDuplicates(["msgId"]).collect()
    assert sorted(bytes(row.body) for row in found) == ALL


def test_repeated_write_with_txnAppId_has_the_same_ids(spark: "SparkSession", copy: Copy) -> None:
    frame = spark.createDataFrame([(f"{number}",) for number in range(10)], "body string").repartition(3, "body")
    for version in (7, 7, 8):
        write(frame, copy.cluster, topic="orders", txnAppId="copy", txnVersion=version)
    counts = Counter(copy.stored("msgId"))
    assert sorted(counts.values()) == [1] * 10 + [2] * 10
    for _ in range(2):
        write(frame, copy.cluster, topic="orders")
    assert len(Counter(copy.stored("msgId"))) == 40, "a write without a name has other ids each time"


def test_rows_with_a_sharding_key_stay_in_order_in_one_queue(copy: Copy) -> None:
    copy.run("body,properties")
    places, orders = defaultdict(set), defaultdict(list)
    for broker, queue_id, properties, body in copy.stored("brokerName", "queueId", "properties", "body"):
        places[dict(properties)["__SHARDINGKEY"]].add((broker, queue_id))
        orders[broker, queue_id, int(body) % 4].append(int(body))  # by the queue that the row comes from
    assert [len(found) for _, found in sorted(places.items())] == [1, 1, 1]
    assert sum(map(len, orders.values())) == 40
    assert not [numbers for numbers in orders.values() if numbers != sorted(numbers)]


def test_rejected_row_leaves_the_cluster_unchanged(spark: "SparkSession", cluster: RunningCluster) -> None:
    last = 24_999  # in the third of Spark's batches of 10,000 rows
    rows = spark.range(last + 1).coalesce(1)
    for body, properties, message in (
        (f"if(id = {last}, repeat('x', 1001), 'x')", "map('a', 'b')", "its body has 1001 bytes; expected at most 1000"),
        ("'x'", f"map(if(id = {last}, '', 'a'), 'b')", "'' is not a property name"),
    ):
        frame = rows.selectExpr(f"{body} as body", f"{properties} as properties")
        with pytest.raises(Exception, match=f"partition 0, row {last}, topic 'orders': {message}"):
            write(frame, cluster, topic="orders", maxMessageSize=1000)
    assert columns_of(address_of(cluster), "orders", "body") == []


def test_write_without_delivery_is_refused_before_any_task(spark: "SparkSession", cluster: RunningCluster) -> None:
    frame = spark.range(1).selectExpr("cast(raise_error('a task ran') as string) as body")
    for options, message in (
        ({}, "rmq prepare-sink"),
        ({"delivery": "atLeastOnce", "flush": "async"}, "flush is not possible here: the cluster at nameServer="),
    ):
        writer = frame.write.format("rmq").mode("append").options(nameServer=cluster.address, topic="orders", **options)
        with pytest.raises(Exception, match=message) as caught:
            writer.save()
        assert "a task ran" not in str(caught.value)
    with pytest.raises(Exception, match="a topic supports appending only"):
        frame.write.format("rmq").mode("overwrite").options(**options_of(cluster, topic="orders")).save()


def test_copy_of_a_cluster_into_a_directory_and_back(
    spark: "SparkSession", cluster: RunningCluster, run_cluster: Callable[..., RunningCluster], tmp_path: Path
) -> None:
    for name in cluster.brokers:
        for number in range(2):
            bodies = [f"{name}/{number}/{offset}" for offset in range(5)]
            cluster.send("orders", *bodies, broker=name, queue_id=number, tags="red", keys="k1 k2")
    # The default columns, without those that a place gives a message itself.
    own = ("queueOffset", "commitLogOffset", "bornTimestamp", "storeTimestamp", "reconsumeTimes")
    frame = stream_of(spark, nameServer=cluster.address, subscribe="orders").drop(*own)
    assert "brokerName" in frame.columns
    store = tmp_path / "store"
    run_stream(frame, tmp_path / "first", path=str(store))
    directory = StoreDirectory(str(store))
    copied = columns_of(directory, "orders", "queueId", "body", "tags", "keys")
    assert len(copied) == 20
    for number in range(2):
        for name in cluster.brokers:
            found = [body for queue, body, *_ in copied if queue == number and body.startswith(name.encode())]
            assert found == [f"{name}/{number}/{offset}".encode() for offset in range(5)]
    assert {row[2:] for row in copied} == {("red", "k1 k2")}
    other = run_cluster()
    back = stream_of(spark, path=str(store), subscribe="orders").drop(*own)
    run_stream(back, tmp_path / "second", **options_of(other, queues=2))
    assert columns_of(address_of(other), "orders", "queueId", "body", "tags", "keys") == copied, "each queue in order"


def test_copy_of_a_directory_keeps_properties_and_flags(
    spark: "SparkSession", cluster: RunningCluster, tmp_path: Path
) -> None:
    with rmq_spark.open_store(tmp_path / "store") as messages:
        messages.send("new", b"a", tags="red", keys="k", properties={"a": "b"}, flag=3, queue_id=0)
    columns = ",".join((*COPIED, "brokerName"))
    frame = spark.read.format("rmq").options(subscribe="new", columns=columns).load(str(tmp_path / "store"))
    write(frame.drop("queueId"), cluster)
    (found,) = stored_rows(address_of(cluster), "new", ["body", "tags", "keys", "flag", "properties"])
    assert dict(found.pop("properties"))["a"] == "b"
    assert found == {"body": b"a", "tags": "red", "keys": "k", "flag": 3}
