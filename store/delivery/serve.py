"""The loop of `rmq serve`, which runs delivery rounds until it is told to stop.

The loop keeps these rules:
- When it is told to stop, it ends after the current round or the current sleep of at most 100 ms.
- Between two rounds it sleeps until the next message is due, but at most 100 ms, so that it notices new messages. If
  the store has not changed, a round costs only a few system calls.
- An error in a round does not end the loop. The scheduler logs the error, and the loop tries again after at most a
  second.
- It logs at most one line per second about delivered messages.

The caller passes in the clock, the sleep function and the stop condition. Signals and terminals are handled elsewhere.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Protocol

from rmq_spark.store.delivery.scheduler import DeliveryRound, DeliveryScheduler
from rmq_spark.store.disk import files
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.log.store_lock import refuse_network
from rmq_spark.store.log.store_state import commit_log_folders
from rmq_spark.store.log.store_writer import WriterSettings

_LOG = logging.getLogger("rmq_spark")

LOOK_MS = 100  # RocketMQ's DELAY_FOR_A_WHILE
RETRY_MS = 1_000
REPORT_MS = 1_000
LOCK_TIMEOUT_MS = 5_000  # if another writer holds the store's lock longer without progress, the next round tries again


class Scheduler(Protocol):
    """The part of `DeliveryScheduler` that `serve` uses."""

    def tick(self, now_ms: int) -> DeliveryRound:
        """Run a delivery round at the time `now_ms` (ms since the epoch)."""


@dataclass(slots=True)
class Served:
    """The totals of a run of the loop."""

    messages: int = 0  # that were delivered
    rounds: int = 0  # rounds that delivered at least one message
    failures: int = 0  # rounds that ended with a problem
    latest_ms: int = 0  # the longest time between a message being due and the end of the round that delivered it


def serve(
    scheduler: Scheduler,
    now_ms: Callable[[], int],
    sleep: Callable[[float], None],
    is_stopped: Callable[[], bool],
    served: Served | None = None,
) -> Served:
    """Deliver messages when they are due, until `is_stopped` returns True. Return the totals.

    `now_ms` returns the time in ms since the epoch. `sleep` takes seconds. If `served` is given, the totals are in it
    after each round, so that another thread can read them.
    """
    served = Served() if served is None else served
    report = _Report(now_ms())
    due_ms: int | None = None
    first_ms: int | None = None  # when the first of the waiting messages is due; None if unknown
    while not is_stopped():
        result = scheduler.tick(now_ms())
        end_ms = now_ms()
        if result.delivered:
            late_ms = 0 if due_ms is None else max(end_ms - due_ms, 0)
            served.messages += result.delivered
            served.rounds += 1
            served.latest_ms = max(served.latest_ms, late_ms)
            report.add(result.delivered, None if first_ms is None else max(end_ms - first_ms, 0))
        report.write(end_ms)
        due_ms = result.next_due_ms
        if due_ms is None or due_ms > end_ms:
            first_ms = due_ms
        elif result.delivered:
            first_ms = None  # more messages are due, but it is unknown since when
        if result.problem is not None:
            served.failures += 1
            # If a source without a problem has a message that is due before the retry, run the next round then.
            next_ms = end_ms if due_ms is None else due_ms
            _pause(min(RETRY_MS, next_ms - end_ms) if next_ms > end_ms else RETRY_MS, sleep, is_stopped)
            continue
        wait_ms = LOOK_MS if due_ms is None else min(max(due_ms - end_ms, 0), LOOK_MS)
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
    served: Served | None = None,
) -> Served:
    """Deliver the messages of the store at `path` when they are due, until `is_stopped` returns True. See `serve`.

    Returns the totals, which are also in `served` after each round, if it is given. Raises StorePathError if there is
    no store at `path`, or if it must not be written to.
    """
    root = files.store_folder(path)
    commit_log_folders(root, commit_log_path)
    refuse_network(root, allowed=allow_network_store)
    settings = WriterSettings("rmq serve", LOCK_TIMEOUT_MS, allow_network_store, commit_log_path)
    _LOG.info("rmq: delivering what is due in %s", root)
    with DeliveryScheduler(root, settings) as scheduler:
        return serve(scheduler, wall_clock_ms, time.sleep, is_stopped, served)


def _pause(pause_ms: int, sleep: Callable[[float], None], is_stopped: Callable[[], bool]) -> None:
    """Sleep for `pause_ms`, but return at most LOOK_MS after `is_stopped` has become true."""
    for begin_ms in range(0, pause_ms, LOOK_MS):
        if is_stopped():
            return
        sleep(min(LOOK_MS, pause_ms - begin_ms) / 1000)


class _Report:
    """Collects what was delivered since the last line of the log, and writes the next line."""

    def __init__(self, now_ms: int) -> None:
        self._written_ms = now_ms - REPORT_MS
        self._messages, self._late_ms, self._is_sure = 0, 0, True

    def add(self, messages: int, late_ms: int | None) -> None:
        """Add delivered messages. `late_ms` is how late the last of them was at most; None if that is unknown."""
        self._messages += messages
        self._late_ms = max(self._late_ms, late_ms or 0)
        self._is_sure = self._is_sure and late_ms is not None

    def write(self, now_ms: int | None) -> None:
        """Log what was added, if the last line is at least REPORT_MS old. If `now_ms` is None, log it in any case."""
        if not self._messages or (now_ms is not None and now_ms - self._written_ms < REPORT_MS):
            return
        if self._is_sure:
            _LOG.info("rmq: delivered %d messages, the last one at most %d ms late", self._messages, self._late_ms)
        else:
            _LOG.info("rmq: delivered %d messages; some may have been due earlier", self._messages)
        self._written_ms = self._written_ms if now_ms is None else now_ms
        self._messages, self._late_ms, self._is_sure = 0, 0, True
