"""Tests of `StoreWriter`: it writes what a broker writes, next to a broker's records and after a writer's death."""

import shutil
import time
from itertools import count
from pathlib import Path

import pytest
from support.encoded_samples import encode_samples

from rmq_spark.store import open_reader, open_store
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, DiskFullError, OffsetRangeError, OptionError, StorePathError
from rmq_spark.store.format.checkpoint import decode_checkpoint
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.log.consume_queue import ConsumeQueue
from rmq_spark.store.log.retention import expire
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import FIRST_STORE_MS, build_store

GOLDEN = Path(__file__).parents[2] / "golden"
SIZES = FileSizes(4096, 1000, 50 * 46, IndexShape(20, 60))
COLUMNS = ("queueOffset", "commitLogOffset", "tags", "keys", "body", "storeTimestamp")


class Clock:
    """A clock that advances by one at each call."""

    def __init__(self, first_ms: int = FIRST_STORE_MS) -> None:
        self.now = count(first_ms)

    def __call__(self) -> int:
        return next(self.now)


def writer(root: Path, clock: Clock | None = None, sizes: FileSizes = SIZES) -> StoreWriter:
    return StoreWriter(str(root), Disk(), WriterSettings(sizes=sizes), clock or Clock(), time.sleep)


def sample(number: int, topic: str = "T", queues: int = 3, size: int = 40) -> SampleMessage:
    body = b"%04d" % number + b"b" * (number * 7 % size)
    return SampleMessage(topic, number % queues, body, tags=f"t{number % 5}", keys=f"k{number} all")


def rows(root: Path) -> dict[str, list[tuple[object, ...]]]:
    """Return every message of every queue of a store, by queue."""
    found = {}
    with open_reader(str(root)) as reader:
        reader.refresh()
        for topic in reader.topics():
            for queue in reader.queues(topic):
                held = reader.bounds(queue)
                batches = reader.read(queue, held.min_offset, held.max_offset, COLUMNS)
                found[str(queue)] = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
    return found


def files_of(root: Path, *folders: str) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for folder in folders
        for path in sorted((root / folder).rglob("*"))
        if path.is_file()
    }


def append_each(store: StoreWriter, messages: list[SampleMessage]) -> None:
    with store.section() as section:
        for message in messages:
            section.ensure_topic(message.topic, 4)
            section.append(encode_samples([message]))


def test_append_writes_the_files_of_a_broker_byte_for_byte(tmp_path: Path) -> None:
    messages = [sample(number) for number in range(200)]
    build_store(tmp_path / "theirs", messages, segment_bytes=4096, queue_file_bytes=1000)
    store = writer(tmp_path / "ours")
    for message in messages:
        with store.section() as section:
            section.append(encode_samples([message]))
    store.close()
    ours, theirs = (files_of(tmp_path / name, "commitlog", "consumequeue") for name in ("ours", "theirs"))
    # The clock was also read for other purposes: compare everything except the store times.
    assert ours.keys() == theirs.keys()
    assert {name: data for name, data in ours.items() if name.startswith("consumequeue")} == {
        name: data for name, data in theirs.items() if name.startswith("consumequeue")
    }
    assert [row[:-1] for queue in rows(tmp_path / "ours").values() for row in queue] == [
        row[:-1] for queue in rows(tmp_path / "theirs").values() for row in queue
    ]


def test_append_of_many_records_equals_single_appends(tmp_path: Path) -> None:
    messages = [sample(number) for number in range(150)]
    together, single = writer(tmp_path / "together"), writer(tmp_path / "single")
    with together.section() as section:
        appended = section.append(encode_samples(messages))
    append_each(single, messages)
    whole = rows(tmp_path / "together")
    assert [row[:-1] for queue in whole.values() for row in queue] == [
        row[:-1] for queue in rows(tmp_path / "single").values() for row in queue
    ]
    seen = {(message.queue_id, offset) for message, offset in zip(messages, appended.queue_offsets, strict=True)}
    assert seen == {(queue, offset) for queue in range(3) for offset in range(50)}


