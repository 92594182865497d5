"""Tests of a lost newest file of a queue: readers and writers refuse the queue, a check and a repair count it."""

import shutil
import time
from pathlib import Path

import pyarrow as pa
import pytest
from support.encoded_samples import encode_samples

import rmq_spark
from rmq_spark import DamageError, OptionError, check, plan_repair, repair
from rmq_spark.store.format.queue_registry import decode_registry
from rmq_spark.store.log import queue_registration, store_writer
from rmq_spark.store.log.queue_registry import registry_path
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.crash_disk import CrashDisk
from rmq_spark.store.testing.sample_message import SampleMessage

KEY = QueueKey("t", 0)
NEWEST = "consumequeue/t/0/00000000000000001200"


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Create new stores with queue files of 20 entries and small segments."""
    made = store_writer.WriterSettings.__init__

    def init(self: object, *given: object, **named: object) -> None:
        named["sizes"] = FileSizes(segment_bytes=1 << 15, queue_file_bytes=400)
        made(self, *given[:4], **named)  # type: ignore[arg-type]

    monkeypatch.setattr(store_writer.WriterSettings, "__init__", init)


def send(path: Path, begin: int, end: int) -> None:
    bodies = [b"%d" % number for number in range(begin, end)]
    with rmq_spark.open_store(path) as store:
        store.send_many(
            pa.table({"topic": ["t"] * len(bodies), "body": bodies, "queueId": pa.array([0] * len(bodies), pa.int32())})
        )


def fill(path: Path) -> None:
    """Send 70 messages to a queue with files of 20, then enough to another topic for several segments."""
    send(path, 0, 70)
    with rmq_spark.open_store(path) as store:
        store.send_many(pa.table({"topic": ["u"] * 600, "body": [b"y" * 100] * 600}))
    assert len(list((path / "consumequeue/t/0").iterdir())) == 4
    assert len(list((path / "commitlog").iterdir())) > 2


def bodies_of(path: Path) -> list[bytes]:
    with StoreReader(str(path)) as reader:
        reader.refresh()
        held = reader.bounds(KEY)
        return [
            row["body"]
            for batch in reader.read(KEY, held.min_offset, held.max_offset, ["body"])
            for row in batch.to_pylist()
        ]


def rolls_of(path: Path) -> dict[QueueKey, int]:
    held, _ = decode_registry(Path(registry_path(str(path))).read_bytes())
    return {key: unit for key, (unit, _) in held.rolls.items() if key == KEY}


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_refuse_lost_end_until_repair_rebuilds_it(lost: int, tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    for file in sorted((path / "consumequeue/t/0").iterdir())[-lost:]:
        file.unlink()
    with pytest.raises(DamageError, match=r"t/0 .*newest.*rmq repair"):
        bodies_of(path)
    end = check(path).log_end
    with rmq_spark.open_store(path) as store, pytest.raises(DamageError, match=r"t/0 .*newest.*rmq repair"):
        store.send("t", b"new", queue_id=0)
    with rmq_spark.open_store(path) as store:
        store.send("u", b"another queue")
    assert check(path).log_end > end
    assert [one.action for one in check(path).findings if one.severity != "note" and one.topic == "t"] == ["rebuild"]
    assert repair(path).report.is_healthy
    assert bodies_of(path) == [b"%d" % number for number in range(70)]
    send(path, 70, 71)
    assert bodies_of(path)[-1] == b"70"


def test_note_roll_writes_nothing_for_a_queue_with_one_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    send(path, 0, 20)
    before = Path(registry_path(str(path))).read_bytes()
    assert b"rolls" not in before
    send(path, 20, 21)
    assert rolls_of(path) == {KEY: 20}
    once = Path(registry_path(str(path))).read_bytes()
    assert once.startswith(before)
    send(path, 21, 40)
    assert Path(registry_path(str(path))).read_bytes() == once
    send(path, 40, 41)
    assert rolls_of(path) == {KEY: 40}


def test_register_queues_includes_the_newest_files(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    Path(registry_path(str(path))).unlink()
    rmq_spark.open_store(path).close()
    assert rolls_of(path) == {KEY: 60}
    (path / NEWEST).unlink()
    with pytest.raises(DamageError, match="newest"):
        bodies_of(path)


def test_expire_keeps_the_registered_newest_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    with rmq_spark.open_store(path) as store:
        assert store.expire(max_bytes=1 << 15).queue_files
    assert [file.name for file in (path / "consumequeue/t/0").iterdir()] == [NEWEST.rpartition("/")[2]]
    assert bodies_of(path) == []
    send(path, 70, 71)
    assert bodies_of(path) == [b"70"]


def test_registry_drops_the_newest_files_of_a_topic_created_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    shutil.rmtree(path / "consumequeue/t")
    config = path / "config/topics.json"
    config.write_text(config.read_text().replace('"t"', '"elsewhere"'))
    for number in range(25):
        send(path, number, number + 1)
    assert bodies_of(path) == [b"%d" % number for number in range(25)]


def test_prepare_after_a_power_cut_restores_a_lost_newest_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    fill(path)
    send(path, 70, 80)
    end = check(path).log_end
    store = rmq_spark.open_store(path, flush="async")
    store.send("t", b"not settled", queue_id=0)
    assert rolls_of(path) == {KEY: 80}
    (path / "consumequeue/t/0/00000000000000001600").unlink()
    segment = sorted((path / "commitlog").iterdir())[-1]
    with segment.open("r+b") as file:
        file.seek(end % (1 << 15))
        file.write(bytes(4096))
    monkeypatch.setattr("rmq_spark.store.disk.host.boot_id", lambda: "after the power cut")
    assert len(bodies_of(path)) == 80
    send(path, 80, 81)
    assert bodies_of(path)[-1] == b"80"
    assert rolls_of(path) == {KEY: 80}
    assert check(path).is_healthy


def use_offsets_twice(path: Path, count: int) -> None:
    """Lose the end of a queue and the registry, as in a broker's store, and send to the queue."""
    fill(path)
    (path / NEWEST).unlink()
    shutil.rmtree(path / "rmq")
    with rmq_spark.open_store(path) as store:
        for number in range(count):
            assert store.send("t", b"again", queue_id=0).queue_offset == 60 + number


