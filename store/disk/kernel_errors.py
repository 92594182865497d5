"""The kernel's errors as errors of this project, with the path, the operation and the next step.

Only this layer calls the kernel, so here is the one place where its errors for reading and locking are translated;
`changing.py` has the texts for writing. Only ABSENT says that something does not exist. Any other error says nothing
about what is on the disk, and is raised.
"""

import contextlib
import errno
from collections.abc import Iterator

from rmq_spark.store.errors import StoreError, StorePathError

ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
FORBIDDEN = frozenset({errno.EACCES, errno.EPERM})
_OF_THE_PATH = FORBIDDEN | {errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
TOO_MANY_FILES = frozenset({errno.EMFILE, errno.ENFILE})
# What fcntl(2) answers where a file system has no locks, or grants this process no lease.
NO_LOCKS = frozenset({errno.ENOLCK, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
NO_LEASE = NO_LOCKS | FORBIDDEN
_NO_MEMORY = frozenset({errno.ENOMEM, errno.ENOBUFS})


def reason(error: OSError) -> str:
    """Return what the kernel reported, in words."""
    return error.strerror or str(error)


def is_of_path(error: OSError) -> bool:
    """Say whether the path or its rights are wrong: the same call fails until somebody changes one of the two."""
    return error.errno in _OF_THE_PATH


def read_error(path: str, operation: str, error: OSError) -> StoreError:
    """Return the error for a file or folder that cannot be read.

    `operation` is what failed, as a participle: "opened", "listed". The error is a StorePathError where the path or its
    rights are wrong, and a StoreError where the disk fails or the machine lacks descriptors or memory.
    """
    what = f"{path} cannot be {operation}: {reason(error)}"
    if is_of_path(error):
        return StorePathError(
            f"{what}; expected a path that the user who runs Spark may read. Give that user the right to read every "
            "folder and file of the store, and make sure that each is what its name says, no link that leads nowhere."
        )
    if error.errno in TOO_MANY_FILES:
        return StoreError(
            f"{what}; expected a free descriptor. Raise the limit of open files (ulimit -n) and try again."
        )
    if error.errno in _NO_MEMORY:
        return StoreError(f"{what}; expected free memory. Give the process or the machine more of it and try again.")
    return StoreError(
        f"{what}; expected an answer of the file system. Look for the disk's state in the kernel's log (dmesg), and "
        "try again once it is sound."
    )


@contextlib.contextmanager
def reading(path: str, operation: str) -> Iterator[None]:
    """Raise the kernel's errors within the block as `read_error`."""
    try:
        yield
    except OSError as error:
        raise read_error(path, operation, error) from error


def is_unreadable(error: BaseException) -> bool:
    """Say whether an error means that the kernel did not let something be read or changed.

    Then nobody knows what is on the disk. False for what does not exist, and for bytes that were read and are damaged.
    """
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno not in ABSENT
