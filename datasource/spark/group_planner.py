"""Planner of a query in a consumer group: the query's queues, their positions, and a report of its progress.

The report is the metadata under "@" in the latest offset. The session's listeners (`group_listeners`) read it there.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rmq_spark.datasource.options.group_options import GroupOptions
from rmq_spark.datasource.options.read_options import ReadOptions
from rmq_spark.datasource.options.subscription import named_topics
from rmq_spark.datasource.plan.batch_assignment import BatchAssignment, Hold
from rmq_spark.datasource.plan.group_placement import (
    BatchFacts,
    QueueFacts,
    Step,
    describe_notices,
    offsets_of,
    place_queue,
)
from rmq_spark.datasource.plan.offsets import StreamOffset, encode_queues
from rmq_spark.datasource.plan.own_offsets import OwnOffsets, QueryHistory
from rmq_spark.datasource.plan.planning import Bounds, find_ahead
from rmq_spark.datasource.spark.batch_locks import BatchLocks
from rmq_spark.datasource.spark.lock_wait import LockWait
from rmq_spark.datasource.spark.positions import find_fallback_starts
from rmq_spark.datasource.spark.source_view import SourceView
from rmq_spark.store.backend import Capability, Fence, GroupAssignment, GroupSession, GroupTerms
from rmq_spark.store.errors import OffsetRangeError, StoreChangedError
from rmq_spark.store.filter.row_filter import ALL, TAG, Expression
from rmq_spark.store.model import QueueKey, QueueRange

_LOG = logging.getLogger("rmq_spark")


def group_terms(options: ReadOptions, group: GroupOptions) -> GroupTerms:
    """Return the terms of the query's membership in its group.

    Members that share queues must have the same subscription and filters, so they compare them: a message that one
    member filters out is not delivered to any other member either. In RocketMQ, members with different subscriptions
    overwrite each other's subscription at the broker.
    """
    topics = named_topics(options.subscription)
    filters = options.filters.describe(topics)
    return GroupTerms(
        group.group,
        "shared" if group.is_shared else "all",
        group.strategy,
        f"{options.subscription}, {filters}" if filters else str(options.subscription),
        options.query_name,
        group.commit,
        group.lease_timeout_ms,
        group.lease_heartbeat_ms,
        group.handover_timeout_ms,
        _expressions(options, topics),
        group.is_orderly,
        group.fallback,
    )


def _expressions(options: ReadOptions, topics: Collection[str] | None) -> tuple[tuple[str, Expression], ...]:
    """Return the topics that the query names, each with its expression. See `GroupTerms.expressions`.

    The topic "" has the expression of topics that are not named. Only a query with a pattern (`topics` is None) has it.
    """
    filters, everything = options.filters, Expression(TAG, ALL)
    if topics is None:
        return (("", filters.for_all or everything), *sorted(filters.topics, key=lambda one: one[0]))
    return tuple((topic, filters.of(topic) or everything) for topic in sorted(topics) if topic != options.retry_topic)


class GroupPlanner:
    """Assigns queues and positions to the batches of one run of a query. For one thread at a time."""

    def __init__(self, options: ReadOptions, group: GroupOptions, view: SourceView, lock_wait: LockWait) -> None:
        self._options, self._group, self._view, self._lock_wait = options, group, view, lock_wait
        self._query = view.backend.group(group_terms(options, group))
        self._is_first = True
        self._owned: frozenset[QueueKey] = frozenset()
        self._had: set[QueueKey] = set()  # queues that this run has owned
        self._has_leases = Capability.LEASES in view.backend.location.capabilities
        self._own_offsets = OwnOffsets()
        self._others: set[QueueKey] = set()  # queues that other members had while this run could have read them
        self._begins: Mapping[QueueKey, int] = {}  # of the last plan
        self._left_out: frozenset[QueueKey] | None = None  # of a repeated batch; None until its queues are claimed

    @property
    def query(self) -> GroupSession:
        """The session of the query in its group."""
        return self._query

    @property
    def published(self) -> Mapping[QueueKey, int] | None:
        """The group's offsets of the query's queues, for `BatchAssignment.marked`."""
        return None if self._has_leases else self._query.published

    def has_changed(self) -> bool:
        """Return whether the query's queues or their positions may have changed. Cheap."""
        return self._query.has_changed()

    def claim(self, ranges: Sequence[QueueRange], after: StreamOffset) -> list[QueueRange]:
        """Return those of the `ranges` that the tasks of a batch read. `after` is the end of the batch.

        If a batch is repeated after a restart, a query whose tasks have fences claims its share of the queues first. An
        orderly query in a cluster then waits for the locks of the batch's queues, and leaves out queues that another
        member reads (`BatchLocks`). Raises GroupConflictError if nothing shows that the other member reads one.
        """
        if not (ranges and self._is_first and self._has_fences):
            return list(ranges)
        if self._left_out is None:
            self._left_out = self._claim(ranges, after)
        return [part for part in ranges if part.queue not in self._left_out]

    def _claim(self, ranges: Sequence[QueueRange], after: StreamOffset) -> frozenset[QueueKey]:
        """Claim the query's share for a repeated batch. Return the queues of the batch that other members read."""
        if self._has_leases:
            if not self._query.epochs:
                self._rebalance(self._view.bounds, {}, after)
            return frozenset()
        step = self._rebalance(self._view.bounds, {}, after)
        batch = BatchLocks(self._view, self._group.group, self._query.member_id, ranges, after)
        while (locked := batch.look(self._query.epochs, step.waiting)) and self._lock_wait.pause(locked):
            step = self._rebalance(self._view.bounds, {}, after)
        return batch.leave_out()

    def fences(self, queues: Iterable[QueueKey]) -> dict[QueueKey, Fence]:
        """Return the fences of the tasks that read these queues. There are none if the query needs none."""
        if not self._has_fences:
            return {}
        group, member_id, epochs = self._group.group, self._query.member_id, self._query.epochs
        return {queue: Fence(group, member_id, epochs.get(queue, 0)) for queue in queues}

    @property
    def _has_fences(self) -> bool:
        """Whether tasks check the owner of their queues. A query that is not a member has no claims to check."""
        return (self._group.is_fenced or self._group.is_orderly) and not self._query.is_outside

    def refresh(self, before: StreamOffset, bounds: Bounds, *, waits: bool = False) -> BatchAssignment:
        """Return the assignment of the next batch.

        All messages below the positions in `before`, the previous offset, have been delivered. For queues that the
        query hands over to other members, these positions are published now, as the group's offsets. For the queues
        that the query keeps, `publish` does this later. `waits` is whether it waits for queues that others have locked.

        The view may have newer bounds afterwards. Raises GroupConflictError if another member conflicts with the query,
        and LockTimeoutError if offsets cannot be published although commitOffsets=required.
        """
        # If the checkpoint is from a query of another group, or of no group, its numbers of resets and suspensions are
        # not those of this group. All of this group's resets and suspensions are then older than the membership.
        is_ours = before.group == self._group.group
        suspended = self._query.suspended()
        # Suspended queues go back to these positions, even if an earlier query has published other offsets for the
        # group. A reset, below, overrides them. A member that resumes after such a position removes the suspension.
        resumes = suspended.behind(before.positions, before.suspended) if is_ours else {}
        resumes = {queue: resume for queue, resume in resumes.items() if queue in bounds}
        positions = {**before.positions, **resumes}
        # Truncated queues are left out, so that their next owner resumes at the group's offset and reports the loss.
        finished = {
            queue: position
            for queue, position in positions.items()
            if queue in bounds and position <= bounds[queue].max_offset
        }
        step = self._rebalance(bounds, finished, before, waits=waits)
        owned = self._owned = frozenset(step.owned)
        facts, batch = self._queue_facts(before, resumes, bounds, step), self._batch_facts(before)
        places = {queue: place_queue(one, batch) for queue, one in facts.items()}
        for warning in describe_notices(places, self._group.group):
            _LOG.warning("rmq: %s", warning)
        seeks, moves = offsets_of(places, Step.SEEK), offsets_of(places, Step.MOVE)
        starts = offsets_of(places, Step.START)
        for is_retry in (False, True):
            unknown = [q for q, place in places.items() if place.step is Step.FIND and facts[q].is_retry == is_retry]
            if unknown:  # all have the same fallback
                starts |= self._group_starts(unknown, bounds, step.held, places[unknown[0]].fallback)
        ahead = find_ahead({**seeks, **starts}, bounds, self._group.group)
        if ahead and not self._has_leases:
            # A consumer that has just given up a queue has often read messages that are newer than the last look.
            self._view.has_moved()
            self._view.refresh(before.positions)
            ahead = find_ahead({**seeks, **starts}, self._view.bounds, self._group.group)
        for loss in ahead:
            (seeks if loss.queue in seeks else starts)[loss.queue] = loss.begin
        holds = {queue: Hold(one.resume, one.until_ms, one.number) for queue, one in suspended.queues.items()}
        # With assignment=all a query reports vanished queues like a query without a group.
        return BatchAssignment(
            owned if self._group.is_shared else None,
            seeks,
            starts,
            moves,
            self._group.group,
            step.reset_number,
            suspended.number,
            holds,
            tuple(ahead),
            step.others,
        )

    def last_suspension(self) -> int:
        """Return the number of the last change of the group's suspended queues."""
        return self._query.suspended().number

    def publish(self, before: StreamOffset, assignment: BatchAssignment, begins: Mapping[QueueKey, int]) -> None:
        """Publish the offsets where the next batch begins (`begins`) as the group's offsets of the query's queues.

        The caller must have checked `begins` and reported the losses. An offset beyond the end of its queue must not be
        published, because later messages would be skipped. A queue that is in neither `before` nor `assignment` is left
        out: the query begins there with its next batch, and until then the start is not published.
        """
        known = before.positions.keys() | assignment.seeks.keys() | assignment.starts.keys()
        self._begins = begins
        self._query.publish(
            {queue: begin for queue, begin in begins.items() if queue in known and queue in self._owned}
        )

    def note_answered(self, *, is_batch: bool = True, is_over: bool = False) -> None:
        """Record that the last assignment is in the offset that `latestOffset` returns to Spark.

        Until this call, an assignment is provisional, because planning may still fail. `is_batch` is whether the offset
        differs from the previous one, so that Spark starts a batch. `is_over` is whether Spark ends the run otherwise.
        Then a member of a cluster's group leaves: it publishes all offsets, and other members get its queues and locks
        at once. If Spark plans another batch nevertheless, the query joins again.
        """
        self._query.settle(is_batch=is_batch)
        self._is_first = False
        self._had |= self._owned
        if not self._has_leases:
            begins = {queue: self._begins[queue] for queue in self._owned if queue in self._begins}
            self._own_offsets.note(begins)
            if is_over and not is_batch:
                self._query.leave(begins)

    def _rebalance(
        self, bounds: Bounds, finished: Mapping[QueueKey, int], offset: StreamOffset, *, waits: bool = False
    ) -> GroupAssignment:
        """Rebalance, again and again while others have locked queues with new messages, if `waits`.

        `offset` has the applied resets, and the positions after which a queue's messages are new.
        """
        while True:
            step = self._rebalance_once(bounds, finished, offset)
            locked = [
                queue
                for queue in (step.waiting if waits else ())
                if bounds[queue].max_offset > offset.positions.get(queue, bounds[queue].min_offset)
            ]
            if not locked or not self._lock_wait.pause(locked):
                return step

    def _rebalance_once(
        self, bounds: Bounds, finished: Mapping[QueueKey, int], offset: StreamOffset
    ) -> GroupAssignment:
        applied_reset = offset.reset if offset.group == self._group.group else None
        step = self._query.rebalance(list(bounds), finished, applied_reset, self._history(offset))
        self._others |= step.others
        self._own_offsets.forget(step.others)
        return step

    def _history(self, before: StreamOffset) -> QueryHistory | None:
        """Return what is known of the query's own offsets. None: nothing, or the place's resets have numbers."""
        if self._has_leases or before.group != self._group.group:
            return None
        known = self._had | self._others
        return QueryHistory(
            before, self._own_offsets, known, is_first=self._is_first, is_orderly=self._group.is_orderly
        )

    def _batch_facts(self, before: StreamOffset) -> BatchFacts:
        options, group = self._options, self._group
        return BatchFacts(
            is_first=self._is_first,
            is_initial=before.is_initial(),
            is_shared=group.is_shared,
            begins_at_group=options.begins_at_group,
            has_start=options.starting_offsets is not None or options.starting_times is not None,
            has_time=options.starting_times is not None,
            on_conflict=group.on_conflict,
            fallback=group.fallback,
        )

    def _queue_facts(
        self, before: StreamOffset, resumes: Mapping[QueueKey, int], bounds: Bounds, step: GroupAssignment
    ) -> dict[QueueKey, QueueFacts]:
        """Return the facts of the queues whose position the group may change. All other queues keep their position.

        `resumes` has the positions of suspended queues to which the query must go back.
        """
        gained, history = frozenset(step.gained), self._history(before)
        return {
            queue: QueueFacts(
                bounds[queue],
                previous=before.positions.get(queue),
                resume=resumes.get(queue),
                reset=step.resets.get(queue),
                committed=step.held.get(queue),
                is_owned=queue in self._owned,
                is_gained=queue in gained,
                was_owned=queue in self._had,
                is_retry=self._options.begins_as_retry(queue),
                own_offsets=None if history is None else history.of(queue),
                has_own_between=history is not None and history.has_between(queue),
            )
            for queue in dict.fromkeys([*resumes, *step.gained, *step.resets])
            if queue in bounds
        }

    def _group_starts(
        self, queues: Sequence[QueueKey], bounds: Bounds, committed: Mapping[QueueKey, int], fallback: str
    ) -> dict[QueueKey, int]:
        """Return the start offset of the group in each of these queues.

        If the group has no offset in any queue of a topic, the start offsets of the whole topic are committed first, so
        that all members begin at the same offsets. In a place without leases each queue is treated by itself, as
        RocketMQ's consumers do.
        """
        backend, times_ms = self._view.backend, self._options.starting_times_of(bounds)
        group = self._group.group
        if not self._has_leases:
            known = {queue: committed[queue] for queue in queues if queue in committed}
            rest = {queue: bounds[queue] for queue in queues if queue not in known}
            return known | (find_fallback_starts(backend, group, rest, {}, fallback, times_ms) if rest else {})
        new = {queue.topic for queue in queues} - {queue.topic for queue in committed}
        if new:
            unknown = {queue: available for queue, available in bounds.items() if queue.topic in new}
            committed = self._query.begin(find_fallback_starts(backend, group, unknown, {}, fallback, times_ms))
        return backend.start_offsets(group, {queue: bounds[queue] for queue in queues}, committed, fallback, times_ms)


