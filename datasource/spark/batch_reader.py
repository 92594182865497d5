"""Batch reader of `spark.read`: plans the partitions of a query, and reads them in tasks.

The attribute `pushFilters` of the reader is not a method, for this reason. By default the setting
spark.sql.python.filterPushdown.enabled is off, and Spark then refuses a reader that overrides the method `pushFilters`.
A reader does not get the setting. To detect an override, Spark compares the `__func__` of the bound method with that of
the base class (pyspark.sql.worker.plan_data_source_read). If the setting is on, Spark only calls the attribute
(data_source_pushdown_filters). So `pushFilters` is a callable object that has the `__func__` of the base class.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition, Not

from rmq_spark.datasource.options.option_parsers import EARLIEST, LATEST
from rmq_spark.datasource.options.read_options import ReadOptions, ReadSettings
from rmq_spark.datasource.plan.planning import Loss, clip_ranges, require_no_losses, resolve_positions
from rmq_spark.datasource.plan.pushdown import Predicate, Pushdown, plan_pushdown
from rmq_spark.datasource.plan.splitting import TaskLimits
from rmq_spark.datasource.spark import clocks
from rmq_spark.datasource.spark.broker_wait import BrokerWait
from rmq_spark.datasource.spark.key_selection import look_up, select
from rmq_spark.datasource.spark.partition import RmqPartition, plan_partitions
from rmq_spark.datasource.spark.partition_reader import read_partition
from rmq_spark.datasource.spark.positions import find_group_starts, find_offsets, find_starts
from rmq_spark.datasource.spark.read_rights import ReadRights
from rmq_spark.datasource.spark.source_view import SourceView
from rmq_spark.datasource.spark.unmatched import warn_of_filters, warn_of_pattern
from rmq_spark.datasource.spark.worker_errors import without_frames
from rmq_spark.store.filter.row_filter import KeyLookup
from rmq_spark.store.model import QueueKey, QueueRange
from rmq_spark.store.places import usable_cores


class PushedFilters:
    """The callable attribute `pushFilters` of a reader. It passes the pushdown of Spark's filters to `accept`."""

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, accept: Callable[[Pushdown], None]) -> None:
        self._accept = accept

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        """Plan the pushdown of `filters`. Return the filters that Spark must still apply to the rows.

        These are the filters that the reader does not apply, or applies only approximately.
        """
        pushdown = plan_pushdown([to_predicate(one) for one in filters])
        self._accept(pushdown)
        return [one for number, one in enumerate(filters) if number not in pushdown.exact]


def to_predicate(one: Filter) -> Predicate | None:
    """Return one of Spark's filters as a Predicate.

    Returns None unless the filter is a condition on one whole column. A field of a struct is only a part of one.
    """
    is_negated = isinstance(one, Not)
    inner: Any = one.child if isinstance(one, Not) else one
    path: tuple[str, ...] = getattr(inner, "attribute", ())
    if len(path) != 1 or isinstance(inner, Not):
        return None
    return Predicate(path[0], type(inner).__name__, getattr(inner, "value", None), is_negated)


_LOG = logging.getLogger("rmq_spark")


