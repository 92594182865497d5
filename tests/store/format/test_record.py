"""Record: golden records are decoded, and encoded to the same bytes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rmq_spark.store.format.java import Host, encode_host
from rmq_spark.store.format.record import (
    BLANK_BYTES,
    BORN_HOST_V6,
    COMPRESSED,
    HOST_BITS,
    INNER_BATCH,
    MAGIC_V1,
    MAGIC_V2,
    NEED_UNWRAP,
    STORE_HOST_V6,
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
    Blank,
    Record,
    Torn,
    decode_record,
    encode_blank,
    encode_record,
    record_size,
)
from rmq_spark.store.format.record_headers import RecordFault, RecordHeaders, RecordRun, first_torn_record

STORES = ["basic", "batchcq-cqext", "broker497", "demo", "livekill533", "propcrc", "timer"]


def records(store: Path) -> Iterator[tuple[int, bytes, Record]]:
    """Yield the physical offset of every record of a golden log, its bytes, and what they are read to."""
    for path in sorted(store.glob("commitlog/*")):
        data, at = path.read_bytes(), 0
        while isinstance(record := decode_record(memoryview(data)[at:]), Record):
            yield int(path.name) + at, data[at : at + record.total_size], record
            at += record.total_size


def run_of(data: bytes, record: Record) -> RecordRun:
    """Return the record as a run of one."""
    return RecordRun(
        np.frombuffer(data, np.uint8),
        np.zeros(1, np.int64),
        np.array([record.total_size]),
        np.array([record.physical_offset]),
        np.array([record.queue_offset]),
        record.topic.decode(),
        record.queue_id,
    )


@pytest.fixture(scope="module")
def basic(golden: Path) -> dict[int, tuple[bytes, Record]]:
    """The records of the store with all kinds of records, by physical offset."""
    return {place: (data, record) for place, data, record in records(golden / "basic")}


@pytest.mark.parametrize("store", STORES)
def test_encode_record_restores_every_golden_record(golden: Path, store: str) -> None:
    found = list(records(golden / store))
    assert found
    for place, data, record in found:
        assert record.physical_offset == place
        assert record.crc_matches
        assert record_size(record) == len(data)
        assert encode_record(record) == data


def test_decode_record_reads_golden_records(basic: dict[int, tuple[bytes, Record]]) -> None:
    assert basic[0][1] == Record(
        total_size=169,
        magic=0xDAA320A7,
        body_crc=0x3610A686,
        queue_id=0,
        flag=7,
        queue_offset=0,
        physical_offset=0,
        sys_flag=0,
        born_timestamp=1_700_000_000_123,
        born_host=encode_host(Host("10.1.2.3", 54321)),
        store_timestamp=1_795_223_694_619,
        store_host=encode_host(Host("127.0.0.1", 10911)),
        reconsume_times=2,
        prepared_transaction_offset=0,
        body=b"hello",
        topic=b"TopicA",
        properties=b"TAGS\x01TagA\x02KEYS\x01k1 k2\x02UNIQ_KEY\x017F000001ABCD18B4AAC200000000\x02foo\x01bar\x02",
    )


def test_decode_record_reads_every_header_size(basic: dict[int, tuple[bytes, Record]]) -> None:
    found = [record for _, record in basic.values()]
    assert {record.magic for record in found} == {MAGIC_V1, MAGIC_V2}
    assert {record.sys_flag & HOST_BITS for record in found} == {0, BORN_HOST_V6 | STORE_HOST_V6} == {0, 0x30}
    assert {len(record.topic) for record in found} >= {6, 200}
    assert 4242 in {record.prepared_transaction_offset for record in found}
    assert b"" in {record.body for record in found}


def test_sys_flag_constants_are_those_of_golden_records(golden: Path, basic: dict[int, tuple[bytes, Record]]) -> None:
    half = {record.sys_flag & TRANSACTION_MASK for _, record in basic.values()}
    assert half == {0, TRANSACTION_PREPARED, TRANSACTION_COMMIT, TRANSACTION_ROLLBACK} == {0, 4, 8, 12}
    demo = {record.sys_flag for _, _, record in records(golden / "demo")}
    assert INNER_BATCH | NEED_UNWRAP in demo
    assert {flag & COMPRESSED for flag in demo} == {0, COMPRESSED} == {0, 1}


def test_decode_record_reads_the_blank_of_a_golden_segment(golden: Path) -> None:
    path = min((golden / "basic").glob("commitlog/*"))
    data = path.read_bytes()
    place, last, _ = [one for one in records(golden / "basic") if one[0] < len(data)][-1]
    end = place + len(last)
    assert decode_record(data[end:]) == Blank(len(data) - end)
    assert encode_blank(len(data) - end) == data[end : end + BLANK_BYTES]
    # A blank of the minimum size, at the end of the buffer.
    assert decode_record(encode_blank(BLANK_BYTES)) == Blank(8)
    assert isinstance(decode_record(data[end : end + BLANK_BYTES - 1]), Torn)


@pytest.mark.parametrize("size", range(169))
def test_decode_record_returns_torn_for_a_record_cut_anywhere(
    size: int, basic: dict[int, tuple[bytes, Record]]
) -> None:
    assert isinstance(decode_record(basic[0][0][:size]), Torn)


def test_encode_record_sets_each_header_field() -> None:
    # All bytes differ, so a value at the position of another field is found.
    record = Record(
        0, MAGIC_V1, 0x05060708, 0x090A0B0C, 0x0D0E0F10, 0x1112131415161718, 0x191A1B1C1D1E1F20, 0x21222300,
        0x25262728292A2B2C, bytes(range(0x2D, 0x35)), 0x35363738393A3B3C, bytes(range(0x3D, 0x45)), 0x45464748,
        0x494A4B4C4D4E4F50, b"body", b"topic", b"a\x01b\x02",
    )  # fmt: skip
    record = replace(record, total_size=record_size(record))
    data = encode_record(record)
    assert data == (
        bytes([0, 0, 0, 104, 0xDA, 0xA3, 0x20, 0xA7]) + bytes(range(5, 0x24)) + b"\0" + bytes(range(0x25, 0x51))
        + bytes([0, 0, 0, 4]) + b"body" + b"\x05topic" + b"\0\x04a\x01b\x02"
    )  # fmt: skip
    assert decode_record(data) == record


def test_encode_record_needs_version_2_for_a_long_topic(basic: dict[int, tuple[bytes, Record]]) -> None:
    record = replace(basic[0][1], topic=b"t" * 128)
    with pytest.raises(ValueError, match="topic of 128 bytes"):
        encode_record(record)
    longer = replace(record, magic=MAGIC_V2)
    assert isinstance(decode_record(encode_record(replace(longer, total_size=record_size(longer)))), Record)


@pytest.mark.parametrize("store", STORES)
def test_first_torn_record_finds_a_changed_length(golden: Path, store: str) -> None:
    for _, data, record in records(golden / store):
        bytes_of = np.frombuffer(data, np.uint8)
        here = np.zeros(1, np.int64)
        assert first_torn_record(bytes_of, here) is None
        for place in (8, len(data) - len(record.properties) - 1, len(data) - len(record.properties) - 2):
            torn = bytes_of.copy()
            torn[place] ^= 1
            is_looked_at = place != 8 or record.body  # nothing has no CRC
            assert first_torn_record(torn, here) == (0 if is_looked_at else None)


@pytest.mark.parametrize(
    ("change", "what", "expected", "found"),
    [
        ({"physical_offset": 1}, "physical offset", 0, 1),
        ({"queue_offset": 1}, "queue offset", 0, 1),
        ({"total_size": 168}, "record length", 169, 168),
        ({"queue_id": 1}, "queue id", 0, 1),
        ({"magic": 0xDAA320A8}, "magic", "0xdaa320a7 or 0xdaa320ab", "0xdaa320a8"),
    ],
)
def test_record_headers_names_the_field_that_differs_from_the_entry(
    change: dict[str, int], what: str, expected: object, found: object, basic: dict[int, tuple[bytes, Record]]
) -> None:
    record = basic[0][1]
    changed = encode_record(replace(record, **{name: value for name, value in change.items() if name != "magic"}))
    if "magic" in change:
        changed = changed[:4] + change["magic"].to_bytes(4, "big") + changed[8:]
    with pytest.raises(RecordFault) as caught:
        RecordHeaders(run_of(changed, record))
    assert caught.value.what == f"the record's {what}"
    assert (caught.value.expected, caught.value.found) == (expected, found)


def test_record_run_take_returns_complete_records() -> None:
    numbers = np.arange(5, dtype=np.int64)
    run = RecordRun(
        np.arange(9, dtype=np.uint8), numbers, numbers + 10, numbers + 20, numbers + 30, "T", 7, numbers + 40
    )
    head = run.take(slice(2))
    assert head.buffer is run.buffer
    assert (head.topic, head.queue_id, len(head)) == ("T", 7, 2)
    columns = (head.positions, head.sizes, head.physical_offsets, head.queue_offsets, head.message_counts)
    assert [None if column is None else column.tolist() for column in columns] == [
        [0, 1], [10, 11], [20, 21], [30, 31], [40, 41],
    ]  # fmt: skip
    assert replace(run, message_counts=None).take(slice(1)).message_counts is None
