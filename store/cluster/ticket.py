"""A request that was submitted, and its outcome."""

from typing import Any, Generic, TypeVar

from rmq_spark.store.cluster.address import Credentials
from rmq_spark.store.cluster.frame import Command
from rmq_spark.store.errors import RmqError

ResponseT = TypeVar("ResponseT")

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.02, 1.0


class Ticket(Generic[ResponseT]):
    """A request that was submitted: its outcome, as soon as there is one. `ClusterClient.submit` makes it.

    `to` is the address that was asked, `request` the request, and `error` what `result` raises, or None.

    The other fields belong to the client. `deadline_s` is by its clock. `is_held`: the broker may hold the request till
    a message arrives. `sent_s`: when the request was sent last. `not_before_s`: when it may be sent again. `losses`:
    how many connections were lost while it was in flight. `refusal`: the last response that asked to repeat it.
    `is_answered`: the outcome comes from a response. `is_for_others`: another name server may know more than it. The
    ticket appends itself to `done` when it has its outcome.
    `keys`: those that the request was signed with last.
    """

    __slots__ = (
        "_pauses",
        "_response",
        "deadline_s",
        "done",
        "error",
        "is_answered",
        "is_done",
        "is_for_others",
        "is_held",
        "keys",
        "losses",
        "not_before_s",
        "refusal",
        "request",
        "sent_s",
        "timeout_ms",
        "to",
    )

    def __init__(
        self,
        to: str,
        request: Any,
        deadline_s: float,
        timeout_ms: int,
        *,
        is_held: bool,
        done: "list[Ticket[ResponseT]] | None" = None,
    ) -> None:
        self.to = to
        self.request = request
        self.deadline_s = deadline_s
        self.timeout_ms = timeout_ms
        self.is_held = is_held
        self.done = done
        self.is_done = self.is_answered = self.is_for_others = False
        self.sent_s = self.not_before_s = 0.0
        self.losses = 0
        self.refusal: Command | None = None
        self.keys: Credentials | None = None
        self._pauses = 0
        self._response: ResponseT | None = None
        self.error: RmqError | None = None

    def result(self) -> ResponseT:
        """Return the response, or raise the RmqError that the request ended with. Requires `is_done`."""
        assert self.is_done, self.request
        if self.error is not None:
            raise self.error
        return self._response  # type: ignore[return-value]  # None can be a response

    def finish(self, response: ResponseT) -> None:
        """Set the outcome, unless there is one."""
        if not self.is_done:
            self._response = response
            self._end()

    def fail(self, error: RmqError) -> None:
        """Set an error as the outcome, unless there is one."""
        if not self.is_done:
            self.error = error
            self._end()

    def _end(self) -> None:
        self.is_done = True
        if self.done is not None:
            self.done.append(self)

    def pause(self, now_s: float) -> None:
        """Set when to send the request again: each pause is twice the one before, from 20 ms to 1 s."""
        self.not_before_s = now_s + min(_FIRST_PAUSE_S * 2**self._pauses, _LAST_PAUSE_S)
        self._pauses += 1
