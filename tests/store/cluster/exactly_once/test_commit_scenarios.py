"""Commits that meet frozen sessions, lost entries, late requests and brokers that are away.

The mistakes of the model's list are planted in the real commit, one at a time. For each of them a scenario fails.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support import exact_commits as commits
from support import exact_mistakes as mistakes
from support.exact_commits import Attempt, B, Death, Process, Script, scripted

from rmq_spark.store.backend import CommitTotals
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.exactly_once.ledger_messages import AppendRequest
from rmq_spark.store.cluster.exactly_once.marks import marks_group
from rmq_spark.store.cluster.exactly_once.publishing import PublishRequest
from rmq_spark.store.cluster.group_requests import CommitOffsetRequest
from rmq_spark.store.cluster.requests import Request
from rmq_spark.store.errors import BackendUnavailableError
from rmq_spark.store.model import CommitKey
from rmq_spark.store.testing.backend_groups import eventually
from rmq_spark.store.testing.brokers import RunningCluster, faults
from rmq_spark.store.testing.brokers.wire import Call

SEND_BATCH, SEND, HEARTBEAT = (
    RequestCode.SEND_BATCH_MESSAGE,
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.HEART_BEAT,
)
_queries = count()


@pytest.fixture(scope="module", params=["5.3", pytest.param("4.9", marks=pytest.mark.slow)])
def cluster(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[RunningCluster]:
    """A cluster for all scenarios. Each has a query of its own."""
    path: Path = tmp_path_factory.mktemp("cluster")
    with RunningCluster(path, release=request.param, brokers=2, name_servers=2) as cluster:
        yield commits.prepare(cluster)


@pytest.fixture(autouse=True)
def _watched(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    commits.hurry(monkeypatch)
    with commits.watched_requests():
        yield
    for broker in cluster.brokers.values():
        broker.heal()


def of_type(kind: type[Request[Any]], number: int = 0, *, after: bool = False, act: Any = commits.live) -> Script:
    """Return a script for request number `number` of a type."""
    return Script(act, number, after, lambda request: type(request) is kind)


def mark_after_the_intent() -> Callable[[Request[Any]], bool]:
    """Return a condition for the mark that a session stores when it has learned that its intent counts."""
    seen = set[type[Request[Any]]]()

    def is_mark(request: Request[Any]) -> bool:
        seen.add(type(request))
        return AppendRequest in seen and isinstance(request, CommitOffsetRequest)

    return is_mark


class Scene:
    """Batch 0 of a query, staged by two attempts with the same rows."""

    def __init__(self, cluster: RunningCluster) -> None:
        self.cluster, self.since = cluster, commits.ends(cluster)
        self.key = CommitKey(f"query-{next(_queries)}", 0)
        self.first, self.second = (commits.stage(cluster, self.key) for _ in range(2))

    def freeze(self, attempt: Attempt, script: Script) -> Process:
        """Commit an attempt in a process that is frozen by the script. Its connections stay open."""
        frozen = Process(lambda: commits.commit(commits.make_sink(self.cluster), attempt), script)
        assert frozen.await_hold(), frozen.outcome
        return frozen

    def die(self, attempt: Attempt, script: Script) -> None:
        """Commit an attempt in a process that dies by the script."""
        with scripted(script), contextlib.suppress(Death):
            commits.commit(commits.make_sink(self.cluster), attempt)
        assert script.is_dead

    def is_finished_soon(self) -> bool:
        """Commit the second attempt, and do not wait for sessions that may still send. Return whether it is stored."""
        try:
            commits.commit(commits.make_sink(self.cluster, fence_timeout_ms=20), self.second)
        except BackendUnavailableError:
            return False
        return True

    def check(self) -> None:
        """Commit the batch again and another one, and check the queues."""
        last = commits.stage(self.cluster, replace(self.key, batch_id=1))
        for attempt in (self.second, last):
            commits.commit(commits.make_sink(self.cluster), attempt)
        commits.check_once(commits.stored(self.cluster, self.since), [self.first, self.second], [last])


# Scenarios.


def an_author_is_frozen_before_it_publishes(cluster: RunningCluster) -> None:
    scene = Scene(cluster)
    frozen = scene.freeze(scene.first, of_type(PublishRequest))
    is_finished = scene.is_finished_soon()
    frozen.thaw()
    scene.check()
    assert not is_finished


def an_author_is_frozen_just_after_its_intent(cluster: RunningCluster) -> None:
    scene = Scene(cluster)
    frozen = scene.freeze(scene.first, Script(commits.live, 0, when=mark_after_the_intent()))
    is_finished = scene.is_finished_soon()
    frozen.thaw()
    scene.check()
    assert not is_finished


def a_broker_loses_the_entry_of_an_author(cluster: RunningCluster) -> None:
    for broker in cluster.brokers.values():
        broker.fail(HEARTBEAT, faults.with_code(0), times=2)
    an_author_is_frozen_before_it_publishes(cluster)


def a_session_that_has_taken_over_is_frozen(cluster: RunningCluster) -> None:
    scene = Scene(cluster)
    scene.die(scene.first, of_type(PublishRequest, act=commits.die))
    frozen = scene.freeze(scene.first, of_type(PublishRequest))
    is_finished = scene.is_finished_soon()
    frozen.thaw()
    scene.check()
    assert not is_finished


def brokers_lose_the_entry_of_a_session_that_has_taken_over(cluster: RunningCluster) -> None:
    """The next session does not find it, and goes on. So it must not register again and do the same."""
    scene = Scene(cluster)
    scene.die(scene.first, of_type(PublishRequest, act=commits.die))
    lost = scene.freeze(scene.second, of_type(AppendRequest, after=True))
    group = marks_group(scene.key.query_id)
    for broker in cluster.brokers.values():
        for one in broker.producers.ids(group):
            broker.producers.remove(group, one)
    next_one = scene.freeze(scene.first, of_type(PublishRequest))
    lost.release()
    # It takes over again, or it has published all rows.
    assert eventually(lambda: lost.has_ended or lost.script.seen.count("AppendRequest") > 1)
    next_one.thaw()
    assert isinstance(lost.thaw(), CommitTotals)
    scene.check()


def an_author_is_frozen_before_its_intent(cluster: RunningCluster) -> None:
    scene = Scene(cluster)
    frozen = scene.freeze(scene.first, of_type(AppendRequest))
    assert scene.is_finished_soon()  # nobody waits for a session without an intent
    assert isinstance(frozen.thaw(), CommitTotals)
    scene.check()


def an_author_dies_before_it_publishes(cluster: RunningCluster) -> None:
    scene = Scene(cluster)
    scene.die(scene.first, of_type(PublishRequest, act=commits.die))
    scene.check()


def an_author_dies_in_the_middle(cluster: RunningCluster) -> None:
    scene = Scene(cluster)
    scene.die(scene.first, of_type(PublishRequest, 1, after=True, act=commits.die))
    scene.check()


def connections_break_while_rows_are_stored(cluster: RunningCluster) -> None:
    scene = Scene(cluster)
    for broker in cluster.brokers.values():
        broker.fail(SEND_BATCH, faults.closes_connection(), times=1)
    assert not commits.commit(commits.make_sink(cluster), scene.first).skipped
    scene.check()


def a_request_is_executed_after_its_connection_ended(cluster: RunningCluster) -> None:
    """A thread of the broker has taken the request. Barriers are executed after it."""
    scene, broker = Scene(cluster), cluster.brokers[B.broker]
    kept: list[Callable[[], None]] = []
    waiting: list[Callable[[], None]] = []

    def keep(call: Call, serve: Callable[[], None]) -> None:
        call.connection.close()
        kept.append(serve)

    broker.fail(SEND_BATCH, keep, times=1)
    broker.fail(SEND, lambda _, serve: waiting.append(serve) if kept else serve())
    commit = Process(lambda: commits.commit(commits.make_sink(cluster), scene.first))
    assert eventually(lambda: bool(waiting) or commit.has_ended)

    def go_on() -> None:
        while kept:
            kept.pop()()
        while waiting:
            waiting.pop()()

    cluster.loop.run(go_on)
    commit.thaw()
    scene.check()


def a_target_broker_is_killed_in_a_batch(cluster: RunningCluster) -> None:
    scene, broker = Scene(cluster), cluster.brokers[B.broker]
    broker.fail(SEND_BATCH, faults.killed_in_batch(1), times=1)
    commit = Process(lambda: commits.commit(commits.make_sink(cluster), scene.first))
    assert eventually(lambda: not broker.is_running)
    broker.restart(new_port=True)
    assert commit.thaw() == CommitTotals(4, scene.first.receipt.bytes, 2)
    scene.check()


def the_brokers_are_killed_one_after_the_other(cluster: RunningCluster) -> None:
    """Also that of the ledger, while rows are on their way."""
    scene = Scene(cluster)
    frozen = scene.freeze(scene.first, of_type(PublishRequest, 1))
    for broker in cluster.brokers.values():
        broker.kill()
    frozen.release()
    for broker in cluster.brokers.values():
        broker.restart(new_port=True)
    assert frozen.thaw() == CommitTotals(4, scene.first.receipt.bytes, 2)
    scene.check()


def name_servers_forget_a_broker_while_rows_are_on_their_way(cluster: RunningCluster) -> None:
    scene, broker = Scene(cluster), cluster.brokers[B.broker]
    frozen = scene.freeze(scene.first, of_type(PublishRequest, 1))
    cluster.forget(B.broker)
    broker.close_connections()
    frozen.release()
    assert eventually(
        lambda: sum(server.requests[RequestCode.GET_ROUTEINFO_BY_TOPIC] for server in cluster.name_servers) > 0
    )
    cluster.register_all()
    assert frozen.thaw() == CommitTotals(4, scene.first.receipt.bytes, 2)
    scene.check()


def two_commits_run_at_once(cluster: RunningCluster) -> None:
    for _ in range(3):
        scene = Scene(cluster)
        both = [
            Process(lambda attempt=attempt: commits.commit(commits.make_sink(cluster), attempt))  # type: ignore[misc]
            for attempt in (scene.first, scene.second)
        ]
        outcomes = [one.thaw() for one in both]
        assert all(isinstance(one, CommitTotals) for one in outcomes), outcomes
        scene.check()


SCENARIOS = (
    an_author_is_frozen_before_it_publishes,
    an_author_is_frozen_just_after_its_intent,
    a_broker_loses_the_entry_of_an_author,
    a_session_that_has_taken_over_is_frozen,
    brokers_lose_the_entry_of_a_session_that_has_taken_over,
    an_author_is_frozen_before_its_intent,
    an_author_dies_before_it_publishes,
    an_author_dies_in_the_middle,
    connections_break_while_rows_are_stored,
    a_request_is_executed_after_its_connection_ended,
    a_target_broker_is_killed_in_a_batch,
    the_brokers_are_killed_one_after_the_other,
    name_servers_forget_a_broker_while_rows_are_on_their_way,
    two_commits_run_at_once,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_each_row_is_stored_once_when(cluster: RunningCluster, scenario: Callable[[RunningCluster], None]) -> None:
    scenario(cluster)


# Mistakes.

MISTAKES = [
    (mistakes.no_fence, an_author_is_frozen_before_it_publishes),
    (mistakes.takers_not_fenced, a_session_that_has_taken_over_is_frozen),
    (mistakes.no_settle, a_request_is_executed_after_its_connection_ended),
    (mistakes.no_read_back, an_author_dies_in_the_middle),
    (mistakes.late_floor, an_author_dies_in_the_middle),
    (mistakes.second_intent_counts, an_author_is_frozen_before_its_intent),
    (mistakes.not_listed, a_broker_loses_the_entry_of_an_author),
    (mistakes.listed_again, brokers_lose_the_entry_of_a_session_that_has_taken_over),
    (mistakes.registered_late, an_author_is_frozen_just_after_its_intent),
    (mistakes.done_early, an_author_dies_before_it_publishes),
    (mistakes.resend, connections_break_while_rows_are_stored),
]


@pytest.mark.parametrize(("plant", "scenario"), MISTAKES, ids=[plant.__name__ for plant, _ in MISTAKES])
def test_a_planted_mistake_is_found(
    cluster: RunningCluster,
    plant: Callable[[pytest.MonkeyPatch], None],
    scenario: Callable[[RunningCluster], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"no attempt of|rows that no batch has, or twice"):
        scenario(cluster)
