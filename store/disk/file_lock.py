"""A lock on a file that excludes other processes, other threads and Java alike.

It is an open-file-description lock on one byte, exclusive. It conflicts with the process-wide locks that Java's
FileChannel#tryLock takes, and unlike those it does not vanish when some other descriptor of the file is closed. It
goes with its descriptor: when the process dies, however, the lock is free.

A broker opens its lock file before it looks at the store, and locks it only after, seconds later (DefaultMessageStore
and its #load, #start). So against brokers a lock is not enough: `BrokerLock` takes a lease too.
"""

import errno
import fcntl
import io
import math
import os
import signal
import struct
import time
import weakref
from collections.abc import Callable

from rmq_spark.store.disk.files import check_regular, refuse_irregular
from rmq_spark.store.disk.kernel_errors import (
    ABSENT,
    FORBIDDEN,
    NO_LEASE,
    NO_LOCKS,
    is_of_path,
    read_error,
    reading,
    reason,
)
from rmq_spark.store.disk.ownership import close_to_readers
from rmq_spark.store.errors import StoreChangedError, StorePathError

# struct flock on 64-bit Linux: type, whence, start, length, pid (0 for locks of this kind).
_FLOCK = "hhqqi4x"
_TAKEN = {errno.EAGAIN, errno.EACCES}
_F_SETSIG = 10  # fcntl(2) of Linux; the module has no name for it
_BREAK_TIME = "/proc/sys/fs/lease-break-time"  # s that the kernel gives the owner of a lease; 0 is for ever
_USUAL_BREAK_S = 45.0
_TRIES = 3  # a file that is replaced under every try is no file to lock


class _LockedFile(io.FileIO):
    """A file that is closed when it is collected, whether before its lock or after, and warns of nothing.

    C code alone closes it: no interrupt can come before the descriptor is closed.
    """

    __del__ = io.FileIO.close


class FileLock:
    """The lock on a byte, `at`, of the file at `path`, which must be there when it is tried.

    For one thread; two objects exclude each other even in one process. A forked child never holds it: there the
    descriptor is closed at once, and the parent's lock stays. It must not be held across a fork all the same, for what
    the child does between fork and that moment nobody guards.

    With `only_writers` the file is closed to users who may read it and not write it: whoever may read a file can hold
    a shared lock on it for ever. `Disk.create_lock` makes such files; those of earlier releases are closed when their
    owner, or root, takes the lock.
    """

    _kind = fcntl.F_WRLCK
    _access = os.O_RDWR
    _right = "write"

    def __init__(self, path: str, at: int = 0, *, only_writers: bool = False) -> None:
        self.path, self._at, self._only_writers = path, at, only_writers
        # A KeyboardInterrupt may come after every call. So the file is an object that closes itself when nothing
        # refers to it, it is kept here before it is locked, and it is closed before it is forgotten.
        self._file: io.FileIO | None = None
        self._identity: tuple[int, int] | None = None  # device and inode of the file that was locked
        self._is_locked = False
        _all.add(self)

    @property
    def is_held(self) -> bool:
        """Say whether this object holds the lock, in this process."""
        return self._is_locked and self._file is not None and not self._file.closed

    @property
    def is_waited_for(self) -> bool:
        """Say whether a broker that starts waits for the release. None does: it only finds this lock taken."""
        return False

    def safe_s(self) -> float:
        """Return for how many seconds no broker looks at the store as far as this lock knows: no end is in sight."""
        return math.inf

    def try_take(self) -> bool:
        """Take the lock if nobody has it; say whether it was taken. Does not wait.

        Call it inside the `try` whose `finally` calls `release`: an interrupt may come when the lock is taken and
        before this returns. Raises StoreChangedError if there is no such file, StorePathError if it cannot be opened
        for writing or its file system has no locks, StoreError if too many files are open.
        """
        assert not self.is_held, f"{self.path} is locked already"
        for _ in range(_TRIES):
            try:
                self._file = self._open()
                descriptor = self._file.fileno()
                if not self._try_lock(descriptor):
                    return False
                if self._is_at_path(descriptor):
                    self._is_locked = True
                    return True
                # Somebody put another file there between the two calls: a lock on the old one excludes nobody.
            finally:
                if not self._is_locked:
                    self.release()
        return False

    def is_in_place(self) -> bool:
        """Say whether the lock is held on the file that is at the path now: without it others may have a lock, too.

        One system call.
        """
        if not self.is_held:
            return False
        try:
            found = os.stat(self.path)
        except OSError as error:
            if error.errno in ABSENT:
                return False
            raise read_error(self.path, "looked up", error) from error
        return (found.st_dev, found.st_ino) == self._identity

    def release(self) -> None:
        """Let the lock go; nothing happens if it is not held.

        An interrupt may come before this begins: then the lock is still held, and a second call releases it.
        """
        was_locked, self._is_locked = self._is_locked, False
        file = self._file
        if file is None:
            return
        try:
            if was_locked and not file.closed:
                # Unlocked before it is closed: a child between fork and exec may still have the descriptor.
                fcntl.fcntl(file.fileno(), fcntl.F_OFD_SETLK, self._range(fcntl.F_UNLCK))
        except OSError:
            pass  # closing the file releases the lock too
        finally:
            try:  # noqa: SIM105 - a call to suppress() is one more place for an interrupt
                file.close()
            except OSError:
                pass  # the kernel closed the file all the same, and released the lock with it
            self._file = None

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.release()

    def _open(self) -> io.FileIO:
        try:
            if self._access == os.O_RDONLY:
                refuse_irregular(os.stat(self.path))  # an open to read a FIFO waits for its writer
            # Opened by C code alone: no interrupt can come between the system call and the object that closes it.
            return _LockedFile(self.path, "rb" if self._access == os.O_RDONLY else "r+b", opener=os.open)
        except FileNotFoundError as error:
            raise StoreChangedError(
                f"{self.path} is gone: the store was moved or removed. Open the store again."
            ) from error
        except OSError as error:
            if not is_of_path(error):
                raise read_error(self.path, "locked", error) from error
            raise StorePathError(
                f"{self.path} cannot be locked: {reason(error)}. Who appends to a store needs to {self._right} this "
                "file. Give the user who runs Spark that right, or run as the user who owns the store."
            ) from error

    def _try_lock(self, descriptor: int) -> bool:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, self._range(self._kind))
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            if error.errno not in NO_LOCKS:
                raise read_error(self.path, "locked", error) from error
            raise StorePathError(
                f"{self.path} cannot be locked: {reason(error)}. Its file system has no working locks, and without "
                "them two writers would destroy the store. Keep it on a local disk."
            ) from error
        return True

    def _range(self, kind: int) -> bytes:
        return struct.pack(_FLOCK, kind, os.SEEK_SET, self._at, 1, 0)

    def _is_at_path(self, descriptor: int) -> bool:
        try:
            locked = check_regular(descriptor)
            if self._only_writers:
                close_to_readers(descriptor, locked)
            self._identity = locked.st_dev, locked.st_ino
            return os.path.samestat(locked, os.stat(self.path))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise read_error(self.path, "locked", error) from error

    def _forget(self) -> None:
        """Close a descriptor that came over a fork. Not unlocked: the lock is one with the parent's."""
        if self._file is not None:
            self._file.close()
        self._file, self._is_locked = None, False


