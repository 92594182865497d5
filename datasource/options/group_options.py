"""The options of a query's consumer group, and the checks that they fit each other and the other options."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rmq_spark.datasource.options import option_parsers
from rmq_spark.datasource.options.option_parsers import Positions, show_duration
from rmq_spark.datasource.options.option_table import BROADCASTING, GROUP, OPTIONS, field_values, option_field
from rmq_spark.store.backend import Capability, Location, find_strategy
from rmq_spark.store.errors import OptionError
from rmq_spark.store.names import check_consumer_group, retry_topic

_TIME_AND_FALLBACK = (
    "groupFallback=timestamp and startingTimestamp go together in a query that begins at its group's offsets "
    "(startingOffsets=group, or assignment=shared in a stream): the time is for topics in which the group has no "
    "offset. Set both or neither."
)


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """The options of a query that has the option consumerGroup (`group`). Durations are in ms.

    `assignment` is None if nothing is shared and the option is not given. `is_member` is whether a stream with these
    options joins the group.
    """

    group: str = option_field(GROUP, is_required=True)
    assignment: str | None = option_field("assignment")
    strategy: str = option_field("allocateStrategy")
    model: str = option_field("messageModel")
    is_orderly: bool = option_field("orderly")
    commit: str = option_field("commitOffsets")
    on_conflict: str = option_field("onOffsetConflict")
    fallback: str = option_field("groupFallback")
    is_fenced: bool = option_field("fenceLostQueues")
    lease_timeout_ms: int = option_field("leaseTimeout")
    lease_heartbeat_ms: int = option_field("leaseHeartbeat")
    handover_timeout_ms: int = option_field("handoverTimeout")
    subscribes_retry: bool = option_field("subscribeRetry")
    is_member: bool = True

    @property
    def begins_at_group(self) -> bool:
        """Whether a stream begins at the group's offsets in any case: its members share queues, or it does not join."""
        return self.is_shared or not (self.is_member or self.is_broadcasting)

    @property
    def retry_topic(self) -> str | None:
        """The topic with the group's failed messages, or None if the query does not read it."""
        return retry_topic(self.group) if self.subscribes_retry and not self.is_broadcasting else None

    @property
    def is_shared(self) -> bool:
        """Whether the queries of the group share the queues, so that this query reads only some of them."""
        return self.assignment == "shared"

    @property
    def is_broadcasting(self) -> bool:
        """Whether every query of the group reads all queues. Such a query publishes no offsets."""
        return self.model == "broadcasting"


def build_group_options(found: Mapping[str, Any], location: Location | None) -> GroupOptions | None:
    """Return the group options of a query, or None if consumerGroup is not given.

    `found` has the parsed values of the given options, by name. `location` is the place, if the options name one.
    Raises OptionError for a group name that RocketMQ refuses, for an allocation strategy that is unknown or cannot be
    imported, and for group options that are given without consumerGroup, have no effect, are not possible in the place,
    or contradict each other.
    """
    if GROUP not in found:
        for option in OPTIONS:
            if option.requires == GROUP and option.name in found:
                raise OptionError(f"{option.name} requires {GROUP}, which is missing. Add {GROUP}=name.")
        return None
    check_consumer_group(found[GROUP])
    options = _in_place(GroupOptions(**field_values(GroupOptions, found)), location)
    _check_effect(options, found)
    if "allocateStrategy" in found:
        find_strategy(options.strategy)
    if options.is_broadcasting:
        _check_broadcasting(options, found)
    if options.is_shared and options.commit == "off":
        raise OptionError(
            "assignment=shared: found commitOffsets=off; expected auto or required. The group's offsets hand queues "
            "over from query to query."
        )
    if options.lease_heartbeat_ms * 2 > options.lease_timeout_ms:
        raise OptionError(
            f"leaseHeartbeat={show_duration(options.lease_heartbeat_ms)}: expected at most half of "
            f"leaseTimeout={show_duration(options.lease_timeout_ms)}, or one late heartbeat counts as death. Set both, "
            "such as leaseHeartbeat=30s and leaseTimeout=120s."
        )
    return options


def _in_place(options: GroupOptions, location: Location | None) -> GroupOptions:
    """Return the options with what depends on the place: whether the query joins its group, and shares its queues.

    Where queues are not leased, the members of a group always share them, and a query that publishes no offsets would
    hand over queues at offsets that it has not reached. So such a query does not join. Raises OptionError for
    assignment=all there.
    """
    if location is None or Capability.LEASES in location.capabilities:
        return replace(options, is_member=not options.is_broadcasting)
    if options.assignment == "all":
        raise OptionError(
            f"assignment=all: found {location.describe()}, where the members of a group share its queues; expected "
            "shared. Leave assignment out. To read all queues from the group's offsets without joining the group, set "
            "commitOffsets=off."
        )
    can_join = Capability.GROUPS in location.capabilities
    is_member = can_join and not options.is_broadcasting and (options.commit != "off" or options.is_shared)
    return replace(options, is_member=is_member, assignment="shared" if is_member else options.assignment)


