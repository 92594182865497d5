"""What shows that a command is at work."""

import io
import sys
import threading

import pytest

from rmq_spark.command import progress as progress_module
from rmq_spark.command.progress import progress, waiting


class _Screen(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.is_written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        count = super().write(text)
        if "orders" in self.getvalue():
            self.is_written.set()
        return count


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> _Screen:
    made = _Screen()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(progress_module, "_QUIET_S", 0)
    return made


def test_a_bar_shows_how_far_it_is(screen: _Screen) -> None:
    with progress("exporting orders", "messages") as note:
        assert screen.is_written.wait(5)
        note(5000, 10000)
    assert "exporting orders" in screen.getvalue()
    assert "5,000 of 10,000 messages" in screen.getvalue()


def test_who_waits_sees_for_what(screen: _Screen) -> None:
    with waiting("sending to orders"):
        assert screen.is_written.wait(5)
    shown = screen.getvalue()
    with pytest.raises(KeyError), waiting("again"):
        raise KeyError
    assert "sending to orders" in shown
    assert threading.active_count() == 1 or not any(
        isinstance(thread, threading.Timer) for thread in threading.enumerate()
    )


def test_what_is_over_soon_shows_nothing(screen: _Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_QUIET_S", 3600)
    with progress("checking orders") as note:
        note(1, 2)
    assert screen.getvalue() == ""


def test_where_nobody_looks_nothing_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress_module, "_QUIET_S", 0)
    with progress("checking orders") as note:
        note(1, 2)
    assert stream.getvalue() == ""
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())
