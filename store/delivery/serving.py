"""Delivering what is due, again and again, until somebody says stop: the loop of `rmq serve`.

Invariants:
- stopping waits for the tick that runs, and for nothing else;
- between two ticks it sleeps until the next message is due, and looks at the store every 100 ms for what was appended
  meanwhile; a look at a store in which nothing moved costs a few calls;
- an error of one tick ends nothing: what could not be delivered is tried again after 10 s, as a broker does
  (ScheduleMessageService, 4.9 and 5.3: DELAY_FOR_A_PERIOD);
- at most one line a second says what was delivered.

Clock, sleep and the word to stop are arguments; nothing here knows of signals or terminals.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rmq_spark.store.errors import RmqError

_LOG = logging.getLogger("rmq_spark")

LOOK_MS = 100  # RocketMQ's DELAY_FOR_A_WHILE
RETRY_MS = 10_000
REPORT_MS = 1_000


class TickResult(Protocol):
    """What one tick came to: how many messages were delivered, and when (ms) the next one is due, if any is."""

    @property
    def delivered(self) -> int:
        """How many messages."""

    @property
    def next_due_ms(self) -> int | None:
        """When the next one is due, in ms since the epoch; None if none waits."""


class Ticking(Protocol):
    """What delivers: `ticker.Ticker`, or a test's."""

    def tick(self, now_ms: int) -> TickResult:
        """Deliver what is due."""


@dataclass(slots=True)
class Served:
    """What a run delivered: messages, the ticks that did, the errors of others, and the latest (ms) behind its time."""

    messages: int = 0
    ticks: int = 0
    errors: int = 0
    latest_ms: int = 0


def serve(
    ticker: Ticking,
    now_ms: Callable[[], int],
    sleep: Callable[[float], None],
    is_stopped: Callable[[], bool],
) -> Served:
    """Deliver what is due until `is_stopped`; return what was. `sleep` takes seconds, `now_ms` is since the epoch."""
    served, report = Served(), _Report(now_ms())
    due_ms: int | None = None
    while not is_stopped():
        began_ms = now_ms()
        try:
            tick = ticker.tick(began_ms)
        except RmqError as error:
            served.errors += 1
            _LOG.error("rmq: nothing was delivered, next try in %g s: %s", RETRY_MS / 1000, error)
            _pause(RETRY_MS, sleep, is_stopped)
            continue
        over_ms = now_ms()
        if tick.delivered:
            late_ms = 0 if due_ms is None else max(over_ms - due_ms, 0)
            served.messages += tick.delivered
            served.ticks += 1
            served.latest_ms = max(served.latest_ms, late_ms)
            report.add(tick.delivered, late_ms)
        report.write(over_ms)
        due_ms = tick.next_due_ms
        wait_ms = LOOK_MS if due_ms is None else min(max(due_ms - over_ms, 0), LOOK_MS)
        if wait_ms and not is_stopped():
            sleep(wait_ms / 1000)
    report.write(None)
    return served


def _pause(pause_ms: int, sleep: Callable[[float], None], is_stopped: Callable[[], bool]) -> None:
    """Sleep, but not on when told to stop."""
    for _ in range(pause_ms // LOOK_MS):
        if is_stopped():
            return
        sleep(LOOK_MS / 1000)


class _Report:
    """The line that is to be written next."""

    def __init__(self, now_ms: int) -> None:
        self._written_ms = now_ms - REPORT_MS
        self._messages = self._late_ms = 0

    def add(self, messages: int, late_ms: int) -> None:
        self._messages += messages
        self._late_ms = max(self._late_ms, late_ms)

    def write(self, now_ms: int | None) -> None:
        """Write what there is, if the last line is old enough; None: whatever its age."""
        if not self._messages or (now_ms is not None and now_ms - self._written_ms < REPORT_MS):
            return
        _LOG.info("rmq: delivered %d messages, the last within %d ms of its time", self._messages, self._late_ms)
        self._written_ms = self._written_ms if now_ms is None else now_ms
        self._messages = self._late_ms = 0
