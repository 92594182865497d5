"""Queries on a cluster that runs in this process, planned and read as by Spark, but without Spark."""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import StructType

from rmq_spark.datasource.options.read_options import ReadSettings
from rmq_spark.datasource.spark.broker_wait import BrokerWait
from rmq_spark.datasource.spark.partition import Piece, RmqPartition
from rmq_spark.datasource.spark.partition_reader import read_partition
from rmq_spark.datasource.spark.source import RmqDataSource
from rmq_spark.store.cluster import client
from rmq_spark.store.cluster.address import ClusterAddress, parse_name_servers
from rmq_spark.store.cluster.backend import ClusterBackend
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.errors import DataLossError, StoreChangedError
from rmq_spark.store.model import MAX_DECOMPRESSED_BYTES, QueueBounds, QueueKey
from rmq_spark.store.testing.brokers import Broker, RunningCluster, faults

SCHEMA = StructType().add("brokerName", "string").add("queueOffset", "long").add("body", "binary")
Row = tuple[str, int, bytes]


@pytest.fixture(params=["5.3", "4.9"])
def cluster(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunningCluster]:
    """Two brokers, each with one queue of the topic orders and three messages in it."""
    for name in ("_ROUTES_MS", "_AWAY_ROUTES_MS", "_ROUTES_MIN_MS"):
        monkeypatch.setattr(f"rmq_spark.store.cluster.catalog.{name}", 50)
    with RunningCluster(tmp_path / "cluster", release=request.param, brokers=2) as cluster:
        cluster.create_topic("orders", queues=1)
        for broker in cluster.brokers:
            cluster.send("orders", b"0", b"1", b"2", broker=broker)
        yield cluster
        client._idle.forget()  # closes the connections that this process keeps


def source_of(cluster: RunningCluster, **given: str) -> RmqDataSource:
    return RmqDataSource({"nameServer": cluster.address, "subscribe": "orders", "requestTimeout": "500ms"} | given)


def rows_of(task: Any, partitions: list[Any]) -> list[Row]:
    """Return the rows that tasks read, from pickled copies."""
    copy = pickle.loads(pickle.dumps(task))
    found = [
        row for part in pickle.loads(pickle.dumps(partitions)) for batch in copy.read(part) for row in batch.to_pylist()
    ]
    return [(row["brokerName"][-1], row["queueOffset"], row["body"]) for row in found]


def rows(broker: str, *offsets: int) -> list[Row]:
    return [(broker, offset, b"%d" % offset) for offset in offsets]


class Stream:
    """A run of a stream."""

    def __init__(self, cluster: RunningCluster, checkpoint: str | None = None, **given: str) -> None:
        self.cluster, self.given = cluster, given
        self.reader = source_of(cluster, **given).streamReader(SCHEMA)
        self.committed = checkpoint or json.dumps(self.reader.initialOffset())

    def restart(self) -> "Stream":
        self.reader.stop()
        return Stream(self.cluster, self.committed, **self.given)

    def trigger(self) -> list[Row]:
        start = json.loads(self.committed)
        end = json.loads(json.dumps(self.reader.latestOffset(start, self.reader.getDefaultReadLimit())))
        if end == start:
            return []
        self.committed = json.dumps(end)
        return rows_of(self.reader, self.reader.partitions(start, end))

    def read(self, count: int) -> list[Row]:
        """Run triggers until this number of rows has come."""
        found: list[Row] = []
        for _ in range(400):
            found += self.trigger()
            if len(found) >= count:
                return found
        raise AssertionError(f"only {found}")


def test_batch_query_reads_all_brokers(cluster: RunningCluster) -> None:
    reader = source_of(cluster).reader(SCHEMA)
    assert rows_of(reader, reader.partitions()) == rows("a", 0, 1, 2) + rows("b", 0, 1, 2)


def test_stream_reads_on_while_a_broker_is_away_and_loses_nothing(cluster: RunningCluster) -> None:
    stream = Stream(cluster, startingOffsets="earliest")
    assert stream.trigger() == rows("a", 0, 1, 2) + rows("b", 0, 1, 2)
    cluster.brokers["broker-b"].kill()
    cluster.send("orders", b"3", broker="broker-a")
    assert stream.read(1) == rows("a", 3)
    assert list(stream.reader.reportLatestOffset()["@"]["away"]) == ["broker-b"]
    stream = stream.restart()
    cluster.send("orders", b"4", broker="broker-a")
    assert stream.read(1) == rows("a", 4)
    cluster.brokers["broker-b"].restart()
    cluster.send("orders", b"3", broker="broker-b")
    assert stream.read(1) == rows("b", 3)
    assert stream.trigger() == []
    assert json.loads(stream.committed)["orders"] == {"broker-a:0": 5, "broker-b:0": 4}
    stream.reader.stop()


