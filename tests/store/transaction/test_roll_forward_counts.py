"""Counts of applied rows: saved, so that a stuck intent costs other writers little."""

import logging
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DiskFullError, StoreChangedError
from rmq_spark.store.format.message_encoder import EncodedRecords
from rmq_spark.store.format.record import Record
from rmq_spark.store.log.store_writer import StoreWriter
from rmq_spark.store.log.write_session import Appended, WriteSession
from rmq_spark.store.model import CommitKey
from rmq_spark.store.testing.crash_disk import ProcessDeathError
from rmq_spark.store.transaction import commit as commits
from rmq_spark.store.transaction import roll_forward as counting
from rmq_spark.store.transaction.intents import Count, Intents, StagedFile
from rmq_spark.store.transaction.roll_forward import BatchRollForward, IntentRollForward
from rmq_spark.store.transaction.staging import read_chunks, staged_path

if TYPE_CHECKING:
    from tests.store.transaction.conftest import Kit

KEY = CommitKey("q", 0)
NAMES = [f"row{number}" for number in range(12)]
Spread = Callable[..., dict[int, list[str]]]


def die_before(kit: "Kit", chunk: int, names: list[str] = NAMES, *, logged: bool = False) -> list[StagedFile]:
    """Commit, and die before the chunk of that number is appended; or, if `logged`, just after it."""
    files, calls = kit.stage(KEY, names), []
    owner = WriteSession if logged else BatchRollForward
    real = owner.append

    def append(*arguments: object) -> object:
        calls.append(1)
        appended = real(*arguments) if len(calls) <= chunk or logged else None  # type: ignore[arg-type]
        if len(calls) > chunk:
            raise ProcessDeathError
        return appended

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, "append", append)
        with pytest.raises(ProcessDeathError):
            kit.commit(KEY, files)
    return files


