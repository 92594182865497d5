"""Errors of the kernel: ENOENT and ENOTDIR mean absent, all others are raised as errors of the store."""

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

from rmq_spark.store.disk import files, host, locks
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.disk.locks import BrokerLock, FileLock
from rmq_spark.store.disk.mapped_window import MappedWindow
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import OptionError, StoreChangedError, StoreError, StorePathError

OF_THE_PATH = [errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG]
OF_THE_MACHINE = [errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EINTR]


@contextlib.contextmanager
def fail(module: Any, name: str, error: int) -> Iterator[None]:
    """Let a module's call fail within the block only, because the test's own machinery also makes such calls."""

    def refuse(*_: object, **__: object) -> Any:
        raise OSError(error, os.strerror(error))

    with mock.patch.object(module, name, refuse):
        yield


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "file").write_bytes(b"x" * 5000)
    return str(tmp_path / "file")


PROBES = [
    (os, "scandir", files.list_folder, "listed", []),
    (os, "stat", files.file_size, "looked up", -1),
    (os, "stat", files.modified_ms, "looked up", -1),
    (os, "stat", files.stamp, "looked up", None),
    (os, "stat", files.is_folder, "looked up", False),
    (os, "stat", files.exists, "looked up", False),
    (os, "stat", host.file_system, "looked up", ""),
]


@pytest.mark.parametrize("error", [*OF_THE_PATH, *OF_THE_MACHINE], ids=errno.errorcode.get)
@pytest.mark.parametrize(
    ("module", "name", "probe", "operation", "absent"), PROBES, ids=lambda one: getattr(one, "__name__", "")
)
def test_read_error_is_raised_unless_a_path_is_absent(
    path: str,
    module: Any,
    name: str,
    probe: Callable[[str], object],
    operation: str,
    absent: object,
    error: int,
) -> None:
    with pytest.raises(StoreError) as raised, fail(module, name, error):
        probe(path)
    assert str(raised.value).startswith(f"{path} cannot be {operation}: {os.strerror(error)}; expected ")
    assert isinstance(raised.value, StorePathError) == (error in OF_THE_PATH)
    for none in (errno.ENOENT, errno.ENOTDIR):
        with fail(module, name, none):
            assert probe(path) == absent


def read_open(file: OpenFile) -> bytes:
    return file.read(0, 10)


def read_into(file: OpenFile) -> None:
    file.read_into(0, memoryview(bytearray(10)))


def find_data(file: OpenFile) -> list[tuple[int, int]]:
    return list(files.data_extents(file.path, 0, 5000))


def map_window(file: OpenFile) -> None:
    MappedWindow(file, 0, 5000, mapped=True)


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
def test_open_file_names_a_file_that_cannot_be_read(
    path: str, module: Any, name: str, act: Callable[[OpenFile], object], error: int
) -> None:
    told = pytest.raises(StoreError, match=f"^{path} cannot be .*: {os.strerror(error)}; expected")
    with OpenFile(path) as file, told, fail(module, name, error):
        act(file)


def test_data_extents_accepts_a_hole_up_to_the_end(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.write(b"x")
        file.truncate(1 << 20)
    assert [begin for begin, _ in files.data_extents(str(tmp_path / "sparse"), 0, 1 << 20)] == [0]


def test_mapped_window_check_raises_if_the_length_is_unknown(path: str) -> None:
    with OpenFile(path) as file, MappedWindow(file, 0, 5000, mapped=True) as window:
        window.check()
        with (
            pytest.raises(StoreError, match=f"{path} cannot be asked for its length: Input/output error"),
            fail(os, "fstat", errno.EIO),
        ):
            window.check()


class BadPages:
    """A mapping whose pages the disk cannot deliver."""

    def madvise(self, *_: int) -> None:
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))


def test_mapped_window_prepare_raises_for_a_bad_page(path: str) -> None:
    with OpenFile(path) as file, MappedWindow(file, 0, 5000, mapped=True) as window:
        window.prepare(0, 5000)
        mapping, window._mapping = window._mapping, BadPages()  # type: ignore[assignment]
        with pytest.raises(StoreError, match=f"{path} cannot be read: Input/output error"):
            window.prepare(0, 5000)
        os.truncate(path, 4999)
        window.prepare(0, 5000)  # the page is not bad, and `check` reports the truncation
        with pytest.raises(StoreChangedError, match="4999 bytes"):
            window.check()
        window._mapping = mapping


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize(
    ("name", "act"), [("pread", lambda file: file.read(0, 5)), ("fstat", lambda file: file.size())]
)
def test_writable_file_names_a_file_that_cannot_be_read(
    path: str, name: str, act: Callable[[Any], object], error: int
) -> None:
    told = pytest.raises(StoreError, match=f"^{path} cannot be .*: {os.strerror(error)}")
    with Disk().open(path) as file, told, fail(os, name, error):
        act(file)


