"""Queue offsets of startingTimestamp, endingTimestamp and startingOffsets=group, and the end of a stream.

Times are store times (storeTimestamp), which normally do not decrease within a queue. The offset of a time is that of
the first message that was stored at or after it, the rule "lower" of ConsumeQueue#getOffsetInQueueByTime (5.x).

A stream ends at endingOffsets or endingTimestamp. The ends by endingOffsets are known at once: `latest` means the end
of each queue at the first refresh of a run, and queues that appear later are not read. The end by endingTimestamp is
known in a queue as soon as a message was stored at or after the time, or the clock has passed the time. Until then the
queue is *open*.
"""

import logging
from collections.abc import Collection, Mapping
from datetime import UTC, datetime

from rmq_spark.datasource.options.option_parsers import Times
from rmq_spark.datasource.options.read_options import ReadOptions
from rmq_spark.datasource.plan.planning import Bounds, Loss, check_named, find_ahead
from rmq_spark.store.backend import Backend
from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import RETRY_TOPIC_PREFIX

_LOG = logging.getLogger("rmq_spark")

NO_OFFSETS: Mapping[QueueKey, int] = {}


def find_starts(backend: Backend, bounds: Bounds, times: Times | None, strategy: str) -> dict[QueueKey, int]:
    """Return the start offset of each queue that has a startingTimestamp.

    If no message was stored in a queue at or after the time, `strategy` determines its start: "latest" (its end),
    "earliest" (its minimum), or "error", which raises OptionError. An empty queue begins at its only offset. Warns if
    messages since the time may have been deleted.
    """
    times_ms = {} if times is None else times.of_each(bounds)
    starts = find_offsets(backend, bounds, times_ms)
    _warn_of_deleted(backend, bounds, times_ms, starts)
    for queue, offset in starts.items():
        available = bounds[queue]
        if offset == available.max_offset and available.min_offset < available.max_offset:
            if strategy == "error":
                assert times is not None
                raise OptionError(
                    f"startingTimestamp: nothing was stored in queue {queue} at or after "
                    f"{show_time(times.of(queue) or 0)}. Give an earlier time, or set "
                    "startingOffsetsByTimestampStrategy to latest (the queue's end) or earliest."
                )
            starts[queue] = available.max_offset if strategy == "latest" else available.min_offset
    return starts


def _warn_of_deleted(
    backend: Backend, bounds: Bounds, times_ms: Mapping[QueueKey, int], starts: Mapping[QueueKey, int]
) -> None:
    """Log once in how many queues messages since their time may have been deleted, and since when there are messages.

    A broker deletes the oldest messages of all queues together. So a queue has lost nothing since the time of the
    oldest message that is known of its broker. Only first messages are looked at, and only if one of them is a start.
    The time 0 means whatever exists.
    """
    cut = [queue for queue, offset in starts.items() if 0 < bounds[queue].min_offset == offset and times_ms[queue] != 0]
    if not cut:
        return
    brokers = {queue.broker for queue in cut}
    firsts = [
        (queue, bounds[queue].min_offset)
        for queue in starts
        if queue.broker in brokers and bounds[queue].min_offset < bounds[queue].max_offset
    ]
    oldest: dict[str, int] = {}
    for (queue, _), proof in backend.positions(firsts).items():
        oldest[queue.broker] = min(proof.store_time_ms, oldest.get(queue.broker, proof.store_time_ms))
    lost = [queue for queue in cut if queue.broker not in oldest or times_ms[queue] < oldest[queue.broker]]
    if lost:
        since = [oldest[queue.broker] for queue in lost if queue.broker in oldest]
        _LOG.warning(
            "rmq: startingTimestamp is earlier than the stored messages: retention has deleted older ones in %d of %d "
            "queues, and %s; expected messages since %s. The query reads what exists. If it needs the rest, read a "
            "backup",
            len(lost),
            len(starts),
            f"those that exist were stored since {show_time(max(since))}" if since else "none exist",
            show_time(min(times_ms[queue] for queue in lost)),
        )


def find_offsets(backend: Backend, bounds: Bounds, times_ms: Mapping[QueueKey, int]) -> dict[QueueKey, int]:
    """Return the offset of the first message stored at or after the time of each queue in `times_ms`.

    The queues are in `bounds`. If there is no such message, this is the end of the queue.
    """
    found = backend.offsets_at(times_ms) if times_ms else {}
    return {
        queue: min(max(offset, bounds[queue].min_offset), bounds[queue].max_offset) for queue, offset in found.items()
    }


