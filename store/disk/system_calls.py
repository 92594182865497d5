"""The system calls that change a disk, one method each: where a disk for tests listens, tears or fails.

Errors are the kernel's (OSError); what they mean for a store is said in `changing.py`. Nothing else in the engine
calls the kernel to change anything, but for locks (`file_lock.py`), which leave nothing on a disk.
"""

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence

from rmq_spark.store.disk.ownership import hand_over

# What open() answers where a file cannot be made without a name: NFS, old kernels, some FUSE file systems.
_NO_NAMELESS_FILES = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL}
_FILE_MODE = 0o666  # less the umask, as Java creates files
_NAMELESS = getattr(os, "O_TMPFILE", 0)
# Linux caches files in folios of up to 2**11 pages (MAX_XAS_ORDER), at multiples of their size.
FOLIO_BYTES = mmap.PAGESIZE << 11
REWRITE_BYTES = 4096  # a multiple of what any disk takes in a direct write
_DIRECT = getattr(os, "O_DIRECT", 0)
_NO_DIRECT_WRITES = {errno.EINVAL, errno.EOPNOTSUPP}  # tmpfs before Linux 6.6, some FUSE file systems
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h: begin, and wait for nothing
_write_out = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux
_sync_data = getattr(os, "fdatasync", os.fsync)


class SystemCalls:
    """What the kernel does to files and folders. Safe for several threads."""

    def make_folder(self, path: str, *, is_own: bool = False) -> None:
        """Make one folder in a folder that is there. FileExistsError if the name is taken.

        Its owner is that of the folder above (`ownership.py`), or with `is_own` the user of this process.
        """
        os.mkdir(path)
        if is_own:
            return
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                hand_over(descriptor, os.path.dirname(path) or ".")
            finally:
                os.close(descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.rmdir(path)
            raise

    def create(
        self,
        path: str,
        size_bytes: int,
        *,
        like: os.stat_result | None = None,
        only_writers: bool = False,
        is_own: bool = False,
    ) -> None:
        """Make a file of `size_bytes` zeros that take no room yet. FileExistsError if the name is taken.

        Its owner and mode are those of `like`, which it is to replace, or follow from its folder (`ownership.py`);
        with `is_own` it belongs to the user of this process. With `only_writers` nobody else may read it.

        The name comes last, so whoever sees the file sees its full size, after a crash too. Only on file systems
        that know no nameless files a crash in between leaves it empty.
        """

        def own(descriptor: int) -> None:
            if not is_own:
                hand_over(descriptor, os.path.dirname(path) or ".", like, only_writers=only_writers)

        _create(path, size_bytes, own)

    def create_filled(self, path: str, size_bytes: int, position: int, data: memoryview) -> None:
        """Make a file of `size_bytes` with bytes at a position, zeros elsewhere. FileExistsError if the name is taken.

        The bytes are on the disk for good before the name is there. Only on file systems that know no nameless files
        a crash in between leaves it empty, or without some of the bytes.
        """

        def fill(descriptor: int) -> None:
            _write_all(descriptor, position, data)
            hand_over(descriptor, os.path.dirname(path) or ".")
            self._sync_new(descriptor)

        _create(path, size_bytes, fill)

    def open(self, path: str) -> int:
        """Open a file that is there for reading and writing; return its descriptor. Changes nothing by itself."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def write(self, descriptor: int, position: int, data: memoryview) -> int:
        """Write bytes at a position; return how many the kernel took, possibly fewer than given."""
        return os.pwrite(descriptor, data, position)

    def write_again(self, path: str, descriptor: int, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Write bytes that the file has, each part at its position, so that they reach the disk after a failed sync.

        ext4 keeps with a page where its bytes go. After a failed write-back it treats that place as recorded, which it
        is not: what is written to the page later is lost with the page cache, though its sync succeeds. A direct write
        drops the page first. It drops neighbours that share a folio with it, too, which may be the only copy: so the
        parts are all bytes that count in the folios that they touch, and were read before the first one is written.
        Each begins at a multiple of REWRITE_BYTES, and ends at one or at the end of the file.
        """
        assert not any(position % REWRITE_BYTES for position, _ in parts), path
        try:
            rest = _write_directly(path, parts)
            if rest:
                _sync_data(descriptor)  # only clean pages can be dropped
            for position, data in rest:
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(descriptor, position, len(data), os.POSIX_FADV_DONTNEED)
                _write_all(descriptor, position, data)
        except BaseException:
            for position, data in parts:
                _write_all(descriptor, position, data)  # what was dropped may have been the only copy
            raise

    def sync(self, descriptor: int) -> None:
        """Return when everything written to the file so far, and its size, survives a power cut."""
        _sync_data(descriptor)

    def begin_sync(self, descriptor: int) -> None:
        """Have the kernel begin to write out what was written to the file; promises nothing, and may do nothing."""
        if _write_out is not None:
            _write_out(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)

    def sync_folder(self, path: str) -> None:
        """Return when all names in the folder, made and removed so far, survive a power cut."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some file systems keep no folder that could be synced
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: str, target: str) -> None:
        """Give a file another name in its folder; what had that name is gone. Others see the one or the other."""
        os.rename(source, target)

    def touch(self, path: str) -> None:
        """Set a file's times to now. FileNotFoundError if it does not exist."""
        os.utime(path)

    def remove(self, path: str) -> None:
        """Take away a file's name. FileNotFoundError if there is none."""
        os.unlink(path)

    def remove_folder(self, path: str) -> None:
        """Take away an empty folder. OSError (ENOTEMPTY) if something is in it."""
        os.rmdir(path)

    def _sync_new(self, descriptor: int) -> None:
        _sync_data(descriptor)


def _write_all(descriptor: int, position: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], position + done)


def _write_directly(path: str, parts: Sequence[tuple[int, memoryview]]) -> list[tuple[int, memoryview]]:
    """Write past the page cache; return what remains: ends that fill no block, all where that cannot be done."""
    if not _DIRECT:
        return list(parts)
    rest = []
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | _DIRECT)
        try:
            for position, data in parts:
                whole = len(data) // REWRITE_BYTES * REWRITE_BYTES
                if whole:
                    with mmap.mmap(-1, whole) as aligned:
                        aligned[:] = data[:whole].tobytes()
                        with memoryview(aligned) as view:
                            _write_all(descriptor, position, view)
                if whole < len(data):
                    rest.append((position + whole, data[whole:]))
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in _NO_DIRECT_WRITES:
            return list(parts)
        raise
    return rest


def _create(path: str, size_bytes: int, fill: Callable[[int], None]) -> None:
    try:
        if not _NAMELESS:
            raise OSError(errno.EOPNOTSUPP, "no nameless files here")
        descriptor = os.open(os.path.dirname(path) or ".", _NAMELESS | os.O_RDWR | os.O_CLOEXEC, _FILE_MODE)
    except OSError as error:
        if error.errno not in _NO_NAMELESS_FILES:
            raise
        _create_named(path, size_bytes, fill)
        return
    try:
        os.ftruncate(descriptor, size_bytes)
        fill(descriptor)
        # Without the folder's descriptor Python calls link(), which would link the link in /proc.
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
    except FileNotFoundError:  # no /proc in this container
        _create_named(path, size_bytes, fill)
    finally:
        os.close(descriptor)


def _create_named(path: str, size_bytes: int, fill: Callable[[int], None]) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
    try:
        os.ftruncate(descriptor, size_bytes)
        fill(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(descriptor)
