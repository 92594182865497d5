"""Damaged units of settled messages, and damaged records, in stores that recovery mends: no message is hidden by it."""

import struct
import time
from itertools import count
from pathlib import Path

import pytest

from rmq_spark.store import check, plan_repair, repair
from rmq_spark.store.disk import host
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from tests.store.log.test_lost_memory import (
    LARGE,
    append,
    append_and_die,
    end_of_note,
    numbers,
    poke,
    queue_file,
    watermark,
    writer,
)

LONG = FileSizes(1 << 20, 20_000, 50 * 46, IndexShape(20, 6000))  # of a queue: 1000 units a file
SEGMENTED = FileSizes(1 << 14, 20_000, 50 * 46, IndexShape(20, 6000))
MIDDLE = 500  # where a binary search looks first


def cut_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing lost, and the machine started anew."""
    monkeypatch.setattr(host, "boot_id", lambda: "another boot")


def make_suspect(root: Path, monkeypatch: pytest.MonkeyPatch | None) -> None:
    """Make the next writer doubt what it finds: by a power cut, or by the entry that lost pages leave in queue T/0."""
    if monkeypatch is not None:
        cut_power(monkeypatch)
    else:
        poke(queue_file(root, "T", 0), 25 * 20, struct.pack(">qiq", (1 << 20) - 3000, 146, 0))


def place_in(root: Path, unit: int) -> int:
    """Return the place that a unit of U/0 names."""
    return int.from_bytes(queue_file(root, "U", 0).read_bytes()[unit * 20 :][:8], "big")


def check_repairs(root: Path, expected: list[int], topic: str = "U") -> None:
    """Judge that nothing but derived files is damaged, and that a repair brings all messages back."""
    report = check(str(root))
    assert {one.severity for one in report.findings} - {"note"} <= {"repairable"}, report
    repair(plan_repair(str(root)))
    assert numbers(root, topic) == expected
    assert check(str(root)).is_healthy


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["a later place", "beyond the log", "an earlier place"])
@pytest.mark.parametrize("has_newer", [False, True])
@pytest.mark.parametrize("is_cut", [False, True])
def test_damaged_last_settled_unit_gives_its_offset_to_nobody(
    is_cut: bool, has_newer: bool, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "s"
    append(writer(root, LARGE), 0, 20, settle=True, topic="U")
    append(writer(root, LARGE), 0, 20, settle=True)
    if has_newer:
        append(writer(root, LARGE), 20, 30, topic="U")
    append(writer(root, LARGE), 20, 50)
    place = {"a later place": 1 << 19, "beyond the log": 1 << 40, "an earlier place": -1000}[damage]
    poke(queue_file(root, "U", 0), 9 * 20, (place_in(root, 9) + place).to_bytes(8, "big"))
    make_suspect(root, monkeypatch if is_cut else None)
    append(writer(root, LARGE), 90, 92)
    assert numbers(root) == [*range(50), 90, 91]
    append(writer(root, LARGE), 80, 82, topic="U")
    check_repairs(root, [*range(30 if has_newer else 20), 80, 81])


@pytest.mark.slow
@pytest.mark.parametrize("is_zero", [True, False])
@pytest.mark.parametrize("is_idle", [True, False])
@pytest.mark.parametrize("is_cut", [False, True])
def test_damaged_unit_where_a_search_looks_takes_none_behind_it_away(
    is_cut: bool, is_idle: bool, is_zero: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "s"
    append(writer(root, LONG), 0, 1400, settle=True, topic="U")
    append(writer(root, LONG), 0, 20, settle=True)
    append(writer(root, LONG), 20, 50)
    if not is_idle:
        append(writer(root, LONG), 1400, 1402, topic="U")
    damage = bytes(20) if is_zero else ((1 << 20) - 5000).to_bytes(8, "big")
    poke(queue_file(root, "U", 0), MIDDLE * 20, damage)
    make_suspect(root, monkeypatch if is_cut else None)
    append(writer(root, LONG), 90, 92)
    assert numbers(root) == [*range(50), 90, 91]
    expected = [*range(1400 if is_idle else 1402)]
    if is_zero:
        with pytest.raises(DamageError, match="the entry of queue offset 500 of queue U/0"):
            append(writer(root, LONG), 8000, 8002, topic="U")
    else:
        append(writer(root, LONG), 8000, 8002, topic="U")
        expected += [8000, 8001]
    check_repairs(root, expected)


@pytest.mark.parametrize("is_settled", [True, False])
def test_queue_with_a_hole_is_not_written_to_and_its_groups_stay(is_settled: bool, tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(writer(root, LONG), 0, 1400, settle=True, topic="U")
    append(writer(root, LONG), 0, 20, settle=is_settled)
    offsets = root / "config/consumerOffset.json"
    offsets.write_text('{"offsetTable":{"U@g":{0:700,1:700}}}')
    (root / "abort").write_text("4711")
    poke(queue_file(root, "U", 0), MIDDLE * 20, bytes(20))
    store = writer(root, LONG)
    append(store, 20, 22)
    with pytest.raises(DamageError, match="the entry of queue offset 500 of queue U/0"):
        append(store, 8000, 8002, topic="U")
    append(store, 22, 24)
    assert numbers(root) == list(range(24))
    assert "0:700" in offsets.read_text()
    check_repairs(root, list(range(1400)))


def test_look_at_a_crashed_store_keeps_the_units_before_its_begin(tmp_path: Path) -> None:
    """What it does not make anew it must not take away."""
    root = tmp_path / "s"
    append(writer(root, SEGMENTED), 0, 1400, settle=True, topic="U")
    ticks = count(1_700_000_060_000)  # a minute later: the checkpoint vouches for what was before
    later = StoreWriter(str(root), Disk(), WriterSettings(sizes=SEGMENTED), lambda: next(ticks), time.sleep)
    append(later, 0, 200, settle=True)
    poke(queue_file(root, "U", 0), MIDDLE * 20, bytes(20))
    (root / "abort").write_text("4711")
    (root / "rmq/watermark").unlink()
    append(writer(root, SEGMENTED), 200, 202)
    with pytest.raises(DamageError, match="the entry of queue offset 500 of queue U/0"):
        append(writer(root, SEGMENTED), 8000, 8002, topic="U")
    assert numbers(root) == list(range(202))
    check_repairs(root, list(range(1400)))


def test_damaged_unit_of_an_idle_queue_does_not_refuse_what_a_dead_writer_left(tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(writer(root, LARGE), 0, 20, settle=True, topic="U")
    append(writer(root, LARGE), 0, 20, settle=True)
    append(writer(root, LARGE), 20, 24)
    append_and_die(writer(root, LARGE), "note_logged", 24, 30)
    poke(queue_file(root, "U", 0), 9 * 20, (place_in(root, 9) | 1 << 19).to_bytes(8, "big"))
    append(writer(root, LARGE), 60, 62)
    assert numbers(root) == [*range(24), 60, 61]
    check_repairs(root, list(range(20)))


@pytest.mark.parametrize("at", [0, 5])  # a byte of its length, of its magic
def test_damaged_first_record_of_a_killed_broker_is_refused(at: int, tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(writer(root, LARGE), 0, 20, settle=True)
    ours, end = watermark(root), end_of_note(root)
    append(writer(root, LARGE), 20, 40)
    (root / "rmq/watermark").write_bytes(ours)  # so a broker wrote them
    check_refused(root, end + at, end)


@pytest.mark.parametrize("is_settled", [True, False])
def test_damaged_head_of_the_last_record_is_refused(is_settled: bool, tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(writer(root, LARGE), 0, 20, settle=True)
    if not is_settled:
        append(writer(root, LARGE), 20, 30)
    (root / "abort").write_text("4711")
    last = max(
        int.from_bytes(queue_file(root, "T", queue).read_bytes()[(9 if is_settled else 14) * 20 :][:8], "big")
        for queue in (0, 1)
    )
    check_refused(root, last + 5, last)


def check_refused(root: Path, damaged: int, refused: int) -> None:
    log = root / "commitlog" / f"{0:020d}"
    poke(log, damaged, bytes([log.read_bytes()[damaged] ^ 1]))
    before = {path: path.read_bytes() for path in (log, *(root / "consumequeue").rglob("0*0"))}
    with pytest.raises(DamageError, match=f"position {refused}: a record is missing in the log"):
        append(writer(root, LARGE), 60, 62, settle=True)
    assert {path: path.read_bytes() for path in before} == before
