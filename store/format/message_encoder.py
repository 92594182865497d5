"""Encoder of message batches: columns of messages -> commit-log records.

Queue offset, physical offset and store time are 0 in the encoded records. The appender sets them later, while it holds
the store's lock. All expensive values (properties, CRCs, hashes, ids) are computed here, before the lock is acquired.

    header | body | length of the topic, topic | length of the properties, UNIQ_KEY | the other properties

The parts of a record are built as columns. If a part has the same size in all rows, it is written as a table of bytes,
one field of all rows at a time. Adjacent bytes that are the same in all rows are added to such a table. Then one call
to Arrow joins the tables and the other columns row by row.

The tests compare the result with `record.encode_record`, `properties.encode` and `java`, which encode one message.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.body_codec import BodyRules, EncodedBodies
from rmq_spark.store.format.byte_ranges import Bytes
from rmq_spark.store.format.delay_routing import AskedDelays, DelayRules, route_delays
from rmq_spark.store.format.java import Host, encode_host, string_hash
from rmq_spark.store.format.message_columns import Given, RowFault, Texts, Topics, join_rows, keys_of
from rmq_spark.store.format.message_ids import NUMBER_CHARS, UniqueIdRun, UniqueIds, powers_of_31, scatter
from rmq_spark.store.format.properties import MAX_PROPERTIES_BYTES, UNIQ_KEY
from rmq_spark.store.format.property_encoder import EncodedProperties, name_digest
from rmq_spark.store.format.queue_router import QueueRouter
from rmq_spark.store.format.record import BLANK_BYTES, BODY_CRC_MASK, MAGIC_V1, MAGIC_V2, RECORD_HEAD
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import MAX_TOPIC_CHARS

_UNIQUE_BEFORE, _UNIQUE_AFTER = f"{UNIQ_KEY}\x01".encode(), b"\x02"
_LENGTH = np.dtype(">i2")  # the length field before the properties string


@dataclass(frozen=True, slots=True)
class RecordParts:
    """The parts of the records of a batch. Each column has one element per record. There is at least one record."""

    head: NDArray[np.void]  # one element of dtype RECORD_HEAD, with the fields that are the same in all records
    topics: Topics
    bodies: EncodedBodies
    ids: UniqueIdRun
    properties: list[bytes | pa.BinaryArray]  # the pieces of the properties string after UNIQ_KEY
    properties_sizes: NDArray[np.int64] | int  # the size of these pieces together (bytes)
    queue_ids: NDArray[np.int64]
    flags: NDArray[np.int64] | None

    def __len__(self) -> int:
        return self.ids.count

    @property
    def text_sizes(self) -> NDArray[np.int64]:
        """The size in bytes of each record's properties string, including UNIQ_KEY."""
        unique = len(_UNIQUE_BEFORE) + self.ids.width + len(_UNIQUE_AFTER)
        return np.broadcast_to(self.properties_sizes + np.int64(unique), len(self))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The size in bytes of each record (TOTALSIZE)."""
        fixed = RECORD_HEAD.itemsize + _LENGTH.itemsize
        sizes: NDArray[np.int64] = self.bodies.stored.sizes + self.text_sizes
        sizes += self.topics.per_row([len(topic_field(name)) + fixed for name in self.topics.names], np.int64)
        return sizes


def join_records(parts: RecordParts, sizes: NDArray[np.int64]) -> Bytes:
    """Return the bytes of all records, one after the other. Record `i` takes `sizes[i]` bytes.

    The caller must have checked that no part is too long for its length field. The sum of `sizes` must be less than 2
    GiB, because Arrow's offsets have 32 bits.
    """
    total = int(sizes.sum())
    assert total < 1 << 31, f"{total} bytes of records: encode fewer rows at once"
    pieces: list[bytes | pa.BinaryArray] = [_headers(parts, sizes), parts.bodies.stored.array()]
    fields = [topic_field(name) for name in parts.topics.names]
    before = b""  # the constant bytes before the length of the properties
    if parts.topics.numbers is None:
        before = fields[0]
    else:
        pieces.append(pa.array(fields, pa.binary()).take(pa.array(parts.topics.numbers)))
    others = list(parts.properties)
    after = others.pop(0) if others and isinstance(others[0], bytes) else b""
    pieces.append(_unique_keys(parts, before, after))
    joined = join_rows(*pieces, *others)
    _, offsets, data = joined.buffers()
    end = np.frombuffer(offsets, np.int32)[len(parts)]
    assert end == total, (end, total)
    return np.frombuffer(data, np.uint8, total)


def magic_for(topic: str) -> int:
    """Return the magic of a record with this topic. A long topic needs a record of version 2 (MessageVersion, 5.1)."""
    return MAGIC_V2 if len(topic.encode()) > MAX_TOPIC_CHARS else MAGIC_V1


def topic_field(topic: str) -> bytes:
    """Return the bytes of a topic in a record: its length (1 or 2 bytes), and then the topic."""
    name = topic.encode()
    return len(name).to_bytes(1 if magic_for(topic) == MAGIC_V1 else 2, "big") + name


def _headers(parts: RecordParts, sizes: NDArray[np.int64]) -> pa.BinaryArray:
    """Return the header of each record."""
    data = bytearray(parts.head.tobytes()) * len(parts)
    headers = np.frombuffer(data, RECORD_HEAD)
    headers["total_size"] = sizes
    magics = [magic_for(name) for name in parts.topics.names]
    if MAGIC_V2 in magics:
        headers["magic"] = parts.topics.per_row(magics, np.uint32)
    headers["body_crc"] = parts.bodies.crcs & np.uint32(BODY_CRC_MASK)
    headers["queue_id"] = parts.queue_ids
    headers["body_size"] = parts.bodies.stored.sizes
    if parts.flags is not None:
        headers["flag"] = parts.flags
    if parts.bodies.sys_flags is not None:
        headers["sys_flag"] = parts.bodies.sys_flags
    return _equal_widths(data, RECORD_HEAD.itemsize)


def _unique_keys(parts: RecordParts, before: bytes, after: bytes) -> pa.BinaryArray:
    """Return for each row these bytes, joined: `before`, the length of the properties, UNIQ_KEY, and `after`."""
    length_at = len(before)
    fixed = before + bytes(_LENGTH.itemsize) + _UNIQUE_BEFORE + parts.ids.prefix.encode()
    number_at = len(fixed)
    template = fixed + bytes(NUMBER_CHARS) + _UNIQUE_AFTER + after
    data = bytearray(template) * len(parts)
    rows = np.frombuffer(data, np.uint8).reshape(len(parts), len(template))
    rows[:, length_at : length_at + _LENGTH.itemsize].view(_LENGTH)[:, 0] = parts.text_sizes
    parts.ids.write_numbers(rows[:, number_at : number_at + NUMBER_CHARS])
    return _equal_widths(data, len(template))


def _equal_widths(data: bytearray, width: int) -> pa.BinaryArray:
    offsets = np.arange(0, len(data) + 1, width, dtype=np.int32)
    return pa.BinaryArray.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


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
_DEFAULT_SEGMENT_BYTES = 1 << 30
_DEFAULT_RULES = BodyRules()
_DEFAULT_DELAYS = DelayRules()
# A factor for flag and queue id in a row's digest. Without it they would be mixed up with the CRC and size of the body.
# Its digits are those of the square root of 2.
_FLAG_FACTOR = np.uint64(0x6A09E667F3BCC909)


@dataclass(frozen=True, slots=True)
class EncodedRecords:
    """Complete records one after the other, with the values from which their entries are built.

    Arrays are in the order of the records. Record `i` takes `sizes[i]` bytes of `data` and belongs to
    `queues[queue_numbers[i]]`. Its queue offset, physical offset and store time are 0. A delayed record belongs to the
    internal queue where it stays until it is due, and the appender computes its tags code.

    Two batches with the same content have the same `digest`. The content is: topics, bodies, tags, keys, properties,
    flags, requested queue ids and delays. The order of rows, ids, hosts, times and the chosen queues do not change the
    digest. If a batch is split into parts, the sum of the parts' digests modulo 2^64 is the digest of the batch.
    """

    data: NDArray[np.uint8]
    sizes: NDArray[np.int64]  # bytes of each record, TOTALSIZE
    queues: tuple[QueueKey, ...]  # each queue once
    queue_numbers: NDArray[np.int32]  # the index of the record's queue in `queues`
    tags_codes: NDArray[np.int64]  # Java hash of the tags, 0 if the message has no tags
    key_rows: NDArray[np.int64]  # for each index entry the index of its record, ascending
    key_hashes: NDArray[np.int32]  # java.index_key_hash of each index entry; a record's UNIQ_KEY is before its KEYS
    digest: int  # 0 to 2^64-1
    # Target topic of delayed messages -> the largest queue id that they use, plus 1.
    real_topics: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sizes)

    @classmethod
    def empty(cls) -> "EncodedRecords":
        """Return a batch without records."""
        none, none_32 = np.zeros(0, np.int64), np.zeros(0, np.int32)
        return cls(np.zeros(0, np.uint8), none, (), none_32, none, none, none_32, digest=0)


class MessageEncoder:
    """Encodes the message batches of one task. Not thread-safe.

    `segment_bytes` is the size of the store's segments. A record and the filler after it must fit into one segment.
    `delay_rules` may be replaced between two batches.
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
            assert len(field) == head[name].dtype.itemsize, f"{name} is {host}; expected an IPv4 address"
            head[name] = np.void(field)
        self._head = head

    def encode(
        self, messages: pa.RecordBatch, router: QueueRouter, born_ms: int, first_row: int | None = 0
    ) -> EncodedRecords:
        """Return the records of a batch of messages, whose columns are some of MESSAGE_COLUMNS.

        `born_ms` is the current time, in ms since the epoch. Raises OptionError if a row cannot become a message; then
        no row is encoded. The error contains the topic and number of this row. Numbers start with `first_row`; if
        `first_row` is None, the error contains no number.
        """
        unknown = set(messages.schema.names) - set(MESSAGE_COLUMNS)
        assert not unknown, unknown
        columns = dict(zip(messages.schema.names, messages.columns, strict=True))
        if not messages.num_rows:
            return EncodedRecords.empty()
        try:
            return self._encode(columns, router, born_ms)
        except RowFault as fault:
            topic = columns["topic"][fault.row].cast(pa.binary()).as_py()
            row = [] if first_row is None else [f"row {first_row + fault.row}"]
            of_topic = [] if topic is None else [f"topic {topic.decode('utf-8', 'replace')!r}"]
            raise OptionError(": ".join(filter(None, [", ".join(row + of_topic), fault.what]))) from None

    def _encode(self, columns: dict[str, pa.Array], router: QueueRouter, born_ms: int) -> EncodedRecords:
        topics = Topics.of(columns["topic"])
        bodies = EncodedBodies(columns["body"], self._body_rules)
        properties = EncodedProperties(
            tags=Texts.of(columns["tags"]) if "tags" in columns else None,
            keys=keys_of(columns["keys"]) if "keys" in columns else None,
            sharding_keys=Texts.of(columns["shardingKey"]) if "shardingKey" in columns else None,
            properties=columns.get("properties"),
        )
        count = len(bodies.stored)
        queue_ids = Given.of(columns["queueId"]) if "queueId" in columns else None
        routes = router.route(topics, count, queue_ids, properties.sharding_hashes())
        record_topics, texts, text_sizes, real_topics = topics, properties.pieces(), properties.sizes, dict[str, int]()
        delays = AskedDelays.of(columns.get("delayLevel"), columns.get("deliverTimestamp"), self.delay_rules, born_ms)
        if delays is not None:
            # This follows the routing, because a delayed message will be delivered to the queue that was chosen now.
            delayed = route_delays(delays, topics, routes, len(self.delay_rules.levels))
            record_topics, routes, real_topics = delayed.topics, delayed.routes, delayed.real_topics
            texts, text_sizes = [*texts, *delayed.texts], text_sizes + delayed.sizes
        head = self._head.copy()
        head["born_timestamp"] = born_ms
        parts = RecordParts(
            head=head,
            topics=record_topics,
            bodies=bodies,
            ids=self._ids.take(count, born_ms),
            properties=texts,
            properties_sizes=text_sizes,
            queue_ids=routes.queue_ids,
            flags=Given.of(columns["flag"]).values if "flag" in columns else None,
        )
        sizes = parts.sizes
        self._check_sizes(sizes, parts.text_sizes)
        key_rows, key_hashes = _key_entries(record_topics, parts.ids, properties.keys)

        return EncodedRecords(
            data=join_records(parts, sizes),
            sizes=sizes,
            queues=routes.queues,
            queue_numbers=routes.queue_numbers,
            tags_codes=np.zeros(count, np.int64) if properties.tags is None else properties.tags.java_hashes(),
            key_rows=key_rows,
            key_hashes=key_hashes,
            digest=_digest(topics, bodies, properties, queue_ids, parts.flags, delays),
            real_topics=real_topics,
        )

    def _check_sizes(self, sizes: NDArray[np.int64], text_sizes: NDArray[np.int64]) -> None:
        for row in np.flatnonzero(text_sizes > MAX_PROPERTIES_BYTES)[:1].tolist():
            raise RowFault(
                row,
                f"properties, tags and keys take {text_sizes[row]} bytes; expected at most "
                f"{MAX_PROPERTIES_BYTES}. Move some of them into the body",
            )
        for row in np.flatnonzero(sizes > self._max_record_bytes)[:1].tolist():
            raise RowFault(
                row,
                f"the record takes {sizes[row]} bytes; expected at most {self._max_record_bytes} in a segment of this "
                "store. Split the message, or create a store with larger segments",
            )


