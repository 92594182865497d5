"""The positions before the next batch of a stream: where a new query begins, and which messages are missing. Pure.

The reader finds the offsets of times and logs what this module returns. `queues_to_resolve` says for which queues it
must find the offset of a time, and `resolve_progress` is the step from one batch to the next.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from rmq_spark.datasource.options.option_parsers import EARLIEST, LATEST
from rmq_spark.datasource.options.read_options import ReadOptions
from rmq_spark.datasource.plan.batch_assignment import BatchAssignment
from rmq_spark.datasource.plan.offsets import StreamOffset
from rmq_spark.datasource.plan.planning import (
    Bounds,
    Loss,
    Progress,
    check_progress,
    describe_unsubscribed,
    list_queues,
    resolve_positions,
)
from rmq_spark.store.model import QueueKey


@dataclass(frozen=True, slots=True)
class StartState:
    """The start of a new query in each queue, by startingOffsets and startingTimestamp, and the losses found there.

    The first plan of a run determines it. If the first batch is planned again, the query begins at the same offsets.
    """

    starts: Mapping[QueueKey, int]
    losses: list[Loss]


@dataclass(frozen=True, slots=True)
class ProgressFacts:
    """What the next batch depends on.

    - `before`: the previous offset, without the queues of other members.
    - `bounds`: the bounds of the queues that the batch may read.
    - `assignment`: the queues and positions that the group sets.
    - `unsubscribed`: the queues in `before` to which the query does not subscribe.
    - `by_time`: the start offset by startingTimestamp of each queue in `queues_to_resolve` that has such a time.
    - `later`: the start offset of each queue in `later_times`.
    - `away`: the queues whose broker is away. They are not in `bounds`.
    - `gone`: the reason for each queue that was deleted or replaced. It is not in `bounds` either.
    - `retired`: the queues in `before` whose broker the user has retired.
    """

    before: StreamOffset
    bounds: Bounds
    assignment: BatchAssignment = field(default_factory=BatchAssignment)
    unsubscribed: Collection[QueueKey] = ()
    by_time: Mapping[QueueKey, int] = field(default_factory=dict)
    later: Mapping[QueueKey, int] = field(default_factory=dict)
    away: Collection[QueueKey] = ()
    gone: Mapping[QueueKey, str] = field(default_factory=dict)
    retired: Collection[QueueKey] = ()


@dataclass(frozen=True, slots=True)
class ProgressStep:
    """The result of `resolve_progress`.

    `state` replaces the given state, also if reporting a loss raises an error. `warning` is logged before the losses.
    Each list in `reports` has losses that are reported together, in this order. They are in `progress` too, which also
    has losses that were reported before.
    """

    state: StartState | None
    progress: Progress
    reports: list[list[Loss]]
    warning: str | None = None


def queues_to_resolve(state: StartState | None, before: StreamOffset, bounds: Bounds, options: ReadOptions) -> Bounds:
    """Return the queues in which `resolve_progress` will determine the start by the options of the query.

    There are none if the query is not new, or if an earlier step has determined its starts.
    """
    if state is not None or not _is_first(before, options):
        return {}
    return {queue: one for queue, one in bounds.items() if not options.begins_as_retry(queue)}


CLOCK_SKEW_MS = 60_000  # how much the clocks of driver and broker may differ


def frozen_since(options: ReadOptions, now_ms: int) -> int | None:
    """Return the time from which a query that begins now reads the queues that it meets after its first batch.

    The offset of the first batch has this time (ms since the epoch) as `since`. None if the query begins at earliest,
    also if only in queues without an offset of its group, or if it is a member of the group whose offsets it begins at.
    `now_ms` is the driver's clock, so `CLOCK_SKEW_MS` are allowed before it.
    """
    start, times = options.starting_offsets, options.starting_times
    if options.begins_at_group and options.group is not None:
        if options.is_member or options.group.fallback == "earliest":
            return None
    elif start is not None and start.default == EARLIEST:
        return None
    since_ms = now_ms - CLOCK_SKEW_MS
    return since_ms if times is None or times.default_ms is None else min(times.default_ms, since_ms)


def later_times(before: StreamOffset, bounds: Bounds, options: ReadOptions) -> dict[QueueKey, int]:
    """Return the queues in `bounds` that the query meets after its first batch and that begin at a time, with the time.

    Other new queues begin at their first message. This is so in a store directory, where a queue is never away. If the
    query begins at the offsets of its group, only queues without such an offset begin at this time.
    """
    if not before.has_brokers or before.is_initial():
        return {}
    named = {} if options.starting_offsets is None else options.starting_offsets.queues
    found = {}
    for queue in bounds:
        if queue in before.positions or named.get(queue) == EARLIEST or options.begins_as_retry(queue):
            continue
        times_ms = [
            time_ms
            for time_ms in (before.since_ms, *options.starting_times_of([queue]).values())
            if time_ms is not None
        ]
        if times_ms:
            found[queue] = min(times_ms)
    return found


def resolve_progress(state: StartState | None, facts: ProgressFacts, options: ReadOptions) -> ProgressStep:
    """Return the positions of the queues before the next batch, and the losses to report.

    `state` is that of the previous step of this run, or None. Raises NotFoundError for a queue in startingOffsets that
    is not in the bounds, and, unless failOnDataLoss is false, OffsetRangeError for an offset in startingOffsets beyond
    the end of its queue.
    """
    before, bounds, assignment = facts.before, facts.bounds, facts.assignment
    is_first = _is_first(before, options)
    # In its first batch a query begins at the group only in retry topics: it must read earlier failures.
    group_starts = {
        queue: offset
        for queue, offset in assignment.starts.items()
        if queue in bounds and (not is_first or options.begins_as_retry(queue))
    }
    group_bounds, name = {queue: bounds[queue] for queue in group_starts}, "the consumer group's offset"
    starts, losses = resolve_positions(group_bounds, None, group_starts, LATEST, name, clip=True)
    dropped = {*facts.unsubscribed, *facts.retired}
    if not is_first:
        warning = None
        if facts.unsubscribed:
            problem = describe_unsubscribed(facts.unsubscribed, str(options.subscription))
            warning = f"failOnDataLoss=false: {problem}. The query drops these positions"
        progress = check_progress(before, bounds, {**facts.later, **starts}, dropped, facts.away, facts.gone)
        progress = replace(progress, losses=[*progress.losses, *losses, *assignment.losses])
        return ProgressStep(state, progress, [progress.losses], warning)
    reports, warning = [losses], None
    if state is None:
        wanted, clip = queues_to_resolve(state, before, bounds, options), not options.fail_on_data_loss
        state = StartState(
            *resolve_positions(
                wanted, options.starting_offsets, facts.by_time, LATEST, "startingOffsets", clip=clip, away=facts.away
            )
        )
        reports = [state.losses, losses]
        warning = _describe_unnamed(wanted, facts.by_time, options)
    progress = check_progress(before, bounds, {**state.starts, **starts}, dropped, facts.away, facts.gone)
    return ProgressStep(state, replace(progress, losses=[*progress.losses, *losses, *state.losses]), reports, warning)


def _describe_unnamed(wanted: Bounds, by_time: Mapping[QueueKey, int], options: ReadOptions) -> str | None:
    """Return a warning if startingOffsets names some queues of a new query, and others begin at latest unasked.

    Kafka's source refuses such startingOffsets. A queue without messages has the same start in any case.
    """
    start = options.starting_offsets
    if start is None or start.default is not None or not start.queues:
        return None
    unnamed = {
        queue: available.max_offset - available.min_offset
        for queue, available in wanted.items()
        if queue not in start.queues and queue not in by_time and available.max_offset > available.min_offset
    }
    if not unnamed:
        return None
    return (
        f"startingOffsets names {len(start.queues)} queue{'s' if len(start.queues) > 1 else ''} only: the stream "
        f"begins at latest in {list_queues(unnamed)}, and does not read the {sum(unnamed.values())} messages that are "
        "there. To read them, start a new query whose startingOffsets has these queues too, with -2 (earliest); -1 "
        "(latest) skips them without this warning"
    )


def _is_first(before: StreamOffset, options: ReadOptions) -> bool:
    """Return whether the query begins with this batch, and not at the offsets of a group."""
    return before.is_initial() and not options.begins_at_group
