"""Suspended queues on disk: changes by batches, crashes, and where queues resume."""

from dataclasses import replace
from pathlib import Path

import pytest

from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.group.group_files import GroupPaths
from rmq_spark.store.group.resets import NOTHING_SUSPENDED, read_suspended, write_outcomes
from rmq_spark.store.model import CommitKey, QueueKey, SuspendedQueues, Suspension

ONE, OTHER = QueueKey("orders", 0), QueueKey("%RETRY%billing", 0)
FIRST, SECOND = CommitKey("query", 7), CommitKey("query", 8)


@pytest.fixture
def root(tmp_path: Path) -> str:
    (tmp_path / "rmq").mkdir()
    return str(tmp_path)


def write(root: str, key: CommitKey, **outcomes: Suspension | None) -> SuspendedQueues:
    named = {{"one": ONE, "other": OTHER}[name]: one for name, one in outcomes.items()}
    write_outcomes(root, "billing", key, named)
    return read_suspended(root, "billing")


def test_read_suspended_returns_the_written_queues(root: str) -> None:
    assert read_suspended(root, "billing") == NOTHING_SUSPENDED
    stopped = Suspension(13, 1_700_000_000_000, {13: 2, 14: 1}, frozenset({15}), frozenset({12}))
    found = write(root, FIRST, one=stopped, other=Suspension(0))
    assert found.number == 1
    assert found.queues[ONE] == replace(stopped, number=1, query_id="query", batch_id=7)
    assert found.queues[OTHER] == Suspension(0, number=1, query_id="query", batch_id=7)


def test_write_outcomes_changes_the_queues_of_the_batch(root: str) -> None:
    write(root, FIRST, one=Suspension(13), other=Suspension(4))
    found = write(root, SECOND, one=Suspension(15))
    assert {queue: (one.resume, one.number) for queue, one in found.queues.items()} == {ONE: (15, 2), OTHER: (4, 1)}
    assert write(root, CommitKey("query", 9), one=None).queues.keys() == {OTHER}


def test_write_outcomes_of_a_repeated_batch_replaces_the_first_outcome(root: str) -> None:
    write(root, FIRST, one=Suspension(13), other=Suspension(4))
    found = write(root, FIRST, one=Suspension(15))
    assert {queue: one.resume for queue, one in found.queues.items()} == {ONE: 15}
    assert found.number == 2
    assert write(root, FIRST).queues == {}


def test_write_outcomes_without_outcomes_writes_nothing(root: str) -> None:
    write(root, FIRST, one=None)
    assert not Path(GroupPaths(root, "billing").folder).exists()
    before = write(root, FIRST, one=Suspension(13))
    assert write(root, SECOND, other=None) == before


def test_behind_moves_a_queue_back_once_and_never_forward() -> None:
    suspended = SuspendedQueues(5, {ONE: Suspension(13, number=5), OTHER: Suspension(4, number=3)})
    assert suspended.behind({ONE: 20, OTHER: 20}, 0) == {ONE: 13, OTHER: 4}
    assert suspended.behind({ONE: 20, OTHER: 20}, 4) == {ONE: 13}
    assert suspended.behind({ONE: 20, OTHER: 20}, 5) == {}
    assert suspended.behind({ONE: 13, OTHER: 3}, 0) == {}
    assert suspended.behind({}, 0) == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"resume": 13', '"resume": -1'),
        ('"number": 1', '"number": 2'),
        ('"0": {', '"-1": {'),
        ('"13": 2', '"13": 0'),
        ('"queryId": "query"', '"queryId": ""'),
        ("}", ""),
    ],
)
def test_read_suspended_names_the_consequences_of_damage(root: str, old: str, new: str) -> None:
    write(root, FIRST, one=Suspension(13, 5, {13: 2}))
    path = Path(GroupPaths(root, "billing").suspended)
    text = path.read_text()
    assert old in text
    position = text.rindex(old)
    path.write_text(text[:position] + new + text[position + len(old) :])
    with pytest.raises(DamageError, match="they resume after rows"):
        read_suspended(root, "billing")


def test_read_suspended_refuses_a_newer_version(root: str) -> None:
    write(root, FIRST, one=Suspension(13))
    path = Path(GroupPaths(root, "billing").suspended)
    path.write_text(path.read_text().replace('"v": 1', '"v": 2'))
    with pytest.raises(StoreError, match="newer"):
        read_suspended(root, "billing")
