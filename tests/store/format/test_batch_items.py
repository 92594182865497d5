"""Items of batches: their bytes, compared with a slow encoder of one item, and the rows that are refused."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sent_rows import (
    BORN_MS,
    COMPRESS_OVER,
    RETRIES,
    batch_of,
    encode,
    id_array,
    id_text,
    rows,
    slow_item,
    slow_pairs,
    slow_solo,
    texts,
)

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.batch_items import (
    ITEM_BYTES,
    MAX_ITEM_PROPERTIES_BYTES,
    NOT_SOLO,
    EncodedItems,
    encode_item,
    split_item,
)
from rmq_spark.store.format.body_codec import BodyRules, Compression, decompress_body
from rmq_spark.store.format.java import Host
from rmq_spark.store.format.message_encoder import MessageEncoder
from rmq_spark.store.format.message_ids import UniqueIds
from rmq_spark.store.format.properties import parse
from rmq_spark.store.format.queue_router import QueueRouter
from rmq_spark.store.format.record import Record, decode_record
from rmq_spark.store.testing.brokers.sent_message import read_items

PLAIN, ZLIB = BodyRules(), BodyRules(Compression.ZLIB, COMPRESS_OVER)
ROW: dict[str, Any] = {"topic": "orders", "body": b"x"}


def cut(items: EncodedItems) -> list[bytes]:
    """Return the bytes of each item."""
    data, ends = items.data.tobytes(), items.sizes.cumsum().tolist()
    return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@settings(max_examples=40)
@given(st.lists(rows, min_size=1, max_size=6), st.sampled_from([PLAIN, ZLIB]))
def test_encode_equals_a_slow_encoder_of_items(given_rows: list[dict[str, Any]], rules: BodyRules) -> None:
    items = encode(batch_of(given_rows), rules=rules)
    assert cut(items) == [slow_item(row, id_text(number), rules) for number, row in enumerate(given_rows)]
    solo = [slow_solo(row, rules) for row in given_rows]
    assert (items.solo is None) == (set(solo) == {NOT_SOLO})
    assert items.solo is None or items.solo.tolist() == solo
    assert [row.tobytes().decode() for row in items.ids] == [id_text(number) for number in range(len(given_rows))]


@settings(max_examples=40)
@given(st.lists(rows, min_size=1, max_size=6))
def test_encode_writes_the_properties_of_records_in_a_directory(given_rows: list[dict[str, Any]]) -> None:
    without = [{**row, "delayLevel": None, "deliverTimestamp": None} for row in given_rows]
    host = Host("10.1.2.3", 0)
    encoder = MessageEncoder(born_host=host, store_host=host, ids=UniqueIds("10.1.2.3", 7, 7))
    records = encoder.encode(batch_of(without), QueueRouter(lambda topic: 4, 0), BORN_MS)
    data, found = records.data.tobytes(), []
    for size in records.sizes.tolist():
        record = decode_record(data[:size])
        assert isinstance(record, Record)
        data = data[size:]
        found.append(record.properties.partition(b"\x02")[2])
    items = [split_item(one) for one in cut(encode(batch_of(without)))]
    assert [properties.encode().partition(b"\x02")[2] for _, _, properties in items] == found


@given(st.lists(st.none() | st.lists(texts | st.none(), max_size=3), min_size=1, max_size=4))
def test_encode_joins_keys_in_lists(keys: list[list[str | None] | None]) -> None:
    given_rows = [{**ROW, "keys": some} for some in keys]
    found = [parse(split_item(item)[2].encode()).get("KEYS") for item in cut(encode(batch_of(given_rows)))]
    assert found == [slow_pairs(row).get("KEYS") for row in given_rows]


def test_encode_makes_items_that_a_broker_reads() -> None:
    bodies = [b"", b"\0" * 300, "标签".encode()]
    batch = batch_of([{**ROW, "body": body, "flag": number, "tags": "A"} for number, body in enumerate(bodies)])
    items = encode(batch)
    read = read_items(items.data.tobytes())
    assert [(one.body, one.flag) for one in read] == [(body, number) for number, body in enumerate(bodies)]
    assert [one.size for one in read] == items.sizes.tolist()
    assert [parse(one.properties) for one in read] == [
        {"UNIQ_KEY": id_text(number), "TAGS": "A"} for number in range(3)
    ]
    assert items.sizes[0] == ITEM_BYTES + len(read[0].properties)


def test_encode_reads_slices_of_columns() -> None:
    given_rows = [
        {
            **ROW,
            "body": b"%d" % number,
            "tags": f"t{number}",
            "properties": {"p": str(number)},
            "flag": number,
            "queueId": number % 2,
            "brokerName": "broker-b",
        }
        for number in range(9)
    ]
    whole = cut(encode(batch_of(given_rows)))
    part = encode(batch_of(given_rows).slice(4, 3), ids=lambda count, _: id_array(9)[4:7])
    assert cut(part) == whole[4:7]
    assert [part.queues.queues[number].queue_id for number in part.queues.numbers] == [0, 1, 0]


@pytest.mark.parametrize("kind", list(Compression))
def test_encode_sends_compressed_bodies_alone(kind: Compression) -> None:
    body = b"word " * 100
    given_rows = [{**ROW, "body": one} for one in (body, b"short", bytes(range(256)), b"")]
    items = encode(batch_of(given_rows), rules=BodyRules(kind, 50))
    assert items.solo is not None
    assert items.solo[:2].tolist() == [kind.sys_flag, NOT_SOLO]
    assert items.solo[3] == NOT_SOLO
    stored = [split_item(one)[1] for one in cut(items)]
    assert decompress_body(stored[0], kind.sys_flag, 1000) == body
    assert [stored[1], stored[3]] == [b"short", b""]


def test_encode_sends_messages_with_a_delay_and_retries_alone() -> None:
    changes: list[dict[str, Any]] = [
        {"delayLevel": 3},
        {"delayLevel": 0},
        {"delayLevel": -1},
        {"deliverTimestamp": BORN_MS + 1},
        {"deliverTimestamp": BORN_MS - 1},
        {"delayLevel": 3, "deliverTimestamp": BORN_MS + 1},
        {"topic": RETRIES},
        {},
        {"properties": {"DELAY": "3"}},
    ]
    items = encode(batch_of([{**ROW, **change} for change in changes]))
    assert items.solo is not None
    assert items.solo.tolist() == [0, -1, -1, 0, 0, 0, 0, -1, -1]
    asked = [parse(split_item(one)[2].encode()) for one in cut(items)]
    assert [one.get("DELAY") for one in asked] == ["3", None, None, None, None, "3", None, None, None]
    times = [one.get("TIMER_DELIVER_MS") for one in asked]
    assert times == [None, None, None, str(BORN_MS + 1), str(BORN_MS - 1), None, None, None, None]


@pytest.mark.parametrize(("unit", "value", "expected"), [("us", 5_001, 6), ("ns", 5_000_001, 6), ("s", 5, 5000)])
def test_encode_rounds_delivery_times_up(unit: str, value: int, expected: int) -> None:
    batch = batch_of([ROW]).append_column("deliverTimestamp", pa.array([value], pa.timestamp(unit, "UTC")))
    assert parse(split_item(cut(encode(batch))[0])[2].encode())["TIMER_DELIVER_MS"] == str(expected)


def test_encode_in_a_batch_of_one_topic_has_no_solo() -> None:
    assert encode(batch_of([ROW, {**ROW, "delayLevel": 0}])).solo is None


LONG = "x" * MAX_ITEM_PROPERTIES_BYTES


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"body": None}, "row 12, topic 'orders': its body is null"),
        ({"body": b"x" * 301}, "row 12, topic 'orders': its body has 301 bytes; expected at most 300"),
        ({"properties": {"p": LONG}}, "row 12, topic 'orders': properties, tags and keys take 32545 bytes"),
        ({"properties": {"": "x"}}, "row 12, topic 'orders': '' is not a property name"),
        ({"properties": {"a\x01": "x"}}, "row 12, topic 'orders': .*is not a property name"),
        ({"properties": {"a\n": "x"}}, "row 12, topic 'orders': the property name .* control character"),
        ({"properties": {"p": "a\x02b"}}, "row 12, topic 'orders': the property 'p' holds the character"),
        ({"tags": "a\x02b"}, "row 12, topic 'orders': tags holds the character"),
        ({"keys": "a\x02b"}, "row 12, topic 'orders': keys holds the character"),
        ({"shardingKey": "a\x02b"}, "row 12, topic 'orders': shardingKey holds the character"),
        ({"topic": None}, "row 12: its topic is null"),
        ({"topic": "a b"}, "row 12, topic 'a b': topic 'a b' is not a topic's name"),
        ({"topic": "SCHEDULE_TOPIC_XXXX"}, "row 12, topic 'SCHEDULE_TOPIC_XXXX': .* internal topic"),
        ({"topic": "%LMQ%x"}, "row 12, topic '%LMQ%x': .* light message queue"),
        ({"body": b"", "delayLevel": 1}, "row 12, topic 'orders': its body is empty"),
        ({"body": b"", "deliverTimestamp": BORN_MS + 1}, "row 12, topic 'orders': its body is empty"),
        ({"body": b"", "topic": RETRIES}, "row 12, topic '%RETRY%billing': its body is empty"),
        ({"queueId": 5, "brokerName": "broker-a"}, "row 12, topic 'orders': queueId 5 of broker broker-a"),
    ],
)  # fmt: skip
def test_encode_refuses_a_row_and_makes_no_id(bad: dict[str, Any], text: str) -> None:
    taken: list[int] = []

    def ids(count: int, digests: Callable[[], object]) -> object:
        taken.append(count)
        return id_array(count)

    batch = batch_of([ROW, ROW, {**ROW, **bad}, ROW])
    with pytest.raises(OptionError, match=text):
        encode(batch, ids=ids, first_row=10, rules=BodyRules(max_bytes=300))
    assert taken == []


def test_encode_refuses_without_a_row_number() -> None:
    with pytest.raises(OptionError, match=r"^topic 'orders': its body is null"):
        encode(batch_of([{**ROW, "body": None}]), first_row=None)


@pytest.mark.parametrize("surplus", [0, 1])
def test_encode_accepts_properties_up_to_the_limit(surplus: int) -> None:
    fixed = len(f"UNIQ_KEY\x01{id_text(0)}\x02TAGS\x01\x02DELAY\x0118\x02")
    row = {**ROW, "tags": "x" * (MAX_ITEM_PROPERTIES_BYTES - fixed + surplus), "delayLevel": 18}
    if surplus:
        with pytest.raises(OptionError, match="take 32501 bytes; expected at most 32500"):
            encode(batch_of([ROW, row]))
        return
    item = cut(encode(batch_of([ROW, row])))[1]
    assert item == slow_item(row, id_text(1), PLAIN)


def test_encode_refuses_a_delivery_time_with_the_reason_of_the_broker() -> None:
    late = {**ROW, "deliverTimestamp": BORN_MS + 1}
    with pytest.raises(OptionError, match="row 1, topic 'one': no timer here"):
        encode(batch_of([ROW, {**late, "topic": "one"}]), refusal="no timer here")
    assert encode(batch_of([{**ROW, "deliverTimestamp": BORN_MS}]), refusal="no timer here").solo is not None
    assert encode(batch_of([{**late, "delayLevel": 1}]), refusal="no timer here").solo is not None


def test_encode_refuses_text_that_is_not_utf8() -> None:
    bad = pa.array([b"\xff"], pa.binary())
    binary = pa.StringArray.from_buffers(1, bad.buffers()[1], bad.buffers()[2])
    for name in ("tags", "keys", "shardingKey"):
        with pytest.raises(OptionError, match=f"{name} holds bytes that are not UTF-8"):
            encode(batch_of([ROW]).append_column(name, binary))


def test_encode_fails_for_a_column_that_it_does_not_know() -> None:
    with pytest.raises(AssertionError, match="odd"):
        encode(batch_of([ROW]).append_column("odd", pa.array([1])))


@given(st.integers(-(2**31), 2**31 - 1), st.binary(max_size=40), st.dictionaries(st.text("abc", min_size=1), texts))
def test_split_item_returns_what_encode_item_was_given(flag: int, body: bytes, pairs: dict[str, str]) -> None:
    properties = "".join(f"{name}\x01{value}\x02" for name, value in pairs.items())
    data = encode_item(flag, body, properties.encode())
    assert split_item(data) == (flag, body, properties)
    (item,) = read_items(data)
    assert (item.flag, item.body, item.properties.decode(), item.encode()) == (flag, body, properties, data)
