"""Ranges to tasks: exact cover, Kafka's rule for how many."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmq_spark.datasource.plan.splitting import (
    LEAST_SPLIT_MESSAGES,
    SHARED_BYTES,
    SHARED_MESSAGES,
    TaskLimits,
    make_tasks,
    split,
    split_ranges,
)
from rmq_spark.datasource.spark.key_selection import join_ranges
from rmq_spark.store.model import QueueKey, QueueRange

# No deadline: the machine may be busy. The same examples every time.
usual = settings(deadline=None, derandomize=True)


def ranges_of(*counts, begin=1000):
    return [QueueRange(QueueKey("orders", n), begin, begin + count) for n, count in enumerate(counts)]


def counts_of(pieces):
    return [(piece.queue.queue_id, piece.count) for piece in pieces]


def test_without_options_a_queue_is_a_task_and_an_empty_one_is_none() -> None:
    assert counts_of(split_ranges(ranges_of(5, 0, 7))) == [(0, 5), (2, 7)]


@usual
@given(st.lists(st.integers(0, 10_000), max_size=8), st.none() | st.integers(7, 500), st.none() | st.integers(1, 60))
def test_pieces_cover_the_ranges_exactly_in_order(counts, max_records, min_partitions) -> None:
    ranges = ranges_of(*counts)
    pieces = split_ranges(ranges, max_records, min_partitions)
    assert all(piece.count > 0 for piece in pieces)
    for part in ranges:
        own = [piece for piece in pieces if piece.queue == part.queue]
        edges = [part.begin] if part.count == 0 else [own[0].begin, *(piece.end for piece in own)]
        assert edges == sorted(edges)
        assert (edges[0], edges[-1]) == (part.begin, part.end)
        assert all(one.end == other.begin for one, other in pairwise(own))
    if max_records:
        assert all(piece.count <= max_records for piece in pieces)
    if min_partitions and sum(counts) >= 100 * min_partitions:
        assert len(pieces) >= min_partitions // 2  # "about": small ranges stay whole


@pytest.mark.parametrize(
    ("counts", "max_records", "min_partitions", "pieces"),
    [
        ((5,), None, 3, [(0, 1), (0, 2), (0, 2)]),
        ((5, 5), None, 1, [(0, 5), (1, 5)]),
        ((1, 5), None, 3, [(0, 1), (1, 2), (1, 3)]),
        ((10, 20), 5, None, [(0, 5), (0, 5), (1, 5), (1, 5), (1, 5), (1, 5)]),
        ((10, 20), 5, 3, [(0, 5), (0, 5), (1, 5), (1, 5), (1, 5), (1, 5)]),
        ((4, 4), 4, 4, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ((1, 1), None, 10, [(0, 1), (1, 1)]),
        ((2, 900), None, 4, [(0, 2), (1, 300), (1, 300), (1, 300)]),
        ((6, 20), 5, 7, [(0, 3), (0, 3), (1, 4), (1, 4), (1, 4), (1, 4), (1, 4)]),
        ((6, 100), 20, 8, [(0, 6), *[(1, 14)] * 5, *[(1, 15)] * 2]),
        ((6, 100), 5, 23, [(0, 3), (0, 3), *[(1, 4)] * 10, *[(1, 5)] * 12]),
        ((100_000, 1, 1), None, 5, [(0, 33_333), (0, 33_333), (0, 33_334), (1, 1), (2, 1)]),
    ],
)
def test_the_biggest_are_split_first(counts, max_records, min_partitions, pieces) -> None:
    assert sorted(counts_of(split_ranges(ranges_of(*counts), max_records, min_partitions))) == pieces


@usual
@given(st.integers(1, 10_000), st.integers(1, 50))
def test_pieces_of_one_range_differ_by_one_at_most(count, parts) -> None:
    sizes = [piece.count for piece in split(ranges_of(count)[0], parts)]
    assert len(sizes) == min(parts, count)
    assert max(sizes) - min(sizes) <= 1


@usual
@given(
    st.dictionaries(st.integers(0, 3), st.sets(st.integers(0, 60)), max_size=4),
    st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 9),
    st.booleans(),
)
def test_tasks_cover_scattered_ranges_in_order(found, most, least, are_apart) -> None:
    parts = [QueueRange(QueueKey("orders", n), one, one + 1) for n, ones in found.items() for one in sorted(ones)]
    joined = join_ranges(parts)
    assert all(one.queue != other.queue or one.end < other.begin for one, other in pairwise(joined))
    tasks = make_tasks(joined, TaskLimits(most, least, 4, are_apart))
    read = [(piece.queue, offset) for task in tasks for piece in task for offset in range(piece.begin, piece.end)]
    assert read == sorted((part.queue, part.begin) for part in parts)
    assert all(task for task in tasks)
    assert all(sum(piece.count for piece in task) <= most for task in tasks if most)
    assert all(len(task) == 1 for task in tasks if are_apart)
    assert len(tasks) >= min(least or 1, len(joined))
    assert least is not None or most is not None or are_apart or len(tasks) <= 1


HALF, FULL = SHARED_MESSAGES // 2, SHARED_MESSAGES


@pytest.mark.parametrize(
    ("counts", "limits", "tasks"),
    [
        ([1] * 5, TaskLimits(), [[1] * 5]),
        ([HALF, HALF, 1, HALF], TaskLimits(), [[HALF, HALF], [1, HALF]]),
        ([FULL, 1, 1, FULL + 1], TaskLimits(), [[FULL], [1, 1], [FULL + 1]]),
        ([5000] * 3, TaskLimits(cores=8), [[5000, 5000], [5000]]),
        ([8000] * 4, TaskLimits(cores=2), [[8000, 8000], [8000, 8000]]),
        ([25_001, 25_001, 24_999, 24_999], TaskLimits(cores=2), [[25_001, 25_001], [24_999, 24_999]]),
        ([25_000] * 3, TaskLimits(cores=2), [[25_000, 25_000], [25_000]]),
        ([5, 5, 5], TaskLimits(max_records=10), [[5, 5], [5]]),
        ([5, 15, 5], TaskLimits(max_records=10), [[5], [7], [8], [5]]),
        ([5, 5, 5, 5], TaskLimits(min_partitions=3), [[5, 5], [5], [5]]),
        ([5] * 6, TaskLimits(min_partitions=2), [[5] * 3, [5] * 3]),
        ([5, 5], TaskLimits(min_partitions=4), [[2], [3], [2], [3]]),
        ([5, 0, 5], TaskLimits(are_queues_apart=True), [[5], [5]]),
        ([8], TaskLimits(max_records=4, are_queues_apart=True), [[4], [4]]),
        ([5] * 6, TaskLimits(are_queues_whole=True), [[5] * 6]),
        ([5] * 6, TaskLimits(cores=2, are_queues_whole=True), [[5] * 3, [5] * 3]),
        ([5, 0, 5], TaskLimits(cores=8, are_queues_whole=True), [[5], [5]]),
        ([5] * 6, TaskLimits(cores=2, min_partitions=3, are_queues_whole=True), [[5, 5]] * 3),
        ([5, 5], TaskLimits(min_partitions=9, are_queues_whole=True), [[5], [5]]),
        ([4000] * 4, TaskLimits(are_queues_whole=True), [[4000, 4000], [4000, 4000]]),
        ([10 * FULL, 1, 1], TaskLimits(cores=2, are_queues_whole=True), [[10 * FULL], [1, 1]]),
    ],
)
def test_ranges_share_a_task_as_far_as_the_options_allow(counts, limits, tasks) -> None:
    found = make_tasks(ranges_of(*counts), limits)
    assert [[piece.count for piece in task] for task in found] == tasks


def test_ranges_with_large_records_do_not_share_a_task() -> None:
    ranges = ranges_of(3, 3, 3, 3)
    sizes = dict(zip(ranges, (SHARED_BYTES - 1, 1, 1, SHARED_BYTES), strict=True))
    assert make_tasks(ranges, TaskLimits(), sizes) == [ranges[:2], ranges[2:3], ranges[3:]]


@pytest.mark.parametrize(
    ("counts", "cores", "pieces"),
    [
        ([8], 4, [2] * 4),
        ([2], 4, [1, 1]),
        ([1], 4, [1]),
        ([2, 2], 4, [1] * 4),
        ([2, 2], 2, [2, 2]),
        ([28, 4], 2, [14, 14, 4]),
        ([4, 4, 4, 4, 4], 4, [4] * 5),
    ],
)
def test_large_ranges_are_split_until_each_core_has_work(counts, cores, pieces) -> None:
    unit = LEAST_SPLIT_MESSAGES
    ranges = ranges_of(*(count * unit for count in counts))
    assert [task[0].count for task in make_tasks(ranges, TaskLimits(cores=cores))] == [one * unit for one in pieces]
    apart = make_tasks(ranges, TaskLimits(cores=cores, are_queues_apart=True))
    whole = make_tasks(ranges, TaskLimits(cores=cores, are_queues_whole=True))
    least = make_tasks(ranges, TaskLimits(cores=cores, min_partitions=1))
    assert apart == whole == least == [[part] for part in ranges]
