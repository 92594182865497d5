"""Message encoder: the records equal those of a simple encoder, and the reader returns the messages."""

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.arrow_rows import arrow_rows

from rmq_spark.store import COLUMNS
from rmq_spark.store.format.body_codec import COMPRESSION_TYPE_MASK, BodyRules, Compression, compress_body
from rmq_spark.store.format.columns import decode
from rmq_spark.store.format.delay_levels import DelayLevels
from rmq_spark.store.format.delay_routing import DelayRules
from rmq_spark.store.format.java import Host, encode_host, index_key_hash, string_hash
from rmq_spark.store.format.message_encoder import EncodedRecords, MessageEncoder
from rmq_spark.store.format.message_ids import UniqueIds
from rmq_spark.store.format.properties import encode
from rmq_spark.store.format.property_encoder import ENGINE_OWNED
from rmq_spark.store.format.queue_router import QueueRouter
from rmq_spark.store.format.record import (
    COMPRESSED,
    MAGIC_V1,
    MAGIC_V2,
    RECORD_HEAD,
    Record,
    body_crc,
    encode_record,
    record_size,
)
from rmq_spark.store.format.record_headers import RecordRun
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import SCHEDULE_TOPIC

Row = dict[str, Any]
BORN_HOST, STORE_HOST = Host("10.1.2.3", 0), Host("192.0.2.7", 10911)
BORN_MS, STORE_MS = 1_774_000_000_123, 1_774_000_001_000
LOG_BEGIN = 1 << 33  # physical offsets that take more than four bytes
COMPRESS_OVER = 100
TYPES = {
    "topic": pa.string(),
    "body": pa.binary(),
    "tags": pa.string(),
    "keys": pa.string(),
    "properties": pa.map_(pa.string(), pa.string()),
    "shardingKey": pa.string(),
    "queueId": pa.int32(),
    "flag": pa.int32(),
    "delayLevel": pa.int32(),
    "deliverTimestamp": pa.timestamp("us", tz="UTC"),
}
LEVELS = DelayLevels.parse("1s 5s 10s 30s")
TIMES_US = [0, -1, BORN_MS * 1000, BORN_MS * 1000 + 1, BORN_MS * 1000 + 500_123, (BORN_MS + 259_200_000) * 1000]
TIMES_US += [1_774_000_005_000_000, 1_774_000_005_001_000, 1_774_000_004_999_999]
WRITE_QUEUES = {"t": 4, "orders": 1, "%RETRY%" + "g" * 193: 3, "a" * 127: 2}

usual = settings(deadline=None, derandomize=True, max_examples=300, suppress_health_check=list(HealthCheck))

