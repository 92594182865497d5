"""Waiting triggers of a query with longPollingMs: events that end the wait, and work during it."""

from collections.abc import Callable
from typing import Any

import pytest

from rmq_spark.store.arrival import Polling
from rmq_spark.store.errors import StoreChangedError


@pytest.fixture
def waiting(store, query_on) -> Callable[..., Any]:
    """A function that makes a query that has read all; it waits by a clock that its naps set. `naps` are in s."""

    def make(at_nap: Callable[[int], None] = lambda number: None, **options: str) -> Any:
        query = query_on(store.path, startingOffsets="earliest", longPollingMs="500ms", **options)
        query.trigger()
        clock, query.naps = [0.0], []

        def sleep(seconds: float) -> None:
            clock[0] += seconds * 1000
            query.naps.append(seconds)
            at_nap(len(query.naps))

        query.reader._monotonic_ms = lambda: clock[0]
        query.reader._view.backend._polling = Polling(lambda: clock[0], sleep)
        return query

    return make


def test_a_file_that_goes_away_under_a_wait_is_no_error(waiting) -> None:
    query = waiting()
    look, looks = query.reader._view.backend.refresh, []

    def refresh() -> bool:
        looks.append(1)
        if len(looks) == 5:
            raise StoreChangedError("retention was quicker")
        return look()

    query.reader._view.backend.refresh = refresh
    assert query.trigger() is None
    assert sum(query.naps) == pytest.approx(0.5)


def test_a_wait_ends_with_spark(waiting) -> None:
    query = waiting(lambda number: setattr(query.reader, "_parent_id", lambda: 1) if number == 3 else None)
    assert query.trigger() is None
    assert 0.003 < sum(query.naps) < 0.1


def test_messages_for_others_do_not_end_a_wait(waiting, store) -> None:
    query = waiting(lambda number: store.append("payments", 0, 1) if number % 5 == 0 and number < 60 else None)
    assert query.trigger() is None
    assert sum(query.naps) == pytest.approx(0.5)
    assert len(query.naps) > 60


def test_a_message_after_those_for_others_ends_the_wait(waiting, store) -> None:
    query = waiting(lambda number: store.append("orders" if number == 30 else "payments", 0, 1))
    assert query.trigger() == [(0, 3)]
    assert len(query.naps) == 30


def test_a_wait_for_enough_messages_ends_when_their_delay_is_over(waiting, store) -> None:
    def set_clock(number: int) -> None:
        query.clock.now_ms += number == 20 and 60_000

    query = waiting(set_clock, minOffsetsPerTrigger="5", maxTriggerDelay="30s")
    store.append("orders", 0, 1)
    assert query.trigger() == [(0, 3)]
    assert len(query.naps) == 20
