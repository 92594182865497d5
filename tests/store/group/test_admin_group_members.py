"""`group_members`: the living members of a group, also those without a queue."""

import subprocess
import sys
from pathlib import Path

import pytest

import rmq_spark
from rmq_spark.store.backend import GroupTerms
from rmq_spark.store.group.group_files import GroupPaths
from rmq_spark.store.group.group_session import GroupSession
from rmq_spark.store.model import QueueKey

QUEUE = QueueKey("orders", 0)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with rmq_spark.open_store(tmp_path / "store", segment_bytes=1 << 16) as messages:
        messages.create_topic("orders", 1)
    return tmp_path / "store"


def test_group_members_lists_a_member_without_a_queue(store: Path) -> None:
    queries = [GroupSession(str(store), GroupTerms("g", "shared", query_name=name)) for name in ("one", "two")]
    for query in queries * 2:
        query.rebalance([QUEUE], {}, None)
    rows = rmq_spark.group_members(store, "g").to_pylist()
    assert [row["member"] for row in rows] == sorted(query.member_id for query in queries)
    assert [row["queues"] for row in rows] == [1, 0], "the first by its id has the only queue"
    assert {row["queryName"] for row in rows} == {"one", "two"}
    assert {(row["assignment"], row["allocateStrategy"]) for row in rows} == {("shared", "avg")}
    queries[0].leave({})
    assert [row["queryName"] for row in rmq_spark.group_members(store).to_pylist()] == ["two"]
    queries[1].leave({})
    assert rmq_spark.group_members(store).num_rows == 0


def test_group_members_omits_a_killed_member(store: Path) -> None:
    code = (
        "import os, sys\n"
        "from rmq_spark.store.group.group_session import GroupSession, GroupTerms\n"
        "GroupSession(sys.argv[1], GroupTerms('g')).join()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code, str(store)], check=False)
    assert list(Path(GroupPaths(str(store), "g").members).glob("*.json"))
    assert rmq_spark.group_members(store, "g").num_rows == 0


def test_group_members_of_an_unknown_group_is_empty(store: Path) -> None:
    assert rmq_spark.group_members(store, "nobody").num_rows == 0
    with pytest.raises(rmq_spark.OptionError):
        rmq_spark.group_members(store, "no group")
    with pytest.raises(rmq_spark.StorePathError):
        rmq_spark.group_members(store / "elsewhere")
