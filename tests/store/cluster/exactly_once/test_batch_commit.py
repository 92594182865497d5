"""The commit of a batch: which batch may follow which, what is returned, and how long it waits."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import exact_commits as commits
from support.exact_commits import A, B, Death, Process, Script, scripted, stage

from rmq_spark.store.backend import CommitTotals
from rmq_spark.store.cluster.codes import RequestCode, ResponseCode
from rmq_spark.store.cluster.exactly_once.commit_session import CommitSession
from rmq_spark.store.cluster.exactly_once.ledger import Ledger
from rmq_spark.store.cluster.exactly_once.ledger_messages import AppendRequest
from rmq_spark.store.cluster.exactly_once.marks import Mark, marks_group
from rmq_spark.store.cluster.exactly_once.publishing import PublishRequest
from rmq_spark.store.cluster.producer_requests import ProducerHeartbeatRequest, ProducersRequest
from rmq_spark.store.errors import BackendUnavailableError, BatchConflictError, IntentStuckError
from rmq_spark.store.model import CommitKey
from rmq_spark.store.testing.backend_groups import eventually
from rmq_spark.store.testing.brokers import RunningCluster, faults

SEND_BATCH = RequestCode.SEND_BATCH_MESSAGE


@pytest.fixture(scope="module", params=["5.3", pytest.param("4.9", marks=pytest.mark.slow)])
def cluster(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[RunningCluster]:
    """A cluster for all tests here, which each have a query of their own."""
    path: Path = tmp_path_factory.mktemp("cluster")
    with RunningCluster(path, release=request.param, brokers=2) as cluster:
        yield commits.prepare(cluster)


@pytest.fixture(autouse=True)
def _healthy(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    commits.hurry(monkeypatch)
    with commits.watched_requests():
        yield
    for broker in cluster.brokers.values():
        broker.heal()


@pytest.fixture
def query(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def write(cluster: RunningCluster, query: str, batch: int | None, *, digest: int = 7, **terms: Any) -> CommitTotals:
    return commits.commit(commits.make_sink(cluster, **terms), stage(cluster, CommitKey(query, batch), digest=digest))


def marks(cluster: RunningCluster, query: str) -> dict[int, int]:
    known = cluster.brokers[A.broker].offsets.committed
    return {queue.queue_id: offset for (group, queue), offset in known.items() if group == marks_group(query)}


# What is returned.


def test_totals_are_those_of_the_batch(cluster: RunningCluster, query: str) -> None:
    attempt = stage(cluster, CommitKey(query, 0), {A: (1, 2), B: (3,)})
    totals = commits.commit(commits.make_sink(cluster), attempt)
    assert totals == CommitTotals(6, sum(run.size for run in attempt.receipt.runs), 2)


def test_a_repeated_batch_is_skipped(cluster: RunningCluster, query: str) -> None:
    write(cluster, query, 0)
    before = commits.stored(cluster)
    assert write(cluster, query, 0) == CommitTotals(skipped=True)
    assert commits.stored(cluster) == before


def test_receipts_of_several_tasks_are_one_batch(cluster: RunningCluster, query: str) -> None:
    since = commits.ends(cluster)
    first, second = (stage(cluster, CommitKey(query, 0)) for _ in range(2))
    assert commits.commit(commits.make_sink(cluster), first, second).rows == 8
    commits.check_once(commits.stored(cluster, since), [first], [second])


def test_an_empty_batch_is_noted_and_followed(cluster: RunningCluster, query: str) -> None:
    sink, key = commits.make_sink(cluster), CommitKey(query, 0)
    assert sink.commit(key, []) == CommitTotals(0, 0, 0)
    assert sink.commit(key, []) == CommitTotals(skipped=True)
    assert write(cluster, query, 1).rows == 4
    with pytest.raises(BatchConflictError, match="the last batch in the store is 1"):
        sink.commit(key, [])


def test_an_empty_batch_after_a_gap_is_refused(cluster: RunningCluster, query: str) -> None:
    write(cluster, query, 0)
    with pytest.raises(BatchConflictError, match="so 1 would be missing"):
        commits.make_sink(cluster).commit(CommitKey(query, 2), [])


@pytest.mark.parametrize("release", ["4.9", "5.3"])
def test_an_empty_batch_is_known_after_its_row_has_expired(
    run_cluster: Callable[..., RunningCluster], query: str, release: str
) -> None:
    cluster = commits.prepare(run_cluster(release=release, brokers=2))
    write(cluster, query, 0)
    assert commits.make_sink(cluster).commit(CommitKey(query, 1), []) == CommitTotals(0, 0, 0)
    assert (marks(cluster, query)[Mark.BEGUN], marks(cluster, query)[Mark.DONE]) == (2, 2)
    write(cluster, "other", 0)
    expire_ledger(cluster, keeps=1)
    assert write(cluster, query, 2).rows == 4


@pytest.mark.parametrize("release", ["4.9", "5.3"])
def test_a_batch_that_has_just_begun_is_finished_after_older_rows_have_expired(
    run_cluster: Callable[..., RunningCluster], query: str, release: str
) -> None:
    """The mark from is stored for a new query too, where 4.9 answers 0 for a mark that does not exist."""
    cluster = commits.prepare(run_cluster(release=release, brokers=2))
    write(cluster, "other", 0)
    since, attempt = commits.ends(cluster), stage(cluster, CommitKey(query, 0))
    script = Script(commits.die, 0, after=True, when=lambda request: isinstance(request, AppendRequest))
    with scripted(script), contextlib.suppress(Death):
        commits.commit(commits.make_sink(cluster), attempt)
    assert script.is_dead
    expire_ledger(cluster, keeps=2)
    commits.commit(commits.make_sink(cluster), attempt)
    commits.check_once(commits.stored(cluster, since), [attempt])


def expire_ledger(cluster: RunningCluster, *, keeps: int) -> None:
    """Let all rows of the ledger expire but the last ones."""
    broker = cluster.brokers[A.broker]
    broker.expire(commits.LEDGER, 0, broker.bounds(commits.LEDGER)[0].max_offset - keeps)


# Which batch may follow.


def test_a_batch_with_other_rows_is_a_conflict(cluster: RunningCluster, query: str) -> None:
    write(cluster, query, 0)
    before = commits.stored(cluster)
    with pytest.raises(BatchConflictError, match="the batch to write has 4 rows with the digest 0000000000000008"):
        write(cluster, query, 0, digest=8)
    assert write(cluster, query, 0, digest=8, on_conflict="skip") == CommitTotals(skipped=True)
    assert commits.stored(cluster) == before


def test_a_batch_after_a_gap_is_refused_or_accepted(cluster: RunningCluster, query: str) -> None:
    write(cluster, query, 0)
    with pytest.raises(BatchConflictError, match=r"so 1 to 2 would be missing. Either the ledger was lost or replaced"):
        write(cluster, query, 3)
    assert write(cluster, query, 3, on_gap="continue").rows == 4
    assert write(cluster, query, 4).rows == 4


def test_the_first_batch_of_an_unknown_query_must_be_0(cluster: RunningCluster, query: str) -> None:
    with pytest.raises(BatchConflictError, match="the ledger has no batch of this query"):
        write(cluster, query, 5)
    assert marks(cluster, query) == {}
    assert write(cluster, query, 5, on_gap="continue").rows == 4


def test_a_version_of_a_transaction_may_leave_a_gap_and_an_older_one_is_passed(
    cluster: RunningCluster, query: str
) -> None:
    assert write(cluster, query, 7, is_transaction=True).rows == 4
    assert write(cluster, query, 12, is_transaction=True).rows == 4
    assert write(cluster, query, 7, is_transaction=True) == CommitTotals(skipped=True)
    assert write(cluster, query, 12, is_transaction=True) == CommitTotals(skipped=True)
    with pytest.raises(BatchConflictError, match="Give every write of an application a txnVersion of its own"):
        write(cluster, query, 12, digest=8, is_transaction=True)


def test_a_plain_batch_write_is_stored_and_keeps_no_marks(cluster: RunningCluster, query: str) -> None:
    since = commits.ends(cluster)
    attempt = stage(cluster, CommitKey(query))
    assert commits.commit(commits.make_sink(cluster), attempt).rows == 4
    commits.check_once(commits.stored(cluster, since), [attempt])
    assert marks(cluster, query) == {}


def test_a_plain_batch_write_finishes_itself(cluster: RunningCluster, query: str) -> None:
    since = commits.ends(cluster)
    cluster.brokers[B.broker].fail(SEND_BATCH, faults.closes_connection(), times=1)
    attempt = stage(cluster, CommitKey(query))
    assert commits.commit(commits.make_sink(cluster), attempt) == CommitTotals(4, attempt.receipt.bytes, 2)
    commits.check_once(commits.stored(cluster, since), [attempt])


# Before the intent.


def test_before_commit_is_called_once_however_many_sessions_there_are(cluster: RunningCluster, query: str) -> None:
    cluster.brokers[B.broker].fail(RequestCode.HEART_BEAT, faults.closes_connection(), times=2)
    cluster.brokers[A.broker].fail(SEND_BATCH, faults.closes_connection(executes=False), times=2)
    calls: list[dict[int, int]] = []
    attempt = stage(cluster, CommitKey(query, 0))
    sink = commits.make_sink(cluster)
    assert sink.commit(attempt.receipt.key, [attempt.receipt], lambda: calls.append(marks(cluster, query))).rows == 4
    assert len(calls) == 1
    assert calls[0][1] == 1  # the mark begun
    assert not sink.commit(attempt.receipt.key, [attempt.receipt], lambda: calls.append({})).rows
    assert len(calls) == 1


def test_an_error_before_the_intent_promises_nothing(cluster: RunningCluster, query: str) -> None:
    since = commits.ends(cluster)
    attempt, other = (stage(cluster, CommitKey(query, 0), digest=digest) for digest in (7, 8))

    def refuse() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        commits.make_sink(cluster).commit(attempt.receipt.key, [attempt.receipt], refuse)
    assert commits.commit(commits.make_sink(cluster), other).rows == 4
    commits.check_once(commits.stored(cluster, since), [other])


# How long it waits.


def test_a_batch_that_does_not_come_on_is_an_error_after_a_time(cluster: RunningCluster, query: str) -> None:
    """Each session that tries is an owner of the batch, and that is no progress."""
    rule = cluster.brokers[B.broker].fail(SEND_BATCH, faults.closes_connection(executes=False))
    attempt = stage(cluster, CommitKey(query, 0))
    with pytest.raises(BackendUnavailableError, match="is not finished: ") as caught:
        commits.commit(commits.make_sink(cluster, wait_ms=300), attempt)
    assert "(brokerDownTimeout)" in caught.value.__notes__[0]
    assert rule.count > 1
    cluster.brokers[B.broker].heal()
    since = {queue: end - len(attempt.bodies[queue]) for queue, end in commits.ends(cluster).items()} | {
        B: commits.ends(cluster)[B]
    }
    assert commits.commit(commits.make_sink(cluster), attempt).skipped  # finished, and found to be stored
    commits.check_once(commits.stored(cluster, since), [attempt])


def test_a_broker_whose_answers_stay_unknown_makes_the_batch_stuck(cluster: RunningCluster, query: str) -> None:
    """The rows are looked for after each answer, so it is known in the end that they are not stored."""
    rule = cluster.brokers[B.broker].fail(SEND_BATCH, faults.with_code(1, "java.lang.IllegalStateException: plug-in"))
    attempt = stage(cluster, CommitKey(query, 0), {A: (3,), B: (2,)})
    with pytest.raises(IntentStuckError, match=r"has answered 3 sessions unexpectedly, .*plug-in") as caught:
        commits.commit(commits.make_sink(cluster), attempt)
    assert (caught.value.written, caught.value.missing) == (3, 2)
    assert rule.count == 4  # the intent was new after the first answer: something had moved
    cluster.brokers[B.broker].heal()
    assert commits.commit(commits.make_sink(cluster), attempt).skipped  # finished first


@pytest.mark.parametrize(
    "fault",
    [faults.disk_full(), faults.with_code(1, "[PC_SYNCHRONIZED]broker busy, start flow control for a while")],
    ids=["disk", "page cache"],
)
def test_a_broker_that_may_store_rows_later_is_waited_for(
    cluster: RunningCluster, query: str, fault: faults.Fault
) -> None:
    rule = cluster.brokers[B.broker].fail(SEND_BATCH, fault, times=5)
    attempt = stage(cluster, CommitKey(query, 0), {B: (2,)})
    assert commits.commit(commits.make_sink(cluster), attempt).rows == 2
    assert rule.count == 5


def test_a_broker_that_stays_busy_is_waited_for_once(cluster: RunningCluster, query: str) -> None:
    cluster.brokers[B.broker].fail(SEND_BATCH, faults.busy())
    attempt, ledger = stage(cluster, CommitKey(query, 0), {B: (2,)}), cluster.brokers[A.broker]
    begin = ledger.bounds(commits.LEDGER)[0].max_offset
    with pytest.raises(BackendUnavailableError, match=r"it is busy, for .* expected a broker with capacity"):
        commits.commit(commits.make_sink(cluster, wait_ms=100), attempt)
    assert ledger.bounds(commits.LEDGER)[0].max_offset == begin + 1, "no second session has taken the batch over"
    cluster.brokers[B.broker].heal()
    assert commits.commit(commits.make_sink(cluster), attempt).skipped  # finished first


def test_progress_lets_it_wait_longer(cluster: RunningCluster, query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each session stores one run, and the time to wait is over after each."""
    broker = cluster.brokers[A.broker]
    broker.fail(SEND_BATCH, faults.closes_connection(executes=True), times=4)
    attempt = stage(cluster, CommitKey(query, 0), {A: (1, 1, 1, 1, 1)})
    assert commits.commit(commits.make_sink(cluster, wait_ms=1), attempt).rows == 5