def _check_effect(options: GroupOptions, found: Mapping[str, Any]) -> None:
    """Raise OptionError if an option has another value than its default and the other options make it ineffective."""
    if options.fallback == "timestamp" and "startingOffsetsByTimestampStrategy" in found:
        raise OptionError(
            "startingOffsetsByTimestampStrategy has no effect with groupFallback=timestamp: a group begins at the end "
            "of a queue without a message since the time, as in RocketMQ. Leave startingOffsetsByTimestampStrategy out."
        )
    for option in OPTIONS:
        name, value = option.name, found.get(option.name, option.default_value)
        if option.requires != GROUP or value == option.default_value:
            continue
        if options.is_broadcasting and option.conflicts == BROADCASTING:
            raise OptionError(
                f"{name} has no effect with {BROADCASTING}: each query of the group reads all queues from its "
                f"own checkpoint. Leave {name} out."
            )
        if not options.is_member and option.conflicts == BROADCASTING:
            raise OptionError(
                f"{name} has no effect in a cluster with commitOffsets=off: the query does not join its group, and "
                f"reads all queues. Leave {name} out."
            )
        if options.is_shared and name == "onOffsetConflict":
            raise OptionError(
                f"onOffsetConflict={value} has no effect with assignment=shared: a queue resumes at the group's offset "
                "if another member or a reset has moved it, else at the checkpoint. Leave onOffsetConflict out."
            )
        if not options.is_shared and name in ("allocateStrategy", "handoverTimeout"):
            raise OptionError(
                f"{name} has no effect in a query that reads all queues of its group: it is for sharing them. Add "
                f"assignment=shared, or leave {name} out."
            )


def _check_broadcasting(options: GroupOptions, found: Mapping[str, Any]) -> None:
    if options.is_shared:
        raise OptionError(
            f"{BROADCASTING} and assignment=shared are both given. With broadcasting every query reads all queues. "
            "Keep one of them."
        )
    if options.commit == "required":
        raise OptionError(
            f"{BROADCASTING}: found commitOffsets=required; expected auto or off. A query keeps its offsets in its "
            "checkpoint and publishes none. Leave commitOffsets=required out."
        )
    if found.get("subscribeRetry"):
        raise OptionError(
            f"{BROADCASTING}: found subscribeRetry=true; expected false. A message that fails in one query is not "
            "delivered again. Leave subscribeRetry=true out."
        )


def check_start(group: GroupOptions | None, start: Positions | None, *, has_time: bool) -> None:
    """Raise OptionError if startingOffsets (`start`) and the group options contradict each other.

    These checks apply to batch queries and streams. `has_time` is whether startingTimestamp is given.
    """
    begins_at_group = start is not None and start.default == option_parsers.GROUP
    if group is None:
        if begins_at_group:
            raise OptionError(f"startingOffsets=group requires {GROUP}, which is missing. Add {GROUP}=name.")
        return
    if group.is_broadcasting and begins_at_group:
        raise OptionError(
            f"startingOffsets=group: with {BROADCASTING} a group has no offsets, as every query keeps its own in its "
            'checkpoint; expected earliest, latest or {"TopicA": {"0": 42}}.'
        )
    if not begins_at_group and not group.begins_at_group:
        _check_no_fallback(group, "startingOffsets=group, or assignment=shared in a stream")
    if begins_at_group and has_time != (group.fallback == "timestamp"):
        raise OptionError(_TIME_AND_FALLBACK)


def check_stream_start(
    group: GroupOptions | None, start: Positions | None, *, has_time: bool, in_cluster: bool
) -> None:
    """Raise OptionError for a start that a stream which begins at its group's offsets cannot have.

    `start` is startingOffsets, and `has_time` is whether startingTimestamp is given. `in_cluster` is whether the
    members of a group share its queues in any case. Call `check_start` before.
    """
    if group is None or not group.begins_at_group:
        return
    if start is not None and start.default != option_parsers.GROUP:
        if not in_cluster:
            cause = "with assignment=shared a query"
        elif group.is_shared:
            cause = f"a member of group {group.group} in a cluster"
        else:
            cause = "with commitOffsets=off in a cluster a query"
        raise OptionError(
            f"startingOffsets: {cause} begins in each queue at the group's offset. Leave startingOffsets out; "
            "groupFallback is the start of queues without an offset, and rmq_spark.reset_offsets changes the group's "
            f"offsets.{' Or leave consumerGroup out to read without a group.' if in_cluster else ''}"
        )
    if has_time != (group.fallback == "timestamp"):
        raise OptionError(_TIME_AND_FALLBACK)


def check_batch_start(group: GroupOptions | None, start: Positions | None) -> None:
    """Raise OptionError if a batch query has groupFallback but does not begin at its group's offsets.

    `start` is startingOffsets. Call `check_start` before this function.
    """
    if group is not None and (start is None or start.default != option_parsers.GROUP):
        _check_no_fallback(group, "startingOffsets=group (assignment=shared has no effect in a batch query)")


def _check_no_fallback(group: GroupOptions, needed: str) -> None:
    """Raise OptionError if groupFallback is not latest, its default. Only with `needed` would it have an effect."""
    if group.fallback != "latest":
        raise OptionError(
            f"groupFallback={group.fallback} has no effect in a query that does not begin at its group's offsets. Add "
            f"{needed}, or leave groupFallback out."
        )
