"""The requests that one broker sends to its clients, and the answers that it waits for.

Source: Broker2Client, NettyRemotingAbstract#invokeSync, #invokeOneway (4.9, 5.3).
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rmq_spark.store.cluster.frame import Command, encode_command
from rmq_spark.store.testing.brokers.connection import Connection
from rmq_spark.store.testing.brokers.event_loop import Timer
from rmq_spark.store.testing.brokers.wire import ONE_WAY

if TYPE_CHECKING:
    from rmq_spark.store.testing.brokers.broker import Broker

OnAnswer = Callable[[Command | None], None]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request without an answer so far, and the timer that ends its time."""

    on_answer: OnAnswer
    timer: Timer


class MemberCalls:
    """The requests of one broker. Their numbers begin at 0, so they also occur among those of a client's requests.

    Only for the loop's thread.
    """

    def __init__(self, broker: "Broker") -> None:
        self._broker = broker
        self._opaques = itertools.count()
        self._waiting: dict[tuple[Connection, int], _Waiting] = {}

    def tell(self, connection: Connection, code: int, fields: Mapping[str, str], body: bytes = b"") -> None:
        """Send a request that is not answered."""
        self._send(connection, code, fields, body, flag=ONE_WAY)

    def ask(
        self, connection: Connection, code: int, fields: Mapping[str, str], body: bytes, on_answer: OnAnswer
    ) -> None:
        """Send a request. `on_answer` gets its answer, or None after `member_answer_s` or when the broker ends.

        A closed connection does not end the waiting.
        """
        opaque = self._send(connection, code, fields, body)
        key = connection, opaque
        timer = self._broker.loop.call_later(self._broker.settings.member_answer_s, lambda: self._end(key, None))
        self._waiting[key] = _Waiting(on_answer, timer)

    def take(self, connection: Connection, answer: Command) -> None:
        """Take an answer. One that nobody waits for is dropped."""
        self._end((connection, answer.opaque), answer)

    def clear(self) -> None:
        """End all waiting."""
        for key in list(self._waiting):
            self._end(key, None)

    def _end(self, key: tuple[Connection, int], answer: Command | None) -> None:
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            waiting.timer.cancel()
            waiting.on_answer(answer)

    def _send(self, connection: Connection, code: int, fields: Mapping[str, str], body: bytes, flag: int = 0) -> int:
        opaque = next(self._opaques)
        number = self._broker.release.number
        request = Command(code, opaque, fields, body, flag=flag, language="JAVA", version=number)
        connection.send(encode_command(request))
        return opaque