def test_broker_that_is_replaced_before_a_restarted_query_has_read_is_noticed(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    stream = Stream(cluster, startingOffsets="earliest")
    assert len(stream.trigger()) == 6
    stream = stream.restart()
    assert stream.trigger() == []
    broker = cluster.brokers["broker-a"]
    broker.kill()
    broker.replace_store(tmp_path / "other")
    broker.restart()
    broker.send("orders", b"new 0", b"new 1", b"new 2", b"new 3", queue_id=0)
    with pytest.raises(DataLossError, match="replaced"):
        stream.read(1)
    stream.reader.stop()


@pytest.mark.parametrize("queues", [1, 2])
def test_broker_that_is_replaced_while_a_repeated_batch_is_read_is_noticed(
    cluster: RunningCluster, tmp_path: Path, queues: int
) -> None:
    """The driver that repeats the batch finds the broker away, so the tasks have only the records of the offset."""
    cluster.create_topic("orders", queues=queues)
    stream = Stream(cluster, startingOffsets="earliest", brokerDownTimeout="20s", requestTimeout="5s")
    assert len(stream.trigger()) == 6
    broker = cluster.brokers["broker-a"]
    for queue_id in range(queues):
        broker.send("orders", b"3", b"4", b"5", queue_id=queue_id)
    start = json.loads(stream.committed)
    end = stream.reader.latestOffset(start, stream.reader.getDefaultReadLimit())
    broker.kill()
    stream = stream.restart()
    partitions = stream.reader.partitions(start, end)
    assert [piece.last for part in partitions for piece in part.pieces] == [None] * queues
    broker.replace_store(tmp_path / "other")
    broker.restart()
    for queue_id in range(queues):
        broker.send("orders", *[b"new"] * 6, queue_id=queue_id)
    with pytest.raises(StoreChangedError, match="replaced"):
        rows_of(stream.reader, partitions)
    stream.reader.stop()


@pytest.mark.parametrize(
    ("given", "first", "later"),
    [({"startingOffsets": "earliest"}, rows("a", 0, 1, 2), rows("b", 0, 1, 2, 3)), ({}, [], rows("b", 0, 1, 2, 3))],
    ids=["earliest", "latest: all are younger than a minute"],
)
def test_broker_that_is_away_at_the_first_plan(
    cluster: RunningCluster, given: dict[str, str], first: list[Row], later: list[Row]
) -> None:
    cluster.brokers["broker-b"].kill()
    stream = Stream(cluster, **given)
    assert stream.trigger() == first
    cluster.brokers["broker-b"].restart()
    cluster.send("orders", b"3", broker="broker-b")
    assert stream.read(len(later)) == later
    assert stream.trigger() == []
    stream.reader.stop()


@pytest.mark.parametrize("is_empty", [False, True])
def test_task_reads_while_no_name_server_lists_its_broker(cluster: RunningCluster, is_empty: bool) -> None:
    stream = Stream(cluster, startingOffsets="earliest", brokerDownTimeout="20s", requestTimeout="5s")
    start = json.loads(stream.committed)
    end = stream.reader.latestOffset(start, stream.reader.getDefaultReadLimit())
    partitions = stream.reader.partitions(start, end)
    for server in cluster.name_servers:
        server.kill()
        if is_empty:
            server.restart()  # the brokers register again half a minute later
    assert rows_of(stream.reader, partitions) == rows("a", 0, 1, 2) + rows("b", 0, 1, 2)
    stream.reader.stop()


def test_task_finds_a_broker_that_has_moved_since_the_plan(cluster: RunningCluster) -> None:
    stream = Stream(cluster, startingOffsets="earliest", brokerDownTimeout="20s", requestTimeout="5s")
    start = json.loads(stream.committed)
    end = stream.reader.latestOffset(start, stream.reader.getDefaultReadLimit())
    partitions = stream.reader.partitions(start, end)
    cluster.brokers["broker-b"].kill()
    cluster.brokers["broker-b"].restart(new_port=True)
    assert rows_of(stream.reader, partitions) == rows("a", 0, 1, 2) + rows("b", 0, 1, 2)
    stream.reader.stop()


def test_long_polling_ends_with_a_message(cluster: RunningCluster) -> None:
    stream = Stream(cluster, startingOffsets="earliest", longPollingMs="60s")
    assert len(stream.trigger()) == 6
    waits = stream.reader._view.backend.wait_for_messages
    asked: list[bool] = []

    def wait_for_messages(after: Any, timeout_ms: float) -> bool:
        if not asked:
            cluster.send("orders", b"3", broker="broker-b")
        asked.append(waits(after, timeout_ms))
        return asked[-1]

    stream.reader._view.backend.wait_for_messages = wait_for_messages
    assert stream.trigger() == rows("b", 3)
    assert asked[-1]
    stream.reader.stop()


def test_available_now_reads_all_and_ends(cluster: RunningCluster) -> None:
    stream = Stream(cluster, startingOffsets="earliest", maxOffsetsPerTrigger="2")
    stream.reader.prepareForTriggerAvailableNow()
    cluster.send("orders", b"3", broker="broker-a")
    assert sorted(stream.read(6)) == rows("a", 0, 1, 2) + rows("b", 0, 1, 2)
    assert stream.trigger() == []
    stream.reader.stop()


def test_broker_that_is_replaced_while_a_task_reads_gives_no_complete_task(
    cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmq_spark.store.cluster.pull_pipeline._JOINED_OFFSETS", 8)
    monkeypatch.setattr("rmq_spark.datasource.spark.partition_reader._JOINED_ROWS", 1)
    monkeypatch.setattr("rmq_spark.datasource.spark.partition_reader._GROUPED_MESSAGES", 1)  # one range after another
    broker = cluster.brokers["broker-a"]
    broker.settings.on_disk = True
    bodies = [b"%d" % number for number in range(100)]
    broker.send("orders", *bodies[3:])
    reader = source_of(cluster, pullsInFlight="1", requestTimeout="3s").reader(SCHEMA)
    found = reader.read(reader.partitions()[0])
    assert next(found).num_rows == 8
    broker.kill()
    broker.replace_store(tmp_path / "other")
    broker.restart()
    broker.send("orders", *bodies)
    with pytest.raises(StoreChangedError, match=r"it was replaced: its message at queue offset 99"):
        list(found)


def test_broker_that_is_away_again_after_a_read_is_waited_for(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmq_spark.datasource.spark.partition_reader._GROUPED_MESSAGES", 1)  # one range after another
    broker = cluster.brokers["broker-a"]
    reader = source_of(cluster, requestTimeout="3s").reader(SCHEMA)
    partitions = reader.partitions()
    client._idle.forget()
    pulls = broker.fail(RequestCode.PULL_MESSAGE, faults.closes_connection(), times=1, when=lambda _: pulls_seen() == 3)
    stats = broker.fail(RequestCode.GET_TOPIC_STATS_INFO, faults.with_code(1), times=2, when=lambda _: pulls.count > 0)

    def pulls_seen() -> int:
        return len(broker.seen_requests(RequestCode.PULL_MESSAGE))

    broker.clear_requests()
    assert rows_of(reader, partitions) == rows("a", 0, 1, 2) + rows("b", 0, 1, 2)
    assert (pulls.count, stats.count) == (1, 2)


def test_broker_that_goes_away_after_ranges_were_read_together_is_read_again(cluster: RunningCluster) -> None:
    reader = source_of(cluster, requestTimeout="3s").reader(SCHEMA)
    partitions = reader.partitions()
    client._idle.forget()
    broker = cluster.brokers["broker-a"]
    broker.clear_requests()
    stats = broker.fail(RequestCode.GET_TOPIC_STATS_INFO, faults.with_code(1), times=1)
    assert rows_of(reader, partitions) == rows("a", 0, 1, 2) + rows("b", 0, 1, 2)
    pulled = [int(one.fields["queueOffset"]) for one in broker.seen_requests(RequestCode.PULL_MESSAGE)]
    assert stats.count == 1
    assert pulled.count(0) >= 2  # the range was read together with the other broker's, and then once more


def test_task_that_meets_expiry_does_not_go_back(cluster: RunningCluster, caplog: pytest.LogCaptureFixture) -> None:
    queue = QueueKey("orders", 0, "broker-a")
    backend = ClusterAddress(parse_name_servers(cluster.address)).open()
    assert backend.bounds([queue]) == {queue: QueueBounds(0, 3)}
    cluster.send("orders", b"3", b"4", b"5", broker="broker-a")
    cluster.brokers["broker-a"].expire("orders", 0, 5)
    partition = RmqPartition(backend.location, (Piece(queue, 4, 6, None, None),))
    settings = ReadSettings(("queueOffset",), False, MAX_DECOMPRESSED_BYTES, fail_on_data_loss=False)
    batches = list(read_partition(partition, settings, backend))
    backend.close()
    assert [row["queueOffset"] for batch in batches for row in batch.to_pylist()] == [5]
    (loss,) = [one for one in caplog.messages if "skipped while reading" in one]
    assert "[4, 5)" in loss


# Brokers that get another store while the query is stopped.


def replace_store(broker: Broker, path: Path, *bodies: bytes, topic: str = "orders") -> None:
    """Start a broker again with another store, which is new unless `path` exists, and append messages to its queue."""
    broker.kill()
    broker.replace_store(path)
    broker.restart()
    broker.send(topic, *bodies, queue_id=0)


def other(count: int) -> list[bytes]:
    return [b"other %d" % number for number in range(count)]


@pytest.mark.parametrize("grouped", [1, 10_000], ids=["apart", "together"])
def test_broker_that_is_away_when_its_task_begins_and_then_replaced_gives_no_complete_task(
    cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grouped: int
) -> None:
    monkeypatch.setattr("rmq_spark.datasource.spark.partition_reader._GROUPED_MESSAGES", grouped)
    reader = source_of(cluster, requestTimeout="3s").reader(SCHEMA)
    partitions = reader.partitions()
    broker, positions = cluster.brokers["broker-a"], ClusterBackend.positions
    broker.kill()

    def come_back(self: ClusterBackend, at: Any) -> Any:
        found = positions(self, at)
        if not broker.is_running:
            replace_store(broker, tmp_path / "other", *other(3))
        return found

    monkeypatch.setattr(ClusterBackend, "positions", come_back)
    if grouped > 1:
        replace_store(broker, tmp_path / "other", *other(3))
    with pytest.raises(StoreChangedError, match=r"planned with|it was replaced: its message"):
        rows_of(reader, partitions)


@pytest.mark.parametrize("count", [4, 9], ids=["equal", "longer"])
@pytest.mark.parametrize("batches", [1, 2], ids=["one batch", "two batches"])
def test_store_that_is_replaced_while_the_query_is_stopped_is_data_loss(
    cluster: RunningCluster, tmp_path: Path, count: int, batches: int
) -> None:
    stream = Stream(cluster, startingOffsets="earliest")
    if batches == 2:
        assert len(stream.trigger()) == 6
    cluster.send("orders", b"3", broker="broker-a")
    assert len(stream.trigger()) == 7 - 6 * (batches - 1)
    stream.reader.stop()
    replace_store(cluster.brokers["broker-a"], tmp_path / "other", *other(count))
    stream = stream.restart()
    with pytest.raises(DataLossError, match=r"it was replaced: its message at queue offset .* The broker broker-a "):
        stream.trigger()
    stream.reader.stop()


def test_store_that_is_replaced_while_the_query_is_stopped_is_read_as_a_new_one_without_failOnDataLoss(
    cluster: RunningCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Stream(cluster, startingOffsets="earliest", failOnDataLoss="false")
    assert len(stream.trigger()) == 6
    stream.reader.stop()
    replace_store(cluster.brokers["broker-a"], tmp_path / "other", *other(4))
    cluster.send("orders", b"3", broker="broker-b")
    stream = stream.restart()
    assert stream.trigger() == rows("b", 3)
    assert json.loads(stream.committed)["orders"] == {"broker-b:0": 4}
    assert list(json.loads(stream.committed)["@"]["read"]["orders"]) == ["broker-b:0"]
    (skipped,) = [line for line in caplog.messages if "it was replaced: " in line]
    assert skipped.startswith("rmq: skipped, failOnDataLoss=false: messages of queue orders/broker-a:0, ")
    stream = stream.restart()
    assert stream.read(4) == [("a", number, body) for number, body in enumerate(other(4))]
    stream = stream.restart()
    assert stream.trigger() == []
    stream.reader.stop()
    assert len([line for line in caplog.messages if "it was replaced: " in line]) == 1


def test_store_that_is_the_same_after_a_restart_is_no_data_loss(cluster: RunningCluster, tmp_path: Path) -> None:
    stream = Stream(cluster, startingOffsets="earliest")
    assert len(stream.trigger()) == 6
    stream = stream.restart()
    before = stream.committed
    assert stream.trigger() == []
    assert stream.committed == before
    stream.reader.stop()
    broker = cluster.brokers["broker-a"]
    broker.kill()
    replace_store(broker, broker.copy_store(tmp_path / "copy"), b"3")
    stream = stream.restart()
    assert stream.trigger() == rows("a", 3)
    stream.reader.stop()


def test_a_start_time_before_deleted_messages_is_logged(
    cluster: RunningCluster, caplog: pytest.LogCaptureFixture
) -> None:
    def read(time: str) -> list[Row]:
        reader = source_of(cluster, startingTimestamp=time).reader(SCHEMA)
        return sorted(rows_of(reader, reader.partitions()))

    long_ago = "2020-01-01T00:00:00Z"
    assert len(read(long_ago)) == 6
    cluster.brokers["broker-a"].expire("orders", 0, 2)
    assert read(long_ago) == rows("a", 2) + rows("b", 0, 1, 2)
    cluster.brokers["broker-a"].expire("orders", 0, 3)
    assert read(long_ago) == rows("b", 0, 1, 2)
    read("0")  # whatever exists
    lines = [one.getMessage() for one in caplog.records if "startingTimestamp is earlier" in one.getMessage()]
    assert ["deleted older ones in 1 of 2 queues" in one for one in lines] == [True, True]
    assert ["none exist" in one for one in lines] == [False, True]


def test_store_whose_record_has_expired_is_not_compared(cluster: RunningCluster, tmp_path: Path) -> None:
    stream = Stream(cluster, startingOffsets="earliest")
    assert len(stream.trigger()) == 6
    stream.reader.stop()
    broker = cluster.brokers["broker-a"]
    replace_store(broker, tmp_path / "other", *other(5))
    broker.expire("orders", 0, 3)
    stream = stream.restart()
    assert stream.trigger() == [("a", 3, b"other 3"), ("a", 4, b"other 4")]
    stream.reader.stop()


def test_store_of_a_broker_that_is_away_at_the_restart_is_compared_when_it_is_back(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    stream = Stream(cluster, startingOffsets="earliest")
    assert len(stream.trigger()) == 6
    stream.reader.stop()
    broker = cluster.brokers["broker-a"]
    broker.kill()
    cluster.send("orders", b"3", broker="broker-b")
    stream = stream.restart()
    assert stream.trigger() == rows("b", 3)
    stream = stream.restart()
    assert stream.trigger() == []
    replace_store(broker, tmp_path / "other", *other(5))
    with pytest.raises(DataLossError, match=r"it was replaced: its message at .* The broker broker-a "):
        stream.read(1)
    stream.reader.stop()


def test_stores_are_compared_by_topic(
    cluster: RunningCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.create_topic("payments", queues=3)
    for broker in cluster.brokers.values():
        broker.send("payments", b"0", b"1", b"2", queue_id=1)
    stream = Stream(cluster, subscribe="orders,payments", startingOffsets="earliest", failOnDataLoss="false")
    assert len(stream.trigger()) == 12
    records = json.loads(stream.committed)["@"]["read"]
    assert {topic: list(queues) for topic, queues in records.items()} == {
        "orders": ["broker-a:0", "broker-b:0"],
        "payments": ["broker-a:1", "broker-b:1"],
    }
    stream.reader.stop()
    broker = cluster.brokers["broker-a"]
    broker.delete_topic("payments")
    broker.set_topic("payments", 3)
    for queue_id in (0, 1, 2):
        broker.send("payments", *other(5), queue_id=queue_id)
    cluster.send("orders", b"3", broker="broker-a")
    stream = stream.restart()
    assert stream.trigger() == rows("a", 3)
    stream.reader.stop()
    assert list(json.loads(stream.committed)["payments"]) == [f"broker-b:{number}" for number in range(3)]
    skipped = [line.partition(", queue offsets")[0][-19:] for line in caplog.messages if "it was replaced: " in line]
    assert skipped == [f"payments/broker-a:{number}" for number in range(3)]


@pytest.mark.parametrize("is_available_now", [False, True])
def test_store_that_is_replaced_before_a_batch_is_repeated_is_data_loss(
    cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_available_now: bool
) -> None:
    monkeypatch.setattr("rmq_spark.store.cluster.queue_answers.REPLACED_MS", 1)  # shorter than the batch
    stream = Stream(cluster, startingOffsets="earliest")
    assert len(stream.trigger()) == 6
    for broker in cluster.brokers:
        cluster.send("orders", b"3", broker=broker)
    start = json.loads(stream.committed)
    end = stream.reader.latestOffset(start, stream.reader.getDefaultReadLimit())
    stream.reader.stop()
    replace_store(cluster.brokers["broker-a"], tmp_path / "other", *other(9))
    stream = stream.restart()
    if is_available_now:
        stream.reader.prepareForTriggerAvailableNow()
    with pytest.raises(DataLossError, match=r"it was replaced: its message at .* The broker broker-a "):
        stream.reader.partitions(start, end)
    stream.given["failOnDataLoss"] = "false"
    stream = stream.restart()
    if is_available_now:
        stream.reader.prepareForTriggerAvailableNow()
    assert rows_of(stream.reader, stream.reader.partitions(start, end)) == rows("b", 3)
    stream.committed = json.dumps(end)
    stream.trigger()
    assert json.loads(stream.committed)["orders"] == {"broker-b:0": 4}
    stream.reader.stop()


def test_offset_of_an_earlier_release_has_no_records_and_is_read_on(cluster: RunningCluster) -> None:
    stream = Stream(cluster, startingOffsets="earliest")
    assert len(stream.trigger()) == 6
    offset = json.loads(stream.committed)
    del offset["@"]["read"]
    stream.committed = json.dumps(offset)
    stream = stream.restart()
    assert stream.trigger() == []
    cluster.send("orders", b"3", broker="broker-a")
    assert stream.trigger() == rows("a", 3)
    assert list(json.loads(stream.committed)["@"]["read"]["orders"]) == ["broker-a:0", "broker-b:0"]
    stream.reader.stop()


def test_queue_with_the_record_that_is_removed_while_the_query_is_stopped_is_data_loss(cluster: RunningCluster) -> None:
    broker = cluster.brokers["broker-a"]
    broker.set_topic("counts", 2)
    broker.send("counts", b"0", b"1", b"2", queue_id=1)
    stream = Stream(cluster, subscribe="counts", startingOffsets="earliest")
    assert stream.trigger() == rows("a", 0, 1, 2)
    assert list(json.loads(stream.committed)["@"]["read"]["counts"]) == ["broker-a:1"]
    stream.reader.stop()
    broker.send("counts", b"3", queue_id=1)
    broker.set_topic("counts", 1)
    stream = stream.restart()
    with pytest.raises(DataLossError, match="the broker broker-a has no queue 1 of the topic counts"):
        stream.trigger()
    stream.reader.stop()


def test_store_that_is_replaced_is_data_loss_after_a_long_wait_for_another_broker(
    cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmq_spark.store.cluster.queue_answers.REPLACED_MS", 1)  # shorter than the wait
    stream = Stream(cluster, startingOffsets="earliest", endingOffsets="latest")
    assert len(stream.trigger()) == 6
    stream.reader.stop()
    replace_store(cluster.brokers["broker-a"], tmp_path / "other", *other(9))
    broker, pause = cluster.brokers["broker-b"], BrokerWait.pause
    broker.kill()

    def come_back(self: BrokerWait, away: Any) -> None:
        pause(self, away)
        if not broker.is_running:
            broker.restart()

    monkeypatch.setattr(BrokerWait, "pause", come_back)
    stream = stream.restart()
    with pytest.raises(DataLossError, match=r"it was replaced: its message at .* The broker broker-a "):
        stream.trigger()
    stream.reader.stop()


@pytest.mark.parametrize("keeps_minimum", [False, True])
@pytest.mark.parametrize("first", [2, 3])
def test_task_skips_messages_that_have_expired_since_the_plan(
    cluster: RunningCluster, caplog: pytest.LogCaptureFixture, first: int, keeps_minimum: bool
) -> None:
    stream = Stream(cluster, startingOffsets="earliest", failOnDataLoss="false")
    start = json.loads(stream.committed)
    end = stream.reader.latestOffset(start, stream.reader.getDefaultReadLimit())
    partitions = stream.reader.partitions(start, end)
    cluster.brokers["broker-a"].expire("orders", 0, first, keeps_minimum=keeps_minimum)
    assert rows_of(stream.reader, partitions) == rows("a", *range(first, 3)) + rows("b", 0, 1, 2)
    assert len([line for line in caplog.messages if "skipped while reading" in line]) == 1
    stream.reader.stop()
