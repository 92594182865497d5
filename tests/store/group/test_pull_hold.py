"""Pulls that wait: which ones do, and which events wake them, as on time lines of a broker."""

from collections.abc import Callable

import pytest

from rmq_spark.store.group.pull_limits import LongPoll, hold_ms

FROM = 10
WANTED: Callable[[int, int], bool] = lambda begin, end: True  # noqa: E731
UNWANTED: Callable[[int, int], bool] = lambda begin, end: False  # noqa: E731


@pytest.mark.parametrize(
    ("may_suspend", "asks_to_suspend", "long_polling", "held_ms"),
    [
        (True, True, True, 15_000),
        (True, True, False, 1_000),
        (True, False, True, None),
        (True, False, False, None),
        (False, True, True, None),
        (False, False, False, None),
    ],
)
def test_a_pull_that_found_nothing_is_held_if_broker_and_client_want_it(
    may_suspend: bool, asks_to_suspend: bool, long_polling: bool, held_ms: int | None
) -> None:
    def held(*, is_not_found: bool) -> int | None:
        return hold_ms(
            15_000,
            is_not_found=is_not_found,
            may_suspend=may_suspend,
            asks_to_suspend=asks_to_suspend,
            long_polling=long_polling,
        )

    assert held(is_not_found=True) == held_ms
    assert held(is_not_found=False) is None


def woken_at_ms(
    arrives_ms: float, has_wanted: Callable[[int, int], bool], *, long_polling: bool = True, held_ms: float = 15_000
) -> int:
    """Look every 10 ms at a queue of which message 10 arrives at a time; return when the pull was woken."""
    hold = LongPoll(FROM, FROM, 0.0, held_ms, long_polling=long_polling)
    for now in range(0, 30_000, 10):
        if hold.is_woken(FROM + (now >= arrives_ms), now, has_wanted):
            return now
    raise AssertionError("never woken")


def test_a_message_that_is_wanted_wakes_at_once() -> None:
    assert woken_at_ms(2_000, WANTED) == 2_000


def test_a_message_that_is_not_wanted_wakes_at_the_next_check() -> None:
    assert woken_at_ms(2_000, UNWANTED) == 5_000
    assert woken_at_ms(7_000, UNWANTED) == 10_000


def test_without_a_message_the_time_has_to_be_over() -> None:
    assert 15_000 <= woken_at_ms(1e9, WANTED) <= 20_000


def test_without_long_polling_a_pull_waits_a_second() -> None:
    assert 1_000 <= woken_at_ms(1e9, WANTED, long_polling=False, held_ms=1_000) <= 2_000


def test_without_long_polling_nobody_tells_of_a_message() -> None:
    assert woken_at_ms(200, WANTED, long_polling=False, held_ms=5_000) == 1_000
    assert woken_at_ms(1_200, WANTED, long_polling=False, held_ms=5_000) == 2_000


def test_the_filter_is_asked_for_each_message_once() -> None:
    asked: list[tuple[int, int]] = []

    def has_wanted(begin: int, end: int) -> bool:
        asked.append((begin, end))
        return False

    hold = LongPoll(FROM, FROM, 0.0, 15_000)
    for now, max_offset in enumerate((10, 11, 11, 14, 14, 20)):
        assert not hold.is_woken(max_offset, now, has_wanted)
    assert asked == [(10, 11), (11, 14), (14, 20)]


def test_of_two_pulls_only_the_one_whose_filter_wants_the_message_is_woken() -> None:
    one, other = LongPoll(FROM, FROM, 0.0, 15_000), LongPoll(FROM, FROM, 0.0, 15_000)
    assert one.is_woken(11, 2_000, WANTED)
    assert not other.is_woken(11, 2_000, UNWANTED)
    assert not other.is_woken(11, 4_990, UNWANTED)


def test_an_end_that_is_not_beyond_the_pull_does_not_wake() -> None:
    hold = LongPoll(FROM, 4, 0.0, 15_000)
    assert not hold.is_woken(10, 100, WANTED)
    assert not hold.is_woken(10, 5_000, WANTED)
    assert hold.is_woken(11, 5_010, WANTED)


def test_a_queue_that_is_shorter_than_it_was_waits_until_the_time_is_over() -> None:
    hold = LongPoll(FROM, FROM, 0.0, 15_000)
    assert not any(hold.is_woken(3, now, WANTED) for now in range(0, 15_000, 500))
    assert hold.is_woken(3, 15_000, WANTED)


def test_a_pull_whose_file_is_gone_is_answered_at_the_next_check() -> None:
    hold = LongPoll(FROM, 700_000, 0.0, 15_000)
    assert not hold.is_woken(700_000, 4_999, WANTED)
    assert hold.is_woken(700_000, 5_000, WANTED)
