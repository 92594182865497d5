"""Restarts of a query of a group: offsets from its checkpoint, and offsets from the group."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rmq_spark
from rmq_spark.store import GroupSession, GroupTerms
from rmq_spark.store.errors import GroupConflictError
from rmq_spark.store.group.group_files import GroupPaths
from rmq_spark.store.group.resets import read_resets
from rmq_spark.store.model import QueueKey

GROUP = {"consumerGroup": "billing"}
EARLIEST = GROUP | {"startingOffsets": "earliest"}
SHARED = GROUP | {"assignment": "shared", "groupFallback": "earliest"}
QUEUE = QueueKey("orders", 0)


class Life:
    """A store of the topic orders, of one queue, and the runs of its queries, of which one lives at a time."""

    def __init__(self, query_on: Callable[..., Any], path: Path, count: int) -> None:
        self._query_on, self.path = query_on, path
        self.store = rmq_spark.open_store(path, segment_bytes=1 << 20)
        self.store.create_topic("orders", 1)
        self.append(count)
        self._living: Any = None

    def append(self, count: int) -> None:
        for _ in range(count):
            self.store.send("orders", "x", queue_id=0)

    def start(self, checkpoint: str | None = None, **options: str) -> Any:
        """Start a query after the death of the one before."""
        self.end()
        query = self._query_on(self.path, checkpoint, **options)
        self._living = query if options.get("messageModel") != "broadcasting" and "consumerGroup" in options else None
        return query

    def end(self) -> None:
        """Let the query's process die, as far as others see it."""
        if self._living is not None:
            self._living.reader._group.query._membership.lease._lock.release()
            self._living = None
            time.sleep(0.25)  # for so long it may count as living

    def reset(self, offset: int) -> None:
        rmq_spark.reset_offsets(self.path, "billing", {"orders": {0: offset}})

    def set_behind_the_back(self, offset: int) -> None:
        """Set the group's offset as a RocketMQ tool or consumer does, of which our queries hear nothing."""
        path = self.path / "config" / "consumerOffset.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"offsetTable": {"orders@billing": {"0": offset}}}))

    def offset(self) -> int | None:
        """Return the offsets of the group."""
        return rmq_spark.group_offsets(self.path, "billing").get("orders", {}).get(0)


@pytest.fixture
def live(query_on, tmp_path: Path) -> Iterator[Callable[[int], Life]]:
    """A function that makes a life with the given number of messages in its store."""
    lives: list[Life] = []

    def make(count: int) -> Life:
        lives.append(Life(query_on, tmp_path / "store", count))
        return lives[-1]

    yield make
    for life in lives:
        life.end()
        life.store.close()


def flat(batches: list[list[tuple[int, int]]]) -> list[int]:
    return [offset for batch in batches for _, offset in batch]


@pytest.mark.parametrize("before", [{}, {"consumerGroup": "audit"}, GROUP | {"messageModel": "broadcasting"}])
def test_a_checkpoint_of_no_member_of_the_group_knows_its_resets_as_past(live, before) -> None:
    life = live(3)
    rmq_spark.reset_offsets(life.path, "billing", "latest", topics="orders")
    first = life.start(**before, startingOffsets="earliest", maxOffsetsPerQueue="1")
    assert first.trigger() == [(0, 0)]
    query = life.start(first.committed, **GROUP)
    assert flat(query.drain()) == [1, 2]
    number = read_resets(GroupPaths(str(life.path), "billing").resets).number
    assert (query.offset().group, query.offset().reset) == ("billing", number)
    life.reset(0)
    assert flat(query.drain()) == [0, 1, 2]


@pytest.mark.parametrize("between", [{}, GROUP | {"messageModel": "broadcasting"}])
def test_a_run_outside_of_the_group_keeps_in_mind_which_resets_were_applied(live, between) -> None:
    life = live(3)
    query = life.start(**EARLIEST)
    query.drain()
    life.reset(1)
    assert flat(query.drain()) == [1, 2]
    other = life.start(query.committed, **between)
    life.append(1)
    assert flat(other.drain()) == [3]
    again = life.start(other.committed, **GROUP)
    assert flat(again.drain()) == []
    life.reset(2)
    assert flat(again.drain()) == [2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [SHARED, GROUP | {"onOffsetConflict": "group"}, GROUP | {"onOffsetConflict": "fail"}]
)
@pytest.mark.parametrize("stands", [10, 7, 0])
def test_a_reset_that_another_has_applied_is_not_applied_again_by_who_comes_back(live, options, stands) -> None:
    life = live(10)
    first = life.start(**options, **({} if "assignment" in options else {"startingOffsets": "earliest"}))
    first.drain()
    life.end()
    life.reset(0)
    life.set_behind_the_back(stands)  # the offset of another query since
    again = life.start(first.committed, **options)
    end = again.plan()
    assert life.offset() == stands, "the group is not set back"
    assert [offset for _, offset in again.rows(first.committed, end)] == list(range(stands, 10))


def test_the_checkpoint_wins_over_who_went_on_after_a_reset_too(live, caplog) -> None:
    life = live(3)
    first = life.start(**EARLIEST)
    first.drain()
    life.end()
    life.reset(1)
    life.set_behind_the_back(2)
    with caplog.at_level(logging.WARNING):
        assert flat(life.start(first.committed, **GROUP).drain()) == [1, 2]
    assert "is at 2 in queue orders/0, and was reset to 1 after this checkpoint" in caplog.text


