"""The client against servers on loopback: what happens to a request, whatever the server does."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from support.forked import run_forked
from support.loopback_server import PATIENCE_S, LoopbackServer, Peer, answer_to, unused_address

from rmq_spark.store.cluster import server as server_module
from rmq_spark.store.cluster.address import ClusterAddress, Credentials
from rmq_spark.store.cluster.client import ClusterClient, Ticket
from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.frame import Command, encode_command
from rmq_spark.store.cluster.requests import MaxOffsetRequest, PullRequest, Request, RouteRequest
from rmq_spark.store.cluster.responses import OffsetResponse
from rmq_spark.store.cluster.server import MAX_IDLE_S, MAX_IN_FLIGHT
from rmq_spark.store.errors import BackendUnavailableError, NotFoundError, RmqError, UnknownOutcomeError
from rmq_spark.store.model import QueueKey

# The tests do not wait for what should happen: they wait until it has happened, at most so long.
LONG_MS = int(PATIENCE_S * 1000)
SHORT_MS = 150  # for what should not happen


class Clock:
    """A clock that runs as the system's, and can be put forward."""

    def __init__(self) -> None:
        from time import monotonic

        self._monotonic = monotonic
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return self._monotonic() + self.ahead_s


def ask(number: int = 0) -> MaxOffsetRequest:
    return MaxOffsetRequest(QueueKey("t", number, "b"))


class OnceRequest(Request[OffsetResponse]):
    """A request that must not be repeated."""

    code: ClassVar[RequestCode] = RequestCode.GET_MAX_OFFSET
    response = OffsetResponse
    is_repeatable: ClassVar[bool] = False
    purpose = "send a message"

    def __init__(self, size: int = 0) -> None:
        self.size = size

    @property
    def body(self) -> bytes:
        return bytes(self.size)


def echo(peer: Peer, command: Command) -> None:
    """Answer with the queue id as the offset."""
    peer.answer(command, offset=command.fields.get("queueId", "0"))


