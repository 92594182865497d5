"""A client for tests of the servers: blocking, one socket, one request after the other unless asked otherwise."""

import json
import socket
import ssl
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rmq_spark.store.cluster.codes import RequestCode
from rmq_spark.store.cluster.frame import Command, encode_command
from rmq_spark.store.testing.brokers.group_members import ConsumerData
from rmq_spark.store.testing.brokers.wire import RESPONSE, RequestReader, text_of

VERSION = 407


class RawClient:
    """A connection to host:port. Use it in `with`. Receiving raises TimeoutError after `timeout_s`.

    `requests` are the server's own requests that were received before an answer.
    """

    def __init__(self, address: str, *, timeout_s: float = 10, tls: ssl.SSLContext | None = None) -> None:
        host, _, port = address.rpartition(":")
        self._sock: socket.socket = socket.create_connection((host, int(port)), timeout_s)
        if tls is not None:
            self._sock = tls.wrap_socket(self._sock)
        self._reader = RequestReader()  # it reads answers too
        self._commands: list[tuple[Command, bool]] = []
        self.requests: list[Command] = []
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

    @property
    def address(self) -> str:
        """The client's own address, as host:port."""
        return "{}:{}".format(*self._sock.getsockname())

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

    def heartbeat(self, client_id: str, *data: ConsumerData) -> Command:
        """Send a heartbeat for groups and return its answer."""
        body = {"clientID": client_id, "consumerDataSet": [one.write() for one in data], "producerDataSet": []}
        return self.call(RequestCode.HEART_BEAT, {}, json.dumps(body).encode())

    def produce(self, client_id: str, *groups: str) -> Command:
        """Send a heartbeat of a producer of groups and return its answer."""
        producers = [{"groupName": group} for group in groups]
        body = {"clientID": client_id, "consumerDataSet": [], "producerDataSet": producers}
        return self.call(RequestCode.HEART_BEAT, {}, json.dumps(body).encode())

    def respond(self, request: Command, code: int = 0, body: bytes = b"", remark: str | None = None) -> None:
        """Answer a request of the server."""
        answer = Command(code, request.opaque, {}, body, flag=RESPONSE, remark=remark, version=VERSION)
        self.send_bytes(encode_command(answer))

    def receive(self) -> Command:
        """Return the next answer. Raises ConnectionError if the server closes the connection."""
        while not (command := self._next()).is_response:
            self.requests.append(command)
        return command

    def receive_request(self) -> Command:
        """Return the server's next request. Raises ConnectionError if the server closes the connection."""
        if self.requests:
            return self.requests.pop(0)
        command = self._next()
        assert not command.is_response, command
        return command

    def _next(self) -> Command:
        while not self._commands:
            self._commands += self._reader.feed(self.receive_bytes())
        command, self.is_binary = self._commands.pop(0)
        return command

    def receive_bytes(self) -> bytes:
        """Return some bytes. Raises ConnectionError if the server closes the connection."""
        data = self._sock.recv(1 << 16)
        if not data:
            raise ConnectionError("closed by the server")
        return data
