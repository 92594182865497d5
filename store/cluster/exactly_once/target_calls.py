"""Requests of one session of the sink to brokers by name, the wait for their outcomes, and the end of the session."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from rmq_spark.store.cluster.requests import Request
from rmq_spark.store.cluster.responses import Response
from rmq_spark.store.cluster.ticket import Ticket
from rmq_spark.store.errors import RmqError
from rmq_spark.store.model import QueueKey

ResponseT = TypeVar("ResponseT", bound=Response)
MAX_WAIT_MS = 1000.0  # between two looks at the connections


class SessionOverError(RmqError):
    """A session must end, because a connection ended or the outcome of a request is not known.

    Its requests may still be executed. A new session takes the intent over. Nothing was lost. Callers outside of the
    sink never see this error. `answers` are the texts of brokers that do not say whether the rows of a send are stored,
    by the target queue. An answer that may be another one later, as after a full disk, is left out.
    """

    def __init__(self, text: str, answers: Mapping[QueueKey, str] | None = None) -> None:
        super().__init__(text)
        self.answers = dict(answers or {})


class TargetCalls(Protocol):
    """The connections of one session. For one thread.

    A target broker is reached on its registered connection only. A broker that only has blobs is reached by the same
    client. Nothing is sent on another connection after one was lost.
    """

    def submit_all(
        self,
        broker: str,
        requests: Sequence[Request[ResponseT]],
        timeout_ms: int | None = None,
        done: list[Ticket[ResponseT]] | None = None,
    ) -> list[Ticket[ResponseT]]:
        """Send requests to a broker together, and return at once, as `ClusterClient.submit_all` does."""

    def take_done(self, done: list[Ticket[ResponseT]], timeout_ms: float) -> list[Ticket[ResponseT]]:
        """Return what is in `done`, as soon as a ticket is, as `ClusterClient.take_done` does."""

    def beat(self) -> None:
        """Send the heartbeats that are due. Returns at once."""

    def check(self) -> None:
        """Raise SessionOverError if a registered connection was lost."""


def take_outcomes(calls: TargetCalls, done: list[Ticket[Any]], timeout_ms: float) -> list[Ticket[Any]]:
    """Return what is in `done`, as soon as a ticket is. Return [] after `timeout_ms`, or earlier.

    Meanwhile heartbeats are sent. Raises SessionOverError if a registered connection was lost and nothing is in `done`:
    outcomes that have come tell more.
    """
    calls.beat()
    taken = calls.take_done(done, min(max(timeout_ms, 0.0), MAX_WAIT_MS))
    if not taken:
        calls.check()
    return taken


def pause(calls: TargetCalls, pause_ms: float, monotonic_ms: Callable[[], float]) -> None:
    """Wait for `pause_ms`, and send heartbeats meanwhile. Raises SessionOverError if a connection was lost."""
    until_ms = monotonic_ms() + pause_ms
    while (left_ms := until_ms - monotonic_ms()) > 0:
        take_outcomes(calls, [], left_ms)


def call_all(calls: TargetCalls, requests: Sequence[tuple[str, Request[Any]]]) -> list[Any | RmqError]:
    """Send requests to brokers by name. Return for each, in order, its response or its error.

    Raises SessionOverError if a registered connection was lost.
    """
    done: list[Ticket[Any]] = []
    numbers = {}
    for number, (broker, request) in enumerate(requests):
        (ticket,) = calls.submit_all(broker, [request], done=done)
        numbers[ticket] = number
    outcomes: list[Any | RmqError] = [None] * len(requests)
    while numbers:
        for ticket in take_outcomes(calls, done, MAX_WAIT_MS):
            outcomes[numbers.pop(ticket)] = ticket.result() if ticket.error is None else ticket.error
    calls.check()
    return outcomes
