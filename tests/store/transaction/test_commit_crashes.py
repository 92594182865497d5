"""Commits that die at any system call: all rows come once, in their order, and the ledger says what the log has.

A commit is recorded on a disk that remembers. Then each state that a crash could have left is taken up by another
process, which finishes what was promised, and by the query, which writes the batch again as Spark would.
"""

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import StoreError
from rmq_spark.store.model import CommitKey
from rmq_spark.store.testing.crash_disk import CrashDisk, ProcessDeathError
from rmq_spark.store.testing.crash_image import Image
from rmq_spark.store.testing.disk_effects import Rename
from rmq_spark.store.transaction.intents import Intents

if TYPE_CHECKING:
    from tests.store.transaction.conftest import Kit

ANOTHER_BOOT = "another boot"
BEFORE = [f"before{number}" for number in range(5)]
FOREIGN = [f"foreign{number}" for number in range(4)]
NAMES = [f"row{number}" + "x" * (number * 7 % 40) for number in range(14)]
KEY = CommitKey("q", 1)
Spread = Callable[..., dict[int, list[str]]]
MakeKit = Callable[..., "Kit"]


@dataclass
class Life:
    """Effects on the disk; those of the commit are [begun, done)."""

    kit: "Kit"
    disk: CrashDisk
    begun: int
    done: int


def live(make_kit: MakeKit, root: Path, flush: str) -> Life:
    """Commit a batch, messages of somebody else, which nobody syncs, and another batch."""
    root.mkdir()
    disk = CrashDisk(root)
    kit = make_kit(str(root / "store"), disk)
    kit.commit(CommitKey("q", 0), kit.stage(CommitKey("q", 0), BEFORE))
    kit.commit(CommitKey("w"), kit.stage(CommitKey("w"), FOREIGN, topic="F"), flush="async")
    files = kit.stage(KEY, NAMES)
    begun = disk.effect_count
    kit.commit(KEY, files, flush=flush)
    return Life(kit, disk, begun, disk.effect_count)


def joined(*parts: dict[int, list[str]]) -> dict[int, list[str]]:
    return {queue: [name for part in parts for name in part.get(queue, [])] for queue in range(2)}


def revived(make_kit: MakeKit, image: Image, folder: Path) -> "Kit":
    """Return the store as the crash left it."""
    shutil.rmtree(folder, ignore_errors=True)
    image.write_to(folder)
    return make_kit(str(folder / "store"))


def check(kit: "Kit", spread: Spread, *, is_done: bool, is_power_cut: bool, is_synced: bool) -> None:
    """Open the store as another process, then as the query, and compare its rows with the expected ones."""
    kept, whole = spread(BEFORE), joined(spread(BEFORE), spread(NAMES))
    is_promised = Intents(kit.root, Disk()).read("q") is not None
    kit.settle()
    found = kit.rows()
    if is_synced or not is_power_cut:
        assert found == (whole if is_promised or is_done else found)
        assert found in (kept, whole), "all or nothing"
    else:
        assert all(names == whole[queue][: len(names)] for queue, names in found.items()), "nothing twice, in order"
    foreign = sorted(kit.all_rows("F"))
    assert foreign == sorted(set(foreign)) if is_power_cut else foreign == FOREIGN
    row = kit.ledger("q")
    assert row is not None
    if is_synced or not is_power_cut:
        assert (row.batch_id, row.rows) == ((1, len(NAMES)) if found == whole else (0, len(BEFORE)))
    assert not any(name.startswith("intents/") for name in kit.own_files())

    totals = kit.commit(KEY, kit.stage(KEY, NAMES))
    assert totals.skipped == (row.batch_id == 1)
    if is_synced or not is_power_cut:
        assert kit.rows() == whole
    assert kit.ledger("q") is not None
    following = CommitKey("q", 2)
    kit.commit(following, kit.stage(following, ["last"]))
    assert kit.all_rows().count("last") == 1


def check_images(
    life: Life,
    points: Sequence[int],
    check_one: Callable[[Image, int, bool], None],
    seed: int,
    *,
    subset_count: int,
) -> int:
    count = 0
    for point in points:
        for image in life.disk.images(point, seed, subset_count=subset_count):
            count += 1
            is_power_cut = "power cut" in str(image)
            with pytest.MonkeyPatch.context() as patch:
                if is_power_cut:
                    patch.setattr("rmq_spark.store.disk.host.boot_id", lambda: ANOTHER_BOOT)
                try:
                    check_one(image, point, is_power_cut)
                except (AssertionError, Exception) as error:
                    raise AssertionError(f"{image}: {error!r}") from error
    return count


def crash(make_kit: MakeKit, spread: Spread, tmp_path: Path, flush: str, seed: int, every: int) -> int:
    """Crash a commit at each `every`th effect and check the store; return the number of crashes."""
    life = live(make_kit, tmp_path / "live", flush)
    assert life.kit.rows() == joined(spread(BEFORE), spread(NAMES))

    def check_one(image: Image, point: int, is_power_cut: bool) -> None:
        kit = revived(make_kit, image, tmp_path / "image")
        is_done = point >= life.done
        check(kit, spread, is_done=is_done, is_power_cut=is_power_cut, is_synced=flush == "sync")

    points = range(life.begun, life.done + 1)[seed % every :: every]
    return check_images(life, points, check_one, seed, subset_count=2)


@pytest.mark.slow
@pytest.mark.parametrize("flush", ["sync", "async"])
def test_a_commit_that_dies_somewhere(make_kit: MakeKit, spread: Spread, tmp_path: Path, flush: str) -> None:
    assert crash(make_kit, spread, tmp_path, flush, 3, 16) > 20


