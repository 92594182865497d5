"""Suspended queues, as a task of an orderly listener gets them."""

import pytest

from rmq_spark.datasource.spark.listener import History
from rmq_spark.datasource.spark.listener_sink import history_of
from rmq_spark.store.model import CommitKey, Suspension

STOPPED = Suspension(5, 0, {5: 2}, frozenset({2}), frozenset({4}), 3, "query", 7)


@pytest.mark.parametrize(
    ("key", "is_shared", "counts_from_resume", "is_repeated"),
    [
        (CommitKey("query", 7), False, False, True),
        (CommitKey("query", 7), True, False, True),
        (CommitKey("query", 8), False, True, False),
        (CommitKey("query", 8), True, False, False),
        (CommitKey("other", 7), False, True, False),
        (CommitKey("other", 7), True, False, False),
    ],
)
@pytest.mark.parametrize(
    ("is_settled", "sent", "pending"), [(True, {2, 4}, set()), (False, {2}, {4})], ids=["settled", "not settled"]
)
def test_who_repeats_a_batch_or_shares_a_queue_is_told_all_and_who_begins_anew_only_from_the_stop_on(
    key: CommitKey,
    is_shared: bool,
    counts_from_resume: bool,
    is_repeated: bool,
    is_settled: bool,
    sent: set[int],
    pending: set[int],
) -> None:
    assert history_of(STOPPED, key, is_settled=is_settled, is_shared=is_shared) == History(
        5,
        {5: 2},
        frozenset(sent),
        frozenset(pending),
        counts_from_resume,
        is_repeated,
        key.query_id != "query",
        STOPPED.number,
    )
