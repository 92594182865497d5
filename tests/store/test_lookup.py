"""Messages by key: many keys for one look at the index, which grows meanwhile."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rmq_spark.store import StoreReader, open_reader
from rmq_spark.store.disk import files
from rmq_spark.store.format import index_file
from rmq_spark.store.format.index_file import IndexFileWriter, IndexHeader, IndexShape
from rmq_spark.store.format.java import index_key_hash
from rmq_spark.store.format.properties import parse
from rmq_spark.store.testing.row_twin import walk_records
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store
from rmq_spark.store.units import QueueKey

QUEUE = QueueKey("T", 0)
SHAPE = IndexShape(slot_count=7, unit_count=21)
COUNT = 40


class GrowingIndex:
    """A store of messages with a key each, and an index that knows the first ones; files hold 20 keys."""

    def __init__(self, store: Path) -> None:
        self.path = store
        content = [SampleMessage("T", 0, b"x", keys=f"k{number}") for number in range(COUNT)]
        build_store(store, content)
        self._records = list(walk_records(store))
        self._buffers: list[np.ndarray] = []
        self._writer: IndexFileWriter | None = None
        (store / "index").mkdir()

    def file(self, number: int) -> Path:
        """Return the path of an index file: they are numbered from 0."""
        return self.path / "index" / f"{20240101000000000 + number}"

    def know(self, count: int) -> None:
        """Add the keys of the first `count` messages that are not there yet, in place as a broker does."""
        done = sum(IndexFileWriter(buffer, SHAPE).header.next_unit - 1 for buffer in self._buffers)
        for number in range(done, count):
            if self._writer is None or self._writer.is_full:
                before = self._writer.header if self._writer else IndexHeader()
                self._buffers.append(np.zeros(SHAPE.file_bytes, np.uint8))
                self._writer = IndexFileWriter(self._buffers[-1], SHAPE, before)
            record = self._records[number]
            assert self._writer.put(index_key_hash(f"T#k{number}"), record.physical_offset, record.store_timestamp)
        for number, buffer in enumerate(self._buffers):
            with self.file(number).open("r+b" if self.file(number).exists() else "wb") as file:
                file.write(buffer.tobytes())


@pytest.fixture
def index(tmp_path: Path) -> GrowingIndex:
    return GrowingIndex(tmp_path / "s")


@pytest.fixture
def reader(index: GrowingIndex) -> Iterator[StoreReader]:
    with open_reader(str(index.path)) as reader:
        yield reader


def found(reader: StoreReader) -> list[int]:
    """Return the messages that their own key leads to; no key leads to another's."""
    hits = {number: reader.find_key("T", f"k{number}") for number in range(COUNT)}
    assert all(hit in ([], [(QUEUE, number)]) for number, hit in hits.items())
    return [number for number, hit in hits.items() if hit]


def test_many_keys_open_each_index_file_once_and_learn_its_shape_once(
    index: GrowingIndex, reader: StoreReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.know(35)
    opened, learned = [], []
    init, learn = files.OpenFile.__init__, index_file.learn_shape
    monkeypatch.setattr(files.OpenFile, "__init__", lambda self, path: (opened.append(path), init(self, path))[1])
    monkeypatch.setattr(index_file, "learn_shape", lambda *given: (learned.append(1), learn(*given))[1])
    assert found(reader) == list(range(35))
    assert [path for path in opened if "/index/" in path] == [str(index.file(0)), str(index.file(1))]
    assert len(learned) == 2


def test_keys_that_come_meanwhile_are_found_in_old_and_new_files(index: GrowingIndex, reader: StoreReader) -> None:
    for count in (0, 1, 2, 19, 20, 21, 40):
        index.know(count)
        assert found(reader) == list(range(count)), count


def test_keys_of_a_file_that_retention_took_are_not_found(index: GrowingIndex, reader: StoreReader) -> None:
    index.know(40)
    assert len(found(reader)) == 40
    index.file(0).unlink()
    assert found(reader) == list(range(20, 40))


def test_index_files_that_were_closed_are_opened_again(index: GrowingIndex, reader: StoreReader) -> None:
    index.know(10)
    assert len(found(reader)) == 10
    reader._index.close()
    assert len(found(reader)) == 10


def test_the_id_of_an_inner_batch_finds_all_its_messages(golden: Path) -> None:
    """The id that its sender was told is a property of the record around it, and of no message."""
    found = 0
    with open_reader(str(golden / "demo")) as reader:
        for record in walk_records(golden / "demo"):
            properties = parse(record.properties)
            if "INNER_NUM" in properties:
                begin = int(properties["INNER_BASE"])
                queue = QueueKey(record.topic.decode(), record.queue_id)
                expected = [(queue, begin + number) for number in range(int(properties["INNER_NUM"]))]
                assert reader.find_key(queue.topic, properties["UNIQ_KEY"]) == expected
                assert reader.find_message_id(properties["UNIQ_KEY"], [queue.topic]) == expected
                found += 1
    assert found > 3
