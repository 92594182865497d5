"""The system calls that change files and folders, with one method for each.

A disk for tests replaces these methods to record a call, to perform only a part of it, or to let it fail. The methods
raise OSError, and `write.py` converts it to errors of this project. No other module changes files. (`locks.py` locks
them, which changes nothing on disk except, for some locks, the permission to read the file.)
"""

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence

from rmq_spark.store.disk.ownership import hand_over

# Errors of open() if O_TMPFILE is not supported: on NFS, on some FUSE file systems, and by old kernels.
_NO_NAMELESS_FILES = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL}
_FILE_MODE = 0o666  # the kernel removes the bits of the umask, so files get the mode that Java gives them
_NAMELESS = getattr(os, "O_TMPFILE", 0)
# Linux caches files in folios: groups of up to 2**11 pages (MAX_XAS_ORDER) that begin at multiples of their size.
FOLIO_BYTES = mmap.PAGESIZE << 11
REWRITE_BYTES = 4096  # a multiple of the block size of direct writes on any disk
_DIRECT = getattr(os, "O_DIRECT", 0)
_NO_DIRECT_WRITES = {errno.EINVAL, errno.EOPNOTSUPP}  # on tmpfs before Linux 6.6, and on some FUSE file systems
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h: start writing the data to disk, and do not wait until that is done
_write_out = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)  # Linux
_LOST_WRITES = {errno.EIO, errno.ENOSPC, errno.EDQUOT}
_sync_data = getattr(os, "fdatasync", os.fsync)


class SystemCalls:
    """The system calls that change files and folders. Several threads may use one object."""

    def make_folder(self, path: str, *, is_own: bool = False) -> None:
        """Create a folder in an existing folder. Raises FileExistsError if the name is taken.

        The new folder belongs to the owner of the parent folder (`ownership.py`). With `is_own`, it belongs to the user
        of this process.
        """
        os.mkdir(path)
        if is_own:
            return
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                hand_over(descriptor, folder_of(path))
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
        """Create a file of `size_bytes` zeros, as a hole. Raises FileExistsError if the name is taken.

        If the new file will replace another one, `like` is the status of that file, and the new file gets its owner and
        mode. Otherwise owner and mode follow from the folder (`ownership.py`). With `is_own`, the file belongs to the
        user of this process. With `only_writers`, users who may not write the file may not read it either.

        The name is created last, so that others see the file only at its full size, even after a crash. But if the file
        system does not support O_TMPFILE, a crash can leave an empty file.
        """

        def own(descriptor: int) -> None:
            if not is_own:
                hand_over(descriptor, folder_of(path), like, only_writers=only_writers)

        _create(path, size_bytes, own)

    def create_filled(self, path: str, size_bytes: int, position: int, data: memoryview) -> None:
        """Create a file of `size_bytes` that contains `data` at `position`, and zeros elsewhere.

        The data are durable before the name exists. But if the file system does not support O_TMPFILE, a crash can
        leave the file empty, or with only a part of the data. Raises FileExistsError if the name is taken.
        """

        def fill(descriptor: int) -> None:
            _write_all(descriptor, position, data)
            hand_over(descriptor, folder_of(path))
            self._sync_new(descriptor)

        _create(path, size_bytes, fill)

    def open(self, path: str) -> int:
        """Open an existing file for reading and writing. Return its descriptor."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def write(self, descriptor: int, position: int, data: memoryview) -> int:
        """Write data at a position. Return the number of bytes written, which may be fewer than `data` has."""
        return os.pwrite(descriptor, data, position)

    def write_again(self, path: str, descriptor: int, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Write data that the file already contains once more, so that they become durable despite a failed sync.

        `parts` are pairs (position, data). Each part begins at a multiple of REWRITE_BYTES, and ends at such a multiple
        or at the end of the file.

        A plain write does not help on ext4. For each cached page, ext4 stores the block of the disk that belongs to the
        page. After a failed sync it assumes that this block was recorded on disk, but it was not. Later writes to the
        same page are lost when the page leaves the cache, even if their sync succeeds. A direct write removes the page
        from the cache first, and so avoids this. But it also removes the other pages of the same folio, and these may
        be the only copy of their data. So `parts` must contain all needed bytes of every folio that they touch, and the
        caller must read all of them before this call.
        """
        assert not any(position % REWRITE_BYTES for position, _ in parts), path
        try:
            rest = _write_directly(path, parts)
            if rest:
                _sync_data(descriptor)  # the kernel removes a page from the cache only if it was written to disk
            for position, data in rest:
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(descriptor, position, len(data), os.POSIX_FADV_DONTNEED)
                _write_all(descriptor, position, data)
        except BaseException:
            for position, data in parts:
                _write_all(descriptor, position, data)  # a page that was removed may have been the only copy
            raise

    def sync(self, descriptor: int) -> None:
        """Make all data durable that were written to the file so far, and also the size of the file."""
        _sync_data(descriptor)

    def begin_sync(self, descriptor: int) -> None:
        """Start writing the file's data to disk, and do not wait. This guarantees nothing and may have no effect.

        Raises OSError if the kernel could not write some of it, because a later sync may not report that again.
        """
        if _write_out is None:
            return
        failed = _write_out(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)
        if failed and ctypes.get_errno() in _LOST_WRITES:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def sync_folder(self, path: str) -> None:
        """Make all creations, renames and removals of names in the folder durable that were done so far."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some file systems do not support the sync of a folder
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: str, target: str) -> None:
        """Rename a file within its folder. If a file named `target` exists, it is replaced atomically."""
        os.rename(source, target)

    def touch(self, path: str) -> None:
        """Set the file's times of access and modification to now. Raises FileNotFoundError if it does not exist."""
        os.utime(path)

    def remove(self, path: str) -> None:
        """Remove the name of a file. Raises FileNotFoundError if it does not exist."""
        os.unlink(path)

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder. Raises OSError (ENOTEMPTY) if it is not empty."""
        os.rmdir(path)

    def _sync_new(self, descriptor: int) -> None:
        _sync_data(descriptor)


def folder_of(path: str) -> str:
    """Return the folder that contains `path`."""
    return os.path.dirname(path) or "."


def _write_all(descriptor: int, position: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], position + done)


def _write_directly(path: str, parts: Sequence[tuple[int, memoryview]]) -> list[tuple[int, memoryview]]:
    """Write the parts directly to the disk, without the page cache. Return the parts that were not written.

    These are the ends of parts that do not fill a block of REWRITE_BYTES. They are all parts if the file system does
    not support direct writes.
    """
    if not _DIRECT:
        return list(parts)
    rest = []
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | _DIRECT)
        try:
            for position, data in parts:
                size = len(data) // REWRITE_BYTES * REWRITE_BYTES
                if size:
                    with mmap.mmap(-1, size) as aligned:
                        aligned[:] = data[:size].tobytes()
                        with memoryview(aligned) as view:
                            _write_all(descriptor, position, view)
                if size < len(data):
                    rest.append((position + size, data[size:]))
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
        descriptor = os.open(folder_of(path), _NAMELESS | os.O_RDWR | os.O_CLOEXEC, _FILE_MODE)
    except OSError as error:
        if error.errno not in _NO_NAMELESS_FILES:
            raise
        _create_named(path, size_bytes, fill)
        return
    try:
        os.ftruncate(descriptor, size_bytes)
        fill(descriptor)
        # With src_dir_fd Python calls linkat(). Otherwise it calls link(), which would link the symbolic link in /proc.
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
    except FileNotFoundError:  # a container without /proc
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
