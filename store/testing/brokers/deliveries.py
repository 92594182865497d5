"""Deliveries of messages that wait: the engine delivers them from the broker's directory when they are due.

Source: ScheduleMessageService, TimerMessageStore (5.3), ScheduleMessageService (4.9).
"""

from typing import TYPE_CHECKING

from rmq_spark.store.delivery.scheduler import DeliveryScheduler
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.testing.brokers.event_loop import Timer
from rmq_spark.store.testing.brokers.message_store import MessageStore

if TYPE_CHECKING:
    from pathlib import Path

    from rmq_spark.store.testing.brokers.broker import Broker

_MORE_MS = 1  # a delivery begins this much after the time at which the first message is due


class Deliveries:
    """The deliveries of one broker. Only for the loop's thread.

    A broker that is stopped or frozen delivers nothing; it continues when it starts. With the setting `delivers` False,
    only `deliver` delivers.
    """

    def __init__(self, broker: "Broker") -> None:
        self._broker = broker
        self._timer: Timer | None = None
        self._has_waiting = False  # whether a client has sent a message that waits

    def deliver(self, now_ms: int) -> int:
        """Deliver what is due at a time (ms since the epoch), and return how many messages that were."""
        count = 0

        def run(path: "Path") -> None:
            nonlocal count
            with DeliveryScheduler(str(path)) as scheduler:
                while True:
                    done = scheduler.tick(now_ms)
                    assert done.problem is None, done.problem
                    count += done.delivered
                    if done.next_due_ms is None or done.next_due_ms > now_ms:
                        break
            self.clear()
            if done.next_due_ms is not None:
                self._start_timer(done.next_due_ms - wall_clock_ms())

        self._broker.write(run)
        return count

    def look(self) -> None:
        """Deliver what is due, and find out when the next message is. Call it when a message begins to wait."""
        broker = self._broker
        self._has_waiting = True
        is_active = broker.settings.delivers and broker.is_running and not broker.is_frozen
        if is_active and isinstance(broker.store, MessageStore):
            self.deliver(wall_clock_ms())

    def resume(self) -> None:
        """Continue after the broker was stopped or frozen."""
        if self._has_waiting:
            self.look()

    def clear(self) -> None:
        """Deliver nothing from now on, as a process that ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self, delay_ms: int) -> None:
        if self._broker.settings.delivers:
            self._timer = self._broker.loop.call_later((max(delay_ms, 0) + _MORE_MS) / 1000, self.look)
