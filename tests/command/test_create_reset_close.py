"""`rmq create`, `reset`, `close`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rmq_spark

Rmq = Callable[..., Any]


def test_a_store_and_topics_are_made_and_stay_as_they_are(rmq: Rmq, tmp_path: Path) -> None:
    path = tmp_path / "store"
    ran = rmq("create", path, "orders", "--queues", 8, "--segment-bytes", "1m")
    assert "is new" in ran.err
    assert rmq("send", path, "orders", "x").status == 0
    assert (path / "commitlog" / "00000000000000000000").stat().st_size == 1 << 20
    assert not (path / "abort").exists()
    rows = rmq("create", path, "orders", "more", "--queues", 2, "--json").rows
    assert rows == [
        {"topic": "orders", "queues": 8, "isNew": False},
        {"topic": "more", "queues": 2, "isNew": True},
    ]
    assert "exists already" in rmq("create", path).err


def test_a_folder_with_something_else_in_it_is_refused(rmq: Rmq, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    ran = rmq("create", tmp_path, "orders")
    assert ran.status == 1
    assert [one.name for one in tmp_path.iterdir()] == ["notes.txt"]


def test_one_wrong_name_makes_nothing(rmq: Rmq, tmp_path: Path) -> None:
    ran = rmq("create", tmp_path / "s", "good", "b.d", "also-good")
    assert ran.status == 1
    assert "topic 'b.d' is not a topic's name" in ran.err
    assert not (tmp_path / "s").exists()


def test_a_new_store_may_have_levels_of_its_own(rmq: Rmq, tmp_path: Path) -> None:
    ran = rmq("create", tmp_path / "s", "a", "--message-delay-level", "1s 1h", "--broker-version", "4.9")
    assert ran.status == 0
    ran = rmq("send", tmp_path / "s", "a", "x", "--deliver-at", "now+1h")
    assert ran.status == 1, "4.9 knows no times"


def test_a_group_goes_where_it_is_sent_and_can_be_taken_back(rmq: Rmq, store: Path) -> None:
    before = rmq_spark.group_offsets(store, "billing")["payments"]
    rows = rmq("reset", store, "billing", "earliest", "--topic", "payments", "--json").rows
    assert [row["oldGroupOffset"] for row in rows] == list(before.values())
    assert [row["groupOffset"] for row in rows] == [0, 0]
    assert rmq("reset", store, "billing", f'{{"payments": {{"0": {before[0]}, "1": {before[1]}}}}}').status == 0
    assert rmq_spark.group_offsets(store, "billing")["payments"] == before
    assert rmq("reset", store, "billing", "latest").status == 0
    assert set(rmq_spark.group_lag(store, "billing")["lagMessages"].to_pylist()) == {0}
    assert rmq("reset", store, "billing", "2026-11-21T05:50:33.600Z").status == 0
    assert rmq("reset", store, "billing", "now-1000d").status == 0
    assert rmq("reset", store, "billing", "2000-01-01T00:00:00Z").status == 0, "a date is not taken for seconds"
    assert rmq_spark.group_offsets(store, "billing")["payments"] == {0: 0, 1: 0}


@pytest.mark.parametrize("where", ["noon", "{", "2026-13-01T00:00:00", "earlyest", "1700000000"])
def test_where_a_group_cannot_go_is_answered_with_what_it_may_be(rmq: Rmq, store: Path, where: str) -> None:
    ran = rmq("reset", store, "billing", where)
    assert ran.status == 2
    assert "WHERE" in ran.err
    assert "orders" in ran.err


def test_the_retries_of_a_group_stay_unless_their_topic_is_named(rmq: Rmq, store: Path) -> None:
    before = rmq_spark.group_offsets(store, "audit")["%RETRY%audit"]
    assert rmq("reset", store, "audit", "earliest").status == 0
    assert rmq_spark.group_offsets(store, "audit")["%RETRY%audit"] == before
    (row,) = rmq("reset", store, "audit", "earliest", "--topic", "%RETRY%audit", "--json").rows
    assert (row["oldGroupOffset"], row["groupOffset"]) == (before[0], 0)
    assert before != {0: 0}


def test_a_group_that_cannot_be_reset_is_answered_with_what_can_be_done(rmq: Rmq, store: Path, tmp_path: Path) -> None:
    ran = rmq("reset", store, "CID_RMQ_SYS_TRANS", "latest")
    assert ran.status == 1
    assert "set the offset in config/consumerOffset.json to that end" in ran.err
    rmq("create", tmp_path / "new", "orders")
    ran = rmq("reset", tmp_path / "new", "g", "latest")
    assert "Name the topics to reset with --topic. The store has no groups." in ran.err


def test_without_where_it_says_what_is_expected(rmq: Rmq, store: Path) -> None:
    ran = rmq("reset", store, "billing")
    assert ran.status == 2
    assert "Missing argument 'WHERE'. Expected earliest, latest, TIME, or '{\"orders\"" in ran.err
    assert "now-10m" in ran.err


def test_an_offset_outside_a_queue_changes_nothing(rmq: Rmq, store: Path) -> None:
    before = (store / "config" / "consumerOffset.json").read_bytes()
    assert rmq("reset", store, "billing", '{"payments": {"0": 9999}}').status == 1
    assert rmq("reset", store, "billing", "[1]").status == 2
    assert rmq("reset", store, "billing", '{"payments": 5}').status == 1
    assert (store / "config" / "consumerOffset.json").read_bytes() == before


def test_close_leaves_a_store_in_order(rmq: Rmq, store: Path) -> None:
    with rmq_spark.open_store(store) as messages:
        messages.send("orders", "x")
    (store / "abort").touch()
    assert rmq("close", store, "--json").rows == [{"path": str(store), "state": "closed"}]
    assert not (store / "abort").exists()
    assert "cleanly shut down" in rmq("close", store).err
    assert rmq("close", store / "none").status == 1
    assert not (store / "none").exists()
