"""Which file system a path lies on, and whether a mapping of a file there can be trusted."""

import os

from rmq_spark.store.disk.kernel_errors import ABSENT, FORBIDDEN, read_error

_MOUNTS = "/proc/self/mountinfo"
# File systems whose files other machines change behind the kernel's back, or whose pages a daemon delivers.
_REMOTE = ("nfs", "cifs", "smb", "fuse", "9p", "ceph", "lustre", "gluster", "afs", "virtiofs", "beegfs")


def file_system(path: str) -> str:
    """Return the type of the file system that holds `path`, as the kernel names it.

    "" where there is nothing at `path`, or the system has no list of mounts, or none for this user.
    """
    try:
        device = os.stat(path).st_dev
    except OSError as error:
        if error.errno in ABSENT:
            return ""
        raise read_error(path, "looked up", error) from error
    try:
        with open(_MOUNTS, encoding="utf-8", errors="replace") as mounts:
            lines = mounts.read().splitlines()
    except OSError as error:
        if error.errno in ABSENT | FORBIDDEN:
            return ""
        raise read_error(_MOUNTS, "read", error) from error
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in reversed(lines):  # the newest mount of a device is the one that is seen
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == wanted:
            return rest.split()[0]
    return ""


def is_remote(path: str) -> bool:
    """Say whether `path` lies on a network or FUSE file system: read it by pread, never by mapping."""
    return file_system(path).startswith(_REMOTE)
