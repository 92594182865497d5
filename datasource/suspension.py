"""Queues that an orderly listener stopped: which of them the next batch leaves alone, and how long. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from rmq_spark.store.units import QueueKey


@dataclass(frozen=True, slots=True)
class Hold:
    """A queue goes on at the queue offset `resume`, not before `until_ms` (ms since the epoch; 0: at once).

    `number` counts the changes of a group's stopped queues.
    """

    resume: int
    until_ms: int
    number: int


@dataclass(frozen=True, slots=True)
class Held:
    """The queues that the next batch leaves alone, and when (ms) the clock alone lets the first one go, if it does."""

    queues: frozenset[QueueKey] = frozenset()
    until_ms: int | None = None


def held_queues(
    holds: Mapping[QueueKey, Hold], begins: Mapping[QueueKey, int], now_ms: int, run_began: int | None
) -> Held:
    """Return what is held of the queues that would go on at `begins`.

    `run_began` is the number of the last change when a run of AvailableNow began, else None. Such a run does not wait:
    what was stopped in it, or must wait longer, is for the next run.
    """
    held = [
        (queue, hold.until_ms)
        for queue, hold in holds.items()
        if hold.until_ms
        and begins.get(queue, hold.resume + 1) <= hold.resume
        and (now_ms < hold.until_ms or (run_began is not None and hold.number > run_began))
    ]
    until_ms = min((until_ms for _, until_ms in held), default=None) if run_began is None else None
    return Held(frozenset(queue for queue, _ in held), until_ms)
