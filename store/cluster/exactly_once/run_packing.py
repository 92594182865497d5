"""Runs of rows for target queues, and blobs that hold them. Pure: nothing is read or sent here.

A queue's rows are cut into runs of at most `MAX_RUN_BYTES`, in their order. A run that is full becomes a blob of its
own. The last run of each queue is small; several of them share a blob, if their queues are on the same broker. A row
that is larger than a run is a run alone.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from rmq_spark.store.cluster.exactly_once.staged_batch import MAX_RUN_BYTES
from rmq_spark.store.cluster.message_spool import ItemRun
from rmq_spark.store.model import QueueKey


@dataclass(slots=True, eq=False)
class PackedRun:
    """Rows for the target `queue`: adjacent items of a spool.

    `begin` is where the run begins in its blob. `crc32` and `first_id` are known when the blob was read.
    """

    queue: QueueKey
    parts: list[ItemRun]
    size: int
    begin: int = 0
    crc32: int = 0
    first_id: str = ""

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(len(part.rows) for part in self.parts)


@dataclass(slots=True, eq=False)
class PackedBlob:
    """Runs that are staged as one message: those of one `broker`, one after the other."""

    broker: str
    runs: list[PackedRun]
    size: int

    @property
    def first_row(self) -> int:
        """The number of its first row in the task. No other blob has the same."""
        return int(self.runs[0].parts[0].rows[0])


def pack_rows(rows: Mapping[QueueKey, Iterable[ItemRun]], max_bytes: int = MAX_RUN_BYTES) -> list[PackedBlob]:
    """Return the blobs of all rows of a task. Runs of a queue are in order, from one blob to the next."""
    blobs: list[PackedBlob] = []
    last: list[PackedRun] = []
    for queue, parts in rows.items():
        *full, small = cut_runs(queue, parts, max_bytes)
        blobs += [PackedBlob(queue.broker, [run], run.size) for run in full]
        last.append(small)
    open_blobs: dict[str, PackedBlob] = {}
    for run in last:
        blob = open_blobs.get(run.queue.broker)
        if blob is None or blob.size + run.size > max_bytes:
            blob = open_blobs[run.queue.broker] = PackedBlob(run.queue.broker, [], 0)
            blobs.append(blob)
        run.begin = blob.size
        blob.runs.append(run)
        blob.size += run.size
    return blobs


def cut_runs(queue: QueueKey, parts: Iterable[ItemRun], max_bytes: int) -> Iterator[PackedRun]:
    """Yield the runs of the rows of one queue. There is at least one row."""
    taken: list[ItemRun] = []
    size = 0
    for part in parts:
        rest: ItemRun | None = part
        while rest is not None:
            fits = int(np.searchsorted(np.cumsum(rest.sizes), max_bytes - size, "right"))
            if not fits and taken:
                yield PackedRun(queue, taken, size)
                taken, size = [], 0
                continue
            head, rest = rest.cut(max(fits, 1))
            taken.append(head)
            size += int(head.sizes.sum())
    yield PackedRun(queue, taken, size)
