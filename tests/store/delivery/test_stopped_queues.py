"""Stopped queues as a task of a listener sees them: dead letters count once their batch was committed."""

from pathlib import Path

import pytest

from rmq_spark.store.commit.keys import CommitKey, make_folders
from rmq_spark.store.commit.ledger import Ledger, LedgerRow
from rmq_spark.store.delivery.stopped_queues import read_stopped_queues
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.group.suspended import Suspension, write_outcomes
from rmq_spark.store.units import QueueKey

ONE, OTHER = QueueKey("orders", 0), QueueKey("orders", 1)
BATCH = CommitKey("query", 7)


@pytest.mark.parametrize(
    ("committed", "reader", "is_settled"),
    [
        (None, CommitKey("query", 8), False),
        (6, CommitKey("query", 8), False),
        (7, CommitKey("query", 8), True),
        (9, CommitKey("query", 10), True),
        (7, CommitKey("other", 7), True),
        (6, CommitKey("other", 7), False),
        (7, BATCH, False),
    ],
)
def test_dead_letters_are_settled_once_their_batch_was_committed_unless_it_is_repeated(
    tmp_path: Path, committed: int | None, reader: CommitKey, is_settled: bool
) -> None:
    (tmp_path / "rmq").mkdir()
    outcomes = {
        ONE: Suspension(13, 5, {13: 2}, frozenset({15}), frozenset({14})),
        OTHER: Suspension(4, sent=frozenset({6})),
    }
    write_outcomes(str(tmp_path), "billing", BATCH, outcomes)
    if committed is not None:
        make_folders(str(tmp_path), Disk())
        row = LedgerRow("sendback:query", 3, 1, 1, 1, 1, {"batch": committed})
        Ledger(str(tmp_path), Disk()).write(row, is_durable=True)
    found = read_stopped_queues(str(tmp_path), "billing", reader)
    assert (found[ONE][0].attempts, found[ONE][0].sent, found[ONE][0].dead) == ({13: 2}, {15}, {14})
    assert found[ONE][1] == is_settled
    assert found[OTHER][1], "it has none"


def test_a_group_of_which_nothing_was_stopped_has_no_file(tmp_path: Path) -> None:
    assert read_stopped_queues(str(tmp_path), "billing", BATCH) == {}
    assert list(tmp_path.iterdir()) == []
