"""A query with a consumer group delivers due messages of the store; other queries do not."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.parsed_options import parse_options

import rmq_spark
from rmq_spark.datasource.options.read_options import ReadSettings
from rmq_spark.datasource.spark.stream_reader import RmqStreamReader
from rmq_spark.store.arrival import Polling
from rmq_spark.store.disk.clock import wall_clock_ms

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


class Waiting:
    """A query that waits for 15 s, by clocks that advance only while it sleeps."""

    def __init__(self, path: Path) -> None:
        self.begun_ms, self.napped_ms = wall_clock_ms(), 0.0
        self.at_nap: Callable[[], None] = lambda: None
        given = {"path": str(path), "subscribe": "orders", "longPollingMs": "15000"} | GROUP
        self.reader = RmqStreamReader(
            parse_options(given, self.begun_ms),
            ReadSettings(("body",), False, 64 << 20, True),
            lambda: self.begun_ms + int(self.napped_ms),
            lambda: self.napped_ms,
        )
        self.reader._view.backend._polling = Polling(lambda: self.napped_ms, self.sleep)
        self.offset = self.reader.initialOffset()

    def sleep(self, seconds: float) -> None:
        self.napped_ms += seconds * 1000
        self.at_nap()

    def trigger(self) -> dict[str, int]:
        """Return the next offsets of the topic's queues after one more trigger."""
        self.offset = json.loads(json.dumps(self.reader.latestOffset(self.offset, self.reader.getDefaultReadLimit())))
        return self.offset["orders"]


@pytest.fixture
def waiting(path: Path) -> Iterator[Waiting]:
    """A query that has read all messages that were stored or due."""
    query = Waiting(path)
    assert query.trigger() == {"0": 2}
    yield query
    query.reader._group.query._membership.lease._lock.release()
    query.reader.stop()


def test_a_trigger_that_waits_ends_when_something_is_due(waiting: Waiting) -> None:
    begun_ms = waiting.napped_ms
    assert waiting.trigger() == {"0": 3}
    assert 5_000 < waiting.napped_ms - begun_ms < 10_200


def test_what_is_sent_during_a_wait_and_due_before_all_else_ends_the_wait(waiting: Waiting, path: Path) -> None:
    with rmq_spark.open_store(path) as sender:
        naps, begun_ms = [], waiting.napped_ms

        def send() -> None:
            naps.append(1)
            if len(naps) == 10:
                sender.send("orders", "sooner", delay_level=1)

        waiting.at_nap = send
        assert waiting.trigger() == {"0": 3}
    assert waiting.napped_ms - begun_ms < 5_000, "the other one waits for longer"
