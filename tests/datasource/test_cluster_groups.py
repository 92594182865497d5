"""Queries on a cluster in this process that only begin at the offsets of a consumer group, or are limited in bytes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import StructType

from rmq_spark.datasource.spark.source import RmqDataSource
from rmq_spark.store.cluster import client
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.errors import DataLossError
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import RunningCluster

SCHEMA = StructType().add("body", "binary")
GROUP = {"consumerGroup": "billing", "startingOffsets": "group", "commitOffsets": "off"}


@pytest.fixture(params=["5.3", "4.9"])
def cluster(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunningCluster]:
    """Two brokers, each with one queue of the topic orders: the messages 1, 2, 3 and 4, the message 0 has expired."""
    for name in ("_ROUTES_MS", "_AWAY_ROUTES_MS", "_ROUTES_MIN_MS"):
        monkeypatch.setattr(f"rmq_spark.store.cluster.catalog.{name}", 50)
    with RunningCluster(tmp_path / "cluster", release=request.param, brokers=2) as cluster:
        cluster.create_topic("orders", queues=1)
        for broker in cluster.brokers:
            cluster.send("orders", *[b"x" * 1000] * 5, broker=broker)
            cluster.brokers[broker].expire("orders", 0, 1)
        yield cluster
        client._idle.forget()


def commit(cluster: RunningCluster, broker: str, offset: int) -> None:
    cluster.loop.run(cluster.brokers[broker].offsets.commit, "billing", QueueKey("orders", 0), offset)


def source_of(cluster: RunningCluster, **given: str) -> RmqDataSource:
    return RmqDataSource({"nameServer": cluster.address, "subscribe": "orders"} | given)


def ranges_of(partitions: list[Any]) -> dict[str, tuple[int, int]]:
    """Return the planned range of each broker's queue."""
    found: dict[str, tuple[int, int]] = {}
    for piece in sorted(piece for part in partitions for piece in part.pieces):
        name = piece.queue.broker[-1]
        begin, end = found.get(name, (piece.begin, piece.begin))
        assert end == piece.begin
        found[name] = begin, piece.end
    return found


class Stream:
    """A run of a stream, of which only the plans are looked at."""

    def __init__(self, cluster: RunningCluster, checkpoint: str | None = None, **given: str) -> None:
        self.reader = source_of(cluster, **given).streamReader(SCHEMA)
        self.committed = checkpoint or json.dumps(self.reader.initialOffset())

    def trigger(self) -> dict[str, tuple[int, int]]:
        start = json.loads(self.committed)
        end = self.reader.latestOffset(start, self.reader.getDefaultReadLimit())
        self.committed = json.dumps(end)
        return {} if end == start else ranges_of(self.reader.partitions(start, end))

    def until(self, broker: str) -> dict[str, tuple[int, int]]:
        """Run triggers until one reads from the broker."""
        for _ in range(400):
            if broker in (found := self.trigger()):
                return found
        raise AssertionError(self.committed)


def test_batch_query_begins_at_the_group_else_at_the_fallback(cluster: RunningCluster) -> None:
    commit(cluster, "broker-a", 3)
    for fallback, expected in (("latest", {"a": (3, 5)}), ("earliest", {"a": (3, 5), "b": (1, 5)})):
        reader = source_of(cluster, **GROUP, groupFallback=fallback).reader(SCHEMA)
        assert ranges_of(reader.partitions()) == expected


def test_batch_query_reports_a_group_that_is_ahead_or_behind(
    cluster: RunningCluster, caplog: pytest.LogCaptureFixture
) -> None:
    commit(cluster, "broker-a", 9)
    commit(cluster, "broker-b", 0)
    with pytest.raises(DataLossError):
        source_of(cluster, **GROUP).reader(SCHEMA).partitions()
    reader = source_of(cluster, **GROUP, failOnDataLoss="false").reader(SCHEMA)
    assert ranges_of(reader.partitions()) == {"b": (1, 5)}
    skipped = [line for line in caplog.messages if "skipped, failOnDataLoss=false" in line]
    assert [("[5, 9)" in line, "[0, 1)" in line) for line in skipped] == [(True, False), (False, True)]


