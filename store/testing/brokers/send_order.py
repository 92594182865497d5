"""The order in which a broker executes sends that are in flight together.

A broker executes them with several threads, so messages of one connection to one queue may be stored in any order. This
broker has one thread. With the setting `holds_sends_ms` it collects the sends of each queue for a time, and then
executes them in another order. So a test notices a client with two requests in flight for a queue.
Source: BrokerConfig#sendMessageThreadPoolNums (4.9, 5.3).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers.wire import Answer, Call, Refusal

if TYPE_CHECKING:
    from rmq_spark.store.testing.brokers.broker import Broker

NEWEST_FIRST, SHUFFLED, ARRIVAL = "newest first", "shuffled", "arrival"


@dataclass(slots=True)
class HeldSend:
    """A send that waits, and the function that executes it."""

    call: Call
    execute: Callable[[], Answer]


class SendOrder:
    """The sends that one broker has received and not executed. Only for the loop's thread.

    `most_in_flight` is, for each queue that a client named, how many sends were in flight together at most. Queue id -1
    has a number of its own. The numbers exceed 1 only while the broker holds sends.
    """

    def __init__(self, broker: "Broker") -> None:
        self.most_in_flight: dict[QueueKey, int] = {}
        self._broker = broker
        self._held: dict[QueueKey, list[HeldSend]] = {}
        self._random = Random(0)

    def run(self, queue: QueueKey, call: Call, execute: Callable[[], Answer]) -> Answer | None:
        """Execute a send and return its answer. Or hold it, return None, and answer later."""
        hold_ms = self._broker.settings.holds_sends_ms
        held = self._held.setdefault(queue, [])
        count = len(held) + 1
        self.most_in_flight[queue] = max(self.most_in_flight.get(queue, 0), count)
        if not held and not hold_ms:
            del self._held[queue]
            return execute()
        held.append(HeldSend(call, execute))
        if count == 1:
            self._start_timer(queue)
        return None

    def choose(self, count: int) -> int:
        """Return a random number below `count`."""
        return self._random.randrange(count)

    def clear(self) -> None:
        """Forget all sends, as a process does that ends."""
        self._held.clear()

    def _start_timer(self, queue: QueueKey) -> None:
        delay_s = self._broker.settings.holds_sends_ms / 1000
        self._broker.loop.call_later(delay_s, functools.partial(self._release, queue))

    def _release(self, queue: QueueKey) -> None:
        """Execute the sends of a queue that were collected."""
        if self._broker.is_frozen and queue in self._held:
            self._start_timer(queue)
            return
        sends = self._held.pop(queue, [])
        order = self._broker.settings.send_order
        assert order in (NEWEST_FIRST, SHUFFLED, ARRIVAL), order
        if order == NEWEST_FIRST:
            sends.reverse()
        elif order == SHUFFLED:
            self._random.shuffle(sends)
        for send in sends:
            try:
                answer = send.execute()
            except Refusal as refusal:
                answer = refusal.answer
            send.call.answer(answer)
