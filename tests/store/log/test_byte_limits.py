"""RangeStatistics: record_bytes and offset_within_bytes are exact, and do not read a whole queue."""

from pathlib import Path

import pytest

from rmq_spark.store import open_reader
from rmq_spark.store.log.consume_queue import EntryFiles
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store, build_uniform_store

QUEUE = QueueKey("T", 0)
COUNT = 30_000


@pytest.fixture
def units_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of entries that each call read; clear it to restart."""
    counts: list[int] = []
    read = EntryFiles.read

    def counted(run: EntryFiles, begin: int, end: int) -> object:
        counts.append(end - begin)
        return read(run, begin, end)

    monkeypatch.setattr(EntryFiles, "read", counted)
    return counts


@pytest.mark.parametrize("begin", [0, 17, COUNT - 5])
def test_offset_within_bytes_reads_few_entries_for_a_small_limit(
    tmp_path: Path, units_read: list[int], begin: int
) -> None:
    build_uniform_store(tmp_path / "s", topic="T", queue_count=1, message_count=COUNT, segment_bytes=1 << 24)
    with open_reader(str(tmp_path / "s")) as reader:
        size = reader.record_bytes(QUEUE, 0, 1)
        for count in (0, 1, 3):
            units_read.clear()
            assert reader.offset_within_bytes(QUEUE, begin, COUNT, count * size + size // 2) == begin + count
            assert sum(units_read) < 200
        units_read.clear()
        assert reader.record_bytes(QUEUE, begin, COUNT) == (COUNT - begin) * size
        assert len(units_read) < 20


def test_record_bytes_and_offset_within_bytes_are_exact(tmp_path: Path) -> None:
    sizes = [100 + number * 7 % 90 for number in range(1500)]
    build_store(tmp_path / "s", [SampleMessage("T", 0, bytes(size)) for size in sizes], queue_file_bytes=40_000)
    with open_reader(str(tmp_path / "s")) as reader:
        fixed = reader.record_bytes(QUEUE, 0, 1) - sizes[0]
        for begin, end in ((0, 1500), (3, 130), (0, 128), (0, 129), (127, 1160), (1499, 1500), (5, 5)):
            total = sum(sizes[begin:end]) + fixed * (end - begin)
            assert reader.record_bytes(QUEUE, begin, end) == total
            assert reader.offset_within_bytes(QUEUE, begin, 1500, total) == end
            assert reader.offset_within_bytes(QUEUE, begin, end, max(total - 1, 0)) == max(end - 1, begin)
