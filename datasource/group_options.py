"""How a query takes part in its consumer group: the options for that, checked against each other and the rest."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rmq_spark.datasource.values import GROUP, Positions, show_duration
from rmq_spark.store import check_consumer_group, find_strategy, retry_topic_of
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
    "handoverTimeout": "handover_timeout_ms",
    "subscribeRetry": "subscribes_retry",
}
# What means nothing without a group.
_FOR_GROUPS = [name for name in GROUP_FIELDS if name != "consumerGroup"]
# What means nothing where every query reads all queues whatever the others do.
_NOT_FOR_BROADCASTING = (
    "allocateStrategy",
    "orderly",
    "onOffsetConflict",
    "fenceLostQueues",
    "leaseTimeout",
    "leaseHeartbeat",
    "handoverTimeout",
)
_TIME_AND_FALLBACK = (
    "groupFallback=timestamp and startingTimestamp go together, where a query begins at its group "
    "(startingOffsets=group, or assignment=shared in a stream): the time is for topics in which the group has no "
    "offset."
)


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
    handover_timeout_ms: int = 60_000
    subscribes_retry: bool = True

    @property
    def retry_topic(self) -> str | None:
        """The topic in which the group's failed messages come again; None if the query does not read it."""
        return retry_topic_of(self.group) if self.subscribes_retry and not self.is_broadcasting else None

    @property
    def is_shared(self) -> bool:
        """Say whether the query has a part of the queues only."""
        return self.assignment == "shared"

    @property
    def is_broadcasting(self) -> bool:
        """Say whether the query reads all queues whoever else does, and publishes nothing."""
        return self.model == "broadcasting"


_DEFAULTS = {field.name: field.default for field in fields(GroupOptions)}


def build_group_options(found: Mapping[str, Any]) -> GroupOptions | None:
    """Return the group's options of those that were given, None without consumerGroup.

    Raises OptionError for a name that RocketMQ refuses, for a strategy that does not exist or cannot be imported, and
    for options that mean nothing without a group or contradict each other.
    """
    if "consumerGroup" not in found:
        for name in _FOR_GROUPS:
            if name in found:
                raise OptionError(f"{name} is about a consumer group, and none was given. Add consumerGroup=name.")
        return None
    check_consumer_group(found["consumerGroup"])
    options = GroupOptions(**{field: found[name] for name, field in GROUP_FIELDS.items() if name in found})
    _refuse_idle(options, found)
    if "allocateStrategy" in found:
        find_strategy(options.strategy)
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
    if options.is_broadcasting and found.get("subscribeRetry"):
        raise OptionError(
            "messageModel=broadcasting has no retries: what fails in one query is not consumed again. Leave "
            "subscribeRetry=true out."
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


def _refuse_idle(options: GroupOptions, found: Mapping[str, Any]) -> None:
    """Raise OptionError for what was given and would change nothing beside the rest. A default says nothing new."""
    if options.fallback == "timestamp" and "startingOffsetsByTimestampStrategy" in found:
        raise OptionError(
            "startingOffsetsByTimestampStrategy is for a query that begins at a time. A group that does, by "
            "groupFallback=timestamp, begins at the end of a queue in which nothing was stored since, as with "
            "RocketMQ. Leave startingOffsetsByTimestampStrategy out."
        )
    changed = [name for name, field in GROUP_FIELDS.items() if getattr(options, field) != _DEFAULTS[field]]
    for name in changed:
        if options.is_broadcasting and name in _NOT_FOR_BROADCASTING:
            raise OptionError(
                f"{name}={found[name]} is about what the queries of a group have to settle among them. With "
                f"messageModel=broadcasting each of them reads all queues from its own checkpoint. Leave {name} out."
            )
        if options.is_shared and name == "onOffsetConflict":
            raise OptionError(
                f"onOffsetConflict={found[name]} is for a query that is alone in its group. With assignment=shared a "
                "queue goes on at the further of the checkpoint and the group's offset. Leave onOffsetConflict out."
            )
        if not options.is_shared and name == "allocateStrategy":
            raise OptionError(
                f"allocateStrategy={found[name]} says how the queries of a group share its queues, and this one reads "
                "them all. Add assignment=shared, or leave allocateStrategy out."
            )
        if not options.is_shared and name == "handoverTimeout":
            raise OptionError(
                "handoverTimeout limits how long a query keeps queues that other queries of the group "
                "wait for, and this one shares no queues. Add assignment=shared, or leave handoverTimeout out."
            )


def check_start(group: GroupOptions | None, start: Positions | None, *, has_time: bool) -> None:
    """Raise OptionError where the start and the group's options contradict each other in any kind of query."""
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
    if not begins_at_group and not group.is_shared:
        _refuse_fallback(group, "startingOffsets=group, or assignment=shared in a stream")
    if begins_at_group and has_time != (group.fallback == "timestamp"):
        raise OptionError(_TIME_AND_FALLBACK)


def check_stream_start(group: GroupOptions | None, start: Positions | None, *, has_time: bool) -> None:
    """Raise OptionError for a start that a stream whose queues are shared cannot have. After `check_start`."""
    if group is None or not group.is_shared:
        return
    if start is not None and start.default != GROUP:
        raise OptionError(
            "startingOffsets: with assignment=shared a query begins in each queue where the group stands, for others "
            "have read it before. Leave startingOffsets out; groupFallback says where a queue without an offset "
            "begins, and rmq_spark.reset_offsets sets the group elsewhere."
        )
    if has_time != (group.fallback == "timestamp"):
        raise OptionError(_TIME_AND_FALLBACK)


def check_batch_start(group: GroupOptions | None, start: Positions | None) -> None:
    """Raise OptionError for a fallback of a start that a batch query does not have. After `check_start`."""
    if group is not None and (start is None or start.default != GROUP):
        _refuse_fallback(group, "startingOffsets=group (a batch query takes no part in assignment=shared)")


def _refuse_fallback(group: GroupOptions, needed: str) -> None:
    """Raise OptionError if there is a fallback, which the query has no use for; it would have with what is `needed`."""
    if group.fallback != "latest":
        raise OptionError(
            f"groupFallback={group.fallback} is for topics in which a group has no offset, in a query that begins "
            f"where its group stands. That takes {needed}. Add it, or leave groupFallback out."
        )
