"""No control character of a message, a name or a path reaches the terminal, in any output of the command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rmq_spark

Rmq = Callable[..., Any]
# C0 without tab and line feed, DEL; C1, where U+009B begins a terminal's command as ESC [ does; line separators.
CONTROLS = [*map(chr, [*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0)]), "\u2028", "\u2029"]
SENT = "".join(char for char in CONTROLS if char != "\x02")
TAG = "A" + SENT


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "s"
    with rmq_spark.open_store(path) as opened:
        opened.send("orders", SENT, tags=TAG, keys="k" + SENT, properties={"p\x9b\x85": SENT, "plain": "x"})
        opened.send("orders", json.dumps({"a": SENT}, ensure_ascii=False), keys="k")
    return path


def assert_clean(ran: Any) -> None:
    for text in (ran.out, ran.err):
        assert not set(CONTROLS) & set(text), repr(text)


@pytest.mark.parametrize(
    "words",
    [
        ("cat", "orders"),
        ("cat", "orders", "--columns", "tags,keys,body,properties"),
        ("get", "--topic", "orders", "--queue", "0", "--offset", "0"),
        ("get", "--key", "k"),
        ("get", "--id", "\x9b1m"),
        ("cat", "no\x9b1m\x85"),
        ("cat", "orders", "--tags", "\x9b1m\x85"),
        ("cat", "orders", "--sql92", "a = \x9b1m'\x85"),
        ("topics",),
        ("check",),
        ("lag", "g\x9b1m\x85"),
        ("lag", "g", "--to", "\x9b"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_control_characters_are_written_out(rmq: Rmq, store: Path, words: tuple[str, ...], more: tuple[str]) -> None:
    assert_clean(rmq(words[0], store, *words[1:], *more))


def test_json_gives_back_the_same_characters(rmq: Rmq, store: Path) -> None:
    rows = rmq("cat", store, "orders", "--json", "--columns", "tags,body").rows
    assert {row["tags"] for row in rows} == {TAG, None}
    assert SENT in {row["body"] for row in rows}


@pytest.mark.parametrize("words", [("check",), ("topics",), ("cat", "orders"), ("send", "orders"), ("close",)])
def test_a_path_with_control_characters_is_written_out(rmq: Rmq, tmp_path: Path, words: tuple[str, ...]) -> None:
    path = tmp_path / "a\x9b1m\x85\x1b[2J"
    assert_clean(rmq(words[0], path, *words[1:]))  # a store that does not exist
    with rmq_spark.open_store(path) as opened:
        opened.send("orders", "x")
    (path / "config" / "topics.json").write_bytes(b"[")
    assert_clean(rmq(words[0], path, *words[1:]))
