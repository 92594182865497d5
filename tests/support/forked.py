"""Run a function in a forked child: its answer, its error, its death or its hang."""

import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_TRACE_CHARS = 3000
_PIPE_BYTES = 1 << 20


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    `how` is "returned" (with `value`), "raised" (with the traceback in `trace`), "killed" (by signal number `signal`,
    before it could answer) or "hung" (killed by the parent when its time was over).
    """

    how: str
    value: Any = None
    trace: str = ""
    signal: int = 0

    @property
    def fault(self) -> str:
        """Describe an end other than "returned"; "" for that one."""
        if self.how == "returned":
            return ""
        return f"the child {self.how}{f' (signal {self.signal})' if self.signal else ''} {self.trace}".strip()


def run_forked(work: Callable[[], Any], seconds: float) -> Ended:
    """Call `work` in a forked child and wait at most `seconds` for it.

    The child leaves by `os._exit`: no exit handler of this process runs in it.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        _answer(work, writing)
    os.close(writing)
    data, is_whole = _read(reading, seconds)
    os.close(reading)
    if not is_whole:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    if not is_whole:
        return Ended("hung", trace=f"after {seconds:.0f} s")
    if not data:
        return Ended("killed", signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)
    ended = pickle.loads(data)
    assert isinstance(ended, Ended)
    return ended


def _answer(work: Callable[[], Any], writing: int) -> None:
    try:
        try:
            data = pickle.dumps(Ended("returned", value=work()))
        except BaseException:
            data = pickle.dumps(Ended("raised", trace=traceback.format_exc()[-_TRACE_CHARS:]))
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(data)
    finally:
        os._exit(0)


def _read(descriptor: int, seconds: float) -> tuple[bytes, bool]:
    """Read until the other end is closed; return the bytes, and False if the time was over first."""
    data, until = b"", time.monotonic() + seconds
    while select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0]:
        got = os.read(descriptor, _PIPE_BYTES)
        if not got:
            return data, True
        data += got
    return data, False
