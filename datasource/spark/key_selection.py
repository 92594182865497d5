"""Selection of the ranges that a batch query must read, by its conditions, keys and ids. Runs on the driver.

Only ranges that certainly have no match are left out. In the remaining ranges Spark or the task filters the rows.
"""

import logging
from bisect import bisect_right
from collections.abc import Sequence

from rmq_spark.datasource.plan.pushdown import Pushdown
from rmq_spark.datasource.spark.clocks import is_info_logged, log_info
from rmq_spark.datasource.spark.positions import show_time
from rmq_spark.datasource.spark.source_view import SourceView
from rmq_spark.store.backend import SizeReader
from rmq_spark.store.filter.row_filter import KeyLookup, RowFilter, only_tags
from rmq_spark.store.model import QueueBounds, QueueRange, subtract_ranges

_LOG = logging.getLogger("rmq_spark")
STEP_BACK_MS = 1000  # store times of a queue may decrease by up to this, after a clock was set back
_PROBES = 256  # the number of sampled store times, in all ranges, to detect larger decreases
_MEASURED_RANGES, _MEASURED_MESSAGES = 16, 32
_SAMPLED_PLACES = 32  # the number of samples of consume-queue entries for their tags
_NEAR_MESSAGES = 128  # up to so few messages between two matches, reading them is faster than opening another range


