"""`spark.read`: one plan over the queues of a query, made when Spark asks for partitions."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from rmq_spark.datasource.clocks import sleep
from rmq_spark.datasource.limits import QueueRange
from rmq_spark.datasource.options import ReadOptions
from rmq_spark.datasource.partition import Fence, Piece, RmqPartition
from rmq_spark.datasource.partition_reader import read_partition
from rmq_spark.datasource.planning import Loss, clip_ranges, find_ahead, refuse_losses, resolve_positions
from rmq_spark.datasource.pushdown import Pushdown
from rmq_spark.datasource.pushed_filters import PushedFilters
from rmq_spark.datasource.read_rights import ReadRights
from rmq_spark.datasource.selection import look_up, select
from rmq_spark.datasource.settings import ReadSettings
from rmq_spark.datasource.splitting import pack_ranges
from rmq_spark.datasource.store_view import StoreView
from rmq_spark.datasource.timestamps import find_ends, find_starts
from rmq_spark.datasource.unmatched import warn_of_filters, warn_of_pattern
from rmq_spark.datasource.values import EARLIEST, LATEST
from rmq_spark.store import Sought
from rmq_spark.store.units import QueueKey

_LOG = logging.getLogger("rmq_spark")


class RmqBatchReader(DataSourceReader):
    """Reads what startingOffsets and endingOffsets leave of the queues, or only keys or ids in there.

    `partitions` runs once on the driver, `read` in the tasks, on a copy that knows nothing but the settings.
    """

    def __init__(self, options: ReadOptions, settings: ReadSettings) -> None:
        self._options = options
        self._settings = settings
        self._pushdown = Pushdown()
        # Not a method: see PushedFilters.
        self.pushFilters = PushedFilters(self._push)  # type: ignore[method-assign]

    def _push(self, pushdown: Pushdown) -> None:
        self._pushdown = pushdown

    def __getstate__(self) -> dict[str, Any]:
        return {"_settings": self._settings}

    def partitions(self) -> list[InputPartition]:
        view = StoreView(self._options)
        try:
            return view.plan(lambda: self._plan(view))
        finally:
            view.close()

    def _plan(self, view: StoreView) -> list[InputPartition]:
        view.look()
        options, ranges = self._options, self._ranges(view)
        rights = ReadRights(view.path, options)
        rights.look(view.store, view.bounds)
        ranges = [part for part in ranges if rights.allows(part.queue)]
        warn_of_pattern(options.subscription, list(view.bounds), view.store)
        warn_of_filters(options.filters, ranges, view.store)
        ranges = select(view, ranges, self._pushdown)
        if options.keys is None and options.message_ids is None:
            return self._partitions_of(view, ranges)
        sought = Sought(options.keys or (), options.message_ids or ())
        found, unknown = look_up(view, ranges, sought)
        return [*self._partitions_of(view, found), *self._partitions_of(view, unknown, sought)]

    def _partitions_of(
        self, view: StoreView, ranges: list[QueueRange], sought: Sought | None = None
    ) -> list[InputPartition]:
        parts = pack_ranges(ranges, self._options.max_records_per_partition, self._options.min_partitions)
        tags = self._pushdown.tags
        return [plan_partition(view, part, sought=sought, tags=tags) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_planned(partition, self._settings)

    def _ranges(self, view: StoreView) -> list[QueueRange]:
        """Return what the options leave of each queue, sorted, none empty."""
        options, bounds = self._options, view.bounds
        clip = not options.fail_on_data_loss
        by_time = self._starts(view)
        begins, losses = resolve_positions(bounds, options.starting_offsets, by_time, EARLIEST, "startingOffsets", clip)
        by_time = find_ends(view.store, bounds, options.ending_times)
        ends, behind = resolve_positions(bounds, options.ending_offsets, by_time, LATEST, "endingOffsets", clip)
        wanted_ends = {loss.queue: loss.begin for loss in behind}  # ends that lie before what is there
        losses = [replace(loss, end=min(loss.end, wanted_ends.get(loss.queue, loss.end))) for loss in losses]
        report_losses([loss for loss in losses if loss.count > 0], options.fail_on_data_loss)
        ranges = [QueueRange(queue, begins[queue], ends[queue]) for queue in bounds]
        return clip_ranges((part for part in ranges if part.count > 0), bounds)[0]

    def _starts(self, view: StoreView) -> dict[QueueKey, int]:
        """Return where queues begin that begin at a time, or where the consumer group stands."""
        options, bounds = self._options, view.bounds
        if not options.names_group_as_start:
            return find_starts(view.store, bounds, options.starting_times, options.strategy)
        assert options.group is not None
        from rmq_spark.store import find_beginnings, read_group_offsets  # half of the engine, which few queries need

        held = read_group_offsets(view.path, options.group.group, sleep)
        begins = find_beginnings(view.store, bounds, held, options.group.fallback, options.starting_time_of)
        ahead = find_ahead(begins, bounds, options.group.group)
        report_losses(ahead, options.fail_on_data_loss)
        return begins | {loss.queue: loss.begin for loss in ahead}


def plan_partition(
    view: StoreView,
    ranges: list[QueueRange],
    fence: Fence | None = None,
    sought: Sought | None = None,
    tags: tuple[str, ...] | None = None,
) -> InputPartition:
    """Return ranges of one queue as a partition, with proof of each one's first and last message."""
    pieces = []
    for part in ranges:
        first = view.proof(part.queue, part.begin)
        last = first if part.count == 1 else view.proof(part.queue, part.end - 1)
        pieces.append(Piece(part.queue, part.begin, part.end, first, last))
    return RmqPartition(view.path, view.commit_log_path, tuple(pieces), view.store.store_id(), fence, sought, tags)


def read_planned(partition: InputPartition, settings: ReadSettings) -> Iterator[pa.RecordBatch]:
    """Return the rows of a partition; none for the empty one that Spark puts in where a plan has none."""
    if not isinstance(partition, RmqPartition):
        return iter(())
    return read_partition(partition, settings)


def report_losses(losses: list[Loss], fail: bool, counted: str = "") -> None:
    """Raise DataLossError if losses are to fail the query, else log each as a warning, and their sum.

    `counted` goes into the log: where the sum can be found again, or that it cannot.
    """
    if fail:
        refuse_losses(losses)
    for loss in losses:
        _LOG.warning("rmq: skipped, failOnDataLoss=false: %s", loss)
    count = sum(loss.count for loss in losses)
    if count:
        _LOG.warning("rmq: skipped %d messages in all%s", count, counted)
