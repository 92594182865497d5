"""The requests of one client to one server: its connection, what is in flight, and what waits.

Nothing here waits: `submit`, `advance` and `check_time` do what is possible at the time that they are given.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from rmq_spark.store.cluster.client_context import ClientContext
from rmq_spark.store.cluster.codes import ResponseCode
from rmq_spark.store.cluster.connection import Connection, ConnectionFailure, FailureKind
from rmq_spark.store.cluster.failures import explain_end, explain_silence, explain_unknown
from rmq_spark.store.cluster.frame import Command, encode_command
from rmq_spark.store.cluster.ticket import Ticket
from rmq_spark.store.errors import BackendUnavailableError, RmqError, UnknownOutcomeError

MAX_IN_FLIGHT = 128  # requests on a connection, without held pulls
# A server closes a connection on which nothing moved for 120 s (NettyServerConfig#serverChannelMaxIdleTimeSeconds). A
# request that is sent at that moment may be lost, so an older connection is not used.
MAX_IDLE_S = 100.0
MAX_UNSENT = 2000  # frames on a connection; more means that the server sends requests and does not read
_RESPONSE = 1
_OWN = 0  # the number of frames that are not our requests


class _Line:
    """A connection and the requests in flight on it, by opaque."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.tickets: dict[int, Ticket[Any]] = {}
        self.in_flight = 0  # without held ones

    def add(self, opaque: int, ticket: Ticket[Any]) -> None:
        self.tickets[opaque] = ticket
        self.in_flight += not ticket.is_held

    def take(self, opaque: int) -> Ticket[Any] | None:
        ticket = self.tickets.pop(opaque, None)
        if ticket is not None:
            self.in_flight -= not ticket.is_held
        return ticket


