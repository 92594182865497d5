"""How much one micro-batch takes, by options and by trigger."""

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows, ReadMinRows

from rmq_spark.store import StoreReader
from rmq_spark.store.errors import StoreChangedError


def test_limits_share_a_batch_over_queues_and_nothing_is_left(store, query_on) -> None:
    store.append("orders", 0, 97)
    store.append("orders", 1, 10)
    batches = query_on(store.path, startingOffsets="earliest", maxOffsetsPerTrigger="22").drain()
    assert [len(rows) for rows in batches] == [22] * 5
    assert [sum(queue == 1 for queue, _ in rows) for rows in batches][:4] == [3, 2, 2, 2]  # of 110 messages 10
    assert sorted(row for rows in batches for row in rows) == [(0, n) for n in range(100)] + [(1, n) for n in range(10)]


def test_a_limit_of_bytes_is_exact(grow, query_on) -> None:
    store = grow()
    store.append("orders", 0, 10, size=300)
    query = query_on(store.path, startingOffsets="earliest", maxBytesPerTrigger="1000")
    batches = query.drain()
    assert [len(rows) for rows in batches] == [2] * 5  # records of about 400 bytes
    assert query_on(store.path, startingOffsets="earliest", maxBytesPerTrigger="10").drain() == [
        [(0, n)] for n in range(10)
    ]


def test_the_limit_of_each_queue_holds(store, query_on) -> None:
    store.append("orders", 1, 1)
    batches = query_on(store.path, startingOffsets="earliest", maxOffsetsPerQueue="2").drain()
    assert batches == [[(0, 0), (0, 1), (1, 0)], [(0, 2)]]


def test_trigger_once_passes_over_every_limit(store, query_on) -> None:
    query = query_on(store.path, startingOffsets="earliest", maxOffsetsPerTrigger="1", minOffsetsPerTrigger="1")
    query.limit = ReadAllAvailable()
    assert query.drain() == [[(0, 0), (0, 1), (0, 2)]]


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({}, ReadAllAvailable()),
        ({"maxOffsetsPerTrigger": "7"}, ReadMaxRows(7)),
        ({"maxOffsetsPerQueue": "8"}, ReadMaxRows(8)),
        ({"maxBytesPerTrigger": "9"}, ReadMaxBytes(9)),
        ({"minOffsetsPerTrigger": "5"}, ReadMinRows(5)),
        ({"minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "7"}, ReadMaxRows(7)),
    ],
)
def test_the_default_limit_lets_trigger_once_be_told_apart(store, given, limit, query_on) -> None:
    assert query_on(store.path, **given).limit == limit


def test_a_minimum_waits_for_messages_or_for_the_delay(store, query_on) -> None:
    query = query_on(store.path, minOffsetsPerTrigger="3", maxTriggerDelay="1m")
    assert query.trigger() == []  # the first batch never waits
    store.append("orders", 0, 2)
    assert query.trigger() is None
    query.clock.now_ms += 59_999
    assert query.trigger() is None
    query.clock.now_ms += 1
    assert query.trigger() == [(0, 3), (0, 4)]
    store.append("orders", 0, 2)
    assert query.trigger() is None
    store.append("orders", 0, 1)
    assert query.trigger() == [(0, 5), (0, 6), (0, 7)]


def test_a_batch_that_was_due_is_due_when_it_is_planned_again(store, query_on, monkeypatch) -> None:
    real, calls = StoreReader.record_bytes, []

    def fail_once(self, *arguments):
        calls.append(1)
        if len(calls) == 1:
            raise StoreChangedError("a segment is gone")
        return real(self, *arguments)

    monkeypatch.setattr(StoreReader, "record_bytes", fail_once)
    query = query_on(store.path, startingOffsets="earliest", minOffsetsPerTrigger="100", maxBytesPerTrigger="1m")
    assert query.trigger() == [(0, 0), (0, 1), (0, 2)], "the first batch never waits"


def test_available_now_reads_up_to_its_snapshot_and_comes_to_rest(store, query_on) -> None:
    query = query_on(store.path, startingOffsets="earliest", available_now=True, maxOffsetsPerTrigger="2")
    store.append("orders", 0, 5)
    store.append("orders", 1, 5)
    assert query.drain() == [[(0, 0), (0, 1)], [(0, 2)]]
    following = query_on(store.path, checkpoint=query.committed, available_now=True)
    assert following.drain() == [[(0, n) for n in range(3, 8)] + [(1, n) for n in range(5)]]


def test_available_now_leaves_a_queue_that_appeared_meanwhile_to_the_next_run(grow, query_on) -> None:
    store = grow(queues=1)
    store.append("orders", 0, 1)
    query = query_on(store.path, startingOffsets="earliest", available_now=True)
    store.append("orders", 3, 2)
    assert query.drain() == [[(0, 0)]]
    assert query_on(store.path, checkpoint=query.committed, available_now=True).drain() == [[(3, 0), (3, 1)]]


def test_available_now_does_not_wait_for_a_minimum(store, query_on) -> None:
    given = {"startingOffsets": "earliest", "minOffsetsPerTrigger": "2", "maxOffsetsPerTrigger": "2"}
    assert query_on(store.path, available_now=True, **given).drain() == [[(0, 0), (0, 1)], [(0, 2)]]
    assert query_on(store.path, **given).drain() == [[(0, 0), (0, 1)]]


def test_available_now_on_an_empty_store_comes_to_rest(grow, query_on) -> None:
    store = grow()
    assert query_on(store.path, subscribePattern="x.*", available_now=True).drain() == [[]]
