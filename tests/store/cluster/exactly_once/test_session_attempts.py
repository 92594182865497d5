"""Sessions, one after the other: when the next one begins, what the log says meanwhile, and when they are given up."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from support import exact_commits as commits
from support.exact_commits import A, B
from support.sent_messages import address_of

from rmq_spark.store.backend import CommitTerms
from rmq_spark.store.cluster.exactly_once.ledger_rows import LastBatch, LedgerState
from rmq_spark.store.cluster.exactly_once.session_attempts import SessionAttempts
from rmq_spark.store.cluster.exactly_once.sink_place import SinkPlace, open_place
from rmq_spark.store.cluster.exactly_once.taking_over import OwnersRemainError
from rmq_spark.store.cluster.exactly_once.target_calls import SessionOverError
from rmq_spark.store.errors import BackendUnavailableError, NoPermissionError
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import RunningCluster

MINUTE_MS = 60_000
REFUSED = "its broker has answered 3 sessions unexpectedly, the last one with:"


@dataclass
class Clock:
    """A clock that moves only while somebody sleeps."""

    time_ms: float = 0.0

    def monotonic_ms(self) -> float:
        return self.time_ms

    def sleep(self, time_s: float) -> None:
        self.time_ms += 1000 * time_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_place(run_cluster: Callable[..., RunningCluster], clock: Clock) -> Iterator[Callable[[int], SinkPlace]]:
    """A function that returns a place whose commits wait for this many ms."""
    cluster = commits.prepare(run_cluster(brokers=2))
    places = []

    def make(wait_ms: int) -> SinkPlace:
        opened = open_place(address_of(cluster, broker_down_timeout_ms=wait_ms), CommitTerms())
        places.append(opened)
        return replace(opened.__enter__(), monotonic_ms=clock.monotonic_ms, sleep=clock.sleep)

    yield make
    for opened in places:
        opened.__exit__(None, None, None)


def session_of(*errors: Exception) -> Callable[[], str]:
    """Return a session that raises these errors, one after the other, and returns "done" then."""
    left = list(errors)

    def run() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return run


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return found


def test_the_log_says_what_a_batch_waits_for_when_that_changes_and_each_minute(
    make_place: Callable[[int], SinkPlace], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = SessionAttempts(make_place(0), "batch 7")
    lost, away = SessionOverError("the connection is lost"), BackendUnavailableError("the ledger is nowhere")
    assert attempts.run(session_of(lost, lost, away, away)) == "done"
    assert lines(caplog) == ["rmq: batch 7 waits: the connection is lost", "rmq: batch 7 waits: the ledger is nowhere"]
    assert clock.time_ms < MINUTE_MS
    assert attempts.run(session_of(*[away] * 65)) == "done"
    assert 2 * MINUTE_MS < clock.time_ms < 3 * MINUTE_MS
    assert lines(caplog) == ["rmq: batch 7 waits: the ledger is nowhere"] * 2


def test_a_call_is_given_up_when_nothing_has_moved_for_the_time(
    make_place: Callable[[int], SinkPlace], clock: Clock
) -> None:
    attempts = SessionAttempts(make_place(MINUTE_MS), "batch 7")
    with pytest.raises(BackendUnavailableError, match=r"batch 7 is not finished: the connection is lost") as caught:
        attempts.run(session_of(*[SessionOverError("the connection is lost")] * 1000))
    assert "nothing has moved for" in caught.value.__notes__[0]
    assert MINUTE_MS <= clock.time_ms < MINUTE_MS + 2000


def test_progress_lets_the_time_begin_again(make_place: Callable[[int], SinkPlace], clock: Clock) -> None:
    attempts = SessionAttempts(make_place(MINUTE_MS), "batch 7")
    begun = iter(range(100))

    def run() -> str:
        number = next(begun)
        attempts.note_state(LedgerState(LastBatch(number // 25), None, 0))
        if number == 99:
            return "done"
        raise BackendUnavailableError("the ledger is nowhere")

    assert attempts.run(run) == "done"
    assert clock.time_ms > 2 * MINUTE_MS


@pytest.mark.parametrize(
    ("error", "raised"),
    [(NoPermissionError("no"), NoPermissionError), (OwnersRemainError("it lives"), BackendUnavailableError)],
)
def test_an_error_that_another_session_meets_again_is_final(
    make_place: Callable[[int], SinkPlace], error: Exception, raised: type[Exception]
) -> None:
    with pytest.raises(raised) as caught:
        SessionAttempts(make_place(0), "batch 7").run(session_of(error))
    assert type(caught.value) is raised, "users import the class from rmq_spark"


@pytest.mark.parametrize(("written", "session_count"), [(0, 1), (1, 2)])
def test_a_session_that_waits_itself_waits_for_all(
    make_place: Callable[[int], SinkPlace], clock: Clock, written: int, session_count: int
) -> None:
    """For a busy broker, for example. If it has moved something before, there is another one."""
    attempts, sessions = SessionAttempts(make_place(MINUTE_MS), "batch 7"), []

    def run() -> str:
        sessions.append(clock.time_ms)
        attempts.note_state(LedgerState())
        clock.sleep(60)
        attempts.note_written(written)
        raise BackendUnavailableError("the broker is busy")

    with pytest.raises(BackendUnavailableError, match="busy"):
        attempts.run(run)
    assert len(sessions) == session_count


@pytest.mark.parametrize(
    ("answers", "refused"),
    [
        ([{A: "no"}, {A: "no"}], {}),
        ([{A: "no"}, {B: "no"}, {A: "no"}, {B: "no"}], {}),
        ([{}, {}, {}], {}),  # no answer came
        ([{A: "no"}, {B: "no"}, {A: "no"}, {A: "at 10:42: no"}], {A: f"{REFUSED} at 10:42: no"}),
        ([{A: "no", B: "never"}] * 3, {A: f"{REFUSED} no", B: f"{REFUSED} never"}),
    ],
)
def test_a_queue_is_refused_when_its_broker_answers_three_sessions_unexpectedly(
    make_place: Callable[[int], SinkPlace], answers: list[dict[QueueKey, str]], refused: dict[QueueKey, str]
) -> None:
    attempts = SessionAttempts(make_place(0), "batch 7")
    attempts.run(session_of(*[SessionOverError("unknown", one) for one in answers]))
    assert attempts.refused() == refused
    attempts.note_written(1)
    assert attempts.refused() == {}, "more rows are stored: something moves"
