"""How a query takes part in its consumer group: the options for that, checked against each other and the rest."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rmq_spark.datasource.values import GROUP, Positions, show_duration
from rmq_spark.store import check_consumer_group
from rmq_spark.store.errors import OptionError

# Option -> where its value goes.
GROUP_FIELDS = {
    "consumerGroup": "group",
    "assignment": "assignment",
    "allocateStrategy": "strategy",
    "messageModel": "model",
    "orderly": "is_orderly",
    "commitOffsets": "commit",
    "onOffsetConflict": "on_conflict",
    "groupFallback": "fallback",
    "fenceLostQueues": "is_fenced",
    "leaseTimeout": "lease_timeout_ms",
    "leaseHeartbeat": "lease_heartbeat_ms",
}
# What means nothing without a group.
_FOR_GROUPS = [name for name in GROUP_FIELDS if name != "consumerGroup"]


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """A query's part in the group `group`. Times in ms."""

    group: str
    assignment: str = "all"
    strategy: str = "avg"
    model: str = "clustering"
    is_orderly: bool = False
    commit: str = "auto"
    on_conflict: str = "checkpoint"
    fallback: str = "latest"
    is_fenced: bool = False
    lease_timeout_ms: int = 120_000
    lease_heartbeat_ms: int = 30_000

    @property
    def is_shared(self) -> bool:
        """Say whether the query has a part of the queues only."""
        return self.assignment == "shared"

    @property
    def is_broadcasting(self) -> bool:
        """Say whether the query reads all queues whoever else does, and publishes nothing."""
        return self.model == "broadcasting"


def build_group_options(found: Mapping[str, Any]) -> GroupOptions | None:
    """Return the group's options of those that were given, None without consumerGroup.

    Raises OptionError for a name that RocketMQ refuses, and for options that mean nothing without a group or contradict
    each other.
    """
    if "consumerGroup" not in found:
        for name in _FOR_GROUPS:
            if name in found:
                raise OptionError(f"{name} is about a consumer group, and none was given. Add consumerGroup=name.")
        return None
    check_consumer_group(found["consumerGroup"])
    options = GroupOptions(**{field: found[name] for name, field in GROUP_FIELDS.items() if name in found})
    if options.is_broadcasting and options.is_shared:
        raise OptionError(
            "messageModel=broadcasting and assignment=shared are both given. In broadcasting every query reads all "
            "queues, so none are shared. Keep one of them."
        )
    if options.is_broadcasting and options.commit == "required":
        raise OptionError(
            "messageModel=broadcasting publishes no offsets: they are in the query's checkpoint. Leave "
            "commitOffsets=required out."
        )
    if options.is_shared and options.commit == "off":
        raise OptionError(
            "assignment=shared hands queues over by the group's offsets, which commitOffsets=off keeps from being "
            "published. Accepted with it: auto, required."
        )
    if options.lease_heartbeat_ms * 2 > options.lease_timeout_ms:
        raise OptionError(
            f"leaseHeartbeat={show_duration(options.lease_heartbeat_ms)} is more than half of "
            f"leaseTimeout={show_duration(options.lease_timeout_ms)}: one late sign of life would count as death. "
            "Accepted: at most half, such as 30s of 120s."
        )
    return options


def check_start(group: GroupOptions | None, start: Positions | None, *, has_time: bool) -> None:
    """Raise OptionError where the start and the group's options contradict each other."""
    begins_at_group = start is not None and start.default == GROUP
    if group is None:
        if begins_at_group:
            raise OptionError("startingOffsets=group needs to know which one. Add consumerGroup=name.")
        return
    if group.is_broadcasting and begins_at_group:
        raise OptionError(
            "startingOffsets=group: with messageModel=broadcasting a group has no offsets, every query has its own in "
            'its checkpoint. Accepted: earliest, latest, {"TopicA": {"0": 42}}.'
        )
    if group.is_shared and start is not None and not begins_at_group:
        raise OptionError(
            "startingOffsets: with assignment=shared a query begins in each queue where the group stands, for others "
            "have read it before. Leave startingOffsets out; groupFallback says where a queue without an offset "
            "begins, and rmq_spark.reset_offsets sets the group elsewhere."
        )
    if (group.fallback == "timestamp") != (has_time and (begins_at_group or group.is_shared)):
        raise OptionError(
            "groupFallback=timestamp and startingTimestamp go together, with startingOffsets=group (or "
            "assignment=shared): the time is for queues in which the group has no offset."
        )
