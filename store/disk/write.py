"""Writing: the only module through which the files of a store are changed.

Every writer gets a `Disk` as an argument, so that tests can pass another one (`store/testing/crash_disk.py`). When a
call has returned, its change survives the death of this process. It survives a power cut when a later sync has
returned: `WritableFile.sync` for the bytes of a file, and `Disk.sync_folder` for names that were created, renamed or
removed.

Every method raises DiskFullError if the disk is full, StorePathError if this user may not write, and StoreError for
other errors of the kernel, such as a failing disk or too many open files. Each message names the file and says what to
do next.
"""

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk.files import exists, is_folder
from rmq_spark.store.disk.kernel_errors import FORBIDDEN, TOO_MANY_FILES, read_error
from rmq_spark.store.disk.ownership import ForeignOwnerError
from rmq_spark.store.disk.system_calls import SystemCalls, folder_of
from rmq_spark.store.errors import DiskFullError, StoreChangedError, StoreError, StorePathError

Bytes = bytes | bytearray | memoryview | NDArray[np.uint8]

# `Disk.replace` writes a file with this suffix and then renames it. If a crash leaves such a file, the next call of
# `replace` for the same path removes it.
TEMPORARY_SUFFIX = ".tmp"

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = FORBIDDEN | {errno.EROFS}
_MISPLACED = {errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}


