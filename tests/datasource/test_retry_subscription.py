"""A stream of a consumer group reads the group's retry topic: once it exists, and from the group's offset."""

import errno
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.parsed_options import parse_options

import rmq_spark
from rmq_spark.store.disk.system_calls import SystemCalls
from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

GROUP = {"consumerGroup": "billing"}
OLD_MS = 1_000_000_000_000
RETRY = "%RETRY%billing"


class Sender:
    """A program that appends to a store, and to the group's retry topic as if messages had failed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = rmq_spark.open_store(path, segment_bytes=1 << 20)
        self.store.create_topic("orders", 1)

    def send(self, topic: str, count: int = 1) -> None:
        self.store.create_topic(topic, 1)
        for _ in range(count):
            self.store.send(topic, "x", queue_id=0)


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Sender]:
    """A store with 2 messages in the topic orders."""
    sender = Sender(tmp_path / "store")
    sender.send("orders", 2)
    yield sender
    sender.store.close()


@pytest.fixture
def start(query_on) -> Iterator[Callable]:
    """A function that starts a query; all leave in the end, as processes do that die."""
    queries = []

    def begin(path: Path, **options: str):
        queries.append(query_on(path, **options))
        return queries[-1]

    yield begin
    for query in queries:
        leave(query)


def leave(query) -> None:
    """End a query as its process would."""
    share = query.reader._group
    if share is not None:
        share.query.leave({})
    query.reader.stop()


def positions(query) -> dict[str, int]:
    """Return the next queue offset of each topic's queue 0."""
    offset = json.loads(query.committed)
    return {topic: queues["0"] for topic, queues in offset.items() if topic != "@"}


def test_the_retry_topic_joins_when_it_appears(sender: Sender, start: Callable) -> None:
    query = start(sender.path, startingOffsets="earliest", **GROUP)
    assert query.drain() == [[(0, 0), (0, 1)]]
    assert positions(query) == {"orders": 2}
    sender.send(RETRY, 3)
    assert query.drain() == [[(0, 0), (0, 1), (0, 2)]]
    assert positions(query) == {RETRY: 3, "orders": 2}


@pytest.mark.parametrize("start_at", ["latest", "earliest"])
def test_what_failed_before_the_query_began_is_read_wherever_it_begins(
    sender: Sender, start: Callable, start_at: str
) -> None:
    sender.send(RETRY, 3)
    query = start(sender.path, startingOffsets=start_at, **GROUP)
    query.drain()
    assert positions(query) == {RETRY: 3, "orders": 2}
    assert query.offset().positions[QueueKey(RETRY, 0)] == 3


def test_all_retries_are_read_though_the_topic_itself_begins_at_its_end(sender: Sender, start: Callable) -> None:
    sender.send(RETRY, 3)
    query = start(sender.path, startingOffsets="latest", **GROUP)
    assert query.drain() == [[(0, 0), (0, 1), (0, 2)]]


def test_retries_that_the_group_has_consumed_are_not_read_again_by_a_new_query(sender: Sender, start: Callable) -> None:
    sender.send(RETRY, 3)
    first = start(sender.path, startingOffsets="earliest", **GROUP)
    first.drain()
    assert rmq_spark.group_offsets(str(sender.path), "billing")[RETRY] == {0: 3}
    leave(first)
    sender.send(RETRY, 1)
    assert start(sender.path, startingOffsets="latest", **GROUP).drain() == [[(0, 3)]]


def test_a_start_that_names_the_retry_topic_counts(sender: Sender, start: Callable) -> None:
    sender.send(RETRY, 3)
    query = start(sender.path, startingOffsets=json.dumps({"orders": {"0": 2}, RETRY: {"0": 2}}), **GROUP)
    assert query.drain() == [[(0, 2)]]


def test_a_start_by_time_asks_nothing_of_the_retry_topic(tmp_path: Path, start: Callable) -> None:
    path = tmp_path / "old"
    old = [SampleMessage(RETRY, 0, b"x", store_timestamp=OLD_MS + 1000 + number) for number in range(3)]
    build_store(path, [*old, SampleMessage("orders", 0, b"x", store_timestamp=OLD_MS + 5000)])
    query = start(path, startingTimestamp=str(OLD_MS + 4000), **GROUP)
    query.drain()
    assert positions(query) == {RETRY: 3, "orders": 1}


def test_who_does_not_want_it_is_not_given_it(sender: Sender, start: Callable) -> None:
    sender.send(RETRY, 3)
    query = start(sender.path, startingOffsets="earliest", subscribeRetry="false", **GROUP)
    assert query.drain() == [[(0, 0), (0, 1)]]
    assert positions(query) == {"orders": 2}


def test_neither_a_broadcasting_query_nor_one_without_a_group_reads_it(sender: Sender, start: Callable) -> None:
    sender.send(RETRY, 3)
    for options in ({}, {"consumerGroup": "billing", "messageModel": "broadcasting"}):
        query = start(sender.path, startingOffsets="earliest", **options)
        query.drain()
        assert positions(query) == {"orders": 2}


def test_the_end_of_an_available_now_run_is_that_of_the_retry_topic_too(sender: Sender, query_on) -> None:
    sender.send(RETRY, 1)
    query = query_on(sender.path, available_now=True, startingOffsets="earliest", **GROUP)
    sender.send(RETRY, 1)
    query.drain()
    assert positions(query) == {RETRY: 1, "orders": 2}
    leave(query)


