"""The disks for tests: CrashDisk and its images, FailingDisk."""

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmq_spark.store.disk.write import Disk
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
    """Yield after each of an endless sequence of random changes."""
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


def test_images_of_a_killed_process_have_all_effects(root: Path) -> None:
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


def test_image_write_to_restores_the_content_with_holes(root: Path, tmp_path: Path) -> None:
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


def test_image_write_to_refuses_a_folder_that_is_not_empty(root: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_bytes(b"")
    with pytest.raises(AssertionError, match="not empty"):
        next(CrashDisk(root).images(0, 0)).write_to(tmp_path / "full")


def test_images_keep_synced_data_and_may_lose_unsynced_data(root: Path) -> None:
    disk = CrashDisk(root)
    path = str(root / "file")
    disk.create(path, 8)
    disk.sync_folder(str(root))
    with disk.open(path) as file:
        file.write(0, b"safe")
        file.sync()
        file.write(4, b"late")
    assert {image.contents["file"] for image in every_image(disk)} == {b"safelate", b"safe\0\0\0\0"}


def test_fail_syncs_may_lose_the_data_despite_later_syncs(root: Path) -> None:
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


def test_images_may_lose_a_name_with_synced_bytes(root: Path) -> None:
    disk = CrashDisk(root)
    disk.create(str(root / "file"), 4)
    with disk.open(str(root / "file")) as file:
        file.write(0, b"safe")
        file.sync()
    assert {image.contents.get("file") for image in every_image(disk)} == {b"safe", None}


def test_images_may_keep_a_name_with_lost_bytes(root: Path) -> None:
    disk = CrashDisk(root)
    disk.create(str(root / "file"), 0)
    with disk.open(str(root / "file")) as file:
        file.write(0, b"late")
    assert {image.contents.get("file") for image in every_image(disk)} == {b"late", b"", None}


def test_images_lose_names_of_a_folder_from_the_last_to_the_first(root: Path) -> None:
    disk = CrashDisk(root)
    for name in "abc":
        disk.create(str(root / name), 0)
    disk.remove(str(root / "a"))
    left = {frozenset(image.contents) for image in every_image(disk)}
    assert left == {frozenset(names) for names in ("", "a", "ab", "abc", "bc")}


def test_images_lose_names_of_two_folders_independently(root: Path) -> None:
    (root / "x").mkdir()
    (root / "y").mkdir()
    disk = CrashDisk(root)
    for folder in "xy":
        disk.create(str(root / folder / "file"), 0)
    left = {frozenset(name for name in image.contents if "/" in name) for image in every_image(disk)}
    assert left == {frozenset(names) for names in ((), ("x/file",), ("y/file",), ("x/file", "y/file"))}


def test_images_lose_the_content_of_a_folder_with_its_name(root: Path) -> None:
    disk = CrashDisk(root)
    disk.make_folder(str(root / "folder"))
    disk.replace(str(root / "folder" / "file"), b"synced")
    assert {"folder/file" in image.contents for image in every_image(disk)} == {True, False}
    disk.sync_folder(str(root))
    assert {image.contents.get("folder/file") for image in every_image(disk)} == {b"synced"}


def test_images_may_lose_sectors_of_a_write_and_never_tear_one(root: Path) -> None:
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


def test_images_of_a_write_in_progress_end_with_a_sector(root: Path) -> None:
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
def test_replace_is_atomic_at_every_crash_and_durable_once_it_returned(root: Path, base: bytes | None) -> None:
    new = b"new" * 1000
    if base is not None:
        (root / "file").write_bytes(base)
    disk = CrashDisk(root)
    disk.replace(str(root / "file"), new)
    for point in range(disk.effect_count):
        for image in every_image(disk, point):
            assert image.contents.get("file") in (base, new), image
    assert {image.contents["file"] for image in every_image(disk)} == {new}


def test_replace_unsynced_survives_a_kill_but_not_a_power_cut(root: Path) -> None:
    new = b"new" * 1000
    (root / "file").write_bytes(b"old")
    disk = CrashDisk(root)
    disk.replace_unsynced(str(root / "file"), new)
    images = [image for point in range(disk.effect_count + 1) for image in every_image(disk, point)]
    assert {image.contents["file"] for image in images if image.name.startswith("killed")} == {b"old", new}
    assert {image.contents["file"] for image in images} > {b"old", b"", new}


def test_images_are_equal_for_the_same_seed_in_any_order(root: Path) -> None:
    disk = CrashDisk(root)
    work = work_anyhow(root, disk, random.Random(7))
    for _ in range(20):
        next(work)
    points = range(disk.effect_count + 1)
    up = {point: list(disk.images(point, seed=3)) for point in points}
    down = {point: list(disk.images(point, seed=3)) for point in reversed(points)}
    assert up == down
    assert any(list(disk.images(point, seed=4)) != up[point] for point in points)


def test_images_of_a_point_are_distinct(root: Path) -> None:
    disk = CrashDisk(root)
    work = work_anyhow(root, disk, random.Random(8))
    for _ in range(20):
        next(work)
    for point in range(disk.effect_count + 1):
        images = list(disk.images(point, seed=1, subset_count=20))
        assert all(one.contents != other.contents for one in images for other in images if one is not other)


def test_rename_keeps_the_identity_of_a_file(root: Path) -> None:
    disk = CrashDisk(root)
    disk.create(str(root / "file.tmp"), 0)
    with disk.open(str(root / "file.tmp")) as file:
        file.write(0, b"one")
        disk.calls.rename(str(root / "file.tmp"), str(root / "file"))
        disk.create(str(root / "file.tmp"), 0)
        file.write(0, b"two")
    assert next(disk.images(disk.effect_count, 0)).contents == {"file": b"two", "file.tmp": b""}


def test_die_at_prevents_effects_until_revive(root: Path) -> None:
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


def test_revive_keeps_unsynced_effects_unsynced(root: Path) -> None:
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


def test_crash_disk_refuses_foreign_files_and_paths_outside(root: Path, tmp_path: Path) -> None:
    disk = CrashDisk(root)
    (root / "strange").write_bytes(b"")
    with pytest.raises(AssertionError, match="was not created by this disk"):
        disk.open(str(root / "strange"))
    with pytest.raises(AssertionError, match="outside"):
        disk.make_folder(str(tmp_path / "elsewhere"))


def test_failing_disk_fails_once_at_the_given_effect(root: Path) -> None:
    disk = FailingDisk(1)
    disk.create(str(root / "file"), 4096)
    with disk.open(str(root / "file")) as file:
        with pytest.raises(DiskFullError, match="No space left"):
            file.write(0, b"x" * 2100)
        assert file.read(0, 4096) == b"x" * 1024 + bytes(3072)
        assert disk.has_failed
        file.write(0, b"y")
    assert disk.effect_count == 3


def test_failing_disk_fails_several_times_with_any_error(root: Path) -> None:
    disk = FailingDisk(0, errno.EIO, times=2)
    for _ in range(2):
        with pytest.raises(StoreError, match="Input/output error"):
            disk.make_folder(str(root / "folder"))
    assert not (root / "folder").exists()
    disk.make_folder(str(root / "folder"))
    assert (root / "folder").is_dir()


def test_failing_disk_can_wrap_the_calls_of_a_crash_disk(root: Path) -> None:
    recording = CrashDisk(root)
    disk: Disk = FailingDisk(1, calls=recording.calls)
    disk.create(str(root / "file"), 4096)
    with disk.open(str(root / "file")) as file:
        with pytest.raises(DiskFullError):
            file.write(0, b"x" * 2100)
        file.sync()
    assert Write("file", 0, 0, b"x" * 1024) in recording.effects
    assert recording.effect_count == 3
