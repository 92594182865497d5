"""The executor's side: from a planned partition to rows, and what happens when the store is not the planned one.

Invariants:
- rows come in queue order, each queue offset of the plan once that the query's filter and the plan's tags want, or an
  error says which are missing;
- a store that is not the one the driver planned with never gives a row: its records do not lie where the proofs
  say;
- what retention deleted between plan and read is loss of data, and failOnDataLoss decides.
"""

import logging
import platform
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa

from rmq_spark.datasource.partition import Piece, RmqPartition
from rmq_spark.datasource.planning import EXPIRED, Loss, refuse_losses
from rmq_spark.datasource.settings import ReadSettings
from rmq_spark.store import (
    SOUGHT_COLUMNS,
    DecodeLimits,
    RowFilter,
    StoreReader,
    compile_filter,
    has_sought,
    only_tags,
    open_reader,
)
from rmq_spark.store.errors import NotFoundError, OffsetRangeError, StoreChangedError, StorePathError
from rmq_spark.store.units import QueueBounds, QueueKey, RecordProof

_LOG = logging.getLogger("rmq_spark")


def read_partition(partition: RmqPartition, settings: ReadSettings) -> Iterator[pa.RecordBatch]:
    """Yield the partition's messages in order, as batches of the columns asked for.

    Raises StoreChangedError where this machine sees another store or none, DataLossError where messages expired
    meanwhile and failOnDataLoss is true, DamageError. Any number of tasks may read at once.
    """
    filters = {topic: _filter_of(topic, partition, settings) for topic in {p.queue.topic for p in partition.pieces}}
    sought, columns = partition.sought, settings.columns
    if sought is not None:
        settings = replace(settings, columns=tuple(dict.fromkeys((*columns, *SOUGHT_COLUMNS))))
    with _Sight(partition, settings.read_mode) as sight:
        for piece in partition.pieces:
            _check_fence(partition, piece)
            for batch in _read_piece(sight, partition, piece, settings, filters[piece.queue.topic]):
                rows = batch if sought is None else batch.filter(has_sought(batch, sought)).select(columns)
                if rows.num_rows:
                    yield rows
            # Not within: what was given to Spark counts only once the task has ended well.
            _check_fence(partition, piece)


def _filter_of(topic: str, partition: RmqPartition, settings: ReadSettings) -> RowFilter | None:
    wanted = compile_filter(settings.filters.of(topic))
    return wanted if partition.tags is None else only_tags(partition.tags, wanted)


def _check_fence(partition: RmqPartition, piece: Piece) -> None:
    """Raise GroupConflictError if the queue is another member's by now, and this task minds."""
    fence = partition.fence
    if fence is not None:
        from rmq_spark.store import check_epochs  # half of the engine, which few queries need

        check_epochs(partition.path, fence.group, fence.member_id, {piece.queue: fence.epoch})


class _Sight:
    """This machine's sight of the partition's store: opened when it is asked for, once for all pieces."""

    def __init__(self, partition: RmqPartition, read_mode: str) -> None:
        self._partition, self._read_mode = partition, read_mode
        self._store: StoreReader | None = None

    def __enter__(self) -> "_Sight":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def store(self) -> StoreReader:
        partition = self._partition
        if self._store is None:
            try:
                self._store = open_reader(
                    partition.path, commit_log_path=partition.commit_log_path, read_mode=self._read_mode
                )
            except StorePathError as error:
                raise _changed(partition, None, str(error)) from None
            seen = self._store.store_id()
            if partition.store_id not in (None, seen):
                raise _changed(partition, None, f"its id is {seen}, the driver planned with {partition.store_id}")
        return self._store

    def close(self) -> None:
        """Forget what was seen: who asks again looks anew."""
        if self._store is not None:
            self._store.close()
        self._store = None


def _read_piece(
    sight: _Sight, partition: RmqPartition, piece: Piece, settings: ReadSettings, wanted: RowFilter | None
) -> Iterator[pa.RecordBatch]:
    """Yield one piece. A file that goes away on the way is looked into once, then it is an error."""
    begin = piece.begin
    failed_at = None
    limits = DecodeLimits(settings.check_crc, settings.max_decompressed_bytes)
    while begin < piece.end:
        try:
            _check_proofs(sight.store, partition, piece, begin)
            # What a filter passes over counts as read: a second try goes on behind it.
            for found in sight.store.read_on(piece.queue, begin, piece.end, settings.columns, limits, wanted):
                begin = found.next_offset
                if found.batch.num_rows:
                    yield found.batch
            return
        except OffsetRangeError as error:
            if error.min_offset <= begin:
                raise _changed(partition, piece.queue, str(error)) from None
            there = sight.store.bounds(piece.queue)  # the error knows of the range that was asked for alone
            begin = _skip(piece, begin, there, settings.fail_on_data_loss)
        except NotFoundError as error:
            raise _changed(partition, piece.queue, str(error)) from None
        except StoreChangedError:
            # A segment that retention deletes looks like this too: a second look tells the two apart.
            if failed_at == begin:
                raise
            failed_at = begin
        sight.close()


def _check_proofs(store: StoreReader, partition: RmqPartition, piece: Piece, begin: int) -> None:
    """Raise StoreChangedError unless the last message, and the first if it is still wanted, lie where planned."""
    checks: list[tuple[int, RecordProof | None]] = [(piece.end - 1, piece.last)]
    if begin == piece.begin < piece.end - 1:
        checks.append((begin, piece.first))
    for offset, planned in checks:
        if planned is None:
            continue
        seen = store.proof(piece.queue, offset)
        if seen != planned:
            raise _changed(
                partition,
                piece.queue,
                f"the message at queue offset {offset} lies at physical offset {seen.physical_offset}, stored at "
                f"{seen.store_time_ms} ms; the driver planned with {planned.physical_offset} and "
                f"{planned.store_time_ms} ms",
            )


def _skip(piece: Piece, begin: int, there: QueueBounds, fail: bool) -> int:
    """Return where to go on behind what expired; raises DataLossError instead if that is to `fail`."""
    loss = Loss(piece.queue, begin, min(there.min_offset, piece.end), EXPIRED.format(there))
    if fail:
        refuse_losses([loss])
    _LOG.warning("rmq: skipped while reading, failOnDataLoss=false, counted in no offset: %s", loss)
    return loss.end


def _changed(partition: RmqPartition, queue: QueueKey | None, found: str) -> StoreChangedError:
    where = f" in queue {queue}" if queue else ""
    return StoreChangedError(
        f'the store at "{partition.path}" on host {platform.node()} is not the one that the driver planned with'
        f"{where}: {found}. On a cluster the path must be storage that the driver and all executors share, mounted at "
        "the same path. If the store was replaced or rebuilt meanwhile, start the query again."
    )