def test_append_indexes_keys_across_index_files(tmp_path: Path) -> None:
    store = writer(tmp_path / "s")
    append_each(store, [sample(number) for number in range(120)])
    assert len(list((tmp_path / "s" / "index").iterdir())) > 2
    with open_reader(str(tmp_path / "s")) as reader:
        for number in range(120):
            assert reader.find_key("T", f"k{number}") == [(QueueKey("T", number % 3), number // 3)]


def test_append_is_visible_to_a_concurrent_reader(tmp_path: Path) -> None:
    store = writer(tmp_path / "s")
    with open_reader(str(tmp_path / "s")) as reader:
        for number in range(60):
            append_each(store, [sample(number, queues=1)])
            reader.refresh()
            assert reader.bounds(QueueKey("T", 0)) == QueueBounds(0, number + 1)


def test_settle_leaves_a_clean_shutdown(tmp_path: Path) -> None:
    store = writer(tmp_path / "s")
    append_each(store, [sample(number) for number in range(9)])
    assert (tmp_path / "s" / "abort").exists()
    store.close()
    assert not (tmp_path / "s" / "abort").exists()
    page = decode_checkpoint((tmp_path / "s" / "checkpoint").read_bytes())
    newest = max(row[-1].timestamp() * 1000 for queue in rows(tmp_path / "s").values() for row in queue)  # type: ignore[attr-defined]
    assert page.physic_msg_timestamp == page.logics_msg_timestamp == round(newest)
    assert page.confirm_phy_offset > 0


def test_append_never_decreases_the_store_time(tmp_path: Path) -> None:
    append_each(writer(tmp_path / "s", Clock(2_000_000_000_000)), [sample(0)])
    append_each(writer(tmp_path / "s", Clock(1_000_000_000_000)), [sample(1)])
    times = [row[-1] for queue in rows(tmp_path / "s").values() for row in queue]
    assert len(set(times)) == 1


GOLDEN_STORES = [folder for folder in sorted(GOLDEN.iterdir()) if (folder / "commitlog").is_dir()]


@pytest.mark.parametrize("golden", GOLDEN_STORES, ids=lambda path: path.name)
def test_append_continues_a_brokers_store(tmp_path: Path, golden: Path) -> None:
    shutil.copytree(golden, tmp_path / "s")
    before = rows(golden)
    store = writer(tmp_path / "s", Clock(1_900_000_000_000))
    append_each(store, [sample(number, "Added") for number in range(30)])
    store.close()
    after = rows(tmp_path / "s")
    for queue, messages in before.items():
        assert after[queue][: len(messages)] == messages
    assert [len(after[f"Added/{queue}"]) for queue in range(3)] == [10, 10, 10]


def test_section_dispatches_what_a_dead_writer_logged(tmp_path: Path) -> None:
    store = writer(tmp_path / "s")
    append_each(store, [sample(number) for number in range(10)])

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with store.section() as section:
        section._dispatch = die  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            section.append(encode_samples([sample(number) for number in range(10, 20)]))
    assert sum(map(len, rows(tmp_path / "s").values())) == 10
    append_each(writer(tmp_path / "s"), [sample(20)])
    found = rows(tmp_path / "s")
    assert sorted(int(row[4][:4]) for queue in found.values() for row in queue) == list(range(21))  # type: ignore[index]
    with open_reader(str(tmp_path / "s")) as reader:
        assert len(reader.find_key("T", "k15")) == 1


def test_section_clears_a_partly_written_record(tmp_path: Path) -> None:
    store = writer(tmp_path / "s")
    append_each(store, [sample(number) for number in range(5)])
    with store.section() as section:
        end = section.end
        section._store.open_session()
    part = encode_samples([sample(5)]).data.tobytes()[:60]
    with (tmp_path / "s" / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(end)
        file.write(part)
    append_each(writer(tmp_path / "s"), [sample(6, size=1)])
    assert sorted(int(row[4][:4]) for queue in rows(tmp_path / "s").values() for row in queue) == [0, 1, 2, 3, 4, 6]  # type: ignore[index]


def test_section_clears_stale_bytes_of_a_broker(tmp_path: Path) -> None:
    golden = GOLDEN / "truncated-stale"
    shutil.copytree(golden, tmp_path / "s")
    with writer(tmp_path / "s", Clock(1_900_000_000_000)).section() as section:
        end = section.end
    last = max((tmp_path / "s" / "commitlog").iterdir())
    assert not last.read_bytes()[end - int(last.name) :].strip(b"\0")


def test_append_refuses_a_record_larger_than_a_segment_before_any_write(tmp_path: Path) -> None:
    store = writer(tmp_path / "s")
    append_each(store, [sample(0)])
    before = files_of(tmp_path / "s", "commitlog", "consumequeue", "index")
    large = encode_samples([sample(1), SampleMessage("T", 0, b"x" * 4000)])
    with pytest.raises(OptionError, match=r'topic "T" takes \d+ bytes'), store.section() as section:
        section.append(large)
    assert files_of(tmp_path / "s", "commitlog", "consumequeue", "index") == before


def test_append_refuses_a_full_disk_before_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = writer(tmp_path / "s")
    append_each(store, [sample(0)])
    before = files_of(tmp_path / "s", "commitlog", "consumequeue", "index")
    monkeypatch.setattr("rmq_spark.store.disk.files.free_bytes", lambda path: 1000)
    with pytest.raises(DiskFullError, match="Make room"), store.section() as section:
        section.append(encode_samples([sample(1)]))
    assert files_of(tmp_path / "s", "commitlog", "consumequeue", "index") == before


def test_write_queues_refuses_a_topic_without_write_permission(tmp_path: Path) -> None:
    store = writer(tmp_path / "s")
    with store.section() as section:
        section.ensure_topic("T", 2)
        topics = tmp_path / "s" / "config" / "topics.json"
        topics.write_text(topics.read_text().replace('"perm":6', '"perm":4'))
        with pytest.raises(StorePathError, match="cannot write to topic"):
            section.write_queues("T")


def test_section_refuses_a_damaged_store(tmp_path: Path) -> None:
    build_store(tmp_path / "s", [sample(number) for number in range(60)], segment_bytes=4096)
    log = min((tmp_path / "s" / "commitlog").iterdir())
    newest = max((tmp_path / "s" / "commitlog").iterdir())
    data = bytearray(newest.read_bytes())
    data[4] ^= 0xFF
    newest.write_bytes(data)
    with pytest.raises(DamageError), writer(tmp_path / "s").section():
        pass
    assert newest.read_bytes() == bytes(data)
    assert log.exists()


def test_store_writer_refuses_settings_of_another_version(tmp_path: Path) -> None:
    append_each(writer(tmp_path / "s"), [sample(0)])
    settings = tmp_path / "s" / "rmq" / "settings.json"
    settings.write_text(settings.read_text().replace('"v": 1', '"v": 2'))
    with pytest.raises(StorePathError, match="version 2"):
        writer(tmp_path / "s")


def test_store_writer_refuses_a_folder_that_is_not_a_store(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("milk")
    with pytest.raises(StorePathError, match=r"is not a RocketMQ store.* It contains: todo.txt. Give the folder that"):
        writer(tmp_path / "notes")
    with pytest.raises(StorePathError, match="is a file"):
        writer(tmp_path / "notes" / "todo.txt")


def test_expire_by_size_deletes_segments_and_their_derived_files(tmp_path: Path) -> None:
    store = writer(tmp_path / "s")
    append_each(store, [sample(number) for number in range(400)])
    with store.section() as section:
        found = expire(section._store, max_bytes=8192)
        assert found.segments > 3
        assert found.queue_files > 0
        assert found.index_files > 0
    held = rows(tmp_path / "s")
    assert sum(map(len, held.values())) < 400
    append_each(store, [sample(400)])
    assert [queue[-1][0] for queue in held.values() if queue] == [133, 132, 132]


def test_expire_by_age_uses_the_messages_times(tmp_path: Path) -> None:
    store = writer(tmp_path / "s", Clock(1_000_000))
    append_each(store, [sample(number) for number in range(100)])
    store = writer(tmp_path / "s", Clock(9_000_000))
    append_each(store, [sample(number) for number in range(100, 200)])
    with store.section() as section:
        expire(section._store, max_age_ms=5_000_000)
    numbers = sorted(int(row[4][:4]) for queue in rows(tmp_path / "s").values() for row in queue)  # type: ignore[index]
    assert numbers[-1] == 199
    assert 60 < numbers[0] <= 100


def test_section_keeps_a_property_of_nul_characters_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = writer(tmp_path / "s")
    append_each(store, [SampleMessage("T", 0, b"0000", properties={"x": "a\0b", "y": "c"}), sample(3)])
    monkeypatch.setattr("rmq_spark.store.disk.host.boot_id", lambda: "another boot")
    append_each(writer(tmp_path / "s"), [sample(6)])
    assert len(rows(tmp_path / "s")["T/0"]) == 3


def test_append_recreates_an_empty_segment_of_a_dead_broker(tmp_path: Path) -> None:
    store = writer(tmp_path / "s")
    append_each(store, [sample(number, queues=1) for number in range(30)])
    store.close()
    last = max((tmp_path / "s" / "commitlog").iterdir())
    (last.parent / f"{int(last.name) + 4096:020d}").touch()
    append_each(writer(tmp_path / "s"), [sample(number, queues=1) for number in range(30, 90)])
    assert len(rows(tmp_path / "s")["T/0"]) == 90


def test_section_keeps_the_append_if_retention_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = writer(tmp_path / "s")
    append_each(store, [sample(number) for number in range(100)])
    store.set_retention(None, 4096)
    append_each(store, [sample(number) for number in range(100, 160)])
    (tmp_path / "s" / "consumequeue" / "T" / "0" / "notes.txt").touch()
    with store.section() as section:
        section.append(encode_samples([sample(number, topic="Other", queues=1) for number in range(60)]))
    assert "retention in" in caplog.text
    with open_reader(str(tmp_path / "s")) as reader:
        assert reader.bounds(QueueKey("Other", 0)).max_offset == 60


def test_search_written_end_is_in_the_first_file_that_is_not_full(tmp_path: Path) -> None:
    append_each(writer(tmp_path / "s"), [sample(number, queues=1) for number in range(60)])
    first = min((tmp_path / "s" / "consumequeue" / "T" / "0").iterdir())
    data = bytearray(first.read_bytes())
    data[18 * 20 :] = bytes(len(data) - 18 * 20)
    first.write_bytes(data)
    queue = ConsumeQueue(QueueKey("T", 0), str(first.parent))
    assert queue.search_written_end() == 18


def test_store_writer_writes_broker_conf_for_a_new_store(tmp_path: Path) -> None:
    with writer(tmp_path).section():
        pass
    lines = (tmp_path / "rmq" / "broker.conf").read_text().splitlines()
    assert dict(line.split("=") for line in lines) == {
        "storePathRootDir": str(tmp_path),
        "mappedFileSizeCommitLog": "4096",
        "mappedFileSizeConsumeQueue": "1000",
        "mapperFileSizeBatchConsumeQueue": str(50 * 46),
        "maxHashSlotNum": "20",
        "maxIndexNum": "60",
        "messageIndexSafe": "true",
        "messageDelayLevel": "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h",
        "timerMaxDelaySec": "259200",
    }


def test_sizes_are_those_of_the_writer_that_created_the_store(tmp_path: Path) -> None:
    with open_store(tmp_path, segment_bytes=1 << 16) as first:
        first.create_topic("a")
        first.set_retention(max_bytes=1 << 20)
    with open_store(tmp_path) as second:
        with pytest.raises(OptionError, match="takes 65"):
            second.send("a", b"x" * 65_450)
        second.send("a", b"x")
    (segment,) = (tmp_path / "commitlog").iterdir()
    assert segment.stat().st_size == 1 << 16
    assert "mappedFileSizeCommitLog=65536\n" in (tmp_path / "rmq" / "broker.conf").read_text()


def test_read_refuses_a_missing_range_and_names_the_bounds(tmp_path: Path) -> None:
    with open_store(tmp_path, segment_bytes=1 << 13) as store:
        store.create_topic("a", 1)
        for _ in range(20):
            store.send("a", b"x" * 1000)
        store.expire(max_bytes=2 << 13)
        held = store.bounds("a")[0]
    assert held.min_offset > 0
    with open_reader(tmp_path) as reader:
        for begin, end in ((0, 10), (-1, held.min_offset + 1), (held.min_offset, 100)):
            with pytest.raises(OffsetRangeError) as caught:
                next(reader.read(QueueKey("a", 0), begin, end, ["body"]))
            assert (caught.value.min_offset, caught.value.max_offset) == (held.min_offset, held.max_offset)


def test_read_names_an_invalid_queue_and_invalid_columns(tmp_path: Path) -> None:
    with open_store(tmp_path, segment_bytes=1 << 13) as store:
        store.send("a", b"x")
    with open_reader(tmp_path) as reader:
        for call in (lambda: reader.bounds("a"), lambda: next(reader.read(("a", 0), 0, 1, ["body"]))):
            with pytest.raises(OptionError, match="invalid queue: found"):
                call()
        with pytest.raises(OptionError, match=r'columns="body" is a text; expected a list'):
            next(reader.read(QueueKey("a", 0), 0, 1, "body"))
