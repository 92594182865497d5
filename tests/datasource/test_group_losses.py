"""Lost queues of a query of a group are reported, as without a group."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark.store import GroupSession, GroupTerms
from rmq_spark.store.errors import DataLossError, OptionError
from rmq_spark.store.model import QueueKey

SUBSCRIBED = {"subscribePattern": "orders|payments"}
KINDS = [
    {"startingOffsets": "earliest"},
    {"consumerGroup": "billing", "startingOffsets": "earliest"},
    {"consumerGroup": "billing", "assignment": "shared", "groupFallback": "earliest"},
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of two topics, of a queue each, with two messages in each."""
    path = tmp_path / "store"
    with rmq_spark.open_store(path, segment_bytes=1 << 20) as writer:
        for topic in ("orders", "payments"):
            writer.create_topic(topic, 1)
            for _ in range(2):
                writer.send(topic, "x", queue_id=0)
    return path


@pytest.fixture
def start(query_on: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """A function that starts a query after the one before it has left."""
    queries: list[Any] = []

    def leave() -> None:
        for query in queries:
            if query.reader._group is not None:
                query.reader._group.query.leave({})
        queries.clear()

    def run(*given: Any, **options: str) -> Any:
        leave()
        queries.append(query_on(*given, **options))
        return queries[-1]

    yield run
    leave()


def remove_payments(store: Path) -> None:
    shutil.rmtree(store / "consumequeue" / "payments")
    path = store / "config" / "topics.json"
    topics = json.loads(path.read_text())
    del topics["topicConfigTable"]["payments"]
    path.write_text(json.dumps(topics))


@pytest.mark.parametrize("options", KINDS)
def test_a_topic_that_vanished_is_a_loss(store, start, options) -> None:
    query = start(store, **SUBSCRIBED, **options)
    query.drain()
    remove_payments(store)
    with pytest.raises(DataLossError, match="payments"):
        start(store, query.committed, **SUBSCRIBED, **options).drain()
    careless = start(store, query.committed, **SUBSCRIBED, **options, failOnDataLoss="false")
    assert careless.drain() == [[]]
    assert careless.offset().positions == {QueueKey("orders", 0): 2}


@pytest.mark.parametrize("options", KINDS)
def test_a_topic_that_is_not_subscribed_to_any_more_is_refused(store, start, options) -> None:
    query = start(store, subscribe="orders,payments", **options)
    query.drain()
    with pytest.raises(OptionError, match="it has positions in payments"):
        start(store, query.committed, subscribe="orders", **options).drain()


def test_a_queue_of_another_member_that_vanished_is_a_loss_to_who_had_it_before(store, start) -> None:
    payments = {"allocateStrategy": 'config:{"payments": [0]}'}
    query = start(store, **SUBSCRIBED, **KINDS[2])
    query.drain()
    mine = start(store, query.committed, **SUBSCRIBED, **KINDS[2], allocateStrategy='config:{"orders": [0]}')
    subscribed = 'subscribePattern="orders|payments" with %RETRY%billing'
    terms = GroupTerms("billing", "shared", payments["allocateStrategy"], subscribed)
    other = GroupSession(str(store), terms)
    other.rebalance([QueueKey("payments", 0)], {}, None)
    mine.drain()
    assert mine.offset().positions == {QueueKey("orders", 0): 2, QueueKey("payments", 0): 2}, "frozen"
    remove_payments(store)
    again = start(store, mine.committed, **SUBSCRIBED, **KINDS[2], allocateStrategy='config:{"orders": [0]}')
    with pytest.raises(DataLossError, match="payments"):
        again.drain()
    other.leave({})
