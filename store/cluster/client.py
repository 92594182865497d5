"""Requests to a cluster's name servers and brokers, and their responses.

A `ClusterClient` has one connection for each address, made at the first request and kept. Many requests are in flight
on a connection; a response finds its request by the request's number (opaque). The client has no thread: `submit` sends
as much as the connection takes, and `wait` sends and receives until a request has its outcome. So a caller that has
submitted requests calls `wait` soon.

What happens to a request, within its deadline:

| event | the client |
| --- | --- |
| code 2 SYSTEM_BUSY: the broker did not execute it | repeats it after growing pauses |
| 1500 GO_AWAY: the server shuts down and did not execute it | repeats it on a new connection |
| the connection is lost, and the request is repeatable or was not sent completely | repeats it on a new connection |
| the connection is lost, and the request is not repeatable | raises UnknownOutcomeError |
| no connection: refused, unreachable, TLS, a name without address | raises BackendUnavailableError |
| a new connection is closed before the first response | raises BackendUnavailableError |
| bytes that are not a frame | closes the connection, raises BackendUnavailableError |
| no response before the deadline | raises BackendUnavailableError, or UnknownOutcomeError if it is not repeatable |

A client that connects once makes no second connection to an address. Where others repeat a request on a new connection,
it raises BackendUnavailableError. Nor does it connect in a forked child.

Source: NettyRemotingClient, NettyRemotingAbstract, MQClientAPIImpl (4.9, 5.3).
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, TypeVar

from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.client_context import ClientContext, RequestHook
from rmq_spark.store.cluster.connection import Connection, wait_ready
from rmq_spark.store.cluster.requests import Deadline, Request
from rmq_spark.store.cluster.responses import Response
from rmq_spark.store.cluster.server import MAX_IN_FLIGHT, Server
from rmq_spark.store.cluster.ticket import Ticket
from rmq_spark.store.errors import BackendUnavailableError, RmqError

__all__ = ["ClusterClient", "Ticket", "ask_master", "borrowed_client"]

AnswerT = TypeVar("AnswerT")
ResponseT = TypeVar("ResponseT", bound=Response)

PULL_TIMEOUT_MS = 10_000  # PullMessageService's requests; DefaultLitePullConsumer#consumerPullTimeoutMillis
HOLD_MARGIN_MS = 10_000  # DefaultMQPushConsumerImpl: 30 s for a pull that is held for 20 s
MAX_IDLE_CLIENTS = 4
_FOR_EVER_MS = inf  # every request ends by its deadline


class ClusterClient:
    """The connections of one caller to one cluster. Use it from one thread at a time.

    In a forked child it connects again, and requests without an outcome have failed.

    `on_request` gets each request that a server sends, with the server's address, and returns the response, or None
    for the answer "not supported" (ResponseCode 3). The client sets its opaque and flag. One-way requests are not
    answered. The hook must not use the client. `wait` waits for connections, by default until one is ready
    (`connection.wait_ready`). With `connects_once` no address gets a second connection, and `find_end` says whether the
    first one is lost.

    Raises OptionError if a file of TLS cannot be used.
    """

    def __init__(
        self,
        address: ClusterAddress,
        monotonic_s: Callable[[], float] = time.monotonic,
        on_request: RequestHook | None = None,
        wait: Callable[[Collection[Connection], float], list[Connection]] = wait_ready,
        *,
        connects_once: bool = False,
    ) -> None:
        self.address = address
        self.connects_once = connects_once
        self._monotonic_s = monotonic_s
        self._wait_ready = wait
        self._context = ClientContext(address, monotonic_s, on_request)
        self._servers: dict[str, Server] = {}
        self._machines: tuple[str, ...] | None = None  # of all name servers
        self._name_server: str | None = None  # the one that answered last
        self.routed_topics: set[str] = set()  # for which a name server had a route; for `write_routes`
        self._faults: dict[str, str] = {}
        self._is_closed = False
        _clients.add(self)

    def name_brokers(self, names: Mapping[str, str]) -> None:
        """Use these names of brokers, by their addresses, in errors. Addresses named earlier keep their names."""
        self._context.name_brokers(names)

    def name_servers(self) -> tuple[str, ...]:
        """Return the addresses of all name servers, for `call` and `call_all`.

        A name of several machines is replaced by its addresses, one for each machine. A name that cannot be resolved
        stays. They are resolved again after no name server has answered.
        """
        if self._machines is None:
            self._machines = self._context.find_name_servers()
        return self._machines

    @property
    def name_server_faults(self) -> Mapping[str, str]:
        """What was found at the name servers that did not answer when they were asked last, by address."""
        return self._faults

    def call(self, to: str, request: Request[ResponseT], timeout_ms: int | None = None) -> ResponseT:
        """Send a request to the address `to`, and return the response.

        The deadline is `timeout_ms` from this call, or the default of the kind of request. It covers connecting, waits
        and repeats. Raises the RmqError that `answer_rules` has for the response's code, or one of the errors above.
        """
        ticket = self.submit(to, request, timeout_ms)
        while not ticket.is_done:
            self._work(inf)
        return ticket.result()

    def call_all(self, calls: Sequence[tuple[str, Request[Any]]]) -> list[Any | RmqError]:
        """Send requests to several addresses in parallel. Return for each, in order, its response or its error.

        After a server could not be reached, the calls to it that were not sent yet get the same error.
        """
        outcomes: list[Any | RmqError] = [None] * len(calls)
        waiting: dict[str, deque[int]] = {}
        for number, (to, _) in enumerate(calls):
            waiting.setdefault(to, deque()).append(number)
        active: dict[Ticket[Any], int] = {}
        done: list[Ticket[Any]] = []
        room = dict.fromkeys(waiting, MAX_IN_FLIGHT)  # how many more calls may be in flight at each server
        while room:
            for to, count in room.items():
                numbers = [waiting[to].popleft() for _ in range(min(count, len(waiting[to])))]
                if numbers:
                    tickets = self.submit_all(to, [calls[number][1] for number in numbers], done=done)
                    active.update(zip(tickets, numbers, strict=True))
            room = {}
            for ticket in self.take_done(done, _FOR_EVER_MS) if active else ():
                outcomes[active.pop(ticket)] = ticket.result() if ticket.error is None else ticket.error
                if isinstance(ticket.error, BackendUnavailableError) and not ticket.is_answered:
                    for rest in waiting[ticket.to]:
                        outcomes[rest] = ticket.error
                    waiting[ticket.to].clear()
                room[ticket.to] = room.get(ticket.to, 0) + 1
        return outcomes

    def submit(self, to: str, request: Request[ResponseT], timeout_ms: int | None = None) -> Ticket[ResponseT]:
        """Send a request, and return at once. Arguments and deadline as in `call`.

        At most 128 requests are in flight on a connection, held pulls not counted; further ones wait in the client.
        """
        return self.submit_all(to, [request], timeout_ms)[0]

    def submit_all(
        self,
        to: str,
        requests: Sequence[Request[ResponseT]],
        timeout_ms: int | None = None,
        done: list[Ticket[ResponseT]] | None = None,
    ) -> list[Ticket[ResponseT]]:
        """Send requests to one address together, and return at once. Otherwise like `submit`, but cheaper.

        Each ticket is appended to `done` when it has its outcome. See `take_done`.
        """
        assert not self._is_closed, "the client is closed"
        now_s = self._monotonic_s()
        tickets: list[Ticket[ResponseT]] = []
        for request in requests:
            deadline = request.deadline
            limit_ms = self._default_timeout_ms(request, deadline) if timeout_ms is None else timeout_ms
            is_held = deadline is Deadline.HELD
            tickets.append(Ticket(to, request, now_s + limit_ms / 1000, limit_ms, is_held=is_held, done=done))
        server = self._servers.get(to)
        if server is None:
            if not self.connects_once:  # brokers change their addresses
                self._servers = {at: one for at, one in self._servers.items() if one.is_used}
            server = self._servers[to] = Server(to, self._context, connects_once=self.connects_once)
        server.submit(tickets, now_s)
        return tickets

    def _default_timeout_ms(self, request: Request[Any], deadline: Deadline) -> int:
        timeout_ms = self.address.request_timeout_ms
        if deadline is Deadline.QUICK:
            return timeout_ms
        if deadline is Deadline.PULL:
            return max(timeout_ms, PULL_TIMEOUT_MS)
        return request.hold_ms + max(timeout_ms, HOLD_MARGIN_MS)

    def wait(self, tickets: Collection[Ticket[Any]], timeout_ms: float) -> list[Ticket[Any]]:
        """Return those of `tickets` that are done, as soon as one is. Return [] if none is after `timeout_ms`.

        Meanwhile the client sends, receives and repeats all requests, also those of other tickets.
        """
        until_s = self._monotonic_s() + timeout_ms / 1000
        while True:
            done = [ticket for ticket in tickets if ticket.is_done]
            if done or not tickets:
                return done
            now_s = self._work(until_s)
            if now_s >= until_s:
                return [ticket for ticket in tickets if ticket.is_done]

    def take_done(self, done: list[Ticket[ResponseT]], timeout_ms: float) -> list[Ticket[ResponseT]]:
        """Return what is in `done`, as soon as a ticket is, and remove it. Return [] if none is after `timeout_ms`.

        `done` is a list that was given to `submit_all`. Otherwise like `wait`, but the cost does not depend on how many
        requests are in flight.
        """
        until_s = self._monotonic_s() + timeout_ms / 1000
        while not done and self._work(until_s) < until_s:
            pass
        found = done.copy()
        done.clear()
        return found

    def work(self, timeout_ms: float) -> None:
        """Wait until a connection is ready, or for `timeout_ms`, and do once what is possible then.

        For a thread that waits for requests of servers. It returns early also if nothing has come of it.
        """
        self._work(self._monotonic_s() + timeout_ms / 1000)

    def _work(self, until_s: float) -> float:
        """Wait until a connection is ready, a time is due, or `until_s`, and do what is possible. Return the time."""
        connections: dict[Connection, Server] = {}
        servers = list(self._servers.values())
        for server in servers:
            for connection in server.connections:
                connections[connection] = server
            until_s = min(until_s, server.next_time_s)
        ready = self._wait_ready(connections, until_s - self._monotonic_s())
        now_s = self._monotonic_s()
        for connection in ready:
            connections[connection].advance(connection, now_s)
        for server in servers:
            if server.next_time_s <= now_s:
                server.check_time(now_s)
        return now_s

    def forget(self, tickets: Collection[Ticket[Any]]) -> None:
        """End requests that nobody waits for any more, with an error. Their responses are skipped."""
        for to in {ticket.to for ticket in tickets} & self._servers.keys():
            self._servers[to].forget([ticket for ticket in tickets if ticket.to == to])

    def ask_name_server(self, request: Request[ResponseT]) -> ResponseT:
        """Ask one name server, and return its response. The one that answered last is asked first.

        If it cannot be reached, is silent, or answers bytes that are not a frame, all others are asked together, and
        the first that answers is kept. So are they if it answers that it does not know the topic, because each name
        server knows only the brokers that have registered there. Other error codes are raised at once. Raises
        BackendUnavailableError, which names every name server and what was found.
        """
        servers = self.name_servers()
        failed: list[Ticket[Any]] = []
        for is_kept in (True, False):
            asked = [to for to in servers if (to == self._name_server) is is_kept]
            ticket = self._first_answer([self.submit(to, request) for to in asked], failed)
            if ticket is not None:
                self._name_server = ticket.to
                response: ResponseT = ticket.result()
                return response
        for ticket in failed:
            if ticket.is_for_others:
                self._name_server = ticket.to
                ticket.result()
        self._name_server = self._machines = None
        if len(failed) == 1:
            failed[0].result()
        texts = " ".join(str(ticket.error) for ticket in failed)
        raise BackendUnavailableError(f"no name server answered. {texts}")

    def _first_answer(self, tickets: list[Ticket[Any]], failed: list[Ticket[Any]]) -> Ticket[Any] | None:
        """Wait for the first answer that counts, and forget the other tickets. Add those that do not count to `failed`.

        Return None if none counts.
        """
        while tickets:
            done = self.wait(tickets, _FOR_EVER_MS)
            tickets = [ticket for ticket in tickets if ticket not in done]
            for ticket in done:
                self._faults.pop(ticket.to, None)
                if isinstance(ticket.error, BackendUnavailableError):
                    self._faults[ticket.to] = str(ticket.error)
                elif not ticket.is_for_others:
                    self.forget(tickets)
                    return ticket
                failed.append(ticket)
        return None

    def connection_number(self, to: str) -> int:
        """Return the number of the newest connection to the address `to`, 0 if there is none.

        No two connections of a client have the same number. Behind a new one another server may answer.
        """
        return self._servers[to].connection_number if to in self._servers else 0

    def is_connected(self, to: str) -> bool:
        """Return whether there is a connection to the address `to` that was not lost, as far as is known."""
        return to in self._servers and any(connection.is_open for connection in self._servers[to].connections)

    def find_end(self, to: str) -> str | None:
        """Return why the connection to the address `to` is not used any more. None if it is, or there was none.

        Only for a client that connects once. `work` finds out what has happened.
        """
        assert self.connects_once, to
        return self._servers[to].end if to in self._servers else None

    def close(self) -> None:
        """Close all connections. Requests without an outcome fail. A second call does nothing."""
        self._is_closed = True
        self._close_connections()

    def _close_connections(self) -> None:
        for server in self._servers.values():
            for ticket in server.pending():
                ticket.fail(BackendUnavailableError(f"the request to {ticket.to} has ended: its client was closed."))
            server.close()
        self._servers.clear()

    def forget_all(self) -> None:
        """Forget all requests without an outcome."""
        for server in self._servers.values():
            server.forget(server.pending())


class _IdleClients:
    """The clients of this process that nobody uses at the moment, the oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: list[ClusterClient] = []

    def take(self, address: ClusterAddress) -> ClusterClient | None:
        """Return the client for `address` that was used last, and remove it. None if there is none."""
        with self._lock:
            for at in reversed(range(len(self._clients))):
                if self._clients[at].address == address:
                    return self._clients.pop(at)
        return None

    def put(self, client: ClusterClient) -> None:
        """Keep a client. Close the oldest one if there are too many."""
        with self._lock:
            self._clients.append(client)
            closed = self._clients[:-MAX_IDLE_CLIENTS]
            del self._clients[:-MAX_IDLE_CLIENTS]
        for old in closed:
            old.close()

    def forget(self) -> None:
        """Close this process's copies of the connections after a fork. Those of the parent process stay open."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        clients, self._clients = self._clients, []
        for client in clients:
            client.close()


def _forget_connections() -> None:
    """Close the copies of connections that a forked child has. Those of the parent stay open."""
    for client in list(_clients):
        if client.connects_once:
            client.close()
        else:
            client._close_connections()


_clients: "weakref.WeakSet[ClusterClient]" = weakref.WeakSet()
_idle = _IdleClients()
os.register_at_fork(after_in_child=_forget_connections)
os.register_at_fork(after_in_child=_idle.forget)


@contextmanager
def borrowed_client(address: ClusterAddress) -> Iterator[ClusterClient]:
    """Return a context manager with a client for `address`, which no other thread has at the time.

    It is an idle client of this process with the same address, or a new one. Afterwards it is idle again, with its
    connections, and forgets the requests without an outcome. At most 4 clients are idle; the oldest one is closed. A
    child process that was forked starts without clients. Raises OptionError if a file of TLS cannot be used.
    """
    client = _idle.take(address) or ClusterClient(address)
    try:
        yield client
    except RmqError:
        client.forget_all()
        _idle.put(client)
        raise
    except BaseException:  # it interrupted the client, or Python deletes borrower, client and sockets in any order
        client.close()
        raise
    client.forget_all()
    _idle.put(client)


def ask_master(find_address: Callable[[bool], str], ask: Callable[[str], AnswerT]) -> AnswerT:
    """Return the answer of a broker's master. If it does not answer, ask at its new address, if there is one.

    `find_address` returns the address, by new routes if its argument is true.
    """
    address = find_address(False)
    try:
        return ask(address)
    except BackendUnavailableError as error:
        try:
            moved_to = find_address(True)
        except BackendUnavailableError:
            raise error from None  # it names the address
        if moved_to == address:
            raise
    return ask(moved_to)


def monotonic_ms() -> float:
    """Return a time in ms that never runs back."""
    return time.monotonic() * 1000


def process_id() -> int:
    """Return the number of this process, which is part of a client's id (UtilAll#getPid)."""
    return os.getpid()


def now_ms() -> int:
    """Return the time in ms since the epoch."""
    return time.time_ns() // 1_000_000  # noqa: TID251 - a message carries the time of its creation
