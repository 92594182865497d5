"""Division of queue ranges into tasks. Pure arithmetic.

`minPartitions` and `maxRecordsPerPartition` follow KafkaOffsetRangeCalculator#getRanges (Spark 4.x), except for the
rounding of `count * i / parts`. Beyond these, `make_tasks` avoids tasks that cost more to start than to run, and cores
that have nothing to do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from rmq_spark.store.model import QueueRange

# Reading this much takes about twice as long as starting a task, so ranges share a task up to this size.
SHARED_MESSAGES = 100_000
SHARED_BYTES = 32 << 20
# Up to this many messages share a task although cores have nothing to do.
LEAST_SHARED_MESSAGES = 10_000
# A piece that a core gets because it would be idle otherwise has at least this many messages.
LEAST_SPLIT_MESSAGES = 100_000


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """How ranges are divided into tasks.

    `max_records` (messages) and `min_partitions` are the options maxRecordsPerPartition and minPartitions. `cores` is
    the number of tasks that can run at once. If `are_queues_apart`, no task reads several queues, and only the two
    options split a queue. If `are_queues_whole`, nothing splits a queue, so `max_records` must be None.
    """

    max_records: int | None = None
    min_partitions: int | None = None
    cores: int = 1
    are_queues_apart: bool = False
    are_queues_whole: bool = False


def make_tasks(
    ranges: list[QueueRange], limits: TaskLimits, sizes: Mapping[QueueRange, int] | None = None
) -> list[list[QueueRange]]:
    """Divide the ranges into tasks, and return the pieces that each task reads.

    `ranges` must be sorted by queue and offset. The pieces cover them exactly, in the same order, and none is empty.

    Ranges that follow each other share a task, up to `SHARED_MESSAGES` and `SHARED_BYTES`, or about up to the share of
    a core if that is less: a range joins if at least half of it is within the share. `sizes` has the bytes of the
    ranges' records; a range that is missing there counts as 0 bytes.
    Without `min_partitions`, large ranges are split so that all cores have work.

    Whole queues share a task up to `LEAST_SHARED_MESSAGES`, and cores and `min_partitions` get a task each as far as
    there are queues. A listener has work for a core although it has few rows, and takes this many rows of several
    queues side by side (`listener_calls.ORDERLY_ROWS`).
    """
    sizes = sizes or {}
    most, least = limits.max_records, limits.min_partitions
    pieces = split_ranges(ranges, most, None if limits.are_queues_whole else least)
    if limits.are_queues_whole:
        most, least = LEAST_SHARED_MESSAGES, max(least or 1, limits.cores)
    if limits.are_queues_apart:
        return [[piece] for piece in pieces]
    if least is None:
        pieces = _use_cores(pieces, limits.cores)
    total = sum(piece.count for piece in pieces)
    # Tasks of about the same length, not one long task and many short ones.
    part = max(-(-total // limits.cores), LEAST_SHARED_MESSAGES) if least is None else -(-total // least)
    shared = min(SHARED_MESSAGES, most or SHARED_MESSAGES)
    spare = len(pieces) - (least or 1)  # this many pieces may join the task before them
    tasks: list[list[QueueRange]] = []
    messages = size = 0
    for piece in pieces:
        added = sizes.get(piece, 0)
        is_small = messages + piece.count <= shared and size + added <= SHARED_BYTES
        if spare > 0 and tasks and is_small and messages + piece.count // 2 <= part:
            tasks[-1].append(piece)
            messages, size, spare = messages + piece.count, size + added, spare - 1
        else:
            tasks.append([piece])
            messages, size = piece.count, added
    return tasks


def _use_cores(pieces: list[QueueRange], cores: int) -> list[QueueRange]:
    """Split each piece that is larger than a core's share of all messages, in proportion to its length."""
    total = sum(piece.count for piece in pieces)
    return [
        part
        for piece in pieces
        for part in split(piece, max(min(_parts(piece.count, total, cores), piece.count // LEAST_SPLIT_MESSAGES), 1))
    ]


def split_ranges(
    ranges: list[QueueRange], max_records: int | None = None, min_partitions: int | None = None
) -> list[QueueRange]:
    """Divide the ranges into pieces. Return pieces that cover the ranges exactly, in the same order, none empty.

    No piece has more than `max_records` messages. If this gives fewer pieces than `min_partitions`, the larger ranges
    are divided further, in proportion to their length, so that there are about `min_partitions` pieces in all. Small
    ranges remain undivided.
    """
    ranges = [part for part in ranges if part.count > 0]
    pieces = [piece for part in ranges for piece in split(part, -(-part.count // max_records) if max_records else 1)]
    if min_partitions is None or len(pieces) >= min_partitions:
        return pieces
    total = sum(part.count for part in ranges)
    whole = {part for part in ranges if _parts(part.count, total, min_partitions) == 1}
    split_total = total - sum(part.count for part in whole)
    split_parts = max(min_partitions - len(whole), 1)
    result = []
    for part in ranges:
        parts = 1 if part in whole else _parts(part.count, split_total, split_parts)
        if max_records:
            parts = max(parts, -(-part.count // max_records))
        result += split(part, parts)
    return result


def split(part: QueueRange, parts: int) -> list[QueueRange]:
    """Divide a range into at most `parts` pieces of almost equal length, in order, none empty."""
    assert parts > 0, parts
    cuts = [part.begin + part.count * number // parts for number in range(parts + 1)]
    return [QueueRange(part.queue, begin, end) for begin, end in pairwise(cuts) if begin < end]


def _parts(count: int, total: int, wanted: int) -> int:
    """Return the number of pieces for a range with `count` messages, if all `total` messages get `wanted` pieces."""
    return max((2 * count * wanted + total) // (2 * total), 1)
