"""Stores that grow during a test, and a query that drives our stream reader like Spark."""

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from pyspark.sql.datasource_internal import _SimpleStreamReaderWrapper
from pyspark.sql.streaming.datasource import ReadLimit
from support.appender import Appender, AppenderSettings
from support.appender_log import AppenderLog
from support.parsed_options import parse_options

from rmq_spark.datasource.options.read_options import ReadSettings
from rmq_spark.datasource.plan.offsets import StreamOffset, decode_offset
from rmq_spark.datasource.spark.hand_over import HandOver
from rmq_spark.datasource.spark.stream_reader import RmqStreamReader
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

SEGMENT_BYTES = 4096
NOW_MS = 1_700_000_000_000
COLUMNS = ("queueId", "queueOffset", "body")

Rows = list[tuple[int, int]]  # queue id and queue offset of each


class GrowingStore:
    """A store with a live writer: the body of a message is its topic, queue and queue offset."""

    def __init__(self, folder: Path, queues: int) -> None:
        self.path = folder / "growing"
        self._history = AppenderLog(folder / "growing-history")
        settings = AppenderSettings(segment_bytes=SEGMENT_BYTES, queues=queues, death_chance=0, pause_chance=0)
        self._appender = Appender(self.path, self._history, Random(1), settings)
        self._appender.open()
        self._next: dict[tuple[str, int], int] = {}

    def append(self, topic: str, queue_id: int = 0, count: int = 1, size: int = 0, **fields: str) -> None:
        """Append messages to one queue; `size` pads the body to that number of bytes."""
        first = self._next.get((topic, queue_id), 0)
        offsets = range(first, first + count)
        bodies = [f"{topic}/{queue_id}/{offset}".encode().ljust(size, b".") for offset in offsets]
        self._appender.append([SampleMessage(topic, queue_id, body, **fields) for body in bodies])
        self._next[topic, queue_id] = first + count

    def expire_segment(self) -> None:
        """Delete the oldest segment of the commit log, as retention does."""
        oldest = min((self.path / "commitlog").iterdir())
        oldest.unlink()

    def close(self) -> None:
        """Release the store like a process that is killed."""
        self._appender.drop()
        self._history.close()


@pytest.fixture
def grow(tmp_path: Path) -> Iterator[Callable[..., GrowingStore]]:
    """A function that makes an empty store with a writer; topics get `queues` queues."""
    stores: list[GrowingStore] = []

    def make(queues: int = 1) -> GrowingStore:
        stores.append(GrowingStore(tmp_path, queues))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def store(grow: Callable[..., GrowingStore]) -> GrowingStore:
    """A store of the topic orders, with 3 messages in queue 0 and none in queue 1."""
    store = grow(queues=2)
    store.append("orders", 0, 3)
    return store


@pytest.fixture
def write_store() -> Callable[..., Path]:
    """A function that writes a store at once: messages of one queue, stored at `first_ms` and each ms after it."""

    def write(path: Path, count: int, topic: str = "orders", first_ms: int | None = None) -> Path:
        times = [None if first_ms is None else first_ms + number for number in range(count)]
        build_store(path, [SampleMessage(topic, 0, b"x", store_timestamp=time_ms) for time_ms in times])
        return path

    return write


class Clock:
    """A clock that only the test sets, in ms since the epoch."""

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


class Query:
    """A query driven as by Spark: offsets go through JSON text, and a batch ends before the next is planned."""

    def __init__(
        self,
        path: Path,
        checkpoint: str | None = None,
        available_now: bool = False,
        now_ms: int = NOW_MS,
        **given: str,
    ) -> None:
        self.clock = Clock(now_ms)
        options = {"path": str(path), "subscribe": "orders"} | given
        if {"assign", "subscribePattern"} & given.keys():
            del options["subscribe"]
        self.options = parse_options(options, now_ms)
        settings = ReadSettings(COLUMNS, False, 64 << 20, self.options.fail_on_data_loss)
        self.hand_over = HandOver(self.options.hand_over_bytes, settings, _SimpleStreamReaderWrapper)
        hand_over = self.hand_over if "handOverBytes" in given else None
        self.reader = RmqStreamReader(self.options, settings, self.clock, hand_over=hand_over)
        if available_now:
            self.reader.prepareForTriggerAvailableNow()
        self.committed = checkpoint or json.dumps(self.reader.initialOffset())
        self.limit: ReadLimit = self.reader.getDefaultReadLimit()

    def plan(self) -> str:
        """Return the text of the next end offset, which may be that of the start."""
        return json.dumps(self.reader.latestOffset(json.loads(self.committed), self.limit))

    def rows(self, start: str, end: str) -> Rows:
        """Return the rows of a batch, read by a task's copy of the reader."""
        task = pickle.loads(pickle.dumps(self.reader))
        rows = []
        for partition in self.reader.partitions(json.loads(start), json.loads(end)):
            for batch in task.read(pickle.loads(pickle.dumps(partition))):
                rows += [(row["queueId"], row["queueOffset"]) for row in batch.to_pylist()]
        return rows

    def trigger(self) -> Rows | None:
        """Run one micro-batch if there is one; return its rows, None without one."""
        end = self.plan()
        if end == self.committed:
            return None
        rows = self.rows(self.committed, end)
        self.committed = end
        return rows

    def offset(self) -> StreamOffset:
        """Return the offset that was committed last."""
        return decode_offset(json.loads(self.committed))

    def drain(self, at_most: int = 100) -> list[Rows]:
        """Run micro-batches until there is none, and return the rows of each."""
        batches = []
        while (rows := self.trigger()) is not None:
            batches.append(rows)
            assert len(batches) < at_most, "does not come to rest"
        return batches


@pytest.fixture
def query_on() -> type[Query]:
    """`query_on(path, **options)`: one run of a stream over a store, by default of the topic orders."""
    return Query
