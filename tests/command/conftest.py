"""The command `rmq` as tests call it: in this process, as a process, and on a terminal."""

import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# The test of the wheel runs without the extra `cli`; `make test` has it.
collect_ignore_glob = [] if find_spec("click") else ["test_*.py"]
WITHIN_S = 60
# A process of its own. On a terminal that one is what Ctrl-C is typed at.
MAIN = """
import sys
if sys.argv[1] == "terminal":
    import fcntl, termios
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.argv = ["rmq", *sys.argv[2:]]
from rmq_spark.command import main
main()
"""
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Ran:
    """Result of a call of the command."""

    status: int
    out: str
    err: str = ""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The output of --json."""
        return json.loads(self.out)


class _Keyboard(io.TextIOWrapper):
    """Standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def rmq(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """A function that runs the command in this process, with words, and standard input or a terminal."""
    from rmq_spark.command.all_commands import run

    def call(*words: object, stdin: str | bytes = "", typed: str | None = None) -> Ran:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        streams = [io.TextIOWrapper(io.BytesIO(held), "utf-8", newline="") for held in (data, b"", b"")]
        if typed is not None:
            streams[0] = _Keyboard(io.BytesIO(typed.encode()), "utf-8", newline="")
        with monkeypatch.context() as patch:
            for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
                patch.setattr(sys, name, stream)
            status = run([str(word) for word in words])
        for stream in streams[1:]:
            stream.flush()
        out, err = (stream.buffer.getvalue().decode() for stream in streams[1:])  # type: ignore[attr-defined]
        return Ran(status, out, err)

    return call


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, words: tuple[object, ...], columns: int, lines: int, kind: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", MAIN, "terminal", *map(str, words)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**env, "TERM": kind},
        )
        os.close(theirs)
        self.raw = ""

    @property
    def text(self) -> str:
        """Text on the terminal, without colours; of a line that was overwritten, the last version."""
        return re.sub(r"[^\n]*\r", "", _ANSI.sub("", self.raw).replace("\r\n", "\n"))

    def type(self, keys: str) -> None:
        """Type keys; "\\x03" is Ctrl-C, "\\x04" Ctrl-D."""
        os.write(self._ours, keys.encode())

    def wait_for(self, text: str) -> None:
        """Wait until a text is shown."""
        until = time.monotonic() + WITHIN_S
        while text not in self.text:
            assert time.monotonic() < until, f"{text!r} is not in\n{self.text}"
            assert self._read(), f"{text!r} is not in\n{self.text}"

    def end(self, keys: str = "") -> int:
        """Wait for the end of the process, and type these keys each second meanwhile. Return its exit status.

        Python does not see a Ctrl-C that comes after a question was printed and before the answer is read.
        """
        until = time.monotonic() + WITHIN_S
        while self._read():
            assert time.monotonic() < until, self.text
            if keys and not select.select([self._ours], [], [], 1)[0]:
                self.type(keys)
        return self._process.wait(WITHIN_S)

    def kill(self) -> None:
        """Leave nothing behind."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._ours)

    def _read(self) -> bool:
        if not select.select([self._ours], [], [], 1)[0]:
            return True
        try:
            data = os.read(self._ours, 65_536)
        except OSError:  # the other side is closed
            return False
        self.raw += data.decode(errors="replace")
        return bool(data)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """A function that starts the command on a terminal of a `kind`, `columns` wide."""
    opened: list[Terminal] = []

    def start(*words: object, columns: int = 100, lines: int = 24, kind: str = "xterm-256color") -> Terminal:
        opened.append(Terminal(words, columns, lines, kind))
        return opened[-1]

    yield start
    for one in opened:
        one.kill()


@pytest.fixture
def process() -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """A function that starts the command as a process with pipes."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: object) -> "subprocess.Popen[bytes]":
        pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
        # The parent process may have set Ctrl-C to be ignored.
        code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + MAIN
        command = [sys.executable, "-P", "-c", code, "pipe", *map(str, words)]
        started.append(subprocess.Popen(command, **pipes))
        return started[-1]

    yield start
    for one in started:
        if one.poll() is None:
            one.send_signal(signal.SIGKILL)
        one.communicate()


@pytest.fixture(scope="session")
def demo(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a store that brokers wrote, for tests that only read."""
    return Path(shutil.copytree(golden / "demo", tmp_path_factory.mktemp("demo") / "store"))


@pytest.fixture
def store(tmp_store: Callable[[str], Path]) -> Path:
    """A copy of the same store, to be changed."""
    return tmp_store("demo")


_HOLDER = """
import fcntl, sys
lock = open(sys.argv[1], "r+b")
fcntl.lockf(lock, fcntl.LOCK_EX, 1, 0)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hold() -> Callable[[Path], Any]:
    """A context in which another process holds the store's lock, like a running broker."""

    @contextmanager
    def held(path: Path) -> Iterator[None]:
        holder = subprocess.Popen(
            [sys.executable, "-c", _HOLDER, str(path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == b"held\n"
            yield
        finally:
            holder.communicate()

    return held