def test_stream_begins_at_the_group_and_goes_on_at_its_checkpoint(
    cluster: RunningCluster, caplog: pytest.LogCaptureFixture
) -> None:
    commit(cluster, "broker-a", 3)
    stream = Stream(cluster, **GROUP, groupFallback="earliest")
    assert stream.trigger() == {"a": (3, 5), "b": (1, 5)}
    assert len([line for line in caplog.messages if "does not join it" in line]) == 1
    stream.reader.stop()
    commit(cluster, "broker-a", 4)
    stream = Stream(cluster, stream.committed, **GROUP, groupFallback="earliest")
    cluster.clear_requests()
    cluster.send("orders", b"new", broker="broker-a")
    assert stream.until("a") == {"a": (5, 6)}
    counts = cluster.clear_requests()
    assert not any(count[RequestCode.QUERY_CONSUMER_OFFSET] for count in counts.values())
    stream.reader.stop()
    assert cluster.brokers["broker-a"].offsets.table() == {"orders@billing": {0: 4}}
    assert all(not count[RequestCode.UPDATE_CONSUMER_OFFSET] for count in counts.values())


def test_stream_reads_the_retry_topic_of_its_group_from_its_first_message(cluster: RunningCluster) -> None:
    for broker in cluster.brokers:
        commit(cluster, broker, 5)
    streams = [Stream(cluster, **GROUP), Stream(cluster, **GROUP, subscribeRetry="false")]
    assert [stream.trigger() for stream in streams] == [{}, {}]
    cluster.create_topic("%RETRY%billing", queues=1, brokers=["broker-b"])
    cluster.send("%RETRY%billing", b"0", b"1", broker="broker-b")
    assert streams[0].until("b") == {"b": (0, 2)}
    assert json.loads(streams[0].committed)["%RETRY%billing"] == {"broker-b:0": 2}
    assert streams[1].trigger() == {}
    for stream in streams:
        stream.reader.stop()


@pytest.mark.parametrize(
    ("committed", "expected"),
    [(3, (3, 6)), (None, (1, 6))],
    ids=["at the committed offset", "latest: all messages are younger than a minute"],
)
def test_stream_meets_a_broker_that_was_away_at_first(
    cluster: RunningCluster, committed: int | None, expected: tuple[int, int]
) -> None:
    commit(cluster, "broker-a", 2)
    if committed is not None:
        commit(cluster, "broker-b", committed)
    cluster.brokers["broker-b"].kill()
    stream = Stream(cluster, **GROUP)
    assert stream.trigger() == {"a": (2, 5)}
    cluster.brokers["broker-b"].restart()
    cluster.send("orders", b"new", broker="broker-b")
    assert stream.until("b") == {"b": expected}
    stream.reader.stop()


def test_stream_whose_broker_goes_away_between_two_questions_reads_the_others(cluster: RunningCluster) -> None:
    for broker in cluster.brokers:
        commit(cluster, broker, 2)
    stream = Stream(cluster, **GROUP)
    backend = stream.reader._view.backend
    asks = backend.committed_offsets

    def committed_offsets(group: str, queues: Any) -> dict[QueueKey, int]:
        if len(queues) == 2:
            cluster.brokers["broker-b"].kill()
        return asks(group, queues)

    backend.committed_offsets = committed_offsets
    assert stream.trigger() == {"a": (2, 5)}
    stream.reader.stop()


def test_stream_that_begins_at_a_time_without_an_offset(
    cluster: RunningCluster, caplog: pytest.LogCaptureFixture
) -> None:
    commit(cluster, "broker-a", 4)
    stream = Stream(cluster, **GROUP, groupFallback="timestamp", startingTimestamp="-10m")
    assert stream.trigger() == {"a": (4, 5), "b": (1, 5)}
    stream.trigger()
    stream.reader.stop()
    assert caplog.text.count("startingTimestamp is earlier than the stored messages") == 1, caplog.text
    assert "deleted older ones in 1 of 1 queues" in caplog.text


def test_stream_is_limited_in_bytes(cluster: RunningCluster) -> None:
    stream = Stream(cluster, startingOffsets="earliest", maxBytesPerTrigger="5000")
    taken = []
    for _ in range(20):
        if not (found := stream.trigger()):
            break
        taken.append(sum(end - begin for begin, end in found.values()))
    assert (sum(taken), max(taken)) == (8, 4), taken
    stream.reader.stop()


def test_stream_with_a_small_limit_takes_a_message_each_time(cluster: RunningCluster) -> None:
    stream = Stream(cluster, startingOffsets="earliest", maxBytesPerTrigger="1")
    taken = [stream.trigger() for _ in range(8)]
    assert [sum(end - begin for begin, end in found.values()) for found in taken] == [1] * 8
    assert stream.trigger() == {}
    stream.reader.stop()
