"""Start offsets of queries whose group has no offset, in queues that are too old for a start at offset 0."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.parsed_options import parse_options

import rmq_spark
from rmq_spark.datasource.options.read_options import ReadSettings
from rmq_spark.datasource.spark.batch_reader import RmqBatchReader
from rmq_spark.datasource.spark.partition import RmqPartition
from rmq_spark.store import open_reader
from rmq_spark.store.errors import DataLossError
from rmq_spark.store.model import QueueKey

GROUP = {"consumerGroup": "billing"}
MODES = {"all": GROUP | {"startingOffsets": "group"}, "shared": GROUP | {"assignment": "shared"}}
FALLBACKS = {"latest": 10, "earliest": 0, "timestamp": 6}  # where each of them begins


class OldStore:
    """A store of the topic orders, of one queue with ten messages; the seventh was stored at `seventh_ms`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with rmq_spark.open_store(path, segment_bytes=1 << 16) as store:
            store.create_topic("orders", 1)
            self._send(store, 6)
            time.sleep(0.01)  # so that the seventh is stored at a time of its own
            self._send(store, 4)
        with open_reader(str(path)) as reader:
            reader.refresh()
            self.seventh_ms = reader.proof(QueueKey("orders", 0), 6).store_time_ms

    def _send(self, store: Any, count: int) -> None:
        for _ in range(count):
            store.send("orders", "x", queue_id=0)

    def begin_by(self, fallback: str) -> dict[str, str]:
        """Return the options that have a group begin so."""
        time_of = {"startingTimestamp": str(self.seventh_ms)} if fallback == "timestamp" else {}
        return {"groupFallback": fallback} | time_of

    def set_group(self, offset: int) -> None:
        """Set the group's offset as a tool of RocketMQ does."""
        path = self.path / "config" / "consumerOffset.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"offsetTable": {"orders@billing": {"0": offset}}}))

    def read(self, **given: str) -> list[int]:
        """Return the queue offsets that a batch query of the group reads."""
        options = parse_options({"path": str(self.path), "subscribe": "orders"} | GROUP | given, 0)
        options.check_batch()
        reader = RmqBatchReader(options, ReadSettings(("queueOffset",), False, 1 << 20, True))
        parts = [part for part in reader.partitions() if isinstance(part, RmqPartition)]
        return [row["queueOffset"] for part in parts for rows in reader.read(part) for row in rows.to_pylist()]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OldStore:
    """Its queue is too old for a start at 0: with so little memory the first message counts as on disk."""
    monkeypatch.setattr("rmq_spark.store.group.start_offsets.memory_bytes", lambda: 1)
    return OldStore(tmp_path / "store")


@pytest.fixture
def join(query_on: Callable[..., Any], store: OldStore) -> Iterator[Callable[..., Any]]:
    """A function that starts a query of the group."""
    queries: list[Any] = []

    def start(**options: str) -> Any:
        queries.append(query_on(store.path, **options))
        return queries[-1]

    yield start
    for query in queries:
        query.reader._group.query.leave({})


@pytest.mark.parametrize("fallback", FALLBACKS)
@pytest.mark.parametrize("mode", MODES)
def test_a_stream_begins_by_its_fallback_in_an_old_queue(store, join, mode, fallback) -> None:
    batches = join(**MODES[mode], **store.begin_by(fallback)).drain()
    assert [offset for rows in batches for _, offset in rows] == list(range(FALLBACKS[fallback], 10))
    assert rmq_spark.group_offsets(store.path, "billing") == {"orders": {0: 10}}


@pytest.mark.parametrize("fallback", FALLBACKS)
def test_a_batch_query_begins_by_its_fallback_in_an_old_queue(store, fallback) -> None:
    rows = store.read(startingOffsets="group", **store.begin_by(fallback))
    assert rows == list(range(FALLBACKS[fallback], 10))


@pytest.mark.parametrize("mode", MODES)
def test_no_fallback_counts_where_the_group_has_an_offset(store, join, mode) -> None:
    store.set_group(3)
    assert join(**MODES[mode], groupFallback="earliest").drain() == [[(0, offset) for offset in range(3, 10)]]


def test_a_batch_query_begins_at_the_group_by_the_word_alone(store) -> None:
    store.set_group(3)
    assert store.read(assignment="shared") == list(range(10))
    assert store.read(assignment="shared", startingOffsets='{"orders": {"0": 8}}') == [8, 9]
    assert store.read(assignment="shared", startingOffsets="group") == list(range(3, 10))


def test_a_batch_query_of_a_group_that_stands_beyond_the_end_is_told_of_the_group(store) -> None:
    store.set_group(12)
    with pytest.raises(DataLossError, match="the consumer group billing is at 12, and the queue ends at 10 now"):
        store.read(startingOffsets="group")
    assert store.read(startingOffsets="group", failOnDataLoss="false") == []
