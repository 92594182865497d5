"""Handover by a member that starts no trigger: offsets, and messages that are delivered twice."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rmq_spark
from rmq_spark.store.errors import GroupConflictError
from rmq_spark.store.group.claims import read_claims
from rmq_spark.store.group.group_files import GroupPaths
from rmq_spark.store.group.handover import LOOK_EVERY_S
from rmq_spark.store.group.resets import write_outcomes
from rmq_spark.store.model import CommitKey, QueueKey, Suspension

SHARED = {"consumerGroup": "billing", "assignment": "shared", "groupFallback": "earliest"}
QUEUES, MESSAGES = 4, 5  # of each queue
LIMIT_S = 60  # ends a hang

Row = tuple[int, int]


class Crew:
    """Queries of one group, and the messages that each has read."""

    def __init__(self, query_on: Callable[..., Any], path: Path) -> None:
        self.path, self._query_on = path, query_on
        self.queries: list[Any] = []
        self.rows: list[Row] = []
        with rmq_spark.open_store(path, segment_bytes=1 << 20) as store:
            store.create_topic("orders", QUEUES)
        self.append()

    def append(self) -> None:
        with rmq_spark.open_store(self.path) as store:
            for number in range(QUEUES * MESSAGES):
                store.send("orders", "x", queue_id=number % QUEUES)

    def join(self, **given: str) -> Any:
        self.queries.append(self._query_on(self.path, **SHARED, **given))
        return self.queries[-1]

    def start_batch(self, query: Any) -> str:
        """Plan a batch without reading its rows; return its end."""
        end = query.plan()
        assert end != query.committed
        return end

    def finish_batch(self, query: Any, end: str) -> list[Row]:
        rows = query.rows(query.committed, end)
        query.committed = end
        self.rows += rows
        return rows

    def drain_until(self, query: Any, count: int) -> None:
        """Have a query read until it owns `count` queues and has read all their messages."""
        until = time.monotonic() + LIMIT_S
        while len(self.owned(query)) != count:
            assert time.monotonic() < until, f"owns {self.owned(query)}"
            self.rows += self.rows_of(query)
            time.sleep(0.02)
        self.rows += self.rows_of(query)

    def owned(self, query: Any) -> set[int]:
        me = query.reader._group.query.member_id
        claims = read_claims(GroupPaths(str(self.path), "billing").claims).queues
        return {queue.queue_id for queue, claim in claims.items() if claim.owner == me and queue.topic == "orders"}

    def offsets(self) -> dict[int, int]:
        return rmq_spark.group_offsets(self.path, "billing").get("orders", {})

    def twice(self) -> set[Row]:
        return {row for row, count in Counter(self.rows).items() if count > 1}

    def check_complete(self, messages: int = MESSAGES) -> None:
        assert set(self.rows) == {(queue, offset) for queue in range(QUEUES) for offset in range(messages)}

    def rows_of(self, query: Any) -> list[Row]:
        """Read to the end, and return the messages of the query."""
        return [row for rows in query.drain() for row in rows]

    def event(self, query: Any, end: str) -> Any:
        """Return the event of the batch that the query planned last."""
        source = SimpleNamespace(latestOffset=json.dumps(query.reader.reportLatestOffset()), endOffset=end)
        progress = SimpleNamespace(sources=[source], runId="run", id="query", batchId=0)
        return SimpleNamespace(progress=progress)

    def report(self, query: Any, end: str) -> None:
        """Report the end of the query's batch to the session's listener, like Spark."""
        rmq_spark.GroupOffsetListener().onQueryProgress(self.event(query, end))


@pytest.fixture
def crew(query_on: Callable[..., Any], tmp_path: Path) -> Iterator[Crew]:
    made = Crew(query_on, tmp_path / "store")
    yield made
    for query in made.queries:
        query.reader._group.query.leave({})


def test_handover_of_a_query_that_found_nothing_at_its_last_trigger_needs_no_further_trigger(crew: Crew) -> None:
    first = crew.join(handoverTimeout="1h")
    crew.drain_until(first, 4)  # afterwards it starts no trigger
    second = crew.join(handoverTimeout="1h")
    crew.drain_until(second, 2)
    assert crew.owned(first).isdisjoint(crew.owned(second))
    crew.append()
    for query in (second, first):
        crew.drain_until(query, 2)
    crew.check_complete(2 * MESSAGES)
    assert crew.twice() == set()


def test_handover_of_a_batch_whose_end_the_listener_recorded_doubles_nothing(crew: Crew) -> None:
    first = crew.join(handoverTimeout="1h")
    end = crew.start_batch(first)
    second = crew.join(handoverTimeout="1h")
    assert crew.rows_of(second) == []
    crew.finish_batch(first, end)
    crew.report(first, end)
    assert set(crew.offsets().values()) == {MESSAGES}, "published before the next trigger"
    crew.drain_until(second, 2)
    crew.append()
    for query in (second, first):
        crew.drain_until(query, 2)
    crew.check_complete(2 * MESSAGES)
    assert crew.twice() == set()


def test_handover_waits_for_a_running_batch_although_the_one_before_was_recorded(crew: Crew) -> None:
    first = crew.join(handoverTimeout="1h")
    end = crew.start_batch(first)
    crew.finish_batch(first, end)
    event = crew.event(first, end)
    crew.append()
    running = crew.start_batch(first)
    second = crew.join(handoverTimeout="1h")
    rmq_spark.GroupOffsetListener().onQueryProgress(event)
    for _ in range(3 * round(LOOK_EVERY_S / 0.05)):
        assert crew.rows_of(second) == []
        time.sleep(0.05)
    assert len(crew.owned(first)) == 4
    crew.finish_batch(first, running)
    for query in (first, second):
        crew.drain_until(query, 2)
    crew.check_complete(2 * MESSAGES)
    assert crew.twice() == set()


def test_handover_of_a_batch_that_does_not_end_reads_its_messages_again_at_the_other_member(crew: Crew) -> None:
    first = crew.join(handoverTimeout="1s")
    end = crew.start_batch(first)
    epochs = first.reader._group.query.epochs
    second = crew.join()
    crew.drain_until(second, 2)
    own = crew.owned(second)
    assert crew.owned(first) == set(range(QUEUES)) - own
    assert {q.queue_id: epoch for q, epoch in second.reader._group.query.epochs.items()} == {
        queue.queue_id: epoch + 2 for queue, epoch in epochs.items() if queue.queue_id in own
    }, "one for the fence, one for the claim"
    crew.finish_batch(first, end)
    crew.report(first, end)  # late: of the queues that it lost nothing is published
    crew.append()
    for query in (first, second):
        crew.drain_until(query, 2)
    crew.check_complete(2 * MESSAGES)
    assert crew.twice() == {(queue, offset) for queue in own for offset in range(MESSAGES)}
    assert crew.offsets() == dict.fromkeys(range(QUEUES), 2 * MESSAGES)


@pytest.mark.parametrize("option", ["fenceLostQueues", "orderly"])
def test_handover_of_a_batch_that_does_not_end_fences_its_tasks(crew: Crew, option: str) -> None:
    first = crew.join(**{option: "true"}, handoverTimeout="1s")
    end = crew.start_batch(first)
    partitions = first.reader.partitions(first.reader.initialOffset(), json.loads(end))
    second = crew.join(**{option: "true"})
    crew.drain_until(second, 2)
    own = crew.owned(second)
    for partition in partitions:
        if own & {piece.queue.queue_id for piece in partition.pieces}:
            with pytest.raises(GroupConflictError, match=r"longer than handoverTimeout.*new checkpointLocation"):
                list(first.reader.read(partition))
        else:
            assert list(first.reader.read(partition))


def test_handover_of_a_queue_that_a_listener_stopped_goes_on_where_it_stopped(crew: Crew) -> None:
    first = crew.join(handoverTimeout="1h")
    end = crew.start_batch(first)
    second = crew.join(handoverTimeout="1h")
    second.drain()
    crew.finish_batch(first, end)
    stopped = {QueueKey("orders", queue): Suspension(3) for queue in range(QUEUES)}
    write_outcomes(str(crew.path), "billing", CommitKey("query", 0), stopped)
    crew.report(first, end)
    crew.drain_until(second, 2)
    own = crew.owned(second)
    assert crew.twice() == {(queue, offset) for queue in own for offset in (3, 4)}
    crew.drain_until(first, 2)
    assert crew.twice() == {(queue, offset) for queue in range(QUEUES) for offset in (3, 4)}, "each goes back once"
    crew.check_complete()


def test_handover_to_a_member_that_dies_gives_the_queues_back_at_the_next_trigger(crew: Crew) -> None:
    first = crew.join(handoverTimeout="1h")
    crew.drain_until(first, 4)
    second = crew.join()
    crew.drain_until(second, 2)
    crew.append()
    second.plan()  # a batch that is never finished
    second.reader._group.query._membership.lease._lock.release()
    crew.drain_until(first, 4)
    crew.check_complete(2 * MESSAGES)
    assert crew.twice() == set()


def test_handover_of_a_member_whose_process_is_stopped_comes_after_its_lease(crew: Crew) -> None:
    first = crew.join(leaseTimeout="2s", leaseHeartbeat="1s")
    end = crew.start_batch(first)
    query = first.reader._group.query
    with query.planning():  # its handover thread does nothing, as that of a process that gets SIGSTOP
        query._membership.lease._end_thread()  # nor does it beat; it has its lock
        second = crew.join(leaseTimeout="2s", leaseHeartbeat="1s")
        crew.drain_until(second, 4)
        assert query._membership.lease._lock.is_held
    crew.finish_batch(first, end)
    for each in (first, second):
        crew.drain_until(each, 2)
    crew.check_complete()
    assert crew.twice() == {(queue, offset) for queue in range(QUEUES) for offset in range(MESSAGES)}
