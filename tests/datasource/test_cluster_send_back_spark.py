"""Failed rows of Spark go back to a cluster in this process, and the same query reads them again."""

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

import rmq_spark
from rmq_spark.store.cluster import client
from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.testing.brokers import RunningCluster, faults

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

pytestmark = pytest.mark.spark

WITHIN_S = 180
SEND_BACK = RequestCode.CONSUMER_SEND_MSG_BACK
FUTURE_MS = 3 * 3600 * 1000
GROUP = {"consumerGroup": "billing", "startingOffsets": "group", "groupFallback": "earliest"}


@pytest.fixture
def cluster(run_cluster: Callable[..., RunningCluster]) -> Iterator[RunningCluster]:
    """Two brokers with the messages a0, a1 and b0, b1 in a queue each of the topic orders, at equal offsets."""
    cluster = run_cluster(brokers=2)
    cluster.create_topic("orders", queues=1)
    for name, broker in cluster.brokers.items():
        broker.settings.delivers = False
        cluster.send("orders", f"{name[-1]}0", f"{name[-1]}1", broker=name, queue_id=0)
    yield cluster
    client._idle.forget()


def deliver(cluster: RunningCluster) -> int:
    return sum(broker.deliver_due(wall_clock_ms() + FUTURE_MS) for broker in cluster.brokers.values())


def rows_of(spark: "SparkSession", cluster: RunningCluster, topic: str) -> list[tuple[str, int, str]]:
    """Return body, reconsumeTimes and broker of all messages of a topic, sorted."""
    frame = spark.read.format("rmq").options(nameServer=cluster.address, subscribe=topic).load()
    found = frame.selectExpr("cast(body as string) body", "reconsumeTimes", "brokerName").collect()
    return sorted((row.body, row.reconsumeTimes, row.brokerName) for row in found)


def test_mode_sendBack_sends_rows_back_to_their_brokers(spark: "SparkSession", cluster: RunningCluster) -> None:
    place = {"nameServer": cluster.address}
    frame = spark.read.format("rmq").options(**place, subscribe="orders").load()
    failed = frame.selectExpr("*", "if(body = 'b1', -1, 0) delayLevel", "'E' error").where("body in ('a0', 'b1')")
    writer = failed.write.format("rmq").mode("append").options(**place, mode="sendBack", consumerGroup="billing")
    writer.save()
    assert rows_of(spark, cluster, "%DLQ%billing") == [("b1", 1, "broker-b")]
    assert deliver(cluster) == 1
    assert rows_of(spark, cluster, "%RETRY%billing") == [("a0", 1, "broker-a")]
    without = failed.drop("brokerName").write.format("rmq").mode("append")
    with pytest.raises(Exception, match="without the column brokerName"):
        without.options(**place, mode="sendBack", consumerGroup="billing").save()


@pytest.mark.slow
def test_consume_gets_failed_rows_of_a_cluster_again(
    spark: "SparkSession", cluster: RunningCluster, tmp_path: Path
) -> None:
    noted = tmp_path / "noted"
    noted.mkdir()

    def listen(rows: "list[Row]", context: Any) -> str:
        (row,) = rows
        text = f"{bytes(row.body).decode()} {row.topic} {row.reconsumeTimes} {context.topic} {context.broker_name}"
        (noted / uuid.uuid4().hex).write_text(text)
        until = time.monotonic() + WITHIN_S
        while not row.reconsumeTimes and len(list(noted.iterdir())) < 4:  # the calls run side by side
            assert time.monotonic() < until
            time.sleep(0.01)
        return "CONSUME_SUCCESS" if row.body[1:] == b"0" else "RECONSUME_LATER"

    def run() -> list[str]:
        """Consume what is there. Return what the listener got."""
        for file in noted.iterdir():
            file.unlink()
        frame = spark.readStream.format("rmq").options(nameServer=cluster.address, subscribe="orders", **GROUP).load()
        query = rmq_spark.consume(
            frame,
            listen,
            name_server=cluster.address,
            group="billing",
            checkpoint_location=tmp_path / "checkpoint",
            max_reconsume_times=1,
            trigger={"availableNow": True},
        )
        try:
            assert query.awaitTermination(WITHIN_S), "does not come to an end"
        finally:
            query.stop()
        counted = rmq_spark.listener_progress(query)
        assert counted is not None
        assert (counted["failedRows"], counted["rows"]) == (2, len(list(noted.iterdir())))
        return sorted(file.read_text() for file in noted.iterdir())

    assert run() == [f"{name}{number} orders 0 orders broker-{name}" for name in "ab" for number in range(2)]
    assert deliver(cluster) == 2
    assert run() == [f"{name}1 orders 1 %RETRY%billing broker-{name}" for name in "ab"]
    assert rows_of(spark, cluster, "%DLQ%billing") == [("a1", 2, "broker-a"), ("b1", 2, "broker-b")]
    assert deliver(cluster) == 0


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True], ids=["after-the-commit", "within-the-commit"])
def test_consume_sends_rows_of_a_repeated_batch_back_once(
    spark: "SparkSession", cluster: RunningCluster, tmp_path: Path, fails: bool
) -> None:
    checkpoint = tmp_path / "check point"

    def listen(rows: "list[Row]", context: Any) -> str:
        return "RECONSUME_LATER"

    def run() -> str:
        """Consume what is there. Return the error of the query, or ""."""
        frame = spark.readStream.format("rmq").options(nameServer=cluster.address, subscribe="orders", **GROUP).load()
        query = rmq_spark.consume(
            frame,
            listen,
            name_server=cluster.address,
            group="billing",
            checkpoint_location=checkpoint,
            max_reconsume_times=1,
            trigger={"availableNow": True},
        )
        try:
            query.awaitTermination(WITHIN_S)
        except StreamingQueryException as error:
            return str(error)
        finally:
            query.stop()
        return ""

    def run_twice() -> None:
        """Run the query, and run it again as after its death before Spark noted the last batch."""
        assert run() == ""
        last = max(int(file.name) for file in (checkpoint / "offsets").iterdir() if file.name.isdigit())
        for name in (str(last), f".{last}.crc"):
            (checkpoint / "commits" / name).unlink(missing_ok=True)
        assert run() == ""

    if fails:
        cluster.brokers["broker-b"].fail(SEND_BACK, faults.with_code(ResponseCode.MESSAGE_ILLEGAL, "planted"), times=1)
        assert "planted" in run()
    run_twice()
    assert deliver(cluster) == 4
    retried = [(f"{name}{number}", 1, f"broker-{name}") for name in "ab" for number in range(2)]
    assert rows_of(spark, cluster, "%RETRY%billing") == retried
    run_twice()
    assert rows_of(spark, cluster, "%DLQ%billing") == [(body, 2, broker) for body, _, broker in retried]
