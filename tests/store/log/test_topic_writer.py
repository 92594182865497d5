"""TopicWriter: topics.json after crashes between any two calls, and the creation of many topics."""

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from support.encoded_samples import encode_samples

import rmq_spark
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import OptionError, StorePathError
from rmq_spark.store.format.config_json import (
    DataVersion,
    TopicConfig,
    TopicsFile,
    decode_topics_file,
    encode_topics_file,
)
from rmq_spark.store.log import topics as topics_module
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.log.store_lock import StoreLock
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.log.topics import TopicWriter, find_topics, read_topics
from rmq_spark.store.testing.crash_disk import CrashDisk
from rmq_spark.store.testing.disk_effects import Rename
from rmq_spark.store.testing.sample_message import SampleMessage

NOW_MS = 1_769_860_800_000  # 2026-01-31T12:00:00Z
MANY = 100


def text(*topics: str, counter: int = 7) -> bytes:
    configs = {topic: TopicConfig(topic, 3, 3) for topic in topics}
    return encode_topics_file(TopicsFile(configs, DataVersion(0, counter, 1), {"more": 1}))


WHOLE, BEFORE = text("a", "b"), text("a", counter=6)
# The possible contents of the folder, by name, and the topics that must not be lost.
LEFT = {
    "as we or a broker leave it": ({"topics.json": WHOLE, "topics.json.bak": BEFORE}, {"a", "b"}),
    "without a backup": ({"topics.json": WHOLE}, {"a", "b"}),
    "with a backup of nothing": ({"topics.json": WHOLE, "topics.json.bak": b""}, {"a", "b"}),
    # MixAll#string2File, 4.9: write the new file, remove the old one, rename the new one.
    "4.9 died before it renamed": ({"topics.json.tmp": text("a", "b", "c"), "topics.json.bak": WHOLE}, {"a", "b"}),
    # MixAll#string2File, 5.3: write the backup, then overwrite the file in place.
    "5.3 died before it wrote": ({"topics.json": b"", "topics.json.bak": WHOLE}, {"a", "b"}),
    "5.3 died while it wrote": ({"topics.json": WHOLE[:-30], "topics.json.bak": WHOLE}, {"a", "b"}),
}


def make(root: Path, left: dict[str, bytes]) -> None:
    (root / "config").mkdir(parents=True)
    for name, content in left.items():
        (root / "config" / name).write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("how", LEFT)
@pytest.mark.parametrize("wanted", [["a"], ["a", "c", "d"]], ids=["there", "some new"])
def test_topic_writer_crash_leaves_every_topic_in_the_file_or_its_backup(
    tmp_path: Path, how: str, wanted: list[str]
) -> None:
    left, topics = LEFT[how]
    root = tmp_path / "store"
    make(root, left)
    disk = CrashDisk(root)
    assert TopicWriter(disk, str(root)).ensure(wanted, 5, NOW_MS) == {name: 3 if name == "a" else 5 for name in wanted}
    for point in range(disk.effect_count + 1):
        is_over = point == disk.effect_count
        for number, image in enumerate(disk.images(point, seed=3)):
            path = tmp_path / f"{point}-{number}"
            image.write_to(path)
            found = set(read_topics(str(path), lambda seconds: None))
            assert found in ([topics | set(wanted)] if is_over else [topics, topics | set(wanted)]), image
            # The next writer creates all of them durably, and loses none.
            assert len(TopicWriter(Disk(), str(path)).ensure(wanted, 5, NOW_MS)) == len(wanted)
            assert set(read_topics(str(path), pytest.fail)) == topics | set(wanted), image


@pytest.mark.parametrize("how", [how for how in LEFT if "died" in how])
def test_topic_writer_restores_the_file_from_its_backup(tmp_path: Path, how: str) -> None:
    make(tmp_path, LEFT[how][0])
    assert TopicWriter(Disk(), str(tmp_path)).ensure(["b"], 5, NOW_MS) == {"b": 3}
    assert (tmp_path / "config" / "topics.json").read_bytes() == WHOLE
    assert (tmp_path / "config" / "topics.json.bak").read_bytes() == WHOLE
    assert not (tmp_path / "config" / "topics.json.tmp").exists()


@pytest.mark.parametrize("how", LEFT)
def test_topic_writer_keeps_the_contents_that_it_read(tmp_path: Path, how: str) -> None:
    make(tmp_path, LEFT[how][0])
    TopicWriter(Disk(), str(tmp_path)).ensure(["c"], 5, NOW_MS)
    found = find_topics(str(tmp_path)).file
    assert found.data_version == DataVersion(0, 8, NOW_MS)
    assert found.unknown == {"more": 1}
    assert found.topics["b"] == TopicConfig("b", 3, 3)
    assert (tmp_path / "config" / "topics.json.bak").read_bytes() == WHOLE


