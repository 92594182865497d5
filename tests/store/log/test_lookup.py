"""Search by key and id: messages found by the index, and those read because it does not cover them."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.row_twin import walk_records

from rmq_spark.store import StoreReader, open_reader
from rmq_spark.store.disk import files
from rmq_spark.store.filter.row_filter import LOOKUP_COLUMNS, KeyLookup
from rmq_spark.store.format import index_file
from rmq_spark.store.format.index_file import IndexFileWriter, IndexHeader, IndexShape
from rmq_spark.store.format.java import index_key_hash
from rmq_spark.store.format.properties import parse
from rmq_spark.store.log import key_search as index_reach
from rmq_spark.store.log import key_search as message_search
from rmq_spark.store.log.key_search import QueueRange
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

QUEUE = QueueKey("T", 0)
SHAPE = IndexShape(slot_count=7, unit_count=21)
COUNT = 40


class GrowingIndex:
    """A store of messages with one key each, and an index that has the keys of the first ones; files hold 20 keys."""

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

    def skip(self, count: int) -> None:
        """Skip the next messages: the broker ran without an index."""
        done = sum(IndexFileWriter(buffer, SHAPE).header.next_unit - 1 for buffer in self._buffers)
        del self._records[done : done + count]

    def know(self, count: int) -> None:
        """Add the missing keys of the first `count` messages, in place as a broker does."""
        done = sum(IndexFileWriter(buffer, SHAPE).header.next_unit - 1 for buffer in self._buffers)
        for number in range(done, count):
            if self._writer is None or self._writer.is_full:
                before = self._writer.header if self._writer else IndexHeader()
                self._buffers.append(np.zeros(SHAPE.file_bytes, np.uint8))
                self._writer = IndexFileWriter(self._buffers[-1], SHAPE, before)
            record = self._records[number]
            (word,) = filter(None, message_search.keys_of(record))
            assert self._writer.put(index_key_hash(f"T#{word}"), record.physical_offset, record.store_timestamp)
        for number, buffer in enumerate(self._buffers):
            with self.file(number).open("r+b" if self.file(number).exists() else "wb") as file:
                file.write(buffer.tobytes())


def put_keys(store: Path, shape: IndexShape) -> None:
    """Write the index that a broker would have written, in one file."""
    buffer = np.zeros(shape.file_bytes, np.uint8)
    writer = IndexFileWriter(buffer, shape)
    for record in walk_records(store):
        for word in filter(None, message_search.keys_of(record)):
            assert writer.put(
                index_key_hash(f"{record.topic.decode()}#{word}"), record.physical_offset, record.store_timestamp
            )
    (store / "index").mkdir()
    (store / "index" / f"{20240101000000000}").write_bytes(buffer.tobytes())


@pytest.fixture
def index(tmp_path: Path) -> GrowingIndex:
    return GrowingIndex(tmp_path / "s")


@pytest.fixture
def reader(index: GrowingIndex) -> Iterator[StoreReader]:
    with open_reader(str(index.path)) as reader:
        yield reader


ALL = list(range(COUNT))
SPAN = QueueRange(QUEUE, 0, COUNT)


def found(reader: StoreReader) -> list[int]:
    """Return the messages that are found by their keys. No key finds another message."""
    hits = {number: reader.find_key("T", f"k{number}") for number in range(COUNT)}
    assert all(hit in ([], [(QUEUE, number)]) for number, hit in hits.items())
    return [number for number, hit in hits.items() if hit]


def unknown(reader: StoreReader, key: str = "k7") -> list[int]:
    """Return the messages that the index does not cover for the key."""
    answer = reader.search([SPAN], KeyLookup(keys=(key,)))
    return [number for span in answer.unknown for number in range(span.begin, span.end)]


def why(reader: StoreReader, key: str = "k7") -> str:
    return "; ".join(reader.search([SPAN], KeyLookup(keys=(key,))).why)


def test_find_key_opens_each_index_file_and_learns_its_shape_once(
    index: GrowingIndex, reader: StoreReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.know(35)
    opened, learned = [], []
    init, learn = files.OpenFile.__init__, index_file.learn_shape
    monkeypatch.setattr(files.OpenFile, "__init__", lambda self, path: (opened.append(path), init(self, path))[1])
    monkeypatch.setattr(index_file, "learn_shape", lambda *given: (learned.append(1), learn(*given))[1])
    assert found(reader) == ALL
    assert [path for path in opened if "/index/" in path] == [str(index.file(0)), str(index.file(1))]
    assert len(learned) == 2


@pytest.mark.parametrize(
    ("known", "read"),
    [
        (0, ALL),
        (1, ALL),
        (19, [0, *range(18, COUNT)]),
        (20, [0, *range(19, COUNT)]),
        (30, [0, 19, 20, *range(29, COUNT)]),
        (40, [0, 19, 20, 39]),
    ],
)
def test_find_key_reads_new_messages_and_the_ends_of_index_files(
    index: GrowingIndex, reader: StoreReader, known: int, read: list[int]
) -> None:
    """Keys of a file's first and last message may also be in a file that is missing."""
    index.know(known)
    assert unknown(reader) == read
    assert found(reader) == ALL


