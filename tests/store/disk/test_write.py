"""Atomic changes of files, their errors with advice, and files poisoned by a failed sync."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from rmq_spark.store.disk import system_calls
from rmq_spark.store.disk.system_calls import SystemCalls
from rmq_spark.store.disk.write import TEMPORARY_SUFFIX, Disk
from rmq_spark.store.errors import DiskFullError, StoreChangedError, StoreError, StorePathError
from rmq_spark.store.testing.crash_disk import CrashDisk
from rmq_spark.store.testing.disk_effects import Create, MakeFolder, SyncFolder
from rmq_spark.store.testing.failing_disk import FailingDisk


@pytest.fixture
def disk() -> Disk:
    return Disk()


def test_make_folder_creates_parents_and_syncs_all_names_but_the_last(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path)
    disk.make_folder(str(tmp_path / "a" / "b" / "c"))
    disk.make_folder(str(tmp_path / "a" / "b"))
    assert disk.effects == (MakeFolder("a"), SyncFolder("."), MakeFolder("a/b"), SyncFolder("a"), MakeFolder("a/b/c"))
    assert (tmp_path / "a/b/c").is_dir()


def test_make_folder_refuses_a_file_in_place_of_a_folder(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "a").write_bytes(b"")
    for path in ("a", "a/b"):
        with pytest.raises(StorePathError, match=r"a.* cannot be written: .*\. Something else has the name"):
            disk.make_folder(str(tmp_path / path))


def test_make_folder_names_a_file_system_that_does_not_allow_it(disk: Disk) -> None:
    for path in ("/proc/nothing", "/proc/nothing/store"):
        with pytest.raises(StorePathError, match=r"the folder /proc/nothing cannot be created: .*\. Give another path"):
            disk.make_folder(path)


@pytest.mark.parametrize("kernel", ["", "no nameless files", "no proc"])
def test_create_makes_a_sparse_file_and_never_replaces_one(
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
def test_create_filled_writes_its_data_and_never_replaces_a_file(
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


@pytest.mark.parametrize("kernel", ["", "no nameless files"])
def test_create_names_a_folder_or_a_link_that_has_the_name(
    tmp_path: Path, disk: Disk, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "no nameless files":
        monkeypatch.setattr(system_calls, "_NAMELESS", 0)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name, found in (("folder", "a folder of this name"), ("link", "a link whose target is missing")):
        path = str(tmp_path / name)
        expected = f"{name} cannot be created: found {found}; expected a free name"
        with pytest.raises(StorePathError, match=expected):
            disk.create(path, 5)
        with pytest.raises(StorePathError, match=expected):
            disk.create_filled(path, 5, 0, b"x")
        with pytest.raises(StorePathError, match=expected):
            disk.create_lock(path)
    assert sorted(os.listdir(tmp_path)) == ["folder", "link"]
    (tmp_path / "nowhere").touch()
    with pytest.raises(FileExistsError):
        disk.create(str(tmp_path / "link"), 5)


def test_create_filled_makes_data_durable_before_the_name(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path)
    disk.create_filled(str(tmp_path / "queue"), 2000, 600, b"b" * 600)
    content = bytes(600) + b"b" * 600 + bytes(800)
    assert [image.contents for image in disk.images(1, 1)] == [{"queue": content}, {}]
    assert [image.contents for image in disk.images(0, 1)] == [{}]


def test_create_leaves_no_name_if_the_size_cannot_be_set(
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
def test_writable_file_write_accepts_bytes_of_any_kind(tmp_path: Path, disk: Disk, data: bytes) -> None:
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


def test_replace_continues_after_partial_writes(tmp_path: Path) -> None:
    class Stingy(SystemCalls):
        def write(self, descriptor: int, position: int, data: memoryview) -> int:
            return super().write(descriptor, position, data[:3])

    path = str(tmp_path / "file")
    disk = Disk(Stingy())
    disk.replace(path, bytes(range(100)))
    assert Path(path).read_bytes() == bytes(range(100))


@pytest.mark.parametrize("replace", [Disk.replace, Disk.replace_unsynced])
def test_replace_ignores_the_temporary_file_of_a_dead_process(tmp_path: Path, disk: Disk, replace) -> None:
    path = tmp_path / "note.json"
    for content in (b"one", b"second", b""):
        (tmp_path / f"note.json{TEMPORARY_SUFFIX}").write_bytes(b"half of someth")
        replace(disk, str(path), content)
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["note.json"]


def test_replace_leaves_the_old_or_new_content_after_an_error(tmp_path: Path) -> None:
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


def test_remove_accepts_a_missing_file(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    disk.remove(str(path))
    assert not path.exists()
    disk.remove(str(path))


def test_remove_folder_removes_only_an_empty_folder(tmp_path: Path, disk: Disk) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_bytes(b"")
    assert not disk.remove_folder(str(folder))
    disk.remove(str(folder / "file"))
    assert disk.remove_folder(str(folder))
    assert disk.remove_folder(str(folder))
    assert not folder.exists()


def test_disk_raises_store_changed_error_for_missing_paths(tmp_path: Path, disk: Disk) -> None:
    with pytest.raises(StoreChangedError, match=r"file is gone.*Open the store again"):
        disk.open(str(tmp_path / "file"))
    with pytest.raises(StoreChangedError, match=r"folder/file is gone, or its folder"):
        disk.create(str(tmp_path / "folder" / "file"), 1)
    with pytest.raises(StoreChangedError):
        disk.sync_folder(str(tmp_path / "folder"))


def test_writable_file_write_raises_disk_full_error_on_a_full_device(disk: Disk) -> None:
    with disk.open("/dev/full") as file, pytest.raises(DiskFullError, match=r"/dev/full cannot be .* Make room"):
        file.write(0, b"x")


@pytest.mark.parametrize(
    ("number", "kind", "advice"),
    [
        (errno.ENOSPC, DiskFullError, "No acknowledged message is lost. Make room on that file system"),
        (errno.EDQUOT, DiskFullError, "raise the quota"),
        (errno.EACCES, StorePathError, "Give the user who runs Spark that right"),
        (errno.EPERM, StorePathError, "Give the user who runs Spark that right"),
        (errno.EROFS, StorePathError, "Read-only file system. A writer needs the right to write every file"),
        (errno.EMFILE, StoreError, "Raise the limit of open files"),
        (errno.EIO, StoreError, "Input/output error. Check the state of the disk in the kernel's log"),
    ],
)
def test_disk_raises_errors_with_the_file_and_the_next_step(
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
def test_writable_file_is_poisoned_by_a_failed_sync(tmp_path: Path, number: int) -> None:
    (tmp_path / "file").write_bytes(b"")
    disk = FailingDisk(1, number)
    with disk.open(str(tmp_path / "file")) as file:
        file.write(0, b"perhaps")
        with pytest.raises(StoreError):
            file.sync()
        for act in (file.sync, lambda: file.write(0, b"more")):
            with pytest.raises(
                StoreError, match=r"could not be synced before.*open it again.*The first error was: .*file"
            ):
                act()
        assert file.read(0, 10) == b"perhaps"
    with disk.open(str(tmp_path / "file")) as file:
        file.write(0, b"written")
        file.sync()


def test_writable_file_is_not_poisoned_by_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with FailingDisk(0).open(str(tmp_path / "file")) as file:
        with pytest.raises(DiskFullError):
            file.write(0, b"x" * 2000)
        file.write(0, b"y" * 2000)  # room was made
        file.sync()
        assert file.read(0, 3000) == b"y" * 2000


def test_writable_file_close_twice_closes_no_other_file(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "file").write_bytes(b"one")
    first = disk.open(str(tmp_path / "file"))
    first.close()
    with disk.open(str(tmp_path / "file")) as second:
        first.close()
        assert second.read(0, 3) == b"one"
    with pytest.raises(AssertionError, match="is closed"):
        first.write(0, b"")


def test_create_is_one_effect(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path)
    disk.create(str(tmp_path / "file"), 12)
    assert disk.effects == (Create("file", 0, 12),)
