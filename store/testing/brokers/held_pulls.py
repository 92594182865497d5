"""Pulls that a broker holds until messages arrive or their time is over.

Source: PullRequestHoldService (4.9, 5.3).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rmq_spark.store.filter.row_filter import RowFilter
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers.event_loop import Timer
from rmq_spark.store.testing.brokers.wire import Answer, Call, Refusal

if TYPE_CHECKING:
    from rmq_spark.store.testing.brokers.broker import Broker


@dataclass(slots=True, eq=False)
class HeldPull:
    """A pull that waits since `since_s`. Messages before the queue offset `seen_end` were compared with its filter."""

    call: Call
    queue: QueueKey
    offset: int
    seen_end: int
    suspend_ms: int
    wanted: RowFilter | None
    again: Callable[[], Answer | None]  # runs the pull again, and returns its answer
    since_s: float = field(default_factory=time.monotonic)

    def is_over(self) -> bool:
        """Return whether its time is over."""
        return time.monotonic() >= self.since_s + self.suspend_ms / 1000


class HeldPulls:
    """The pulls that one broker holds. Only for the loop's thread."""

    def __init__(self, broker: "Broker") -> None:
        self._broker = broker
        self._waiting: dict[QueueKey, list[HeldPull]] = {}
        self._timer: Timer | None = None

    def __len__(self) -> int:
        """Return how many pulls are held."""
        return sum(map(len, self._waiting.values()))

    def add(self, pull: HeldPull) -> None:
        """Hold a pull. The broker checks its time at each tick, so it waits longer than asked for."""
        self._waiting.setdefault(pull.queue, []).append(pull)
        if self._timer is None:
            self._start_timer()

    def clear(self) -> None:
        """Forget all pulls, as a process does that ends."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look_at_arrivals(self) -> None:
        """Answer the pulls for which a wanted message has arrived."""
        for pull in [pull for pulls in self._waiting.values() for pull in pulls]:
            end = self._broker.store.bounds(pull.queue).max_offset
            begin, pull.seen_end = pull.seen_end, max(end, pull.seen_end)
            if begin < end and self._broker.store.has_wanted(pull.queue, begin, end, pull.wanted):
                self._answer(pull)

    def _tick(self) -> None:
        """Answer the pulls whose time is over, and those that can continue after messages that were not wanted."""
        self._timer = None
        if self._broker.is_frozen:
            self._start_timer()
            return
        for pull in [pull for pulls in self._waiting.values() for pull in pulls]:
            if pull.is_over() or self._broker.store.bounds(pull.queue).max_offset > pull.offset:
                self._answer(pull)
        if self._waiting:
            self._start_timer()

    def _start_timer(self) -> None:
        self._timer = self._broker.loop.call_later(self._broker.settings.tick_ms / 1000, self._tick)

    def _answer(self, pull: HeldPull) -> None:
        """Run the pull again, and send its answer."""
        waiting = self._waiting[pull.queue]
        waiting.remove(pull)
        if not waiting:
            del self._waiting[pull.queue]
        try:
            answer = pull.again()
        except Refusal as refusal:
            answer = refusal.answer
        assert answer is not None
        pull.call.answer(answer)
