"""How much of each queue one micro-batch takes: pure arithmetic over backlogs.

Invariants, for every limit and all of them together:
- what is taken of a queue begins at its position, so order within a queue holds;
- a sum of messages or bytes never goes beyond its limit, but for one record that is bigger than the limit alone;
- while anything is there, something is taken;
- no queue starves: where a limit is too small for one message of every queue, queues take turns, by a cursor
  (`turn`) that is kept in the offset, so that a replay takes the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rmq_spark.datasource.options import Limits
from rmq_spark.store.units import QueueKey


@dataclass(frozen=True, slots=True)
class QueueRange:
    """The messages [begin, end) of one queue, as queue offsets."""

    queue: QueueKey
    begin: int
    end: int

    @property
    def count(self) -> int:
        """How many messages."""
        return self.end - self.begin


# Exact bytes of the records in a range, and the end of the longest beginning of it that fits into some bytes.
MeasureBytes = Callable[[QueueRange], int]
FitBytes = Callable[[QueueRange, int], int]


@dataclass(frozen=True, slots=True)
class Take:
    """The end of what is taken, for each queue that has a backlog, and the cursor for the next time."""

    ends: Mapping[QueueKey, int]
    turn: QueueKey | None


def take_limited(
    backlog: list[QueueRange],
    limits: Limits,
    turn: QueueKey | None,
    measure: MeasureBytes,
    fit: FitBytes,
) -> Take:
    """Return how far each queue of the backlog (sorted, none empty) goes under all limits.

    `measure` and `fit` are asked only under a limit of bytes, and never about more of a queue than that limit.
    """
    assert all(part.count > 0 for part in backlog), backlog
    taken = backlog
    if limits.max_offsets_per_queue is not None:
        most = limits.max_offsets_per_queue
        taken = [QueueRange(part.queue, part.begin, min(part.end, part.begin + most)) for part in taken]
    served = {part.queue for part in taken}
    if limits.max_offsets is not None:
        taken = share_messages(taken, limits.max_offsets, turn)
        served = {part.queue for part in taken}
    if limits.max_bytes is not None:
        taken = share_bytes(taken, limits.max_bytes, turn, measure, fit)
        served = {part.queue for part in taken}
    ends = {part.queue: part.begin for part in backlog}
    ends.update((part.queue, part.end) for part in taken)
    if len(served) == len(backlog):
        return Take(ends, None)
    return Take(ends, in_turn([part for part in backlog if part.queue in served], turn)[-1].queue)


def in_turn(parts: list[QueueRange], turn: QueueKey | None) -> list[QueueRange]:
    """Return the parts beginning with the first one after the queue that was served last."""
    if turn is None:
        return parts
    return [part for part in parts if part.queue > turn] + [part for part in parts if part.queue <= turn]


def share_messages(backlog: list[QueueRange], limit: int, turn: QueueKey | None) -> list[QueueRange]:
    """Return what is taken of each queue that is served: in all as many messages as there are, or `limit`.

    One of each queue, and the rest in proportion to what is left of it; remainders go to the largest fractions.
    Kafka's source prorates too, but rounds shares below one up, which may exceed the limit.
    """
    if limit < len(backlog):
        return [QueueRange(part.queue, part.begin, part.begin + 1) for part in in_turn(backlog, turn)[:limit]]
    spare = limit - len(backlog)
    shares = [share + 1 for share in _prorate([part.count - 1 for part in backlog], spare)]
    return [QueueRange(part.queue, part.begin, part.begin + share) for part, share in zip(backlog, shares, strict=True)]


def share_bytes(
    backlog: list[QueueRange], limit: int, turn: QueueKey | None, measure: MeasureBytes, fit: FitBytes
) -> list[QueueRange]:
    """Return what is taken of each queue that is served: records of at most `limit` bytes in all.

    In turn, the first record of each queue while it fits; then the rest in proportion to the bytes behind it, of
    which no queue counts more than `limit`. The very first record is taken whatever its size.
    """
    firsts: list[tuple[QueueRange, QueueRange]] = []
    spare = limit
    for part in in_turn(backlog, turn):
        first = QueueRange(part.queue, part.begin, part.begin + 1)
        size = measure(first)
        if firsts and size > spare:
            break  # it is first the next time
        firsts.append((part, first))
        spare -= size
        if spare <= 0:
            break
    if spare <= 0:
        return [first for _, first in firsts]
    rests = [QueueRange(part.queue, first.end, part.end) for part, first in firsts]
    rests = [QueueRange(rest.queue, rest.begin, fit(rest, limit)) for rest in rests]
    shares = _prorate([measure(rest) if rest.count else 0 for rest in rests], spare)
    return [
        QueueRange(part.queue, part.begin, fit(rest, share) if rest.count else rest.begin)
        for (part, _), rest, share in zip(firsts, rests, shares, strict=True)
    ]


def _prorate(sizes: list[int], limit: int) -> list[int]:
    """Return a share of `limit` for each size, in proportion; none above its size, in all limit or all there is."""
    total = sum(sizes)
    if total <= limit:
        return sizes
    shares = [size * limit // total for size in sizes]
    left = limit - sum(shares)
    largest = sorted(range(len(sizes)), key=lambda number: -(sizes[number] * limit % total))  # stable: ties in order
    for number in largest[:left]:
        shares[number] += 1
    return shares


def must_wait(new_messages: int, limits: Limits, waited_ms: int) -> bool:
    """Say whether minOffsetsPerTrigger asks to wait on, `waited_ms` after the last batch; as Kafka's source does."""
    return limits.min_offsets is not None and new_messages < limits.min_offsets and waited_ms < limits.max_delay_ms
