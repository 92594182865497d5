"""A range of a file as one array of bytes, mapped or copied, with protection against SIGBUS.

If a file shrinks while it is mapped, access to a page beyond its new end causes the signal SIGBUS, which by default
kills the process. The signal handler of this module replaces every watched mapping whose file has shrunk by pages of
zeros. Then the interrupted instruction continues, with zeros as data. `TruncationWatch.shrank` says whether that
happened. If no watched mapping explains the signal, the handler that was installed before gets it.

Other modules access a mapping only through `MappedWindow.data`. They compute a result from the data and then call
`MappedWindow.check`, before they return the result. If the file shrank meanwhile, `check` raises an error.

Python code can run in this signal handler, because the signal is synchronous: it comes from a load instruction in
numpy, Arrow or the interpreter, and at that point they hold no lock except the interpreter's own. ctypes acquires that
one as for any callback. A process installs the handler once, with its first watch; a forked child inherits it.
"""

import ctypes
import errno
import mmap
import os
import signal
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.disk.kernel_errors import read_error
from rmq_spark.store.errors import StoreChangedError

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.signal.restype = ctypes.c_void_p
_libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
_libc.sigaction.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_before = ctypes.create_string_buffer(1024)  # the earlier handler's struct sigaction, which is smaller on any system
_watched: dict[int, "TruncationWatch"] = {}  # address of a mapping -> its watch


class TruncationWatch:
    """A watch on one mapping of a file, which notices if the file shrinks.

    The mapping has `size` bytes at `address`. The file must have at least `end` bytes, or else it is too short for the
    mapping.
    """

    def __init__(self, address: int, size: int, descriptor: int, end: int) -> None:
        self._address, self._size, self._descriptor, self._end = address, size, descriptor, end
        self._zeroed = False
        _install()
        _watched[address] = self

    def shrank(self) -> bool:
        """Say whether the file is too short for the mapping, or was too short when the handler ran.

        If so, data that were read from the mapping may be zeros instead of the file's bytes. Raises OSError if the
        length of the file is unknown. Do not trust the data then either.
        """
        return self._zeroed or os.fstat(self._descriptor).st_size < self._end

    def release(self) -> None:
        """Stop watching. Call it before the mapping or the descriptor is closed."""
        if _watched.get(self._address) is self:
            del _watched[self._address]

    def zero(self) -> bool:
        """Replace the mapping by pages of zeros if its file is too short. Say whether this call replaced it."""
        if self._zeroed:
            return False
        try:
            is_short = os.fstat(self._descriptor).st_size < self._end
        except OSError:
            is_short = True  # the handler must not raise, so treat the file as too short: `shrank` then returns True
        if not is_short:
            return False
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _libc.mmap(self._address, self._size, mmap.PROT_READ, flags, -1, 0)
        self._zeroed = True
        return True


def _on_bus_error(number: int) -> None:
    global _installed
    if not any([watch.zero() for watch in list(_watched.values())]):
        # The mapping is not one of ours, or its file has grown again. Restore the earlier handler (for example that of
        # faulthandler). Then the instruction runs again, and if it fails again, the earlier handler gets the signal.
        # The next watch installs our handler again.
        _libc.sigaction(number, _before, None)
        _installed = False


# Kept as a global reference: if this callback were garbage-collected, the kernel would still call its address.
_handler = _HANDLER(_on_bus_error)
_installed = False


def _install() -> None:
    global _installed
    if not _installed:
        _libc.sigaction(signal.SIGBUS, None, _before)
        _libc.signal(signal.SIGBUS, ctypes.cast(_handler, ctypes.c_void_p))
        _installed = True


# The largest window. It bounds the address space of a reader, because spark.executor.pyspark.memory limits that.
WINDOW_BYTES = 64 << 20
_MADV_POPULATE_READ = 22  # Python's mmap does not define it
_EHWPOISON = 133  # of Linux; the errno module does not define it
_BAD_PAGES = {errno.EFAULT, _EHWPOISON}  # errors of madvise(2) for pages that the disk or the memory cannot deliver
_DISK_FAILS = OSError(errno.EIO, os.strerror(errno.EIO))


class MappedWindow:
    """The bytes [begin, end) of a file as the array `data` (uint8).

    With `mapped`, the bytes are mapped from the file, else they are read into memory.
    """

    def __init__(self, file: OpenFile, begin: int, end: int, *, mapped: bool) -> None:
        assert 0 <= begin < end, (begin, end)
        self.begin, self.end = begin, end
        self._file = file
        self._watch: TruncationWatch | None = None
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
        except ValueError:  # the file shrank after the check of its size
            raise self._shrunk() from None
        except OSError as error:
            raise read_error(file.path, "mapped", error) from error
        whole = np.frombuffer(self._mapping, np.uint8)
        self._watch = TruncationWatch(whole.ctypes.data, len(whole), file.descriptor, end)
        self.data = whole[begin - aligned :]

    def __enter__(self) -> "MappedWindow":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def prepare(self, begin: int, end: int) -> None:
        """Let the kernel load the pages of the range [begin, end) of the file in one call.

        Call this if most of these pages will be read, because a page fault for each single page costs more time than
        decoding the page. Does nothing if the window is not mapped, or on Linux before 5.14. Raises StoreError if the
        disk cannot deliver a page.
        """
        if self._mapping is not None:
            start = (begin - self._aligned) // mmap.PAGESIZE * mmap.PAGESIZE
            try:
                self._mapping.madvise(_MADV_POPULATE_READ, start, end - self._aligned - start)
            except OSError as error:
                # Access to a page that the disk cannot deliver would kill the process. Pages beyond the end of a file
                # that shrank become zeros instead, and `check` raises the error.
                if error.errno in _BAD_PAGES and self._file.size() >= self.end:
                    raise read_error(self._file.path, "read", _DISK_FAILS) from error

    def check(self) -> None:
        """Raise StoreChangedError if the file has shrunk since the window was opened, or if the window is closed."""
        if self._is_closed:
            raise StoreChangedError(
                f"{self._file.path} was closed during a read. Finish or drop a read before you refresh or close its "
                "reader."
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
        """Release the bytes. Do not keep arrays that refer to them.

        Such an array would keep the mapping alive, but nothing would watch the mapping for a file that shrinks.
        """
        if self._watch is not None:
            self._watch.release()
            self._watch = None
        self._mapping, self._is_closed = None, True
        self.data = np.empty(0, np.uint8)

    def __del__(self) -> None:
        if getattr(self, "_watch", None) is not None:  # not closed, and another mapping may soon have this address
            self.close()

    def _shrunk(self) -> StoreChangedError:
        return StoreChangedError(
            f"{self._file.path} has {self._file.size()} bytes; expected {self.end}, because segments never change "
            "size. Another program truncated or overwrote it. Restore it, then plan the read again."
        )
