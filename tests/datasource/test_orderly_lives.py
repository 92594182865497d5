"""Promises of orderly and concurrent listeners that fail at random, in a query that dies at random.

Without Spark: the stream reader, the tasks and the commit are real, and this module does the work of Spark between
them, in the same order: a batch is planned, run and committed, or repeated from its begin after a death.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from support.parsed_options import parse_options

import rmq_spark
from rmq_spark.datasource.options.read_options import ReadSettings
from rmq_spark.datasource.options.write_options import SendBackOptions
from rmq_spark.datasource.spark.listener import ListenerTerms
from rmq_spark.datasource.spark.listener_sink import ListenerJob
from rmq_spark.datasource.spark.stream_reader import RmqStreamReader
from rmq_spark.datasource.spark.task_writer import SinkTask
from rmq_spark.store import CommitKey, commit_final_offsets
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.group.resets import read_suspended, write_outcomes
from rmq_spark.store.local.directory import StoreDirectory
from rmq_spark.store.log.write_session import WriteSession
from rmq_spark.store.model import QueueKey, Suspension
from rmq_spark.store.transaction.intents import Intents

COLUMNS = ("topic", "physicalTopic", "queueId", "queueOffset", "commitLogOffset", "reconsumeTimes", "body")
QUEUES = 3
MESSAGES = 8  # in each queue


class DeathError(KeyboardInterrupt):
    """The driver is killed, possibly within the listener."""


@dataclass
class Life:
    """A store, a listener that fails at random, and a query that dies at random."""

    path: Path
    random: Random
    model: str
    batch_size: int
    max_times: int
    threads: int = 1  # with several a seed gives another life each time
    fail_chance: float = 0.3
    death_chance: float = 0.1
    given: list[tuple[int, int]] = field(default_factory=list)  # queue id and offset, as the listener got them
    too_early: list[str] = field(default_factory=list)
    succeeded: Counter[tuple[int, int]] = field(default_factory=Counter)
    committed: str = '{"@": {"v": 1}}'
    planned: str | None = None
    batch_id: int = 0
    query_id: str = "query"
    most: str | None = None  # maxOffsetsPerTrigger, at random without
    now_ms: int = 1_700_000_000_000
    dying: bool = True
    deaths: int = 0
    reader: RmqStreamReader | None = None

    def listen(self, rows: list[Any], context: Any) -> str | None:
        self.may_die()
        places = [(row.queueId, row.queueOffset) for row in rows]
        self.given += places
        self.check_order(places)
        if any(row.body == b"bad" for row in rows) or self.random.random() < self.fail_chance:
            context.suspend_ms = 10
            return None
        self.succeeded.update(places)
        return "SUCCESS" if self.model == "orderly" else "CONSUME_SUCCESS"

    def check_order(self, places: list[tuple[int, int]]) -> None:
        """All rows of the queue before these have succeeded, or are dead letters in the store."""
        if self.model != "orderly":
            return
        queue_id, first = places[0]
        missing = {offset for offset in range(first) if not self.succeeded[queue_id, offset]}
        if missing:
            missing -= {offset for dead_id, offset in self.dead_letters() if dead_id == queue_id}
        if missing:
            self.too_early.append(f"{places} before {sorted(missing)} of the queue")

    def may_die(self) -> None:
        if self.dying and self.random.random() < self.death_chance:
            self.deaths += 1
            raise DeathError

    def dead_letters(self) -> list[tuple[int, int]]:
        """Return queue id and offset of the originals, from their keys."""
        pairs = [key.split("-") for key in self.read_dead("keys")]
        return [(int(queue_id), int(offset)) for queue_id, offset in pairs]

    def dead_times(self) -> list[int]:
        return self.read_dead("reconsumeTimes")

    def read_dead(self, column: str) -> list[Any]:
        with rmq_spark.open_reader(self.path) as store:
            store.refresh()
            if "%DLQ%g" not in store.topics():
                return []
            [queue] = store.queues("%DLQ%g")
            held = store.bounds(queue)
            found = store.read(queue, 0, held.max_offset, [column])
            return [value for batch in found for value in batch[column].to_pylist()]

    def start(self) -> RmqStreamReader:
        options = {"path": str(self.path), "subscribe": "orders", "consumerGroup": "g", "startingOffsets": "earliest"}
        options |= {"orderly": "true"} if self.model == "orderly" else {}
        options |= {
            "subscribeRetry": "false",
            "maxOffsetsPerTrigger": self.most or str(self.random.choice([3, 7, 1000])),
        }
        settings = ReadSettings(COLUMNS, False, 64 << 20, True)
        self.reader = RmqStreamReader(parse_options(options, self.now_ms), settings, lambda: self.now_ms)
        return self.reader

    def stop(self) -> None:
        if self.reader is not None and self.reader._group is not None:
            self.reader._group.query._membership.lease._lock.release()
        self.reader = None

    def run(self, trigger_count: int) -> None:
        """Run `trigger_count` triggers, with deaths and restarts among them."""
        for _ in range(trigger_count):
            try:
                self.trigger(self.reader or self.start())
            except DeathError:
                self.stop()
            self.now_ms += 7

    def settle(self, at_most: int = 200) -> None:
        """Run until a trigger finds nothing, ten times: a queue may wait."""
        idle = 0
        while idle < 10:
            at_most -= 1
            assert at_most, "does not come to rest"
            before = self.batch_id
            self.run(1)
            idle = idle + 1 if self.batch_id == before else 0

    def trigger(self, reader: RmqStreamReader) -> None:
        start = json.loads(self.committed)
        if self.planned is None:
            end = json.dumps(reader.latestOffset(start, reader.getDefaultReadLimit()))
            if end == self.committed:
                return
            self.planned = end
        self.may_die()
        job = self.job()
        key = CommitKey(self.query_id, self.batch_id)
        done = []
        for number, partition in enumerate(reader.partitions(start, json.loads(self.planned))):
            rows = self.slow(reader.read(partition))
            done.append(job.run(rows, None, key, SinkTask(number, 0, self.random.getrandbits(32))))
        if not done:
            done = [job.run(iter(()), None, key, SinkTask(0, 0, self.random.getrandbits(32)))]
        self.may_die()
        job.commit(done, key, self.now_ms)
        self.may_die()
        self.committed, self.planned, self.batch_id = self.planned, None, self.batch_id + 1

    def slow(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from (batch.slice(first, 2) for first in range(0, batch.num_rows, 2))

    def job(self) -> ListenerJob:
        terms = ListenerTerms(self.model, self.batch_size, self.max_times, threads=self.threads)
        times = self.max_times if self.model == "concurrently" else None
        options = SendBackOptions(location=StoreDirectory(str(self.path)), group="g", max_reconsume_times=times)
        return ListenerJob(self.listen, terms, options)


def make_life(path: Path, seed: int, **terms: Any) -> Life:
    with rmq_spark.open_store(path, segment_bytes=1 << 20) as store:
        store.create_topic("orders", QUEUES)
        for number in range(MESSAGES):
            for queue_id in range(QUEUES):
                body = "bad" if (queue_id, number) in {(0, 2), (1, 0), (1, 1), (2, 7)} else "good"
                store.send("orders", body, queue_id=queue_id, keys=f"{queue_id}-{number}")
    return Life(path, Random(seed), **terms)


@pytest.fixture
def deadly(monkeypatch: pytest.MonkeyPatch) -> list[Life]:
    """Lives that may also die in a commit: about the file of stopped queues, before an intent, and at each append."""
    lives: list[Life] = []
    replace, append, write = Disk.replace, WriteSession.append, Intents.write

    def dying_replace(self: Disk, path: str, data: bytes) -> None:
        if lives and path.endswith("suspended.json"):
            lives[0].may_die()
            replace(self, path, data)
            lives[0].may_die()
        else:
            replace(self, path, data)

    def dying_append(self: WriteSession, *given: Any, **more: Any) -> Any:
        if lives:
            lives[0].may_die()
        return append(self, *given, **more)

    def dying_write(self: Intents, intent: Any) -> None:
        if lives:  # the state of the batch is on disk by now, and no intent promises the batch
            lives[0].may_die()
        write(self, intent)

    monkeypatch.setattr(Disk, "replace", dying_replace)
    monkeypatch.setattr(Intents, "write", dying_write)
    monkeypatch.setattr(WriteSession, "append", dying_append)
    return lives


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 20])
@pytest.mark.parametrize(
    ("seed", "batch_size", "max_times", "group_stands_at"),
    [
        (0, 1, 2, 0),
        (0, 3, 2, 0),
        (2, 1, 2, 0),
        (101, 2, 0, 0),
        (103, 2, 0, 0),
        (104, 3, 2, 0),
        (0, 1, 2, MESSAGES),
        (3, 2, 2, MESSAGES),
        (4, 1, 0, 5),
    ],
)
def test_in_order_every_row_is_processed_or_a_dead_letter_and_none_before_the_one_ahead_of_it(
    tmp_path: Path, deadly: list[Life], seed: int, batch_size: int, max_times: int, group_stands_at: int, threads: int
) -> None:
    terms = {"batch_size": batch_size, "max_times": max_times, "threads": threads}
    life = make_life(tmp_path / "store", seed, model="orderly", **terms)
    if group_stands_at:  # as an earlier query of the group left it
        with rmq_spark.open_consumer(life.path, "g") as consumer:
            for queue_id in range(QUEUES):
                consumer.update_consume_offset(QueueKey("orders", queue_id), group_stands_at)
    deadly.append(life)
    life.run(50)
    life.dying, life.fail_chance = False, 0.0
    life.settle()
    assert life.too_early == []
    dead = life.dead_letters()
    assert len(dead) == len(set(dead)), "no dead letter twice"
    every = {(queue_id, offset) for queue_id in range(QUEUES) for offset in range(MESSAGES)}
    assert set(life.succeeded) | set(dead) == every
    assert {(0, 2), (1, 0), (1, 1), (2, 7)} <= set(dead)
    assert set(life.dead_times()) == {max_times}, "as often as it was retried"
    assert life.deaths
    published = rmq_spark.group_offsets(life.path, "g")["orders"]
    assert published == dict.fromkeys(range(QUEUES), MESSAGES)
    life.stop()


@pytest.mark.parametrize("threads", [1, 20])
@pytest.mark.parametrize("seed", [0, 1, 105])
def test_concurrently_every_row_is_processed_or_sent_back_once_for_each_batch(
    tmp_path: Path, deadly: list[Life], seed: int, threads: int
) -> None:
    life = make_life(tmp_path / "store", seed, model="concurrently", batch_size=2, max_times=0, threads=threads)
    deadly.append(life)
    life.run(40)
    life.dying, life.fail_chance = False, 0.0
    life.settle()
    dead = life.dead_letters()
    assert len(dead) == len(set(dead)), "none was sent back twice"
    every = {(queue_id, offset) for queue_id in range(QUEUES) for offset in range(MESSAGES)}
    assert set(life.succeeded) | set(dead) == every
    assert life.deaths
    life.stop()


def letters_after_one_run(path: Path) -> Life:
    """Return a life in which each queue's rows were given once, and the bad ones are dead letters."""
    life = make_life(path, 1, model="orderly", batch_size=1, max_times=0, fail_chance=0.0)
    life.dying = False
    life.settle()
    assert sorted(life.dead_letters()) == [(0, 2), (1, 0), (1, 1), (2, 7)]
    life.given.clear()
    return life


