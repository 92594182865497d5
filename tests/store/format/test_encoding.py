"""Message encoder: limits, errors with the row, digests, and copies of golden stores."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.arrow_rows import arrow_rows

from rmq_spark.store import open_reader
from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.body_codec import BodyRules, Compression, decompress_body
from rmq_spark.store.format.java import Host, index_key_hash, string_hash
from rmq_spark.store.format.message_encoder import MESSAGE_COLUMNS, EncodedRecords, MessageEncoder
from rmq_spark.store.format.message_ids import UniqueIds
from rmq_spark.store.format.properties import MAX_PROPERTIES_BYTES, parse
from rmq_spark.store.format.property_encoder import ENGINE_OWNED
from rmq_spark.store.format.queue_router import QueueRouter
from rmq_spark.store.format.record import BLANK_BYTES, Record, decode_record

Row = dict[str, Any]
TYPES = {
    "topic": pa.string(),
    "body": pa.binary(),
    "tags": pa.string(),
    "keys": pa.list_(pa.string()),
    "properties": pa.map_(pa.string(), pa.string()),
    "shardingKey": pa.string(),
    "queueId": pa.int32(),
    "flag": pa.int32(),
    "delayLevel": pa.int32(),
    "deliverTimestamp": pa.timestamp("us", tz="UTC"),
}
BORN_MS = 1_774_000_000_123
MAX_BODY = BodyRules().max_bytes


def encoder(*, rules: BodyRules | None = None, segment_bytes: int = 1 << 30, random_bits: int = 1) -> MessageEncoder:
    host = Host("10.1.2.3", 0)
    ids = UniqueIds("10.1.2.3", 7, random_bits)
    return MessageEncoder(
        born_host=host, store_host=host, ids=ids, body_rules=rules or BodyRules(), segment_bytes=segment_bytes
    )


def batch(*rows: Row) -> pa.RecordBatch:
    """Return rows with topic `t` and body `b` by default."""
    whole = [{"topic": "t", "body": b"b", **row} for row in rows]
    names = [name for name in TYPES if any(name in row for row in whole)]
    return pa.RecordBatch.from_arrays([pa.array([row.get(n) for row in whole], TYPES[n]) for n in names], names)


def encode(*rows: Row, with_encoder: MessageEncoder | None = None, first_row: int | None = 0) -> EncodedRecords:
    return (with_encoder or encoder()).encode(batch(*rows), QueueRouter(lambda _: 4, 0), BORN_MS, first_row)


def records_of(encoded: EncodedRecords) -> list[Record]:
    records, begin = [], 0
    for size in encoded.sizes.tolist():
        record = decode_record(encoded.data[begin : begin + size].tobytes())
        assert isinstance(record, Record), record
        records.append(record)
        begin += size
    assert begin == len(encoded.data)
    return records


def test_message_columns_are_all_tested() -> None:
    assert tuple(TYPES) == MESSAGE_COLUMNS


def test_encode_returns_writable_records() -> None:
    encoded = encode({})
    encoded.data[0] = 1
    assert encoded.data.flags.c_contiguous


def test_encode_of_no_rows_has_no_records() -> None:
    encoded = encode()
    assert (len(encoded), len(encoded.data), encoded.queues, encoded.digest) == (0, 0, (), 0)


def test_encode_of_topic_and_body_has_no_property_except_the_id() -> None:
    (record,) = records_of(encode({}))
    assert list(parse(record.properties)) == ["UNIQ_KEY"]
    assert record.crc_matches


def test_encode_computes_the_crc_of_bodies_of_all_sizes() -> None:
    """Small and large bodies take different ways to their CRC."""
    for sizes in ([0, 1, 200] * 700, [5000, 0, 70_000]):
        encoded = encode(*({"body": bytes([size & 255]) * size} for size in sizes))
        assert [len(record.body) for record in records_of(encoded)] == sizes
        assert all(record.crc_matches for record in records_of(encoded))


@pytest.mark.parametrize("kind", Compression)
def test_compress_over_compresses_bodies_that_become_smaller(kind: Compression) -> None:
    noise = random.Random(7).randbytes(5000)
    bodies = [b"x" * 4095, b"x" * 4096, noise, b"y" * 100_000, b""]
    encoded = encode(*({"body": body} for body in bodies), with_encoder=encoder(rules=BodyRules(kind)))
    records = records_of(encoded)
    assert [record.sys_flag for record in records] == [0, kind.sys_flag, 0, kind.sys_flag, 0]
    assert [decompress_body(record.body, record.sys_flag, 1 << 20) for record in records] == bodies
    assert all(record.crc_matches for record in records)
    assert encoded.digest == encode(*({"body": body} for body in bodies)).digest


def test_encode_hashes_a_key_without_absolute_hash_to_zero() -> None:
    assert string_hash("t#qolygtg") == -(1 << 31)
    encoded = encode({"keys": ["qolygtg", "k"]}, {"keys": ["qolygtg"]})
    assert encoded.key_rows.tolist() == [0, 0, 0, 1, 1]
    assert [int(encoded.key_hashes[place]) for place in (1, 2, 4)] == [0, index_key_hash("t#k"), 0]
    assert encode({"keys": ["qolygtg"]}).key_hashes[1] == 0, "one key in every row takes a way of its own"


# An invalid row, and the error message after row and topic.
REFUSED: list[tuple[Row, str]] = [
    ({"body": None}, "its body is null. Give a body"),
    ({"body": bytes(MAX_BODY + 1)}, f"its body has {MAX_BODY + 1} bytes; expected at most {MAX_BODY}"),
    ({"tags": "x" * 40_000}, "properties, tags and keys take 40048 bytes; expected at most 32767"),
    ({"tags": "a\x02"}, "tags holds the character"),
    ({"keys": ["a", "b\x02"]}, "keys holds the character"),
    ({"properties": [("", "x")]}, "'' is not a property name"),
    ({"properties": [("a", "\x02")]}, "the property 'a' holds the character"),
    ({"queueId": 4}, "queueId 4 is not one of the 4 queues of topic t"),
    ({"queueId": 4, "delayLevel": 1}, "queueId 4 is not one of the 4 queues of topic t"),
    (
        {"deliverTimestamp": (BORN_MS + 259_200_001) * 1000},
        f"deliverTimestamp {BORN_MS + 259_200_001} (ms since the epoch) is 259200 s ahead; expected at "
        "most 259200 s (timerMaxDelaySec). Give an earlier time, or open",
    ),
    ({"deliverTimestamp": 2**63 - 1}, f"deliverTimestamp {-(-(2**63 - 1) // 1000)} (ms since the epoch) is"),
]


@pytest.mark.parametrize(("wrong", "what"), REFUSED, ids=[what[:30] for _, what in REFUSED])
def test_encode_names_the_row_that_cannot_become_a_message(wrong: Row, what: str) -> None:
    """The error has the number of the row, if rows have numbers."""
    one = encoder()
    with pytest.raises(OptionError) as error:
        encode({}, wrong, {}, with_encoder=one, first_row=3)
    assert str(error.value).startswith(f"row 4, topic 't': {what}")
    with pytest.raises(OptionError) as error:
        encode(wrong, with_encoder=one, first_row=None)
    assert str(error.value).startswith(f"topic 't': {what}")
    encode({}, with_encoder=one)


@pytest.mark.parametrize(
    ("topic", "start"),
    [
        (None, "row 1: its topic is null"),
        ("a b", "row 1, topic 'a b': topic 'a b' is not a topic's name: accepted are the characters"),
        ("SCHEDULE_TOPIC_XXXX", "row 1, topic 'SCHEDULE_TOPIC_XXXX': topic SCHEDULE_TOPIC_XXXX is an internal topic"),
    ],
)
def test_encode_names_the_row_with_a_refused_topic(topic: str | None, start: str) -> None:
    with pytest.raises(OptionError) as error:
        encode({}, {"topic": topic})
    assert str(error.value).startswith(start)


def test_encode_shows_a_topic_that_is_not_utf8() -> None:
    data = pa.py_buffer(b"a\xff")
    topics = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), data)
    rows = pa.RecordBatch.from_arrays([topics, pa.array([b"b"])], ["topic", "body"])
    with pytest.raises(OptionError, match=r"row 0, topic 'a\ufffd': .* is not a topic's name"):
        encoder().encode(rows, QueueRouter(lambda _: 4, 0), BORN_MS)


def test_max_bytes_limits_the_stored_size_of_a_body() -> None:
    rules = BodyRules(max_bytes=1000)
    assert len(encode({"body": bytes(1000)}, with_encoder=encoder(rules=rules))) == 1
    with pytest.raises(OptionError, match=r"its body has 1001 bytes; expected at most 1000 .*or set compression"):
        encode({"body": bytes(1001)}, with_encoder=encoder(rules=rules))
    packing = BodyRules(Compression.ZLIB, 500, 1000)
    assert len(encode({"body": bytes(90_000)}, with_encoder=encoder(rules=packing))) == 1
    with pytest.raises(OptionError, match=r"its body has \d+ bytes after compression; .* Split the message$"):
        encode({"body": random.Random(7).randbytes(3000) * 2}, with_encoder=encoder(rules=packing))


def test_encode_accepts_properties_of_the_maximum_size() -> None:
    others = len(parse_size({}))
    fitting = MAX_PROPERTIES_BYTES - others - len("TAGS\x01\x02")
    (record,) = records_of(encode({"tags": "x" * fitting}))
    assert len(record.properties) == MAX_PROPERTIES_BYTES
    with pytest.raises(OptionError, match=f"take {MAX_PROPERTIES_BYTES + 1} bytes"):
        encode({"tags": "x" * (fitting + 1)})


def parse_size(row: Row) -> bytes:
    (record,) = records_of(encode(row))
    return record.properties


def test_segment_bytes_limits_a_record_with_the_filler_after_it() -> None:
    size = int(encode({"body": bytes(500)}).sizes[0])
    assert len(encode({"body": bytes(500)}, with_encoder=encoder(segment_bytes=size + BLANK_BYTES))) == 1
    with pytest.raises(OptionError) as error:
        encode({}, {"body": bytes(500)}, with_encoder=encoder(segment_bytes=size + BLANK_BYTES - 1))
    assert str(error.value).startswith(
        f"row 1, topic 't': the record takes {size} bytes; expected at most {size - 1} in a segment"
    )


ROWS: list[Row] = [
    {"body": b"one", "tags": "A", "keys": ["k1", "k2"], "properties": [("a", "1"), ("b", "2")], "flag": 3},
    {"topic": "u", "body": b"two", "shardingKey": "s", "queueId": 2},
    {"body": b"three" * 2000, "tags": "B", "properties": [("c", "3")]},
    {},
]


def test_digest_ignores_order_ids_routing_time_and_compression() -> None:
    digest = encode(*ROWS).digest
    assert 0 < digest < 1 << 64
    for seed in range(20):
        shuffled = random.Random(seed).sample(ROWS, len(ROWS))
        assert encode(*shuffled, with_encoder=encoder(random_bits=seed)).digest == digest
    other = encoder(rules=BodyRules(Compression.ZSTD)).encode(batch(*ROWS), QueueRouter(lambda _: 9, 7), BORN_MS + 1)
    assert other.digest == digest


def test_digest_of_parts_adds_up() -> None:
    parts = [encode(*ROWS[:1]), encode(*ROWS[1:3]), encode(*ROWS[3:])]
    assert sum(part.digest for part in parts) % (1 << 64) == encode(*ROWS).digest


def test_digest_is_the_same_for_other_types_of_columns() -> None:
    """A missing column equals a column of nulls, and keys may be lists or strings."""
    given = {"tags": None, "keys": None, "properties": None, "shardingKey": None, "queueId": None, "flag": None}
    assert (
        encode({}).digest
        == encode(given).digest
        == encode({"flag": 0, "properties": [], "keys": [], "tags": ""}).digest
        == encode({"delayLevel": None, "deliverTimestamp": None}).digest
        == encode({"delayLevel": 0}).digest
        == encode({"delayLevel": -1}).digest
    )
    delayed = {"body": b"x", "delayLevel": 5}
    assert encode({}, delayed).digest == (encode({}).digest + encode(delayed).digest) % (1 << 64)
    rows = batch({"keys": ["a", "b"]}).set_column(2, "keys", pa.array(["a b"]))
    assert encoder().encode(rows, QueueRouter(lambda _: 4, 0), BORN_MS).digest == encode({"keys": ["a", "b"]}).digest


CHANGES: dict[str, Callable[[Row], Row]] = {
    "topic": lambda row: {**row, "topic": "t2"},
    "body": lambda row: {**row, "body": b"onE"},
    "longer body": lambda row: {**row, "body": b"one\0"},
    "empty body": lambda row: {**row, "body": b""},
    "tags": lambda row: {**row, "tags": "a"},
    "no tags": lambda row: {**row, "tags": None},
    "key": lambda row: {**row, "keys": ["k1", "k3"]},
    "order of keys": lambda row: {**row, "keys": ["k2", "k1"]},
    "no keys": lambda row: {**row, "keys": None},
    "value": lambda row: {**row, "properties": [("a", "1"), ("b", "3")]},
    "values exchanged": lambda row: {**row, "properties": [("a", "2"), ("b", "1")]},
    "name": lambda row: {**row, "properties": [("a", "1"), ("B", "2")]},
    "less properties": lambda row: {**row, "properties": [("a", "1")]},
    "sharding key": lambda row: {**row, "shardingKey": "k"},
    "flag": lambda row: {**row, "flag": -3},
    "no flag": lambda row: {**row, "flag": None},
    "queue id": lambda row: {**row, "queueId": 0},
    "delay level": lambda row: {**row, "delayLevel": 3},
    "greater delay level": lambda row: {**row, "delayLevel": 19},
    "delay level beyond the last": lambda row: {**row, "delayLevel": 20},
    "time": lambda row: {**row, "deliverTimestamp": BORN_MS * 1000},
    "time to come": lambda row: {**row, "deliverTimestamp": (BORN_MS + 1) * 1000},
    "time before 1970": lambda row: {**row, "deliverTimestamp": -1000},
    "time that is 0": lambda row: {**row, "deliverTimestamp": 0},
    "level and time": lambda row: {**row, "delayLevel": 3, "deliverTimestamp": 0},
}


def test_digest_depends_on_every_field_of_the_user() -> None:
    digests = {encode(*ROWS).digest}
    for change in CHANGES.values():
        digests.add(encode(change(ROWS[0]), *ROWS[1:]).digest)
    assert len(digests) == len(CHANGES) + 1


def test_digest_differs_for_exchanged_fields_and_repeated_rows() -> None:
    one, two = {"body": b"1", "tags": "A"}, {"body": b"2", "tags": "B"}
    crossed = encode({"body": b"1", "tags": "B"}, {"body": b"2", "tags": "A"})
    digests = {encode(one, two).digest, crossed.digest, encode(one, two, two).digest, encode(one, one).digest}
    assert len(digests) == 4


# Stores of real brokers, and of their classes, with all that they leave in properties.
@pytest.mark.parametrize(
    ("name", "lost", "kept"),
    [
        ("basic", {"DELAY"}, {"TAGS", "KEYS"}),
        ("timer", {"TIMER_OUT_MS", "REAL_TOPIC"}, {"TAGS"}),
        ("broker497", set(), {"CLUSTER"}),
        ("livekill533", set(), {"CLUSTER", "WAIT"}),
    ],
)
def test_encode_copies_rows_of_the_source_except_ids_hosts_and_times(
    golden: Path, name: str, lost: set[str], kept: set[str]
) -> None:
    columns = ["topic", "tags", "keys", "body", "properties", "flag"]
    with open_reader(str(golden / name)) as reader:
        queues = [queue for topic in reader.topics() for queue in reader.queues(topic)]
        bounds = [(queue, reader.bounds(queue)) for queue in queues]
        batches = [found for queue, at in bounds for found in reader.read(queue, at.min_offset, at.max_offset, columns)]
    rows = pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
    copied = rows.set_column(0, "topic", pa.repeat(pa.scalar("copy"), rows.num_rows))
    records = records_of(encoder().encode(copied, QueueRouter(lambda _: 4, 0), BORN_MS))
    found_lost: set[str] = set()
    found_kept: set[str] = set()
    for record, row in zip(records, arrow_rows([rows]), strict=True):
        copy, original = parse(record.properties), row["properties"]
        assert (record.body, record.flag) == (row["body"], row["flag"])
        assert (copy.get("TAGS"), copy.get("KEYS")) == (row["tags"], row["keys"])
        assert copy.pop("UNIQ_KEY") != original.pop("UNIQ_KEY", None)
        assert copy == {name: value for name, value in original.items() if name not in ENGINE_OWNED}
        found_lost |= original.keys() - copy.keys()
        found_kept |= copy.keys()
    assert found_lost >= lost
    assert found_kept >= kept
