"""Rows of messages to send, made by Hypothesis, and a slow encoder of their items, one at a time."""

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from rmq_spark.store.format.batch_items import BROKER_NAME, EncodedItems, ItemEncoder
from rmq_spark.store.format.body_codec import BodyRules, Compression
from rmq_spark.store.format.broker_router import BrokerRouter
from rmq_spark.store.format.message_table import MESSAGE_TYPES
from rmq_spark.store.format.property_encoder import ENGINE_OWNED, TRANSIENT_PREFIX
from rmq_spark.store.model import QueueKey

BORN_MS = 1_774_000_000_123
COMPRESS_OVER = 60
RETRIES = "%RETRY%billing"
QUEUES = {
    "orders": [("broker-a", 2), ("broker-b", 3)],
    "one": [("broker-a", 1)],
    RETRIES: [("broker-b", 1)],
}
COLUMNS = {**MESSAGE_TYPES, BROKER_NAME: pa.string()}
OWN_COLUMNS = {"TAGS": "tags", "KEYS": "keys", "__SHARDINGKEY": "shardingKey"}
HEAD = struct.Struct(">iiiii")

texts = st.one_of(
    st.sampled_from(["", "A", "k1 k2", " ", "标签", "😀", "a\x01b", "word" * 9]),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x02"), max_size=20),
)
names = st.one_of(
    st.sampled_from(["TAGS", "KEYS", "__SHARDINGKEY", "WAIT", "UNIQ_KEY", "DELAY", "TIMER_DELIVER_MS", "REAL_TOPIC"]),
    st.sampled_from(["__RMQ.TRANSIENT.x", "名", "INNER_NUM", "TRAN_MSG", "CLUSTER"]),
    st.text("abc", min_size=1, max_size=9),
)
rows = st.fixed_dictionaries(
    {
        "topic": st.sampled_from(sorted(QUEUES)),
        "body": st.binary(min_size=1, max_size=100) | st.just(b"x" * 200),
        "tags": st.none() | texts,
        "keys": st.none() | texts,
        "properties": st.none() | st.dictionaries(names, st.none() | texts, max_size=5),
        "shardingKey": st.none() | texts,
        "flag": st.sampled_from([None, 0, 1, -(2**31), 2**31 - 1]),
        "delayLevel": st.sampled_from([None, None, None, 0, -1, 1, 18, 99]),
        "deliverTimestamp": st.sampled_from([None, None, None, 0, BORN_MS - 1, BORN_MS, BORN_MS + 5_000]),
    }
)


def queues_of(topic: str) -> list[QueueKey]:
    """Return the queues of a topic of `QUEUES`."""
    return [QueueKey(topic, number, broker) for broker, count in QUEUES[topic] for number in range(count)]


def batch_of(given: Sequence[dict[str, Any]], *, left_out: Sequence[str] = ()) -> pa.RecordBatch:
    """Return rows as columns, with a column for each value that some row has. Keys may be lists."""
    arrays = {}
    for name, kind in COLUMNS.items():
        values = [row.get(name) for row in given]
        if name in left_out or (name not in ("topic", "body") and all(value is None for value in values)):
            continue
        if name == "properties":
            values = [value if value is None else list(value.items()) for value in values]
        if name == "keys" and any(isinstance(value, list) for value in values):
            kind = pa.list_(pa.string())
            values = [[value] if isinstance(value, str) else value for value in values]
        arrays[name] = pa.array(values, kind)
    return pa.RecordBatch.from_pydict(arrays)


def encode(
    messages: pa.RecordBatch,
    *,
    ids: Any = None,
    rules: BodyRules | None = None,
    refusal: str | None = None,
    first_row: int | None = 0,
    start: int = 0,
) -> EncodedItems:
    """Return the items of messages, by default with the ids `id_text(0)`, `id_text(1)` and so on."""
    encoder = ItemEncoder(rules or BodyRules(), lambda topics: refusal)
    make_ids = ids or (lambda count, _: id_array(count))
    return encoder.encode(messages, BrokerRouter(queues_of, start), make_ids, BORN_MS, first_row)


def id_text(number: int) -> str:
    """Return an id."""
    return f"{number:032X}"


def id_array(count: int) -> Any:
    """Return the first ids as the encoder takes them."""
    return np.frombuffer("".join(map(id_text, range(count))).encode(), np.uint8).reshape(count, 32)


def slow_pairs(row: dict[str, Any]) -> dict[str, str]:
    """Return the properties of a message without UNIQ_KEY and delays, in order."""
    in_map = row.get("properties") or {}
    pairs = {}
    for name, column in OWN_COLUMNS.items():
        value = row.get(column)
        if isinstance(value, list):
            value = " ".join(filter(None, value))
        pairs[name] = in_map.get(name) if value is None else value
    for name, value in in_map.items():
        if name not in OWN_COLUMNS and name not in ENGINE_OWNED and not name.startswith(TRANSIENT_PREFIX):
            pairs[name] = value
    return {name: value for name, value in pairs.items() if value}


def slow_delays(row: dict[str, Any]) -> dict[str, str]:
    """Return the properties that ask a broker for a delay."""
    level, time_ms = row.get("delayLevel") or 0, row.get("deliverTimestamp")
    if level > 0:
        return {"DELAY": str(level)}
    return {} if time_ms is None else {"TIMER_DELIVER_MS": str(time_ms)}


def slow_item(row: dict[str, Any], message_id: str, rules: BodyRules) -> bytes:
    """Return the item of one message (MessageDecoder#encodeMessage)."""
    body, _ = slow_body(row["body"], rules)
    pairs = {"UNIQ_KEY": message_id, **slow_pairs(row), **slow_delays(row)}
    properties = "".join(f"{name}\x01{value}\x02" for name, value in pairs.items()).encode()
    size = HEAD.size + len(body) + 2 + len(properties)
    head = HEAD.pack(size, 0, 0, row.get("flag") or 0, len(body))
    return head + body + struct.pack(">h", len(properties)) + properties


def slow_body(body: bytes, rules: BodyRules) -> tuple[bytes, int]:
    """Return a stored body and its sysFlag."""
    if rules.compression is Compression.ZLIB and len(body) >= rules.compress_over:
        packed = zlib.compress(body, 5)
        if len(packed) < len(body):
            return packed, 0x301
    return body, 0


def slow_solo(row: dict[str, Any], rules: BodyRules) -> int:
    """Return the sysFlag of a message that must not be in a batch, else -1."""
    _, flag = slow_body(row["body"], rules)
    return flag if flag or slow_delays(row) or row["topic"].startswith("%RETRY%") else -1
