"""Messages that a GroupSession logs for its user, each once."""

import errno
import logging
import os
from pathlib import Path

import pytest

import rmq_spark
from rmq_spark.store.backend import GroupTerms
from rmq_spark.store.disk.system_calls import SystemCalls
from rmq_spark.store.errors import StoreError
from rmq_spark.store.group.group_session import GroupSession
from rmq_spark.store.model import QueueKey

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


def test_rebalance_warns_of_unowned_queues_once_for_each_change(store: str, caplog: pytest.LogCaptureFixture) -> None:
    query = GroupSession(store, GroupTerms("g", assignment="shared", strategy="machineRoom:r1,r2"))
    assert query.rebalance(QUEUES[:2], {}, None).owned == ()
    (told,) = warnings(caplog)
    assert told.startswith(
        "rmq: allocateStrategy=machineRoom:r1,r2 of the consumer group g gives these queues to nobody, so no member "
        "reads them: orders/0, orders/1. "
    )
    assert told.endswith("Set another one in all members, such as avg")
    query.rebalance(QUEUES[:2], {}, 0)
    assert warnings(caplog) == [], "nothing has changed"
    query.rebalance(QUEUES, {}, 0)
    (told,) = warnings(caplog)
    assert "orders/9 and 2 more. " in told
    query.leave({})


@pytest.mark.parametrize("strategy", ["avg", "consistentHash", 'config:{"orders": [0]}', "machineRoomNearby"])
def test_rebalance_does_not_warn_if_other_members_may_own_queues(
    store: str, caplog: pytest.LogCaptureFixture, strategy: str
) -> None:
    query = GroupSession(store, GroupTerms("g", assignment="shared", strategy=strategy))
    assert query.rebalance(QUEUES, {}, None).owned
    assert warnings(caplog) == []
    query.leave({})


def test_rebalance_with_assignment_all_ignores_the_strategy(store: str, caplog: pytest.LogCaptureFixture) -> None:
    query = GroupSession(store, GroupTerms("g", strategy="machineRoom:r1"))
    assert len(query.rebalance(QUEUES, {}, None).owned) == len(QUEUES)
    assert warnings(caplog) == []
    query.leave({})


def test_rebalance_gains_queues_again_after_a_failed_settle(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query = GroupSession(store, GroupTerms("g", assignment="shared"))
    assert query.rebalance(QUEUES[:1], {}, None).gained == tuple(QUEUES[:1])
    with monkeypatch.context() as patch:
        patch.setattr(SystemCalls, "create", refuse_for_want_of_memory)
        with pytest.raises(StoreError, match=r"planned\.tmp.*: Cannot allocate memory"):
            query.settle()
    assert query.rebalance(QUEUES[:1], {}, None).gained == tuple(QUEUES[:1])
    query.settle()
    assert query.rebalance(QUEUES[:1], {}, None).gained == ()
    query.leave({})


def refuse_for_want_of_memory(calls: SystemCalls, path: str, *_: object, **__: object) -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), path)
