"""`rmq topics`, `queues`, `groups`, `lag`."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark.store.backend import GroupTerms
from rmq_spark.store.group.group_session import GroupSession
from rmq_spark.store.model import QueueKey

Rmq = Callable[..., Any]


def test_topics_lists_names_messages_and_bytes(rmq: Rmq, demo: Path) -> None:
    rows = {row["topic"]: row for row in rmq("topics", demo, "--json").rows}
    assert rows["orders"]["messages"] == 1170
    assert rows["orders"]["queues"] == 4
    assert rows["orders"]["firstTimestamp"] == "2026-11-21T05:50:31.752Z"
    assert list(rows["orders"]) == [
        *("topic", "isSystem", "queues", "messages", "bytes", "firstTimestamp", "lastTimestamp")
    ]
    assert "%DLQ%audit" in rows, "one of RocketMQ's own that holds messages"
    assert "BenchmarkTest" not in rows, "one of RocketMQ's own that is empty"
    everything = {row["topic"] for row in rmq("topics", demo, "--all", "--json").rows}
    with rmq_spark.open_reader(demo) as store:
        assert everything == set(store.topics())


def test_topics_as_text_is_a_table_with_a_row_a_line(rmq: Rmq, demo: Path) -> None:
    ran = rmq("topics", demo)
    head, *lines = ran.out.splitlines()
    assert head.split() == ["topic", "queues", "messages", "bytes", "firstTimestamp", "lastTimestamp"]
    (orders,) = [line for line in lines if line.startswith("orders ")]
    assert orders.split() == ["orders", "4", "1170", "429", "KiB", "2026-11-21", "05:50:31", "2026-11-21", "05:50:33"]
    assert ran.err == ""


def test_a_store_without_topics_says_what_makes_one(rmq: Rmq, tmp_path: Path) -> None:
    rmq_spark.create_store(tmp_path / "new")
    ran = rmq("topics", tmp_path / "new")
    assert (ran.status, ran.out) == (0, "")
    assert "rmq create PATH TOPIC" in ran.err
    assert rmq("topics", tmp_path / "new", "--json").out == "[]\n"


def test_queues_lists_half_open_offsets(rmq: Rmq, demo: Path) -> None:
    rows = rmq("queues", demo, "orders", "--json").rows
    assert [(row["queueId"], row["minOffset"], row["maxOffset"]) for row in rows] == [
        *((0, 0, 289), (1, 0, 292), (2, 0, 293), (3, 0, 296))
    ]
    topics = {row["topic"] for row in rmq("queues", demo, "--json").rows}
    assert {"orders", "payments", "%DLQ%audit"} <= topics
    assert "BenchmarkTest" not in topics


@pytest.mark.parametrize("command", ["topics", "queues"])
def test_a_queue_that_cannot_be_read_is_named_beside_the_table(
    rmq: Rmq, store: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    folder = store / "consumequeue" / "orders" / "1"
    scandir = os.scandir

    def refusing(path: str) -> Any:  # also where tests run as root, whom no mode of a folder stops
        if Path(path) == folder:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    assert rmq(command, store).err == ""
    monkeypatch.setattr(os, "scandir", refusing)
    for ran in (rmq(command, store), rmq(command, store, "--json")):
        assert ran.status == 0
        assert ran.err.startswith(f"orders/1: {folder} cannot be listed: Permission denied")
        assert ran.err.endswith(f". `rmq check {store}` tells more.\n")
        assert "or `rmq repair`" not in ran.err
        assert len(ran.err.splitlines()) == 1


def test_the_rest_of_a_store_without_a_segment_is_shown(rmq: Rmq, store: Path) -> None:
    missing = store / "commitlog" / "00000000000000262144"
    missing.unlink()
    ran = rmq("topics", store, "--json")
    assert ran.status == 0
    assert {row["topic"]: row["messages"] for row in ran.rows}["clicks"] == 16
    named = [line for line in ran.err.splitlines() if line.startswith(("orders/", "payments/"))]
    assert len(named) == 6
    assert all(f"{missing}" in line and "`rmq check`" in line and "tells more" not in line for line in named)


def test_a_queue_without_a_folder_raises_no_alarm(rmq: Rmq, store: Path) -> None:
    shutil.rmtree(store / "consumequeue" / "orders" / "1")  # as before the first message that is sent to it
    ran = rmq("queues", store, "orders", "--json")
    assert (ran.status, ran.err) == (0, "")
    assert [row["messages"] for row in ran.rows] == [289, 0, 293, 296]


def test_queues_of_no_named_topic_are_those_that_hold_messages(rmq: Rmq, demo: Path) -> None:
    rows = rmq("queues", demo, "--json").rows
    assert all(row["messages"] for row in rows)
    assert "compat" not in {row["topic"] for row in rows}
    assert len(rmq("queues", demo, "compat", "--json").rows) == 16


def test_a_damaged_queue_is_listed_though_no_message_of_it_can_be_read(rmq: Rmq, store: Path) -> None:
    path = store / "consumequeue" / "orders" / "0" / "00000000000000000000"
    path.rename(path.with_name("00000000000000000007"))
    rows = rmq("queues", store, "--json").rows
    assert [(row["topic"], row["queueId"], row["messages"]) for row in rows if row["problem"]] == [("orders", 0, 0)]


def test_a_queue_that_is_damaged_is_listed_with_its_problem(rmq: Rmq, store: Path) -> None:
    path = store / "consumequeue" / "orders" / "0" / "00000000000000000000"
    path.rename(path.with_name("00000000000000000007"))
    ran = rmq("queues", store, "orders")
    assert ran.status == 0
    assert ran.out.splitlines()[0].endswith("problem")
    rows = rmq("queues", store, "orders", "--json").rows
    assert rows[0]["problem"]
    assert rows[1]["problem"] is None


def test_groups_and_lag_agree_with_the_package(rmq: Rmq, demo: Path) -> None:
    rows = {row["group"]: row for row in rmq("groups", demo, "--json").rows}
    assert sorted(rows) == sorted(rmq_spark.groups(demo))
    assert rows["reporting"] == {
        **rows["reporting"],
        **{"topics": ["orders"], "queues": 4, "lagMessages": 270, "members": []},
    }
    table = rmq_spark.group_lag(demo, "billing")
    lag = rmq("lag", demo, "billing", "--json").rows
    assert [row["lagMessages"] for row in lag] == table["lagMessages"].to_pylist()
    assert list(lag[0]) == table.column_names
    assert {row["group"] for row in rmq("lag", demo, "--json").rows} == set(rows)
    assert rmq("groups", demo).out.splitlines()[0].split()[:3] == ["group", "topics", "queues"]
    assert rmq("lag", demo).out.splitlines()[0].split()[:3] == ["group", "topic", "queueId"]
    assert rmq("lag", demo, "billing").out.splitlines()[0].split()[:3] == ["topic", "queueId", "state"]


def test_a_group_that_is_not_there_is_an_error_that_names_those_that_are(rmq: Rmq, demo: Path) -> None:
    ran = rmq("lag", demo, "biling")
    assert ran.status == 1
    assert "billing" in ran.err


def test_groups_lists_members_that_have_no_queue(rmq: Rmq, store: Path) -> None:
    queries = [GroupSession(str(store), GroupTerms("reporting", "shared")) for _ in range(2)]
    for query in queries * 2:
        query.rebalance([QueueKey("orders", 0)], {}, None)
    rows = {row["group"]: row for row in rmq("groups", store, "--json").rows}
    assert rows["reporting"]["members"] == sorted(query.member_id for query in queries)
    assert rows["billing"]["members"] == []
    for query in queries:
        query.leave({})
