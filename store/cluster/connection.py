"""One connection to one server, which never blocks, and the wait for several of them.

A `Connection` connects, does the TLS handshake, sends frames and receives commands, each as far as it goes without
waiting. `wait_ready` waits until one of several connections can continue, and is the only place where a client waits.
Only resolving a name may block, because the system has no other way; a numeric address does not.

A connection that fails stays failed: `failure` says why. This is the only module with sockets to servers.

Source: NettyRemotingClient, TlsHelper, NetworkUtil (4.9, 5.3).
"""

import errno
import math
import select
import socket
import ssl
from collections import deque
from collections.abc import Collection, Iterable
from enum import Enum, auto
from itertools import islice
from typing import Any, Protocol, TypeAlias, TypeVar

from rmq_spark.store.cluster.address import TlsOptions, join_address, split_address
from rmq_spark.store.cluster.frame import Command, FrameError, FrameReader
from rmq_spark.store.errors import OptionError

CONNECT_TIMEOUT_S = 3.0  # NettyClientConfig#connectTimeoutMillis
_LONGEST_WAIT_S = 3600.0  # the system takes no infinity
_FRAMES_AT_ONCE = 128  # less than the system's limit of parts (IOV_MAX)
_READS_AT_ONCE = 8  # so that one connection does not keep the others waiting


class FailureKind(Enum):
    """Why a connection cannot be made or used any more."""

    UNRESOLVED = auto()  # the name has no address
    REFUSED = auto()  # nothing listens at the port
    UNREACHABLE = auto()  # no way to the machine
    SILENT = auto()  # no connection within the time
    CERTIFICATE = auto()  # the server's certificate was not accepted
    TLS = auto()  # the peers do not agree on TLS, or the server demands a certificate
    LOST = auto()  # closed by the server or the network
    GARBAGE = auto()  # bytes that are not a frame


class ConnectionFailure(Exception):
    """The end of a connection. `detail` is what the system or the peer said."""

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


class _State(Enum):
    CONNECTING = auto()
    HANDSHAKE = auto()
    OPEN = auto()
    CLOSED = auto()


_Target: TypeAlias = tuple[Any, ...]  # an address as the socket module has it: its form depends on the family


