"""Changing files: whole or not at all, errors that say what to do, no belief in a disk whose sync failed."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from rmq_spark.store.disk import system_calls
from rmq_spark.store.disk.changing import TEMPORARY_SUFFIX, Disk
from rmq_spark.store.disk.system_calls import SystemCalls
from rmq_spark.store.errors import DiskFullError, StoreChangedError, StoreError, StorePathError
from rmq_spark.store.testing.crash_disk import CrashDisk
from rmq_spark.store.testing.disk_effects import Create, MakeFolder, SyncFolder
from rmq_spark.store.testing.failing_disk import FailingDisk


@pytest.fixture
def disk() -> Disk:
    return Disk()


def test_a_folder_is_made_with_those_above_it_and_only_the_last_name_is_left_to_sync(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path)
    disk.make_folder(str(tmp_path / "a" / "b" / "c"))
    disk.make_folder(str(tmp_path / "a" / "b"))
    assert disk.effects == (MakeFolder("a"), SyncFolder("."), MakeFolder("a/b"), SyncFolder("a"), MakeFolder("a/b/c"))
    assert (tmp_path / "a/b/c").is_dir()


def test_a_file_where_a_folder_should_be_is_an_error_that_says_so(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "a").write_bytes(b"")
    for path in ("a", "a/b"):
        with pytest.raises(StorePathError, match=r"a.* cannot be written: .*\. Something else stands where"):
            disk.make_folder(str(tmp_path / path))


def test_a_folder_that_no_file_system_makes_is_not_said_to_be_gone(disk: Disk) -> None:
    for path in ("/proc/nothing", "/proc/nothing/store"):
        with pytest.raises(StorePathError, match=r"the folder /proc/nothing cannot be made: .*\. Give another path"):
            disk.make_folder(path)


@pytest.mark.parametrize("kernel", ["", "no nameless files", "no proc"])
def test_a_new_file_has_its_full_size_takes_no_room_and_replaces_none(
    tmp_path: Path, disk: Disk, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "no nameless files":
        monkeypatch.setattr(system_calls, "_NAMELESS", 0)
    if kernel == "no proc":
        monkeypatch.setattr(os, "link", lambda *_, **__: os.open("no/such/file", os.O_RDONLY))
    path = tmp_path / "segment"
    disk.create(str(path), 1 << 30)
    assert path.stat().st_size == 1 << 30
    assert path.stat().st_blocks == 0
    assert path.stat().st_mode & 0o600 == 0o600
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        disk.create(str(path), 5)
    assert path.read_bytes() == b"mine"
    assert os.listdir(tmp_path) == ["segment"]


@pytest.mark.parametrize("kernel", ["", "no nameless files", "no proc"])
def test_a_filled_file_has_its_bytes_and_replaces_none(
    tmp_path: Path, disk: Disk, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "no nameless files":
        monkeypatch.setattr(system_calls, "_NAMELESS", 0)
    if kernel == "no proc":
        monkeypatch.setattr(os, "link", lambda *_, **__: os.open("no/such/file", os.O_RDONLY))
    path = tmp_path / "queue"
    disk.create_filled(str(path), 10, 3, b"abcd")
    assert path.read_bytes() == b"\0\0\0abcd\0\0\0"
    with pytest.raises(FileExistsError):
        disk.create_filled(str(path), 10, 0, b"x")
    assert path.read_bytes() == b"\0\0\0abcd\0\0\0"
    assert os.listdir(tmp_path) == ["queue"]


def test_no_power_cut_leaves_the_name_of_a_filled_file_without_its_bytes(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path)
    disk.create_filled(str(tmp_path / "queue"), 2000, 600, b"b" * 600)
    whole = bytes(600) + b"b" * 600 + bytes(800)
    assert [image.contents for image in disk.images(1, 1)] == [{"queue": whole}, {}]
    assert [image.contents for image in disk.images(0, 1)] == [{}]


def test_a_file_that_does_not_get_its_size_gets_no_name(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(_: int, __: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "ftruncate", no_room)
    for nameless in (system_calls._NAMELESS, 0):
        monkeypatch.setattr(system_calls, "_NAMELESS", nameless)
        with pytest.raises(DiskFullError):
            disk.create(str(tmp_path / "segment"), 10)
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "data", [b"abcd", bytearray(b"abcd"), memoryview(b"xabcd")[1:], np.frombuffer(b"abcd", np.uint8)], ids=type
)
def test_bytes_of_any_kind_are_written_where_they_belong(tmp_path: Path, disk: Disk, data: bytes) -> None:
    path = str(tmp_path / "file")
    disk.create(path, 10)
    with disk.open(path) as file:
        file.write(3, data)
        file.sync()
        assert file.read(0, 100) == b"\0\0\0abcd\0\0\0"
        assert file.read(4, 2) == b"bc"
        assert file.read(10, 5) == b""
        file.write(9, b"grows")
        assert file.size() == 14


def test_a_kernel_that_takes_few_bytes_at_a_time_gets_them_all(tmp_path: Path) -> None:
    class Stingy(SystemCalls):
        def write(self, descriptor: int, position: int, data: memoryview) -> int:
            return super().write(descriptor, position, data[:3])

    path = str(tmp_path / "file")
    disk = Disk(Stingy())
    disk.replace(path, bytes(range(100)))
    assert Path(path).read_bytes() == bytes(range(100))


@pytest.mark.parametrize("replace", [Disk.replace, Disk.replace_unsynced])
def test_a_small_file_is_replaced_whatever_a_dead_process_left(tmp_path: Path, disk: Disk, replace) -> None:
    path = tmp_path / "note.json"
    for content in (b"one", b"second", b""):
        (tmp_path / f"note.json{TEMPORARY_SUFFIX}").write_bytes(b"half of someth")
        replace(disk, str(path), content)
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["note.json"]


def test_an_error_while_replacing_leaves_the_old_content_or_the_new_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    number = 0
    while True:
        path.write_bytes(b"old")
        disk = FailingDisk(number)
        try:
            disk.replace(str(path), b"new" * 1000)
        except DiskFullError as error:
            assert str(tmp_path) in str(error)  # noqa: PT017
        if not disk.has_failed:
            break
        # create, write, sync, rename, sync of the folder: the fourth effect is the moment of change.
        assert path.read_bytes() == (b"old" if number < 4 else b"new" * 1000), number
        assert os.listdir(tmp_path) == ["note.json"], number
        number += 1
    assert number == 5
    assert path.read_bytes() == b"new" * 1000


def test_what_is_not_there_is_removed_without_an_error(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    disk.remove(str(path))
    assert not path.exists()
    disk.remove(str(path))


def test_only_an_empty_folder_is_taken_away(tmp_path: Path, disk: Disk) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_bytes(b"")
    assert not disk.remove_folder(str(folder))
    disk.remove(str(folder / "file"))
    assert disk.remove_folder(str(folder))
    assert disk.remove_folder(str(folder))
    assert not folder.exists()


def test_a_file_or_folder_that_is_gone_says_so(tmp_path: Path, disk: Disk) -> None:
    with pytest.raises(StoreChangedError, match=r"file is gone.*Open the store again"):
        disk.open(str(tmp_path / "file"))
    with pytest.raises(StoreChangedError, match=r"folder/file is gone, or the folder"):
        disk.create(str(tmp_path / "folder" / "file"), 1)
    with pytest.raises(StoreChangedError):
        disk.sync_folder(str(tmp_path / "folder"))


def test_a_full_device_is_told_apart(disk: Disk) -> None:
    with disk.open("/dev/full") as file, pytest.raises(DiskFullError, match=r"/dev/full cannot be .* Make room"):
        file.write(0, b"x")


@pytest.mark.parametrize(
    ("number", "kind", "advice"),
    [
        (errno.ENOSPC, DiskFullError, "Nothing that was acknowledged is lost. Make room on that file system"),
        (errno.EDQUOT, DiskFullError, "raise the quota"),
        (errno.EACCES, StorePathError, "Give the user who runs Spark that right"),
        (errno.EPERM, StorePathError, "Give the user who runs Spark that right"),
        (errno.EROFS, StorePathError, "Read-only file system. Who appends to a store needs to write every file"),
        (errno.EMFILE, StoreError, "Raise the limit of open files"),
        (errno.EIO, StoreError, "Input/output error. Look for the disk's state in the kernel's log"),
    ],
)
def test_what_the_kernel_says_becomes_an_error_with_the_file_and_the_next_step(
    tmp_path: Path, number: int, kind: type[StoreError], advice: str
) -> None:
    for act in (
        lambda disk: disk.make_folder(str(tmp_path / "file")),
        lambda disk: disk.create(str(tmp_path / "file"), 1),
        lambda disk: disk.replace(str(tmp_path / "file"), b"x"),
        lambda disk: disk.replace_unsynced(str(tmp_path / "file"), b"x"),
        lambda disk: disk.remove(str(tmp_path / "file")),
        lambda disk: disk.remove_folder(str(tmp_path / "file")),
        lambda disk: disk.sync_folder(str(tmp_path)),
    ):
        with pytest.raises(kind) as error:
            act(FailingDisk(0, number))
        assert type(error.value) is kind
        assert str(tmp_path) in str(error.value)
        assert advice in str(error.value)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_after_a_failed_sync_a_file_is_not_believed_any_more(tmp_path: Path, number: int) -> None:
    (tmp_path / "file").write_bytes(b"")
    disk = FailingDisk(1, number)
    with disk.open(str(tmp_path / "file")) as file:
        file.write(0, b"perhaps")
        with pytest.raises(StoreError):
            file.sync()
        for act in (file.sync, lambda: file.write(0, b"more")):
            with pytest.raises(
                StoreError, match=r"could not be synced before.*open it again.*What happened then: .*file"
            ):
                act()
        assert file.read(0, 10) == b"perhaps"
    with disk.open(str(tmp_path / "file")) as file:
        file.write(0, b"written")
        file.sync()


def test_a_full_disk_does_not_poison_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with FailingDisk(0).open(str(tmp_path / "file")) as file:
        with pytest.raises(DiskFullError):
            file.write(0, b"x" * 2000)
        file.write(0, b"y" * 2000)  # room was made
        file.sync()
        assert file.read(0, 3000) == b"y" * 2000


def test_a_file_that_is_closed_twice_closes_no_other(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "file").write_bytes(b"one")
    first = disk.open(str(tmp_path / "file"))
    first.close()
    with disk.open(str(tmp_path / "file")) as second:
        first.close()
        assert second.read(0, 3) == b"one"
    with pytest.raises(AssertionError, match="is closed"):
        first.write(0, b"")


def test_a_new_file_is_one_effect(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path)
    disk.create(str(tmp_path / "file"), 12)
    assert disk.effects == (Create("file", 0, 12),)
