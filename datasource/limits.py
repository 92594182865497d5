"""Limits of a micro-batch: how many messages it takes from the backlog of each queue. Pure arithmetic.

The backlog of a queue is its messages that no batch has taken yet. These invariants apply to each limit, and to all
limits together:

- A batch takes the first messages of a backlog, so the order within a queue is kept.
- The number of messages or bytes never exceeds its limit, except that a batch may be a single record that is larger.
- While there is a backlog, a batch takes at least one message.
- No queue starves. If a limit allows less than one message for each queue, the queues are served in a cycle. The
  cursor, which is the queue that was served last, is part of the offset, so a repeated plan takes the same messages.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rmq_spark.datasource.read_options import Limits
from rmq_spark.store.model import QueueKey


@dataclass(frozen=True, slots=True)
class QueueRange:
    """The messages of one queue at the queue offsets [begin, end)."""

    queue: QueueKey
    begin: int
    end: int

    @property
    def count(self) -> int:
        """The number of messages."""
        return self.end - self.begin


# MeasureBytes returns the exact size of a range's records in bytes. FitBytes returns the end of the longest prefix of a
# range whose records fit into a number of bytes.
MeasureBytes = Callable[[QueueRange], int]
FitBytes = Callable[[QueueRange, int], int]


@dataclass(frozen=True, slots=True)
class Take:
    """The messages that a batch takes: the end of its range in each queue that has a backlog, and the next cursor.

    The cursor is None if every queue with a backlog was served.
    """

    ends: Mapping[QueueKey, int]
    cursor: QueueKey | None


def take_limited(
    backlog: list[QueueRange],
    limits: Limits,
    cursor: QueueKey | None,
    measure: MeasureBytes,
    fit: FitBytes,
) -> Take:
    """Return the messages that the batch takes from `backlog` under all limits.

    `backlog` has the range of each queue, sorted by queue, none empty. `measure` and `fit` are called only if there is
    a limit of bytes, and never for more bytes of a queue than this limit, except for a single record.
    """
    assert all(part.count > 0 for part in backlog), backlog
    taken = backlog
    if limits.max_offsets_per_queue is not None:
        maximum = limits.max_offsets_per_queue
        taken = [QueueRange(part.queue, part.begin, min(part.end, part.begin + maximum)) for part in taken]
    if limits.max_offsets is not None:
        taken = share_messages(taken, limits.max_offsets, cursor)
    if limits.max_bytes is not None:
        taken = share_bytes(taken, limits.max_bytes, cursor, measure, fit)
    served = {part.queue for part in taken}
    ends = {part.queue: part.begin for part in backlog}
    ends.update((part.queue, part.end) for part in taken)
    if len(served) == len(backlog):
        return Take(ends, None)
    return Take(ends, _round_robin([part for part in backlog if part.queue in served], cursor)[-1].queue)


def _round_robin(parts: list[QueueRange], cursor: QueueKey | None) -> list[QueueRange]:
    """Return the ranges in the order in which their queues are served, which begins after the cursor."""
    if cursor is None:
        return parts
    return [part for part in parts if part.queue > cursor] + [part for part in parts if part.queue <= cursor]


def share_messages(backlog: list[QueueRange], limit: int, cursor: QueueKey | None) -> list[QueueRange]:
    """Return the range to take from each queue: `limit` messages in all, or the whole backlog if that is less.

    If `limit` is less than the number of queues, only that number of queues is served, with one message each. Otherwise
    each queue gets one message, and the rest of the limit is divided in proportion to the backlogs; the shares with the
    largest fractions are rounded up. Kafka's source divides in proportion too, but rounds every share below one up to
    one, so it may exceed the limit.
    """
    if limit < len(backlog):
        return [QueueRange(part.queue, part.begin, part.begin + 1) for part in _round_robin(backlog, cursor)[:limit]]
    spare = limit - len(backlog)
    shares = [share + 1 for share in _prorate([part.count - 1 for part in backlog], spare)]
    return [QueueRange(part.queue, part.begin, part.begin + share) for part, share in zip(backlog, shares, strict=True)]


def share_bytes(
    backlog: list[QueueRange], limit: int, cursor: QueueKey | None, measure: MeasureBytes, fit: FitBytes
) -> list[QueueRange]:
    """Return the range to take from each queue: records of at most `limit` bytes in all.

    First the queues are served in a cycle, each with its first record, while these records fit. The very first record
    is taken whatever its size. Then the rest of the limit is divided in proportion to the backlogs in bytes; a backlog
    larger than `limit` is treated as one of `limit`. A queue that is not served is left out.
    """
    firsts: list[tuple[QueueRange, QueueRange]] = []
    spare = limit
    for part in _round_robin(backlog, cursor):
        first = QueueRange(part.queue, part.begin, part.begin + 1)
        size = measure(first)
        if firsts and size > spare:
            break  # the next batch begins with this queue
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
    """Divide `limit` in proportion to the sizes. Return the shares, which are whole numbers.

    No share is larger than its size. If the sum of the sizes is at most `limit`, the shares are the sizes.
    """
    total = sum(sizes)
    if total <= limit:
        return sizes
    shares = [size * limit // total for size in sizes]
    left = limit - sum(shares)
    largest = sorted(
        range(len(sizes)), key=lambda number: -(sizes[number] * limit % total)
    )  # stable: ties keep their order
    for number in largest[:left]:
        shares[number] += 1
    return shares


def must_wait(new_messages: int, limits: Limits, waited_ms: int) -> bool:
    """Return whether a trigger starts no batch, because there are fewer new messages than minOffsetsPerTrigger.

    `waited_ms` is the time since the last batch. Once it has reached maxTriggerDelay, a trigger starts a batch anyway,
    as in Kafka's source.
    """
    return limits.min_offsets is not None and new_messages < limits.min_offsets and waited_ms < limits.max_delay_ms
