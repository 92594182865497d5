"""Tests of `repair` if records and entries differ: it rebuilds wrong entries, and leaves damaged records to people."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import rmq_spark
from rmq_spark import check, plan_repair, repair
from rmq_spark.store.format.consume_queue_entry import QUEUE_UNIT
from rmq_spark.store.format.file_names import segment_name
from rmq_spark.store.format.record import RECORD_HEAD, Record, decode_record
from rmq_spark.store.tools.finding import field_position

ENTRY = QUEUE_UNIT.itemsize
BODIES = [f"body{number}".encode() for number in range(31)]  # 16 in queue 0, 15 in queue 1, alternating
Damage = Callable[[Path], None]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with two queues of a topic. The last record of the log is of another topic."""
    path = tmp_path / "s"
    with rmq_spark.open_store(path, segment_bytes=1 << 16, queues=2) as messages:
        ids = pa.array([number % 2 for number in range(31)], pa.int32())
        messages.send_many(pa.table({"topic": ["orders"] * 31, "body": BODIES, "queueId": ids}))
        messages.send("other", "last")
    return path


def bodies_of(path: Path) -> dict[tuple[int, int], bytes]:
    found = {}
    with rmq_spark.open_reader(path) as reader:
        reader.refresh()
        for queue in reader.queues("orders"):
            bounds = reader.bounds(queue)
            for batch in reader.read(queue, bounds.min_offset, bounds.max_offset, ["queueOffset", "body"]):
                for row in batch.to_pylist():
                    found[queue.queue_id, row["queueOffset"]] = row["body"]
    return found


def queue_file(path: Path, queue_id: int) -> Path:
    return path / f"consumequeue/orders/{queue_id}" / segment_name(0)


def swap(path: Path, one: int, other: int) -> None:
    """Exchange two entries of queue 1."""
    data = bytearray(queue_file(path, 1).read_bytes())
    first, second = (data[number * ENTRY :][:ENTRY] for number in (one, other))
    data[one * ENTRY : one * ENTRY + ENTRY], data[other * ENTRY : other * ENTRY + ENTRY] = second, first
    queue_file(path, 1).write_bytes(data)


def _file_renamed(path: Path) -> None:
    queue_file(path, 1).rename(queue_file(path, 1).with_name(segment_name(ENTRY)))


def _entries_moved_down(path: Path) -> None:
    data = queue_file(path, 1).read_bytes()
    queue_file(path, 1).write_bytes(data[ENTRY:] + bytes(ENTRY))


def _files_swapped(path: Path) -> None:
    one, other = (queue_file(path, queue_id).read_bytes() for queue_id in range(2))
    queue_file(path, 0).write_bytes(other)
    queue_file(path, 1).write_bytes(one)


def _entries_swapped(path: Path) -> None:
    swap(path, 4, 9)


def _first_and_last_entry_swapped(path: Path) -> None:
    swap(path, 0, 14)


@pytest.mark.parametrize(
    "damage", [_file_renamed, _entries_moved_down, _files_swapped, _entries_swapped, _first_and_last_entry_swapped]
)
def test_repair_rebuilds_entries_that_name_other_records(damage: Damage, store: Path) -> None:
    before = bodies_of(store)
    assert sorted(before.values()) == sorted(BODIES)
    damage(store)
    plan = plan_repair(store)
    assert {finding.severity for finding in plan.report.findings} <= {"repairable", "note"}
    assert {step.action for step in plan.steps} == {"rebuild"}
    assert repair(plan).report.is_healthy
    assert bodies_of(store) == before


def change_header(path: Path, number: int, field: str, value: int) -> None:
    """Change a field in the header of the record with this number in the log."""
    (segment,) = (path / "commitlog").iterdir()
    data, begin = bytearray(segment.read_bytes()), 0
    for _ in range(number):
        record = decode_record(memoryview(data)[begin:])
        assert isinstance(record, Record)
        begin += record.total_size
    begin += field_position(RECORD_HEAD, field)
    size = RECORD_HEAD[field].itemsize
    assert data[begin : begin + size] != value.to_bytes(size, "big")
    data[begin : begin + size] = value.to_bytes(size, "big")
    segment.write_bytes(data)


@pytest.mark.parametrize(
    ("number", "field", "value"),
    [
        (9, "queue_offset", 5),  # another record of queue 1 has this queue offset
        (28, "queue_offset", 16),
        (29, "queue_offset", 0),  # the last record of queue 1; it looks like a restart of the queue
        (9, "queue_id", 0),
        (30, "queue_id", 1),  # the last record of queue 0; it fits the end of queue 1
    ],
)
def test_check_blames_a_record_with_a_changed_header(number: int, field: str, value: int, store: Path) -> None:
    change_header(store, number, field, value)
    assert any(
        finding.severity == "damage" and finding.area == "commitlog" and "header differs" in finding.what
        for finding in check(store).findings
    )
    assert all(step.action == "leave" for step in plan_repair(store).steps)
