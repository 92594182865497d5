"""The search for a time in a queue, over all small queues, with every hint."""

import bisect
import itertools

import pytest

from rmq_spark.store.cluster.time_search import TimeSearch
from rmq_spark.store.model import QueueBounds


def run(times: list[int], first: int, search: TimeSearch) -> int:
    """Answer the looks of a search. Messages below the queue offset `first` do not exist. Return the looks."""
    looks = 0
    while (offset := search.next_look()) is not None:
        looks += 1
        assert looks < 100
        if offset < first:
            search.note_expired(first)
            offset = first
        if offset < len(times):
            search.note(offset, times[offset])
    return looks


@pytest.mark.parametrize("size", range(6))
def test_search_finds_the_first_message_from_the_time_with_every_hint(size: int) -> None:
    for times in itertools.combinations_with_replacement(range(1, 4), size):
        for begin, time_ms in itertools.product(range(size + 1), range(5)):
            expected = max(bisect.bisect_left(times, time_ms), begin)
            for hint in (None, *range(size + 2)):
                search = TimeSearch(QueueBounds(begin, size), time_ms, hint)
                run(list(times), 0, search)
                assert search.found == expected, (times, begin, time_ms, hint)


@pytest.mark.parametrize("first", range(9))
def test_search_skips_expired_messages(first: int) -> None:
    times = [10, 20, 20, 30, 30, 30, 40, 50]
    for time_ms, hint in itertools.product(range(5, 60, 5), (None, *range(9))):
        search = TimeSearch(QueueBounds(0, 8), time_ms, hint)
        run(times, first, search)
        assert search.found == max(bisect.bisect_left(times, time_ms), first), (time_ms, hint)


@pytest.mark.parametrize(
    ("time_ms", "hint", "looks"),
    [(5000, 5000, 2), (10_000, 10_000, 1), (10_000, 9_999, 1), (5000, 4999, 2), (0, 0, 1)],
    ids=["5.3", "5.3 after the last", "4.9 after the last", "4.9 neighbour", "first"],
)
def test_search_needs_few_looks_with_a_good_hint(time_ms: int, hint: int, looks: int) -> None:
    search = TimeSearch(QueueBounds(0, 10_000), time_ms, hint)
    assert run(list(range(10_000)), 0, search) == looks
    assert search.found == time_ms


def test_search_leaves_a_run_of_equal_times_in_growing_steps() -> None:
    times = [1] * 5000 + [2] * 5000
    search = TimeSearch(QueueBounds(0, 10_000), 2, 9_000)
    assert run(times, 0, search) < 30
    assert search.found == 5000
