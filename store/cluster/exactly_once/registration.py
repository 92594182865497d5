"""The connections of one session to the brokers of its targets, and its registration as a producer at each of them.

A broker lists a producer as long as its connection lasts. So a session that is not listed any more cannot send, and
another session that does not find it in the list may publish in its place. That holds because a session has one
connection to each broker and never a second one: if one of them ends, the session is over.

A session registers before its row is in the ledger, and another one asks who is registered after it has read this row.
An answer that does not list the asking session itself proves nothing: a broker of 5.3 can lose a new entry when the
last other connection of the group ends at the same moment. A second heartbeat brings the entry back.

To wait for a slow broker costs less than a new session. So requests have five times the usual time.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.exactly_once.target_calls import SessionOverError
from rmq_spark.store.cluster.heartbeats import FORGOTTEN_S, HeartbeatSchedule
from rmq_spark.store.cluster.namespace import wrap_name
from rmq_spark.store.cluster.producer_requests import (
    ProducerHeartbeatRequest,
    ProducersRequest,
    ProducersResponse,
    UnregisterProducerRequest,
)
from rmq_spark.store.cluster.requests import Request
from rmq_spark.store.cluster.responses import Response
from rmq_spark.store.cluster.ticket import Ticket
from rmq_spark.store.errors import BrokerError, RmqError

ResponseT = TypeVar("ResponseT", bound=Response)

TIMEOUT_FACTOR = 5  # of the time of a request (requestTimeout)
MAX_TRIES = 5  # registrations until a broker lists the session
_PAUSE_MS = 20.0  # before the second registration; each further pause is twice as long
_PATIENCE_MS = 500.0  # the longest time between two looks at the connections and heartbeats
_FAREWELL_MS = 1000  # for the answer of a broker to the farewell


class Registration:
    """A session as a producer of `group` at brokers, with the id `client_id`. For one thread.

    `group` is without the namespace of `address`. No other session ever had the id. `monotonic_s` returns a time in s
    that never runs back.

    Every method but `close` raises SessionOverError if a connection has ended, whether it was in use or not. The
    session must send nothing more then. Heartbeats are sent by `beat`, and by each method that waits, so call one of
    them at least every 30 s. Use it in `with`: it closes the connections without a farewell.
    """

    def __init__(
        self,
        address: ClusterAddress,
        group: str,
        client_id: str,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client_id = client_id
        self._group = wrap_name(address.namespace, group)
        self._monotonic_s = monotonic_s
        self._client = ClusterClient(address, monotonic_s, connects_once=True)
        self._addresses: dict[str, str] = {}
        self._reached: dict[str, str] = {}  # brokers at which the session is not registered
        self._timeout_ms = TIMEOUT_FACTOR * address.request_timeout_ms
        self._schedule = HeartbeatSchedule()
        self._beats: dict[Ticket[Any], str] = {}  # heartbeats without an outcome that was noted, and their brokers
        self._ended_beats: list[Ticket[Any]] = []  # those of them that have an outcome
        self._refusals: dict[str, RmqError] = {}  # the errors of the last heartbeats, by broker

    def __enter__(self) -> "Registration":
        return self

    def __exit__(self, *_: object) -> None:
        self.close(unregisters=False)

    def register(self, brokers: Mapping[str, str]) -> None:
        """Register at further brokers, given as the addresses of their masters by name.

        When it returns, each of them lists the session. Raises BrokerError if one still does not after 5 heartbeats,
        NoPermissionError if the account may not ask for the list, and the errors of brokers that refuse a request.
        """
        self.check()
        new = {name: to for name, to in brokers.items() if name not in self._addresses}
        self._client.name_brokers({to: name for name, to in new.items()})
        self._addresses |= new
        self._schedule.change_brokers(self._addresses, self._monotonic_s())
        self._register(new)

    def reach(self, brokers: Mapping[str, str]) -> None:
        """Let requests go to these brokers too, given as addresses by name. The session is not registered there."""
        self._reached |= brokers

    def register_again(self) -> None:
        """Register at all brokers again. Errors as in `register`.

        Do it just before a row of the ledger names the session. A broker of 5.x may forget a session that registers at
        the moment in which the last other session of the group leaves, and then keeps it from the next heartbeat on
        (ProducerManager#registerProducer and #unregisterProducer, 5.3, do not exclude each other).
        """
        self._register(self._addresses)

    def producers(self, brokers: Collection[str]) -> dict[str, Mapping[str, str]]:
        """Return for each broker the addresses of the producers of the group, by client id. This session is among them.

        Call it when a row of the ledger names the session. If a broker does not list the session, others may take it
        for ended: then it raises SessionOverError, and never registers again. Raises NoPermissionError if the account
        may not ask for the list, and the errors of brokers that refuse a request.
        """
        found = self._ask_for_producers(brokers)
        for broker, addresses in found.items():
            if self.client_id not in addresses:
                raise SessionOverError(
                    f"the session {self.client_id} is over: broker {broker} at {self._addresses[broker]} does not list "
                    "it any more; expected all sessions that are connected. A new session finishes the batch."
                )
        return found

    def call(self, broker: str, request: Request[ResponseT], timeout_ms: int | None = None) -> ResponseT:
        """Send a request to a broker, and return the response. Raises the errors of `ClusterClient.call`.

        The deadline is `timeout_ms` from this call, by default five times the request timeout.
        """
        done: list[Ticket[ResponseT]] = []
        self.submit_all(broker, [request], timeout_ms, done)
        while True:
            for ticket in self.take_done(done, _PATIENCE_MS):
                return ticket.result()

    def submit(
        self,
        broker: str,
        request: Request[ResponseT],
        timeout_ms: int | None = None,
        done: list[Ticket[ResponseT]] | None = None,
    ) -> Ticket[ResponseT]:
        """Send a request to a broker, and return at once, as `submit_all` does."""
        return self.submit_all(broker, [request], timeout_ms, done)[0]

    def submit_all(
        self,
        broker: str,
        requests: Sequence[Request[ResponseT]],
        timeout_ms: int | None = None,
        done: list[Ticket[ResponseT]] | None = None,
    ) -> list[Ticket[ResponseT]]:
        """Send requests to a broker together, and return at once. Deadline as in `call`.

        Otherwise like `ClusterClient.submit_all`.
        """
        self.check()
        to = self._addresses.get(broker) or self._reached[broker]
        return self._client.submit_all(to, requests, timeout_ms or self._timeout_ms, done)

    def take_done(self, done: list[Ticket[ResponseT]], timeout_ms: float) -> list[Ticket[ResponseT]]:
        """Return what is in `done`, as soon as a ticket is, and remove it. Return [] if none is after `timeout_ms`.

        `done` is a list that was given to `submit_all`. Tickets of a connection that has ended are not returned: the
        session is over then.
        """
        until_s = self._monotonic_s() + timeout_ms / 1000
        while True:
            left_ms = max(until_s - self._monotonic_s(), 0.0) * 1000
            self.beat()
            found = self._client.take_done(done, min(left_ms, _PATIENCE_MS))
            self.check()
            if found or self._monotonic_s() >= until_s:
                return found

    def wait(self, timeout_ms: float) -> None:
        """Wait for `timeout_ms`, and send heartbeats meanwhile."""
        self.take_done([], timeout_ms)

    def beat(self) -> None:
        """Send the heartbeats that are due, and take the answers to earlier ones. It does not wait."""
        self.check()
        self._note_beats(0)
        request = ProducerHeartbeatRequest(self.client_id, self._group)
        for broker in self._schedule.take_due(self._monotonic_s()):
            to = self._addresses[broker]
            (ticket,) = self._client.submit_all(to, [request], self._timeout_ms, self._ended_beats)
            self._beats[ticket] = broker

    def check(self) -> None:
        """Raise SessionOverError if a connection has ended, or a broker may have forgotten the session."""
        self._client.work(0)
        for broker, to in self._addresses.items():
            end = self._client.find_end(to)
            if end is not None:
                raise SessionOverError(
                    f"the session {self.client_id} is over: its connection to broker {broker} at {to} has ended: "
                    f"{end}; expected that it lasts. A new session finishes the batch."
                )
        for broker in self._schedule.forgetful(self._monotonic_s()):
            raise SessionOverError(
                f"the session {self.client_id} is over: broker {broker} has acknowledged no heartbeat for "
                f"{FORGOTTEN_S:.0f} s; expected one each 30 s. A new session finishes the batch."
            )

    def close(self, *, unregisters: bool) -> None:
        """Close the connections. If it `unregisters`, tell the brokers first, so that they do not list the session.

        Never raises. A second call does nothing.
        """
        farewell = UnregisterProducerRequest(self.client_id, self._group)
        known = [to for to in self._addresses.values() if self._client.find_end(to) is None] if unregisters else []
        self._addresses = {}
        tickets = [self._client.submit(to, farewell, _FAREWELL_MS) for to in known]
        while not all(ticket.is_done for ticket in tickets):
            self._client.work(_FAREWELL_MS)
        self._client.close()

    def _register(self, brokers: Collection[str]) -> None:
        self._beat_now(brokers)
        self._await_listing(brokers)

    def _beat_now(self, brokers: Collection[str]) -> None:
        """Send heartbeats to brokers, and wait for the answers. Raises the first error."""
        self._schedule.hasten(brokers, self._monotonic_s())
        self.beat()
        while not set(brokers).isdisjoint(self._beats.values()):
            self._note_beats(_PATIENCE_MS)
            self.check()
        for broker in brokers:
            if broker in self._refusals:
                raise self._refusals[broker]

    def _note_beats(self, timeout_ms: float) -> None:
        for ticket in self._client.take_done(self._ended_beats, timeout_ms):
            broker = self._beats.pop(ticket)
            if ticket.error is None:
                self._schedule.note_answer(broker, ticket.sent_s)
                self._refusals.pop(broker, None)
            else:
                self._schedule.note_failure(broker, self._monotonic_s())
                self._refusals[broker] = ticket.error

    def _await_listing(self, brokers: Collection[str]) -> None:
        """Wait until brokers list the session. Where it is not listed, register it again."""
        missing = list(brokers)
        for number in range(MAX_TRIES):
            if number and missing:
                self.wait(_PAUSE_MS * 2 ** (number - 1))
                self._beat_now(missing)
            found = self._ask_for_producers(missing)
            missing = [broker for broker in missing if self.client_id not in found[broker]]
        for broker in missing:
            raise BrokerError(
                0,
                f"broker {broker} at {self._addresses[broker]} does not list this session as a producer of group "
                f"{self._group}, after {MAX_TRIES} heartbeats of {self.client_id}; expected a broker that lists "
                "whoever has registered. Check whether the address is that of a broker and not of a proxy, or set "
                "delivery=atLeastOnce.",
            )

    def _ask_for_producers(self, brokers: Collection[str]) -> dict[str, Mapping[str, str]]:
        done: list[Ticket[ProducersResponse]] = []
        waiting: dict[Ticket[ProducersResponse], str] = {}
        for broker in brokers:
            waiting[self.submit(broker, ProducersRequest(self._group, broker), done=done)] = broker
        found: dict[str, Mapping[str, str]] = {}
        while waiting:
            for ticket in self.take_done(done, _PATIENCE_MS):
                found[waiting.pop(ticket)] = ticket.result().addresses
        return found
