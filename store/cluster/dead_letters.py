"""Republishing of the dead letters of a group in a cluster to the topics that they came from, at least once.

Dead letters are in %DLQ%group, a queue on each broker that made one. The chosen ones are sent as new messages, and the
brokers have stored them before the progress is noted. The progress is the committed offset of a group of its own,
GROUP-republish-NAME, in each queue of the dead letters. So a call that dies repeats at most the letters of its last
batch of each queue, and loses none. A broker that is killed forgets the progress of its last 5 s.

The id of a republished message (UNIQ_KEY) is made from the place of the dead letter: topic, broker, queue and queue
offset. So a letter that is republished again has the same id, and a reader can drop the copy.

A republished message has the content, tags, keys and properties of its dead letter, and reconsumeTimes 0. Properties
whose names the engine owns are left out, except ORIGIN_MESSAGE_ID. REPUBLISHED_FROM is added; it contains queue and
queue offset of the dead letter.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.backend import COLUMNS, ReadBatch
from rmq_spark.store.cluster.address import ClusterAddress
from rmq_spark.store.cluster.backend import ClusterBackend
from rmq_spark.store.cluster.client import monotonic_ms, now_ms
from rmq_spark.store.cluster.message_spool import MessageSpool
from rmq_spark.store.cluster.namespace import unwrap_name
from rmq_spark.store.cluster.offset_commits import OffsetCommits
from rmq_spark.store.cluster.puller import PullTerms
from rmq_spark.store.cluster.sender import Sender, SendTerms
from rmq_spark.store.cluster.write_routes import NewTopics, WriteRoutes
from rmq_spark.store.errors import NotFoundError, OptionError, RmqError, StoreChangedError
from rmq_spark.store.format.batch_items import (
    MAX_ITEM_PROPERTIES_BYTES,
    EncodedItems,
    ItemEncoder,
    encode_item,
    split_item,
)
from rmq_spark.store.format.body_codec import BodyRules
from rmq_spark.store.format.broker_router import BrokerRouter
from rmq_spark.store.format.content_ids import ContentIds
from rmq_spark.store.format.letter_choice import Chooser, choose_letters
from rmq_spark.store.format.message_ids import scatter
from rmq_spark.store.format.properties import RETRY_TOPIC
from rmq_spark.store.format.property_encoder import SHARDING_KEY
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.model import QueueBounds, QueueKey, QueueRange
from rmq_spark.store.names import check_group_name, dlq_topic

ORIGIN_MESSAGE_ID, REPUBLISHED_FROM = "ORIGIN_MESSAGE_ID", "REPUBLISHED_FROM"
_TAKEN = ("body", "tags", "keys", "flag", "properties")


@dataclass(frozen=True, slots=True)
class ClusterRepublished:
    """The result of a call: `sent` dead letters were republished, and `passed_over` ones were skipped by the filter.

    The next call starts in each queue of the dead letters at its offset in `next_offsets`.
    """

    sent: int
    passed_over: int
    next_offsets: Mapping[QueueKey, int]


@dataclass(frozen=True, slots=True)
class RepublishTerms:
    """Which dead letters of a `group` go where: those that `choose` selects, to `topic` or where they came from.

    A queue begins at the offset of its broker in `begins`, else where the last call with the same `progress` ended.
    Without the name `progress` nothing is noted.
    """

    group: str
    choose: Chooser
    topic: str | None = None
    begins: Mapping[str, int] | None = None
    progress: str | None = "default"


def republish(address: ClusterAddress, terms: RepublishTerms) -> ClusterRepublished:
    """Send the dead letters that exist now, queue by queue. Two calls with one progress must not run at a time.

    Raises OptionError for a dead letter that cannot be sent, and NotFoundError if its topic does not exist any more,
    both with its queue offset. Raises StoreChangedError before anything is sent if the progress is beyond the end of a
    queue without an offset in `begins`. Raises BackendUnavailableError if a broker that is listed does not answer, and
    the errors of brokers that refuse. A broker that no name server lists is left out; the next call sends its dead
    letters. Messages that were sent before an error stay sent.
    """
    noted = None
    if terms.progress is not None:
        noted = PullTerms(check_group_name(f"{terms.group}-republish-{terms.progress}"), address.namespace)
    with closing(ClusterBackend(address)) as backend:
        return _Republishing(backend, address, terms, noted).run()


class _Republishing:
    """The work of one call. `noted` are the terms of the group whose offsets are the progress."""

    def __init__(
        self, backend: ClusterBackend, address: ClusterAddress, terms: RepublishTerms, noted: PullTerms | None
    ) -> None:
        self._backend, self._terms, self._namespace = backend, terms, address.namespace
        self._commits = None if noted is None else OffsetCommits(backend, noted)
        self._send_terms = SendTerms(address.write_wait_ms, repeats_unknown=True)
        self._routes = WriteRoutes(backend.client, monotonic_ms, NewTopics(is_allowed=False))
        self._encoder = ItemEncoder(BodyRules(), lambda _: None)
        self._router = BrokerRouter(self._queues_of, now_ms())

    def run(self) -> ClusterRepublished:
        """Republish queue by queue, and batch by batch."""
        self._backend.refresh()
        dead = dlq_topic(self._terms.group)
        queues = self._backend.queues([dead], missing_ok=[dead]).get(dead, [])
        bounds = self._backend.require_bounds(queues)
        begins = self._terms.begins or {}
        unknown = sorted(begins.keys() - {queue.broker for queue in queues})
        if unknown:
            held = ", ".join(queue.broker for queue in queues) or "none"
            raise OptionError(f"begin: no dead letters are on {', '.join(unknown)}; brokers that have some: {held}.")
        noted = {queue: self._read_progress(queue, bounds[queue], begins) for queue in queues}
        sent = passed_over = 0
        reached: dict[QueueKey, int] = {}
        for queue in queues:
            at = max(bounds[queue].min_offset, begins.get(queue.broker, noted[queue]))
            reached[queue] = max(at, noted[queue])
            for rows, next_offset in self._read(queue, at, bounds[queue]):
                mask = choose_letters(self._terms.choose, rows)
                if mask.any():
                    self._send(queue, rows, np.flatnonzero(mask))
                sent, passed_over = sent + int(mask.sum()), passed_over + int((~mask).sum())
                if next_offset > reached[queue]:
                    reached[queue] = next_offset
                    self._note(queue, next_offset)
        return ClusterRepublished(sent, passed_over, reached)

    def _read(self, queue: QueueKey, begin: int, bounds: QueueBounds) -> Iterator[ReadBatch]:
        """Yield the dead letters that begin at offset `begin`, in batches."""
        if begin < bounds.max_offset:
            yield from self._backend.read(
                QueueRange(queue, begin, bounds.max_offset), list(COLUMNS), DecodeLimits(), None
            )

    def _read_progress(self, queue: QueueKey, bounds: QueueBounds, begins: Mapping[str, int]) -> int:
        """Return the offset up to which earlier calls have sent the letters of a queue.

        If it is beyond the end of the queue, it is that of an earlier queue: return 0 if `begins` has an offset, or
        raise StoreChangedError.
        """
        noted = 0 if self._commits is None else self._commits.read(queue) or 0
        if noted <= bounds.max_offset:
            return noted
        if queue.broker in begins:
            return 0
        raise StoreChangedError(
            f"cannot republish the dead letters of {queue}: the progress {self._terms.progress!r} is at queue offset "
            f"{noted}, but the queue ends at {bounds.max_offset}; expected a queue that reaches its progress. The "
            "broker's store was replaced or truncated, so the progress says nothing about its letters. Give "
            f'begin={{"{queue.broker}": 0}} for all of them, or a later offset. Nothing was sent.'
        )

    def _note(self, queue: QueueKey, offset: int) -> None:
        if self._commits is not None:
            outcome = self._commits.send({queue: offset})[queue]
            if isinstance(outcome, RmqError):
                raise outcome

    def _send(self, queue: QueueKey, batch: pa.RecordBatch, rows: NDArray[np.intp]) -> None:
        """Send some rows of a batch of dead letters. When it returns, the brokers have stored them."""
        letters = batch.take(pa.array(rows))
        offsets = letters.column("queueOffset").to_pylist()
        properties = letters.column("properties")
        columns = {name: letters.column(name) for name in _TAKEN}
        columns["topic"] = self._topics_of(queue, properties, offsets)
        columns["shardingKey"] = pc.map_lookup(properties, SHARDING_KEY, "last")
        stored = self._backend.location.namespace, queue.topic, queue.broker, queue.queue_id
        places = scatter(np.array(offsets, np.int64).view(np.uint64).copy())
        ids = ContentIds("/".join(map(str, ("republished", *stored)))).take(places)
        try:
            items = self._encoder.encode(
                pa.RecordBatch.from_pydict(columns), self._router, lambda _, __: ids, now_ms(), None
            )
        except OptionError as error:
            raise OptionError(f"a dead letter of {queue} at queue offset {offsets[0]} or later: {error}") from None
        trails = [
            {ORIGIN_MESSAGE_ID: origin, REPUBLISHED_FROM: f"{queue}/{offset}"}
            for origin, offset in zip(
                pc.map_lookup(properties, ORIGIN_MESSAGE_ID, "last").to_pylist(), offsets, strict=True
            )
        ]
        with MessageSpool() as spool:
            spool.add(_with_properties(items, trails))
            client = self._backend.client
            Sender(client, self._routes, self._send_terms, monotonic_ms, now_ms, lambda _, __: None).send(spool)

    def _topics_of(self, queue: QueueKey, properties: pa.MapArray, offsets: Sequence[int]) -> pa.StringArray:
        if self._terms.topic is not None:
            return pa.repeat(pa.scalar(self._terms.topic), len(offsets))
        stored = pc.map_lookup(properties, RETRY_TOPIC, "last").to_pylist()
        for topic, offset in zip(stored, offsets, strict=True):
            if not topic:
                raise OptionError(
                    f"the dead letter at queue offset {offset} of {queue} has no property {RETRY_TOPIC}, the topic "
                    "that it came from. Set topic=, or leave the message out with a filter."
                )
        return pa.array([unwrap_name(self._namespace, topic) for topic in stored])

    def _queues_of(self, topic: str) -> Sequence[QueueKey]:
        try:
            return self._routes.queues(topic)
        except NotFoundError:
            raise NotFoundError(
                f'dead letters came from topic "{topic}", which does not exist any more. Create it, set topic= to send '
                "them to another one, or leave them out with a filter."
            ) from None


def _with_properties(items: EncodedItems, trails: Sequence[Mapping[str, str | None]]) -> EncodedItems:
    """Return items with further properties. A property with the value None or "" is left out.

    Raises OptionError if the properties of an item get too large.
    """
    data, made, begin = items.data.tobytes(), [], 0
    for size, trail in zip(items.sizes.tolist(), trails, strict=True):
        flag, body, text = split_item(data[begin : begin + size])
        begin += size
        added = "".join(f"{name}\x01{value}\x02" for name, value in trail.items() if value)
        properties = (text + added).encode()
        if len(properties) > MAX_ITEM_PROPERTIES_BYTES:
            raise OptionError(
                f"the dead letter {trail[REPUBLISHED_FROM]} has {len(properties)} bytes of properties with those that "
                f"are added; expected at most {MAX_ITEM_PROPERTIES_BYTES}. Leave it out with a filter."
            )
        made.append(encode_item(flag, body, properties))
    sizes = np.array([len(item) for item in made], np.int64)
    return replace(items, data=np.frombuffer(b"".join(made), np.uint8), sizes=sizes)
