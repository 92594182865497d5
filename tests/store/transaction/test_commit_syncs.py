"""Proofs that a commit needs its syncs: without one of them, a power cut loses or doubles rows, or blocks the query.

`docs/DECISIONS.md` has the table of these syncs.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rmq_spark.store.disk.write import Disk, WritableFile
from rmq_spark.store.errors import StoreError
from rmq_spark.store.model import CommitKey
from rmq_spark.store.testing.crash_disk import CrashDisk
from rmq_spark.store.testing.crash_image import Image
from rmq_spark.store.transaction.intents import Intents

if TYPE_CHECKING:
    from tests.store.transaction.conftest import Kit

BEFORE = [f"before{number}" for number in range(5)]
NAMES = [f"row{number}" + "x" * (number * 7 % 40) for number in range(14)]
KEY = CommitKey("q", 1)
MakeKit = Callable[..., "Kit"]


def omit_syncs(monkeypatch: pytest.MonkeyPatch, is_omitted: Callable[[str], bool]) -> None:
    """Omit the syncs of the files and folders with the given paths."""
    sync_file, sync_folder = WritableFile.sync, Disk.sync_folder

    def file_or_nothing(self: WritableFile) -> None:
        if not is_omitted(self.path):
            sync_file(self)

    def folder_or_nothing(self: Disk, path: str) -> None:
        if not is_omitted(path + "/"):
            sync_folder(self, path)

    monkeypatch.setattr(WritableFile, "sync", file_or_nothing)
    monkeypatch.setattr(Disk, "sync_folder", folder_or_nothing)


def lives_after_power_cuts(
    make_kit: MakeKit, folder: Path, monkeypatch: pytest.MonkeyPatch, is_omitted: Callable[[str], bool]
) -> Iterator[tuple[Image, "Kit"]]:
    """Commit a batch without some syncs. Yield states that a power cut may leave, with their stores after a boot."""
    (folder / "live").mkdir(parents=True)
    disk = CrashDisk(folder / "live")
    kit = make_kit(str(folder / "live" / "store"), disk)
    kit.commit(CommitKey("q", 0), kit.stage(CommitKey("q", 0), BEFORE))
    with monkeypatch.context() as patch:
        omit_syncs(patch, is_omitted)
        staged = kit.stage(KEY, NAMES)
        begun = disk.effect_count
        kit.commit(KEY, staged)
    for point in range(begun, disk.effect_count + 1):
        for image in disk.images(point, 3, subset_count=2):
            if "power cut" not in str(image):
                continue
            shutil.rmtree(folder / "image", ignore_errors=True)
            image.write_to(folder / "image")
            with monkeypatch.context() as patch:
                patch.setattr("rmq_spark.store.disk.host.boot_id", lambda: "another boot")
                yield image, make_kit(str(folder / "image" / "store"))


def rows_after_repeat(kit: "Kit") -> list[str]:
    """Write the batch again, as Spark does after a power cut, and return all rows of the store, sorted."""
    kit.commit(KEY, kit.stage(KEY, NAMES))
    return sorted(kit.all_rows())


def is_below(name: str, ending: str = "") -> Callable[[str], bool]:
    """Return a function that says whether a path is below a folder of this name, and ends with this text."""
    return lambda path: f"/{name}/" in path and path.endswith(ending)


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_omitted",
    [
        is_below("staging", ".arrow"),
        is_below("staging", "/"),
        is_below("intents"),
        is_below("commitlog"),
        is_below("ledger"),
    ],
    ids=["staged rows", "names of staged rows", "intent", "log", "ledger"],
)
def test_commit_without_one_of_its_syncs_is_not_exactly_once(
    make_kit: MakeKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_omitted: Callable[[str], bool]
) -> None:
    faults = []
    for image, kit in lives_after_power_cuts(make_kit, tmp_path, monkeypatch, is_omitted):
        try:
            rows = rows_after_repeat(kit)
        except StoreError as error:
            faults.append(f"{image}: {error}")
        else:
            faults += [] if rows == sorted([*BEFORE, *NAMES]) else [f"{image}: {rows}"]
        if faults:
            break
    assert faults
    print(faults)


@pytest.mark.slow
def test_commit_whose_staged_rows_are_lost_cannot_be_abandoned(
    make_kit: MakeKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So staged rows are synced, although Spark repeats a batch that was not committed: the log has a part of them."""
    doubled = 0
    for _, kit in lives_after_power_cuts(make_kit, tmp_path, monkeypatch, is_below("staging")):
        Intents(kit.root, Disk()).remove("q")
        rows = rows_after_repeat(kit)
        doubled += len(rows) > len(set(rows))
        if doubled:
            break
    assert doubled