class Connection:
    """A connection to the server at `address`, which begins at once. All times are of the same monotonic clock, in s.

    `tls` encrypts it; `host` is then the name in the server's certificate, by default the host of the address. If the
    name has several addresses, they are tried one after the other, all together for `timeout_s`.
    """

    def __init__(
        self,
        address: str,
        now_s: float,
        *,
        tls: ssl.SSLContext | None = None,
        host: str | None = None,
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self.address = address
        self.failure: ConnectionFailure | None = None
        self.received_s: float | None = None  # when bytes arrived last
        self.moved_s = now_s  # when bytes were sent or received last
        self.commands = 0  # how many were received
        self.was_open = False  # whether frames could be sent
        self._tls = tls
        self._host = host
        self._state = _State.CONNECTING
        self._socket: socket.socket | None = None
        self._reader = FrameReader()
        self._unsent: deque[tuple[int, bytes | memoryview]] = deque()
        self._is_split = False  # whether a part of the first unsent frame was sent, or given to TLS
        self._write_waits_to_read = self._read_waits_to_write = False  # TLS may need the other direction
        self._write_failure: ConnectionFailure | None = None
        self._targets: deque[tuple[int, _Target]] = deque()
        self._connect_deadline_s = self._give_up_s = now_s + timeout_s
        try:
            self._targets.extend(_resolve(address))
        except ConnectionFailure as failure:
            self.end(failure)
            return
        self._try_next(ConnectionFailure(FailureKind.UNRESOLVED, "no address"), now_s)

    @property
    def is_open(self) -> bool:
        """Whether frames can be sent at once."""
        return self._state is _State.OPEN

    @property
    def is_closed(self) -> bool:
        """Whether the connection has failed or was closed."""
        return self._state is _State.CLOSED

    @property
    def deadline_s(self) -> float | None:
        """When `check_time` must be called at the latest. None if the connection is open or closed."""
        return self._give_up_s if self._state in (_State.CONNECTING, _State.HANDSHAKE) else None

    @property
    def wants(self) -> int:
        """The events to wait for, as flags of `select.poll`."""
        if self._state is _State.CONNECTING:
            return select.POLLOUT
        wants_write = self._read_waits_to_write or (
            self._state is _State.OPEN and bool(self._unsent) and not self._write_waits_to_read
        )
        return select.POLLIN | (select.POLLOUT if wants_write else 0)

    @property
    def has_decrypted(self) -> bool:
        """Whether received bytes wait in memory, which no event announces."""
        return isinstance(self._socket, ssl.SSLSocket) and self._state is _State.OPEN and self._socket.pending() > 0

    def fileno(self) -> int:
        """Return the number of the socket. Requires that the connection is not closed."""
        assert self._socket is not None, self.address
        return self._socket.fileno()

    def check_time(self, now_s: float) -> None:
        """Give up an address that has not answered in its time: try the next one, or fail."""
        if self.deadline_s is not None and now_s >= self._give_up_s:
            what = "connection" if self._state is _State.CONNECTING else "TLS handshake"
            self._try_next(ConnectionFailure(FailureKind.SILENT, f"no {what} in time"), now_s)

    def send(self, frames: Iterable[tuple[int, bytes]], now_s: float) -> None:
        """Send frames as far as possible now, and the rest later. Each has a number for `unsent`."""
        self._unsent.extend(frames)
        if self._state is _State.OPEN:
            self._flush(now_s)

    def unsent(self) -> set[int]:
        """Return the numbers of the frames that were not sent completely, so that the server cannot execute them."""
        return {number for number, _ in self._unsent}

    @property
    def unsent_count(self) -> int:
        """How many frames were not sent completely."""
        return len(self._unsent)

    def withdraw(self, number: int) -> None:
        """Do not send a frame, if no part of it was sent or encrypted yet."""
        kept = [frame for at, frame in enumerate(self._unsent) if frame[0] != number or (at == 0 and self._is_split)]
        self._unsent = deque(kept)

    def advance(self, now_s: float) -> list[Command]:
        """Continue as far as possible without waiting. Return the commands that were received.

        Look at `failure` afterwards: commands that arrived before the connection failed are returned too.
        """
        if self._state is _State.CONNECTING:
            self._finish_connect(now_s)
        if self._state is _State.HANDSHAKE:
            self._shake_hands(now_s)
        if self._state is not _State.OPEN:
            return []
        self._write_waits_to_read = self._read_waits_to_write = False
        self._flush(now_s)
        return self._receive(now_s)

    def close(self) -> None:
        """Close the connection. A second call does nothing. Without a word to the peer, so also after a fork."""
        self._state = _State.CLOSED
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def end(self, failure: ConnectionFailure) -> None:
        """Close the connection because of `failure`."""
        self.failure = failure
        self.close()

    def _try_next(self, failure: ConnectionFailure, now_s: float) -> None:
        """Begin to connect to the next address of the name. If there is none, fail with `failure`."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        while self._targets:
            family, target = self._targets.popleft()
            self._state = _State.CONNECTING
            self._give_up_s = now_s + max(0.0, self._connect_deadline_s - now_s) / (len(self._targets) + 1)
            try:
                self._socket = socket.socket(family, socket.SOCK_STREAM)
                self._socket.setblocking(False)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                code = self._socket.connect_ex(target)
            except OSError as error:  # no such family, or too many open files
                code = error.errno or errno.EINVAL
            if code in (0, errno.EINPROGRESS, errno.EINTR):
                return
            failure = _connect_failure(code)
            if self._socket is not None:
                self._socket.close()
                self._socket = None
        self.end(failure)

    def _finish_connect(self, now_s: float) -> None:
        assert self._socket is not None, self.address
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == 0:
            try:
                peer = self._socket.getpeername()
            except OSError as error:
                if error.errno == errno.ENOTCONN:
                    return  # not yet
                code = error.errno or errno.EINVAL
            else:
                # A socket can be given the very port that it connects to, and then talks to itself.
                if peer == self._socket.getsockname():
                    code = errno.ECONNREFUSED
        if code:
            self._try_next(_connect_failure(code), now_s)
            return
        if self._tls is None:
            self._begin_open(now_s)
            return
        host = self._host or split_address(self.address)[0]
        try:
            self._socket = self._tls.wrap_socket(
                self._socket, server_hostname=host.partition("%")[0], do_handshake_on_connect=False
            )
        except (OSError, ValueError) as error:
            self.end(ConnectionFailure(FailureKind.TLS, str(error)))
            return
        self._state = _State.HANDSHAKE

    def _shake_hands(self, now_s: float) -> None:
        assert isinstance(self._socket, ssl.SSLSocket), self.address
        self._read_waits_to_write = False
        try:
            self._socket.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLWantWriteError:
            self._read_waits_to_write = True
            return
        except OSError as error:
            self.end(_stream_failure(error, in_handshake=True))
            return
        self._begin_open(now_s)

    def _begin_open(self, now_s: float) -> None:
        self._state = _State.OPEN
        self.was_open = True
        self.moved_s = now_s

    def _flush(self, now_s: float) -> None:
        assert self._socket is not None, self.address
        while self._unsent:
            try:
                size = self._send_some(self._socket)
            except BlockingIOError:
                return
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError) as error:
                # TLS may have encrypted the beginning of the frame, and then expects the same bytes again.
                self._is_split = True
                self._write_waits_to_read = isinstance(error, ssl.SSLWantReadError)
                return
            except OSError as error:
                # What the server sent last may be responses, or say more than this error: receive it first.
                self._write_failure = _stream_failure(error)
                self._write_waits_to_read = True
                return
            self.moved_s = now_s
            self._remove_sent(size)

    def _send_some(self, sock: socket.socket) -> int:
        """Send unsent frames with one call of the system, as far as possible. Return the number of bytes."""
        if self._tls is None:
            return sock.sendmsg([frame for _, frame in islice(self._unsent, _FRAMES_AT_ONCE)])
        # TLS repeats a call that could not end with the same bytes, so only a frame that stays is in it.
        return sock.send(self._unsent[0][1])

    def _remove_sent(self, size: int) -> None:
        """Remove the first `size` bytes of the unsent frames."""
        while size:
            number, frame = self._unsent.popleft()
            self._is_split = size < len(frame)
            if self._is_split:
                self._unsent.appendleft((number, memoryview(frame)[size:]))
                return
            size -= len(frame)

    def _receive(self, now_s: float) -> list[Command]:
        commands: list[Command] = []
        try:
            for _ in range(_READS_AT_ONCE):
                if not self._receive_once(now_s, commands):
                    break
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        except ssl.SSLWantWriteError:
            self._read_waits_to_write = True
        except FrameError as error:
            self.end(ConnectionFailure(FailureKind.GARBAGE, str(error)))
        except OSError as error:
            self.end(_stream_failure(error))
        if self._write_failure is not None and not self.is_closed:
            self.end(self._write_failure)
        self.commands += len(commands)
        return commands

    def _receive_once(self, now_s: float, commands: list[Command]) -> bool:
        """Receive once and add the complete commands. Return whether there may be more to receive."""
        assert self._socket is not None, self.address
        buffer = self._reader.get_buffer()
        size = self._socket.recv_into(buffer)
        if size == 0:
            detail = "the server closed the connection"
            try:
                self._reader.at_end()
            except FrameError as error:
                detail = str(error)
            self.end(ConnectionFailure(FailureKind.LOST, detail))
            return False
        self.received_s = self.moved_s = now_s
        is_full = size == len(buffer)
        commands += self._reader.received(size)
        return is_full or self._tls is not None


def _connect_failure(code: int) -> ConnectionFailure:
    name = errno.errorcode.get(code, str(code))
    if code == errno.ECONNREFUSED:
        return ConnectionFailure(FailureKind.REFUSED, "connection refused")
    if code == errno.ETIMEDOUT:
        return ConnectionFailure(FailureKind.SILENT, "no connection in time")
    return ConnectionFailure(FailureKind.UNREACHABLE, f"system error {name}")


def _stream_failure(error: OSError, *, in_handshake: bool = False) -> ConnectionFailure:
    """Return the failure for an error of a read, a write or a TLS handshake."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return ConnectionFailure(FailureKind.CERTIFICATE, error.verify_message)
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return ConnectionFailure(FailureKind.TLS, error.reason or "TLS error")
    detail = f"the connection broke ({errno.errorcode.get(error.errno or 0, type(error).__name__)})"
    if in_handshake:
        return ConnectionFailure(FailureKind.TLS, "the server closed the connection in the TLS handshake")
    return ConnectionFailure(FailureKind.LOST, detail)


class Waitable(Protocol):
    """What `wait_ready` waits for: a connection."""

    @property
    def wants(self) -> int:
        """The events to wait for, as flags of `select.poll`."""

    @property
    def has_decrypted(self) -> bool:
        """Whether received bytes wait in memory, which no event announces."""

    def fileno(self) -> int:
        """Return the number of the socket."""


WaitableT = TypeVar("WaitableT", bound=Waitable)


def wait_ready(connections: Collection[WaitableT], timeout_s: float) -> list[WaitableT]:
    """Wait until some connections can continue (`Connection.advance`), and return them. [] after `timeout_s`."""
    poll = select.poll()
    decrypted: set[int] = set()
    numbers: dict[int, WaitableT] = {}
    for connection in connections:
        number = connection.fileno()
        numbers[number] = connection
        poll.register(number, connection.wants)
        if connection.has_decrypted:
            decrypted.add(number)
    wait_ms = 0 if decrypted else math.ceil(min(max(timeout_s, 0.0), _LONGEST_WAIT_S) * 1000)
    ready = {number for number, _ in poll.poll(wait_ms)} | decrypted
    return [connection for number, connection in numbers.items() if number in ready]


def find_own_ip(towards: str) -> str:
    """Return the IP address by which this machine reaches an address, without connecting. "127.0.0.1" if it has none.

    Java's clients use the address of the first network interface instead (NetworkUtil#getLocalAddress).
    """
    try:
        family, target = _resolve(towards)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # a datagram socket sends nothing then
            return str(probe.getsockname()[0])
    except (ConnectionFailure, OSError):
        return "127.0.0.1"


def find_machines(address: str) -> list[str]:
    """Return the addresses of all machines that the host of an address names, as numbers. [address] if it is only one.

    The loopback addresses of both families are one machine. Raises ConnectionFailure if the name cannot be resolved.
    """
    targets = dict.fromkeys(str(target[0]) for _, target in _resolve(address))
    if len(targets) == 1 or all(host.startswith("127.") or host == "::1" for host in targets):
        return [address]
    return [join_address(host, split_address(address)[1]) for host in targets]


def _resolve(address: str) -> list[tuple[int, _Target]]:
    try:
        host, port = split_address(address)
        found = socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise ConnectionFailure(FailureKind.UNRESOLVED, error.strerror or type(error).__name__) from None
    except ValueError as error:  # also a name that no resolver accepts
        raise ConnectionFailure(FailureKind.UNRESOLVED, str(error)) from None
    return [(family, target) for family, _, _, _, target in found]


def make_tls_context(options: TlsOptions) -> ssl.SSLContext:
    """Return the settings of TLS for connections. Raises OptionError if a file cannot be used.

    Follows TlsHelper#buildSslContext for clients.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = options.verify == "full"
    context.verify_mode = ssl.CERT_NONE if options.verify == "none" else ssl.CERT_REQUIRED
    if options.verify != "none":
        if options.ca_file is None:
            context.load_default_certs()
        else:
            try:
                context.load_verify_locations(options.ca_file)
            except OSError as error:
                raise _refused_file("tlsCaFile", options.ca_file, error, "the certificates of authorities") from None
    if options.cert_file is None:
        if options.key_file is not None:
            raise OptionError(
                "the option tlsKeyFile was given without tlsCertFile; expected both. Add the file with the certificate."
            )
        return context
    password = options.key_password or ""
    try:
        # With a function OpenSSL never asks for the password at the terminal.
        context.load_cert_chain(options.cert_file, options.key_file, lambda: password)
    except OSError as error:
        files = options.cert_file if options.key_file is None else f"{options.cert_file}, {options.key_file}"
        expected = "a certificate and its key, and tlsKeyPassword if the key has a password"
        raise _refused_file("tlsCertFile, tlsKeyFile", files, error, expected) from None
    return context


def _refused_file(options: str, files: str, error: OSError, expected: str) -> OptionError:
    found = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return OptionError(
        f"the files of {options} ({files}) cannot be used: {found or 'they have no valid content'}; expected "
        f"{expected} as PEM text, on every machine of the query. Correct the option or the file."
    )
