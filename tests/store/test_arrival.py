"""Waiting for news: how soon a look follows, when it ends, and what odd clocks and slow looks do to it."""

from collections.abc import Callable

import pytest

from rmq_spark.store.arrival import MAX_NAP_MS, MAX_SLOW_NAP_MS, MIN_NAP_MS, Polling, nap_ms, wait_for_arrival


class Clock:
    """Time goes by only in naps, and by `look_ms` in each look."""

    def __init__(self, look_ms: Callable[[int], float] = lambda look: 0.0) -> None:
        self.ms, self.naps, self.looks, self._look_ms = 0.0, [], 0, look_ms
        self.naps: list[float]

    def now_ms(self) -> float:
        return self.ms

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.naps.append(seconds * 1000)
        self.ms += seconds * 1000

    def moves_at(self, ms: float) -> Callable[[], bool]:
        def has_moved() -> bool:
            self.looks += 1
            self.ms += self._look_ms(self.looks)
            return self.ms >= ms

        return has_moved


def test_what_has_moved_already_is_seen_without_a_nap() -> None:
    clock = Clock()
    assert wait_for_arrival(clock.moves_at(0), 1_000, clock.now_ms, clock.sleep)
    assert clock.naps == []


def test_a_wait_whose_time_is_over_looks_once() -> None:
    clock = Clock()
    assert not wait_for_arrival(clock.moves_at(1), -5, clock.now_ms, clock.sleep)
    assert (clock.looks, clock.naps) == (1, [])


@pytest.mark.parametrize("moved_ms", [0.5, 3, 10, 100, 399, 1_000, 9_999])
def test_news_is_late_by_a_twentieth_of_the_wait_and_some_ms_at_most(moved_ms: float) -> None:
    clock = Clock()
    assert wait_for_arrival(clock.moves_at(moved_ms), 60_000, clock.now_ms, clock.sleep)
    late_ms = clock.ms - moved_ms
    assert 0 <= late_ms <= max(MIN_NAP_MS, min(moved_ms / 20, MAX_NAP_MS)) + 1e-6


def test_a_wait_without_news_ends_on_time_with_a_last_look() -> None:
    clock = Clock()
    assert not wait_for_arrival(clock.moves_at(1_000.5), 1_000, clock.now_ms, clock.sleep)
    assert clock.ms == pytest.approx(1_000)
    assert clock.looks == len(clock.naps) + 1
    at_the_end = Clock()
    assert wait_for_arrival(at_the_end.moves_at(999.999), 1_000, at_the_end.now_ms, at_the_end.sleep)


def test_looks_that_take_long_come_seldom() -> None:
    assert nap_ms(10_000, 5) == 100
    assert nap_ms(0, 5) == 100
    assert nap_ms(10_000, 500) == MAX_SLOW_NAP_MS
    slow = Clock(lambda look: 5.0)
    assert not wait_for_arrival(slow.moves_at(1e9), 10_000, slow.now_ms, slow.sleep)
    assert slow.looks * 5 <= 10_000 / 20 + 2 * 5


def test_one_slow_look_does_not_delay_the_next() -> None:
    clock = Clock(lambda look: 50.0 if look in (1, 9) else 0.0)
    assert not wait_for_arrival(clock.moves_at(1e9), 1_000, clock.now_ms, clock.sleep)
    assert max(clock.naps) <= MAX_NAP_MS


@pytest.mark.parametrize("step_ms", [0.0, -3.0], ids=["stands still", "runs back"])
def test_a_clock_that_does_not_go_on_ends_the_wait_all_the_same(step_ms: float) -> None:
    clock, slept = Clock(), []

    def sleep(seconds: float) -> None:
        slept.append(seconds * 1000)
        clock.ms += step_ms

    assert not wait_for_arrival(clock.moves_at(1e9), 500, clock.now_ms, sleep)
    assert sum(slept) == pytest.approx(500)


def test_a_clock_that_jumps_ends_the_wait() -> None:
    clock = Clock(lambda look: 1e7 if look == 5 else 0.0)
    assert not wait_for_arrival(clock.moves_at(1e12), 60_000, clock.now_ms, clock.sleep)
    assert clock.looks == 5


def test_an_error_of_a_look_ends_the_wait() -> None:
    def broken() -> bool:
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        wait_for_arrival(broken, 1_000, lambda: 0.0, lambda seconds: None)


def test_single_polls_pause_as_long_as_one_wait() -> None:
    once, single = Recorder(), Recorder()
    wait_for_arrival(lambda: False, 300, once.now_ms, once.sleep)
    polling = Polling(single.now_ms, single.sleep)
    while single.now_ms() < 300:
        polling.poll(lambda: False, 300 - single.now_ms())
    assert single.naps == pytest.approx(once.naps)
    assert single.naps[0] == MIN_NAP_MS
    assert max(single.naps) == MAX_NAP_MS


def test_single_polls_begin_anew_after_a_change() -> None:
    clock = Recorder()
    polling = Polling(clock.now_ms, clock.sleep)
    for _ in range(100):
        polling.poll(lambda: False, 1_000)
    assert clock.naps[-1] == MAX_NAP_MS
    assert polling.poll(lambda: True, 1_000)
    polling.poll(lambda: False, 1_000)
    assert clock.naps[-1] == MIN_NAP_MS


def test_single_polls_pause_longer_if_two_polls_in_a_row_are_slow() -> None:
    clock = Recorder()
    polling = Polling(clock.now_ms, clock.sleep)
    for poll_ms in (20, 0, 20, 20, 0):
        polling.poll(lambda poll_ms=poll_ms: clock.advance(poll_ms), 1_000)
    assert [nap > MAX_NAP_MS for nap in clock.naps] == [False, False, False, False, True]


def test_a_single_poll_pauses_no_longer_than_it_may() -> None:
    clock = Recorder()
    polling = Polling(clock.now_ms, clock.sleep)
    polling.poll(lambda: False, 0.25)
    polling.poll(lambda: False, -5)
    assert clock.naps == [0.25, 0]


class Recorder:
    """A clock that only pauses and `advance` move. It remembers the pauses, in ms."""

    def __init__(self) -> None:
        self._now_ms = 0.0
        self.naps: list[float] = []

    def now_ms(self) -> float:
        return self._now_ms

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds * 1000)
        self._now_ms += seconds * 1000

    def advance(self, poll_ms: float) -> bool:
        self._now_ms += poll_ms
        return False
