"""The disks for tests: what a crash may leave is just that, all of that, and the same for the same seed."""

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import DiskFullError, StoreError
from rmq_spark.store.testing.crash_disk import CrashDisk, ProcessDeathError
from rmq_spark.store.testing.crash_image import SECTOR_BYTES, Image, read_contents
from rmq_spark.store.testing.disk_effects import Remove, Write
from rmq_spark.store.testing.failing_disk import FailingDisk

SEEDS = range(30)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


def every_image(disk: CrashDisk, point: int | None = None, seeds: range = SEEDS) -> Iterator[Image]:
    for seed in seeds:
        yield from disk.images(disk.effect_count if point is None else point, seed)


def work_anyhow(root: Path, disk: CrashDisk, chance: random.Random) -> Iterator[None]:
    """Do one random thing after another, as long as somebody asks."""
    files: list[str] = []
    while True:
        dice = chance.random()
        if dice < 0.2 or not files:
            folder = root / chance.choice(["", "a", "b", "a/c"])
            disk.make_folder(str(folder))
            files.append(str(folder / str(chance.random())))
            disk.create(files[-1], chance.choice([0, 100, 4096]))
        elif dice < 0.6:
            with disk.open(chance.choice(files)) as file:
                file.write(chance.randrange(3000), chance.randbytes(chance.randrange(1, 3000)))
                if chance.random() < 0.3:
                    file.sync()
        elif dice < 0.7:
            disk.sync_folder(os.path.dirname(chance.choice(files)))
        elif dice < 0.9:
            (disk.replace if chance.random() < 0.5 else disk.replace_unsynced)(chance.choice(files), b"new")
        else:
            disk.remove(files.pop(chance.randrange(len(files))))
        yield


def test_a_killed_process_leaves_what_the_disk_showed_at_that_moment(root: Path) -> None:
    (root / "before").write_bytes(b"was there")
    disk = CrashDisk(root)
    seen = {0: read_contents(root)}
    work = work_anyhow(root, disk, random.Random(5))
    for _ in range(100):
        next(work)
        seen[disk.effect_count] = read_contents(root)
    for point, contents in seen.items():
        first = next(disk.images(point, seed=0))
        assert first.name.startswith("killed, before effect")
        assert first.contents == contents, point


def test_an_image_becomes_real_just_as_it_is_and_zeros_take_no_room(root: Path, tmp_path: Path) -> None:
    disk = CrashDisk(root)
    disk.create(str(root / "sparse"), 1 << 20)
    with disk.open(str(root / "sparse")) as file:
        file.write(10, b"\0\0data\0\0")
    work = work_anyhow(root, disk, random.Random(6))
    for _ in range(30):
        next(work)
    for number, image in enumerate(disk.images(disk.effect_count, seed=1)):
        image.write_to(tmp_path / str(number))
        assert read_contents(tmp_path / str(number)) == image.contents
        if "sparse" in image.contents:
            assert (tmp_path / str(number) / "sparse").stat().st_blocks <= 8


