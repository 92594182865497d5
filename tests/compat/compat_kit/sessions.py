"""Processes with all that they start, each in a session of its own."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path


def processes_of(session: int, word: str = "") -> list[int]:
    """Return the living processes of a session whose command line has the word."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, own, *_ = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                line = (entry / "cmdline").read_text(errors="replace").replace("\0", " ")
                if int(own) == session and state != "Z" and word in line:
                    found.append(int(entry.name))
    return found


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes, those that are gone excepted."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_session(process: "subprocess.Popen[bytes] | subprocess.Popen[str]") -> None:
    """Kill all processes of the session that a process leads, and wait until they are gone."""
    while pids := processes_of(process.pid):
        signal_all(pids, signal.SIGKILL)
        time.sleep(0.01)
    process.wait()
