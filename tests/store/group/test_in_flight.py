"""The offset to commit is the smallest message that is not finished, or one beyond the newest."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmq_spark.store.group.in_flight import InFlight, raise_offset


def holding(*offsets: int) -> InFlight:
    queue = InFlight()
    queue.put(offsets)
    return queue


@pytest.mark.parametrize(
    ("held", "removed", "results"),
    [
        (range(100, 105), [102, 100, 101, 103, 104], [100, 101, 103, 104, 105]),
        ([100, 105, 110], [110, 100, 105], [100, 105, 111]),
        ([], [7, 8], [None, None]),
        ([7], [7, 7], [8, None]),
        (range(100, 104), [[100, 101]], [102]),
        (range(100, 104), [101], [100]),
    ],
)
def test_what_is_committed_after_each_removal(held: Any, removed: list[Any], results: list[int | None]) -> None:
    queue = holding(*held)
    assert [queue.remove(offsets) for offsets in removed] == results


def test_a_message_that_is_not_at_work_is_passed_over() -> None:
    queue = holding(5, 6)
    assert queue.remove([1, 5, 9]) == 6
    assert queue.remove([5]) == 6
    assert queue.remove([]) == 6
    assert len(queue) == 1


def test_a_message_that_is_finished_twice_counts_once() -> None:
    queue = holding(5, 6)
    assert queue.remove([5, 5]) == 6
    assert len(queue) == 1


def test_what_is_finished_is_not_taken() -> None:
    queue = holding(5, 6, 7, 8)
    queue.remove([6])
    assert queue.take(2).tolist() == [5, 7]
    assert queue.remove([8]) == 9


def test_putting_a_message_again_changes_nothing() -> None:
    queue = holding(5, 6)
    assert queue.put([6, 5]) == 0
    assert queue.put([6, 7, 7]) == 1
    assert len(queue) == 3
    assert queue.remove([5, 6, 7]) == 8


def test_the_newest_is_the_last_that_was_new_as_in_java() -> None:
    queue = holding(5, 3, 5)
    assert queue.remove([3, 5]) == 4
    assert queue.put([2]) == 1
    assert queue.remove([2]) == 3


def test_the_span_is_from_the_oldest_to_the_newest_at_work() -> None:
    queue = InFlight()
    assert queue.span == 0
    queue.put([10, 20, 2010])
    assert queue.span == 2000
    queue.remove([10])
    assert queue.span == 1990
    queue.remove([2010])
    assert queue.span == 0
    assert len(queue) == 1


def test_in_order_the_commit_is_one_beyond_what_was_taken() -> None:
    queue = holding(5, 6, 7)
    assert queue.take(2).tolist() == [5, 6]
    assert (len(queue), queue.taken_count) == (1, 2)
    assert queue.commit() == 7
    assert queue.take(2).tolist() == [7]
    assert queue.commit() == 8
    assert queue.commit() is None
    assert queue.take(1).tolist() == []


def test_a_batch_that_is_suspended_commits_nothing_and_comes_again() -> None:
    queue = holding(5, 6, 7)
    queue.give_back(queue.take(2))
    assert queue.commit() is None
    assert queue.take(3).tolist() == [5, 6, 7]


def test_without_automatic_commits_taken_batches_add_up_until_a_commit_or_a_rollback() -> None:
    queue = holding(5, 6, 7, 8)
    queue.take(1)
    queue.take(1)
    queue.roll_back()
    assert queue.taken_count == 0
    assert queue.take(1).tolist() == [5]
    assert queue.take(2).tolist() == [6, 7]
    queue.give_back([7, 99])
    assert queue.commit() == 7
    assert queue.take(9).tolist() == [7, 8]


def test_a_million_at_once_and_one_by_one() -> None:
    queue = InFlight()
    assert queue.put(np.arange(1_000_000)) == 1_000_000
    assert queue.remove(np.arange(1, 999_999)) == 0
    assert queue.remove([0]) == 999_999
    queue.put(range(1_000_000, 1_001_000))
    assert [queue.remove([offset]) for offset in range(999_999, 1_001_000)] == list(range(1_000_000, 1_001_001))


class TreeMaps:
    """ProcessQueue line by line: what the arrays must agree with."""

    def __init__(self) -> None:
        self.tree: set[int] = set()
        self.consuming: set[int] = set()
        self.newest = -1

    def put(self, offsets: list[int]) -> int:
        count = 0
        for offset in offsets:
            if offset not in self.tree:
                self.tree.add(offset)
                self.newest = offset
                count += 1
        return count

    def remove(self, offsets: list[int]) -> int | None:
        if not self.tree:
            return None
        self.tree -= set(offsets)
        return min(self.tree) if self.tree else self.newest + 1

    def take(self, count: int) -> list[int]:
        first = sorted(self.tree)[:count]
        self.tree -= set(first)
        self.consuming |= set(first)
        return first

    def commit(self) -> int | None:
        last = max(self.consuming, default=None)
        self.consuming.clear()
        return None if last is None else last + 1

    def roll_back(self) -> None:
        self.tree |= self.consuming
        self.consuming.clear()

    def give_back(self, offsets: list[int]) -> None:
        self.tree |= self.consuming & set(offsets)
        self.consuming -= set(offsets)


# Mostly runs, as pulls and tasks have them, so that moves meet; long ones, so that finished ones are taken out.
runs = st.tuples(st.integers(0, 200), st.integers(1, 100)).map(lambda run: list(range(run[0], run[0] + run[1])))
some_offsets = st.one_of(runs, runs, st.lists(st.integers(0, 20), max_size=30))
steps = st.one_of(
    st.tuples(st.sampled_from(["put", "remove", "give_back"]), some_offsets),
    st.tuples(st.just("take"), st.integers(1, 20)),
    st.tuples(st.sampled_from(["commit", "roll_back"]), st.none()),
)


@given(st.lists(steps, max_size=25))
def test_the_arrays_do_what_the_trees_of_java_do(moves: list[tuple[str, Any]]) -> None:
    arrays, trees = InFlight(), TreeMaps()
    for name, argument in moves:
        arguments = [] if argument is None else [argument]
        done, expected = getattr(arrays, name)(*arguments), getattr(trees, name)(*arguments)
        assert (done.tolist() if isinstance(done, np.ndarray) else done) == expected
        assert len(arrays) == len(trees.tree)
        assert arrays.taken_count == len(trees.consuming)
        assert arrays.span == (max(trees.tree) - min(trees.tree) if trees.tree else 0)


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=60, unique=True), st.randoms(use_true_random=False))
def test_a_crash_at_any_moment_delivers_every_unfinished_message_again(offsets: list[int], chance: Any) -> None:
    queue, stored = holding(*sorted(offsets)), None
    unfinished = set(offsets)
    chance.shuffle(offsets)
    for offset in offsets:
        unfinished.discard(offset)
        stored = raise_offset(stored, queue.remove([offset]))
        assert stored is not None
        assert all(left >= stored for left in unfinished)
    assert stored == max(offsets) + 1


@pytest.mark.parametrize(
    ("stored", "result", "is_dropped", "after"),
    [
        (None, 7, False, 7),
        (7, 9, False, 9),
        (9, 7, False, 9),
        (9, None, False, 9),
        (None, None, False, None),
        (7, 9, True, 7),
        (0, 0, False, 0),
    ],
)
def test_the_stored_offset_never_goes_back_and_a_dropped_queue_stores_nothing(
    stored: int | None, result: int | None, is_dropped: bool, after: int | None
) -> None:
    assert raise_offset(stored, result, is_dropped=is_dropped) == after
