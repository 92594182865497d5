"""Rows in the stage topic: runs, the receipt of a task that has staged them, and a batch of all receipts. Pure.

A *run* is rows for one target queue, encoded as the body of a batch request (`format.batch_items`), of at most 1 MiB. A
*blob* is one message in the stage topic; its body is one run, or several small ones.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rmq_spark.store.errors import BatchConflictError
from rmq_spark.store.model import CommitKey, QueueKey

MAX_RUN_BYTES = 1 << 20  # of a run, and of a blob
_DIGEST_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class StagedRun:
    """Rows for the target `queue`: `size` bytes from `begin` on in the body of a blob, and their CRC-32.

    The blob is the message at the queue offset `offset` of the queue `stage`. `first_id` is the id (UNIQ_KEY) of the
    first of its `rows` rows. Topics are without the namespace.
    """

    queue: QueueKey
    stage: QueueKey
    offset: int
    begin: int
    size: int
    crc32: int
    first_id: str
    rows: int


@dataclass(frozen=True, slots=True)
class StagedRows:
    """The receipt of a task: its runs in their order, all stored, and the totals of its rows.

    `digest` is the sum of the digests of its rows modulo 2**64. `write_queues` are the queues among which the task
    chose, in their order, by topic.
    """

    key: CommitKey
    runs: tuple[StagedRun, ...]
    rows: int
    digest: int
    write_queues: Mapping[str, tuple[QueueKey, ...]]

    @property
    def bytes(self) -> int:
        """The size of the runs."""
        return sum(run.size for run in self.runs)


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """The rows of a batch: `runs` in the order of the tasks, their number, and the sum of their digests."""

    key: CommitKey
    runs: tuple[StagedRun, ...]
    rows: int = 0
    digest: int = 0
    write_queues: Mapping[str, tuple[QueueKey, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, key: CommitKey, receipts: Sequence[StagedRows]) -> "StagedBatch":
        """Join the receipts of the tasks of a batch.

        Raises BatchConflictError if a receipt is of another batch, or if two tasks have chosen among different queues
        of a topic. A sharding key could then lead to two queues, so nothing of the batch is promised.
        """
        queues: dict[str, tuple[QueueKey, ...]] = {}
        for receipt in receipts:
            if receipt.key != key:
                raise BatchConflictError(
                    f"{key} cannot be written: one of its tasks has staged rows of {receipt.key}. Nothing was written. "
                    "Start it again."
                )
            for topic, chosen in receipt.write_queues.items():
                if queues.setdefault(topic, chosen) != chosen:
                    raise BatchConflictError(
                        f"{key} cannot be written: the queues of topic {topic} changed while its tasks ran: one task "
                        f"found {len(queues[topic])} queues on {_brokers(queues[topic])}, another one {len(chosen)} "
                        f"on {_brokers(chosen)}; expected the same, or a key could be split over two queues. Nothing "
                        "was written. Start it again."
                    )
        return cls(
            key,
            tuple(run for receipt in receipts for run in receipt.runs),
            sum(receipt.rows for receipt in receipts),
            sum(receipt.digest for receipt in receipts) & _DIGEST_MASK,
            queues,
        )

    @property
    def bytes(self) -> int:
        """The size of the runs."""
        return sum(run.size for run in self.runs)

    @property
    def queues(self) -> list[QueueKey]:
        """The target queues, in the order in which they are first used."""
        return list(dict.fromkeys(run.queue for run in self.runs))

    @property
    def brokers(self) -> list[str]:
        """The names of the brokers of the target queues, sorted."""
        return sorted({run.queue.broker for run in self.runs})

    def blob_ends(self) -> dict[QueueKey, tuple[int, int]]:
        """Return for each stage queue the offset of its first blob, and the offset after its last one."""
        ends: dict[QueueKey, tuple[int, int]] = {}
        for run in self.runs:
            first, end = ends.get(run.stage, (run.offset, run.offset + 1))
            ends[run.stage] = min(first, run.offset), max(end, run.offset + 1)
        return ends


def _brokers(queues: Iterable[QueueKey]) -> str:
    return ", ".join(dict.fromkeys(queue.broker for queue in queues))
