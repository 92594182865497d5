"""Spark reads a cluster that runs in this process, and shows no secret."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from brokers import RunningCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

SECRETS = {
    "accessKey": "plantedName",
    "secretKey": "plantedSecret",
    "securityToken": "plantedToken",
    "tlsKeyPassword": "plantedPassword",
}


@pytest.fixture
def options(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The options of a query of a topic with one message on each of two brokers."""
    with RunningCluster(tmp_path / "cluster", brokers=2) as cluster:
        cluster.create_topic("orders", queues=1)
        for broker in cluster.brokers:
            cluster.send("orders", broker, broker=broker)
        keys = {name: text for name, text in SECRETS.items() if not name.startswith("tls")}
        yield {"nameServer": cluster.address, "subscribe": "orders"} | keys


def test_spark_reads_a_cluster_and_shows_no_secret(
    spark: "SparkSession", options: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    read = spark.read.format("rmq").options(**options).load()
    assert sorted((row.brokerName, bytes(row.body).decode()) for row in read.collect()) == [
        ("broker-a", "broker-a"),
        ("broker-b", "broker-b"),
    ]
    read.createOrReplaceTempView("planted_orders")
    shown = [
        read._jdf.queryExecution().toString(),
        spark.sql("DESCRIBE EXTENDED planted_orders")._jdf.showString(100, 0, False).replace("planted_orders", ""),
    ]
    stream = spark.readStream.format("rmq").options(**options, startingOffsets="earliest").load()
    writer = stream.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.trigger(availableNow=True).start(str(tmp_path / "rows"))
    query.awaitTermination()
    assert spark.read.parquet(str(tmp_path / "rows")).count() == 2
    shown += [query._jsq.explainInternal(True), str(query.recentProgress), capfd.readouterr().err]
    shown += [path.read_text(errors="replace") for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    assert any('"broker-b:0"' in text for text in shown), "the progress is there"
    assert not [text for text in shown if "planted" in text]


def test_error_of_a_cluster_shows_no_secret(spark: "SparkSession", options: dict[str, str]) -> None:
    tls = {"tls": "true", "tlsCertFile": "/missing.pem", "tlsKeyFile": "/missing.key", "requestTimeout": "500ms"}
    with pytest.raises(Exception, match="missing") as caught:
        spark.read.format("rmq").options(**options, **tls, tlsKeyPassword=SECRETS["tlsKeyPassword"]).load().collect()
    assert "planted" not in str(caught.value)
