"""Reader of a planned partition on an executor.

Invariants:

- Rows come in the order of the queue. Each planned message that matches the query's filter and the plan's tags is
  exactly one row; if messages are missing, an error names them.
- No row comes from a store other than the one that the driver planned with. The reader detects another store by its
  id, and because the first and last records are not at the planned positions.
- If retention has deleted messages after the plan, they are lost, and failOnDataLoss applies.
"""

import logging
import platform
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa

from rmq_spark.datasource.partition import Piece, RmqPartition
from rmq_spark.datasource.planning import EXPIRED, Loss, require_no_losses
from rmq_spark.datasource.read_options import ReadSettings
from rmq_spark.store import (
    LOOKUP_COLUMNS,
    DecodeLimits,
    RowFilter,
    StoreReader,
    compile_filter,
    matches_lookup,
    only_tags,
)
from rmq_spark.store.errors import NotFoundError, OffsetRangeError, StoreChangedError, StorePathError
from rmq_spark.store.model import QueueBounds, QueueKey, RecordProof

_LOG = logging.getLogger("rmq_spark")


def read_partition(partition: RmqPartition, settings: ReadSettings) -> Iterator[pa.RecordBatch]:
    """Yield the partition's messages in order, as batches of the requested columns. Many tasks may read at once.

    Raises StoreChangedError if this machine has no store at the path or another one. Raises DataLossError if messages
    have expired since the plan and failOnDataLoss is true. Raises DamageError if a file is damaged, and
    GroupConflictError if the partition has a fence and its queue has another owner.
    """
    filters = {topic: _filter_of(topic, partition, settings) for topic in {p.queue.topic for p in partition.pieces}}
    sought, columns = partition.sought, settings.columns
    if sought is not None:
        settings = replace(settings, columns=tuple(dict.fromkeys((*columns, *LOOKUP_COLUMNS))))
    with _StoreHandle(partition, settings.read_mode) as handle:
        for piece in partition.pieces:
            _check_fence(partition, piece)
            for batch in _read_piece(handle, partition, piece, settings, filters[piece.queue.topic]):
                rows = batch if sought is None else batch.filter(matches_lookup(batch, sought)).select(columns)
                if rows.num_rows:
                    yield rows
            # One check at the end is enough, because Spark discards the rows of a task that fails.
            _check_fence(partition, piece)


def _filter_of(topic: str, partition: RmqPartition, settings: ReadSettings) -> RowFilter | None:
    wanted = compile_filter(settings.filters.of(topic))
    return wanted if partition.tags is None else only_tags(partition.tags, wanted)


def _check_fence(partition: RmqPartition, piece: Piece) -> None:
    """Raise GroupConflictError if the partition has a fence and its queue now has another owner or epoch."""
    fence = partition.fence
    if fence is not None:
        from rmq_spark.store import check_epochs  # the group part of the engine: import late

        check_epochs(partition.path, fence.group, fence.member_id, {piece.queue: fence.epoch})


class _StoreHandle:
    """The partition's store on this machine, which is opened at its first use and shared by all pieces."""

    def __init__(self, partition: RmqPartition, read_mode: str) -> None:
        self._partition, self._read_mode = partition, read_mode
        self._store: StoreReader | None = None

    def __enter__(self) -> "_StoreHandle":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def store(self) -> StoreReader:
        partition = self._partition
        if self._store is None:
            try:
                self._store = StoreReader(
                    partition.path, commit_log_path=partition.commit_log_path, read_mode=self._read_mode
                )
            except StorePathError as error:
                raise _changed(partition, None, str(error)) from None
            found_id = self._store.store_id()
            if partition.store_id not in (None, found_id):
                raise _changed(partition, None, f"its id is {found_id}, the driver planned with {partition.store_id}")
        return self._store

    def close(self) -> None:
        """Close the store. The next use opens it again."""
        if self._store is not None:
            self._store.close()
        self._store = None


def _read_piece(
    handle: _StoreHandle, partition: RmqPartition, piece: Piece, settings: ReadSettings, wanted: RowFilter | None
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of one piece that match `wanted`, or all if it is None.

    If a file disappears during the read, the store is opened again and the read continues. If that happens again at the
    same message, StoreChangedError is raised.
    """
    begin = piece.begin
    failed_at = None
    limits = DecodeLimits(settings.check_crc, settings.max_decompressed_bytes)
    while begin < piece.end:
        try:
            _check_proofs(handle.store, partition, piece, begin)
            # A second attempt resumes after the last message that was read or that the filter skipped.
            for found in handle.store.read_with_progress(
                piece.queue, begin, piece.end, settings.columns, limits, wanted
            ):
                begin = found.next_offset
                if found.batch.num_rows:
                    yield found.batch
            return
        except OffsetRangeError as error:
            if error.min_offset <= begin:
                raise _changed(partition, piece.queue, str(error)) from None
            # The bounds in the error are only those of the requested range.
            available = handle.store.bounds(piece.queue)
            begin = _skip(piece, begin, available, settings.fail_on_data_loss)
        except NotFoundError as error:
            raise _changed(partition, piece.queue, str(error)) from None
        except StoreChangedError:
            # Retention may have deleted a segment. In that case the second attempt raises OffsetRangeError.
            if failed_at == begin:
                raise
            failed_at = begin
        handle.close()


def _check_proofs(store: StoreReader, partition: RmqPartition, piece: Piece, begin: int) -> None:
    """Raise StoreChangedError unless this store has the messages at the positions that the driver found.

    The last message of the piece is compared, and the first one if it has not been read yet.
    """
    checks: list[tuple[int, RecordProof | None]] = [(piece.end - 1, piece.last)]
    if begin == piece.begin < piece.end - 1:
        checks.append((begin, piece.first))
    for offset, planned in checks:
        if planned is None:
            continue
        found = store.proof(piece.queue, offset)
        if found != planned:
            raise _changed(
                partition,
                piece.queue,
                f"the message at queue offset {offset} is at physical offset {found.physical_offset}, stored at "
                f"{found.store_time_ms} ms; the driver planned with {planned.physical_offset} and "
                f"{planned.store_time_ms} ms",
            )


def _skip(piece: Piece, begin: int, available: QueueBounds, fail: bool) -> int:
    """Return the queue offset after the expired messages, and log the loss. If `fail`, raise DataLossError instead."""
    loss = Loss(piece.queue, begin, min(available.min_offset, piece.end), EXPIRED.format(available))
    if fail:
        require_no_losses([loss])
    _LOG.warning("rmq: skipped while reading, failOnDataLoss=false, counted in no offset: %s", loss)
    return loss.end


def _changed(partition: RmqPartition, queue: QueueKey | None, found: str) -> StoreChangedError:
    where = f" in queue {queue}" if queue else ""
    return StoreChangedError(
        f'the store at "{partition.path}" on host {platform.node()} is not the one that the driver planned with'
        f"{where}: {found}. On a cluster the path must be storage that the driver and all executors share, mounted at "
        "the same path. If the store was replaced or rebuilt meanwhile, start the query again."
    )
