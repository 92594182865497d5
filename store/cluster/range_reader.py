"""Reading of planned ranges from a cluster: finds the brokers, lets them filter, and checks what was read."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import groupby

import pyarrow as pa

from rmq_spark.store.backend import ReadBatch
from rmq_spark.store.cluster.catalog import ClusterCatalog
from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.pull_pace import PullPace
from rmq_spark.store.cluster.pull_pipeline import Pulled
from rmq_spark.store.cluster.pulled_records import decode_small_ranges
from rmq_spark.store.cluster.puller import Puller, PullTerms
from rmq_spark.store.cluster.requests import CheckFilterRequest
from rmq_spark.store.errors import (
    BackendUnavailableError,
    DamageError,
    OffsetRangeError,
    OptionError,
    StoreError,
)
from rmq_spark.store.filter.row_filter import TAG, Expression, RowFilter, compile_filter
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.model import Away, QueueAnswer, QueueBounds, QueueKey, QueueRange
from rmq_spark.store.names import RETRY_TOPIC_PREFIX, SCHEDULE_TOPIC

_CHECK_PAUSE_S = 0.25  # between two looks at a broker that was away during a read
_TOGETHER_BYTES = 16 << 20  # of records, the most that are read together


class RangeReader:
    """Reads ranges over one client. `require` returns the bounds of a queue, or raises the error for another answer.

    `monotonic_ms` is a time that never runs back.
    """

    def __init__(
        self,
        client: ClusterClient,
        catalog: ClusterCatalog,
        terms: PullTerms,
        require: Callable[[QueueKey, QueueAnswer], QueueBounds],
        monotonic_ms: Callable[[], float],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client, self._catalog, self._terms = client, catalog, terms
        self._require, self._monotonic_ms, self._sleep = require, monotonic_ms, sleep
        self._paces: dict[str, PullPace] = {}
        self._filters: dict[tuple[str, str, Expression], bool] = {}  # whether a broker tests an expression
        self._reads_together = True  # False once ranges were too large for it

    def read(
        self, part: QueueRange, columns: Sequence[str], limits: DecodeLimits, wanted: RowFilter | None
    ) -> Iterator[ReadBatch]:
        """Yield the messages of a range in order. A broker that is away is waited for. See `Puller.read`.

        At the end raises NotFoundError if another store has taken the broker's place meanwhile, as far as the catalogue
        knows a record of the queue.
        """
        queue, reached = part.queue, part.begin
        try:
            puller = self._puller(queue.topic)
            for found in puller.read(part, columns, limits, wanted, self.broker_filter(queue, wanted)):
                reached = found.next_offset
                yield found
            self._check_store(queue)
        except DamageError as error:
            # A broker of 4.9 may answer any bytes for a message that has expired.
            answer = self._catalog.look_again(queue)
            if not isinstance(answer, QueueBounds) or answer.min_offset <= reached:
                raise
            raise OffsetRangeError(str(queue), part.begin, part.end, answer.min_offset, answer.max_offset) from error
        except OffsetRangeError as error:
            if error.min_offset > part.begin:
                self._catalog.note_expired(queue, error.min_offset)
            bounds = error.min_offset, error.max_offset
            raise OffsetRangeError(str(queue), part.begin, part.end, *bounds, error.next_step) from error

    def read_together(
        self, parts: Sequence[QueueRange], columns: Sequence[str], limits: DecodeLimits, wanted: RowFilter | None
    ) -> pa.RecordBatch | None:
        """Return the messages of ranges of one topic in order. The ranges of one broker share the pulls in flight.

        Return None if they need too much memory or a record is not as usual; then `read` them one by one, which finds
        the same messages. Raises the errors of `read`.
        """
        batches: list[pa.RecordBatch] = []
        for _, adjacent in groupby(parts, lambda part: part.queue.broker):
            found = self._read_broker(list(adjacent), columns, limits, wanted) if self._reads_together else None
            if found is None:
                return None
            batches.append(found)
        filled = [batch for batch in batches if batch.num_rows] or batches[:1]
        return pa.Table.from_batches(filled).combine_chunks().to_batches()[0] if len(filled) > 1 else filled[0]

    def _read_broker(
        self, parts: list[QueueRange], columns: Sequence[str], limits: DecodeLimits, wanted: RowFilter | None
    ) -> pa.RecordBatch | None:
        """Return the messages of ranges of one broker, or None if they must be read one by one."""
        puller, expression = self._puller(parts[0].queue.topic), self.broker_filter(parts[0].queue, wanted)
        pulled: list[list[Pulled]] = [[] for _ in parts]
        size = 0
        with closing(puller.pull_all(parts, expression)) as reading:
            for number, found in reading:
                pulled[number] += found
                size += sum(len(one.body) for one in found)
                if size > _TOGETHER_BYTES:
                    self._reads_together = False  # the others of this task would be as large
                    return None
        is_filtered = compile_filter(expression) is not None
        batch = decode_small_ranges(
            [puller.source_of(part.queue) for part in parts], pulled, columns, limits, wanted, is_filtered=is_filtered
        )
        for part in parts:
            self._check_store(part.queue)
        return batch

    def _puller(self, topic: str) -> Puller:
        """Return the puller of one reading of queues of a topic."""
        addresses = _Addresses(self._catalog, topic)
        return Puller(
            self._client,
            addresses.find,
            self._terms,
            is_acting_master=addresses.is_acting_master,
            sleep=self._sleep,
            paces=self._paces,
        )

    def _check_store(self, queue: QueueKey) -> None:
        """Check after a read that its broker has not been replaced, if the catalogue cannot exclude it."""
        if not self._catalog.is_doubtful(queue):
            return
        self._catalog.compare_again(queue)
        since_ms, timeout_ms = self._monotonic_ms(), self._terms.broker_down_timeout_ms
        while isinstance(answer := self._catalog.look_again(queue), Away):
            if timeout_ms and self._monotonic_ms() - since_ms >= timeout_ms:
                break
            self._sleep(_CHECK_PAUSE_S)
            self._catalog.refresh()
        self._require(queue, answer)

    def broker_filter(self, queue: QueueKey, wanted: RowFilter | None) -> Expression | None:
        """Return an expression that the broker tests, so that it sends fewer messages. They are tested again here.

        A tag filter is preferred, because brokers test it without reading messages. SQL92 is only used if the broker
        compiles it (CHECK_CLIENT_CONFIG): a pull with an expression that it cannot compile returns all messages.
        """
        if wanted is None or queue.topic == SCHEDULE_TOPIC or queue.topic.startswith(RETRY_TOPIC_PREFIX):
            return None  # in these topics the tags hashes are others, or the group's own subscription counts
        for expression in sorted(wanted.expressions, key=lambda one: one.kind != TAG):
            if expression.kind == TAG or self._compiles(queue, expression):
                return expression
        return None

    def _compiles(self, queue: QueueKey, expression: Expression) -> bool:
        """Return whether the broker of a queue tests an expression."""
        key = queue.topic, queue.broker, expression
        if key not in self._filters:
            request = CheckFilterRequest(
                self._catalog.topic_of(queue.topic), self._terms.stored_group, expression.text, expression.kind
            )
            try:
                address = self._catalog.find_address(queue.topic, queue.broker, renews=False)
                response = self._client.call(address, request)
            except BackendUnavailableError:
                return False
            except (OptionError, StoreError):
                self._filters[key] = False
            else:
                self._filters[key] = response.is_supported
        return self._filters[key]


class _Addresses:
    """Where to pull from, for one reading of queues of one topic."""

    def __init__(self, catalog: ClusterCatalog, topic: str) -> None:
        self._catalog, self._topic = catalog, topic
        self._asked: set[str] = set()

    def find(self, broker: str) -> str:
        """Return the address of a broker. A second question means that nothing answered at the first address."""
        renews = broker in self._asked
        self._asked.add(broker)
        return self._catalog.find_address(self._topic, broker, renews=renews)

    def is_acting_master(self, broker: str) -> bool:
        """Say whether a slave acts as the broker's master."""
        return self._catalog.book.listing(self._topic, broker).is_acting