def test_topic_writer_ensure_creates_many_topics_by_one_write(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path)
    writer = TopicWriter(disk, str(tmp_path))
    names = [f"t{number}" for number in range(MANY)]
    for wanted in (names[:1], names, [*names, "another"], names):
        before = disk.effect_count
        assert writer.ensure(wanted, 2, NOW_MS) == dict.fromkeys(wanted, 2)
        assert sum(isinstance(effect, Rename) for effect in disk.effects[before:]) <= 2
    assert set(read_topics(str(tmp_path))) == {*names, "another"}


@pytest.mark.parametrize(("bad", "error"), [("a/b", OptionError), ("closed", StorePathError)])
def test_topic_writer_ensure_creates_nothing_if_one_topic_is_refused(
    tmp_path: Path, bad: str, error: type[Exception]
) -> None:
    configs = {"closed": TopicConfig("closed", perm=4)}
    make(tmp_path, {"topics.json": encode_topics_file(TopicsFile(configs))})
    with pytest.raises(error):
        TopicWriter(Disk(), str(tmp_path)).ensure(["new", bad], 2, NOW_MS)
    assert set(read_topics(str(tmp_path))) == {"closed"}


@pytest.fixture
def signs(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """The calls of the lock holder's heartbeat."""
    called: list[Callable[[], None]] = []
    monkeypatch.setattr(StoreLock, "heartbeat", lambda self: [call() for call in called])
    return called


def test_heartbeat_while_topics_and_queues_are_created_and_synced(
    tmp_path: Path, signs: list[Callable[[], None]]
) -> None:
    """A waiting process would consider the holder hung: each file needs a sync or more, and there may be many."""
    disk = CrashDisk(tmp_path)
    store = StoreWriter(str(tmp_path / "s"), disk, WriterSettings(), lambda: NOW_MS, time.sleep)
    names = [f"t{number}" for number in range(MANY)]
    seen: list[int] = []
    with store.section() as section:
        signs.append(lambda: seen.append(disk.effect_count))
        section.ensure_topics(names, 2)
        assert len(seen) >= MANY
        section.append(encode_samples([SampleMessage(name, queue, b"body") for name in names for queue in range(2)]))
        section.settle()
        seen.append(disk.effect_count)
    assert seen[-1] > 4 * MANY
    assert max(after - before for before, after in pairwise(seen)) < 30


def test_size_of_new_queue_files_is_determined_once_per_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Determining the size lists every topic's folder: doing so for each new queue would take minutes."""
    asked = []
    real = StoreFiles._queue_file_bytes
    monkeypatch.setattr(StoreFiles, "_queue_file_bytes", lambda self, kind: asked.append(1) or real(self, kind))
    store = StoreWriter(str(tmp_path), Disk(), WriterSettings(), lambda: NOW_MS, time.sleep)
    with store.section() as section:
        section.append(encode_samples([SampleMessage(f"t{number}", 0, b"body") for number in range(MANY)]))
    assert len(asked) == 1


def test_topics_json_is_decoded_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []

    def count(text: bytes) -> TopicsFile:
        decoded.append(len(text))
        return decode_topics_file(text)

    monkeypatch.setattr(topics_module, "decode_topics_file", count)
    with rmq_spark.open_store(tmp_path / "s") as first:
        for name in ("a", "b"):
            first.create_topic(name)
        decoded.clear()
    with rmq_spark.open_store(tmp_path / "s") as store:
        for _ in range(3):
            store.send("a", "x")
            store.topics()
        assert len(decoded) == 1
        store.create_topic("c")
        store.send("c", "x")
        assert store.topics() == ["a", "b", "c"]
        assert len(decoded) == 2


def test_import_parquet_creates_all_topics_by_one_write(tmp_path: Path) -> None:
    names = [f"t{number}" for number in range(50)]
    parquet.write_table(pa.table({"topic": names, "body": names}), tmp_path / "f.parquet")
    rmq_spark.import_parquet(tmp_path / "s", tmp_path / "f.parquet")
    found = find_topics(str(tmp_path / "s")).file
    assert set(found.topics) == set(names)
    assert found.data_version is not None
    assert found.data_version.counter == 1


@pytest.mark.parametrize(("perm", "written"), [(6, 7), (4, 5), (2, 3)])
def test_topic_writer_sets_the_inherit_bit_of_tbw102(tmp_path: Path, perm: int, written: int) -> None:
    """TopicConfigManager#createTopicInSendMessageMethod asks PermName#isInherited of TBW102 (4.9, 5.3)."""
    store = StoreWriter(str(tmp_path), Disk(), WriterSettings(), lambda: NOW_MS, time.sleep)
    with store.section() as section:
        section.ensure_topics(["TBW102", "orders"], 8, perm)
    topics = read_topics(str(tmp_path))
    assert (topics["TBW102"].perm, topics["orders"].perm) == (written, perm)
