"""limits: exact sums, shares by backlog, and no queue starves."""

from bisect import bisect_right
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmq_spark.datasource.options.read_options import Limits
from rmq_spark.datasource.plan.limits import must_wait, share_messages, take_limited
from rmq_spark.store.model import QueueKey, QueueRange

# No deadline, as the machine may be busy. The same examples every time.
usual = settings(deadline=None, derandomize=True)


def key(number):
    return QueueKey("orders", number)


def backlog_of(counts, begin=0):
    return [QueueRange(key(n), begin, begin + count) for n, count in enumerate(counts) if count]


class Sizes:
    """Sizes of records in bytes by queue id, from queue offset 0; counts the bytes that are measured."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.measured = 0

    def measure(self, parts):
        found = {part: sum(self.sizes[part.queue.queue_id][part.begin : part.end]) for part in parts}
        self.measured += sum(found.values())
        return found

    def fit(self, max_bytes):
        return {part: part.begin + bisect_right(self._sums(part), maximum) for part, maximum in max_bytes.items()}

    def _sums(self, part):
        return list(accumulate(self.sizes[part.queue.queue_id][part.begin : part.end]))


def take(backlog, cursor=None, sizes=None, **limits):
    sizes = sizes or Sizes({})
    return take_limited(backlog, Limits(**limits), cursor, sizes)


def counts_of(backlog, found):
    return [found.ends[part.queue] - part.begin for part in backlog]


def test_take_limited_takes_all_without_a_limit() -> None:
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
def test_max_offsets_is_divided_by_backlog_with_at_least_one_each(counts, limit, shares) -> None:
    backlog = backlog_of(counts)
    found = take(backlog, max_offsets=limit)
    assert counts_of(backlog, found) == shares
    assert found.cursor is None


@usual
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=30), st.integers(1, 10**6), st.integers(0, 10**9))
def test_max_offsets_is_reached_exactly_or_the_backlog_is_taken(counts, limit, begin) -> None:
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
def test_max_offsets_below_the_number_of_queues_is_served_round_robin(counts, limit, arrivals) -> None:
    """A queue with a backlog waits at most for one round of all queues, whatever messages arrive."""
    ends = dict(enumerate(counts))
    positions = dict.fromkeys(ends, 0)
    cursor, waited = None, dict.fromkeys(ends, 0)
    for step in range(60):
        if step < len(arrivals) and arrivals[step][0] in ends:
            ends[arrivals[step][0]] += arrivals[step][1]
        backlog = [QueueRange(key(n), positions[n], ends[n]) for n in ends if ends[n] > positions[n]]
        found = take(backlog, cursor, max_offsets=limit)
        taken = {part.queue.queue_id: found.ends[part.queue] - part.begin for part in backlog}
        assert sum(taken.values()) == min(limit, sum(part.count for part in backlog))
        for number, count in taken.items():
            positions[number] += count
            waited[number] = 0 if count else waited[number] + 1
            assert waited[number] <= len(ends) // limit + 1
        cursor = found.cursor


def test_cursor_depends_on_backlog_and_previous_cursor_only() -> None:
    backlog = backlog_of([5, 5, 5])
    first = take(backlog, None, max_offsets=2)
    assert first == take(backlog, None, max_offsets=2)
    assert (first.ends, first.cursor) == ({key(0): 1, key(1): 1, key(2): 0}, key(1))
    second = take(backlog_of([5, 5, 5]), first.cursor, max_offsets=2)
    assert (second.ends, second.cursor) == ({key(0): 1, key(1): 0, key(2): 1}, key(0))


def test_cursor_may_be_a_queue_that_no_longer_exists() -> None:
    assert take(backlog_of([5, 0, 5]), key(1), max_offsets=1).ends == {key(0): 0, key(2): 1}
    assert take(backlog_of([5, 5]), key(9), max_offsets=1).ends == {key(0): 1, key(1): 0}


def test_max_offsets_per_queue_applies_before_the_division() -> None:
    backlog = backlog_of([100, 100, 3])
    assert counts_of(backlog, take(backlog, max_offsets_per_queue=10)) == [10, 10, 3]
    assert counts_of(backlog, take(backlog, max_offsets_per_queue=10, max_offsets=13)) == [6, 5, 2]
    assert counts_of(backlog, take(backlog, max_offsets_per_queue=1, max_offsets=100)) == [1, 1, 1]


def test_max_bytes_is_divided_by_bytes() -> None:
    sizes = Sizes({0: [10] * 100, 1: [30] * 100})
    backlog = backlog_of([100, 100])
    found = take(backlog, sizes=sizes, max_bytes=400)
    assert counts_of(backlog, found) == [19, 6]  # 190 + 180 bytes: equal, as each backlog exceeds the limit
    assert counts_of(backlog, take(backlog, sizes=sizes, max_bytes=10_000)) == [100, 100]


def test_max_bytes_takes_a_larger_record_alone() -> None:
    sizes = Sizes({0: [1000, 10], 1: [10, 10]})
    backlog = backlog_of([2, 2])
    found = take(backlog, sizes=sizes, max_bytes=50)
    assert counts_of(backlog, found) == [1, 0]
    assert found.cursor == key(0)
    second = [QueueRange(key(0), 1, 2), QueueRange(key(1), 0, 2)]
    assert counts_of(second, take(second, found.cursor, sizes=sizes, max_bytes=50)) == [1, 2]


def test_max_bytes_begins_with_the_record_that_did_not_fit() -> None:
    sizes = Sizes({0: [10] * 9, 1: [95] * 9, 2: [10] * 9})
    backlog = backlog_of([9, 9, 9])
    found = take(backlog, sizes=sizes, max_bytes=100)
    assert counts_of(backlog, found) == [9, 0, 0]
    assert found.cursor == key(0)
    rest = backlog[1:]
    second = take(rest, found.cursor, sizes=sizes, max_bytes=100)
    assert counts_of(rest, second) == [1, 0]


@usual
@given(
    st.lists(st.lists(st.integers(91, 500), min_size=1, max_size=30), min_size=1, max_size=6),
    st.integers(91, 5000),
    st.none() | st.integers(1, 40),
)
def test_max_bytes_is_kept_and_all_messages_are_read(sizes_by_queue, limit, max_offsets) -> None:
    sizes = Sizes(dict(enumerate(sizes_by_queue)))
    positions = dict.fromkeys(sizes.sizes, 0)
    cursor, waited = None, dict.fromkeys(positions, 0)
    while True:
        backlog = [
            QueueRange(key(n), positions[n], len(sizes.sizes[n]))
            for n in positions
            if positions[n] < len(sizes.sizes[n])
        ]
        if not backlog:
            break
        found = take(backlog, cursor, sizes=sizes, max_bytes=limit, max_offsets=max_offsets)
        taken = [QueueRange(part.queue, part.begin, found.ends[part.queue]) for part in backlog]
        total = sum(sizes.measure(taken).values())
        count = sum(part.count for part in taken)
        assert count >= 1
        assert total <= limit or count == 1
        assert max_offsets is None or count <= max_offsets
        for part in taken:
            number = part.queue.queue_id
            waited[number] = 0 if part.count else waited[number] + 1
            assert waited[number] <= len(positions)
            positions[number] = part.end
        cursor = found.cursor


def test_max_bytes_measures_no_more_of_a_queue_than_the_limit() -> None:
    sizes = Sizes({0: [100] * 100_000, 1: [100] * 5})
    take(backlog_of([100_000, 5]), sizes=sizes, max_bytes=1000)
    assert sizes.measured <= 4 * 1000


def test_share_messages_serves_queues_in_order_after_the_cursor() -> None:
    assert [part.queue for part in share_messages(backlog_of([9] * 4), 2, key(2))] == [key(3), key(0)]


@pytest.mark.parametrize(
    ("new", "waited_ms", "waits"),
    [(0, 0, True), (9, 59_999, True), (10, 0, False), (9, 60_000, False), (0, 60_000, False)],
)
def test_must_wait_until_messages_or_delay(new, waited_ms, waits) -> None:
    assert must_wait(new, Limits(min_offsets=10, max_delay_ms=60_000), waited_ms) is waits


def test_must_wait_is_false_without_a_minimum() -> None:
    assert not must_wait(0, Limits(), 0)
