"""Resets of groups: targets, refused calls, and the files afterwards."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from rmq_spark.store import open_reader
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import (
    DamageError,
    LockTimeoutError,
    NotFoundError,
    OffsetRangeError,
    OptionError,
    StoreError,
    StorePathError,
)
from rmq_spark.store.format.config_json import ConsumerOffsets, decode_consumer_offsets, encode_consumer_offsets
from rmq_spark.store.group.admin import find_targets, group_offsets, groups, reset_offsets
from rmq_spark.store.group.group_files import CommitStamp, GroupLock, GroupPaths, read_commit_stamp, write_commit_stamp
from rmq_spark.store.group.resets import NO_RESETS, Target, add_reset, read_resets
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

FIRST_MS = 1_700_000_000_000
BROKER = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1] + "/lock", os.O_RDWR)
fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
print("held", flush=True)
sys.stdin.read()
"""
OFFSETS = {"T@g": {0: 4, 1: 2}, "%RETRY%g@g": {0: 1}, "T@other": {0: 5}, "deleted@g": {0: 3}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Ten messages in T/0, a second apart, from the third on; five in T/1; two in U/0; one to be tried again."""
    messages = [SampleMessage("T", 0, b"x", store_timestamp=FIRST_MS + number * 1000) for number in range(10)]
    messages += [SampleMessage("T", 1, b"x", store_timestamp=FIRST_MS + 10_000 + number) for number in range(5)]
    messages += [SampleMessage(topic, store_timestamp=FIRST_MS + 20_000) for topic in ("U", "U", "%RETRY%g")]
    path = tmp_path / "store"
    build_store(path, messages, first_offsets={QueueKey("T", 0): 2}, segment_bytes=1 << 12, log_begin=1 << 12)
    (path / "config" / "consumerOffset.json").write_bytes(encode_consumer_offsets(ConsumerOffsets(OFFSETS)))
    return path


def stored(root: Path) -> dict[str, dict[int, int]]:
    held = decode_consumer_offsets((root / "config" / "consumerOffset.json").read_bytes())
    return {key: dict(offsets) for key, offsets in held.offsets.items()}


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("to", "topics", "expected"),
    [
        ("earliest", None, {"T": {0: 2, 1: 0}}),
        ("latest", None, {"T": {0: 12, 1: 5}}),
        ("latest", "U", {"U": {0: 2}}),
        ("earliest", ["U", "%RETRY%g"], {"U": {0: 0}, "%RETRY%g": {0: 0}}),
        (FIRST_MS + 3_500, None, {"T": {0: 6, 1: 0}}),
        (datetime.fromtimestamp(FIRST_MS / 1000 + 3, UTC), None, {"T": {0: 5, 1: 0}}),
        (0, "T", {"T": {0: 2, 1: 0}}),
        (FIRST_MS + 10_003, "T", {"T": {0: 12, 1: 3}}),
        (FIRST_MS * 2, "T", {"T": {0: 12, 1: 5}}),
        ({"T": {1: 3}}, None, {"T": {1: 3}}),
        ({"T": {"0": 2, "1": 5}, "@": {"v": 1}}, None, {"T": {0: 2, 1: 5}}),
    ],
)
def test_reset_offsets_sets_the_targets_and_nothing_else(
    root: Path, to: object, topics: object, expected: dict[str, dict[int, int]]
) -> None:
    assert reset_offsets(root, "g", to, topics) == expected  # type: ignore[arg-type]
    after = {key: dict(offsets) for key, offsets in OFFSETS.items()}
    for topic, offsets in expected.items():
        after.setdefault(f"{topic}@g", {}).update(offsets)
    assert stored(root) == after
    resets = read_resets(GroupPaths(str(root), "g").resets)
    assert resets.number == resets.time_ms > FIRST_MS
    assert resets.since(0) == {
        QueueKey(topic, one): at for topic, queues in expected.items() for one, at in queues.items()
    }


@pytest.mark.parametrize(
    ("to", "topics", "error", "named"),
    [
        ("newest", None, OptionError, "'newest' is none of"),
        (-1, None, OptionError, "to=-1"),
        (True, None, OptionError, "to=True"),
        (1.5, None, OptionError, "to=1.5"),
        (None, None, OptionError, "to=None"),
        (datetime(2026, 1, 1), None, OptionError, "time zone"),
        ("latest", [], OptionError, "empty list of `topics`"),
        ("latest", "V", NotFoundError, 'no topic "V"'),
        ({"T": {0: 3}}, "T", OptionError, "Leave `topics` out"),
        ({}, None, OptionError, "no queue in `to`"),
        ({"@": {}}, None, OptionError, "no queue in `to`"),
        ({"T": 3}, None, OptionError, "by queue id"),
        ({"T": {0: "3"}}, None, OptionError, r"to\['T'\]\[0\]: offset='3' is not a queue offset"),
        ({"T": {0: 1 << 63}}, None, OptionError, r"is not a queue offset.*2\*\*63 - 1"),
        ({"T": {0: True}}, None, OptionError, "is not a queue offset"),
        ({"T": {True: 3}}, None, OptionError, "expected a queue id"),
        ({"T": {"9" * 5000: 3}}, None, OptionError, "expected a queue id"),
        ({"T": {"0": 3, 0: 4}}, None, OptionError, "names the queue 0 twice"),
        ({5: {0: 3}}, None, OptionError, "found the topic 5 in `to`"),
        ("latest", 5, OptionError, "topics=5; expected a topic name"),
        ("latest", ["T", 5], OptionError, "expected a topic name or a list of them"),
        ({"T": {"x": 3}}, None, OptionError, "expected a queue id"),
        ({"V": {0: 3}}, None, NotFoundError, 'no topic "V"'),
        ({"T": {7: 3}}, None, NotFoundError, "no queue 7"),
        (
            {"T": {0: 1}},
            None,
            OffsetRangeError,
            r'\[2, 12\).*reset_offsets .*"earliest" is 2 and "latest" is 12',
        ),
        ({"T": {1: 0, 0: 13}}, None, OffsetRangeError, "offset 13"),
    ],
)
def test_reset_offsets_refuses_invalid_targets_and_changes_nothing(
    root: Path, to: object, topics: object, error: type[Exception], named: str
) -> None:
    before = contents(root)
    with pytest.raises(error, match=named):
        reset_offsets(root, "g", to, topics)  # type: ignore[arg-type]
    assert contents(root) == before


def test_reset_offsets_of_a_group_without_offsets_needs_topics(root: Path) -> None:
    with pytest.raises(NotFoundError, match=r'"new" has no offsets.*Name the topics'):
        reset_offsets(root, "new", "earliest")
    assert reset_offsets(root, "new", "latest", "T") == {"T": {0: 12, 1: 5}}
    assert groups(root) == ["g", "new", "other"]


@pytest.mark.parametrize("name", ["CID_RMQ_SYS_TRANS", "DEFAULT_CONSUMER", "", 5, None])
def test_reset_offsets_refuses_reserved_and_invalid_groups(root: Path, name: str) -> None:
    before = contents(root)
    with pytest.raises(OptionError, match="consumer group"):
        reset_offsets(root, name, "latest", "T")
    assert contents(root) == before


def test_reset_offsets_accepts_integers_of_numpy(root: Path) -> None:
    assert reset_offsets(root, "g", {"T": {np.int64(0): np.uint16(3)}}) == {"T": {0: 3}}  # type: ignore[dict-item]
    assert reset_offsets(root, "g", np.int64(FIRST_MS + 3_500)) == {"T": {0: 6, 1: 0}}  # type: ignore[arg-type]


def test_reset_offsets_refuses_an_invalid_name_and_a_path_without_a_store(root: Path, tmp_path: Path) -> None:
    for ask in (lambda: reset_offsets(root, "a b", "latest"), lambda: group_offsets(root, "a@b")):
        with pytest.raises(OptionError, match="not a group's name"):
            ask()
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorePathError):
        reset_offsets(tmp_path / "empty", "g", "latest", "T")
    with pytest.raises(StorePathError):
        groups(tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []


def test_add_reset_counts_up_and_since_returns_the_new_resets(root: Path) -> None:
    for to in ({"T": {0: 3, 1: 1}}, {"T": {0: 4}}, {"U": {0: 1}}):
        reset_offsets(root, "g", to)
    resets = read_resets(GroupPaths(str(root), "g").resets)
    first, second, third = sorted(resets.numbers().values())
    assert resets.number == third > second > first
    assert resets.targets == {
        QueueKey("T", 0): Target(4, second),
        QueueKey("T", 1): Target(1, first),
        QueueKey("U", 0): Target(1, third),
    }
    assert resets.since(first) == {QueueKey("T", 0): 4, QueueKey("U", 0): 1}
    assert resets.since(third) == {}
    assert read_resets(GroupPaths(str(root), "other").resets) == NO_RESETS


def test_add_reset_numbers_never_decrease() -> None:
    queue = QueueKey("T", 0)
    lost = NO_RESETS.followed_by({queue: 1}, 1000).followed_by({queue: 2}, 1000).followed_by({queue: 3}, 900)
    assert lost.number == 1002
    again = NO_RESETS.followed_by({queue: 4}, 5000)
    assert again.since(lost.number) == {queue: 4}


def test_reset_offsets_records_nothing_while_a_broker_runs(root: Path) -> None:
    command = [sys.executable, "-c", BROKER, str(root)]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(LockTimeoutError, match="broker"):
            reset_offsets(root, "g", "latest")
        assert group_offsets(root, "other") == {"T": {0: 5}}, "reading works"
        child.kill()
    assert stored(root) == OFFSETS
    assert read_resets(GroupPaths(str(root), "g").resets) == NO_RESETS


def test_reset_offsets_raises_while_the_group_lock_is_held(root: Path) -> None:
    turn = GroupLock(GroupPaths(str(root), "g"), Disk(), lambda seconds: None)
    with turn.hold():
        with pytest.raises(LockTimeoutError, match='group "g"'):
            reset_offsets(root, "g", "latest", lock_timeout_ms=10)
        assert reset_offsets(root, "other", "latest") == {"T": {0: 12, 1: 5}}
    assert stored(root) == {**OFFSETS, "T@other": {0: 12, 1: 5}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"v":1}',
        '{"v":1,"group":"g","number":0,"timeMs":1,"targets":{}}',
        '{"v":1,"group":"g","number":1,"timeMs":1,"targets":{"T":{"0":[3,2]}}}',
        '{"v":1,"group":"g","number":1,"timeMs":1,"targets":{"T":{"0":[-3,1]}}}',
        '{"v":1,"group":"g","number":1,"timeMs":1,"targets":{"T":{"x":[3,1]}}}',
        '{"v":1,"group":"g","number":1,"timeMs":1,"targets":{"T":{"0":[3]}}}',
        '{"v":1,"group":"g","number":1,"timeMs":1,"targets":{"T":4}}',
    ],
)
def test_read_resets_names_damage_and_keeps_the_file(root: Path, text: str) -> None:
    path = Path(GroupPaths(str(root), "g").resets)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(DamageError, match="resets of a consumer group"):
        read_resets(str(path))
    with pytest.raises(DamageError):
        reset_offsets(root, "g", "latest")
    assert path.read_text() == text
    assert stored(root) == OFFSETS


def test_read_resets_refuses_a_newer_version(root: Path) -> None:
    path = Path(GroupPaths(str(root), "g").resets)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"v": 2}))
    with pytest.raises(StoreError, match="version 2"):
        reset_offsets(root, "g", "latest")
    assert stored(root) == OFFSETS


def test_reset_offsets_stops_at_a_damaged_offset_file(root: Path) -> None:
    (root / "config" / "consumerOffset.json").write_bytes(b"garbage")
    for ask in (
        lambda: reset_offsets(root, "g", "latest", "T"),
        lambda: group_offsets(root, "g"),
        lambda: groups(root),
    ):
        with pytest.raises(DamageError, match="consumer offsets"):
            ask()
    assert read_resets(GroupPaths(str(root), "g").resets) == NO_RESETS


def test_reset_offsets_commits_offsets_before_it_records_the_reset(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rmq_spark.store.group.admin.add_reset", die)
    with pytest.raises(KeyboardInterrupt):
        reset_offsets(root, "g", {"T": {0: 3}})
    assert stored(root)["T@g"] == {0: 3, 1: 2}


def test_add_reset_requires_the_group_lock(root: Path) -> None:
    paths = GroupPaths(str(root), "g")
    with pytest.raises(AssertionError, match="lock of g"):
        add_reset(paths, Disk(), GroupLock(paths, Disk(), lambda seconds: None), {QueueKey("T", 0): 3}, 1)


def test_find_targets_changes_nothing(root: Path) -> None:
    before = contents(root)
    with open_reader(root) as reader:
        assert find_targets(reader, "g", "latest") == {QueueKey("T", 0): 12, QueueKey("T", 1): 5}
    assert group_offsets(root, "g") == {"%RETRY%g": {0: 1}, "T": {0: 4, 1: 2}, "deleted": {0: 3}}
    assert group_offsets(root, "nobody") == {}
    assert groups(root) == ["g", "other"]
    assert contents(root) == before


def test_read_commit_stamp_returns_the_last_commit(root: Path) -> None:
    paths = GroupPaths(str(root), "g")
    assert read_commit_stamp(paths.published) is None
    with GroupLock(paths, Disk(), lambda seconds: None).hold():
        write_commit_stamp(paths, Disk(), 17, "host@1#2")
    assert read_commit_stamp(paths.published) == CommitStamp("g", 17, "host@1#2")
    for text in (b"", b'{"v": 2}'):  # a power cut; a newer version, which writes more
        Path(paths.published).write_bytes(text)
        assert read_commit_stamp(paths.published) is None


def test_reset_offsets_lists_other_groups_for_an_unknown_one(root: Path) -> None:
    with pytest.raises(NotFoundError, match=r'"othr" has no offsets.*Did you mean other\? Groups there: g, other\.'):
        reset_offsets(root, "othr", "earliest")
    with GroupLock(GroupPaths(str(root), "new"), Disk(), lambda seconds: None).hold():
        pass
    with pytest.raises(NotFoundError, match=r"Name the topics to reset\.$"):
        reset_offsets(root, "new", "earliest")


@pytest.mark.parametrize("to", [1, 1_700_000_000, 978_307_200_000, 1_700_000_000_000_000])
def test_reset_offsets_names_the_unit_of_a_time_in_another_unit(root: Path, to: int) -> None:
    with pytest.raises(OptionError, match=rf"reset_offsets: to={to} .*the unit is milliseconds"):
        reset_offsets(root, "g", to, "T")
    assert stored(root) == OFFSETS
