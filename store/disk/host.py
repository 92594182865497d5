"""What tells this machine, this boot and this process from others, for files that outlive all three.

A process number alone names nobody: numbers are used again, and every container counts for itself. So a process
goes by its host, the boot, the space that its number counts in, its number and the moment it started.
"""

import errno
import os
import socket
from dataclasses import dataclass

from rmq_spark.store.disk.kernel_errors import ABSENT, FORBIDDEN, TOO_MANY_FILES, read_error

_PROC = "/proc"
_UNTOLD = ABSENT | FORBIDDEN | {errno.ESRCH}
_DEAD_STATES = "ZXx"  # a zombie holds no lock: its files are closed
_STATE_FIELD, _START_FIELD = 0, 19  # of what follows the command in /proc/<pid>/stat (proc_pid_stat(5): 3 and 22)


@dataclass(frozen=True, slots=True)
class Process:
    """One process, now or in the past. Where the system does not say, a text is "" and a number 0."""

    host: str
    boot_id: str  # a uuid that the kernel draws at each start
    pid_space: str  # which numbering of processes: a container has its own
    pid: int
    start_ticks: int  # clock ticks from the boot to the process's start


def this_process() -> Process:
    """Return the process that asks. After a fork the child is another one: do not keep it."""
    pid = os.getpid()
    return Process(host_name(), boot_id(), _pid_space(), pid, start_ticks(pid))


def is_alive(process: Process) -> bool | None:
    """Say whether a process lives; None where it cannot be known from here: another host or container, no /proc."""
    here = this_process()
    if process.host != here.host or not here.start_ticks:
        return None
    if process.boot_id != here.boot_id:
        return False  # the machine was started since
    if process.pid_space != here.pid_space:
        return None
    return process.start_ticks != 0 and start_ticks(process.pid) == process.start_ticks


def start_ticks(pid: int) -> int:
    """Return when the process started, in clock ticks since the boot; 0 if no such process lives or nobody says."""
    # The command, in parentheses, may hold anything, parentheses too.
    fields = _read(f"{_PROC}/{pid}/stat").rpartition(")")[2].split()
    if len(fields) <= _START_FIELD or fields[_STATE_FIELD] in _DEAD_STATES:
        return 0
    return int(fields[_START_FIELD])


def command_name(pid: int) -> str:
    """Return the name of the program that the process runs, at most 15 bytes of it; "" if no such process lives."""
    return _read(f"{_PROC}/{pid}/comm").rstrip("\n")


def boot_id() -> str:
    """Return what names the time from the machine's start to its next, "" if the system does not say.

    Where a container hides the kernel's id, the second in which the machine started.
    """
    found = _read(f"{_PROC}/sys/kernel/random/boot_id").strip()
    if not found:
        started = [line for line in _read(f"{_PROC}/stat").splitlines() if line.startswith("btime ")]
        found = started[0] if started else ""
    return found


def memory_bytes() -> int | None:
    """Return how much memory the machine has, None where the system does not say."""
    for line in _read(f"{_PROC}/meminfo").splitlines():
        name, _, size = line.partition(":")
        if name == "MemTotal":
            return int(size.split()[0]) * 1024
    return None


def host_name() -> str:
    """Return the machine's name, for people and to tell hosts apart."""
    return socket.gethostname()


def ipv4_address() -> str:
    """Return the IPv4 address by which others reach this machine, "127.0.0.1" if it has none. Sends nothing.

    A broker asks its network interfaces instead and takes the first address outside 127.0, 192.168 and 0.
    (RemotingUtil#getLocalAddress in 4.9, NetworkUtil in 5.x).
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket only asks the routing table. The address is one reserved for examples.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        if error.errno in TOO_MANY_FILES:
            raise read_error("a socket", "opened", error) from error
        return _own_address()  # no route leads anywhere, or this machine has no IPv4


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _pid_space() -> str:
    path = f"{_PROC}/self/ns/pid"
    try:
        return os.readlink(path)
    except OSError as error:
        if error.errno in _UNTOLD:
            return ""
        raise read_error(path, "read", error) from error


def _read(path: str) -> str:
    """Return a file of /proc, "" if there is none, it is not for this user, or its process has ended."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        if error.errno in _UNTOLD:
            return ""
        raise read_error(path, "read", error) from error
