"""Locks on files that exclude other processes, other threads and Java programs, and checks for such locks.

A lock is an exclusive open-file-description lock on one byte of a file. It conflicts with the locks that Java takes by
FileChannel#tryLock. Java's locks belong to the process, and are lost when the process closes any descriptor of the
file; ours are not. The kernel releases a lock when its descriptor is closed, so a process that dies holds no lock.

A broker opens its lock file, then reads the store, and locks the file only seconds later (DefaultMessageStore and its
#load, #start). So a lock alone does not keep a broker from reading the store, and `BrokerLock` also takes a lease.

`is_locked`, `seems_locked` and `is_open_to_write` check for locks and open files of others. They take no lock, so they
never block a writer.
"""

import contextlib
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

from rmq_spark.store.disk.files import check_regular, require_regular
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

# struct flock on 64-bit Linux: type, whence, start, length, pid. The pid is 0 for open-file-description locks.
_FLOCK = "hhqqi4x"
_TAKEN = {errno.EAGAIN, errno.EACCES}
_F_SETSIG = 10  # of Linux, see fcntl(2); the fcntl module does not define it
_BREAK_TIME = "/proc/sys/fs/lease-break-time"  # seconds that the kernel gives the owner of a lease; 0 is unlimited
_USUAL_BREAK_S = 45.0
_TRIES = 3  # each further try follows a replacement of the file during the previous one


class _LockedFile(io.FileIO):
    """A file that closes itself without a warning when it is garbage-collected, even before its `FileLock` is.

    Closing runs C code only, so no interrupt can come before the descriptor is closed.
    """

    __del__ = io.FileIO.close


def _open_file(path: str, access: int) -> _LockedFile:
    """Open a regular file, for reading if `access` is os.O_RDONLY, and otherwise also for writing. Raises OSError.

    Opening runs C code only. So no interrupt can come after the file is open but before there is an object that closes
    it. A descriptor as an int would stay open until the process ends.
    """
    if access == os.O_RDONLY:
        require_regular(os.stat(path))  # opening a FIFO for reading waits for its writer
    return _LockedFile(path, "rb" if access == os.O_RDONLY else "r+b", opener=os.open)


