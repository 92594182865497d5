"""What can go wrong with the answer to a request. Give one of these to `Server.fail`.

A fault is a function. It gets the call, and a function that serves the call as usual. It decides whether to serve it,
and may change how the call is answered.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rmq_spark.store.cluster.codes import ResponseCode
from rmq_spark.store.testing.brokers.sent_message import read_items
from rmq_spark.store.testing.brokers.wire import Answer, Call

Fault = Callable[[Call, Callable[[], None]], None]
REJECTED = "[REJECTREQUEST]system busy, start flow control for a while"
NOT_AVAILABLE = (
    "service not available now. It may be caused by one of the following reasons: the broker's disk is full "
    "[CL:  0.99 CQ:  0.99 INDEX: -1.00], messages are put to the slave, message store has been shut down, etc."
)
REGION = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}  # fields of every answer to a send
_LATE = (ResponseCode.FLUSH_DISK_TIMEOUT, ResponseCode.SLAVE_NOT_AVAILABLE, ResponseCode.FLUSH_SLAVE_TIMEOUT)
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


def garbage(data: bytes = b"HTTP/1.1 400 Bad Request\r\n\r\n", *, executes: bool = False) -> Fault:
    """Answer with bytes that are not a frame. With `executes`, the request is executed first."""

    def fail(call: Call, serve: Callable[[], None]) -> None:
        call.send = lambda answer: call.connection.send(data)
        if executes:
            serve()
        else:
            call.send(b"")

    return fail


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
        call.send = lambda data: call.connection.close()
        if executes:
            serve()
        if not executes or call.command.is_one_way:
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
                loop.call_later((delay_ms + number * pause_ms) / 1000, functools.partial(call.connection.send, part))

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


def with_code(code: int, remark: str | None = None, fields: Mapping[str, str] | None = None) -> Fault:
    """Answer with this response code, without executing the request."""
    return lambda call, serve: call.answer(Answer(code, fields or {}, remark=remark))


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


def disk_full() -> Fault:
    """Refuse a send because the broker's disk is full, or because the broker is shutting down. Nothing is stored."""
    return with_code(ResponseCode.SERVICE_NOT_AVAILABLE, NOT_AVAILABLE, REGION)


def stored_late(code: int = ResponseCode.FLUSH_DISK_TIMEOUT) -> Fault:
    """Store what was sent, and answer that the flush or the replica is late: with code 10, 11 or 12."""
    assert code in _LATE, code
    return changed(lambda answer: replace(answer, code=code) if answer.code == ResponseCode.SUCCESS else answer)


def with_fields(**fields: str | None) -> Fault:
    """Serve the request, and answer with other values of these fields. None takes a field away."""

    def change(answer: Answer) -> Answer:
        all_fields = {**answer.fields, **fields}
        return replace(answer, fields={name: value for name, value in all_fields.items() if value is not None})

    return changed(change)


def killed_in_batch(stored_items: int) -> Fault:
    """Store only the first items of a batch, and kill the server before it answers (a kill in the middle of an append).

    The server stays away until it is restarted.
    """

    def fail(call: Call, serve: Callable[[], None]) -> None:
        call.send = lambda data: call.server.kill()
        body = bytes(call.command.body)
        size = sum(item.size for item in read_items(body)[:stored_items])
        call.command = replace(call.command, body=body[:size])
        if size:
            serve()
        else:
            call.server.kill()

    return fail