def test_a_batch_that_is_run_again_reads_the_same_retries(sender: Sender, start: Callable) -> None:
    sender.send(RETRY, 2)
    query = start(sender.path, startingOffsets="latest", **GROUP)
    before = query.committed
    rows = query.trigger()
    end = query.committed
    leave(query)
    sender.send(RETRY, 2)
    again = start(sender.path, checkpoint=before, startingOffsets="latest", **GROUP)
    assert again.rows(before, end) == rows == [(0, 0), (0, 1)]


def test_members_that_share_queues_share_those_of_the_retry_topic(sender: Sender, start: Callable) -> None:
    sender.send(RETRY, 2)
    shared = GROUP | {"assignment": "shared", "groupFallback": "latest"}
    query = start(sender.path, **shared)
    rows = [row for batch in query.drain() for row in batch]
    assert sorted(rows) == [(0, 0), (0, 0), (0, 1), (0, 1)], "both are young"


def test_a_subscription_that_names_it_already_reads_it_once(sender: Sender, start: Callable) -> None:
    sender.send(RETRY, 2)
    query = start(sender.path, subscribe=RETRY, startingOffsets="earliest", **GROUP)
    assert query.drain() == [[(0, 0), (0, 1)]]


def test_the_members_of_a_group_must_agree_on_it(
    sender: Sender, start: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmq_spark.store.group.membership.DYING_MS", 100)
    shared = GROUP | {"assignment": "shared"}
    start(sender.path, **shared).drain()
    with pytest.raises(Exception, match="%RETRY%billing"):
        start(sender.path, subscribeRetry="false", **shared).drain()


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(OptionError, match="subscribeRetry requires consumerGroup"):
        parse_options({"subscribeRetry": "true"}, 0)
    with pytest.raises(OptionError, match="broadcasting: found subscribeRetry=true"):
        parse_options({"subscribeRetry": "true", "messageModel": "broadcasting", **GROUP}, 0)
    assert parse_options({"subscribeRetry": "false", "messageModel": "broadcasting", **GROUP}, 0).retry_topic is None


def test_a_store_that_cannot_be_written_is_read_with_its_retries(
    sender: Sender, start: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(self: SystemCalls, path: str, size_bytes: int, **owner: Any) -> None:
        raise OSError(errno.ENOSPC, path)

    sender.send(RETRY, 3)
    with rmq_spark.open_consumer(sender.path, "billing") as consumer:
        consumer.update_consume_offset(QueueKey(RETRY, 0), 1)
    query = start(sender.path, startingOffsets="latest", **GROUP)
    monkeypatch.setattr(SystemCalls, "create", create)
    assert query.drain() == [[(0, 1), (0, 2)]]
    assert query.reader._group.query.is_outside


def test_what_others_have_consumed_of_the_retry_topic_is_not_read_by_a_query_that_comes_to_it(
    sender: Sender, start: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    query = start(sender.path, startingOffsets="earliest", subscribeRetry="false", **GROUP)
    query.drain()
    leave(query)
    sender.send(RETRY, 3)
    with rmq_spark.open_consumer(sender.path, "billing") as consumer:
        consumer.update_consume_offset(QueueKey(RETRY, 0), 2)
    again = start(sender.path, checkpoint=query.committed, onOffsetConflict="fail", **GROUP)
    assert again.drain() == [[(0, 2)]]
    assert "is at" not in caplog.text


@pytest.mark.parametrize("fallback", ["latest", "earliest", "timestamp"])
@pytest.mark.parametrize("assignment", ["all", "shared"])
def test_where_a_group_begins_its_retry_topic_is_that_of_rocketmq(
    sender: Sender, start: Callable, monkeypatch: pytest.MonkeyPatch, fallback: str, assignment: str
) -> None:
    monkeypatch.setattr("rmq_spark.store.group.start_offsets.is_young", lambda *_: False)
    sender.send(RETRY, 3)
    options = {"groupFallback": fallback, "assignment": assignment}
    options |= {"startingTimestamp": str(OLD_MS)} if fallback == "timestamp" else {}
    options |= {"startingOffsets": "group"} if assignment == "all" else {}
    query = start(sender.path, **options, **GROUP)
    rows = [row for batch in query.drain() for row in batch]
    retries = 0 if fallback == "timestamp" else 3
    assert len(rows) == retries + (0 if fallback == "latest" else 2)
    held = rmq_spark.group_offsets(str(sender.path), "billing")
    assert held == {RETRY: {0: 3}, "orders": {0: 2}}


@pytest.mark.parametrize("assignment", ["all", "shared"])
def test_a_retry_topic_that_comes_later_is_read_from_its_first_message_by_a_group_that_began_at_a_time(
    sender: Sender, start: Callable, monkeypatch: pytest.MonkeyPatch, assignment: str
) -> None:
    monkeypatch.setattr("rmq_spark.store.group.start_offsets.is_young", lambda *_: False)
    options = {"groupFallback": "timestamp", "startingTimestamp": str(OLD_MS), "assignment": assignment}
    options |= {"startingOffsets": "group"} if assignment == "all" else {}
    query = start(sender.path, **options, **GROUP)
    query.drain()
    sender.send(RETRY, 3)
    assert query.drain() == [[(0, 0), (0, 1), (0, 2)]]
