"""`rmq get`: single messages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Rmq = Callable[..., Any]


def test_a_message_is_found_by_id_by_key_and_by_place(rmq: Rmq, demo: Path) -> None:
    (row,) = rmq("get", demo, "--topic", "orders", "--queue", 3, "--offset", 17, "--json").rows
    assert (row["topic"], row["queueId"], row["queueOffset"]) == ("orders", 3, 17)
    assert row["properties"]["KEYS"] == row["keys"]
    assert rmq("get", demo, "--id", row["msgId"], "--json").rows == [row]
    assert rmq("get", demo, "--id", row["offsetMsgId"], "--json").rows == [row]
    assert row in rmq("get", demo, "--key", row["keys"], "--json").rows
    assert {one["topic"] for one in rmq("get", demo, "--key", row["keys"], "--topic", "payments", "--json").rows} <= {
        "payments"
    }


def test_as_text_it_shows_properties_and_body(rmq: Rmq, demo: Path) -> None:
    ran = rmq("get", demo, "--topic", "orders", "--queue", 0, "--offset", 0)
    assert ran.status == 0
    assert "in orders/0, queue offset 0, physical offset 0" in ran.out
    assert "\n  KEYS = O-1010\n" in ran.out
    assert "orderId" in ran.out


def test_nothing_found_is_a_no(rmq: Rmq, demo: Path) -> None:
    ran = rmq("get", demo, "--topic", "orders", "--queue", 0, "--offset", 289)
    assert (ran.status, ran.out) == (3, "")
    assert "[0, 289)" in ran.err
    ran = rmq("get", demo, "--id", "0" * 32, "--json")
    assert (ran.status, ran.out) == (3, "[]\n")


def test_a_word_that_may_be_a_key_is_answered_with_the_options(rmq: Rmq, demo: Path) -> None:
    ran = rmq("get", demo, "O-1010")
    assert (ran.status, ran.out) == (2, "")
    assert "Give --key O-1010 or --id O-1010." in ran.err
    assert rmq("get", demo, "--no-such", "x").status == 2


def test_a_body_that_is_not_the_one_that_was_sent_is_shown_and_told(rmq: Rmq, store: Path) -> None:
    words = ("get", store, "--topic", "orders", "--queue", 0, "--offset", 0)
    assert rmq(*words).err == ""
    log = store / "commitlog" / "00000000000000000000"
    log.write_bytes(log.read_bytes().replace(b'"orderId":"O-1010"', b'"orderId":"O-9999"', 1))
    ran = rmq(*words)
    assert ran.status == 0
    assert "O-9999" in ran.out
    assert "orders/0@0: the body's CRC does not match" in ran.err


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--id", "a", "--key", "b"),
        ("--offset", "1"),
        ("--queue", "1", "--key", "b"),
        ("--topic", "orders", "--queue", "9", "--offset", "1"),
    ],
)
def test_it_must_be_said_which_one(rmq: Rmq, demo: Path, words: tuple[str, ...]) -> None:
    assert rmq("get", demo, *words).status == 2
