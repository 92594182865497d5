"""Warnings at the start of a query: a pattern without a topic, a filter without a match; cost of the check."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from support.parsed_options import parse_options

from rmq_spark.datasource.options.read_options import ReadSettings
from rmq_spark.datasource.spark.batch_reader import RmqBatchReader
from rmq_spark.datasource.spark.unmatched import SAMPLED_MESSAGES, SAMPLED_QUEUES
from rmq_spark.store.log.consume_queue import ConsumeQueue
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

Warn = Callable[..., list[str]]


def tag_of(number: int) -> str:
    return ("created", "paid", "shipped")[number % 3]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("unmatched") / "store"
    messages = [
        SampleMessage(topic, number % 2, b"x", tags=tag_of(number), properties={"amount": "5", "region": "EU"})
        for topic in ("orders", "payments")
        for number in range(30)
    ]
    build_store(path, messages, empty_topics={"empty": 2})
    return path


@pytest.fixture(params=["batch", "stream"])
def warn(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, query_on) -> Warn:
    """A function that begins a query of either kind, and returns its warnings."""

    def begin(path: Path, **given: str) -> list[str]:
        caplog.clear()
        if request.param == "stream":
            query = query_on(path, startingOffsets="earliest", **given)
            query.drain()
        else:
            options = {"path": str(path), "subscribe": "orders"} | given
            if "subscribePattern" in given:
                del options["subscribe"]
            parsed = parse_options(options, 0)
            RmqBatchReader(parsed, ReadSettings(("topic",), False, 1 << 20, True, parsed.filters)).partitions()
        said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
        return [one for one in said if "have no files" not in one]  # an empty topic of a broker's store

    return begin


def test_a_pattern_that_matches_no_topic_names_what_was_meant(store: Path, warn: Warn) -> None:
    [said] = warn(store, subscribePattern="pay*")
    assert 'subscribePattern="pay*" matches no topic. Did you mean "pay.*", which matches payments?' in said
    [said] = warn(store, subscribePattern="order|invoices")
    assert "Did you mean orders? Topics: empty, orders, payments." in said
    assert warn(store, subscribePattern="order.*|invoices") == []
    assert warn(store, subscribePattern="emp.y") == []


def test_tags_that_no_message_has_are_named_with_the_nearest(store: Path, warn: Warn) -> None:
    [said] = warn(store, tags="Paid || shiped")
    assert 'tags="Paid || shiped" matches none of the 30 messages in orders.' in said
    assert "Did you mean paid or shipped? Tags: created, paid, shipped." in said
    assert warn(store, tags="shiped || paid") == []
    assert warn(store, tags="*") == []


def test_a_filter_counts_as_matching_if_it_does_in_one_of_its_topics(store: Path, warn: Warn) -> None:
    assert warn(store, subscribe="orders,empty", tags="paid") == []
    [said] = warn(store, subscribe="orders,payments", tags='{"orders": "paid", "payments": "pid"}')
    assert 'tags="pid" matches none of the 30 messages in payments. Did you mean paid?' in said


def test_sql92_that_nothing_matches_names_the_nearest_property(store: Path, warn: Warn) -> None:
    [said] = warn(store, sql92="amonut > 1")
    assert "matches none of the 30 messages in orders. Did you mean amount? Properties: " in said
    assert "region" in said
    [said] = warn(store, sql92="amount > 100")
    assert "Did you mean" not in said
    assert warn(store, sql92="amount > 1 AND TAGS = 'paid'") == []


def test_nothing_is_said_of_what_holds_no_messages(store: Path, warn: Warn) -> None:
    assert warn(store, subscribe="empty", tags="paid") == []


@pytest.mark.slow
def test_in_a_large_queue_a_bounded_sample_is_asked_and_no_more(
    tmp_path: Path, warn: Warn, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues, per_queue = SAMPLED_QUEUES * 2, SAMPLED_MESSAGES * 3
    messages = [
        SampleMessage("orders", queue_id, b"", tags="rare" if number == per_queue // 2 else "common")
        for queue_id in range(queues)
        for number in range(per_queue)
    ]
    build_store(tmp_path / "store", messages)
    looked_at: list[tuple[int, int]] = []
    real = ConsumeQueue.read
    [said] = warn(tmp_path / "store", tags="rare")
    most = SAMPLED_QUEUES * SAMPLED_MESSAGES * 2
    assert f"matches none of the {most} sampled messages, of {queues * per_queue}, in orders" in said
    monkeypatch.setattr("rmq_spark.datasource.spark.unmatched._warn", lambda *_: looked_at.append((-1, -1)))
    monkeypatch.setattr(
        ConsumeQueue, "read", lambda queue, begin, end: (looked_at.append((begin, end)), real(queue, begin, end))[1]
    )
    assert warn(tmp_path / "store", tags="common", maxOffsetsPerTrigger="1000000") == []
    assert (-1, -1) not in looked_at
    newest = per_queue - SAMPLED_MESSAGES
    assert looked_at.count((newest, newest + 64)) == 1, "of the first sampled queue alone"
