"""The only door by which the bytes of a store are changed.

Whatever writes gets a `Disk` as an argument, so that a disk for tests (`store/testing/crash_disk.py`) can stand in
for the real one. A change survives the death of this process once its call has returned, and a power cut once the
sync that covers it has: `ChangingFile.sync` for bytes, `Disk.sync_folder` for names.

Every method raises DiskFullError where there is no room, StorePathError where writing is not allowed, and StoreError
for what else the kernel reports (a failing disk, too many open files), each naming the file and the next step.
"""

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk.files import is_folder
from rmq_spark.store.disk.kernel_errors import read_error
from rmq_spark.store.disk.ownership import ForeignOwnerError
from rmq_spark.store.disk.system_calls import SystemCalls
from rmq_spark.store.errors import DiskFullError, StoreChangedError, StoreError, StorePathError

Bytes = bytes | bytearray | memoryview | NDArray[np.uint8]

TEMPORARY_SUFFIX = ".tmp"  # what `replace` writes first; a crash may leave one, and the next replace takes it away

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_MISPLACED = {errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
_TOO_MANY = {errno.EMFILE, errno.ENFILE}


def is_forbidden(error: StoreError) -> bool:
    """Say whether an error means that this process may not write there: it will not pass by itself."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _FORBIDDEN


def is_disk_trouble(error: StoreError) -> bool:
    """Say whether an error means that the disk is full or fails: to read may go on, and to write may work later."""
    cause = error.__cause__
    return isinstance(error, DiskFullError) or (isinstance(cause, OSError) and cause.errno == errno.EIO)


class Disk:
    """Makes, replaces and removes files and folders. Keeps no state: safe for several threads and processes.

    Everything it does goes through `calls`, one system call at a time.
    """

    def __init__(self, calls: SystemCalls | None = None) -> None:
        self.calls = calls or SystemCalls()

    def make_folder(self, path: str, *, is_own: bool = False) -> None:
        """Make a folder, and those above it, where they are missing.

        They belong to the owner of the folder that exists (`ownership.py`), or with `is_own` to the user of this
        process: the folder of a new store does. Sync the folder above to keep its name through a power cut; those
        further up are synced here.
        """
        if is_folder(path):
            return
        above = _folder_of(path)
        if not is_folder(above):
            self.make_folder(above, is_own=is_own)
            # A synced name in a folder whose own name is lost would be lost with it.
            self.sync_folder(_folder_of(above))
        with _explained(path):
            try:
                self.calls.make_folder(path, is_own=is_own)
            except FileExistsError:
                if not is_folder(path):
                    raise NotADirectoryError(errno.ENOTDIR, "a file stands there") from None
            except FileNotFoundError as error:
                raise _unmakeable(path, error) from error

    def create(self, path: str, size_bytes: int, *, is_own: bool = False) -> None:
        """Make a file of `size_bytes` zeros, which take no room until they are written over.

        Others see it at its full size or not at all. Its name survives a power cut once its folder is synced.
        It belongs to the owner of its folder (`ownership.py`), or with `is_own` to the user of this process. Raises
        FileExistsError, and then nothing has changed.
        """
        assert size_bytes >= 0, size_bytes
        with _explained(path):
            self.calls.create(path, size_bytes, is_own=is_own)

    def create_lock(self, path: str) -> None:
        """Make an empty file to be locked, which nobody may read who may not write it. Raises FileExistsError.

        Whoever may read a file can lock it against its writers.
        """
        with _explained(path):
            self.calls.create(path, 0, only_writers=True)

    def create_filled(self, path: str, size_bytes: int, position: int, data: Bytes) -> None:
        """Make a file of `size_bytes` with `data` (contiguous) at `position`, and zeros elsewhere.

        Others see it with its data or not at all, after a power cut too: the data are on disk for good before the
        name is there, which is once its folder is synced. Raises FileExistsError, and then nothing has changed.
        """
        view = _view(data)
        assert 0 <= position <= position + len(view) <= size_bytes, (position, len(view), size_bytes)
        with _explained(path):
            self.calls.create_filled(path, size_bytes, position, view)

    def open(self, path: str) -> "ChangingFile":
        """Open a file that is there, to change its bytes. Raises StoreChangedError if it is not there."""
        with _explained(path):
            return ChangingFile(path, self.calls.open(path), self.calls)

    def replace(self, path: str, data: Bytes) -> None:
        """Make `data` the content of a small file, there or not: whole and through a power cut once this returns.

        After an error or a crash the file holds the old content or the new one, whole.
        """
        self._replace(path, data, is_synced=True)

    def replace_unsynced(self, path: str, data: Bytes) -> None:
        """Make `data` the content of a small file, there or not, without waiting for the disk.

        Readers and a process's death meet the old content or the new one, whole; a power cut may leave anything.
        """
        self._replace(path, data, is_synced=False)

    def make_durable(self, path: str, data: Bytes) -> None:
        """Have a small file that holds `data`, which whoever wrote it may not have synced, survive a power cut.

        Where its sync fails it is written again as a new file: a second sync would succeed and write nothing.
        """
        try:
            with self.open(path) as file:
                file.sync()
        except StoreChangedError:
            raise
        except StoreError:
            self.replace(path, data)
            return
        self.sync_folder(_folder_of(path))

    def put_in_place(self, path: str, target: str) -> None:
        """Give a finished file, synced by its writer, the name `target`, which another may have had until now.

        Both lie in one folder. After a crash `target` is the old file or the new one, whole.
        """
        with _explained(target):
            self.calls.rename(path, target)
        # A power cut before this returns may bring the old name back.
        self.sync_folder(_folder_of(target))

    def touch(self, path: str) -> None:
        """Set the times of an existing file to now. A full disk does not prevent it."""
        with _explained(path):
            self.calls.touch(path)

    def remove(self, path: str) -> None:
        """Take a file away if it is there. It may come back after a power cut until its folder is synced."""
        with _explained(path), contextlib.suppress(FileNotFoundError):
            self.calls.remove(path)

    def remove_folder(self, path: str) -> bool:
        """Take a folder away if it is there and empty; say whether it is gone."""
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
        """Return when all names in the folder, made and removed so far, survive a power cut."""
        with _explained(path):
            self.calls.sync_folder(path)

    def _replace(self, path: str, data: Bytes, *, is_synced: bool) -> None:
        temporary = path + TEMPORARY_SUFFIX
        try:
            self._create_afresh(temporary, path)
            with self.open(temporary) as file:
                file.write(0, data)
                if is_synced:
                    # Before the name: else a power cut could leave the name with nothing behind it.
                    file.sync()
            with _explained(path):
                self.calls.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # `path` still has what it had; let no half-written file take room
                self.calls.remove(temporary)
            raise
        if is_synced:
            # A power cut before this returns may bring the old content back.
            self.sync_folder(_folder_of(path))

    def _create_afresh(self, path: str, target: str) -> None:
        """Make an empty file with the owner and the mode of the one that it is to replace."""
        with _explained(path):
            try:
                like = os.stat(target)
            except FileNotFoundError:
                like = None
            try:
                self.calls.create(path, 0, like=like)
            except FileExistsError:  # a process died while it replaced
                self.calls.remove(path)
                self.calls.create(path, 0, like=like)


class ChangingFile:
    """An open file whose bytes are read and changed by position. Made by `Disk.open`; close it or use it in `with`.

    Once a sync has failed, nobody knows which bytes are on the disk, and the kernel may report the next sync as a
    success: every later write and sync raises. Open the file again and find out what it holds. Not for two threads at
    the same position.
    """

    def __init__(self, path: str, descriptor: int, calls: SystemCalls) -> None:
        self.path = path
        self._descriptor, self._calls = descriptor, calls
        self._poison: str | None = None

    def __enter__(self) -> "ChangingFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, position: int, data: Bytes) -> None:
        """Write `data` (contiguous) from `position` on. Readers see it at once; a power cut may lose or tear it.

        After an error any part of it may be there.
        """
        assert position >= 0, position
        self._refuse_if_poisoned()
        view, done = _view(data), 0
        with _explained(self.path):
            while done < len(view):
                done += self._calls.write(self._descriptor, position + done, view[done:])

    def write_again(self, parts: Sequence[tuple[int, Bytes]]) -> None:
        """Write bytes that the file has already; a later sync puts them on the disk, whatever sync failed before.

        Each part has its position. They are all that counts in some folios, as `SystemCalls.write_again` explains.
        """
        self._refuse_if_poisoned()
        with _explained(self.path):
            self._calls.write_again(self.path, self._descriptor, [(position, _view(data)) for position, data in parts])

    def read(self, position: int, size: int) -> bytes:
        """Return `size` bytes from `position`, or fewer at the file's end."""
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
        """Return the file's length now, in bytes."""
        try:
            return os.fstat(self._descriptor).st_size
        except OSError as error:
            raise read_error(self.path, "asked for its length", error) from error

    def begin_sync(self) -> None:
        """Have the kernel begin to write out this file: a later `sync` waits less. Promises nothing."""
        self._calls.begin_sync(self._descriptor)

    def sync(self) -> None:
        """Return when every byte written to this file so far, by whomever, survives a power cut."""
        self._refuse_if_poisoned()
        try:
            with _explained(self.path):
                self._calls.sync(self._descriptor)
        except StoreError as error:
            self._poison = str(error)
            raise

    def close(self) -> None:
        """Close the file; nothing is synced. A second call does nothing."""
        # Nothing is called between the two lines: an interrupt finds the file open, or closed and forgotten.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            try:
                os.close(descriptor)
            except OSError as error:
                # The kernel freed the descriptor all the same. A network file system reports lost writes here.
                raise _explanation(self.path, error) from error

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self.close()

    def _refuse_if_poisoned(self) -> None:
        assert self._descriptor >= 0, f"{self.path} is closed"
        if self._poison is not None:
            raise StoreError(
                f"{self.path} could not be synced before, and what of it is on the disk is not known. Close the writer "
                f"and open it again: it recovers. What happened then: {self._poison}"
            )


def _view(data: Bytes) -> memoryview:
    return (data.data if isinstance(data, np.ndarray) else memoryview(data)).cast("B")


def _folder_of(path: str) -> str:
    return os.path.dirname(path) or "."


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    """Raise the kernel's errors as ours; FileExistsError stays, whoever creates acts on it."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise _explanation(path, error) from error


def _unmakeable(path: str, error: OSError) -> StoreError:
    """Return why a folder cannot be made, although the one above it was there a moment ago."""
    if not is_folder(_folder_of(path)):
        return _explanation(path, error)
    return StorePathError(
        f"the folder {path} cannot be made: {error.strerror}. {_folder_of(path)} is there, but its file system takes "
        "no such folder (as /proc does not). Give another path."
    )


def _explanation(path: str, error: OSError) -> StoreError:
    if isinstance(error, ForeignOwnerError):
        return StorePathError(f"{path} cannot be written: {error}")
    what = f"{path} cannot be written: {error.strerror}."
    if error.errno in _NO_ROOM:
        return DiskFullError(
            f"{what} Nothing that was acknowledged is lost. Make room on that file system (or raise the quota of the "
            "user who runs Spark), then write again."
        )
    if error.errno in _FORBIDDEN:
        return StorePathError(
            f"{what} Who appends to a store needs to write every file and folder in it. Give the user who runs Spark "
            "that right, or run as the user who owns the store (a broker's user, where one writes there too)."
        )
    if error.errno in _MISPLACED:
        return StorePathError(
            f"{what} Something else stands where the store has a file or folder of that name, or the path is too long. "
            "Move it away, or give another path."
        )
    if error.errno == errno.ENOENT:
        return StoreChangedError(
            f"{path} is gone, or the folder that it belongs in: retention deleted it, or the store was moved or "
            "rebuilt. Open the store again."
        )
    if error.errno in _TOO_MANY:
        return StoreError(f"{what} Raise the limit of open files (ulimit -n) and write again.")
    return StoreError(
        f"{what} Look for the disk's state in the kernel's log (dmesg); once it is sound, open the store again: the "
        "next writer recovers what was begun."
    )
