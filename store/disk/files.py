"""Reading of folders and files. No function here creates, changes or locks a file.

Only the kernel's errors ENOENT and ENOTDIR mean that a file does not exist. Every other error of the kernel is raised
as an error of this project: StorePathError if the path or its permissions are wrong, and StoreError if the disk fails
or the machine lacks memory or file descriptors. StoreChangedError means that a file existed before, but is gone now or
has become shorter.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator
from types import TracebackType

from rmq_spark.store.disk.kernel_errors import ABSENT, read_error, reading, reason
from rmq_spark.store.errors import OptionError, StoreChangedError

_EXTENT_BYTES = 1 << 20
_LEAST_READ_BYTES = 1 << 12
_ADDRESS = r"(\[[0-9a-fA-F:.]+\]|[a-zA-Z0-9][a-zA-Z0-9._-]*):[0-9]{1,5}"
_ADDRESSES = re.compile(rf"\s*{_ADDRESS}(\s*[;,]\s*{_ADDRESS})*[;,]?\s*")


def list_folder(path: str) -> list[tuple[str, bool]]:
    """Return a pair (name, whether it is a folder) for each entry of the folder `path`, sorted by name.

    Returns [] if the folder does not exist. A link that leads nowhere, or to itself, is not a folder.
    """
    try:
        with os.scandir(path) as entries:
            return sorted((entry.name, _is_entry_of_folder(entry)) for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise read_error(error.filename or path, "listed", error) from error


def _is_entry_of_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder. Most file systems return that with the name, without a system call."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP and entry.is_symlink():
            return False
        raise


def file_size(path: str) -> int:
    """Return the file's length in bytes, or -1 if the file does not exist."""
    found = _status(path)
    return -1 if found is None else found.st_size


def modified_ms(path: str) -> int:
    """Return the file's modification time in ms since the epoch, or -1 if the file does not exist."""
    found = _status(path)
    return -1 if found is None else found.st_mtime_ns // 1_000_000


def stamp(path: str) -> tuple[int, int, int] | None:
    """Return (inode, length, modification time) of a file, or None if the file does not exist.

    Use it for small files that are replaced when they change: a different stamp means that the file has changed.
    """
    found = _status(path)
    return None if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)


def is_folder(path: str) -> bool:
    """Say whether `path` is a folder, or a link to one."""
    found = _status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def exists(path: str) -> bool:
    """Say whether `path` is an existing file or folder, or a link to one."""
    return _status(path) is not None


def _status(path: str) -> os.stat_result | None:
    """Return the status of a file or folder, or None if `path` does not exist."""
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise read_error(path, "looked up", error) from error


def read_small(path: str) -> bytes | None:
    """Return the content of a small file, or None if the file does not exist.

    If a part of the path that should be a folder is a file, this raises StorePathError.
    """
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
    """Open a regular file for reading. Return its descriptor and its length in bytes.

    Raises OSError if the file cannot be opened or is not a regular file. If `path` is a FIFO, this does not wait for a
    process that writes to the FIFO, as a plain `open` would.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:  # another process has a lease on the file; an open that may wait for its end succeeds
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise
        descriptor = os.open(path, flags)
    try:
        return descriptor, check_regular(descriptor).st_size
    except OSError:
        os.close(descriptor)
        raise


def check_regular(descriptor: int) -> os.stat_result:
    """Return the status of an open file. Raises OSError if it is not a regular file."""
    found = os.fstat(descriptor)
    require_regular(found)
    return found


def require_regular(found: os.stat_result) -> None:
    """Raise OSError (EISDIR) if the status `found` is not that of a regular file, but of a folder, FIFO or device."""
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
    """Yield the parts of a file that contain other bytes than zeros, as pairs (begin, end) of positions in bytes.

    Only the range [begin, end) of the file is searched. A part has at most 1 MiB, and may also contain zeros.
    """
    with OpenFile(path) as file:
        for first, last in file.extents(begin, end):
            if file.read(first, last - first).strip(b"\0"):
                yield first, last


def free_bytes(path: str) -> int:
    """Return how many bytes this user can still write on the file system of `path`."""
    with reading(path, "asked for its free space"):
        status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def process_id() -> int:
    """Return the id of this process."""
    return os.getpid()


def parent_process_id() -> int:
    """Return the id of the parent process, which changes when the parent dies."""
    return os.getppid()


def store_folder(path: str | os.PathLike[str]) -> str:
    """Return the path of a store's folder as an absolute path, like `absolute`. Raises OptionError for an address."""
    if isinstance(path, str | os.PathLike):
        refuse_address(os.fspath(path))
    return absolute(path)


