"""Progress bar and spinner of a command at work."""

import io
import sys
import threading

import pytest

from rmq_spark.command import output as progress_module
from rmq_spark.command.output import progress, waiting


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Timer:
    """A timer that the test fires."""

    made: "list[_Timer]"

    def __init__(self, seconds: float, function: object) -> None:
        self.seconds, self.go_off, self.daemon, self.is_cancelled = seconds, function, False, False
        self.made.append(self)

    def start(self) -> None:
        pass

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> _Screen:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(_Timer, "made", [], raising=False)
    monkeypatch.setattr(progress_module.threading, "Timer", _Timer)
    return _Screen()


def test_a_bar_shows_how_far_it_is(screen: _Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen)
    with progress("exporting orders", "messages") as note:
        note(1, 10_000)
        _Timer.made[0].go_off()  # type: ignore[operator]
        note(5_000, 10_000)
    assert "exporting orders" in screen.getvalue()
    assert "5,000 of 10,000 messages" in screen.getvalue()
    assert _Timer.made[0].is_cancelled


def test_who_waits_sees_for_what(screen: _Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen)
    with waiting("sending to orders"):
        _Timer.made[0].go_off()  # type: ignore[operator]
    assert _Timer.made[0].is_cancelled
    assert "sending to orders" in screen.getvalue()


def test_what_is_over_soon_shows_nothing(screen: _Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen)
    with progress("checking orders") as note:
        note(1, 2)
    assert _Timer.made[0].seconds == 0.5
    _Timer.made[0].go_off()  # type: ignore[operator]  # at the same moment
    assert screen.getvalue() == ""


def test_where_nobody_looks_nothing_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("checking orders") as note:
        note(1, 2)
    assert stream.getvalue() == ""
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())
