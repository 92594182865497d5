"""Folders and files for reading. Nothing here creates, changes or locks anything.

Every function raises StoreChangedError for a file that was there and is gone or has shrunk, and StorePathError for
one that cannot be read (a permission, a link that leads nowhere).
"""

import errno
import os
import stat
from collections.abc import Iterator
from types import TracebackType

from rmq_spark.store.errors import OptionError, StoreChangedError, StorePathError

_EXTENT_BYTES = 1 << 20
_LEAST_READ_BYTES = 1 << 12


def list_folder(path: str) -> list[tuple[str, bool]]:
    """Return name and is-a-folder of everything in `path`, sorted by name; [] if there is no such folder."""
    try:
        with os.scandir(path) as entries:
            return sorted((entry.name, is_folder(entry.path)) for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unreadable(path, error) from error


def file_size(path: str) -> int:
    """Return the file's length in bytes, -1 if there is no such file."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return -1
    except OSError as error:
        raise _unreadable(path, error) from error


def modified_ms(path: str) -> int:
    """Return when the file was last modified, in ms since the epoch; -1 if there is no such file."""
    try:
        return os.stat(path).st_mtime_ns // 1_000_000
    except OSError:
        return -1


def stamp(path: str) -> tuple[int, int, int] | None:
    """Return what differs once a small file was replaced or written: its inode, length and time; None without one."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def is_folder(path: str) -> bool:
    """Say whether there is a folder at `path`, or a link to one."""
    return os.path.isdir(path)


def exists(path: str) -> bool:
    """Say whether there is a file or a folder at `path`, or a link to one."""
    return os.path.exists(path)


def read_small(path: str) -> bytes | None:
    """Return a whole small file, None if there is none."""
    try:
        descriptor, size = open_regular(path)
        try:
            pieces = []
            while piece := os.read(descriptor, max(size, _LEAST_READ_BYTES)):
                pieces.append(piece)
            return b"".join(pieces)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def open_regular(path: str) -> tuple[int, int]:
    """Open a regular file for reading and return its descriptor and its length in bytes. Raises OSError.

    Never waits for the writer of a FIFO, which a plain open does.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:  # another process has a lease on the file: an open that may wait succeeds
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise
        descriptor = os.open(path, flags)
    try:
        return descriptor, check_regular(descriptor).st_size
    except OSError:
        os.close(descriptor)
        raise


def check_regular(descriptor: int) -> os.stat_result:
    """Return what the system knows of an open regular file. Raises OSError for anything else: a FIFO, a folder."""
    found = os.fstat(descriptor)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    return found


def join(*parts: str) -> str:
    """Join path parts."""
    return os.path.join(*parts)


def parent(path: str) -> str:
    """Return the folder that holds `path`."""
    return os.path.dirname(path)


def data_extents(path: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of [begin, end) of a file (bytes) that may be anything but zeros; holes are passed over.

    A part is at most 1 MiB. Bytes that are zero may be among them.
    """
    with OpenFile(path) as file:
        at = begin
        while at < end:
            try:
                at = os.lseek(file.descriptor, at, os.SEEK_DATA)
            except OSError:
                return  # nothing but a hole is left
            until = min(os.lseek(file.descriptor, at, os.SEEK_HOLE), end, at + _EXTENT_BYTES)
            if at >= until:
                return
            if os.pread(file.descriptor, until - at, at).strip(b"\0"):
                yield at, until
            at = until


def free_bytes(path: str) -> int:
    """Return how much of the file system that holds `path` this user may still fill."""
    held = os.statvfs(path)
    return held.f_bavail * held.f_frsize


def process_id() -> int:
    """Return this process's id."""
    return os.getpid()


def parent_process_id() -> int:
    """Return the id of the process that started this one, of another one once that is dead."""
    return os.getppid()


def absolute(path: str | os.PathLike[str]) -> str:
    """Return the path as seen from everywhere on this machine; `~` is the user's home.

    Raises OptionError for what is no path at all: the kernel would not even be asked.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise OptionError(f"{path!r} is no path. Give the folder of a store as a str or a pathlib.Path.")
    if "\0" in text:
        raise OptionError(f"the path {text!r} has the character 0 in it, which no path can have. Take it out.")
    return os.path.abspath(os.path.expanduser(text))


def resolved(path: str) -> str:
    """Return the absolute path with every link in it followed, as far as there is something."""
    return os.path.realpath(path)


def _unreadable(path: str, error: OSError) -> StorePathError:
    return StorePathError(
        f"{path} cannot be read: {error.strerror}. The user who runs Spark needs to read every folder and file of the "
        "store, and each must be what its name says, no link that leads nowhere."
    )


class OpenFile:
    """A file open for reading by position. Use as a context manager, or `close` it.

    It keeps reading the same file when another takes its name. Safe for several threads.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.descriptor, _ = open_regular(path)
        except FileNotFoundError as error:
            raise StoreChangedError(
                f"{path} is gone: retention deleted it, or the store was moved or rebuilt. Plan the read again."
            ) from error
        except OSError as error:
            raise _unreadable(path, error) from error

    def __enter__(self) -> "OpenFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def size(self) -> int:
        """Return the file's length now, in bytes."""
        return os.fstat(self.descriptor).st_size

    def read(self, position: int, size: int) -> bytes:
        """Return `size` bytes from `position`, or fewer at the file's end."""
        data = os.pread(self.descriptor, size, position)
        while 0 < len(data) < size:
            more = os.pread(self.descriptor, size - len(data), position + len(data))
            if not more:
                break
            data += more
        return data

    def read_into(self, position: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `position` on. Raises StoreChangedError if the file is shorter."""
        done = 0
        while done < len(target):
            count = os.preadv(self.descriptor, [target[done:]], position + done)
            if not count:
                raise StoreChangedError(
                    f"{self.path} has {self.size()} bytes, {position + len(target)} were expected: it was cut "
                    "while it was being read. Plan the read again."
                )
            done += count
