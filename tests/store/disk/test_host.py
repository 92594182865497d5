"""Identity of processes: alive, dead, or unknown; the machine's address."""

import ipaddress
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rmq_spark.store.disk import host


@contextmanager
def sleeper(command: str = sys.executable) -> Iterator[int]:
    """Start a process that lives until the end of the block."""
    arguments = ["-c", "import sys; sys.stdin.read()"] if command == sys.executable else ["1000"]
    with subprocess.Popen([command, *arguments], stdin=subprocess.PIPE) as child:
        try:
            yield child.pid
        finally:
            child.kill()


def named(pid: int) -> host.Process:
    return replace(host.this_process(), pid=pid, start_ticks=host.start_ticks(pid))


def test_is_alive_until_the_process_is_dead() -> None:
    assert host.is_alive(host.this_process())
    with sleeper() as pid:
        process = named(pid)
        assert process.start_ticks > 0
        assert host.is_alive(process)
    assert host.is_alive(process) is False
    assert host.start_ticks(pid) == 0
    assert host.is_alive(named(pid)) is False


# Python 3.12 warns of a fork beside threads that other tests left running; the child here only exits.
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_start_ticks_of_a_zombie_is_0() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert host.start_ticks(pid) == 0
    os.waitpid(pid, 0)


def test_is_alive_is_false_for_a_reused_process_id() -> None:
    process = host.this_process()
    assert host.is_alive(replace(process, start_ticks=process.start_ticks - 1)) is False
    assert host.is_alive(replace(process, start_ticks=0)) is False


def test_is_alive_is_false_for_an_earlier_boot() -> None:
    assert host.is_alive(replace(host.this_process(), boot_id="another")) is False


def test_is_alive_is_unknown_for_another_host_or_container() -> None:
    assert host.is_alive(replace(host.this_process(), host="another", boot_id="another")) is None
    assert host.is_alive(replace(host.this_process(), pid_space="pid:[1]")) is None


def test_is_alive_is_unknown_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    process = host.this_process()
    monkeypatch.setattr(host, "_PROC", str(tmp_path))
    assert host.is_alive(process) is None
    assert host.is_alive(host.this_process()) is None
    assert host.boot_id() == host.command_name(os.getpid()) == ""


def test_command_name_may_contain_any_character(tmp_path: Path) -> None:
    command = shutil.copy(str(shutil.which("sleep")), tmp_path / ") S 1 (")
    with sleeper(str(command)) as pid:
        deadline = time.monotonic() + 60
        while host.command_name(pid).startswith("python") and time.monotonic() < deadline:
            time.sleep(0.01)  # the child has not become the program yet
        assert host.command_name(pid) == ") S 1 ("
        assert host.is_alive(named(pid))
        assert host.start_ticks(pid) >= host.start_ticks(os.getpid())


def test_ipv4_address_is_of_version_4() -> None:
    assert ipaddress.IPv4Address(host.ipv4_address())


def test_ipv4_address_without_a_network_is_of_the_host_name_or_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unconnected:
        def __init__(self, *_: object) -> None:
            pass

        def __enter__(self) -> "Unconnected":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def connect(self, _: object) -> None:
            raise OSError("Network is unreachable")

    def unknown(_: str) -> str:
        raise OSError("Name or service not known")

    monkeypatch.setattr(host.socket, "socket", Unconnected)
    monkeypatch.setattr(host.socket, "gethostbyname", lambda _: "10.1.2.3")
    assert host.ipv4_address() == "10.1.2.3"
    monkeypatch.setattr(host.socket, "gethostbyname", unknown)
    assert host.ipv4_address() == "127.0.0.1"
