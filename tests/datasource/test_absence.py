"""absence: what a query says about brokers that are away or retired, and how long it waits for them."""

import pytest

from rmq_spark.datasource.plan.absence import (
    AwayBroker,
    describe_changes,
    describe_for_progress,
    describe_retired,
    find_overdue,
    group_by_broker,
)
from rmq_spark.store.model import Away, QueueBounds, QueueKey

A0, A1, B0 = QueueKey("orders", 0, "a"), QueueKey("orders", 1, "a"), QueueKey("orders", 0, "b")
SINCE_MS = 1_700_000_000_000  # 2023-11-14T22:13:20Z
DOWN = AwayBroker(SINCE_MS, "refused", 2)


def test_group_by_broker_counts_queues_and_keeps_the_earliest_reason() -> None:
    away = {B0: Away("b", 7, "frozen"), A1: Away("a", 9, "later"), A0: Away("a", 5, "refused")}
    assert group_by_broker(away) == {"a": AwayBroker(5, "refused", 2), "b": AwayBroker(7, "frozen", 1)}
    assert list(group_by_broker(away)) == ["a", "b"]


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ([], {}, []),
        (["a"], {"a": DOWN}, []),
        ([], {"a": DOWN}, ["the broker a is away since 2023-11-14T22:13:20+00:00: refused. 2 of its queues keep"]),
        (["a"], {}, ["the broker a is back, and its queues are read again"]),
        (["a"], {"b": DOWN}, ["the broker b is away since", "the broker a is back"]),
    ],
)
def test_describe_changes_has_a_line_for_each_broker_that_went_or_came_back(before, after, lines) -> None:
    found = describe_changes(before, after)
    assert len(found) == len(lines)
    assert all(line.startswith(begin) for line, begin in zip(found, lines, strict=True))


def test_describe_changes_ends_the_reason_once() -> None:
    (line,) = describe_changes([], {"a": AwayBroker(SINCE_MS, "refused. Start it.", 1)})
    assert "refused. Start it. 1 of its queues" in line


def test_describe_for_progress_is_json_by_broker() -> None:
    assert describe_for_progress({"a": DOWN}) == {
        "a": {"since": "2023-11-14T22:13:20+00:00", "queues": 2, "reason": "refused"}
    }


@pytest.mark.parametrize(
    ("now_ms", "timeout_ms", "is_overdue"),
    [(SINCE_MS + 999, 1000, False), (SINCE_MS + 1000, 1000, True), (SINCE_MS + 10**9, 0, False)],
)
def test_find_overdue_names_the_broker_after_the_time(now_ms, timeout_ms, is_overdue) -> None:
    found = find_overdue({"a": DOWN, "b": AwayBroker(now_ms, "new", 1)}, now_ms, timeout_ms)
    assert (found is not None) == is_overdue
    assert found is None or ("a since" in found and "b since" not in found and "brokerDownTimeout=1000ms" in found)


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ({A0: QueueBounds(0, 9), A1: QueueBounds(0, 3)}, "; 4 messages of them were not read"),
        ({A0: QueueBounds(0, 9)}, "; 4 messages of them were not read and the number of unread messages in 1 of them"),
        ({}, "; the number of unread messages in 2 of them is unknown"),
    ],
)
def test_describe_retired_counts_unread_messages(bounds, text) -> None:
    (line,) = describe_retired({A0: 5, A1: 3}, bounds)
    assert line.startswith("retiredBrokers: the query drops its positions in 2 queues of the broker a; ")
    assert text in line