class BrokerLock(FileLock):
    """The lock on byte 0 of the file that brokers lock, against them alone: others of ours may have it as well.

    While it is held a broker that starts waits before it looks at the store, for 45 s at most. It is not to be had
    while a broker has the file open, be it before the broker's own lock. Readers of the file are not held up.

    That is done by a lease (fcntl(2)), which the kernel takes away from who does not release it within that time
    (/proc/sys/fs/lease-break-time) from when the broker opened the file. So a holder has to ask how long it is `safe_s`
    to write. The kernel grants no lease to a process that neither owns the file nor is privileged, and none on some
    file systems: there a broker that starts is excluded only from when it takes its lock.

    `monotonic_s` is a clock that is never set, `break_s` the time that the kernel gives.
    """

    _kind = fcntl.F_RDLCK  # enough against an exclusive lock; and a lease is for who does not write to the file himself
    _access = os.O_RDONLY
    _right = "read"

    def __init__(
        self,
        path: str,
        at: int = 0,
        *,
        monotonic_s: Callable[[], float] | None = None,
        break_s: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(path, at)
        self._monotonic_s, self._break_s = monotonic_s or time.monotonic, break_s or lease_break_s
        self._has_lease = False
        self._whole_s = 0.0  # when the lease was last seen whole

    @property
    def is_waited_for(self) -> bool:
        """Say whether a broker that starts waits for the release, or has ceased to wait and looks at the store."""
        if not self.is_held or not self._has_lease:
            return False
        assert self._file is not None
        now_s = self._monotonic_s()
        with reading(self.path, "asked for its lease"):
            lease = fcntl.fcntl(self._file.fileno(), fcntl.F_GETLEASE)
        if lease != fcntl.F_RDLCK:
            return True  # the kernel says the same of a lease that is being broken and of one that is gone
        self._whole_s = now_s
        return False

    def safe_s(self) -> float:
        """Return for how many seconds no broker looks at the store, whatever comes; 0 or less: one may look already.

        Infinite while no broker has opened the file, and where there is no lease: nothing is known there. When the
        file was opened nobody says: it counts from when the lease was last seen whole, so ask often. Cheap.
        """
        if not self.is_waited_for:
            return math.inf
        break_s = self._break_s()
        return self._whole_s + break_s - self._monotonic_s() if break_s else math.inf

    def _try_lock(self, descriptor: int) -> bool:
        self._has_lease, self._whole_s = False, self._monotonic_s()
        try:
            # When a broker opens the file the kernel sends a signal: one that nobody minds, instead of SIGIO, of which
            # a process dies. Who holds the lock asks instead of being told.
            fcntl.fcntl(descriptor, _F_SETSIG, signal.SIGURG)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            self._has_lease = True
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return False  # somebody has it open for writing
            if error.errno not in NO_LEASE:
                raise read_error(self.path, "leased", error) from error
        return super()._try_lock(descriptor)  # the lease goes with the descriptor


def lease_break_s() -> float:
    """Return how long the kernel lets others wait for the owner of a lease, in seconds; 0 is for ever."""
    try:
        with open(_BREAK_TIME, encoding="ascii") as file:
            return float(file.read())
    except ValueError:
        return _USUAL_BREAK_S
    except OSError as error:
        if error.errno in ABSENT | FORBIDDEN:
            return _USUAL_BREAK_S
        raise read_error(_BREAK_TIME, "read", error) from error


_all: "weakref.WeakSet[FileLock]" = weakref.WeakSet()


def _forget_all() -> None:
    for lock in _all:
        lock._forget()


os.register_at_fork(after_in_child=_forget_all)