def test_a_session_that_may_still_send_is_waited_for_and_named(cluster: RunningCluster, query: str) -> None:
    since = commits.ends(cluster)
    attempt = stage(cluster, CommitKey(query, 0))
    script = Script(commits.live, 0, when=lambda request: isinstance(request, PublishRequest))
    frozen = Process(lambda: commits.commit(commits.make_sink(cluster), attempt), script)
    assert frozen.await_hold()
    other = commits.make_sink(cluster, fence_timeout_ms=30)
    for _ in range(2):  # the second one waits for the author, and not for the first one, which has ended
        with pytest.raises(BackendUnavailableError, match=r"still lists \d+#rmq-spark-sink#\w+ at 127.0.0.1:\d+"):
            commits.commit(other, attempt)
    assert commits.stored(cluster, since) == {A: [], B: []}
    assert isinstance(frozen.thaw(), CommitTotals)
    commits.check_once(commits.stored(cluster, since), [attempt])


def test_a_read_back_that_gets_no_answer_ends_after_a_time(cluster: RunningCluster, query: str) -> None:
    since, attempt = commits.ends(cluster), stage(cluster, CommitKey(query, 0))
    script = Script(commits.die, 1, after=True, when=lambda request: isinstance(request, PublishRequest))
    with scripted(script), contextlib.suppress(Death):
        commits.commit(commits.make_sink(cluster), attempt)
    for broker in cluster.brokers.values():
        broker.fail(
            RequestCode.PULL_MESSAGE,
            faults.with_code(ResponseCode.PULL_RETRY_IMMEDIATELY),
            when=lambda call: call.command.fields["topic"] == commits.TOPIC,
        )
    waiting = Process(lambda: commits.commit(commits.make_sink(cluster, wait_ms=100), attempt))
    assert eventually(lambda: waiting.has_ended)
    assert isinstance(waiting.thaw(), BackendUnavailableError)
    for broker in cluster.brokers.values():
        broker.heal()
    commits.commit(commits.make_sink(cluster), attempt)
    commits.check_once(commits.stored(cluster, since), [attempt])


