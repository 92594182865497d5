"""Stream reader of `spark.readStream`: plans micro-batches on the driver and reads partitions in tasks.

Spark keeps one instance of the reader on the driver, in a process of its own, as long as the query runs, and makes one
call at a time. Tasks get a copy that has only the settings. The rest of the design follows from what Spark 4.3 does:

- After a restart Spark calls `initialOffset` again until a batch was committed. So the initial offset is a constant,
  and the end of the first batch records where the query began. See `offsets`.
- After a restart Spark may call `partitions` first, to repeat a planned batch. So `partitions` needs only its two
  arguments.
- Spark compares offsets as texts. If nothing has changed, `latestOffset` returns its argument without reading a queue.
- Spark calls `commit` one batch late and never for the last batch, and does not call `stop` at a normal end. So nothing
  depends on these two calls.
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

from rmq_spark.datasource.options.option_parsers import MARK
from rmq_spark.datasource.options.read_options import Limits, ReadOptions, ReadSettings
from rmq_spark.datasource.plan.absence import describe_for_progress, describe_left_out, describe_retired, find_overdue
from rmq_spark.datasource.plan.batch_assignment import BatchAssignment, held_queues
from rmq_spark.datasource.plan.limits import must_wait
from rmq_spark.datasource.plan.offsets import (
    StreamOffset,
    decode_offset,
    encode_offset,
    encode_queues,
    initial_offset,
    version_of,
)
from rmq_spark.datasource.plan.planning import (
    Bounds,
    Progress,
    clip_ranges,
    count_new,
    is_same,
    plan_batch,
    ranges_between,
    require_subscribed,
)
from rmq_spark.datasource.plan.splitting import TaskLimits
from rmq_spark.datasource.plan.stream_progress import (
    ProgressFacts,
    StartState,
    frozen_since,
    later_times,
    queues_to_resolve,
    resolve_progress,
)
from rmq_spark.datasource.spark import clocks
from rmq_spark.datasource.spark.batch_reader import read_planned, report_losses
from rmq_spark.datasource.spark.broker_wait import BrokerWait
from rmq_spark.datasource.spark.hand_over import HandingOver, HandOver
from rmq_spark.datasource.spark.lock_wait import LockWait
from rmq_spark.datasource.spark.partition import plan_partitions
from rmq_spark.datasource.spark.positions import StreamEnd, find_group_starts, find_offsets, find_starts
from rmq_spark.datasource.spark.read_records import ReadRecords
from rmq_spark.datasource.spark.read_rights import ReadRights
from rmq_spark.datasource.spark.source_view import SourceView
from rmq_spark.datasource.spark.unmatched import warn_of_filters, warn_of_pattern
from rmq_spark.datasource.spark.worker_errors import without_frames
from rmq_spark.store.errors import BackendUnavailableError, StoreChangedError
from rmq_spark.store.model import QueueKey, QueueRange
from rmq_spark.store.places import parent_process_id, usable_cores

if TYPE_CHECKING:
    from rmq_spark.datasource.spark.group_planner import GroupPlanner

_LOG = logging.getLogger("rmq_spark")

_WAIT_MS = 200.0  # the longest wait for messages without a look at due messages and the consumer group
_UNAVAILABLE_PAUSE_S = 0.5  # between two triggers while nobody answers
_GROUP_POLL_MS = 50.0  # the shortest interval at which a waiting trigger looks at the consumer group
_COUNTED = 'The offset of this batch counts them under "@".lost'
_NOT_COUNTED = "No offset counts them: they disappeared after their batch was planned, and its offset is fixed"


@without_frames
class RmqStreamReader(HandingOver, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of one run of one query. `options` must be complete; `now_ms` is the clock in ms.

    Without a `hand_over`, tasks read all batches.
    """

    def __init__(
        self,
        options: ReadOptions,
        settings: ReadSettings,
        now_ms: Callable[[], int],
        monotonic_ms: Callable[[], float] = clocks.monotonic_ms,
        sleep: Callable[[float], None] = clocks.sleep,
        parent_id: Callable[[], int] = parent_process_id,
        hand_over: HandOver | None = None,
    ) -> None:
        self._settings = settings
        self._now_ms, self._monotonic_ms, self._sleep = now_ms, monotonic_ms, sleep
        self._parent_id, self._spark_id = parent_id, parent_id()  # the driver's JVM starts the process of a reader
        self._options = options = options.for_stream()
        self._view = SourceView(options)
        self._records = ReadRecords(self._view)
        self._hand_over = hand_over
        self._end = StreamEnd(options)
        self._rights = ReadRights(options)
        self._group = self._make_group_planner()
        self._next_due_ms: int | None = None  # time of the first scheduled message
        self._snapshot: Mapping[QueueKey, int] | None = None  # of AvailableNow: the ends of the queues
        self._must_wait = False  # a run of AvailableNow, and the first look at the ends of a stream, need all brokers
        self._since_ms: int | None = None  # of a new query: see `frozen_since`
        self._unavailable_ms: int | None = None  # since when nobody answers
        self._last_suspension: int | None = None  # of AvailableNow: the number of the last one when the run began
        self._start: StartState | None = None  # the start of a new query, once resolved
        self._idle_at: dict[str, Any] | None = None  # the offset after which the last plan found no message
        self._idle_until_ms: int | None = None  # when the clock alone may change that
        self._last_batch_ms = -(2**62)  # the first batch never waits
        self._last: tuple[dict[str, Any], StreamOffset] | None = None  # the last end of a batch, encoded and decoded
        self._planned: tuple[BatchAssignment, Mapping[QueueKey, int]] | None = None  # of the last plan, with its end
        self._report: dict[str, Any] | None = None
        self._has_warned = False  # of patterns and filters without a match, once a run

    def __getstate__(self) -> dict[str, Any]:
        if self._hand_over is not None:
            self._hand_over.withdraw()  # pickle refuses an object that appears to have another class
        return {"_settings": self._settings}

    def initialOffset(self) -> dict[str, Any]:
        return initial_offset()

    def getDefaultReadLimit(self) -> ReadLimit:
        # Any limit distinguishes other triggers from Trigger.Once, which passes ReadAllAvailable to latestOffset.
        # The limits themselves come from the options, as Spark cannot combine several.
        limits = self._options.limits
        max_rows = limits.max_offsets or limits.max_offsets_per_queue
        if max_rows is not None:
            return ReadMaxRows(max_rows)
        if limits.max_bytes is not None:
            return ReadMaxBytes(limits.max_bytes)
        return ReadAllAvailable() if limits.min_offsets is None else ReadMinRows(limits.min_offsets)

    def prepareForTriggerAvailableNow(self) -> None:
        self._view.change_wait(self._options.wait_ms())
        self._group = self._make_group_planner()  # the session is one of the view's backend
        self._join()
        self._deliver_due()
        self._must_wait = True
        self._name_brokers(is_new=False)
        self._view.plan(lambda: self._refresh(()))
        self._snapshot = {queue: available.max_offset for queue, available in self._view.bounds.items()}
        self._last_suspension = 0 if self._group is None else self._group.last_suspension()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        if self._hand_over is not None:
            self._hand_over.withdraw()  # PySpark did not ask for it
        limits = Limits() if isinstance(limit, ReadAllAvailable) else self._options.limits
        try:
            self._join()
            self._deliver_due()
            end = self._view.plan(lambda: self._plan_end(start, limits))
            if self._unavailable_ms is not None:
                self._unavailable_ms = None
                _LOG.warning("rmq: the place answers again, and batches are planned")
            if end is start and self._options.long_polling_ms > 0 and self._snapshot is None:
                end = self._wait_for_batch(start, limits)
        except BackendUnavailableError as error:
            self._tolerate(error)
            return start
        overdue = find_overdue(self._view.brokers_away, self._now_ms(), self._options.broker_down_timeout_ms or 0)
        if overdue is not None:
            raise BackendUnavailableError(overdue)
        return end

    def _tolerate(self, error: BackendUnavailableError) -> None:
        """Pause and return if the query can wait until somebody answers again, and log this once. Else raise the error.

        A run that has not planned yet does not wait, because the address may be wrong. Nor does AvailableNow, which
        would end without the rest.
        """
        now_ms, timeout_ms = self._now_ms(), self._options.broker_down_timeout_ms or 0
        if self._must_wait or (self._last is None and self._idle_at is None):
            raise error
        if self._unavailable_ms is None:
            self._unavailable_ms = now_ms
            _LOG.warning("rmq: no batch is planned until somebody answers again: %s", error)
        if timeout_ms and now_ms - self._unavailable_ms >= timeout_ms:
            raise error
        self._sleep(_UNAVAILABLE_PAUSE_S)

    def _make_group_planner(self) -> "GroupPlanner | None":
        """Return the group planner if the query is a member of a group, else None."""
        options = self._options
        if options.group is None or not options.is_member:
            return None
        from rmq_spark.datasource.spark.group_planner import GroupPlanner  # the group part of the engine: import late

        wait = LockWait(self._monotonic_ms, self._sleep, self._is_orphan)
        return GroupPlanner(options, options.group, self._view, wait)

    def _is_orphan(self) -> bool:
        """Return whether Spark is dead. The end of this process releases its locks."""
        return self._parent_id() != self._spark_id

    def _join(self) -> None:
        """Join the group, if the query has one. Called before anything is read, because the group may refuse it."""
        if self._group is not None:
            self._group.query.join()

    def _deliver_due(self) -> None:
        """If the query is in a group, deliver the scheduled messages that are due. Cheap if none are due.

        A query without a group must not write to the place.
        """
        if self._group is not None:
            self._next_due_ms = self._view.backend.deliver_due(self._now_ms())

    def _wait_for_batch(self, start: dict[str, Any], limits: Limits) -> dict[str, Any]:
        """Wait until there are messages for the query, and return the end of the next batch.

        If there are none within longPollingMs, returns `start`. Stopping the query ends the wait, because Spark ends
        this process. If messages arrive that the query does not read, such as those of another topic, the wait
        continues.
        """
        until_ms, group_poll_ms = self._monotonic_ms() + self._options.long_polling_ms, 0.0
        # Other members of a group in a cluster take over queues as soon as a member joins.
        longest_ms = _GROUP_POLL_MS if self._group is not None and self._view.has_brokers else _WAIT_MS
        while (left_ms := until_ms - self._monotonic_ms()) > 0:
            try:
                has_changed = self._view.wait(min(left_ms, longest_ms))
                if has_changed or _is_past(self._next_due_ms, self._now_ms()):
                    self._deliver_due()  # a new message may be due earlier than the scheduled ones
                    has_changed = self._view.has_moved()
                has_changed = has_changed or _is_past(self._idle_until_ms, self._now_ms())
            except StoreChangedError:  # a file disappeared during the wait; planning reopens all files
                has_changed = True
            # A look at the group costs ten times as much as a look at a directory's log, and is less urgent.
            if self._monotonic_ms() >= group_poll_ms:
                group_poll_ms = self._monotonic_ms() + _GROUP_POLL_MS
                if self._is_orphan():
                    return start
                has_changed = has_changed or (self._group is not None and self._group.has_changed())
            if has_changed:
                end = self._view.plan(lambda: self._plan_end(start, limits))
                if end is not start:
                    return end
        return start

    def _plan_end(self, start: dict[str, Any], limits: Limits) -> dict[str, Any]:
        """Return the end of the next batch. While it is planned, the group's handover thread releases no queue."""
        with contextlib.nullcontext() if self._group is None else self._group.query.planning():
            return self._latest_offset(start, limits)

    def _name_brokers(self, *, is_new: bool) -> None:
        """Add the broker's name to each queue that the options name without it, as soon as the queue matters."""
        options = self._view.name_brokers(self._options, is_new=is_new)
        if options is not self._options:
            self._options, self._end, self._rights = options, StreamEnd(options), ReadRights(options)

    def _latest_offset(self, start: dict[str, Any], limits: Limits) -> dict[str, Any]:
        now_ms = self._now_ms()
        if not self._records.has_begun:
            self._records.recall(self._decode(start))
        has_changed = self._view.has_moved()
        if not has_changed and self._group is not None and self._group.has_changed():
            self._view.has_moved()  # again, because the group's offsets may be beyond the ends of the look before
            has_changed = True
        if not has_changed and start == self._idle_at and not _is_past(self._idle_until_ms, now_ms):
            return start
        before = self._decode(start)
        self._name_brokers(is_new=before.is_initial())
        self._refresh(before.positions)
        self._records.begin(before.positions)
        if before.is_initial() and self._view.has_brokers:
            if self._since_ms is None:
                self._since_ms = frozen_since(self._options, now_ms)
            before = replace(before, since_ms=self._since_ms)
        bounds = self._view.bounds
        if self._snapshot is not None and self._view.has_brokers:  # a broker that was away when the snapshot was made
            missed = before.positions.keys() & bounds.keys() - self._snapshot.keys()
            self._snapshot = {**self._snapshot, **{queue: bounds[queue].max_offset for queue in missed}}
        self._end.refresh(self._view.backend, bounds, now_ms)
        assignment = BatchAssignment()
        if self._group is not None:
            readable = {queue: available for queue, available in bounds.items() if self._rights.allows(queue)}
            assignment = self._group.refresh(before, readable, waits=self._must_wait)
        after, until_ms = self._plan(before, assignment, limits, now_ms)
        self._planned, self._report = (assignment, after.positions), None
        is_idle = is_same(before, after)
        if self._group is not None:
            self._group.note_answered(is_batch=not is_idle, is_over=self._snapshot is not None)
        if is_idle:
            self._idle_at, self._idle_until_ms = start, until_ms
            return start
        self._idle_at = None
        after = self._records.add_to(before, after)
        end = encode_offset(after)
        self._last = end, after
        return end

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        self._join()  # a repeated batch is planned before latestOffset is called
        with contextlib.nullcontext() if self._group is None else self._group.query.planning():
            planned = self._view.plan(lambda: self._partitions(start, end))
        if self._hand_over is not None:
            self._hand_over.offer(planned)
        return planned

    def _partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        before, after = self._decode(start), self._decode(end)
        must_compare = self._records.recall(after)
        self._name_brokers(is_new=before.is_initial())
        ranges = ranges_between(before, after)
        retired = self._view.retired([part.queue for part in ranges])
        for line in describe_left_out([part for part in ranges if part.queue in retired]):
            _LOG.warning("rmq: %s", line)
        ranges = [part for part in ranges if part.queue not in retired]
        if not ranges:
            return []
        if must_compare or not self._view.has_bounds:
            self._refresh([part.queue for part in ranges])
        unsubscribed = self._unsubscribed([part.queue for part in ranges])
        view = self._view
        kept, losses = clip_ranges(ranges, view.bounds, unsubscribed, view.away, view.gone)
        report_losses(losses, self._options.fail_on_data_loss, _NOT_COUNTED)
        options, member = self._options, self._options.group
        limits = TaskLimits(
            options.max_records_per_partition,
            options.min_partitions,
            usable_cores(),
            are_queues_apart=member is not None and member.is_fenced and not member.is_orderly,
            are_queues_whole=member is not None and member.is_orderly,
        )
        if self._group is not None:
            kept = self._group.claim(kept, after)
        fences = {} if self._group is None else self._group.fences(part.queue for part in kept)
        planned = plan_partitions(view, kept, limits, fences, records=after.records)
        self._records.note_planned(planned)
        return planned

    def _unsubscribed(self, queues: Collection[QueueKey]) -> set[QueueKey]:
        """Return those of `queues` to which the query does not subscribe.

        If there are any and failOnDataLoss is true, raises OptionError instead.
        """
        found = self._view.unsubscribed(queues)
        if self._options.fail_on_data_loss:
            require_subscribed(found, str(self._options.subscription))
        return found

    def reportLatestOffset(self) -> dict[str, Any] | None:
        if self._report is None and self._view.has_bounds:
            ends = {queue: available.max_offset for queue, available in self._view.bounds.items()}
            metadata: dict[str, Any] = {"v": version_of(has_brokers=self._view.has_brokers)}
            if self._view.away:
                metadata["away"] = describe_for_progress(self._view.brokers_away)
            self._report = {**encode_queues(ends), MARK: metadata}
            if self._group is not None and self._planned is not None:
                from rmq_spark.datasource.spark.group_planner import mark_of  # late: the engine's part for groups

                assignment, positions = self._planned
                metadata |= mark_of(self._group.query, self._view, assignment, positions, self._now_ms())
        return self._report

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_planned(partition, self._settings)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: only the checkpoint records delivered messages."""

    def stop(self) -> None:
        self._view.close()

    def _decode(self, offset: dict[str, Any]) -> StreamOffset:
        if self._last is not None and offset == self._last[0]:
            return self._last[1]
        return decode_offset(offset, has_brokers=self._view.has_brokers)

    def _refresh(self, known: Collection[QueueKey]) -> None:
        bounds = self._view.bounds
        if self._must_wait or (self._end.is_wanted and not self._end.is_known):
            wait = BrokerWait(self._options.wait_ms(), self._monotonic_ms, self._sleep, self._is_orphan)
            self._view.refresh_all(wait, known)
        else:
            self._view.refresh(known)
        if self._view.bounds is not bounds:
            self._report = None
        self._rights.refresh(self._view.backend, self._view.bounds)
        if not self._has_warned:  # legal, but probably not meant
            self._has_warned = True
            options, bounds, backend = self._options, self._view.bounds, self._view.backend
            warn_of_pattern(options.subscription, list(bounds), backend)
            ranges = [QueueRange(queue, one.min_offset, one.max_offset) for queue, one in bounds.items()]
            warn_of_filters(options.filters, ranges, backend)

    def _plan(
        self, before: StreamOffset, assignment: BatchAssignment, limits: Limits, now_ms: int
    ) -> tuple[StreamOffset, int | None]:
        """Return the end of the next batch, and the time (ms since the epoch) from which a plan may have another end.

        Before that time the end changes only if the store or the group does. It is None if time alone changes nothing.
        """
        begin = assignment.moved(before, self._view.bounds)
        bounds = {
            queue: available
            for queue, available in self._view.bounds.items()
            if assignment.has(queue) and (self._is_read(queue) or queue in begin.positions)
        }
        progress = self._check_progress(begin, bounds, assignment)
        if self._group is not None:
            self._group.publish(before, assignment, progress.begins)
        held = held_queues(assignment.holds, progress.begins, now_ms, self._last_suspension)
        targets = {
            queue: self._end.limit(queue, available.max_offset if self._snapshot is None else self._snapshot[queue])
            for queue, available in bounds.items()
            if self._is_read(queue) and queue not in held.queues
        }
        until_ms, last_batch_ms = _earlier(self._end.closes_at_ms, held.until_ms), self._last_batch_ms
        if limits.min_offsets is not None and self._snapshot is None:
            if must_wait(count_new(progress, targets), limits, now_ms - last_batch_ms):
                targets = {}
            else:
                last_batch_ms = now_ms
            until_ms = _earlier(until_ms, last_batch_ms + limits.max_delay_ms)
        sizes = None if limits.max_bytes is None else self._view.backend.size_estimates
        after = plan_batch(begin, progress, targets, limits, sizes)
        self._last_batch_ms = last_batch_ms  # only now, as a plan that meets retention is repeated and must not wait
        if self._end.is_wanted:
            is_reached = self._end.is_reached(after.positions, self._view.away)
            after = replace(after, ending=True, ended=is_reached)
        published = None if self._group is None else self._group.published
        return assignment.marked(before, after, progress.begins, self._view.bounds, published), until_ms

    def _is_read(self, queue: QueueKey) -> bool:
        """Return whether this run reads the queue.

        A run of AvailableNow leaves queues that appear after its start to the next run.
        """
        is_new = self._snapshot is not None and queue not in self._snapshot
        return self._end.covers(queue) and self._rights.allows(queue) and not is_new

    def _check_progress(self, before: StreamOffset, bounds: Bounds, assignment: BatchAssignment) -> Progress:
        """Return the positions of the queues before the next batch.

        Losses are logged, or raise DataLossError if failOnDataLoss is true.
        """
        options, view = self._options, self._view
        wanted = queues_to_resolve(self._start, before, bounds, options)
        by_time = find_starts(view.backend, wanted, options.starting_times, options.strategy)
        later = find_offsets(view.backend, bounds, later_times(before, bounds, options))
        if options.begins_at_group and not options.is_member:
            assignment = self._begin_at_group(before, bounds, later)
        retired = view.retired(before.positions)
        if retired:
            positions = {queue: before.positions[queue] for queue in retired}
            for line in describe_retired(positions, view.find_last_bounds(retired)):
                _LOG.warning("rmq: %s", line)
        unsubscribed = self._unsubscribed(before.positions.keys() - retired)
        facts = ProgressFacts(
            before, bounds, assignment, unsubscribed, by_time, later, view.away.keys(), view.gone, retired
        )
        step = resolve_progress(self._start, facts, options)
        self._start = step.state
        if step.warning is not None:
            _LOG.warning("rmq: %s", step.warning)
        for losses in step.reports:
            report_losses(losses, options.fail_on_data_loss, _COUNTED)
        return step.progress

    def _begin_at_group(self, before: StreamOffset, bounds: Bounds, later: Mapping[QueueKey, int]) -> BatchAssignment:
        """Return the starts of new queues of a query that begins at the offsets of a group and is not a member."""
        new = {queue: available for queue, available in bounds.items() if queue not in before.positions}
        if not new:
            return BatchAssignment()
        if before.is_initial() and self._options.group is not None:
            _LOG.warning(
                "rmq: the query begins at the offsets of consumer group %s, but does not join it: it reads all "
                "queues, and commits nothing",
                self._options.group.group,
            )
        starts, losses = find_group_starts(self._view.backend, new, self._options, later)
        return BatchAssignment(starts=starts, losses=tuple(losses))


def _is_past(until_ms: int | None, now_ms: int) -> bool:
    return until_ms is not None and now_ms >= until_ms


def _earlier(one_ms: int | None, other_ms: int | None) -> int | None:
    return min((time_ms for time_ms in (one_ms, other_ms) if time_ms is not None), default=None)
