"""Bodies of pulls as record batches, compared with what a store directory's reader gives for the same records."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.remoting_frames import read_frames

from rmq_spark.store.backend import BROKER_NAME, COLUMNS
from rmq_spark.store.cluster.codes import PullStatus, RequestCode
from rmq_spark.store.cluster.pull_pipeline import Pull, Pulled, Verdict, judge
from rmq_spark.store.cluster.pulled_records import (
    BATCH_ROWS,
    NotARecordError,
    PulledQueue,
    decode_pulled,
    decode_small_ranges,
    find_records,
)
from rmq_spark.store.cluster.requests import PullRequest
from rmq_spark.store.cluster.responses import PullResponse
from rmq_spark.store.errors import DamageError, OffsetRangeError, StoreChangedError
from rmq_spark.store.filter.row_filter import RowFilter, only_tags
from rmq_spark.store.format.body_codec import Compression, compress_body
from rmq_spark.store.format.columns import COLUMNS as RECORD_COLUMNS
from rmq_spark.store.format.record import MAGIC_V1, MIN_RECORD_BYTES, RECORD_HEAD, encode_record
from rmq_spark.store.format.record_batch import walk_records
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.model import QueueKey, QueueRange
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store, build_uniform_store
from rmq_spark.store.testing.strategies import inner_batches, messages

TOPIC = "orders"
QUEUE = QueueKey(TOPIC, 1, "broker-a")
SOURCE = PulledQueue(QUEUE, TOPIC)
LIMITS = DecodeLimits()
ALL = tuple(RECORD_COLUMNS)


def records_of(samples: Sequence[SampleMessage], first: int = 0) -> list[tuple[int, bytes]]:
    """Return queue offset and bytes of the records that a broker stores for messages of one queue."""
    found, offset, place = [], first, 1 << 33
    for number, sample in enumerate(samples):
        data = encode_record(sample.as_record(offset, place, 1_700_000_000_000 + number))
        found.append((offset, data))
        offset += max(sample.message_count, 1)
        place += len(data) + 7
    return found


def answers(records: Sequence[tuple[int, bytes]], end: int, sizes: Sequence[int]) -> list[Pulled]:
    """Return the records as answers of this many records each; the last size is used for the rest."""
    found, at, number = [], 0, 0
    while at < len(records):
        size = sizes[min(number, len(sizes) - 1)]
        part = records[at : at + size]
        at, number = at + size, number + 1
        found.append(Pulled(part[0][0], records[at][0] if at < len(records) else end, b"".join(d for _, d in part)))
    return found


def decode(
    pulled: Sequence[Pulled],
    columns: Sequence[str] = ALL,
    wanted: RowFilter | None = None,
    source: PulledQueue = SOURCE,
    limits: DecodeLimits = LIMITS,
    *,
    is_filtered: bool = False,
) -> pa.Table:
    """Return all rows. Checks the progress of the batches, and the schema."""
    batches, before = [], pulled[0].offset
    for batch, next_offset in decode_pulled(source, pulled, columns, limits, wanted, is_filtered=is_filtered):
        assert next_offset > before
        assert batch.schema == pa.schema([(name, COLUMNS[name]) for name in columns])
        if "queueOffset" in columns:
            assert all(before <= offset < next_offset for offset in batch.column("queueOffset").to_pylist())
        batches.append(batch)
        before = next_offset
    assert before == pulled[-1].next_offset
    return pa.Table.from_batches(batches)


def read_store(path: Path, queue: QueueKey, columns: Sequence[str] = ALL) -> pa.Table:
    reader = StoreReader(str(path))
    bounds = reader.bounds(queue)
    batches = list(reader.read(queue, bounds.min_offset, bounds.max_offset, columns))
    reader.close()
    schema = pa.schema([(name, COLUMNS[name]) for name in columns])
    return pa.Table.from_batches(batches, schema)


def log_records(path: Path, queue: QueueKey) -> list[bytes]:
    """Return the records of a queue from the files of a store's commit log."""
    found = []
    for file in sorted((path / "commitlog").iterdir()):
        data = file.read_bytes()
        positions, end = walk_records(data)
        for begin, stop in zip(positions.tolist(), [*positions.tolist()[1:], end], strict=True):
            if struct.unpack_from(">i", data, begin + 12)[0] == queue.queue_id:
                found.append(data[begin:stop])
    return found