class FileLock:
    """A lock on the byte at position `at` of the file at `path`. The file must exist when the lock is taken.

    For one thread at a time. Two `FileLock` objects of the same byte exclude each other, even within one process. After
    a fork, the parent keeps the lock, and the child closes its copy of the descriptor at once, so the child does not
    hold the lock. Still, do not fork while a lock is held, because the child has that copy until it is closed.

    With `only_writers`, taking the lock removes the permission to read the file from users who may not write it,
    because a reader could hold a shared lock on the file forever. New lock files from `Disk.create_lock` do not give
    that permission in the first place. Lock files of earlier releases give it until their owner, or root, takes the
    lock.
    """

    _kind = fcntl.F_WRLCK
    _access = os.O_RDWR
    _right = "write"

    def __init__(self, path: str, at: int = 0, *, only_writers: bool = False) -> None:
        self.path, self._at, self._only_writers = path, at, only_writers
        # A KeyboardInterrupt may come after every call. So the file is an object that closes itself when its last
        # reference is gone. The file is assigned to this attribute before it is locked, and closed before the attribute
        # becomes None again.
        self._file: io.FileIO | None = None
        self._identity: tuple[int, int] | None = None  # device and inode of the file that was locked
        self._is_locked = False
        _all.add(self)

    @property
    def is_held(self) -> bool:
        """Say whether this object holds the lock in this process."""
        return self._is_locked and self._file is not None and not self._file.closed

    @property
    def broker_is_waiting(self) -> bool:
        """Say whether a starting broker waits until this is released. Always False, because brokers wait for leases."""
        return False

    @property
    def lets_brokers_wait(self) -> bool:
        """Say whether a starting broker waits until this is released. Always False, because brokers wait for leases."""
        return False

    def is_other_locked(self, at: int) -> bool:
        """Say whether another object or process has locked the byte at position `at` of the file. For a held lock."""
        assert self._file is not None
        with reading(self.path, "asked for its lock"):
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
            answer = fcntl.fcntl(self._file.fileno(), fcntl.F_OFD_GETLK, asked)
        return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)

    def lease_seconds_left(self) -> float:
        """Return for how many seconds no broker can read the store. Infinite here, because this lock has no lease."""
        return math.inf

    def try_take(self) -> bool:
        """Take the lock if it is free, and say whether it was taken. Does not wait.

        Call this inside the `try` whose `finally` calls `release`, because an interrupt may come when the lock is taken
        but this method has not returned yet. Raises StoreChangedError if the file does not exist, StorePathError if
        this user may not open the file or its file system has no locks, and StoreError if too many files are open.
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
                # Another file was renamed to the path after this one was opened. A lock on the old file has no effect.
            finally:
                if not self._is_locked:
                    self.release()
        return False

    def is_in_place(self) -> bool:
        """Say whether this object holds the lock, and the locked file is still the one at the path.

        If the file was replaced, another process may hold a lock on the new file. Costs one system call.
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
        """Release the lock. Does nothing if the lock is not held.

        If an interrupt comes before this method begins, the lock is still held. Then call this method again.
        """
        was_locked, self._is_locked = self._is_locked, False
        file = self._file
        if file is None:
            return
        try:
            if was_locked and not file.closed:
                # Closing alone would not release the lock while a child between fork and exec has the descriptor too.
                fcntl.fcntl(file.fileno(), fcntl.F_OFD_SETLK, self._range(fcntl.F_UNLCK))
        except OSError:
            pass  # closing the file also releases the lock
        finally:
            try:  # noqa: SIM105 - an interrupt can come within a call to suppress()
                file.close()
            except OSError:
                pass  # the kernel has closed the file, and released the lock with it
            self._file = None

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.release()

    def _open(self) -> io.FileIO:
        try:
            return _open_file(self.path, self._access)
        except FileNotFoundError as error:
            raise StoreChangedError(
                f"{self.path} is gone: the store was moved or removed. Open the store again."
            ) from error
        except OSError as error:
            if not is_of_path(error):
                raise read_error(self.path, "locked", error) from error
            raise StorePathError(
                f"{self.path} cannot be locked: {reason(error)}. A writer needs the right to {self._right} this file. "
                "Give the user who runs Spark that right, or run as the user who owns the store."
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
        """Close the descriptor that a forked child inherited. The lock stays, because it belongs to the parent."""
        if self._file is not None:
            self._file.close()
        self._file, self._is_locked = None, False


class BrokerLock(FileLock):
    """A shared lock on one byte of the brokers' lock file. It excludes brokers, but not other `BrokerLock` objects.

    While the lock is held, a broker that starts must wait before it reads the store, but at most 45 s by default. The
    lock cannot be taken while a broker has the file open, even if the broker has not locked the file yet. Processes
    that open the file only for reading do not wait.

    The waiting works by a lease on the file (fcntl(2)). When a broker opens the file for writing, the kernel makes the
    broker wait, and gives the owner of the lease some time to release the lease (/proc/sys/fs/lease-break-time). After
    that time the kernel removes the lease, and the broker continues. So the holder of this lock must call
    `lease_seconds_left` before it writes. The kernel grants a lease only to the owner of the file and to privileged
    processes, and some file systems have no leases. Without a lease, the lock still stops a broker, but only after the
    broker has read the store.

    `monotonic_s` is a clock in seconds that nobody can set. `break_s` returns the kernel's time for a lease in seconds.
    """

    _kind = fcntl.F_RDLCK  # a shared lock also conflicts with a broker's exclusive one, and fits a read-only descriptor
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
        self._intact_s = 0.0  # when the lease was last known to be intact

    @property
    def broker_is_waiting(self) -> bool:
        """Say whether a starting broker waits until this lock is released, or has stopped waiting and reads the store.

        False if this process holds no lease, because then no broker waits.
        """
        if not self.is_held or not self._has_lease:
            return False
        assert self._file is not None
        now_s = self._monotonic_s()
        with reading(self.path, "asked for its lease"):
            lease = fcntl.fcntl(self._file.fileno(), fcntl.F_GETLEASE)
        if lease != fcntl.F_RDLCK:
            return True  # the kernel does not tell whether the lease was already removed or will be
        self._intact_s = now_s
        return False

    @property
    def lets_brokers_wait(self) -> bool:
        """Say whether a starting broker waits until this lock is released. False without a lease."""
        return self.is_held and self._has_lease

    def lease_seconds_left(self) -> float:
        """Return for how many seconds no broker can read the store. If <= 0, a broker may read it already.

        Returns infinity while no broker has opened the file. Returns infinity also without a lease, because then it is
        unknown whether a broker reads the store. The time at which a broker opened the file is unknown too. So the
        seconds are counted from the last call that found the lease unchanged. Call this often; it is cheap.
        """
        if not self.broker_is_waiting:
            return math.inf
        break_s = self._break_s()
        return self._intact_s + break_s - self._monotonic_s() if break_s else math.inf

    def _try_lock(self, descriptor: int) -> bool:
        self._has_lease, self._intact_s = False, self._monotonic_s()
        try:
            _take_lease(descriptor)
            self._has_lease = True
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return False  # a process, such as a broker, has the file open for writing
            if error.errno not in NO_LEASE:
                raise read_error(self.path, "leased", error) from error
        return super()._try_lock(descriptor)  # closing the descriptor also ends the lease


def _take_lease(descriptor: int) -> None:
    # When another process opens the file, the kernel sends the owner of the lease a signal. By default this is SIGIO,
    # which would kill the process. So SIGURG is chosen, which is ignored by default. The owner polls the lease instead.
    fcntl.fcntl(descriptor, _F_SETSIG, signal.SIGURG)
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)


