"""Deeds of the workers of a kill round on one store: each one at random, with notes in the worker's ledger.

A deed gets a `Worker`. A deed that must not run twice at a time, such as one query, holds a lock of the books.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from ledger import Ledger

from rmq_spark.store import (
    CommitKey,
    CommitOptions,
    DeliveryScheduler,
    GroupSession,
    GroupTerms,
    Producer,
    RecordBuilderSettings,
    SendBackSettings,
    SendBackTask,
    SendBackTerms,
    SinkSettings,
    StagedFile,
    StoreReader,
    TaskStage,
    check,
    close,
    commit_copies,
    commit_sink,
    export_parquet,
    import_parquet,
    open_consumer,
    open_store,
    plan_repair,
    repair,
    republish_dead_letters,
    reset_offsets,
)
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.errors import BatchConflictError, NotFoundError, OptionError, StoreChangedError, StorePathError
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.model import QueueKey

SEGMENT_BYTES = 1 << 18
KEPT_BYTES = 40 * SEGMENT_BYTES  # by retention
LEVELS = "1s 2s 3s"
IMPORTED = 500  # messages of one import
PULLING_GROUPS = ("puller0", "puller1", "puller2")


class Worker:
    """One process at the store. `books` is the folder of the ledgers, and of what deeds remember."""

    def __init__(self, store: str, books: Path, seed: int, lock_timeout_ms: int) -> None:
        self.store, self.books, self.random = store, books, Random(seed)
        self.ledger = Ledger(books, f"{seed}-{os.getpid()}")
        self._lock_timeout_ms = lock_timeout_ms

    def open(self, flush: str = "async") -> Producer:
        """Open the store for writing."""
        return open_store(
            self.store,
            flush=flush,
            segment_bytes=SEGMENT_BYTES,
            message_delay_level=LEVELS,
            lock_timeout_ms=self._lock_timeout_ms,
        )

    def name(self, kind: str) -> str:
        """Return a name that no other message has."""
        return f"{kind}{os.getpid()}.{time.monotonic_ns()}"

    @contextmanager
    def alone(self, name: str) -> Iterator[bool]:
        """Hold a lock of this name; yield False if another worker holds it."""
        file = os.open(self.books / f"{name}.lock", os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
            else:
                yield True
        finally:
            os.close(file)

    def remembered(self, name: str, default: Any) -> Any:
        """Return what was remembered last by this name."""
        try:
            return json.loads((self.books / f"{name}.state").read_text())
        except (FileNotFoundError, ValueError):
            return default

    def remember(self, name: str, value: Any) -> None:
        """Remember a value for the next worker, at once or not at all."""
        path = self.books / f"{name}.{os.getpid()}"
        path.write_text(json.dumps(value))
        path.rename(self.books / f"{name}.state")


def send(worker: Worker) -> None:
    """Send single messages and tables."""
    random = worker.random
    with worker.open(random.choice(["async", "sync"])) as messages:
        for _ in range(random.randint(1, 8)):
            name = worker.name("sent")
            if random.random() < 0.6:
                topic = random.choice(["orders", "payments", f"topic{random.randint(0, 30)}"])
                sent = messages.send(topic, name, tags=random.choice(["x", "y", None]), keys=name)
                worker.ledger.note("sent", name, sent.commit_log_offset)
            else:
                count, fill = random.choice([2, 10, 300]), "z" * random.choice([0, 0, 900])
                bodies = [f"{name}.{row} {fill}".encode() for row in range(count)]
                placed = messages.send_many(pa.table({"body": bodies}), topic=random.choice(["orders", "payments"]))
                worker.ledger.note("sent many", name, count, placed.column("commitLogOffset")[0].as_py())
            if random.random() < 0.1:
                messages.settle()


def send_delayed(worker: Worker) -> None:
    """Send messages of a delay level, and of a time."""
    random = worker.random
    with worker.open() as messages:
        for _ in range(random.randint(1, 4)):
            name = worker.name("late")
            if random.random() < 0.5:
                level = random.randint(1, 3)
                due_ms = wall_clock_ms() + level * 1000
                messages.send("late", name, delay_level=level, keys=name)
            else:
                due_ms = wall_clock_ms() + random.choice([1, 500, 1500, 2500])
                messages.send("late", name, deliver_at_ms=due_ms, keys=name)
            worker.ledger.note("delayed", name, due_ms)


def tick(worker: Worker) -> None:
    """Deliver what is due, some times."""
    with DeliveryScheduler(worker.store) as ticker:
        for _ in range(worker.random.randint(1, 20)):
            ticker.tick(wall_clock_ms())
            time.sleep(worker.random.random() * 0.01)


def sink(worker: Worker) -> None:
    """Commit batches of a query; a batch has the same rows whenever it is tried."""
    query = f"query{worker.random.randint(0, 5)}"
    is_careful = worker.random.random() < 0.8
    with worker.alone(query) as is_alone:
        if is_careful and not is_alone:
            return
        for _ in range(worker.random.randint(1, 4)):
            batch = worker.remembered(query, 0)
            try:
                _sink_batch(worker, query, batch)
            except BatchConflictError:
                if is_alone:
                    raise
                return  # the other worker was faster
            worker.ledger.note("committed", query, batch)
            if worker.remembered(query, 0) <= batch:
                worker.remember(query, batch + 1)


def _sink_batch(worker: Worker, query: str, batch: int) -> None:
    random = Random(f"{query}:{batch}")
    files, rows = random.randint(1, 3), random.choice([0, 1, 5, 40, 400])
    settings = SinkSettings(
        worker.store,
        record_builder=RecordBuilderSettings(sizes=FileSizes(segment_bytes=SEGMENT_BYTES)),
        commit=CommitOptions(flush=random.choice(["sync", "async"]), chunk_bytes=1 << 14, session_bytes=1 << 15),
    )
    key = CommitKey(query, batch)
    worker.ledger.note("batch", query, batch, files * rows)
    staged: list[StagedFile] = []
    for file in range(files):
        task = TaskStage(settings, key, f"{file}-{os.getpid()}-{time.monotonic_ns()}")
        if rows:
            columns = {
                "topic": [f"sink{row % 3}" for row in range(rows)],
                "body": [f"b{query}.{batch}.{file}.{row}".encode() for row in range(rows)],
                "queueId": pa.array([row % 4 for row in range(rows)], pa.int32()),
            }
            task.write(pa.RecordBatch.from_pydict(columns))
        staged.append(task.finish())
    commit_sink(settings, key, staged)


def close_store(worker: Worker) -> None:
    """Shut the store down."""
    close(worker.store)


def check_store(worker: Worker) -> None:
    """Check the store while others write."""
    for finding in check(worker.store).findings:
        if finding.severity == "damage":
            worker.ledger.note("damage", str(finding))


def read(worker: Worker) -> None:
    """Read everything; note gaps."""
    with StoreReader(worker.store) as reader:
        reader.refresh()
        for topic in reader.topics():
            for queue in reader.queues(topic):
                bounds = reader.bounds(queue)
                expected = bounds.min_offset
                for batch in reader.read(queue, expected, bounds.max_offset, ["queueOffset", "body"]):
                    for offset in batch.column("queueOffset").to_pylist():
                        if offset != expected:
                            worker.ledger.note("gap", str(queue), offset, expected)
                        expected = offset + 1


def repair_store(worker: Worker) -> None:
    """Plan a repair and apply it, unless the store changed in between."""
    try:
        repair(plan_repair(worker.store))
    except (StoreChangedError, OptionError) as error:
        worker.ledger.note("repair refused", type(error).__name__)


def join_group(worker: Worker) -> None:
    """Be a member of a shared group for some steps."""
    terms = GroupTerms("crew", "shared", lease_timeout_ms=5000, lease_heartbeat_ms=1000)
    group = GroupSession(worker.store, terms)
    queues = _queues_of_orders(worker)
    offsets: dict[QueueKey, int] = {}
    for _ in range(worker.random.randint(1, 6) if queues else 0):
        step = group.rebalance(queues, offsets, 0)
        offsets |= {queue: step.held.get(queue, 0) for queue in step.gained}
        group.settle()
        with StoreReader(worker.store) as reader:
            reader.refresh()
            offsets = {
                queue: max(min(offsets.get(queue, 0) + 1, reader.bounds(queue).max_offset), offsets.get(queue, 0))
                for queue in step.owned
            }
        time.sleep(worker.random.random() * 0.02)
    if queues and worker.random.random() < 0.5:
        group.leave(offsets)


def _queues_of_orders(worker: Worker) -> list[QueueKey]:
    with StoreReader(worker.store) as reader:
        reader.refresh()
        try:
            return reader.queues("orders")
        except NotFoundError:
            return []


def pull(worker: Worker) -> None:
    """Pull and commit as a consumer that has its group to itself."""
    group = worker.random.choice(PULLING_GROUPS)
    with worker.alone(group) as is_alone:
        if not is_alone:
            return
        with open_consumer(worker.store, group) as consumer:
            try:
                queue = worker.random.choice(consumer.queues("orders"))
            except NotFoundError:
                return
            at = consumer.fetch_consume_offset(queue) or consumer.min_offset(queue)
            for _ in range(3):
                at = consumer.pull(queue, at, 32).next_begin_offset
                consumer.update_consume_offset(queue, at)
                consumer.commit()
                worker.ledger.note("offset", group, queue.queue_id, at)


def create_topics(worker: Worker) -> None:
    """Create topics."""
    with worker.open() as messages:
        for _ in range(3):
            name = f"made{worker.random.randint(0, 10**9)}"
            messages.create_topic(name, worker.random.randint(1, 5))
            worker.ledger.note("topic", name)


def send_back(worker: Worker) -> None:
    """Send messages back, as one query does batch by batch."""
    with worker.alone("back") as is_alone:
        if not is_alone:
            return
        batch, at = worker.remembered("back", (0, 0))
        queues = _queues_of_orders(worker)
        if not queues:
            return
        names = ["commitLogOffset", "physicalTopic", "queueId", "queueOffset", "reconsumeTimes"]
        with StoreReader(worker.store) as reader:
            reader.refresh()
            bounds = reader.bounds(queues[0])
            begin = max(at, bounds.min_offset)
            end = min(begin + 20, bounds.max_offset)
            if end <= begin:
                return
            rows = pa.Table.from_batches(list(reader.read(queues[0], begin, end, names)))
        levels = pa.array([worker.random.choice([-1, 1]) for _ in range(len(rows))], pa.int32())
        settings = SendBackSettings(worker.store, SendBackTerms("crew", 3, "error"))
        key = CommitKey("backs", batch)
        task = SendBackTask(settings, key, f"r-{os.getpid()}-{time.monotonic_ns()}")
        task.write(rows.append_column("delayLevel", levels).combine_chunks().to_batches()[0])
        commit_copies(settings, key, [task.finish()])
        worker.remember("back", (batch + 1, end))


def republish(worker: Worker) -> None:
    """Republish the dead letters."""
    with worker.alone("dead") as is_alone:
        if is_alone:
            _unless_missing(lambda: republish_dead_letters(worker.store, "crew", topic="undead"))


def import_messages(worker: Worker) -> None:
    """Import a file; an import that was finished adds nothing."""
    number = worker.random.randint(0, 3)
    path = worker.books / f"import{number}.parquet"
    with worker.alone(path.stem) as is_alone:
        if not is_alone:
            return
        if not path.exists():
            bodies = [f"i{number}.{row}".encode() for row in range(IMPORTED)]
            pq.write_table(pa.table({"topic": ["imported"] * IMPORTED, "body": bodies}), f"{path}.new")
            os.rename(f"{path}.new", path)
        import_parquet(worker.store, path)
        worker.ledger.note("imported", number)


def export(worker: Worker) -> None:
    """Export a topic."""
    number = worker.random.randint(0, 1)
    with worker.alone(f"export{number}") as is_alone:
        if is_alone:
            target = worker.books / f"export{number}.parquet"
            _unless_missing(lambda: export_parquet(worker.store, target, topics=["orders"], overwrite=True))


def expire(worker: Worker) -> None:
    """Delete what is beyond the bytes to keep."""
    with worker.open() as messages:
        messages.expire(max_bytes=KEPT_BYTES)


def reset(worker: Worker) -> None:
    """Reset a group's offsets."""
    to = worker.random.choice(["earliest", "latest"])
    _unless_missing(lambda: reset_offsets(worker.store, "crew", to, topics="orders"))


def _unless_missing(deed: Callable[[], object]) -> None:
    with contextlib.suppress(NotFoundError, StorePathError):  # the topic, the group or the store does not exist yet
        deed()


WEIGHTS: dict[Callable[[Worker], None], int] = {
    send: 10,
    send_delayed: 4,
    tick: 6,
    sink: 10,
    close_store: 3,
    check_store: 2,
    read: 3,
    repair_store: 2,
    join_group: 4,
    pull: 3,
    create_topics: 2,
    send_back: 4,
    republish: 2,
    import_messages: 2,
    export: 1,
    expire: 3,
    reset: 1,
}
