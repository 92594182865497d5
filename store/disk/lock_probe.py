"""Whether somebody holds a lock on a file, asked without taking one: who asks is in nobody's way."""

import contextlib
import errno
import fcntl
import os
import signal
import struct

from rmq_spark.store.disk.files import open_regular
from rmq_spark.store.disk.kernel_errors import NO_LEASE, NO_LOCKS, read_error, reason
from rmq_spark.store.errors import StorePathError

# struct flock on 64-bit Linux: type, whence, start, length, pid.
_FLOCK = "hhqqi4x"
_F_SETSIG = 10  # fcntl(2) of Linux; the module has no name for it


def is_locked(path: str, at: int = 0, *, exclusively: bool = False) -> bool:
    """Say whether somebody holds a lock on the byte `at` of the file; False where there is no such file.

    That is another process, whatever kind its lock is of, or an object of this one with an open-file-description lock.
    With `exclusively` shared locks do not count. Raises StorePathError where this user may not read the file or the
    file system has no locks, and StoreError where the kernel fails to answer.
    """
    kind = fcntl.F_RDLCK if exclusively else fcntl.F_WRLCK
    try:
        descriptor, _ = open_regular(path)
        try:
            # Asked for the process, not for the open file: answered for locks of both kinds.
            answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, at, 1, 0))
        finally:
            os.close(descriptor)
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
    """Do as `is_locked`, and say False where this user may not ask. For who only reads, and may read all the same.

    A broker holds byte 0 of its lock file as long as it lives (DefaultMessageStore#start, 4.9 and 5.3).
    """
    with contextlib.suppress(StorePathError):
        return is_locked(path)
    return False


def is_open_to_write(path: str) -> bool:
    """Say whether somebody has the file open for writing: a broker has, from before it looks at the store.

    False, too, where there is no such file, and where the kernel grants no lease, by which this is asked: then nobody
    knows. Do not ask on a network file system: NFS and SMB say yes whatever is the case. A broker that opens the file
    in this moment waits for microseconds. Raises StorePathError if the file cannot be opened to be read.
    """
    try:
        descriptor, _ = open_regular(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise read_error(path, "opened", error) from error
    try:
        # As `file_lock.BrokerLock` does it: a signal that nobody minds, instead of SIGIO, of which a process dies.
        fcntl.fcntl(descriptor, _F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return True
        if error.errno not in NO_LEASE:
            raise read_error(path, "asked for a lease", error) from error
        return False
    finally:
        os.close(descriptor)  # and with it the lease
    return False
