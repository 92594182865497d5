"""Whether somebody holds the store's lock, asked without taking it."""

import fcntl
import os
import struct

# struct flock on 64-bit Linux: type, whence, start, length, pid.
_FLOCK = "hhqqi4x"


def is_locked(path: str) -> bool:
    """Say whether another process holds a lock on byte 0 of the file: a broker does as long as it lives.

    Source: DefaultMessageStore#start (4.9, 5.3), which locks [0, 1) of `lock` exclusively.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False  # no such file: nobody ever started here
    try:
        wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted)
    except OSError:
        return False  # a file system without locks: no broker could hold one there either
    finally:
        os.close(descriptor)
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
