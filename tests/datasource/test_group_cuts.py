"""Stores that were cut or restored from an older copy: no group is left ahead of its queues, unless the user agrees."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.parsed_options import parse_options

import rmq_spark
from rmq_spark.datasource.plan.offsets import StreamOffset
from rmq_spark.datasource.spark.group_planner import GroupPlanner
from rmq_spark.datasource.spark.lock_wait import LockWait
from rmq_spark.datasource.spark.source_view import SourceView
from rmq_spark.store import GroupSession, GroupTerms
from rmq_spark.store.errors import DataLossError
from rmq_spark.store.model import QueueBounds, QueueKey

CopyStore = Callable[[Path, Path], Path]
GROUP = {"consumerGroup": "billing"}
MODES = {"all": GROUP | {"startingOffsets": "group"}, "shared": GROUP | {"assignment": "shared"}}
CARELESS = {"failOnDataLoss": "false"}
QUEUE = QueueKey("orders", 0)


def batch(count: int, body: str) -> pa.Table:
    return pa.table({"topic": ["orders"] * count, "body": [body] * count, "queueId": pa.array([0] * count, pa.int32())})


class RestoredStore:
    """A store of the topic orders, of one queue, that had 41 messages and is restored from a copy with 25 of them."""

    def __init__(self, folder: Path, copy_store: CopyStore) -> None:
        self.path, self._copy, self._copy_store = folder / "store", folder / "copy", copy_store
        with rmq_spark.open_store(self.path, segment_bytes=1 << 16) as store:
            store.create_topic("orders", 1)
        self.append(25)
        self.set_group(10)
        copy_store(self.path, self._copy)
        self.append(16)

    def append(self, count: int) -> None:
        with rmq_spark.open_store(self.path) as store:
            store.send_many(batch(count, "x"))

    def set_group(self, offset: int) -> None:
        """Set the group's offset as a tool of RocketMQ does."""
        path = self.path / "config" / "consumerOffset.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"offsetTable": {"orders@billing": {"0": offset}}}))

    def restore(self) -> None:
        shutil.rmtree(self.path)
        self._copy_store(self._copy, self.path)

    def group_offset(self) -> int:
        return rmq_spark.group_offsets(self.path, "billing")["orders"][0]


@pytest.fixture
def store(tmp_path: Path, copy_store: CopyStore) -> RestoredStore:
    return RestoredStore(tmp_path, copy_store)


@pytest.fixture
def join(query_on: Callable[..., Any], store: RestoredStore) -> Iterator[Callable[..., Any]]:
    """A function that starts a query of the group after the one before it has died."""
    queries: list[Any] = []

    def die() -> None:
        for query in queries:
            query.reader._group.query._membership.lease._lock.release()
        queries.clear()

    def start(*checkpoint: str, **options: str) -> Any:
        die()
        queries.append(query_on(store.path, *checkpoint, **options))
        return queries[-1]

    yield start
    die()


def rows(first: int, end: int) -> list[tuple[int, int]]:
    return [(0, offset) for offset in range(first, end)]


@pytest.mark.parametrize("mode", MODES)
def test_a_query_that_fails_for_its_checkpoint_is_beyond_the_end_leaves_the_group_where_it_was(store, join, mode):
    query = join(**MODES[mode])
    query.drain()
    store.restore()
    with pytest.raises(DataLossError, match=r"orders/0: 16 messages, queue offsets \[25, 41\)"):
        join(query.committed, **MODES[mode]).plan()
    assert store.group_offset() == 10
    store.append(6)
    assert join(**MODES[mode]).drain() == [rows(10, 31)], "what came below 41 is delivered"


@pytest.mark.parametrize("mode", MODES)
def test_who_accepts_the_loss_publishes_the_queues_end(store, join, mode) -> None:
    query = join(**MODES[mode])
    query.drain()
    store.restore()
    careless = join(query.committed, **MODES[mode], **CARELESS)
    careless.trigger()
    assert store.group_offset() == 25
    store.append(2)
    assert careless.drain() == [rows(25, 27)]


