"""Damage, and records of others, beside an `abort` of the same boot: recovery takes none of it for lost memory.

What lost memory leaves, and how recovery goes on there, is in `test_lost_memory.py`.
"""

import errno
import os
import struct
import time
from itertools import count
from pathlib import Path

import pytest

from rmq_spark.store import check, open_reader
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.disk.kernel_errors import reading
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.log.file_sizes import FileSizes
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.log.watermark_file import read_watermarks
from rmq_spark.store.testing.encoded_samples import encode_samples
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.units import QueueKey

SIZES = FileSizes(1 << 20, 20_000, 50 * 46, IndexShape(20, 600))
QUEUES = 2


def append(root: Path, first: int, last: int, *, settle: bool = False, topic: str = "T", property_: str = "") -> None:
    """Append from a writer of its own, which does not settle when it lets go."""
    ticks = count(1_700_000_000_000)
    store = StoreWriter(str(root), Disk(), WriterSettings(sizes=SIZES), lambda: next(ticks), time.sleep)
    with store.section() as section:
        section.ensure_topic(topic, QUEUES)
        properties = {"p": property_} if property_ else {}
        section.append(
            encode_samples(
                [
                    SampleMessage(topic, number % QUEUES, b"%05d" % number, keys=f"k{number}", properties=properties)
                    for number in range(first, last)
                ]
            )
        )
        if settle:
            section.settle()


def numbers(root: Path, topic: str = "T") -> list[int]:
    found = []
    with open_reader(str(root)) as reader:
        reader.refresh()
        for key in (QueueKey(topic, queue) for queue in range(QUEUES)):
            held = reader.bounds(key)
            for batch in reader.read(key, held.min_offset, held.max_offset, ("body",), check_crc=True):
                found += [int(row["body"]) for row in batch.to_pylist()]
    return sorted(found)


def poke(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def queue_file(root: Path, topic: str, queue: int) -> Path:
    return root / "consumequeue" / topic / str(queue) / f"{0:020d}"


def end_of_note(root: Path) -> int:
    note = read_watermarks(str(root))[0]
    assert note is not None
    return note.end


def test_records_of_others_behind_a_damaged_one_stay(tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(root, 0, 20, settle=True)
    ours, begin = (root / "rmq/watermark").read_bytes(), end_of_note(root)
    append(root, 20, 50)
    size = (end_of_note(root) - begin) // 30
    (root / "rmq/watermark").write_bytes(ours)  # so a broker wrote them
    poke(root / "commitlog" / f"{0:020d}", begin + 10 * size + 88, b"\xff")  # a byte of a body
    append(root, 90, 92)
    with pytest.raises(DamageError, match="CRC of the body"):
        numbers(root)
    with open_reader(str(root)) as reader:
        reader.refresh()
        held = [reader.bounds(QueueKey("T", queue)) for queue in range(QUEUES)]
    assert [one.max_offset for one in held] == [26, 26], "nothing behind the damage was taken back"


def test_damaged_unit_of_an_idle_queue_stays_damage_and_takes_no_message_back(tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(root, 0, 20, settle=True, topic="U")
    append(root, 0, 20, settle=True)
    append(root, 20, 50)
    poke(queue_file(root, "U", 0), 9 * 20, (1 << 40).to_bytes(8, "big"))
    append(root, 90, 92)
    assert numbers(root) == [*range(50), 90, 91]
    append(root, 80, 82, topic="U")
    with pytest.raises(DamageError, match="queue offset 10 of U/0"):
        numbers(root, "U")
    assert [one.severity for one in check(root).findings if one.severity != "note"] == ["repairable"]


def test_damaged_unit_of_a_settled_store_with_abort_stays_damage(tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(root, 0, 20, settle=True, topic="U")
    append(root, 0, 20, settle=True)
    poke(queue_file(root, "U", 0), 9 * 20 + 6, b"\x0b\x0b")  # an earlier place, of another record
    (root / "abort").write_text("4711")  # of a broker that was killed before it wrote anything
    append(root, 20, 22, settle=True)
    assert numbers(root) == list(range(22))
    with pytest.raises(DamageError):
        numbers(root, "U")
    assert {one.severity for one in check(root).findings} - {"note"} == {"repairable"}


def test_settled_unit_that_is_damaged_stays_where_memory_was_lost(tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(root, 0, 20, settle=True, topic="U")
    append(root, 0, 20, settle=True)
    note, end = (root / "rmq/watermark").read_bytes(), end_of_note(root)
    append(root, 20, 40)
    (root / "rmq/watermark").write_bytes(note)
    poke(root / "commitlog" / f"{0:020d}", end, bytes((1 << 20) - end))
    poke(queue_file(root, "U", 0), 9 * 20 + 6, b"\x0b\x0b")
    append(root, 60, 62, settle=True)
    assert numbers(root) == [*range(20), 60, 61]
    append(root, 80, 82, topic="U")
    with pytest.raises(DamageError):
        numbers(root, "U")


def test_acknowledged_message_of_nul_characters_is_not_taken_for_torn(tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(root, 0, 4, settle=True, topic="U")
    append(root, 0, 2)
    append(root, 2, 3, property_="\0" * 1500)
    append(root, 3, 9)
    # A stale unit behind the end of another queue, as a broker leaves, that names a place in the log's file.
    poke(queue_file(root, "U", 0), 2 * 20, struct.pack(">qiq", 9000, 146, 0))
    append(root, 90, 92)
    assert numbers(root) == [*range(9), 90, 91]


def test_unreadable_queue_keeps_no_writer_from_other_topics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "s"
    append(root, 0, 4, topic="U")
    append(root, 0, 4)
    last_place, refused = ConsumeQueue.last_place, os.fspath(queue_file(root, "U", 0).parent)

    def fail(queue: ConsumeQueue) -> int:
        if queue.run.folder == refused:
            with reading(refused, "opened"):
                raise OSError(errno.EIO, "Input/output error")
        return last_place(queue)

    monkeypatch.setattr(ConsumeQueue, "last_place", fail)
    append(root, 4, 8)
    assert numbers(root) == list(range(8))
