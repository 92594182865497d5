"""The trends of topics and groups, from two looks at a store or a cluster. Pure.

A rate is the difference of two looks divided by the time between them, so it is never an average over a longer time.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rmq_spark.store.model import QueueBounds, QueueKey

GROWING, SHRINKING, STEADY = "growing", "shrinking", "steady"


class GroupLook(NamedTuple):
    """The lag of a group at one moment: unread messages, and the age of the oldest of them in seconds, or None.

    `unknown_queues` is the number of queues that are not in the sum, because their broker is away.
    """

    messages: int | None
    seconds_behind: float | None
    unknown_queues: int = 0


@dataclass(frozen=True, slots=True)
class Look:
    """The state of a place at one moment. `at_s` is a time in seconds that never runs back.

    `bounds` has the queues that can be read. `listed` are the topics that have been listed until then, with the topics
    whose queues cannot be read.
    """

    at_s: float
    bounds: Mapping[QueueKey, QueueBounds]
    groups: Mapping[str, GroupLook] = field(default_factory=dict)
    listed: Collection[str] = frozenset()


class TopicTrend(NamedTuple):
    """A topic between two looks. `messages` are those that it has now."""

    topic: str
    messages: int
    messages_per_s: float
    bytes_per_s: float | None


class GroupTrend(NamedTuple):
    """A group between two looks: its lag, by how much the lag changes in a second, and whether it grows.

    `unknown_queues` is the number of queues without a known lag now. There is no trend if one of the looks has some.
    """

    group: str
    lag_messages: int | None
    lag_per_s: float | None
    trend: str | None
    seconds_behind: float | None
    unknown_queues: int = 0


def new_ranges(before: Look, now: Look) -> dict[QueueKey, tuple[int, int]]:
    """Return the queue offsets [begin, end) that queues have got since. Queues of a new topic have got all of theirs.

    A queue that could not be read before or now is left out, and so is one that went back.
    """
    ranges = {}
    listed = {queue.topic for queue in before.bounds} | set(before.listed)
    for queue, bounds in now.bounds.items():
        known = before.bounds.get(queue)
        if known is None and queue.topic in listed:
            continue  # its broker was away, so it is not known what is new
        begin = bounds.min_offset if known is None else max(known.max_offset, bounds.min_offset)
        if begin < bounds.max_offset:
            ranges[queue] = begin, bounds.max_offset
    return ranges


def topic_trends(before: Look, now: Look, sizes: Mapping[str, int | None]) -> list[TopicTrend]:
    """Return the trends of all topics, the busiest first. `sizes` are the bytes of the new messages by topic."""
    seconds = max(now.at_s - before.at_s, 1e-9)
    totals: dict[str, int] = {}
    for queue, bounds in now.bounds.items():
        totals[queue.topic] = totals.get(queue.topic, 0) + bounds.max_offset - bounds.min_offset
    counts = dict.fromkeys(totals, 0)
    for queue, (begin, end) in new_ranges(before, now).items():
        counts[queue.topic] += end - begin
    trends = []
    for topic, total in totals.items():
        size = sizes.get(topic) if counts[topic] else 0
        trends.append(TopicTrend(topic, total, counts[topic] / seconds, None if size is None else size / seconds))
    return sorted(trends, key=lambda one: (-one.messages_per_s, one.topic))


def group_trends(before: Look, now: Look) -> list[GroupTrend]:
    """Return the trends of all groups, the largest lag first."""
    seconds = max(now.at_s - before.at_s, 1e-9)
    trends = []
    for group, look in now.groups.items():
        known = before.groups.get(group)
        change = None
        if look.messages is not None and known is not None and known.messages is not None:
            change = None if look.unknown_queues or known.unknown_queues else look.messages - known.messages
        trend = None if change is None else GROWING if change > 0 else SHRINKING if change < 0 else STEADY
        rate = None if change is None else change / seconds
        trends.append(GroupTrend(group, look.messages, rate, trend, look.seconds_behind, look.unknown_queues))
    return sorted(trends, key=lambda one: (-(one.lag_messages or 0), one.group))