def _key_entries(topics: Topics, ids: UniqueIdRun, keys: Texts | None) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the index of the record and the key hash of each index entry, in the order in which a broker adds them.

    Source: IndexService#buildIndex, IndexFile#indexKeyHashMethod.
    """
    of_topic = topics.per_row([string_hash(f"{name}#") & 0xFFFFFFFF for name in topics.names], np.uint32)
    hashes = ids.hashes() + of_topic * powers_of_31(ids.width)
    rows = np.arange(len(hashes))
    if keys is not None and len(keys.data):
        key_rows, words = keys.words()
        key_hashes = words.java(before=of_topic if topics.numbers is None else of_topic[key_rows])
        if np.array_equal(key_rows, rows):  # the usual case: one key in each row
            hashes = np.stack([hashes, key_hashes], axis=1).ravel()
            rows = np.repeat(rows, 2)
        else:
            # A stable sort by row puts each row's UNIQ_KEY before its KEYS.
            rows = np.concatenate([rows, key_rows])
            order = np.argsort(rows, kind="stable")
            rows, hashes = rows[order], np.concatenate([hashes, key_hashes])[order]
    # The absolute value of -2^31 is negative in numpy, as in Java. The index uses 0 for it.
    return rows, np.maximum(np.abs(hashes.view(np.int32)), 0)


def _digest(
    topics: Topics,
    bodies: EncodedBodies,
    properties: EncodedProperties,
    queue_ids: Given | None,
    flags: NDArray[np.int64] | None,
    delays: AskedDelays | None,
) -> int:
    """Return the digest of a batch: the sum, modulo 2^64, of one number per row.

    The number of a row depends on all values that the user gave for this row.
    """
    rows = scatter(bodies.digests())
    rows += topics.per_row([int(name_digest(name)) for name in topics.names], np.uint64)
    rows += properties.digests()
    if flags is not None or queue_ids is not None:
        extra = np.zeros(len(rows), np.uint64)
        if flags is not None:
            extra += flags.astype(np.uint32)
        if queue_ids is not None:
            extra += np.where(queue_ids.mask, queue_ids.values + 1, 0).view(np.uint64) << np.uint64(32)
        extra *= _FLAG_FACTOR  # 0 stays 0, so a column of zeros has the same digest as no column
        rows += scatter(extra)
    if delays is not None:
        rows += delays.digests
    return int(scatter(rows).sum())
