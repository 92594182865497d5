"""Commits: all rows of all files, once, in their order; or an error, and then nothing."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rmq_spark.store import check
from rmq_spark.store.backend import CommitTotals
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import (
    BatchConflictError,
    DamageError,
    DiskFullError,
    LockTimeoutError,
    NotFoundError,
    OptionError,
    StoreChangedError,
    StoreError,
)
from rmq_spark.store.format.message_encoder import EncodedRecords
from rmq_spark.store.format.record import Record
from rmq_spark.store.log.store_state import read_watermarks
from rmq_spark.store.log.store_writer import StoreWriter
from rmq_spark.store.log.write_session import Appended, WriteSession
from rmq_spark.store.model import CommitKey
from rmq_spark.store.testing.crash_disk import CrashDisk, ProcessDeathError
from rmq_spark.store.testing.failing_disk import FailingDisk
from rmq_spark.store.transaction import roll_forward as counting
from rmq_spark.store.transaction import roll_forward as finishing
from rmq_spark.store.transaction.commit import commit_staged
from rmq_spark.store.transaction.intents import Hint, Intents, StagedFile
from rmq_spark.store.transaction.ledger import Ledger, LedgerRow
from rmq_spark.store.transaction.staging import read_chunks, staged_path

if TYPE_CHECKING:
    from tests.store.transaction.conftest import Kit

KEY = CommitKey("q", 0)
NAMES = [f"row{number}" for number in range(12)]
SKIPPED = CommitTotals(0, 0, 0, True)
Spread = Callable[..., dict[int, list[str]]]


def files_of(root: str) -> dict[str, bytes]:
    """Return all files of a store but those that every taking of the lock changes."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(Path(root).rglob("*"))
        if path.is_file() and path.name not in ("watermark", "holder.json")
    }


def test_all_rows_come_into_the_store_in_the_order_of_the_files(kit: "Kit", spread: Spread) -> None:
    files = kit.stage(KEY, NAMES)
    totals = kit.commit(KEY, files)
    assert totals == CommitTotals(12, sum(file.bytes for file in files), 2, False)
    assert kit.rows() == spread(NAMES)
    row = kit.ledger("q")
    assert row is not None
    assert (row.batch_id, row.rows, row.bytes) == (0, 12, totals.bytes)
    assert row.digest == sum(file.digest for file in files) % (1 << 64)
    assert kit.own_files() == []
    assert not Path(kit.root, "abort").exists(), "flush=sync leaves a store that was closed in order"


def test_a_commit_that_is_repeated_appends_nothing(kit: "Kit", spread: Spread) -> None:
    files = kit.stage(KEY, NAMES)
    kit.commit(KEY, files)
    again = kit.stage(KEY, NAMES)
    assert kit.commit(KEY, again) == SKIPPED
    assert kit.commit(KEY, files) == SKIPPED, "its files are gone, and nobody needs them"
    assert kit.rows() == spread(NAMES)
    assert kit.own_files() == []


def test_rows_in_another_order_are_the_same_batch(kit: "Kit", spread: Spread) -> None:
    kit.commit(KEY, kit.stage(KEY, NAMES))
    assert kit.commit(KEY, kit.stage(KEY, NAMES[::-1], tasks=3)) == SKIPPED
    assert kit.rows() == spread(NAMES)


def test_batches_follow_each_other_and_queries_mind_their_own(kit: "Kit") -> None:
    for batch in range(3):
        for query in ("q", "r"):
            key = CommitKey(query, batch + 5)
            assert kit.commit(key, kit.stage(key, [f"{query}{batch}{n}" for n in range(5)])).rows == 5
    found = kit.all_rows()
    assert sorted(found) == sorted(f"{query}{batch}{n}" for query in "qr" for batch in range(3) for n in range(5))
    assert [row.batch_id for row in (kit.ledger("q"), kit.ledger("r")) if row] == [7, 7]


