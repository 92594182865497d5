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
