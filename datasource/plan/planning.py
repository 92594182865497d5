"""Planning of batches: start offsets, end offsets and losses. Pure arithmetic.

The functions compute offsets from the bounds of queues, and use neither disk nor clock nor Spark. They return missing
messages as values (`Loss`); the caller raises an error for them, or logs and counts them.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from rmq_spark.datasource.options.option_parsers import EARLIEST, LATEST, Positions
from rmq_spark.datasource.options.read_options import Limits
from rmq_spark.datasource.plan.limits import take_limited
from rmq_spark.datasource.plan.offsets import StreamOffset
from rmq_spark.store.backend import SizeEstimates
from rmq_spark.store.errors import DataLossError, NotFoundError, OffsetRangeError, OptionError
from rmq_spark.store.model import QueueBounds, QueueKey, QueueRange

Bounds = Mapping[QueueKey, QueueBounds]

EXPIRED = "retention has deleted them, the queue now begins at {0.min_offset}"
CUT = "the queue ends at {0.max_offset} now; the store was truncated after a crash, rebuilt or replaced"
AHEAD = (
    "the consumer group {0} is at {1}, and the queue ends at {2} now; the store was truncated after a crash, rebuilt "
    "or restored from an older copy, or a tool set the group's offset. Set it with rmq_spark.reset_offsets, or in a "
    "cluster with mqadmin resetOffsetByTime"
)
VANISHED = "the queue does not exist any more, as a second scan of the store confirmed"
UNSUBSCRIBED = "the checkpoint has a position in the queue, to which the query does not subscribe"
NO_REASONS: Mapping[QueueKey, str] = {}
_SHOWN_TOPICS, _SHOWN_QUEUES = 5, 8  # in an error


@dataclass(frozen=True, slots=True)
class Loss(QueueRange):
    """Messages that the query should read and that are missing.

    If `begin` equals `end`, so that `count` is 0, the number of missing messages is unknown. `why` is the reason, for
    the error.
    """

    why: str

    def __str__(self) -> str:
        if not self.count:
            return f"messages of queue {self.queue}, queue offsets ≥ {self.begin}: {self.why}"
        return f"{self.count} messages of queue {self.queue}, queue offsets [{self.begin}, {self.end}): {self.why}"


def require_no_losses(losses: Iterable[Loss]) -> None:
    """Raise DataLossError if there are losses. It describes the largest loss, and says how many others there are."""
    ordered = sorted(losses, key=lambda loss: (-loss.count, loss.queue))
    if ordered:
        worst = ordered[0]
        more = f" (and {len(ordered) - 1} more queues)" if len(ordered) > 1 else ""
        queue = worst.queue
        raise DataLossError(queue.topic, queue.queue_id, worst.begin, worst.end, worst.why + more, queue.broker)


def find_ahead(committed: Mapping[QueueKey, int], bounds: Bounds, group: str) -> list[Loss]:
    """Return a loss for each queue in which the group's committed offset is beyond the end of the queue.

    In RocketMQ a broker answers OFFSET_OVERFLOW_BADLY to a pull at such an offset, and the client silently resumes at
    the end of the queue.
    """
    return [
        Loss(queue, available.max_offset, offset, AHEAD.format(group, offset, available.max_offset))
        for queue, offset in committed.items()
        if (available := bounds.get(queue)) is not None and offset > available.max_offset
    ]


def resolve_positions(
    bounds: Bounds,
    wanted: Positions | None,
    by_time: Mapping[QueueKey, int],
    default: int,
    name: str,
    clip: bool = False,
    away: Collection[QueueKey] = (),
) -> tuple[dict[QueueKey, int], list[Loss]]:
    """Return the offset at which each queue in `bounds` begins or ends, and the losses.

    The offset of a queue is the first that is given of: its offset in `by_time`, its offset in `wanted`, the default of
    `wanted`, and `default`. If it is below the queue's minimum, it becomes the minimum, and the messages between are a
    loss. If it is beyond the queue's end, OffsetRangeError is raised, because such an offset has never existed; with
    `clip` it becomes the end instead. A queue in `away` has unknown bounds, so it gets its offset in `wanted` as it is,
    and no position if that is none. Raises NotFoundError for another queue in `wanted` that does not exist. `name` is
    the name of the option in errors.
    """
    wanted = wanted or Positions()
    check_named(wanted.queues, {*bounds, *away} if away else bounds, name)
    default = default if wanted.default is None else wanted.default
    positions = {queue: offset for queue in away if (offset := wanted.queues.get(queue, LATEST)) >= 0}
    losses = []
    for queue, available in bounds.items():
        offset = by_time.get(queue, wanted.queues.get(queue, default))
        if offset == EARLIEST:
            offset = available.min_offset
        elif offset == LATEST:
            offset = available.max_offset
        if offset < available.min_offset:
            losses.append(Loss(queue, offset, available.min_offset, EXPIRED.format(available)))
            offset = available.min_offset
        elif offset > available.max_offset:
            if not clip:
                error = OffsetRangeError(str(queue), offset, offset, available.min_offset, available.max_offset)
                error.add_note(
                    f"The offset is from {name}. Give one in the range, or set failOnDataLoss=false for the nearest."
                )
                raise error
            offset = available.max_offset
        positions[queue] = offset
    return positions, losses


def check_named(queues: Iterable[QueueKey], known: Collection[QueueKey], name: str) -> None:
    """Raise NotFoundError if one of `queues`, which the option `name` contains, is not in `known`."""
    for queue in queues:
        if queue not in known:
            ids = ", ".join(other.id_text for other in sorted(known) if other.topic == queue.topic)
            raise NotFoundError(
                f"{name}: the queue {queue} is not in the store. "
                + (f'Queues of topic "{queue.topic}": {ids}.' if ids else f'The topic "{queue.topic}" does not exist.')
            )


@dataclass(frozen=True, slots=True)
class Progress:
    """The positions of queues before the next batch, and the losses that were found.

    `begins` has the position of every queue. A position outside of the queue's bounds was moved to the nearest bound.
    `starts` has only the queues that are not in the previous offset.
    """

    begins: dict[QueueKey, int]
    starts: dict[QueueKey, int]
    losses: list[Loss]


def describe_unsubscribed(queues: Collection[QueueKey], subscription: str) -> str:
    """Return an error text about a checkpoint that has positions in `queues`, to which the query does not subscribe."""
    return (
        f"the checkpoint is not one of {subscription}: it has positions in {list_queues(queues)}, to which the query "
        "does not subscribe"
    )


def list_queues(queues: Collection[QueueKey]) -> str:
    """Return the queues by topic, for a text: "orders (queues 0, 1), payments (queue 3)". Long lists are cut."""
    ids: dict[str, list[str]] = {}
    for queue in sorted(queues):
        ids.setdefault(queue.topic, []).append(queue.id_text)
    shown = [
        f"{topic} (queue{'s' if len(some) > 1 else ''} {', '.join(some[:_SHOWN_QUEUES])}"
        f"{' …' if len(some) > _SHOWN_QUEUES else ''})"
        for topic, some in ids.items()
    ]
    more = f" and {len(shown) - _SHOWN_TOPICS} more topics" if len(shown) > _SHOWN_TOPICS else ""
    return f"{', '.join(shown[:_SHOWN_TOPICS])}{more}"


def require_subscribed(queues: Collection[QueueKey], subscription: str) -> None:
    """Raise OptionError if there are any `queues` to which the query does not subscribe.

    These are queues in which the query's checkpoint has positions. `subscription` is the query's, as text.
    """
    if queues:
        raise OptionError(
            f"{describe_unsubscribed(queues, subscription)}; expected a checkpoint of the same topics. Give this query "
            "a checkpointLocation of its own, or subscribe to those topics again. With failOnDataLoss=false the query "
            "drops these positions and does not read the other messages there."
        )


def check_progress(
    offset: StreamOffset,
    bounds: Bounds,
    starts: Mapping[QueueKey, int],
    dropped: Collection[QueueKey] = (),
    away: Collection[QueueKey] = (),
    gone: Mapping[QueueKey, str] = NO_REASONS,
) -> Progress:
    """Return the positions of the queues in `bounds` before the next batch. `offset` is the end of the previous batch.

    A queue that is not in `offset` begins at its position in `starts`, or at its minimum if `starts` lacks it too. So
    if `offset` is the initial offset, `starts` must have the start of the query. A queue in `away` keeps its position,
    if it has one. Any other queue that is in `offset` but not in `bounds` is left out of the next offset. It is a loss,
    for the reason in `gone` if there is one, unless it is in `dropped`.
    """
    losses = [
        Loss(queue, position, position, gone.get(queue, VANISHED))
        for queue, position in offset.positions.items()
        if queue not in bounds and queue not in dropped and queue not in away
    ]
    begins, new = {}, {}
    for queue in away:
        if queue in offset.positions:
            begins[queue] = offset.positions[queue]
        elif queue in starts:
            begins[queue] = new[queue] = starts[queue]
    for queue, available in bounds.items():
        position = offset.positions.get(queue)
        if position is None:
            begins[queue] = new[queue] = starts.get(queue, available.min_offset)
            continue
        if position < available.min_offset:
            losses.append(Loss(queue, position, available.min_offset, EXPIRED.format(available)))
            position = available.min_offset
        elif position > available.max_offset:
            # Resume at the end, as clients do after a broker's OFFSET_OVERFLOW_BADLY (since 4.9.4). If a crash lost the
            # last messages, resuming at the beginning would deliver the whole queue twice.
            losses.append(Loss(queue, available.max_offset, position, CUT.format(available)))
            position = available.max_offset
        begins[queue] = position
    return Progress(begins, new, losses)


def plan_batch(
    before: StreamOffset,
    progress: Progress,
    targets: Mapping[QueueKey, int],
    limits: Limits,
    sizes: SizeEstimates | None,
) -> StreamOffset:
    """Return the offset at the end of the next batch.

    In each queue the batch ends at the queue's offset in `targets`, or before it if `limits` allow less. A queue that
    is not in `targets` has no rows. The caller sets the fields `ending` and `ended` of the result.
    """
    begins = progress.begins
    backlog = [
        QueueRange(queue, begins[queue], target) for queue, target in sorted(targets.items()) if target > begins[queue]
    ]
    take = take_limited(backlog, limits, before.cursor, sizes)
    lost = dict(before.lost)
    for loss in progress.losses:
        if loss.count:
            lost[loss.queue] = lost.get(loss.queue, 0) + loss.count
    positions = {**begins, **take.ends}
    starts = {queue: start for queue, start in progress.starts.items() if start < positions[queue]}
    return StreamOffset(positions, starts, lost=lost, cursor=take.cursor, since_ms=before.since_ms)


def count_new(progress: Progress, targets: Mapping[QueueKey, int]) -> int:
    """Return the number of new messages: those between the positions in `progress` and the offsets in `targets`."""
    return sum(max(target - progress.begins[queue], 0) for queue, target in targets.items())


def is_same(before: StreamOffset, after: StreamOffset) -> bool:
    """Return whether nothing has changed from `before` to `after`, so that the text of `before` must be repeated.

    `starts` and `seeks` of `before` are not compared, because they describe the previous batch. `cursor` is not
    compared, because a batch that only changes the cursor has no rows.
    """
    return (
        not before.is_initial()
        and not after.seeks
        and before.positions == after.positions
        and (before.group, before.reset, before.suspended) == (after.group, after.reset, after.suspended)
        and before.lost == after.lost
        and (before.ending, before.ended) == (after.ending, after.ended)
    )


def ranges_between(before: StreamOffset, after: StreamOffset) -> list[QueueRange]:
    """Return the ranges that a batch from `before` to `after` reads, sorted by queue, none empty.

    In each queue the batch ends at the position in `after`. It begins at the first of these that exists:

    1. the position in the `seeks` of `after`;
    2. the position in `before`, plus the number of messages that were counted as lost from `before` to `after`;
    3. the position in the `starts` of `after`;
    4. the position in `after`, so that nothing is read.
    """
    if before == after:  # an empty batch, whose `starts` and `seeks` describe the previous batch
        return []
    starts = after.starts or {}
    resumed = {
        queue: position + after.lost.get(queue, 0) - before.lost.get(queue, 0)
        for queue, position in before.positions.items()
    }
    ranges = [
        QueueRange(queue, after.seeks.get(queue, resumed.get(queue, starts.get(queue, end))), end)
        for queue, end in after.positions.items()
    ]
    return sorted((part for part in ranges if part.count > 0), key=lambda part: part.queue)


def clip_ranges(
    ranges: Iterable[QueueRange],
    bounds: Bounds,
    unsubscribed: Collection[QueueKey] = (),
    away: Collection[QueueKey] = (),
    gone: Mapping[QueueKey, str] = NO_REASONS,
) -> tuple[list[QueueRange], list[Loss]]:
    """Return the parts of the ranges that are within the bounds, none empty, and the other parts as losses.

    If a range's queue is in `away`, the whole range is kept, and its task waits for the broker. If its queue is not in
    `bounds` either, the whole range is a loss; `unsubscribed` and `gone` determine which reason is given.
    """
    kept, losses = [], []
    for part in ranges:
        available = bounds.get(part.queue)
        if part.queue in away:
            kept.append(part)
            continue
        if available is None:
            why = UNSUBSCRIBED if part.queue in unsubscribed else gone.get(part.queue, VANISHED)
            losses.append(Loss(part.queue, part.begin, part.end, why))
            continue
        begin, end = max(part.begin, available.min_offset), min(part.end, available.max_offset)
        if begin > part.begin:
            losses.append(Loss(part.queue, part.begin, min(begin, part.end), EXPIRED.format(available)))
        if end < part.end:
            losses.append(Loss(part.queue, max(end, part.begin), part.end, CUT.format(available)))
        if begin < end:
            kept.append(QueueRange(part.queue, begin, end))
    return kept, losses
