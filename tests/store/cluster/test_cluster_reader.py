"""The reader of a cluster for programs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark.store.cluster.address import ClusterAddress, Credentials, parse_name_servers
from rmq_spark.store.cluster.reader import ClusterReader
from rmq_spark.store.errors import NotFoundError, OffsetRangeError, OptionError
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.testing.brokers import RunningCluster

QUEUE = QueueKey("orders", 0, "broker-a")
MISSING = QueueKey("orders", 9, "broker-a")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    with RunningCluster(Path(tmp_path_factory.mktemp("cluster"))) as cluster:
        cluster.create_topic("orders", queues=2)
        for tags in ("a", "b"):
            cluster.send("orders", *[f"{tags}{number}" for number in range(5)], queue_id=0, tags=tags)
        yield cluster


@pytest.fixture
def reader(cluster: RunningCluster) -> Iterator[ClusterReader]:
    with ClusterReader(ClusterAddress(parse_name_servers(cluster.address))) as reader:
        yield reader


def test_reader_lists_topics_queues_and_bounds(reader: ClusterReader) -> None:
    assert "orders" in reader.topics()
    queues = reader.queues("orders")
    assert queues == [QUEUE, QueueKey("orders", 1, "broker-a")]
    assert reader.bounds(QUEUE) == QueueBounds(0, 10)
    assert reader.all_bounds(queues) == dict(zip(queues, [QueueBounds(0, 10), QueueBounds(0, 0)], strict=True))


def test_reader_finds_records_and_times(reader: ClusterReader) -> None:
    first, last = reader.proof(QUEUE, 0), reader.proof(QUEUE, 9)
    assert first.physical_offset < last.physical_offset
    assert reader.offset_at_time(QUEUE, first.store_time_ms) == 0
    assert reader.offset_at_time(QUEUE, last.store_time_ms + 1) == 10


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, range(2, 9)), ({"tags": "b"}, range(5, 9)), ({"sql92": "TAGS = 'a'"}, range(2, 5)), ({"tags": "c"}, ())],
)
def test_reader_reads_what_matches(reader: ClusterReader, options: dict[str, str], expected: range) -> None:
    batches = reader.read(QUEUE, 2, 9, ["queueOffset", "brokerName"], **options)  # type: ignore[arg-type]
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert rows == [{"queueOffset": offset, "brokerName": "broker-a"} for offset in expected]


def test_reader_refuses_what_does_not_exist(reader: ClusterReader) -> None:
    with pytest.raises(NotFoundError, match="absent"):
        reader.queues("absent")
    with pytest.raises(NotFoundError, match="broker-a:9"):
        reader.bounds(MISSING)
    with pytest.raises(OffsetRangeError, match="not offset 10"):
        reader.proof(QUEUE, 10)
    with pytest.raises(OptionError, match="no such column: size"):
        list(reader.read(QUEUE, 0, 1, ["size"]))
    with pytest.raises(OptionError, match="is a text"):
        list(reader.read(QUEUE, 0, 1, "body"))


def test_reader_that_is_closed_refuses(reader: ClusterReader) -> None:
    reader.close()
    with pytest.raises(OptionError, match="closed"):
        reader.topics()


def test_open_reader_opens_a_cluster(cluster: RunningCluster) -> None:
    with rmq_spark.open_reader(name_server=cluster.address, access_key="a", secret_key="b") as reader:
        assert reader.bounds(QUEUE) == QueueBounds(0, 10)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({}, "neither path nor name_server was given"),
        ({"path": "x", "name_server": "ns:1"}, "path and name_server were both given"),
        ({"path": "x", "tls": True}, "tls is for a cluster"),
        ({"name_server": "ns:1", "read_mode": "mmap"}, "read_mode is for a store directory"),
        ({"name_server": "ns"}, "nameServer"),
        ({"name_server": "ns:1", "acces_key": "x"}, "unknown argument acces_key. Did you mean access_key?"),
        ({"name_servers": "ns:1"}, r"open_reader: unknown argument name_servers\. Did you mean name_server\?"),
        ({"path": "x", "readmode": "mmap"}, r"unknown argument readmode\. Did you mean read_mode\?"),
        ({"path": "x", "zzz": 1}, "unknown argument zzz. Expected some of name_server, path, commit_log_path"),
        ({"name_server": "ns:1", "tls_verify": "yes"}, "tls_verify='yes'"),
        ({"name_server": "ns:1", "request_timeout_ms": 0}, "request_timeout_ms"),
        ({"name_server": "ns:1", "access_key": "x"}, "secretKey"),
    ],
)
def test_open_reader_refuses_invalid_arguments(arguments: dict[str, Any], found: str) -> None:
    with pytest.raises(OptionError, match=found):
        rmq_spark.open_reader(**arguments)


def test_repr_has_no_secret() -> None:
    address = ClusterAddress(("ns:9876",), credentials=Credentials("key", "planted-secret"))
    assert "planted-secret" not in repr(ClusterReader(address))
    assert "ns:9876" in repr(ClusterReader(address))
