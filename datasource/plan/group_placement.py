"""Where a query begins in a queue that its group has assigned, reset or suspended. Pure.

`place_queue` decides this for one queue. It reads no files: if the query begins at a start offset of the group, the
place only says so, and the caller finds the offset. It logs nothing and raises nothing: a place may have a notice, and
`describe_notices` returns the warnings for the notices of all queues, or raises the error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from rmq_spark.datasource.plan.own_offsets import is_own
from rmq_spark.store.errors import GroupConflictError
from rmq_spark.store.model import QueueBounds, QueueKey


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What is true for all queues of the next batch.

    - `is_first`: no plan of this run of the query has been returned to Spark yet.
    - `is_initial`: the previous offset is the initial offset, so the query is new.
    - `is_shared`: assignment=shared.
    - `begins_at_group`: a new query begins at the group's offsets.
    - `has_start`: startingOffsets or startingTimestamp is given.
    - `has_time`: startingTimestamp is given.
    - `on_conflict`, `fallback`: the values of onOffsetConflict and groupFallback.
    """

    is_first: bool
    is_initial: bool
    is_shared: bool
    begins_at_group: bool
    has_start: bool
    has_time: bool
    on_conflict: str
    fallback: str


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """What is true for one queue before the next batch. All positions are queue offsets, or None if there is none.

    - `bounds`: the bounds of the queue.
    - `previous`: the position in the previous offset.
    - `resume`: the position to which a suspended queue must go back. It is smaller than `previous`.
    - `reset`: the target of a reset that the query has not applied yet.
    - `committed`: the group's committed offset. It matters only in a gained queue.
    - `is_owned`: the query owns the queue.
    - `is_gained`: the query owns the queue since the last rebalance.
    - `was_owned`: this run of the query has owned the queue in an earlier plan.
    - `is_retry`: the queue is in the group's retry topic, and startingOffsets does not name it.
    - `own_offsets`: the offsets at which the group may be if only this query has moved it, besides `previous`. None if
      they are not known, or if the resets of the place have numbers.
    - `has_own_between`: the group may also be at any offset between these, because the checkpoint has only some.
    """

    bounds: QueueBounds
    previous: int | None = None
    resume: int | None = None
    reset: int | None = None
    committed: int | None = None
    is_owned: bool = True
    is_gained: bool = False
    was_owned: bool = False
    is_retry: bool = False
    own_offsets: tuple[int, ...] | None = None
    has_own_between: bool = False

    @property
    def position(self) -> int | None:
        """The position before the group's committed offset and resets are applied."""
        return self.previous if self.resume is None else self.resume

    def is_own(self, committed: int) -> bool:
        """Return whether the query has set the group's offset by itself, as far as `own_offsets` tells."""
        if self.own_offsets is None or self.position is None:
            return False
        return is_own(committed, self.position, self.own_offsets, has_between=self.has_own_between)


class Step(Enum):
    """How the group changes the position of a queue. `BatchAssignment` describes `seeks`, `starts` and `moves`."""

    KEEP = "keep"  # no change: a queue that is not in the previous offset begins where the query's options say
    SEEK = "seek"
    START = "start"
    MOVE = "move"
    FIND = "find"  # a start, at the start offset of the group, which the caller finds


