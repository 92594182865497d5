"""A wait for connections that another thread can end, through a pair of sockets of this process."""

import contextlib
import select
import socket
from collections.abc import Collection

from rmq_spark.store.cluster.connection import Connection, wait_ready


class Waker:
    """A wait for connections (`wait`) that another thread can end (`wake`).

    `wake` may be called from any thread, `wait` and `close` from one.
    """

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def wake(self) -> None:
        """End the wait that runs now, or else the next one."""
        with contextlib.suppress(OSError):  # full of earlier calls, or closed
            self._sender.send(b"\0")

    def wait(self, connections: Collection[Connection], timeout_s: float) -> list[Connection]:
        """Do as `wait_ready` does, but return early after `wake`."""
        awaited: list[Connection | Waker] = [*connections, self]
        ready = wait_ready(awaited, timeout_s)
        if self in ready:
            with contextlib.suppress(BlockingIOError):
                self._receiver.recv(4096)
        return [one for one in ready if isinstance(one, Connection)]

    # What `wait_ready` asks of a connection.
    wants = select.POLLIN
    has_decrypted = False

    def fileno(self) -> int:
        """Return the number of the socket that is ready after `wake`."""
        return self._receiver.fileno()

    def close(self) -> None:
        """Close the sockets. A second call does nothing."""
        self._receiver.close()
        self._sender.close()