def test_an_image_is_not_written_over_something_else(root: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_bytes(b"")
    with pytest.raises(AssertionError, match="not empty"):
        next(CrashDisk(root).images(0, 0)).write_to(tmp_path / "full")


def test_what_was_synced_stays_and_what_was_not_may_be_lost(root: Path) -> None:
    disk = CrashDisk(root)
    path = str(root / "file")
    disk.create(path, 8)
    disk.sync_folder(str(root))
    with disk.open(path) as file:
        file.write(0, b"safe")
        file.sync()
        file.write(4, b"late")
    assert {image.contents["file"] for image in every_image(disk)} == {b"safelate", b"safe\0\0\0\0"}


def test_what_a_failed_sync_should_have_written_may_be_lost_whatever_is_synced_later(root: Path) -> None:
    disk = CrashDisk(root)
    path = str(root / "file")
    disk.create(path, 2 * SECTOR_BYTES)
    disk.sync_folder(str(root))
    disk.fail_syncs({1})
    with disk.open(path) as file:
        file.write(0, b"a" * 2 * SECTOR_BYTES)
        with pytest.raises(StoreError, match="Input/output error"):
            file.sync()
    with disk.open(path) as file:
        assert file.read(0, 1) == b"a"
        file.sync()
        file.write(SECTOR_BYTES, b"b" * SECTOR_BYTES)
        file.sync()
    found = {image.contents["file"] for image in every_image(disk)}
    assert found == {first * SECTOR_BYTES + b"b" * SECTOR_BYTES for first in (b"a", b"\0")}
    with disk.open(path) as file:
        file.write(0, b"a" * SECTOR_BYTES)
        file.sync()
    assert {image.contents["file"] for image in every_image(disk)} == {b"a" * SECTOR_BYTES + b"b" * SECTOR_BYTES}


def test_a_name_may_be_lost_although_the_bytes_behind_it_were_synced(root: Path) -> None:
    disk = CrashDisk(root)
    disk.create(str(root / "file"), 4)
    with disk.open(str(root / "file")) as file:
        file.write(0, b"safe")
        file.sync()
    assert {image.contents.get("file") for image in every_image(disk)} == {b"safe", None}


def test_a_name_may_stay_although_the_bytes_behind_it_are_lost(root: Path) -> None:
    disk = CrashDisk(root)
    disk.create(str(root / "file"), 0)
    with disk.open(str(root / "file")) as file:
        file.write(0, b"late")
    assert {image.contents.get("file") for image in every_image(disk)} == {b"late", b"", None}


def test_names_of_one_folder_are_lost_from_the_last_to_the_first(root: Path) -> None:
    disk = CrashDisk(root)
    for name in "abc":
        disk.create(str(root / name), 0)
    disk.remove(str(root / "a"))
    left = {frozenset(image.contents) for image in every_image(disk)}
    assert left == {frozenset(names) for names in ("", "a", "ab", "abc", "bc")}


def test_names_of_two_folders_are_lost_independently(root: Path) -> None:
    (root / "x").mkdir()
    (root / "y").mkdir()
    disk = CrashDisk(root)
    for folder in "xy":
        disk.create(str(root / folder / "file"), 0)
    left = {frozenset(name for name in image.contents if "/" in name) for image in every_image(disk)}
    assert left == {frozenset(names) for names in ((), ("x/file",), ("y/file",), ("x/file", "y/file"))}


def test_a_folder_whose_name_is_lost_takes_all_in_it_along(root: Path) -> None:
    disk = CrashDisk(root)
    disk.make_folder(str(root / "folder"))
    disk.replace(str(root / "folder" / "file"), b"synced")
    assert {"folder/file" in image.contents for image in every_image(disk)} == {True, False}
    disk.sync_folder(str(root))
    assert {image.contents.get("folder/file") for image in every_image(disk)} == {b"synced"}


def test_of_a_long_write_any_sectors_may_be_missing_and_a_sector_is_never_torn(root: Path) -> None:
    (root / "file").write_bytes(b"-" * 4096)
    disk = CrashDisk(root)
    with disk.open(str(root / "file")) as file:
        file.write(100, b"1" * 3000)
        file.write(1000, b"2" * 1000)
    versions = [bytearray(b"-" * 4096) for _ in range(3)]
    for version in versions[1:]:
        version[100:3100] = b"1" * 3000
    versions[2][1000:2000] = b"2" * 1000
    seen: list[set[int]] = [set() for _ in range(8)]
    for image in every_image(disk, seeds=range(200)):
        data = image.contents["file"]
        assert data is not None
        for sector in range(8):
            place = slice(sector * SECTOR_BYTES, (sector + 1) * SECTOR_BYTES)
            fits = [number for number in range(3) if versions[number][place] == data[place]]
            assert fits, (image, sector)
            seen[sector].update(fits[:1])
    assert seen == [{0, 1}, {0, 1, 2}, {0, 1, 2}, {0, 1, 2}, {0, 1}, {0, 1}, {0, 1}, {0}]


def test_a_process_killed_while_it_writes_leaves_a_part_that_ends_with_a_sector(root: Path) -> None:
    (root / "file").write_bytes(bytes(4096))
    disk = CrashDisk(root)
    with disk.open(str(root / "file")) as file:
        file.write(100, b"x" * 3000)
    torn = {
        len(image.contents["file"].rstrip(b"\0"))  # type: ignore[union-attr]
        for image in every_image(disk, point=0)
        if "written up to" in image.name
    }
    assert torn == {512, 1024, 1536, 2048, 2560, 3072}
    assert "position=100, size=3000" in str(next(disk.images(0, 0)))


@pytest.mark.parametrize("base", [None, b"old" * 400])
def test_replacing_is_atomic_at_every_crash_and_done_once_it_returned(root: Path, base: bytes | None) -> None:
    new = b"new" * 1000
    if base is not None:
        (root / "file").write_bytes(base)
    disk = CrashDisk(root)
    disk.replace(str(root / "file"), new)
    for point in range(disk.effect_count):
        for image in every_image(disk, point):
            assert image.contents.get("file") in (base, new), image
    assert {image.contents["file"] for image in every_image(disk)} == {new}


def test_replacing_without_a_sync_survives_a_kill_but_not_a_power_cut(root: Path) -> None:
    new = b"new" * 1000
    (root / "file").write_bytes(b"old")
    disk = CrashDisk(root)
    disk.replace_unsynced(str(root / "file"), new)
    images = [image for point in range(disk.effect_count + 1) for image in every_image(disk, point)]
    assert {image.contents["file"] for image in images if image.name.startswith("killed")} == {b"old", new}
    assert {image.contents["file"] for image in images} > {b"old", b"", new}


def test_the_same_seed_gives_the_same_images_in_any_order(root: Path) -> None:
    disk = CrashDisk(root)
    work = work_anyhow(root, disk, random.Random(7))
    for _ in range(20):
        next(work)
    points = range(disk.effect_count + 1)
    up = {point: list(disk.images(point, seed=3)) for point in points}
    down = {point: list(disk.images(point, seed=3)) for point in reversed(points)}
    assert up == down
    assert any(list(disk.images(point, seed=4)) != up[point] for point in points)


def test_no_two_images_of_a_point_are_alike(root: Path) -> None:
    disk = CrashDisk(root)
    work = work_anyhow(root, disk, random.Random(8))
    for _ in range(20):
        next(work)
    for point in range(disk.effect_count + 1):
        images = list(disk.images(point, seed=1, subset_count=20))
        assert all(one.contents != other.contents for one in images for other in images if one is not other)


def test_a_file_is_the_same_file_under_its_new_name(root: Path) -> None:
    disk = CrashDisk(root)
    disk.create(str(root / "file.tmp"), 0)
    with disk.open(str(root / "file.tmp")) as file:
        file.write(0, b"one")
        disk.calls.rename(str(root / "file.tmp"), str(root / "file"))
        disk.create(str(root / "file.tmp"), 0)
        file.write(0, b"two")
    assert next(disk.images(disk.effect_count, 0)).contents == {"file": b"two", "file.tmp": b""}


def test_a_disk_that_died_does_nothing_until_the_next_life(root: Path) -> None:
    disk = CrashDisk(root)
    disk.die_at(3)
    with pytest.raises(ProcessDeathError, match="effect 3"):
        disk.replace(str(root / "file"), b"new")
    with pytest.raises(ProcessDeathError):
        disk.remove(str(root / "file.tmp"))
    assert os.listdir(root) == ["file.tmp"]  # created, written and synced, not renamed
    disk.revive()
    disk.replace(str(root / "file"), b"newer")
    assert os.listdir(root) == ["file"]
    assert disk.effects[3] == Remove("file.tmp")


def test_a_power_cut_in_the_second_life_takes_what_the_first_did_not_sync(root: Path) -> None:
    (root / "file").write_bytes(bytes(4))
    disk = CrashDisk(root)
    disk.die_at(1)
    with disk.open(str(root / "file")) as file:
        file.write(0, b"1")
        with pytest.raises(ProcessDeathError):
            file.sync()
    disk.revive()
    disk.create(str(root / "other"), 0)
    assert {image.contents["file"] for image in every_image(disk)} == {b"1\0\0\0", b"\0\0\0\0"}


def test_what_others_made_or_what_lies_outside_is_no_part_of_the_recording(root: Path, tmp_path: Path) -> None:
    disk = CrashDisk(root)
    (root / "strange").write_bytes(b"")
    with pytest.raises(AssertionError, match="made by somebody else"):
        disk.open(str(root / "strange"))
    with pytest.raises(AssertionError, match="outside"):
        disk.make_folder(str(tmp_path / "elsewhere"))


def test_a_disk_fails_just_once_and_where_it_was_told_to(root: Path) -> None:
    disk = FailingDisk(1)
    disk.create(str(root / "file"), 4096)
    with disk.open(str(root / "file")) as file:
        with pytest.raises(DiskFullError, match="No space left"):
            file.write(0, b"x" * 2100)
        assert file.read(0, 4096) == b"x" * 1024 + bytes(3072)
        assert disk.has_failed
        file.write(0, b"y")
    assert disk.effect_count == 3


def test_a_disk_can_fail_for_a_while_with_any_error(root: Path) -> None:
    disk = FailingDisk(0, errno.EIO, times=2)
    for _ in range(2):
        with pytest.raises(StoreError, match="Input/output error"):
            disk.make_folder(str(root / "folder"))
    assert not (root / "folder").exists()
    disk.make_folder(str(root / "folder"))
    assert (root / "folder").is_dir()


def test_a_failing_disk_can_stand_before_one_that_records(root: Path) -> None:
    recording = CrashDisk(root)
    disk: Disk = FailingDisk(1, calls=recording.calls)
    disk.create(str(root / "file"), 4096)
    with disk.open(str(root / "file")) as file:
        with pytest.raises(DiskFullError):
            file.write(0, b"x" * 2100)
        file.sync()
    assert Write("file", 0, 0, b"x" * 1024) in recording.effects
    assert recording.effect_count == 3
