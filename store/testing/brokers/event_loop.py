"""One thread that serves all sockets of a cluster: a selectors loop with timers.

All state of the servers belongs to this thread. A test's thread changes it only through `run`.
"""

import contextlib
import functools
import heapq
import itertools
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
OnEvents = Callable[[int], None]


class Timer:
    """A function that the loop calls once, at a time."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function: Callable[[], None] | None = function

    def cancel(self) -> None:
        """Do not call the function, if it was not called yet."""
        self.function = None


class EventLoop:
    """The loop and its thread, which `start` starts and `stop` ends.

    `errors` are the errors of functions that the loop called for a socket or a timer. They are faults of the servers
    themselves, so whoever stops the loop raises them.
    """

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._take_wakes)
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._serve, name="brokers", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and close what the loop owns."""
        self.run(self._set_stopping)
        self._thread.join()
        self._selector.close()
        self._waker.close()
        self._woken.close()

    def run(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Call a function in the loop's thread, and return its result or raise its error."""
        if threading.current_thread() is self._thread:
            return function(*arguments, **named)
        assert not self._is_stopping, "the cluster was closed"
        future: Future[T] = Future()
        self._calls.append((future, lambda: function(*arguments, **named)))
        with contextlib.suppress(BlockingIOError):  # then the loop has many wakes to read
            self._waker.send(b"\0")
        return future.result()

    def call_later(self, delay_s: float, function: Callable[[], None]) -> Timer:
        """Call a function after a delay. Only for the loop's thread."""
        timer = Timer(function)
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._numbers), timer))
        return timer

    def watch(self, sock: socket.socket, events: int, on_events: OnEvents) -> None:
        """Call `on_events` when the socket is ready for one of the events, until `unwatch`. Events 0 pause it."""
        known = sock in self._selector.get_map()
        if not events:
            self.unwatch(sock)
        elif known:
            self._selector.modify(sock, events, on_events)
        else:
            self._selector.register(sock, events, on_events)

    def unwatch(self, sock: socket.socket) -> None:
        """Forget a socket, if the loop knows it. Call it before the socket is closed."""
        if sock.fileno() >= 0 and sock in self._selector.get_map():
            self._selector.unregister(sock)

    def _set_stopping(self) -> None:
        self._is_stopping = True

    def _take_wakes(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def _serve(self) -> None:
        while not self._is_stopping:
            timeout_s = max(self._timers[0][0] - time.monotonic(), 0) if self._timers else None
            for key, events in self._selector.select(timeout_s):
                if key.fileobj is self._woken or self._selector.get_map().get(key.fd) is key:
                    self._guard(functools.partial(key.data, events))
            while self._calls:
                future, function = self._calls.popleft()
                try:
                    future.set_result(function())
                except BaseException as error:  # also an assertion of a test: its thread raises it
                    future.set_exception(error)
            while self._timers and self._timers[0][0] <= time.monotonic():
                timer = heapq.heappop(self._timers)[2]
                if timer.function is not None:
                    self._guard(timer.function)

    def _guard(self, function: Callable[[], Any]) -> None:
        try:
            function()
        except Exception as error:
            self.errors.append(error)
