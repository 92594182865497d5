"""One connection that a server has accepted: its bytes in both directions, and TLS.

A server that permits TLS looks at the first byte, as RocketMQ's does (NettyRemotingServer.HandshakeHandler): 0x16
begins a TLS handshake. A server does not serve further requests of a connection whose answers pile up.
"""

import contextlib
import selectors
import socket
import ssl
import struct
from typing import TYPE_CHECKING

from rmq_spark.store.cluster.frame import FrameError
from rmq_spark.store.testing.brokers.wire import RequestReader

if TYPE_CHECKING:
    from rmq_spark.store.testing.brokers.server import Server

_TLS_HANDSHAKE = 0x16
_READ_BYTES = 256 << 10
_MAX_UNSENT_BYTES = 1 << 20  # with more unsent bytes, the server does not read further requests of the connection
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST


class Connection:
    """An accepted connection of a server. Belongs to the thread of the server's loop.

    `moved_s` is when it received or sent bytes for the last time, by the server's clock.
    """

    def __init__(self, server: "Server", sock: socket.socket, peer: str) -> None:
        self.server, self.peer, self.is_closed = server, peer, False
        self.moved_s = server.now_s()
        self._sock, self._reader, self._unsent = sock, RequestReader(), bytearray()
        self._tls: ssl.SSLObject | None = None
        self._inward, self._outward = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._is_first, self._is_shaken, self._closes_when_sent = True, False, False
        self._watched = 0
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.watch()

    def watch(self) -> None:
        """Watch the socket for what the connection waits for, unless the server is frozen."""
        if self.is_closed:
            return
        events = 0 if self._is_full else selectors.EVENT_READ
        if self._unsent:
            events |= selectors.EVENT_WRITE
        if self.server.is_frozen:
            events = 0
        if events != self._watched:
            self._watched = events
            self.server.loop.watch(self._sock, events, self._on_events)

    def send(self, data: bytes) -> None:
        """Send bytes, now or when the peer reads. Does nothing if the connection is closed."""
        if self.is_closed:
            return
        if self._tls is not None:
            self._tls.write(data)
            data = self._outward.read()
        self._unsent += data
        self._flush()

    def finish(self) -> None:
        """Close the connection after everything was sent."""
        self._closes_when_sent = True
        self._flush()

    def close(self, *, is_reset: bool = False) -> None:
        """Close the connection: with a FIN, or with a RST as the system does for a killed process with unread bytes."""
        if self.is_closed:
            return
        self.is_closed = True
        self.server.loop.unwatch(self._sock)
        if is_reset:
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._sock.close()
        self.server.forget_connection(self)

    def _on_events(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
            self._serve_waiting()
        if events & selectors.EVENT_READ and not self.is_closed:
            self._receive()

    def _receive(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self.moved_s = self.server.now_s()
        try:
            self._serve(self._decrypt(data))
        except (FrameError, ssl.SSLError):
            self.close()

    def resume(self) -> None:
        """Continue after the server was frozen: serve the requests that were received before."""
        self.watch()
        self._serve_waiting()

    @property
    def _is_full(self) -> bool:
        """Whether too much is unsent for the server to look at further requests."""
        return len(self._unsent) > _MAX_UNSENT_BYTES

    def _serve_waiting(self) -> None:
        """Serve the requests that were received, but not served."""
        if self.is_closed or self.server.is_frozen or self._is_full:
            return
        try:
            self._serve(b"")
        except FrameError:
            self.close()

    def _serve(self, data: bytes) -> None:
        for command, is_binary in self._reader.feed(data):
            self.server.receive(self, command, is_binary)
            if self.is_closed or self.server.is_frozen or self._is_full:
                return

    def _decrypt(self, data: bytes) -> bytes:
        """Return the bytes of frames in received bytes. Raises FrameError if the server's TLS mode forbids the peer."""
        if self._is_first:
            self._is_first = False
            tls = self.server.tls
            is_hello = data[0] == _TLS_HANDSHAKE
            if tls is not None and tls.is_enforced and not is_hello:
                raise FrameError("a plain connection to a server that enforces TLS")
            if tls is not None and is_hello:
                self._tls = tls.context().wrap_bio(self._inward, self._outward, server_side=True)
        if self._tls is None:
            return data
        self._inward.write(data)
        plain = b""
        try:
            if not self._is_shaken:
                self._tls.do_handshake()
                self._is_shaken = True
            while part := self._tls.read(_READ_BYTES):
                plain += part
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        finally:
            self._unsent += self._outward.read()  # also the alert of a failed handshake
            self._flush()
        return plain

    def _flush(self) -> None:
        if self.is_closed:
            return
        try:
            while self._unsent and not self.server.is_frozen:
                sent = self._sock.send(bytes(self._unsent[:_READ_BYTES]))
                del self._unsent[:sent]
                self.moved_s = self.server.now_s()
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if self._closes_when_sent and not self._unsent:
            self.close()
            return
        self.watch()
