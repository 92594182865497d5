"""Clients that a process keeps between tasks."""

import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.forked import run_forked
from support.loopback_server import LoopbackServer, Peer

from rmq_spark.store.cluster import client as module
from rmq_spark.store.cluster.address import ClusterAddress, Credentials
from rmq_spark.store.cluster.client import MAX_IDLE_CLIENTS, ClusterClient, borrowed_client
from rmq_spark.store.cluster.requests import MaxOffsetRequest
from rmq_spark.store.errors import BackendUnavailableError, RmqError
from rmq_spark.store.model import QueueKey

ASK = MaxOffsetRequest(QueueKey("t", 0, "b"))


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    def behave(peer: Peer) -> None:
        while True:
            request = peer.receive()
            if request.fields["queueId"] == "0":
                peer.answer(request, offset=str(peer.number))

    with LoopbackServer(behave) as server:
        yield server


@pytest.fixture(autouse=True)
def no_clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    idle = module._IdleClients()
    monkeypatch.setattr(module, "_idle", idle)
    yield
    idle.forget()


def address_of(server: LoopbackServer, group: str = "") -> ClusterAddress:
    return ClusterAddress((server.address,), pull_group=group, request_timeout_ms=10_000)


def test_borrowed_client_keeps_its_connection(server: LoopbackServer) -> None:
    for _ in range(3):
        with borrowed_client(address_of(server)) as client:
            assert client.call(server.address, ASK).offset == 0
    assert server.count == 1


def test_borrowed_client_belongs_to_one_borrower(server: LoopbackServer) -> None:
    with borrowed_client(address_of(server)) as one, borrowed_client(address_of(server)) as two:
        assert one is not two


def test_borrowed_client_is_for_one_address_and_account(server: LoopbackServer) -> None:
    address = address_of(server)
    seen: list[ClusterClient] = []
    for one in (address, ClusterAddress((server.address,), credentials=Credentials("a", "b"))):
        with borrowed_client(one) as client:
            seen.append(client)
    assert seen[0] is not seen[1]
    with borrowed_client(address_of(server)) as client:
        assert client is seen[0]


def test_borrowed_client_forgets_the_requests_of_the_last_borrower(server: LoopbackServer) -> None:
    silent = MaxOffsetRequest(QueueKey("t", 1, "b"))
    with borrowed_client(address_of(server)) as client:
        ticket = client.submit(server.address, silent)
    assert ticket.is_done
    with borrowed_client(address_of(server)) as client:
        assert client.call(server.address, ASK).offset == 0


def test_idle_clients_are_bounded(server: LoopbackServer) -> None:
    clients: list[ClusterClient] = []
    for number in range(MAX_IDLE_CLIENTS + 1):
        with borrowed_client(address_of(server, str(number))) as client:
            clients.append(client)
    with pytest.raises(AssertionError, match="closed"):
        clients[0].submit(server.address, ASK)
    with borrowed_client(address_of(server, str(MAX_IDLE_CLIENTS))) as client:
        assert client is clients[-1]


def test_borrowed_client_stays_after_an_error_of_ours(server: LoopbackServer) -> None:
    with pytest.raises(RmqError), borrowed_client(address_of(server)) as first:
        raise RmqError
    with borrowed_client(address_of(server)) as second:
        assert second is first


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_borrowed_client_is_closed_after_another_error(server: LoopbackServer, error: type[BaseException]) -> None:
    with pytest.raises(error), borrowed_client(address_of(server)) as first:
        raise error
    with borrowed_client(address_of(server)) as second:
        assert second is not first


# The collector may finalize the socket before the client that would close it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_borrowed_client_is_closed_if_its_borrower_is_never_closed(server: LoopbackServer) -> None:
    stack = ExitStack()
    client = stack.enter_context(borrowed_client(address_of(server)))
    client.call(server.address, ASK)
    cycle: list[Any] = [stack, client]
    cycle.append(cycle)
    del stack, client, cycle
    gc.collect()
    with borrowed_client(address_of(server)) as client:
        assert client.call(server.address, ASK).offset == 1, "on another connection"


def test_a_client_that_is_lent_out_connects_again_in_a_forked_child(server: LoopbackServer) -> None:
    silent = MaxOffsetRequest(QueueKey("t", 1, "b"))
    with borrowed_client(address_of(server)) as client:
        assert client.call(server.address, ASK).offset == 0
        waiting = client.submit(server.address, silent)

        def work() -> list[int]:
            assert waiting.is_done
            assert isinstance(waiting.error, BackendUnavailableError)
            return [client.call(server.address, ASK).offset for _ in range(20)]

        ended = run_forked(work, 10)
        assert ended.value == [1] * 20, f"the child makes its own connection {ended.fault}"
        assert client.call(server.address, ASK).offset == 0
        assert not waiting.is_done


def test_a_forked_child_forgets_the_clients_and_the_parent_keeps_them(
    server: LoopbackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the hook of the module is about its own object
    held = threading.Event()
    done = threading.Event()

    def hold_the_lock() -> None:
        with module._idle._lock:
            held.set()
            done.wait(10)

    with borrowed_client(address_of(server)) as client:
        client.call(server.address, ASK)
    holder = threading.Thread(target=hold_the_lock)
    holder.start()
    held.wait(10)

    def work() -> int:
        with borrowed_client(address_of(server)) as client:
            return client.call(server.address, ASK).offset

    ended = run_forked(work, 10)
    done.set()
    holder.join()
    assert ended.value == 1, f"the child makes its own connection {ended.fault}"
    with borrowed_client(address_of(server)) as client:
        assert client.call(server.address, ASK).offset == 0
