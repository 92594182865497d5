"""Folders and files for reading. Nothing here creates, changes or locks anything.

Only ENOENT and ENOTDIR mean that something does not exist. Every other error of the kernel is raised: StorePathError
where the path or its rights are wrong, StoreError where the disk fails or the machine lacks something. A file that
existed and is gone or has shrunk is a StoreChangedError.
"""

import errno
import os
import stat
from collections.abc import Iterator
from types import TracebackType

from rmq_spark.store.disk.kernel_errors import ABSENT, read_error, reading, reason
from rmq_spark.store.errors import OptionError, StoreChangedError

_EXTENT_BYTES = 1 << 20
_LEAST_READ_BYTES = 1 << 12


def list_folder(path: str) -> list[tuple[str, bool]]:
    """Return name and is-a-folder of everything in `path`, sorted by name; [] if there is no such folder."""
    try:
        with os.scandir(path) as entries:
            # Most file systems give the kind with the name: no further call is needed then.
            return sorted((entry.name, entry.is_dir()) for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise read_error(error.filename or path, "listed", error) from error


def file_size(path: str) -> int:
    """Return the file's length in bytes, -1 if there is no such file."""
    found = _status(path)
    return -1 if found is None else found.st_size


def modified_ms(path: str) -> int:
    """Return when the file was last modified, in ms since the epoch; -1 if there is no such file."""
    found = _status(path)
    return -1 if found is None else found.st_mtime_ns // 1_000_000


def stamp(path: str) -> tuple[int, int, int] | None:
    """Return what differs once a small file was replaced or written: its inode, length and time; None without one."""
    found = _status(path)
    return None if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)


def is_folder(path: str) -> bool:
    """Say whether there is a folder at `path`, or a link to one."""
    found = _status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def exists(path: str) -> bool:
    """Say whether there is a file or a folder at `path`, or a link to one."""
    return _status(path) is not None


def _status(path: str) -> os.stat_result | None:
    """Return what the kernel knows of a file or folder, None where there is none."""
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise read_error(path, "looked up", error) from error


def read_small(path: str) -> bytes | None:
    """Return a whole small file, None if there is none. A file in place of its folder is an error."""
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
        raise read_error(path, "read", error) from error


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
    refuse_irregular(found)
    return found


def refuse_irregular(found: os.stat_result) -> None:
    """Raise OSError, with the number for a folder, for anything but a regular file: a FIFO, a folder, a device."""
    if not stat.S_ISREG(found.st_mode):
        is_folder = stat.S_ISDIR(found.st_mode)
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR) if is_folder else "it is not a regular file")


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
        for first, last in file.extents(begin, end):
            if file.read(first, last - first).strip(b"\0"):
                yield first, last


def free_bytes(path: str) -> int:
    """Return how much of the file system that holds `path` this user may still fill."""
    with reading(path, "asked for its free space"):
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
    try:
        return os.path.abspath(os.path.expanduser(text))
    except OSError as error:  # the working folder was removed
        raise OptionError(
            f"the path {text!r} cannot be made absolute: {reason(error)}; expected a working folder that exists. Give "
            "the path from / on."
        ) from error


def resolved(path: str) -> str:
    """Return the absolute path with every link in it followed, as far as there is something."""
    try:
        return os.path.realpath(path, strict=True)
    except OSError as error:
        if error.errno not in ABSENT:
            raise read_error(error.filename or path, "resolved", error) from error
        return os.path.realpath(path)


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
            raise read_error(path, "opened", error) from error

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
        # Nothing is called between the two lines: an interrupt finds the file open, or closed and forgotten.
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            try:  # noqa: SIM105 - a call to suppress() is one more place for an interrupt
                os.close(descriptor)
            except OSError:
                pass  # the kernel freed the descriptor all the same, and what was read was read before

    def size(self) -> int:
        """Return the file's length now, in bytes."""
        try:
            return os.fstat(self.descriptor).st_size
        except OSError as error:
            raise read_error(self.path, "asked for its length", error) from error

    def extents(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of [begin, end) that are no holes, at most 1 MiB each; they may hold zeros."""
        at = begin
        while at < end:
            try:
                at = os.lseek(self.descriptor, at, os.SEEK_DATA)
                hole = os.lseek(self.descriptor, at, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return  # only a hole is left
                raise read_error(self.path, "searched for data", error) from error
            until = min(hole, end, at + _EXTENT_BYTES)
            if at >= until:
                return
            yield at, until
            at = until

    def read(self, position: int, size: int) -> bytes:
        """Return `size` bytes from `position`, or fewer at the file's end."""
        try:
            data = os.pread(self.descriptor, size, position)
            while 0 < len(data) < size:
                more = os.pread(self.descriptor, size - len(data), position + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise read_error(self.path, "read", error) from error
        return data

    def read_into(self, position: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `position` on. Raises StoreChangedError if the file is shorter."""
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self.descriptor, [target[done:]], position + done)
            except OSError as error:
                raise read_error(self.path, "read", error) from error
            if not count:
                raise StoreChangedError(
                    f"{self.path} has {self.size()} bytes, {position + len(target)} were expected: it was cut "
                    "while it was being read. Plan the read again."
                )
            done += count
