"""Partitions: each is the input of one task, which Spark pickles on the driver and sends to an executor.

A partition is small and contains no open files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pyspark.sql.datasource import InputPartition

from rmq_spark.datasource.plan.splitting import SHARED_BYTES, SHARED_MESSAGES, TaskLimits, make_tasks
from rmq_spark.datasource.spark.source_view import SourceView
from rmq_spark.store.backend import Fence, Location
from rmq_spark.store.filter.row_filter import KeyLookup
from rmq_spark.store.model import QueueKey, QueueRange, RecordProof

_Place: TypeAlias = tuple[QueueKey, int]
_NO_RECORDS: Mapping[_Place, RecordProof] = {}
_NO_FENCES: Mapping[QueueKey, Fence] = {}
# The forms of these classes in a pickle.
_FlatQueue: TypeAlias = tuple[str, int, str]
_FlatProof: TypeAlias = tuple[int, int]
_FlatPiece: TypeAlias = tuple[_FlatQueue, int, int, _FlatProof | None, _FlatProof | None]


@dataclass(frozen=True, slots=True)
class Piece(QueueRange):
    """A range of messages that a task reads.

    `first` and `last` are the positions and store times of the first and the last message, by which the executor
    detects that it reads another place. One is None if the message had disappeared when the driver planned the read;
    the executor will detect that it is missing.
    """

    first: RecordProof | None
    last: RecordProof | None


class RmqPartition(InputPartition):
    """The pieces that a task reads, sorted by queue and offset.

    `location` has no secrets; those are in `ReadSettings`. `identity` is the id of the place (`Backend.identity`), None
    if it has none. `fences` has the fences of its queues, as far as they need one. The task applies the filters of the
    query. If `sought` is not None, only messages with one of its keys or ids are rows. If `tags` is not None, only
    messages with one of these tags are rows. `records` are messages of earlier batches, by queue and queue offset: the
    executor recognises the store of a broker by them where pieces have no positions, because the broker was away when
    the driver planned them.
    """

    def __init__(
        self,
        location: Location,
        pieces: tuple[Piece, ...],
        identity: str | None = None,
        fences: Mapping[QueueKey, Fence] = _NO_FENCES,
        sought: KeyLookup | None = None,
        tags: tuple[str, ...] | None = None,
        records: Mapping[_Place, RecordProof] = _NO_RECORDS,
    ) -> None:
        self.location = location
        self.pieces = pieces
        self.identity = identity
        self.fences = fences
        self.sought = sought
        self.tags = tags
        self.records = records

    def __reduce__(self) -> tuple[object, ...]:
        flat = tuple(
            (
                _flat_queue(piece.queue),
                piece.begin,
                piece.end,
                _flat(piece.first),
                _flat(piece.last),
            )
            for piece in self.pieces
        )
        fences = tuple((_flat_queue(queue), tuple(fence)) for queue, fence in self.fences.items())
        sought = self.sought and tuple(self.sought)
        records = tuple((_flat_queue(queue), at, _flat(proof)) for (queue, at), proof in self.records.items())
        return _unpickle, (self.location, flat, self.identity, fences, sought, self.tags, records)


def _flat_queue(queue: QueueKey) -> _FlatQueue:
    return queue.topic, queue.queue_id, queue.broker


def _flat(proof: RecordProof | None) -> _FlatProof | None:
    return None if proof is None else (proof.physical_offset, proof.store_time_ms)


def _unpickle(
    location: Location,
    flat: tuple[_FlatPiece, ...],
    identity: str | None,
    fences: tuple[tuple[_FlatQueue, tuple[str, str, int]], ...],
    sought: tuple[tuple[str, ...], tuple[str, ...]] | None,
    tags: tuple[str, ...] | None,
    records: tuple[tuple[_FlatQueue, int, _FlatProof], ...],
) -> RmqPartition:
    pieces = tuple(
        Piece(
            QueueKey(*queue),
            begin,
            end,
            None if first is None else RecordProof(*first),
            None if last is None else RecordProof(*last),
        )
        for queue, begin, end, first, last in flat
    )
    return RmqPartition(
        location,
        pieces,
        identity,
        {QueueKey(*queue): Fence(*fence) for queue, fence in fences},
        sought and KeyLookup(*sought),
        tags,
        {(QueueKey(*queue), at): RecordProof(*proof) for queue, at, proof in records},
    )


def plan_partitions(
    view: SourceView,
    ranges: Sequence[QueueRange],
    limits: TaskLimits,
    fences: Mapping[QueueKey, Fence] = _NO_FENCES,
    sought: KeyLookup | None = None,
    tags: tuple[str, ...] | None = None,
    records: Mapping[_Place, RecordProof] = _NO_RECORDS,
) -> list[InputPartition]:
    """Divide the ranges, which are sorted by queue and offset, into tasks. Return their partitions.

    A partition contains the positions of the first and last message of each piece. `fences` has the
    fences of queues; `sought` and `tags` are passed to `RmqPartition`, and those of `records` that a task needs.
    """
    if not ranges:
        return []
    backend = view.backend
    location, identity = backend.location.without_secrets(), backend.identity()
    proofs = backend.positions(_edges(ranges))
    tasks = make_tasks(list(ranges), limits, _sizes(view, ranges, proofs))
    missing = [edge for edge in _edges([piece for task in tasks for piece in task]) if edge not in proofs]
    proofs |= backend.positions(missing)
    partitions: list[InputPartition] = []
    for task in tasks:
        pieces = tuple(
            Piece(
                piece.queue,
                piece.begin,
                piece.end,
                proofs.get((piece.queue, piece.begin)),
                proofs.get((piece.queue, piece.end - 1)),
            )
            for piece in task
        )
        unproved = {(piece.queue.topic, piece.queue.broker) for piece in pieces if piece.last is None}
        needed = {place: record for place, record in records.items() if (place[0].topic, place[0].broker) in unproved}
        fenced = {piece.queue: fences[piece.queue] for piece in task if piece.queue in fences}
        partitions.append(RmqPartition(location, pieces, identity, fenced, sought, tags, needed))
    return partitions


def _edges(ranges: Sequence[QueueRange]) -> dict[tuple[QueueKey, int], None]:
    """Return queue and offset of the first and the last message of each range, in order."""
    return dict.fromkeys((part.queue, offset) for part in ranges for offset in (part.begin, part.end - 1))


def _sizes(
    view: SourceView, ranges: Sequence[QueueRange], proofs: dict[tuple[QueueKey, int], RecordProof]
) -> dict[QueueRange, int]:
    """Return the bytes of the ranges that are short enough to share a task, as far as they matter.

    They do not matter if all ranges lie within a part of the log that one task may read. Then no size is read.
    """
    places = [proof.physical_offset for proof in proofs.values()]
    sizes = view.backend.sizes
    if sizes is None or not places or max(places) - min(places) <= SHARED_BYTES:
        return {}
    return sizes.measure([part for part in ranges if part.count <= SHARED_MESSAGES])