def find_group_starts(
    backend: Backend, bounds: Bounds, options: ReadOptions, later: Mapping[QueueKey, int] = NO_OFFSETS
) -> tuple[dict[QueueKey, int], list[Loss]]:
    """Return where the query begins in each queue if it begins at the offsets of its group, and the losses.

    This is the committed offset, or else the start by groupFallback. A queue in `later`, without a committed offset,
    begins at its offset there if that is lower. An offset beyond the end of its queue is a loss, and becomes the end.
    Warns as `find_fallback_starts`.
    """
    assert options.group is not None
    group = options.group.group
    committed = backend.committed_offsets(group, list(bounds))
    times_ms = options.starting_times_of(bounds)
    begins = find_fallback_starts(backend, group, bounds, committed, options.group.fallback, times_ms)
    begins |= {queue: min(begins[queue], later[queue]) for queue in later.keys() & bounds.keys() - committed.keys()}
    ahead = find_ahead(begins, bounds, group)
    return begins | {loss.queue: loss.begin for loss in ahead}, ahead


def find_fallback_starts(
    backend: Backend,
    group: str,
    bounds: Bounds,
    committed: Mapping[QueueKey, int],
    fallback: str,
    times_ms: Mapping[QueueKey, int],
) -> dict[QueueKey, int]:
    """Return `Backend.start_offsets`. Warn if messages since the time of groupFallback=timestamp may have been deleted.

    A retry topic has no such messages: a group begins at its end.
    """
    begins = backend.start_offsets(group, bounds, committed, fallback, times_ms)
    if fallback == "timestamp":
        begun = bounds.keys() & times_ms.keys() - committed.keys()
        by_time = {queue: begins[queue] for queue in begun if not queue.topic.startswith(RETRY_TOPIC_PREFIX)}
        _warn_of_deleted(backend, bounds, times_ms, by_time)
    return begins


def show_time(time_ms: int) -> str:
    """Return a time as text for error messages: in ISO 8601 (UTC), and in ms since the epoch."""
    try:
        shown = datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, OSError, ValueError):  # beyond the year 9999
        return f"{time_ms} ms"
    return f"{shown} ({time_ms} ms)"


# A message stored just before the time becomes visible a few ms later, when the broker dispatches it.
_VISIBLE_AFTER_MS = 1000


class StreamEnd:
    """The end offset of each queue, for one run of a stream. For one thread at a time.

    If `is_wanted` is False, the stream has neither endingOffsets nor endingTimestamp, and never ends.
    """

    def __init__(self, options: ReadOptions) -> None:
        self._offsets = options.ending_offsets
        self._times = options.ending_times
        self.is_wanted = self._offsets is not None or self._times is not None
        self._ends: dict[QueueKey, int] | None = None  # None before the first refresh
        self._open: set[QueueKey] = set()
        self.closes_at_ms: int | None = None  # the first time at which the clock alone determines an open queue's end

    @property
    def is_known(self) -> bool:
        """Whether the ends by endingOffsets are known."""
        return self._ends is not None

    def refresh(self, backend: Backend, bounds: Bounds, now_ms: int) -> None:
        """Determine the ends of the queues in `bounds` that are not known yet.

        `now_ms` is in ms since the epoch. Raises NotFoundError for a queue of endingOffsets that is not in `bounds`.
        """
        if not self.is_wanted:
            return
        if self._ends is None:
            named = dict(self._offsets.queues) if self._offsets else {}
            check_named(named, bounds, "endingOffsets")
            self._ends = {}
            for queue, available in bounds.items():
                if self._times is None or self._times.of(queue) is None:
                    offset = named.get(queue, -1)
                    self._ends[queue] = available.max_offset if offset < 0 else offset
        if self._times is None:
            return
        self._open.clear()
        self.closes_at_ms = None
        unknown = {queue: available for queue, available in bounds.items() if queue not in self._ends}
        for queue, offset in find_offsets(backend, unknown, self._times.of_each(unknown)).items():
            available, time_ms = bounds[queue], self._times.of(queue)
            assert time_ms is not None
            if offset < available.max_offset or now_ms >= time_ms + _VISIBLE_AFTER_MS:
                self._ends[queue] = offset
            else:
                self._open.add(queue)
                closes_at_ms = time_ms + _VISIBLE_AFTER_MS
                self.closes_at_ms = min(self.closes_at_ms or closes_at_ms, closes_at_ms)

    def covers(self, queue: QueueKey) -> bool:
        """Return whether this run reads the queue. A run with an end may not read queues that appeared later."""
        return not self.is_wanted or queue in self._open or queue in (self._ends or {})

    def limit(self, queue: QueueKey, offset: int) -> int:
        """Return `offset`, or the end of the queue if that is known and smaller."""
        return min(offset, (self._ends or {}).get(queue, offset))

    def is_reached(self, positions: Mapping[QueueKey, int], away: Collection[QueueKey] = ()) -> bool:
        """Return whether `positions` has reached the end of every queue, and no queue is open.

        A queue in `away` whose end is not known, or that has no position yet, has not reached its end.
        """
        ends = self._ends
        if ends is None or self._open:
            return False
        for queue in away:
            if queue in ends:
                is_open = queue not in positions
            else:
                is_open = self._times is not None and self._times.of(queue) is not None
            if is_open:
                return False
        return all(positions.get(queue, end) >= end for queue, end in ends.items())
