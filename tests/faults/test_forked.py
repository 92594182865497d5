"""A forked child's answer, error, death and hang are told apart; a preload without a compiler names what to install."""

import os
import signal
import time
from pathlib import Path

import pytest
from support.forked import Ended, run_forked
from support.preload import NoCompilerError, compile_preload


def fail() -> None:
    raise ValueError("wrong")


def test_run_forked_tells_answers_errors_deaths_and_hangs_apart() -> None:
    assert run_forked(lambda: [1, "x"], 60) == Ended("returned", [1, "x"])
    failed = run_forked(fail, 60)
    assert (failed.how, "ValueError: wrong" in failed.fault) == ("raised", True)
    killed = run_forked(lambda: os.kill(os.getpid(), signal.SIGKILL), 60)
    assert killed == Ended("killed", signal=signal.SIGKILL)
    hung = run_forked(lambda: time.sleep(600), 0.2)
    assert hung.how == "hung"
    assert hung.fault


def test_compile_preload_names_a_missing_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoCompilerError, match="install gcc or clang"):
        compile_preload(tmp_path / "x.c", tmp_path)
