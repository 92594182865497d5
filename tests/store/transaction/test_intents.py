"""Intents: read as written, owned by one process, and found after the owner died."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.model import CommitKey
from rmq_spark.store.transaction.intents import Hint, Intent, Intents, StagedFile
from rmq_spark.store.transaction.ledger import make_folders

FILES = (
    StagedFile("q@1/a.arrow", 3, 900, (1 << 64) - 1, {"T": 2, "ü": 1}, 300, 2000),
    StagedFile("q@1/b.arrow", 1, 100, 0, {"T": 5}, 100, 1000),
)
INTENT = Intent(CommitKey("q", 1), FILES, 4, 1000, (1 << 64) - 1, True, 4, True, 12345, "my app", 1_700_000_000_000)


@pytest.fixture
def intents(tmp_path: Path) -> Intents:
    make_folders(str(tmp_path), Disk())
    return Intents(str(tmp_path), Disk())


def put(intents: Intents, intent: Intent) -> None:
    """Leave an intent as a process does that died."""
    lock = intents.lock(intent.key.query_id)
    assert lock.try_take()
    intents.write(intent)
    lock.release()


@pytest.mark.parametrize(
    "intent",
    [
        INTENT,
        replace(INTENT, key=CommitKey("txn:ä/b", 0), is_synced=False, create_topics=False),
        replace(INTENT, key=CommitKey("uuid"), files=()),
        replace(INTENT, checks_topics=False, note={"level.3": 17, "timer.read": -1}),
    ],
)
def test_intents_reads_an_intent_as_it_was_written(intents: Intents, intent: Intent) -> None:
    assert intents.read(intent.key.query_id) is None
    put(intents, intent)
    assert intents.read(intent.key.query_id) == intent
    assert intents.read_all() == [intent]
    assert intents.staged_names() == {file.name for file in intent.files}


def test_intents_reads_an_intent_without_a_note(intents: Intents, tmp_path: Path) -> None:
    put(intents, INTENT)
    path = tmp_path / "rmq/intents/q.json"
    found = json.loads(path.read_text())
    del found["note"], found["checksTopics"]
    path.write_text(json.dumps(found))
    assert intents.read("q") == INTENT


def test_intent_topics_have_the_queue_counts_of_all_files() -> None:
    assert INTENT.topics == {"T": 5, "ü": 1}


def test_intent_file_is_json_with_a_version(intents: Intents, tmp_path: Path) -> None:
    put(intents, INTENT)
    found = json.loads((tmp_path / "rmq/intents/q.json").read_text())
    assert found["v"] == 1
    assert found["queryId"] == "q"
    assert found["flush"] == "sync"
    assert found["files"][1]["digest"] == "0000000000000000"
    assert len(found) == len(fields(Intent)) + 2, "every field, the version, and a key of two parts"


SPOILT = [
    (name, value)
    for name in ("queryId", "batchId", "files", "rows", "digest", "start", "flush", "createTopics")
    for value in (..., [1], {"a": 1}, "x", -1, 1.5)
]
SPOILT += [("checksTopics", value) for value in (None, 1, "true")]
SPOILT += [("note", value) for value in (None, 1, [1], {"a": "1"}, {"a": True}, {"a": 1.0})]


@pytest.mark.parametrize(("name", "value"), SPOILT)
def test_intents_refuses_an_invalid_field(intents: Intents, tmp_path: Path, name: str, value: object) -> None:
    put(intents, INTENT)
    path = tmp_path / "rmq/intents/q.json"
    found = json.loads(path.read_text())
    if value is ...:
        del found[name]
    else:
        found[name] = value
    path.write_text(json.dumps(found))
    with pytest.raises(DamageError, match=r"q\.json.*abandons the rows that are not in the store yet"):
        intents.read("q")


def test_intents_refuses_a_newer_version_in_every_call(intents: Intents, tmp_path: Path) -> None:
    put(intents, INTENT)
    path = tmp_path / "rmq/intents/q.json"
    path.write_text(path.read_text().replace('"v": 1', '"v": 2'))
    for read in (intents.read_all, intents.lock_orphans, intents.staged_names):
        with pytest.raises(StoreError, match=r"q\.json has version 2, and this rmq-spark supports version 1"):
            read()
    lock = intents.lock("q")
    assert lock.try_take(), "a failed read holds no lock"
    lock.release()


def test_lock_orphans_finds_dead_owners_and_skips_live_ones(intents: Intents) -> None:
    for query, start in (("a", 30), ("b", 10), ("c", 20)):
        put(intents, replace(INTENT, key=CommitKey(query, 0), start=start))
    owner = intents.lock("c")
    assert owner.try_take()
    dead = intents.lock_orphans()
    assert [intent.key.query_id for intent, _ in dead] == ["b", "a"], "in the order of the log"
    assert intents.lock_orphans() == [], "the process that locked them is alive"
    for _, lock in dead:
        lock.release()
    owner.release()
    assert len(intents.lock_orphans()) == 3


def test_hints_are_read_newest_last_and_a_torn_one_is_ignored(intents: Intents, tmp_path: Path) -> None:
    assert intents.hints("q") == []
    put(intents, INTENT)
    given = [Hint(1, 10), Hint(2, 1 << 40), Hint(3, 7)]
    for hint in given:
        intents.add_hint(INTENT, hint)
    assert intents.hints("q") == given
    path = tmp_path / "rmq/intents/q.progress"
    path.write_bytes(path.read_bytes()[:-1])
    assert intents.hints("q") == given[:2]
    intents.add_hint(INTENT, Hint(4, 8))
    assert intents.hints("q") == [*given[:2], Hint(4, 8)]


def test_intents_remove_leaves_no_file(intents: Intents) -> None:
    put(intents, INTENT)
    intents.add_hint(INTENT, Hint(1, 10))
    intents.remove("q")
    intents.remove("q")
    assert list(Path(intents.folder).iterdir()) == []


def test_remove_orphans_keeps_the_files_of_intents(intents: Intents) -> None:
    put(intents, INTENT)
    intents.add_hint(INTENT, Hint(1, 10))
    put(intents, replace(INTENT, key=CommitKey("dead")))
    intents.add_hint(replace(INTENT, key=CommitKey("dead")), Hint(1, 10))
    about_to = intents.lock("about-to")
    assert about_to.try_take()
    folder = Path(intents.folder)
    (folder / "dead.json").unlink()
    (folder / "half.json.tmp").write_bytes(b"{")
    (folder / "q.json.tmp").write_bytes(b"{")
    (folder / "foreign").write_bytes(b"")
    intents.remove_orphans()
    assert sorted(path.name for path in folder.iterdir()) == [
        "about-to.lock",
        "foreign",
        "q.json",
        "q.json.tmp",
        "q.lock",
        "q.progress",
    ]
