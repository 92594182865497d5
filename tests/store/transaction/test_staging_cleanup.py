"""Removal of staging files: old orphans are removed, and files of an intent never are."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rmq_spark.store.log.write_session import WriteSession
from rmq_spark.store.model import CommitKey
from rmq_spark.store.testing.crash_disk import ProcessDeathError
from rmq_spark.store.transaction.commit import commit_staged
from rmq_spark.store.transaction.intents import StagedFile
from rmq_spark.store.transaction.ledger import folder_of
from rmq_spark.store.transaction.staging import staged_path
from rmq_spark.store.transaction.staging_cleanup import abort_staged, find_orphans, sweep_staging

if TYPE_CHECKING:
    from tests.store.transaction.conftest import Kit

NAMES = [f"row{number}" for number in range(12)]
DAY_MS = 24 * 3_600_000
KEY = CommitKey("q", 3)


def make_older(kit: "Kit", files: list[StagedFile], age_ms: int, *, now_ms: int) -> None:
    """Set back the times of files and their folder."""
    seconds = (now_ms - age_ms) / 1000
    for file in files:
        os.utime(staged_path(kit.root, file.name), (seconds, seconds))
        os.utime(Path(staged_path(kit.root, file.name)).parent, (seconds, seconds))


def die_in_commit(kit: "Kit", key: CommitKey, files: list[StagedFile]) -> None:
    def die(section: WriteSession, records: object) -> None:
        raise ProcessDeathError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WriteSession, "append", die)
        with pytest.raises(ProcessDeathError):
            kit.commit(key, files)


def staged(kit: "Kit") -> list[str]:
    return [name.removeprefix("staging/") for name in kit.own_files() if name.startswith("staging/")]


def test_abort_staged_leaves_no_file(kit: "Kit") -> None:
    files = kit.stage(KEY, NAMES)
    abort_staged(kit.root, kit.disk, folder_of(KEY), files[:1])
    assert staged(kit) == ["q@3/00001-0.arrow"]
    abort_staged(kit.root, kit.disk, folder_of(KEY), files)
    assert staged(kit) == []
    assert not Path(kit.root, "rmq/staging", folder_of(KEY)).exists()
    abort_staged(kit.root, kit.disk, folder_of(KEY), files)


def test_abort_staged_keeps_files_of_an_intent(kit: "Kit") -> None:
    files, stray = kit.stage(KEY, NAMES), kit.stage(KEY, ["x"], tasks=1)
    die_in_commit(kit, KEY, files)
    abort_staged(kit.root, kit.disk, folder_of(KEY), files + stray)
    assert staged(kit) == [file.name for file in files]
    kit.settle()
    assert sorted(kit.all_rows()) == sorted(NAMES)


def test_abort_staged_keeps_all_files_if_intents_are_unreadable(kit: "Kit", caplog: pytest.LogCaptureFixture) -> None:
    files = kit.stage(KEY, NAMES)
    die_in_commit(kit, KEY, files)
    Path(kit.root, "rmq/intents/q.json").write_text("{")
    abort_staged(kit.root, kit.disk, folder_of(KEY), files)
    assert len(staged(kit)) == 2
    assert "staging files remain" in caplog.text


@pytest.mark.parametrize(
    ("batch_id", "age_ms", "goes"),
    [
        (2, DAY_MS + 1000, True),
        (2, DAY_MS - 1000, True),  # the ledger has passed it
        (3, 16 * 60_000, True),
        (3, 14 * 60_000, False),  # a task of a restarted query may be about to finish it
        (4, 16 * 60_000, False),
        (4, DAY_MS - 1000, False),
        (4, DAY_MS + 1000, True),
        (None, DAY_MS - 1000, False),
        (None, DAY_MS + 1000, True),
    ],
)
def test_sweep_staging_removes_files_of_committed_batches_sooner(
    kit: "Kit", batch_id: int | None, age_ms: int, goes: bool
) -> None:
    kit.commit(KEY, kit.stage(KEY, NAMES))
    key = CommitKey("q", batch_id)
    files, now_ms = kit.stage(key, NAMES), 1_800_000_000_000
    make_older(kit, files, age_ms, now_ms=now_ms)
    assert sweep_staging(kit.root, kit.disk, now_ms, DAY_MS) == (2 if goes else 0)
    assert staged(kit) == ([] if goes else [file.name for file in files])
    assert Path(kit.root, "rmq/staging", folder_of(key)).exists() is not goes


def test_sweep_staging_keeps_a_young_file_in_an_old_folder(kit: "Kit") -> None:
    kit.commit(KEY, kit.stage(KEY, NAMES))
    files, now_ms = kit.stage(CommitKey("w"), NAMES), 1_800_000_000_000
    make_older(kit, files, 2 * DAY_MS, now_ms=now_ms)
    os.utime(staged_path(kit.root, files[0].name), (now_ms / 1000, now_ms / 1000))
    assert sweep_staging(kit.root, kit.disk, now_ms, DAY_MS) == 1
    assert staged(kit) == [files[0].name]
    assert list(find_orphans(kit.root, kit.disk, now_ms, DAY_MS)) == []


def test_sweep_staging_keeps_old_files_of_an_intent(kit: "Kit") -> None:
    files, now_ms = kit.stage(KEY, NAMES), 1_800_000_000_000
    stray = kit.stage(KEY, ["x"], tasks=1)
    die_in_commit(kit, KEY, files)
    make_older(kit, files + stray, 9 * DAY_MS, now_ms=now_ms)
    assert sweep_staging(kit.root, kit.disk, now_ms, DAY_MS) == 1
    assert staged(kit) == [file.name for file in files]


def test_commit_sweeps_old_files_of_others(kit: "Kit") -> None:
    old, young = kit.stage(CommitKey("w"), NAMES), kit.stage(CommitKey("v"), NAMES)
    now_ms = 1_800_000_000_000
    make_older(kit, old, 2 * DAY_MS, now_ms=now_ms)
    make_older(kit, young, 0, now_ms=now_ms)
    kit.now_ms = lambda: now_ms  # type: ignore[method-assign]
    kit.commit(KEY, kit.stage(KEY, NAMES))
    assert staged(kit) == [file.name for file in young]


def test_commit_succeeds_if_its_sweep_fails(kit: "Kit", caplog: pytest.LogCaptureFixture) -> None:
    old = kit.stage(CommitKey("w", 1), NAMES)
    kit.commit(CommitKey("other", 0), kit.stage(CommitKey("other", 0), ["x"]))
    now_ms = 1_800_000_000_000
    make_older(kit, old, 2 * DAY_MS, now_ms=now_ms)
    Path(kit.root, "rmq/ledger/w.json").write_text("{")
    kit.now_ms = lambda: now_ms  # type: ignore[method-assign]
    with kit.writer() as writer:
        files = kit.stage(KEY, NAMES)
        assert commit_staged(writer, KEY, files, kit.options).rows == 12
    assert "is in the store, but staging files in rmq/ remain" in caplog.text
