"""The start of a group in a topic is fixed once, by its first member; later queues are read from their begin."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark.store import GroupSession, GroupTerms
from rmq_spark.store.model import QueueKey

GROUP = {"consumerGroup": "billing"}
SHARED = GROUP | {"assignment": "shared"}


@pytest.fixture(autouse=True)
def _no_queue_is_young(monkeypatch: pytest.MonkeyPatch) -> None:
    """More was appended since each queue's first message than 40 % of the machine's memory."""
    monkeypatch.setattr("rmq_spark.store.group.start_offsets.memory_bytes", lambda: 1)


class Store:
    """A store of the topic orders; `raise_queues` adds its second queue."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with rmq_spark.open_store(path, segment_bytes=1 << 20) as writer:
            writer.create_topic("orders", 1)

    def append(self, queue_id: int, count: int) -> None:
        with rmq_spark.open_store(self.path) as writer:
            for _ in range(count):
                writer.send("orders", "x", queue_id=queue_id)

    def raise_queues(self) -> None:
        path = self.path / "config" / "topics.json"
        topics = json.loads(path.read_text())
        topics["topicConfigTable"]["orders"] |= {"readQueueNums": 2, "writeQueueNums": 2}
        path.write_text(json.dumps(topics))

    def offsets(self) -> dict[int, int]:
        return rmq_spark.group_offsets(self.path, "billing").get("orders", {})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def start(query_on: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """A function that starts a query; all leave in the end."""
    queries: list[Any] = []

    def run(*given: Any, **options: str) -> Any:
        queries.append(query_on(*given, **options))
        return queries[-1]

    yield run
    for query in queries:
        query.reader._group.query.leave({})


def flat(batches: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    return sorted(row for batch in batches for row in batch)


@pytest.mark.parametrize("options", [SHARED, GROUP | {"startingOffsets": "group"}])
@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_queue_that_came_while_all_were_stopped_is_read_from_its_begin(store, start, options, checkpoint) -> None:
    store.append(0, 3)
    first = start(store.path, **options)
    assert flat(first.drain()) == []
    assert store.offsets() == {0: 3}
    first.reader._group.query.leave({})
    store.raise_queues()
    store.append(1, 5)
    again = start(store.path, first.committed if checkpoint else None, **options)
    assert flat(again.drain()) == [(1, offset) for offset in range(5)]


def test_the_first_member_settles_where_all_queues_of_a_topic_begin(store, start) -> None:
    store.raise_queues()
    store.append(1, 5)
    first = start(store.path, **SHARED, allocateStrategy='config:{"orders": [0]}')
    first.plan()
    assert store.offsets() == {0: 0, 1: 5}
    store.append(1, 3)
    second = start(store.path, **SHARED, allocateStrategy='config:{"orders": [1]}')
    assert flat(second.drain()) == [(1, 5), (1, 6), (1, 7)]


def test_a_begin_is_settled_once_and_not_where_nothing_is_to_be_published(store, start) -> None:
    store.append(0, 3)
    queues = {QueueKey("orders", 0): 2, QueueKey("orders", 1): 0}
    for commit, expected in (("off", {}), ("auto", {0: 2, 1: 0})):
        group = GroupSession(str(store.path), GroupTerms("billing", commit=commit))
        group.rebalance(list(queues), {}, None)
        assert group.begin(queues) == queues
        assert store.offsets() == expected
        assert group.begin(dict.fromkeys(queues, 3)) == ({queue: 3 for queue in queues} if commit == "off" else queues)
        assert store.offsets() == expected
        group.leave({})


def test_a_batch_query_reads_a_queue_that_came_later_from_its_begin_too(store, start) -> None:
    from support.parsed_options import parse_options

    from rmq_spark.datasource.spark.batch_reader import RmqBatchReader

    store.append(0, 3)
    start(store.path, **SHARED).drain()
    store.raise_queues()
    store.append(1, 5)
    options = {"path": str(store.path), "subscribe": "orders", "startingOffsets": "group"} | GROUP
    (partition,) = RmqBatchReader(parse_options(options, 0), None).partitions()
    (piece,) = partition.pieces
    assert (piece.queue, piece.begin, piece.end) == (QueueKey("orders", 1), 0, 5)
