"""A reader of a live cluster for programs: the same methods as `StoreReader`, as far as a cluster can answer."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

import pyarrow as pa

from rmq_spark.store.backend import COLUMNS
from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.backend import ClusterBackend
from rmq_spark.store.cluster.message_lookup import FOR_EVER_MS, TimeSpan
from rmq_spark.store.errors import OffsetRangeError, OptionError
from rmq_spark.store.filter.row_filter import (
    LOOKUP_COLUMNS,
    KeyLookup,
    compile_filter,
    make_expression,
    matches_lookup,
)
from rmq_spark.store.format.columns import refuse_unknown_columns
from rmq_spark.store.format.properties import UNIQ_KEY
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
        return f"<{type(self).__name__} of {self._backend.location.describe()}>"

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

    def offsets_at(self, times_ms: Mapping[QueueKey, int]) -> dict[QueueKey, int]:
        """Return for each queue the offset of the first message stored at or after its time (ms since the epoch).

        It is the max offset if there is none. Raises BackendUnavailableError if a broker does not answer.
        """
        return self._opened.offsets_at(times_ms)

    def proof(self, queue: QueueKey, offset: int) -> RecordProof:
        """Return physical offset and store time of a message. Raises OffsetRangeError if the queue does not have it."""
        bounds = self.bounds(queue)
        found = self._opened.positions([(queue, offset)])
        if (queue, offset) not in found:
            raise OffsetRangeError(str(queue), offset, offset, bounds.min_offset, bounds.max_offset)
        return found[queue, offset]

    def find_key(
        self, topic: str, key: str, begin_ms: int = 0, end_ms: int = FOR_EVER_MS
    ) -> list[tuple[QueueKey, int]]:
        """Return (queue, queue offset) of each of the topic's messages with this key, sorted.

        A message matches if the key is its UNIQ_KEY or one of its KEYS. Only messages stored in [begin_ms, end_ms] are
        returned. The brokers search their key indexes (`message_lookup`); messages that are in no index, as with
        messageIndexEnable=false, are not found. Raises NotFoundError if no name server lists the topic.
        """
        brokers = _brokers_of(self._opened.queues([topic]))
        found, hidden = self._opened.message_lookup().by_word(brokers, key, begin_ms=begin_ms, end_ms=end_ms)
        return self._kept(found | self._find_hidden(hidden, KeyLookup(keys=(key,)), begin_ms, end_ms))

    def find_message_id(self, message_id: str, topics: Sequence[str]) -> list[tuple[QueueKey, int]]:
        """Return (queue, queue offset) of each message in these topics with this id, sorted. [] if there is none.

        The id is an offsetMsgId, or a UNIQ_KEY, which the brokers search in their key indexes as in `find_key`. Topics
        that do not exist are left out.
        """
        brokers = _brokers_of(self._opened.queues(topics, missing_ok=topics))
        lookup = self._opened.message_lookup()
        # An offsetMsgId begins with the address of a broker, so it is not a UNIQ_KEY if a broker has its message.
        found = lookup.by_offset_id(brokers, message_id)
        if not found:
            found, hidden = lookup.by_word(brokers, message_id, (UNIQ_KEY,))
            found |= self._find_hidden(hidden, KeyLookup(message_ids=(message_id,)), 0, FOR_EVER_MS)
        return self._kept(found)

    def _find_hidden(
        self, hidden: Sequence[tuple[str, TimeSpan]], sought: KeyLookup, begin_ms: int, end_ms: int
    ) -> set[tuple[QueueKey, int]]:
        """Read the messages that the indexes of brokers hide. Return those that match."""
        found: set[tuple[QueueKey, int]] = set()
        for topic, span in hidden:
            queues = [queue for queue in self.queues(topic) if queue.broker == span.broker]
            begins = self._opened.offsets_at(dict.fromkeys(queues, max(span.begin_ms, begin_ms)))
            ends = self._opened.offsets_at(dict.fromkeys(queues, min(span.end_ms, end_ms) + 1))
            for queue in queues:
                for batch in self.read(queue, begins[queue], ends[queue], ["queueOffset", *LOOKUP_COLUMNS]):
                    rows = batch.filter(matches_lookup(batch, sought))
                    found.update((queue, offset) for offset in rows.column("queueOffset").to_pylist())
        return found

    def _kept(self, found: Collection[tuple[QueueKey, int]]) -> list[tuple[QueueKey, int]]:
        """Return the messages that have not expired from their queues, sorted."""
        bounds = self._opened.bounds({queue for queue, _ in found})
        return sorted(
            (queue, offset)
            for queue, offset in found
            if not isinstance(answer := bounds[queue], QueueBounds) or answer.min_offset <= offset
        )

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


def _brokers_of(queues: Mapping[str, Sequence[QueueKey]]) -> dict[str, list[str]]:
    """Return the brokers of each topic."""
    return {topic: sorted({queue.broker for queue in some}) for topic, some in queues.items()}
