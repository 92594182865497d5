"""Every command on a real terminal, with keys that are pressed while it runs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark.command.all_commands import COMMANDS

Start = Callable[..., Any]

# Words, input typed afterwards, exit status, and the pattern of a line that must appear.
SESSIONS: dict[str, tuple[tuple[str, ...], str, int, str]] = {
    "topics": (("{store}",), "", 0, r"^orders +4 +1170 +429 KiB +2026"),
    "queues": (("{store}", "orders"), "", 0, r"^orders +3 +0 +296 +296 "),
    "count": (("{store}", "orders"), "", 0, r"^orders +4 +1170"),
    "groups": (("{store}",), "", 0, r"^reporting +orders .*270"),
    "lag": (("{store}", "reporting"), "", 0, r"^orders +0 +ok "),
    "cat": (("{store}", "orders", "--last", "1"), "", 0, r"^2026-11-21 05:50:33\.455  orders/0@288"),
    "get": (("{store}", "--key", "O-1010"), "", 0, r"^  KEYS = O-1010"),
    "dump": (("{store}/checkpoint",), "", 0, r"^ +0 +physic_msg_timestamp +\d+"),
    "send": (("{store}", "orders"), "typed\n\x04\x04", 0, r"^orders +\d +\d+ +[0-9A-F]{32}"),
    "create": (("{tmp}/new", "orders"), "", 0, r"^orders +4 +yes"),
    "reset": (("{store}", "billing", "earliest"), "", 0, r"^payments +0 +152 +0"),
    "dlq": (("list", "{store}"), "", 0, r"^audit +2 "),
    "export": (("{store}", "{tmp}/m.parquet", "--topic", "orders"), "", 0, r"^1,170 messages of orders written to"),
    "import": (("{store}", "{tmp}/two.parquet"), "", 0, r"^2 messages appended, 0 skipped"),
    "check": (("{store}",), "", 0, r"store: healthy"),
    "repair": (("{damaged}",), "y\n", 0, r"Apply this plan to .*\? \[y/N\] y"),
    "close": (("{store}",), "", 0, r"cleanly shut down\.$"),
    "serve": (("{store}",), "", 0, r"stopped by SIGINT; delivered \d+"),
    "doctor": (("-n", "127.0.0.1:1"), "", 1, r"^missing +name server 127\.0\.0\.1:1"),
    "demo": ((), "", 0, r"^  rmq topics "),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_on_a_terminal(
    terminal: Start,
    tmp_store: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    words, keys, status, pattern = SESSIONS[name]
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    places = {"store": tmp_store("demo").rename(tmp_path / "store"), "tmp": tmp_path}
    if name == "repair":
        places["damaged"] = places["store"]
        file = places["store"] / "consumequeue" / "orders" / "0" / "00000000000000000000"
        file.write_bytes(b"\x7f" * 20 + file.read_bytes()[20:])
    if name == "import":
        rmq_spark.export_parquet(places["store"], tmp_path / "two.parquet", topics=["%DLQ%audit"])
        places["store"] = tmp_store("demo")
    started = terminal(name, *(word.format(**places) for word in words), columns=120)
    if name == "serve":
        started.wait_for("delivering")
        started.type("\x03")
    if name == "repair":
        started.wait_for("[y/N]")
    if keys:
        if name == "send":
            started.wait_for("Ctrl-D ends it")
        started.type(keys)
    assert started.end() == status, started.text
    assert re.search(pattern, started.text, re.MULTILINE), started.text
    assert "Traceback" not in started.text


def test_the_help_fits_a_terminal_of_24_lines(terminal: Start) -> None:
    started = terminal("--help", columns=80)
    assert started.end() == 0
    assert started.text.count("\n") <= 23
    assert max(map(len, started.text.split("\n"))) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 50])
def test_a_narrow_terminal_shows_whole_numbers_and_cuts_no_line(terminal: Start, demo: Path, columns: int) -> None:
    for words in (("topics", demo), ("queues", demo, "orders"), ("lag", demo), ("groups", demo)):
        started = terminal(*words, columns=columns)
        assert started.end() == 0
        lines = started.text.split("\n")
        assert max(len(line.rstrip()) for line in lines if not line.startswith("Columns that do not fit")) <= columns, (
            started.text
        )
        assert "…" not in started.text
        if words[0] == "queues":
            assert re.search(r"^orders +3 +0 +296 +296", started.text, re.MULTILINE), started.text


def test_ctrl_c_ends_a_cat_that_follows(terminal: Start, demo: Path) -> None:
    started = terminal("cat", demo, "orders", "--follow", "--last", 1)
    started.wait_for("orders/0@288")
    started.type("\x03")
    assert started.end() == 130
    assert "stopped" not in started.text, "it has no other end"
    assert "Traceback" not in started.text


def test_ctrl_c_at_the_question_changes_nothing(terminal: Start, store: Path) -> None:
    file = store / "consumequeue" / "orders" / "0" / "00000000000000000000"
    file.write_bytes(b"\x7f" * 20 + file.read_bytes()[20:])
    started = terminal("repair", store)
    started.wait_for("[y/N]")
    started.type("\x03")
    assert started.end("\x03") == 130
    assert file.read_bytes()[:20] == b"\x7f" * 20
    assert not (store / "rmq").exists()