@pytest.mark.parametrize("name", [A.broker, B.broker])
def test_a_batch_waits_while_a_slave_acts_for_its_master(
    run_cluster: Callable[..., RunningCluster], query: str, name: str
) -> None:
    """A slave that acts for its master stores nothing, and its topics are listed without write permission (5.x)."""
    cluster = commits.prepare(run_cluster(brokers=2))
    attempt = stage(cluster, CommitKey(query, 0))
    slave = cluster.add_slave(name)
    cluster.brokers[name].kill()
    slave.act_as_master()
    with pytest.raises(BackendUnavailableError, match=f"broker {name} (has an acting|with a) master"):
        commits.commit(commits.make_sink(cluster, wait_ms=1), attempt)
    slave.kill()
    cluster.brokers[name].restart()
    assert commits.commit(commits.make_sink(cluster), attempt).rows == 4
    commits.check_once(commits.stored(cluster), [attempt])


@pytest.mark.parametrize("number", range(2))
def test_a_broker_that_one_name_server_does_not_list_is_found_at_the_other(
    run_cluster: Callable[..., RunningCluster], query: str, number: int
) -> None:
    """One that cannot reach it, for example. The batch is written, and then one is taken over."""
    cluster = commits.prepare(run_cluster(brokers=2, name_servers=2))
    first, second = (stage(cluster, CommitKey(query, number)) for number in range(2))
    cluster.name_servers[number].forget(B.broker)
    assert commits.commit(commits.make_sink(cluster, wait_ms=1), first).rows == 4
    script = Script(commits.die, 0, when=lambda request: isinstance(request, PublishRequest))
    with scripted(script), contextlib.suppress(Death):
        commits.commit(commits.make_sink(cluster), second)
    commits.commit(commits.make_sink(cluster, wait_ms=1), second)
    commits.check_once(commits.stored(cluster), [first], [second])