def test_a_batch_that_does_not_follow_changes_nothing(kit: "Kit") -> None:
    kit.commit(KEY, kit.stage(KEY, NAMES))
    same, beyond = CommitKey("q", 0), CommitKey("q", 2)
    other, gap = kit.stage(same, NAMES[:5]), kit.stage(beyond, NAMES)
    before = files_of(kit.root)
    with pytest.raises(BatchConflictError, match="onBatchConflict"):
        kit.commit(same, other)
    with pytest.raises(BatchConflictError, match="so 1 would be missing"):
        kit.commit(beyond, gap)
    assert files_of(kit.root) == before, "the staged files too are left to abort"
    assert kit.commit(same, other, on_conflict="skip") == SKIPPED
    assert kit.commit(beyond, gap, on_gap="continue").rows == 12
    assert kit.own_files() == []


def test_an_overruled_batch_is_not_skipped_in_silence(kit: "Kit", caplog: pytest.LogCaptureFixture) -> None:
    kit.commit(KEY, kit.stage(KEY, NAMES))
    with caplog.at_level(logging.INFO, "rmq_spark"):
        kit.commit(KEY, kit.stage(KEY, NAMES[:5]), on_conflict="skip")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "batch 0 of query q with 5 rows is skipped: the store has another batch" in record.getMessage()


def test_a_commit_says_in_the_log_what_it_did(kit: "Kit", caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rmq_spark"):
        totals = kit.commit(KEY, kit.stage(KEY, NAMES))
    assert f"rmq: batch 0 of query q: 12 rows, {totals.bytes} bytes, 2 queues" in caplog.messages


@pytest.mark.parametrize(
    ("numbers", "options", "told"),
    [
        ([5, 6], {}, ["batch 5 of query q"]),
        ([0, 1], {}, []),
        ([None], {}, []),
        ([5, 6], {"is_transaction": True}, []),
    ],
)
def test_a_query_that_does_not_begin_with_its_first_batch_is_told_once_that_others_are_missing(
    kit: "Kit", caplog: pytest.LogCaptureFixture, numbers: list[int | None], options: dict[str, object], told: list[str]
) -> None:
    for number in numbers:
        key = CommitKey("q", number)
        kit.commit(key, kit.stage(key, NAMES), **options)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == len(told)
    for warning, what in zip(warnings, told, strict=True):
        assert f"rmq: {what} is the first batch of its query in the store at {kit.root}. If earlier batches" in warning


def test_a_transaction_is_written_once_whatever_the_order_of_tries(kit: "Kit") -> None:
    for version, rows in ((3, 4), (3, 4), (2, 9), (10, 2)):
        key = CommitKey("txn:app", version)
        kit.commit(key, kit.stage(key, [f"v{version}-{n}" for n in range(rows)]), is_transaction=True)
    assert sorted(kit.all_rows()) == sorted([f"v3-{n}" for n in range(4)] + ["v10-0", "v10-1"])
    with pytest.raises(BatchConflictError, match="txnVersion"):
        kit.commit(CommitKey("txn:app", 10), kit.stage(CommitKey("txn:app", 10), ["x"]), is_transaction=True)


def test_batch_writes_are_each_their_own_and_leave_no_ledger(kit: "Kit") -> None:
    for query in ("uuid1", "uuid2"):
        kit.commit(CommitKey(query), kit.stage(CommitKey(query), NAMES))
    assert {key: len(rows) for key, rows in kit.rows().items()} == {0: 16, 1: 8}
    assert list(Path(kit.root, "rmq/ledger").iterdir()) == []
    assert kit.own_files() == []


def test_an_empty_batch_is_a_batch(kit: "Kit") -> None:
    assert kit.commit(CommitKey("q", 4), []) == CommitTotals(0, 0, 0, False)
    key = CommitKey("q", 5)
    assert kit.commit(key, kit.stage(key, ["a"], tasks=3)).rows == 1, "tasks without rows have no file"
    assert kit.commit(CommitKey("q", 5), [], on_conflict="skip") == SKIPPED
    assert kit.commit(CommitKey("w"), []) == CommitTotals(0, 0, 0, False)
    assert kit.all_rows() == ["a"]


def test_topics_are_made_as_asked_for(kit: "Kit") -> None:
    kit.commit(KEY, kit.stage(KEY, NAMES, topic="new", queues=3), queue_count=5)
    topics = json.loads(Path(kit.root, "config/topics.json").read_text())["topicConfigTable"]
    assert topics["new"]["writeQueueNums"] == 5
    assert {queue for queue, names in kit.rows("new").items() if names} == {0, 1, 2}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"create_topics": False}, NotFoundError, 'topic "other" does not exist, and createTopic=false. Create'),
        (
            {"queue_count": 2},
            StoreChangedError,
            'topic "other" has 2 write queues, and messages were prepared for queue 2',
        ),
    ],
)
def test_topics_that_cannot_take_the_rows_are_an_error_before_anything_changes(
    kit: "Kit", options: dict[str, object], error: type[StoreError], words: str
) -> None:
    kit.commit(CommitKey("q", 0), kit.stage(CommitKey("q", 0), NAMES))
    key = CommitKey("q", 1)
    files = kit.stage(key, NAMES[:5]) + kit.stage(key, NAMES, topic="other", queues=3)
    before = files_of(kit.root)
    with pytest.raises(error, match=words):
        kit.commit(key, files, **options)
    assert files_of(kit.root) == before


