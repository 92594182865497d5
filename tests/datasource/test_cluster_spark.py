"""Spark reads and writes a cluster that runs in this process, and shows no secret."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import support.loopback_server

from rmq_spark.store.testing.brokers import Account, AccountTable, RunningCluster, ServerTls

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

SECRETS = {
    "accessKey": "plantedName",
    "secretKey": "plantedSecret",
    "securityToken": "plantedToken",
    "tlsKeyPassword": "test-password",
}
CERTIFICATES = Path(support.loopback_server.__file__).parent / "certificates"
AUTHORITY = str(CERTIFICATES / "authority.crt")
TLS_FILES = {
    "tls": "true",
    "tlsCaFile": AUTHORITY,
    "tlsCertFile": str(CERTIFICATES / "client.pem"),
    "tlsKeyFile": str(CERTIFICATES / "client-with-password.key"),
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


def test_spark_reads_and_writes_a_cluster_and_shows_no_secret_anywhere(tmp_path: Path) -> None:
    files = {"cert_file": CERTIFICATES / "localhost.pem", "key_file": CERTIFICATES / "localhost.pem"}
    tls = ServerTls(**{name: str(file) for name, file in files.items()}, client_ca_file=AUTHORITY, is_enforced=True)
    folder = tmp_path / "written"
    folder.mkdir()
    with RunningCluster(tmp_path / "cluster", brokers=2, tls=tls) as cluster:
        cluster.create_topic("orders", queues=1)
        for broker in cluster.brokers.values():
            broker.send("orders", broker.name)
            token = SECRETS["securityToken"]
            account = Account(SECRETS["accessKey"], SECRETS["secretKey"], is_admin=True, security_token=token)
            broker.accounts = AccountTable(account)
        options = {"nameServer": cluster.address, "subscribe": "orders", **SECRETS, **TLS_FILES}
        program = [sys.executable, "-P", str(Path(support.loopback_server.__file__).with_name("secret_queries.py"))]
        with (folder / "log").open("w") as log:
            run = [*program, str(folder)]
            done = subprocess.run(run, input=json.dumps(options), stdout=subprocess.PIPE, stderr=log, text=True)
        assert done.returncode == 0, (folder / "log").read_text()[-3000:]
    assert json.loads(done.stdout) == [*["broker-a"] * 3, *["broker-b"] * 3, "written"]
    written = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    kinds = {path.relative_to(folder).parts[0] for path in written}
    assert kinds >= {"checkpoint", "error", "events", "log", "plans", "processes", "progress", "rows"}
    assert kinds >= {"sink-checkpoint", "sink-progress"}
    reading = (b"SparkListenerSQLExecutionStart", b'"broker-b:0"', b"DataSourceV2", b"the account is unknown")
    writing = (b"AppendData", b"its body has 7 bytes", b"which exactly-once delivery needs, do not exist")
    for text in (*reading, *writing):
        assert any(text in data for data in written.values()), text
    found = [(path, name) for path, data in written.items() for name, text in SECRETS.items() if text.encode() in data]
    assert found == []


def test_error_of_a_cluster_shows_no_secret(spark: "SparkSession", options: dict[str, str]) -> None:
    tls = {"tls": "true", "tlsCertFile": "/missing.pem", "tlsKeyFile": "/missing.key", "requestTimeout": "500ms"}
    with pytest.raises(Exception, match="missing") as caught:
        spark.read.format("rmq").options(**options, **tls, tlsKeyPassword=SECRETS["tlsKeyPassword"]).load().collect()
    assert not [text for text in SECRETS.values() if text in str(caught.value)]


def test_stream_of_spark_notices_a_store_that_was_replaced_while_it_was_stopped(
    spark: "SparkSession", run_cluster: Callable[..., RunningCluster], tmp_path: Path
) -> None:
    cluster = run_cluster(brokers=2)
    cluster.create_topic("orders", queues=1)

    def run(**given: str) -> list[tuple[str, str]]:
        """Read what is there, and return the rows so far, sorted."""
        options = {"nameServer": cluster.address, "subscribe": "orders", "startingOffsets": "earliest"}
        stream = spark.readStream.format("rmq").options(**options | given).load()
        writer = stream.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start(str(tmp_path / "rows")).awaitTermination()
        found = spark.read.schema("brokerName string, body binary").parquet(str(tmp_path / "rows")).collect()
        return sorted((row.brokerName, bytes(row.body).decode()) for row in found)

    def last_offset() -> dict[str, object]:
        logs = [path for path in (tmp_path / "checkpoint" / "offsets").iterdir() if path.name.isdigit()]
        offset = json.loads(max(logs, key=lambda path: int(path.name)).read_text().splitlines()[-1])
        return dict(offset)

    for broker in cluster.brokers:
        cluster.send("orders", "0", "1", broker=broker)
    first = [("broker-a", "0"), ("broker-a", "1"), ("broker-b", "0"), ("broker-b", "1")]
    assert run() == first
    replaced = cluster.brokers["broker-a"]
    replaced.kill()
    replaced.replace_store(tmp_path / "other")
    replaced.restart()
    cluster.send("orders", "new 0", "new 1", "new 2", broker="broker-a")
    cluster.send("orders", "2", broker="broker-b")
    with pytest.raises(Exception, match=r"it was replaced: its message at queue offset 1 .* The broker broker-a "):
        run()
    second = [*first, ("broker-b", "2")]
    assert run(failOnDataLoss="false") == second
    assert last_offset()["orders"] == {"broker-b:0": 3}
    new = [("broker-a", f"new {number}") for number in range(3)]
    assert run() == sorted([*second, *new])
    assert last_offset()["orders"] == {"broker-a:0": 3, "broker-b:0": 3}
