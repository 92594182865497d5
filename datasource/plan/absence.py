"""Queues that cannot be planned because their broker is away, or because the broker was retired. Pure.

A queue whose broker is away keeps its position in the offset, and no batch reads it until the broker is back. The query
logs once that the broker went away, once that it came back, and reports it in its progress meanwhile. A *retired*
broker is one that the option retiredBrokers names: its queues are dropped from the offset once.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rmq_spark.datasource.plan.planning import Bounds
from rmq_spark.store.backend import Away
from rmq_spark.store.model import QueueKey, QueueRange


@dataclass(frozen=True, slots=True)
class AwayBroker:
    """A broker that is away: since when (ms since the epoch), why, and the number of its queues that the query reads.

    If only some of the broker's queues are away, `queues` is their number.
    """

    since_ms: int
    reason: str
    queues: int


def group_by_broker(away: Mapping[QueueKey, Away]) -> dict[str, AwayBroker]:
    """Return the brokers of the queues that are away, sorted by name. The reason is that of the earliest absence."""
    found: dict[str, AwayBroker] = {}
    for one in sorted(away.values(), key=lambda one: (one.broker, one.since_ms)):
        first = found.get(one.broker)
        found[one.broker] = AwayBroker(
            one.since_ms if first is None else first.since_ms,
            one.reason if first is None else first.reason,
            1 if first is None else first.queues + 1,
        )
    return found


def describe_changes(before: Collection[str], after: Mapping[str, AwayBroker]) -> list[str]:
    """Return the log lines about brokers that went away or came back. `before` are the brokers that were away."""
    went = [
        f"the broker {name} is away since {_show(one.since_ms)}: {one.reason.rstrip('.')}. {one.queues} of its "
        "queues keep their offsets and are read when it is back; if it will not come back, set retiredBrokers"
        for name, one in after.items()
        if name not in before
    ]
    return went + [f"the broker {name} is back, and its queues are read again" for name in before if name not in after]


def describe_for_progress(brokers: Mapping[str, AwayBroker]) -> dict[str, Any]:
    """Return the brokers that are away as JSON for the query's progress. Empty if there are none."""
    return {
        name: {"since": _show(one.since_ms), "queues": one.queues, "reason": one.reason}
        for name, one in brokers.items()
    }


def find_overdue(brokers: Mapping[str, AwayBroker], now_ms: int, timeout_ms: int) -> str | None:
    """Return the error text if a broker has been away for `timeout_ms` or longer, else None. 0 means no limit."""
    if not timeout_ms:
        return None
    overdue = [name for name, one in brokers.items() if now_ms - one.since_ms >= timeout_ms]
    return describe_overdue({name: brokers[name] for name in overdue}, timeout_ms) if overdue else None


def describe_overdue(brokers: Mapping[str, AwayBroker], timeout_ms: int) -> str:
    """Return the error text for brokers that were away for longer than brokerDownTimeout."""
    listed = "; ".join(
        f"{name} since {_show(one.since_ms)} ({one.reason.rstrip('.')})" for name, one in brokers.items()
    )
    return (
        f"the query waited longer than brokerDownTimeout={timeout_ms}ms for brokers that are away: {listed}; expected "
        "all brokers of its topics. Start the broker or raise brokerDownTimeout (0 waits for ever). If the broker was "
        "removed, name it in retiredBrokers to continue without its queues."
    )


def describe_retired(positions: Mapping[QueueKey, int], bounds: Bounds) -> list[str]:
    """Return the log lines for queues of retired brokers, which are dropped from the offset: one line for each broker.

    `positions` are their positions in the previous offset. `bounds` has the bounds of those queues that are still
    known; the number of unread messages of the others is unknown.
    """
    lines = []
    for broker in sorted({queue.broker for queue in positions}):
        queues = [queue for queue in positions if queue.broker == broker]
        unread = sum(max(bounds[queue].max_offset - positions[queue], 0) for queue in queues if queue in bounds)
        unknown = sum(queue not in bounds for queue in queues)
        counted = f"{unread} messages of them were not read" if unknown < len(queues) else ""
        rest = f"the number of unread messages in {unknown} of them is unknown" if unknown else ""
        lines.append(
            f"retiredBrokers: the query drops its positions in {len(queues)} queues of the broker {broker}; "
            f"{' and '.join(filter(None, (counted, rest)))}"
        )
    return lines


def describe_left_out(ranges: Collection[QueueRange]) -> list[str]:
    """Return the log lines for a batch that was planned before its brokers were retired: one line for each broker.

    `ranges` are what the batch does not read for this reason.
    """
    counts: dict[str, int] = {}
    for part in ranges:
        counts[part.queue.broker] = counts.get(part.queue.broker, 0) + part.count
    return [
        f"retiredBrokers: the repeated batch leaves out {count} messages of the broker {broker}, which were planned"
        for broker, count in sorted(counts.items())
    ]


def _show(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="seconds")
