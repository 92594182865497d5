"""`spark.readStream`: what Spark asks in each micro-batch, and what we answer.

Spark keeps one instance in one process on the driver for the life of a query, and calls it one call at a time; tasks
get a copy that knows nothing but the settings. What Spark 4.3 does, and what follows from it:

- `initialOffset` is asked again after a restart until a batch was committed, so it is a constant, and the end of
  the first batch says where the query began. See `offsets`.
- After a restart `partitions` may come first, to repeat a planned batch: it needs nothing but the two offsets.
- Offsets are compared as text. While nothing moves, `latestOffset` returns what it was given, and looks at no
  queue: only the store says whether anything moved.
- `commit` lags a batch behind and never sees the last one, `stop` is not called at a normal end: nothing hangs on
  either.
"""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from rmq_spark.datasource import clocks
from rmq_spark.datasource.batch_reader import plan_partition, read_planned, report_losses
from rmq_spark.datasource.limits import QueueRange, must_wait
from rmq_spark.datasource.offsets import (
    StreamOffset,
    decode_offset,
    encode_offset,
    encode_queues,
    initial_offset,
)
from rmq_spark.datasource.options import Limits, ReadOptions
from rmq_spark.datasource.partition import Fence
from rmq_spark.datasource.planning import (
    Bounds,
    Loss,
    Progress,
    check_progress,
    clip_ranges,
    count_new,
    describe_unsubscribed,
    is_same,
    plan_batch,
    ranges_between,
    refuse_unsubscribed,
    resolve_positions,
)
from rmq_spark.datasource.read_rights import ReadRights
from rmq_spark.datasource.settings import ReadSettings
from rmq_spark.datasource.share import Share
from rmq_spark.datasource.splitting import split_ranges
from rmq_spark.datasource.store_view import StoreView
from rmq_spark.datasource.stream_end import StreamEnd
from rmq_spark.datasource.suspension import held_queues
from rmq_spark.datasource.timestamps import find_starts
from rmq_spark.datasource.unmatched import warn_of_filters, warn_of_pattern
from rmq_spark.datasource.values import LATEST, MARK
from rmq_spark.store import parent_process_id, wait_for_arrival
from rmq_spark.store.errors import RmqError, StoreChangedError
from rmq_spark.store.units import QueueKey

if TYPE_CHECKING:
    from rmq_spark.datasource.group_share import GroupShare
    from rmq_spark.store import Ticker

_LOG = logging.getLogger("rmq_spark")

_GROUP_LOOK_MS = 50.0  # between two looks at the consumer group while a trigger waits for a message
_COUNTED = ', counted under "@".lost in the offset of this batch'
_NOT_COUNTED = ', NOT counted under "@".lost: they went after the batch was planned, and its offset stands'


class RmqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One run of one query. `options` is complete; `now_ms` is the clock, in ms since the epoch."""

    def __init__(
        self,
        options: ReadOptions,
        settings: ReadSettings,
        now_ms: Callable[[], int],
        monotonic_ms: Callable[[], float] = clocks.monotonic_ms,
        sleep: Callable[[float], None] = clocks.sleep,
        parent_id: Callable[[], int] = parent_process_id,
    ) -> None:
        self._options = options = options.for_stream()
        self._settings = settings
        self._now_ms, self._monotonic_ms, self._sleep = now_ms, monotonic_ms, sleep
        self._parent_id, self._spark_id = parent_id, parent_id()  # the driver's JVM starts the process of a reader
        self._view = StoreView(options)
        self._end = StreamEnd(options)
        self._rights = ReadRights(self._view.path, options)
        self._group = _group_share(options, self._view)
        # Only who takes part in a group was asked to write to the store: such a query delivers what waited there.
        log_path = self._view.commit_log_path
        self._ticker = None if self._group is None else _ticker_of(self._view.path, log_path)
        self._next_due_ms: int | None = None  # when the first message that waits is to be delivered
        self._snapshot: Mapping[QueueKey, int] | None = None  # of AvailableNow: where the queues ended
        self._last_suspension: int | None = None  # of AvailableNow: the number of the last one when it began
        self._starts: dict[QueueKey, int] | None = None  # where the query begins, once resolved
        self._start_losses: list[Loss] = []
        self._idle_at: dict[str, Any] | None = None  # the offset behind which nothing was, as of the last look
        self._idle_until_ms: int | None = None  # when the clock alone may change that
        self._last_batch_ms = -(2**62)  # the first batch never waits
        self._last: tuple[dict[str, Any], StreamOffset] | None = None  # the last answer, in both forms
        self._planned: tuple[Share, Mapping[QueueKey, int]] | None = None  # the last plan: whose queues, and how far
        self._report: dict[str, Any] | None = None
        self._has_warned = False  # of what matches nothing: at the first look of a run

    def __getstate__(self) -> dict[str, Any]:
        return {"_settings": self._settings}

    def initialOffset(self) -> dict[str, Any]:
        return initial_offset()

    def getDefaultReadLimit(self) -> ReadLimit:
        # A hint that some limit is set, by which Trigger.Once, which has none, can be told from other triggers.
        # The limits themselves come from the options: Spark knows no combination of them.
        limits = self._options.limits
        most = limits.max_offsets or limits.max_offsets_per_queue
        if most is not None:
            return ReadMaxRows(most)
        if limits.max_bytes is not None:
            return ReadMaxBytes(limits.max_bytes)
        return ReadAllAvailable() if limits.min_offsets is None else ReadMinRows(limits.min_offsets)

    def prepareForTriggerAvailableNow(self) -> None:
        self._join()
        self._tick()
        self._view.plan(lambda: self._look(()))
        self._snapshot = {queue: there.max_offset for queue, there in self._view.bounds.items()}
        self._last_suspension = 0 if self._group is None else self._group.last_suspension()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        limits = Limits() if isinstance(limit, ReadAllAvailable) else self._options.limits
        self._join()
        self._tick()
        answer = self._view.plan(lambda: self._plan_end(start, limits))
        if answer is start and self._options.long_polling_ms > 0 and self._snapshot is None:
            return self._wait_for_batch(start, limits)
        return answer

    def _join(self) -> None:
        """Become a member of the group before anything is read: another query may be in the way."""
        if self._group is not None:
            self._group.query.join()

    def _tick(self) -> None:
        """Deliver what waited and is due, if this query may: cheap where nothing is."""
        if self._ticker is not None:
            self._next_due_ms = self._ticker.tick(self._now_ms()).next_due_ms

    def _wait_for_batch(self, start: dict[str, Any], limits: Limits) -> dict[str, Any]:
        """Return the end of the next batch as soon as there is one, or `start` after longPollingMs.

        Who stops the query does not wait for that: Spark ends this process, wherever it is. What comes for others only,
        such as another topic of a busy store, is looked at within the wait, which rests the longer the more such looks
        take.
        """
        until_ms, answer, group_at_ms = self._monotonic_ms() + self._options.long_polling_ms, start, 0.0

        def has_come() -> bool:
            nonlocal answer, group_at_ms
            try:
                has_news = self._view.has_moved()
                if has_news or _is_over(self._next_due_ms, self._now_ms()):
                    self._tick()  # what came may be due before all that waited
                    has_news = self._view.has_moved()
                has_news = has_news or _is_over(self._idle_until_ms, self._now_ms())
            except StoreChangedError:  # a file went away under the look: planning opens everything anew
                has_news = True
            # A look at a group costs ten times one at the log, and news of it are not so urgent.
            if self._monotonic_ms() >= group_at_ms:
                group_at_ms = self._monotonic_ms() + _GROUP_LOOK_MS
                if self._parent_id() != self._spark_id:
                    return True  # Spark is dead: what is held in its name is free once this process has ended
                has_news = has_news or (self._group is not None and self._group.has_news())
            if has_news:
                answer = self._view.plan(lambda: self._plan_end(start, limits))
            return answer is not start

        wait_for_arrival(has_come, until_ms, self._monotonic_ms, self._sleep)
        return answer

    def _has_news(self) -> bool:
        return self._view.has_moved() or (self._group is not None and self._group.has_news())

    def _plan_end(self, start: dict[str, Any], limits: Limits) -> dict[str, Any]:
        """Return the end of the next batch. Meanwhile the group's handover thread leaves the queues alone."""
        with contextlib.nullcontext() if self._group is None else self._group.query.planning():
            return self._latest_offset(start, limits)

    def _latest_offset(self, start: dict[str, Any], limits: Limits) -> dict[str, Any]:
        now_ms = self._now_ms()
        is_idle = not self._has_news() and start == self._idle_at
        if is_idle and (self._idle_until_ms is None or now_ms < self._idle_until_ms):
            return start
        before = self._decode(start)
        self._look(before.positions)
        self._end.look(self._view.store, self._view.bounds, now_ms)
        share = Share() if self._group is None else self._group.look(before, self._readable())
        after, until_ms = self._plan(before, share, limits, now_ms)
        self._planned, self._report = (share, after.positions), None
        is_idle = is_same(before, after)
        if self._group is not None:
            self._group.note_answered(is_batch=not is_idle)
        if is_idle:
            self._idle_at, self._idle_until_ms = start, until_ms
            return start
        self._idle_at = None
        answer = encode_offset(after)
        self._last = answer, after
        self._report = None
        return answer

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        self._join()  # a repeated batch comes before all else
        with contextlib.nullcontext() if self._group is None else self._group.query.planning():
            return self._view.plan(lambda: self._partitions(start, end))

    def _partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        before, after = self._decode(start), self._decode(end)
        ranges = ranges_between(before, after)
        if not ranges:
            return []
        if not self._view.has_looked:
            self._look([part.queue for part in ranges])
        unsubscribed = self._unsubscribed([part.queue for part in ranges])
        kept, losses = clip_ranges(ranges, self._view.bounds, unsubscribed)
        report_losses(losses, self._options.fail_on_data_loss, _NOT_COUNTED)
        pieces = split_ranges(kept, self._options.max_records_per_partition, self._options.min_partitions)
        return [plan_partition(self._view, [piece], self._fence(piece.queue)) for piece in pieces]

    def _unsubscribed(self, queues: Collection[QueueKey]) -> set[QueueKey]:
        """Return those of the queues that the query does not read. Raises OptionError for one without leave to lose."""
        found = self._view.unsubscribed(queues)
        if self._options.fail_on_data_loss:
            refuse_unsubscribed(found, str(self._options.subscription))
        return found

    def _fence(self, queue: QueueKey) -> Fence | None:
        """Return what a task has to show to read the queue, if it has to."""
        options, share = self._options.group, self._group
        if options is None or share is None or not (options.is_fenced or options.is_orderly):
            return None
        if share.query.is_outside:  # who is no member has no claims, and nobody takes them
            return None
        return Fence(options.group, share.query.member_id, share.epochs(self._view.bounds).get(queue, 0))

    def reportLatestOffset(self) -> dict[str, Any] | None:
        if self._report is None and self._view.has_looked:
            ends = {queue: there.max_offset for queue, there in self._view.bounds.items()}
            self._report = {**encode_queues(ends), **initial_offset()}
            if self._group is not None and self._planned is not None:
                from rmq_spark.datasource.group_mark import mark_of  # half of the engine, as above

                share, positions = self._planned
                mark = mark_of(self._group.query, self._view, share, positions, self._now_ms())
                self._report[MARK] = {**self._report[MARK], **mark}
        return self._report

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_planned(partition, self._settings)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to do: the checkpoint alone says what was delivered."""

    def stop(self) -> None:
        if self._ticker is not None:
            self._ticker.close()
        self._view.close()

    def _decode(self, offset: dict[str, Any]) -> StreamOffset:
        if self._last is not None and offset == self._last[0]:
            return self._last[1]
        return decode_offset(offset)

    def _look(self, known: Collection[QueueKey]) -> None:
        bounds = self._view.bounds
        self._view.look(known)
        if self._view.bounds is not bounds:
            self._report = None
        self._rights.look(self._view.store, self._view.bounds)
        if not self._has_warned:
            self._has_warned = True
            self._warn_of_unmatched()

    def _warn_of_unmatched(self) -> None:
        """Warn, when the query begins, of a pattern and of filters that match nothing by now; both are legal."""
        options, bounds, store = self._options, self._view.bounds, self._view.store
        warn_of_pattern(options.subscription, list(bounds), store)
        held = [QueueRange(queue, there.min_offset, there.max_offset) for queue, there in bounds.items()]
        warn_of_filters(options.filters, held, store)

    def _plan(self, before: StreamOffset, share: Share, limits: Limits, now_ms: int) -> tuple[StreamOffset, int | None]:
        """Return the end of the next batch, and when the clock alone could change it, if ever."""
        begin = share.moved(before, self._view.bounds)
        bounds = {
            queue: there
            for queue, there in self._view.bounds.items()
            if share.has(queue) and (self._is_read(queue) or queue in begin.positions)
        }
        progress = self._check_progress(begin, bounds, share)
        if self._group is not None:
            self._group.publish(before, share, progress.begins)
        held = held_queues(share.holds, progress.begins, now_ms, self._last_suspension)
        targets = {
            queue: self._end.limit(queue, there.max_offset if self._snapshot is None else self._snapshot[queue])
            for queue, there in bounds.items()
            if self._is_read(queue) and queue not in held.queues
        }
        until_ms, last_batch_ms = _earlier(self._end.closes_at_ms, held.until_ms), self._last_batch_ms
        if limits.min_offsets is not None and self._snapshot is None:
            if must_wait(count_new(progress, targets), limits, now_ms - last_batch_ms):
                targets = {}
            else:
                last_batch_ms = now_ms
            delay_over_ms = last_batch_ms + limits.max_delay_ms
            until_ms = _earlier(until_ms, delay_over_ms)
        after = plan_batch(begin, progress, targets, limits, self._view.measure, self._view.fit)
        self._last_batch_ms = last_batch_ms  # not before: a plan that meets retention is made again, and still due
        if self._end.is_wanted:
            after = replace(after, ending=True, ended=self._end.is_reached(after.positions))
        return share.marked(before, after, progress.begins, self._view.bounds), until_ms

    def _is_read(self, queue: QueueKey) -> bool:
        """Say whether this run goes on in the queue: one that appeared after a snapshot is for the next run."""
        is_new = self._snapshot is not None and queue not in self._snapshot
        return self._end.covers(queue) and self._rights.allows(queue) and not is_new

    def _readable(self) -> Bounds:
        """Return the bounds of the queues that the query's group may read: among them its members share."""
        return {queue: there for queue, there in self._view.bounds.items() if self._rights.allows(queue)}

    def _check_progress(self, before: StreamOffset, bounds: Bounds, share: Share) -> Progress:
        """Return where the queues stand, after the losses were raised or logged."""
        fail, starts = self._options.fail_on_data_loss, share.starts
        if not before.is_initial() or self._options.begins_at_group:
            placed, gone = resolve_positions(
                {queue: bounds[queue] for queue in starts if queue in bounds},
                None,
                starts,
                LATEST,
                "the consumer group's offset",
                clip=True,
            )
            unsubscribed = self._unsubscribed(before.positions)
            if unsubscribed:
                what = describe_unsubscribed(unsubscribed, str(self._options.subscription))
                _LOG.warning("rmq: failOnDataLoss=false: %s. The query drops these positions", what)
            progress = check_progress(before, bounds, placed, unsubscribed)
            progress = replace(progress, losses=[*progress.losses, *gone, *share.losses])
            report_losses(progress.losses, fail, _COUNTED)
            return progress
        if self._starts is None:
            # Retry topics begin where the group stands: what failed before this query began is not to be forgotten.
            asked = {queue: there for queue, there in bounds.items() if not self._options.begins_as_retry(queue)}
            by_time = find_starts(self._view.store, asked, self._options.starting_times, self._options.strategy)
            wanted = self._options.starting_offsets
            self._starts, self._start_losses = resolve_positions(
                asked, wanted, by_time, LATEST, "startingOffsets", clip=not fail
            )
            report_losses(self._start_losses, fail, _COUNTED)
        retries = {
            queue: at for queue, at in starts.items() if self._options.begins_as_retry(queue) and queue in bounds
        }
        placed, gone = resolve_positions(
            {queue: bounds[queue] for queue in retries}, None, retries, LATEST, "the consumer group's offset", clip=True
        )
        report_losses(gone, fail, _COUNTED)
        progress = check_progress(before, bounds, self._starts | placed)
        progress = replace(progress, losses=progress.losses + gone)
        return replace(progress, losses=progress.losses + self._start_losses)


def _is_over(until_ms: int | None, now_ms: int) -> bool:
    return until_ms is not None and now_ms >= until_ms


def _earlier(one_ms: int | None, other_ms: int | None) -> int | None:
    return min((time_ms for time_ms in (one_ms, other_ms) if time_ms is not None), default=None)


def _group_share(options: ReadOptions, view: StoreView) -> "GroupShare | None":
    """Return the share of a query that is a member of a group, None for one that is none."""
    group = options.group
    if group is None or group.is_broadcasting:
        return None
    from rmq_spark.datasource.group_share import GroupShare  # half of the engine, which no other query needs

    return GroupShare(options, group, view)


def _ticker_of(path: str, commit_log_path: str | None) -> "Ticker":
    from rmq_spark.store import Ticker  # it writes: half of the engine, which few queries need

    return Ticker(path, commit_log_path=commit_log_path)


class RefusedStream(DataSourceStreamReader):
    """Raises an error at the first call that Spark makes.

    An error that the constructor of a reader raises is shown with one of Spark's own behind it, which hides it.
    """

    def __init__(self, error: RmqError) -> None:
        self._error = error

    def initialOffset(self) -> dict[str, Any]:
        raise self._error

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        raise self._error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        raise self._error
