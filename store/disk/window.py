"""A stretch of a file as one array of bytes: mapped where that is safe and cheap, copied elsewhere.

Nobody outside touches a mapping but through `Window.data`, and whoever used it calls `check` before what was
computed from it leaves the function: a file that shrank meanwhile gives zeros and an error, not a signal.
"""

import errno
import mmap
import os
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.disk.guard import Watch
from rmq_spark.store.disk.kernel_errors import read_error
from rmq_spark.store.errors import StoreChangedError

# Bounds the address space that one reader needs: spark.executor.pyspark.memory limits exactly that.
WINDOW_BYTES = 64 << 20
_MADV_POPULATE_READ = 22  # not in Python's mmap yet
_EHWPOISON = 133  # of Linux; the module errno has no name for it
_BAD_PAGES = {errno.EFAULT, _EHWPOISON}  # how madvise(2) calls pages that the disk, or the memory, does not give
_DISK_FAILS = OSError(errno.EIO, os.strerror(errno.EIO))


class Window:
    """The bytes [begin, end) of a file as `data` (uint8). Mapped, or read into memory of its own."""

    def __init__(self, file: OpenFile, begin: int, end: int, *, mapped: bool) -> None:
        assert 0 <= begin < end, (begin, end)
        self.begin, self.end = begin, end
        self._file = file
        self._watch: Watch | None = None
        self._mapping: mmap.mmap | None = None
        self._is_closed = False
        if file.size() < end:
            raise self._shrunk()
        if not mapped:
            self.data: NDArray[np.uint8] = np.empty(end - begin, np.uint8)
            file.read_into(begin, self.data.data)
            return
        aligned = begin - begin % mmap.ALLOCATIONGRANULARITY
        self._aligned = aligned
        try:
            self._mapping = mmap.mmap(file.descriptor, end - aligned, prot=mmap.PROT_READ, offset=aligned)
        except ValueError:  # it shrank since it was asked for its size
            raise self._shrunk() from None
        except OSError as error:
            raise read_error(file.path, "mapped", error) from error
        whole = np.frombuffer(self._mapping, np.uint8)
        self._watch = Watch(whole.ctypes.data, len(whole), file.descriptor, end)
        self.data = whole[begin - aligned :]

    def __enter__(self) -> "Window":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def prepare(self, begin: int, end: int) -> None:
        """Have the kernel map the pages of [begin, end) in one go: for who will read most of them.

        Fault by fault the same costs more than decoding what is on the pages. Where the kernel cannot
        (before Linux 5.14) nothing happens. Raises StoreError for pages that the disk does not give.
        """
        if self._mapping is not None:
            start = (begin - self._aligned) // mmap.PAGESIZE * mmap.PAGESIZE
            try:
                self._mapping.madvise(_MADV_POPULATE_READ, start, end - self._aligned - start)
            except OSError as error:
                # To touch such a page would end the process. Of a file that shrank it is a page of zeros, see `check`.
                if error.errno in _BAD_PAGES and self._file.size() >= self.end:
                    raise read_error(self._file.path, "read", _DISK_FAILS) from error

    def check(self) -> None:
        """Raise StoreChangedError if the file shrank since the window was opened, or the window is closed."""
        if self._is_closed:
            raise StoreChangedError(
                f"{self._file.path} was closed while a read of it went on: finish or drop a read before you refresh or "
                "close its reader."
            )
        if self._watch is None:
            return
        try:
            has_shrunk = self._watch.shrank()
        except OSError as error:
            raise read_error(self._file.path, "asked for its length", error) from error
        if has_shrunk:
            raise self._shrunk()

    def close(self) -> None:
        """Let the bytes go. Arrays that still look at a mapping keep it alive, unwatched: keep none."""
        if self._watch is not None:
            self._watch.release()
            self._watch = None
        self._mapping, self._is_closed = None, True
        self.data = np.empty(0, np.uint8)

    def __del__(self) -> None:
        if getattr(self, "_watch", None) is not None:  # dropped without close: the address is about to be another's
            self.close()

    def _shrunk(self) -> StoreChangedError:
        return StoreChangedError(
            f"{self._file.path} has {self._file.size()} bytes, {self.end} were expected: segments never change "
            "size, so it was cut or overwritten by something else. Restore it, then plan the read again."
        )
