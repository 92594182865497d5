"""What name servers and brokers have in common: a port, connections, a table of handlers, counts, and faults."""

import contextlib
import functools
import selectors
import socket
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rmq_spark.store.cluster.codes import ResponseCode
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.testing.brokers.connection import Connection
from rmq_spark.store.testing.brokers.event_loop import EventLoop
from rmq_spark.store.testing.brokers.faults import Fault, FaultRule
from rmq_spark.store.testing.brokers.releases import Release
from rmq_spark.store.testing.brokers.wire import Answer, Call, Refusal

HOST = "127.0.0.1"
_BACKLOG = 128
# Of the requests that a server has received it keeps the latest.
_KEPT_REQUESTS, _KEPT_BODY_BYTES = 100_000, 64 << 20

# A handler gets the server and the call. It returns the answer, or None if it answers later or never.
Handler = Callable[[Any, Call], Answer | None]
F = TypeVar("F", bound=Callable[..., Any])


class HandlerTable(dict[int, Handler]):
    """Handlers by request code. A module with handlers has one table, and fills it with the decorator `on`."""

    def on(self, *codes: int) -> Callable[[Handler], Handler]:
        """Return a decorator that makes a function the handler of requests with these codes."""

        def add(handler: Handler) -> Handler:
            for code in codes:
                assert code not in self, code
                self[int(code)] = handler
            return handler

        return add


def in_loop(method: F) -> F:
    """Make a method of a server run in the loop's thread, so that a test may call it."""

    @functools.wraps(method)
    def run(self: Any, *arguments: Any, **named: Any) -> Any:
        return self.loop.run(method, self, *arguments, **named)

    return run  # type: ignore[return-value]


