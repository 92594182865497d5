"""The lag of groups, compared with the content of their queues."""

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rmq_spark.store import GroupSession, GroupTerms, open_reader
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError, NotFoundError, OptionError
from rmq_spark.store.format.config_json import ConsumerOffsets, encode_consumer_offsets
from rmq_spark.store.group.admin import group_lag
from rmq_spark.store.group.group_files import GroupLock, GroupPaths, write_commit_stamp
from rmq_spark.store.group.lag import GroupState, lag_table, queue_lag
from rmq_spark.store.group_tables import LAG, QueueLag, unread_range
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store

FIRST_MS = 1_700_000_000_000
NOW_MS = FIRST_MS + 60_000
SEGMENT = 1 << 12
GOLDEN = Path(__file__).parents[2] / "golden"


def build(path: Path, offsets: dict[str, dict[int, int]]) -> Path:
    """Ten messages in T/0, a second apart, from offset 2 on; T/1 and T/2 are empty; each body is longer."""
    messages = [SampleMessage("T", 0, b"x" * n, store_timestamp=FIRST_MS + n * 1000) for n in range(10)]
    build_store(
        path,
        messages,
        first_offsets={QueueKey("T", 0): 2},
        segment_bytes=SEGMENT,
        log_begin=SEGMENT,
        empty_topics={"T": 3},
    )
    (path / "config" / "consumerOffset.json").write_bytes(encode_consumer_offsets(ConsumerOffsets(offsets)))
    return path