def is_forbidden(error: StoreError) -> bool:
    """Say whether the error means that this process has no permission to write, so that a retry cannot succeed."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _FORBIDDEN


def is_disk_trouble(error: StoreError) -> bool:
    """Say whether the error means that the disk is full or fails. Reads and later writes may still succeed then."""
    cause = error.__cause__
    return isinstance(error, DiskFullError) or (isinstance(cause, OSError) and cause.errno == errno.EIO)


class Disk:
    """Creates, replaces and removes files and folders. Several threads may use one object, because it has no state.

    All changes are made through the methods of `calls`.
    """

    def __init__(self, calls: SystemCalls | None = None) -> None:
        self.calls = calls or SystemCalls()

    def make_folder(self, path: str, *, is_own: bool = False) -> None:
        """Create a folder, and its parent folders if they are missing. Does nothing if the folder exists.

        The new folders belong to the owner of the lowest folder that existed before (`ownership.py`). With `is_own`,
        they belong to the user of this process, as the folder of a new store does. When this returns, the names of the
        new parent folders are durable. The name of the folder itself is durable when its parent folder is synced.
        """
        if is_folder(path):
            return
        parent = folder_of(path)
        if not is_folder(parent):
            self.make_folder(parent, is_own=is_own)
            # If a power cut loses the name of the parent, all names in the parent are lost too, even synced ones.
            self.sync_folder(folder_of(parent))
        with _explained(path):
            try:
                self.calls.make_folder(path, is_own=is_own)
            except FileExistsError:
                if not is_folder(path):
                    raise NotADirectoryError(errno.ENOTDIR, "a file has this name") from None
            except FileNotFoundError as error:
                raise _unmakeable(path, error) from error

    def create(self, path: str, size_bytes: int, *, is_own: bool = False) -> None:
        """Create a file of `size_bytes` zeros, as a hole: it takes no space on disk until it is overwritten.

        Others see the file only at its full size. Its name is durable when its folder is synced. The file belongs to
        the owner of its folder (`ownership.py`). With `is_own`, it belongs to the user of this process. Raises
        FileExistsError, and changes nothing, if the name is taken.
        """
        assert size_bytes >= 0, size_bytes
        with _explained(path):
            self.calls.create(path, size_bytes, is_own=is_own)

    def create_lock(self, path: str) -> None:
        """Create an empty lock file. Raises FileExistsError if the name is taken.

        Users who may not write the file may not read it either, because a user who can read a file can also lock it,
        and could so block the writers forever.
        """
        with _explained(path):
            self.calls.create(path, 0, only_writers=True)

    def create_filled(self, path: str, size_bytes: int, position: int, data: Bytes) -> None:
        """Create a file of `size_bytes` that contains `data` at `position`, and zeros elsewhere.

        `data` must be contiguous in memory. The data are durable before the name exists, so others see the file only
        with its data, even after a power cut. The name is durable when the folder is synced. Raises FileExistsError,
        and changes nothing, if the name is taken.
        """
        view = _view(data)
        assert 0 <= position <= position + len(view) <= size_bytes, (position, len(view), size_bytes)
        with _explained(path):
            self.calls.create_filled(path, size_bytes, position, view)

    def open(self, path: str) -> "WritableFile":
        """Open an existing file to change its bytes. Raises StoreChangedError if it does not exist."""
        with _explained(path):
            return WritableFile(path, self.calls.open(path), self.calls)

    def replace(self, path: str, data: Bytes) -> None:
        """Create a small file with the content `data`, or replace the content of an existing file by it atomically.

        The new content is durable when this returns. After an error or a crash, the file has either its complete old
        content or its complete new content.
        """
        self._replace(path, data, is_synced=True)

    def replace_unsynced(self, path: str, data: Bytes) -> None:
        """Create a small file with the content `data`, or replace the content of an existing file by it atomically.

        Unlike `replace`, this does not wait for the disk. Readers see either the complete old content or the complete
        new content, even if this process dies. But after a power cut the content is undefined.
        """
        self._replace(path, data, is_synced=False)

    def make_durable(self, path: str, data: Bytes) -> None:
        """Make a small file durable that contains `data`, but that its writer may not have synced.

        If the sync fails, the file is replaced by a new one with the same content. Another sync of the old file would
        not help, because it could succeed without writing anything.
        """
        try:
            with self.open(path) as file:
                file.sync()
        except StoreChangedError:
            raise
        except StoreError:
            self.replace(path, data)
            return
        self.sync_folder(folder_of(path))

    def put_in_place(self, path: str, target: str) -> None:
        """Rename the complete and synced file `path` to `target`, in the same folder. Durable when this returns.

        If `target` exists, it is replaced. After a crash, `target` is either the complete old file or the complete new
        one.
        """
        with _explained(target):
            self.calls.rename(path, target)
        # Without this sync, or before it has returned, a power cut may restore the old name.
        self.sync_folder(folder_of(target))

    def touch(self, path: str) -> None:
        """Set the times of an existing file to now. This works even if the disk is full."""
        with _explained(path):
            self.calls.touch(path)

    def remove(self, path: str) -> None:
        """Remove a file if it exists. The removal is durable when the folder is synced."""
        with _explained(path), contextlib.suppress(FileNotFoundError):
            self.calls.remove(path)

    def remove_folder(self, path: str) -> bool:
        """Remove a folder if it is empty.

        Returns False if the folder is not empty and so stays, and True if it does not exist (any more).
        """
        with _explained(path):
            try:
                self.calls.remove_folder(path)
            except FileNotFoundError:
                return True
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    return False
                raise
        return True

    def sync_folder(self, path: str) -> None:
        """Make all creations, renames and removals of names in the folder durable that were done so far."""
        with _explained(path):
            self.calls.sync_folder(path)

    def _replace(self, path: str, data: Bytes, *, is_synced: bool) -> None:
        temporary = path + TEMPORARY_SUFFIX
        try:
            self._create_like(temporary, path)
            with self.open(temporary) as file:
                file.write(0, data)
                if is_synced:
                    # Synced before the rename. Otherwise a power cut could leave the new file without its data.
                    file.sync()
            with _explained(path):
                self.calls.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # `path` has its old content; the temporary file only takes space
                self.calls.remove(temporary)
            raise
        if is_synced:
            # Without this sync, or before it has returned, a power cut may restore the old content.
            self.sync_folder(folder_of(path))

    def _create_like(self, path: str, target: str) -> None:
        """Create the empty file `path`, with the owner and the mode of the file `target` that it will replace."""
        with _explained(path):
            try:
                like = os.stat(target)
            except FileNotFoundError:
                like = None
            try:
                self.calls.create(path, 0, like=like)
            except FileExistsError:  # a process died during a replace
                self.calls.remove(path)
                self.calls.create(path, 0, like=like)


class WritableFile:
    """An open file that is read and changed by position, as returned by `Disk.open`. Use it in `with`, or close it.

    After a failed sync the content on disk is unknown, and the next sync may succeed without writing the data. So after
    a failed sync every later write and sync raises StoreError. Then open the file again and verify its content. Two
    threads must not write at the same position.
    """

    def __init__(self, path: str, descriptor: int, calls: SystemCalls) -> None:
        self.path = path
        self._descriptor, self._calls = descriptor, calls
        self._poison: str | None = None

    def __enter__(self) -> "WritableFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, position: int, data: Bytes) -> None:
        """Write `data`, which must be contiguous in memory, at `position`.

        Readers see the data immediately. Before a sync, a power cut may lose all or some of the bytes. After an error,
        any part of the data may have been written.
        """
        assert position >= 0, position
        self._check_usable()
        view, done = _view(data), 0
        with _explained(self.path):
            while done < len(view):
                done += self._calls.write(self._descriptor, position + done, view[done:])

    def write_again(self, parts: Sequence[tuple[int, Bytes]]) -> None:
        """Write data that the file already contains once more, so that a later sync makes them durable.

        Use this after a failed sync. `parts` are pairs (position, data), and must contain all needed bytes of the
        folios that they touch. `SystemCalls.write_again` explains why.
        """
        self._check_usable()
        with _explained(self.path):
            self._calls.write_again(self.path, self._descriptor, [(position, _view(data)) for position, data in parts])

    def read(self, position: int, size: int) -> bytes:
        """Return `size` bytes from `position`, or fewer if the file ends before."""
        pieces: list[bytes] = []
        while size > 0:
            try:
                piece = os.pread(self._descriptor, size, position)
            except OSError as error:
                raise read_error(self.path, "read", error) from error
            if not piece:
                break
            pieces.append(piece)
            position, size = position + len(piece), size - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def size(self) -> int:
        """Return the file's current length in bytes."""
        try:
            return os.fstat(self._descriptor).st_size
        except OSError as error:
            raise read_error(self.path, "asked for its length", error) from error

    def begin_sync(self) -> None:
        """Start writing the file's data to disk, so that a later `sync` waits less. This guarantees nothing.

        Raises StoreError if the kernel could not write some of it.
        """
        with _explained(self.path):
            self._calls.begin_sync(self._descriptor)

    def sync(self) -> None:
        """Make all bytes durable that this or any other process has written to the file so far."""
        self._check_usable()
        try:
            with _explained(self.path):
                self._calls.sync(self._descriptor)
        except StoreError as error:
            self._poison = str(error)
            raise

    def close(self) -> None:
        """Close the file without a sync. A second call does nothing."""
        # There is no other call before os.close, so no interrupt can come in between. An interrupt finds the file
        # either open, or closed and with the descriptor -1.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            try:
                os.close(descriptor)
            except OSError as error:
                # The kernel has closed the descriptor anyway. The error matters: a network file system reports here
                # that it lost writes.
                raise _explanation(self.path, error) from error

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self.close()

    def _check_usable(self) -> None:
        assert self._descriptor >= 0, f"{self.path} is closed"
        if self._poison is not None:
            raise StoreError(
                f"{self.path} could not be synced before, so its content on disk is unknown. Close the writer and "
                f"open it again: it recovers. The first error was: {self._poison}"
            )


