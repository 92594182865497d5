"""A damaged file beside the messages: the error says what helps for that file, and it helps."""

import contextlib
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

import rmq_spark
from rmq_spark.store.delivery.send_back_ledger import SendBackLedger
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.group.claims import NO_CLAIMS, read_claims
from rmq_spark.store.group.member_lease import read_member
from rmq_spark.store.group.offset_file import read_group_offsets
from rmq_spark.store.group.read_rights import read_group_config
from rmq_spark.store.group.resets import NO_RESETS, NOTHING_SUSPENDED, read_resets, read_suspended
from rmq_spark.store.log.delay_offsets import DelayOffsetFile
from rmq_spark.store.log.store_state import read_settings
from rmq_spark.store.log.topics import read_topics
from rmq_spark.store.model import CommitKey
from rmq_spark.store.transaction.intents import Intents, StagedFile
from rmq_spark.store.transaction.ledger import Ledger
from rmq_spark.store.transaction.staging import check_staged

GROUP = "rmq/groups/g"
# File -> what reads it, and what the error advises.
FILES: dict[str, tuple[Callable[[str], object], str]] = {
    f"{GROUP}/claims.json": (
        lambda root: read_claims(f"{root}/{GROUP}/claims.json"),
        "Stop the group's queries, remove the file and start them again",
    ),
    f"{GROUP}/members/m.json": (
        lambda root: read_member(f"{root}/{GROUP}/members/m.json"),
        "A living member writes the file again within leaseHeartbeat (30 s by default). If the process has ended,",
    ),
    f"{GROUP}/resets.json": (
        lambda root: read_resets(f"{root}/{GROUP}/resets.json"),
        "Or stop the group's queries, remove the file and start them with new checkpoints.",
    ),
    "rmq/ledger/q.json": (
        lambda root: Ledger(root, Disk()).read("q"),
        "or remove it, if the batch that the query writes next is not in the store.",
    ),
    "rmq/intents/q.json": (
        lambda root: Intents(root, Disk()).read("q"),
        "Restore the file from a copy, or remove it and accept that.",
    ),
    "rmq/settings.json": (
        read_settings,
        "or remove it. Without it the next write creates a new one",
    ),
    "config/topics.json": (lambda root: read_topics(root, lambda _: None), "Restore the file from a copy."),
    "config/consumerOffset.json": (
        lambda root: read_group_offsets(root, "g", lambda _: None),
        "If that may be so, remove it and its .bak: then no group has an offset",
    ),
    f"{GROUP}/suspended.json": (
        lambda root: read_suspended(root, "g"),
        "Or stop the group's queries, remove the file, and reset the group to its offsets",
    ),
    "rmq/sentback/q.json": (
        lambda root: SendBackLedger(root, Disk(), CommitKey("q", 0)).known()[0] + 1 or None,
        "Restore the file from a copy, or remove it at that price.",
    ),
    "config/delayOffset.json": (
        lambda root: DelayOffsetFile(root, Disk(), lambda: 0, lambda _: None).read(),
        "Restore config/delayOffset.json from a copy, or remove it and its .bak and accept the duplicates.",
    ),
    "config/subscriptionGroup.json": (
        lambda root: read_group_config(root, "g", lambda _: None),
        "or remove it and its .bak: then every group has RocketMQ's defaults.",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_the_error_says_what_to_do_about_this_very_file(tmp_path: Path, name: str) -> None:
    read, advice = FILES[name]
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"{")
    with pytest.raises(DamageError) as raised:
        read(str(tmp_path))
    for error in (raised.value, pickle.loads(pickle.dumps(raised.value))):
        assert str(error).startswith(f"damaged store: {path}, position 0: ")
        assert advice in str(error).partition("The damage was not repaired. ")[2]
        assert "startingOffsets" not in str(error), "that is for what holds messages"
    path.unlink()
    assert read(str(tmp_path)) in (None, {}, NO_CLAIMS, NO_RESETS, NOTHING_SUSPENDED), (
        "without the file all is as at first"
    )


CONTENTS = {
    "a deep list": b"[" * 200_000,
    "a deep object": b'{"v":' * 100_000,
    "true": b"true",
    "a number": b"5",
    "a text": b'"v"',
    "a list": b"[1]",
    "only a version": b'{"v": 1}',
    "infinite": b'{"v": 1, "storeId": "s", "fileSizes": {"a": Infinity}}',
    "true in all places": b'{"v": 1, "storeId": "s", "retentionMs": true, "fileSizes": {"a": true}}',
    "another version": b'{"v": [[2]]}',
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", FILES)
def test_other_content_is_an_error_of_ours_or_nothing(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENTS[content])
    # A config file may have fields that we do not know, so an object may be one without a field that we do.
    is_lenient = name.startswith("config/") or content == "another version" or content == "only a version"
    with contextlib.suppress(StoreError) if is_lenient else pytest.raises(StoreError):
        FILES[name][0](str(tmp_path))


def test_so_does_that_of_a_staged_file(tmp_path: Path) -> None:
    file = StagedFile("q/a.arrow", 1, 1, 1, 1, {}, 1)
    (tmp_path / "rmq/staging/q").mkdir(parents=True)
    (tmp_path / "rmq/staging" / file.name).write_bytes(b"?")
    with pytest.raises(DamageError, match="When the query writes the batch again it stages its rows again"):
        check_staged(str(tmp_path), file)


def test_what_holds_messages_may_be_read_around() -> None:
    error = DamageError("a record", "commitlog/0", 7, 1, 2)
    assert str(pickle.loads(pickle.dumps(error))).endswith(
        "commitlog/0, position 7: a record: expected 1, found 2. The damage was not repaired. Read around the position "
        "with startingOffsets and endingOffsets, or restore the file from a copy."
    )


def test_settings_that_are_removed_are_made_again_with_another_id(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with rmq_spark.open_store(path, segment_bytes=1 << 20) as store:
        store.send("T", "a")
        store.set_retention(max_bytes=1 << 40)
    before = read_settings(path)
    settings = Path(path, "rmq/settings.json")
    settings.write_bytes(b"{")
    with pytest.raises(DamageError, match="or remove it"):
        rmq_spark.open_store(path)
    settings.unlink()
    with rmq_spark.open_store(path) as store:
        store.send("T", "b")
    after = read_settings(path)
    assert before is not None
    assert after is not None
    assert (before.store_id == after.store_id, before.retention_bytes, after.retention_bytes) == (False, 1 << 40, None)
    with rmq_spark.open_reader(path) as reader:
        assert sum(reader.bounds(queue).max_offset for queue in reader.queues("T")) == 2
