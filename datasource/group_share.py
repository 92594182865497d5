"""The share of a query that is a member of a group, from look to look, as the engine gives it."""

import logging
from collections.abc import Mapping

from rmq_spark.datasource.group_options import GroupOptions
from rmq_spark.datasource.offsets import StreamOffset
from rmq_spark.datasource.options import ReadOptions
from rmq_spark.datasource.planning import Bounds
from rmq_spark.datasource.share import Share
from rmq_spark.datasource.store_view import StoreView
from rmq_spark.store import GroupTerms, QueryGroup, find_beginnings
from rmq_spark.store.errors import GroupConflictError
from rmq_spark.store.units import QueueKey

_LOG = logging.getLogger("rmq_spark")


def group_terms(options: ReadOptions, group: GroupOptions) -> GroupTerms:
    """Return how the query takes part in its group."""
    return GroupTerms(
        group.group,
        "shared" if group.is_shared else "all",
        group.strategy,
        str(options.subscription),
        options.query_name,
        group.commit,
        group.lease_timeout_ms,
        group.lease_heartbeat_ms,
    )


class GroupShare:
    """The share of one run of a query, from look to look. One thread at a time."""

    def __init__(self, options: ReadOptions, group: GroupOptions, view: StoreView) -> None:
        self._options, self._group, self._view = options, group, view
        self._query = QueryGroup(view.path, group_terms(options, group))
        self._is_first = True
        self._fresh: dict[QueueKey, int | None] = {}  # gained, and in no offset of ours yet

    @property
    def query(self) -> QueryGroup:
        """The membership behind it."""
        return self._query

    def has_news(self) -> bool:
        """Say whether the next look may find another share. Cheap."""
        return self._query.has_news()

    def epochs(self, bounds: Bounds) -> Mapping[QueueKey, int]:
        """Return the epochs of this query's queues; of a repeated batch, before its first look, after claiming them."""
        if self._is_first and not self._fresh:
            self._fresh |= self._query.step(list(bounds), {}, None).gained
        return self._query.epochs

    def look(self, before: StreamOffset, bounds: Bounds) -> Share:
        """Return the share of the next batch, and publish what is finished: all before the offset `before`.

        Raises GroupConflictError, and LockTimeoutError where commitOffsets=required cannot be.
        """
        # A checkpoint of another group, or of none, says nothing of the resets of this one: to it they are all past.
        applied_reset = before.reset if before.group == self._group.group else None
        step = self._query.step(list(bounds), before.positions, applied_reset)
        owned = frozenset(step.owned)
        self._fresh |= step.gained
        # Where a queue was told to go counts more than where the group stands, which a reset has set as well.
        gained = {queue: held for queue, held in self._fresh.items() if queue in owned and queue not in step.resets}
        seeks, starts = self._places(before, bounds, gained)
        others: dict[QueueKey, int] = {}
        for queue, target in step.resets.items():
            if queue in bounds:
                there = bounds[queue]
                place = max(there.min_offset, min(target, there.max_offset))
                if queue in owned:
                    (seeks if queue in before.positions else starts)[queue] = place
                elif queue in before.positions:
                    others[queue] = place
        finished = {queue: at for queue, at in {**before.positions, **seeks, **starts}.items() if queue in owned}
        self._query.publish(finished)
        return Share(owned, seeks, starts, others, self._group.group, step.reset_number)

    def note_answered(self) -> None:
        """Note that Spark was given an offset that was planned with the last share. A plan may fail before that."""
        self._is_first = False
        self._fresh.clear()

    def _places(
        self, before: StreamOffset, bounds: Bounds, gained: Mapping[QueueKey, int | None]
    ) -> tuple[dict[QueueKey, int], dict[QueueKey, int]]:
        """Return where gained queues go on: those that `before` names, if elsewhere, and those that it does not."""
        seeks: dict[QueueKey, int] = {}
        starts: dict[QueueKey, int] = {}
        known = {queue: held for queue, held in gained.items() if queue in before.positions and held is not None}
        if self._is_first and not self._group.is_shared:
            seeks = self._settle_conflict(before, known)
        else:
            # What somebody else has finished meanwhile; an offset behind ours is ours, of one batch before.
            seeks = {queue: held for queue, held in known.items() if held > before.positions[queue]}
        if self._options.begins_at_group and (self._group.is_shared or before.is_initial()):
            fresh = {queue: bounds[queue] for queue in gained if queue not in before.positions and queue in bounds}
            held = {queue: at for queue in fresh if (at := gained[queue]) is not None}
            starts = find_beginnings(
                self._view.store, fresh, held, self._group.fallback, self._options.starting_time_of
            )
        return seeks, starts

    def _settle_conflict(self, before: StreamOffset, held: Mapping[QueueKey, int]) -> dict[QueueKey, int]:
        """Return where to go on instead of the checkpoint, as onOffsetConflict has it."""
        ahead = {queue: at for queue, at in held.items() if at > before.positions[queue]}
        if self._group.on_conflict == "group":
            return {queue: at for queue, at in held.items() if at != before.positions[queue]}
        if ahead:
            queue, at = min(ahead.items())
            found = (
                f"the consumer group {self._group.group} stands at {at} in queue {queue}, and this query's checkpoint "
                f"at {before.positions[queue]}" + (f" (and {len(ahead) - 1} more queues)" if len(ahead) > 1 else "")
            )
            if self._group.on_conflict == "fail":
                raise GroupConflictError(
                    f"{found}: another consumer of the group went on, or its offsets were set. Set "
                    "onOffsetConflict=checkpoint to read from the checkpoint (what the other has read comes again), or "
                    "onOffsetConflict=group to go on where the group stands."
                )
            _LOG.warning("rmq: %s; onOffsetConflict=checkpoint: what lies between is read again", found)
        return {}