def sample(number: int, **changes: Any) -> SampleMessage:
    fields: dict[str, Any] = {
        "queue_id": 1,
        "body": b"body %d" % number,
        "tags": ("red", "green", None)[number % 3],
        "keys": f"k{number}",
        "properties": {"UNIQ_KEY": f"{number:032X}", "number": str(number)},
    }
    return SampleMessage(TOPIC, **{**fields, **changes})


# Equal to a store directory.


@settings(max_examples=25)
@given(data=st.data())
def test_rows_equal_those_of_a_directory_in_every_column(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    samples = data.draw(st.lists(messages(TOPIC, 1), min_size=1, max_size=30))
    path = tmp_path_factory.mktemp("store") / "store"
    build_store(path, samples, segment_bytes=1 << 20)
    records = list(enumerate(log_records(path, QueueKey(TOPIC, 1))))
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    found = decode(answers(records, len(records), sizes))
    assert found.equals(read_store(path, QueueKey(TOPIC, 1)))


@settings(max_examples=25)
@given(data=st.data())
def test_inner_batches_equal_those_of_a_directory(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    either = st.one_of(inner_batches(TOPIC, 1), messages(TOPIC, 1))
    samples = [data.draw(inner_batches(TOPIC, 1)), *data.draw(st.lists(either, max_size=10))]
    path = tmp_path_factory.mktemp("store") / "store"
    build_store(path, samples, segment_bytes=1 << 20, batch_topics=(TOPIC,))
    records, offset = [], 0
    for one, record in zip(samples, log_records(path, QueueKey(TOPIC, 1)), strict=True):
        records.append((offset, record))
        offset += max(one.message_count, 1)
    whole = read_store(path, QueueKey(TOPIC, 1))
    assert decode(answers(records, offset, [3])).equals(whole)
    inside = samples[0].message_count - 1  # the range begins and ends inside of a batch
    if inside:
        (first, *_) = answers(records[:1], inside, [1])
        part = decode([first._replace(offset=inside - 1)], ["queueOffset", "body"])
        assert part.equals(whole.select(["queueOffset", "body"]).slice(inside - 1, 1))


@pytest.mark.parametrize("columns", [["body"], ["queueOffset"], ["tags", "storeTimestamp"], ["brokerName", "body"], []])
def test_some_columns_of_uniform_records(columns: list[str], tmp_path: Path) -> None:
    build_uniform_store(tmp_path / "s", topic=TOPIC, queue_count=2, message_count=6_000, segment_bytes=1 << 20)
    records = list(enumerate(log_records(tmp_path / "s", QueueKey(TOPIC, 1))))
    stored = [name for name in columns if name != BROKER_NAME]
    expected = read_store(tmp_path / "s", QueueKey(TOPIC, 1), stored)
    found = decode(answers(records, 3_000, [32, 1024, 100]), columns)
    assert found.num_rows == 3_000
    assert found.select(stored).equals(expected)
    if BROKER_NAME in columns:
        assert set(found.column(BROKER_NAME).to_pylist()) == {"broker-a"}


def test_batches_have_a_limited_number_of_rows() -> None:
    (_, record), *_ = records_of([sample(0)])
    count = BATCH_ROWS + 5
    body = np.tile(np.frombuffer(record, np.uint8), (count, 1))
    heads = np.ndarray((count,), RECORD_HEAD, body.data, strides=(len(record),))
    heads["queue_offset"] = heads["physical_offset"] = np.arange(count)
    found = list(decode_pulled(SOURCE, [Pulled(0, count, body.tobytes())], ["queueOffset"], LIMITS))
    assert [(part.batch.num_rows, part.next_offset) for part in found] == [(BATCH_ROWS, BATCH_ROWS), (5, count)]


def test_large_decompressed_bodies_are_divided_among_batches() -> None:
    body = compress_body(bytes(1000), Compression.ZLIB)
    pulled = answers(records_of([sample(n, body=body, sys_flag=1) for n in range(10)]), 10, [4])
    limits = DecodeLimits(result_decompressed_bytes=2500)
    found = list(decode_pulled(SOURCE, pulled, ["queueOffset", "body"], limits))
    assert [part.next_offset for part in found] == [2, 4, 6, 8, 10]
    assert [row for part in found for row in part.batch.column("queueOffset").to_pylist()] == list(range(10))
    with pytest.raises(DamageError, match="one that decompresses"):
        list(decode_pulled(SOURCE, pulled, ["body"], DecodeLimits(max_decompressed_bytes=999)))


# Filters.


def test_filtered_answers_need_not_be_dense() -> None:
    records = records_of([sample(number) for number in range(90)])
    red = [(offset, data) for offset, data in records if offset % 3 == 0]
    pulled = [
        Pulled(0, 30, b"".join(data for offset, data in red if offset < 30)),
        Pulled(30, 40, b""),
        Pulled(40, 60, b"".join(data for offset, data in red if 40 <= offset < 75)),
        Pulled(60, 90, b"".join(data for offset, data in red if offset >= 60)),
    ]
    found = decode(pulled, ["queueOffset", "tags"], only_tags(["red"]), is_filtered=True)
    assert found.column("queueOffset").to_pylist() == [n for n in range(0, 90, 3) if n < 30 or n >= 40]


def test_what_the_broker_did_not_filter_is_filtered_here() -> None:
    pulled = answers(records_of([sample(number) for number in range(90)]), 90, [7])
    for is_filtered in (False, True):
        found = decode(pulled, ["queueOffset"], only_tags(["red"]), is_filtered=is_filtered)
        assert found.column("queueOffset").to_pylist() == list(range(0, 90, 3))


@pytest.mark.parametrize("pulled", [[Pulled(5, 800, b"")], [Pulled(5, 6, b""), Pulled(6, 9, b"")]])
def test_answers_without_messages_report_progress(pulled: list[Pulled]) -> None:
    assert decode(pulled, ["brokerName", "body"], only_tags(["red"]), is_filtered=True).num_rows == 0


def test_messages_above_the_searched_offsets_only_report_progress() -> None:
    (record,) = records_of([sample(0)], 70)
    found = decode([Pulled(5, 60, record[1])], ["body"], only_tags(["red"]), is_filtered=True)
    assert found.num_rows == 0


@pytest.mark.parametrize("offsets", [[3, 7], [9, 7], [7, 7]])
def test_filtered_messages_outside_of_the_search_are_damage(offsets: list[int]) -> None:
    body = b"".join(records_of([sample(0)], offset)[0][1] for offset in offsets)
    with pytest.raises(DamageError, match="queue offset"):
        decode([Pulled(5, 60, body)], ["body"], only_tags(["red"]), is_filtered=True)


# Answers of real brokers.


def golden_pulls() -> list[tuple[Pull, PullResponse, Any]]:
    """Return all recorded pulls with their answers and the recorded messages, or None if there are none."""
    found = []
    for frame in read_frames():
        asked = frame.request
        if frame.line["kind"] != "response" or asked is None or asked["code"] != RequestCode.PULL_MESSAGE:
            continue
        command = frame.command()
        fields = asked["ext"]
        if command.code not in (0, 19, 20, 21) or "nextBeginOffset" not in command.fields:
            continue
        queue = QueueKey(fields["topic"], int(fields["queueId"]), "broker-a")
        response = PullRequest(queue, 0, 1, "g").read(command)
        pull = Pull(0, queue, int(fields["queueOffset"]), int(fields["maxMsgNums"]), 0)
        found.append((pull, response, (frame.line.get("body") or {}).get("messages")))
    return found


def test_golden_pulls_decode_to_the_recorded_messages() -> None:
    count = 0
    columns = ["topic", "queueId", "queueOffset", "commitLogOffset", "sysFlag", "reconsumeTimes", "properties"]
    names = ["topic", "queueId", "queueOffset", "phys", "sysFlag", "recon", "properties"]
    for pull, response, recorded in golden_pulls():
        if response.status is not PullStatus.FOUND:
            continue
        pulled = Pulled(pull.offset, response.next_offset, response.records)
        offsets = [message["queueOffset"] for message in recorded]
        is_dense = offsets == list(range(pull.offset, response.next_offset))
        source = PulledQueue(pull.queue, pull.queue.topic)
        rows = decode([pulled], [*columns, "body"], source=source, is_filtered=not is_dense).to_pylist()
        for row, message in zip(rows, recorded, strict=True):
            assert {**row, "properties": dict(row["properties"])} == {
                **dict(zip(columns, (message[name] for name in names), strict=True)),
                "body": row["body"] if "bodyText" not in message else message["bodyText"].encode(),
            }
        count += len(rows)
    assert count > 50


def test_golden_pulls_are_judged_by_their_status() -> None:
    meanings: dict[str, set[object]] = {}
    for pull, response, _ in golden_pulls():
        part = QueueRange(pull.queue, 0, 10_000)
        for is_filtered in (False, True):
            found = judge(pull, response, part, is_filtered=is_filtered)
            meaning = type(found) if not isinstance(found, Verdict) else found
            meanings.setdefault(response.reason, set()).add(meaning)
    assert meanings == {
        "FOUND": {int},
        "NO_MATCHED_MESSAGE": {int, OffsetRangeError},
        "MESSAGE_WAS_REMOVING": {OffsetRangeError},
        "OFFSET_TOO_SMALL": {OffsetRangeError},
        "OFFSET_OVERFLOW_ONE": {Verdict.SHORT_QUEUE},
        "OFFSET_OVERFLOW_BADLY": {Verdict.SHORT_QUEUE},
        "NO_MESSAGE_IN_QUEUE": {Verdict.SHORT_QUEUE},
        "OFFSET_RESET": {Verdict.RESET},
    }


# Names.


@pytest.mark.parametrize("topic", ["orders", "%RETRY%billing", "%DLQ%billing", "orders%x"])
def test_columns_do_not_show_the_namespace(topic: str) -> None:
    head, _, rest = topic.rpartition("%") if topic[0] == "%" else ("", "", topic)
    prefix = f"{head}%" if head else ""
    stored = f"{prefix}team%{rest}"
    first = replace(sample(0), topic=stored, properties={"RETRY_TOPIC": "team%orders"})
    second = replace(sample(1), topic=stored, properties={"RETRY_TOPIC": "other%orders"})
    source = PulledQueue(QueueKey(topic, 1, "broker-a"), stored, "team")
    found = decode(answers(records_of([first, second]), 2, [2]), ["topic", "physicalTopic", "queueId"], source=source)
    assert found.column("physicalTopic").to_pylist() == [topic, topic]
    is_retry = topic.startswith("%RETRY%")
    assert found.column("topic").to_pylist() == (["orders", "other%orders"] if is_retry else [topic, topic])


def test_long_topics_have_records_of_version_2() -> None:
    topic = "t" * 200
    samples = [replace(sample(number), topic=topic) for number in range(5)]
    found = decode(answers(records_of(samples), 5, [3]), ["topic"], source=PulledQueue(QUEUE, topic))
    assert found.column("topic").to_pylist() == [topic] * 5


# Damage.


def changed(records: Sequence[tuple[int, bytes]], row: int, change: Callable[[bytearray], object]) -> list[Pulled]:
    """Return the records in answers of 4, after one record was changed."""
    data = bytearray(records[row][1])
    change(data)
    copy = [*records]
    copy[row] = copy[row][0], bytes(data)
    return answers(copy, records[0][0] + len(records), [4])


def put(at: int, layout: str, value: int) -> Callable[[bytearray], object]:
    return lambda data: struct.pack_into(layout, data, at, value)


DAMAGES: dict[str, tuple[Callable[[bytearray], object], str]] = {
    "size too large": (put(0, ">i", 10_000), "a complete record"),
    "size of the next record too": (lambda data: data.extend(bytes(3)), "a complete record"),
    "negative size": (put(0, ">i", -5), "a complete record"),
    "size too small": (put(0, ">i", MIN_RECORD_BYTES - 1), "a complete record"),
    "magic": (put(4, ">I", 0xCBD43194), "a complete record"),
    "cut": (lambda data: data.__delitem__(slice(-1, None)), "a complete record"),
    "queue id": (put(12, ">i", 2), "queue id"),
    "physical offset": (put(28, ">q", 5), "physical offset"),
    "negative physical offset": (put(28, ">q", -5), "physical offset"),
    "earlier queue offset": (put(20, ">q", 0), "queue offset"),
    "queue offset beyond the range": (put(20, ">q", 1 << 40), "queue offset"),
    "topic": (lambda data: data.__setitem__(slice(None), data.replace(b"orders", b"orderx")), "topic.*orderx"),
    "length of the topic": (lambda data: data.__setitem__(data.index(b"\x06orders"), 5), "topic"),
    "body size": (put(84, ">i", 1 << 20), "topic"),
    "negative body size": (put(84, ">i", -100), "topic"),
    "sys flag of a batch": (put(36, ">i", 0x80), "INNER_NUM"),
    "properties": (lambda data: data.__setitem__(data.index(b"orders") + 7, 3), "properties"),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("row", [0, 5, 8, 11])
def test_damage_is_an_error(name: str, row: int) -> None:
    change, text = DAMAGES[name]
    if row == 0:  # with these values the first record would be right
        change = {"earlier queue offset": put(20, ">q", 49), "physical offset": put(28, ">q", 1 << 60)}.get(
            name, change
        )
    records = records_of([sample(number) for number in range(12)], 50)
    with pytest.raises(DamageError, match=f"(?s){text}") as caught:
        decode(changed(records, row, change), ALL)
    assert "broker-a" in str(caught.value)


def test_damage_names_the_message() -> None:
    records = records_of([sample(number) for number in range(12)], 50)
    with pytest.raises(DamageError) as caught:
        decode(changed(records, 5, put(12, ">i", 2)), ["body"])
    place = struct.unpack_from(">q", records[5][1], 28)[0]
    assert caught.value.path == "commit log of broker broker-a"
    assert caught.value.position == place
    assert f"message 55 of queue orders/broker-a:1 at physical offset {place}" in caught.value.what
    assert (caught.value.expected, caught.value.found) == (1, 2)


def test_crc_is_checked_if_asked() -> None:
    records = records_of([sample(number) for number in range(12)])
    pulled = changed(records, 5, lambda data: data.__setitem__(90, data[90] ^ 1))
    assert decode(pulled, ["body"]).num_rows == 12
    with pytest.raises(DamageError, match="CRC of the body, message 5 "):
        decode(pulled, ["body"], limits=DecodeLimits(check_crc=True))


@pytest.mark.parametrize(("gone", "lost"), [([6], (6, 7)), ([5, 6, 7], (5, 8)), ([11], (11, 12)), ([4], (4, 5))])
def test_missing_messages_are_an_error(gone: list[int], lost: tuple[int, int]) -> None:
    records = [one for one in records_of([sample(number) for number in range(12)]) if one[0] not in gone]
    with pytest.raises(StoreChangedError, match=rf"\[{lost[0]}, {lost[1]}\) are missing"):
        decode([Pulled(0, 12, b"".join(data for _, data in records))], ["body"])


def test_more_messages_than_were_asked_for_are_damage() -> None:
    records = records_of([sample(number) for number in range(12)])
    with pytest.raises(DamageError, match="queue offset"):
        decode([Pulled(0, 11, b"".join(data for _, data in records))], ["body"])


# Small ranges of several queues.


def small_ranges(random: Random) -> tuple[list[PulledQueue], list[list[Pulled]], list[pa.Table]]:
    """Return queues of one topic, answers for a range of each, and the rows of each."""
    sources = [PulledQueue(QueueKey(TOPIC, number, "broker-a"), TOPIC) for number in range(random.randrange(1, 6))]
    pulled = []
    for source in sources:
        first, count = random.randrange(1000), random.randrange(1, 12)
        samples = [sample(number, queue_id=source.queue.queue_id) for number in range(count)]
        pulled.append(answers(records_of(samples, first), first + count, [random.randrange(1, 5)]))
    return sources, pulled, [decode(one, source=source) for source, one in zip(sources, pulled, strict=True)]


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_small_ranges_have_the_rows_of_each_range(seed: int) -> None:
    sources, pulled, tables = small_ranges(Random(seed))
    found = decode_small_ranges(sources, pulled, ALL, LIMITS)
    assert found is not None
    assert pa.Table.from_batches([found]).combine_chunks().equals(pa.concat_tables(tables).combine_chunks())


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_small_ranges_that_were_filtered_have_the_rows_of_each_range(seed: int) -> None:
    sources, pulled, tables = small_ranges(Random(seed))
    pulled = [[one._replace(offset=max(one.offset - 3, 0)) for one in parts[:1]] for parts in pulled]
    wanted = only_tags(frozenset({"red"}))
    expected = [decode(one, ALL, wanted, source, is_filtered=True) for source, one in zip(sources, pulled, strict=True)]
    found = decode_small_ranges(sources, pulled, ALL, LIMITS, wanted, is_filtered=True)
    assert found is not None
    assert pa.Table.from_batches([found]).combine_chunks().equals(pa.concat_tables(expected).combine_chunks())
    assert len(expected) == len(tables)


def test_small_ranges_without_messages_have_no_rows() -> None:
    found = decode_small_ranges([SOURCE], [[Pulled(0, 5, b"")]], ["body", "brokerName"], LIMITS, is_filtered=True)
    assert found is not None
    assert found.schema.names == ["body", "brokerName"]
    assert found.num_rows == 0


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_small_ranges_with_mutated_bodies_have_the_same_rows_or_are_read_apart(seed: int) -> None:
    random = Random(seed)
    sources, pulled, tables = small_ranges(random)
    changed_part = random.choice(pulled)
    body = bytearray(changed_part[0].body)
    at = random.randrange(len(body))
    body[at] ^= random.randrange(1, 256)
    changed_part[0] = changed_part[0]._replace(body=bytes(body))
    limits = DecodeLimits(check_crc=True)
    found = decode_small_ranges(sources, pulled, ALL, limits)
    expected = [decode_or_none(one, source, limits) for source, one in zip(sources, pulled, strict=True)]
    if None in expected:
        assert found is None
    elif found is not None:
        assert pa.Table.from_batches([found]).combine_chunks().equals(pa.concat_tables(expected).combine_chunks())
    assert len(tables) == len(sources)


def decode_or_none(pulled: list[Pulled], source: PulledQueue, limits: DecodeLimits) -> pa.Table | None:
    try:
        return decode(pulled, source=source, limits=limits)
    except (DamageError, StoreChangedError):
        return None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda parts: parts.reverse(),
        lambda parts: parts[0].__setitem__(0, parts[0][0]._replace(next_offset=99)),
        lambda parts: parts[0].__setitem__(0, parts[0][0]._replace(offset=1)),
    ],
    ids=["queues", "end", "begin"],
)
def test_small_ranges_that_differ_from_their_answers_are_read_apart(spoil: Callable[[Any], None]) -> None:
    sources = [PulledQueue(QueueKey(TOPIC, number, "broker-a"), TOPIC) for number in range(2)]
    parts = [answers(records_of([sample(n, queue_id=number) for n in range(6)]), 6, [3]) for number in range(2)]
    spoil(parts)
    assert decode_small_ranges(sources, parts, ["body"], LIMITS) is None


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_mutated_bodies_give_the_same_rows_or_an_error(seed: int) -> None:
    random = Random(seed)
    records = records_of([sample(number, body=random.randbytes(random.randrange(60))) for number in range(20)])
    pulled = answers(records, 20, [random.randrange(1, 21)])
    number = random.randrange(len(pulled))
    body = bytearray(pulled[number].body)
    for _ in range(random.randrange(1, 4)):
        body[random.randrange(len(body))] = random.randrange(256)
    pulled[number] = pulled[number]._replace(body=bytes(body[: random.choice([None, random.randrange(1, len(body))])]))
    columns = random.choice([ALL, ("body",), ("queueOffset", "topic"), ()])
    try:
        found = decode(pulled, columns, limits=DecodeLimits(check_crc=True))
    except (DamageError, StoreChangedError):
        return
    assert found.num_rows == 20
    if "queueOffset" in columns:
        assert found.column("queueOffset").to_pylist() == list(range(20))


# Begins of records.


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), lane_kib=st.sampled_from([0, 16, 100]))
def test_find_records_finds_the_records_that_a_walk_finds(seed: int, lane_kib: int) -> None:
    random, data, bounds = Random(seed), bytearray(), [0]
    magic = struct.pack(">I", MAGIC_V1)
    for _ in range(random.randrange(1, 6)):
        for _ in range(random.choice([1, 5, 400])):
            body = random.randbytes(random.randrange(0, 200)) + random.choice([b"", magic, bytes(100)])
            if random.random() < 0.02:  # a record inside of a body
                body += struct.pack(">iI", 100, MAGIC_V1) + bytes(92)
            size = random.choice([MIN_RECORD_BYTES, 120, MIN_RECORD_BYTES + len(body), lane_kib << 10])
            size = max(size, MIN_RECORD_BYTES)
            data += (struct.pack(">iI", size, MAGIC_V1) + body).ljust(size, b"\0")[:size]
        bounds.append(len(data))
    begins, ends = np.array(bounds[:-1]), np.array(bounds[1:])
    expected, end = walk_records(bytes(data))
    assert end == len(data)
    assert find_records(bytes(data), begins, ends).tolist() == expected.tolist()


def test_find_records_names_the_first_place_without_a_record() -> None:
    record = struct.pack(">iI", 100, MAGIC_V1).ljust(100, b"\0")
    data = record * 3 + bytes(100) + record
    with pytest.raises(NotARecordError) as caught:
        find_records(data, np.array([0, 200]), np.array([200, 500]))
    assert caught.value.position == 300
    with pytest.raises(NotARecordError) as caught:
        find_records(data[:250], np.array([0]), np.array([250]))
    assert caught.value.position == 200
