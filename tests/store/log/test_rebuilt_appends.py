"""Records that were made again are appended like others: with hosts of IPv6 the store time lies further back."""

import itertools
import time
from pathlib import Path

import numpy as np
import pytest

from rmq_spark.store import open_reader
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.format.java import Host
from rmq_spark.store.format.message_columns import Topics
from rmq_spark.store.format.record import encode_record
from rmq_spark.store.format.record_rewrite import rebuild_records
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage

V4, V6 = Host("10.1.2.3", 54321), Host("2001:db8::1", 10911)
NOW_MS = 1_750_000_000_000


@pytest.mark.parametrize("hosts", [*itertools.product((V4, V6), repeat=2), None])
def test_store_time_and_offsets_stand_where_readers_look(tmp_path: Path, hosts: tuple[Host, Host] | None) -> None:
    pairs = list(itertools.product((V4, V6), repeat=2)) if hosts is None else [hosts] * 3
    messages = [
        SampleMessage("S", 0, b"body", tags="a", born_host=born, store_host=stored, properties={"UNIQ_KEY": "k"})
        for born, stored in pairs
    ]
    records = [encode_record(message.as_record(5, 17, 1_600_000_000_000)) for message in messages]
    ends = np.cumsum([len(record) for record in records])
    made = rebuild_records(
        np.frombuffer(b"".join(records), np.uint8),
        ends - [len(record) for record in records],
        ends,
        topics=Topics(("T",), None),
        queue_ids=np.zeros(len(records), np.int64),
    )
    store = StoreWriter(str(tmp_path / "store"), Disk(), WriterSettings(), lambda: NOW_MS, time.sleep)
    with store.section() as section:
        section.ensure_topic("T", 1)
        section.append(made)
    store.close()
    with open_reader(str(tmp_path / "store")) as reader:
        reader.refresh()
        columns = ("queueOffset", "body", "storeTimestamp", "bornTimestamp", "bornHost", "storeHost", "tags")
        found = [row for batch in reader.read(QueueKey("T", 0), 0, len(pairs), columns) for row in batch.to_pylist()]
    assert [row["queueOffset"] for row in found] == list(range(len(pairs)))
    assert {round(row["storeTimestamp"].timestamp() * 1000) for row in found} == {NOW_MS}
    assert {round(row["bornTimestamp"].timestamp() * 1000) for row in found} == {messages[0].born_timestamp}
    assert [(row["bornHost"], row["storeHost"]) for row in found] == [(str(a), str(b)) for a, b in pairs]
    assert {(row["body"], row["tags"]) for row in found} == {(b"body", "a")}
