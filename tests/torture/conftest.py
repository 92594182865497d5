"""Programs in sessions of their own, and ways to kill what belongs to them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import rmq_spark

HERE = Path(__file__).resolve().parent


class Life:
    """One run of a program with all that it starts: Spark's JVMs and their Python processes. `log` has its output."""

    def __init__(self, command: Sequence[str], log: Path, **environment: str) -> None:
        self.log = log
        package = str(Path(rmq_spark.__file__).resolve().parent.parent)
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": package, "PYSPARK_PYTHON": sys.executable} | environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The number of the program's own process."""
        return self._process.pid

    def says(self, word: str) -> bool:
        """Say whether the program has printed a line of this one word."""
        return word in self.log.read_text(errors="replace").splitlines()

    def wait_for(self, word: str, seconds: float) -> bool:
        """Wait for a line; False if the program ends without it or the time is over."""
        until = time.monotonic() + seconds
        while not self.says(word):
            if self._process.poll() is not None or time.monotonic() > until:
                return self.says(word)
            time.sleep(0.01)
        return True

    def wait(self, seconds: float) -> int | None:
        """Return the program's exit code, None if it still runs when the time is over."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def members(self, program: str = "", argument: str = "") -> list[int]:
        """Return the processes of the session that run a program of this name with this argument, or any."""
        found = [pid for pid, session, name in living() if session == self.pid and program in name]
        return [pid for pid in found if argument in command_line(pid)]

    def kill(self, pids: Sequence[int]) -> None:
        """Kill processes that may be gone already, without a chance for them to do anything."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill all that is left; return when nothing is."""
        while pids := self.members():
            self.kill(pids)
            time.sleep(0.01)
        self._process.wait()


def living() -> list[tuple[int, int, str]]:
    """Return number, session and program of every process that is not dead."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                head, _, rest = (entry / "stat").read_text(errors="replace").rpartition(")")
                state, _, _, session, *_ = rest.split()
                if state != "Z":
                    found.append((int(entry.name), int(session), head.partition("(")[2]))
    return found


def command_line(pid: int) -> str:
    """Return the program of a process with its arguments, "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def script_command(script: str) -> list[str]:
    """Return the command that runs a script of this folder."""
    return [sys.executable, str(HERE / script)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Life]]:
    """A function that starts a script of this folder, or another command, and ends it after the test."""
    lives: list[Life] = []

    def begin(script: str, *arguments: str, command: Sequence[str] | None = None, **environment: str) -> Life:
        run = [*(command or script_command(script)), *arguments]
        lives.append(Life(run, tmp_path / f"{len(lives):03d}-{Path(script).stem}.log", **environment))
        return lives[-1]

    yield begin
    for life in reversed(lives):
        life.end()
