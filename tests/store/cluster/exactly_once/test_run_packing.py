"""Runs and blobs: every row once and in order, within the limits, and few blobs."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rmq_spark.store.cluster.exactly_once.run_packing import PackedRun, pack_rows
from rmq_spark.store.cluster.message_spool import ItemRun
from rmq_spark.store.model import QueueKey

LIMIT = 100
A0, A1, B0 = QueueKey("orders", 0, "broker-a"), QueueKey("orders", 1, "broker-a"), QueueKey("orders", 0, "broker-b")
sizes_of_parts = st.lists(st.lists(st.integers(1, 40) | st.integers(90, 250), min_size=1, max_size=8), min_size=1)


def parts_of(sizes: list[list[int]], first: int) -> list[ItemRun]:
    """Return parts with items of these sizes. Rows have consecutive numbers, and each part its own position."""
    parts = []
    for part in sizes:
        rows = np.arange(first, first + len(part))
        parts.append(ItemRun(rows, np.array(part), None, is_free=True, data=None, position=1000 * first))
        first += len(part)
    return parts


def rows_of(run: PackedRun) -> list[int]:
    return [row for part in run.parts for row in part.rows.tolist()]


@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from([A0, A1, B0]), sizes_of_parts, min_size=1))
def test_pack_rows_keeps_all_rows_in_order_within_the_limits(queues: dict[QueueKey, list[list[int]]]) -> None:
    spool = {queue: parts_of(sizes, 1000 * at) for at, (queue, sizes) in enumerate(queues.items())}
    blobs = pack_rows(spool, LIMIT)
    for queue, parts in spool.items():
        runs = [run for blob in blobs for run in blob.runs if run.queue == queue]
        assert [row for run in runs for row in rows_of(run)] == [row for part in parts for row in part.rows.tolist()]
    for blob in blobs:
        at = 0
        for run in blob.runs:
            assert (run.begin, run.queue.broker, run.rows) == (at, blob.broker, len(rows_of(run)))
            assert run.size == sum(int(part.sizes.sum()) for part in run.parts)
            assert run.size <= LIMIT or run.rows == 1
            at += run.size
        assert blob.size == at
        assert blob.size <= LIMIT or len(blob.runs) == blob.runs[0].rows == 1
    assert len({blob.first_row for blob in blobs}) == len(blobs)


@settings(max_examples=30)
@given(sizes_of_parts)
def test_runs_are_as_long_as_the_limit_allows(sizes: list[list[int]]) -> None:
    runs = [run for blob in pack_rows({A0: parts_of(sizes, 0)}, LIMIT) for run in blob.runs]
    firsts = [int(run.parts[0].sizes[0]) for run in runs]
    assert all(run.size + first > LIMIT for run, first in zip(runs, firsts[1:], strict=False))


def test_the_small_runs_of_a_broker_share_blobs() -> None:
    spool = {A0: parts_of([[60, 60]], 0), B0: parts_of([[30]], 10), A1: parts_of([[40]], 20)}
    found = [[(run.queue, run.begin, rows_of(run)) for run in blob.runs] for blob in pack_rows(spool, LIMIT)]
    assert found == [[(A0, 0, [0])], [(A0, 0, [1]), (A1, 60, [20])], [(B0, 0, [10])]]
