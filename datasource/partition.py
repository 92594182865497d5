"""Partitions: each is the input of one task, which Spark pickles on the driver and sends to an executor.

A partition is small and contains no open files.
"""

from typing import NamedTuple

from pyspark.sql.datasource import InputPartition

from rmq_spark.store import KeyLookup
from rmq_spark.store.model import QueueKey, RecordProof


class Piece(NamedTuple):
    """The messages with queue offsets [begin, end) of one queue.

    `first` and `last` are the positions and store times of the first and the last message, by which the executor
    detects that it reads another store. One is None if the message had disappeared when the driver planned the read;
    the executor will detect that it is missing.
    """

    queue: QueueKey
    begin: int
    end: int
    first: RecordProof | None
    last: RecordProof | None


class Fence(NamedTuple):
    """The member of a group that owns a partition's queue, and the epoch (number) of its claim to the queue.

    A task with a fence fails if the queue has another owner or epoch when the task begins or ends a piece.
    """

    group: str
    member_id: str
    epoch: int


class RmqPartition(InputPartition):
    """The pieces of one queue that a task reads, in order; usually one. Both paths are absolute.

    `store_id` is the id that rmq-spark's writers gave to the store; None if only brokers have written to it. The task
    applies the filters of the query. If `sought` is not None, only messages with one of its keys or ids are rows. If
    `tags` is not None, only messages with one of these tags are rows.
    """

    def __init__(
        self,
        path: str,
        commit_log_path: str | None,
        pieces: tuple[Piece, ...],
        store_id: str | None = None,
        fence: Fence | None = None,
        sought: KeyLookup | None = None,
        tags: tuple[str, ...] | None = None,
    ) -> None:
        self.path = path
        self.commit_log_path = commit_log_path
        self.pieces = pieces
        self.store_id = store_id
        self.fence = fence
        self.sought = sought
        self.tags = tags

    def __reduce__(self) -> tuple[object, ...]:
        flat = tuple(
            (piece.queue.topic, piece.queue.queue_id, piece.begin, piece.end, _flat(piece.first), _flat(piece.last))
            for piece in self.pieces
        )
        fence, sought = self.fence and tuple(self.fence), self.sought and tuple(self.sought)
        return _unpickle, (self.path, self.commit_log_path, flat, self.store_id, fence, sought, self.tags)


def _flat(proof: RecordProof | None) -> tuple[int, int] | None:
    return None if proof is None else (proof.physical_offset, proof.store_time_ms)


_FlatPiece = tuple[str, int, int, int, tuple[int, int] | None, tuple[int, int] | None]


def _unpickle(
    path: str,
    commit_log_path: str | None,
    flat: tuple[_FlatPiece, ...],
    store_id: str | None,
    fence: tuple[str, str, int] | None,
    sought: tuple[tuple[str, ...], tuple[str, ...]] | None,
    tags: tuple[str, ...] | None,
) -> RmqPartition:
    pieces = tuple(
        Piece(
            QueueKey(topic, queue_id),
            begin,
            end,
            None if first is None else RecordProof(*first),
            None if last is None else RecordProof(*last),
        )
        for topic, queue_id, begin, end, first, last in flat
    )
    return RmqPartition(
        path, commit_log_path, pieces, store_id, fence and Fence(*fence), sought and KeyLookup(*sought), tags
    )