def lease_break_s() -> float:
    """Return for how many seconds at most the kernel makes others wait for the owner of a lease. 0 means no limit."""
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


for _ in range(2):  # because an interrupt can end the first run
    os.register_at_fork(after_in_child=_forget_all)


def is_locked(path: str, at: int = 0, *, exclusively: bool = False) -> bool:
    """Say whether the byte at position `at` of the file is locked. Returns False if the file does not exist.

    This sees all locks of other processes, and also open-file-description locks (`FileLock`) of this process. With
    `exclusively`, shared locks are ignored. Raises StorePathError if this user may not read the file or its file system
    has no locks, and StoreError if the kernel cannot answer.
    """
    kind = fcntl.F_RDLCK if exclusively else fcntl.F_WRLCK
    try:
        file = _open_file(path, os.O_RDONLY)
        try:
            # F_GETLK rather than F_OFD_GETLK, so that the kernel reports locks of processes and of open files.
            answer = fcntl.fcntl(file.fileno(), fcntl.F_GETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, at, 1, 0))
        finally:
            file.close()
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno in NO_LOCKS:
            raise StorePathError(
                f"{path} cannot be asked for its lock: {reason(error)}; expected a file system with locks. Keep the "
                "store on a local disk."
            ) from error
        raise read_error(path, "asked for its lock", error) from error
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def seems_locked(path: str) -> bool:
    """Say whether byte 0 of the file is locked. Returns False also if this user may not read the file.

    For programs that only read the store. A broker locks byte 0 of its lock file at its start and keeps that lock as
    long as it lives (DefaultMessageStore#start, 4.9 and 5.3).
    """
    with contextlib.suppress(StorePathError):
        return is_locked(path)
    return False


def is_open_to_write(path: str) -> bool:
    """Say whether a process has the file open for writing. A broker opens its lock file so before it reads the store.

    Returns False if the file does not exist, and also if the answer is unknown because the kernel grants no lease. Do
    not use this on a network file system, because the result on NFS and SMB is always True. The check takes a lease for
    some microseconds; a broker that opens the file in that time waits until the check ends. Raises StorePathError if
    this user may not open the file for reading.
    """
    try:
        file = _open_file(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise read_error(path, "opened", error) from error
    try:
        _take_lease(file.fileno())
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return True
        if error.errno not in NO_LEASE:
            raise read_error(path, "asked for a lease", error) from error
        return False
    finally:
        file.close()  # also ends the lease
    return False