def refuse_address(path: str | bytes) -> None:
    """Raise OptionError if the path of a store looks like "host:port", and nothing exists there.

    Several addresses may be joined by ";" or ",".
    """
    if isinstance(path, str) and _ADDRESSES.fullmatch(path) and not os.path.lexists(path):
        raise OptionError(
            f"{path} looks like the address of a name server, and there is no such folder; expected a folder. Give "
            "nameServer=… (name_server=…, -n …) for a cluster, or ./host:port for a folder."
        )


def absolute(path: str | os.PathLike[str]) -> str:
    """Return `path` as an absolute path. A leading `~` is the user's home.

    Raises OptionError if the value is not a path, or if the working folder of this process was removed.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise OptionError(f"{path!r} is not a path. Give the folder of a store as a str or a pathlib.Path.")
    if "\0" in text:
        raise OptionError(f"the path {text!r} contains the character 0, which is not valid in a path. Remove it.")
    try:
        return os.path.abspath(os.path.expanduser(text))
    except OSError as error:
        raise OptionError(
            f"the path {text!r} cannot be made absolute: {reason(error)}; expected a working folder that exists. Give "
            "the path from /."
        ) from error


def resolved(path: str) -> str:
    """Return `path` as an absolute path without symbolic links. A part that does not exist stays as it is."""
    try:
        return os.path.realpath(path, strict=True)
    except OSError as error:
        if error.errno not in ABSENT:
            raise read_error(error.filename or path, "resolved", error) from error
        return os.path.realpath(path)


class OpenFile:
    """An open file that is read by position. Use it in `with`, or call `close`.

    If another file is renamed to the path while this one is open, reads still return the bytes of the first file.
    Several threads may use it.
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
        """Close the file. A second call does nothing."""
        # There is no other call before os.close, so no interrupt can come in between. An interrupt finds the file
        # either open, or closed and with the descriptor -1.
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            try:  # noqa: SIM105 - an interrupt can come within a call to suppress()
                os.close(descriptor)
            except OSError:
                pass  # the kernel has freed the descriptor, and the data was read before

    def size(self) -> int:
        """Return the file's current length in bytes."""
        try:
            return os.fstat(self.descriptor).st_size
        except OSError as error:
            raise read_error(self.path, "asked for its length", error) from error

    def extents(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of the range [begin, end) that are not holes, as pairs (begin, end) of positions in bytes.

        A part has at most 1 MiB, and may contain zeros.
        """
        position = begin
        while position < end:
            try:
                position = os.lseek(self.descriptor, position, os.SEEK_DATA)
                hole = os.lseek(self.descriptor, position, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return  # the rest is a hole
                raise read_error(self.path, "searched for data", error) from error
            extent_end = min(hole, end, position + _EXTENT_BYTES)
            if position >= extent_end:
                return
            yield position, extent_end
            position = extent_end

    def read(self, position: int, size: int) -> bytes:
        """Return `size` bytes from `position`, or fewer if the file ends before."""
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
        """Fill `target` with the bytes from `position`. Raises StoreChangedError if the file ends before that."""
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self.descriptor, [target[done:]], position + done)
            except OSError as error:
                raise read_error(self.path, "read", error) from error
            if not count:
                raise StoreChangedError(
                    f"{self.path} has {self.size()} bytes; expected {position + len(target)}. It was truncated during "
                    "the read. Plan the read again."
                )
            done += count


class FileCursor:
    """A read position in an open file, with the methods that Arrow expects of a file.

    Closing the cursor does not close the file. For one thread at a time.
    """

    def __init__(self, file: OpenFile) -> None:
        self.closed = False
        self._file, self._position = file, 0

    def read(self, size: int = -1) -> bytes:
        """Return the next `size` bytes, or fewer if the file ends before. By default return all remaining bytes."""
        data = self._file.read(self._position, size if size >= 0 else self._file.size() - self._position)
        self._position += len(data)
        return data

    def seek(self, position: int, whence: int = 0) -> int:
        """Move the read position and return the new one, in bytes from the beginning of the file.

        `position` is relative to the beginning of the file if `whence` is 0, to the current position if it is 1, and to
        the end of the file if it is 2.
        """
        self._position = (0, self._position, self._file.size())[whence] + position
        return self._position

    def tell(self) -> int:
        """Return the current position."""
        return self._position

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Mark the cursor as closed. The file stays open."""
        self.closed = True
