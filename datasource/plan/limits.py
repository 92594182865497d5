"""Limits of a micro-batch: how many messages it takes from the backlog of each queue. Pure arithmetic.

The backlog of a queue is its messages that no batch has taken yet. These invariants apply to each limit, and to all
limits together:

- A batch takes the first messages of a backlog, so the order within a queue is kept.
- The number of messages or bytes never exceeds its limit, except that a batch may be a single record that is larger.
- While there is a backlog, a batch takes at least one message.
- No queue starves. If a limit allows less than one message for each queue, the queues are served in a cycle. The
  cursor, which is the queue that was served last, is part of the offset, so a repeated plan takes the same messages.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rmq_spark.datasource.options.read_options import Limits
from rmq_spark.store.backend import SizeEstimates
from rmq_spark.store.model import QueueKey, QueueRange


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
    sizes: SizeEstimates | None,
) -> Take:
    """Return the messages that the batch takes from `backlog` under all limits.

    `backlog` has the range of each queue, sorted by queue, none empty. `sizes` is used only if there is a limit of
    bytes, and measures at most this many bytes of a queue, or a single record. If sizes are estimates, a batch may be
    larger than the limit.
    """
    assert all(part.count > 0 for part in backlog), backlog
    taken = backlog
    if limits.max_offsets_per_queue is not None:
        maximum = limits.max_offsets_per_queue
        taken = [QueueRange(part.queue, part.begin, min(part.end, part.begin + maximum)) for part in taken]
    if limits.max_offsets is not None:
        taken = share_messages(taken, limits.max_offsets, cursor)
    if limits.max_bytes is not None:
        assert sizes is not None, "load() refuses maxBytesPerTrigger where sizes are unknown"
        taken = share_bytes(taken, limits.max_bytes, cursor, sizes)
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
    backlog: list[QueueRange], limit: int, cursor: QueueKey | None, sizes: SizeEstimates
) -> list[QueueRange]:
    """Return the range to take from each queue: records of at most `limit` bytes in all.

    First the queues are served in a cycle, each with its first record, while these records fit. The very first record
    is taken whatever its size. Then the rest of the limit is divided in proportion to the backlogs in bytes; a backlog
    larger than `limit` is treated as one of `limit`. A queue that is not served is left out.
    """
    firsts = [(part, QueueRange(part.queue, part.begin, part.begin + 1)) for part in _round_robin(backlog, cursor)]
    first_bytes = sizes.measure([first for _, first in firsts])
    spare = limit
    for number, (_, first) in enumerate(firsts):
        if spare <= 0 or (number and first_bytes[first] > spare):
            firsts = firsts[:number]  # the next batch begins with this queue
            break
        spare -= first_bytes[first]
    if spare <= 0:
        return [first for _, first in firsts]
    rests = {part.queue: QueueRange(part.queue, first.end, part.end) for part, first in firsts if part.count > 1}
    ends = sizes.fit(dict.fromkeys(rests.values(), limit))
    rests = {queue: QueueRange(queue, rest.begin, ends[rest]) for queue, rest in rests.items()}
    rests = {queue: rest for queue, rest in rests.items() if rest.count}
    rest_bytes = sizes.measure(list(rests.values()))
    shares = _prorate([rest_bytes[rest] for rest in rests.values()], spare)
    ends = sizes.fit(dict(zip(rests.values(), shares, strict=True)))
    return [
        QueueRange(part.queue, part.begin, ends[rests[part.queue]] if part.queue in rests else first.end)
        for part, first in firsts
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
