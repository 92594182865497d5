"""How far groups are behind: messages, bytes and time, beside what each queue really holds."""

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rmq_spark.store import GroupTerms, QueryGroup, open_reader
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import DamageError, NotFoundError, OptionError
from rmq_spark.store.format.config_json import ConsumerOffsets, encode_consumer_offsets
from rmq_spark.store.group.admin import group_lag
from rmq_spark.store.group.group_paths import GroupPaths, GroupTurn
from rmq_spark.store.group.lag import LAG, GroupState, QueueLag, lag_table, queue_lag, unread_range
from rmq_spark.store.group.published import write_published
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store
from rmq_spark.store.units import QueueBounds, QueueKey

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
def test_a_queue_is_as_far_behind_as_its_unread_messages_say(
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


def test_queues_without_an_offset_and_queues_that_are_gone_are_there_too(tmp_path: Path) -> None:
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


def test_each_group_has_its_rows_and_the_time_of_its_last_commit(tmp_path: Path) -> None:
    root = build(tmp_path / "store", {"T@b": {0: 5}, "T@a": {0: 6}})
    paths = GroupPaths(str(root), "a")
    with GroupTurn(paths, Disk(), lambda seconds: None).hold():
        write_published(paths, Disk(), FIRST_MS + 7, "me")
    found = rows(root)
    assert [name for name in found if name.endswith("/0")] == ["a T/0", "b T/0"]
    assert [found[f"{group} T/0"]["lastCommitTimestamp"] for group in "ab"] == [at(FIRST_MS + 7), None]
    assert set(rows(root, "b")) == {"b T/0", "b T/1", "b T/2"}
    with pytest.raises(OptionError, match="not a group's name"):
        group_lag(root, "a@b")
    with pytest.raises(OptionError, match="is a text, found 5"):
        group_lag(root, 5)  # type: ignore[arg-type]


def test_a_group_that_nobody_knows_is_not_found_and_one_without_offsets_has_no_rows(tmp_path: Path) -> None:
    root = build(tmp_path / "store", {"T@billing": {0: 5}})
    with pytest.raises(NotFoundError, match=r'group "biling".*Did you mean billing\? Groups there: billing'):
        group_lag(root, "biling")
    for name in ("new", "n" * 240):  # a name that long is no folder's
        with GroupTurn(GroupPaths(str(root), name), Disk(), lambda seconds: None).hold():
            assert rows(root, name) == {}
    (root / "config" / "consumerOffset.json").unlink()
    with pytest.raises(NotFoundError, match=r"Groups there: new\."):
        group_lag(root, "billing")


def test_a_message_of_the_future_is_not_behind(tmp_path: Path) -> None:
    root = build(tmp_path / "store", {"T@g": {0: 5}})
    assert group_lag(root, "g", now_ms=FIRST_MS)["secondsBehind"].to_pylist()[0] == 0.0
    assert group_lag(root, "g")["secondsBehind"].to_pylist()[0] > 86_400


def test_the_lag_on_a_store_that_a_broker_wrote_is_what_its_queues_hold() -> None:
    found = rows(GOLDEN / "demo")
    billing = found["billing payments/0"]
    assert (billing["groupOffset"], billing["state"]) == (152, "ok")
    assert billing["lagMessages"] == billing["maxOffset"] - 152  # type: ignore[operator]
    assert {row["state"] for row in found.values()} <= {"ok", "none", "gone"}


def test_retention_that_comes_between_is_seen_at_the_next_try(tmp_path: Path) -> None:
    root = tmp_path / "store"
    messages = [SampleMessage("T", 0, b"x" * 900, store_timestamp=FIRST_MS + n) for n in range(20)]
    build_store(root, messages, segment_bytes=SEGMENT)
    queue = QueueKey("T", 0)
    with open_reader(root) as reader:
        reader.refresh()
        assert queue_lag(reader, queue, 1).state == "ok"
        reader._log.close()  # of what it holds open it would go on reading
        min((root / "commitlog").iterdir()).unlink()
        lag = queue_lag(reader, queue, 1)
        assert lag.state == "expired"
        assert lag.bounds is not None
        assert lag.expired == lag.bounds.min_offset - 1 > 0
        assert lag.messages == 20 - lag.bounds.min_offset
        assert queue_lag(reader, QueueKey("T", 5), 1) == QueueLag("gone")


def test_a_damaged_offset_file_is_named(tmp_path: Path) -> None:
    root = build(tmp_path / "store", {"T@g": {0: 5}})
    (root / "config" / "consumerOffset.json").write_bytes(b"garbage")
    with pytest.raises(DamageError, match="consumer offsets"):
        group_lag(root)


def test_looking_changes_nothing_on_disk(tmp_path: Path) -> None:
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
def test_what_is_left_to_read_follows_from_the_bounds(offset: int | None, expected: tuple[str, int, int]) -> None:
    assert unread_range(offset, QueueBounds(3, 9)) == expected


def test_no_groups_have_no_rows_and_all_columns(tmp_path: Path) -> None:
    root = build(tmp_path / "store", {})
    with open_reader(root) as reader:
        table = lag_table(reader, [GroupState("g", {}, None)], NOW_MS)
    assert (table.num_rows, table.schema) == (0, LAG)


def test_a_queue_names_the_living_member_that_has_it(tmp_path: Path) -> None:
    root = build(tmp_path / "store", {"T@g": {0: 5}, "T@other": {0: 5}})
    member = QueryGroup(str(root), GroupTerms("g"))
    member.step([QueueKey("T", 0), QueueKey("T", 1)], {}, None)
    names = {name: row["member"] for name, row in rows(root).items()}
    assert names == {
        **{"g T/0": member.member_id, "g T/1": member.member_id, "g T/2": None},
        **{f"other T/{number}": None for number in range(3)},
    }
    member._membership.lease._lock.release()  # as its process does when it dies
    assert {row["member"] for row in rows(root).values()} == {None}
    (root / "rmq" / "groups" / "g" / "claims.json").write_text("{")
    assert rows(root)["g T/0"]["member"] is None, "a damaged file keeps nobody from the table"
