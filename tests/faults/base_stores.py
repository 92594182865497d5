"""The stores on which operations are tried: each is built once, and every case gets a copy."""

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rmq_spark.store import (
    CommitKey,
    CommitOptions,
    DeliveryScheduler,
    Producer,
    RecordBuilderSettings,
    SinkSettings,
    StagedFile,
    TaskStage,
    commit_sink,
    open_consumer,
    open_store,
)
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.log import consume_queue_writer as queue_writer
from rmq_spark.store.log.segments import FileSizes

SEGMENT_BYTES = 1 << 16
QUEUES = 2
OLD_MESSAGES = 250  # "old0", "old1", … of the topic orders
SINK_FILES, SINK_ROWS = 2, 40
IMPORT_MESSAGES = 100
DEAD_LETTERS = 10
LEVEL_MESSAGES = TIMER_MESSAGES = 6
HOUR_MS = 3_600_000
WAITING_TOPICS = ("SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer")


def opened(store: str, **options: Any) -> Producer:
    """Open a store with small files."""
    options = {"message_delay_level": "1s 2s 3s", "queues": QUEUES} | options
    return open_store(store, segment_bytes=SEGMENT_BYTES, **options)


def old_bodies() -> pa.Table:
    """The messages that most stores begin with."""
    return pa.table({"body": [f"old{number} {'z' * 300}".encode() for number in range(OLD_MESSAGES)]})


def settled(store: str) -> None:
    """A store after a clean shutdown, with an index."""
    with opened(store) as messages:
        messages.send_many(old_bodies(), topic="orders")
        messages.send("orders", "keyed", keys="a-key")
        messages.send("late", "x")


def in_use(store: str) -> None:
    """A store whose writer ended without a shutdown: `abort` exists."""
    messages = opened(store)
    messages.send_many(old_bodies(), topic="orders")
    messages.send("orders", "keyed", keys="a-key")
    os._exit(0)


def due(store: str) -> None:
    """A store with messages of delay levels and of the timer; all are due when it is used."""
    with opened(store) as messages:
        messages.send("late", "first")
        for number in range(LEVEL_MESSAGES):
            messages.send("late", f"level{number}", delay_level=1 + number % 2)
        for number in range(TIMER_MESSAGES):
            messages.send("late", f"timer{number}", deliver_at_ms=wall_clock_ms() + 300 + 400 * (number % 3))
    time.sleep(3)


def _waiting(store: str, **options: int) -> None:
    """Let ten messages wait in the log's first segment; fill some more segments with others."""
    with opened(store, message_delay_level="1h 2h") as messages:
        for number in range(10):
            messages.send("late", f"waits{number}", **options)
        messages.send_many(pa.table({"body": [b"z" * 300] * 2000}), topic="orders")


def waiting_by_level(store: str) -> None:
    """A store whose oldest messages wait for a delay level of an hour."""
    _waiting(store, delay_level=1)


def waiting_by_timer(store: str) -> None:
    """A store whose oldest messages wait for their time, an hour from now."""
    _waiting(store, deliver_at_ms=wall_clock_ms() + HOUR_MS)


def waiting_in_the_wheel(store: str) -> None:
    """The same after a tick, which has put them into the timer wheel."""
    waiting_by_timer(store)
    with DeliveryScheduler(store) as ticker:
        ticker.tick(wall_clock_ms())


def cut_commit(store: str) -> None:
    """A store whose writer was killed in the second append of a commit."""
    settled(store)
    settings = sink_settings(store)
    key = CommitKey("q", 0)
    staged = stage(settings, key)
    puts, put = 0, queue_writer.ConsumeQueueWriter.put

    def dying_put(self: queue_writer.ConsumeQueueWriter, *arguments: Any) -> Any:
        nonlocal puts
        puts += 1
        if puts == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return put(self, *arguments)

    queue_writer.ConsumeQueueWriter.put = dying_put  # type: ignore[method-assign]
    commit_sink(settings, key, staged)


def without_a_queue(store: str) -> None:
    """A store that lost the folder of one queue."""
    settled(store)
    shutil.rmtree(f"{store}/consumequeue/orders/0")


def with_dead_letters(store: str) -> None:
    """A store of which a group has given up some messages."""
    with opened(store) as messages:
        messages.create_topic("again")
        sent = [messages.send("orders", f"letter{number}", queue_id=0) for number in range(DEAD_LETTERS)]
        rows = [
            {
                "commitLogOffset": one.commit_log_offset,
                "physicalTopic": "orders",
                "queueId": 0,
                "queueOffset": one.queue_offset,
                "reconsumeTimes": 0,
                "delayLevel": -1,
            }
            for one in sent
        ]
        messages.send_back(rows, "crew")


def with_a_group(store: str) -> None:
    """A store with the offsets of a group."""
    settled(store)
    with open_consumer(store, "crew") as consumer:
        consumer.update_consume_offset(consumer.queues("orders")[0], 3)
        consumer.commit()


def nothing(store: str) -> None:
    """No store yet: its parent folder exists."""


def sink_settings(store: str, flush: str = "sync") -> SinkSettings:
    """Settings of a sink whose batch takes several appends."""
    return SinkSettings(
        store,
        record_builder=RecordBuilderSettings(sizes=FileSizes(segment_bytes=SEGMENT_BYTES), queue_count=QUEUES),
        commit=CommitOptions(flush=flush, chunk_bytes=1 << 14, session_bytes=1 << 15),
    )


def stage(settings: SinkSettings, key: CommitKey) -> list[StagedFile]:
    """Stage the rows of `SINK_BODIES`, in two tasks."""
    staged = []
    for file in range(SINK_FILES):
        task = TaskStage(settings, key, f"{file}-{time.monotonic_ns()}")
        topics = [f"sink{row % 2}" for row in range(SINK_ROWS)]
        bodies = [f"sunk{file}.{row} {'y' * 200}".encode() for row in range(SINK_ROWS)]
        task.write(pa.RecordBatch.from_pydict({"topic": topics, "body": bodies}))
        staged.append(task.finish())
    return staged


SINK_BODIES = {(f"sink{row % 2}", f"sunk{file}.{row}") for file in range(SINK_FILES) for row in range(SINK_ROWS)}


def write_import_file(path: Path) -> None:
    """Write the Parquet file that an import reads."""
    bodies = [f"imported{number}".encode() for number in range(IMPORT_MESSAGES)]
    pq.write_table(pa.table({"topic": ["imported"] * IMPORT_MESSAGES, "body": bodies}), path)
