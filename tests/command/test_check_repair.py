"""`rmq check` and `rmq repair`: output, questions and results."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Rmq = Callable[..., Any]


@pytest.fixture
def without_index(store: Path) -> Path:
    """A store whose first consume-queue file is damaged; a repair can rebuild it."""
    path = store / "consumequeue" / "orders" / "0" / "00000000000000000000"
    path.write_bytes(b"\x7f" * 40 + path.read_bytes()[40:])
    return store


@pytest.fixture
def torn(store: Path) -> Path:
    """A store with damage in the middle of its log: messages of it are lost."""
    path = store / "commitlog" / "00000000000000000000"
    data = bytearray(path.read_bytes())
    data[100_000:100_400] = bytes(400)
    path.write_bytes(data)
    return store


def contents(path: Path) -> dict[str, bytes]:
    return {str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*") if one.is_file()}


def test_a_healthy_store_is_answered_with_0(rmq: Rmq, demo: Path) -> None:
    ran = rmq("check", demo)
    assert ran.status == 0
    assert "healthy" in ran.out
    assert rmq("check", demo, "--json").rows == []
    ran = rmq("repair", demo)
    assert (ran.status, ran.err) == (0, "Nothing to repair: the store is healthy.\n")
    assert rmq("repair", demo, "--yes", "--json").rows == []


def test_a_damaged_store_is_answered_with_3_and_the_evidence(rmq: Rmq, without_index: Path) -> None:
    ran = rmq("check", without_index)
    assert ran.status == 3
    assert "not healthy" in ran.out
    assert "\nrepairable  consumequeue/orders/0/00000000000000000000, position 0\n    " in ran.out
    assert "`rmq repair` rebuilds the queue" in ran.out
    ran = rmq("check", without_index, "--json")
    assert ran.status == 3
    assert {"severity", "area", "what", "path", "position", "topic", "queueId", "nextStep"} <= ran.rows[0].keys()
    assert any(row["topic"] == "orders" and row["queueId"] == 0 for row in ran.rows)


@pytest.mark.parametrize("answer", ["", "\n", "n\n", "maybe\n"])
def test_repair_does_nothing_unasked(rmq: Rmq, without_index: Path, answer: str) -> None:
    before = contents(without_index)
    ran = rmq("repair", without_index, typed=answer)
    assert ran.status == 3
    assert f"Apply this plan to {without_index}? [y/N]" in ran.err
    assert "Nothing was changed." in ran.err
    assert "rebuild" in ran.out
    assert contents(without_index) == before


@pytest.mark.parametrize("answer", ["", "y\n", "yes\n"])
def test_repair_does_nothing_where_there_is_no_terminal(rmq: Rmq, without_index: Path, answer: str) -> None:
    before = contents(without_index)
    ran = rmq("repair", without_index, stdin=answer)
    assert ran.status == 3
    assert "[y/N]" not in ran.err
    assert "so confirmation is impossible. Add --yes to repair without it.\nNothing was changed." in ran.err
    assert contents(without_index) == before


@pytest.mark.parametrize("words", [(), ("--yes",), ("--yes", "--json")])
def test_repair_makes_a_store_whole(rmq: Rmq, without_index: Path, words: tuple[str, ...]) -> None:
    messages = rmq("cat", without_index, "payments", "--json").rows
    ran = rmq("repair", without_index, *words, typed="y\n")
    assert ran.status == 0, ran.err
    assert ("Apply this plan" in ran.err) is (words == ())
    if "--json" in words:
        assert {row["action"] for row in ran.rows} & {"rebuild", "recover"}
    else:
        assert " done, 0 left" in ran.err
    assert rmq("check", without_index).status == 0
    assert rmq("cat", without_index, "payments", "--json").rows == messages
    assert len(rmq("cat", without_index, "orders", "--json").rows) == 1170


def test_a_dry_run_changes_nothing(rmq: Rmq, without_index: Path) -> None:
    before = contents(without_index)
    ran = rmq("repair", without_index, "--dry-run", "--json")
    assert ran.status == 3
    assert all(list(row) == ["action", "what", "path", "messagesLost", "isDoneByRepair"] for row in ran.rows)
    assert rmq("repair", without_index, "--dry-run").status == 3
    assert rmq("repair", without_index, "--json").status == 2, "--json cannot ask"
    assert contents(without_index) == before


def test_messages_are_given_up_only_if_that_is_said(rmq: Rmq, torn: Path) -> None:
    before = contents(torn)
    ran = rmq("repair", torn, "--yes")
    assert ran.status == 3
    ran = rmq("repair", torn, "--yes", "--cut-log")
    assert ran.status == 3
    assert "messages would be lost" in ran.err
    assert contents(torn) == before
    ran = rmq("repair", torn, "--cut-log", "--accept-loss", typed="n\n")
    assert "messages will be lost." in ran.err
    assert contents(torn) == before
    ran = rmq("repair", torn, "--cut-log", "--accept-loss", typed="yes\n")
    assert ran.status == 0, "offsets beyond the end are clamped to it"
    assert rmq("check", torn, "--json").rows == []
    assert 0 < len(rmq("cat", torn, "orders", "--json").rows) < 1170


def test_messages_without_units_are_given_up_only_if_that_is_said(rmq: Rmq, torn: Path) -> None:
    shutil.rmtree(torn / "consumequeue")
    before = contents(torn)
    ran = rmq("repair", torn, "--yes", "--cut-log")
    assert ran.status == 3
    assert "messages would be lost, so nothing was changed" in ran.err
    assert not ran.err.startswith("0 ")
    assert contents(torn) == before


def test_what_cannot_be_repaired_is_not_called_healthy(rmq: Rmq, torn: Path) -> None:
    ran = rmq("repair", torn, "--dry-run")
    assert ran.status == 3
    assert "leave" in ran.out
    assert "read around the place: `rmq cat --offset`; in Spark" in ran.out
    assert "healthy." not in ran.err
    assert "--cut-log --accept-loss" in ran.err
    assert "--offset N` reads the messages after the damage" in ran.err
    assert "--cut-log --accept-loss" not in rmq("repair", torn, "--cut-log", "--dry-run").err


def test_a_finding_shows_plain_numbers(rmq: Rmq, without_index: Path) -> None:
    found = [row["found"] for row in rmq("check", without_index, "--json").rows]
    assert found.count("(9187201950435737471, 2139062143, 9187201950435737471)") == len(found) == 2


def test_a_path_without_a_store_is_an_error(rmq: Rmq, tmp_path: Path) -> None:
    for name in ("check", "repair"):
        assert rmq(name, tmp_path / "none").status == 1
