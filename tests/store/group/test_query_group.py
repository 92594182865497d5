"""A query in its group says what its user must know, and says it once."""

import errno
import logging
import os
from pathlib import Path

import pytest

import rmq_spark
from rmq_spark.store.disk.system_calls import SystemCalls
from rmq_spark.store.errors import StoreError
from rmq_spark.store.group.query_group import GroupTerms, QueryGroup
from rmq_spark.store.units import QueueKey

QUEUES = [QueueKey("orders", number) for number in range(12)]


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A store with one message."""
    with rmq_spark.open_store(tmp_path / "store", segment_bytes=1 << 16) as messages:
        messages.send("orders", "x", queue_id=0)
    return str(tmp_path / "store")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    caplog.clear()
    return found


def test_queues_that_the_strategy_gives_to_nobody_are_told_of_once_for_each_change(
    store: str, caplog: pytest.LogCaptureFixture
) -> None:
    query = QueryGroup(store, GroupTerms("g", assignment="shared", strategy="machineRoom:r1,r2"))
    assert query.step(QUEUES[:2], {}, None).owned == ()
    (told,) = warnings(caplog)
    assert told.startswith(
        "rmq: allocateStrategy=machineRoom:r1,r2 of the consumer group g gives these queues to nobody, so no member "
        "reads them: orders/0, orders/1. "
    )
    assert told.endswith("Set another one in all members, such as avg")
    query.step(QUEUES[:2], {}, 0)
    assert warnings(caplog) == [], "nothing has changed"
    query.step(QUEUES, {}, 0)
    (told,) = warnings(caplog)
    assert "orders/9 and 2 more. " in told
    query.leave({})


@pytest.mark.parametrize("strategy", ["avg", "consistentHash", 'config:{"orders": [0]}', "machineRoomNearby"])
def test_of_a_strategy_that_leaves_none_or_leaves_some_to_others_nothing_is_said(
    store: str, caplog: pytest.LogCaptureFixture, strategy: str
) -> None:
    query = QueryGroup(store, GroupTerms("g", assignment="shared", strategy=strategy))
    assert query.step(QUEUES, {}, None).owned
    assert warnings(caplog) == []
    query.leave({})


def test_a_query_that_reads_all_queues_has_no_use_for_a_strategy(store: str, caplog: pytest.LogCaptureFixture) -> None:
    query = QueryGroup(store, GroupTerms("g", strategy="machineRoom:r1"))
    assert len(query.step(QUEUES, {}, None).owned) == len(QUEUES)
    assert warnings(caplog) == []
    query.leave({})


def test_queues_are_gained_again_if_the_batch_that_they_began_with_could_not_be_noted(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = QueryGroup(store, GroupTerms("g", assignment="shared"))
    assert query.step(QUEUES[:1], {}, None).gained == tuple(QUEUES[:1])
    with monkeypatch.context() as patch:
        patch.setattr(SystemCalls, "create", refuse_for_want_of_memory)
        with pytest.raises(StoreError, match=r"planned\.tmp.*: Cannot allocate memory"):
            query.settle()
    assert query.step(QUEUES[:1], {}, None).gained == tuple(QUEUES[:1])
    query.settle()
    assert query.step(QUEUES[:1], {}, None).gained == ()
    query.leave({})


def refuse_for_want_of_memory(calls: SystemCalls, path: str, *_: object, **__: object) -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), path)