def test_a_dead_letter_at_the_end_of_its_queue_is_given_again_after_a_reset(tmp_path: Path) -> None:
    life = letters_after_one_run(tmp_path / "store")
    rmq_spark.reset_offsets(life.path, "g", {"orders": {2: 5}})
    life.settle()
    assert life.given == [(2, 5), (2, 6), (2, 7)]
    life.stop()


def test_a_query_that_reads_the_group_anew_gets_the_dead_letters_of_another_one(tmp_path: Path) -> None:
    life = letters_after_one_run(tmp_path / "store")
    life.stop()
    life.committed, life.planned, life.batch_id, life.query_id = '{"@": {"v": 1}}', None, 0, "another"
    life.settle()
    assert sorted(life.given) == [(queue_id, offset) for queue_id in range(QUEUES) for offset in range(MESSAGES)]
    life.stop()


@pytest.mark.parametrize("most", ["9", "3"], ids=["batches end at the place", "batches end before it"])
def test_so_it_does_where_a_batch_of_it_begins_where_the_other_one_stopped(tmp_path: Path, most: str) -> None:
    life = make_life(tmp_path / "store", 1, model="orderly", batch_size=1, max_times=2, fail_chance=0.0)
    life.dying, life.most = False, most
    queue, stopped = QueueKey("orders", 2), Suspension(3, 0, {3: 1, 5: 2}, frozenset({5}), frozenset({4}))
    write_outcomes(str(life.path), "g", CommitKey("another", 6), {queue: stopped})
    life.run(1)
    assert (2, 3) not in life.given
    kept = read_suspended(str(life.path), "g").queues[queue]
    assert (kept.resume, kept.attempts, kept.sent, kept.dead) == (3, {}, set(), set())
    life.settle()
    assert set(life.given) == {(queue_id, offset) for queue_id in range(QUEUES) for offset in range(MESSAGES)}
    life.stop()


