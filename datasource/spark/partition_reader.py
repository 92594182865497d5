"""Reader of a planned partition on an executor.

Invariants:

- Rows come in the order of the queue. Each planned message that matches the query's filter and the plan's tags is
  exactly one row; if messages are missing, an error names them.
- No row comes from a store other than the one that the driver planned with. The reader detects another store by its
  id, and because the first and last records are not at the planned positions.
- If retention has deleted messages after the plan, they are lost, and failOnDataLoss applies.
"""

import contextlib
import logging
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

from rmq_spark.datasource.options.read_options import ReadSettings
from rmq_spark.datasource.plan.planning import EXPIRED, Loss, require_no_losses
from rmq_spark.datasource.spark.log_lines import configure_from_environment
from rmq_spark.datasource.spark.partition import Piece, RmqPartition
from rmq_spark.store.backend import Backend, DecodeLimits
from rmq_spark.store.errors import (
    BackendUnavailableError,
    NotFoundError,
    OffsetRangeError,
    RmqError,
    StoreChangedError,
    StorePathError,
)
from rmq_spark.store.filter.row_filter import LOOKUP_COLUMNS, RowFilter, compile_filter, matches_lookup, only_tags
from rmq_spark.store.model import QueueBounds, QueueKey, QueueRange, RecordProof

_LOG = logging.getLogger("rmq_spark")
configure_from_environment()  # a task may load no other module of ours before this one
_GROUPED_MESSAGES = 10_000  # pieces are read together up to this many
_JOINED_ROWS, _JOINED_BYTES = 1024, 1 << 20  # batches that are smaller in both are joined


