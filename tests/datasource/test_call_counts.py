"""Counts and times of listener calls: sums over tasks, percentiles, and the texts that show them."""

import pickle
from random import Random
from typing import Any

import pytest

from rmq_spark.datasource.spark.batch_counts import BatchCounts
from rmq_spark.datasource.spark.call_counts import CallCounts
from rmq_spark.datasource.spark.listener import Answer


def counts_of(*times_ms: float, begin_ms: int | None = None, end_ms: int | None = None) -> CallCounts:
    """Return the counts of calls with two rows each."""
    counts = CallCounts(begin_ms=begin_ms, end_ms=end_ms)
    for time_ms in times_ms:
        counts.add(2, Answer(2, took_s=time_ms / 1000))
    return counts


def test_calls_are_counted_with_their_rows() -> None:
    counts = CallCounts()
    counts.add(3, Answer(3, took_s=0.05))
    counts.add(3, Answer(1, error="ack_index", took_s=0.07))
    counts.add(1, Answer(0, error="late", took_s=9.5, is_late=True))
    assert (counts.rows, counts.calls, counts.failed_rows, counts.timed_out_calls) == (7, 3, 3, 1)
    assert counts.max_ms == 9_500


@pytest.mark.parametrize("share", [0.01, 0.5, 0.95, 1.0])
def test_a_percentile_is_within_five_percent(share: float) -> None:
    random = Random(1)
    times = sorted(random.lognormvariate(3, 2) for _ in range(1000))
    exact = times[max(int(1000 * share) - 1, 0)]
    assert counts_of(*times).percentile_ms(share) == pytest.approx(exact, rel=0.05)


def test_no_percentile_is_above_the_longest_time_and_times_of_nothing_are_counted() -> None:
    assert counts_of(50.0).percentile_ms(0.5) <= 50.0
    assert counts_of(0.0, 0.0).percentile_ms(0.95) == 0.0
    assert CallCounts().percentile_ms(0.5) == 0.0


def test_the_sum_of_tasks_is_that_of_all_calls_and_begins_with_the_first() -> None:
    one, other = counts_of(1, 100, begin_ms=5_000, end_ms=6_000), counts_of(10, begin_ms=4_500, end_ms=5_500)
    both = sum((one, other, CallCounts()), CallCounts())
    assert both == counts_of(1, 10, 100, begin_ms=4_500, end_ms=6_000)
    assert both.rows_per_s == 4.0
    assert CallCounts().rows_per_s == 0.0
    assert counts_of(1, begin_ms=7, end_ms=7).rows_per_s == 2_000


def test_the_texts_of_counts_have_all_numbers() -> None:
    counts = counts_of(10, 20, begin_ms=0, end_ms=1_000)
    counts.add(1, Answer(0, took_s=2.0, is_late=True))
    assert counts.as_dict() == {
        "rows": 5,
        "calls": 3,
        "failedRows": 1,
        "timedOutCalls": 1,
        "rowsPerSecond": 5.0,
        "callMs": {"p50": pytest.approx(20, rel=0.05), "p95": pytest.approx(2_000, rel=0.05), "max": 2_000.0},
    }
    text = str(counts)
    assert text.startswith("5 rows in 3 calls, 5.0 rows/s, 1 row failed, 1 call timed out; a call took p50 ")
    assert text.endswith(" ms, max 2e+03 ms")


class Context:
    """Makes accumulators that are not Spark's."""

    def accumulator(self, value: Any, param: Any) -> Any:
        return LocalAccumulator(value, param)


class LocalAccumulator:
    """As PySpark's: it pickles as a zero, and what is added to a copy comes to the first one later."""

    def __init__(self, value: Any, param: Any) -> None:
        self.value, self.param = value, param

    def __reduce__(self) -> Any:
        return LocalAccumulator, (self.param.zero(self.value), self.param)

    def add(self, term: Any) -> None:
        self.value = self.param.addInPlace(self.value, term)


def test_counts_of_tasks_are_reported_by_batch_and_in_all() -> None:
    made = BatchCounts(Context())
    assert made.report(5) is None
    for batch_id, time_ms in [(3, 10), (3, 20), (4, 30)]:
        in_task = pickle.loads(pickle.dumps(made))
        in_task.add(batch_id, counts_of(time_ms))
        made._accumulator.add(in_task._accumulator.value)
    assert made.report(2) is None
    third, fourth = made.report(3), made.report(9)
    assert third is not None
    assert fourth is not None
    assert (third["batchId"], third["calls"], third["total"]["calls"]) == (3, 2, 3)
    assert (fourth["batchId"], fourth["calls"], fourth["callMs"]["max"]) == (4, 1, 30)
    assert fourth["total"] == counts_of(10, 20, 30).as_dict()


def test_old_batches_are_forgotten_but_not_their_sum() -> None:
    made = BatchCounts(Context())
    for batch_id in range(1_000):
        made.add(batch_id, counts_of(10))
    assert made.report(500) is None
    last = made.report(999)
    assert last is not None
    assert (last["batchId"], last["total"]["calls"]) == (999, 1_000)
    assert len(made._accumulator.value) == 11
