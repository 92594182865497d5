"""A reader of a live cluster for programs: the same methods as `StoreReader`, as far as a cluster can answer."""

from collections.abc import Collection, Iterator, Sequence
from types import TracebackType
from typing import Self

import pyarrow as pa

from rmq_spark.store.backend import COLUMNS
from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.backend import ClusterBackend
from rmq_spark.store.errors import OffsetRangeError, OptionError
from rmq_spark.store.filter.row_filter import compile_filter, make_expression
from rmq_spark.store.format.columns import refuse_unknown_columns
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.model import MAX_DECOMPRESSED_BYTES, QueueBounds, QueueKey, QueueRange, RecordProof


class ClusterReader:
    """A live cluster, for reading. An instance must not be used by two threads at the same time.

    It connects at its first call. `topics`, `queues` and `bounds` answer as of the last `refresh`. Every method raises
    BackendUnavailableError if a server that it needs does not answer, and NoPermissionError if it refuses. `read` waits
    for a broker that is away, for ever or as long as the address says. Use it in `with`.
    """

    def __init__(self, address: ClusterAddress) -> None:
        self._backend = ClusterBackend(address)
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ClusterReader of {self._backend.location.describe()}>"

    def close(self) -> None:
        """Release the connections. A second call does nothing."""
        self._is_closed = True
        self._backend.close()

    def refresh(self) -> bool:
        """Look at the cluster again. Return whether topics, queues or bounds may have changed."""
        return self._opened.refresh()

    def topics(self) -> list[str]:
        """Return the sorted names of all topics, RocketMQ's own included."""
        return self._opened.topics()

    def queues(self, topic: str) -> list[QueueKey]:
        """Return the sorted queues of a topic, empty ones and those of absent brokers included.

        Raises NotFoundError if no name server lists the topic.
        """
        return self._opened.queues([topic])[topic]

    def bounds(self, queue: QueueKey) -> QueueBounds:
        """Return the queue offsets that can be read in a queue. Raises NotFoundError if it does not exist."""
        return self._opened.require_bounds([queue])[queue]

    def all_bounds(self, queues: Collection[QueueKey]) -> dict[QueueKey, QueueBounds]:
        """Return the bounds of many queues, by one request for each broker and topic."""
        return self._opened.require_bounds(queues)

    def offset_at_time(self, queue: QueueKey, time_ms: int) -> int:
        """Return the offset of the first message stored at or after a time (ms since the epoch), or the max offset."""
        return self._opened.offsets_at({queue: time_ms})[queue]

    def proof(self, queue: QueueKey, offset: int) -> RecordProof:
        """Return physical offset and store time of a message. Raises OffsetRangeError if the queue does not have it."""
        bounds = self.bounds(queue)
        found = self._opened.positions([(queue, offset)])
        if (queue, offset) not in found:
            raise OffsetRangeError(str(queue), offset, offset, bounds.min_offset, bounds.max_offset)
        return found[queue, offset]

    def read(
        self,
        queue: QueueKey,
        begin: int,
        end: int,
        columns: Sequence[str],
        *,
        tags: str | None = None,
        sql92: str | None = None,
        check_crc: bool = False,
        max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the messages with queue offsets [begin, end) in order, as batches of these columns.

        If `tags` (such as "A || B") or `sql92` (such as "a > 5") is given, yield only matching messages; the broker
        filters first. Raises OptionError for an unknown column or an invalid expression, OffsetRangeError if the queue
        does not have the whole range, and DamageError if a record is damaged. All rows that were yielded before an
        error are correct.
        """
        refuse_unknown_columns(columns, COLUMNS)
        wanted = compile_filter(make_expression(tags=tags, sql92=sql92))
        limits = DecodeLimits(check_crc, max_decompressed_bytes)
        if begin < end:
            for found in self._opened.read(QueueRange(queue, begin, end), columns, limits, wanted):
                if found.batch.num_rows:
                    yield found.batch

    @property
    def _opened(self) -> ClusterBackend:
        if self._is_closed:
            raise OptionError(f"{self!r} is closed; expected an open reader. Open another one.")
        return self._backend