def test_a_topic_that_lost_queues_since_its_rows_were_staged_is_an_error(kit: "Kit") -> None:
    kit.commit(KEY, kit.stage(KEY, NAMES), queue_count=2)
    key = CommitKey("q", 1)
    with pytest.raises(StoreChangedError, match='topic "T" has 2 write queues, and messages were prepared for queue 2'):
        kit.commit(key, kit.stage(key, NAMES, queues=3), queue_count=8)


def test_a_record_that_no_segment_holds_is_an_error_before_anything_is_promised(kit: "Kit") -> None:
    with pytest.raises(OptionError, match="a segment of this store holds 4088"):
        kit.commit(KEY, kit.stage(KEY, ["a", "x" * 5000]))
    assert kit.rows() == {}
    assert [name for name in kit.own_files() if not name.startswith("staging/")] == []


def take_away(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.find(b"row") + 1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("spoil", [take_away, cut, flip])
def test_a_spoilt_file_is_found_before_anything_is_appended(kit: "Kit", spoil: Callable[[Path], None]) -> None:
    files = kit.stage(KEY, NAMES)
    spoil(Path(staged_path(kit.root, files[0].name)))
    with pytest.raises((StoreChangedError, DamageError), match=r"00000-0\.arrow"):
        kit.commit(KEY, files)
    assert kit.rows() == {}
    assert kit.ledger("q") is None
    assert not any(name.startswith("intents/") for name in kit.own_files())


def test_a_full_disk_is_an_error_before_anything_is_promised(kit: "Kit", monkeypatch: pytest.MonkeyPatch) -> None:
    files = kit.stage(KEY, NAMES)
    monkeypatch.setattr("rmq_spark.store.transaction.roll_forward.files.free_bytes", lambda _: 1000)
    with pytest.raises(DiskFullError, match="needed to append 12 messages"):
        kit.commit(KEY, files)
    monkeypatch.undo()
    assert not any(name.startswith("intents/") for name in kit.own_files())
    assert kit.commit(KEY, files).rows == 12


def die(*_: object) -> None:
    raise ProcessDeathError


def die_before(kit: "Kit", files: list[StagedFile], chunk: int, key: CommitKey = KEY, **options: object) -> None:
    """Commit, and die before the chunk of that number is appended."""
    appended = 0

    def append(section: WriteSession, records: object) -> object:
        nonlocal appended
        appended += 1
        if appended > chunk:
            raise ProcessDeathError
        return real(section, records)  # type: ignore[arg-type]

    real = WriteSession.append
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WriteSession, "append", append)
        with pytest.raises(ProcessDeathError):
            kit.commit(key, files, **options)


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_whoever_writes_next_finishes_what_a_dead_process_began(
    kit: "Kit", spread: Spread, chunk: int, caplog: pytest.LogCaptureFixture
) -> None:
    die_before(kit, kit.stage(KEY, NAMES), chunk)
    assert len(kit.all_rows()) < 12
    other = CommitKey("other", 0)
    kit.commit(other, kit.stage(other, ["x"], topic="X"))
    assert kit.rows() == spread(NAMES)
    assert f"of application 'rmq-spark', whose writer died: {[0, 5, 10][chunk]} of 12 rows" in caplog.text
    assert kit.commit(KEY, kit.stage(KEY, NAMES)) == SKIPPED
    assert kit.own_files() == []