def test_repair_counts_messages_whose_queue_offsets_were_reused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    use_offsets_twice(path, 2)
    (finding,) = [one for one in check(path).findings if one.severity == "damage"]
    assert (finding.topic, finding.queue_id, finding.begin, finding.end, finding.messages) == ("t", 0, 60, 62, 2)
    plan = plan_repair(path)
    assert plan.messages_lost == 2
    assert "2 messages would be lost" in str(plan)
    with pytest.raises(OptionError, match="accept_loss"):
        repair(plan)
    assert len(bodies_of(path)) == 62
    report = repair(plan, accept_loss=True).report
    assert bodies_of(path) == [b"%d" % number for number in range(70)]
    assert [(one.severity, one.messages) for one in report.findings if one.severity != "note"] == [("damage", 2)]
    assert not plan_repair(path).is_lossy, "nothing more is lost by another repair"


def test_check_accepts_a_queue_whose_lost_offsets_were_all_reused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    use_offsets_twice(path, 12)
    (finding,) = [one for one in check(path).findings if one.severity != "note"]
    assert (finding.severity, finding.begin, finding.end, finding.messages) == ("damage", 60, 70, 10)
    assert plan_repair(path).is_empty


def effects_of_send(path: Path, number: int) -> list[str]:
    """Return what one warm append to the queue does to the disk, by kind of effect."""
    disk = CrashDisk(path)
    settings = store_writer.WriterSettings()
    writer = store_writer.StoreWriter(str(path), disk, settings, lambda: 1_900_000_000_000, time.sleep)
    with writer:
        for one in (number, number + 1):
            before = disk.effect_count
            with writer.section() as section:
                section.append(encode_samples([SampleMessage("t", 0, b"%d" % one)]))
    return [type(effect).__name__ for effect in disk.effects[before:]]


def test_append_to_a_queue_with_several_files_has_no_extra_effects(tmp_path: Path) -> None:
    path = tmp_path / "s"
    send(path, 0, 2)
    without = effects_of_send(path, 2)
    send(path, 4, 62)
    assert effects_of_send(path, 62) == without


def test_append_reads_the_registry_only_at_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    send(path, 0, 10)
    asked = []
    ask = queue_registration.follow_topics

    def count(store: StoreFiles, end: int) -> object:
        asked.append(end)
        return ask(store, end)

    monkeypatch.setattr(queue_registration, "follow_topics", count)
    with rmq_spark.open_store(path) as store:
        for number in range(10, 20):
            store.send("t", b"%d" % number, queue_id=0)
        assert not asked
        store.send("t", b"20", queue_id=0)
        assert len(asked) == 1


@pytest.mark.slow
def test_forget_roll_survives_a_crash_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash around the writes of the registry and the removal leaves a queue that no process refuses.

    Its entry is made again with the file.
    """
    path = tmp_path / "made" / "s"
    path.parent.mkdir()
    send(path, 0, 80)
    end = check(path).log_end
    store = rmq_spark.open_store(path, flush="async")
    store.send("t", b"not settled", queue_id=0)
    assert rolls_of(path) == {KEY: 80}
    with sorted((path / "commitlog").iterdir())[-1].open("r+b") as file:
        file.seek(end % (1 << 15))
        file.write(bytes(4096))
    monkeypatch.setattr("rmq_spark.store.disk.host.boot_id", lambda: "after the power cut")
    disk = CrashDisk(path.parent)
    writer = store_writer.StoreWriter(
        str(path), disk, store_writer.WriterSettings(), lambda: 1_900_000_000_000, time.sleep
    )
    with writer, writer.section() as section:
        section.settle()
    removed = path / "consumequeue/t/0/00000000000000001600"
    assert not removed.exists()
    assert rolls_of(path) == {KEY: 60}
    seen = set()
    near = [
        at for at, effect in enumerate(disk.effects) if any(name in repr(effect) for name in ("rmq/queues", "1600"))
    ]
    for point in sorted({*near, *(at + 1 for at in near), disk.effect_count}):
        for number, image in enumerate(disk.images(point, 7, subset_count=1)):
            folder = tmp_path / f"{point}-{number}"
            image.write_to(folder)
            boot = f"boot {number}" if "power cut" in str(image) else "after the power cut"
            with monkeypatch.context() as patch:
                patch.setattr("rmq_spark.store.disk.host.boot_id", lambda boot=boot: boot)
                seen.add(((folder / "s" / removed.relative_to(path)).exists(), rolls_of(folder / "s").get(KEY)))
                assert len(bodies_of(folder / "s")) == 80, str(image)
                send(folder / "s", 80, 81)
                assert bodies_of(folder / "s")[-1] == b"80"
                assert rolls_of(folder / "s") == {KEY: 80}
                assert check(folder / "s").is_healthy
            shutil.rmtree(folder)
    assert {(True, 80), (True, 0), (False, 0), (False, 60)} <= seen
    assert (False, 80) not in seen, "the entry goes before the file"
