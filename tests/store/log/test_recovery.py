"""Tests of `recovery`: it must not treat promised records as torn, stale or missing."""

import contextlib
import json
import os
import shutil
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from support.encoded_samples import encode_samples

from rmq_spark.store import open_reader
from rmq_spark.store.disk.system_calls import SystemCalls
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import StorePathError
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.format.record import MAGIC_BLANK, encode_blank
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.log.topics import read_topics
from rmq_spark.store.log.write_session import WriteSession
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.crash_disk import CrashDisk, ProcessDeathError
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import FIRST_STORE_MS

GOLDEN = Path(__file__).parents[2] / "golden"
SIZES = FileSizes(4096, 1000, 50 * 46, IndexShape(20, 60))


class WriterDeathError(Exception):
    """The writer died here."""


def die(*_: object) -> None:
    raise WriterDeathError


def writer(
    root: Path, disk: Disk | None = None, sizes: FileSizes = SIZES, commit_log_path: str | None = None
) -> StoreWriter:
    ticks = count(FIRST_STORE_MS)
    settings = WriterSettings(sizes=sizes, commit_log_path=commit_log_path)
    return StoreWriter(str(root), disk or Disk(), settings, lambda: next(ticks), time.sleep)


def samples(first: int, last: int, topic: str = "T", queues: int = 2) -> list[SampleMessage]:
    return [
        SampleMessage(topic, number % queues, b"%04d" % number + b"b" * 30, tags=f"t{number % 5}", keys=f"k{number}")
        for number in range(first, last)
    ]


def append(store: StoreWriter, messages: list[SampleMessage], *, settle: bool = False) -> None:
    with store.section() as section:
        for topic in sorted({message.topic for message in messages}):
            section.ensure_topic(topic, 2)
        section.append(encode_samples(messages))
        if settle:
            section.settle()


def begin_and_die(store: StoreWriter, messages: list[SampleMessage], part: str, step: str) -> None:
    """Begin to append, and die before a step of a part of the store's files; `part` "" is StoreFiles itself."""

    def begin(section: WriteSession) -> None:
        setattr(getattr(section._store, part) if part else section._store, step, die)
        section.append(encode_samples(messages))

    with pytest.raises(WriterDeathError), store.section() as section:
        begin(section)


def numbers(root: Path, commit_log_path: str | None = None) -> dict[str, list[int]]:
    """Return the number of every message, by queue."""
    found: dict[str, list[int]] = {}
    with open_reader(str(root), commit_log_path=commit_log_path) as reader:
        reader.refresh()
        for topic in reader.topics():
            for queue in reader.queues(topic):
                held = reader.bounds(queue)
                batches = reader.read(queue, held.min_offset, held.max_offset, ("body",))
                found[str(queue)] = [int(row["body"][:4]) for batch in batches for row in batch.to_pylist()]
    return found


def cut_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the machine was restarted since."""
    monkeypatch.setattr("rmq_spark.store.disk.host.boot_id", lambda: "another boot")


def test_prepare_recovers_after_retention_deleted_the_settled_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = writer(tmp_path / "s")
    for first in range(0, 200, 20):
        append(store, samples(first, first + 20))
    with store.section() as section:
        assert section.expire(max_bytes=8192).segments > 2
    before = numbers(tmp_path / "s")
    cut_power(monkeypatch)
    append(writer(tmp_path / "s"), samples(200, 202))
    assert numbers(tmp_path / "s") == {"T/0": [*before["T/0"], 200], "T/1": [*before["T/1"], 201]}


def test_prepare_continues_a_fully_expired_queue_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = writer(tmp_path / "s")
    append(store, samples(0, 20, "Idle", 1))
    for first in range(20, 200, 20):
        append(store, samples(first, first + 20))
    with store.section() as section:
        section.expire(max_bytes=4096)
    store.close()
    append(store, samples(200, 202))
    cut_power(monkeypatch)
    with writer(tmp_path / "s").section() as section:
        assert section.next_offset("Idle", 0) == 20


@pytest.mark.parametrize("is_closed", [True, False])
def test_prepare_refuses_a_log_whose_end_is_in_another_folder(tmp_path: Path, is_closed: bool) -> None:
    log = tmp_path / "log"
    log.mkdir()
    store = writer(tmp_path / "s", commit_log_path=str(log))
    append(store, samples(0, 60))
    if is_closed:
        store.close()
    before = numbers(tmp_path / "s", str(log))
    with pytest.raises(StorePathError, match="commitLogPath"):
        writer(tmp_path / "s").close()
    assert numbers(tmp_path / "s", str(log)) == before


def test_prepare_refuses_a_log_with_an_unmounted_folder(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    both = ",".join(map(str, folders))
    store = writer(tmp_path / "s", commit_log_path=both)
    append(store, samples(0, 40), settle=True)
    append(store, samples(40, 120))
    before = numbers(tmp_path / "s", both)
    missing = max((path for folder in folders for path in folder.iterdir()), key=lambda path: path.name).parent
    missing.rename(tmp_path / "away")
    missing.mkdir()
    with pytest.raises(StorePathError, match="mounted"):
        append(writer(tmp_path / "s", commit_log_path=both), samples(120, 122))
    missing.rmdir()
    (tmp_path / "away").rename(missing)
    assert numbers(tmp_path / "s", both) == before


@pytest.mark.parametrize(("part", "step"), [("log_writer", "write"), ("", "note_logged"), ("", "close_session")])
def test_prepare_keeps_the_messages_of_a_broker_that_died_after_our_writer(
    tmp_path: Path, part: str, step: str
) -> None:
    store = writer(tmp_path / "s")
    append(store, samples(0, 6))
    begin_and_die(store, samples(6, 10), part, step)
    root = tmp_path / "s"
    ours = {name: (root / "rmq" / name).read_bytes() for name in ("watermark", "settings.json")}
    # A broker ignores our side files, and a 4.9 broker writes its checkpoint once a minute.
    shutil.rmtree(root / "rmq")
    page = (root / "checkpoint").read_bytes() if (root / "checkpoint").exists() else None
    append(writer(root), samples(10, 14, "B"))
    (root / "checkpoint").unlink(missing_ok=True)
    if page is not None:
        (root / "checkpoint").write_bytes(page)
    for name, data in ours.items():
        (root / "rmq" / name).write_bytes(data)
    before = numbers(root)
    append(writer(root), samples(14, 16, "C"))
    assert numbers(root) == {**before, "C/0": [14], "C/1": [15]}
    assert before["B/0"] == [10, 12]


class SyncedNames(SystemCalls):
    """A disk that remembers the names of the synced files."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def sync(self, descriptor: int) -> None:
        """Sync, and remember what."""
        self.names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        super().sync(descriptor)


