"""StoreReader after close: every method raises an error and opens no file."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import rmq_spark
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.model import QueueKey

QUEUE = QueueKey("T", 0)
COUNT = 8
USES: dict[str, Callable[[StoreReader], object]] = {
    "with": lambda reader: reader.__enter__(),
    "store_id": lambda reader: reader.store_id(),
    "topics": lambda reader: reader.topics(),
    "queues": lambda reader: reader.queues("T"),
    "refresh": lambda reader: reader.refresh(),
    "bounds": lambda reader: reader.bounds(QUEUE),
    "offset_at_time": lambda reader: reader.offset_at_time(QUEUE, 0),
    "record_bytes": lambda reader: reader.record_bytes(QUEUE, 0, COUNT),
    "offset_within_bytes": lambda reader: reader.offset_within_bytes(QUEUE, 0, COUNT, 1),
    "proof": lambda reader: reader.proof(QUEUE, 0),
    "find_key": lambda reader: reader.find_key("T", "k"),
    "find_message_id": lambda reader: reader.find_message_id("0" * 32, ["T"]),
    "read": lambda reader: list(reader.read(QUEUE, 0, COUNT, ["body"])),
}


@pytest.fixture
def reader(tmp_path: Path) -> StoreReader:
    """A refreshed reader of a store with a few messages, which take several batches."""
    with rmq_spark.open_store(tmp_path / "s", segment_bytes=1 << 23) as store:
        for _ in range(COUNT):
            store.send("T", os.urandom(1 << 20) * 3, keys="k", queue_id=0)
    reader = rmq_spark.open_reader(tmp_path / "s")
    reader.refresh()
    return reader


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("use", USES)
def test_store_reader_raises_after_close(reader: StoreReader, use: str) -> None:
    USES[use](reader)
    reader.close()
    before = open_files()
    with pytest.raises(rmq_spark.StoreError, match=r'the reader of the store at ".*/s" was closed. Open another one'):
        USES[use](reader)
    assert open_files() == before
    reader.close()


def test_store_reader_read_raises_after_close(reader: StoreReader) -> None:
    with reader:
        batches = reader.read(QUEUE, 0, COUNT, ["body"])
        first = next(batches)
    assert 0 < first.num_rows < COUNT
    before = open_files()
    with pytest.raises(rmq_spark.StoreError, match="was closed"):
        next(batches)
    assert open_files() <= before
