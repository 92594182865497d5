"""Digests of rows: equal for the same content, whatever columns it is in, and different for other content."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sent_rows import BORN_MS, batch_of, id_array, queues_of, rows

from rmq_spark.store.format.batch_items import ItemEncoder
from rmq_spark.store.format.body_codec import BodyRules, Compression
from rmq_spark.store.format.broker_router import BrokerRouter

ROW: dict[str, Any] = {"topic": "orders", "body": b"x"}


def digests_of(
    messages: pa.RecordBatch, *, rules: BodyRules | None = None, born_ms: int = BORN_MS, start: int = 0
) -> list[int]:
    found: list[int] = []

    def ids(count: int, digests: Callable[[], Any]) -> Any:
        taken = digests()
        assert taken.dtype == np.uint64
        found.extend(taken.tolist())
        return id_array(count)

    encoder = ItemEncoder(rules or BodyRules(), lambda topics: None)
    encoder.encode(messages, BrokerRouter(queues_of, start), ids, born_ms)
    return found


def digest(**changes: Any) -> int:
    """Return the digest of a row with these values."""
    (one,) = digests_of(batch_of([{**ROW, **changes}]))
    return one


@settings(max_examples=20)
@given(st.lists(rows, min_size=1, max_size=8), st.integers(0, 8), st.randoms(use_true_random=False))
def test_digests_do_not_depend_on_piece_order_or_time(given_rows: list[dict[str, Any]], at: int, random: Any) -> None:
    whole = digests_of(batch_of(given_rows))
    parts = [part for part in (given_rows[:at], given_rows[at:]) if part]
    assert [one for part in parts for one in digests_of(batch_of(part))] == whole
    assert [digests_of(batch_of([row]))[0] for row in given_rows] == whole
    order = random.sample(range(len(given_rows)), len(given_rows))
    mixed = digests_of(batch_of([given_rows[row] for row in order]), born_ms=BORN_MS + 10_000, start=3)
    assert mixed == [whole[row] for row in order]


@settings(max_examples=20)
@given(st.lists(rows, min_size=1, max_size=5))
def test_digests_of_slices_are_those_of_the_rows(given_rows: list[dict[str, Any]]) -> None:
    batch = batch_of([ROW, *given_rows, ROW])
    assert digests_of(batch.slice(1, len(given_rows))) == digests_of(batch)[1:-1]


def test_digests_do_not_depend_on_compression() -> None:
    batch = batch_of([{**ROW, "body": b"word " * 100}])
    assert digests_of(batch) == digests_of(batch, rules=BodyRules(Compression.ZLIB, 10))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"tags": "A"}, {"properties": {"TAGS": "A"}}),
        ({"keys": "k1 k2"}, {"properties": {"KEYS": "k1 k2"}}),
        ({"keys": "k1 k2"}, {"keys": ["k1", None, "", "k2"]}),
        ({"shardingKey": "s"}, {"properties": {"__SHARDINGKEY": "s"}}),
        ({"tags": "A"}, {"tags": "A", "properties": {"TAGS": "B"}}),
        ({"properties": {"a": "1", "b": "2"}}, {"properties": {"b": "2", "a": "1"}}),
        ({"properties": {"a": "1", "b": ""}}, {"properties": {"a": "1", "UNIQ_KEY": "x", "DELAY": "1"}}),
        ({}, {"tags": None, "keys": "", "properties": {}, "flag": 0, "delayLevel": 0}),
        ({}, {"properties": {"a": None}, "queueId": None, "brokerName": None, "shardingKey": "", "delayLevel": -1}),
    ],
)
def test_digests_of_the_same_content_are_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert digest(**one) == digest(**other)


DIFFERENT: Sequence[dict[str, Any]] = [
    {},
    *({"topic": topic} for topic in ("one",)),
    *({"body": body} for body in (b"", b"y", b"x\0", b"\0x", b"x" * 8, b"x" * 16, b"x" * 8 + b"y" * 8)),
    *({name: "A"} for name in ("tags", "keys", "shardingKey")),
    *({name: "B"} for name in ("tags", "keys", "shardingKey")),
    *({"properties": pairs} for pairs in ({"A": "B"}, {"B": "A"}, {"A": "A"}, {"A": "A", "B": "B"}, {"tags": "A"})),
    *({"flag": flag} for flag in (1, 2, -1, -(2**31), 2**31 - 1)),
    *({"queueId": number, "brokerName": broker} for broker in ("broker-a", "broker-b") for number in (0, 1)),
    *({"delayLevel": level} for level in (1, 2, 18, 19)),
    *({"deliverTimestamp": time_ms} for time_ms in (0, 1, BORN_MS, BORN_MS + 1)),
    {"delayLevel": 1, "deliverTimestamp": 0},
    {"flag": 1, "queueId": 0, "brokerName": "broker-a"},
    {"tags": "A", "keys": "A"},
    {"tags": "B", "keys": "A"},
    {"tags": "A", "keys": "B"},
    {"tags": "A", "flag": 1},
]


def test_digests_depend_on_each_column() -> None:
    found = [digest(**changes) for changes in DIFFERENT]
    twins = [
        (DIFFERENT[one], DIFFERENT[two])
        for one, two in itertools.combinations(range(len(found)), 2)
        if found[one] == found[two]
    ]
    assert not twins
    together = digests_of(batch_of([{**ROW, **changes} for changes in DIFFERENT]))
    assert together == found


def test_digests_tell_a_null_queue_from_queue_0() -> None:
    """With the queue ids that a topic of one broker allows without a broker's name."""
    null, zero = ({**ROW, "topic": "one", "queueId": number} for number in (None, 0))
    first, second = digests_of(batch_of([null, zero]))
    assert first != second
    assert digests_of(batch_of([null])) == [first]
    named = {**zero, "brokerName": "broker-a"}
    assert digests_of(batch_of([named]))[0] not in (first, second)


def test_digests_of_many_short_bodies_differ() -> None:
    bodies = [b"%d" % number for number in range(10_000)]
    found = digests_of(batch_of([{**ROW, "body": body, "tags": "A", "flag": 7} for body in bodies]))
    assert len(set(found)) == len(bodies)
