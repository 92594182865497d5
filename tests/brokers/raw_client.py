"""A client for tests of the servers: blocking, one socket, one request after the other unless asked otherwise."""

import socket
import ssl
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from brokers.wire import RequestReader
from rmq_spark.store.cluster.frame import Command, encode_command

VERSION = 407


class RawClient:
    """A connection to host:port. Use it in `with`. Receiving raises TimeoutError after `timeout_s`."""

    def __init__(self, address: str, *, timeout_s: float = 10, tls: ssl.SSLContext | None = None) -> None:
        host, _, port = address.rpartition(":")
        self._sock: socket.socket = socket.create_connection((host, int(port)), timeout_s)
        if tls is not None:
            self._sock = tls.wrap_socket(self._sock)
        self._reader = RequestReader()  # it reads answers too
        self._answers: list[tuple[Command, bool]] = []
        self.is_binary = False  # whether the last answer had a binary header
        self._opaque = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def call(
        self, code: int, fields: Mapping[str, object] | None = None, body: bytes = b"", *, version: int = VERSION
    ) -> Command:
        """Send a request and return its answer."""
        opaque = self.send(code, fields, body, version=version)
        answer = self.receive()
        assert answer.opaque == opaque, answer
        return answer

    def send(
        self,
        code: int,
        fields: Mapping[str, object] | None = None,
        body: bytes = b"",
        *,
        version: int = VERSION,
        flag: int = 0,
    ) -> int:
        """Send a request and return its number."""
        self._opaque += 1
        texts = {name: text_of(value) for name, value in (fields or {}).items()}
        self.send_bytes(encode_command(Command(code, self._opaque, texts, body, flag=flag, version=version)))
        return self._opaque

    def send_bytes(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._sock.sendall(data)

    def receive(self) -> Command:
        """Return the next answer. Raises ConnectionError if the server closes the connection."""
        while not self._answers:
            self._answers += self._reader.feed(self.receive_bytes())
        answer, self.is_binary = self._answers.pop(0)
        return answer

    def receive_bytes(self) -> bytes:
        """Return some bytes. Raises ConnectionError if the server closes the connection."""
        data = self._sock.recv(1 << 16)
        if not data:
            raise ConnectionError("closed by the server")
        return data


def text_of(value: object) -> str:
    """Return the value of a field as it travels."""
    return str(value).lower() if isinstance(value, bool) else str(value)
