"""One connection: names with several addresses, and times that pass while it connects."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.loopback_server import LoopbackServer, Peer, unused_address

from rmq_spark.store.cluster import connection as module
from rmq_spark.store.cluster.connection import (
    CONNECT_TIMEOUT_S,
    Connection,
    ConnectionFailure,
    FailureKind,
    find_machines,
    find_own_ip,
    wait_ready,
)
from rmq_spark.store.cluster.frame import Command, encode_command
from rmq_spark.store.cluster.waker import Waker

RESOLVE = socket.getaddrinfo


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    def behave(peer: Peer) -> None:
        while True:
            peer.answer(peer.receive())

    with LoopbackServer(behave) as server:
        yield server


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names and their addresses, for the resolver."""
    names: dict[str, list[str]] = {}

    def resolve(host: str, port: int, *rest: Any) -> list[Any]:
        return [found for one in names.get(host, [host]) for found in RESOLVE(one, port, *rest)]

    monkeypatch.setattr(module.socket, "getaddrinfo", resolve)
    return names


def open_connection(connection: Connection) -> None:
    while not connection.is_open:
        assert not connection.is_closed, connection.failure
        assert wait_ready([connection], 10) == [connection]
        connection.advance(0)


def exchange(connection: Connection) -> list[Command]:
    connection.send([(1, encode_command(Command(30, 1)))], 0)
    commands: list[Command] = []
    while not commands:
        assert wait_ready([connection], 10) == [connection]
        commands = connection.advance(5)
    return commands


def test_connection_tries_the_next_address_of_a_name(server: LoopbackServer, names: dict[str, list[str]]) -> None:
    names["cluster"] = ["127.0.0.2", "127.0.0.1"]  # nothing listens at the first one
    connection = Connection(f"cluster:{server.port}", 0)
    open_connection(connection)
    assert exchange(connection)[0].opaque == 1
    assert (connection.commands, connection.received_s, connection.was_open) == (1, 5, True)
    connection.close()


def test_connection_fails_with_the_last_reason(names: dict[str, list[str]]) -> None:
    names["cluster"] = ["127.0.0.2", "127.0.0.1"]
    port = unused_address().rpartition(":")[2]
    connection = Connection(f"cluster:{port}", 0)
    while not connection.is_closed:
        wait_ready([connection], 10)
        connection.advance(0)
    assert connection.failure is not None
    assert connection.failure.kind is FailureKind.REFUSED
    assert not connection.was_open
    assert connection.advance(0) == []