class Server:
    """The requests of one client to the server at `address`.

    There is one connection for new requests. Another one is made if it is lost, idle for too long, or silent while a
    request's deadline passes; older connections are kept while requests are in flight on them. `next_time_s` is when
    `check_time` must be called at the latest.

    If it `connects_once`, there is no other connection, and requests fail instead. `end` is then why the connection is
    not used for new requests any more, None as long as it is.
    """

    def __init__(self, address: str, context: ClientContext, *, connects_once: bool = False) -> None:
        self.address = address
        self.next_time_s = inf
        self.connection_number = 0  # of the newest connection
        self.end: str | None = None
        self._connects_once = connects_once
        self._context = context
        self._line: _Line | None = None
        self._old: list[_Line] = []
        self._waiting: deque[Ticket[Any]] = deque()
        self._paused: list[Ticket[Any]] = []

    @property
    def is_used(self) -> bool:
        """Whether there is a connection, or a request without an outcome."""
        return bool(self._lines or self._waiting or self._paused)

    @property
    def connections(self) -> Iterator[Connection]:
        """The connections that are not closed."""
        return (line.connection for line in self._lines)

    @property
    def _lines(self) -> list[_Line]:
        return self._old if self._line is None else [*self._old, self._line]

    def submit(self, tickets: Sequence[Ticket[Any]], now_s: float) -> None:
        """Send requests together, or keep them until they can be sent."""
        self._waiting.extend(tickets)
        for ticket in tickets:
            self.next_time_s = min(self.next_time_s, ticket.deadline_s)
        self._send_waiting(now_s)

    def advance(self, connection: Connection, now_s: float) -> None:
        """Continue on a connection that is ready."""
        for line in self._lines:
            if line.connection is connection:
                self._advance_line(line, now_s)
        self._send_waiting(now_s)

    def check_time(self, now_s: float) -> None:
        """Give up what took too long, and repeat what has paused long enough."""
        for line in self._lines:
            line.connection.check_time(now_s)
            if line.connection.is_closed:
                self._drop_line(line, now_s)
        for line in self._lines:
            self._expire_in_flight(line, now_s)
        late = [ticket for ticket in self._waiting if ticket.deadline_s <= now_s]
        self._waiting = deque(ticket for ticket in self._waiting if ticket.deadline_s > now_s)
        for ticket in late:
            self._expire(ticket, is_connected=True)
        paused, self._paused = self._paused, []
        for ticket in paused:
            if ticket.deadline_s <= now_s:
                self._expire(ticket, is_connected=True)
            elif ticket.not_before_s <= now_s:
                self._waiting.append(ticket)
            else:
                self._paused.append(ticket)
        self._send_waiting(now_s)
        self._close_old()
        self.next_time_s = min(self._times(), default=inf)

    def forget(self, tickets: Collection[Ticket[Any]]) -> None:
        """End requests with an error. Those that were not sent are never sent; the responses to others are skipped."""
        forgotten = set(map(id, tickets))
        self._waiting = deque(ticket for ticket in self._waiting if id(ticket) not in forgotten)
        self._paused = [ticket for ticket in self._paused if id(ticket) not in forgotten]
        for line in self._lines:
            for opaque in [opaque for opaque, ticket in line.tickets.items() if id(ticket) in forgotten]:
                line.take(opaque)
                line.connection.withdraw(opaque)
        for ticket in tickets:
            ticket.fail(RmqError(f"the caller of the request to {ticket.to} does not wait for its response any more"))
        self._close_old()
        self.next_time_s = -inf  # others may be sent now

    def pending(self) -> list[Ticket[Any]]:
        """Return the requests without an outcome."""
        return [*self._waiting, *self._paused, *(ticket for line in self._lines for ticket in line.tickets.values())]

    def close(self) -> None:
        """Close all connections."""
        for connection in self.connections:
            connection.close()
        self._line, self._old = None, []

    def _times(self) -> Iterator[float]:
        yield from (ticket.deadline_s for ticket in self.pending())
        yield from (ticket.not_before_s for ticket in self._paused)
        yield from (at for connection in self.connections if (at := connection.deadline_s) is not None)

    # Sending.

    def _send_waiting(self, now_s: float) -> None:
        if not self._waiting:
            return
        line = self._open_line(now_s)
        if line is None:
            return
        frames: list[tuple[int, bytes]] = []
        while self._waiting and (line.in_flight < MAX_IN_FLIGHT or self._waiting[0].is_held):
            ticket = self._waiting.popleft()
            opaque = self._context.next_opaque()
            try:
                frame = self._context.encode(ticket, opaque)
            except RmqError as error:
                ticket.fail(error)
                continue
            ticket.sent_s = now_s
            line.add(opaque, ticket)
            frames.append((opaque, frame))
        line.connection.send(frames, now_s)

    def _open_line(self, now_s: float) -> _Line | None:
        """Return the connection for new requests, made now if need be. None if it fails at once."""
        line = self._line
        if line is not None and not line.tickets and line.connection.is_open:
            self._advance_line(line, now_s)  # the server may have closed it meanwhile
            line = self._line
        if line is not None and now_s - line.connection.moved_s > MAX_IDLE_S:
            self._retire(line, f"nothing was sent or received for {MAX_IDLE_S:.0f} s")
            line = None
        if line is not None:
            return line
        if self.end is not None:
            self._fail_waiting(self._make_end_error(self.end))
            return None
        try:
            connection = self._context.connect(self.address)
        except RmqError as error:
            self._fail_waiting(error)
            return None
        self.connection_number = self._context.connection_count
        self._line = line = _Line(connection)
        if connection.deadline_s is not None:
            self.next_time_s = min(self.next_time_s, connection.deadline_s)
        if connection.is_closed:
            self._drop_line(line, now_s)
        return self._line

    def _fail_waiting(self, error: RmqError) -> None:
        for ticket in self._waiting:
            ticket.fail(error)
        self._waiting.clear()

    # Receiving.

    def _advance_line(self, line: _Line, now_s: float) -> None:
        for command in line.connection.advance(now_s):
            if command.is_response:
                self._take_response(line, command, now_s)
            else:
                self._take_request(line, command, now_s)
        if line.connection.is_closed:
            self._drop_line(line, now_s)
        self._close_old()

    def _take_response(self, line: _Line, command: Command, now_s: float) -> None:
        ticket = line.take(command.opaque)
        if ticket is None:
            return  # nobody waits for it any more
        if command.code and self._context.has_new_keys(ticket, command):
            self._waiting.append(ticket)
            return
        if command.code == ResponseCode.GO_AWAY:
            self._retire(line, "the server is shutting down")
        if command.code and self._context.is_for_later(ticket, command):
            self._pause(ticket, command, now_s)
        else:
            self._context.settle(ticket, command)

    def _take_request(self, line: _Line, command: Command, now_s: float) -> None:
        response = self._context.answer(self.address, command)
        if command.is_one_way or line.connection.is_closed:
            return
        if line.connection.unsent_count >= MAX_UNSENT:
            detail = "the server sends requests without end, and does not read the responses"
            line.connection.end(ConnectionFailure(FailureKind.GARBAGE, detail))
            return
        if response is None:
            response = Command(
                ResponseCode.REQUEST_CODE_NOT_SUPPORTED, 0, remark=f"request code {command.code} is not supported"
            )
        response = replace(response, opaque=command.opaque, flag=_RESPONSE)
        line.connection.send([(_OWN, encode_command(response))], now_s)

    def _pause(self, ticket: Ticket[Any], refusal: Command | None, now_s: float) -> None:
        ticket.refusal = refusal
        ticket.pause(now_s)
        self._paused.append(ticket)
        self.next_time_s = min(self.next_time_s, ticket.not_before_s)

    # Ends of connections and of requests.

    def _retire(self, line: _Line, why: str) -> None:
        """Do not use a connection for new requests. It is closed when nothing is in flight on it."""
        if line is self._line:
            self._line = None
            self._old.append(line)
            self._note_end(why)
        self._close_old()

    def _note_end(self, why: str) -> None:
        if self._connects_once and self.end is None:
            self.end = why

    def _make_end_error(self, why: str) -> BackendUnavailableError:
        return BackendUnavailableError(explain_end(self._context.name_of(self.address), why))

    def _close_old(self) -> None:
        if not self._old:
            return
        for line in self._old:
            if not line.tickets:
                line.connection.close()
        self._old = [line for line in self._old if not line.connection.is_closed]

    def _drop_line(self, line: _Line, now_s: float) -> None:
        """Decide about the requests of a connection that has ended."""
        if line is self._line:
            self._line = None
        self._old = [old for old in self._old if old is not line]
        connection, failure = line.connection, line.connection.failure
        if failure is None:
            return
        unsent = connection.unsent()
        has_worked = failure.kind is FailureKind.LOST and connection.commands > 0
        server = self._context.name_of(self.address)
        text = self._context.explain(connection)
        self._note_end(failure.detail)
        for opaque, ticket in line.tickets.items():
            if opaque not in unsent and not ticket.request.is_repeatable:
                ticket.fail(UnknownOutcomeError(explain_unknown(server, ticket.request.purpose, failure.detail)))
            elif has_worked:
                self._repeat(ticket, now_s)
            else:
                ticket.fail(BackendUnavailableError(text))
        line.tickets.clear()
        if not connection.was_open:
            self._fail_waiting(BackendUnavailableError(text))

    def _repeat(self, ticket: Ticket[Any], now_s: float) -> None:
        """Send a request again: at once the first time, then after pauses."""
        ticket.losses += 1
        if ticket.losses > 1:
            self._pause(ticket, None, now_s)
        else:
            self._waiting.append(ticket)

    def _expire_in_flight(self, line: _Line, now_s: float) -> None:
        connection = line.connection
        is_silent = False
        unsent = connection.unsent()
        for opaque in [opaque for opaque, ticket in line.tickets.items() if ticket.deadline_s <= now_s]:
            ticket = line.take(opaque)
            assert ticket is not None, opaque
            connection.withdraw(opaque)
            is_silent |= connection.received_s is None or connection.received_s < ticket.sent_s
            self._expire(ticket, is_connected=connection.was_open, is_sent=opaque not in unsent)
        # The connection may be dead although it is open: nothing came for as long as a request may take.
        if is_silent:
            self._retire(line, "a request had no response in its time, and nothing else was received meanwhile")

    def _expire(self, ticket: Ticket[Any], *, is_connected: bool, is_sent: bool = False) -> None:
        server = self._context.name_of(self.address)
        if ticket.refusal is not None and not is_sent:
            self._context.settle(ticket, ticket.refusal)
        elif is_sent and not ticket.request.is_repeatable:
            detail = f"no response within {ticket.timeout_ms} ms"
            ticket.fail(UnknownOutcomeError(explain_unknown(server, ticket.request.purpose, detail)))
        else:
            text = explain_silence(server, ticket.request.purpose, ticket.timeout_ms, is_connected=is_connected)
            ticket.fail(BackendUnavailableError(text))