def test_a_batch_that_follows_one_that_is_yet_to_be_finished_is_no_gap(kit: "Kit", spread: Spread) -> None:
    kit.commit(KEY, kit.stage(KEY, NAMES[:3]))
    die_before(kit, kit.stage(CommitKey("q", 1), NAMES[3:]), 1, CommitKey("q", 1))
    assert kit.commit(CommitKey("q", 2), kit.stage(CommitKey("q", 2), ["z"])).rows == 1
    assert sorted(kit.all_rows()) == sorted([*NAMES, "z"])


def test_an_intent_whose_batch_the_ledger_has_is_only_taken_away(kit: "Kit", spread: Spread) -> None:
    files = kit.stage(KEY, NAMES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Intents, "remove", die)
        with pytest.raises(ProcessDeathError):
            kit.commit(KEY, files)
    Path(staged_path(kit.root, files[0].name)).unlink()
    kit.settle()
    assert kit.rows() == spread(NAMES)
    assert kit.own_files() == []


def test_a_row_that_nobody_synced_does_not_stand_for_messages(kit: "Kit", spread: Spread) -> None:
    """A power cut may leave the row of an async commit and take the messages, while its intent is still there."""
    files = kit.stage(KEY, NAMES)
    die_before(kit, files, 1, flush="async")
    digest = sum(file.digest for file in files) % (1 << 64)
    Ledger(kit.root, kit.disk).write(LedgerRow("q", 0, 12, 999, digest, 1), is_durable=False)
    kit.settle()
    assert kit.rows() == spread(NAMES)


@pytest.mark.parametrize(("turn_chunks", "turns"), [(1, [1] * 9), (3, [1, 3, 3, 2]), (100, [1, 8])])
def test_a_turn_has_as_many_chunks_as_its_bytes_allow(
    kit: "Kit", spread: Spread, monkeypatch: pytest.MonkeyPatch, turn_chunks: int, turns: list[int]
) -> None:
    names = [f"{number:04d}" for number in range(45)]
    files, found = kit.stage(KEY, names), []
    section, append = StoreWriter.section, WriteSession.append

    def note_section(writer: StoreWriter) -> AbstractContextManager[WriteSession]:
        found.append(0)
        return section(writer)

    def note_append(one: WriteSession, records: EncodedRecords) -> Appended:
        found[-1] += 1
        return append(one, records)

    monkeypatch.setattr(StoreWriter, "section", note_section)
    monkeypatch.setattr(WriteSession, "append", note_append)
    kit.commit(KEY, files, session_bytes=turn_chunks * kit.options.chunk_bytes)
    assert [chunks for chunks in found if chunks] == turns
    assert kit.rows() == spread(names)


def test_others_get_their_turn_between_chunks_and_leave_the_living_alone(kit: "Kit", spread: Spread) -> None:
    files = kit.stage(KEY, NAMES)
    others = [CommitKey(f"other{number}") for number in range(2)]
    between = iter([kit.stage(key, ["x"]) for key in others])
    real = Intents.add_hint

    with kit.writer() as writer, pytest.MonkeyPatch.context() as patch:
        section = writer.section

        def commit_between() -> object:
            staged = next(between, None)
            if staged is not None and seen:
                kit.commit(CommitKey(staged[0].name.split("/")[0]), staged)
            return section()

        seen: list[Hint] = []
        patch.setattr(Intents, "add_hint", lambda self, intent, hint: (seen.append(hint), real(self, intent, hint)))
        patch.setattr(writer, "section", commit_between)
        commit_staged(writer, KEY, files, kit.options)
    assert [hint.rows for hint in seen] == [5, 10]
    found = kit.rows()
    assert kit.all_rows().count("x") == 1
    assert found[0].index("x") not in (0, len(found[0]) - 1), "in between"
    assert {queue: [name for name in names if name != "x"] for queue, names in found.items()} == spread(NAMES)


def test_an_error_in_the_middle_leaves_the_rest_to_the_next_writer(kit: "Kit", spread: Spread) -> None:
    files = kit.stage(KEY, NAMES)
    kit.settle()
    real = WriteSession.append
    with pytest.MonkeyPatch.context() as patch:
        calls: list[int] = []

        def append(section: WriteSession, records: object) -> object:
            calls.append(1)
            if len(calls) == 2:
                raise DiskFullError("no room")
            return real(section, records)  # type: ignore[arg-type]

        patch.setattr(WriteSession, "append", append)
        with pytest.raises(DiskFullError) as caught:
            kit.commit(KEY, files)
    assert len(kit.all_rows()) == 5
    assert kit.commit(KEY, kit.stage(KEY, NAMES)) == SKIPPED, "finished first, then found in the ledger"
    assert kit.rows() == spread(NAMES)
    assert caught.tb is not None, "kept until here with all that it holds: the lock must be free all the same"


