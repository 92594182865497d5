"""Records of one size are read together: one that differs within that size is read as itself, or refused."""

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.arrow_rows import arrow_rows
from support.row_twin import slow_rows

from rmq_spark.store import COLUMNS, StoreReader, open_reader
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.body_codec import Compression, compress_body
from rmq_spark.store.format.java import Host
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

QUEUE = QueueKey("topic", 0)
COUNT = 100
PLACES = (0, 1, 50, COUNT - 1)
ASKED = (list(COLUMNS), ["body"], ["body", "queueOffset"], ["tags", "sysFlag", "body"])
BODY = b"0123456789" * 5
TEXT = b"UNIQ_KEY\x01%08d\x02TAGS\x01T\x02"


def plain(number: int) -> SampleMessage:
    return SampleMessage("topic", body=BODY, properties=TEXT % number)


def alike(odd: SampleMessage, place: int) -> list[SampleMessage]:
    return [odd if number == place else plain(number) for number in range(COUNT)]


def read_modes(path: Path) -> Iterator[StoreReader]:
    for read_mode in ("mmap", "pread"):
        with open_reader(str(path), read_mode=read_mode) as reader:
            yield reader


V6 = Host("2001:db8::1", 7)
COMPRESSED_BODY = compress_body(BODY * 3, Compression.ZLIB)
ODD = {
    "a longer body": SampleMessage("topic", body=BODY + b"x", properties=(TEXT % 7).replace(b"T\x02", b"\x02")),
    "a shorter body": SampleMessage("topic", body=BODY[1:], properties=(TEXT % 7).replace(b"T\x02", b"Tx\x02")),
    "no body": SampleMessage("topic", properties=b"".join([TEXT % 7, b"a\x01", b"v" * 47, b"\x02"])),
    "a long topic's length": SampleMessage("topic", body=BODY[1:], properties=TEXT % 7, version2=True),
    "a long topic's length and a short text": SampleMessage(
        "topic", body=BODY, properties=TEXT.replace(b"TAGS", b"TAG") % 7, version2=True
    ),
    "a born host of IPv6": SampleMessage("topic", body=BODY[12:], properties=TEXT % 7, born_host=V6),
    "a store host of IPv6": SampleMessage("topic", body=BODY[12:], properties=TEXT % 7, store_host=V6),
    "another host": SampleMessage("topic", body=BODY, properties=TEXT % 7, store_host=Host("10.9.8.7", 6)),
    "a compressed body": SampleMessage(
        "topic",
        body=COMPRESSED_BODY,
        properties=(TEXT % 7) + b"a\x01" + b"v" * (len(BODY) - len(COMPRESSED_BODY) - 3) + b"\x02",
        sys_flag=1,
    ),
    "a compressed body as long as the others": SampleMessage(
        "topic", body=zlib.compress(b"z" * (len(BODY) - 11), 0), properties=TEXT % 7, sys_flag=1
    ),
    "another property": SampleMessage("topic", body=BODY, properties=(TEXT % 7).replace(b"TAGS", b"KEYS")),
    "a separator in a value": SampleMessage("topic", body=BODY, properties=b"UNIQ_KEY\x0100\x0200007\x02TAGS\x01T\x02"),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_one_that_differs_is_read_as_itself(tmp_path: Path, odd: SampleMessage) -> None:
    for place in PLACES:
        built = build_store(tmp_path / str(place), alike(odd, place))
        rows = slow_rows(built.path)[QUEUE]
        for reader in read_modes(built.path):
            own, all_together = (reader.record_bytes(QUEUE, at, end) for at, end in ((place, place + 1), (0, COUNT)))
            assert own * COUNT == all_together, "the odd one must not be told from the others by its size"
            for columns in ASKED:
                found = arrow_rows(reader.read(QUEUE, 0, COUNT, columns))
                assert found == [{name: row[name] for name in columns} for row in rows]


@pytest.mark.parametrize(
    ("damaged", "by", "message"),
    [
        (b"\x05topic", b"\x05tOpic", "topic and properties length"),
        (b"\x05topic", b"\x04topic", "topic and properties length"),
        (b"topic\x00\x19", b"topic\x00\x18", "topic and properties length"),
        (b"\x00\x00\x00\x32012", b"\x7f\x00\x00\x32012", "body length"),
        (b"\x00\x00\x00\x32012", b"\xff\xff\xff\xff012", "body length"),
        (b"\x00\x00\x00\x32012", b"\x00\x00\x00\x33012", "topic and properties length"),
    ],
)
def test_one_that_is_damaged_is_refused(tmp_path: Path, damaged: bytes, by: bytes, message: str) -> None:
    for place in PLACES:
        built = build_store(tmp_path / str(place), [plain(number) for number in range(COUNT)])
        segment = next((built.path / "commitlog").iterdir())
        parts = segment.read_bytes().split(damaged)
        assert len(parts) == COUNT + 1
        parts[place : place + 2] = [parts[place] + by + parts[place + 1]]
        segment.write_bytes(damaged.join(parts))
        for reader in read_modes(built.path):
            with pytest.raises(DamageError, match=message) as raised:
                list(reader.read(QUEUE, 0, COUNT, list(COLUMNS)))
            assert f"message {place} of queue" in str(raised.value)


def test_records_that_are_all_of_another_topic_are_refused(tmp_path: Path) -> None:
    built = build_store(tmp_path / "s", [plain(number) for number in range(COUNT)])
    segment = next((built.path / "commitlog").iterdir())
    segment.write_bytes(segment.read_bytes().replace(b"\x05topic", b"\x05tOpic"))
    for reader in read_modes(built.path):
        with pytest.raises(DamageError, match=r"message 0 of queue .*tOpic"):
            list(reader.read(QUEUE, 0, COUNT, list(COLUMNS)))
