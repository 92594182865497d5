"""TLS between the client and servers on loopback: what is accepted, and what a user sees when something is wrong."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import support.loopback_server
from support.loopback_server import PATIENCE_S, LoopbackServer, Peer, answer_to

from rmq_spark.store.cluster import connection
from rmq_spark.store.cluster.address import ClusterAddress, TlsOptions
from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.connection import Connection, wait_ready
from rmq_spark.store.cluster.frame import Command, encode_command
from rmq_spark.store.cluster.requests import MaxOffsetRequest
from rmq_spark.store.errors import BackendUnavailableError, OptionError
from rmq_spark.store.model import QueueKey

CERTIFICATES = Path(support.loopback_server.__file__).parent / "certificates"
AUTHORITY, OTHER = str(CERTIFICATES / "authority.crt"), str(CERTIFICATES / "other-authority.crt")
CLIENT, CLIENT_KEY = str(CERTIFICATES / "client.pem"), str(CERTIFICATES / "client-with-password.key")
PASSWORD = "test-password"
ASK = MaxOffsetRequest(QueueKey("t", 0, "b"))

Serve = Callable[..., LoopbackServer]


def echo_all(peer: Peer) -> None:
    while True:
        peer.answer(peer.receive(), offset="5", body=bytes(100_000))


def enforcing(peer: Peer) -> None:
    """Do what a server does that accepts only TLS: it closes a connection whose first byte is another one."""
    peer.socket.recv(1)


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[LoopbackServer] = []

    def start(
        certificate: str | None = "localhost", behave: Callable[[Peer], Any] = echo_all, client_ca: str = ""
    ) -> Any:
        context = None
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATES / f"{certificate}.pem")
            if client_ca:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(client_ca)
        servers.append(LoopbackServer(behave, tls=context))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def call(server: LoopbackServer, tls: TlsOptions | None, host: str = "127.0.0.1") -> int:
    client = ClusterClient(ClusterAddress((f"{host}:{server.port}",), tls=tls, request_timeout_ms=10_000))
    try:
        for _ in range(3):  # on one connection
            offset = client.ask_name_server(ASK).offset
        assert server.count == 1
        return offset
    finally:
        client.close()


@pytest.mark.parametrize(
    ("certificate", "options"),
    [
        ("localhost", TlsOptions(ca_file=AUTHORITY)),
        ("localhost", TlsOptions("full", AUTHORITY)),
        ("localhost", TlsOptions("none")),
        ("elsewhere", TlsOptions(ca_file=AUTHORITY)),
        ("expired", TlsOptions("none")),
    ],
)
def test_tls_connects(serve: Serve, certificate: str, options: TlsOptions) -> None:
    assert call(serve(certificate), options) == 5


def test_tls_reads_what_is_decrypted_already(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def behave(peer: Peer) -> None:
        large = encode_command(answer_to(peer.receive(), offset="5", body=bytes(300_000)))
        peer.socket.sendall(large + encode_command(answer_to(peer.receive(), offset="6")))
        peer.wait_for_end()

    monkeypatch.setattr(connection, "_READS_AT_ONCE", 1)
    server = serve(behave=behave)
    client = ClusterClient(ClusterAddress((server.address,), tls=TlsOptions("none"), request_timeout_ms=10_000))
    tickets = [client.submit(server.address, ASK) for _ in range(2)]
    while not all(ticket.is_done for ticket in tickets):
        client.wait([ticket for ticket in tickets if not ticket.is_done], 10_000)
    assert [ticket.result().offset for ticket in tickets] == [5, 6]
    client.close()


def test_tls_checks_the_host_of_a_name_server_that_was_found_by_name(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    resolve = socket.getaddrinfo

    def two_machines(host: str, port: int, *rest: Any) -> list[Any]:
        if host != "localhost":
            return resolve(host, port, *rest)
        return [found for one in ("127.0.0.1", "192.0.2.1") for found in resolve(one, port, *rest)]

    monkeypatch.setattr(connection.socket, "getaddrinfo", two_machines)
    assert call(server, TlsOptions("full", AUTHORITY), "localhost") == 5
    elsewhere = serve("elsewhere")
    with pytest.raises(BackendUnavailableError, match=r"127.0.0.1:\d+ \(of localhost\).*not valid for 'localhost'"):
        call(elsewhere, TlsOptions("full", AUTHORITY), "localhost")


@pytest.mark.parametrize(
    ("certificate", "options", "found"),
    [
        ("localhost", TlsOptions(ca_file=OTHER), f"not accepted .*issuer.*tlsCaFile={OTHER}"),
        ("localhost", TlsOptions(), "authorities of this machine"),
        ("expired", TlsOptions(ca_file=AUTHORITY), "certificate has expired"),
        ("elsewhere", TlsOptions("full", AUTHORITY), "not valid for '127.0.0.1'"),
    ],
)
def test_tls_refuses_a_certificate_and_says_why(
    serve: Serve, certificate: str, options: TlsOptions, found: str
) -> None:
    with pytest.raises(BackendUnavailableError, match=found) as error:
        call(serve(certificate), options)
    assert "tlsVerify=none" in str(error.value)


def test_tls_with_a_plain_server_says_so(serve: Serve) -> None:
    def plain(peer: Peer) -> None:
        peer.socket.recv(1000)
        peer.socket.sendall(b"\x00\x00\x00\x00\x00\x00\x00\x00")

    for behave in (plain, enforcing):
        with pytest.raises(BackendUnavailableError, match="tls=false"):
            call(serve(None, behave), TlsOptions("none"))


def test_plain_client_of_an_enforcing_server_is_told_to_use_tls(serve: Serve) -> None:
    with pytest.raises(BackendUnavailableError, match="tls=true"):
        call(serve(None, enforcing), None)


@pytest.mark.parametrize(
    "options",
    [
        TlsOptions("none", cert_file=CLIENT),
        TlsOptions("none", cert_file=CLIENT, key_file=CLIENT_KEY, key_password=PASSWORD),
    ],
)
def test_tls_shows_the_certificate_of_the_client(serve: Serve, options: TlsOptions) -> None:
    assert call(serve(client_ca=AUTHORITY), options) == 5


def test_tls_says_that_the_server_demands_a_certificate(serve: Serve) -> None:
    with pytest.raises(BackendUnavailableError, match="tlsCertFile"):
        call(serve(client_ca=AUTHORITY), TlsOptions("none"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (TlsOptions(ca_file="/no/such/file"), "tlsCaFile"),
        (TlsOptions(ca_file=__file__), "tlsCaFile"),
        (TlsOptions(cert_file="/no/such/file"), "tlsCertFile"),
        (TlsOptions(key_file=CLIENT_KEY), "tlsCertFile"),
        (TlsOptions(cert_file=CLIENT, key_file=CLIENT_KEY), "tlsKeyPassword"),
        (TlsOptions(cert_file=CLIENT, key_file=CLIENT_KEY, key_password="planted-secret"), "tlsKeyPassword"),
    ],
)
def test_tls_refuses_files_that_cannot_be_used(options: TlsOptions, named: str) -> None:
    with pytest.raises(OptionError, match=named) as error:
        ClusterClient(ClusterAddress(("ns:1",), tls=options))
    assert "planted" not in str(error.value)


def test_tls_does_not_withdraw_a_frame_that_is_partly_encrypted(serve: Serve) -> None:
    goes_on, has_all = threading.Event(), threading.Event()
    received: list[Command] = []

    def behave(peer: Peer) -> None:
        assert goes_on.wait(PATIENCE_S)
        received.extend(peer.receive() for _ in range(count + 1))
        has_all.set()

    server = serve(behave=behave)
    one = Connection(server.address, 0, tls=connection.make_tls_context(TlsOptions("none")))
    while not one.is_open:
        assert wait_ready([one], PATIENCE_S)
        one.advance(0)
    count = 0
    while one.unsent() != {count}:  # until the system takes no more
        count += 1
        one.send([(count, encode_command(Command(30, count, body=bytes(10_000))))], 0)
    one.withdraw(count)
    one.send([(count + 1, encode_command(Command(30, count + 1, body=bytes(12_000))))], 0)
    goes_on.set()
    while one.unsent_count:
        assert wait_ready([one], PATIENCE_S)
        one.advance(0)
    assert one.failure is None
    assert has_all.wait(PATIENCE_S)
    one.close()
    assert [command.opaque for command in received] == list(range(1, count + 2))
