"""Where a query begins, where its next batch ends, and what of a range is gone: pure arithmetic.

No disk, no clock, no Spark: bounds come in as numbers, offsets go out. A loss of data is a value here
(`Loss`); the caller raises it or counts it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from rmq_spark.datasource.limits import FitBytes, MeasureBytes, QueueRange, take_limited
from rmq_spark.datasource.offsets import StreamOffset
from rmq_spark.datasource.options import Limits
from rmq_spark.datasource.values import EARLIEST, LATEST, Positions
from rmq_spark.store.errors import DataLossError, NotFoundError, OffsetRangeError, OptionError
from rmq_spark.store.units import QueueBounds, QueueKey

Bounds = Mapping[QueueKey, QueueBounds]

EXPIRED = "retention has deleted them, the queue now begins at {0.min_offset}"
CUT = "the queue ends at {0.max_offset} now; the store was cut after a crash, rebuilt or replaced"
AHEAD = (
    "the consumer group {0} stands at {1}, and the queue ends at {2} now; the store was cut after a crash, rebuilt or "
    "restored from an older copy, or a tool set the group's offset. rmq_spark.reset_offsets sends the group to where "
    "it is to go on"
)
VANISHED = "the store has no such queue any more, and looking twice did not find it"
UNSUBSCRIBED = "the query does not subscribe to the queue, which the checkpoint names"
_SHOWN_TOPICS, _SHOWN_QUEUES = 5, 8  # that an error names


@dataclass(frozen=True, slots=True)
class Loss:
    """Queue offsets [begin, end) of a queue that were promised and are not there. May be empty if unknown."""

    queue: QueueKey
    begin: int
    end: int
    why: str

    @property
    def count(self) -> int:
        """How many messages, as far as offsets tell."""
        return self.end - self.begin

    def __str__(self) -> str:
        if not self.count:
            return f"messages of queue {self.queue} from queue offset {self.begin} on: {self.why}"
        return f"{self.count} messages of queue {self.queue}, queue offsets [{self.begin}, {self.end}): {self.why}"


def refuse_losses(losses: Iterable[Loss]) -> None:
    """Raise DataLossError for the largest loss, which says how many more there are; nothing for none."""
    ordered = sorted(losses, key=lambda loss: (-loss.count, loss.queue))
    if ordered:
        worst = ordered[0]
        more = f" (and {len(ordered) - 1} more queues)" if len(ordered) > 1 else ""
        raise DataLossError(worst.queue.topic, worst.queue.queue_id, worst.begin, worst.end, worst.why + more)


def find_ahead(held: Mapping[QueueKey, int], bounds: Bounds, group: str) -> list[Loss]:
    """Return what lies between the ends of queues and the places behind them where a consumer group stands.

    A broker answers OFFSET_OVERFLOW_BADLY there, and its client goes on at the end, in silence.
    """
    return [
        Loss(queue, there.max_offset, at, AHEAD.format(group, at, there.max_offset))
        for queue, at in held.items()
        if (there := bounds.get(queue)) is not None and at > there.max_offset
    ]


def resolve_positions(
    bounds: Bounds,
    wanted: Positions | None,
    by_time: Mapping[QueueKey, int],
    default: int,
    name: str,
    clip: bool = False,
) -> tuple[dict[QueueKey, int], list[Loss]]:
    """Return the queue offset for each queue of `bounds`, and what of the wanted offsets is gone.

    A time goes before an offset, a named queue before the word for the rest, that before `default`. An offset
    below the queue's first is a loss. One beyond its end raises OffsetRangeError, since it never was there; with
    `clip` it becomes the end. `name` is the option that a message speaks of. Raises NotFoundError for a named
    queue that is not there.
    """
    wanted = wanted or Positions()
    check_named(wanted.queues, bounds, name)
    rest = default if wanted.default is None else wanted.default
    positions, losses = {}, []
    for queue, there in bounds.items():
        offset = by_time.get(queue, wanted.queues.get(queue, rest))
        if offset == EARLIEST:
            offset = there.min_offset
        elif offset == LATEST:
            offset = there.max_offset
        if offset < there.min_offset:
            losses.append(Loss(queue, offset, there.min_offset, EXPIRED.format(there)))
            offset = there.min_offset
        elif offset > there.max_offset:
            if not clip:
                error = OffsetRangeError(str(queue), offset, offset, there.min_offset, there.max_offset)
                error.add_note(
                    f"{name} names that offset. Give one that the queue holds, or set failOnDataLoss=false to take "
                    "the nearest."
                )
                raise error
            offset = there.max_offset
        positions[queue] = offset
    return positions, losses


def check_named(queues: Iterable[QueueKey], bounds: Bounds, name: str) -> None:
    """Raise NotFoundError for a queue that the option `name` names and that is not there."""
    for queue in queues:
        if queue not in bounds:
            ids = ", ".join(str(other.queue_id) for other in sorted(bounds) if other.topic == queue.topic)
            raise NotFoundError(
                f"{name} names the queue {queue}, which is not in the store. "
                + (f'Queues of topic "{queue.topic}": {ids}.' if ids else f'There is no topic "{queue.topic}".')
            )


@dataclass(frozen=True, slots=True)
class Progress:
    """Where each queue stands before the next batch, and what was found missing on the way.

    `begins` are the positions, moved to what is there; `starts` those of the queues that the offset before did
    not name.
    """

    begins: dict[QueueKey, int]
    starts: dict[QueueKey, int]
    losses: list[Loss]


def describe_unsubscribed(queues: Collection[QueueKey], subscription: str) -> str:
    """Return what is wrong with a checkpoint that has positions in `queues`, which the query does not read."""
    ids: dict[str, list[str]] = {}
    for queue in sorted(queues):
        ids.setdefault(queue.topic, []).append(str(queue.queue_id))
    shown = [
        f"{topic} (queue{'s' if len(some) > 1 else ''} {', '.join(some[:_SHOWN_QUEUES])}"
        f"{' …' if len(some) > _SHOWN_QUEUES else ''})"
        for topic, some in ids.items()
    ]
    more = f" and {len(shown) - _SHOWN_TOPICS} more topics" if len(shown) > _SHOWN_TOPICS else ""
    return (
        f"the checkpoint is not one of {subscription}: it has positions in {', '.join(shown[:_SHOWN_TOPICS])}{more}, "
        "to which the query does not subscribe"
    )


def refuse_unsubscribed(queues: Collection[QueueKey], subscription: str) -> None:
    """Raise OptionError if a checkpoint has positions in `queues`, which the query does not read; nothing for none."""
    if queues:
        raise OptionError(
            f"{describe_unsubscribed(queues, subscription)}; expected a checkpoint of the same topics. Give this query "
            "a checkpointLocation of its own, or subscribe to those topics again. With failOnDataLoss=false the query "
            "drops these positions and does not read what is left there."
        )


def check_progress(
    offset: StreamOffset, bounds: Bounds, starts: Mapping[QueueKey, int], unsubscribed: Collection[QueueKey] = ()
) -> Progress:
    """Return where the queues of `bounds` stand after `offset`, which is not the initial one, or is with `starts`.

    A queue that the offset does not name begins at its place in `starts`, else at its earliest message. A queue
    that `bounds` does not name has vanished, unless it is in `unsubscribed`. The next offset names neither.
    """
    losses = [
        Loss(queue, position, position, VANISHED)
        for queue, position in offset.positions.items()
        if queue not in bounds and queue not in unsubscribed
    ]
    begins, new = {}, {}
    for queue, there in bounds.items():
        position = offset.positions.get(queue)
        if position is None:
            begins[queue] = new[queue] = starts.get(queue, there.min_offset)
            continue
        if position < there.min_offset:
            losses.append(Loss(queue, position, there.min_offset, EXPIRED.format(there)))
            position = there.min_offset
        elif position > there.max_offset:
            # As a broker answers OFFSET_OVERFLOW_BADLY (4.9.4 on): go on at the end. To begin again would deliver
            # the whole queue twice after a crash that cost its last messages.
            losses.append(Loss(queue, there.max_offset, position, CUT.format(there)))
            position = there.max_offset
        begins[queue] = position
    return Progress(begins, new, losses)


def plan_batch(
    before: StreamOffset,
    progress: Progress,
    targets: Mapping[QueueKey, int],
    limits: Limits,
    measure: MeasureBytes,
    fit: FitBytes,
) -> StreamOffset:
    """Return the offset at the end of the next batch: `targets` at most, under the limits.

    A queue without target stays where it is. `ending` and `ended` are left to the caller.
    """
    begins = progress.begins
    backlog = [
        QueueRange(queue, begins[queue], target) for queue, target in sorted(targets.items()) if target > begins[queue]
    ]
    take = take_limited(backlog, limits, before.turn, measure, fit)
    lost = dict(before.lost)
    for loss in progress.losses:
        if loss.count:
            lost[loss.queue] = lost.get(loss.queue, 0) + loss.count
    positions = {**begins, **take.ends}
    starts = {queue: start for queue, start in progress.starts.items() if start < positions[queue]}
    return StreamOffset(positions, starts, lost=lost, turn=take.turn)


def count_new(progress: Progress, targets: Mapping[QueueKey, int]) -> int:
    """Return how many messages lie between the positions and the targets."""
    return sum(max(target - progress.begins[queue], 0) for queue, target in targets.items())


def is_same(before: StreamOffset, after: StreamOffset) -> bool:
    """Say whether nothing has moved, so that the text of `before` is to be repeated.

    `starts` and `seeks` of an offset are history once the next one has it as its start; `turn` alone moves nothing.
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
    """Return what a batch from `before` to `after` reads, sorted by queue; nothing where the end lies before.

    A queue begins at its place in the `seeks` of `after`; else, if `before` does not name it, in the `starts` of
    `after`, else where it ends. A batch does not read what `after` counts as lost behind the position in `before`.
    """
    if before == after:  # a batch without news, in which `starts` and `seeks` are history
        return []
    starts = after.starts or {}
    counted = {
        queue: at + after.lost.get(queue, 0) - before.lost.get(queue, 0) for queue, at in before.positions.items()
    }
    ranges = [
        QueueRange(queue, after.seeks.get(queue, counted.get(queue, starts.get(queue, end))), end)
        for queue, end in after.positions.items()
    ]
    return sorted((part for part in ranges if part.count > 0), key=lambda part: part.queue)


def clip_ranges(
    ranges: Iterable[QueueRange], bounds: Bounds, unsubscribed: Collection[QueueKey] = ()
) -> tuple[list[QueueRange], list[Loss]]:
    """Return what of the ranges is there, none empty, and what is not."""
    kept, losses = [], []
    for part in ranges:
        there = bounds.get(part.queue)
        if there is None:
            why = UNSUBSCRIBED if part.queue in unsubscribed else VANISHED
            losses.append(Loss(part.queue, part.begin, part.end, why))
            continue
        begin, end = max(part.begin, there.min_offset), min(part.end, there.max_offset)
        if begin > part.begin:
            losses.append(Loss(part.queue, part.begin, min(begin, part.end), EXPIRED.format(there)))
        if end < part.end:
            losses.append(Loss(part.queue, max(end, part.begin), part.end, CUT.format(there)))
        if begin < end:
            kept.append(QueueRange(part.queue, begin, end))
    return kept, losses
