"""Tests of pages that are lost without a restart: the disk failed, and was unmounted and mounted again.

What was written since the last sync is only partly on disk. The tests build these images by hand, in the same boot.
"""

import errno
import os
import struct
import time
from itertools import count
from pathlib import Path

import pytest
from support.encoded_samples import encode_samples

from rmq_spark.store import check, open_reader, plan_repair, repair
from rmq_spark.store.disk.kernel_errors import reading
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.log.consume_queue import ConsumeQueue
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_state import read_watermarks
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage

SIZES = FileSizes(4096, 1000, 50 * 46, IndexShape(20, 60))  # of a queue: 50 entries in a file
LARGE = FileSizes(1 << 20, 20_000, 50 * 46, IndexShape(20, 600))
QUEUES = 2


def writer(root: Path, sizes: FileSizes = SIZES) -> StoreWriter:
    ticks = count(1_700_000_000_000)
    return StoreWriter(str(root), Disk(), WriterSettings(sizes=sizes), lambda: next(ticks), time.sleep)


def append(
    store: StoreWriter, first: int, last: int, *, settle: bool = False, topic: str = "T", property_: str = ""
) -> None:
    properties = {"p": property_} if property_ else {}
    with store.section() as section:
        section.ensure_topic(topic, QUEUES)
        messages = [
            SampleMessage(
                topic, number % QUEUES, b"%05d" % number + b"b" * 30, tags="t", keys=f"k{number}", properties=properties
            )
            for number in range(first, last)
        ]
        section.append(encode_samples(messages))
        if settle:
            section.settle()


class DeathError(Exception):
    """The writer ends here."""


def append_and_die(store: StoreWriter, method: str, first: int, last: int) -> None:
    """Append messages with a writer that dies when it calls this method of its files."""

    def die(*_: object) -> None:
        raise DeathError

    setattr(store._files, method, die)
    with pytest.raises(DeathError):
        append(store, first, last)


def numbers(root: Path, topic: str = "T") -> list[int]:
    """Return the numbers of all messages. Each queue must have its own in order."""
    found = []
    with open_reader(str(root)) as reader:
        reader.refresh()
        for key in (QueueKey(topic, queue) for queue in range(QUEUES)):
            held = reader.bounds(key)
            batches = reader.read(key, held.min_offset, held.max_offset, ("body",), check_crc=True)
            seen = [int(row["body"][:5]) for batch in batches for row in batch.to_pylist()]
            assert len(seen) == held.max_offset - held.min_offset, (key, held)
            assert seen == sorted(seen)
            found += seen
    return sorted(found)


def watermark(root: Path) -> bytes:
    return (root / "rmq/watermark").read_bytes()


def settled_end(root: Path) -> int:
    settled = read_watermarks(str(root))[1]
    assert settled is not None
    return settled.end


def lose_log(root: Path, begin: int, end: int | None = None) -> None:
    """Clear a range of the log, like pages that were never written."""
    for path in (root / "commitlog").iterdir():
        first = int(path.name)
        data = bytearray(path.read_bytes())
        low, high = max(begin - first, 0), min(len(data) if end is None else end - first, len(data))
        if low < high:
            data[low:high] = bytes(high - low)
            path.write_bytes(data)


def lose_entries(root: Path, queue: int, first: int, last: int) -> None:
    """Clear entries of a queue, by their numbers."""
    for path in (root / "consumequeue/T" / str(queue)).iterdir():
        data = bytearray(path.read_bytes())
        low, high = max(first * 20 - int(path.name), 0), min(last * 20 - int(path.name), len(data))
        if low < high:
            data[low:high] = bytes(high - low)
            path.write_bytes(data)


def check_continues(root: Path, kept: list[int], sizes: FileSizes = SIZES) -> None:
    """Check the next acknowledged messages: they follow the kept ones, and the store has no findings."""
    store = writer(root, sizes)
    append(store, 90_000, 90_004, settle=True)
    assert numbers(root) == [*kept, *range(90_000, 90_004)]
    report = check(str(root))
    assert report.is_healthy, report
    append(writer(root, sizes), 90_004, 90_006)
    assert numbers(root) == [*kept, *range(90_000, 90_006)]