def test_find_key_finds_new_keys_in_old_and_new_files(index: GrowingIndex, reader: StoreReader) -> None:
    for count in (0, 1, 2, 19, 20, 21, 40):
        index.know(count)
        assert found(reader) == ALL, count


def test_find_key_reads_the_messages_of_a_missing_index_file(index: GrowingIndex, reader: StoreReader) -> None:
    index.know(40)
    assert unknown(reader) == [0, 19, 20, 39]
    index.file(0).unlink()
    assert unknown(reader) == [*range(21), 39]
    assert found(reader) == ALL


def test_find_key_without_an_index_reads_all_messages_and_logs_it(
    index: GrowingIndex, reader: StoreReader, caplog: pytest.LogCaptureFixture
) -> None:
    assert reader.find_key("T", "k7") == [(QUEUE, 7)]
    (record,) = caplog.records
    assert "40 messages, which are read instead (" in record.message
    assert record.message.endswith("the store has no index file")


def test_find_key_logs_nothing_if_only_ends_of_files_are_read(
    index: GrowingIndex, reader: StoreReader, caplog: pytest.LogCaptureFixture
) -> None:
    index.know(40)
    assert reader.find_key("T", "k7") == [(QUEUE, 7)]
    assert not caplog.records


def corrupt(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


UNITS = SHAPE.unit_position(0)


@pytest.mark.parametrize(
    ("position", "data", "told"),
    [
        (0, bytes(40), ""),  # a header of zeros: an empty file
        (16, (12).to_bytes(8, "big"), "the header has"),  # its first physical offset
        (24, (1 << 40).to_bytes(8, "big"), "the header has"),  # its last physical offset
        (36, (5).to_bytes(4, "big"), "the header has"),  # the number of entries
        (UNITS + 20 * 9, bytes(20), "entry 9"),
        (UNITS + 20 * 9 + 16, (9).to_bytes(4, "big"), "entry 9"),  # a circular chain
        (40, bytes(4 * SHAPE.slot_count), "entry 1 "),
        (UNITS, b"\xff" * 20 * 21, "the header has"),
    ],
)
def test_find_key_reads_the_messages_of_a_damaged_index_file(
    index: GrowingIndex, tmp_path: Path, position: int, data: bytes, told: str
) -> None:
    index.know(40)
    corrupt(index.file(0), position, data)
    with open_reader(str(index.path)) as reader:
        assert unknown(reader) == [*range(21), 39]
        assert told in why(reader)
        assert found(reader) == ALL


def test_find_key_reads_the_messages_of_a_truncated_index_file(index: GrowingIndex) -> None:
    index.know(40)
    with index.file(1).open("r+b") as file:
        file.truncate(SHAPE.file_bytes - 100)
    with open_reader(str(index.path)) as reader:
        assert unknown(reader) == [0, *range(19, 40)]
        assert found(reader) == ALL


def test_find_key_detects_a_broken_chain_between_samples(index: GrowingIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_reach, "_SAMPLE_ENTRIES", 2)
    monkeypatch.setattr(index_file, "_SAMPLE_UNITS", 2)
    monkeypatch.setattr(message_search, "_SAMPLE_RECORDS", 0)
    index.know(40)
    corrupt(index.file(0), UNITS + 20 * 9, bytes(20))
    with open_reader(str(index.path)) as reader:
        assert found(reader) == ALL
        told = {number: why(reader, f"k{number}") for number in range(COUNT)}
    assert any("entry 9 has the hash 0" in one for one in told.values())
    assert not all(told.values()), "keys of other slots need no unit 9"


def test_find_key_detects_a_time_without_an_index_within_a_file(index: GrowingIndex) -> None:
    """A broker that is started without messageIndexEnable, and later with it again, continues the same file."""
    index.know(8)
    index.skip(10)
    index.know(20)
    with open_reader(str(index.path)) as reader:
        assert unknown(reader) == ALL
        assert "it was off for a while" in why(reader)
        assert found(reader) == ALL


def test_find_key_after_a_crash_trusts_files_that_the_checkpoint_covers(index: GrowingIndex) -> None:
    index.know(40)
    (index.path / "abort").write_bytes(b"")
    with open_reader(str(index.path)) as reader:
        assert "the store was not closed" in why(reader)
        assert unknown(reader) == ALL
        assert found(reader) == ALL


def test_index_folder_opens_closed_files_again(index: GrowingIndex, reader: StoreReader) -> None:
    index.know(10)
    assert len(found(reader)) == COUNT
    reader._index.close()
    assert len(found(reader)) == COUNT


def test_find_key_distinguishes_keys_with_the_same_hash(tmp_path: Path) -> None:
    content = [SampleMessage("T", 0, b"x", keys=key) for key in ("Aa", "BB", "Aa x", "x BB", "AaAa", "BBBB")]
    build_store(tmp_path, content)
    put_keys(tmp_path, SHAPE)
    with open_reader(str(tmp_path)) as reader:
        assert index_key_hash("T#Aa") == index_key_hash("T#BB")
        assert [offset for _, offset in reader.find_key("T", "Aa")] == [0, 2]
        assert [offset for _, offset in reader.find_key("T", "BB")] == [1, 3]
        assert reader.find_key("T", "A") == reader.find_key("T", "") == []
        assert [offset for _, offset in reader.find_key("T", "x")] == [2, 3]


def test_search_in_more_queues_than_files_may_be_open(tmp_path: Path) -> None:
    queues = 60
    build_store(tmp_path, [SampleMessage("T", queue_id, b"x", keys="k") for queue_id in range(queues)])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open_reader(str(tmp_path)) as reader:
        ranges = [QueueRange(QueueKey("T", queue_id), 0, 1) for queue_id in range(queues)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + queues // 2, hard))
        try:
            assert reader.search(ranges, KeyLookup(("k",), ())).unknown == ranges, "there is no index"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_find_key_limits_times_to_the_millisecond(index: GrowingIndex, reader: StoreReader) -> None:
    index.know(40)
    times = [reader.proof(QUEUE, number).store_time_ms for number in range(COUNT)]
    for number in range(COUNT):
        key, stored = f"k{number}", times[number]
        assert reader.find_key("T", key, stored, stored) == [(QUEUE, number)]
        assert reader.find_key("T", key, stored + 1) == reader.find_key("T", key, 0, stored - 1) == []


def test_find_key_finds_a_retried_message_in_the_retry_topic(tmp_path: Path) -> None:
    retry = SampleMessage("%RETRY%g", 0, b"x", keys="k", properties={"RETRY_TOPIC": "T"})
    build_store(tmp_path, [SampleMessage("T", 0, b"x", keys="k"), retry])
    put_keys(tmp_path, SHAPE)
    with open_reader(str(tmp_path)) as reader:
        assert reader.find_key("T", "k") == [(QUEUE, 0)]
        assert reader.find_key("%RETRY%g", "k") == [(QueueKey("%RETRY%g", 0), 0)]


def test_find_key_and_message_id_differ_in_messages_that_are_read(tmp_path: Path) -> None:
    content = [
        SampleMessage("T", 0, b"x", keys="a b"),
        SampleMessage("T", 0, b"x", keys="a", properties={"UNIQ_KEY": "U1"}),
        SampleMessage("T", 0, b"x"),
        SampleMessage("T", 0, b"x", keys="U1"),
    ]
    build_store(tmp_path, content)
    with open_reader(str(tmp_path)) as reader:
        (rows,) = reader.read(QUEUE, 0, 4, ("msgId", "offsetMsgId"))
        place = rows.column("offsetMsgId").to_pylist()[2]
        assert [offset for _, offset in reader.find_key("T", "a")] == [0, 1]
        assert [offset for _, offset in reader.find_key("T", "b")] == [0]
        assert reader.find_key("T", "a b") == reader.find_key("T", place) == []
        assert [offset for _, offset in reader.find_key("T", "U1")] == [1, 3]
        assert [offset for _, offset in reader.find_message_id("U1", ["T"])] == [1]
        assert [offset for _, offset in reader.find_message_id(place, ["T"])] == [2]
        assert [offset for _, offset in reader.find_message_id(place.lower(), ["T"])] == [2]
        assert reader.find_message_id(place, ["other"]) == []


def test_find_message_id_of_an_inner_batch_finds_all_its_messages(golden: Path) -> None:
    """The id that its sender got is a property of the outer record, not of a message."""
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


@pytest.mark.parametrize("name", ["basic", "demo", "crashed", "timer", "broker497", "livekill533"])
def test_find_key_and_message_id_find_all_messages_of_brokers_stores(golden: Path, name: str) -> None:
    """Includes retried, restored and committed messages, and the index of a killed broker."""
    with open_reader(str(golden / name)) as reader:
        reader.refresh()
        having: dict[tuple[str, str], list[tuple[QueueKey, int]]] = {}
        for topic in reader.topics():
            for queue in reader.queues(topic):
                held = reader.bounds(queue)
                for batch in reader.read(queue, held.min_offset, held.max_offset, ("queueOffset", *LOOKUP_COLUMNS)):
                    for row in batch.to_pylist():
                        own = row["msgId"] if row["msgId"] != row["offsetMsgId"] else ""
                        for word in {own, *(row["keys"] or "").split(" ")} - {""}:
                            having.setdefault((topic, word), []).append((queue, row["queueOffset"]))
        chosen = sorted(having)[:: max(len(having) // 40, 1)]
        assert chosen
        for topic, word in chosen:
            found = reader.find_key(topic, word)
            # The id of a whole inner batch finds its messages, which do not carry it.
            assert [hit for hit in found if hit in having[topic, word]] == sorted(having[topic, word]), (topic, word)


def test_find_key_ignores_a_record_after_the_end_of_the_log(tmp_path) -> None:
    build_store(tmp_path / "s", [SampleMessage("T", 0, b"x", keys=f"k{number}") for number in range(4)])
    *_, second, _third, last = walk_records(tmp_path / "s")
    (segment,) = (tmp_path / "s" / "commitlog").iterdir()
    content, place = bytearray(segment.read_bytes()), last.physical_offset + last.total_size + 40
    # A broker's truncation leaves this after the end: a complete record whose queue offset was reused.
    stale = bytearray(content[second.physical_offset : second.physical_offset + second.total_size])
    stale[28:36] = place.to_bytes(8, "big")
    content[place : place + len(stale)] = stale
    segment.write_bytes(content)
    with open_reader(tmp_path / "s") as store:
        offset_id = next(store.read(QUEUE, 1, 2, ["offsetMsgId"])).column(0)[0].as_py()
        assert store.find_message_id(offset_id, ["T"]) == [(QUEUE, 1)]
        assert store.find_message_id(f"{offset_id[:16]}{place:016X}", ["T"]) == []
