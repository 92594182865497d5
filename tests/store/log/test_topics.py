"""TopicTable: topics and queues from folders and from topics.json."""

import json
from pathlib import Path

import pytest

from rmq_spark.store.log import topics
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.model import QueueKey


def make(root: Path, folders: dict[str, list[str]], counts: dict[str, int]) -> TopicTable:
    for topic, names in folders.items():
        for name in names:
            (root / "consumequeue" / topic / name).mkdir(parents=True)
    (root / "config").mkdir()
    configs = {name: {"topicName": name, "readQueueNums": n, "writeQueueNums": n} for name, n in counts.items()}
    (root / "config" / "topics.json").write_text(json.dumps({"topicConfigTable": configs}))
    return TopicTable(str(root))


def test_topic_table_has_queues_of_folders_and_of_topics_json_by_id(tmp_path: Path) -> None:
    table = make(tmp_path, {"a": ["10", "9", "x"], "b": ["0"]}, {"a": 2, "c": 1})
    assert table.topics() == ["a", "b", "c"]
    assert [key.queue_id for key in table.queues_of("a")] == [0, 1, 9, 10]
    assert table.queues_of("b") == [QueueKey("b", 0)]
    assert table.queues_of("nothing") == []


def test_topic_table_refresh_drops_a_deleted_queue(tmp_path: Path) -> None:
    table = make(tmp_path, {"a": ["0", "1"]}, {})
    assert len(table.queues_of("a")) == 2
    (tmp_path / "consumequeue" / "a" / "1").rmdir()
    table.refresh()
    assert table.queues_of("a") == [QueueKey("a", 0)]


def test_queues_of_for_every_topic_reads_the_queues_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may have ten thousand topics: reading all queues for each of them would take minutes."""
    compared = []

    class CountedKey(QueueKey):
        def __getattribute__(self, name: str) -> object:
            if name == "topic":
                compared.append(1)
            return super().__getattribute__(name)

    monkeypatch.setattr(topics, "QueueKey", CountedKey)
    table = make(tmp_path, {f"t{number}": ["0", "1"] for number in range(30)}, {})
    assert len(table.queues) == 60
    compared.clear()
    assert sum(len(table.queues_of(topic)) for topic in table.topics()) == 60
    assert len(compared) <= 200


def test_has_folder_finds_a_new_folder_without_a_refresh(tmp_path: Path) -> None:
    table = make(tmp_path, {"a": ["0"]}, {})
    table.refresh()
    asked = [QueueKey("a", 1), QueueKey("../a", 0), QueueKey("a\0", 0), QueueKey("a", -1), QueueKey("", 0)]
    assert not any(map(table.has_folder, asked))
    (tmp_path / "batchconsumequeue" / "a" / "1").mkdir(parents=True)
    assert [table.has_folder(key) for key in asked] == [True, False, False, False, False]