@pytest.mark.parametrize(("part", "step"), [("queues", "put"), ("", "close_session")])
def test_prepare_syncs_a_dead_writers_files_before_a_clean_shutdown(tmp_path: Path, part: str, step: str) -> None:
    store = writer(tmp_path / "s")
    append(store, samples(0, 6), settle=True)
    begin_and_die(store, samples(6, 10), part, step)
    calls = SyncedNames()
    writer(tmp_path / "s", Disk(calls)).close()
    changed = [path for folder in ("commitlog", "consumequeue") for path in (tmp_path / "s" / folder).rglob("0*0")]
    assert {str(path) for path in changed if path.is_file()} <= set(calls.names)


def test_prepare_clears_stale_bytes_durably_before_it_settles(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "truncated-stale", tmp_path / "s")
    last = str(max((tmp_path / "s" / "commitlog").iterdir()))
    calls = SyncedNames()
    append(writer(tmp_path / "s", Disk(calls)), samples(0, 1))
    assert calls.names.index(last) < calls.names.index(str(tmp_path / "s" / "rmq" / "watermark"))


def test_prepare_rewrites_a_partly_written_entry(tmp_path: Path) -> None:
    sizes = FileSizes(1 << 20, 1000 * 20, 50 * 46, IndexShape(20, 6000))
    store = writer(tmp_path / "s", sizes=sizes)
    append(store, samples(0, 5, queues=1))
    path = tmp_path / "s" / "consumequeue" / "T" / "0" / f"{0:020d}"
    before = path.read_bytes()
    begin_and_die(store, samples(5, 300, queues=1), "", "close_session")
    whole = path.read_bytes()
    page_bytes = 4096  # the kernel writes page by page, and a process may be killed between two
    assert page_bytes % 20 == 16, "place and size of a unit before the edge, half of its tags code behind it"
    path.write_bytes(whole[:page_bytes] + before[page_bytes:])
    writer(tmp_path / "s", sizes=sizes).close()
    assert path.read_bytes() == whole


def crash_as_a_broker(root: Path) -> None:
    """Leave our store as a broker's that died: no side files, and no index that survives a crash."""
    shutil.rmtree(root / "rmq")
    shutil.rmtree(root / "index")
    (root / "abort").touch()


def delete_and_create_again(root: Path, topic: str, store: StoreWriter) -> None:
    """Delete a topic as a broker does, and let one of our writers create it."""
    shutil.rmtree(root / "consumequeue" / topic)
    (root / "config" / "topics.json").write_text(json.dumps({"topicConfigTable": {"Other": {"topicName": "Other"}}}))
    with store.section() as section:
        section.ensure_topic(topic, 1)


def test_prepare_drops_messages_of_a_topic_before_it_was_created_again(tmp_path: Path) -> None:
    store = writer(tmp_path / "s")
    append(store, samples(0, 30, queues=1))
    store.close()
    delete_and_create_again(tmp_path / "s", "T", store)
    append(store, samples(30, 36, queues=1))
    store.close()
    crash_as_a_broker(tmp_path / "s")
    append(writer(tmp_path / "s"), samples(36, 37, queues=1))
    assert numbers(tmp_path / "s")["T/0"] == list(range(30, 37))


