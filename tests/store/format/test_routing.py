"""Queue router: a given queue id, then the sharding key, then round-robin."""

import math

import numpy as np
import pyarrow as pa
import pytest

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.message_columns import Given, RowFault, Texts, Topics
from rmq_spark.store.format.queue_router import QueueRouter, Routes
from rmq_spark.store.model import QueueKey

COUNTS = {"orders": 4, "pay": 3, "log": 1, "wide": 70_000}


def router(start: int = 0) -> QueueRouter:
    return QueueRouter(COUNTS.__getitem__, start)


def route(
    topics: list[str], ids: list[int | None] | None = None, keys: list[str | None] | None = None, start: int = 0
) -> Routes:
    return route_with(router(start), topics, ids, keys)


def route_with(
    chosen: QueueRouter, topics: list[str], ids: list[int | None] | None, keys: list[str | None] | None
) -> Routes:
    hashes = None
    if keys is not None:
        texts = Texts.of(pa.array(keys, pa.string()))
        hashes = Given(texts.hashes.java(), np.array([key is not None for key in keys]))
    queue_ids = None if ids is None else Given.of(pa.array(ids, pa.int32()))
    return chosen.route(Topics.of(pa.array(topics)), len(topics), queue_ids, hashes)


def by_hash(key: str, count: int) -> int:
    """SelectMessageQueueByHash#select: Java's remainder has the sign of the hash, then the sign goes."""
    return abs(int(math.fmod(string_hash(key), count)))


def test_route_prefers_queue_id_to_key_and_key_to_round_robin() -> None:
    routes = route(["orders"] * 4, [3, None, None, 0], ["a", "a", None, None])
    assert routes.queue_ids.tolist() == [3, by_hash("a", 4), 0, 0]


# Computed by Java's rules: hash % count, then abs if negative. The last three hash to Java's smallest int.
@pytest.mark.parametrize(
    ("key", "count", "queue_id"),
    [
        ("", 4, 0), ("TagA", 3, 1), ("order-created", 4, 3), ("order-created", 3, 1),
        ("polygenelubricants", 3, 2), ("GydZG_", 5, 3), ("DESIGNING WORKHOUSES", 7, 2),
    ],
)  # fmt: skip
def test_route_by_key_equals_the_clients_selector(key: str, count: int, queue_id: int) -> None:
    routes = QueueRouter(lambda _: count, 0).route(
        Topics.of(pa.array(["t"])), 1, None, Given(Texts.of(pa.array([key])).hashes.java(), np.ones(1, np.bool_))
    )
    assert routes.queue_ids.tolist() == [queue_id]


def test_route_sends_equal_keys_to_one_queue() -> None:
    keys = [f"k{number % 9}" for number in range(200)]
    routes = route(["orders", "pay"] * 100, None, list(keys))
    assert routes.queue_ids.tolist() == [
        by_hash(key, COUNTS[topic]) for key, topic in zip(keys, ["orders", "pay"] * 100, strict=True)
    ]


def test_route_continues_round_robin_across_batches() -> None:
    chosen = router(start=2)
    assert route_with(chosen, ["orders"] * 3, None, None).queue_ids.tolist() == [2, 3, 0]
    assert route_with(chosen, ["orders"] * 6, None, None).queue_ids.tolist() == [1, 2, 3, 0, 1, 2]


def test_route_counts_round_robin_per_topic() -> None:
    chosen = router(start=1)
    mixed = ["orders", "pay", "orders", "log", "pay", "orders", "orders", "pay"]
    assert route_with(chosen, mixed, None, None).queue_ids.tolist() == [1, 1, 2, 0, 2, 3, 0, 0]
    assert route_with(chosen, ["pay", "orders"], None, None).queue_ids.tolist() == [1, 1]


def test_route_uses_round_robin_only_for_rows_without_queue_or_key() -> None:
    routes = route(["orders"] * 6, [None, 3, None, None, 3, None], [None, None, "a", None, None, None])
    assert [routes.queue_ids[row] for row in (0, 3, 5)] == [0, 1, 2]


@pytest.mark.parametrize("wrong", [-1, 3, 2**31 - 1])
def test_route_refuses_an_unknown_queue_id(wrong: int) -> None:
    with pytest.raises(RowFault) as error:
        route(["orders", "pay"], [3, wrong])
    assert error.value.row == 1
    assert error.value.what == (
        f"queueId {wrong} is not one of the 3 queues of topic pay; expected 0 to 2, or null for any"
    )


def test_route_refuses_a_topic_without_write_queues() -> None:
    with pytest.raises(OptionError, match="topic t has 0 write queues"):
        QueueRouter(lambda _: 0, 0).route(Topics.of(pa.array(["t"])), 1)


def test_route_asks_for_the_queues_of_a_topic_once() -> None:
    asked = []

    def count(topic: str) -> int:
        asked.append(topic)
        return 4

    chosen = QueueRouter(count, 0)
    for _ in range(3):
        route_with(chosen, ["orders", "pay", "orders"], None, None)
    assert asked == ["orders", "pay"]


@pytest.mark.parametrize("topic", ["log", "wide"], ids=["few queues", "many queues"])
def test_route_numbers_the_used_queues_by_topic_and_id(topic: str) -> None:
    last = COUNTS[topic] - 1
    routes = route(["pay", topic, "pay", topic, "pay"], [2, last, 0, 0, 2])
    numbered = [routes.queues[number] for number in routes.queue_numbers]
    assert numbered == [
        QueueKey("pay", 2), QueueKey(topic, last), QueueKey("pay", 0), QueueKey(topic, 0), QueueKey("pay", 2),
    ]  # fmt: skip
    assert len(set(routes.queues)) == len(routes.queues)
    assert set(numbered) == set(routes.queues)
    assert routes.queue_numbers.dtype == np.int32
