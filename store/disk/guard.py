"""Survive a mapped file that shrinks: zeros in place of a signal, and a mark that says so.

Touching a page of a mapping beyond its file's end raises SIGBUS, which ends the process. The handler here puts
zero pages over every watched mapping whose file has become shorter and lets the instruction go on; whoever
reads the mapping asks `shrank` before it believes what it read. A SIGBUS that none of our mappings explains
gets the action that it had before.

The signal is synchronous: it comes out of a load instruction in numpy, Arrow or the interpreter, which hold no
lock of theirs at that point besides the interpreter's own, and that one ctypes takes as in any callback. So
Python may run in the handler. One handler a process, installed at the first watch, inherited over fork.
"""

import ctypes
import mmap
import os
import signal

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
_before = ctypes.create_string_buffer(1024)  # struct sigaction as it was before our handler; longer than any system's

_watched: dict[int, "Watch"] = {}  # address -> the mapping there


class Watch:
    """One mapping under guard: `size` bytes at `address`, which need the file to reach `end` (bytes)."""

    def __init__(self, address: int, size: int, descriptor: int, end: int) -> None:
        self._address, self._size, self._descriptor, self._end = address, size, descriptor, end
        self._zeroed = False
        _install()
        _watched[address] = self

    def shrank(self) -> bool:
        """Say whether the file is, or once was, too short for the mapping: what was read may be zeros.

        Raises OSError if the kernel does not say how long the file is: what was read is not to be believed then.
        """
        return self._zeroed or os.fstat(self._descriptor).st_size < self._end

    def _is_short(self) -> bool:
        try:
            return os.fstat(self._descriptor).st_size < self._end
        except OSError:
            return True  # in the handler nothing may be raised: zeros, and `shrank` says so

    def release(self) -> None:
        """Stop watching; call before the mapping or the descriptor is closed."""
        if _watched.get(self._address) is self:
            del _watched[self._address]

    def zero(self) -> bool:
        """Put zero pages in the mapping's place if its file is too short; say whether that was done."""
        if self._zeroed or not self._is_short():
            return False
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _libc.mmap(self._address, self._size, mmap.PROT_READ, flags, -1, 0)
        self._zeroed = True
        return True


def _on_bus_error(number: int) -> None:
    global _installed
    if not any([watch.zero() for watch in list(_watched.values())]):
        # Not ours, or the file has grown again: the instruction runs once more, and if it fails once more it meets
        # the action from before, which may be another handler (faulthandler). The next watch installs ours again.
        _libc.sigaction(number, _before, None)
        _installed = False


_handler = _HANDLER(_on_bus_error)  # kept: a collected callback would be called all the same
_installed = False


def _install() -> None:
    global _installed
    if not _installed:
        _libc.sigaction(signal.SIGBUS, None, _before)
        _libc.signal(signal.SIGBUS, ctypes.cast(_handler, ctypes.c_void_p))
        _installed = True
