"""A kernel of which one call fails: for tests of what is true while a file or folder cannot be read."""

import builtins
import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from rmq_spark.store.disk import files
from rmq_spark.store.errors import RmqError

_OF_PATHS = ((os, "open"), (os, "stat"), (os, "scandir"), (os, "statvfs"))
_OF_DESCRIPTORS = (
    (os, "fstat"),
    (os, "pread"),
    (os, "preadv"),
    (os, "lseek"),
    (os, "close"),
    (fcntl, "fcntl"),
    (mmap, "mmap"),
)

_FEW_CALLS = 10  # who makes no more of them asks something else than this module knows


class FailingKernel:
    """Calls by which files below `root` are looked for, opened, read, mapped, locked and closed; one of them fails.

    That is number `fail_at`, counted from 0 since `failing` was entered; it raises OSError with the errno `error`. It
    fails the engine's own calls in this process, for one thread. `hit` says which call on which path failed.
    """

    def __init__(self, root: str, fail_at: int, error: int) -> None:
        self._root, self._fail_at, self._error = os.path.realpath(root), fail_at, error
        self.count, self.hit = 0, ""

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Let the call fail within the block."""
        with contextlib.ExitStack() as stack:
            for module, name in _OF_PATHS:
                stack.enter_context(mock.patch.object(module, name, self._of_path(name, getattr(module, name))))
            for module, name in _OF_DESCRIPTORS:
                stack.enter_context(mock.patch.object(module, name, self._of_descriptor(name, getattr(module, name))))
            opening = self._of_path("open", builtins.open)
            stack.enter_context(mock.patch.object(files, "open", opening, create=True))
            yield

    def _of_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **more: Any) -> Any:
            if isinstance(path, str):
                self._meet(name, path)
            return real(path, *rest, **more)

        return call

    def _of_descriptor(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        readlink = os.readlink

        def call(descriptor: Any, *rest: Any, **more: Any) -> Any:
            path = readlink(f"/proc/self/fd/{descriptor}") if isinstance(descriptor, int) and descriptor >= 0 else ""
            if name == "close":
                real(descriptor)  # the kernel frees it whatever it reports
                self._meet(name, path)
                return None
            self._meet(name, path)
            return real(descriptor, *rest, **more)

        return call

    def _meet(self, name: str, path: str) -> None:
        if path != self._root and not path.startswith(self._root + "/"):
            return
        number, self.count = self.count, self.count + 1
        if number == self._fail_at:
            self.hit = f"{name}({path})"
            raise OSError(self._error, os.strerror(self._error), path)


def each_failure(root: str, error: int, act: Callable[[], object]) -> Iterator[tuple[str, object]]:
    """Call `act` once for each of its calls to the kernel, which fails; yield that call, and what came of `act`.

    What comes is what it returned, or the RmqError that it raised; another error is raised. `act` must change nothing.
    """
    number = 0
    while True:
        kernel = FailingKernel(root, number, error)
        outcome: object
        try:
            with kernel.failing():
                outcome = act()
        except RmqError as raised:
            outcome = raised
        if not kernel.hit:
            assert number > _FEW_CALLS, number
            return
        yield kernel.hit, outcome
        number += 1
