"""Division of queue ranges into tasks by maxRecordsPerPartition, then by minPartitions. Pure arithmetic.

Follows KafkaOffsetRangeCalculator#getRanges (Spark 4.x), except for the rounding of `count * i / parts`.
"""

from itertools import groupby, pairwise

from rmq_spark.store.model import QueueRange

_SHORT = 10_000  # messages; a longer range is not packed into one task with others


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


def pack_ranges(
    ranges: list[QueueRange], max_records: int | None = None, min_partitions: int | None = None
) -> list[list[QueueRange]]:
    """Divide the ranges into tasks. Return the tasks in order; each is a list of pieces of one queue.

    The pieces cover the ranges exactly, and ranges are divided as in `split_ranges`. If a queue has several ranges,
    short ones (up to 10,000 messages) are combined: a task gets as many of them as `max_records` allows, because
    starting a task costs more than reading a short range.
    """
    alone: list[QueueRange] = []
    packs: list[list[QueueRange]] = []
    for _, group in groupby((part for part in ranges if part.count > 0), key=lambda part: part.queue):
        parts = list(group)
        is_scattered = len(parts) > 1
        short = [part for part in parts if is_scattered and part.count <= _SHORT]
        alone += [part for part in parts if not is_scattered or part.count > _SHORT]
        room = 0
        for part in short:
            for piece in split(part, -(-part.count // max_records) if max_records else 1):
                if piece.count > room:
                    packs.append([])
                    room = max_records or sum(one.count for one in short)
                packs[-1].append(piece)
                room -= piece.count
    wanted = None if min_partitions is None else max(min_partitions - len(packs), 1)
    packs += [[piece] for piece in split_ranges(alone, max_records, wanted)]
    return sorted(packs, key=lambda pack: (pack[0].queue, pack[0].begin))
