"""A query that takes part in a group delivers what waited in the store and is due; others deliver nothing."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import rmq_spark
from rmq_spark.datasource.options import parse_options
from rmq_spark.datasource.settings import ReadSettings
from rmq_spark.datasource.stream_reader import RmqStreamReader
from rmq_spark.store.disk.chance import wall_clock_ms

GROUP = {"consumerGroup": "billing", "startingOffsets": "earliest"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with a message in orders/0, one that is due at once and one that is due in ten seconds."""
    with rmq_spark.open_store(
        tmp_path / "store", segment_bytes=1 << 20, queues=1, message_delay_level="0s 10s"
    ) as opened:
        opened.create_topic("orders", 1)
        opened.send("orders", "first")
        opened.send("orders", "due", delay_level=1)
        opened.send("orders", "later", delay_level=2)
    return tmp_path / "store"


@pytest.fixture
def start(query_on, path: Path) -> Iterator:
    """A function that starts a query of the group; all leave in the end."""
    queries = []

    def begin(**options: object):
        queries.append(query_on(path, **options))
        return queries[-1]

    yield begin
    for query in queries:
        if query.reader._group is not None:
            query.reader._group.query._membership.lease._lock.release()


def test_a_query_of_a_group_reads_what_its_own_trigger_delivered(start) -> None:
    now_ms = wall_clock_ms()
    query = start(now_ms=now_ms, **GROUP)
    assert query.drain() == [[(0, 0), (0, 1)]]
    query.clock.now_ms = now_ms + 10_000
    assert query.drain() == [[(0, 2)]]


def test_an_available_now_run_begins_with_what_is_due(start) -> None:
    query = start(now_ms=wall_clock_ms() + 10_000, available_now=True, **GROUP)
    assert query.drain() == [[(0, 0), (0, 1), (0, 2)]]


@pytest.mark.parametrize("more", [{}, {"consumerGroup": "billing", "messageModel": "broadcasting"}])
def test_a_query_that_is_no_member_of_a_group_delivers_nothing(start, path: Path, more: dict[str, str]) -> None:
    query = start(now_ms=wall_clock_ms() + 10_000, startingOffsets="earliest", **more)
    assert query.drain() == [[(0, 0)]]
    assert not (path / "rmq/delivery").exists()


def test_a_trigger_that_waits_ends_when_something_is_due(path: Path) -> None:
    """Clocks that go on in naps only."""
    begun_ms, napped = wall_clock_ms(), [0.0]
    options = parse_options({"path": str(path), "subscribe": "orders", "longPollingMs": "15000"} | GROUP, begun_ms)
    reader = RmqStreamReader(
        options,
        ReadSettings(("body",), False, 64 << 20, "auto", True),
        lambda: begun_ms + int(sum(napped)),
        lambda: sum(napped),
        lambda seconds: napped.append(seconds * 1000),
    )
    try:
        limit = reader.getDefaultReadLimit()
        first = json.loads(json.dumps(reader.latestOffset(reader.initialOffset(), limit)))
        assert first["orders"] == {"0": 2}
        waited_ms = sum(napped)
        assert reader.latestOffset(first, limit)["orders"] == {"0": 3}
        assert 5_000 < sum(napped) - waited_ms < 10_200
    finally:
        reader._group.query._membership.lease._lock.release()
        reader.stop()
