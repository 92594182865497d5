"""Every command on a real terminal, with keys that are pressed while it runs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark.command.all_commands import COMMANDS
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import RunningCluster

Start = Callable[..., Any]

# Words, input typed afterwards, exit status, and the pattern of a line that must appear.
SESSIONS: dict[str, tuple[tuple[str, ...], str, int, str]] = {
    "topics": (("{store}",), "", 0, r"^orders +4 +1170 +429 KiB +2026"),
    "queues": (("{store}", "orders"), "", 0, r"^orders +3 +0 +296 +296 "),
    "count": (("{store}", "orders"), "", 0, r"^orders +4 +1170"),
    "groups": (("{store}",), "", 0, r"^reporting +orders .*270"),
    "lag": (("{store}", "reporting"), "", 0, r"^orders +0 +ok "),
    "members": (("-n", "{cluster}"), "", 0, r"^billing +10\.0\.0\.9@17 .* orders: \*"),
    "brokers": (("-n", "{cluster}"), "", 0, r"^DefaultCluster +broker-b +0 +127\.0\.0\.1:\d+ .* 25%"),
    "route": (("-n", "{cluster}", "orders"), "", 0, r"^DefaultCluster +broker-b +rw +2 +2 +127\.0\.0\.1:\d+"),
    "stats": (("-n", "{cluster}"), "", 0, r"^orders +billing +3\.0 .* 6$"),
    "watch": (("{store}", "--interval", "0.1", "--count", "2"), "", 0, r"^orders +0\.0 +0 B +1,170"),
    "browse": (("{store}",), "q", 0, r"orders"),
    "cat": (("{store}", "orders", "--last", "1"), "", 0, r"^2026-11-21 05:50:33\.455  orders/0@288"),
    "get": (("{store}", "--key", "O-1010"), "", 0, r"^  KEYS = O-1010"),
    "dump": (("{store}/checkpoint",), "", 0, r"^ +0 +physic_msg_timestamp +\d+"),
    "send": (("{store}", "orders"), "typed\n\x04\x04", 0, r"^orders +\d +\d+ +[0-9A-F]{32}"),
    "create": (("{tmp}/new", "orders"), "", 0, r"^orders +4 +yes"),
    "delete": (("-n", "{cluster}", "orders"), "y\n", 0, r"^orders +broker-a, broker-b +127\.0\.0\.1:\d+"),
    "reset": (("{store}", "billing", "earliest"), "", 0, r"^payments +0 +152 +0"),
    "dlq": (("list", "{store}"), "", 0, r"^audit +2 "),
    "export": (("{store}", "{tmp}/m.parquet", "--topic", "orders"), "", 0, r"^1,170 messages of orders written to"),
    "import": (("{store}", "{tmp}/two.parquet"), "", 0, r"^2 messages appended, 0 skipped"),
    "check": (("{store}",), "", 0, r"store: healthy"),
    "repair": (("{damaged}",), "y\n", 0, r"Apply this plan to .*\? \[y/N\] y"),
    "close": (("{store}",), "", 0, r"cleanly shut down\.$"),
    "serve": (("{store}",), "\x03", 0, r"stopped by SIGINT; delivered \d+"),
    "doctor": (("-n", "127.0.0.1:1"), "", 1, r"^missing +name server 127\.0\.0\.1:1"),
    "prepare-sink": (("-n", "127.0.0.1:1", "--ledger-broker", "a"), "", 1, r"^rmq prepare-sink: .* 127\.0\.0\.1:1 "),
    "intents": (("-n", "127.0.0.1:1"), "", 1, r"^rmq intents: .* 127\.0\.0\.1:1 "),
    "completion": (("bash",), "", 0, r"^_rmq_completion\(\)"),
    "demo": ((), "", 0, r"^  rmq topics "),
}


def start_cluster(run_cluster: Callable[..., RunningCluster]) -> str:
    """Start two brokers with messages, a group and its member; return the address of their name server."""
    cluster = run_cluster(release="5.3", brokers=2)
    cluster.create_topic("orders", queues=2)
    for name, broker in cluster.brokers.items():
        cluster.send("orders", *([b"x"] * 5), broker=name, queue_id=0)
        broker.offsets.commit("billing", QueueKey("orders", 0), 2)
        broker.members.add("billing", "10.0.0.9@17", {"orders": "*"})
        broker.settings.statistics = {("TOPIC_PUT_NUMS", "orders"): (1.5, 50)}
    return cluster.address


# What a command shows before its input is typed.
SHOWN = {
    "browse": "1,170",
    "delete": "[y/N]",
    "repair": "[y/N]",
    "send": "Ctrl-D ends it",
    "serve": "delivering",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_on_a_terminal(
    terminal: Start,
    run_cluster: Callable[..., RunningCluster],
    tmp_store: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    words, keys, status, pattern = SESSIONS[name]
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    places: dict[str, object] = {"store": tmp_store("demo").rename(tmp_path / "store"), "tmp": tmp_path}
    if "{cluster}" in words:
        places["cluster"] = start_cluster(run_cluster)
    if name == "repair":
        places["damaged"] = places["store"]
        file = places["store"] / "consumequeue" / "orders" / "0" / "00000000000000000000"
        file.write_bytes(b"\x7f" * 20 + file.read_bytes()[20:])
    if name == "import":
        rmq_spark.export_parquet(places["store"], tmp_path / "two.parquet", topics=["%DLQ%audit"])
        places["store"] = tmp_store("demo")
    started = terminal(name, *(word.format(**places) for word in words), columns=120)
    if name in SHOWN:
        started.wait_for(SHOWN[name])
    started.type(keys)
    assert started.end() == status, started.text
    assert re.search(pattern, started.text, re.MULTILINE), started.text
    assert "Traceback" not in started.text


def test_the_help_fits_a_terminal_of_60_columns(terminal: Start) -> None:
    started = terminal("--help", columns=60)
    assert started.end() == 0
    assert max(map(len, started.text.split("\n"))) <= 60


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


@pytest.mark.slow
def test_serve_colours_no_times_numbers_and_paths(terminal: Start, store: Path) -> None:
    started = terminal("serve", store)
    started.wait_for("delivering")
    started.type("\x03")
    assert started.end() == 0
    assert "rmq: delivering what is due in" in started.text
    assert not re.findall(r"\x1b\[[0-9;]*[1-9][0-9;]*m", started.raw)


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
