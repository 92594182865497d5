"""Queries with an account, on a cluster in this process that checks accounts: its key changes while a query runs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql.types import StructType

from rmq_spark.datasource.spark.source import RmqDataSource
from rmq_spark.store.cluster import client, credentials
from rmq_spark.store.errors import OptionError
from rmq_spark.store.testing.brokers import Account, AccountTable, RunningCluster

SCHEMA = StructType().add("queueOffset", "long")
RunCluster = Callable[..., RunningCluster]


class Stream:
    """A stream of a cluster with one broker, and the file with its account's key."""

    def __init__(self, cluster: RunningCluster, file: Path) -> None:
        self.cluster, self.file = cluster, file
        self.give_key("the first key")
        self.write_key("the first key")
        options = {"nameServer": cluster.address, "subscribe": "orders", "credentialsFile": str(file)}
        self.reader = RmqDataSource({**options, "startingOffsets": "earliest"}).streamReader(SCHEMA)
        self.committed = self.reader.initialOffset()

    def give_key(self, secret_key: str) -> None:
        """Let the brokers accept only this key."""
        account = Account("reader", secret_key, topics={"orders": "SUB|GET"}, groups={"*": "SUB"})
        self.cluster.broker.accounts = AccountTable(account)

    def write_key(self, secret_key: str) -> None:
        """Replace the file."""
        new = self.file.with_suffix(".new")
        new.write_text(f"accessKey: reader\nsecretKey: {secret_key}\n")
        new.replace(self.file)

    def plan(self) -> list[int]:
        """Plan a batch and read it. Return its offsets."""
        start, end = self.committed, self.reader.latestOffset(self.committed, self.reader.getDefaultReadLimit())
        if json.dumps(end) == json.dumps(start):
            return []
        self.committed = end
        return self.read(start, end)

    def read(self, start: dict[str, object], end: dict[str, object]) -> list[int]:
        """Read a batch. Return its offsets."""
        parts = self.reader.partitions(start, end)
        return [
            offset for part in parts for batch in self.reader.read(part) for offset in batch["queueOffset"].to_pylist()
        ]


@pytest.fixture(params=["5.3", "4.9"])
def stream(
    request: pytest.FixtureRequest, run_cluster: RunCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Stream:
    """A stream that has read three messages."""
    monkeypatch.setattr(credentials, "CHECK_PERIOD_S", 3600.0)  # only a refusal makes it look at the file
    cluster = run_cluster(release=request.param)
    cluster.create_topic("orders", queues=1)
    cluster.send("orders", b"0", b"1", b"2")
    stream = Stream(cluster, tmp_path / "keys")
    assert stream.plan() == [0, 1, 2]
    yield stream
    stream.reader.stop()
    client._idle.forget()


def test_stream_goes_on_after_the_key_and_its_file_have_changed(stream: Stream) -> None:
    for number in range(3):
        stream.cluster.send("orders", b"%d" % number)
        stream.give_key(f"key {number}")
        stream.write_key(f"key {number}")
        assert stream.plan() == [3 + number]


def test_stream_whose_key_has_changed_and_whose_file_has_not_names_the_file(stream: Stream) -> None:
    stream.give_key("another key")
    with pytest.raises(OptionError, match="credentialsFile") as error:
        stream.plan()
    assert "first key" not in str(error.value)
    stream.write_key("another key")
    stream.cluster.send("orders", b"3")
    assert stream.plan() == [3]