def test_connection_shares_the_time_among_the_addresses(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    class SilentSocket(socket.socket):
        """Connects to nothing, and no error comes."""

        def connect_ex(self, address: Any) -> int:
            tried.append(address[0])
            return module.errno.EINPROGRESS

    monkeypatch.setattr(module.socket, "socket", SilentSocket)
    names["cluster"] = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    connection = Connection("cluster:1", 0.0)
    third = CONNECT_TIMEOUT_S / 3
    for at_s, count in [(third - 0.1, 1), (third, 2), (2 * third - 0.1, 2), (2 * third, 3), (3 * third - 0.1, 3)]:
        connection.check_time(at_s)
        assert len(tried) == count
        assert connection.deadline_s == pytest.approx(third * count)
    connection.check_time(3 * third)
    assert tried == names["cluster"]
    assert connection.failure is not None
    assert connection.failure.kind is FailureKind.SILENT
    assert connection.deadline_s is None


def test_connection_that_reached_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class SelfSocket(socket.socket):
        """Is given the very port that it connects to."""

        def connect_ex(self, address: Any) -> int:
            self.bind(address)
            return super().connect_ex(address)

    monkeypatch.setattr(module.socket, "socket", SelfSocket)
    connection = Connection(unused_address(), 0)
    wait_ready([connection], 10)
    connection.advance(0)
    assert connection.failure is not None
    assert connection.failure.kind is FailureKind.REFUSED


@pytest.mark.parametrize("name", ["no-such-name.invalid", "a..b", "x" * 300, "", "a b"])
def test_connection_fails_if_a_name_has_no_address(name: str) -> None:
    connection = Connection(f"{name}:1", 0)
    assert connection.is_closed
    assert connection.failure is not None
    assert connection.failure.kind is FailureKind.UNRESOLVED


def test_connection_fails_if_no_socket_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> socket.socket:
        raise OSError(module.errno.EMFILE, "too many open files")

    monkeypatch.setattr(module.socket, "socket", refuse)
    connection = Connection("127.0.0.1:1", 0)
    assert connection.failure is not None
    assert "EMFILE" in connection.failure.detail


def test_connection_knows_which_frames_were_not_sent(server: LoopbackServer) -> None:
    connection = Connection(server.address, 0)
    for number in range(3):
        connection.send([(number, encode_command(Command(30, number)))], 0)
    assert connection.unsent() == {0, 1, 2}
    connection.withdraw(1)
    assert connection.unsent() == {0, 2}
    open_connection(connection)
    connection.advance(0)
    assert connection.unsent() == set()
    connection.close()


def test_connection_does_not_withdraw_half_a_frame() -> None:
    with LoopbackServer(lambda peer: peer.socket.recv(1, socket.MSG_PEEK) and peer.wait_for_end()) as server:
        connection = Connection(server.address, 0)
        open_connection(connection)
        frame = encode_command(Command(30, 7, body=bytes(15 << 20)))
        connection.send([(7, frame)], 0)
        connection.send([(8, frame)], 0)
        connection.withdraw(7)
        connection.withdraw(8)
        assert connection.unsent() == {7}
        connection.close()


def test_connection_sends_frames_that_are_cut_anywhere() -> None:
    received: list[Command] = []
    with LoopbackServer(lambda peer: [received.append(peer.receive()) for _ in range(400)]) as server:
        connection = Connection(server.address, 0)
        open_connection(connection)
        sent = [Command(30, number, body=bytes([number % 251]) * (number * 7919 % 100_003)) for number in range(400)]
        connection.send([(one.opaque, encode_command(one)) for one in sent], 0)
        assert connection.unsent_count > 0
        while not connection.is_closed:
            assert wait_ready([connection], 10) == [connection]
            connection.advance(0)
        assert connection.unsent_count == 0
    assert received == sent


def test_wait_ready_returns_nothing_after_the_time(server: LoopbackServer) -> None:
    connection = Connection(server.address, 0)
    open_connection(connection)
    assert wait_ready([connection], 0) == []
    assert wait_ready([], 0.001) == []
    connection.close()


def test_a_wait_ends_when_another_thread_wakes_it(server: LoopbackServer) -> None:
    connection, waker = Connection(server.address, 0), Waker()
    open_connection(connection)
    thread = threading.Timer(0.05, waker.wake)
    thread.start()
    assert waker.wait([connection], 3600) == [], "the time is not over"
    thread.join()
    for _ in range(2000):  # more than its pair of sockets can keep
        waker.wake()
    while waker.wait([], 0.0):
        pass
    connection.send([(1, encode_command(Command(30, 1)))], 0)
    while not (ready := waker.wait([connection], 10)):
        pass
    assert ready == [connection]
    waker.close()
    waker.close()
    waker.wake()
    connection.close()


def test_own_ip_is_that_towards_an_address() -> None:
    assert find_own_ip("127.0.0.1:9876") == "127.0.0.1"
    assert find_own_ip("[::1]:9876") in ("::1", "127.0.0.1")
    assert find_own_ip("no-such-name.invalid:1") == "127.0.0.1"


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["10.0.0.1"], ["cluster:9876"]),
        (["10.0.0.1", "10.0.0.2"], ["10.0.0.1:9876", "10.0.0.2:9876"]),
        (["10.0.0.1", "10.0.0.1"], ["cluster:9876"]),
        (["127.0.0.1", "127.0.0.2"], ["cluster:9876"]),
        (["2001:db8::1", "10.0.0.1"], ["[2001:db8::1]:9876", "10.0.0.1:9876"]),
    ],
)
def test_find_machines_lists_the_addresses_of_a_name(
    names: dict[str, list[str]], addresses: list[str], expected: list[str]
) -> None:
    names["cluster"] = addresses
    assert find_machines("cluster:9876") == expected


def test_find_machines_fails_for_an_unknown_name() -> None:
    with pytest.raises(ConnectionFailure):
        find_machines("no-such-name.invalid:1")
