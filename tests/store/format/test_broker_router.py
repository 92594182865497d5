"""Queues of rows among brokers: those that Java's selector finds, given queue ids, round-robin, and errors."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmq_spark.store.errors import NotFoundError, OptionError
from rmq_spark.store.format.broker_router import BrokerRouter
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.message_columns import Given, RowFault, Topics
from rmq_spark.store.model import QueueKey

WRITE_QUEUES = {
    "orders": {"broker-a": 2, "broker-b": 3},
    "one": {"broker-c": 2},
    "many": {f"broker-{number}": 1 + number % 3 for number in range(9)},
    "none": {},
}


def list_queues(topic: str) -> list[QueueKey]:
    if topic not in WRITE_QUEUES:
        raise NotFoundError(f"no {topic}")
    counts = WRITE_QUEUES[topic]
    return [QueueKey(topic, number, broker) for broker, count in counts.items() for number in range(count)]


def route(
    router: BrokerRouter,
    topics: Sequence[str],
    *,
    queue_ids: Sequence[int | None] | None = None,
    brokers: Sequence[str | None] | None = None,
    keys: Sequence[str | None] | None = None,
) -> tuple[list[QueueKey], list[bool]]:
    """Return the queue of each row, and whether round-robin chose it."""
    hashes = None
    if keys is not None:
        values = np.array([0 if key is None else string_hash(key) & 0xFFFFFFFF for key in keys], np.uint32)
        hashes = Given(values, np.array([key is not None for key in keys]))
    found = router.route(
        Topics.of(pa.array(topics)),
        len(topics),
        None if queue_ids is None else Given.of(pa.array(queue_ids, pa.int32())),
        None if brokers is None else pa.array(brokers, pa.string()),
        hashes,
    )
    assert len(set(found.queues)) == len(found.queues), "each queue once"
    assert set(found.numbers.tolist()) == set(range(len(found.queues))), "no queue without rows"
    return [found.queues[number] for number in found.numbers], found.are_free.tolist()


def java_queue(topic: str, key: str) -> QueueKey:
    """Return the queue that SelectMessageQueueByHash chooses."""
    queues = list_queues(topic)
    value = abs(string_hash(key)) % len(queues)  # Math.abs(hash % size), with Java's remainder
    return queues[value]


def test_route_of_sharding_keys_equals_javas_selector() -> None:
    keys = ["", "a", "polygenelubricants", "标签", "😀", *(f"key-{number}" for number in range(50))]
    for topic in ("orders", "one", "many"):
        found, are_free = route(BrokerRouter(list_queues, 1), [topic] * len(keys), keys=keys)
        assert found == [java_queue(topic, key) for key in keys]
        assert not any(are_free)
    assert {java_queue("orders", key).broker for key in keys} == {"broker-a", "broker-b"}


def test_route_finds_the_queue_id_of_a_named_broker() -> None:
    numbers, brokers = [0, 1, 2, 0, 1], ["broker-b", "broker-b", "broker-b", "broker-a", "broker-a"]
    found, are_free = route(BrokerRouter(list_queues, 0), ["orders"] * 5, queue_ids=numbers, brokers=brokers)
    assert found == [QueueKey("orders", number, broker) for number, broker in zip(numbers, brokers, strict=True)]
    assert not any(are_free)


def test_route_needs_no_broker_if_the_topic_has_one() -> None:
    for brokers in (None, [None, None], ["broker-c", None]):
        found, _ = route(BrokerRouter(list_queues, 0), ["one"] * 2, queue_ids=[1, 0], brokers=brokers)
        assert found == [QueueKey("one", 1, "broker-c"), QueueKey("one", 0, "broker-c")]


def test_route_of_several_topics_follows_the_rules_of_each() -> None:
    topics = ["orders", "one", "orders", "one", "many", "orders"]
    found, are_free = route(
        BrokerRouter(list_queues, 1),
        topics,
        queue_ids=[2, None, None, 1, None, None],
        brokers=["broker-b", None, None, None, None, None],
        keys=["k", "k", None, "k", None, "k"],
    )
    assert found == [
        QueueKey("orders", 2, "broker-b"),  # the queue id comes before the key
        java_queue("one", "k"),
        QueueKey("orders", 1, "broker-a"),
        QueueKey("one", 1, "broker-c"),
        list_queues("many")[1],
        java_queue("orders", "k"),
    ]
    assert are_free == [False, False, True, False, True, False]


@pytest.mark.parametrize(
    ("topic", "queue_id", "broker", "text"),
    [
        ("orders", 0, None, r"queueId 0 and no brokerName, .* several brokers: broker-a \(2 queues\), broker-b \(3"),
        ("orders", 2, "broker-a", r"queueId 2 of broker broker-a is not a queue .*one of: broker-a \(2 queues\),"),
        ("orders", -1, "broker-a", "queueId -1 of broker broker-a is not a queue"),
        ("orders", 0, "broker-x", r"broker broker-x is not listed .* down, .*one of: broker-a \(2 queues\), broker-b"),
        ("orders", 0, "", "broker '' is not listed with the topic now"),
        ("one", 2, None, r"queueId 2 is not a queue .* broker-c \(2 queues\), with ids from 0"),
        ("one", 0, "broker-a", "broker broker-a is not listed with the topic now"),
        ("one", None, "broker-c", "brokerName and no queueId; expected both, or neither"),
    ],
)  # fmt: skip
def test_route_refuses_a_row(topic: str, queue_id: int | None, broker: str | None, text: str) -> None:
    router = BrokerRouter(list_queues, 0)
    with pytest.raises(RowFault, match=text) as caught:
        route(
            router,
            ["many", "one", topic, topic],
            queue_ids=[None, 1, queue_id, queue_id],
            brokers=[None, None, broker, broker],
        )
    assert caught.value.row == 2
    assert router.route_one(topic, queue_id, broker, None) is None


def test_route_refuses_a_broker_without_a_column_of_queue_ids() -> None:
    with pytest.raises(RowFault, match="brokerName and no queueId") as caught:
        route(BrokerRouter(list_queues, 0), ["orders"] * 3, brokers=[None, "broker-a", "broker-b"])
    assert caught.value.row == 1
    found, _ = route(BrokerRouter(list_queues, 4), ["orders"], brokers=[None])
    assert found == [QueueKey("orders", 2, "broker-b")]


def test_route_passes_on_the_errors_of_a_topic() -> None:
    router = BrokerRouter(list_queues, 0)
    with pytest.raises(NotFoundError, match="no absent"):
        route(router, ["orders", "absent"])
    with pytest.raises(OptionError, match="topic none has 0 write queues"):
        route(router, ["none"], keys=["k"])
    with pytest.raises(OptionError, match="topic none has 0 write queues"):
        router.route_one("none", None, None, None)


def test_round_robin_continues_across_batches_and_single_rows() -> None:
    router = BrokerRouter(list_queues, 3)
    found = route(router, ["orders"] * 4)[0] + route(router, ["orders", "one"])[0][:1]
    found += [router.route_one("orders", None, None, None)]  # type: ignore[list-item]
    router.route_one("orders", None, None, 7)  # a key takes no turn
    router.route_one("orders", 1, "broker-a", None)
    found += route(router, ["orders"] * 2)[0]
    expected = [list_queues("orders")[(3 + number) % 5] for number in range(len(found))]
    assert found == expected


@pytest.mark.parametrize(
    ("count", "start", "expected"),
    [
        (1, 7, [2]),
        (5, 1, [1, 2, 3, 4, 0]),
        (7, 4, [4, 4, 0, 0, 1, 1, 2]),
        (11, 0, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]),
    ],
)
def test_route_of_free_rows_gives_each_queue_a_block(count: int, start: int, expected: list[int]) -> None:
    router, queues = BrokerRouter(list_queues, start), list_queues("orders")
    for _ in range(3):
        found, are_free = route(router, ["orders"] * count, queue_ids=[None] * count, brokers=[None] * count)
        assert found == [queues[number] for number in expected]
        assert are_free == [True] * count
        expected = [(number + len(set(expected))) % 5 for number in expected]


def test_forget_asks_for_the_queues_again_and_continues() -> None:
    counts = {"broker-a": 2}
    asked: list[str] = []

    def queues_of(topic: str) -> list[QueueKey]:
        asked.append(topic)
        return [QueueKey(topic, number, broker) for broker, count in counts.items() for number in range(count)]

    router = BrokerRouter(queues_of, 0)
    assert [one.queue_id for one in route(router, ["t"])[0]] == [0]
    counts["broker-b"] = 2
    assert len(router.queues("t")) == 2
    router.forget()
    assert len(router.queues("t")) == 4
    assert [str(one) for one in route(router, ["t"] * 4)[0]] == [
        "t/broker-a:1", "t/broker-b:0", "t/broker-b:1", "t/broker-a:0",
    ]  # fmt: skip
    assert asked == ["t", "t"]
    counts.clear()
    counts["broker-b"] = 1
    router.forget()
    assert router.route_one("t", None, None, None) == QueueKey("t", 0, "broker-b")


ROWS = st.tuples(
    st.sampled_from(["orders", "one", "many"]),
    st.sampled_from([None, None, 0, 1, 2, -1, 2**31 - 1]),
    st.sampled_from([None, None, "broker-a", "broker-b", "broker-c", "broker-2"]),
    st.sampled_from([None, "", "k", "polygenelubricants"]),
)


@settings(max_examples=60)
@given(st.lists(ROWS, min_size=1, max_size=8), st.integers(0, 2**32 - 1))
def test_route_one_agrees_with_route(rows: list[tuple[str, int | None, str | None, str | None]], start: int) -> None:
    one_by_one, batches = BrokerRouter(list_queues, start), BrokerRouter(list_queues, start)
    for topic, queue_id, broker, key in rows:
        found = one_by_one.route_one(topic, queue_id, broker, None if key is None else string_hash(key))
        try:
            expected = route(batches, [topic], queue_ids=[queue_id], brokers=[broker], keys=[key])[0][0]
        except RowFault:
            expected = None
        assert found == expected


@pytest.mark.parametrize("queue_id", [True, 1.0, "1", b"1", [1]])
def test_route_one_takes_integers_only(queue_id: object) -> None:
    router = BrokerRouter(list_queues, 0)
    assert router.route_one("one", queue_id, None, None) is None
    assert router.route_one("one", queue_id, "broker-c", None) is None
    assert router.route_one("one", 1, 7, None) is None
