"""Java dies alone while a query's Python waits for messages: then the query is over, and its group is free."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import rmq_spark
from rmq_spark.store import GroupSession, GroupTerms
from rmq_spark.store.errors import GroupConflictError

if TYPE_CHECKING:
    from tests.torture.conftest import Life

pytestmark = [pytest.mark.spark, pytest.mark.torture(minutes=1)]

GROUP = "waiters"  # of waiting_life.py
STARTS_WITHIN_S = 120
WAIT_S = 1800  # for messages, of the trigger
FREE_WITHIN_S = 60


def test_a_query_whose_java_was_killed_while_it_waits_leaves_its_group(
    start: "Callable[..., Life]", tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with rmq_spark.open_store(store, queues=1, segment_bytes=1 << 16) as messages:
        messages.send("orders", "x")
    life = start("waiting_life.py", "local[1]", str(store), str(tmp_path / "checkpoint"), f"{WAIT_S}s")
    assert life.wait_for("waits", STARTS_WITHIN_S), life.log.read_text()
    follower = GroupSession(str(store), GroupTerms(GROUP))
    with pytest.raises(GroupConflictError, match='query "the one that waits"'):
        follower.join()
    life.kill(life.members("java"))
    until = time.monotonic() + FREE_WITHIN_S
    while not joins(follower):
        assert time.monotonic() < until, f"its group is not free\n{life.log.read_text()}"
    follower.leave({})


def joins(query: GroupSession) -> bool:
    """Say whether a query has become a member; it waits for a while for one that is in the way."""
    try:
        query.join()
    except GroupConflictError:
        return False
    return True
