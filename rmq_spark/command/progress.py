"""What shows that a command is at work: a bar where the end is known, else a spinner. Only where somebody looks.

It shows after half a second: what is gone before anybody has read it only flickers.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rmq_spark.command.output import bytes_text

_QUIET_S = 0.5


@contextmanager
def progress(what: str, unit: str = "bytes") -> Iterator[Callable[[int, int], None]]:
    """Yield what is to be called with (done, total); until it is called a spinner shows."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    shown = _Shown(what, unit)
    try:
        yield shown.note
    finally:
        shown.stop()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show a spinner while the block is at work: a writer may have to wait for another one's lock."""
    with progress(what):
        yield


class _Shown:
    """A bar, once it is time for it. `note` is called by the thread that works; a timer's thread makes it show."""

    def __init__(self, what: str, unit: str) -> None:
        self._what, self._unit = what, unit
        self._state = threading.Lock()
        self._noted: tuple[int, int] | None = None
        self._bar: Any = None
        self._task: Any = None
        self._is_over = False
        self._timer = threading.Timer(_QUIET_S, self._start)
        self._timer.daemon = True
        self._timer.start()

    def note(self, done: int, total: int) -> None:
        """Say how far it is."""
        with self._state:
            self._noted = done, total
            if self._bar is not None:
                self._update()

    def stop(self) -> None:
        """Take it away."""
        self._timer.cancel()
        with self._state:
            self._is_over = True
            if self._bar is not None:
                self._bar.stop()

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

        with self._state:
            if self._is_over:
                return
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20))
            counts = TextColumn("{task.fields[counts]}"), TimeRemainingColumn()
            self._bar = Progress(*columns, *counts, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._what, total=None, counts="")
            self._update()
            self._bar.start()

    def _update(self) -> None:
        if self._noted is not None:
            done, total = self._noted
            texts = [bytes_text(count) if self._unit == "bytes" else f"{count:,}" for count in (done, total)]
            counts = f"{' of '.join(texts)}{'' if self._unit == 'bytes' else ' ' + self._unit}"
            self._bar.update(self._task, completed=done, total=total, counts=counts)