def read_partition(
    partition: RmqPartition, settings: ReadSettings, opened: Backend | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the partition's messages in order, as batches of the requested columns. Many tasks may read at once.

    They are read with `opened`, an open backend of the partition's location, or with a backend that is closed at the
    end.

    Raises StoreChangedError if this machine has no store at the path or another one. Raises DataLossError if messages
    have expired since the plan and failOnDataLoss is true. Raises DamageError if a file is damaged, and
    GroupConflictError if a queue with a fence has another owner.
    """
    return _join_small(_read_pieces(partition, settings, opened))


def _read_pieces(partition: RmqPartition, settings: ReadSettings, opened: Backend | None) -> Iterator[pa.RecordBatch]:
    filters = {topic: _filter_of(topic, partition, settings) for topic in {p.queue.topic for p in partition.pieces}}
    sought, columns = partition.sought, settings.columns
    if sought is not None:
        settings = replace(settings, columns=tuple(dict.fromkeys((*columns, *LOOKUP_COLUMNS))))
    location = partition.location
    if settings.secrets is not None:
        location = location.with_secrets_of(settings.secrets)
    with contextlib.closing(location.open()) if opened is None else contextlib.nullcontext(opened) as backend:
        _check_identity(backend, partition)
        if partition.records:
            backend.note_read(partition.records)
        for pieces in _groups(partition.pieces):
            _check_fences(backend, partition, pieces)
            for batch in _read_group(backend, partition, pieces, settings, filters[pieces[0].queue.topic]):
                rows = batch if sought is None else batch.filter(matches_lookup(batch, sought)).select(columns)
                if rows.num_rows:
                    yield rows
        # One check at the end is enough, because Spark discards the rows of a task that fails.
        _check_fences(backend, partition, partition.pieces)


def _check_fences(backend: Backend, partition: RmqPartition, pieces: Sequence[Piece]) -> None:
    """Raise GroupConflictError if another member of the group has taken a queue of the pieces."""
    for queue in dict.fromkeys(piece.queue for piece in pieces):
        if queue in partition.fences:
            backend.check_fence(partition.fences[queue], queue)


def _groups(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield the pieces in order. Small ones of one topic that follow each other are in one list."""
    group: list[Piece] = []
    messages = 0
    for piece in pieces:
        is_same_topic = bool(group) and group[0].queue.topic == piece.queue.topic
        if group and (not is_same_topic or messages + piece.count > _GROUPED_MESSAGES):
            yield group
            group, messages = [], 0
        group.append(piece)
        messages += piece.count
    if group:
        yield group


def _read_group(
    backend: Backend, partition: RmqPartition, pieces: list[Piece], settings: ReadSettings, wanted: RowFilter | None
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of the pieces in order, read together if the place can and everything is as planned."""
    if len(pieces) > 1:
        try:
            limits = DecodeLimits(settings.check_crc, settings.max_decompressed_bytes)
            together = backend.read_together(pieces, settings.columns, limits, wanted)
            # Only then, because a cluster asks its brokers for the positions.
            if together is not None and _are_as_planned(backend, pieces):
                yield together
                return
        except BackendUnavailableError:
            raise  # it was waited for long enough
        except NotFoundError as error:
            raise _changed(partition, None, str(error)) from None
        except RmqError:
            pass  # reading piece by piece reports it
    for piece in pieces:
        yield from _read_piece(backend, partition, piece, settings, wanted)


def _join_small(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in larger batches, because each batch costs Spark about as much as a hundred rows."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        held.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= _JOINED_ROWS or size >= _JOINED_BYTES:
            yield _joined(held)
            held, rows, size = [], 0, 0
    if held:
        yield _joined(held)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def _filter_of(topic: str, partition: RmqPartition, settings: ReadSettings) -> RowFilter | None:
    wanted = compile_filter(settings.filters.of(topic))
    return wanted if partition.tags is None else only_tags(partition.tags, wanted)


def _read_piece(
    backend: Backend, partition: RmqPartition, piece: Piece, settings: ReadSettings, wanted: RowFilter | None
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of one piece that match `wanted`, or all if it is None.

    If a file disappears during the read, the place is opened again and the read continues. If that happens again at the
    same message, StoreChangedError is raised.
    """
    begin = piece.begin
    failed_at = None
    limits = DecodeLimits(settings.check_crc, settings.max_decompressed_bytes)
    while begin < piece.end:
        try:
            _check_proofs(backend, partition, piece, begin)
            # A second attempt resumes after the last message that was read or that the filter skipped.
            rest = QueueRange(piece.queue, begin, piece.end)
            for found in backend.read(rest, settings.columns, limits, wanted):
                begin = found.next_offset
                if found.batch.num_rows:
                    yield found.batch
            return
        except OffsetRangeError as error:
            if error.min_offset <= begin:
                raise _changed(partition, piece.queue, str(error)) from None
            # The bounds in the error are only those of the requested range.
            available = backend.bounds([piece.queue])[piece.queue]
            if not isinstance(available, QueueBounds):  # the broker went away after the error
                raise
            first = max(available.min_offset, error.min_offset)  # the bounds may be older than the error
            available = QueueBounds(first, max(available.max_offset, first))
            begin = _skip(piece, begin, available, settings.fail_on_data_loss)
        except NotFoundError as error:
            raise _changed(partition, piece.queue, str(error)) from None
        except StoreChangedError:
            # Retention may have deleted a segment. In that case the second attempt raises OffsetRangeError.
            if failed_at == begin:
                raise
            failed_at = begin
        backend.reopen()
        _check_identity(backend, partition)


def _check_identity(backend: Backend, partition: RmqPartition) -> None:
    """Raise StoreChangedError unless this process sees the place that the driver planned with."""
    try:
        found = backend.identity()
    except StorePathError as error:
        raise _changed(partition, None, str(error)) from None
    if partition.identity not in (None, found):
        raise _changed(partition, None, f"its id is {found}, the driver planned with {partition.identity}")


def _check_proofs(backend: Backend, partition: RmqPartition, piece: Piece, begin: int) -> None:
    """Raise StoreChangedError unless this place has the messages at the positions that the driver found.

    The last message of the piece is compared, and the first one if it has not been read yet. A message that has expired
    is left to the read, which reports it. If a broker is away, the read waits for it, and compares the messages then.
    """
    asked = _planned_proofs([(piece, begin)])
    found = backend.positions(asked)
    for (queue, offset), planned in asked.items():
        seen = found.get((queue, offset), planned)
        if seen != planned:
            raise _changed(
                partition,
                queue,
                f"the message at queue offset {offset} is at physical offset {seen.physical_offset}, stored at "
                f"{seen.store_time_ms} ms; the driver planned with {planned.physical_offset} and "
                f"{planned.store_time_ms} ms",
            )
    missing = {at: planned for at, planned in asked.items() if at not in found}
    if missing and piece.queue.broker:
        answer = backend.bounds([piece.queue])[piece.queue]
        first = answer.min_offset if isinstance(answer, QueueBounds) else 0
        backend.note_read({at: planned for at, planned in missing.items() if at[1] >= first})


def _are_as_planned(backend: Backend, pieces: Sequence[Piece]) -> bool:
    """Return whether the first and the last messages of pieces that were read are at the planned positions.

    A broker that went away after the read answers for none, so the messages may be those of another store. In a
    directory a message that is missing has expired after the read.
    """
    asked = _planned_proofs((piece, piece.begin) for piece in pieces)
    found = backend.positions(asked)
    return all(found.get(at, None if at[0].broker else proof) == proof for at, proof in asked.items())


def _planned_proofs(begun: Iterable[tuple[Piece, int]]) -> dict[tuple[QueueKey, int], RecordProof]:
    """Return queue and offset of the messages of pieces that are compared, with the planned proofs.

    Each piece is given with the offset of its next message. The last message of a piece is compared, and the first one
    if it is the next.
    """
    asked: dict[tuple[QueueKey, int], RecordProof] = {}
    for piece, begin in begun:
        if piece.last is not None:
            asked[piece.queue, piece.end - 1] = piece.last
        if begin == piece.begin < piece.end - 1 and piece.first is not None:
            asked[piece.queue, begin] = piece.first
    return asked


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
        f"{partition.location.describe()} on host {platform.node()} is not the one that the driver planned with"
        f"{where}: {found}. {partition.location.sharing_advice()} If the store was replaced or rebuilt meanwhile, "
        "start the query again."
    )