letters = st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02")
values = st.one_of(
    st.sampled_from(["", "A", "TagA", "k1 k2", " ", "polygenelubricants", "标签", "😀", "a\x01b"]),
    st.text(letters, max_size=20),
)
NAMES = ["TAGS", "KEYS", "__SHARDINGKEY", "WAIT", "CLUSTER", "a", "b", "DELAY", "UNIQ_KEY", "__RMQ.TRANSIENT.x"]
name_letters = st.characters(codec="utf-8", exclude_characters=[*map(chr, range(0x20)), "\x7f"])
names = st.one_of(st.sampled_from(NAMES), st.text(name_letters, min_size=1, max_size=12))
bodies = st.one_of(
    st.just(b""), st.binary(max_size=40), st.integers(0, 400).map(lambda size: b"words and words " * (size // 16))
)


def rows_strategy() -> st.SearchStrategy[list[Row]]:
    """Rows with all columns, as a producer may give them; topics mostly alike."""
    row = st.fixed_dictionaries(
        {
            "topic": st.one_of(st.just("t"), st.sampled_from(sorted(WRITE_QUEUES))),
            "body": bodies,
            "tags": st.none() | values,
            "keys": st.none() | values,
            "properties": st.none() | st.dictionaries(names, st.none() | values, max_size=5),
            "shardingKey": st.none() | values,
            "queueId": st.sampled_from([None, None, 0]),
            "flag": st.none() | st.integers(-(2**31), 2**31 - 1),
            "delayLevel": st.none() | st.sampled_from([0, -1, -(2**31), 1, 4, 5, 19, 2**31 - 1]),
            "deliverTimestamp": st.none() | st.sampled_from(TIMES_US),
        }
    )
    alike = st.tuples(row, st.integers(1, 20)).map(lambda pair: [pair[0]] * pair[1])
    return st.one_of(st.lists(row, min_size=1, max_size=25), alike)


class SlowEncoder:
    """One message at a time, in plain Python."""

    def __init__(self, compression: Compression | None, start: int) -> None:
        self._compression, self._start = compression, start
        self._turns: dict[str, int] = {}
        self._ids = new_ids()

    def encode(self, row: Row) -> tuple[Record, int, list[int]]:
        """Return the record as it is handed to the appender, its tags code and the hashes of its index keys."""
        unique = self._ids.take(1, BORN_MS).texts().tobytes().decode()
        topic, queue_id, added = waiting_place(row, self._queue_id(row))
        properties = {"UNIQ_KEY": unique, **given_properties(row), **added}
        stored, sys_flag = row["body"], 0
        if self._compression is not None and len(stored) >= COMPRESS_OVER:
            packed = compress_body(stored, self._compression)
            if len(packed) < len(stored):
                stored, sys_flag = packed, self._compression.sys_flag
        record = Record(
            total_size=0,
            magic=MAGIC_V2 if len(topic) > 127 else MAGIC_V1,
            body_crc=body_crc(stored),
            queue_id=queue_id,
            flag=row["flag"] or 0,
            queue_offset=0,
            physical_offset=0,
            sys_flag=sys_flag,
            born_timestamp=BORN_MS,
            born_host=encode_host(BORN_HOST),
            store_timestamp=0,
            store_host=encode_host(STORE_HOST),
            reconsume_times=0,
            prepared_transaction_offset=0,
            body=stored,
            topic=topic.encode(),
            properties=encode(properties),
        )
        keys = [unique, *(key for key in properties.get("KEYS", "").split(" ") if key)]
        hashes = [index_key_hash(f"{topic}#{key}") for key in keys]
        return record, string_hash(properties.get("TAGS", "")), hashes

    def _queue_id(self, row: Row) -> int:
        topic, count = row["topic"], WRITE_QUEUES[row["topic"]]
        if row["queueId"] is not None:
            return int(row["queueId"])
        key = row["shardingKey"]
        if key is None:
            key = (row["properties"] or {}).get("__SHARDINGKEY") or None
        if key is not None:
            return abs(string_hash(key)) % count
        turn = self._turns.get(topic, self._start)
        self._turns[topic] = turn + 1
        return turn % count


def given_properties(row: Row) -> dict[str, str]:
    """Return the properties that a reader must find, in their written order."""
    given = dict(row["properties"] or {})
    own = {}
    for name, column in (("TAGS", "tags"), ("KEYS", "keys"), ("__SHARDINGKEY", "shardingKey")):
        from_map = given.pop(name, None)
        own[name] = from_map if row[column] is None else row[column]
    others = {
        name: value
        for name, value in given.items()
        if name not in ENGINE_OWNED and not name.startswith("__RMQ.TRANSIENT.")
    }
    return {name: value for name, value in {**own, **others}.items() if value}


def waiting_place(row: Row, queue_id: int) -> tuple[str, int, dict[str, str]]:
    """Return topic, queue and further properties of a row's record, as a broker does at BORN_MS."""
    level, time_us = row["delayLevel"] or 0, row["deliverTimestamp"]
    real = {"REAL_TOPIC": row["topic"], "REAL_QID": str(queue_id)}
    if level > 0:
        level = min(level, len(LEVELS))
        return SCHEDULE_TOPIC, level - 1, {"DELAY": str(level), **real}
    if time_us is None:
        return row["topic"], queue_id, {}
    time_ms = math.ceil(time_us / 1000)
    times = {"TIMER_DELIVER_MS": str(time_ms)}
    if time_ms <= BORN_MS:
        return row["topic"], queue_id, times
    out_ms = time_ms - 1000 if time_ms % 1000 == 0 else time_ms // 1000 * 1000
    return "rmq_sys_wheel_timer", 0, {**times, "TIMER_OUT_MS": str(out_ms), **real}


def new_ids() -> UniqueIds:
    return UniqueIds("10.1.2.3", 77, 0xCAFE)


def table(rows: list[Row], columns: list[str]) -> pa.RecordBatch:
    """Return the rows as Arrow hands them over."""
    plain = [{**row, "properties": row["properties"] and list(row["properties"].items())} for row in rows]
    arrays = [pa.array([row[name] for row in plain], TYPES[name]) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, columns)


def stamped(records: EncodedRecords, offsets: dict[QueueKey, int]) -> list[tuple[QueueKey, RecordRun]]:
    """Set the fields that an appender sets, with queue offsets from `offsets`; return the records by queue."""
    positions = np.cumsum(records.sizes) - records.sizes
    runs = []
    for number, key in enumerate(records.queues):
        chosen = np.flatnonzero(records.queue_numbers == number)
        queue_offsets = offsets.get(key, 0) + np.arange(len(chosen))
        for position, queue_offset in zip(positions[chosen].tolist(), queue_offsets.tolist(), strict=True):
            head = records.data[position : position + RECORD_HEAD.itemsize].view(RECORD_HEAD)
            assert (int(head["queue_offset"][0]), int(head["physical_offset"][0]), int(head["store_timestamp"][0])) == (
                0,
                0,
                0,
            )
            head["queue_offset"], head["physical_offset"], head["store_timestamp"] = (
                queue_offset, LOG_BEGIN + position, STORE_MS,
            )  # fmt: skip
        runs.append(
            (
                key,
                RecordRun(
                    records.data, positions[chosen], records.sizes[chosen], LOG_BEGIN + positions[chosen],
                    queue_offsets, key.topic, key.queue_id,
                ),
            )
        )  # fmt: skip
    return runs


@pytest.mark.slow
@usual
@given(
    rows_strategy(),
    st.lists(st.sampled_from(sorted(TYPES)), unique=True),
    st.sampled_from([None, *Compression]),
    st.integers(0, 2**32 - 1),
    st.integers(0, 30),
)
def test_encode_equals_a_simple_encoder(
    rows: list[Row], dropped: list[str], compression: Compression | None, start: int, cut: int
) -> None:
    columns = [name for name in TYPES if name not in dropped or name in ("topic", "body")]
    rows = [{name: value if name in columns else None for name, value in row.items()} for row in rows]
    fast = MessageEncoder(
        born_host=BORN_HOST,
        store_host=STORE_HOST,
        ids=new_ids(),
        body_rules=BodyRules(compression, COMPRESS_OVER),
        delay_rules=DelayRules(LEVELS),
    )
    router = QueueRouter(WRITE_QUEUES.__getitem__, start)
    slow = SlowEncoder(compression, start)
    whole = table(rows, columns)
    for part in (slice(0, cut), slice(cut, len(rows))):
        encoded = fast.encode(whole.slice(part.start, max(min(part.stop, len(rows)) - part.start, 0)), router, BORN_MS)
        assert_alike(encoded, rows[part], slow)
        assert_read(encoded, rows[part])


def assert_alike(encoded: EncodedRecords, rows: list[Row], slow: SlowEncoder) -> None:
    expected = [slow.encode(row) for row in rows]
    records = [encode_record(with_size(record)) for record, _, _ in expected]
    assert encoded.data.tobytes() == b"".join(records)
    assert len(encoded) == len(rows)
    assert encoded.sizes.tolist() == [len(record) for record in records]
    assert encoded.tags_codes.tolist() == [tags_code for _, tags_code, _ in expected]
    keys = [(row, key_hash) for row, (_, _, hashes) in enumerate(expected) for key_hash in hashes]
    assert list(zip(encoded.key_rows.tolist(), encoded.key_hashes.tolist(), strict=True)) == keys
    queues = [QueueKey(record.topic.decode(), record.queue_id) for record, _, _ in expected]
    assert [encoded.queues[number] for number in encoded.queue_numbers] == queues
    assert len(set(encoded.queues)) == len(encoded.queues) == len(set(queues))


def found_real_queue(found: Row) -> int:
    """Return the target queue of a message, which may be delayed."""
    return int(found["properties"].get("REAL_QID", found["queueId"]))


def with_size(record: Record) -> Record:
    fields = {name: getattr(record, name) for name in record.__slots__}
    return Record(**{**fields, "total_size": record_size(record)})


def assert_read(encoded: EncodedRecords, rows: list[Row]) -> None:
    """See that a reader finds what was given."""
    for number, (_, run) in enumerate(stamped(encoded, {})):
        chosen = np.flatnonzero(encoded.queue_numbers == number).tolist()
        batch, next_offset = decode(run, list(COLUMNS), 0, len(run), DecodeLimits(check_crc=True))
        assert next_offset == len(run)
        for found, row in zip(arrow_rows([batch]), (rows[at] for at in chosen), strict=True):
            properties = given_properties(row)
            topic, queue_id, added = waiting_place(row, found_real_queue(found))
            assert (found["topic"], found["queueId"]) == (topic, queue_id)
            assert found["body"] == row["body"]
            assert found["tags"] == properties.get("TAGS")
            assert found["keys"] == properties.get("KEYS")
            assert found["properties"] == {"UNIQ_KEY": found["msgId"], **properties, **added}
            assert found["flag"] == (row["flag"] or 0)
            assert (found["bornHost"], found["storeHost"]) == ("10.1.2.3:0", "192.0.2.7:10911")
            assert (found["bornTimestamp"], found["storeTimestamp"]) == (BORN_MS * 1000, STORE_MS * 1000)
            assert found["reconsumeTimes"] == found["sysFlag"] & ~(COMPRESSED | COMPRESSION_TYPE_MASK) == 0