@pytest.mark.parametrize("target", [1, 6])
def test_a_reset_between_the_look_at_resets_and_the_claim_is_applied_once(live, target) -> None:
    life = live(10)
    first = life.start(**SHARED, maxOffsetsPerQueue="2")
    first.trigger()
    first.trigger()
    query = life.start(first.committed, **SHARED, maxOffsetsPerQueue="2")
    assignment = query.reader._group.query._assignment
    rebalance = assignment.rebalance

    def reset_and_rebalance(*given: Any) -> Any:
        assignment.rebalance = rebalance
        life.reset(target)
        return rebalance(*given)

    assignment.rebalance = reset_and_rebalance
    assert flat(query.drain()) == list(range(target, 10))
    assert life.offset() == 10


@pytest.mark.parametrize("target", [1, 6])
def test_a_reset_between_the_claim_and_the_plan_is_applied_once(live, target) -> None:
    life = live(10)
    fenced = SHARED | {"orderly": "true"}
    first = life.start(**fenced, maxOffsetsPerQueue="2")
    start, end = first.committed, first.plan()
    query = life.start(start, **fenced)
    assert query.rows(start, end) == [(0, 0), (0, 1)]  # repeated, and claimed for it
    query.committed = end
    life.reset(target)
    assert flat(query.drain()) == list(range(target, 10))


@pytest.mark.parametrize(("finished", "stands"), [(20, 30), (40, 40)])
def test_a_queue_that_was_claimed_for_a_repeated_batch_and_is_let_go_takes_the_group_never_back(
    live, finished, stands
) -> None:
    life = live(1)
    life.set_behind_the_back(30)
    group = GroupSession(str(life.path), GroupTerms("billing", "shared"))
    group.rebalance([QUEUE], {}, None)
    assert group.rebalance([], {QUEUE: finished}, 0).lost == (QUEUE,)
    assert life.offset() == stands
    group.leave({})


def test_where_a_run_had_a_queue_before_the_group_counts_be_it_further_back(live) -> None:
    life = live(10)
    query = life.start(**SHARED)
    query.drain()
    query.reader._group.query._membership.lease._lock.release()  # taken for dead
    other = GroupSession(str(life.path), GroupTerms("billing", "shared", subscription='subscribe="orders"'))
    assert other.rebalance([QUEUE], {}, None).gained == (QUEUE,)
    other.publish({QUEUE: 4})  # the store was cut, and written to again
    other.leave({})
    assert flat(query.drain()) == [4, 5, 6, 7, 8, 9]


def test_a_checkpoint_that_is_ahead_of_its_shared_group_is_gone_on_from_with_a_warning(live, caplog) -> None:
    life = live(3)
    first = life.start(**SHARED)
    first.drain()
    life.set_behind_the_back(1)
    with caplog.at_level(logging.WARNING):
        assert flat(life.start(first.committed, **SHARED).drain()) == []
    assert "is at 1 in queue orders/0, and this query's checkpoint at 3: it resumes at its" in caplog.text


def test_the_same_move_back_by_two_runs_is_made_twice(live) -> None:
    life = live(3)
    query = life.start(**EARLIEST)
    query.drain()
    for _ in range(3):
        life.end()
        life.set_behind_the_back(1)
        query = life.start(query.committed, **GROUP, onOffsetConflict="group")
        assert flat(query.drain()) == [1, 2]
        assert life.offset() == 3


@pytest.fixture
def two_topics(live) -> tuple[Life, str]:
    """A life with a topic of five messages that is newer than the checkpoint; the group is at its fourth one."""
    life = live(3)
    query = life.start(**EARLIEST, subscribePattern="orders.*")
    query.drain()
    life.store.create_topic("orders2", 1)
    for _ in range(5):
        life.store.send("orders2", "x", queue_id=0)
    life.end()
    table = {"orders@billing": {"0": 3}, "orders2@billing": {"0": 4}}
    (life.path / "config" / "consumerOffset.json").write_text(json.dumps({"offsetTable": table}))
    return life, query.committed


@pytest.mark.parametrize(("conflict", "rows"), [("group", [4]), ("checkpoint", [0, 1, 2, 3, 4])])
def test_a_queue_that_only_the_group_knows_goes_on_as_the_conflict_is_settled(
    two_topics, caplog, conflict, rows
) -> None:
    life, checkpoint = two_topics
    query = life.start(checkpoint, **GROUP, subscribePattern="orders.*", onOffsetConflict=conflict)
    with caplog.at_level(logging.WARNING):
        assert flat(query.drain()) == rows
    assert ("is at 4 in queue orders2/0, and this query's checkpoint at 0" in caplog.text) == (len(rows) > 1)


def test_a_queue_that_only_the_group_knows_fails_a_query_that_is_to_fail(two_topics) -> None:
    life, checkpoint = two_topics
    query = life.start(checkpoint, **GROUP, subscribePattern="orders.*", onOffsetConflict="fail")
    with pytest.raises(GroupConflictError, match="is at 4 in queue orders2/0"):
        query.plan()


@pytest.mark.parametrize(
    ("options", "stands", "is_told"),
    [
        ({}, 1, True),
        ({}, 3, False),
        ({"startingOffsets": "latest"}, 1, False),
        ({"startingOffsets": "group"}, 1, False),
    ],
)
def test_a_query_that_begins_behind_what_its_group_has_not_read_says_so(live, caplog, options, stands, is_told) -> None:
    life = live(3)
    life.set_behind_the_back(stands)
    with caplog.at_level(logging.WARNING):
        life.start(**GROUP, **options).drain()
    told = "the consumer group billing is at 1 in queue orders/0, and this query begins at 3"
    assert caplog.text.count(told) == is_told
    assert ("startingOffsets=group begins at the group's offsets" in caplog.text) == is_told
