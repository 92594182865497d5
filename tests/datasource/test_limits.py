"""Limits of a micro-batch: exact sums, shares by backlog, and nobody starves."""

from bisect import bisect_right
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmq_spark.datasource.limits import QueueRange, must_wait, share_messages, take_limited
from rmq_spark.datasource.options import Limits
from rmq_spark.store.units import QueueKey

# No deadline: a busy machine is no bug. The same examples every time.
usual = settings(deadline=None, derandomize=True)


def key(number):
    return QueueKey("orders", number)


def backlog_of(counts, begin=0):
    return [QueueRange(key(n), begin, begin + count) for n, count in enumerate(counts) if count]


class Sizes:
    """Records of known sizes in bytes, by queue id, from queue offset 0 on; counts what is asked."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.measured = 0

    def measure(self, part):
        total = sum(self.sizes[part.queue.queue_id][part.begin : part.end])
        self.measured += total
        return total

    def fit(self, part, max_bytes):
        sums = list(accumulate(self.sizes[part.queue.queue_id][part.begin : part.end]))
        return part.begin + bisect_right(sums, max_bytes)


def take(backlog, turn=None, sizes=None, **limits):
    sizes = sizes or Sizes({})
    return take_limited(backlog, Limits(**limits), turn, sizes.measure, sizes.fit)


def counts_of(backlog, found):
    return [found.ends[part.queue] - part.begin for part in backlog]


def test_without_limit_everything_is_taken() -> None:
    backlog = backlog_of([5, 7], begin=100)
    assert take(backlog).ends == {key(0): 105, key(1): 107}


@pytest.mark.parametrize(
    ("counts", "limit", "shares"),
    [
        ([100, 10, 0], 50, [45, 5]),
        ([100, 10, 0], 110, [100, 10]),
        ([100, 10, 0], 1000, [100, 10]),
        ([1_000_000, 1], 10, [9, 1]),
        ([1_000_000, 1, 1, 1], 4, [1, 1, 1, 1]),
        ([50, 50, 50], 100, [34, 33, 33]),
        ([3], 2, [2]),
    ],
)
def test_messages_are_shared_by_backlog_with_one_at_least(counts, limit, shares) -> None:
    backlog = backlog_of(counts)
    found = take(backlog, max_offsets=limit)
    assert counts_of(backlog, found) == shares
    assert found.turn is None


@usual
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=30), st.integers(1, 10**6), st.integers(0, 10**9))
def test_the_sum_is_exactly_the_limit_or_all_there_is(counts, limit, begin) -> None:
    backlog = backlog_of(counts, begin)
    shares = counts_of(backlog, take(backlog, max_offsets=limit))
    assert sum(shares) == min(limit, sum(counts))
    assert all(0 <= share <= count for share, count in zip(shares, counts, strict=True))
    if limit >= len(counts):
        assert min(shares) >= 1
        spare = min(limit, sum(counts)) - len(counts)
        rest = sum(counts) - len(counts)
        for share, count in zip(shares, counts, strict=True):
            assert abs((share - 1) * rest - (count - 1) * spare) <= max(rest, 1)  # within one of its exact share


@usual
@given(
    st.lists(st.integers(0, 30), min_size=2, max_size=12),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 9)), max_size=20),
)
def test_with_fewer_than_one_message_a_queue_all_take_turns(counts, limit, arrivals) -> None:
    """Whatever arrives meanwhile, a queue with a backlog waits at most for one round of all queues."""
    ends = dict(enumerate(counts))
    positions = dict.fromkeys(ends, 0)
    turn, waited = None, dict.fromkeys(ends, 0)
    for step in range(60):
        if step < len(arrivals) and arrivals[step][0] in ends:
            ends[arrivals[step][0]] += arrivals[step][1]
        backlog = [QueueRange(key(n), positions[n], ends[n]) for n in ends if ends[n] > positions[n]]
        found = take(backlog, turn, max_offsets=limit)
        taken = {part.queue.queue_id: found.ends[part.queue] - part.begin for part in backlog}
        assert sum(taken.values()) == min(limit, sum(part.count for part in backlog))
        for number, count in taken.items():
            positions[number] += count
            waited[number] = 0 if count else waited[number] + 1
            assert waited[number] <= len(ends) // limit + 1
        turn = found.turn


def test_a_turn_is_a_pure_function_of_what_came_before() -> None:
    backlog = backlog_of([5, 5, 5])
    first = take(backlog, None, max_offsets=2)
    assert first == take(backlog, None, max_offsets=2)
    assert (first.ends, first.turn) == ({key(0): 1, key(1): 1, key(2): 0}, key(1))
    second = take(backlog_of([5, 5, 5]), first.turn, max_offsets=2)
    assert (second.ends, second.turn) == ({key(0): 1, key(1): 0, key(2): 1}, key(0))


def test_a_turn_may_name_a_queue_that_is_gone() -> None:
    assert take(backlog_of([5, 0, 5]), key(1), max_offsets=1).ends == {key(0): 0, key(2): 1}
    assert take(backlog_of([5, 5]), key(9), max_offsets=1).ends == {key(0): 1, key(1): 0}


def test_the_limit_of_each_queue_caps_before_the_shares() -> None:
    backlog = backlog_of([100, 100, 3])
    assert counts_of(backlog, take(backlog, max_offsets_per_queue=10)) == [10, 10, 3]
    assert counts_of(backlog, take(backlog, max_offsets_per_queue=10, max_offsets=13)) == [6, 5, 2]
    assert counts_of(backlog, take(backlog, max_offsets_per_queue=1, max_offsets=100)) == [1, 1, 1]


def test_bytes_are_shared_by_bytes() -> None:
    sizes = Sizes({0: [10] * 100, 1: [30] * 100})
    backlog = backlog_of([100, 100])
    found = take(backlog, sizes=sizes, max_bytes=400)
    assert counts_of(backlog, found) == [19, 6]  # 190 + 180 bytes: equal, since more than the limit lies behind each
    assert counts_of(backlog, take(backlog, sizes=sizes, max_bytes=10_000)) == [100, 100]


def test_a_record_bigger_than_the_limit_is_taken_alone() -> None:
    sizes = Sizes({0: [1000, 10], 1: [10, 10]})
    backlog = backlog_of([2, 2])
    found = take(backlog, sizes=sizes, max_bytes=50)
    assert counts_of(backlog, found) == [1, 0]
    assert found.turn == key(0)
    second = [QueueRange(key(0), 1, 2), QueueRange(key(1), 0, 2)]
    assert counts_of(second, take(second, found.turn, sizes=sizes, max_bytes=50)) == [1, 2]


def test_a_record_that_does_not_fit_any_more_is_first_the_next_time() -> None:
    sizes = Sizes({0: [10] * 9, 1: [95] * 9, 2: [10] * 9})
    backlog = backlog_of([9, 9, 9])
    found = take(backlog, sizes=sizes, max_bytes=100)
    assert counts_of(backlog, found) == [9, 0, 0]
    assert found.turn == key(0)
    rest = backlog[1:]
    second = take(rest, found.turn, sizes=sizes, max_bytes=100)
    assert counts_of(rest, second) == [1, 0]


@usual
@given(
    st.lists(st.lists(st.integers(91, 500), min_size=1, max_size=30), min_size=1, max_size=6),
    st.integers(91, 5000),
    st.none() | st.integers(1, 40),
)
def test_bytes_stay_within_the_limit_and_all_is_read_in_the_end(sizes_by_queue, limit, max_offsets) -> None:
    sizes = Sizes(dict(enumerate(sizes_by_queue)))
    positions = dict.fromkeys(sizes.sizes, 0)
    turn, waited = None, dict.fromkeys(positions, 0)
    while True:
        backlog = [
            QueueRange(key(n), positions[n], len(sizes.sizes[n]))
            for n in positions
            if positions[n] < len(sizes.sizes[n])
        ]
        if not backlog:
            break
        found = take(backlog, turn, sizes=sizes, max_bytes=limit, max_offsets=max_offsets)
        taken = [QueueRange(part.queue, part.begin, found.ends[part.queue]) for part in backlog]
        total = sum(sizes.measure(part) for part in taken)
        count = sum(part.count for part in taken)
        assert count >= 1
        assert total <= limit or count == 1
        assert max_offsets is None or count <= max_offsets
        for part in taken:
            number = part.queue.queue_id
            waited[number] = 0 if part.count else waited[number] + 1
            assert waited[number] <= len(positions)
            positions[number] = part.end
        turn = found.turn


def test_a_limit_of_bytes_measures_no_more_of_a_queue_than_the_limit() -> None:
    sizes = Sizes({0: [100] * 100_000, 1: [100] * 5})
    take(backlog_of([100_000, 5]), sizes=sizes, max_bytes=1000)
    assert sizes.measured <= 4 * 1000


def test_shares_of_one_message_a_queue_go_by_queue_order() -> None:
    assert [part.queue for part in share_messages(backlog_of([9] * 4), 2, key(2))] == [key(3), key(0)]


@pytest.mark.parametrize(
    ("new", "waited_ms", "waits"),
    [(0, 0, True), (9, 59_999, True), (10, 0, False), (9, 60_000, False), (0, 60_000, False)],
)
def test_a_minimum_waits_for_messages_or_for_the_delay(new, waited_ms, waits) -> None:
    assert must_wait(new, Limits(min_offsets=10, max_delay_ms=60_000), waited_ms) is waits


def test_without_a_minimum_nothing_waits() -> None:
    assert not must_wait(0, Limits(), 0)
