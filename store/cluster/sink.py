"""The sink of a live cluster with delivery=atLeastOnce: each task sends its rows, and the commit adds up what was sent.

A task encodes all of its rows before it sends the first one. If it fails or is repeated, rows are stored again, with
the same message ids (`format.content_ids`), so that a reader can drop the copies. The seed of the ids is the batch and
the partition. So a batch that is repeated with other partitions has other ids, and its copies cannot be recognised.

The driver fixes the queues of the option topic for each batch, and tasks learn them from the token. For a topic that
a row names, each task asks for its queues once.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from rmq_spark.store.backend import CommitTerms, CommitTotals, Guarantee, Receipt, SinkTerms
from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.client import ClusterClient, borrowed_client, monotonic_ms, now_ms
from rmq_spark.store.cluster.message_spool import MessageSpool
from rmq_spark.store.cluster.send_requests import SendResponse
from rmq_spark.store.cluster.sender import Outgoing, Sender, SendTerms
from rmq_spark.store.cluster.write_routes import V5_0_0, NewTopics, WriteRoutes
from rmq_spark.store.format.batch_items import ItemEncoder
from rmq_spark.store.format.body_codec import BodyRules
from rmq_spark.store.format.broker_router import BrokerRouter
from rmq_spark.store.format.content_ids import ContentIds
from rmq_spark.store.model import CommitKey, QueueKey
from rmq_spark.store.names import check_sent_topic

MOVED_AFTER_MS = 10_000  # a restart or a short fault of a broker must not change the order of rows


class TaskRoutes(NamedTuple):
    """The client of a task, and what the task knows about topics and brokers."""

    client: ClusterClient
    routes: WriteRoutes


@dataclass(frozen=True, slots=True)
class SentRows:
    """The receipt of a task: how many rows and bytes of items it has sent, and to which queues."""

    rows: int
    bytes: int
    queues: frozenset[QueueKey]


@dataclass(frozen=True, slots=True)
class ClusterSink:
    """Sends new messages to a cluster, each row at least once."""

    address: ClusterAddress
    terms: SinkTerms
    commit_terms: CommitTerms

    @property
    def guarantee(self) -> Guarantee:
        """At least once: a repeated task sends its rows again."""
        return Guarantee.AT_LEAST_ONCE

    def prepare(self) -> str | None:
        """Return the queues of the option topic for this batch, as JSON. Without that option return None.

        A missing topic may be created. Raises NotFoundError if it must not be, NoPermissionError if the topic accepts
        no messages, OptionError if clients must not send to it, and BackendUnavailableError if no name server answers.
        """
        topic = self.terms.topic
        if topic is None:
            return None
        check_sent_topic(topic)
        with borrowed_client(self.address) as client:
            routes = WriteRoutes(client, monotonic_ms, self._new_topics)
            queues = [[queue.broker, queue.queue_id] for queue in routes.queues(topic)]
            return json.dumps({"queues": queues, "masters": routes.book.masters()}, sort_keys=True)

    def open_task(self, token: str | None, key: CommitKey, task: str, partition: int) -> "ClusterTask":
        """Return the writer of an attempt of a task, which sends its rows when it finishes."""
        return ClusterTask(self, token, f"{key.query_id}/{key.batch_id}/{partition}")

    def commit(
        self, key: CommitKey, receipts: Sequence[Receipt], before_commit: Callable[[], None] | None = None
    ) -> CommitTotals:
        """Return the totals. The tasks have stored all rows already."""
        sent = [receipt for receipt in receipts if isinstance(receipt, SentRows)]
        assert len(sent) == len(receipts), receipts
        if before_commit is not None:
            before_commit()
        queues: set[QueueKey] = set().union(*(one.queues for one in sent))
        return CommitTotals(sum(one.rows for one in sent), sum(one.bytes for one in sent), len(queues))

    def abort(self, key: CommitKey, receipts: Sequence[Receipt]) -> None:
        """Do nothing, because messages in a cluster cannot be taken back."""

    @property
    def _new_topics(self) -> NewTopics:
        return NewTopics(self.terms.creates_topics, self.terms.queue_count)

    @property
    def body_rules(self) -> BodyRules:
        """How bodies are compressed, and how large they may be."""
        terms = self.terms
        return BodyRules.named(terms.compression, terms.compress_over_bytes, terms.max_message_bytes)

    @property
    def send_terms(self) -> SendTerms:
        """How a task deals with brokers that are away."""
        return SendTerms(self.address.write_wait_ms, repeats_unknown=True, moved_after_ms=MOVED_AFTER_MS)

    def open_routes(self, held: ExitStack, token: str | None) -> "TaskRoutes":
        """Return a connected client and the routes of a task, until `held` is closed."""
        client = held.enter_context(borrowed_client(self.address))
        fixed, masters = {}, None
        if token is not None and self.terms.topic is not None:
            found = json.loads(token)
            masters = found["masters"]
            topic = self.terms.topic
            fixed[topic] = tuple(QueueKey(topic, queue_id, broker) for broker, queue_id in found["queues"])
        routes = WriteRoutes(client, monotonic_ms, self._new_topics, fixed, masters)
        client.name_brokers(routes.book.names())
        return TaskRoutes(client, routes)


def brokers_of(token: str) -> set[str]:
    """Return the names of the brokers in a token of `ClusterSink.prepare`."""
    return {broker for broker, _ in json.loads(token)["queues"]}


class ClusterTask:
    """Encodes the rows of one task, and sends them in `finish`."""

    def __init__(self, sink: ClusterSink, token: str | None, seed: str) -> None:
        self._sink, self._held = sink, ExitStack()
        self._spool = self._held.enter_context(MessageSpool())
        self._client, self._routes = sink.open_routes(self._held, token)
        start = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=4).digest(), "big")
        self._router = BrokerRouter(self._routes.queues, start)
        self._encoder = ItemEncoder(sink.body_rules, lambda topics: refuse_timers(self._routes, topics))
        self._ids = ContentIds(seed)

    def write(self, rows: pa.RecordBatch) -> None:
        """Encode rows, whose columns must be among SENT_COLUMNS.

        Raises OptionError if a row is not a valid message; the error has the row's number in the task. Raises the
        errors of `WriteRoutes.queues` for a topic in a row, and DiskFullError if a temporary file has no room.
        """
        if rows.num_rows:
            self._spool.add(
                self._encoder.encode(
                    rows, self._router, lambda _, digests: self._ids.take(digests()), now_ms(), self._spool.count
                )
            )

    def finish(self) -> SentRows:
        """Send all rows, and return what was sent.

        Raises BackendUnavailableError if a broker stores nothing for `brokerDownTimeout`, and the error of a broker
        that refuses. Rows may have been stored then.
        """
        spool, queues = self._spool, set[QueueKey]()

        def on_stored(sent: Outgoing, _: SendResponse) -> None:
            queues.add(sent.queue)

        sender = Sender(self._client, self._routes, self._sink.send_terms, monotonic_ms, now_ms, on_stored)
        with self._held:
            sender.send(spool)
        return SentRows(spool.count, spool.bytes, frozenset(queues))

    def discard(self) -> None:
        """Forget the rows of a failed task. Rows that were sent stay in the cluster."""
        self._held.__exit__(*sys.exc_info())  # an interrupted client must not be used again


def refuse_timers(routes: WriteRoutes, topics: Sequence[str]) -> str | None:
    """Return why a broker of these topics would deliver a message with a delivery time at once, or None."""
    for topic in topics:
        old = sorted(name for name, version in routes.fetch_versions(topic).items() if version < V5_0_0)
        if old:
            return (
                f"it has a deliverTimestamp, and the topic is on brokers of RocketMQ 4.9, which have no timer and "
                f"would deliver it at once: {', '.join(old)}; expected brokers of 5.x. Use delayLevel instead"
            )
    return None