class Reason(Enum):
    """Why the user must know of the place of a queue. The values are the texts of the warnings and the error."""

    RESET = (
        "the consumer group {group} is at {committed} in queue {queue}, and was reset to {other} after this "
        "checkpoint: another consumer has advanced it since. onOffsetConflict=checkpoint: reads the messages between "
        "again"
    )
    UNREAD = (
        "the consumer group {group} is at {committed} in queue {queue}{more}, and this query begins at {other}, after "
        "the newest message, as any stream without startingOffsets: the messages between are not read. "
        "startingOffsets=group begins at the group's offsets"
    )
    CONFLICT = (
        "the consumer group {group} is at {committed} in queue {queue}, and this query's checkpoint at {other}{more}: "
        "another consumer of the group advanced, or its offsets were set. Set onOffsetConflict=checkpoint to resume at "
        "the checkpoint and read these messages again, or onOffsetConflict=group to resume at the group's offsets."
    )
    AHEAD = (
        "the consumer group {group} is at {committed} in queue {queue}, and this query's checkpoint at {other}{more}; "
        "onOffsetConflict=checkpoint: the messages between are read again"
    )
    LAGGING = (
        "the consumer group {group} is at {committed} in queue {queue}, and this query's checkpoint at {other}{more}: "
        "it resumes at its checkpoint. That is right if its last batch was not published. If the store was truncated "
        "and another query advanced, reset the group to read the messages between"
    )
    SET_BACK = (
        "the consumer group {group} is at {committed} in queue {queue}, and this query at {other}{more}: the group's "
        "offset was reset, or another consumer has committed it, or a broker has lost its last commits. The query "
        "follows the group, and reads the messages between again"
    )


@dataclass(frozen=True, slots=True)
class Notice:
    """The numbers in the text of a reason: the group's committed offset, and the offset that differs from it."""

    reason: Reason
    committed: int
    other: int


@dataclass(frozen=True, slots=True)
class Place:
    """The decision for one queue.

    `offset` is the queue offset of a seek, start or move. `fallback` is where the group starts in a topic without a
    committed offset, if the step is FIND: latest, earliest or timestamp.
    """

    step: Step = Step.KEEP
    offset: int = 0
    fallback: str = ""
    notice: Notice | None = None


def place_queue(facts: QueueFacts, batch: BatchFacts) -> Place:
    """Return where the query begins in a queue with the next batch.

    A reset overrides everything else. A suspended queue goes back to the position where it resumes, even if an earlier
    query has published a larger offset for the group, unless a restarted query has onOffsetConflict=group. The group's
    committed offset matters only in a queue that the query has gained.
    """
    if facts.is_gained:
        return _place_gained(facts, batch)
    if facts.reset is not None:
        return _put(facts, _nearest(facts.reset, facts.bounds))
    return _stay(facts)


def _place_gained(facts: QueueFacts, batch: BatchFacts) -> Place:
    if facts.reset is not None:
        return _place_reset(facts, batch, facts.reset)
    if facts.previous is None:
        # In the group's retry topic the query begins at the group's offset, whatever its startingOffsets.
        if facts.is_retry:
            # With startingTimestamp a group begins in an existing retry topic at its end, and in one that appears later
            # at its first message.
            by_time = batch.is_initial and batch.has_time
            return Place(Step.FIND, fallback="timestamp" if by_time else "earliest")
        if batch.begins_at_group and (batch.is_shared or batch.is_initial):
            return Place(Step.FIND, fallback=batch.fallback)
    if facts.committed is None:
        return _stay(facts)
    if batch.is_initial:
        return Place(notice=_notice_unread(facts, batch, facts.committed))
    if batch.is_first and not batch.is_shared:
        return _resolve_conflict(facts, batch, facts.committed)
    return _follow(facts, facts.committed)


def _place_reset(facts: QueueFacts, batch: BatchFacts, target: int) -> Place:
    """Return the place of a gained queue to which a reset applies.

    It is the group's committed offset, because the reset set this offset, and a member that has applied the reset may
    have advanced it since. With onOffsetConflict=checkpoint and assignment=all, a restarted query begins at the offset
    of the reset. So does a query that knows its own offsets, because no other member has had the queue meanwhile.
    """
    if facts.committed is None or facts.committed == target or facts.own_offsets is not None:
        return _put(facts, _nearest(target, facts.bounds))
    if batch.is_first and not batch.is_shared and batch.on_conflict == "checkpoint":
        return _put(facts, _nearest(target, facts.bounds), Notice(Reason.RESET, facts.committed, target))
    return _put(facts, facts.committed)


def _notice_unread(facts: QueueFacts, batch: BatchFacts, committed: int) -> Notice | None:
    """Return a notice if the query skips messages that the group has not read, because no start is given."""
    if batch.has_start or not batch.is_first or committed >= facts.bounds.max_offset:
        return None
    return Notice(Reason.UNREAD, committed, facts.bounds.max_offset)


