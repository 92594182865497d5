"""Lag that a query of a group reports: of its own queues, after the messages that it has planned."""

import time

import pytest

import rmq_spark

SHARED = {"consumerGroup": "billing", "assignment": "shared", "groupFallback": "earliest"}
ALONE = {"consumerGroup": "billing", "startingOffsets": "earliest"}


@pytest.fixture
def path(tmp_path):
    """A store of two queues of three messages each."""
    with rmq_spark.open_store(tmp_path / "store", segment_bytes=1 << 20) as writer:
        writer.create_topic("orders", 2)
        for queue_id in (0, 1):
            for _ in range(3):
                writer.send("orders", "x", queue_id=queue_id)
    return tmp_path / "store"


def mark_of(query) -> dict:
    return query.reader.reportLatestOffset()["@"]


def test_messages_bytes_and_time_behind_are_those_of_the_lag_table(path, query_on) -> None:
    query = query_on(path, **ALONE, maxOffsetsPerQueue="1", now_ms=time.time_ns() // 1_000_000 + 5_000)  # noqa: TID251
    query.trigger()
    query.trigger()
    table = rmq_spark.group_lag(path, "billing", now_ms=query.clock.now_ms).to_pylist()  # lags the plan by one batch
    mark = mark_of(query)
    assert (mark["lagMessages"], mark["lagBytes"] * 2) == (2, sum(row["lagBytes"] for row in table))
    assert mark["secondsBehind"] <= max(row["secondsBehind"] for row in table)
    assert mark["secondsBehind"] >= 5
    query.drain()
    assert [mark_of(query)[name] for name in ("lagMessages", "lagBytes", "secondsBehind")] == [0, 0, 0.0]
    query.reader._group.query.leave({})


def test_queues_of_others_do_not_count(path, query_on) -> None:
    first = query_on(path, **SHARED)
    first.drain()
    second = query_on(path, **SHARED)
    for query in (second, first, second):
        query.drain()
    with rmq_spark.open_store(path) as writer:
        for queue_id in (0, 1):
            writer.send("orders", "x", queue_id=queue_id)
    for query in (first, second):
        query.drain()
        assert mark_of(query)["lagMessages"] == 0
        query.reader._group.query.leave({})


def test_a_query_that_starts_again_and_finds_nothing_says_how_far_behind_it_is(path, query_on) -> None:
    first = query_on(path, **ALONE)
    first.drain()
    first.reader._group.query.leave({})
    again = query_on(path, first.committed, **ALONE)
    assert again.plan() == first.committed
    assert mark_of(again)["lagMessages"] == 0
    again.reader._group.query.leave({})


def test_where_many_queues_are_behind_only_messages_are_counted(path, query_on, monkeypatch) -> None:
    monkeypatch.setattr("rmq_spark.datasource.spark.group_planner._MEASURED_QUEUES", 1)
    query = query_on(path, **ALONE, maxOffsetsPerQueue="1")
    query.trigger()
    assert mark_of(query)["lagMessages"] == 4
    assert not {"lagBytes", "secondsBehind"} & mark_of(query).keys()
    query.reader._group.query.leave({})
