"""Conversion of the kernel's errors to errors of this project, which name the path, the operation and the next step.

This module has the texts of errors while reading and locking. `write.py` has those of errors while writing. Only the
ABSENT errors mean that a file does not exist. After any other error the content of the disk is unknown, so such an
error is always raised.
"""

import contextlib
import errno
from collections.abc import Iterator

from rmq_spark.store.errors import StoreError, StorePathError

ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
FORBIDDEN = frozenset({errno.EACCES, errno.EPERM})
_OF_THE_PATH = FORBIDDEN | {errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
TOO_MANY_FILES = frozenset({errno.EMFILE, errno.ENFILE})
# Errors of fcntl(2). NO_LOCKS: the file system has no locks. NO_LEASE: the kernel grants this process no lease.
NO_LOCKS = frozenset({errno.ENOLCK, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
NO_LEASE = NO_LOCKS | FORBIDDEN
_NO_MEMORY = frozenset({errno.ENOMEM, errno.ENOBUFS})


def reason(error: OSError) -> str:
    """Return the kernel's text for an error, without the number and the path."""
    return error.strerror or str(error)


def is_of_path(error: OSError) -> bool:
    """Say whether the path or its permissions are wrong. The same call then fails until one of them is changed."""
    return error.errno in _OF_THE_PATH


def read_error(path: str, operation: str, error: OSError) -> StoreError:
    """Return the error of this project for a file or folder that cannot be read.

    `operation` is a participle, such as "opened" or "listed". The result is a StorePathError if the path or its
    permissions are wrong, and another StoreError if the disk fails or file descriptors or memory run out.
    """
    what = f"{path} cannot be {operation}: {reason(error)}"
    if is_of_path(error):
        return StorePathError(
            f"{what}; expected a path that the user who runs Spark may read. Give that user the right to read every "
            "folder and file of the store, and check for files in place of folders and for dangling links."
        )
    if error.errno in TOO_MANY_FILES:
        return StoreError(
            f"{what}; expected a free descriptor. Raise the limit of open files (ulimit -n) and try again."
        )
    if error.errno in _NO_MEMORY:
        return StoreError(f"{what}; expected free memory. Give the process or the machine more memory and try again.")
    return StoreError(
        f"{what}; expected an answer of the file system. Check the state of the disk in the kernel's log (dmesg), and "
        "try again once it works."
    )


@contextlib.contextmanager
def reading(path: str, operation: str) -> Iterator[None]:
    """Convert an OSError in the body of `with` by `read_error`, and raise the result."""
    try:
        yield
    except OSError as error:
        raise read_error(path, operation, error) from error


def is_unreadable(error: BaseException) -> bool:
    """Say whether `error` was caused by the kernel, which failed to read or change a file.

    The content of the disk is unknown then. Returns False if the file does not exist, or if its bytes were read but are
    damaged.
    """
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno not in ABSENT
