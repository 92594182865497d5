"""Delivering what is due, again and again, until somebody says stop: the loop of `rmq serve`.

Invariants:
- stopping waits for the tick that runs, and for nothing else;
- between two ticks it sleeps until the next message is due, and looks at the store every 100 ms for what was appended
  meanwhile; a look at a store in which nothing moved costs a few calls;
- an error of one tick ends nothing: what could not be delivered is tried again a second later. The ticker has told it;
- at most one line a second says what was delivered.

Clock, sleep and the word to stop are arguments; nothing here knows of signals or terminals.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Protocol

from rmq_spark.store.delivery.ticker import Ticker
from rmq_spark.store.disk import files
from rmq_spark.store.disk.chance import wall_clock_ms
from rmq_spark.store.errors import RmqError
from rmq_spark.store.log.store_kind import commit_log_folders
from rmq_spark.store.log.store_lock import refuse_network
from rmq_spark.store.log.store_writer import WriterSettings

_LOG = logging.getLogger("rmq_spark")

LOOK_MS = 100  # RocketMQ's DELAY_FOR_A_WHILE
RETRY_MS = 1_000
REPORT_MS = 1_000
LOCK_TIMEOUT_MS = 5_000  # for a writer of ours that makes no progress: the next tick tries again


class TickResult(Protocol):
    """What one tick came to: how many messages were delivered, and when (ms) the next one is due, if any is."""

    @property
    def delivered(self) -> int:
        """How many messages."""

    @property
    def next_due_ms(self) -> int | None:
        """When the next one is due, in ms since the epoch; None if none waits."""

    @property
    def problem(self) -> RmqError | None:
        """Why what may be due was not delivered."""


class Ticking(Protocol):
    """What delivers: `ticker.Ticker`, or a test's."""

    def tick(self, now_ms: int) -> TickResult:
        """Deliver what is due."""


@dataclass(slots=True)
class Served:
    """What a run delivered: messages, the ticks that did, problems of others, and the latest (ms) behind its time."""

    messages: int = 0
    ticks: int = 0
    problems: int = 0
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
    first_ms: int | None = None  # when the first message is due that is left, if it is known
    while not is_stopped():
        tick = ticker.tick(now_ms())
        over_ms = now_ms()
        if tick.delivered:
            late_ms = 0 if due_ms is None else max(over_ms - due_ms, 0)
            served.messages += tick.delivered
            served.ticks += 1
            served.latest_ms = max(served.latest_ms, late_ms)
            report.add(tick.delivered, None if first_ms is None else max(over_ms - first_ms, 0))
        report.write(over_ms)
        due_ms = tick.next_due_ms
        if due_ms is None or due_ms > over_ms:
            first_ms = due_ms
        elif tick.delivered:
            first_ms = None  # more is due, since whenever
        if tick.problem is not None:
            served.problems += 1
            # What it could not deliver keeps nobody else's messages waiting.
            next_ms = over_ms if due_ms is None else due_ms
            _pause(min(RETRY_MS, next_ms - over_ms) if next_ms > over_ms else RETRY_MS, sleep, is_stopped)
            continue
        wait_ms = LOOK_MS if due_ms is None else min(max(due_ms - over_ms, 0), LOOK_MS)
        if wait_ms and not is_stopped():
            sleep(wait_ms / 1000)
    report.write(None)
    return served


def serve_store(
    path: str | PurePath,
    is_stopped: Callable[[], bool],
    *,
    commit_log_path: str | None = None,
    allow_network_store: bool = False,
) -> Served:
    """Deliver what is due in the store at `path` until `is_stopped`. See `serve`.

    Raises StorePathError for a path that holds no store, or one that cannot be written.
    """
    root = files.absolute(path)
    commit_log_folders(root, commit_log_path)
    refuse_network(root, allowed=allow_network_store)
    settings = WriterSettings("rmq serve", LOCK_TIMEOUT_MS, allow_network_store, commit_log_path)
    _LOG.info("rmq: delivering what is due in %s", root)
    with Ticker(root, settings) as ticker:
        return serve(ticker, wall_clock_ms, time.sleep, is_stopped)


def _pause(pause_ms: int, sleep: Callable[[float], None], is_stopped: Callable[[], bool]) -> None:
    """Sleep, but not on when told to stop."""
    for begin_ms in range(0, pause_ms, LOOK_MS):
        if is_stopped():
            return
        sleep(min(LOOK_MS, pause_ms - begin_ms) / 1000)


class _Report:
    """The line that is to be written next."""

    def __init__(self, now_ms: int) -> None:
        self._written_ms = now_ms - REPORT_MS
        self._messages, self._late_ms, self._is_sure = 0, 0, True

    def add(self, messages: int, late_ms: int | None) -> None:
        """Add messages of which the last came so late; None: that is not known."""
        self._messages += messages
        self._late_ms = max(self._late_ms, late_ms or 0)
        self._is_sure = self._is_sure and late_ms is not None

    def write(self, now_ms: int | None) -> None:
        """Write what there is, if the last line is old enough; None: whatever its age."""
        if not self._messages or (now_ms is not None and now_ms - self._written_ms < REPORT_MS):
            return
        if self._is_sure:
            _LOG.info("rmq: delivered %d messages, the last within %d ms of its time", self._messages, self._late_ms)
        else:
            _LOG.info("rmq: delivered %d messages; some may have been due before", self._messages)
        self._written_ms = self._written_ms if now_ms is None else now_ms
        self._messages, self._late_ms, self._is_sure = 0, 0, True
