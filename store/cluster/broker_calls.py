"""Many requests to brokers by their names: a bounded number in flight at each, repeated while it is away.

| outcome of a request | what follows |
| --- | --- |
| a response | it is handed on, and the next request of the broker is sent |
| the broker is away, or busy for longer than the request timeout | the request is sent again later, by new routes |
| not known, without a response | the same: a broker may execute such a request twice |
| any other error | no further request is sent, and after those in flight have ended it is raised |

While a broker is away it gets one request at a time. `wait_ms` bounds how long it may be away.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.requests import Request
from rmq_spark.store.cluster.ticket import Ticket
from rmq_spark.store.cluster.write_routes import WriteRoutes
from rmq_spark.store.errors import BackendUnavailableError, RmqError, UnknownOutcomeError

_LOG = logging.getLogger("rmq_spark")

MAX_IN_FLIGHT = 16  # at each broker; brokers execute these requests in their pool for sends
_FIRST_PAUSE_MS, _LAST_PAUSE_MS = 50.0, 2000.0
_PATIENCE_MS = 200.0  # the longest time between two looks at what is paused


class Call(NamedTuple):
    """A request to the master of `broker`. The routes of `topic`, without its namespace, have the address."""

    topic: str
    broker: str
    request: Request[Any]


@dataclass(slots=True)
class _Lane:
    """The calls of one broker that have no outcome. `numbers` are those that are not in flight."""

    broker: str
    numbers: deque[int]
    in_flight: int = 0
    failures: int = 0  # in a row
    failing_since_ms: float | None = None
    paused_until_ms: float = 0.0


class BrokerCalls:
    """Runs of calls over one client. For one thread. `monotonic_ms` returns a time that never runs back."""

    def __init__(
        self, client: ClusterClient, routes: WriteRoutes, wait_ms: float, monotonic_ms: Callable[[], float]
    ) -> None:
        self._client, self._routes, self._wait_ms, self._monotonic_ms = client, routes, wait_ms, monotonic_ms
        self._error: RmqError | None = None
        self._active: dict[Ticket[Any], tuple[_Lane, int]] = {}

    def run(self, brokers: Sequence[str], make: Callable[[int], Call], on_response: Callable[[int, Any], None]) -> None:
        """Make the calls 0 to n - 1, of which call `number` goes to `brokers[number]`, and hand on each response.

        `make` returns a call by its number, again if it is repeated. `on_response` gets the number and the response.
        Raises the first error, after all calls in flight have ended.
        """
        lanes: dict[str, _Lane] = {}
        for number, broker in enumerate(brokers):
            lane = lanes.get(broker)
            if lane is None:
                lane = lanes[broker] = _Lane(broker, deque())
            lane.numbers.append(number)
        self._error = None
        done: list[Ticket[Any]] = []
        try:
            while self._active or (self._error is None and any(lane.numbers for lane in lanes.values())):
                if self._error is None:
                    for lane in lanes.values():
                        self._submit(lane, make, done)
                for ticket in self._client.take_done(done, _PATIENCE_MS if self._active else self._pause_ms(lanes)):
                    self._take(ticket, make, on_response)
        finally:
            self._client.forget(list(self._active))
            self._active.clear()
        if self._error is not None:
            raise self._error

    def _pause_ms(self, lanes: dict[str, _Lane]) -> float:
        """Return how long to wait if nothing is in flight: until the first broker is asked again."""
        first_ms = min((lane.paused_until_ms for lane in lanes.values() if lane.numbers), default=0.0)
        return min(max(first_ms - self._monotonic_ms(), 0.0), _PATIENCE_MS)

    def _submit(self, lane: _Lane, make: Callable[[int], Call], done: list[Ticket[Any]]) -> None:
        if lane.paused_until_ms > self._monotonic_ms():
            return
        while lane.numbers and lane.in_flight < (1 if lane.failures else MAX_IN_FLIGHT) and self._error is None:
            number = lane.numbers.popleft()
            call = make(number)
            try:
                to = self._find_address(call)
            except BackendUnavailableError as error:
                self._repeat(lane, number, call.topic, error)
                return
            (ticket,) = self._client.submit_all(to, [call.request], done=done)
            self._active[ticket] = lane, number
            lane.in_flight += 1

    def _find_address(self, call: Call) -> str:
        if self._routes.book.address(call.broker) is None:
            self._routes.renew(call.topic)
        return self._routes.address(call.broker)

    def _take(self, ticket: Ticket[Any], make: Callable[[int], Call], on_response: Callable[[int, Any], None]) -> None:
        lane, number = self._active.pop(ticket)
        lane.in_flight -= 1
        error = ticket.error
        if error is None:
            lane.failing_since_ms, lane.failures = None, 0
            on_response(number, ticket.result())
        elif isinstance(error, BackendUnavailableError) or (
            isinstance(error, UnknownOutcomeError) and not ticket.is_answered
        ):
            self._repeat(lane, number, make(number).topic, error)
        else:
            self._fail(error)

    def _repeat(self, lane: _Lane, number: int, topic: str, error: RmqError) -> None:
        """Make a call again later, or end if its broker was away for too long."""
        now_ms = self._monotonic_ms()
        lane.numbers.appendleft(number)
        if lane.failing_since_ms is None:
            lane.failing_since_ms = now_ms
            _LOG.warning("rmq: requests to broker %s wait: %s", lane.broker, error)
        if lane.paused_until_ms <= now_ms:  # the calls that were in flight together count as one failure
            lane.failures += 1
            lane.paused_until_ms = now_ms + min(_FIRST_PAUSE_MS * 2 ** (lane.failures - 1), _LAST_PAUSE_MS)
        self._routes.renew(topic)
        waited_ms = now_ms - lane.failing_since_ms
        if waited_ms >= self._wait_ms:
            error.add_note(f"rmq: broker {lane.broker} was away for {waited_ms / 1000:.1f} s (brokerDownTimeout).")
            self._fail(error)

    def _fail(self, error: RmqError) -> None:
        if self._error is None:
            self._error = error
