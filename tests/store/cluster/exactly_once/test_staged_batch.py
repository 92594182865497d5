"""A batch as its tasks have staged it: joined receipts, totals, and what contradicts."""

import pytest

from rmq_spark.store.cluster.exactly_once.staged_batch import StagedBatch, StagedRows, StagedRun
from rmq_spark.store.errors import BatchConflictError
from rmq_spark.store.model import CommitKey, QueueKey

KEY = CommitKey("query", 3)
A0, A1, B0 = QueueKey("orders", 0, "broker-a"), QueueKey("orders", 1, "broker-a"), QueueKey("orders", 0, "broker-b")
STAGE_A, STAGE_B = QueueKey("stage", 0, "broker-a"), QueueKey("stage", 2, "broker-b")


def run(queue: QueueKey, offset: int, stage: QueueKey = STAGE_A, rows: int = 2, size: int = 100) -> StagedRun:
    return StagedRun(queue, stage, offset, 0, size, 0, "ID", rows)


def rows(
    *runs: StagedRun, digest: int = 1, key: CommitKey = KEY, queues: tuple[QueueKey, ...] = (A0, B0)
) -> StagedRows:
    return StagedRows(key, runs, sum(one.rows for one in runs), digest, {"orders": queues})


def test_receipts_are_joined_in_the_order_of_the_tasks() -> None:
    first, second = rows(run(B0, 5), run(A0, 6)), rows(run(A0, 2), run(A1, 1, STAGE_B, rows=3, size=7))
    batch = StagedBatch.of(KEY, [first, second])
    assert batch.runs == first.runs + second.runs
    assert (batch.rows, batch.bytes) == (9, 307)
    assert batch.queues == [B0, A0, A1]
    assert batch.brokers == ["broker-a", "broker-b"]
    assert batch.write_queues == {"orders": (A0, B0)}


def test_digests_are_added_modulo_64_bits() -> None:
    batch = StagedBatch.of(KEY, [rows(digest=(1 << 64) - 1), rows(digest=3)])
    assert batch.digest == 2
    assert batch.digest == StagedBatch.of(KEY, [rows(digest=3), rows(digest=(1 << 64) - 1)]).digest


def test_a_batch_without_receipts_is_empty() -> None:
    batch = StagedBatch.of(KEY, [])
    assert (batch.rows, batch.digest, batch.bytes, batch.queues, batch.brokers) == (0, 0, 0, [], [])
    assert batch.blob_ends() == {}


def test_blob_ends_span_the_blobs_of_each_stage_queue() -> None:
    runs = run(A0, 7), run(A1, 4), run(B0, 9, STAGE_B), run(A0, 5)
    assert StagedBatch.of(KEY, [rows(*runs)]).blob_ends() == {STAGE_A: (4, 8), STAGE_B: (9, 10)}


@pytest.mark.parametrize("other", [CommitKey("query", 4), CommitKey("another", 3), CommitKey("query")])
def test_a_receipt_of_another_batch_is_refused(other: CommitKey) -> None:
    with pytest.raises(BatchConflictError, match=r"has staged rows of .*Nothing was written"):
        StagedBatch.of(KEY, [rows(run(A0, 1)), rows(run(A0, 2), key=other)])


@pytest.mark.parametrize("queues", [(A0,), (B0, A0), (A0, A1, B0)], ids=["fewer", "another order", "more"])
def test_tasks_that_chose_among_other_queues_are_refused(queues: tuple[QueueKey, ...]) -> None:
    with pytest.raises(BatchConflictError, match=f"found 2 queues on broker-a, broker-b, another one {len(queues)}"):
        StagedBatch.of(KEY, [rows(run(A0, 1)), rows(run(A0, 2), queues=queues)])


def test_tasks_may_write_to_other_topics() -> None:
    other = StagedRows(KEY, (), 0, 0, {"payments": (A1,)})
    assert StagedBatch.of(KEY, [rows(), other]).write_queues == {"orders": (A0, B0), "payments": (A1,)}
