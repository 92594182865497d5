"""Identification of this machine, boot and process, and the type of a file system.

Files of a store name the process that wrote them, and outlive it. A process id alone does not identify a process,
because the kernel reuses ids and each container has its own ids. So a process is identified by five values together:
its host, the boot of that host, the namespace of its process id, the process id, and its start time.
"""

import errno
import functools
import os
import socket
from dataclasses import dataclass

from rmq_spark.store.disk.kernel_errors import ABSENT, FORBIDDEN, TOO_MANY_FILES, read_error

_PROC = "/proc"
_UNKNOWN = ABSENT | FORBIDDEN | {errno.ESRCH}
_DEAD_STATES = "ZXx"  # the files of a zombie are closed, so it does not hold a lock
# Indexes among the fields after the command in /proc/<pid>/stat. In proc_pid_stat(5) they have the numbers 3 and 22.
_STATE_FIELD, _START_FIELD = 0, 19


@dataclass(frozen=True, slots=True)
class Process:
    """The identity of a process, which may have ended. An unknown text is "", and an unknown number is 0."""

    host: str
    boot_id: str  # a UUID that the kernel creates at each boot
    pid_space: str  # the namespace of the process id; each container has its own namespace
    pid: int
    start_ticks: int  # clock ticks from the boot to the start of the process


def this_process() -> Process:
    """Return the current process. Call it again after a fork, because the child is another process."""
    pid = os.getpid()
    return Process(host_name(), boot_id(), _pid_space(), pid, start_ticks(pid))


def is_alive(process: Process) -> bool | None:
    """Say whether `process` is alive.

    Returns None if that is unknown: the process runs on another host or in another container, or /proc is missing.
    """
    here = this_process()
    if process.host != here.host or not here.start_ticks:
        return None
    if process.boot_id != here.boot_id:
        return False  # the machine was restarted after the process began
    if process.pid_space != here.pid_space:
        return None
    return process.start_ticks != 0 and start_ticks(process.pid) == process.start_ticks


def start_ticks(pid: int) -> int:
    """Return when the process started, in clock ticks since the boot of the machine.

    Returns 0 if the process is dead or its start is unknown.
    """
    # The command, in parentheses, may contain any character, including parentheses.
    fields = _read(f"{_PROC}/{pid}/stat").rpartition(")")[2].split()
    if len(fields) <= _START_FIELD or fields[_STATE_FIELD] in _DEAD_STATES:
        return 0
    return int(fields[_START_FIELD])


def command_name(pid: int) -> str:
    """Return the first 15 bytes of the name of the process's program, or "" if the process is dead."""
    return _read(f"{_PROC}/{pid}/comm").rstrip("\n")


def boot_id() -> str:
    """Return a text that identifies the current boot of the machine, or "" if it is unknown.

    This is the kernel's boot id. If a container hides that, it is the line of /proc/stat with the time of the boot.
    """
    return _boot_id(_PROC)


@functools.cache  # no process lives longer than a boot
def _boot_id(proc: str) -> str:
    found = _read(f"{proc}/sys/kernel/random/boot_id").strip()
    if not found:
        started = [line for line in _read(f"{proc}/stat").splitlines() if line.startswith("btime ")]
        found = started[0] if started else ""
    return found


def memory_bytes() -> int | None:
    """Return the size of the machine's memory in bytes, or None if it is unknown."""
    for line in _read(f"{_PROC}/meminfo").splitlines():
        name, _, size = line.partition(":")
        if name == "MemTotal":
            return int(size.split()[0]) * 1024
    return None


def usable_cores() -> int:
    """Return the number of cores that this process may use. Spark's local master runs as many tasks at once."""
    return len(os.sched_getaffinity(0))


def host_name() -> str:
    """Return the machine's host name. It is shown to people, and it distinguishes hosts."""
    return socket.gethostname()


def ipv4_address() -> str:
    """Return the IPv4 address by which others reach this machine, or "127.0.0.1" if it has none. Sends no packet.

    A broker chooses differently: it takes the first address of its network interfaces outside 127.0, 192.168 and 0.
    (RemotingUtil#getLocalAddress in 4.9, NetworkUtil in 5.x).
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing, it only reads the routing table. The address is one that is
            # reserved for examples.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        if error.errno in TOO_MANY_FILES:
            raise read_error("a socket", "opened", error) from error
    try:  # the machine has no route, or no IPv4
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _pid_space() -> str:
    path = f"{_PROC}/self/ns/pid"
    try:
        return os.readlink(path)
    except OSError as error:
        if error.errno in _UNKNOWN:
            return ""
        raise read_error(path, "read", error) from error


def _read(path: str) -> str:
    """Return the content of a file of /proc.

    Returns "" if the file does not exist, if this user may not read it, or if its process has ended.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        if error.errno in _UNKNOWN:
            return ""
        raise read_error(path, "read", error) from error


_MOUNTS = "/proc/self/mountinfo"
# File systems whose files other machines can change without this kernel's knowledge, or whose bytes come from a daemon.
_REMOTE = ("nfs", "cifs", "smb", "fuse", "9p", "ceph", "lustre", "gluster", "afs", "virtiofs", "beegfs")


def file_system(path: str) -> str:
    """Return the type of the file system of `path`, by the kernel's name for it, such as "ext4" or "nfs4".

    Returns "" if the type is unknown: `path` does not exist, or the list of mounts is missing or may not be read.
    """
    try:
        device = os.stat(path).st_dev
    except OSError as error:
        if error.errno in ABSENT:
            return ""
        raise read_error(path, "looked up", error) from error
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in reversed(_read(_MOUNTS).splitlines()):  # the newest mount of a device is the visible one
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == wanted:
            return rest.split()[0]
    return ""


def is_remote(path: str) -> bool:
    """Say whether `path` is on a network or FUSE file system. Files there must be read by pread instead of mapped."""
    return file_system(path).startswith(_REMOTE)
