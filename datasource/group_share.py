"""The share of a query that is a member of a group, from look to look, as the engine gives it."""

import logging
from collections.abc import Collection, Mapping, Sequence

from rmq_spark.datasource.group_options import GroupOptions
from rmq_spark.datasource.offsets import StreamOffset
from rmq_spark.datasource.options import ReadOptions
from rmq_spark.datasource.planning import Bounds, find_ahead
from rmq_spark.datasource.share import Share
from rmq_spark.datasource.store_view import StoreView
from rmq_spark.datasource.subscription import named_topics
from rmq_spark.datasource.suspension import Hold
from rmq_spark.store import GroupStep, GroupTerms, QueryGroup, find_beginnings
from rmq_spark.store.errors import GroupConflictError
from rmq_spark.store.units import QueueBounds, QueueKey

_LOG = logging.getLogger("rmq_spark")


def group_terms(options: ReadOptions, group: GroupOptions) -> GroupTerms:
    """Return how the query takes part in its group.

    Members that share queues compare what they subscribe to, filters included: a message that one of them filters out
    is lost to the others too. In RocketMQ such members overwrite each other's subscription at the broker.
    """
    filters = options.filters.describe(named_topics(options.subscription))
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
    )


class GroupShare:
    """The share of one run of a query, from look to look. One thread at a time."""

    def __init__(self, options: ReadOptions, group: GroupOptions, view: StoreView) -> None:
        self._options, self._group, self._view = options, group, view
        self._query = QueryGroup(view.path, group_terms(options, group))
        self._is_first = True
        self._owned: frozenset[QueueKey] = frozenset()
        self._had: set[QueueKey] = set()  # owned by this run by now, be it for a while

    @property
    def query(self) -> QueryGroup:
        """The membership behind it."""
        return self._query

    def has_news(self) -> bool:
        """Say whether the next look may find another share. Cheap."""
        return self._query.has_news()

    def epochs(self, bounds: Bounds) -> Mapping[QueueKey, int]:
        """Return the epochs of this query's queues; of a repeated batch, before its first look, after claiming them."""
        if self._is_first and not self._query.epochs:
            self._query.step(list(bounds), {}, None)
        return self._query.epochs

    def look(self, before: StreamOffset, bounds: Bounds) -> Share:
        """Return the share of the next batch, and publish what is finished in queues that are let go.

        All before the offset `before` is finished; what of it is in the query's own queues, `publish` publishes. Raises
        GroupConflictError, and LockTimeoutError where commitOffsets=required cannot be.
        """
        self._query.note_look(self._view.registry_stamp)
        # A checkpoint of another group, or of none, says nothing of the resets of this one, nor of its stopped queues:
        # to it they are all past.
        is_ours = before.group == self._group.group
        suspended = self._query.suspended()
        # Whatever the group's offset says: that may be of an earlier query, or of none that published. Who goes on
        # behind a stopped queue's place strikes it out, and a reset is applied below, over this.
        back = suspended.behind(before.positions, before.suspended) if is_ours else {}
        back = {queue: resume for queue, resume in back.items() if queue in bounds}
        standing = {**before.positions, **back}
        # Not of queues that end before: who gets one of those goes on, and learns of the loss, where the group stands.
        finished = {queue: at for queue, at in standing.items() if _is_reached(at, bounds.get(queue))}
        step = self._query.step(list(bounds), finished, before.reset if is_ours else None)
        owned = self._owned = frozenset(step.owned)
        seeks, starts = self._places(before, back, bounds, step)
        seeks = {queue: resume for queue, resume in back.items() if queue in owned} | seeks
        others = {queue: resume for queue, resume in back.items() if queue not in owned}
        gained = frozenset(step.gained)
        for queue, target in step.resets.items():
            if queue in bounds and queue not in gained:
                place = _nearest(target, bounds[queue])
                if queue in owned:
                    (seeks if queue in before.positions else starts)[queue] = place
                elif queue in before.positions:
                    others[queue] = place
        ahead = find_ahead({**seeks, **starts}, bounds, self._group.group)
        for loss in ahead:
            (seeks if loss.queue in seeks else starts)[loss.queue] = loss.begin
        holds = {queue: Hold(one.resume, one.until_ms, one.number) for queue, one in suspended.queues.items()}
        # Who is alone misses queues that are gone as a query without a group does.
        return Share(
            owned if self._group.is_shared else None,
            seeks,
            starts,
            others,
            self._group.group,
            step.reset_number,
            suspended.number,
            holds,
            tuple(ahead),
        )

    def last_suspension(self) -> int:
        """Return the number of the last change of the queues that an orderly listener stopped."""
        return self._query.suspended().number

    def publish(self, before: StreamOffset, share: Share, begins: Mapping[QueueKey, int]) -> None:
        """Publish what is finished in the query's own queues: all before `begins`, where the next batch begins.

        To be called once losses were raised, or accepted and logged: a place that the store does not have is then no
        place of the group's, so messages that come to be stored before it are not passed over. Left out are queues of
        which neither `before` nor `share` says anything: their begin is not the group's before it is read.
        """
        known = before.positions.keys() | share.seeks.keys() | share.starts.keys()
        self._query.publish({queue: at for queue, at in begins.items() if queue in known and queue in self._owned})

    def note_answered(self, *, is_batch: bool = True) -> None:
        """Note that Spark was given an offset that was planned with the last share. A plan may fail before that.

        `is_batch` says whether that is another offset than before, and so a batch.
        """
        self._query.settle(is_batch=is_batch)
        self._is_first = False
        self._had |= self._owned

    def _places(
        self, before: StreamOffset, back: Mapping[QueueKey, int], bounds: Bounds, step: GroupStep
    ) -> tuple[dict[QueueKey, int], dict[QueueKey, int]]:
        """Return where gained queues go on: those that `before` names, if elsewhere, and those that it does not.

        `back` has the stopped queues that go back, and where to.
        """
        positions = {**before.positions, **back}
        gained = [queue for queue in step.gained if queue in bounds]
        # These go on where the group stands, whatever is said of where the query begins, or was before it read them.
        retries = {queue for queue in gained if queue not in positions and self._options.begins_as_retry(queue)}
        sent = {queue: self._sent(queue, step, bounds[queue]) for queue in gained if queue in step.resets}
        held = {queue: step.held[queue] for queue in gained if queue in step.held and queue not in sent}
        known = {queue: at for queue, at in held.items() if queue in positions}
        starts = {queue: place for queue, place in sent.items() if queue not in positions}
        if before.is_initial():
            seeks = {}
            self._tell_of_unread({queue: at for queue, at in held.items() if queue not in retries}, bounds)
        elif self._is_first and not self._group.is_shared:
            begins = {queue: positions.get(queue, bounds[queue].min_offset) for queue in held if queue not in retries}
            moves = self._settle_conflict(begins, {queue: held[queue] for queue in begins})
            seeks = {queue: at for queue, at in moves.items() if queue in positions}
            starts |= {queue: at for queue, at in moves.items() if queue not in positions}
        else:
            # Nobody has gone on behind the place of a queue that goes back.
            known = {queue: at for queue, at in known.items() if at <= back.get(queue, at)}
            seeks = self._follow(positions, known)
        seeks |= {queue: place for queue, place in sent.items() if queue in positions}
        fresh = [queue for queue in gained if queue not in positions and queue not in sent]
        if self._options.begins_at_group and (self._group.is_shared or before.is_initial()):
            own = [queue for queue in fresh if queue not in retries]
            starts |= self._beginnings(own, bounds, step.held, self._group.fallback)
        # With a time for its own topics a group begins a retry topic at its end (see `start_position`); one that comes
        # later is read from its first message.
        by_time = before.is_initial() and self._options.starting_times is not None
        fallback = "timestamp" if by_time else "earliest"
        starts |= self._beginnings([q for q in fresh if q in retries], bounds, step.held, fallback)
        return seeks, starts

    def _beginnings(
        self, queues: Sequence[QueueKey], bounds: Bounds, held: Mapping[QueueKey, int], fallback: str
    ) -> dict[QueueKey, int]:
        """Return where the group begins in these queues, after settling it for topics that it does not know."""
        new = {queue.topic for queue in queues} - {queue.topic for queue in held}
        time_of = self._options.starting_time_of
        if new:
            unknown = {queue: there for queue, there in bounds.items() if queue.topic in new}
            held = self._query.begin(find_beginnings(self._view.store, unknown, {}, fallback, time_of))
        return find_beginnings(self._view.store, {q: bounds[q] for q in queues}, held, fallback, time_of)

    def _sent(self, queue: QueueKey, step: GroupStep, there: QueueBounds) -> int:
        """Return where a gained queue goes on that was told to go elsewhere.

        That is where the group stands: the reset set it, and who has applied it may have gone on since.
        """
        target, held = step.resets[queue], step.held.get(queue)
        if held is None or held == target:
            return _nearest(target, there)
        if self._is_first and not self._group.is_shared and self._group.on_conflict == "checkpoint":
            _LOG.warning(
                "rmq: the consumer group %s stands at %d in queue %s, and was sent to %d after this checkpoint: "
                "another consumer has gone on since. onOffsetConflict=checkpoint: what lies between is read again",
                self._group.group,
                held,
                queue,
                target,
            )
            return _nearest(target, there)
        return held

    def _follow(self, positions: Mapping[QueueKey, int], held: Mapping[QueueKey, int]) -> dict[QueueKey, int]:
        """Return where to go on in queues that others may have had.

        Where this run had the queue before, it is where the group stands, be that further back: it published what it
        had finished. In a queue of the checkpoint, what others have finished since counts; an offset behind the
        checkpoint's is most often this query's own, of one batch before.
        """
        behind = {q: at for q, at in held.items() if at < positions[q] and q not in self._had}
        if behind:
            queue, at = min(behind.items())
            _LOG.warning(
                "rmq: the consumer group %s stands at %d in queue %s, and this query's checkpoint at %d%s: it goes on "
                "from its checkpoint. That is right if its last batch was not published; if the store was cut and "
                "another query went on, reset the group to have what lies between read",
                self._group.group,
                at,
                queue,
                positions[queue],
                _and_more(behind),
            )
        return {q: at for q, at in held.items() if at != positions[q] and q not in behind}

    def _settle_conflict(self, begins: Mapping[QueueKey, int], held: Mapping[QueueKey, int]) -> dict[QueueKey, int]:
        """Return where to go on instead of the checkpoint, as onOffsetConflict has it.

        `begins` are where the checkpoint goes on; a queue that it does not know, at the earliest message.
        """
        group, conflict = self._group.group, self._group.on_conflict
        ahead = {queue: at for queue, at in held.items() if at > begins[queue]}
        if conflict == "group":
            return {queue: at for queue, at in held.items() if at != begins[queue]}
        if ahead:
            queue, at = min(ahead.items())
            found = (
                f"the consumer group {group} stands at {at} in queue {queue}, and this query's checkpoint at "
                f"{begins[queue]}{_and_more(ahead)}"
            )
            if conflict == "fail":
                raise GroupConflictError(
                    f"{found}: another consumer of the group went on, or its offsets were set. Set "
                    "onOffsetConflict=checkpoint to read from the checkpoint (what the other has read comes again), or "
                    "onOffsetConflict=group to go on where the group stands."
                )
            _LOG.warning("rmq: %s; onOffsetConflict=checkpoint: what lies between is read again", found)
        return {}

    def _tell_of_unread(self, held: Mapping[QueueKey, int], bounds: Bounds) -> None:
        """Warn of messages that the group has not read, and that nobody said are to be left out."""
        if self._options.starting_offsets is not None or self._options.starting_times is not None:
            return
        if self._options.begins_at_group or not self._is_first:
            return
        unread = {queue: at for queue, at in held.items() if at < bounds[queue].max_offset}
        if unread:
            queue, at = min(unread.items())
            _LOG.warning(
                "rmq: the consumer group %s stands at %d in queue %s%s, and this query begins at %d, behind the newest "
                "message, as any stream without startingOffsets: what lies between is not read. "
                "startingOffsets=group begins where the group stands",
                self._group.group,
                at,
                queue,
                _and_more(unread),
                bounds[queue].max_offset,
            )


def _is_reached(offset: int, there: QueueBounds | None) -> bool:
    return there is not None and offset <= there.max_offset


def _nearest(offset: int, there: QueueBounds) -> int:
    return max(there.min_offset, min(offset, there.max_offset))


def _and_more(queues: Collection[QueueKey]) -> str:
    return f" (and {len(queues) - 1} more queues)" if len(queues) > 1 else ""
