"""Import into a live cluster: send the messages of a parquet file, each at least once.

A cluster has no ledger, so it does not recognise an import that it has stored. A repeated call sends all rows again,
or those after `skip_rows`. Their message ids are the same as before: an id is made from the name of the import, the
content of the file, and the number of the row. So a reader can drop the copies.

Rows are sent in parts, one part after the other. In each queue, messages have the order of the file. The list of queues
of a topic is fixed for the whole call.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import PurePath

import numpy as np
import pyarrow as pa

from rmq_spark.store.argument_checks import check_setting
from rmq_spark.store.backend import CommitTerms, SinkTerms
from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.client import monotonic_ms, now_ms
from rmq_spark.store.cluster.message_spool import MessageSpool
from rmq_spark.store.cluster.producer import cut_batch
from rmq_spark.store.cluster.send_requests import SendResponse
from rmq_spark.store.cluster.sender import Outgoing, Sender
from rmq_spark.store.cluster.sink import ClusterSink, TaskRoutes, refuse_timers
from rmq_spark.store.disk import files
from rmq_spark.store.errors import NotFoundError, OptionError
from rmq_spark.store.format.batch_items import EncodedItems, ItemEncoder
from rmq_spark.store.format.broker_router import BrokerRouter
from rmq_spark.store.format.byte_ranges import Bytes
from rmq_spark.store.format.config_json import TopicConfig
from rmq_spark.store.format.content_ids import ContentIds
from rmq_spark.store.format.message_ids import scatter
from rmq_spark.store.model import QueueKey
from rmq_spark.store.tools.import_parquet import Imported, ImportTerms
from rmq_spark.store.tools.import_source import ImportSource
from rmq_spark.store.tools.parquet_file import ParquetSource


def import_into_cluster(
    address: ClusterAddress,
    source: str | PurePath,
    terms: ImportTerms,
    *,
    skip_rows: int = 0,
    max_message_size: int = 4 << 20,
) -> Imported:
    """Send the messages of the file `source` to a cluster. See `import_parquet` of `store.parquet_copies`."""
    sink = ClusterSink(address, SinkTerms(creates_topics=False, max_message_bytes=max_message_size), CommitTerms())
    with ParquetSource(files.absolute(source)) as opened, ExitStack() as held:
        rows = terms.open(opened, has_brokers=True)
        check_setting("skip_rows", skip_rows, 0, rows.total)
        sent = _Import(sink, sink.open_routes(held, None), rows, skip_rows)
        sent.make_topics()
        try:
            sent.run(terms)
        except BaseException as error:
            error.add_note(sent.describe())
            raise
        return Imported(rows.name, sent.done - skip_rows, skip_rows, rows.topics)


class _Import:
    """One call of `import_into_cluster`. `done` is the number of the first row of the part that is being sent."""

    def __init__(self, sink: ClusterSink, connected: TaskRoutes, source: ImportSource, skip_rows: int) -> None:
        self._sink, self._client, self._routes, self._source = sink, connected.client, connected.routes, source
        self.done = skip_rows
        self._stored = np.zeros(0, np.bool_)  # which rows of the part are stored
        self._seed = f"rmq:import:{source.name}/{source.digest}"
        start = int.from_bytes(hashlib.blake2b(self._seed.encode(), digest_size=4).digest(), "big")
        self._router = BrokerRouter(self._routes.queues, start)
        self._encoder = ItemEncoder(sink.body_rules, lambda topics: refuse_timers(self._routes, topics))

    def make_topics(self) -> None:
        """Create the missing topics, on every master.

        Raises OptionError if the rows need a queue that does not exist, and NoPermissionError if the account may not
        create a topic. If a topic that exists lacks a queue, no topic was created.
        """
        new, missing = self._source.new_queue_counts(), []
        masters: list[str] = []
        for topic in self._source.topics:
            try:
                queues = self._routes.queues(topic)
            except NotFoundError:
                missing.append(topic)
                masters = masters or sorted(self._routes.find_masters(topic))
                queues = tuple(QueueKey(topic, number, name) for name in masters for number in range(new[topic]))
            self._check_queues(topic, queues)
        for topic in missing:
            self._routes.wait_for(topic, self._routes.create(TopicConfig(topic, new[topic], new[topic])))

    def _check_queues(self, topic: str, queues: Sequence[QueueKey]) -> None:
        """Raise OptionError if the rows of a topic need a queue that is not in the list."""
        counts = Counter(queue.broker for queue in queues)
        shown = ", ".join(f"{name} ({count} queues)" for name, count in sorted(counts.items()))
        for broker, needed in self._source.needed_queues(topic).items():
            if not needed:
                continue
            if not broker and len(counts) > 1:
                found = "rows with queueId and no brokerName, and the topic is on several brokers"
            elif broker and broker not in counts:
                found = f"rows of broker {broker}"
            elif needed > (counts[broker] if broker else counts.total()):
                found = f"rows of queue {QueueKey(topic, needed - 1, broker).id_text}"
            else:
                continue
            raise OptionError(
                f"{self._source.path}, topic {topic}: the file has {found}; expected rows of these queues: {shown}. "
                "Give keep_queues=False to spread the messages over them, or leave out the columns queueId and "
                "brokerName. Nothing was sent."
            )

    def run(self, terms: ImportTerms) -> None:
        """Send all rows from `done` on."""
        total = self._source.total
        terms.note(self.done, total)
        for rows in self._source.parts(self.done):
            self._stored = np.zeros(len(rows), np.bool_)
            with MessageSpool() as spool:
                for batch in rows.to_batches():
                    for piece in cut_batch(batch):
                        spool.add(self._encode(piece, self.done + spool.count))
                Sender(
                    self._client,
                    self._routes,
                    self._sink.send_terms,
                    monotonic_ms,
                    now_ms,
                    self._note_stored,
                    self.done,
                ).send(spool)
            self._stored = np.zeros(0, np.bool_)  # before `done` grows, so that an interrupt here counts no row twice
            self.done += len(rows)
            terms.note(self.done, total)

    def describe(self) -> str:
        """Return how far the import came, and how to repeat it."""
        missing = np.flatnonzero(~self._stored)
        first = self.done + (int(missing[0]) if len(missing) else len(self._stored))
        beyond = self.done + int(np.count_nonzero(self._stored)) - first
        if not first and not beyond:
            return "rmq: no row is certainly stored. Repeat it without skip_rows."
        others = f", and {beyond} or more of the others" if beyond else ""
        repeat = f"with skip_rows={first} to send the others" if first else "without skip_rows"
        return f"rmq: the first {first} of {self._source.total} rows are certainly stored{others}. Repeat it {repeat}."

    def _encode(self, rows: pa.RecordBatch, first_row: int) -> EncodedItems:
        """Return the items of rows. The id of each row is made from its number in the file."""

        def make_ids(count: int, _: object) -> Bytes:
            return ContentIds(self._seed).take(scatter(np.arange(first_row, first_row + count, dtype=np.uint64)))

        return self._encoder.encode(rows, self._router, make_ids, now_ms(), first_row)

    def _note_stored(self, sent: Outgoing, _: SendResponse) -> None:
        self._stored[sent.rows] = True
