"""Tests of a sync that fails once: no later acknowledgement may depend on what that sync did not write.

Linux reports a failed write-back once and marks the pages clean: the next sync of the same file succeeds, in any
process.
"""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from support.encoded_samples import encode_samples

from rmq_spark.store import check, open_reader, repair
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.disk.system_calls import FOLIO_BYTES
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import StoreError
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.log.commit_log_writer import DirtyFiles, write_again
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.crash_disk import CrashDisk
from rmq_spark.store.testing.sample_message import SampleMessage

SIZES = FileSizes(2048, 200, 10 * 46, IndexShape(7, 40))
QUEUES = 2
ANOTHER_BOOT = "after the power cut"


def writer(root: Path, disk: Disk | None = None) -> StoreWriter:
    ticks = count(1_700_000_000_000)
    return StoreWriter(str(root), disk or Disk(), WriterSettings(sizes=SIZES), lambda: next(ticks), time.sleep)


def sample(number: int) -> SampleMessage:
    body = b"%05d" % number + b"b" * (number * 13 % 50)
    return SampleMessage("T", number % QUEUES, body, tags="t", keys=f"k{number}")


def append(store: StoreWriter, first: int, last: int, *, settle: bool) -> None:
    with store.section() as section:
        section.ensure_topic("T", QUEUES)
        section.append(encode_samples([sample(number) for number in range(first, last)]))
        if settle:
            section.settle()


def numbers(root: Path) -> list[int]:
    """Return the numbers of all messages. Each queue must have its own in order, each once."""
    found = []
    with open_reader(str(root)) as reader:
        reader.refresh()
        for key in (QueueKey("T", queue) for queue in range(QUEUES)):
            if "T" not in reader.topics() or key not in reader.queues("T"):
                continue
            held = reader.bounds(key)
            bodies = [
                row["body"]
                for batch in reader.read(key, held.min_offset, held.max_offset, ("body",), check_crc=True)
                for row in batch.to_pylist()
            ]
            seen = [int(body[:5]) for body in bodies]
            assert seen == [offset * QUEUES + key.queue_id for offset in range(held.min_offset, held.max_offset)]
            found += seen
    return sorted(found)


def check_power_cuts(disk: CrashDisk, folder: Path, settled: int, monkeypatch: pytest.MonkeyPatch, seeds: range) -> int:
    """Check what a power cut now may leave: every settled message, and a store without findings."""
    tried = 0
    for seed in seeds:
        for image in disk.images(disk.effect_count, seed, subset_count=3):
            if "power cut" not in str(image):
                continue
            tried += 1
            shutil.rmtree(folder, ignore_errors=True)
            image.write_to(folder)
            with monkeypatch.context() as patch:
                patch.setattr("rmq_spark.store.disk.host.boot_id", lambda: ANOTHER_BOOT)
                try:
                    if not (folder / "s" / "abort").exists():
                        assert check(str(folder / "s")).is_healthy
                    store = writer(folder / "s")
                    store.close()
                    found = numbers(folder / "s")
                    assert found[:settled] == list(range(settled))
                    begin = len(found)
                    append(store, begin, begin + 2, settle=True)
                    assert numbers(folder / "s") == list(range(begin + 2))
                    report = check(str(folder / "s"))
                    assert report.is_healthy, report
                except Exception as error:
                    raise AssertionError(f"{image}: {error!r}") from error
    return tried


def go_on_settling(store: StoreWriter, root: Path, disk: CrashDisk) -> int:
    store.close()
    return 22


def go_on_elsewhere(store: StoreWriter, root: Path, disk: CrashDisk) -> int:
    writer(root, disk).close()
    return 22


def go_on_sending(store: StoreWriter, root: Path, disk: CrashDisk) -> int:
    append(store, 22, 23, settle=True)
    return 23


def go_on_without_waiting(store: StoreWriter, root: Path, disk: CrashDisk) -> int:
    append(writer(root, disk), 22, 40, settle=False)
    append(store, 40, 41, settle=True)
    return 41


GoOn = Callable[[StoreWriter, Path, CrashDisk], int]


WAYS: list[GoOn] = [go_on_settling, go_on_elsewhere, go_on_sending, go_on_without_waiting]


