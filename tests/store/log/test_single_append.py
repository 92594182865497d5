"""Appends of single messages to an open session: the same files as `WriteSession.append` writes, and fewer reads."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.single_samples import single_record

from rmq_spark.store import open_reader
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DiskFullError
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_state import read_watermark
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.crash_disk import CrashDisk
from rmq_spark.store.testing.disk_effects import Write
from rmq_spark.store.testing.failing_disk import FailingDisk
from rmq_spark.store.tools.check import check

SIZES = FileSizes(4096, 400, 10 * 46, IndexShape(7, 90))
QUEUES = 3
COUNT = 50
NOW_MS = 1_700_000_000_000


def writer(root: Path, disk: Disk | None = None, now_ms: Callable[[], int] = lambda: NOW_MS) -> StoreWriter:
    return StoreWriter(str(root), disk or Disk(), WriterSettings(sizes=SIZES), now_ms, time.sleep)


def contents(root: Path) -> dict[str, bytes]:
    """Return the files that a broker reads, by name."""
    kinds = ("commitlog", "consumequeue", "index")
    found = [path for kind in kinds for path in sorted(root.glob(f"{kind}/**/*")) if path.is_file()]
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


@pytest.mark.slow
@pytest.mark.parametrize("key_count", [0, 1, 5])
def test_append_writes_the_same_files_as_a_session_for_each_message(tmp_path: Path, key_count: int) -> None:
    records = [single_record("T", number, number % QUEUES, keys=number % (key_count + 1)) for number in range(COUNT)]
    now_ms = [NOW_MS]
    singly, each = (writer(tmp_path / name, now_ms=lambda: now_ms[0]) for name in ("singly", "each"))
    with singly.section() as section:
        section.ensure_topic("T", QUEUES)
        appender = singly.single_appender(section)
        places = []
        for number, record in enumerate(records):
            now_ms[0] = NOW_MS + number * 700  # so that seconds in the key index differ
            places.append(appender.append(record))
        appender.finish()
        appender.close()
    now_ms[0] = NOW_MS
    for number, (record, place) in enumerate(zip(records, places, strict=True)):
        with each.section() as section:
            section.ensure_topic("T", QUEUES)
            now_ms[0] = NOW_MS + number * 700
            appended = section.append(record.as_batch())
            assert (appended.queue_offsets.tolist(), appended.physical_offsets.tolist()) == ([place[0]], [place[1]])
    assert contents(tmp_path / "singly") == contents(tmp_path / "each")
    for store in (singly, each):
        store.close()
    assert not check(str(tmp_path / "singly")).findings


def test_append_is_seen_at_once_and_leaves_the_session_open(tmp_path: Path) -> None:
    store = writer(tmp_path / "s")
    with store.section() as section, open_reader(str(tmp_path / "s")) as reader:
        section.ensure_topic("T", QUEUES)
        appender = store.single_appender(section)
        for number in range(8):
            assert appender.append(single_record("T", number, 0, keys=1)) == (number, section_end(tmp_path, number))
            reader.refresh()
            assert reader.bounds(QueueKey("T", 0)).max_offset == number + 1
            assert reader.find_key("T", f"k{number}") == [(QueueKey("T", 0), number)]
        watermark = read_watermark(str(tmp_path / "s"))
        assert watermark is not None
        assert watermark.is_open
        appender.finish()
        appender.close()
        closed = read_watermark(str(tmp_path / "s"))
        assert closed is not None
        assert (closed.is_open, closed.end) == (False, watermark.logged_end)


def section_end(root: Path, number: int) -> int:
    return number * len(single_record("T", number, 0, keys=1).data)


def test_append_writes_one_watermark_for_each_message(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    disk = CrashDisk(tmp_path / "live")
    store = writer(tmp_path / "live/s", disk)
    with store.section() as section:
        section.ensure_topic("T", QUEUES)
        appender = store.single_appender(section)
        for number in range(2):
            appender.append(single_record("T", number, 0, keys=1))
        before = disk.effect_count
        appender.append(single_record("T", 2, 0, keys=1))
        effects = disk.effects[before:]
        appender.finish()
        appender.close()
    paths = [effect.path for effect in effects if isinstance(effect, Write)]
    assert len(paths) == len(effects)
    assert sum("watermark" in path for path in paths) == 1
    assert [path.split("/")[1] for path in paths[:3]] == ["commitlog", "rmq", "consumequeue"]


@pytest.mark.slow
def test_append_on_a_full_disk_loses_nothing_and_continues_with_space(tmp_path: Path) -> None:
    """Fill the disk at every effect of a session, then free space and continue."""
    failures = 0
    for point in range(300):
        root = tmp_path / str(point) / "s"
        disk, done = FailingDisk(point), 0
        store = writer(root)
        with store.section() as section:
            section.ensure_topic("T", QUEUES)
        try:
            store = writer(root, disk)
            with store.section() as section:
                appender = store.single_appender(section)
                for number in range(12):
                    appender.append(single_record("T", number, 0, keys=1))
                    done = number + 1
                appender.finish()
                appender.close()
        except DiskFullError:
            failures += 1
        if not disk.has_failed:
            break
        with writer(root).section() as section:
            assert done <= section.next_offset("T", 0) <= done + 1
            found = section.next_offset("T", 0)
            section.append(single_record("T", 99, 0, keys=1).as_batch())
        with open_reader(str(root)) as reader:
            reader.refresh()
            batches = reader.read(QueueKey("T", 0), 0, found + 1, ("body",), check_crc=True)
            bodies = [row["body"][:5] for batch in batches for row in batch.to_pylist()]
        assert bodies == [b"%05d" % number for number in [*range(found), 99]]
    assert failures > 30