def write_others(kit: "Kit", count: int, names: int = 6) -> None:
    for number in range(count):
        key = CommitKey(f"w{number}-{len(kit.all_rows('W'))}")
        kit.commit(key, kit.stage(key, [f"{number}-{row}" for row in range(names)], topic="W"))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The physical offsets of the records that were compared with staged ones."""
    found: list[int] = []
    real = counting._is_same

    def note(record: Record, wanted: Record) -> bool:
        found.append(record.physical_offset)
        return real(record, wanted)

    monkeypatch.setattr(counting, "_is_same", note)
    return found


def deny_room(_: WriteSession, log_bytes: int, record_count: int) -> None:
    if record_count == 7:
        raise DiskFullError("no room for the rest")


@pytest.mark.parametrize("is_known", [True, False])
def test_count_saves_comparisons_while_the_disk_is_full(
    kit: "Kit", spread: Spread, compared: list[int], monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    die_before(kit, 1)
    with monkeypatch.context() as patch:
        patch.setattr(WriteSession, "refuse_full_disk", deny_room)
        if not is_known:
            Path(kit.root, "rmq/intents/q.count").unlink()
        write_others(kit, 1)
        assert bool(compared) != is_known
        compared.clear()
        write_others(kit, 5)
        assert compared == []
    kit.settle()
    assert kit.rows() == spread(NAMES)
    assert len(kit.all_rows("W")) == 36


def test_roll_forward_compares_no_record_while_a_topic_is_missing(kit: "Kit", compared: list[int]) -> None:
    die_before(kit, 1)
    Path(kit.root, "rmq/intents/q.count").unlink()
    with pytest.MonkeyPatch.context() as patch:
        real = WriteSession.write_queues
        patch.setattr(WriteSession, "write_queues", lambda one, topic: 1 if topic == "T" else real(one, topic))
        write_others(kit, 3)
    assert compared == []


def test_count_before_a_damaged_record_is_saved(kit: "Kit", spread: Spread, compared: list[int]) -> None:
    die_before(kit, 1)
    (intent,) = Intents(kit.root, Disk()).read_all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WriteSession, "refuse_full_disk", deny_room)
        write_others(kit, 1)
        with kit.writer().section() as section:
            others = [one.physical_offset for one in section.records_from(0)][5:]
    Path(kit.root, "rmq/intents/q.count").unlink()
    segment = Path(kit.root, "commitlog", "0" * 20)
    whole = segment.read_bytes()
    with segment.open("r+b") as file:
        file.seek(others[3] + 88)
        file.write(b"?")
    damaged = segment.read_bytes()
    assert damaged != whole
    compared.clear()
    for _ in range(3):
        kit.settle()
        assert {place for place in compared if place >= others[0]} <= set(others[:3])
        first, compared[:] = list(compared), []
    assert first == [], "what was compared once is not compared again"
    segment.write_bytes(whole)
    kit.settle()
    assert kit.rows() == spread(NAMES)
    assert intent.start == 0


def test_count_is_cleared_before_an_append(kit: "Kit", spread: Spread) -> None:
    die_before(kit, 1, logged=True)
    intents = Intents(kit.root, Disk())
    (intent,) = intents.read_all()
    assert intents.count(intent) is None
    assert [hint.rows for hint in intents.hints("q")] == [5]
    assert len(kit.all_rows()) == 10
    kit.settle()
    assert kit.rows() == spread(NAMES)


@pytest.mark.parametrize("why", ["another boot", "another intent", "torn", "its record is gone"])
def test_count_that_may_be_wrong_is_ignored(
    kit: "Kit", spread: Spread, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    die_before(kit, 1)
    intents = Intents(kit.root, Disk())
    (intent,) = intents.read_all()
    right = intents.count(intent)
    assert right is not None
    assert (right.rows, right.is_complete) == (5, True)
    lie = Count(10, right.physical_offset, right.fingerprint, is_complete=True)
    path = Path(kit.root, "rmq/intents/q.count")
    if why == "its record is gone":
        intents.save_count(intent, Count(10, right.physical_offset, right.fingerprint ^ 1, is_complete=True))
    elif why == "another boot":
        intents.save_count(intent, lie)
        monkeypatch.setattr("rmq_spark.store.disk.host.boot_id", lambda: "later")
    elif why == "another intent":
        other = Intents(kit.root, Disk()).read("q")
        assert other is not None
        object.__setattr__(other, "made_ms", 1)
        intents.save_count(other, lie)
    else:
        intents.save_count(intent, lie)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    kit.settle()
    assert kit.rows() == spread(NAMES)


def test_roll_forward_releases_the_lock_after_session_bytes(
    kit: "Kit", spread: Spread, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{number:04d}" for number in range(45)]
    die_before(kit, 1, names)
    turns: list[int] = []
    append, chunk_bytes = WriteSession.append, kit.options.chunk_bytes
    finisher = IntentRollForward(kit.root, kit.disk, kit.now_ms, chunk_bytes, session_bytes=3 * chunk_bytes)
    writer = StoreWriter(kit.root, kit.disk, kit.settings, kit.now_ms, kit.sleep, [finisher])
    hold = writer.lock.hold

    def note_hold() -> object:
        if len(turns) == 2:
            write_others_raw(kit)
        turns.append(0)
        return hold()

    def note_append(one: WriteSession, records: EncodedRecords) -> Appended:
        turns[-1] += 1
        return append(one, records)

    monkeypatch.setattr(writer.lock, "hold", note_hold)
    monkeypatch.setattr(WriteSession, "append", note_append)
    with writer.section():
        assert turns[-1] == 0, "its own work has a section of its own"
    assert turns[:2] == [3, 4], "three chunks, then with the chunk of somebody else in between"
    assert kit.rows() == spread(names)
    assert kit.all_rows("W") == ["other"]


def write_others_raw(kit: "Kit") -> None:
    """Append as a process does that leaves the dead to others."""
    with StoreWriter(kit.root, kit.disk, kit.settings, kit.now_ms, kit.sleep).section() as section:
        section.ensure_topic("W", 2)
        (chunk,) = read_chunks(kit.root, kit.stage(CommitKey("w"), ["other"], tasks=1, topic="W"))
        section.append(chunk)


def test_retention_held_by_a_stuck_intent_is_logged_once_a_segment(
    kit: "Kit", caplog: pytest.LogCaptureFixture
) -> None:
    files = die_before(kit, 1)
    os.remove(staged_path(kit.root, files[1].name))
    writer = kit.writer()
    writer.set_retention(None, 1)
    path = Intents(kit.root, Disk()).path("q")
    (big,) = read_chunks(kit.root, kit.stage(CommitKey("w"), ["x" * 1500], tasks=1, topic="W"))
    caplog.clear()
    for _ in range(3):
        with writer.section() as section:
            section.ensure_topic("W", 2)
            section.append(big)
        with writer.section():
            pass
    told = [record for record in caplog.records if "retention in" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.WARNING] * len(told)
    assert [path in record.getMessage() for record in told] == [True] * 2
    with writer.section() as section:
        found = section.expire(max_bytes=1)
        assert (found.segments, found.held_by, found.is_held_for_good) == (0, path, True)
        assert found.held_bytes == 2 * kit.settings.sizes.segment_bytes


def test_commit_has_at_most_two_chunks_in_memory(kit: "Kit", monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[np.ndarray]] = []
    most: list[int] = []

    def chunks(*arguments: object) -> Iterator[EncodedRecords]:
        for records in read_chunks(*arguments):  # type: ignore[arg-type]
            alive.append(weakref.ref(records.data))
            yield records
            del records

    def one_by_one(items: Iterator[EncodedRecords]) -> Iterator[EncodedRecords]:
        for item in items:
            most.append(sum(one() is not None for one in alive))
            yield item
            del item

    monkeypatch.setattr(commits, "read_chunks", chunks)
    monkeypatch.setattr(commits, "read_ahead", one_by_one)
    kit.commit(KEY, kit.stage(KEY, [f"{number}" for number in range(30)]), session_bytes=3 * kit.options.chunk_bytes)
    assert len(most) > 4
    assert max(most) == 1, "without reading ahead: the one before is gone when the next comes"


def test_commit_raises_for_a_stuck_intent_of_its_query(kit: "Kit") -> None:
    files = die_before(kit, 1)
    os.remove(staged_path(kit.root, files[1].name))
    with pytest.raises(StoreChangedError, match="cannot be finished"):
        kit.commit(KEY, kit.stage(KEY, NAMES))