@without_frames
class RmqBatchReader(DataSourceReader):
    """Reads the queues from startingOffsets to endingOffsets; if keys or ids are given, only messages that have them.

    `partitions` runs once, on the driver. `read` runs in the tasks, on a copy of the reader that has only the settings.
    """

    def __init__(
        self,
        options: ReadOptions,
        settings: ReadSettings,
        monotonic_ms: Callable[[], float] = clocks.monotonic_ms,
        sleep: Callable[[float], None] = clocks.sleep,
    ) -> None:
        self._options = options
        self._settings = settings
        self._monotonic_ms, self._sleep = monotonic_ms, sleep
        self._pushdown = Pushdown()
        # Not a method: see the docstring of the module.
        self.pushFilters = PushedFilters(self._push)  # type: ignore[method-assign]

    def _push(self, pushdown: Pushdown) -> None:
        self._pushdown = pushdown

    def __getstate__(self) -> dict[str, Any]:
        return {"_settings": self._settings}

    def partitions(self) -> list[InputPartition]:
        view = SourceView(self._options)
        try:
            return view.plan(lambda: self._plan(view))
        finally:
            view.close()

    def _plan(self, view: SourceView) -> list[InputPartition]:
        self._options = view.name_brokers(self._options, is_new=True)
        view.refresh_all(BrokerWait(self._options.wait_ms(), self._monotonic_ms, self._sleep))
        options, ranges = self._options, self._ranges(view)
        rights = ReadRights(options)
        rights.refresh(view.backend, view.bounds)
        ranges = [part for part in ranges if rights.allows(part.queue)]
        warn_of_pattern(options.subscription, list(view.bounds), view.backend)
        warn_of_filters(options.filters, ranges, view.backend)
        ranges = select(view, ranges, self._pushdown)
        if options.keys is None and options.message_ids is None:
            return self._partitions_of(view, ranges)
        sought = KeyLookup(options.keys or (), options.message_ids or ())
        found, unknown = look_up(view, ranges, sought)
        return [*self._partitions_of(view, found), *self._partitions_of(view, unknown, sought)]

    def _partitions_of(
        self, view: SourceView, ranges: list[QueueRange], sought: KeyLookup | None = None
    ) -> list[InputPartition]:
        options = self._options
        limits = TaskLimits(options.max_records_per_partition, options.min_partitions, usable_cores())
        return plan_partitions(view, ranges, limits, sought=sought, tags=self._pushdown.tags)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_planned(partition, self._settings)

    def _ranges(self, view: SourceView) -> list[QueueRange]:
        """Return the range of each queue between the query's start and end, sorted by queue.

        A queue without messages between them is left out. Raises DataLossError, or logs the loss if failOnDataLoss is
        false.
        """
        options, bounds = self._options, view.bounds
        clip = not options.fail_on_data_loss
        by_time = self._starts(view)
        begins, losses = resolve_positions(bounds, options.starting_offsets, by_time, EARLIEST, "startingOffsets", clip)
        times_ms = {} if options.ending_times is None else options.ending_times.of_each(bounds)
        by_time = find_offsets(view.backend, bounds, times_ms)
        ends, end_losses = resolve_positions(bounds, options.ending_offsets, by_time, LATEST, "endingOffsets", clip)
        wanted_ends = {loss.queue: loss.begin for loss in end_losses}  # ends below the minimum
        losses = [replace(loss, end=min(loss.end, wanted_ends.get(loss.queue, loss.end))) for loss in losses]
        report_losses([loss for loss in losses if loss.count > 0], options.fail_on_data_loss)
        ranges = [QueueRange(queue, begins[queue], ends[queue]) for queue in bounds]
        return clip_ranges((part for part in ranges if part.count > 0), bounds)[0]

    def _starts(self, view: SourceView) -> dict[QueueKey, int]:
        """Return the start offsets of the queues that begin at a time or at the consumer group's offset."""
        options, bounds = self._options, view.bounds
        if not options.names_group_as_start:
            return find_starts(view.backend, bounds, options.starting_times, options.strategy)
        begins, ahead = find_group_starts(view.backend, bounds, options)
        report_losses(ahead, options.fail_on_data_loss)
        return begins


def read_planned(partition: InputPartition, settings: ReadSettings) -> Iterator[pa.RecordBatch]:
    """Return the rows of a partition. Spark inserts a partition of its own into an empty plan; it has no rows."""
    if not isinstance(partition, RmqPartition):
        return iter(())
    return read_partition(partition, settings)


def report_losses(losses: list[Loss], fail: bool, counted: str = "") -> None:
    """Report losses. If `fail` and there are any, raise DataLossError; otherwise log one warning for each.

    `counted` is the sentence that says whether the messages are recorded in the stream's offset.
    """
    if fail:
        require_no_losses(losses)
    for loss in losses:
        ending = f". {counted}" if counted and loss.count else ""
        _LOG.warning("rmq: skipped, failOnDataLoss=false: %s%s", loss, ending)
