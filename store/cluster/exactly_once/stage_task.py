"""The task of an exactly-once sink: it encodes its rows, and stores them in the stage topic, which only the sink reads.

A task encodes all of its rows before it sends the first blob. Each attempt makes ids of its own, so rows of an attempt
that failed are never taken for those of another one. If the outcome of a send is not known, the blob is sent again; the
copy that no receipt names is garbage, and expires. So is all that an attempt has staged whose receipt is not committed.

A blob goes to the broker of its target queues, so that the commit does not depend on a further broker. While this
broker stores nothing, or if it does not have the stage topic, the blob goes to another one.
"""

import ipaddress
import sys
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count

import numpy as np
import pyarrow as pa

from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.client import monotonic_ms, now_ms, process_id
from rmq_spark.store.cluster.connection import find_own_ip
from rmq_spark.store.cluster.exactly_once.preparation import how_to_prepare
from rmq_spark.store.cluster.exactly_once.run_packing import PackedBlob, pack_rows
from rmq_spark.store.cluster.exactly_once.staged_batch import StagedRows, StagedRun
from rmq_spark.store.cluster.exactly_once.target_topics import (
    AT_LEAST_ONCE,
    OwnTopics,
    TargetTopics,
    checked_topics,
)
from rmq_spark.store.cluster.message_spool import ItemRun, MessageSpool
from rmq_spark.store.cluster.send_requests import SendResponse
from rmq_spark.store.cluster.sender import Outgoing, Sender, SendTerms
from rmq_spark.store.cluster.sink import ClusterSink
from rmq_spark.store.cluster.write_routes import NewTopics, WriteRoutes
from rmq_spark.store.errors import BrokerError, NotFoundError
from rmq_spark.store.format.batch_items import EncodedItems, ItemEncoder, describe_fault, find_first_id, join_item
from rmq_spark.store.format.broker_router import BrokerRouter
from rmq_spark.store.format.byte_ranges import Bytes
from rmq_spark.store.format.message_columns import Given, RowFault
from rmq_spark.store.format.message_ids import Digests, UniqueIds
from rmq_spark.store.model import CommitKey, QueueKey

_DIGESTS = 1 << 64  # a sum of digests is modulo this number
_WAITS = "because a message that waits for its delivery cannot be found again"


class StageTask:
    """Encodes the rows of one attempt of a task, and stages them in `finish`. For one thread."""

    def __init__(self, sink: ClusterSink, own: OwnTopics, key: CommitKey, token: str | None) -> None:
        """Make the writer of an attempt. `token` is that of `prepare_targets`."""
        self._sink, self._own, self._key = sink, own, key
        self._held = ExitStack()
        self._spool = self._held.enter_context(MessageSpool())
        self._client, routes = opened = sink.open_routes(self._held, token)
        self._targets = TargetTopics(opened, own, checked_topics(sink, token), sink.address.write_wait_ms)
        self._stage = WriteRoutes(
            self._client, monotonic_ms, NewTopics(is_allowed=False), masters=routes.book.masters()
        )
        self._ids = make_ids(sink.address)
        self._router = BrokerRouter(self._targets.queues, _random_bits())
        self._encoder = ItemEncoder(replace(sink.body_rules, is_allowed=False), _refuse_waiting)
        self._digest = 0

    def write(self, rows: pa.RecordBatch) -> None:
        """Encode rows, whose columns must be among SENT_COLUMNS.

        Raises OptionError if a row is not a valid message, or cannot be stored exactly once; the error has the row's
        number in the task. Raises the errors of `TargetTopics.queues` for a topic in a row, NotFoundError if there is
        no stage topic, and DiskFullError if a temporary file has no room. Nothing is sent.
        """
        if not rows.num_rows:
            return
        self._find_stage()
        first_row = self._spool.count
        try:
            _refuse_levels(rows)
            items = self._encoder.encode(rows, self._router, self._make_ids, now_ms(), first_row)
            self._refuse_large(items)
        except RowFault as fault:
            raise describe_fault(rows, fault, first_row) from None
        self._spool.add(items)

    def finish(self) -> StagedRows:
        """Stage all rows, and return the receipt.

        Raises BackendUnavailableError if no broker stores anything for `brokerDownTimeout`, and the error of a broker
        that refuses.
        """
        with self._held:
            blobs = pack_rows(self._spool.runs)
            places = self._send(blobs) if blobs else {}
            runs = [
                StagedRun(
                    run.queue,
                    *places[blob.first_row],
                    run.begin,
                    run.size,
                    run.crc32,
                    run.first_id,
                    run.rows,
                )
                for blob in blobs
                for run in blob.runs
            ]
            return StagedRows(self._key, tuple(runs), self._spool.count, self._digest, dict(self._targets.used))

    def discard(self) -> None:
        """Forget the rows of a failed attempt. Blobs that were staged stay until they expire."""
        self._held.__exit__(*sys.exc_info())  # an interrupted client must not be used again

    def _make_ids(self, row_count: int, digests: Callable[[], Digests]) -> Bytes:
        self._digest = (self._digest + int(digests().sum(dtype=np.uint64))) % _DIGESTS
        return self._ids.take(row_count, now_ms()).texts()

    def _refuse_large(self, items: EncodedItems) -> None:
        most = self._sink.terms.max_message_bytes
        for row in np.flatnonzero(items.sizes > most)[:1].tolist():
            raise RowFault(
                row,
                f"it takes {items.sizes[row]} bytes in a batch, with its properties; expected at most {most} "
                "(maxMessageSize). Split the message, or move a part of it elsewhere",
            )

    def _find_stage(self) -> tuple[QueueKey, ...]:
        stage = self._own.stage
        try:
            return self._stage.queues(stage)
        except NotFoundError:
            raise NotFoundError(
                f"the topic {stage} (stageTopic), in which rows are staged for exactly-once delivery, does not exist: "
                f"no name server has a route of it; expected an existing topic. Create it: "
                f"{how_to_prepare(self._client.address.namespace)}. Or {AT_LEAST_ONCE}."
            ) from None

    def _send(self, blobs: Sequence[PackedBlob]) -> dict[int, tuple[QueueKey, int]]:
        """Send blobs. Return the stage queue and queue offset of each, by the number of its first row."""
        places: dict[int, tuple[QueueKey, int]] = {}

        def on_stored(sent: Outgoing, response: SendResponse) -> None:
            if response.queue_offset is None:
                raise BrokerError(
                    int(response.status),
                    f"broker {sent.queue.broker} stored rows in queue {sent.queue}, but its answer has no valid queue "
                    "offset; expected queueOffset. Check the version of the broker.",
                )
            places[int(sent.rows[0])] = sent.queue, response.queue_offset

        terms = SendTerms(self._sink.address.write_wait_ms, repeats_unknown=True, batch_messages=1)
        spool = _BlobSpool(self._spool, blobs, self._find_stage(), _random_bits())
        Sender(self._client, self._stage, terms, monotonic_ms, now_ms, on_stored).send(spool)
        return places


