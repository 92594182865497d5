"""`rmq demo`: a store to try the commands on, and commands that work on it."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Rmq = Callable[..., Any]


@pytest.fixture
def made(rmq: Rmq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return rmq("demo")


def test_every_command_that_it_prints_works(rmq: Rmq, made: Any, tmp_path: Path) -> None:
    assert made.status == 0
    lines = [line.strip() for line in made.out.splitlines() if line.startswith("  rmq ")]
    assert len(lines) == 8
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        if words[0] != "serve":
            ran = rmq(*words)
            assert (ran.status, ran.err) == (0, ""), line
            assert len(ran.out.splitlines()) >= 2 or words[0] == "check", line


def test_it_says_where_it_is_and_how_it_goes(made: Any, tmp_path: Path) -> None:
    (folder,) = tmp_path.iterdir()
    assert f"rm -r {folder}" in made.out


def test_json_has_the_topics_and_where_they_are(rmq: Rmq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rows = {row["topic"]: row for row in rmq("demo", "--json").rows}
    assert rows["orders"]["messages"] == 1000
    assert Path(rows["orders"]["path"]).is_dir()
    assert {"%DLQ%billing", "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"} <= rows.keys()