def test_a_try_that_was_not_committed_is_not_published_when_its_query_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = make_life(tmp_path / "store", 1, model="orderly", batch_size=1, max_times=0, fail_chance=0.0)
    life.dying, life.most = False, "1000"
    reader = life.start()
    member = reader._group.query.member_id

    def die(*_: object) -> None:
        raise DeathError

    with monkeypatch.context() as patch:  # the outcome is on disk, and the disk is full
        patch.setattr(Intents, "write", die)
        life.run(1)
    assert read_suspended(str(life.path), "g").queues[QueueKey("orders", 1)].dead == {0}
    assert life.dead_letters() == []
    ends = {QueueKey("orders", queue_id): MESSAGES for queue_id in range(QUEUES)}
    assert not commit_final_offsets(life.path, "g", member, ends, 0)
    assert rmq_spark.group_offsets(life.path, "g") == {}
    life.stop()
    life.settle()
    assert sorted(life.dead_letters()) == [(0, 2), (1, 0), (1, 1), (2, 7)]
    assert life.too_early == []
    life.stop()


@pytest.mark.parametrize("model", ["orderly", "concurrently"])
def test_what_a_try_that_died_had_promised_is_in_the_store_when_its_batch_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    life = make_life(tmp_path / "store", 1, model=model, batch_size=MESSAGES, max_times=0, fail_chance=1.0)
    life.dying = False

    def die(*_: object) -> None:
        raise DeathError

    with monkeypatch.context() as patch:
        patch.setattr(WriteSession, "append", die)
        life.run(1)
    assert (life.batch_id, life.dead_letters()) == (0, [])
    failed = set(life.given)
    assert failed
    life.fail_chance = 0.0
    life.run(1)
    assert life.batch_id == 1
    assert failed <= set(life.dead_letters())
    life.stop()
