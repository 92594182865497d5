"""Tests of lost watermarks, with all entries after the last one that is left: the remaining bytes stay invalid."""

import errno
import json
import os
import shutil
import time
from itertools import count
from pathlib import Path

import pytest

from rmq_spark.store import check, open_reader
from rmq_spark.store.disk.kernel_errors import reading
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.log.consume_queue import EntryFiles
from rmq_spark.store.log.segments import SegmentRun
from rmq_spark.store.log.store_state import read_watermarks
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from tests.store.log.test_lost_memory import (
    LARGE,
    QUEUES,
    SIZES,
    append,
    check_continues,
    end_of_note,
    lose_entries,
    lose_log,
    numbers,
    poke,
    queue_file,
    watermark,
    writer,
)


def store_with_watermark(root: Path, *, is_settled: bool, topic: str = "T") -> tuple[int, bytes]:
    """Create a store whose newest watermark is settled or not. Return the next message's number, and the file."""
    append(writer(root, LARGE), 0, 20, settle=True, topic=topic)
    if not is_settled:
        append(writer(root, LARGE), 20, 22, topic=topic)
    return 20 if is_settled else 22, watermark(root)


def lose_watermarks(root: Path, old: bytes, first: int, end: int | None = None) -> None:
    """Lose the newer watermarks, T's entries from a message on, and the log from the old watermark's end to `end`."""
    (root / "rmq/watermark").write_bytes(old)
    lose_log(root, end_of_note(root), end)
    for queue in range(QUEUES):
        lose_entries(root, queue, first // QUEUES, 1000)


@pytest.mark.parametrize("is_settled", [True, False])
@pytest.mark.parametrize("topic", ["T", "U"])
def test_prepare_clears_records_newer_than_their_watermarks_and_entries(
    topic: str, is_settled: bool, tmp_path: Path
) -> None:
    """New records of the same length fill the gap before them, up to the first of them."""
    root = tmp_path / "s"

    ticks = count(1_700_000_000_000)

    def by_clock() -> StoreWriter:
        return StoreWriter(str(root), Disk(), WriterSettings(sizes=LARGE), lambda: next(ticks), time.sleep)

    append(by_clock(), 100, 120, settle=True, topic="U")
    append(by_clock(), 100, 120, settle=True)
    if not is_settled:
        append(by_clock(), 120, 122)
    first, old, begin = 120 if is_settled else 122, watermark(root), end_of_note(root)
    append(by_clock(), first, first + 80)
    lose_watermarks(root, old, first - 100, begin + (end_of_note(root) - begin) // 2)
    append(by_clock(), 500, 540, topic=topic)
    append(by_clock(), 600, 602)
    assert numbers(root) == [*range(100, first), *(range(500, 540) if topic == "T" else ()), 600, 601]
    assert numbers(root, "U") == [*range(100, 120), *(range(500, 540) if topic == "U" else ())]
    assert check(str(root)).is_healthy


@pytest.mark.parametrize("is_settled", [True, False])
@pytest.mark.parametrize("more", [100, 300])
def test_prepare_clears_entries_for_lost_segments(more: int, is_settled: bool, tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(writer(root), 0, 20, settle=True)
    if not is_settled:
        append(writer(root), 20, 22)
    first, old, end = 20 if is_settled else 22, watermark(root), end_of_note(root)
    append(writer(root), first, first + more)
    lose_segments(root, old, end)
    check_continues(root, list(range(first)))


def test_prepare_clears_entries_if_the_first_lost_record_began_a_segment(tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(writer(root), 0, 20, settle=True)
    number = 20
    while SIZES.segment_bytes - end_of_note(root) % SIZES.segment_bytes > 150:
        append(writer(root), number, number + 1)
        number += 1
    old, end = watermark(root), end_of_note(root)
    append(writer(root), number, number + 100)
    lose_segments(root, old, end)
    check_continues(root, list(range(number)))


@pytest.mark.parametrize("is_begin_lost", [True, False])
def test_is_head_lost_finds_a_half_lost_header(is_begin_lost: bool, tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(writer(root, LARGE), 100, 120, settle=True)
    append(writer(root, LARGE), 120, 130)
    number = 130
    while True:
        append(writer(root, LARGE), number, number + 1)
        number += 1
        note = read_watermarks(str(root))[0]
        assert note is not None
        edge = note.last_place + -note.last_place % 512
        if 8 < edge - note.last_place < 80:
            break
    before = note.last_place - (note.end - note.last_place)
    lose_log(root, *((before, edge) if is_begin_lost else (edge, None)))
    check_continues(root, list(range(100, number - (2 if is_begin_lost else 1))), LARGE)


def lose_segments(root: Path, old: bytes, end: int) -> None:
    for path in (root / "commitlog").iterdir():
        if int(path.name) > end:
            path.unlink()
    lose_log(root, end)
    (root / "rmq/watermark").write_bytes(old)


@pytest.mark.parametrize("is_settled", [True, False])
def test_prepare_restarts_a_queue_that_only_the_registry_has(is_settled: bool, tmp_path: Path) -> None:
    root = tmp_path / "s"
    first, old = store_with_watermark(root, is_settled=is_settled)
    append(writer(root, LARGE), first, 30)
    append(writer(root, LARGE), 0, 4, topic="V")
    lose_watermarks(root, old, first)
    shutil.rmtree(root / "consumequeue/V")
    append(writer(root, LARGE), 100, 140)
    append(writer(root, LARGE), 0, 4, topic="V")
    assert numbers(root) == [*range(first), *range(100, 140)]
    assert numbers(root, "V") == [0, 1, 2, 3]
    assert check(str(root)).is_healthy


@pytest.mark.parametrize("is_settled", [True, False])
def test_prepare_removes_the_keys_of_lost_messages(
    is_settled: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "s"
    first, old = store_with_watermark(root, is_settled=is_settled)
    append(writer(root, LARGE), first, 60)
    lose_watermarks(root, old, first)
    append(writer(root, LARGE), 100, 120)
    with open_reader(str(root)) as reader:
        reader.refresh()
        found = {number: len(list(reader.find_key("T", f"k{number}"))) for number in (*range(first), *range(100, 120))}
    assert set(found.values()) == {1}, found
    assert "the key index does not cover" not in caplog.text
    assert check(str(root)).is_healthy


@pytest.mark.parametrize("is_settled", [True, False])
def test_set_groups_back_after_an_older_watermark(is_settled: bool, tmp_path: Path) -> None:
    root = tmp_path / "s"
    first, old = store_with_watermark(root, is_settled=is_settled)
    append(writer(root, LARGE), first, 60)
    path = root / "config/consumerOffset.json"
    path.write_text('{"offsetTable":{"T@g":{0:30,1:5}}}')
    lose_watermarks(root, old, first)
    append(writer(root, LARGE), 100, 110)
    offsets = path.read_text().replace("0:", '"0":').replace("1:", '"1":')
    assert json.loads(offsets)["offsetTable"]["T@g"] == {"0": first // QUEUES, "1": 5}


def fail_to_list(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """Let the kernel refuse to list the files of one queue."""
    list_files = EntryFiles._list

    def fail(run: EntryFiles) -> SegmentRun:
        if run.folder == folder:
            with reading(folder, "opened"):
                raise OSError(errno.EIO, "Input/output error")
        return list_files(run)

    monkeypatch.setattr(EntryFiles, "_list", fail)


def test_prepare_finds_lost_memory_despite_an_unreadable_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T's entries show that memory is lost. So the unreadable queue may have such entries too."""
    root = tmp_path / "s"
    append(writer(root, LARGE), 0, 4, topic="A")
    append(writer(root, LARGE), 0, 20, settle=True)
    old, end = watermark(root), end_of_note(root)
    append(writer(root, LARGE), 20, 40)
    lose_log(root, end)
    (root / "rmq/watermark").write_bytes(old)
    with monkeypatch.context() as context:
        fail_to_list(context, os.fspath(queue_file(root, "A", 0).parent))
        with pytest.raises(StoreError, match="A/0 cannot be opened"):
            append(writer(root, LARGE), 60, 64)
    append(writer(root, LARGE), 60, 64)
    assert numbers(root) == [*range(20), *range(60, 64)]


@pytest.mark.parametrize("is_settled", [True, False])
def test_set_groups_back_skips_an_unreadable_queue(
    is_settled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "s"
    append(writer(root, LARGE), 0, 4, topic="U")
    append(writer(root, LARGE), 0, 20, settle=is_settled)
    (root / "abort").write_text("4711")
    (root / "config/consumerOffset.json").write_text('{"offsetTable":{"U@g":{0:2,1:2},"T@g":{0:90}}}')
    fail_to_list(monkeypatch, os.fspath(queue_file(root, "U", 0).parent))
    append(writer(root, LARGE), 20, 24)
    assert numbers(root) == list(range(24))
    assert "T@g" in (text := (root / "config/consumerOffset.json").read_text())
    assert "0:10" in text


@pytest.mark.parametrize("at", [0, 4, 28 + 7])  # a byte of its length, its magic, its physical offset
def test_refuse_cut_refuses_damage_before_messages_of_a_killed_broker(at: int, tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(writer(root, LARGE), 0, 20, settle=True, topic="U")
    append(writer(root, LARGE), 0, 20, settle=True)
    ours = watermark(root)
    append(writer(root, LARGE), 20, 40)
    (root / "rmq/watermark").write_bytes(ours)  # so a broker wrote them
    log, unit = root / "commitlog" / f"{0:020d}", queue_file(root, "U", 0).read_bytes()[5 * 20 :]
    place = int.from_bytes(unit[:8], "big") + at
    poke(log, place, bytes([log.read_bytes()[place] ^ 1]))
    before = {path: path.read_bytes() for path in (log, *(root / "consumequeue").rglob("0*0"))}
    with pytest.raises(DamageError, match="a record is missing in the log"):
        append(writer(root, LARGE), 60, 62)
    assert {path: path.read_bytes() for path in before} == before
    (root / "rmq/watermark").unlink()
    append(writer(root, LARGE), 60, 62, settle=True)
    assert numbers(root, "U") == list(range(10))
    assert check(str(root)).is_healthy
