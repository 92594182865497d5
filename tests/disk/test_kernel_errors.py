"""Only ENOENT and ENOTDIR mean that something does not exist; every other error of the kernel is raised as ours."""

import builtins
import contextlib
import errno
import fcntl
import mmap
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rmq_spark.store.disk import file_lock, files, host, lock_probe, mounts
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.disk.file_lock import BrokerLock, FileLock
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.disk.window import Window
from rmq_spark.store.errors import OptionError, StoreChangedError, StoreError, StorePathError

OF_THE_PATH = [errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG]
OF_THE_MACHINE = [errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EINTR]


@contextlib.contextmanager
def fail(module: Any, name: str, error: int) -> Iterator[None]:
    """Let a module's call fail within the block, and no longer: the test's own machinery makes such calls, too."""

    def refuse(*_: object, **__: object) -> Any:
        raise OSError(error, os.strerror(error))

    with mock.patch.object(module, name, refuse):
        yield


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "file").write_bytes(b"x" * 5000)
    return str(tmp_path / "file")


LOOKS = [
    (os, "scandir", files.list_folder, "listed", []),
    (os, "stat", files.file_size, "looked up", -1),
    (os, "stat", files.modified_ms, "looked up", -1),
    (os, "stat", files.stamp, "looked up", None),
    (os, "stat", files.is_folder, "looked up", False),
    (os, "stat", files.exists, "looked up", False),
    (os, "stat", mounts.file_system, "looked up", ""),
]


@pytest.mark.parametrize("error", [*OF_THE_PATH, *OF_THE_MACHINE], ids=errno.errorcode.get)
@pytest.mark.parametrize(
    ("module", "name", "look", "operation", "absent"), LOOKS, ids=lambda one: getattr(one, "__name__", "")
)
def test_what_cannot_be_looked_at_is_no_absence(
    path: str,
    module: Any,
    name: str,
    look: Callable[[str], object],
    operation: str,
    absent: object,
    error: int,
) -> None:
    with pytest.raises(StoreError) as raised, fail(module, name, error):
        look(path)
    assert str(raised.value).startswith(f"{path} cannot be {operation}: {os.strerror(error)}; expected ")
    assert isinstance(raised.value, StorePathError) == (error in OF_THE_PATH)
    for none in (errno.ENOENT, errno.ENOTDIR):
        with fail(module, name, none):
            assert look(path) == absent


def read_open(file: OpenFile) -> bytes:
    return file.read(0, 10)


def read_into(file: OpenFile) -> None:
    file.read_into(0, memoryview(bytearray(10)))


def find_data(file: OpenFile) -> list[tuple[int, int]]:
    return list(files.data_extents(file.path, 0, 5000))


def map_window(file: OpenFile) -> None:
    Window(file, 0, 5000, mapped=True)


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.ENOMEM, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize(
    ("module", "name", "act"),
    [
        (os, "fstat", OpenFile.size),
        (os, "pread", read_open),
        (os, "preadv", read_into),
        (os, "lseek", find_data),
        (os, "pread", find_data),
        (mmap, "mmap", map_window),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    path: str, module: Any, name: str, act: Callable[[OpenFile], object], error: int
) -> None:
    told = pytest.raises(StoreError, match=f"^{path} cannot be .*: {os.strerror(error)}; expected")
    with OpenFile(path) as file, told, fail(module, name, error):
        act(file)


def test_a_hole_up_to_the_end_is_no_error(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.write(b"x")
        file.truncate(1 << 20)
    assert [begin for begin, _ in files.data_extents(str(tmp_path / "sparse"), 0, 1 << 20)] == [0]


def test_a_window_of_a_file_of_which_the_length_is_not_known_is_not_believed(path: str) -> None:
    with OpenFile(path) as file, Window(file, 0, 5000, mapped=True) as window:
        window.check()
        with (
            pytest.raises(StoreError, match=f"{path} cannot be asked for its length: Input/output error"),
            fail(os, "fstat", errno.EIO),
        ):
            window.check()


class BadPages:
    """A mapping whose pages the disk does not give."""

    def madvise(self, *_: int) -> None:
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))


def test_a_page_that_the_disk_does_not_give_is_an_error_before_it_is_touched(path: str) -> None:
    with OpenFile(path) as file, Window(file, 0, 5000, mapped=True) as window:
        window.prepare(0, 5000)
        mapping, window._mapping = window._mapping, BadPages()  # type: ignore[assignment]
        with pytest.raises(StoreError, match=f"{path} cannot be read: Input/output error"):
            window.prepare(0, 5000)
        os.truncate(path, 4999)
        window.prepare(0, 5000)  # no page of a bad disk: `check` tells of it
        with pytest.raises(StoreChangedError, match="4999 bytes"):
            window.check()
        window._mapping = mapping


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize(
    ("name", "act"), [("pread", lambda file: file.read(0, 5)), ("fstat", lambda file: file.size())]
)
def test_a_file_that_is_changed_and_cannot_be_read_is_named(
    path: str, name: str, act: Callable[[Any], object], error: int
) -> None:
    told = pytest.raises(StoreError, match=f"^{path} cannot be .*: {os.strerror(error)}")
    with Disk().open(path) as file, told, fail(os, name, error):
        act(file)


