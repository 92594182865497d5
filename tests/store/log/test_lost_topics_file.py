"""Tests of queues whose files are lost with topics.json, or with its newest version: no process restarts them."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import rmq_spark
from rmq_spark import DamageError, NotFoundError, check, repair
from rmq_spark.store.log import queue_registration, recovery
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.model import QueueKey

Rows = dict[QueueKey, list[object]]


def fill(path: Path) -> None:
    """Send 40 messages to four queues of one topic, then enough to another for several segments."""
    with rmq_spark.open_store(path, queues=4, segment_bytes=1 << 14) as store:
        queue_ids = pa.array([number % 4 for number in range(40)], pa.int32())
        store.send_many(
            pa.table({"topic": ["t"] * 40, "body": [b"%d" % number for number in range(40)], "queueId": queue_ids})
        )
        store.send_many(pa.table({"topic": ["u"] * 200, "body": [b"y" * 100] * 200}))


def rows_of(path: Path, topic: str = "t") -> Rows:
    found = {}
    with StoreReader(str(path)) as reader:
        reader.refresh()
        for key in reader.queues(topic):
            held = reader.bounds(key)
            batches = reader.read(key, held.min_offset, held.max_offset, ["queueOffset", "body"])
            found[key] = [row for batch in batches for row in batch.to_pylist()]
    return found


def lose(path: Path, *names: str) -> None:
    for name in names:
        if (path / name).is_dir():
            shutil.rmtree(path / name)
        else:
            (path / name).unlink()


def empty_folder_of_queues(path: Path) -> None:
    lose(path, "consumequeue", "config")
    (path / "consumequeue").mkdir()


LOSSES: list[Callable[[Path], None]] = [
    lambda path: lose(path, "consumequeue", "config"),
    empty_folder_of_queues,
    lambda path: lose(path, "consumequeue/t", "config"),
    lambda path: lose(path, "consumequeue/t/1", "config"),
    lambda path: lose(path, "consumequeue/t", "config", "rmq"),
    lambda path: lose(path, "consumequeue/t", "config", "rmq/queues"),
]


@pytest.mark.parametrize("loss", range(len(LOSSES)))
def test_register_topics_refuses_a_lost_queue_without_topics_json(loss: int, tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    before = rows_of(path)
    LOSSES[loss](path)
    end = check(path).log_end
    for _ in range(2):
        with pytest.raises(DamageError, match=r"rmq_spark\.repair"), rmq_spark.open_store(path) as store:
            store.send("t", b"new", queue_id=1)
    with contextlib.suppress(DamageError), rmq_spark.open_store(path) as store:
        store.create_topic("t", 8)
    with pytest.raises(DamageError, match=r"rmq_spark\.repair"), rmq_spark.open_store(path) as store:
        store.send("t", b"new", queue_id=1)
    assert check(path).log_end == end
    assert repair(path).report.is_healthy
    assert rows_of(path) == before
    with rmq_spark.open_store(path) as store:
        assert store.send("t", b"new", queue_id=1).queue_offset == 10


@pytest.mark.parametrize("loss", range(4))
def test_find_lost_queues_names_a_lost_queue_without_topics_json(loss: int, tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    LOSSES[loss](path)
    with pytest.raises(DamageError, match=r"rmq repair"):
        rows_of(path)


def test_lost_queue_names_topics_json_too(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    lose(path, "consumequeue/t", "config")
    with pytest.raises(DamageError, match=r"t/0 has had messages, and its files are missing, as is .*topics\.json"):
        rows_of(path)
    assert sum(map(len, rows_of(path, "u").values())) == 200
    with rmq_spark.open_store(path) as store:
        assert store.send("new", b"1").queue_offset == 0, "a topic that never was"


def lose_late_topic(path: Path, *, is_put_back: bool) -> None:
    """Lose topics.json and the queues of a topic that its `.bak` does not have. Maybe restore the `.bak`."""
    with rmq_spark.open_store(path) as store:
        store.send("late", b"1", queue_id=0)
    lose(path, "config/topics.json", "consumequeue/late")
    if is_put_back:
        shutil.copy(path / "config/topics.json.bak", path / "config/topics.json")


@pytest.mark.parametrize("is_repaired_first", [False, True])
@pytest.mark.parametrize("is_put_back", [False, True])
def test_register_topics_refuses_a_lost_queue_with_an_older_topics_json(
    is_put_back: bool, is_repaired_first: bool, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    fill(path)
    lose_late_topic(path, is_put_back=is_put_back)
    with pytest.raises(DamageError, match=r"late/0 has had messages.*rmq repair"):
        rows_of(path, "late")
    for _ in range(2):
        with rmq_spark.open_store(path) as store, pytest.raises(DamageError, match="late/0 has had messages"):
            store.send("late", b"new", queue_id=0)
    assert sum(map(len, rows_of(path).values())) == 40
    if is_repaired_first:
        assert any("late/0" in one.what for one in rmq_spark.plan_repair(path).steps)
        assert repair(path).report.is_healthy
        assert len(rows_of(path, "late")[QueueKey("late", 0)]) == 1
        with rmq_spark.open_store(path) as store:
            assert store.send("late", b"new", queue_id=0).queue_offset == 1
        return
    with rmq_spark.open_store(path) as store:
        assert store.send("new", b"1").queue_offset == 0, "a topic that never was"
        with pytest.raises(DamageError, match="late/0 has had messages"):
            store.send("late", b"new", queue_id=0)
    with pytest.raises(DamageError, match=r"late/0 has had messages.*rmq repair"):
        rows_of(path, "late")
    assert repair(path).report.is_healthy
    assert len(rows_of(path, "late")[QueueKey("late", 0)]) == 1


def test_write_queues_does_not_find_an_unknown_topic_without_topics_json(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    lose(path, "config")
    with pytest.raises(NotFoundError):
        rows_of(path, "nothing")
    assert sum(map(len, rows_of(path).values())) == 40
    with rmq_spark.open_store(path) as store:
        assert store.send("t", b"more", queue_id=1).queue_offset == 10


def test_refuse_lost_folder_is_called_once_for_each_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    fill(path)
    looks = []

    def count(root: str, log: object) -> None:
        looks.append(root)

    monkeypatch.setattr(recovery, "refuse_lost_folder", count)
    with rmq_spark.open_store(path) as store:
        for _ in range(5):
            store.send("t", b"new", queue_id=1)
    assert len(looks) == 1


def test_register_topics_searches_only_without_a_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    fill(path)
    lose(path, "config")
    monkeypatch.setattr(queue_registration, "sound_blocks", None)
    with rmq_spark.open_store(path) as store:
        assert store.send("new", b"1").queue_offset == 0