class _BlobSpool(MessageSpool):
    """The blobs of a task as messages to the stage topic. Each is read from the rows when it is sent.

    Its number is that of its first row, so that errors name this row. A blob goes to a queue of its broker if the stage
    topic has one there, else to any queue. Round-robin over queues begins at `start`.
    """

    def __init__(self, rows: MessageSpool, blobs: Sequence[PackedBlob], stage: Sequence[QueueKey], start: int) -> None:
        super().__init__()
        self._rows = rows
        self._blobs = {blob.first_row: blob for blob in blobs}
        of_broker: dict[str, list[QueueKey]] = {}
        for queue in stage:
            of_broker.setdefault(queue.broker, []).append(queue)
        numbers = count(start)
        for blob in blobs:
            queues = of_broker.get(blob.broker, stage)
            number, size = np.array([blob.first_row]), np.array([blob.size])
            run = ItemRun(number, size, None, is_free=True, data=None, position=0)
            self.runs.setdefault(queues[next(numbers) % len(queues)], deque()).append(run)
        self.count = len(blobs)

    def read(self, run: ItemRun) -> bytes:
        """Return the item of a blob, and note what the receipt says of its runs."""
        parts: list[bytes | memoryview] = []
        for packed in self._blobs[int(run.rows[0])].runs:
            data = [self._rows.read(part) for part in packed.parts]
            packed.first_id = find_first_id(data[0])
            packed.crc32 = 0
            for part in data:
                packed.crc32 = zlib.crc32(part, packed.crc32)
            parts += data
        return join_item(0, parts, b"")


def make_ids(address: ClusterAddress) -> UniqueIds:
    """Return a maker of ids that no other task and attempt has. Ids have 32 characters.

    They contain the address of this machine as its brokers see it, or the last four bytes of an IPv6 address.
    """
    ip = ipaddress.ip_address(find_own_ip(address.name_servers[0]).partition("%")[0])
    return UniqueIds(str(ipaddress.IPv4Address(ip.packed[-4:])), process_id(), _random_bits())


def _random_bits() -> int:
    return uuid.uuid4().int & 0xFFFFFFFF


def _refuse_levels(rows: pa.RecordBatch) -> None:
    if "delayLevel" not in rows.schema.names:
        return
    levels = Given.of(rows.column("delayLevel")).values
    for row in np.flatnonzero(levels > 0)[:1].tolist():
        raise RowFault(row, f"it has delayLevel {levels[row]}{_no_delay('delayLevel')}")


def _refuse_waiting(topics: Sequence[str]) -> str:
    return f"it has a deliverTimestamp in the future{_no_delay('deliverTimestamp')}"


def _no_delay(column: str) -> str:
    return f"; expected none with exactly-once delivery, {_WAITS}. Leave {column} out, or {AT_LEAST_ONCE}"
