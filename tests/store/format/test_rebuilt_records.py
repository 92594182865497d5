"""`rebuild_records`: the copies equal those made record by record, for all kinds of records."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rebuild_twin import rebuild_one

from rmq_spark.store.format.java import Host
from rmq_spark.store.format.message_columns import RowFault, Topics
from rmq_spark.store.format.properties import parse
from rmq_spark.store.format.record import Record, decode_record, encode_record, record_size
from rmq_spark.store.format.record_batch import NotWholeError, WholeRecords, are_whole
from rmq_spark.store.format.record_rewrite import rebuild_records
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.strategies import inner_batches, messages, property_texts

TARGETS = ("orders", "%RETRY%billing", "T" * 127, "%RETRY%" + "g" * 121, "%DLQ%" + "g" * 248, "标签" * 30)
HOSTS = (Host("10.1.2.3", 54321), Host("2001:db8::1", 10911))


def _record(message: SampleMessage) -> bytes:
    return encode_record(message.as_record(queue_offset=7, physical_offset=4711, store_timestamp=1_700_000_000_000))


def _buffer(records: list[bytes], gap: bytes = b"") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    begins, data = [], b""
    for record in records:
        data += gap
        begins.append(len(data))
        data += record
    positions = np.array(begins, np.int64)
    return np.frombuffer(data, np.uint8), positions, positions + [len(record) for record in records]


def _topics(names: list[str]) -> Topics:
    distinct = tuple(dict.fromkeys(names))
    if len(distinct) == 1:
        return Topics(distinct, None)
    return Topics(distinct, np.array([distinct.index(name) for name in names], np.int64))


@st.composite
def _cases(draw: st.DrawFn):
    names = st.sampled_from(["SCHEDULE_TOPIC_XXXX", "a", "R" * 127, "%RETRY%" + "r" * 200])
    one = names.flatmap(lambda name: st.one_of(messages(name, 3), messages(name, 3), inner_batches(name, 3)))
    found = draw(st.lists(one, min_size=1, max_size=12))
    if draw(st.booleans()):  # all alike, which takes other ways through the columns
        found = found[:1] * draw(st.integers(1, 20))
    count = len(found)
    targets = draw(st.lists(st.sampled_from(TARGETS), min_size=count, max_size=count))
    if draw(st.booleans()):
        targets = targets[:1] * count
    queue_ids = draw(st.lists(st.sampled_from([0, 1, 17, 2**31 - 1]), min_size=count, max_size=count))
    texts = draw(st.none() | st.lists(property_texts(), min_size=count, max_size=count))
    times = draw(st.none() | st.lists(st.integers(-(2**31), 2**31 - 1), min_size=count, max_size=count))
    return [_record(one) for one in found], targets, queue_ids, texts, times, draw(st.sampled_from([b"", b"\xff" * 5]))


@pytest.mark.parametrize(
    "text",
    [
        b"a\x01b\x02__CRC32#\x011234567890\x02",
        b"__CRC32#\x011234567890\x02a\x01b\x01c\x02__CRC32#\x01",  # as a sender may write it
        b"__CRC32#\x01",
        b"x__CRC32#\x01kept\x02odd\x02",
        b"no __CRC32# of a record\x01b\x02odd\x02",
    ],
)
def test_rebuild_records_drops_the_crc_of_the_record(text):
    plain = decode_record(_record(SampleMessage("a", 0, b"x")))
    assert isinstance(plain, Record)
    with_text = replace(plain, properties=text)
    record = encode_record(replace(with_text, total_size=record_size(with_text)))
    only = rebuild_one(record, "orders", 0)
    made = rebuild_records(*_buffer([record]), topics=_topics(["orders"]), queue_ids=np.zeros(1, np.int64))
    assert made.data.tobytes() == only.data
    assert (b"__CRC32#\x01" in only.data) == (b"x__CRC32#\x01" in text)


@pytest.mark.slow
@given(_cases())
def test_rebuild_records_equals_a_copy_record_by_record(case):
    records, targets, queue_ids, texts, times, gap = case
    made = rebuild_records(
        *_buffer(records, gap),
        topics=_topics(targets),
        queue_ids=np.array(queue_ids, np.int64),
        properties=None if texts is None else pa.array(texts, pa.binary()),
        reconsume_times=None if times is None else np.array(times, np.int64),
    )
    twins = [
        rebuild_one(
            record, topic, queue_id, None if texts is None else texts[row], None if times is None else times[row]
        )
        for row, (record, topic, queue_id) in enumerate(zip(records, targets, queue_ids, strict=True))
    ]
    ends = np.cumsum(made.sizes).tolist()
    view = made.data.tobytes()
    assert [view[begin:end] for begin, end in zip([0, *ends], ends, strict=False)] == [twin.data for twin in twins]
    assert [made.queues[number] for number in made.queue_numbers] == [twin.queue for twin in twins]
    assert len(set(made.queues)) == len(made.queues)
    assert made.tags_codes.tolist() == [twin.tags_code for twin in twins]
    keys = [(row, key) for row, twin in enumerate(twins) for key in twin.key_hashes]
    assert list(zip(made.key_rows.tolist(), made.key_hashes.tolist(), strict=True)) == keys
    made.data[:] = 0  # the appender writes into it


@pytest.mark.slow
@given(_cases(), st.data())
def test_are_whole_equals_decode_record(case, data):
    record = bytearray(case[0][0])
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.one_of(st.integers(0, len(record) - 1), st.integers(0, min(len(record), 120) - 1)))
        record[place] = data.draw(st.integers(0, 255))
    records = [bytes(record), *case[0]]
    buffer, positions, ends = _buffer(records)
    cut = data.draw(st.integers(0, len(record)))
    ends[0] = positions[0] + cut

    def is_one(begin: int, end: int) -> bool:
        found = decode_record(buffer[begin:end].tobytes())
        return isinstance(found, Record) and found.total_size == end - begin

    expected = [is_one(begin, end) for begin, end in zip(positions.tolist(), ends.tolist(), strict=True)]
    assert are_whole(buffer, positions, ends).tolist() == expected


def test_whole_records_finds_the_parts_of_all_kinds_of_records():
    kinds = [
        SampleMessage("orders", 5, b"body", tags="a", born_host=born, store_host=stored, reconsume_times=4)
        for born in HOSTS
        for stored in HOSTS
    ]
    records = [decode_record(_record(kind)) for kind in kinds]
    found = WholeRecords.of(*_buffer([_record(kind) for kind in kinds]))
    for name in ("queue_id", "store_timestamp", "reconsume_times", "body_crc", "born_timestamp", "sys_flag"):
        assert found.field(name).tolist() == [getattr(record, name) for record in records], name
    assert found.topics().to_pylist() == [b"orders"] * 4
    assert [parse(text) for text in found.texts().to_pylist()] == [{"TAGS": "a"}] * 4
    assert found.pairs().column("TAGS").to_pylist() == ["a"] * 4


def test_rebuild_records_of_no_records_is_empty():
    none = np.zeros(0, np.int64)
    made = rebuild_records(np.zeros(0, np.uint8), none, none, topics=Topics(("a",), None), queue_ids=none)
    assert len(made) == 0
    assert made.queues == ()


def test_rebuild_records_refuses_an_invalid_range_with_its_row():
    records = [_record(SampleMessage("a")), b"\x00" * 100, _record(SampleMessage("a"))]
    with pytest.raises(NotWholeError) as caught:
        rebuild_records(*_buffer(records), topics=Topics(("a",), None), queue_ids=np.zeros(3, np.int64))
    assert caught.value.row == 1


@pytest.mark.parametrize("size", [32767, 32768])
def test_rebuild_records_refuses_properties_that_are_too_long(size):
    records = [_record(SampleMessage("a"))] * 2
    texts = pa.array([b"", b"x" * size], pa.binary())

    def rebuild():
        zeros = np.zeros(2, np.int64)
        return rebuild_records(*_buffer(records), topics=Topics(("a",), None), queue_ids=zeros, properties=texts)

    if size == 32767:
        assert len(rebuild()) == 2
        return
    with pytest.raises(RowFault, match="properties take 32768 bytes; expected at most 32767") as caught:
        rebuild()
    assert caught.value.row == 1


def test_rebuild_records_refuses_a_topic_that_is_too_long():
    records = [_record(SampleMessage("a"))] * 2
    topics = Topics(("a", "t" * 256), np.array([0, 1]))
    with pytest.raises(RowFault, match="256 bytes; expected at most 255") as caught:
        rebuild_records(*_buffer(records), topics=topics, queue_ids=np.zeros(2, np.int64))
    assert caught.value.row == 1
