"""What can go wrong with the answer to a request. Give one of these to `Server.fail`.

A fault is a function. It gets the call, and a function that serves the call as usual. It decides whether to serve it,
and may change how the call is answered.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from brokers.wire import Answer, Call
from rmq_spark.store.cluster.codes import ResponseCode

Fault = Callable[[Call, Callable[[], None]], None]
_PIECE_BYTES = 64 << 10


@dataclass(slots=True, eq=False)
class FaultRule:
    """A fault, and the requests that it is applied to. `count` is how many these were so far."""

    code: int | None
    fault: Fault
    times: int | None = None
    when: Callable[[Call], bool] | None = None
    count: int = 0

    def is_about(self, call: Call) -> bool:
        """Return whether the fault must be applied to this call."""
        is_left = self.times is None or self.count < self.times
        return is_left and self.code in (None, call.command.code) and (self.when is None or self.when(call))


def garbage(data: bytes = b"HTTP/1.1 400 Bad Request\r\n\r\n") -> Fault:
    """Answer with bytes that are not a frame."""
    return lambda call, serve: call.connection.send(data)


def half_a_frame(*, closes: bool = True) -> Fault:
    """Send the first half of the answer. Then close the connection, or leave it open and silent."""

    def fail(call: Call, serve: Callable[[], None]) -> None:
        def send(data: bytes) -> None:
            call.connection.send(data[: len(data) // 2])
            if closes:
                call.connection.finish()

        call.send = send
        serve()

    return fail


def nothing(*, executes: bool = True) -> Fault:
    """Never answer. The request is executed, unless `executes` is False."""

    def fail(call: Call, serve: Callable[[], None]) -> None:
        call.send = lambda data: None
        if executes:
            serve()

    return fail


def closes_connection(*, executes: bool = True) -> Fault:
    """Close the connection instead of an answer. The request is executed, unless `executes` is False."""

    def fail(call: Call, serve: Callable[[], None]) -> None:
        call.send = lambda data: None
        if executes:
            serve()
        call.connection.close()

    return fail


def slowly(delay_ms: int = 0, *, pieces: int = 1, pause_ms: int = 0) -> Fault:
    """Send the answer after a delay, in so many pieces of equal size, with a pause between two of them."""

    def fail(call: Call, serve: Callable[[], None]) -> None:
        loop = call.server.loop

        def send(data: bytes) -> None:
            size = max(math.ceil(len(data) / pieces), 1)
            for number, begin in enumerate(range(0, len(data), size)):
                part = data[begin : begin + size]
                loop.call_later((delay_ms + number * pause_ms) / 1000, lambda part=part: call.connection.send(part))

        call.send = send
        serve()

    return fail


def too_much(frame_bytes: int = 1 << 30, *, sent_bytes: int = 32 << 20) -> Fault:
    """Begin an answer whose frame claims `frame_bytes`, and send so many zeros of it."""

    def fail(call: Call, serve: Callable[[], None]) -> None:
        call.connection.send((frame_bytes - 4).to_bytes(4, "big"))
        for begin in range(0, sent_bytes, _PIECE_BYTES):
            call.connection.send(bytes(min(_PIECE_BYTES, sent_bytes - begin)))

    return fail


def with_code(code: int, remark: str | None = None) -> Fault:
    """Answer with this response code, without executing the request."""
    return lambda call, serve: call.answer(Answer(code, remark=remark))


def busy() -> Fault:
    """Refuse the request by flow control (BrokerFastFailure), without executing it."""
    remark = "[TIMEOUT_CLEAN_QUEUE]broker busy, start flow control for a while, period in queue: 207ms"
    return with_code(ResponseCode.SYSTEM_BUSY, remark)


def changed(change: Callable[[Answer], Answer]) -> Fault:
    """Serve the request, and send what `change` makes of the answer."""

    def fail(call: Call, serve: Callable[[], None]) -> None:
        call.change = change
        serve()

    return fail
