"""`rmq cat`: which messages, and in which order."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rmq_spark

Rmq = Callable[..., Any]


def test_messages_come_in_the_order_of_the_log_each_once(rmq: Rmq, demo: Path) -> None:
    rows = rmq("cat", demo, "orders", "payments", "clicks", "--json").rows
    places = [row["commitLogOffset"] for row in rows]
    assert places == sorted(places)
    assert len({(row["topic"], row["queueId"], row["queueOffset"]) for row in rows}) == len(rows) == 1170 + 299 + 16
    assert list(rows[0]) == [
        *("topic", "queueId", "queueOffset", "commitLogOffset", "tags", "keys", "body"),
        *("bornTimestamp", "storeTimestamp", "reconsumeTimes"),
    ]


def test_a_line_has_when_where_tags_keys_and_body(rmq: Rmq, demo: Path) -> None:
    line = rmq("cat", demo, "orders", "--limit", 1).out
    assert line.startswith('2026-11-21 05:50:31.752  orders/0@0  created  O-1010  {"orderId":"O-1010"')
    assert rmq("cat", demo, "%DLQ%audit", "-n", 1).out.split("  ")[2] == "(try 3)"


def test_limit_offset_and_queue_choose(rmq: Rmq, demo: Path) -> None:
    rows = rmq("cat", demo, "orders", "--queue", 2, "--offset", 290, "--json").rows
    assert [(row["queueId"], row["queueOffset"]) for row in rows] == [(2, 290), (2, 291), (2, 292)]
    assert len(rmq("cat", demo, "orders", "-n", 7, "--json").rows) == 7


def test_last_counts_over_all_queues_and_behind_filters(rmq: Rmq, demo: Path) -> None:
    every = rmq("cat", demo, "orders", "--json").rows
    assert rmq("cat", demo, "orders", "--last", 5, "--json").rows == every[-5:]
    paid = [row for row in every if row["tags"] == "paid"]
    assert rmq("cat", demo, "orders", "--last", 5, "--tags", "paid", "--json").rows == paid[-5:]
    assert rmq("cat", demo, "orders", "--last", 5000, "--json").rows == every
    assert rmq("cat", demo, "orders", "--last", 0, "--json").rows == []


def test_times_are_half_open(rmq: Rmq, demo: Path) -> None:
    every = rmq("cat", demo, "orders", "--json").rows
    moment = every[500]["storeTimestamp"]
    behind = rmq("cat", demo, "orders", "--from", moment, "--json").rows
    before = rmq("cat", demo, "orders", "--to", moment, "--json").rows
    assert before + behind == every
    assert all(row["storeTimestamp"] >= moment for row in behind)


@pytest.mark.parametrize("tags", ["paid|shipped", "paid, shipped"])
def test_one_bar_or_a_comma_between_tags_is_answered_with_two_bars(rmq: Rmq, demo: Path, tags: str) -> None:
    ran = rmq("cat", demo, "orders", "--tags", tags, "--json")
    assert (ran.status, ran.out) == (1, "")
    assert 'as in "paid || shipped"' in ran.err


def test_filters_are_those_of_subscriptions(rmq: Rmq, demo: Path) -> None:
    tags = {row["tags"] for row in rmq("cat", demo, "orders", "--tags", "paid || shipped", "--json").rows}
    assert tags == {"paid", "shipped"}
    rows = rmq("cat", demo, "orders", "--sql92", "customer = 'c-009'", "--columns", "properties", "--json").rows
    assert rows
    assert all(row["properties"]["customer"] == "c-009" for row in rows)
    ran = rmq("cat", demo, "orders", "--sql92", "customer = ")
    assert ran.status == 1


def test_columns_as_text_are_values_with_tabs_between(rmq: Rmq, demo: Path) -> None:
    out = rmq("cat", demo, "orders", "-n", 2, "--columns", "keys,queueId,storeTimestamp").out
    assert out.splitlines()[0] == "O-1010\t0\t2026-11-21 05:50:31.752"
    assert list(rmq("cat", demo, "orders", "-n", 1, "--columns", "*", "--json").rows[0]) == list(rmq_spark.COLUMNS)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--offset", "1", "--last", "2"), "Give one of them"),
        (("--follow", "--to", "now"), "--follow and --to cannot be combined"),
        (("--json", "--format", "text"), "--json and --format text cannot be combined"),
        (("--columns", "bodi"), "unknown column bodi; expected some of: topic"),
        (("--columns", "Keys,bdy"), "Did you mean keys and body?"),
        (("--columns", "body,body"), "a column is repeated"),
        (("--queue", "9"), "Its queues: 0, 1, 2, 3"),
        (("--from", "noon"), "is not a time"),
        (("--from", "1700000000"), "the unit is milliseconds"),
        (("--from", "1700000000000000"), "Divide microseconds by 1000"),
    ],
)
def test_wrong_words_are_answered_with_what_is_right(rmq: Rmq, demo: Path, words: tuple[str, ...], text: str) -> None:
    ran = rmq("cat", demo, "orders", *words)
    assert ran.status == 2
    assert text in ran.err
    assert ran.out == ""


def test_nothing_to_print_is_said(rmq: Rmq, demo: Path) -> None:
    ran = rmq("cat", demo, "orders", "--from", "now")
    assert (ran.status, ran.out, ran.err) == (0, "", "No messages match.\n")


def test_control_characters_of_a_message_do_not_reach_the_terminal(rmq: Rmq, tmp_path: Path) -> None:
    with rmq_spark.open_store(tmp_path / "store", segment_bytes=1 << 20) as store:
        store.send("orders", "a\x1b[2Jb\nc", tags="\x1b]0;t\x07", keys="k")
        store.send("orders", b"\xff\x00", keys="raw")
    first, second = rmq("cat", tmp_path / "store", "orders").out.splitlines()
    assert first.endswith(r"  \x1b]0;t\x07  k  a\x1b[2Jb\nc")
    assert second.endswith("  raw  ff 00")
    assert "\x1b" not in rmq("get", tmp_path / "store", "--key", "k").out
    rows = rmq("cat", tmp_path / "store", "orders", "--json").rows
    assert rows[0]["body"] == "a\x1b[2Jb\nc"
    assert (rows[1]["body"], rows[1]["bodyBase64"]) == (None, "/wA=")


def test_follow_prints_what_comes_also_in_new_queues_until_its_limit(
    process: Callable[..., "subprocess.Popen[bytes]"], store: Path
) -> None:
    started = process("cat", store, "orders", "--follow", "--last", 1, "--limit", 5, "--columns", "body")
    assert started.stdout is not None
    assert b"orderId" in started.stdout.readline()
    with rmq_spark.open_store(store) as writer:
        for body in ("one", "two", "three"):
            writer.send("orders", body)
        assert [started.stdout.readline() for _ in range(3)] == [b"one\n", b"two\n", b"three\n"]
        assert started.poll() is None
        time.sleep(0)
        writer.send("orders", "four")
    assert started.stdout.read() == b"four\n"
    assert started.wait(60) == 0
