"""Appending where things are not as a writer of ours leaves them: empty files, a lost topics.json, a forked child."""

import os
import shutil
import time
from itertools import count
from pathlib import Path

import pytest
from support.encoded_samples import encode_samples

from rmq_spark.store import open_reader, open_store
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import StoreError
from rmq_spark.store.format.config_json import decode_topics_file
from rmq_spark.store.format.consume_queue_entry import Item, encode_items
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import FIRST_STORE_MS, build_store

SIZES = FileSizes(4096, 1000, 50 * 46, IndexShape(20, 60))


def writer(root: Path) -> StoreWriter:
    ticks = count(FIRST_STORE_MS)
    return StoreWriter(str(root), Disk(), WriterSettings(sizes=SIZES), lambda: next(ticks), time.sleep)


def append(root: Path, topic: str, bodies: list[bytes]) -> None:
    with writer(root).section() as section:
        section.ensure_topic(topic, 1)
        section.append(encode_samples([SampleMessage(topic, 0, body) for body in bodies]))


def bodies_of(root: Path, topic: str) -> list[bytes]:
    with open_reader(str(root)) as reader:
        reader.refresh()
        held = reader.bounds(QueueKey(topic, 0))
        batches = reader.read(QueueKey(topic, 0), held.min_offset, held.max_offset, ("body",))
        return [row["body"] for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize("topic", ["T", "Another"])
def test_an_empty_file_of_a_queue_is_made_anew_and_no_measure_for_others(tmp_path: Path, topic: str) -> None:
    append(tmp_path / "s", "Z", [b"first"])
    empty = tmp_path / "s" / "consumequeue" / "T" / "0" / f"{0:020d}"
    empty.parent.mkdir(parents=True)
    empty.touch()
    append(tmp_path / "s", topic, [b"one", b"two"])
    assert bodies_of(tmp_path / "s", topic) == [b"one", b"two"]
    assert (tmp_path / "s" / "consumequeue" / topic / "0" / f"{0:020d}").stat().st_size == 1000


def test_batch_queues_that_topics_json_does_not_name_stay_batch_queues(tmp_path: Path) -> None:
    items = encode_items([Item(0, b"one", b""), Item(0, b"two", b"")])
    batch = SampleMessage("B", 0, items, properties={"INNER_NUM": "2"}, message_count=2)
    build_store(tmp_path / "s", [batch], segment_bytes=4096, batch_topics=["B"])
    topics = tmp_path / "s" / "config" / "topics.json"
    topics.unlink()
    append(tmp_path / "s", "B", [b"three"])
    assert not (tmp_path / "s" / "consumequeue" / "B").exists()
    assert bodies_of(tmp_path / "s", "B") == [b"one", b"two", b"three"]
    assert decode_topics_file(topics.read_bytes()).topics["B"].is_batch_queue


def test_a_child_that_was_forked_in_a_section_appends_nothing(tmp_path: Path) -> None:
    append(tmp_path / "s", "T", [b"one"])
    with writer(tmp_path / "s").section() as section:
        child = os.fork()
        if not child:
            status = 1
            try:
                section.append(encode_samples([SampleMessage("T", 0, b"the child's")]))
            except StoreError:
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        section.append(encode_samples([SampleMessage("T", 0, b"two")]))
    assert bodies_of(tmp_path / "s", "T") == [b"one", b"two"]


def test_a_reader_beside_goes_on_when_retention_takes_files_of_a_queue_that_rests(tmp_path: Path) -> None:
    append(tmp_path / "s", "T", [b"%04d" % number + b"b" * 30 for number in range(200)])
    with open_reader(str(tmp_path / "s")) as reader:
        reader.refresh()
        before = reader.bounds(QueueKey("T", 0))
        with writer(tmp_path / "s").section() as section:
            assert section.expire(max_bytes=8192).queue_files
        reader.refresh()
        after = reader.bounds(QueueKey("T", 0))
        assert before.min_offset < after.min_offset < after.max_offset == before.max_offset
        batches = list(reader.read(QueueKey("T", 0), after.min_offset, after.max_offset, ("body",)))
        assert sum(batch.num_rows for batch in batches) == after.max_offset - after.min_offset


def test_units_that_a_power_cut_lost_in_the_middle_of_a_queue_are_made_anew(tmp_path: Path) -> None:
    """A broker's own recovery would end the queue at the hole, and append there."""
    root = tmp_path / "s"
    messages = [SampleMessage("T", 0, b"%03d" % number) for number in range(40)]
    build_store(root, messages, segment_bytes=1 << 16, queue_file_bytes=1000, abort=True)
    (root / "checkpoint").unlink()
    units = root / "consumequeue" / "T" / "0" / f"{0:020d}"
    data = bytearray(units.read_bytes())
    data[20 * 11 : 20 * 19] = bytes(20 * 8)
    units.write_bytes(data)
    append(root, "T", [b"new"])
    assert bodies_of(root, "T") == [b"%03d" % number for number in range(40)] + [b"new"]


def test_a_topic_that_was_deleted_and_made_anew_in_one_segment_is_no_damage(tmp_path: Path) -> None:
    root = tmp_path / "s"
    messages = [SampleMessage("T", 0, b"old %d" % number) for number in range(9)]
    build_store(root, [*messages, SampleMessage("Other", 0, b"other")], segment_bytes=1 << 16)
    shutil.rmtree(root / "consumequeue" / "T")
    topics = root / "config" / "topics.json"
    topics.write_text(topics.read_text().replace('"T"', '"Gone"'))
    append(root, "T", [b"new", b"newer"])
    open_store(str(root)).close()
    shutil.rmtree(root / "rmq")  # as a broker leaves it
    assert bodies_of(root, "T") == [b"new", b"newer"]
    append(root, "T", [b"newest"])
    assert bodies_of(root, "T") == [b"new", b"newer", b"newest"]