def fail_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, go_on: GoOn, failing: range, *, seeds: range, times: int = 1
) -> tuple[int, int]:
    """Fail syncs of an append that fills queue files, and of the settling after it; then continue."""
    failures = images = 0
    for number in failing:
        root = tmp_path / f"live{number}"
        root.mkdir()
        disk = CrashDisk(root)
        store = writer(root / "s", disk)
        append(store, 0, 3, settle=True)
        append(store, 3, 12, settle=False)
        first = disk.sync_count + number
        disk.fail_syncs(range(first, first + times))
        try:
            append(store, 12, 22, settle=False)
            store.close()
        except StoreError:
            failures += 1
        if disk.sync_count <= first:
            break
        for _ in range(times):  # recovery fails, too, or the append is done again
            try:
                with store.section():
                    pass
                done = len(numbers(root / "s"))
                if done < 22:
                    append(store, done, 22, settle=False)
                    break
            except StoreError:
                failures += 1
        disk.fail_syncs(())
        settled = go_on(store, root / "s", disk)
        assert numbers(root / "s") == list(range(settled))
        assert not (root / "s" / "abort").exists()
        images += check_power_cuts(disk, tmp_path / "image", settled, monkeypatch, seeds)
        shutil.rmtree(root)
    print(f"{failures} syncs failed, {images} images")
    return failures, images


@pytest.mark.parametrize("number", range(len(WAYS)))
def test_settle_after_a_failed_sync_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    failures, _ = fail_each(tmp_path, monkeypatch, WAYS[number], range(number, 100, len(WAYS)), seeds=range(1))
    assert failures > 2


@pytest.mark.parametrize("number", range(len(WAYS)))
def test_settle_after_failed_syncs_of_recovery_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    failing = range(number, 100, len(WAYS))
    failures, _ = fail_each(tmp_path, monkeypatch, WAYS[number], failing, seeds=range(1), times=3)
    assert failures > 2


def store_with_failed_sync(root: Path) -> tuple[StoreWriter, CrashDisk]:
    root.mkdir()
    disk = CrashDisk(root)
    store = writer(root / "s", disk)
    append(store, 0, 3, settle=True)
    append(store, 3, 12, settle=False)
    disk.fail_syncs({disk.sync_count})
    with pytest.raises(StoreError):
        store.close()
    return store, disk


def test_check_reports_a_failed_sync_until_it_was_repeated(tmp_path: Path) -> None:
    store, _ = store_with_failed_sync(tmp_path / "live")
    root = str(tmp_path / "live" / "s")
    found = [one for one in check(root).findings if "a sync failed" in one.what]
    assert [(one.severity, one.action) for one in found] == [("repairable", "recover")]
    with store.lock.hold():  # a writer that is at work may be in the middle of a sync
        assert not [one for one in check(root).findings if "a sync failed" in one.what]
    store.close()
    assert check(root).is_healthy


def test_has_failed_sync_ignores_another_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_with_failed_sync(tmp_path / "live")
    monkeypatch.setattr("rmq_spark.store.disk.host.boot_id", lambda: ANOTHER_BOOT)
    assert not [one for one in check(str(tmp_path / "live" / "s")).findings if "a sync failed" in one.what]


def test_append_is_refused_while_the_disk_fails(tmp_path: Path) -> None:
    store, disk = store_with_failed_sync(tmp_path / "live")
    disk.fail_syncs(range(disk.sync_count, disk.sync_count + 1000))
    for one in (store, writer(tmp_path / "live" / "s", disk)):
        with pytest.raises(StoreError, match="Input/output error"):
            append(one, 12, 13, settle=False)
    assert (tmp_path / "live" / "s" / "abort").exists()
    assert numbers(tmp_path / "live" / "s") == list(range(12))


def test_repair_writes_again_what_a_failed_sync_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, disk = store_with_failed_sync(tmp_path / "live")
    monkeypatch.setattr("rmq_spark.store.tools.repair.Disk", lambda: disk)
    root = tmp_path / "live" / "s"
    queue = next((root / "consumequeue" / "T" / "0").iterdir())
    with disk.open(str(queue)) as file:
        file.write(0, bytes(60))  # so that the repair forgets the watermark, which has the record of the failed sync
    repaired = repair(str(root))
    assert any(step.action == "rebuild" for step in repaired.steps)
    assert repaired.report.is_healthy
    assert numbers(root) == list(range(12))
    assert check_power_cuts(disk, tmp_path / "image", 12, monkeypatch, range(3)) > 0


def test_prepare_drops_lost_bytes_and_the_store_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, disk = store_with_failed_sync(tmp_path / "live")
    root = tmp_path / "live" / "s"
    with open_reader(str(root)) as reader:
        reader.refresh()
        key = QueueKey("T", 0)
        rows = [row for batch in reader.read(key, 2, 6, ("commitLogOffset",)) for row in batch.to_pylist()]
    place = rows[2]["commitLogOffset"]  # of message 8
    with disk.open(str(root / "commitlog" / f"{0:020d}")) as file:
        file.write(place, bytes(40))
    store.close()
    assert numbers(root) == list(range(8))
    assert "messages at physical offsets" in caplog.text
    append(store, 8, 12, settle=True)
    assert numbers(root) == list(range(12))
    assert check(str(root)).is_healthy


