"""Tests of queues whose files are lost although the log has their messages: reading, writing, check and repair."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import rmq_spark
from rmq_spark import DamageError, check, repair
from rmq_spark.store.format.queue_registry import decode_registry
from rmq_spark.store.log import queue_registration
from rmq_spark.store.log import write_session as section
from rmq_spark.store.log.queue_registry import read_registry, registry_path
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.log.topics import TopicWriter
from rmq_spark.store.model import QueueKey

SMALL, LARGE = 1 << 14, 1 << 24  # segments: the lost queue's messages are in an early one, or in the last one


def fill(path: Path, segment_bytes: int) -> rmq_spark.store.Producer:
    """Send 50 messages to each of four queues, then 50 to another topic. Return the open store."""
    store = rmq_spark.open_store(path, queues=4, segment_bytes=segment_bytes)
    store.send_many(pa.table({"topic": ["orders"] * 200, "body": [b"%3d" % n * 50 for n in range(200)]}))
    store.send_many(pa.table({"topic": ["other"] * 200, "body": [b"x" * 100] * 200}))
    return store


def rows_of(path: Path, topic: str = "orders") -> dict[QueueKey, list[object]]:
    found = {}
    with StoreReader(str(path)) as reader:
        reader.refresh()
        for key in reader.queues(topic):
            held = reader.bounds(key)
            batches = reader.read(key, held.min_offset, held.max_offset, ["queueOffset", "body"])
            found[key] = [row for batch in batches for row in batch.to_pylist()]
    return found


def _one_queue(path: Path) -> None:
    shutil.rmtree(path / "consumequeue/orders/2")


def _files_of_a_queue(path: Path) -> None:
    for file in (path / "consumequeue/orders/2").iterdir():
        file.unlink()


def _a_topic(path: Path) -> None:
    shutil.rmtree(path / "consumequeue/orders")


def _all_in_the_folder(path: Path) -> None:
    shutil.rmtree(path / "consumequeue")
    (path / "consumequeue").mkdir()


def _the_folder(path: Path) -> None:
    shutil.rmtree(path / "consumequeue")


@pytest.mark.slow
@pytest.mark.parametrize("segment_bytes", [SMALL, LARGE])
@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("damage", [_one_queue, _files_of_a_queue, _a_topic, _all_in_the_folder, _the_folder])
def test_refuse_lost_queue_until_repair_rebuilds_it(
    damage: Callable[[Path], None], is_closed: bool, segment_bytes: int, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    store = fill(path, segment_bytes)
    if is_closed:
        store.close()
    before = rows_of(path)
    damage(path)
    with pytest.raises(DamageError, match=r"rmq_spark\.repair"):
        rows_of(path)
    log_end = check(path).log_end
    row = {"topic": ["orders"], "body": [b"new"], "queueId": pa.array([2], pa.int32())}
    with pytest.raises(DamageError, match=r"rmq_spark\.repair"), rmq_spark.open_store(path) as other:
        other.send_many(pa.table(row))
    assert check(path).log_end == log_end, "nothing was appended"
    assert any(one.topic == "orders" and one.queue_id == 2 for one in check(path).findings if one.severity != "note")
    assert repair(path).report.is_healthy
    assert rows_of(path) == before
    with rmq_spark.open_store(path) as other:
        other.send_many(pa.table(row))
    assert rows_of(path)[QueueKey("orders", 2)][-1] == {"queueOffset": 50, "body": b"new"}


def test_refuse_lost_queue_accepts_a_queue_without_messages(tmp_path: Path) -> None:
    path = tmp_path / "s"
    rmq_spark.create_store(path, topics={"orders": 4})
    with rmq_spark.open_store(path) as store:
        store.send("orders", b"1", queue_id=0)
    assert {key.queue_id: len(rows) for key, rows in rows_of(path).items()} == {0: 1, 1: 0, 2: 0, 3: 0}
    with rmq_spark.open_store(path) as store:
        assert store.send("orders", b"2", queue_id=3).queue_offset == 0
    assert check(path).is_healthy


def lose_and_restart(path: Path, monkeypatch: pytest.MonkeyPatch, queue_ids: list[int]) -> None:
    """Lose queues, and let a writer without a protection restart them at offset 0."""
    for queue_id in queue_ids:
        shutil.rmtree(path / f"consumequeue/orders/{queue_id}")
    Path(registry_path(str(path))).unlink(missing_ok=True)
    with monkeypatch.context() as patch:
        patch.setattr(section, "refuse_lost_queue", lambda *_: None)
        with rmq_spark.open_store(path) as store:
            for queue_id in queue_ids:
                assert store.send("orders", b"new", queue_id=queue_id).queue_offset == 0


@pytest.mark.parametrize("queue_ids", [[2], [0, 1, 2, 3]])
def test_check_reports_messages_from_before_a_queue_restarted(
    queue_ids: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    fill(path, LARGE).close()
    lose_and_restart(path, monkeypatch, queue_ids)
    found = [one for one in check(path).findings if one.severity == "damage"]
    assert sorted((one.queue_id, one.begin, one.end, one.messages) for one in found) == [
        (queue_id, 0, 50, 50) for queue_id in queue_ids
    ]


def test_check_notes_a_topic_that_a_broker_may_have_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    fill(path, LARGE).close()
    (path / "config/subscriptionGroup.json").write_text('{"subscriptionGroupTable":{}}')
    lose_and_restart(path, monkeypatch, [0, 1, 2, 3])
    report = check(path)
    assert report.is_healthy
    assert sum(one.messages for one in report.findings if one.topic == "orders") == 200


def test_follow_topics_creates_a_missing_registry(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path, SMALL).close()
    Path(registry_path(str(path))).unlink(missing_ok=True)
    rmq_spark.open_store(path).close()
    _one_queue(path)
    with pytest.raises(DamageError, match=r"rmq_spark\.repair"):
        rows_of(path)


def test_refuse_lost_queue_searches_the_log_once_without_a_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    fill(path, SMALL).close()
    _one_queue(path)
    Path(registry_path(str(path))).unlink(missing_ok=True)
    with monkeypatch.context() as patch:
        patch.setattr(queue_registration, "sound_blocks", None)
        with rmq_spark.open_store(path) as store:
            assert store.send("fresh", b"no search for a new topic").queue_offset == 0
    with rmq_spark.open_store(path) as store, pytest.raises(DamageError, match=r"rmq_spark\.repair"):
        store.send("orders", b"new", queue_id=2)
    with monkeypatch.context() as patch:
        patch.setattr(queue_registration, "sound_blocks", None)
        with rmq_spark.open_store(path) as store, pytest.raises(DamageError, match=r"rmq_spark\.repair"):
            store.send("orders", b"new", queue_id=2)


def test_prepare_does_not_restart_a_lost_queue_in_its_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    fill(path, SMALL).close()
    before = rows_of(path)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    store = rmq_spark.open_store(path)
    with monkeypatch.context() as patch:
        patch.setattr(section.WriteSession, "_dispatch", die)
        with pytest.raises(KeyboardInterrupt):
            store.send("orders", b"logged", queue_id=2)
    _one_queue(path)
    with pytest.raises(DamageError, match=r"rmq_spark\.repair"), rmq_spark.open_store(path) as other:
        other.send("other", b"x")
    assert repair(path).report.is_healthy
    after = rows_of(path)
    assert after.pop(QueueKey("orders", 2)) == [
        *before.pop(QueueKey("orders", 2)),
        {"queueOffset": 50, "body": b"logged"},
    ]
    assert after == before


def test_refuse_lost_queue_accepts_a_deleted_topic(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path, SMALL).close()
    config = path / "config/topics.json"
    config.write_text(config.read_text().replace('"orders"', '"elsewhere"'))
    _a_topic(path)
    with StoreReader(str(path)) as reader:
        reader.refresh()
        assert "orders" not in reader.topics()
    with rmq_spark.open_store(path, queues=4) as store:
        assert store.send("orders", b"new", queue_id=2).queue_offset == 0
    assert {key.queue_id: len(rows) for key, rows in rows_of(path).items()} == {0: 0, 1: 0, 2: 1, 3: 0}


@pytest.mark.parametrize("cut", [1, 40, 10_000])
def test_refuse_lost_queue_works_with_an_incomplete_registry(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path, SMALL).close()
    file = Path(registry_path(str(path)))
    file.write_bytes(file.read_bytes()[:-cut])
    _one_queue(path)
    with rmq_spark.open_store(path) as store, pytest.raises(DamageError, match=r"rmq_spark\.repair"):
        store.send("orders", b"new", queue_id=2)


@pytest.mark.parametrize("cut", [1, 40])
def test_check_reports_a_damaged_registry_and_repair_rebuilds_it(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path, SMALL).close()
    file = Path(registry_path(str(path)))
    whole = decode_registry(file.read_bytes())[0].queues.keys()
    assert whole == {QueueKey(topic, queue_id) for topic in ("orders", "other") for queue_id in range(4)}
    file.write_bytes(file.read_bytes()[:-cut])
    (finding,) = [one for one in check(path).findings if one.severity != "note"]
    assert finding.path == str(file)
    assert repair(path).report.is_healthy
    assert decode_registry(file.read_bytes())[0].queues.keys() == whole


def test_refuse_lost_queue_refuses_a_fully_expired_queue(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with rmq_spark.open_store(path, segment_bytes=SMALL) as store:
        store.send("old", b"x", queue_id=0)
        store.send_many(pa.table({"topic": ["other"] * 400, "body": [b"x" * 100] * 400}))
        assert store.expire(max_bytes=SMALL).segments
    shutil.rmtree(path / "consumequeue/old")
    with pytest.raises(DamageError, match="old/0 has had messages"):
        rows_of(path, "old")
    with pytest.raises(DamageError, match="old/0 has had messages"), rmq_spark.open_store(path) as store:
        store.send("old", b"y", queue_id=0)
    (finding,) = [one for one in check(path).findings if one.severity == "damage"]
    assert (finding.topic, finding.queue_id, finding.action) == ("old", 0, "leave")
    Path(registry_path(str(path))).unlink()
    with rmq_spark.open_store(path) as store:
        assert store.send("old", b"y", queue_id=0).queue_offset == 0
    assert check(path).is_healthy


def test_register_again_drops_a_new_queue_that_a_power_cut_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    rmq_spark.create_store(path, topics={"orders": 4})
    with rmq_spark.open_store(path) as store:
        store.send("orders", b"settled", queue_id=0)
    end = check(path).log_end
    store = rmq_spark.open_store(path, flush="async")
    store.send("orders", b"not settled", queue_id=1)
    shutil.rmtree(path / "consumequeue/orders/1")
    (log,) = (path / "commitlog").iterdir()
    with log.open("r+b") as file:
        file.seek(end)
        file.write(bytes(4096))
    monkeypatch.setattr("rmq_spark.store.disk.host.boot_id", lambda: "after the power cut")
    assert {key.queue_id: len(rows) for key, rows in rows_of(path).items()} == {0: 1, 1: 0, 2: 0, 3: 0}
    with rmq_spark.open_store(path) as other:
        assert other.send("orders", b"new", queue_id=1).queue_offset == 0
    assert check(path).is_healthy


@pytest.mark.parametrize("has_registry", [True, False])
def test_repair_never_restarts_a_lost_queue_below_its_groups(has_registry: bool, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with rmq_spark.open_store(path, segment_bytes=1 << 12, queues=1) as store:
        for number in range(10):
            store.send("old", b"%d" % number)
        for _ in range(100):
            store.send("new", b"x" * 200)
    with rmq_spark.open_consumer(path, "g") as consumer:
        consumer.update_consume_offset(QueueKey("old", 0), 10)
    with rmq_spark.open_store(path) as store:
        assert store.expire(max_bytes=1 << 13).segments
    if not has_registry:  # an older release wrote the store last, and ours came once
        Path(registry_path(str(path))).unlink()
        rmq_spark.open_store(path).close()
    complete = path / "consumequeue/old"
    complete.rename(tmp_path / "old")
    assert [one.severity for one in check(path).findings if one.topic == "old"] == ["damage"]
    with pytest.raises(DamageError, match=r"rmq_spark\.repair"):
        rows_of(path, "old")
    for _ in range(2):
        with rmq_spark.open_store(path) as store, pytest.raises(DamageError, match=r"rmq_spark\.repair"):
            store.send("old", b"again")
        assert not repair(path).report.is_healthy
    (tmp_path / "old").rename(complete)
    assert check(path).is_healthy
    with rmq_spark.open_store(path) as store:
        assert store.send("old", b"again").queue_offset == 10


def delete_topic(path: Path, topic: str) -> None:
    """Do what an idle broker does to delete a topic."""
    shutil.rmtree(path / "consumequeue" / topic)
    config = path / "config/topics.json"
    value = json.loads(config.read_text())
    del value["topicConfigTable"][topic]
    value["dataVersion"]["counter"] += 1
    config.write_text(json.dumps(value))


def create_topic(path: Path, topic: str) -> None:
    """Do what an idle broker does to create a topic."""
    config = path / "config/topics.json"
    value = json.loads(config.read_text())
    one = dict(next(iter(value["topicConfigTable"].values())), topicName=topic)
    value["topicConfigTable"][topic] = one
    value["dataVersion"]["counter"] += 1
    config.write_text(json.dumps(value))


def test_add_topics_keeps_the_queues_that_another_writer_registers(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with rmq_spark.open_store(path, segment_bytes=SMALL) as first:
        first.create_topic("orders", 4)
        with rmq_spark.open_store(path) as second:
            second.send_many(pa.table({"topic": ["orders"] * 200, "body": [b"x" * 100] * 200}))
        first.send_many(pa.table({"topic": ["other"] * 200, "body": [b"x" * 100] * 200}))
    _one_queue(path)
    with pytest.raises(DamageError, match="orders/2 has had messages"):
        rows_of(path)
    with pytest.raises(DamageError, match="orders/2 has had messages"), rmq_spark.open_store(path) as store:
        store.send("orders", b"new", queue_id=2)


@pytest.mark.parametrize("has_registry", [True, False])
def test_register_topics_of_a_deleted_topic_lets_another_process_write(has_registry: bool, tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path, SMALL).close()
    delete_topic(path, "orders")
    if not has_registry:
        shutil.rmtree(path / "rmq")
    with rmq_spark.open_store(path) as store:
        store.create_topic("orders", 4)
    assert {key.queue_id: len(rows) for key, rows in rows_of(path).items()} == {0: 0, 1: 0, 2: 0, 3: 0}
    with rmq_spark.open_store(path) as store:
        assert store.send("orders", b"new", queue_id=2).queue_offset == 0
    assert {key.queue_id: len(rows) for key, rows in rows_of(path).items()} == {0: 0, 1: 0, 2: 1, 3: 0}


def test_register_topics_comes_before_the_change_of_topics_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    fill(path, SMALL).close()
    delete_topic(path, "orders")

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TopicWriter, "_replace", die)
        with rmq_spark.open_store(path) as store, pytest.raises(KeyboardInterrupt):
            store.create_topic("orders", 4)
    found, _ = decode_registry(Path(registry_path(str(path))).read_bytes())
    assert "orders" in found.topics
    assert not [key for key in found.queues if key.topic == "orders"]


def test_find_lost_queues_accepts_a_topic_that_a_broker_created_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path, SMALL).close()
    delete_topic(path, "orders")
    create_topic(path, "orders")
    empty: dict[int, int] = {0: 0, 1: 0, 2: 0, 3: 0}
    assert {key.queue_id: len(rows) for key, rows in rows_of(path).items()} == empty
    with rmq_spark.open_store(path) as store, pytest.raises(DamageError, match="deleted the topic and created it"):
        store.send("orders", b"new", queue_id=2)
    assert {key.queue_id: len(rows) for key, rows in rows_of(path).items()} == empty, "a failed send changes nothing"
    with rmq_spark.open_store(path) as store:
        store.send("other", b"x", queue_id=0)
    shutil.rmtree(path / "consumequeue/other/2")
    with pytest.raises(DamageError, match="other/2 has had messages"):
        rows_of(path, "other")


def test_search_ignores_old_records_if_a_sibling_queue_proves_it(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path, SMALL).close()
    delete_topic(path, "orders")
    with rmq_spark.open_store(path) as store:
        store.create_topic("orders", 4)
        store.send("orders", b"second life", queue_id=0)
        store.send("orders", b"second life", queue_id=3)
        store.send_many(pa.table({"topic": ["other"] * 200, "body": [b"x" * 100] * 200}))
    shutil.rmtree(path / "rmq")  # as if a broker had written that
    with rmq_spark.open_store(path) as store:
        assert store.send("orders", b"new", queue_id=2).queue_offset == 0
    assert {key.queue_id: len(rows) for key, rows in rows_of(path).items()} == {0: 1, 1: 0, 2: 1, 3: 1}
    shutil.rmtree(path / "rmq")
    shutil.rmtree(path / "consumequeue/orders/3")
    with rmq_spark.open_store(path) as store, pytest.raises(DamageError, match="orders/3 has had messages"):
        store.send("orders", b"new", queue_id=3)


def test_lost_queue_names_how_to_restart_a_queue_that_may_have_expired(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with rmq_spark.open_store(path, segment_bytes=SMALL) as store:
        store.send("old", b"x", queue_id=0)
        store.send_many(pa.table({"topic": ["other"] * 400, "body": [b"x" * 100] * 400}))
        store.expire(max_bytes=SMALL)
    shutil.rmtree(path / "consumequeue/old")
    with pytest.raises(DamageError, match=r"below the offsets of its groups, remove .*rmq/queues"):
        rows_of(path, "old")


def test_sound_blocks_skips_old_damage(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with fill(path, SMALL) as store:
        store.create_topic("fresh", 4)
    shutil.rmtree(path / "rmq")
    shutil.rmtree(path / "consumequeue/orders/2")
    segment = sorted((path / "commitlog").iterdir())[0]
    with segment.open("r+b") as file:
        file.seek(9000)
        file.write(b"\xff" * 300)
    with rmq_spark.open_store(path) as store:
        assert store.send("fresh", b"new", queue_id=1).queue_offset == 0
        with pytest.raises(DamageError, match="orders/2 has had messages"):
            store.send("orders", b"new", queue_id=2)


def test_read_registry_ignores_a_torn_registry(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path, SMALL).close()
    file = Path(registry_path(str(path)))
    file.write_bytes(file.read_bytes() + b"torn")
    assert read_registry(str(path)) is None
    with rmq_spark.open_store(path) as store:
        assert store.send("fresh", b"new", queue_id=1).queue_offset == 0
    found = read_registry(str(path))
    assert found is not None
    assert QueueKey("fresh", 1) in found.queues


def test_sound_blocks_continues_after_damage_in_the_same_segment(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with rmq_spark.open_store(path, queues=4, segment_bytes=SMALL) as store:
        store.send_many(pa.table({"topic": ["orders"] * 20, "body": [b"x" * 100] * 20}))
        store.send("once", b"behind the damage", queue_id=2)
        store.send_many(pa.table({"topic": ["other"] * 200, "body": [b"x" * 100] * 200}))
    shutil.rmtree(path / "rmq")
    shutil.rmtree(path / "consumequeue/once/2")
    with sorted((path / "commitlog").iterdir())[0].open("r+b") as file:
        file.seek(2000)
        file.write(b"\xff" * 300)
    with rmq_spark.open_store(path) as store, pytest.raises(DamageError, match="once/2 has had messages"):
        store.send("once", b"new", queue_id=2)


def test_prepare_rebuilds_all_queues_of_a_crashed_store(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path, SMALL).close()
    before = rows_of(path)
    shutil.rmtree(path / "rmq")
    shutil.rmtree(path / "consumequeue")
    (path / "abort").touch()
    with pytest.raises(DamageError, match=r"rmq_spark\.repair"):
        rows_of(path)
    with rmq_spark.open_store(path) as store:
        assert store.send("orders", b"new", queue_id=2).queue_offset == 50
    assert rows_of(path)[QueueKey("orders", 2)] == [
        *before[QueueKey("orders", 2)],
        {"queueOffset": 50, "body": b"new"},
    ]
    assert rows_of(path)[QueueKey("orders", 0)] == before[QueueKey("orders", 0)]
    assert check(path).is_healthy


def test_refuse_lost_folder_ignores_the_folder_of_batch_queues(golden: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    shutil.copytree(golden / "demo", path)
    before = rows_of(path)
    shutil.rmtree(path / "consumequeue")
    with pytest.raises(DamageError, match="the folder of the consume queues is missing"):
        rows_of(path)
    with pytest.raises(DamageError, match="the folder of the consume queues"), rmq_spark.open_store(path) as store:
        store.send("orders", b"new")
    assert repair(path).report.is_healthy
    assert rows_of(path) == before
