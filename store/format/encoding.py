"""Rows of messages -> finished records of the commit log, a whole batch at a time.

What only the store can decide is left at zero: queue offset, physical offset and store time, which the appender fills
in while it holds the store's lock. Everything that costs time (properties, CRCs, hashes, ids) is done here, before it.

`record.encode_record`, `properties.encode` and `java` are the slow twins that a test holds against this.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.diversion import AskedDelays, DelayRules, divert
from rmq_spark.store.format.java import Host, encode_host, string_hash
from rmq_spark.store.format.message_columns import Given, RowFault, Texts, Topics, keys_of
from rmq_spark.store.format.outgoing_bodies import BodyRules, OutgoingBodies
from rmq_spark.store.format.outgoing_properties import OutgoingProperties, name_digest
from rmq_spark.store.format.record import BLANK_BYTES, MAGIC_V1, RECORD_HEAD
from rmq_spark.store.format.record_join import RecordParts, join_records
from rmq_spark.store.format.routing import QueueRouter
from rmq_spark.store.format.text_hashes import powers_of_31, scatter
from rmq_spark.store.format.unique_ids import UniqueIdRun, UniqueIds
from rmq_spark.store.units import QueueKey

MESSAGE_COLUMNS = (
    "topic",
    "body",
    "tags",
    "keys",
    "properties",
    "shardingKey",
    "queueId",
    "flag",
    "delayLevel",
    "deliverTimestamp",
)
MAX_PROPERTIES_BYTES = 32767  # the length is a signed number of two bytes

_DEFAULT_SEGMENT_BYTES = 1 << 30
_DEFAULT_RULES = BodyRules()
_DEFAULT_DELAYS = DelayRules()
# Keeps flag and queue id apart from CRC and size of a body in a row's digest: digits of the square root of 2.
_OF_FLAG = np.uint64(0x6A09E667F3BCC909)


@dataclass(frozen=True, slots=True)
class EncodedRecords:
    """Whole records one after the other, and what their units and index entries need.

    Arrays are in the order of the records. Record `i` takes `sizes[i]` bytes of `data`; its queue offset, physical
    offset and store time are zero in there. It belongs to `queues[queue_numbers[i]]`. `digest` tells whether two
    batches are the same to their user: it depends on topics, bodies, tags, keys, properties, flags, given queue ids and
    delays, and not on the order of rows, ids, hosts, times or the choice of a queue. Digests of parts add up, modulo
    2^64. A record that is to wait belongs to a queue where it waits; its tags code there is the appender's to find.
    """

    data: NDArray[np.uint8]
    sizes: NDArray[np.int64]  # bytes of each record, TOTALSIZE
    queues: tuple[QueueKey, ...]  # distinct
    queue_numbers: NDArray[np.int32]  # into `queues`
    tags_codes: NDArray[np.int64]  # Java hash of TAGS, 0 without
    key_rows: NDArray[np.int64]  # one element for each index entry, ascending: which record it is of
    key_hashes: NDArray[np.int32]  # java.index_key_hash of `topic#key`; of a record first UNIQ_KEY, then KEYS in order
    digest: int  # 0 .. 2^64-1
    # Of the messages that are to wait: the topics that they are for -> largest queue id, plus one.
    real_topics: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sizes)


class MessageEncoder:
    """Encodes batches of one task. For one thread.

    `segment_bytes` is the size of the store's segments: a record must fit into one, with the filler behind it.
    `delay_rules` may be set anew between two batches.
    """

    def __init__(
        self,
        *,
        born_host: Host,
        store_host: Host,
        ids: UniqueIds,
        body_rules: BodyRules = _DEFAULT_RULES,
        segment_bytes: int = _DEFAULT_SEGMENT_BYTES,
        delay_rules: DelayRules = _DEFAULT_DELAYS,
    ) -> None:
        self.delay_rules = delay_rules
        self._ids, self._body_rules = ids, body_rules
        self._max_record_bytes = segment_bytes - BLANK_BYTES
        head = np.zeros(1, RECORD_HEAD)
        head["magic"] = MAGIC_V1
        for name, host in (("born_host", born_host), ("store_host", store_host)):
            field = encode_host(host)
            assert len(field) == head[name].dtype.itemsize, f"{name} {host} is no IPv4 address"
            head[name] = np.void(field)
        self._head = head

    def encode(
        self, messages: pa.RecordBatch, router: QueueRouter, born_ms: int, first_row: int | None = 0
    ) -> EncodedRecords:
        """Encode the rows, born at `born_ms` since the epoch, which is now; the columns are some of MESSAGE_COLUMNS.

        Raises OptionError, which names the row and its topic, for one that cannot become a message; the first is called
        `first_row`, or nothing if that is None. Nothing is encoded then.
        """
        unknown = set(messages.schema.names) - set(MESSAGE_COLUMNS)
        assert not unknown, unknown
        columns = dict(zip(messages.schema.names, messages.columns, strict=True))
        if not messages.num_rows:
            return _nothing()
        try:
            encoded = self._encode(columns, router, born_ms)
        except RowFault as fault:
            topic = columns["topic"][fault.row].cast(pa.binary()).as_py()
            row = [] if first_row is None else [f"row {first_row + fault.row}"]
            of_topic = [] if topic is None else [f"topic {topic.decode('utf-8', 'replace')!r}"]
            raise OptionError(": ".join(filter(None, [", ".join(row + of_topic), fault.what]))) from None
        return encoded

    def _encode(self, columns: dict[str, pa.Array], router: QueueRouter, born_ms: int) -> EncodedRecords:
        topics = Topics.of(columns["topic"])
        bodies = OutgoingBodies(columns["body"], self._body_rules)
        properties = OutgoingProperties(
            tags=Texts.of(columns["tags"]) if "tags" in columns else None,
            keys=keys_of(columns["keys"]) if "keys" in columns else None,
            sharding_keys=Texts.of(columns["shardingKey"]) if "shardingKey" in columns else None,
            properties=columns.get("properties"),
        )
        count = len(bodies.stored)
        queue_ids = Given.of(columns["queueId"]) if "queueId" in columns else None
        routes = router.route(topics, count, queue_ids, properties.sharding_hashes())
        of_records, texts, text_sizes, real_topics = topics, properties.pieces(), properties.sizes, dict[str, int]()
        asked = self._asked_delays(columns, born_ms)
        if asked is not None:
            # First the queue that a message is for, then where it waits: it must come out where it would have gone.
            diverted = divert(asked, topics, routes, len(self.delay_rules.levels))
            of_records, routes, real_topics = diverted.topics, diverted.routes, diverted.real_topics
            texts, text_sizes = [*texts, *diverted.texts], text_sizes + diverted.sizes
        parts = RecordParts(
            head=self._head_at(born_ms),
            topics=of_records,
            bodies=bodies,
            ids=self._ids.take(count, born_ms),
            properties=texts,
            properties_sizes=text_sizes,
            queue_ids=routes.queue_ids,
            flags=Given.of(columns["flag"]).values if "flag" in columns else None,
        )
        sizes = parts.sizes
        self._check_sizes(sizes, parts.text_sizes)
        key_rows, key_hashes = _key_entries(of_records, parts.ids, properties.keys)
        return EncodedRecords(
            data=join_records(parts, sizes),
            sizes=sizes,
            queues=routes.queues,
            queue_numbers=routes.queue_numbers,
            tags_codes=_tags_codes(properties.tags, count),
            key_rows=key_rows,
            key_hashes=key_hashes,
            digest=_digest(topics, bodies, properties, queue_ids, parts.flags, asked),
            real_topics=real_topics,
        )

    def _asked_delays(self, columns: dict[str, pa.Array], now_ms: int) -> AskedDelays | None:
        levels, times = columns.get("delayLevel"), columns.get("deliverTimestamp")
        if levels is None and times is None:
            return None
        return AskedDelays.of(levels, times, self.delay_rules, now_ms)

    def _head_at(self, born_ms: int) -> NDArray[np.void]:
        head = self._head.copy()
        head["born_timestamp"] = born_ms
        return head

    def _check_sizes(self, sizes: NDArray[np.int64], text_sizes: NDArray[np.int64]) -> None:
        for row in np.flatnonzero(text_sizes > MAX_PROPERTIES_BYTES)[:1].tolist():
            raise RowFault(
                row,
                f"its properties, tags and keys take {text_sizes[row]} bytes, a record has room for "
                f"{MAX_PROPERTIES_BYTES}: put some of them into the body",
            )
        for row in np.flatnonzero(sizes > self._max_record_bytes)[:1].tolist():
            raise RowFault(
                row,
                f"its record takes {sizes[row]} bytes, a segment of the store has room for {self._max_record_bytes}: "
                "split the message, or make a store with larger segments",
            )


def _tags_codes(tags: Texts | None, count: int) -> NDArray[np.int64]:
    """Return the tags codes of the units (MessageExtBrokerInner#tagsString2tagsCode); no tags hash to 0."""
    return np.zeros(count, np.int64) if tags is None else tags.hashes.java().view(np.int32).astype(np.int64)


def _key_entries(topics: Topics, ids: UniqueIdRun, keys: Texts | None) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return row and hash of what the key index gets of each record, in the order in which a broker puts them.

    Source: IndexService#buildIndex, IndexFile#indexKeyHashMethod.
    """
    of_topic = topics.per_row([string_hash(f"{name}#") & 0xFFFFFFFF for name in topics.names], np.uint32)
    hashes = ids.hashes() + of_topic * powers_of_31(ids.width)
    rows = np.arange(len(hashes))
    if keys is not None and len(keys.data):
        key_rows, words = keys.words()
        key_hashes = words.java(before=of_topic if topics.numbers is None else of_topic[key_rows])
        if np.array_equal(key_rows, rows):  # one key in every row, as it mostly is
            hashes = np.stack([hashes, key_hashes], axis=1).ravel()
            rows = np.repeat(rows, 2)
        else:
            # UNIQ_KEY first: a stable order by row of all of the one kind, then all of the other.
            rows = np.concatenate([rows, key_rows])
            order = np.argsort(rows, kind="stable")
            rows, hashes = rows[order], np.concatenate([hashes, key_hashes])[order]
    # |-2^31| stays negative in numpy as in Java; the index takes 0 for it.
    return rows, np.maximum(np.abs(hashes.view(np.int32)), 0)


def _digest(
    topics: Topics,
    bodies: OutgoingBodies,
    properties: OutgoingProperties,
    queue_ids: Given | None,
    flags: NDArray[np.int64] | None,
    asked: AskedDelays | None,
) -> int:
    """Return the sum of a number for each row that depends on all that its user gave, modulo 2^64."""
    rows = scatter(bodies.digests())
    rows += topics.per_row([int(name_digest(name)) for name in topics.names], np.uint64)
    rows += properties.digests()
    if flags is not None or queue_ids is not None:
        extra = np.zeros(len(rows), np.uint64)
        if flags is not None:
            extra += flags.astype(np.uint32)
        if queue_ids is not None:
            extra += np.where(queue_ids.mask, queue_ids.values + 1, 0).view(np.uint64) << np.uint64(32)
        extra *= _OF_FLAG  # 0, which flag and queue id are where there is no such column, stays 0
        rows += scatter(extra)
    if asked is not None:
        rows += asked.digests
    return int(scatter(rows).sum())


def _nothing() -> EncodedRecords:
    none = np.zeros(0, np.int64)
    return EncodedRecords(
        np.zeros(0, np.uint8), none, (), none.astype(np.int32), none, none, none.astype(np.int32), digest=0
    )
