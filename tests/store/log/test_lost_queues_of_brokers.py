"""Tests of queues without files in a broker's store: empty, of a topic that was created again, or lost."""

import json
import logging
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

import rmq_spark
from rmq_spark import DamageError, check, repair
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.model import QueueKey


def fill(path: Path, *, others: int = 1, has_registry: bool = False) -> None:
    """Send to a topic, then `others` messages to another one. Leave the store as a broker's after a clean shutdown."""
    with rmq_spark.open_store(path, segment_bytes=1 << 14, queues=4) as store:
        queue_ids = pa.array([0, *[1] * 10], pa.int32())
        store.send_many(pa.table({"topic": ["t"] * 11, "body": [b"old"] * 11, "queueId": queue_ids}))
        spread = pa.array([number % 4 for number in range(others)], pa.int32())
        store.send_many(pa.table({"topic": ["u"] * others, "body": [b"y" * 100] * others, "queueId": spread}))
    if not has_registry:
        shutil.rmtree(path / "rmq")


def touch_topics(path: Path) -> None:
    """Change topics.json as a broker does that deletes and creates a topic."""
    config = path / "config/topics.json"
    value = json.loads(config.read_text())
    value["dataVersion"]["counter"] += 2
    config.write_text(json.dumps(value))


def count(path: Path, topic: str) -> dict[int, int]:
    with StoreReader(str(path)) as reader:
        reader.refresh()
        return {key.queue_id: reader.bounds(key).max_offset for key in reader.queues(topic)}


@pytest.mark.parametrize("has_folder", [False, True])
@pytest.mark.parametrize("has_registry", [False, True])
def test_prepare_accepts_other_topics_than_one_created_again(
    has_registry: bool, has_folder: bool, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    fill(path, has_registry=has_registry)
    touch_topics(path)
    shutil.rmtree(path / "consumequeue/t")
    if has_registry:  # the broker has written its checkpoint
        with (path / "checkpoint").open("r+b") as file:
            file.seek(40)
            file.write((1).to_bytes(8, "big"))
    if has_folder:
        (path / "consumequeue/t/0").mkdir(parents=True)
    with rmq_spark.open_store(path) as store:
        assert store.send("u", b"z", queue_id=0).queue_offset == 1
    for queue_id in (0, 1):
        with (
            rmq_spark.open_store(path) as store,
            pytest.raises(DamageError, match=rf"t/{queue_id} .*created it again.*through a broker"),
        ):
            store.send("t", b"new", queue_id=queue_id)
    with rmq_spark.open_store(path) as store:
        assert store.send("t", b"new", queue_id=2).queue_offset == 0
        assert store.send("u", b"z", queue_id=0).queue_offset == 2
    assert repair(path).report.is_healthy
    assert count(path, "t") == {0: 1, 1: 10, 2: 1, 3: 0}


def test_found_queue_names_repair_and_the_broker(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    shutil.rmtree(path / "consumequeue/t")
    with pytest.raises(DamageError, match=r"t/0 has no files.*rmq repair.*created it again"):
        count(path, "t")


def test_prepare_refuses_other_damage_in_a_brokers_store(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    shutil.rmtree(path / "consumequeue/t/0")
    (file,) = (path / "consumequeue/t/1").iterdir()
    with file.open("r+b") as units:
        units.seek(9 * 20)
        units.write(bytes(20))
    with pytest.raises(DamageError, match="queue offset 9"), rmq_spark.open_store(path) as store:
        store.send("u", b"z", queue_id=0)


def warnings_of(path: Path, caplog: pytest.LogCaptureFixture, *topics: str) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "rmq_spark"), rmq_spark.open_reader(path) as reader:
        for _ in range(3):
            reader.refresh()
            for topic in topics:
                for key in reader.queues(topic):
                    reader.bounds(key)
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


@pytest.mark.parametrize("lost", [(1,), (0, 1)])
def test_queue_doubt_warns_once_if_the_registry_is_invalid(
    lost: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s"
    fill(path, others=400)
    for queue_id in lost:
        shutil.rmtree(path / f"consumequeue/t/{queue_id}")
    named = ", ".join(str(queue_id) for queue_id in sorted({*lost, 2, 3}))
    (told,) = warnings_of(path, caplog, "t")
    assert f'topic "t": queues [{named}] have no files' in told
    assert "they never had a message, or their files are lost. Run `rmq check` to find out" in told
    assert warnings_of(path, caplog, "u") == []
    assert warnings_of(path, caplog) == []
    assert [one.queue_id for one in check(path).findings if one.topic == "t"] == list(lost)


def test_queue_doubt_warns_if_others_have_changed_topics_json(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "s"
    fill(path, others=400, has_registry=True)
    assert warnings_of(path, caplog, "t", "u") == [], "the registry counts"
    touch_topics(path)
    shutil.rmtree(path / "consumequeue/t/1")
    (told,) = warnings_of(path, caplog, "t")
    assert "queues [1, 2, 3] have no files" in told
    with rmq_spark.open_store(path) as store:
        store.send("u", b"z", queue_id=0)
    (told,) = warnings_of(path, caplog, "t")
    assert "queues [1, 2, 3] have no files" in told, "what others have written is unsearched"


def test_queue_doubt_does_not_warn_in_an_empty_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "s"
    rmq_spark.create_store(path, topics={"t": 4})
    shutil.rmtree(path / "rmq", ignore_errors=True)
    assert warnings_of(path, caplog, "t") == []


def test_queue_doubt_does_not_warn_of_our_lost_queue(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "s"
    fill(path, others=400, has_registry=True)
    shutil.rmtree(path / "consumequeue/t/1")
    with pytest.raises(DamageError), StoreReader(str(path)) as reader:
        reader.bounds(QueueKey("t", 1))
    assert not caplog.records
