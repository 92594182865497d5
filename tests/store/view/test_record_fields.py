"""Fields of a record: they cover all its bytes, and have the values of an independent decoder."""

from pathlib import Path

import pytest

import rmq_spark
from rmq_spark.store.errors import StoreChangedError
from rmq_spark.store.format.record import (
    BORN_HOST_V6,
    MAGIC_V1,
    MAGIC_V2,
    STORE_HOST_V6,
    Record,
    RecordParts,
    encode_record,
    find_parts,
    record_size,
)
from rmq_spark.store.model import QueueKey
from rmq_spark.store.view.explorer import StoreExplorer
from rmq_spark.store.view.record_fields import fields_of, record_fields


def encoded(magic: int, sys_flag: int) -> bytes:
    hosts = {bit: bytes(16 if sys_flag & bit else 4) + b"\x00\x00\x00\x09" for bit in (BORN_HOST_V6, STORE_HOST_V6)}
    parts = (5, hosts[BORN_HOST_V6], 6, hosts[STORE_HOST_V6], 7, 8)
    record = Record(0, magic, 1, 2, 3, 4, 0, sys_flag, *parts, b"body", b"topic", b"a\x01b\x02")
    return encode_record(Record(record_size(record), *[getattr(record, name) for name in list(record.__slots__)[1:]]))


@pytest.mark.parametrize("magic", [MAGIC_V1, MAGIC_V2])
@pytest.mark.parametrize("sys_flag", [0, BORN_HOST_V6, STORE_HOST_V6, BORN_HOST_V6 | STORE_HOST_V6])
def test_fields_cover_every_byte_once(magic: int, sys_flag: int) -> None:
    data = encoded(magic, sys_flag)
    parts = find_parts(data)
    assert isinstance(parts, RecordParts)
    fields = fields_of(data, parts)
    assert [field.position for field in fields] == [0, *[field.position + field.size for field in fields][:-1]]
    assert fields[-1].position + fields[-1].size == len(data)
    value = {field.name: field.value for field in fields}
    assert value["magic"] == f"{magic:#x}"
    assert value["topic_size"] == "5"
    assert (value["body"], value["topic"], value["properties"]) == ("body", "topic", "a\x01b\x02")
    assert value["born_host"] == ("[::]:9" if sys_flag & BORN_HOST_V6 else "0.0.0.0:9")


def test_record_fields_returns_the_bytes_of_the_log(golden: Path) -> None:
    with rmq_spark.open_reader(golden / "demo") as reader:
        data, fields = record_fields(reader, QueueKey("orders", 3), 8)
        message = reader.message(QueueKey("orders", 3), 8)
    value = {field.name: field.value for field in fields}
    assert len(data) == int(value["total_size"]) == 378
    assert int(value["physical_offset"]) == message.commit_log_offset
    assert value["body"] == message.text()


def test_a_record_that_is_removed_meanwhile_is_an_error(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StoreExplorer(str(golden / "demo")) as reader:
        monkeypatch.setattr(reader.log, "bytes_at", lambda physical_offset, size: b"")
        with pytest.raises(StoreChangedError, match="removed or replaced meanwhile"):
            record_fields(reader, QueueKey("orders", 3), 8)