def _view(data: Bytes) -> memoryview:
    return (data.data if isinstance(data, np.ndarray) else memoryview(data)).cast("B")


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    """Convert an OSError in the body of `with` to an error of this project, and raise that.

    FileExistsError is raised unchanged, because callers handle it. But if the name is that of a folder, or of a link
    whose target is missing, StorePathError is raised, because a file of this name cannot be opened either.
    """
    try:
        yield
    except FileExistsError as error:
        if is_folder(path):
            what = "a folder of this name"
        elif os.path.islink(path) and not exists(path):
            what = "a link whose target is missing"
        else:
            raise
        raise StorePathError(
            f"{path} cannot be created: found {what}; expected a free name. Move it to another place."
        ) from error
    except OSError as error:
        raise _explanation(path, error) from error


def _unmakeable(path: str, error: OSError) -> StoreError:
    """Return the error for a folder that cannot be created, although its parent folder existed a moment before."""
    if not is_folder(folder_of(path)):
        return _explanation(path, error)
    return StorePathError(
        f"the folder {path} cannot be created: {error.strerror}. The file system of {folder_of(path)} does not allow "
        "it (like /proc). Give another path."
    )


def _explanation(path: str, error: OSError) -> StoreError:
    if isinstance(error, ForeignOwnerError):
        return StorePathError(f"{path} cannot be written: {error}")
    what = f"{path} cannot be written: {error.strerror}."
    if error.errno in _NO_ROOM:
        return DiskFullError(
            f"{what} No acknowledged message is lost. Make room on that file system (or raise the quota of the "
            "user who runs Spark), then write again."
        )
    if error.errno in _FORBIDDEN:
        return StorePathError(
            f"{what} A writer needs the right to write every file and folder of the store. Give the user who runs "
            "Spark that right, or run as the user who owns the store (the broker's user, if a broker writes there too)."
        )
    if error.errno in _MISPLACED:
        return StorePathError(
            f"{what} Something else has the name of a file or folder of the store, or the path is too long. Move it "
            "away, or give another path."
        )
    if error.errno == errno.ENOENT:
        return StoreChangedError(
            f"{path} is gone, or its folder: retention deleted it, or the store was moved or rebuilt. Open the store "
            "again."
        )
    if error.errno in TOO_MANY_FILES:
        return StoreError(f"{what} Raise the limit of open files (ulimit -n) and write again.")
    return StoreError(
        f"{what} Check the state of the disk in the kernel's log (dmesg). Once it works, open the store again: the "
        "next writer recovers unfinished writes."
    )
