"""The sample stores are what they say: the independent decoder and the reader find in them what was asked for."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rmq_spark.store import COLUMNS, open_reader
from rmq_spark.store.format.consume_queue_entry import Item, encode_items
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store, build_uniform_store


@pytest.fixture(scope="module")
def decoder() -> ModuleType:
    """The decoder that shares no line with the project."""
    path = Path(__file__).resolve().parent.parent / "golden" / "decode_store.py"
    spec = importlib.util.spec_from_file_location("golden_decode_store", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("interleave", ["message", "batch"])
def test_a_uniform_store_has_every_message_once(tmp_path: Path, decoder: ModuleType, interleave: str) -> None:
    built = build_uniform_store(
        tmp_path / "s", topic="orders", queue_count=3, message_count=1000, interleave=interleave,
        segment_bytes=1 << 16, queue_file_bytes=2000,
    )  # fmt: skip
    decoded = decoder.decode_store(built.path)
    assert decoded["log"]["stopped"] == "zeros"
    assert (decoded["log"]["end"], decoded["log"]["records"]) == (built.log_end, 1000)
    rows = [row for queue in decoded["topics"]["orders"].values() for row in queue["rows"]]
    for column in ("keys", "msgId", "body"):
        assert len({row[column] for row in rows}) == 1000, column
    for queue_id, queue in decoded["topics"]["orders"].items():
        key = QueueKey("orders", int(queue_id))
        assert built.bounds[key] == QueueBounds(queue["min"], queue["max"])
        assert len({row["tags"] for row in queue["rows"]}) == 8
    by_place = [row["queueId"] for row in sorted(rows, key=lambda row: row["commitLogOffset"])]
    run = 1 if interleave == "message" else 32
    assert by_place == [number // run % 3 for number in range(1000)]


def test_the_same_seed_gives_the_same_bytes_and_another_gives_others(tmp_path: Path) -> None:
    logs = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        built = build_uniform_store(
            tmp_path / name, topic="t", queue_count=2, message_count=50, segment_bytes=1 << 15, seed=seed
        )
        logs.append((built.path / "commitlog" / f"{0:020d}").read_bytes())
    assert logs[0] == logs[1] != logs[2]


def test_a_built_store_keeps_what_its_messages_say(tmp_path: Path, decoder: ModuleType) -> None:
    inner = encode_items([Item(i, b"item %d" % i, b"TAGS\x01i\x02") for i in range(3)])
    messages = [
        SampleMessage("a", 1, b"one", tags="T", keys="k1 k2", flag=5, reconsume_times=2),
        SampleMessage("b", 0, inner, properties={"INNER_NUM": "3", "INNER_BASE": "0"}, message_count=3),
        SampleMessage("a", 1, b"half", sys_flag=0x4),
        SampleMessage("a", 1, b"two", properties=b"odd\x02TAGS\x01U", version2=True),
    ]
    first = QueueKey("a", 1)
    built = build_store(
        tmp_path / "s", messages, segment_bytes=1024, log_begin=5120, first_offsets={first: 77},
        batch_topics=["b"], empty_topics={"e": 2}, preallocated=True, abort=True,
    )  # fmt: skip
    decoded = decoder.decode_store(built.path)
    assert decoded["log"]["begin"] == 5120
    assert decoded["log"]["records"] == 4
    queue = decoded["topics"]["a"]["1"]
    assert (queue["min"], queue["max"], queue["units"]["fill"]) == (77, 79, 27)
    assert [(row["tags"], row["keys"], row["flag"]) for row in queue["rows"]] == [("T", "k1 k2", 5), ("U", None, 0)]
    assert [row["queueOffset"] for row in decoded["topics"]["b"]["0"]["rows"]] == [0, 1, 2]
    assert len(list((built.path / "commitlog").iterdir())) == 2
    assert (built.path / "abort").exists()
    with open_reader(str(built.path)) as reader:
        assert reader.topics() == ["a", "b", "e"]
        assert reader.bounds(first) == built.bounds[first]
        assert reader.bounds(QueueKey("e", 1)) == QueueBounds(0, 0)
        batches = reader.read(QueueKey("b", 0), 0, 3, list(COLUMNS), check_crc=True)
        assert [row["body"] for batch in batches for row in batch.to_pylist()] == [b"item 0", b"item 1", b"item 2"]


def test_a_record_moves_on_when_it_would_leave_no_room_for_a_blank(tmp_path: Path) -> None:
    whole = SampleMessage("t", body=bytes(200)).as_record(0, 0, 0).total_size
    places = []
    for spare in (7, 8):
        built = build_store(
            tmp_path / str(spare), [SampleMessage("t", body=bytes(200))] * 2, segment_bytes=2 * whole + spare
        )
        places.append(built.log_end - whole)
    assert places == [2 * whole + 7, whole]


def test_a_record_larger_than_a_segment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        build_store(tmp_path / "s", [SampleMessage("t", body=bytes(5000))], segment_bytes=4096)