def test_a_full_disk_at_any_moment_loses_and_doubles_nothing(
    make_kit: "type[Kit]", tmp_path: Path, spread: Spread
) -> None:
    number, has_failed = 0, True
    while has_failed:
        kit = make_kit(str(tmp_path / str(number)))
        files = kit.stage(KEY, NAMES)
        kit.settle()
        disk = FailingDisk(number)
        failing = make_kit(kit.root, disk)
        try:
            failing.commit(KEY, files)
        except DiskFullError:
            assert disk.has_failed
        kit.commit(KEY, files if kit.own_files() else kit.stage(KEY, NAMES))
        assert kit.rows() == spread(NAMES), number
        has_failed = disk.has_failed
        number += 5
    assert number > 40


def test_a_query_that_is_committed_elsewhere_is_waited_for(kit: "Kit", spread: Spread) -> None:
    files = kit.stage(KEY, NAMES)
    key = CommitKey("q", 1)
    later = kit.stage(key, ["z"])
    with kit.writer() as writer:
        section, calls = writer.section, []

        def wait_between() -> object:
            calls.append(1)
            if len(calls) == 2:
                # The other process looks once, waits, and continues when the first has given up.
                with pytest.raises(
                    LockTimeoutError, match="batch 1 of query q cannot be written: application 'rmq-spark'"
                ):
                    patient.commit(key, later)
            return section()

        patient = replace(kit, settings=replace(kit.settings, lock_timeout_ms=200), sleep=lambda _: None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer, "section", wait_between)
            commit_staged(writer, KEY, files, kit.options)
    assert kit.commit(key, later).rows == 1
    assert kit.rows() == {0: [*spread(NAMES)[0], "z"], 1: spread(NAMES)[1]}


def clear_count(kit: "Kit", *, hints: bool = True) -> None:
    """Have nobody know how many rows are in the log, as after a power cut, which may lose the hints too."""
    for name in ("q.count", "q.progress")[: 1 + hints]:
        Path(kit.root, "rmq/intents", name).unlink(missing_ok=True)


def spoil_one(kit: "Kit", files: list[StagedFile]) -> Path:
    path = Path(staged_path(kit.root, files[1].name))
    path.rename(path.with_suffix(".kept"))
    return path


def test_an_intent_that_cannot_be_finished_stops_its_query_and_nobody_else(
    kit: "Kit", spread: Spread, caplog: pytest.LogCaptureFixture
) -> None:
    files = kit.stage(KEY, NAMES)
    die_before(kit, files, 1)
    path = spoil_one(kit, files)
    other = CommitKey("other", 0)
    assert kit.commit(other, kit.stage(other, ["x"], topic="X")).rows == 1
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    intent = Path(kit.root, "rmq/intents/q.json")
    assert [word for word in (str(path), str(intent), "no such file", "are duplicated") if word not in message] == []
    again = kit.stage(KEY, NAMES)
    with pytest.raises(StoreChangedError, match="cannot be finished"):
        kit.commit(KEY, again)
    assert len(kit.all_rows()) == 5

    path.with_suffix(".kept").rename(path)
    assert kit.commit(KEY, again) == SKIPPED
    assert kit.rows() == spread(NAMES)
    assert kit.all_rows("X") == ["x"]
    assert kit.own_files() == []


def test_an_intent_that_is_given_up_lets_its_query_go_on(kit: "Kit") -> None:
    files = kit.stage(KEY, NAMES)
    die_before(kit, files, 1)
    spoil_one(kit, files)
    Path(kit.root, "rmq/intents/q.json").unlink()
    assert kit.commit(KEY, kit.stage(KEY, NAMES)).rows == 12
    assert len(kit.all_rows()) == 5 + 12, "as the error said"
    assert [name for name in kit.own_files() if name.startswith("intents/")] == []


def tear(record: bytes, other: bytes) -> bytes:
    return bytes(len(record))