def select(view: SourceView, ranges: Sequence[QueueRange], pushdown: Pushdown) -> list[QueueRange]:
    """Return the parts of the ranges that may match the conditions, sorted, none empty.

    Logs how many messages, bytes and queues need not be read.
    """
    left = pushdown.cut(ranges)
    if pushdown.first_ms is not None or pushdown.last_ms is not None:
        probes = max(_PROBES // max(len(left), 1), 4)
        left = [part for one in left for part in _cut_by_time(view, one, pushdown, probes)]
    if left and (pushdown.keys is not None or pushdown.message_ids is not None):
        found, unknown = look_up(view, left, KeyLookup(pushdown.keys or (), pushdown.message_ids or ()))
        left = join_ranges([*found, *unknown])
    if pushdown.used and is_info_logged():
        _log_saving(view, ranges, left, pushdown)
    return left


def look_up(
    view: SourceView, ranges: Sequence[QueueRange], sought: KeyLookup
) -> tuple[list[QueueRange], list[QueueRange]]:
    """Return two lists of ranges: messages that match the lookup, and messages that must be read and compared.

    No message is in both lists. A message must be compared if the key index does not cover it, or if it is near
    matches, because close matches are joined to one range.
    """
    keys = view.backend.keys
    assert keys is not None, "load() refuses keys and ids where they cannot be searched"
    answer = keys.search(ranges, sought)
    unknown = subtract_ranges(answer.unknown, answer.found)
    found = join_ranges(answer.found)
    return _bridge(ranges, found, join_ranges(unknown))


def _bridge(
    ranges: Sequence[QueueRange], found: list[QueueRange], unknown: list[QueueRange]
) -> tuple[list[QueueRange], list[QueueRange]]:
    """Join matches (`found`) that are close together. Return the remaining matches, and the ranges to compare.

    A joined range contains messages that do not match, so it is among the ranges to compare, as the `unknown` ones are.
    Matches are not joined across the end of one of `ranges`, because messages outside of these must not be read. They
    are not joined either if unknown messages are between them. In a batch queue all messages that are not found are
    unknown, so matches there are never joined. This is necessary because a batch may match by its own id, which its
    messages do not have, so a comparison would drop them.
    """
    planned = sorted((part.queue, part.begin) for part in ranges)
    runs: list[list[QueueRange]] = []
    previous: tuple[bool, int] = False, -1
    pieces = [(part, True) for part in found] + [(part, False) for part in unknown]
    for part, is_found in sorted(pieces, key=lambda piece: (piece[0].queue, piece[0].begin)):
        current = is_found, bisect_right(planned, (part.queue, part.begin))  # the number of the range that has the part
        if is_found and current == previous and part.begin - runs[-1][-1].end <= _NEAR_MESSAGES:
            runs[-1].append(part)
        elif is_found:
            runs.append([part])
        previous = current
    bridged = [QueueRange(run[0].queue, run[0].begin, run[-1].end) for run in runs if len(run) > 1]
    return [run[0] for run in runs if len(run) == 1], join_ranges([*unknown, *bridged])


def join_ranges(ranges: Sequence[QueueRange]) -> list[QueueRange]:
    """Return the same messages in the smallest number of ranges, sorted by queue and offset."""
    joined: list[QueueRange] = []
    for part in sorted(ranges, key=lambda part: (part.queue, part.begin)):
        last = joined[-1] if joined else None
        if last is not None and last.queue == part.queue and part.begin <= last.end:
            joined[-1] = QueueRange(part.queue, last.begin, max(part.end, last.end))
        else:
            joined.append(part)
    return joined


def _cut_by_time(view: SourceView, part: QueueRange, pushdown: Pushdown, probes: int) -> list[QueueRange]:
    """Return the part of a range that may have been stored from `first_ms` to `last_ms` of the pushdown; [] if none.

    Uses binary search, which is correct only if store times never decrease by more than STEP_BACK_MS. To check this, a
    sample of the messages outside of the part is read. If one of them was stored within the time, returns the whole
    range, with a warning.
    """
    available = view.bounds[part.queue]
    begin, end = part.begin, part.end
    first_ms, last_ms = pushdown.first_ms, pushdown.last_ms
    if first_ms is not None and last_ms is not None and first_ms > last_ms:
        return []
    if first_ms is not None:
        found = view.backend.offsets_at({part.queue: first_ms - STEP_BACK_MS})
        begin = max(begin, _clip(found[part.queue], available))
    if last_ms is not None:
        found = view.backend.offsets_at({part.queue: last_ms + STEP_BACK_MS + 1})
        end = min(end, _clip(found[part.queue], available))
    # A sample of the messages that are left out.
    before, after = (part.begin, min(begin, part.end)), (max(end, part.begin), part.end)
    sample = [(part.queue, offset) for offset in (*_spread(*before, probes), *_spread(*after, probes))]
    for (_, offset), position in view.backend.positions(dict.fromkeys(sample)).items():
        time_ms = position.store_time_ms
        if (first_ms is None or first_ms <= time_ms) and (last_ms is None or time_ms <= last_ms):
            _LOG.warning(
                "rmq: store times of queue %s are not in order: message %d was stored at %s. So conditions on "
                "storeTimestamp choose no range there, and all of it is read",
                part.queue,
                offset,
                show_time(time_ms),
            )
            return [part]
    return [QueueRange(part.queue, begin, end)] if begin < end else []


def _clip(offset: int, available: QueueBounds) -> int:
    return min(max(offset, available.min_offset), available.max_offset)


def _spread(begin: int, end: int, count: int) -> list[int]:
    """Return up to `count` numbers from [begin, end), evenly spread, including the first and the last."""
    if begin >= end:
        return []
    return sorted({begin + (end - 1 - begin) * number // max(count - 1, 1) for number in range(count)})


def _log_saving(
    view: SourceView, before: Sequence[QueueRange], after: Sequence[QueueRange], pushdown: Pushdown
) -> None:
    sizes = view.backend.sizes
    if sizes is None:
        return
    counts = sum(part.count for part in before), sum(part.count for part in after)
    mean, about = _mean_bytes(sizes, before), ""
    if pushdown.tags is not None:
        about, share = "about ", _wanted_share(sizes, after, only_tags(pushdown.tags))
        counts = counts[0], round(counts[1] * share)
    read, planned = len({part.queue for part in after}), len({part.queue for part in before})
    line = (
        f"rmq: pushed down: {' and '.join(map(str, pushdown.used))}. Reads {about}{counts[1]} of {counts[0]} messages, "
        f"about {round(counts[1] * mean)} of {round(counts[0] * mean)} bytes of the log, in {read} of {planned} queues"
    )
    log_info(line)  # Spark plans in another process, usually without logging


def _mean_bytes(sizes: SizeReader, ranges: Sequence[QueueRange]) -> float:
    """Return the mean size of a record in bytes. It is estimated from a sample, because measuring all is slow."""
    sample = set()
    for part in ranges[:: max(len(ranges) // _MEASURED_RANGES, 1)]:
        for begin in (part.begin, part.begin + part.count // 2, part.end - _MEASURED_MESSAGES):
            begin = max(begin, part.begin)
            sample.add(QueueRange(part.queue, begin, min(begin + _MEASURED_MESSAGES, part.end)))
    return sum(sizes.measure(sample).values()) / max(sum(part.count for part in sample), 1)


def _wanted_share(sizes: SizeReader, ranges: Sequence[QueueRange], wanted: RowFilter) -> float:
    """Return the fraction of the messages that a filter matches, from 0 to 1.

    It is estimated from a sample of consume-queue entries.
    """
    asked = ranges[:: max(len(ranges) // _SAMPLED_PLACES, 1)]
    places = max(_SAMPLED_PLACES // max(len(asked), 1), 1)
    shares = [(part.count, sizes.share_wanted(part, wanted, places)) for part in asked]
    return sum(count * share for count, share in shares) / max(sum(count for count, _ in shares), 1)
