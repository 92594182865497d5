"""The positions before the next batch of a stream: where a new query begins, and which messages are missing. Pure.

The reader finds the offsets of times and logs what this module returns. `queues_to_resolve` says for which queues it
must find the offset of a time, and `resolve_progress` is the step from one batch to the next.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from rmq_spark.datasource.options.option_parsers import LATEST
from rmq_spark.datasource.options.read_options import ReadOptions
from rmq_spark.datasource.plan.batch_assignment import BatchAssignment
from rmq_spark.datasource.plan.offsets import StreamOffset
from rmq_spark.datasource.plan.planning import (
    Bounds,
    Loss,
    Progress,
    check_progress,
    describe_unsubscribed,
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
    """

    before: StreamOffset
    bounds: Bounds
    assignment: BatchAssignment = field(default_factory=BatchAssignment)
    unsubscribed: Collection[QueueKey] = ()
    by_time: Mapping[QueueKey, int] = field(default_factory=dict)


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
    if not is_first:
        warning = None
        if facts.unsubscribed:
            problem = describe_unsubscribed(facts.unsubscribed, str(options.subscription))
            warning = f"failOnDataLoss=false: {problem}. The query drops these positions"
        progress = check_progress(before, bounds, starts, facts.unsubscribed)
        progress = replace(progress, losses=[*progress.losses, *losses, *assignment.losses])
        return ProgressStep(state, progress, [progress.losses], warning)
    reports = [losses]
    if state is None:
        wanted, clip = queues_to_resolve(state, before, bounds, options), not options.fail_on_data_loss
        state = StartState(
            *resolve_positions(wanted, options.starting_offsets, facts.by_time, LATEST, "startingOffsets", clip=clip)
        )
        reports = [state.losses, losses]
    progress = check_progress(before, bounds, {**state.starts, **starts})
    return ProgressStep(state, replace(progress, losses=[*progress.losses, *losses, *state.losses]), reports)


def _is_first(before: StreamOffset, options: ReadOptions) -> bool:
    """Return whether the query begins with this batch, and not at the offsets of a group."""
    return before.is_initial() and not options.begins_at_group