@pytest.mark.parametrize("mode", MODES)
def test_a_query_that_fails_for_what_retention_deleted_leaves_the_group_where_it_was(store, join, mode) -> None:
    query = join(**MODES[mode], maxOffsetsPerTrigger="2")
    query.trigger()
    with rmq_spark.open_store(store.path) as messages:
        messages.send_many(batch(300, "x" * 500))
        messages.expire(max_bytes=1 << 16)
    with pytest.raises(DataLossError, match="retention has deleted"):
        join(query.committed, **MODES[mode]).plan()
    assert store.group_offset() == 10
    careless = join(query.committed, **MODES[mode], **CARELESS)
    careless.plan()
    assert store.group_offset() == careless.reader._view.bounds[QUEUE].min_offset > 12


@pytest.mark.parametrize("mode", MODES)
def test_a_group_that_stands_beyond_the_end_is_a_loss_that_names_it(store, join, mode) -> None:
    store.restore()
    store.set_group(41)
    with pytest.raises(DataLossError) as caught:
        join(**MODES[mode]).plan()
    said = str(caught.value)
    assert "queue orders/0: 16 messages, queue offsets [25, 41)" in said
    assert "the consumer group billing is at 41, and the queue ends at 25 now" in said
    assert "rmq_spark.reset_offsets" in said
    assert store.group_offset() == 41
    rmq_spark.reset_offsets(store.path, "billing", {"orders": {0: 20}})
    assert join(**MODES[mode]).drain() == [rows(20, 25)]


@pytest.mark.parametrize("mode", MODES)
def test_who_accepts_it_goes_on_at_the_end_and_the_group_with_it(
    store, join, mode, caplog: pytest.LogCaptureFixture
) -> None:
    store.restore()
    store.set_group(41)
    with caplog.at_level(logging.WARNING):
        query = join(**MODES[mode], **CARELESS)
        query.trigger()
    assert "skipped, failOnDataLoss=false: 16 messages of queue orders/0" in caplog.text
    assert "the consumer group billing is at 41" in caplog.text
    assert query.offset().lost == {QUEUE: 16}
    assert store.group_offset() == 25
    store.append(3)
    assert query.drain() == [rows(25, 28)]
    assert query.offset().lost == {QUEUE: 16}, "counted once"


def test_a_checkpoint_that_is_to_follow_a_group_beyond_the_end_is_told_of_the_group(store, join) -> None:
    follows = MODES["all"] | {"onOffsetConflict": "group"}
    query = join(**follows, endingOffsets='{"orders": {"0": 12}}')
    query.drain()
    store.restore()
    store.set_group(41)
    with pytest.raises(DataLossError, match="the consumer group billing is at 41, and the queue ends at 25"):
        join(query.committed, **follows).plan()
    careless = join(query.committed, **follows, **CARELESS)
    assert careless.trigger() == []
    assert store.group_offset() == 25
    assert careless.offset().positions == {QUEUE: 25}


def test_what_lies_beyond_the_end_is_not_published_for_a_queue_that_is_let_go(store: RestoredStore) -> None:
    options = parse_options({"path": str(store.path), "subscribe": "orders"} | MODES["shared"], 0)
    assert options.group is not None
    share = GroupPlanner(options, options.group, SourceView(options), LockWait())
    bounds = {QUEUE: QueueBounds(0, 41), QueueKey("orders", 1): QueueBounds(0, 41)}
    share.refresh(StreamOffset({}, {}), bounds)
    share.note_answered()
    others = [GroupSession(str(store.path), GroupTerms("billing", "shared", "avg", str(options.subscription)))]
    others[0].join()
    after = StreamOffset(dict.fromkeys(bounds, 41), {}, group="billing")
    kept = share.refresh(after, dict.fromkeys(bounds, QueueBounds(0, 25))).owned
    assert kept is not None
    assert len(kept) == 1, "the other one was let go"
    assert rmq_spark.group_offsets(store.path, "billing") == {"orders": {0: 10}}
    for query in (share.query, *others):
        query.leave({})
