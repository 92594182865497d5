"""Suspended queues as a listener's task reads them: dead letters are settled once their batch is committed."""

from pathlib import Path

import pytest

from rmq_spark.store.delivery.send_back_ledger import read_suspended_queues
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.group.resets import write_outcomes
from rmq_spark.store.model import CommitKey, QueueKey, Suspension
from rmq_spark.store.transaction.ledger import Ledger, LedgerRow, make_folders

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
def test_read_suspended_queues_settled_once_the_batch_is_committed(
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
    found = read_suspended_queues(str(tmp_path), "billing", reader)
    assert (found[ONE][0].attempts, found[ONE][0].sent, found[ONE][0].dead) == ({13: 2}, {15}, {14})
    assert found[ONE][1] == is_settled
    assert found[OTHER][1], "it has none"


def test_read_suspended_queues_of_a_group_without_a_file(tmp_path: Path) -> None:
    assert read_suspended_queues(str(tmp_path), "billing", BATCH) == {}
    assert list(tmp_path.iterdir()) == []