def test_prepare_keeps_a_message_with_nul_characters_in_a_property(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A power cut may leave the same in a record's properties, but the machine was not restarted."""
    (tmp_path / "live").mkdir()
    disk, root = CrashDisk(tmp_path / "live"), tmp_path / "live" / "s"
    sizes = FileSizes(1 << 16, 200, 10 * 46, IndexShape(7, 40))
    settings = WriterSettings(sizes=sizes)
    store = StoreWriter(str(root), disk, settings, lambda: 1_700_000_000_000, time.sleep)
    append(store, 0, 2, settle=True)
    with store.section() as section:
        odd = replace(sample(2), properties={"a": "\0" * 3000})
        section.append(encode_samples([odd, *(sample(number) for number in range(3, 9))]))
    disk.fail_syncs({disk.sync_count})
    with pytest.raises(StoreError):
        store.close()
    store.close()
    assert numbers(root) == list(range(9))
    assert check(str(root)).is_healthy
    assert "are lost" not in caplog.text
    assert "The messages are kept" in caplog.text


def test_write_again_writes_only_what_changed_since_the_last_settle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, disk, written = tmp_path / "s", Disk(), dict[str, int]()
    store = StoreWriter(str(root), disk, WriterSettings(), lambda: 1_700_000_000_000, time.sleep)  # sizes of a broker
    with store.section() as section:
        section.ensure_topic("T", 20)
        section.append(encode_samples([replace(sample(number), queue_id=number) for number in range(20)]))
        section.settle()

    def fail(changes: DirtyFiles) -> None:
        raise StoreError("the sync failed")

    def write_again(path: str, descriptor: int, parts: Sequence[tuple[int, memoryview]]) -> None:
        written[path] = written.get(path, 0) + sum(len(data) for _, data in parts)

    with monkeypatch.context() as patch:
        patch.setattr(DirtyFiles, "sync", fail)
        with store.section() as section:
            section.append(encode_samples([replace(sample(20), queue_id=3)]))
        with pytest.raises(StoreError, match="the sync failed"):
            store.close()
    monkeypatch.setattr(disk.calls, "write_again", write_again)
    with store.section():
        pass
    index = next((root / "index").iterdir())
    log, queue = root / "commitlog" / f"{0:020d}", root / "consumequeue" / "T" / "3" / f"{0:020d}"
    assert written.keys() == {str(log), str(queue), str(index)}
    assert sum(written.values()) < 1 << 20  # of more than 1 GiB
    assert check(str(root)).is_healthy


def test_write_again_reads_holes_only_in_the_known_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "file", []
    with path.open("wb") as file:
        file.truncate(6 * FOLIO_BYTES)
        for position in (4096, 5 * FOLIO_BYTES + 4096):
            file.seek(position)
            file.write(b"x" * 4096)

    def note_read(file: OpenFile, position: int, size: int) -> bytes:
        read.append((position, size))
        return os.pread(file.descriptor, size, position)

    monkeypatch.setattr(OpenFile, "read", note_read)
    write_again(Disk(), str(path), 4096, end=3 * 4096)
    assert read == [(4096, 2 * 4096), (5 * FOLIO_BYTES + 4096, 4096)]
    read.clear()
    write_again(Disk(), str(path), 4096, end=3 * 4096, stop=FOLIO_BYTES)
    assert read == [(4096, 2 * 4096)]


def test_write_again_keeps_bytes_holes_and_length(tmp_path: Path) -> None:
    path, size = tmp_path / "file", 3 * FOLIO_BYTES + 700
    with path.open("wb") as file:
        file.truncate(size)
        for position in (100, FOLIO_BYTES - 5, size - 300):
            file.seek(position)
            file.write(b"0123456789")
    before, blocks = path.read_bytes(), path.stat().st_blocks
    write_again(Disk(), str(path), 200)
    assert path.read_bytes() == before
    assert path.stat().st_size == size
    with OpenFile(str(path)) as held:
        assert not list(held.extents(2 * FOLIO_BYTES, 3 * FOLIO_BYTES)) or not blocks


def test_replace_after_a_failed_sync_writes_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    disk = CrashDisk(tmp_path)
    with disk.open(str(tmp_path / "file")) as file:
        file.write(0, b"after!")
    disk.fail_syncs({0})
    disk.make_durable(str(tmp_path / "file"), b"after!")
    for image in disk.images(disk.effect_count, 1):
        assert image.contents["file"] == b"after!"


@pytest.mark.torture
@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize("go_on", WAYS)
def test_sync_may_fail_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, go_on: GoOn, times: int) -> None:
    failures, _ = fail_each(tmp_path, monkeypatch, go_on, range(100), seeds=range(4), times=times)
    assert failures > 10
