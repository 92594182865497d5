"""A commit that dies, is cut off or is frozen at each of its requests, and the commits after it."""

import contextlib
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support import exact_commits as commits
from support.exact_commits import Attempt, Death, Process, Script, scripted

from rmq_spark.store.backend import CommitTotals
from rmq_spark.store.cluster.exactly_once.publishing import PublishRequest
from rmq_spark.store.cluster.requests import Request
from rmq_spark.store.errors import BatchConflictError
from rmq_spark.store.model import CommitKey
from rmq_spark.store.testing.brokers import RunningCluster, faults
from rmq_spark.store.testing.brokers.faults import Fault
from rmq_spark.store.testing.brokers.wire import Call

SAME, REPEATED, OTHER = "the same receipts", "another attempt", "other rows"
FOLLOWERS = (SAME, REPEATED, OTHER)
_queries = count()


@pytest.fixture(scope="module", params=["5.3", pytest.param("4.9", marks=pytest.mark.slow)])
def cluster(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[RunningCluster]:
    """A cluster for all tests here. Each case has a query of its own."""
    path: Path = tmp_path_factory.mktemp("cluster")
    with RunningCluster(path, release=request.param, brokers=2) as cluster:
        yield commits.prepare(cluster)


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    commits.hurry(monkeypatch)
    with commits.watched_requests():
        yield


class Case:
    """One query. Its batch 0 is begun by a process that dies, is finished by others, and followed by batch 1."""

    def __init__(self, cluster: RunningCluster, follower: str = SAME) -> None:
        self.cluster, self.sink = cluster, commits.make_sink(cluster)
        self.query = f"query-{next(_queries)}"
        self.since = commits.ends(cluster)
        self.first = self.stage(0)
        self.second = self.first if follower == SAME else self.stage(0, digest=8 if follower == OTHER else 7)

    def stage(self, batch: int, digest: int = 7) -> Attempt:
        return commits.stage(self.cluster, CommitKey(self.query, batch), digest=digest)

    def run(self, script: Script) -> object:
        """Commit the first attempt. Return its totals, or its death."""
        with scripted(script):
            try:
                return commits.commit(self.sink, self.first)
            except Death as death:
                return death

    def finish(self) -> None:
        """Commit the second attempt and another batch, and check the queues."""
        is_conflict = False
        try:
            totals = commits.commit(self.sink, self.second)
            assert totals == CommitTotals(4, self.second.receipt.bytes, 2) or totals.skipped
        except BatchConflictError:
            is_conflict = True
        chosen = self.check([self.first, self.second])
        assert is_conflict is (chosen.receipt.digest != self.second.receipt.digest)
        self.check_next([self.first, self.second])

    def check_next(self, attempts: list[Attempt]) -> None:
        last = self.stage(1)
        assert not commits.commit(self.sink, last).skipped
        commits.check_once(commits.stored(self.cluster, self.since), attempts, [last])

    def check_prefix(self) -> bool:
        """Return whether each queue has the beginning of the first attempt."""
        found = commits.stored(self.cluster, self.since)
        return all(bodies == self.first.bodies[queue][: len(bodies)] for queue, bodies in found.items())

    def check(self, attempts: list[Attempt]) -> Attempt:
        (chosen,) = commits.check_once(commits.stored(self.cluster, self.since), attempts)
        return chosen


def die_at_each_request(cluster: RunningCluster, follower: Callable[[int], str], after: Callable[[int], bool]) -> int:
    """Let a commit die at each of its requests. Return how many these are."""
    for number in count():
        case = Case(cluster, follower(number))
        script = Script(commits.die, number, after(number))
        outcome = case.run(script)
        if not script.is_used:
            assert outcome == CommitTotals(4, case.first.receipt.bytes, 2)
            return number
        assert isinstance(outcome, Death), outcome
        case.finish()
    raise AssertionError


def is_publish(request: Request[Any]) -> bool:
    return isinstance(request, PublishRequest)


def test_a_commit_that_dies_after_any_request_is_finished(cluster: RunningCluster) -> None:
    """A death before the next request is sent is the same, unless several are in flight."""
    assert die_at_each_request(cluster, lambda number: FOLLOWERS[number % 3], lambda _: True) >= 35


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before it was sent", "after it was executed"])
@pytest.mark.parametrize("follower", FOLLOWERS)
def test_a_commit_that_dies_at_any_request_is_finished_by_each(
    cluster: RunningCluster, after: bool, follower: str
) -> None:
    assert die_at_each_request(cluster, lambda _: follower, lambda _: after) >= 35


def die_twice(cluster: RunningCluster, first_sends: int, after: bool, step: int = 1) -> None:
    """Let a commit die after this many sends, and the commit that takes over at each of its requests, or some."""
    for number in count(0, step):
        case = Case(cluster, REPEATED)
        assert isinstance(case.run(Script(commits.die, first_sends - 1, after=True, when=is_publish)), Death)
        script = Script(commits.die, number, after)
        with scripted(script), contextlib.suppress(Death):
            commits.commit(case.sink, case.second)
        if not script.is_used:
            assert number > 35
            return
        assert case.check_prefix()
        case.finish()


def test_a_take_over_that_dies_after_requests_is_finished(cluster: RunningCluster) -> None:
    die_twice(cluster, 2, after=True, step=4)


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before it was sent", "after it was executed"])
@pytest.mark.parametrize("sends", [1, 2, 3])
def test_a_take_over_that_dies_at_any_request_is_finished(cluster: RunningCluster, sends: int, after: bool) -> None:
    die_twice(cluster, sends, after)


def spoil_each_request(cluster: RunningCluster, fault: Fault, step: int = 1, begin: int = 0) -> None:
    """Spoil the answer to each request of a commit, or to some, and check that the same call finishes the batch."""
    servers = [*cluster.name_servers, *cluster.brokers.values()]
    for number in count(begin, step):
        case = Case(cluster)
        numbers = count()

        def is_due(call: Call, numbers: Iterator[int] = numbers, number: int = number) -> bool:
            return next(numbers) == number

        for server in servers:
            server.fail(None, fault, when=is_due)
        try:
            totals = commits.commit(case.sink, case.first)
        finally:
            for server in servers:
                server.heal()
        assert totals == CommitTotals(4, case.first.receipt.bytes, 2)
        case.check([case.first])
        if next(numbers) <= number:
            assert number > 30
            case.check_next([case.first])
            return


@pytest.mark.parametrize("executes", [True, False], ids=["answer lost", "request lost"])
def test_a_commit_whose_connection_breaks_at_a_request_finishes_the_batch(
    cluster: RunningCluster, executes: bool
) -> None:
    spoil_each_request(cluster, faults.closes_connection(executes=executes), step=3, begin=int(executes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        faults.closes_connection(executes=True),
        faults.closes_connection(executes=False),
        faults.garbage(),
        faults.garbage(executes=True),
        faults.half_a_frame(),
        faults.busy(),
    ],
    ids=["answer lost", "request lost", "garbage", "executed, garbage", "half a frame", "busy"],
)
def test_a_commit_with_a_spoilt_answer_to_any_request_finishes_the_batch(cluster: RunningCluster, fault: Fault) -> None:
    spoil_each_request(cluster, fault)


def freeze_at_each_request(cluster: RunningCluster, follower: Callable[[int], str], after: bool, step: int = 1) -> None:
    """Freeze a commit at each of its requests, or at some, and cut it off. Thaw it after others have gone on."""
    for number in count(0, step):
        case = Case(cluster, follower(number))
        frozen = Process(lambda case=case: commits.commit(case.sink, case.first), Script(commits.live, number, after))  # type: ignore[misc]
        if not frozen.await_hold():
            assert number > 30
            return
        for server in [*cluster.name_servers, *cluster.brokers.values()]:
            server.close_connections()
        case.finish()
        before = commits.stored(cluster, case.since)
        outcome = frozen.thaw()
        assert commits.stored(cluster, case.since) == before
        assert isinstance(outcome, CommitTotals | BatchConflictError), outcome


def test_a_frozen_commit_writes_nothing_after_others_have_gone_on(cluster: RunningCluster) -> None:
    freeze_at_each_request(cluster, lambda number: FOLLOWERS[number % 3], after=False, step=4)


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before it was sent", "after it was executed"])
@pytest.mark.parametrize("follower", FOLLOWERS)
def test_a_commit_that_is_frozen_at_any_request_writes_nothing_later(
    cluster: RunningCluster, after: bool, follower: str
) -> None:
    freeze_at_each_request(cluster, lambda _: follower, after)
