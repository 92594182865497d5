"""Queries of a consumer group in a cluster in this process, of which tests look at the plans. No Spark runs."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import StructType

from rmq_spark.datasource.spark.source import RmqDataSource
from rmq_spark.store.cluster import client
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import RunningCluster
from rmq_spark.store.testing.brokers.raw_client import RawClient

SCHEMA = StructType().add("body", "binary")
GROUP = "billing"
OTHER = "zz@1#other"  # sorts after the ids of queries, so it gets the queue of broker-b


@contextmanager
def two_brokers(path: Path, release: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningCluster]:
    """Yield two light brokers, each with a queue of the topic orders, in which ten messages have arrived."""
    for name in ("_ROUTES_MS", "_AWAY_ROUTES_MS", "_ROUTES_MIN_MS"):
        monkeypatch.setattr(f"rmq_spark.store.cluster.catalog.{name}", 50)
    with RunningCluster(path / "cluster", release=release, brokers=2, is_light=True) as cluster:
        cluster.create_topic("orders", queues=1)
        for broker in cluster.brokers:
            cluster.advance("orders", 10, broker=broker)
        yield cluster
        client._idle.forget()


class Query:
    """A run of a query, of which only the plans are looked at. The end of `with` is the end of the run."""

    def __init__(self, cluster: RunningCluster, checkpoint: str | None = None, **given: str) -> None:
        options = {"nameServer": cluster.address, "subscribe": "orders", "consumerGroup": GROUP}
        self.reader: Any = RmqDataSource({**options, "groupFallback": "earliest", **given}).streamReader(SCHEMA)
        self.committed = checkpoint or json.dumps(self.reader.initialOffset())

    def __enter__(self) -> "Query":
        return self

    def __exit__(self, *error: object) -> None:
        self.reader.stop()

    def trigger(self) -> dict[str, tuple[int, int]]:
        """Plan a batch, and return the range of each broker's queue in it. All its rows count as delivered."""
        start = json.loads(self.committed)
        end = self.reader.latestOffset(start, self.reader.getDefaultReadLimit())
        self.committed = json.dumps(end)
        if end == start:
            return {}
        pieces = sorted(piece for part in self.reader.partitions(start, end) for piece in part.pieces)
        found: dict[str, tuple[int, int]] = {}
        for piece in pieces:
            name = piece.queue.broker[-1]
            begin, last = found.get(name, (piece.begin, piece.begin))
            assert last == piece.begin, pieces
            found[name] = begin, piece.end
        return found

    def until(self, broker: str) -> dict[str, tuple[int, int]]:
        """Run triggers until one reads from the broker."""
        for _ in range(400):
            if broker in (found := self.trigger()):
                return found
        raise AssertionError(self.committed)

    @property
    def mark(self) -> dict[str, Any]:
        mark: dict[str, Any] = self.reader.reportLatestOffset()["@"]
        return mark

    @property
    def positions(self) -> dict[str, int]:
        found: dict[str, int] = json.loads(self.committed)["orders"]
        return found

    @property
    def metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.committed)["@"]
        return found


def reset(cluster: RunningCluster, broker: str) -> None:
    """Reset the group to the first message, as mqadmin does: 5.3 keeps the reset, 4.9 tells the members."""
    fields = {"topic": "orders", "group": GROUP, "isForce": True, "timestamp": 0}
    with RawClient(cluster.brokers[broker].address) as admin:
        assert admin.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, fields).code == 0


def commit(cluster: RunningCluster, broker: str, offset: int) -> None:
    """Set the group's offset in the queue of a broker."""
    cluster.loop.run(cluster.brokers[broker].offsets.commit, GROUP, QueueKey("orders", 0), offset)


def committed(cluster: RunningCluster, broker: str) -> int | None:
    """Return the group's offset in the queue of a broker, None if it has none."""
    found: int | None = cluster.loop.run(cluster.brokers[broker].offsets.find, GROUP, QueueKey("orders", 0))
    return found


def add_other(cluster: RunningCluster, **subscription: str) -> None:
    """Let another member join, which reads all messages of orders unless a `subscription` is given."""
    for broker in cluster.brokers.values():
        broker.members.add(GROUP, OTHER, subscription or {"orders": "*"})


def remove_other(cluster: RunningCluster) -> None:
    """Let the other member leave."""
    for broker in cluster.brokers.values():
        broker.members.remove(GROUP, OTHER)
