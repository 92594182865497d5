"""Which file system a path lies on, and whether a mapping of a file there can be trusted."""

import os

# File systems whose files other machines change behind the kernel's back, or whose pages a daemon delivers.
_REMOTE = ("nfs", "cifs", "smb", "fuse", "9p", "ceph", "lustre", "gluster", "afs", "virtiofs", "beegfs")


def file_system(path: str) -> str:
    """Return the type of the file system that holds `path`, as the kernel names it, or "" if it does not say."""
    try:
        device = os.stat(path).st_dev
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            lines = mounts.read().splitlines()
    except OSError:
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in reversed(lines):  # the newest mount of a device is the one that is seen
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == wanted:
            return rest.split()[0]
    return ""


def is_remote(path: str) -> bool:
    """Say whether `path` lies on a network or FUSE file system: read it by pread, never by mapping."""
    return file_system(path).startswith(_REMOTE)
