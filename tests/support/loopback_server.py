"""A server on a loopback port that does what a test says, in threads: answers in any order, garbage, or nothing."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rmq_spark.store.cluster.frame import Command, FrameReader, encode_command

PATIENCE_S = 10.0  # after this time a test has failed


class Peer:
    """The server's end of one connection."""

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.socket = sock
        self.number = number  # of the connection: 0, 1, …
        self._reader = FrameReader()
        self._commands: list[Command] = []

    def receive(self) -> Command:
        """Return the next command. Raises EOFError if the client has closed the connection."""
        while not self._commands:
            size = self.socket.recv_into(self._reader.get_buffer())
            if size == 0:
                raise EOFError
            self._commands += self._reader.received(size)
        return self._commands.pop(0)

    def send(self, command: Command) -> None:
        self.socket.sendall(encode_command(command))

    def answer(
        self, request: Command, code: int = 0, remark: str | None = None, body: bytes = b"", **fields: str
    ) -> None:
        self.send(answer_to(request, code, remark, body, **fields))

    def wait_for_end(self) -> None:
        """Read until the client closes the connection."""
        with contextlib.suppress(EOFError):
            while True:
                self.receive()


def answer_to(request: Command, code: int = 0, remark: str | None = None, body: bytes = b"", **fields: str) -> Command:
    return Command(code, request.opaque, fields, body, flag=1, remark=remark)


class LoopbackServer:
    """Runs `behave` for each connection in a thread, and closes the connection afterwards."""

    def __init__(
        self,
        behave: Callable[[Peer], Any],
        *,
        family: socket.AddressFamily = socket.AF_INET,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.count = 0  # of connections
        self.received: list[Command] = []  # those that `behave` adds
        self._behave, self._tls = behave, tls
        host = "127.0.0.1" if family == socket.AF_INET else "::1"
        self._listener = socket.create_server((host, 0), family=family)
        self.port = self._listener.getsockname()[1]
        self.address = f"{host}:{self.port}" if family == socket.AF_INET else f"[{host}]:{self.port}"
        self._sockets: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.settimeout(PATIENCE_S)
            self._sockets.append(sock)
            peer_number, self.count = self.count, self.count + 1
            threading.Thread(target=self._serve, args=(sock, peer_number), daemon=True).start()

    def _serve(self, sock: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError, EOFError):
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True)
                self._sockets.append(sock)
            try:
                self._behave(Peer(sock, number))
            finally:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()

    def close(self) -> None:
        """Close the port and all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE_S)
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def unused_address() -> str:
    """Return an address of this machine where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"