@pytest.mark.torture
@pytest.mark.parametrize("flush", ["sync", "async"])
@pytest.mark.parametrize("seed", range(8))
def test_a_commit_that_dies_anywhere(make_kit: MakeKit, spread: Spread, tmp_path: Path, flush: str, seed: int) -> None:
    print(f"{crash(make_kit, spread, tmp_path, flush, seed, 8)} images")


def die_and_finish(make_kit: MakeKit, root: Path, after: int) -> Life:
    """Die `after` effects into the commit; have another process finish, on the same disk."""
    root.mkdir()
    disk = CrashDisk(root)
    kit = make_kit(str(root / "store"), disk)
    kit.commit(CommitKey("q", 0), kit.stage(CommitKey("q", 0), BEFORE))
    kit.commit(CommitKey("w"), kit.stage(CommitKey("w"), FOREIGN, topic="F"), flush="async")
    files = kit.stage(KEY, NAMES)
    disk.die_at(disk.effect_count + after)
    with contextlib.suppress(ProcessDeathError):
        kit.commit(KEY, files)
    disk.revive()
    begun = disk.effect_count
    kit.settle()
    return Life(kit, disk, begun, disk.effect_count)


def crash_twice(make_kit: MakeKit, spread: Spread, tmp_path: Path, deaths: Sequence[int], every: int) -> int:
    """Die in a commit, then in the process that finishes it, and have a third one finish; return how many crashes."""
    count = 0
    for death in deaths:
        shutil.rmtree(tmp_path / "live", ignore_errors=True)
        life = die_and_finish(make_kit, tmp_path / "live", death)
        finished = life.kit.rows() == joined(spread(BEFORE), spread(NAMES))

        def check_one(
            image: Image, point: int, is_power_cut: bool, life: Life = life, finished: bool = finished
        ) -> None:
            kit = revived(make_kit, image, tmp_path / "image")
            is_done = finished and point >= life.done
            check(kit, spread, is_done=is_done, is_power_cut=is_power_cut, is_synced=True)

        points = range(life.begun, life.done + 1)[death % every :: every]
        count += check_images(life, points, check_one, death, subset_count=1)
    return count


def test_who_finishes_may_die_too(make_kit: MakeKit, spread: Spread, tmp_path: Path) -> None:
    assert crash_twice(make_kit, spread, tmp_path, (8, 36, 64), 24) > 15


@pytest.mark.slow
@pytest.mark.parametrize("name", ["intents/q.json", "ledger/q.json"])
def test_who_finishes_relies_on_no_name_that_is_not_on_disk(
    make_kit: MakeKit, spread: Spread, tmp_path: Path, name: str
) -> None:
    """Die when a file has its name and the name is not yet synced: the next process sees it, a power cut takes it."""
    life = live(make_kit, tmp_path / "measured", "sync")
    renamed = Rename(f"store/rmq/{name}.tmp", f"store/rmq/{name}")
    (place,) = [place for place in range(life.begun, life.done) if life.disk.effects[place] == renamed]
    assert crash_twice(make_kit, spread, tmp_path, [place + 1 - life.begun], 6) > 5


@pytest.mark.torture
@pytest.mark.parametrize("first", range(8))
def test_who_finishes_may_die_anywhere_too(make_kit: MakeKit, spread: Spread, tmp_path: Path, first: int) -> None:
    print(f"{crash_twice(make_kit, spread, tmp_path, range(first, 104, 8), 9)} images")


def fail_syncs(make_kit: MakeKit, spread: Spread, tmp_path: Path, failing: range) -> tuple[int, int]:
    """Fail one sync of a commit, commit the batch again, and cut the power; return counts of failures and images."""
    failures = images = 0
    for number in failing:
        root = tmp_path / f"live{number}"
        root.mkdir()
        disk = CrashDisk(root)
        kit = make_kit(str(root / "store"), disk)
        kit.commit(CommitKey("q", 0), kit.stage(CommitKey("q", 0), BEFORE))
        kit.commit(CommitKey("w"), kit.stage(CommitKey("w"), FOREIGN, topic="F"), flush="async")
        begun = disk.sync_count
        disk.fail_syncs({begun + number})
        try:
            kit.commit(KEY, kit.stage(KEY, NAMES))
        except StoreError:
            failures += 1
        if disk.sync_count <= begun + number:
            break
        kit.commit(KEY, kit.stage(KEY, NAMES))
        life = Life(kit, disk, 0, disk.effect_count)

        def check_one(image: Image, point: int, is_power_cut: bool) -> None:
            check(revived(make_kit, image, tmp_path / "image"), spread, is_done=True, is_power_cut=True, is_synced=True)

        images += check_images(life, [disk.effect_count], check_one, number, subset_count=2)
        shutil.rmtree(root)
    print(f"{failures} failures, {images} images")
    return failures, images


def test_a_commit_whose_sync_failed_once_is_whole_after_a_power_cut(
    make_kit: MakeKit, spread: Spread, tmp_path: Path
) -> None:
    failures, _ = fail_syncs(make_kit, spread, tmp_path, range(0, 60, 3))
    assert failures > 3


@pytest.mark.torture
def test_any_sync_of_a_commit_may_fail(make_kit: MakeKit, spread: Spread, tmp_path: Path) -> None:
    failures, _ = fail_syncs(make_kit, spread, tmp_path, range(60))
    assert failures > 10
