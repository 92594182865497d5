"""The engine reads every store that a real broker wrote as the independent decoder does, and changes nothing."""

import base64
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rmq_spark.store import COLUMNS, StoreReader, open_reader
from rmq_spark.store.format.record import INNER_BATCH
from rmq_spark.store.model import QueueBounds, QueueKey

STORES = [
    "basic",
    "batchcq-cqext",
    "broker497",
    "crashed",
    "demo",
    "livekill533",
    "preblank",
    "propcrc",
    "timer",
    "truncated-stale",
]


@pytest.fixture(scope="module")
def decoder(golden: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("decode_store", golden / "decode_store.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(reader: StoreReader, queue: QueueKey, begin: int, end: int) -> Iterator[dict[str, Any]]:
    for batch in reader.read(queue, begin, end, list(COLUMNS), check_crc=True):
        batch.validate(full=True)
        for row in batch.to_pylist():
            row["body"] = base64.b64encode(row["body"]).decode()
            row["properties"] = dict(row["properties"])
            for name in ("bornTimestamp", "storeTimestamp"):
                row[name] = round(row[name].timestamp() * 1000)
            yield row


def fingerprints(store: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(store.rglob("*"))}


@pytest.mark.wheel
@pytest.mark.parametrize("read_mode", ["mmap", "pread"])
@pytest.mark.parametrize("name", STORES)
def test_every_row_of_a_brokers_store_is_the_one_that_the_plain_decoder_gives(
    name: str, read_mode: str, golden: Path, decoder: ModuleType
) -> None:
    before = fingerprints(golden / name)
    expected = decoder.decode_store(golden / name)["topics"]
    count = 0
    with open_reader(str(golden / name), read_mode=read_mode) as reader:
        assert reader.refresh()
        for topic, queues in expected.items():
            for queue_id, wanted in queues.items():
                queue = QueueKey(topic, int(queue_id))
                bounds = reader.bounds(queue)
                assert bounds == QueueBounds(wanted["min"], wanted["max"])
                assert list(rows_of(reader, queue, bounds.min_offset, bounds.max_offset)) == wanted["rows"]
                count += len(wanted["rows"])
    assert count > 10
    assert fingerprints(golden / name) == before


@pytest.mark.parametrize("name", ["basic", "demo", "batchcq-cqext"])
def test_every_single_message_can_be_read_by_itself(name: str, golden: Path, decoder: ModuleType) -> None:
    with open_reader(str(golden / name)) as reader:
        for topic, queues in decoder.decode_store(golden / name)["topics"].items():
            for queue_id, wanted in queues.items():
                for row in wanted["rows"][:40]:
                    offset = row["queueOffset"]
                    assert list(rows_of(reader, QueueKey(topic, int(queue_id)), offset, offset + 1)) == [row]


@pytest.mark.parametrize("name", ["basic", "demo", "broker497", "preblank"])
def test_every_message_is_found_by_its_ids_and_keys(name: str, golden: Path, decoder: ModuleType) -> None:
    tried = 0
    with open_reader(str(golden / name)) as reader:
        for topic, queues in decoder.decode_store(golden / name)["topics"].items():
            for queue_id, wanted in queues.items():
                for row in wanted["rows"][:25]:
                    place = QueueKey(topic, int(queue_id)), row["queueOffset"]
                    assert place in reader.find_message_id(row["offsetMsgId"], [topic])
                    if row["sysFlag"] & INNER_BATCH:
                        continue  # a broker's index knows an inner batch by its outer record only
                    if row["msgId"] != row["offsetMsgId"]:
                        assert place in reader.find_message_id(row["msgId"], [topic])
                    for key in (row["keys"] or "").split():
                        found = reader.find_key(topic, key)
                        assert place in found
                        assert len(found) == len(set(found))
                        tried += 1
    assert tried > 5


def test_a_store_at_rest_is_idle_after_one_look(golden: Path) -> None:
    with open_reader(str(golden / "basic")) as reader:
        assert reader.refresh()
        assert not reader.refresh()


def test_messages_that_a_killed_broker_did_not_dispatch_are_waited_for(golden: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(golden / "livekill533", tmp_path / "s"))
    with open_reader(str(store)) as reader:
        assert reader.refresh()
        assert not reader.refresh()  # 42 records have no unit yet: only a writer's repair gives them one
        assert reader.bounds(QueueKey("orders", 1)) == QueueBounds(0, 78)
        (store / "lock").write_bytes(b"lock")  # as a broker does that starts
        assert reader.refresh()