def echo_all(peer: Peer) -> None:
    while True:
        echo(peer, peer.receive())


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def serve() -> Iterator[Callable[..., LoopbackServer]]:
    servers: list[LoopbackServer] = []

    def start(behave: Callable[[Peer], Any] = echo_all, **settings: Any) -> LoopbackServer:
        servers.append(LoopbackServer(behave, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def make_client(clock: Clock) -> Iterator[Callable[..., ClusterClient]]:
    clients: list[ClusterClient] = []

    def make(
        *name_servers: str,
        on_request: Callable[[str, Command], Command | None] | None = None,
        **fields: Any,
    ) -> ClusterClient:
        address = ClusterAddress(name_servers or ("127.0.0.1:1",), **{"request_timeout_ms": LONG_MS, **fields})
        clients.append(ClusterClient(address, clock, on_request))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(make_client: Callable[..., ClusterClient]) -> ClusterClient:
    return make_client()


Serve = Callable[..., LoopbackServer]


def wait_for_all(client: ClusterClient, tickets: list[Ticket[Any]]) -> list[Any]:
    missing = list(tickets)
    while missing:
        done = client.wait(missing, LONG_MS)
        assert done
        missing = [ticket for ticket in missing if not ticket.is_done]
    return [ticket.result() for ticket in tickets]


def wait_for_errors(client: ClusterClient, tickets: list[Ticket[Any]]) -> list[RmqError]:
    while not all(ticket.is_done for ticket in tickets):
        assert client.wait([ticket for ticket in tickets if not ticket.is_done], LONG_MS)
    return [ticket.error for ticket in tickets if ticket.error is not None]


# Responses.


def test_client_keeps_one_connection(client: ClusterClient, serve: Serve) -> None:
    server = serve()
    assert [client.call(server.address, ask(number)).offset for number in range(5)] == list(range(5))
    assert server.count == 1


def test_client_matches_responses_in_any_order(client: ClusterClient, serve: Serve) -> None:
    def behave(peer: Peer) -> None:
        requests = [peer.receive() for _ in range(50)]
        for request in reversed(requests):
            echo(peer, request)
        peer.wait_for_end()

    server = serve(behave)
    tickets = [client.submit(server.address, ask(number)) for number in range(50)]
    assert [one.offset for one in wait_for_all(client, tickets)] == list(range(50))


def test_client_reads_responses_byte_by_byte(client: ClusterClient, serve: Serve) -> None:
    def behave(peer: Peer) -> None:
        peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = b"".join(encode_command(answer_to(peer.receive(), offset=str(number))) for number in range(3))
        for at in range(len(data)):
            peer.socket.sendall(data[at : at + 1])
        peer.wait_for_end()

    server = serve(behave)
    tickets = [client.submit(server.address, ask()) for _ in range(3)]
    assert [one.offset for one in wait_for_all(client, tickets)] == [0, 1, 2]


def test_client_bounds_the_requests_in_flight(client: ClusterClient, serve: Serve) -> None:
    arrived = threading.Semaphore(0)
    go = threading.Event()
    counts: list[int] = []

    def behave(peer: Peer) -> None:
        first = [peer.receive() for _ in range(MAX_IN_FLIGHT)]
        peer.socket.settimeout(SHORT_MS / 1000)
        try:
            peer.receive()
        except TimeoutError:
            counts.append(MAX_IN_FLIGHT)
        arrived.release()
        go.wait(PATIENCE_S)
        peer.socket.settimeout(PATIENCE_S)
        for request in first:
            echo(peer, request)
        echo_all(peer)

    server = serve(behave)
    tickets = [client.submit(server.address, ask(number)) for number in range(MAX_IN_FLIGHT + 20)]
    while not arrived.acquire(blocking=False):
        client.wait(tickets, 10)
    go.set()
    assert [one.offset for one in wait_for_all(client, tickets)] == list(range(MAX_IN_FLIGHT + 20))
    assert counts == [MAX_IN_FLIGHT]


def test_client_lets_held_pulls_pass_the_bound(client: ClusterClient, serve: Serve) -> None:
    count = MAX_IN_FLIGHT + 20
    held: list[Command] = []

    def behave(peer: Peer) -> None:
        for request in [peer.receive() for _ in range(count)]:
            if request.code == RequestCode.PULL_MESSAGE:
                held.append(request)
            else:
                echo(peer, request)
        for request in held:
            peer.answer(request, 19, nextBeginOffset="0", minOffset="0", maxOffset="0", suggestWhichBrokerId="0")
        peer.wait_for_end()

    server = serve(behave)
    pull = PullRequest(QueueKey("t", 0, "b"), 0, 32, "g", hold_ms=1000)
    tickets = [client.submit(server.address, pull) for _ in range(count - 1)]
    assert client.call(server.address, ask(7)).offset == 7
    assert len(wait_for_all(client, tickets)) == count - 1


def test_client_forgets_addresses_that_it_does_not_use(client: ClusterClient, serve: Serve) -> None:
    kept, numbers = serve(), set()
    client.call(kept.address, ask())
    for _ in range(20):
        gone = unused_address()
        late = client.submit(gone, ask())
        assert wait_for_errors(client, [late])
        client.forget([late])
        server = serve(lambda peer: echo(peer, peer.receive()))
        client.call(server.address, ask())
        numbers.add(client.connection_number(server.address))
        client.call(kept.address, ask())
    assert len(numbers) == 20
    assert len(client._servers) <= 3
    assert client.connection_number(kept.address) == 1
    assert kept.count == 1
    assert client.connection_number("127.0.0.1:1") == 0


def test_client_returns_the_error_of_a_response(client: ClusterClient, serve: Serve) -> None:
    server = serve(lambda peer: peer.answer(peer.receive(), 1, remark="it is broken"))
    with pytest.raises(RmqError, match="it is broken"):
        client.call(server.address, ask())


def test_client_skips_late_responses(client: ClusterClient, serve: Serve) -> None:
    def behave(peer: Peer) -> None:
        echo(peer, peer.receive())
        late = peer.receive()
        request = peer.receive()
        echo(peer, late)
        peer.answer(request, offset="7")
        peer.answer(request, offset="8")
        echo_all(peer)

    server = serve(behave)
    client.call(server.address, ask())
    late = client.submit(server.address, ask(1))
    client.forget([late])
    assert client.call(server.address, ask()).offset == 7
    assert client.call(server.address, ask(3)).offset == 3
    assert server.count == 1
    with pytest.raises(RmqError, match="does not wait"):
        late.result()


def test_forget_makes_room_for_requests_that_wait(client: ClusterClient, serve: Serve, clock: Clock) -> None:
    def behave(peer: Peer) -> None:
        for _ in range(2):
            echo(peer, peer.receive())
        for _ in range(MAX_IN_FLIGHT):
            peer.receive()
        echo_all(peer)

    server = serve(behave)
    for _ in range(2):
        client.call(server.address, ask())
        clock.ahead_s += 60  # past all times that were due
    tickets = [client.submit(server.address, ask(number)) for number in range(MAX_IN_FLIGHT + 1)]
    client.wait(tickets, SHORT_MS)
    client.forget(tickets[:-1])
    assert wait_for_all(client, tickets[-1:])[0].offset == MAX_IN_FLIGHT


def test_wait_returns_nothing_after_its_time(client: ClusterClient, serve: Serve) -> None:
    server = serve(Peer.wait_for_end)
    assert client.wait([client.submit(server.address, ask())], SHORT_MS) == []
    assert client.wait([], LONG_MS) == []


def test_take_done_returns_each_ticket_once(client: ClusterClient, serve: Serve) -> None:
    server = serve()
    done: list[Ticket[Any]] = []
    tickets = client.submit_all(server.address, [ask(number) for number in range(5)], done=done)
    found: list[Ticket[Any]] = []
    while len(found) < len(tickets):
        found += client.take_done(done, LONG_MS)
    assert {id(ticket) for ticket in found} == {id(ticket) for ticket in tickets}
    assert [ticket.result().offset for ticket in tickets] == list(range(5))
    assert client.take_done(done, 0) == []


def test_take_done_returns_failed_and_forgotten_requests(client: ClusterClient, serve: Serve) -> None:
    silent = serve(lambda peer: peer.receive())
    done: list[Ticket[Any]] = []
    tickets = client.submit_all(silent.address, [ask(1)], done=done)
    client.forget(tickets)
    assert client.take_done(done, 0) == tickets
    assert tickets[0].error is not None


def test_call_all_returns_errors_as_values(client: ClusterClient, serve: Serve) -> None:
    def behave(peer: Peer) -> None:
        while True:
            request = peer.receive()
            if request.fields["queueId"] == "1":
                peer.answer(request, 1, remark="no")
            else:
                echo(peer, request)

    one, two, gone = serve(behave), serve(behave), unused_address()
    calls = [(to, ask(number)) for number in range(MAX_IN_FLIGHT + 5) for to in (one.address, two.address, gone)]
    outcomes = client.call_all(calls)
    assert all(isinstance(outcome, BackendUnavailableError) for outcome in outcomes[2::3])
    for outcome, (_, request) in zip(outcomes, calls, strict=True):
        if not isinstance(outcome, BackendUnavailableError):
            number = request.queue.queue_id
            assert isinstance(outcome, RmqError) if number == 1 else outcome.offset == number
    assert sum(isinstance(outcome, RmqError) for outcome in outcomes) == MAX_IN_FLIGHT + 5 + 2


def test_call_all_keeps_calling_a_server_that_answers_wrongly(client: ClusterClient, serve: Serve) -> None:
    def behave(peer: Peer) -> None:
        peer.answer(peer.receive(), offset="no number")
        echo_all(peer)

    server = serve(behave)
    count = MAX_IN_FLIGHT + 5
    outcomes = client.call_all([(server.address, ask(number)) for number in range(count)])
    assert isinstance(outcomes[0], BackendUnavailableError)
    assert [outcome.offset for outcome in outcomes[1:]] == list(range(1, count))


# Requests of the server.


def test_client_answers_unknown_requests_of_the_server(client: ClusterClient, serve: Serve) -> None:
    answers: list[Command] = []

    def behave(peer: Peer) -> None:
        request = peer.receive()
        peer.send(Command(307, request.opaque))  # the same number as ours
        peer.send(Command(40, request.opaque, flag=2))  # one-way
        answers.append(peer.receive())
        peer.answer(request, offset="5")
        answers.append(peer.receive())
        peer.answer(answers[-1], offset="6")
        peer.wait_for_end()

    server = serve(behave)
    assert client.call(server.address, ask()).offset == 5
    assert client.call(server.address, ask()).offset == 6
    assert answers[0].is_response
    assert (answers[0].code, answers[0].opaque) == (3, 1)
    assert not answers[1].is_response, "the one-way request was not answered"


def test_client_passes_requests_of_the_server_to_the_hook(
    make_client: Callable[..., ClusterClient], serve: Serve
) -> None:
    seen: list[tuple[str, int]] = []
    answers: list[Command] = []

    def hook(address: str, command: Command) -> Command | None:
        seen.append((address, command.code))
        return Command(0, 0, body=b"state")

    def behave(peer: Peer) -> None:
        request = peer.receive()
        peer.send(Command(307, 77))
        peer.send(Command(40, 78, flag=2))
        answers.append(peer.receive())
        echo(peer, request)
        peer.wait_for_end()

    server = serve(behave)
    make_client(on_request=hook).call(server.address, ask())
    assert seen == [(server.address, 307), (server.address, 40)]
    assert (answers[0].code, answers[0].opaque, bytes(answers[0].body)) == (0, 77, b"state")
    assert answers[0].is_response


# Lost connections.


def test_client_repeats_a_request_that_an_idle_close_has_lost(client: ClusterClient, serve: Serve) -> None:
    def behave(peer: Peer) -> None:
        echo(peer, peer.receive())
        if peer.number == 0:
            peer.receive()  # and close
        else:
            echo_all(peer)

    server = serve(behave)
    client.call(server.address, ask())
    assert client.call(server.address, ask(4)).offset == 4
    assert server.count == 2


def reset(peer: Peer) -> None:
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.socket.close()


def close_half(peer: Peer) -> None:
    peer.socket.shutdown(socket.SHUT_WR)
    peer.wait_for_end()


@pytest.mark.parametrize("end", [reset, close_half])
def test_client_repeats_a_request_that_a_broken_connection_has_lost(
    client: ClusterClient, serve: Serve, end: Callable[[Peer], None]
) -> None:
    def behave(peer: Peer) -> None:
        if peer.number == 0:
            echo(peer, peer.receive())
            peer.receive()
            end(peer)
        else:
            echo_all(peer)

    server = serve(behave)
    client.call(server.address, ask())
    tickets = [client.submit(server.address, ask(number)) for number in range(3)]
    assert [one.offset for one in wait_for_all(client, tickets)] == [0, 1, 2]
    assert server.count == 2


def test_client_repeats_with_pauses_while_connections_break(client: ClusterClient, serve: Serve) -> None:
    def behave(peer: Peer) -> None:
        request = peer.receive()
        if peer.number < 4:
            peer.send(Command(40, 1, flag=2))  # it works, and breaks then
        else:
            echo(peer, request)
            peer.wait_for_end()

    server = serve(behave)
    assert client.call(server.address, ask(3)).offset == 3
    assert server.count == 5


def test_client_notices_a_closed_connection_before_it_sends(client: ClusterClient, serve: Serve) -> None:
    closed = threading.Event()

    def behave(peer: Peer) -> None:
        if peer.number == 0:
            echo(peer, peer.receive())
            peer.socket.close()
            closed.set()
        else:
            peer.answer(peer.receive(), offset="9")
            peer.wait_for_end()

    server = serve(behave)
    client.call(server.address, ask())
    assert closed.wait(PATIENCE_S)
    assert client.call(server.address, OnceRequest()).offset == 9


def test_client_replaces_a_connection_that_was_idle_for_long(client: ClusterClient, serve: Serve, clock: Clock) -> None:
    server = serve()
    client.call(server.address, ask())
    clock.ahead_s += MAX_IDLE_S + 1
    client.call(server.address, ask())
    assert server.count == 2


def test_client_does_not_repeat_a_request_of_unknown_outcome(client: ClusterClient, serve: Serve) -> None:
    def behave(peer: Peer) -> None:
        echo(peer, peer.receive())
        peer.receive()

    server = serve(behave)
    client.call(server.address, ask())
    with pytest.raises(UnknownOutcomeError, match="send a message"):
        client.call(server.address, OnceRequest())
    assert server.count == 1


def test_client_repeats_what_was_not_sent_completely(client: ClusterClient, serve: Serve) -> None:
    full = threading.Event()

    def behave(peer: Peer) -> None:
        if peer.number == 0:
            echo(peer, peer.receive())
            full.wait(PATIENCE_S)  # never reads the next one
        else:
            request = peer.receive()
            peer.answer(request, offset=str(len(request.body)))
            peer.wait_for_end()

    server = serve(behave)
    client.call(server.address, ask())
    size = 15 << 20  # more than the buffers of a connection hold
    ticket = client.submit(server.address, OnceRequest(size))
    client.wait([ticket], SHORT_MS)
    full.set()
    assert wait_for_all(client, [ticket])[0].offset == size


def test_client_gives_up_a_server_that_never_reads(client: ClusterClient, serve: Serve) -> None:
    done = threading.Event()
    server = serve(lambda _: done.wait(PATIENCE_S))
    ticket = client.submit(server.address, OnceRequest(15 << 20), SHORT_MS)
    others = [client.submit(server.address, ask(), SHORT_MS) for _ in range(3 * MAX_IN_FLIGHT)]
    for one in [ticket, *others]:
        while not one.is_done:
            client.wait([one], LONG_MS)
        with pytest.raises(BackendUnavailableError, match=f"within {SHORT_MS} ms"):
            one.result()
    done.set()


def test_client_makes_a_new_connection_after_silence(client: ClusterClient, serve: Serve) -> None:
    def behave(peer: Peer) -> None:
        if peer.number == 0:
            peer.wait_for_end()
        echo_all(peer)

    server = serve(behave)
    with pytest.raises(BackendUnavailableError, match="requestTimeout"):
        client.call(server.address, ask(), SHORT_MS)
    assert client.call(server.address, ask(2)).offset == 2
    assert server.count == 2


def test_client_keeps_requests_on_a_silent_connection(client: ClusterClient, serve: Serve) -> None:
    answer = threading.Event()

    def behave(peer: Peer) -> None:
        if peer.number == 0:
            held = peer.receive()
            peer.receive()
            answer.wait(PATIENCE_S)
            echo(peer, held)
        echo_all(peer)

    server = serve(behave)
    held = client.submit(server.address, OnceRequest())
    with pytest.raises(BackendUnavailableError):
        client.call(server.address, ask(), SHORT_MS)
    assert client.call(server.address, ask(2)).offset == 2
    answer.set()
    assert wait_for_all(client, [held])[0].offset == 0


def test_silence_after_a_request_that_must_not_be_repeated_is_unknown(client: ClusterClient, serve: Serve) -> None:
    server = serve(Peer.wait_for_end)
    with pytest.raises(UnknownOutcomeError, match="Find out"):
        client.call(server.address, OnceRequest(), SHORT_MS)


# Refusals.


def test_client_waits_out_flow_control_with_growing_pauses(client: ClusterClient, serve: Serve) -> None:
    def behave(peer: Peer) -> None:
        for _ in range(3):
            peer.answer(peer.receive(), 2, remark="[TIMEOUT_CLEAN_QUEUE]broker busy")
        peer.answer(peer.receive(), offset="1")
        peer.wait_for_end()

    server = serve(behave)
    assert client.call(server.address, OnceRequest()).offset == 1
    assert server.count == 1


def test_client_ends_flow_control_at_the_deadline_with_the_remark(client: ClusterClient, serve: Serve) -> None:
    def behave(peer: Peer) -> None:
        while True:
            peer.answer(peer.receive(), 2, remark="[OVERLOAD]system busy")

    server = serve(behave)
    with pytest.raises(RmqError, match="OVERLOAD"):
        client.call(server.address, ask(), SHORT_MS)


def test_client_does_not_repeat_a_pull_at_a_slave(client: ClusterClient, serve: Serve) -> None:
    server = serve(lambda peer: peer.answer(peer.receive(), 2, "[REJECTREQUEST]the broker is slave mode"))
    with pytest.raises(BackendUnavailableError, match="slave"):
        client.call(server.address, PullRequest(QueueKey("t", 0, "b"), 0, 32, "g"))
    assert server.count == 1


def test_client_connects_again_after_go_away(client: ClusterClient, serve: Serve) -> None:
    def behave(peer: Peer) -> None:
        if peer.number == 0:
            peer.answer(peer.receive(), 1500)
            peer.wait_for_end()
        peer.answer(peer.receive(), offset="3")
        peer.wait_for_end()

    server = serve(behave)
    assert client.call(server.address, OnceRequest()).offset == 3
    assert server.count == 2


# Servers that are none.


def garbage(peer: Peer) -> None:
    peer.socket.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    peer.wait_for_end()


def half_a_frame(peer: Peer) -> None:
    peer.socket.sendall(encode_command(answer_to(peer.receive(), offset="1"))[:20])


def closes_at_once(peer: Peer) -> None:
    pass


def huge_frame(peer: Peer) -> None:
    peer.socket.sendall((1 << 30).to_bytes(4, "big") + bytes(100))
    peer.wait_for_end()


def no_offset(peer: Peer) -> None:
    peer.answer(peer.receive())
    peer.wait_for_end()


@pytest.mark.parametrize(
    ("behave", "found"),
    [
        (garbage, "not a frame of RocketMQ.*HTTP"),
        (half_a_frame, "closed after 20 bytes"),
        (closes_at_once, "tls=true"),
        (huge_frame, "not a frame of RocketMQ"),
        (no_offset, "offset"),
    ],
)
def test_client_names_a_server_that_answers_wrongly(
    client: ClusterClient, serve: Serve, behave: Callable[[Peer], None], found: str
) -> None:
    server = serve(behave)
    client.name_brokers({server.address: "broker-a"})
    with pytest.raises(BackendUnavailableError, match=found) as error:
        client.call(server.address, ask())
    assert f"broker broker-a at {server.address}" in str(error.value)


def test_client_ends_a_slow_drip_at_the_deadline(client: ClusterClient, serve: Serve) -> None:
    stop = threading.Event()

    def behave(peer: Peer) -> None:
        frame = encode_command(answer_to(peer.receive(), offset="1"))
        for at in range(len(frame)):
            peer.socket.sendall(frame[at : at + 1])
            if stop.wait(0.02):
                return

    server = serve(behave)
    with pytest.raises(BackendUnavailableError, match=f"within {SHORT_MS} ms"):
        client.call(server.address, ask(), SHORT_MS)
    stop.set()


def test_client_survives_responses_that_nobody_asked_for(client: ClusterClient, serve: Serve) -> None:
    def behave(peer: Peer) -> None:
        request = peer.receive()
        frame = encode_command(Command(0, 999_999, {"offset": "1"}, bytes(1 << 16), flag=1))
        for _ in range(200):
            peer.socket.sendall(frame)
        echo_all_from(peer, request)

    def echo_all_from(peer: Peer, request: Command) -> None:
        echo(peer, request)
        echo_all(peer)

    server = serve(behave)
    assert client.call(server.address, ask(6)).offset == 6


def test_client_ends_a_flood_of_requests_from_the_server(
    make_client: Callable[..., ClusterClient], serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_UNSENT", 50)
    client = make_client(on_request=lambda *_: Command(0, 0, body=bytes(100_000)))

    def behave(peer: Peer) -> None:
        peer.receive()
        frame = encode_command(Command(307, 5))
        while True:
            peer.socket.sendall(frame * 100)  # and never reads the answers

    server = serve(behave)
    with pytest.raises(BackendUnavailableError, match="does not read"):
        client.call(server.address, ask())


def test_client_says_what_to_check_if_a_broker_refuses(make_client: Callable[..., ClusterClient]) -> None:
    address = unused_address()
    client = make_client()
    client.name_brokers({address: "broker-a"})
    with pytest.raises(BackendUnavailableError) as error:
        client.call(address, ask())
    text = str(error.value)
    assert f"broker broker-a at {address} cannot be reached: connection refused" in text
    assert "brokerIP1" in text
    assert "brokerAddresses=broker-a=host:port" in text

    mapped = make_client(broker_addresses=(("broker-a", address),))
    mapped.name_brokers({address: "broker-a"})
    with pytest.raises(BackendUnavailableError, match="option brokerAddresses, which gives this address"):
        mapped.call(address, ask())


def test_client_names_a_host_without_address(client: ClusterClient) -> None:
    with pytest.raises(BackendUnavailableError, match=r"broker.invalid:10911.*a name that this machine can resolve"):
        client.call("broker.invalid:10911", ask())


def test_client_reaches_ipv6(client: ClusterClient, serve: Serve) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        server = serve(family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 on loopback")
    assert client.call(server.address, ask(3)).offset == 3
    assert client.call(f"::1:{server.port}", ask(4)).offset == 4


# Name servers.


def test_ask_name_server_keeps_the_one_that_answers(make_client: Callable[..., ClusterClient], serve: Serve) -> None:
    server, silent = serve(), serve(Peer.wait_for_end)
    refusing = unused_address()
    client = make_client(refusing, silent.address, server.address)
    assert [client.ask_name_server(ask(number)).offset for number in range(3)] == [0, 1, 2]
    assert silent.count == 1
    assert list(client.name_server_faults) == [refusing]


@pytest.mark.parametrize("behave", [garbage, half_a_frame, closes_at_once, no_offset])
def test_ask_name_server_goes_to_the_next_after_a_wrong_one(
    make_client: Callable[..., ClusterClient], serve: Serve, behave: Callable[[Peer], None]
) -> None:
    fails = threading.Event()

    def first(peer: Peer) -> None:
        if peer.number == 0:
            peer.answer(peer.receive(), offset="1")
            fails.wait(PATIENCE_S)
        behave(peer)

    def second(peer: Peer) -> None:
        fails.wait(PATIENCE_S)
        while True:
            peer.answer(peer.receive(), offset="2")

    client = make_client(serve(first).address, serve(second).address)
    assert client.ask_name_server(ask()).offset == 1
    fails.set()
    assert [client.ask_name_server(ask()).offset for _ in range(2)] == [2, 2]
    assert list(client.name_server_faults) == [client.address.name_servers[0]]


def test_ask_name_server_names_all_that_failed(make_client: Callable[..., ClusterClient], serve: Serve) -> None:
    one, two = unused_address(), serve(garbage).address
    with pytest.raises(BackendUnavailableError) as error:
        make_client(one, two).ask_name_server(ask())
    text = str(error.value)
    assert f"name server {one} cannot be reached" in text
    assert f"name server {two} answered bytes that are not a frame" in text
    assert "nameServer" in text


def test_ask_name_server_returns_the_error_of_a_response(
    make_client: Callable[..., ClusterClient], serve: Serve
) -> None:
    server = serve(lambda peer: peer.answer(peer.receive(), 1, remark="name server not ready"))
    with pytest.raises(RmqError, match="not ready") as error:
        make_client(server.address).ask_name_server(ask())
    assert not isinstance(error.value, BackendUnavailableError)


def test_name_server_faults_end_with_a_response(make_client: Callable[..., ClusterClient], serve: Serve) -> None:
    server = serve(lambda peer: garbage(peer) if peer.number == 0 else echo_all(peer))
    client = make_client(server.address)
    with pytest.raises(BackendUnavailableError):
        client.ask_name_server(ask())
    assert "not a frame" in client.name_server_faults[server.address]
    client.ask_name_server(ask())
    assert client.name_server_faults == {}


def unknown_topic(peer: Peer) -> None:
    while True:
        peer.answer(peer.receive(), 17, "No topic route info in name server for the topic: t")


def test_ask_name_server_asks_the_others_for_an_unknown_topic(
    make_client: Callable[..., ClusterClient], serve: Serve
) -> None:
    empty, knowing = (
        serve(unknown_topic),
        serve(lambda peer: peer.answer(peer.receive(), body=b'{"queueDatas":[],"brokerDatas":[]}')),
    )
    client = make_client(empty.address)
    with pytest.raises(NotFoundError):
        client.ask_name_server(RouteRequest("t"))
    both = make_client(empty.address, unused_address(), knowing.address)
    assert both.ask_name_server(RouteRequest("t")).queues == ()


def test_ask_name_server_raises_that_no_one_knows_the_topic(
    make_client: Callable[..., ClusterClient], serve: Serve
) -> None:
    client = make_client(unused_address(), serve(unknown_topic).address)
    for _ in range(2):
        with pytest.raises(NotFoundError, match="topic t"):
            client.ask_name_server(RouteRequest("t"))


def test_errors_show_no_keys(make_client: Callable[..., ClusterClient], serve: Serve) -> None:
    remark = "AclException: Check signature failed for accessKey=planted-key, token planted-token"
    server = serve(lambda peer: peer.answer(peer.receive(), 1, remark))
    client = make_client(credentials=Credentials("planted-key", "planted-secret", "planted-token"))
    with pytest.raises(RmqError, match="accessKey=\\*\\*\\*") as error:
        client.call(server.address, ask())
    assert "planted" not in str(error.value)


def test_requests_are_signed(make_client: Callable[..., ClusterClient], serve: Serve) -> None:
    requests: list[Command] = []

    def behave(peer: Peer) -> None:
        requests.append(peer.receive())
        echo(peer, requests[-1])

    server = serve(behave)
    make_client(credentials=Credentials("key", "secret", "token")).call(server.address, ask())
    fields = requests[0].fields
    assert (fields["AccessKey"], fields["SecurityToken"]) == ("key", "token")
    assert "Signature" in fields
    assert "secret" not in str(requests[0])


def test_close_ends_requests(client: ClusterClient, serve: Serve) -> None:
    server = serve(Peer.wait_for_end)
    ticket = client.submit(server.address, ask())
    client.close()
    client.close()
    with pytest.raises(BackendUnavailableError, match="closed"):
        ticket.result()


def test_a_client_that_only_works_answers_and_notices_the_end(
    make_client: Callable[..., ClusterClient], serve: Serve
) -> None:
    asked: list[int] = []
    answers: list[Command] = []
    go = threading.Event()

    def behave(peer: Peer) -> None:
        echo(peer, peer.receive())
        peer.send(Command(307, 77))
        answers.append(peer.receive())
        go.wait(PATIENCE_S)

    def answer(address: str, command: Command) -> Command:
        asked.append(command.code)
        return Command(0, 0, body=b"state")

    server = serve(behave)
    client = make_client(on_request=answer)
    assert not client.is_connected(server.address)
    client.call(server.address, ask())
    assert client.is_connected(server.address)
    while not answers:
        client.work(10)
    assert asked == [307]
    assert (answers[0].opaque, bytes(answers[0].body)) == (77, b"state")
    go.set()
    while client.is_connected(server.address):
        client.work(10)


# A client that connects once.


@pytest.fixture
def once(clock: Clock) -> Iterator[ClusterClient]:
    client = ClusterClient(ClusterAddress(("127.0.0.1:1",), request_timeout_ms=LONG_MS), clock, connects_once=True)
    yield client
    client.close()


def check_end(once: ClusterClient, server: LoopbackServer, serve: Serve, why: str) -> None:
    """Check that nothing is sent to the server any more, and that the error says why."""
    other = serve()
    assert once.call(other.address, ask(1)).offset == 1
    assert once.find_end(other.address) is None
    for request in (ask(1), OnceRequest()):
        with pytest.raises(BackendUnavailableError, match=r"the only connection to .* has ended: ") as caught:
            once.call(server.address, request)
        assert why in str(caught.value)
    assert why in (once.find_end(server.address) or "")
    assert server.count == 1


@pytest.mark.parametrize("end", [reset, close_half])
def test_client_that_connects_once_repeats_nothing_that_a_connection_has_lost(
    once: ClusterClient, serve: Serve, end: Callable[[Peer], None]
) -> None:
    def behave(peer: Peer) -> None:
        echo(peer, peer.receive())
        for _ in range(2):
            peer.receive()
        end(peer)

    server = serve(behave)
    assert once.find_end(server.address) is None
    once.call(server.address, ask())
    tickets = [once.submit(server.address, request) for request in (ask(1), OnceRequest())]
    first, second = wait_for_errors(once, tickets)
    assert type(first) is BackendUnavailableError
    assert type(second) is UnknownOutcomeError
    check_end(once, server, serve, "")


def test_client_that_connects_once_fails_at_once_what_waits_for_a_lost_connection(
    once: ClusterClient, serve: Serve
) -> None:
    def behave(peer: Peer) -> None:
        for _ in range(MAX_IN_FLIGHT):
            peer.receive()

    server = serve(behave)
    tickets = [once.submit(server.address, ask(number)) for number in range(MAX_IN_FLIGHT + 5)]
    assert {type(error) for error in wait_for_errors(once, tickets)} == {BackendUnavailableError}
    check_end(once, server, serve, "closed the connection")


def test_client_that_connects_once_notices_a_close_while_nothing_is_in_flight(
    once: ClusterClient, serve: Serve
) -> None:
    server = serve(lambda peer: echo(peer, peer.receive()))
    once.call(server.address, ask())
    for _ in range(5):
        once.work(SHORT_MS if once.find_end(server.address) else LONG_MS)
    check_end(once, server, serve, "the server closed the connection")


def test_client_that_connects_once_does_not_replace_an_idle_connection(
    once: ClusterClient, serve: Serve, clock: Clock
) -> None:
    server = serve()
    once.call(server.address, ask())
    clock.ahead_s += MAX_IDLE_S + 1
    with pytest.raises(BackendUnavailableError, match="nothing was sent or received for 100 s"):
        once.call(server.address, ask())
    check_end(once, server, serve, "for 100 s")


def test_client_that_connects_once_does_not_replace_a_silent_connection(once: ClusterClient, serve: Serve) -> None:
    server = serve(Peer.wait_for_end)
    with pytest.raises(BackendUnavailableError, match="requestTimeout"):
        once.call(server.address, ask(), SHORT_MS)
    check_end(once, server, serve, "no response in its time")


def test_client_that_connects_once_repeats_nothing_elsewhere_for_a_server_that_goes_away(
    once: ClusterClient, serve: Serve
) -> None:
    def behave(peer: Peer) -> None:
        peer.answer(peer.receive(), 1500)
        echo_all(peer)

    server = serve(behave)
    with pytest.raises(BackendUnavailableError, match="shutting down"):
        once.call(server.address, OnceRequest())
    check_end(once, server, serve, "shutting down")


def test_client_that_connects_once_repeats_a_busy_request_on_its_connection(once: ClusterClient, serve: Serve) -> None:
    def behave(peer: Peer) -> None:
        peer.answer(peer.receive(), 2, remark="busy")
        echo_all(peer)

    server = serve(behave)
    assert once.call(server.address, ask(3)).offset == 3
    assert (server.count, once.find_end(server.address)) == (1, None)


def test_client_that_connects_once_does_not_connect_again_after_a_refusal(once: ClusterClient) -> None:
    gone = unused_address()
    for words in ("connection refused", "the only connection to .* has ended: connection refused"):
        with pytest.raises(BackendUnavailableError, match=words):
            once.call(gone, ask())
    assert once.connection_number(gone) == 1


def test_client_that_connects_once_is_closed_in_a_forked_child(once: ClusterClient, serve: Serve) -> None:
    server = serve()
    once.call(server.address, ask())

    def work() -> str:
        try:
            once.call(server.address, ask())
        except AssertionError as error:
            return str(error)
        return "it was asked"

    assert str(run_forked(work, 10).value).startswith("the client is closed")
    assert once.call(server.address, ask(5)).offset == 5
    assert server.count == 1