def at(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def rows(path: Path, group: str | None = None) -> dict[str, dict[str, object]]:
    """Return the table's rows by `group topic/queue`."""
    table = group_lag(path, group, now_ms=NOW_MS)
    assert table.schema == LAG
    return {f"{row['group']} {row['topic']}/{row['queueId']}": row for row in table.to_pylist()}


@pytest.mark.parametrize(
    ("offset", "state", "messages", "expired", "behind", "last_ms"),
    [
        (2, "ok", 10, 0, 60.0, None),
        (3, "ok", 9, 0, 59.0, FIRST_MS),
        (11, "ok", 1, 0, 51.0, FIRST_MS + 8_000),
        (12, "ok", 0, 0, 0.0, FIRST_MS + 9_000),
        (0, "expired", 10, 2, 60.0, None),
        (13, "ahead", 0, 0, 0.0, None),
        (-1, "none", 10, 0, 60.0, None),
    ],
)
def test_group_lag_counts_unread_messages(
    tmp_path: Path, offset: int, state: str, messages: int, expired: int, behind: float, last_ms: int | None
) -> None:
    root = build(tmp_path / "store", {"T@g": {0: offset, 1: 0}})
    row = rows(root)["g T/0"]
    assert (row["groupOffset"], row["state"]) == (offset if offset >= 0 else None, state)
    assert (row["minOffset"], row["maxOffset"]) == (2, 12)
    assert (row["lagMessages"], row["expiredMessages"], row["secondsBehind"]) == (messages, expired, behind)
    assert row["lastConsumedTimestamp"] == (at(last_ms) if last_ms is not None else None)
    assert row["lastCommitTimestamp"] is None
    with open_reader(root) as reader:
        sizes = [reader.record_bytes(QueueKey("T", 0), one, one + 1) for one in range(2, 12)]
    assert row["lagBytes"] == sum(sizes[10 - messages :])
    assert len(set(sizes)) == 10


def test_group_lag_includes_queues_without_an_offset_and_missing_queues(tmp_path: Path) -> None:
    found = rows(build(tmp_path / "store", {"T@g": {0: 12, 9: 4}, "deleted@g": {0: 3}}))
    states = {name: (row["state"], row["groupOffset"], row["lagMessages"]) for name, row in found.items()}
    assert states == {
        "g T/0": ("ok", 12, 0),
        "g T/1": ("none", None, 0),
        "g T/2": ("none", None, 0),
        "g T/9": ("gone", 4, None),
        "g deleted/0": ("gone", 3, None),
    }
    assert list(states) == list(found), "sorted"
    assert found["g deleted/0"]["secondsBehind"] is None


def test_group_lag_has_rows_and_commit_time_of_each_group(tmp_path: Path) -> None:
    root = build(tmp_path / "store", {"T@b": {0: 5}, "T@a": {0: 6}})
    paths = GroupPaths(str(root), "a")
    with GroupLock(paths, Disk(), lambda seconds: None).hold():
        write_commit_stamp(paths, Disk(), FIRST_MS + 7, "me")
    found = rows(root)
    assert [name for name in found if name.endswith("/0")] == ["a T/0", "b T/0"]
    assert [found[f"{group} T/0"]["lastCommitTimestamp"] for group in "ab"] == [at(FIRST_MS + 7), None]
    assert set(rows(root, "b")) == {"b T/0", "b T/1", "b T/2"}
    with pytest.raises(OptionError, match="not a group's name"):
        group_lag(root, "a@b")
    with pytest.raises(OptionError, match="is a text, found 5"):
        group_lag(root, 5)  # type: ignore[arg-type]


def test_group_lag_refuses_an_unknown_group(tmp_path: Path) -> None:
    root = build(tmp_path / "store", {"T@billing": {0: 5}})
    with pytest.raises(NotFoundError, match=r'group "biling".*Did you mean billing\? Groups there: billing'):
        group_lag(root, "biling")
    for name in ("new", "n" * 240):  # the second is too long for a folder
        with GroupLock(GroupPaths(str(root), name), Disk(), lambda seconds: None).hold():
            assert rows(root, name) == {}
    (root / "config" / "consumerOffset.json").unlink()
    with pytest.raises(NotFoundError, match=r"Groups there: new\."):
        group_lag(root, "billing")


def test_group_lag_is_0_s_for_a_message_of_the_future(tmp_path: Path) -> None:
    root = build(tmp_path / "store", {"T@g": {0: 5}})
    assert group_lag(root, "g", now_ms=FIRST_MS)["secondsBehind"].to_pylist()[0] == 0.0
    assert group_lag(root, "g")["secondsBehind"].to_pylist()[0] > 86_400


def test_group_lag_of_a_brokers_store_matches_its_queues() -> None:
    found = rows(GOLDEN / "demo")
    billing = found["billing payments/0"]
    assert (billing["groupOffset"], billing["state"]) == (152, "ok")
    assert billing["lagMessages"] == billing["maxOffset"] - 152  # type: ignore[operator]
    assert {row["state"] for row in found.values()} <= {"ok", "none", "gone"}


def test_queue_lag_retries_after_retention(tmp_path: Path) -> None:
    root = tmp_path / "store"
    messages = [SampleMessage("T", 0, b"x" * 900, store_timestamp=FIRST_MS + n) for n in range(20)]
    build_store(root, messages, segment_bytes=SEGMENT)
    queue = QueueKey("T", 0)
    with open_reader(root) as reader:
        reader.refresh()
        assert queue_lag(reader, queue, 1).state == "ok"
        reader._log.close()  # otherwise it would read from its open files
        min((root / "commitlog").iterdir()).unlink()
        lag = queue_lag(reader, queue, 1)
        assert lag.state == "expired"
        assert lag.bounds is not None
        assert lag.expired == lag.bounds.min_offset - 1 > 0
        assert lag.messages == 20 - lag.bounds.min_offset
        assert queue_lag(reader, QueueKey("T", 5), 1) == QueueLag("gone")


def test_group_lag_names_a_damaged_offset_file(tmp_path: Path) -> None:
    root = build(tmp_path / "store", {"T@g": {0: 5}})
    (root / "config" / "consumerOffset.json").write_bytes(b"garbage")
    with pytest.raises(DamageError, match="consumer offsets"):
        group_lag(root)


def test_group_lag_changes_nothing_on_disk(tmp_path: Path) -> None:
    root = build(tmp_path / "store", {"T@g": {0: 5}})
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    group_lag(root)
    here, there = ({p.relative_to(one): p.is_file() and p.read_bytes() for p in one.rglob("*")} for one in (root, copy))
    assert here == there


@pytest.mark.parametrize(
    ("offset", "expected"),
    [
        (None, ("none", 3, 9)),
        (2, ("expired", 3, 9)),
        (3, ("ok", 3, 9)),
        (9, ("ok", 9, 9)),
        (10, ("ahead", 9, 9)),
    ],
)
def test_unread_range_follows_from_the_bounds(offset: int | None, expected: tuple[str, int, int]) -> None:
    assert unread_range(offset, QueueBounds(3, 9)) == expected


def test_lag_table_without_groups_has_all_columns(tmp_path: Path) -> None:
    root = build(tmp_path / "store", {})
    with open_reader(root) as reader:
        table = lag_table(reader, [GroupState("g", {}, None)], NOW_MS)
    assert (table.num_rows, table.schema) == (0, LAG)


def test_group_lag_names_the_living_owner(tmp_path: Path) -> None:
    root = build(tmp_path / "store", {"T@g": {0: 5}, "T@other": {0: 5}})
    member = GroupSession(str(root), GroupTerms("g"))
    member.rebalance([QueueKey("T", 0), QueueKey("T", 1)], {}, None)
    names = {name: row["member"] for name, row in rows(root).items()}
    assert names == {
        **{"g T/0": member.member_id, "g T/1": member.member_id, "g T/2": None},
        **{f"other T/{number}": None for number in range(3)},
    }
    member._membership.lease._lock.release()  # as its process does when it dies
    assert {row["member"] for row in rows(root).values()} == {None}
    (root / "rmq" / "groups" / "g" / "claims.json").write_text("{")
    assert rows(root)["g T/0"]["member"] is None, "a damaged file keeps nobody from the table"