@dataclass
class ServerTls:
    """The TLS of a server: PEM files, and whether it refuses plain connections (tls.server.mode=enforcing).

    `client_ca_file` makes it demand a certificate of the client (tls.server.need.client.auth).
    """

    cert_file: str
    key_file: str
    is_enforced: bool = False
    client_ca_file: str | None = None
    _context: ssl.SSLContext | None = field(default=None, repr=False)

    def context(self) -> ssl.SSLContext:
        """Return the context for accepted connections."""
        if self._context is None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(self.cert_file, self.key_file)
            if self.client_ca_file is not None:
                self._context.load_verify_locations(self.client_ca_file)
                self._context.verify_mode = ssl.CERT_REQUIRED
        return self._context


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request that a server has received."""

    code: int
    fields: dict[str, str]
    body: bytes
    is_one_way: bool
    connection: int  # the number of the connection, counted from 0 for each server


class Server:
    """A name server or a broker that listens on a port of 127.0.0.1.

    `requests` counts the requests by code since the last `clear_requests`, and `seen` has the requests themselves: the
    latest 100,000, or fewer if their bodies have more than 64 MiB.
    `connection_count` is the number of connections that were accepted so far.
    """

    def __init__(self, loop: EventLoop, release: Release, handlers: HandlerTable) -> None:
        self.loop, self.release, self.handlers = loop, release, handlers
        self.port = 0
        self.is_running = self.is_frozen = False
        self.tls: ServerTls | None = None
        self.requests: Counter[int] = Counter()
        self.seen: deque[SeenRequest] = deque()
        self._seen_bytes = 0
        self.connection_count = 0
        self._listener: socket.socket | None = None
        self._connections: dict[Connection, int] = {}
        self._rules: list[FaultRule] = []
        self._passed_s = 0.0

    @property
    def address(self) -> str:
        """The address that clients connect to, as host:port."""
        return f"{HOST}:{self.port}"

    @property
    def open_connections(self) -> int:
        """The number of connections that are open now."""
        return len(self._connections)

    @in_loop
    def start(self, port: int | None = None) -> None:
        """Listen, on `port` if it is given, else on the last port, else on a free one."""
        assert not self.is_running
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, self.port if port is None else port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self._listener, self.is_running, self.is_frozen = listener, True, False
        self._watch_listener()
        self.on_started()

    @in_loop
    def stop(self) -> None:
        """Stop as a server does that is told to: close all sockets, so that clients read an end of file."""
        self._shut(is_reset=False)

    @in_loop
    def kill(self) -> None:
        """Stop as a killed process does: close all sockets, with a reset."""
        self._shut(is_reset=True)

    @in_loop
    def freeze(self) -> None:
        """Behave as a stopped process (SIGSTOP): the system accepts connections, and nothing is read or answered."""
        assert self.is_running
        self.is_frozen = True
        self._watch_listener()
        for connection in list(self._connections):
            connection.watch()

    @in_loop
    def thaw(self) -> None:
        """Continue after `freeze`. Requests that arrived meanwhile are served."""
        assert self.is_frozen
        self.is_frozen = False
        self._watch_listener()
        for connection in list(self._connections):
            connection.resume()
        self.on_thawed()

    @in_loop
    def close_connections(self) -> None:
        """Close all connections, and accept new ones."""
        for connection in list(self._connections):
            connection.close()

    @in_loop
    def fail(
        self, code: int | None, fault: Fault, times: int | None = None, when: Callable[[Call], bool] | None = None
    ) -> FaultRule:
        """Apply a fault to requests with this code, or to all requests if it is None.

        `times` limits to how many requests it is applied, and `when` chooses among them. The rule that was made first
        decides. Remove it with `heal`.
        """
        rule = FaultRule(code, fault, times, when)
        self._rules.append(rule)
        return rule

    @in_loop
    def heal(self, rule: FaultRule | None = None) -> None:
        """Remove a rule, or all rules."""
        self._rules = [one for one in self._rules if rule is not None and one is not rule]

    @in_loop
    def clear_requests(self) -> Counter[int]:
        """Return the counts of requests by code, and count from 0 again."""
        counted, self.requests = self.requests, Counter()
        self.seen.clear()
        self._seen_bytes = 0
        return counted

    @in_loop
    def seen_requests(self, code: int) -> list[SeenRequest]:
        """Return the requests with this code since the last `clear_requests`, in the order of arrival."""
        return [one for one in self.seen if one.code == code]

    def now_s(self) -> float:
        """Return the time of the server's clock, which does not begin at a known time."""
        return time.monotonic() + self._passed_s

    @in_loop
    def pass_time(self, passed_s: float) -> None:
        """Set the server's clock forward, so that what is too old by then is forgotten at once."""
        self._passed_s += passed_s
        self.on_time_passed()

    def receive(self, connection: Connection, command: Command, is_binary: bool) -> None:
        """Serve one command of a connection, which is a request or an answer to a request of the server."""
        if command.is_response:
            self.on_response(connection, command)
            return
        self.requests[command.code] += 1
        self.seen.append(
            SeenRequest(
                command.code,
                dict(command.fields),
                bytes(command.body),
                command.is_one_way,
                self._connections[connection],
            )
        )
        self._seen_bytes += len(command.body)
        while len(self.seen) > _KEPT_REQUESTS or (self._seen_bytes > _KEPT_BODY_BYTES and len(self.seen) > 1):
            self._seen_bytes -= len(self.seen.popleft().body)
        call = Call(self, connection, command, is_binary, connection.send)
        rule = next((one for one in self._rules if one.is_about(call)), None)
        if rule is None:
            self.serve(call)
        else:
            rule.count += 1
            rule.fault(call, lambda: self.serve(call))

    def serve(self, call: Call) -> None:
        """Answer a call with its handler."""
        try:
            answer = self.handle(call)
        except Refusal as refusal:
            answer = refusal.answer
        except Exception as error:
            call.answer(Answer(ResponseCode.SYSTEM_ERROR, remark=f"a fault of the tests' server: {error!r}"))
            raise
        if answer is not None:
            call.answer(answer)

    def handle(self, call: Call) -> Answer | None:
        """Return the answer to a call, or None if it is answered later or never."""
        handler = self.handlers.get(call.command.code)
        if handler is None or call.command.code in self.release.unsupported:
            return self.answer_unknown(call)
        return handler(self, call)

    def answer_unknown(self, call: Call) -> Answer | None:
        """Return the answer to a request with an unknown code (NettyRemotingAbstract#processRequestCommand)."""
        remark = f" request type {call.command.code} not supported"
        return Answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)

    def on_started(self) -> None:
        """Do what the server does when its port is open."""

    def on_stopped(self) -> None:
        """Do what others notice when the server's sockets are closed."""

    def on_thawed(self) -> None:
        """Do what the server does when it continues after `freeze`."""

    def on_time_passed(self) -> None:
        """Forget what is too old."""

    def on_response(self, connection: Connection, command: Command) -> None:
        """Take an answer of a client to a request of the server."""

    def on_connection_closed(self, connection: Connection) -> None:
        """Do what the server does when a connection was closed."""

    def forget_connection(self, connection: Connection) -> None:
        """Take the notice that a connection was closed."""
        self._connections.pop(connection, None)
        self.on_connection_closed(connection)

    def _shut(self, *, is_reset: bool) -> None:
        if not self.is_running:
            return
        assert self._listener is not None
        self.loop.unwatch(self._listener)
        self._listener.close()
        self._listener, self.is_running, self.is_frozen = None, False, False
        for connection in list(self._connections):
            connection.close(is_reset=is_reset)
        self.on_stopped()

    def _watch_listener(self) -> None:
        assert self._listener is not None
        self.loop.watch(self._listener, 0 if self.is_frozen else selectors.EVENT_READ, self._accept)

    def _accept(self, events: int) -> None:
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while True:
                sock, peer = self._listener.accept()
                connection = Connection(self, sock, f"{peer[0]}:{peer[1]}")
                self._connections[connection] = self.connection_count
                self.connection_count += 1