@pytest.mark.parametrize("is_folder_there", [True, False])
@pytest.mark.parametrize("new_count", [3, 40])
def test_prepare_rebuilds_a_topic_created_again_whose_entries_are_lost(
    tmp_path: Path, is_folder_there: bool, new_count: int
) -> None:
    """The log still has what its queue contained before the deletion."""
    store, root = writer(tmp_path / "s"), tmp_path / "s"
    append(store, samples(0, 30, queues=1))
    append(store, samples(0, 1, "Other", queues=1))
    store.close()
    delete_and_create_again(root, "T", store)
    append(store, samples(30, 30 + new_count, queues=1))
    store.close()
    before = numbers(root)
    for path in (root / "consumequeue" / "T" / "0").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    if not is_folder_there:
        shutil.rmtree(root / "consumequeue" / "T")
    crash_as_a_broker(root)
    append(writer(root), samples(99, 100, queues=1))
    assert numbers(root) == {**before, "T/0": [*range(30, 30 + new_count), 99]}


@pytest.mark.parametrize("end_in_sector", [508, 509, 510])
def test_prepare_ends_the_log_at_a_torn_filler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end_in_sector: int
) -> None:
    """Its length has three bytes. The first two or three of them are in a sector that was not written to the disk."""
    sizes, root = FileSizes(1 << 18, 1000, 50 * 46, IndexShape(20, 60)), tmp_path / "s"
    store, place = writer(root, sizes=sizes), (1 << 17) - 512 + end_in_sector
    one = len(encode_samples(samples(0, 1)).data)
    padding = b"b" * (place - 2 * one)
    first, second = samples(0, 2)
    append(store, [first, replace(second, body=second.body + padding)], settle=True)
    begin_and_die(store, samples(2, 4), "log_writer", "write")
    filler = encode_blank((1 << 18) - place)
    lost = 512 - end_in_sector
    with (root / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(place + lost)
        file.write(filler[lost:])
    cut_power(monkeypatch)
    with writer(root, sizes=sizes).section() as section:
        assert section.end == place
        section.append(encode_samples(samples(2, 4)))
    assert numbers(root) == {"T/0": [0, 2], "T/1": [1, 3]}


def test_records_from_reads_past_a_torn_filler_of_a_broker(tmp_path: Path) -> None:
    store = writer(tmp_path / "s")
    append(store, samples(0, 60))
    path = tmp_path / "s" / "commitlog" / f"{0:020d}"
    raw = path.read_bytes()
    at = raw.rindex(MAGIC_BLANK.to_bytes(4, "big")) - 4
    for length in (0, SIZES.segment_bytes - at - 8, SIZES.segment_bytes):
        path.write_bytes(raw[:at] + length.to_bytes(4, "big") + raw[at + 4 :])
        with writer(tmp_path / "s").section() as section:
            assert [int(record.body[:4]) for record in section.records_from(0)] == list(range(60))


def test_prepare_keeps_a_deleted_topic_deleted(tmp_path: Path) -> None:
    store = writer(tmp_path / "s")
    append(store, samples(0, 30))
    append(store, samples(30, 32, "Other"))
    store.close()
    topics = tmp_path / "s" / "config" / "topics.json"
    topics.write_text(topics.read_text().replace('"T"', '"NotT"'))
    shutil.rmtree(tmp_path / "s" / "consumequeue" / "T")
    crash_as_a_broker(tmp_path / "s")
    writer(tmp_path / "s").close()
    assert not (tmp_path / "s" / "consumequeue" / "T").exists()
    with open_reader(str(tmp_path / "s")) as reader:
        assert reader.find_key("Other", "k31") == [(QueueKey("Other", 1), 0)]


def test_ensure_topics_of_a_dead_writer_is_durable_before_its_messages(tmp_path: Path) -> None:
    """Die at every effect of creating a topic; another writer sends to it and settles; then the power fails."""
    (tmp_path / "disk").mkdir()
    disk = CrashDisk(tmp_path / "disk")
    root = tmp_path / "disk" / "s"
    append(writer(root, disk), samples(0, 2), settle=True)
    for death in range(40):
        topic = f"New{death}"
        disk.die_at(disk.effect_count + death)
        with contextlib.suppress(ProcessDeathError), writer(root, disk).section() as section:
            section.ensure_topic(topic, 2)
            break
        disk.revive()
        append(writer(root, disk), samples(0, 2, topic), settle=True)
        for image in disk.images(disk.effect_count, 1, subset_count=0):
            if "only what was synced" in str(image):
                again = tmp_path / str(death)
                again.mkdir()
                image.write_to(again)
                assert topic in read_topics(str(again / "s")), image
    assert death > 10
