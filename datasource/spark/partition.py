"""Partitions: each is the input of one task, which Spark pickles on the driver and sends to an executor.

A partition is small and contains no open files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition

from rmq_spark.datasource.plan.splitting import SHARED_BYTES, SHARED_MESSAGES, TaskLimits, make_tasks
from rmq_spark.datasource.spark.source_view import SourceView
from rmq_spark.store.backend import Fence, Location
from rmq_spark.store.filter.row_filter import KeyLookup
from rmq_spark.store.model import QueueKey, QueueRange, RecordProof


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
    """The pieces that a task reads, sorted by queue and offset. Only a task without a fence reads several queues.

    `location` has no secrets; those are in `ReadSettings`. `identity` is the id of the place (`Backend.identity`), None
    if it has none. The task applies the filters of the query. If `sought` is not None, only messages with one of its
    keys or ids are rows. If `tags` is not None, only messages with one of these tags are rows.
    """

    def __init__(
        self,
        location: Location,
        pieces: tuple[Piece, ...],
        identity: str | None = None,
        fence: Fence | None = None,
        sought: KeyLookup | None = None,
        tags: tuple[str, ...] | None = None,
    ) -> None:
        self.location = location
        self.pieces = pieces
        self.identity = identity
        self.fence = fence
        self.sought = sought
        self.tags = tags

    def __reduce__(self) -> tuple[object, ...]:
        flat = tuple(
            (
                (piece.queue.topic, piece.queue.queue_id, piece.queue.broker),
                piece.begin,
                piece.end,
                _flat(piece.first),
                _flat(piece.last),
            )
            for piece in self.pieces
        )
        fence, sought = self.fence and tuple(self.fence), self.sought and tuple(self.sought)
        return _unpickle, (self.location, flat, self.identity, fence, sought, self.tags)


def _flat(proof: RecordProof | None) -> tuple[int, int] | None:
    return None if proof is None else (proof.physical_offset, proof.store_time_ms)


_FlatPiece = tuple[tuple[str, int, str], int, int, tuple[int, int] | None, tuple[int, int] | None]


def _unpickle(
    location: Location,
    flat: tuple[_FlatPiece, ...],
    identity: str | None,
    fence: tuple[str, str, int] | None,
    sought: tuple[tuple[str, ...], tuple[str, ...]] | None,
    tags: tuple[str, ...] | None,
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
    return RmqPartition(location, pieces, identity, fence and Fence(*fence), sought and KeyLookup(*sought), tags)


def plan_partitions(
    view: SourceView,
    ranges: Sequence[QueueRange],
    limits: TaskLimits,
    fence_of: Callable[[QueueKey], Fence | None] = lambda _: None,
    sought: KeyLookup | None = None,
    tags: tuple[str, ...] | None = None,
) -> list[InputPartition]:
    """Divide the ranges, which are sorted by queue and offset, into tasks. Return their partitions.

    A partition contains the positions of the first and last message of each piece. `fence_of` returns the fence of a
    queue; `sought` and `tags` are passed to `RmqPartition`.
    """
    if not ranges:
        return []
    backend = view.backend
    location, identity = backend.location.without_secrets(), backend.identity()
    proofs = backend.positions(_edges(ranges))
    tasks = make_tasks(list(ranges), limits, _sizes(view, ranges, proofs))
    missing = [edge for edge in _edges([piece for task in tasks for piece in task]) if edge not in proofs]
    proofs |= backend.positions(missing)
    return [
        RmqPartition(
            location,
            tuple(
                Piece(
                    piece.queue,
                    piece.begin,
                    piece.end,
                    proofs.get((piece.queue, piece.begin)),
                    proofs.get((piece.queue, piece.end - 1)),
                )
                for piece in task
            ),
            identity,
            fence_of(task[0].queue),
            sought,
            tags,
        )
        for task in tasks
    ]


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
