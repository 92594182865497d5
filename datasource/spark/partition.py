"""Partitions: each is the input of one task, which Spark pickles on the driver and sends to an executor.

A partition is small and contains no open files.
"""

from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition

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
    """The pieces of one queue that a task reads, in order; usually one.

    `identity` is the id of the place (`Backend.identity`), None if it has none. The task applies the filters of the
    query. If `sought` is not None, only messages with one of its keys or ids are rows. If `tags` is not None, only
    messages with one of these tags are rows.
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
