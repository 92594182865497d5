"""Ranges that a cluster's backend reads together."""

from collections.abc import Callable, Iterator

import pytest

from rmq_spark.store.backend import COLUMNS
from rmq_spark.store.cluster import range_reader
from rmq_spark.store.cluster.address import ClusterAddress, parse_name_servers
from rmq_spark.store.cluster.backend import ClusterBackend
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.errors import OffsetRangeError
from rmq_spark.store.filter.row_filter import RowFilter, compile_filter, make_expression
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.model import QueueKey, QueueRange
from rmq_spark.store.testing.brokers import RunningCluster
from rmq_spark.store.testing.brokers.wire import Call

PULL = RequestCode.PULL_MESSAGE
QUEUES = 8
EACH = 5
LIMITS = DecodeLimits()


@pytest.fixture
def cluster(run_cluster: Callable[..., RunningCluster]) -> RunningCluster:
    """Two brokers with a topic of 8 queues each, and 5 messages in each queue."""
    cluster = run_cluster(brokers=2)
    cluster.create_topic("orders", queues=QUEUES)
    for broker in cluster.brokers:
        for number in range(QUEUES):
            bodies = [f"{broker} {number} {offset}" for offset in range(EACH)]
            for offset, body in enumerate(bodies):
                cluster.send("orders", body, broker=broker, queue_id=number, tags=f"tag{offset}")
    return cluster


@pytest.fixture
def backend(cluster: RunningCluster) -> Iterator[ClusterBackend]:
    backend = ClusterBackend(ClusterAddress(parse_name_servers(cluster.address), broker_down_timeout_ms=2000))
    yield backend
    backend.close()


def parts_of(begin: int, end: int) -> list[QueueRange]:
    """Return the same range of every queue, in their order."""
    brokers = ("broker-a", "broker-b")
    return [
        QueueRange(QueueKey("orders", number, broker), begin, end) for broker in brokers for number in range(QUEUES)
    ]


def bodies_of(parts: list[QueueRange], offsets: range) -> list[bytes]:
    return [f"{part.queue.broker} {part.queue.queue_id} {offset}".encode() for part in parts for offset in offsets]


def read_bodies(backend: ClusterBackend, parts: list[QueueRange], wanted: RowFilter | None = None) -> list[bytes]:
    batch = backend.read_together(parts, ["body"], LIMITS, wanted)
    assert batch is not None
    found: list[bytes] = batch.column("body").to_pylist()
    return found


def test_ranges_of_two_brokers_come_in_order(backend: ClusterBackend) -> None:
    parts = parts_of(1, 4)
    assert read_bodies(backend, parts) == bodies_of(parts, range(1, 4))


def test_ranges_have_every_column(backend: ClusterBackend) -> None:
    batch = backend.read_together(parts_of(0, 2), list(COLUMNS), LIMITS, None)
    assert batch is not None
    assert batch.schema.names == list(COLUMNS)
    assert batch.column("brokerName").to_pylist() == ["broker-a"] * 16 + ["broker-b"] * 16


def test_ranges_are_filtered(backend: ClusterBackend) -> None:
    parts = parts_of(0, EACH)
    wanted = compile_filter(make_expression(tags="tag2"))
    assert read_bodies(backend, parts, wanted) == bodies_of(parts, range(2, 3))


def test_ranges_without_a_match_have_no_rows(backend: ClusterBackend) -> None:
    assert read_bodies(backend, parts_of(0, EACH), compile_filter(make_expression(tags="none"))) == []


def test_ranges_of_a_broker_are_pulled_at_the_same_time(cluster: RunningCluster, backend: ClusterBackend) -> None:
    held: list[Callable[[], None]] = []

    def serve_together(call: Call, serve: Callable[[], None]) -> None:
        held.append(serve)
        if len(held) == QUEUES:
            for one in held:
                one()

    parts = parts_of(0, EACH)[:QUEUES]
    cluster.brokers["broker-a"].fail(PULL, serve_together)
    assert read_bodies(backend, parts) == bodies_of(parts, range(EACH))


def test_ranges_that_need_much_memory_are_not_read_together(
    backend: ClusterBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_reader, "_TOGETHER_BYTES", 100)
    assert backend.read_together(parts_of(0, EACH), ["body"], LIMITS, None) is None
    monkeypatch.undo()
    assert backend.read_together(parts_of(0, EACH), ["body"], LIMITS, None) is None  # and no try costs time again


def test_ranges_with_expired_messages_raise_an_error(cluster: RunningCluster, backend: ClusterBackend) -> None:
    cluster.brokers["broker-b"].expire("orders", 3, 2)
    with pytest.raises(OffsetRangeError, match="orders"):
        backend.read_together(parts_of(0, EACH), ["body"], LIMITS, None)