def test_close_reports_errors_of_written_files_only_and_closes_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_free_bytes_raises_if_the_free_space_is_unknown(path: str) -> None:
    with (
        pytest.raises(StoreError, match=f"{path} cannot be asked for its free space: Input/output error"),
        fail(os, "statvfs", errno.EIO),
    ):
        files.free_bytes(path)


def test_resolved_follows_links_as_far_as_the_path_exists(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    assert files.resolved(str(tmp_path / "link" / "new")) == str(tmp_path / "folder" / "new")
    (tmp_path / "folder").mkdir()
    assert files.resolved(str(tmp_path / "link")) == str(tmp_path / "folder")
    with pytest.raises(StoreError, match="cannot be resolved: Input/output error"), fail(os, "lstat", errno.EIO):
        files.resolved(str(tmp_path / "link"))


def test_list_folder_counts_a_link_as_a_folder_only_if_it_leads_to_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name, target in (("alias", "folder"), ("itself", "itself"), ("nowhere", "missing")):
        (tmp_path / name).symlink_to(target)
    found = files.list_folder(str(tmp_path))
    assert found == [("alias", True), ("folder", True), ("itself", False), ("nowhere", False)]


def test_absolute_refuses_a_relative_path_in_a_removed_folder() -> None:
    with (
        pytest.raises(OptionError, match=r"'store' cannot be made absolute: .*Give the path from /"),
        fail(os, "getcwd", errno.ENOENT),
    ):
        files.absolute("store")


def test_locks_raise_if_the_kernel_fails_to_answer(path: str) -> None:
    for ask in (locks.is_locked, locks.seems_locked, locks.is_open_to_write):
        told = pytest.raises(StoreError, match=f"{path} cannot be asked for .*: Input/output error")
        with told, fail(fcntl, "fcntl", errno.EIO):
            ask(path)
    for lock in (FileLock(path), BrokerLock(path)):
        told = pytest.raises(StoreError, match=f"{path} cannot be .*: Input/output error")
        with told, fail(fcntl, "fcntl", errno.EIO):
            lock.try_take()
        assert not lock.is_held
    with fail(fcntl, "fcntl", errno.ENOLCK):
        assert not locks.seems_locked(path)
        assert not locks.is_open_to_write(path)


@pytest.mark.parametrize("name", ["fstat", "stat"])
def test_try_take_leaves_no_open_file_after_an_error(path: str, name: str) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(StoreError, match=f"{path} cannot be locked: Input/output error"), fail(os, name, errno.EIO):
        FileLock(path).try_take()
    assert os.listdir("/proc/self/fd") == before


def test_lease_seconds_left_raises_if_the_lease_is_unknown(path: str) -> None:
    lock = BrokerLock(path)
    assert lock.try_take()
    lock._has_lease = True  # also if the file system grants none
    with (
        pytest.raises(StoreError, match=f"{path} cannot be asked for its lease: Input/output error"),
        fail(fcntl, "fcntl", errno.EIO),
    ):
        lock.lease_seconds_left()
    lock._has_lease = False
    lock.release()


def _read_boot_id() -> str:
    host._boot_id.cache_clear()
    try:
        return host.boot_id()
    finally:
        host._boot_id.cache_clear()


@pytest.mark.parametrize("ask", [_read_boot_id, lambda: host.start_ticks(1), host.memory_bytes, locks.lease_break_s])
def test_host_raises_if_proc_cannot_be_read_now(ask: Callable[[], object]) -> None:
    """Otherwise a live process would count as dead while this process has too many open files."""
    with (
        pytest.raises(StoreError, match=r"/proc/.* cannot be read: Too many open files"),
        fail(builtins, "open", errno.EMFILE),
    ):
        ask()
    for untold in (errno.ENOENT, errno.EACCES):
        with fail(builtins, "open", untold):
            assert ask() in ("", 0, None, 45.0)


def test_is_remote_raises_if_the_mounts_cannot_be_read_now(path: str) -> None:
    with (
        pytest.raises(StoreError, match="/proc/self/mountinfo cannot be read: Too many open files"),
        fail(builtins, "open", errno.EMFILE),
    ):
        host.is_remote(path)
    with fail(builtins, "open", errno.ENOENT):
        assert not host.is_remote(path)


def test_ipv4_address_raises_if_too_many_files_are_open() -> None:
    with (
        pytest.raises(StoreError, match="socket cannot be opened: Too many open files"),
        fail(socket, "socket", errno.EMFILE),
    ):
        host.ipv4_address()
