"""Records at a physical offset, whole or only their queue and size."""

from pathlib import Path

import pytest

from rmq_spark.store.format.java import Host
from rmq_spark.store.format.record import Blank, Record, Torn
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

V6 = Host("fe80::1", 10911)
MESSAGES = [
    SampleMessage("orders", 3, b"x" * 300),
    SampleMessage("orders", 0, b"", born_host=V6),
    SampleMessage("t" * 200, 1, b"y" * 6000, properties={"KEYS": "k"}),
    *[SampleMessage("orders", 1, b"z" * 4000)] * 5,
]


@pytest.fixture
def log(tmp_path: Path) -> CommitLog:
    build_store(tmp_path, MESSAGES, segment_bytes=16384)
    return CommitLog((str(tmp_path / "commitlog"),), mapped=False)


def test_queue_at_agrees_with_record_at_at_every_record(log: CommitLog) -> None:
    at, found = 0, []
    while not isinstance(record := log.record_at(at), Torn):
        queue = log.queue_at(at)
        if isinstance(record, Blank):
            assert queue == record
            at += 16384 - at % 16384
        else:
            assert queue == (QueueKey(record.topic.decode(), record.queue_id), record.total_size)
            at += record.total_size
        found.append(queue)
    assert len(found) == len(MESSAGES) + 1  # with a filler
    assert log.queue_at(at) is None


def test_queue_at_of_a_damaged_record_is_none_where_record_at_is_torn(tmp_path: Path, log: CommitLog) -> None:
    segment = min((tmp_path / "commitlog").iterdir())
    data = segment.read_bytes()
    record = log.record_at(0)
    assert isinstance(record, Record)
    torn = 0
    for at in [*range(100), *range(380, record.total_size)]:
        segment.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        log.refresh()
        found, queue = log.record_at(0), log.queue_at(0)
        assert (queue is None) == isinstance(found, Torn), at
        torn += queue is None
    assert 20 < torn < 100  # lengths, magic, physical offset, but not times, CRC, tags and bodies