# The number of messages after the settled ones: in one segment, and in several with several files for each queue.
@pytest.mark.parametrize("more", [10, 100, 300])
@pytest.mark.parametrize("sizes", [SIZES, LARGE])
def test_prepare_clears_entries_without_records_after_a_settled_watermark(
    more: int, sizes: FileSizes, tmp_path: Path
) -> None:
    root = tmp_path / "s"
    append(writer(root, sizes), 0, 20, settle=True)
    old = watermark(root)
    append(writer(root, sizes), 20, 20 + more)
    lose_log(root, settled_end(root))
    (root / "rmq/watermark").write_bytes(old)
    assert (root / "abort").exists()
    check_continues(root, list(range(20)), sizes)


@pytest.mark.parametrize("more", [10, 300])
def test_prepare_clears_entries_without_records_after_an_unsettled_watermark(more: int, tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(writer(root), 0, 20, settle=True)
    append(writer(root), 20, 31)
    old, end = watermark(root), read_watermarks(str(root))[0]
    append(writer(root), 31, 31 + more)
    assert end is not None
    lose_log(root, end.end)
    (root / "rmq/watermark").write_bytes(old)
    check_continues(root, list(range(31)))


def test_prepare_ignores_a_watermark_without_its_last_record(tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(writer(root), 0, 20, settle=True)
    append(writer(root), 20, 25)
    note = read_watermarks(str(root))[0]
    append(writer(root), 25, 60)
    assert note is not None
    lose_log(root, note.end)
    check_continues(root, list(range(25)))


def test_must_check_queues_finds_that_newer_watermarks_are_lost(tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(writer(root), 0, 20, settle=True)
    store = writer(root)
    append(store, 20, 30)
    old, note = watermark(root), read_watermarks(str(root))[0]
    append(store, 30, 50)
    assert note is not None
    lose_log(root, note.end)
    (root / "rmq/watermark").write_bytes(old)
    append(store, 90_000, 90_002, settle=True)
    assert numbers(root) == [*range(30), 90_000, 90_001]
    assert check(str(root)).is_healthy


def test_prepare_accepts_an_open_watermark_whose_records_are_lost(tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(writer(root), 0, 20, settle=True)
    append(writer(root), 20, 25)
    store = writer(root)
    note = read_watermarks(str(root))[0]
    assert note is not None
    append_and_die(store, "close_session", 25, 60)
    lose_log(root, note.end)
    check_continues(root, list(range(25)))


@pytest.mark.parametrize("is_old", [True, False])
def test_prepare_finds_lost_memory_after_retention(is_old: bool, tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(writer(root), 0, 20, settle=True)
    store = writer(root)
    for first in range(20, 300, 20):
        append(store, first, first + 20)
    old, note = watermark(root), read_watermarks(str(root))[0]
    assert note is not None
    with store.section() as section:
        assert section.expire(max_bytes=8192).segments > 2
    if not is_old:
        old = watermark(root)
    append(store, 300, 340)
    lose_log(root, note.end)
    (root / "rmq/watermark").write_bytes(old)
    with open_reader(str(root)) as reader:
        reader.refresh()
        least = min(reader.bounds(QueueKey("T", queue)).min_offset * QUEUES + queue for queue in range(QUEUES))
    check_continues(root, list(range(least, 300)))


@pytest.mark.parametrize("kept", [0, 1, 7, 39])
@pytest.mark.parametrize(("lost_bytes", "is_settled"), [(70, False), (40, False), (1000, False), (1000, True)])
def test_prepare_ends_a_log_newer_than_its_watermark_where_it_is_torn(
    lost_bytes: int, is_settled: bool, kept: int, tmp_path: Path
) -> None:
    """A body, properties with their length, and complete records are torn."""
    root, first = log_newer_than_its_watermark(tmp_path, lost_bytes, kept, is_settled=is_settled)
    check_continues(root, list(range(first + kept)), LARGE)


@pytest.mark.parametrize("kept", [0, 1, 7])
@pytest.mark.parametrize("lost_bytes", [70, 40])
def test_refuse_cut_refuses_a_torn_record_after_a_settled_watermark(lost_bytes: int, kept: int, tmp_path: Path) -> None:
    root, first = log_newer_than_its_watermark(tmp_path, lost_bytes, kept, is_settled=True)
    before = (root / "commitlog" / f"{0:020d}").read_bytes()
    with pytest.raises(DamageError, match="the parts add up to"):
        append(writer(root, LARGE), first, first + 1)
    assert (root / "commitlog" / f"{0:020d}").read_bytes() == before


def log_newer_than_its_watermark(tmp_path: Path, lost_bytes: int, kept: int, *, is_settled: bool) -> tuple[Path, int]:
    """Return a store whose log has `kept` complete records after the watermark, and the first number of them."""
    root = tmp_path / "s"
    append(writer(root, LARGE), 0, 20, settle=True)
    if not is_settled:
        append(writer(root, LARGE), 20, 22)
    old, note = watermark(root), read_watermarks(str(root))[0]
    first = 20 if is_settled else 22
    append(writer(root, LARGE), first, first + 40)
    after = read_watermarks(str(root))[0]
    assert note is not None
    assert after is not None
    size = (after.end - note.end) // 40
    place = note.end + kept * size
    lose_log(root, place if lost_bytes > size else place + size - lost_bytes, place + max(size, lost_bytes))
    (root / "rmq/watermark").write_bytes(old)
    return root, first


@pytest.mark.parametrize("lost", ["log", "middle", "units", "index", "all"])
@pytest.mark.parametrize("is_cut", [True, False])
def test_prepare_without_a_watermark_scans_the_whole_log(lost: str, is_cut: bool, tmp_path: Path) -> None:
    """As docs/OPERATIONS.md describes it for a file system that was unmounted by force."""
    root = tmp_path / "s"
    append(writer(root, LARGE), 0, 20, settle=True)
    begin = settled_end(root)
    old = watermark(root)
    append(writer(root, LARGE), 20, 100)
    note = read_watermarks(str(root))[0]
    assert note is not None
    size, kept = (note.end - begin) // 80, 100
    if lost in ("log", "all"):
        lose_log(root, begin)
        kept = 20
    if lost == "middle":
        lose_log(root, begin + 30 * size, begin + 40 * size)
        kept = 50
    if lost in ("units", "all"):
        lose_entries(root, 0, 15, 30)
        lose_entries(root, 1, 10, 100)
    if lost in ("index", "all"):
        for path in (root / "index").iterdir():
            path.write_bytes(bytes(path.stat().st_size))
    if is_cut:
        (root / "rmq/watermark").write_bytes(old)
    (root / "rmq/watermark").unlink()
    check_continues(root, list(range(kept)), LARGE)


def test_repair_without_a_watermark_keeps_what_precedes_a_torn_message(tmp_path: Path) -> None:
    """The rest of this paragraph in docs/OPERATIONS.md: only the watermark distinguishes a torn message from damage."""
    root = tmp_path / "s"
    append(writer(root, LARGE), 0, 20, settle=True)
    begin = settled_end(root)
    append(writer(root, LARGE), 20, 100)
    note = read_watermarks(str(root))[0]
    assert note is not None
    size = (note.end - begin) // 80
    lose_log(root, begin + 31 * size - 40, begin + 50 * size)
    (root / "rmq/watermark").unlink()
    with pytest.raises(DamageError, match="a record before the log's end"):
        append(writer(root, LARGE), 90_000, 90_004)
    repair(plan_repair(str(root), cut_log=True), accept_loss=True)
    check_continues(root, list(range(50)), LARGE)


# Damage, and records of others, next to an `abort` of the same boot: recovery treats none of it as lost memory.


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


def test_prepare_keeps_records_of_others_after_a_damaged_one(tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(writer(root, LARGE), 0, 20, settle=True)
    ours, begin = (root / "rmq/watermark").read_bytes(), end_of_note(root)
    append(writer(root, LARGE), 20, 50)
    size = (end_of_note(root) - begin) // 30
    (root / "rmq/watermark").write_bytes(ours)  # so a broker wrote them
    poke(root / "commitlog" / f"{0:020d}", begin + 10 * size + 88, b"\xff")  # a byte of a body
    append(writer(root, LARGE), 90, 92)
    with pytest.raises(DamageError, match="CRC of the body"):
        numbers(root)
    with open_reader(str(root)) as reader:
        reader.refresh()
        held = [reader.bounds(QueueKey("T", queue)) for queue in range(QUEUES)]
    assert [one.max_offset for one in held] == [26, 26], "nothing behind the damage was taken back"


def test_prepare_keeps_a_damaged_entry_of_an_idle_queue(tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(writer(root, LARGE), 0, 20, settle=True, topic="U")
    append(writer(root, LARGE), 0, 20, settle=True)
    append(writer(root, LARGE), 20, 50)
    poke(queue_file(root, "U", 0), 9 * 20, (1 << 40).to_bytes(8, "big"))
    append(writer(root, LARGE), 90, 92)
    assert numbers(root) == [*range(50), 90, 91]
    append(writer(root, LARGE), 80, 82, topic="U")
    with pytest.raises(DamageError, match="queue offset 10 of U/0"):
        numbers(root, "U")
    assert [one.severity for one in check(root).findings if one.severity != "note"] == ["repairable"]


def test_prepare_keeps_a_damaged_entry_of_a_settled_store_with_abort(tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(writer(root, LARGE), 0, 20, settle=True, topic="U")
    append(writer(root, LARGE), 0, 20, settle=True)
    poke(queue_file(root, "U", 0), 9 * 20 + 6, b"\x0b\x0b")  # an earlier place, of another record
    (root / "abort").write_text("4711")  # of a broker that was killed before it wrote anything
    append(writer(root, LARGE), 20, 22, settle=True)
    assert numbers(root) == list(range(22))
    with pytest.raises(DamageError):
        numbers(root, "U")
    assert {one.severity for one in check(root).findings} - {"note"} == {"repairable"}


def test_prepare_keeps_a_damaged_settled_entry_after_lost_memory(tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(writer(root, LARGE), 0, 20, settle=True, topic="U")
    append(writer(root, LARGE), 0, 20, settle=True)
    note, end = (root / "rmq/watermark").read_bytes(), end_of_note(root)
    append(writer(root, LARGE), 20, 40)
    (root / "rmq/watermark").write_bytes(note)
    lose_log(root, end)
    poke(queue_file(root, "U", 0), 9 * 20 + 6, b"\x0b\x0b")
    append(writer(root, LARGE), 60, 62, settle=True)
    assert numbers(root) == [*range(20), 60, 61]
    append(writer(root, LARGE), 80, 82, topic="U")
    with pytest.raises(DamageError):
        numbers(root, "U")


def test_prepare_keeps_an_acknowledged_message_of_nul_characters(tmp_path: Path) -> None:
    root = tmp_path / "s"
    append(writer(root, LARGE), 0, 4, settle=True, topic="U")
    append(writer(root, LARGE), 0, 2)
    append(writer(root, LARGE), 2, 3, property_="\0" * 1500)
    append(writer(root, LARGE), 3, 9)
    # A stale entry after the end of another queue, as a broker leaves it, for a position in the log's file.
    poke(queue_file(root, "U", 0), 2 * 20, struct.pack(">qiq", 9000, 146, 0))
    append(writer(root, LARGE), 90, 92)
    assert numbers(root) == [*range(9), 90, 91]


def test_entries_from_skips_an_unreadable_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "s"
    append(writer(root, LARGE), 0, 4, topic="U")
    append(writer(root, LARGE), 0, 4)
    last_place, refused = ConsumeQueue.last_place, os.fspath(queue_file(root, "U", 0).parent)

    def fail(queue: ConsumeQueue) -> int:
        if queue.run.folder == refused:
            with reading(refused, "opened"):
                raise OSError(errno.EIO, "Input/output error")
        return last_place(queue)

    monkeypatch.setattr(ConsumeQueue, "last_place", fail)
    append(writer(root, LARGE), 4, 8)
    assert numbers(root) == list(range(8))