def _resolve_conflict(facts: QueueFacts, batch: BatchFacts, committed: int) -> Place:
    """Apply onOffsetConflict in a restarted query that reads all queues.

    A queue that the checkpoint does not have counts as if the checkpoint had its minimum offset.
    """
    begin = facts.bounds.min_offset if facts.position is None else facts.position
    if batch.on_conflict == "group":
        return _put(facts, committed) if committed != begin else _stay(facts)
    if committed <= begin:
        return _stay(facts)
    return _stay(facts, Notice(Reason.CONFLICT if batch.on_conflict == "fail" else Reason.AHEAD, committed, begin))


def _follow(facts: QueueFacts, committed: int) -> Place:
    """Return the place of a gained queue that another member may have read in the meantime.

    A queue normally resumes at the group's committed offset. If that is smaller than the position, it matters whether
    this run of the query has owned the queue before. If so, the run published its own position, so the smaller offset
    is a later decision, and applies. If not, the position is from the checkpoint, and applies: most often the committed
    offset is only that of this query's previous batch. The user is told.

    If the query's own offsets are known, they decide instead: at one of them, nobody else has moved the group.
    """
    position = facts.position
    if position is None:
        return _stay(facts)
    if facts.own_offsets is not None:
        if facts.is_own(committed):
            return _stay(facts)
        return _put(facts, committed, Notice(Reason.SET_BACK, committed, position) if committed < position else None)
    # If a suspended queue goes back, no member has resumed after that position, so a larger offset is older.
    if facts.resume is not None and committed > facts.resume:
        return _stay(facts)
    if committed < position and not facts.was_owned:
        return _stay(facts, Notice(Reason.LAGGING, committed, position))
    return _put(facts, committed) if committed != position else _stay(facts)


def _stay(facts: QueueFacts, notice: Notice | None = None) -> Place:
    """Return the place of a queue in which the group does not change the position, unless it was suspended."""
    return Place(notice=notice) if facts.resume is None else _put(facts, facts.resume, notice)


def _put(facts: QueueFacts, offset: int, notice: Notice | None = None) -> Place:
    """Return the place of a queue at the queue offset `offset`."""
    if facts.is_owned:
        return Place(Step.START if facts.previous is None else Step.SEEK, offset, notice=notice)
    return Place() if facts.previous is None else Place(Step.MOVE, offset)


def _nearest(offset: int, bounds: QueueBounds) -> int:
    return max(bounds.min_offset, min(offset, bounds.max_offset))


def offsets_of(places: Mapping[QueueKey, Place], step: Step) -> dict[QueueKey, int]:
    """Return the queue offsets of the queues whose place has this step."""
    return {queue: place.offset for queue, place in places.items() if place.step is step}


def describe_notices(places: Mapping[QueueKey, Place], group: str) -> list[str]:
    """Return the warnings for all queues, in the order in which they are logged.

    There is one warning for each reason: it describes the first queue, and says how many others there are. Only the
    warnings of resets are one for each queue. Raises GroupConflictError if onOffsetConflict=fail and the consumer group
    `group` is ahead of the checkpoint.
    """
    found: dict[Reason, dict[QueueKey, Notice]] = {}
    for queue, place in places.items():
        if place.notice is not None:
            found.setdefault(place.notice.reason, {})[queue] = place.notice
    resets = found.pop(Reason.RESET, {})
    warnings = [_describe(group, queue, resets[queue]) for queue in sorted(resets)]
    for reason, notices in found.items():
        queue = min(notices)
        text = _describe(group, queue, notices[queue], len(notices) - 1)
        if reason is Reason.CONFLICT:
            raise GroupConflictError(text)
        warnings.append(text)
    return warnings


def _describe(group: str, queue: QueueKey, notice: Notice, others: int = 0) -> str:
    more = f" (and {others} more queues)" if others else ""
    return notice.reason.value.format(
        group=group, committed=notice.committed, queue=queue, other=notice.other, more=more
    )
