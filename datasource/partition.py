"""What one task reads, as it travels from the driver to an executor: small, and nothing in it is open."""

from typing import NamedTuple

from pyspark.sql.datasource import InputPartition

from rmq_spark.store import Sought
from rmq_spark.store.units import QueueKey, RecordProof


class Piece(NamedTuple):
    """The messages [begin, end) of one queue, and where the planner saw the first and the last of them.

    A proof is None where the message was gone when it was asked for; the executor will meet that too.
    """

    queue: QueueKey
    begin: int
    end: int
    first: RecordProof | None
    last: RecordProof | None


class Fence(NamedTuple):
    """Whose the queue of a partition is: the task fails once it is another member's, or has another epoch."""

    group: str
    member_id: str
    epoch: int


class RmqPartition(InputPartition):
    """Some pieces of one queue, in order; nearly always one. Both paths are absolute.

    `store_id` is what our writers once named the store that was planned with, None for one that only brokers wrote.
    With `sought` only messages that have one of these keys or ids are rows, with `tags` only those that have one of
    these tags: in queues of any topic, beside what the query's filters want.
    """

    def __init__(
        self,
        path: str,
        commit_log_path: str | None,
        pieces: tuple[Piece, ...],
        store_id: str | None = None,
        fence: Fence | None = None,
        sought: Sought | None = None,
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
            (*_key(piece.queue), piece.begin, piece.end, _flat(piece.first), _flat(piece.last)) for piece in self.pieces
        )
        fence, sought = self.fence and tuple(self.fence), self.sought and tuple(self.sought)
        return _unpickle, (self.path, self.commit_log_path, flat, self.store_id, fence, sought, self.tags)


def _key(queue: QueueKey) -> tuple[str, int]:
    return queue.topic, queue.queue_id


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
    held = None if fence is None else Fence(*fence)
    return RmqPartition(path, commit_log_path, pieces, store_id, held, sought and Sought(*sought), tags)
