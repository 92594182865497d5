"""Estimates of the sizes of records."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rmq_spark.store.cluster import client
from rmq_spark.store.cluster.address import ClusterAddress, parse_name_servers
from rmq_spark.store.cluster.backend import ClusterBackend
from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.cluster.record_sizes import MovingAverage, count_records
from rmq_spark.store.errors import NoPermissionError
from rmq_spark.store.model import QueueKey, QueueRange
from rmq_spark.store.testing.brokers import RunningCluster, faults

SMALL = QueueKey("small", 0, "broker-a")
LARGE = QueueKey("large", 0, "broker-a")


class Clock:
    now_ms = 1000.0

    def __call__(self) -> float:
        return self.now_ms


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    """A broker with 100 messages of 100 bytes and 100 of 10,000 bytes."""
    with RunningCluster(tmp_path / "cluster") as cluster:
        for topic, size in (("small", 100), ("large", 10_000)):
            cluster.create_topic(topic, queues=1)
            cluster.send(topic, *[bytes(size)] * 100)
        yield cluster
        client._idle.forget()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def backend(cluster: RunningCluster, clock: Clock) -> Iterator[ClusterBackend]:
    backend = ClusterBackend(ClusterAddress(parse_name_servers(cluster.address)), monotonic_ms=clock)
    backend.require_bounds([SMALL, LARGE])
    yield backend
    backend.close()


def pulls(cluster: RunningCluster) -> int:
    return cluster.clear_requests().get("broker-a", {}).get(RequestCode.PULL_MESSAGE, 0)


def test_sizes_are_those_of_the_topics_records(cluster: RunningCluster, backend: ClusterBackend) -> None:
    small, large = QueueRange(SMALL, 0, 100), QueueRange(LARGE, 50, 60)
    measured = backend.size_estimates.measure([small, large])
    assert 100 * 200 < measured[small] < 100 * 400
    assert 10 * 10_100 < measured[large] < 10 * 10_300


def test_fit_agrees_with_measure(backend: ClusterBackend) -> None:
    small, large = QueueRange(SMALL, 3, 100), QueueRange(LARGE, 50, 100)
    sizes = backend.size_estimates
    ends = sizes.fit({small: 10_000, large: 35_000})
    assert ends[large] == 53
    fitting = QueueRange(SMALL, 3, ends[small])
    assert (
        sizes.measure([fitting])[fitting]
        <= 10_000
        < sizes.measure([QueueRange(SMALL, 3, ends[small] + 1)]).popitem()[1]
    )
    assert sizes.fit({small: 1 << 40, large: 1}) == {small: 100, large: 50}


def test_sample_is_pulled_once_in_ten_seconds(cluster: RunningCluster, backend: ClusterBackend, clock: Clock) -> None:
    parts = [QueueRange(SMALL, begin, begin + 1) for begin in range(10)]
    pulls(cluster)
    backend.size_estimates.measure(parts)
    assert pulls(cluster) == 2, "of ten ranges two are sampled"
    backend.size_estimates.measure(parts)
    clock.now_ms += 9_999
    backend.size_estimates.fit(dict.fromkeys(parts, 100))
    assert pulls(cluster) == 0
    clock.now_ms += 1
    backend.size_estimates.measure(parts)
    assert pulls(cluster) == 2


def test_average_follows_the_records_that_planning_reads(cluster: RunningCluster, backend: ClusterBackend) -> None:
    part = QueueRange(SMALL, 0, 100)
    before = backend.size_estimates.measure([part])[part]
    cluster.send("small", *[bytes(5_000)] * 50)
    backend.refresh()
    backend.positions([(SMALL, offset) for offset in range(100, 150)])
    assert backend.size_estimates.measure([part])[part] > 2 * before


def test_sizes_are_logged_once_as_estimates(backend: ClusterBackend, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        backend.size_estimates.measure([QueueRange(SMALL, 0, 1)])
    (line,) = caplog.messages
    assert "estimate" in line


def test_broker_that_does_not_answer_leaves_the_last_estimate(
    cluster: RunningCluster, backend: ClusterBackend, clock: Clock
) -> None:
    small, large = QueueRange(SMALL, 0, 10), QueueRange(LARGE, 0, 10)
    before = backend.size_estimates.measure([small])
    cluster.broker.kill()
    clock.now_ms += 10_000
    assert backend.size_estimates.measure([small, large]) == {**before, large: 10 * 1024}


def test_sizes_without_the_right_to_pull(cluster: RunningCluster, backend: ClusterBackend) -> None:
    remark = "User:u has no permission to access Topic:small from 127.0.0.1"
    cluster.broker.fail(RequestCode.PULL_MESSAGE, faults.with_code(ResponseCode.NO_PERMISSION, remark))
    with pytest.raises(NoPermissionError):
        backend.size_estimates.measure([QueueRange(SMALL, 0, 1)])


def test_moving_average_forgets_old_records() -> None:
    average = MovingAverage()
    assert average.value == 1024
    average.add(10, 1_000)
    assert average.value == 100
    for _ in range(40):
        average.add(32, 32 * 5_000)
    assert 4_900 < average.value <= 5_000
    assert average.count == 256


def test_records_are_counted_by_their_sizes() -> None:
    records = b"".join(size.to_bytes(4, "big") + bytes(size - 4) for size in (100, 91, 4096))
    assert count_records(records) == 3
    assert count_records(records[:-1]) == 2
    assert count_records(bytes(100)) == 0
    assert count_records(b"") == 0