def test_a_close_that_fails_is_told_of_what_was_written_alone_and_gives_the_number_back_once(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, written, closed, close = OpenFile(path), Disk().open(path), [], os.close

    def fail_after(descriptor: int) -> None:
        close(descriptor)
        closed.append(descriptor)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "close", fail_after)
    read.close()
    with pytest.raises(StoreError, match=f"{path} cannot be written: Input/output error"):
        written.close()
    read.close()
    written.close()
    assert len(closed) == 2


def test_the_room_on_a_disk_that_does_not_tell_is_not_taken_for_any(path: str) -> None:
    with (
        pytest.raises(StoreError, match=f"{path} cannot be asked for its free space: Input/output error"),
        fail(os, "statvfs", errno.EIO),
    ):
        files.free_bytes(path)


def test_a_path_is_resolved_as_far_as_it_exists_and_no_error_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    assert files.resolved(str(tmp_path / "link" / "new")) == str(tmp_path / "folder" / "new")
    (tmp_path / "folder").mkdir()
    assert files.resolved(str(tmp_path / "link")) == str(tmp_path / "folder")
    with pytest.raises(StoreError, match="cannot be resolved: Input/output error"), fail(os, "lstat", errno.EIO):
        files.resolved(str(tmp_path / "link"))


def test_a_relative_path_in_a_folder_that_was_removed_is_refused() -> None:
    with (
        pytest.raises(OptionError, match=r"'store' cannot be made absolute: .*Give the path from /"),
        fail(os, "getcwd", errno.ENOENT),
    ):
        files.absolute("store")


def test_a_lock_of_which_the_kernel_says_nothing_is_neither_free_nor_taken(path: str) -> None:
    for ask in (lock_probe.is_locked, lock_probe.seems_locked, lock_probe.is_open_to_write):
        told = pytest.raises(StoreError, match=f"{path} cannot be asked for .*: Input/output error")
        with told, fail(fcntl, "fcntl", errno.EIO):
            ask(path)
    for lock in (FileLock(path), BrokerLock(path)):
        told = pytest.raises(StoreError, match=f"{path} cannot be .*: Input/output error")
        with told, fail(fcntl, "fcntl", errno.EIO):
            lock.try_take()
        assert not lock.is_held
    with fail(fcntl, "fcntl", errno.ENOLCK):
        assert not lock_probe.seems_locked(path)
        assert not lock_probe.is_open_to_write(path)


@pytest.mark.parametrize("name", ["fstat", "stat"])
def test_a_file_to_be_locked_that_cannot_be_looked_at_leaves_nothing_open(path: str, name: str) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(StoreError, match=f"{path} cannot be locked: Input/output error"), fail(os, name, errno.EIO):
        FileLock(path).try_take()
    assert os.listdir("/proc/self/fd") == before


def test_a_lease_of_which_the_kernel_says_nothing_is_not_taken_for_a_whole_one(path: str) -> None:
    lock = BrokerLock(path)
    assert lock.try_take()
    lock._has_lease = True  # where the file system grants none, too
    with (
        pytest.raises(StoreError, match=f"{path} cannot be asked for its lease: Input/output error"),
        fail(fcntl, "fcntl", errno.EIO),
    ):
        lock.safe_s()
    lock._has_lease = False
    lock.release()


@pytest.mark.parametrize("ask", [host.boot_id, lambda: host.start_ticks(1), host.memory_bytes, file_lock.lease_break_s])
def test_what_the_system_cannot_tell_now_is_no_answer(ask: Callable[[], object]) -> None:
    """Else a living process is taken for a dead one while its own has too many files open."""
    with (
        pytest.raises(StoreError, match=r"/proc/.* cannot be read: Too many open files"),
        fail(builtins, "open", errno.EMFILE),
    ):
        ask()
    for untold in (errno.ENOENT, errno.EACCES):
        with fail(builtins, "open", untold):
            assert ask() in ("", 0, None, 45.0)


def test_the_list_of_mounts_that_cannot_be_read_now_does_not_make_a_path_a_local_one(path: str) -> None:
    with (
        pytest.raises(StoreError, match="/proc/self/mountinfo cannot be read: Too many open files"),
        fail(builtins, "open", errno.EMFILE),
    ):
        mounts.is_remote(path)
    with fail(builtins, "open", errno.ENOENT):
        assert not mounts.is_remote(path)


def test_an_address_is_not_made_up_where_too_many_files_are_open() -> None:
    with (
        pytest.raises(StoreError, match="socket cannot be opened: Too many open files"),
        fail(socket, "socket", errno.EMFILE),
    ):
        host.ipv4_address()