_MEASURED_QUEUES = 100  # the maximum number of lagging queues to measure: each takes a third of a ms at every trigger


def mark_of(
    query: GroupSession, view: SourceView, assignment: BatchAssignment, positions: Mapping[QueueKey, int], now_ms: int
) -> dict[str, Any]:
    """Return the metadata for the latest offset: the names of group, member and place, and the query's total lag.

    With assignment=shared it has the queues of `positions` that other members own, as `others`: an offset keeps the
    position of a queue that the query has given up.

    The lag is that of the query's queues after `positions`: lagMessages, and if at most 100 queues lag also lagBytes
    and secondsBehind. The names have the same meaning as in `rmq_spark.group_lag`, which returns them for each queue;
    here they are the sums, and the maximum of secondsBehind. `now_ms` is in ms since the epoch.
    """
    backlog = [
        QueueRange(queue, max(position, available.min_offset), available.max_offset)
        for queue, position in positions.items()
        if (available := view.bounds.get(queue)) is not None
        and assignment.has(queue)
        and position < available.max_offset
    ]
    progress: dict[str, Any] = {"group": query.terms.group, "member": query.member_id, **view.backend.location.mark()}
    progress["batch"] = query.batches  # with this number the session's listener identifies the batch that ended
    if query.terms.assignment == "shared":
        progress["shared"] = True
        others = {queue: position for queue, position in positions.items() if not assignment.has(queue)}
        if others:
            progress["others"] = encode_queues(others)
    progress |= {"commit": query.terms.commit, "lagMessages": sum(part.count for part in backlog)}
    sizes = view.backend.sizes
    if len(backlog) > _MEASURED_QUEUES or sizes is None:
        return progress
    found = view.backend.positions([(part.queue, part.begin) for part in backlog])
    firsts = [position.store_time_ms for position in found.values()]
    try:
        size_bytes = sum(sizes.measure(backlog).values())
    except (OffsetRangeError, StoreChangedError):
        return progress  # retention deleted messages meanwhile; the next trigger plans again
    return {**progress, "lagBytes": size_bytes, "secondsBehind": max(now_ms - min(firsts, default=now_ms), 0) / 1000}
