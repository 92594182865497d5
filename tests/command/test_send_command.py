"""`rmq send`: queues of messages, and refused input."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark.store.errors import StoreError

Rmq = Callable[..., Any]


def test_a_message_has_what_was_said_of_it(rmq: Rmq, store: Path) -> None:
    words = ("--tags", "paid", "--key", "a", "--key", "b", "--property", "colour=red=x", "--queue", 2)
    (sent,) = rmq("send", store, "orders", "hello", *words, "--json").rows
    assert sent["queueOffset"] == 293
    (row,) = rmq("get", store, "--id", sent["msgId"], "--json").rows
    assert (row["body"], row["tags"], row["keys"], row["queueId"]) == ("hello", "paid", "a b", 2)
    assert row["properties"]["colour"] == "red=x"
    assert (row["commitLogOffset"], row["queueOffset"]) == (sent["commitLogOffset"], 293)
    assert not (store / "abort").exists(), "a clean shutdown removes the abort file"


def test_standard_input_is_a_body_or_a_message_a_line(rmq: Rmq, store: Path) -> None:
    rmq("send", store, "orders", "--queue", 0, stdin=b"two\nlines \xff")
    ran = rmq("send", store, "orders", "--queue", 0, "--lines", stdin="one\r\ntwo\n\nfour")
    assert ran.out.splitlines()[1].split() == ["orders", "0", "4", "290", "293"]
    with rmq_spark.open_reader(store) as reader:
        bodies = [reader.message(reader.queues("orders")[0], offset).body for offset in range(289, 294)]
    assert bodies == [b"two\nlines \xff", b"one", b"two", b"", b"four"]


@pytest.mark.slow
def test_many_lines_are_sent_each_once_with_their_ids(rmq: Rmq, store: Path) -> None:
    lines = "".join(f"line {number:09}\n" for number in range(80_000))  # more than is read at once
    rows = rmq("send", store, "payments", "--lines", "--json", stdin=lines).rows
    assert len(rows) == len({row["msgId"] for row in rows}) == 80_000
    assert [row["messages"] for row in rmq("topics", store, "--json").rows if row["topic"] == "payments"] == [80_299]


def test_no_line_is_no_message(rmq: Rmq, store: Path) -> None:
    ran = rmq("send", store, "orders", "--lines")
    assert (ran.status, ran.out) == (0, "")
    assert "Nothing was sent" in ran.err
    assert rmq("send", store, "orders", "--lines", "--json").rows == []


def test_a_delayed_message_is_printed_where_it_waits(rmq: Rmq, store: Path) -> None:
    (row,) = rmq("send", store, "orders", "later", "--delay-level", 3, "--json").rows
    assert (row["topic"], row["queueId"]) == ("SCHEDULE_TOPIC_XXXX", 2)
    (row,) = rmq("send", store, "orders", "later", "--deliver-at", "now+1h", "--json").rows
    assert row["topic"] == "rmq_sys_wheel_timer"


def test_a_path_or_topic_with_a_typing_error_is_not_made(rmq: Rmq, store: Path, tmp_path: Path) -> None:
    ran = rmq("send", tmp_path / "stroe", "orders", "x")
    assert ran.status == 1
    assert not (tmp_path / "stroe").exists()
    ran = rmq("send", store, "ordres", "x")
    assert ran.status == 1
    assert "Did you mean orders?" in ran.err
    assert "--create-topic" in ran.err
    assert rmq("send", store, "new", "x", "--create-topic").status == 0
    assert len(rmq("queues", store, "new", "--json").rows) == 4


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--property", "colour"), "NAME=VALUE"),
        (("--lines",), "Give one of them"),
        (("--delay-level", "x"), "delay-level"),
        (("--deliver-at", "tomorrow"), "is not a time"),
    ],
)
def test_wrong_words_send_nothing(rmq: Rmq, store: Path, words: tuple[str, ...], text: str) -> None:
    ran = rmq("send", store, "orders", "x", *words)
    assert ran.status == 2
    assert text in ran.err
    assert not (store / "rmq").exists()


def test_a_store_that_somebody_holds_is_an_error_that_names_him(
    rmq: Rmq, store: Path, hold: Callable[..., Any]
) -> None:
    with hold(store):
        began = time.monotonic()
        ran = rmq("send", store, "orders", "x", "--lock-timeout", 0.2)
        assert time.monotonic() - began < 30
        assert ran.status == 1
        assert "Traceback" not in ran.err
        assert "broker" in ran.err
        assert rmq("topics", store).status == 0, "read-only commands do not wait for the lock"
        assert rmq("check", store).status in (0, 3)
    assert json.loads(rmq("send", store, "orders", "x", "--json").out)[0]["queueOffset"] > 0


def test_a_body_may_be_any_bytes_and_a_key_only_text(rmq: Rmq, store: Path) -> None:
    word = os.fsdecode(b"\xff\xfe")
    (sent,) = rmq("send", store, "orders", word, "--json").rows
    (row,) = rmq("get", store, "--id", sent["msgId"], "--json").rows
    assert (row["body"], row["bodyBase64"]) == (None, "//4=")
    ran = rmq("send", store, "orders", "x", "--key", word)
    assert (ran.status, ran.err) == (2, "rmq send: b'\\xff\\xfe' is not valid UTF-8.\n")


def test_a_delay_level_that_the_store_does_not_have_is_refused(rmq: Rmq, store: Path, tmp_path: Path) -> None:
    ran = rmq("send", store, "orders", "late", "--delay-level", 99)
    assert ran.status == 2
    assert "--delay-level 99: the store has the levels 1 to 18; expected one of them." in ran.err
    assert rmq("send", store, "orders", "late", "--delay-level", 0).status == 2
    assert rmq("create", tmp_path / "new", "orders", "--message-delay-level", "1s 2s").status == 0
    assert rmq("send", tmp_path / "new", "orders", "late", "--delay-level", 2).status == 0
    assert "the levels 1 to 2;" in rmq("send", tmp_path / "new", "orders", "late", "--delay-level", 3).err


@pytest.mark.parametrize("words", [("hi",), ("--lines",)])
def test_a_queue_that_does_not_exist_is_answered_in_words_of_the_command(
    rmq: Rmq, store: Path, words: tuple[str, ...]
) -> None:
    ran = rmq("send", store, "orders", *words, "--queue", 9, stdin="one\ntwo")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err == (
        "rmq send: --queue 9 is not one of the 4 queues of topic orders; expected 0 to 3. Leave --queue out for any "
        "queue.\n"
    )


def test_a_store_that_cannot_be_written_is_one_error(rmq: Rmq, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise StoreError("rmq/turn cannot be locked: Permission denied.")

    monkeypatch.setattr(rmq_spark.store.Producer, "send_many", fail)
    monkeypatch.setattr(rmq_spark.store.Producer, "close", fail)
    ran = rmq("send", store, "orders", "hi")
    assert ran.status == 1
    assert ran.err == "rmq send: rmq/turn cannot be locked: Permission denied.\n"
