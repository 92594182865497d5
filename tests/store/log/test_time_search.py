"""Offset by time against RocketMQ's own answers: consumption vectors of the 4.9 and 5.x rules."""

import os
from pathlib import Path

import pytest

from rmq_spark.store import open_reader
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

QUEUE = QueueKey("T", 0)
TENS = [10 * n for n in range(1, 11)]
# store times, requested time, 4.9, 5.x LOWER, 5.x UPPER
VECTORS = [
    ([1000, 1010, 1020, 1030, 1040], 999, 0, 0, 0),
    ([1000, 1010, 1020, 1030, 1040], 1000, 0, 0, 0),
    ([1000, 1010, 1020, 1030, 1040], 1014, 1, 2, 1),
    ([1000, 1010, 1020, 1030, 1040], 1015, 1, 2, 1),
    ([1000, 1010, 1020, 1030, 1040], 1016, 2, 2, 1),
    ([1000, 1010, 1020, 1030, 1040], 1040, 4, 4, 4),
    ([1000, 1010, 1020, 1030, 1040], 1041, 4, 5, 4),
    ([1000, 1000, 1000, 2000, 2000], 1000, 2, 0, 2),
    ([1000, 1000, 1000, 2000, 2000], 1400, 2, 3, 2),
    ([1000, 1000, 1000, 2000, 2000], 1501, 3, 3, 2),
    ([1000, 1000, 1000, 2000, 2000], 2000, 3, 3, 4),
    ([1000, 1000, 1000, 2000, 2000], 2001, 4, 5, 4),
    ([1000, 1000, 1000, 1000], 1000, 1, 0, 3),
    ([5], 4, 0, 0, 0),
    ([5], 6, 0, 1, 0),
    (TENS, 55, 4, 5, 4),
    (TENS, 96, 9, 9, 8),
]


def store_with(times: list[int], path: Path, **sizes: int) -> str:
    build_store(path, [SampleMessage("T", 0, b"x", store_timestamp=time) for time in times], **sizes)
    return str(path)


@pytest.mark.parametrize(("times", "asked", "nearest", "lower", "upper"), VECTORS)
def test_offset_at_time_returns_the_offset_of_rocketmq(
    times: list[int], asked: int, nearest: int, lower: int, upper: int, tmp_path: Path
) -> None:
    with open_reader(store_with(times, tmp_path / "store")) as reader:
        found = {rule: reader.offset_at_time(QUEUE, asked, rule) for rule in ("nearest", "lower", "upper")}
    assert found == {"nearest": nearest, "lower": lower, "upper": upper}


def test_offset_at_time_nearest_searches_only_the_file_chosen_by_mtime(tmp_path: Path) -> None:
    path = store_with(TENS, tmp_path / "store", queue_file_bytes=100)  # five entries per file
    folder = Path(path, "consumequeue", "T", "0")
    first, second = sorted(folder.iterdir())
    os.utime(first, (0.2, 0.2))  # 200 ms: the first file's mtime is after every requested time
    with open_reader(path) as reader:
        assert reader.offset_at_time(QUEUE, 95, "nearest") == 4
        os.utime(first, (0.09, 0.09))
        os.utime(second, (0.2, 0.2))
        assert reader.offset_at_time(QUEUE, 95, "nearest") == 8


def test_offset_at_time_of_an_empty_queue_is_0(golden: Path) -> None:
    with open_reader(str(golden / "demo")) as reader:
        queue = reader.queues("BenchmarkTest")[0]
        assert [reader.offset_at_time(queue, 5, rule) for rule in ("lower", "upper", "nearest")] == [0, 0, 0]
