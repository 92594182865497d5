"""Crash tests of `repair` and `import_parquet`: after any crash they resume, and no message is lost or duplicated."""

import contextlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
import pytest

import rmq_spark
from rmq_spark import DamageError, export_parquet, import_parquet, repair
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.testing.crash_disk import CrashDisk
from rmq_spark.store.tools import import_parquet as parquet_import
from rmq_spark.store.tools import import_source
from rmq_spark.store.tools import repair as repairing

SIZES = FileSizes(4096, 400, 460, IndexShape(7, 40))
POINTS_IN_DEFAULT_SUITE = 12
MESSAGES = 60

Rows = dict[str, list[dict[str, object]]]
CrashEverywhere = Callable[[CrashDisk, Iterable[int], int, Callable[[Path], None]], None]


def make(path: Path) -> None:
    with StoreWriter(str(path), Disk(), WriterSettings(sizes=SIZES), lambda: 1, time.sleep) as writer:
        writer.close()


def fill(path: Path) -> None:
    make(path)
    with rmq_spark.open_store(path, queues=2) as store:
        for topic in ("a", "b"):
            store.create_topic(topic, 2)
        store.send_many(
            pa.table(
                {
                    "topic": ["ab"[number % 2] for number in range(MESSAGES)],
                    "body": [b"%05d" % number * 9 for number in range(MESSAGES)],
                    "keys": [f"k{number}" for number in range(MESSAGES)],
                    "queueId": pa.array([number // 2 % 2 for number in range(MESSAGES)], pa.int32()),
                }
            )
        )


def rows_of(path: Path, columns: list[str]) -> Rows:
    with rmq_spark.open_reader(path) as reader:
        reader.refresh()
        found: Rows = {}
        for topic in reader.topics():
            for key in reader.queues(topic):
                held = reader.bounds(key)
                batches = reader.read(key, held.min_offset, held.max_offset, columns)
                found[str(key)] = [row for batch in batches for row in batch.to_pylist()]
        return {key: rows for key, rows in found.items() if rows}


def spoil(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x55
    path.write_bytes(data)


def repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[CrashDisk, Callable[[Path], None]]:
    """Repair damage of entries, the index and topics.json; return the disk, and the check to run after a crash."""
    path = tmp_path / "live/s"
    fill(path)
    columns = ["queueOffset", "commitLogOffset", "body"]
    before = rows_of(path, columns)
    spoil(path / "consumequeue/a/0/00000000000000000000", 45)
    shutil.rmtree(path / "consumequeue/b/1")
    spoil(next((path / "index").iterdir()), 40 + 28 + 28)
    (path / "config/topics.json").write_bytes(b'{"topicConfigTable":{"a"')
    disk = CrashDisk(path.parent)
    with monkeypatch.context() as patch:
        patch.setattr(repairing, "Disk", lambda: disk)
        assert repair(path).report.is_healthy
    assert rows_of(path, columns) == before

    def go_on(image: Path) -> None:
        report = repair(image).report
        assert report.is_healthy, str(report)
        assert rows_of(image, columns) == before
        assert rmq_spark.plan_repair(image).is_empty

    return disk, go_on


def rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[CrashDisk, Callable[[Path], None]]:
    """Repair a queue with a short file; return the disk, and the check of readers and writers after a crash."""
    path = tmp_path / "live/s"
    fill(path)
    columns = ["queueOffset", "commitLogOffset", "body"]
    before = rows_of(path, columns)
    os.truncate(path / "consumequeue/a/0/00000000000000000000", 5 * 20)
    with pytest.raises(DamageError):
        rows_of(path, columns)
    disk = CrashDisk(path.parent)
    with monkeypatch.context() as patch:
        patch.setattr(repairing, "Disk", lambda: disk)
        assert repair(path).report.is_healthy
    assert rows_of(path, columns) == before

    def is_complete_or_refused(image: Path) -> bool:
        try:
            found = rows_of(image, columns)
        except DamageError:
            return False
        assert {key: rows[: len(before[key])] for key, rows in found.items()} == before, "a reader misses messages"
        return True

    def go_on(image: Path) -> None:
        is_complete_or_refused(image)
        is_noted = (image / "rmq/rebuild").exists()
        # Without `rmq/rebuild` the repair has not begun: a writer may refuse the store after a power failure.
        may_refuse = contextlib.nullcontext() if is_noted else contextlib.suppress(DamageError)
        with may_refuse, rmq_spark.open_store(image) as store:
            store.send("b", b"later", queue_id=0)
        assert is_complete_or_refused(image) or not is_noted, "the writer did not finish the repair"
        assert repair(image).report.is_healthy
        assert is_complete_or_refused(image)
        with rmq_spark.open_store(image) as store:
            assert store.send("a", b"later", queue_id=0).queue_offset == len(before["a/0"])

    return disk, go_on


def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[CrashDisk, Callable[[Path], None]]:
    """Import a file in three commits; return the disk, and the check to run after a crash."""
    fill(tmp_path / "source")
    file = tmp_path / "x.parquet"
    export_parquet(tmp_path / "source", file, row_group_rows=10)
    columns = ["queueOffset", "body", "keys"]
    before = rows_of(tmp_path / "source", columns)
    monkeypatch.setattr(import_source, "_PART_ROWS", 20)
    path = tmp_path / "live/s"
    path.parent.mkdir()
    make(path)
    disk = CrashDisk(path.parent)
    with monkeypatch.context() as patch:
        patch.setattr(parquet_import, "Disk", lambda: disk)
        assert import_parquet(path, file).messages == MESSAGES
    assert rows_of(path, columns) == before

    def go_on(image: Path) -> None:
        done = import_parquet(image, file)
        assert done.messages + done.skipped == MESSAGES
        rows = rows_of(image, columns)
        bodies = Counter(row["body"] for held in rows.values() for row in held)
        assert max(bodies.values()) == 1, "no message is duplicated"
        assert rows == before
        rmq_spark.close(image)
        assert rmq_spark.check(image).count("damage") == 0
        report = repair(image).report  # a kill may have torn one slot of the watermark
        assert report.is_healthy, str(report)
        assert rows_of(image, columns) == before

    return disk, go_on


@pytest.mark.slow
@pytest.mark.parametrize("work", [repaired, rebuilt, imported])
def test_repair_survives_a_crash_at_some_system_calls(
    work: Callable[..., tuple[CrashDisk, Callable[[Path], None]]],
    crash_everywhere: CrashEverywhere,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk, go_on = work(tmp_path, monkeypatch)
    step = max(disk.effect_count // POINTS_IN_DEFAULT_SUITE, 1)
    crash_everywhere(disk, range(0, disk.effect_count + 1, step), 1, go_on)


@pytest.mark.torture
@pytest.mark.parametrize("work", [repaired, rebuilt, imported])
def test_repair_survives_a_crash_at_every_system_call(
    work: Callable[..., tuple[CrashDisk, Callable[[Path], None]]],
    crash_everywhere: CrashEverywhere,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk, go_on = work(tmp_path, monkeypatch)
    crash_everywhere(disk, range(disk.effect_count + 1), 2, go_on)
