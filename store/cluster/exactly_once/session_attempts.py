"""Sessions for one query, one after the other, until one of them ends with a result or nothing moves any more.

A session ends early when a connection is lost or a server does not answer. The next one finds out what it has left. A
broker that gives several sessions an unexpected answer for a queue will not store its rows: the batch is stuck then.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rmq_spark.store.cluster.exactly_once.commit_session import CommitSession
from rmq_spark.store.cluster.exactly_once.ledger import Ledger
from rmq_spark.store.cluster.exactly_once.ledger_rows import Intent, LastBatch, LedgerState
from rmq_spark.store.cluster.exactly_once.sink_place import SinkPlace
from rmq_spark.store.cluster.exactly_once.taking_over import OwnersRemainError
from rmq_spark.store.cluster.exactly_once.target_calls import SessionOverError
from rmq_spark.store.errors import BackendUnavailableError, RmqError, UnknownOutcomeError
from rmq_spark.store.model import CommitKey, QueueKey

_LOG = logging.getLogger("rmq_spark")
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 2.0
_LOG_MS = 60_000.0  # between two lines in the log about the same wait
_MAX_ANSWERS = 3  # of a broker to sends to one queue, to a session each
ResultT = TypeVar("ResultT")


class SessionAttempts:
    """The sessions of one call. `what` names what they are to finish, for errors. For one thread."""

    def __init__(self, place: SinkPlace, what: str) -> None:
        self._place, self._what = place, what
        self._session: CommitSession | None = None
        self._seen: tuple[LastBatch | None, Intent | None] | None = None  # what the last session has read
        self._written = 0  # the rows of the open batch that are known to be stored
        self._moved_ms = place.monotonic_ms()  # when something has moved last
        self._waits_since_ms: float | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._logged: tuple[str, float] | None = None  # the type of the last error in the log, and when
        self._answers: dict[QueueKey, list[str]] = {}  # since something has moved

    def run(self, run_session: Callable[[], ResultT | None]) -> ResultT:
        """Call `run_session` until it returns a result. After None it is called again at once.

        After an error that another session may not meet, it is called again after a pause. Raises
        BackendUnavailableError or UnknownOutcomeError if nothing has moved for brokerDownTimeout, and at once if
        earlier owners of the batch remain, because the session has waited for them itself. Raises all other errors.
        """
        while True:
            begun_ms = self._place.monotonic_ms()
            try:
                result = run_session()
            except OwnersRemainError as error:
                raise BackendUnavailableError(str(error)) from None
            except (SessionOverError, BackendUnavailableError, UnknownOutcomeError) as error:
                if isinstance(error, SessionOverError):
                    for queue, answer in error.answers.items():
                        self._answers.setdefault(queue, []).append(answer)
                self._wait(error, begun_ms)
                continue
            if result is not None:
                return result

    @contextmanager
    def open_session(self, ledger: Ledger, key: CommitKey) -> Iterator[CommitSession]:
        """Return a context manager with a session for `run`. While it waits for the ledger, `keep_alive` is called."""
        with CommitSession(self._place, ledger, key, self.refused()) as session:
            self._session = session
            try:
                yield session
            finally:
                self._session = None
                self.note_written(session.written)

    def keep_alive(self) -> None:
        """Keep the connections of the session that runs, if any, while the ledger is waited for."""
        if self._session is not None:
            self._session.keep_alive()

    def refused(self) -> dict[QueueKey, str]:
        """Return the queues to which sending is useless, because their brokers answer unexpectedly each time: why."""
        return {
            queue: f"its broker has answered {len(answers)} sessions unexpectedly, the last one with: {answers[-1]}"
            for queue, answers in self._answers.items()
            if len(answers) >= _MAX_ANSWERS
        }

    def note_state(self, state: LedgerState) -> None:
        """Note the state of the query that a session has read. A new one proves that something moves.

        Another owner of the same intent does not: each session of this call becomes one.
        """
        seen = state.last, None if state.open is None else state.open.intent
        if seen != self._seen:
            self._seen, self._written = seen, 0
            self._note_progress()

    def note_written(self, written: int) -> None:
        """Note how many rows of the open batch are known to be stored. More than before prove that something moves."""
        if written > self._written:
            self._written = written
            self._note_progress()

    def _note_progress(self) -> None:
        """Let brokerDownTimeout begin again."""
        self._waits_since_ms, self._pause_s, self._logged = None, _FIRST_PAUSE_S, None
        self._moved_ms = self._place.monotonic_ms()
        self._answers.clear()

    def _wait(self, error: RmqError, begun_ms: float) -> None:
        """Wait before the next session. Raises an error if nothing has moved for brokerDownTimeout.

        The session that ended with `error` began at `begun_ms`. It may have waited itself: for a busy broker, or for an
        answer.
        """
        now_ms = self._place.monotonic_ms()
        if self._waits_since_ms is None:
            has_waited = isinstance(error, BackendUnavailableError)
            self._waits_since_ms = max(begun_ms, self._moved_ms) if has_waited else now_ms
        cause = type(error).__name__
        if self._logged is None or self._logged[0] != cause or now_ms - self._logged[1] >= _LOG_MS:
            self._logged = cause, now_ms
            _LOG.warning("rmq: %s waits: %s", self._what, error)
        waited_ms = now_ms - self._waits_since_ms
        if waited_ms >= self._place.address.write_wait_ms:
            if isinstance(error, SessionOverError):
                error = BackendUnavailableError(f"{self._what} is not finished: {error}")
            error.add_note(f"rmq: nothing has moved for {waited_ms / 1000:.1f} s (brokerDownTimeout).")
            raise error
        self._place.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