def test_a_session_registers_again_just_before_its_row(cluster: RunningCluster, query: str) -> None:
    """5.3 may lose the entry of a session that registers when the last other one leaves, as at a take-over."""
    attempt = stage(cluster, CommitKey(query, 0))
    kinds = (ProducerHeartbeatRequest, ProducersRequest, AppendRequest)
    for act in (commits.die, commits.live):  # the author, and the session that takes over
        script = Script(act, 8, after=True, when=lambda request: isinstance(request, kinds))
        with scripted(script), contextlib.suppress(Death):
            commits.commit(commits.make_sink(cluster), attempt)
        once = ["ProducerHeartbeatRequest"] * 2 + ["ProducersRequest"] * 2
        assert script.seen[:9] == [*once, *once, "AppendRequest"]


def test_a_session_that_has_ended_is_not_kept_alive(
    cluster: RunningCluster, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger may be waited for between two sessions of one commit."""
    ended: set[CommitSession] = set()
    leave, keep, read = CommitSession.__exit__, CommitSession.keep_alive, Ledger.read

    def noted_exit(session: CommitSession, *rest: object) -> None:
        ended.add(session)
        leave(session, *rest)

    def checked_keep(session: CommitSession) -> None:
        assert session not in ended
        keep(session)

    def waiting_read(ledger: Ledger, *rest: Any) -> Any:
        ledger._pause(1)
        return read(ledger, *rest)

    monkeypatch.setattr(CommitSession, "__exit__", noted_exit)
    monkeypatch.setattr(CommitSession, "keep_alive", checked_keep)
    monkeypatch.setattr(Ledger, "read", waiting_read)
    cluster.brokers[B.broker].fail(SEND_BATCH, faults.closes_connection(), times=1)
    assert write(cluster, query, 0).rows == 4
    assert len(ended) == 2


def test_another_broker_at_the_address_of_a_target_gets_nothing(
    run_cluster: Callable[..., RunningCluster], query: str
) -> None:
    """A name server may have an old route, whose address another broker has by now."""
    cluster = commits.prepare(run_cluster(brokers=2))
    attempt = stage(cluster, CommitKey(query, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rmq_spark.store.cluster.exactly_once.staged_checks._check_blobs", lambda *_: None)
        cluster.brokers[B.broker].advertise(cluster.brokers[A.broker].address)
        with pytest.raises(
            BackendUnavailableError, match="broker broker-a has answered at the address of broker broker"
        ):
            commits.commit(commits.make_sink(cluster, wait_ms=300), attempt)
    assert commits.stored(cluster) == {A: [], B: []}
    cluster.brokers[B.broker].advertise(None)
    assert commits.commit(commits.make_sink(cluster), attempt).rows == 4
    commits.check_once(commits.stored(cluster), [attempt])
