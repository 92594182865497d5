"""Ranges of queues -> tasks, by maxRecordsPerPartition and then minPartitions; pure arithmetic.

Follows KafkaOffsetRangeCalculator#getRanges (Spark 4.x), but for the rounding of `count * i / parts`.
"""

from itertools import pairwise

from rmq_spark.datasource.limits import QueueRange


def split_ranges(
    ranges: list[QueueRange], max_records: int | None = None, min_partitions: int | None = None
) -> list[QueueRange]:
    """Return pieces that cover the ranges exactly, in order, none empty.

    None is longer than `max_records`. If these are fewer than `min_partitions`, the whole ranges are split again:
    the big ones in proportion to their length, to about that number; small ones stay whole. A piece is never
    longer than `max_records` then either.
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
    """Return at most `parts` pieces of nearly one length that cover the range exactly, in order, none empty."""
    assert parts > 0, parts
    cuts = [part.begin + part.count * number // parts for number in range(parts + 1)]
    return [QueueRange(part.queue, begin, end) for begin, end in pairwise(cuts) if begin < end]


def _parts(count: int, total: int, wanted: int) -> int:
    """Return into how many pieces a range of `count` of `total` messages goes if all together become `wanted`."""
    return max((2 * count * wanted + total) // (2 * total), 1)


def join_offsets(found: list[int]) -> list[tuple[int, int]]:
    """Return sorted queue offsets as half-open ranges, each as long as possible."""
    ranges: list[tuple[int, int]] = []
    for offset in found:
        if ranges and ranges[-1][1] == offset:
            ranges[-1] = (ranges[-1][0], offset + 1)
        else:
            ranges.append((offset, offset + 1))
    return ranges
