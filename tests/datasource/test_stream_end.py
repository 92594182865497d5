"""End of a stream with endingOffsets or endingTimestamp, and how it reports it."""

import pytest

from rmq_spark.store.errors import NotFoundError


def test_ending_latest_is_what_the_run_found_and_then_it_idles_and_says_so(store, query_on) -> None:
    query = query_on(store.path, startingOffsets="earliest", endingOffsets="latest", maxOffsetsPerTrigger="2")
    assert query.trigger() == [(0, 0), (0, 1)]
    assert '"ending": true' in query.committed
    assert '"ended"' not in query.committed
    store.append("orders", 0, 5)
    store.append("orders", 9, 5)  # a queue that it does not read
    assert query.drain() == [[(0, 2)]]
    assert '"ending": true, "ended": true' in query.committed


def test_an_ending_offset_may_lie_ahead(store, query_on) -> None:
    query = query_on(store.path, startingOffsets="earliest", endingOffsets='{"orders": {"0": 5}}')
    assert query.drain() == [[(0, 0), (0, 1), (0, 2)]]
    assert not query.offset().ended
    store.append("orders", 0, 4)
    store.append("orders", 1, 4)  # not named: ends where this run found it
    assert query.drain() == [[(0, 3), (0, 4)]]
    assert query.offset().ended


def test_available_now_ends_at_the_smaller_of_snapshot_and_bound(store, query_on) -> None:
    given = {"startingOffsets": "earliest", "endingOffsets": '{"orders": {"0": 2}}'}
    query = query_on(store.path, available_now=True, **given)
    assert query.drain() == [[(0, 0), (0, 1)]]
    assert query.offset().ended
    query = query_on(store.path, available_now=True, **(given | {"endingOffsets": '{"orders": {"0": 4}}'}))
    store.append("orders", 0, 4)
    assert query.drain() == [[(0, 0), (0, 1), (0, 2)]]
    assert not query.offset().ended


def test_a_bound_that_is_behind_already_is_reported_by_one_empty_batch(store, query_on) -> None:
    query = query_on(store.path, startingOffsets="earliest")
    query.drain()
    bounded = query_on(store.path, checkpoint=query.committed, endingOffsets='{"orders": {"0": 1, "1": 0}}')
    assert bounded.drain() == [[]]
    assert bounded.offset().ended
    unbounded = query_on(store.path, checkpoint=bounded.committed)
    assert unbounded.drain() == [[]]
    assert '"ended"' not in unbounded.committed


def test_endingOffsets_of_a_missing_queue_are_an_error(store, query_on) -> None:
    with pytest.raises(NotFoundError, match="endingOffsets: the queue orders/7 is not in the store"):
        query_on(store.path, endingOffsets='{"orders": {"7": 1}}').trigger()


def test_an_ending_time_that_lies_behind_is_an_offset(tmp_path, query_on, write_store) -> None:
    path = write_store(tmp_path / "store", 10, first_ms=1_600_000_000_000)
    for now_ms in (1_700_000_000_000, 1_500_000_000_000):  # a message decides, not the clock
        query = query_on(path, now_ms=now_ms, startingOffsets="earliest", endingTimestamp="1600000000004")
        assert query.drain() == [[(0, 0), (0, 1), (0, 2), (0, 3)]]
        assert query.offset().ended


def test_an_ending_time_that_lies_ahead_ends_by_a_message_or_by_the_clock(grow, query_on) -> None:
    store = grow()
    store.append("orders", 0, 2)
    until_ms = 1_700_000_060_000
    query = query_on(store.path, now_ms=until_ms - 60_000, startingOffsets="earliest", endingTimestamp=str(until_ms))
    assert query.drain() == [[(0, 0), (0, 1)]]
    assert not query.offset().ended
    query.clock.now_ms = until_ms
    store.append("payments", 0, 1)
    assert query.trigger() is None  # a broker may still dispatch messages that it stored in time
    query.clock.now_ms += 1_000
    assert query.trigger() == []
    assert query.offset().ended
    store.append("orders", 0, 2)
    assert query.trigger() is None
