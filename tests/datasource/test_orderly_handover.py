"""Orderly listeners in a shared group: a batch that lost a queue while it ran leaves the new owner's stop alone."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.parsed_options import parse_options

import rmq_spark
from rmq_spark.datasource.options.read_options import ReadSettings
from rmq_spark.datasource.options.write_options import SendBackOptions
from rmq_spark.datasource.spark.listener import ListenerTerms
from rmq_spark.datasource.spark.listener_sink import ListenerJob
from rmq_spark.datasource.spark.stream_reader import RmqStreamReader
from rmq_spark.datasource.spark.task_writer import SinkTask
from rmq_spark.store import CommitKey
from rmq_spark.store.group.resets import read_suspended, write_outcomes
from rmq_spark.store.local.directory import StoreDirectory
from rmq_spark.store.model import QueueKey, Suspension
from tests.datasource.test_orderly_lives import COLUMNS

QUEUES = 2
LIMIT_S = 60  # ends a hang
Place = tuple[int, int]  # queue id and queue offset


class Member:
    """A query of a shared group, whose listener fails at the places in `bad`."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name, self.batch_id, self.now_ms = path, name, 0, 1_700_000_000_000
        self.bad: set[Place] = set()
        self.processed: set[Place] = set()
        options = {
            "path": str(path),
            "subscribe": "orders",
            "consumerGroup": "g",
            "startingOffsets": "earliest",
            "orderly": "true",
            "assignment": "shared",
            "subscribeRetry": "false",
            "handoverTimeout": "1s",
        }
        settings = ReadSettings(COLUMNS, False, 64 << 20, True)
        self.reader = RmqStreamReader(parse_options(options, self.now_ms), settings, lambda: self.now_ms)
        self.committed = self.reader.initialOffset()
        terms = ListenerTerms("orderly", 1, 100)
        self.job = ListenerJob(
            self.listen, terms, SendBackOptions(location=StoreDirectory(str(path)), group="g"), is_shared=True
        )

    def listen(self, rows: list[Any], _: Any) -> str:
        for row in rows:
            place = row.queueId, row.queueOffset
            if place in self.bad:
                raise ValueError("bad")
            self.processed.add(place)
        return "SUCCESS"

    def plan(self) -> bool:
        self.now_ms += 5_000  # no stopped queue has to wait
        self.end = self.reader.latestOffset(self.committed, self.reader.getDefaultReadLimit())
        return self.end != self.committed

    def run_tasks(self) -> None:
        self.key = CommitKey(self.name, self.batch_id)
        parts = self.reader.partitions(self.committed, self.end)
        self.done = [
            self.job.run(self.reader.read(part), None, self.key, SinkTask(number, 0, number))
            for number, part in enumerate(parts)
        ] or [self.job.run(iter(()), None, self.key, SinkTask(0, 0, 0))]

    def commit(self) -> None:
        self.job.commit(self.done, self.key, self.now_ms)
        self.committed, self.batch_id = json.loads(json.dumps(self.end)), self.batch_id + 1

    def trigger(self) -> None:
        if self.plan():
            self.run_tasks()
            self.commit()

    def stops(self) -> dict[int, int]:
        return {queue.queue_id: one.resume for queue, one in read_suspended(str(self.path), "g").queues.items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with rmq_spark.open_store(tmp_path / "store", segment_bytes=1 << 20) as store:
        store.create_topic("orders", QUEUES)
    append(tmp_path / "store", 20)
    return tmp_path / "store"


def append(path: Path, count: int) -> None:
    with rmq_spark.open_store(path) as store:
        for number in range(count * QUEUES):
            store.send("orders", "x", queue_id=number % QUEUES)


def take_over(one: Member, other: Member) -> int:
    """Have `other` join, and wait until it owns a queue of the running batch of `one`; return the queue's id."""
    until = time.monotonic() + LIMIT_S
    while not other.reader._group.query.epochs:  # type: ignore[union-attr]
        assert time.monotonic() < until
        other.plan()
        time.sleep(0.05)
    [queue] = other.reader._group.query.epochs  # type: ignore[union-attr]
    return queue.queue_id


@pytest.mark.parametrize(("runs_late", "place"), [(False, 30), (True, 10)], ids=["before the fence", "after the stop"])
def test_the_commit_of_a_fenced_batch_leaves_the_new_owners_stop(path: Path, runs_late: bool, place: int) -> None:
    one, other = Member(path, "one"), Member(path, "other")
    one.bad = {(0, 5), (1, 5)}
    one.trigger()
    assert one.stops() == {0: 5, 1: 5}
    one.bad = set()
    while not one.processed >= {(0, 5), (1, 5)}:  # the stopped queues again
        assert one.plan()
        rows = [list(one.reader.read(part)) for part in one.reader.partitions(one.committed, one.end)]
        if runs_late and any(rows):  # the rows are read, and the listener has not been called
            break
        one.run_tasks()
        if not any(rows):
            one.commit()
    append(path, 20)
    queue_id = take_over(one, other)
    other.bad = {(0, place), (1, place)}
    while other.stops().get(queue_id) != place:
        other.run_tasks()
        other.commit()
        other.plan()
    if runs_late:
        one.key = CommitKey(one.name, one.batch_id)
        one.done = [
            one.job.run(batches, None, one.key, SinkTask(number, 0, number)) for number, batches in enumerate(rows)
        ]
    one.commit()
    assert queue_id in other.stops()
    other.bad = set()
    for _ in range(6):
        other.trigger()
    given = one.processed | other.processed
    assert [offset for offset in range(40) if (queue_id, offset) not in given] == []
    append(path, 1)
    other.trigger()
    assert queue_id not in other.stops(), "the stop goes when its own query has gone on"
    for member in (one, other):
        member.reader.stop()
        member.reader._group.query.leave({})  # type: ignore[union-attr]


def test_a_query_that_takes_over_a_stopped_queue_deletes_the_stop_one_batch_later(path: Path) -> None:
    one = Member(path, "one")
    one.bad = {(0, 5), (1, 5)}
    one.trigger()
    one.reader._group.query.leave({})  # type: ignore[union-attr]
    other = Member(path, "other")
    for _ in range(3):
        other.trigger()
    assert other.processed >= {(queue_id, offset) for queue_id in range(QUEUES) for offset in range(5, 20)}
    assert other.stops() == {0: 20, 1: 20}, "the places where the batch ended"
    append(path, 1)
    other.trigger()
    assert other.stops() == {}
    assert len([place for place in other.processed if place[1] == 20]) == QUEUES
    other.reader._group.query.leave({})  # type: ignore[union-attr]


def test_a_newer_stop_of_another_query_stays_whatever_the_outcome(path: Path) -> None:
    queue, root = QueueKey("orders", 0), str(path)
    write_outcomes(root, "g", CommitKey("one", 0), {queue: Suspension(5)})
    write_outcomes(root, "g", CommitKey("other", 0), {queue: Suspension(30)}, {queue: 1})
    for outcome in (None, Suspension(40)):
        write_outcomes(root, "g", CommitKey("one", 1), {queue: outcome}, {queue: 1})
        assert read_suspended(root, "g").queues[queue].resume == 30
    write_outcomes(root, "g", CommitKey("one", 2), {queue: None}, {queue: 2})
    assert read_suspended(root, "g").queues == {}