def flip_body(record: bytes, other: bytes) -> bytes:
    return record[:90] + bytes([record[90] ^ 1]) + record[91:]


def flip_property(record: bytes, other: bytes) -> bytes:
    return record[:-3] + bytes([record[-3] ^ 1]) + record[-2:]


def put_another(record: bytes, other: bytes) -> bytes:
    assert len(record) == len(other)
    return other


@pytest.mark.parametrize("row", [0, 4, 8])
@pytest.mark.parametrize("damage", [tear, flip_body, flip_property, put_another])
def test_a_damaged_row_is_not_taken_for_one_that_is_yet_to_come(
    kit: "Kit",
    spread: Spread,
    damage: Callable[[bytes, bytes], bytes],
    row: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    die_before(kit, kit.stage(KEY, NAMES), 2)
    clear_count(kit)
    with kit.writer() as store, store.lock.hold():
        store._files.refresh()
        log, places = store._files.log, [0]
        while isinstance(record := log.record_at(places[-1]), Record):
            places.append(places[-1] + record.total_size)
        log.close()
    segment = Path(kit.root, "commitlog", "0" * 20)
    whole = segment.read_bytes()
    parts = [whole[begin:end] for begin, end in pairwise(places)]
    assert len(parts) == 10
    other = next(part for part in parts[row + 1 :] + parts if len(part) == len(parts[row]) and part != parts[row])
    with segment.open("r+b") as file:
        file.seek(places[row])
        file.write(damage(parts[row], other))
    kit.settle()
    assert "cannot be finished: damaged store" in caplog.text
    with segment.open("r+b") as file:
        file.seek(0)
        assert file.read() == whole.replace(parts[row], damage(parts[row], other), 1), "nothing was appended"
        file.seek(0)
        file.write(whole)
    kit.settle()
    assert kit.rows() == spread(NAMES)


def test_a_hole_as_short_as_a_filler_before_the_end_of_a_full_log_is_damage(kit: "Kit") -> None:
    kit.commit(KEY, kit.stage(KEY, NAMES))
    with kit.writer().section() as section:
        assert len([*section.records_from(0)]) == len(NAMES)
        store = section._store
        store.watermark = replace(store.watermark, end=section.segment_bytes)
        with pytest.raises(DamageError, match="before the log's end"):
            list(section.records_from(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits",
    [{"max_bytes": 0}, {"max_age_ms": 0}, {"max_bytes": 5000, "max_age_ms": 1}],
    ids=lambda limits: "_".join(limits),
)
@pytest.mark.parametrize("is_set", [False, True], ids=["called", "set"])
@pytest.mark.parametrize("chunks", [0, 1])
def test_retention_leaves_what_an_unfinished_commit_needs(
    kit: "Kit", spread: Spread, chunks: int, is_set: bool, limits: dict[str, int]
) -> None:
    early = [f"early{number}" for number in range(60)]
    kit.commit(CommitKey("w", 0), kit.stage(CommitKey("w", 0), early, topic="W"))
    files = kit.stage(KEY, NAMES)
    die_before(kit, files, chunks)
    path = spoil_one(kit, files)
    (intent,) = Intents(kit.root, Disk()).read_all()
    if is_set:
        kit.writer().set_retention(limits.get("max_age_ms"), limits.get("max_bytes"))
    for batch in range(1, 5):
        kit.commit(CommitKey("w", batch), kit.stage(CommitKey("w", batch), early, topic="W"))
        with kit.writer().section() as section:
            if not is_set:
                section.expire(**limits)
    begins = sorted(int(found.name) for found in Path(kit.root, "commitlog").iterdir())
    segment_bytes = kit.settings.sizes.segment_bytes
    assert begins[0] == intent.start // segment_bytes * segment_bytes > 0, "what is older goes"

    path.with_suffix(".kept").rename(path)
    clear_count(kit)
    if is_set:
        kit.writer().set_retention(None, None)  # else the rows go with the rest once they are finished
    kit.settle()
    assert kit.rows() == spread(NAMES)
    with kit.writer().section() as section:
        assert section.expire(max_bytes=0).segments == len(begins) - 1, "nobody needs it any more"


def test_retention_deletes_nothing_that_the_commit_in_whose_section_it_runs_needs(kit: "Kit") -> None:
    kit.writer().set_retention(None, 0)
    names = [name + "x" * 400 for name in NAMES]
    files = kit.stage(KEY, names)
    die_before(kit, files, 1, chunk_bytes=7000)
    assert sorted(found.name for found in Path(kit.root, "commitlog").iterdir())[0] == "0" * 20


def test_damage_behind_the_first_chunk_stops_the_commit_and_says_how_to_go_on(kit: "Kit") -> None:
    files = kit.stage(KEY, NAMES)
    path = Path(staged_path(kit.root, files[1].name))
    whole = path.read_bytes()
    flip(path)
    with pytest.raises(
        StoreChangedError, match=r"00001-0\.arrow.*Fix the cause, and the next write to the store finishes"
    ):
        kit.commit(KEY, files)
    assert len(kit.all_rows()) == 5
    kit.settle()
    path.write_bytes(whole)
    kit.settle()
    assert len(kit.all_rows()) == 12


def test_an_unreadable_intent_stops_everybody_for_nobody_knows_what_it_promises(kit: "Kit") -> None:
    die_before(kit, kit.stage(KEY, NAMES), 1)
    path = Path(kit.root, "rmq/intents/q.json")
    text = path.read_text()
    path.write_text(text[:50])
    with pytest.raises(DamageError, match=r"q\.json.*the intent to append"):
        kit.settle()
    path.write_text(text.replace('"v": 1', '"v": 9'))
    with pytest.raises(StoreError, match=r"q\.json has version 9"):
        kit.settle()
    path.write_text(text)
    kit.settle()
    assert kit.own_files() == []


def test_a_log_that_lost_its_end_does_not_lose_the_intent_its_place(make_kit: "type[Kit]", tmp_path: Path) -> None:
    """A power cut loses messages that were stored before an intent; others are then written at their offsets."""
    kit = make_kit(str(tmp_path / "store"))
    kit.commit(CommitKey("w"), kit.stage(CommitKey("w"), NAMES), flush="async")
    files = kit.stage(KEY, NAMES)
    die_before(kit, files, 0)
    intents = Intents(kit.root, Disk())
    (intent,) = intents.read_all()
    intents.write(replace(intent, start=intent.start + 100_000))
    path = spoil_one(kit, files)
    kit.settle()
    (moved,) = intents.read_all()
    assert moved.start == intent.start
    kit.commit(CommitKey("v"), kit.stage(CommitKey("v"), NAMES[:3]))
    path.with_suffix(".kept").rename(path)
    kit.settle()
    assert sorted(kit.all_rows()) == sorted(NAMES * 2 + NAMES[:3])


def test_rows_are_found_behind_a_start_at_which_a_broker_has_put_something_else(kit: "Kit", spread: Spread) -> None:
    kit.commit(CommitKey("w"), kit.stage(CommitKey("w"), NAMES[:4], topic="W"))
    die_before(kit, kit.stage(KEY, NAMES), 2)
    clear_count(kit)
    intents = Intents(kit.root, Disk())
    (intent,) = intents.read_all()
    intents.write(replace(intent, start=intent.start + 5))
    kit.settle()
    assert kit.rows() == spread(NAMES)


def test_who_waits_for_somebody_who_finishes_sees_progress(kit: "Kit", monkeypatch: pytest.MonkeyPatch) -> None:
    die_before(kit, kit.stage(KEY, NAMES), 0)
    signs: list[int] = []
    monkeypatch.setattr(WriteSession, "heartbeat", lambda section: signs.append(section.end))
    kit.settle()
    assert len(set(signs)) == 4, "before the first chunk and after each"


@pytest.mark.parametrize("lie", [(12, 0), (5, 1 << 40), (13, 10), (1, 3), (10, 0), (0, 0)])
def test_hints_that_the_log_does_not_bear_out_are_passed_over(kit: "Kit", spread: Spread, lie: tuple[int, int]) -> None:
    die_before(kit, kit.stage(KEY, NAMES), 2)
    intents = Intents(kit.root, Disk())
    (intent,) = intents.read_all()
    assert [hint.rows for hint in intents.hints("q")] == [5, 10]
    intents.add_hint(intent, Hint(*lie))
    clear_count(kit, hints=False)
    kit.settle()
    assert kit.rows() == spread(NAMES)


def test_without_hints_the_log_is_compared_from_where_it_ended(kit: "Kit", spread: Spread) -> None:
    kit.commit(CommitKey("w"), kit.stage(CommitKey("w"), NAMES[:4], topic="W"))
    die_before(kit, kit.stage(KEY, NAMES), 2)
    clear_count(kit)
    kit.settle()
    assert kit.rows() == spread(NAMES)


def test_hints_save_the_comparison_of_what_is_before_them(kit: "Kit", monkeypatch: pytest.MonkeyPatch) -> None:
    die_before(kit, kit.stage(KEY, NAMES), 2)
    clear_count(kit, hints=False)
    seen: list[int] = []

    def note(root: str, files: list[StagedFile], row: int, limit_bytes: int) -> Iterator[EncodedRecords]:
        seen.append(row)
        return read_chunks(root, files, row, limit_bytes)

    for module in (finishing, counting):
        monkeypatch.setattr(module, "read_chunks", note)
    kit.settle()
    assert seen == [9, 10, 10], "row 9 is compared with the hint, from row 10 on rows are looked for, then appended"


def test_with_flush_async_nothing_is_synced_but_the_promise(kit: "Kit", spread: Spread) -> None:
    kit.commit(KEY, kit.stage(KEY, NAMES), flush="async")
    assert kit.rows() == spread(NAMES)
    assert Path(kit.root, "abort").exists(), "a broker would recover the store: nothing says that it is on disk"
    kit.settle()
    assert not Path(kit.root, "abort").exists()


def test_the_steps_of_a_commit_are_synced_in_their_order(make_kit: "type[Kit]", tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path)
    kit = make_kit(str(tmp_path / "store"), disk)
    files = kit.stage(KEY, NAMES)
    first = disk.effect_count
    kit.commit(KEY, files)
    steps = [str(effect) for effect in disk.effects[first:]]

    def at(*words: str) -> int:
        (place,) = [place for place, step in enumerate(steps) if all(word in step for word in words)]
        return place

    order = [
        at("Rename", "target='store/rmq/intents/q.json'"),
        next(place for place, step in enumerate(steps) if step.startswith("Write(path='store/commitlog")),
        at("Remove(path='store/abort'"),
        at("Rename", "target='store/rmq/ledger/q.json'"),
        at("Remove(path='store/rmq/intents/q.json'"),
        at("Remove(path='store/rmq/staging/q@0/00000-0.arrow'"),
    ]
    assert order == sorted(order)
    assert "SyncFolder(path='store/rmq/intents')" in steps[order[0] : order[1]]
    assert "SyncFolder(path='store/rmq/ledger')" in steps[order[3] : order[4]]
    assert "SyncFolder(path='store/rmq/intents')" in steps[order[4] : order[5]]


@pytest.mark.parametrize("dies_in", ["append", "settle"])
@pytest.mark.parametrize("is_note_old", [True, False])
def test_a_commit_whose_rows_were_lost_from_memory_is_finished_once_and_whole(
    kit: "Kit", spread: Spread, dies_in: str, is_note_old: bool
) -> None:
    """The disk failed before the rows were on it, and was mounted again in the same boot; queues had been written."""
    first = CommitKey("first", 0)
    kit.commit(first, kit.stage(first, ["x"] * 6, topic="X"))
    kit.settle()
    root = Path(kit.root)
    watermark = root / "rmq/watermark"
    old, note = watermark.read_bytes(), read_watermarks(kit.root)[1]
    assert note is not None
    if dies_in == "append":
        die_before(kit, kit.stage(KEY, NAMES), 2)
    else:
        files = kit.stage(KEY, NAMES)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WriteSession, "settle", die)
            with pytest.raises(ProcessDeathError):
                kit.commit(KEY, files)
    for path in (root / "commitlog").iterdir():
        data, begin = path.read_bytes(), max(note.end - int(path.name), 0)
        path.write_bytes(data[:begin].ljust(len(data), b"\0"))
    if is_note_old:
        watermark.write_bytes(old)
    kit.settle()
    assert kit.rows() == spread(NAMES)
    assert kit.all_rows("X") == ["x"] * 6
    assert kit.commit(KEY, kit.stage(KEY, NAMES)) == SKIPPED
    assert kit.own_files() == []
    assert check(kit.root).is_healthy
