"""What of the planned ranges of a batch query is read, by its conditions, keys and ids; asks the driver's view.

Everything here leaves out only what cannot pass: what is read too much, Spark or the task sorts out.
"""

import logging
from bisect import bisect_right
from collections.abc import Sequence

from rmq_spark.datasource.limits import QueueRange
from rmq_spark.datasource.notices import is_heard, tell
from rmq_spark.datasource.pushdown import Pushdown
from rmq_spark.datasource.store_view import StoreView
from rmq_spark.datasource.timestamps import show_time
from rmq_spark.store import RowFilter, Sought, Span, StoreReader, only_tags, subtract_spans
from rmq_spark.store.units import QueueBounds

_LOG = logging.getLogger("rmq_spark")
# Store times of a queue may step back where a clock was set. By so much they may anywhere:
STEP_BACK_MS = 1000
_PROBES = 256  # messages in all whose times are looked at, to notice where they stepped back further
_MEASURED_RANGES, _MEASURED_MESSAGES = 16, 32
_SAMPLED_PLACES = 32  # where units are asked for their tags
_NEAR_MESSAGES = 128  # between two that were found are read sooner than a range of its own is opened


def select(view: StoreView, ranges: Sequence[QueueRange], pushdown: Pushdown) -> list[QueueRange]:
    """Return what of the ranges the conditions leave, in order, none empty; logs what that saves."""
    left = pushdown.cut(ranges)
    if pushdown.first_ms is not None or pushdown.last_ms is not None:
        probes = max(_PROBES // max(len(left), 1), 4)
        left = [part for one in left for part in _cut_by_time(view, one, pushdown, probes)]
    if left and (pushdown.keys is not None or pushdown.message_ids is not None):
        found, unknown = look_up(view, left, Sought(pushdown.keys or (), pushdown.message_ids or ()))
        left = join_ranges([*found, *unknown])
    if pushdown.used and is_heard():
        _log_saving(view, ranges, left, pushdown)
    return left


def look_up(view: StoreView, ranges: Sequence[QueueRange], sought: Sought) -> tuple[list[QueueRange], list[QueueRange]]:
    """Return messages of the ranges that are sought, and those that are to be read and compared; none in both.

    Of these the key index does not tell, or they lie between messages that were found, near together.
    """
    answer = view.store.search([Span(part.queue, part.begin, part.end) for part in ranges], sought)
    unknown = subtract_spans(answer.unknown, answer.found)
    found = join_ranges([QueueRange(*span) for span in answer.found])
    return _bridge(ranges, found, join_ranges([QueueRange(*span) for span in unknown]))


def _bridge(
    ranges: Sequence[QueueRange], found: list[QueueRange], unknown: list[QueueRange]
) -> tuple[list[QueueRange], list[QueueRange]]:
    """Return both with neighbours among the found made one that is to be compared, where nothing unknown is between.

    Never across the end of a range: what is outside must not be read. And never within a queue of batches, all of
    which is unknown: a batch may have been found by its own id, which its messages do not show.
    """
    planned = sorted((part.queue, part.begin) for part in ranges)
    runs: list[list[QueueRange]] = []
    before: tuple[bool, int] = False, -1
    pieces = [(part, True) for part in found] + [(part, False) for part in unknown]
    for part, is_found in sorted(pieces, key=lambda piece: (piece[0].queue, piece[0].begin)):
        at = is_found, bisect_right(planned, (part.queue, part.begin))  # in which range it lies
        if is_found and at == before and part.begin - runs[-1][-1].end <= _NEAR_MESSAGES:
            runs[-1].append(part)
        elif is_found:
            runs.append([part])
        before = at
    bridged = [QueueRange(run[0].queue, run[0].begin, run[-1].end) for run in runs if len(run) > 1]
    return [run[0] for run in runs if len(run) == 1], join_ranges([*unknown, *bridged])


def join_ranges(ranges: Sequence[QueueRange]) -> list[QueueRange]:
    """Return the same messages, sorted, in ranges as few as possible."""
    joined: list[QueueRange] = []
    for part in sorted(ranges, key=lambda part: (part.queue, part.begin)):
        last = joined[-1] if joined else None
        if last is not None and last.queue == part.queue and part.begin <= last.end:
            joined[-1] = QueueRange(part.queue, last.begin, max(part.end, last.end))
        else:
            joined.append(part)
    return joined


def _cut_by_time(view: StoreView, part: QueueRange, pushdown: Pushdown, probes: int) -> list[QueueRange]:
    """Return what of a range may have been stored between the first and the last ms, nothing if nothing can.

    Found by binary search, which is right while times step back by at most STEP_BACK_MS. Where a look here and
    there sees more, the whole range is read.
    """
    store, there = view.store, view.bounds[part.queue]
    begin, end = part.begin, part.end
    first_ms, last_ms = pushdown.first_ms, pushdown.last_ms
    if first_ms is not None and last_ms is not None and first_ms > last_ms:
        return []
    if first_ms is not None:
        begin = max(begin, _clip(store.offset_at_time(part.queue, first_ms - STEP_BACK_MS), there))
    if last_ms is not None:
        end = min(end, _clip(store.offset_at_time(part.queue, last_ms + STEP_BACK_MS + 1), there))
    # Whatever is left out is looked at here and there.
    for at in {*_spread(part.begin, min(begin, part.end), probes), *_spread(max(end, part.begin), part.end, probes)}:
        time_ms = store.proof(part.queue, at).store_time_ms
        if (first_ms is None or first_ms <= time_ms) and (last_ms is None or time_ms <= last_ms):
            _LOG.warning(
                "rmq: store times of queue %s are not in order: message %d was stored at %s. So conditions on "
                "storeTimestamp choose no range there, and all of it is read",
                part.queue,
                at,
                show_time(time_ms),
            )
            return [part]
    return [QueueRange(part.queue, begin, end)] if begin < end else []


def _clip(offset: int, there: QueueBounds) -> int:
    return min(max(offset, there.min_offset), there.max_offset)


def _spread(begin: int, end: int, count: int) -> list[int]:
    """Return some numbers of [begin, end), both ends among them."""
    if begin >= end:
        return []
    return sorted({begin + (end - 1 - begin) * number // max(count - 1, 1) for number in range(count)})


def _log_saving(view: StoreView, before: Sequence[QueueRange], after: Sequence[QueueRange], pushdown: Pushdown) -> None:
    counts = sum(part.count for part in before), sum(part.count for part in after)
    mean, about = _mean_bytes(view.store, before), ""
    if pushdown.tags is not None:
        about, share = "about ", _wanted_share(view.store, after, only_tags(pushdown.tags))
        counts = counts[0], round(counts[1] * share)
    read, there = len({part.queue for part in after}), len({part.queue for part in before})
    line = (
        f"rmq: pushed down: {' and '.join(map(str, pushdown.used))}. Reads {about}{counts[1]} of {counts[0]} messages, "
        f"about {round(counts[1] * mean)} of {round(counts[0] * mean)} bytes of the log, in {read} of {there} queues"
    )
    tell(line)  # Spark plans in a process of its own, where mostly nobody has set up logging


def _mean_bytes(store: StoreReader, ranges: Sequence[QueueRange]) -> float:
    """Return about how long a record of the ranges is: a few are looked at, for to look at all would cost a read."""
    count = size = 0
    for part in ranges[:: max(len(ranges) // _MEASURED_RANGES, 1)]:
        for begin in (part.begin, part.begin + part.count // 2, part.end - _MEASURED_MESSAGES):
            begin = max(begin, part.begin)
            end = min(begin + _MEASURED_MESSAGES, part.end)
            count, size = count + end - begin, size + store.record_bytes(part.queue, begin, end)
    return size / max(count, 1)


def _wanted_share(store: StoreReader, ranges: Sequence[QueueRange], wanted: RowFilter) -> float:
    """Return about which part of the messages a filter wants, by a sample of their units: to ask all costs a read."""
    asked = ranges[:: max(len(ranges) // _SAMPLED_PLACES, 1)]
    places = max(_SAMPLED_PLACES // max(len(asked), 1), 1)
    shares = [(part.count, store.wanted_share(part.queue, part.begin, part.end, wanted, places)) for part in asked]
    return sum(count * share for count, share in shares) / max(sum(count for count, _ in shares), 1)
