"""Messages as a client sends them: columns of messages -> the items of batch requests.

    i32 size | i32 0 | i32 0 | i32 flag | i32 length of the body | body | i16 length of the properties | properties

A batch request is a run of items of one queue. A message that is not sent in a batch is sent as the parts of its item:
flag, body and properties. Messages with a delay, compressed messages and messages to retry topics are *solo*: a broker
ignores the delay of an item, and does not accept the others in a batch.

Source: MessageDecoder#encodeMessage, #encodeMessages, SendMessageProcessor, MessageBatch#generateFromList (4.9, 5.3).
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.body_codec import BodyRules, EncodedBodies
from rmq_spark.store.format.broker_router import BrokerRouter, RowQueues
from rmq_spark.store.format.byte_ranges import Bytes, of_one_size
from rmq_spark.store.format.consume_queue_entry import ITEM_HEAD, ITEM_TAIL
from rmq_spark.store.format.content_ids import ID_CHARS
from rmq_spark.store.format.delay_routing import AskedDelays, DelayRules
from rmq_spark.store.format.message_columns import Given, RowFault, Texts, Topics, join_rows, keys_of
from rmq_spark.store.format.message_ids import Digests, scatter
from rmq_spark.store.format.properties import UNIQ_KEY
from rmq_spark.store.format.property_encoder import EncodedProperties, name_digest
from rmq_spark.store.names import RETRY_TOPIC_PREFIX

_HEAD = struct.Struct(">iiiii")
assert _HEAD.size == ITEM_HEAD.itemsize
ITEM_BYTES = ITEM_HEAD.itemsize + ITEM_TAIL.itemsize  # an item without body and properties
# The broker adds properties of its own, and does not check the sum of an item's (5.3 adds up to 170 bytes).
MAX_ITEM_PROPERTIES_BYTES = 32_500
_UNIQUE_BEFORE, _UNIQUE_AFTER = f"{UNIQ_KEY}\x01".encode(), b"\x02"
DELAY, TIMER_DELIVER_MS = "DELAY", "TIMER_DELIVER_MS"
BROKER_NAME = "brokerName"
SENT_COLUMNS = (
    "topic",
    "body",
    "tags",
    "keys",
    "properties",
    "shardingKey",
    "queueId",
    BROKER_NAME,
    "flag",
    "delayLevel",
    "deliverTimestamp",
)
NOT_SOLO = -1
# Factors that keep flag, queue id and broker apart from other values in a digest: digits of the square roots of 6, 7.
_FLAG_FACTOR, _BROKER_TERM = np.uint64(0xB97A6A5BE61C3F4B), np.uint64(0xA54FF53A5F1D36F1)

# What the columns are called as arguments of `ClusterProducer.send`.
_ARGUMENTS = {
    "Add the column brokerName": "Give broker_name",
    "brokerName": "broker_name",
    "queueId": "queue_id",
    "shardingKey": "sharding_key",
    "delayLevel": "delay_level",
    "deliverTimestamp": "deliver_at_ms",
}

IdMaker = Callable[[int, Callable[[], Digests]], Bytes]
"""Makes the ids of this many rows, as bytes with one row per id; the function returns the digests of their contents."""


@dataclass(frozen=True, slots=True)
class EncodedItems:
    """Items one after the other. Arrays are in the order of the messages; item `i` takes `sizes[i]` bytes of `data`.

    `ids` has one row of ASCII per message. `solo` is None if every message may be in a batch; else it is NOT_SOLO for
    those that may, and the sysFlag of the request for the others.
    """

    data: Bytes
    sizes: NDArray[np.int64]
    queues: RowQueues
    ids: Bytes
    solo: NDArray[np.int32] | None


class ItemEncoder:
    """Encodes batches of messages. Not thread-safe.

    `timer_refusal` gets the topics of messages with a delivery time in the future. It returns the reason why a broker
    of them would deliver such a message at once, or None.
    """

    def __init__(self, rules: BodyRules, timer_refusal: Callable[[Sequence[str]], str | None]) -> None:
        self._rules, self._timer_refusal = rules, timer_refusal

    def encode(
        self, messages: pa.RecordBatch, router: BrokerRouter, make_ids: IdMaker, born_ms: int, first_row: int | None = 0
    ) -> EncodedItems:
        """Return the items of messages, whose columns are some of SENT_COLUMNS. There is at least one message.

        `born_ms` is the current time, in ms since the epoch. Raises OptionError if a row cannot become a message; then
        no id is made. The error has the row's topic and number, which starts with `first_row`. If that is None, it has
        no number, and the names of the arguments of `ClusterProducer.send`.
        """
        columns = dict(zip(messages.schema.names, messages.columns, strict=True))
        assert set(columns) <= set(SENT_COLUMNS), columns.keys()
        try:
            return self._encode(columns, router, make_ids, born_ms)
        except RowFault as fault:
            raise describe_fault(messages, fault, first_row) from None

    def _encode(
        self, columns: dict[str, pa.Array], router: BrokerRouter, make_ids: IdMaker, born_ms: int
    ) -> EncodedItems:
        topics = Topics.of(columns["topic"])
        bodies = EncodedBodies(columns["body"], self._rules)
        count = len(bodies.stored)
        properties = EncodedProperties(
            tags=Texts.of(columns["tags"]) if "tags" in columns else None,
            keys=keys_of(columns["keys"]) if "keys" in columns else None,
            sharding_keys=Texts.of(columns["shardingKey"]) if "shardingKey" in columns else None,
            properties=columns.get("properties"),
        )
        delays = _Delays.of(columns, topics, self._timer_refusal, born_ms)
        flags = Given.of(columns["flag"]).values if "flag" in columns else None
        queue_ids = Given.of(columns["queueId"]) if "queueId" in columns else None
        brokers = columns.get(BROKER_NAME)
        queues = router.route(topics, count, queue_ids, brokers, properties.sharding_hashes())
        solo = _solo(topics, bodies, delays, count)
        texts, text_sizes = properties.pieces(), properties.sizes
        if delays is not None:
            texts, text_sizes = [*texts, *delays.texts], text_sizes + delays.sizes

        def digests() -> Digests:
            return _digests(columns, topics, bodies, properties, delays, flags, queue_ids)

        # Nothing below may refuse a row but its size, which does not depend on the id.
        unique_bytes = len(_UNIQUE_BEFORE) + ID_CHARS + len(_UNIQUE_AFTER)
        text_sizes = np.broadcast_to(text_sizes + np.int64(unique_bytes), count)
        for row in np.flatnonzero(text_sizes > MAX_ITEM_PROPERTIES_BYTES)[:1].tolist():
            raise RowFault(
                row,
                f"properties, tags and keys take {text_sizes[row]} bytes; expected at most "
                f"{MAX_ITEM_PROPERTIES_BYTES}, because the broker adds some. Move some of them into the body",
            )
        if solo is not None:
            for row in np.flatnonzero((solo != NOT_SOLO) & (bodies.stored.sizes == 0))[:1].tolist():
                raise RowFault(
                    row,
                    "its body is empty, which a broker of 5.x refuses for a message with a delay or to a retry topic; "
                    "expected at least one byte. Give a body",
                )
        ids = make_ids(count, digests)
        sizes = bodies.stored.sizes + text_sizes + ITEM_BYTES
        data = _join_items(bodies, flags, text_sizes, ids, texts, sizes)
        return EncodedItems(data, sizes, queues, ids, solo)


@dataclass(frozen=True, slots=True)
class _Delays:
    """The delays of a batch: which rows have one, and the properties that ask the broker for it."""

    are_delayed: NDArray[np.bool_]
    texts: list[pa.BinaryArray]
    sizes: NDArray[np.int64]
    digests: Digests

    @classmethod
    def of(
        cls,
        columns: dict[str, pa.Array],
        topics: Topics,
        timer_refusal: Callable[[Sequence[str]], str | None],
        now_ms: int,
    ) -> "_Delays | None":
        """Return the delays of messages, or None if none has one. The broker limits the levels and the times."""
        level_column = columns.get("delayLevel")
        rules = DelayRules(timer_max_delay_ms=1 << 62)
        asked = AskedDelays.of(level_column, columns.get("deliverTimestamp"), rules, now_ms)
        if asked is None:
            return None
        if asked.is_ahead.any():
            row = int(np.argmax(asked.is_ahead))
            refusal = timer_refusal(topics.names)
            if refusal is not None:
                raise RowFault(row, refusal)
        levels = np.zeros(len(asked.levels), np.int64)
        if level_column is not None:
            levels = np.maximum(Given.of(level_column).values, 0)
        texts = []
        for name, numbers, mask in ((DELAY, levels, levels > 0), (TIMER_DELIVER_MS, asked.times_ms, asked.is_timed)):
            if mask.any():
                values = pa.array(np.where(mask, numbers, 0)).cast(pa.string()).cast(pa.binary())
                joined = join_rows(f"{name}\x01".encode(), values, b"\x02")
                texts.append(pc.if_else(pa.array(mask), joined, pa.scalar(b"", pa.binary())))
        sizes = sum((Texts.of(text).sizes for text in texts), np.zeros(len(levels), np.int64))
        return cls((levels > 0) | asked.is_timed, texts, sizes, asked.digests)


def describe_fault(messages: pa.RecordBatch, fault: RowFault, first_row: int | None) -> OptionError:
    """Return the error for a row that is refused, with its topic and number as `ItemEncoder.encode` has them."""
    topic = messages.column("topic")[fault.row].cast(pa.binary()).as_py()
    row = [] if first_row is None else [f"row {first_row + fault.row}"]
    what = _as_arguments(fault.what) if first_row is None else fault.what
    of_topic = [] if topic is None else [f"topic {topic.decode('utf-8', 'replace')!r}"]
    return OptionError(": ".join(filter(None, [", ".join(row + of_topic), what])))


def _as_arguments(text: str) -> str:
    for name, argument in _ARGUMENTS.items():
        text = text.replace(name, argument)
    return text


def _solo(topics: Topics, bodies: EncodedBodies, delays: _Delays | None, count: int) -> NDArray[np.int32] | None:
    are_retries = [name.startswith(RETRY_TOPIC_PREFIX) for name in topics.names]
    if delays is None and bodies.sys_flags is None and not any(are_retries):
        return None
    flags = np.zeros(count, np.int32) if bodies.sys_flags is None else bodies.sys_flags
    are_solo = (flags != 0) | np.broadcast_to(topics.per_row(are_retries, np.bool_), count)
    if delays is not None:
        are_solo = are_solo | delays.are_delayed
    return np.where(are_solo, flags, np.int32(NOT_SOLO))


def _join_items(
    bodies: EncodedBodies,
    flags: NDArray[np.int64] | None,
    text_sizes: NDArray[np.int64],
    ids: Bytes,
    texts: list[bytes | pa.BinaryArray],
    sizes: NDArray[np.int64],
) -> Bytes:
    """Return the bytes of all items. Their sum must be less than 2 GiB, because Arrow's offsets have 32 bits."""
    count, total = len(ids), int(sizes.sum())
    assert total < 1 << 31, f"{total} bytes of items: encode fewer rows at once"
    heads = np.zeros(count, ITEM_HEAD)
    heads["item_size"] = sizes
    heads["body_size"] = bodies.stored.sizes
    if flags is not None:
        heads["flag"] = flags
    others = list(texts)
    after = _UNIQUE_AFTER + (others.pop(0) if others and isinstance(others[0], bytes) else b"")
    length_end = ITEM_TAIL.itemsize
    ids_begin = length_end + len(_UNIQUE_BEFORE)
    ids_end = ids_begin + ids.shape[1]
    middles = np.empty((count, ids_end + len(after)), np.uint8)
    middles[:, :length_end].view(ITEM_TAIL)[:, 0]["properties_size"] = text_sizes
    middles[:, length_end:ids_begin] = np.frombuffer(_UNIQUE_BEFORE, np.uint8)
    middles[:, ids_begin:ids_end] = ids
    middles[:, ids_end:] = np.frombuffer(after, np.uint8)
    joined = join_rows(
        of_one_size(heads.view(f"V{ITEM_HEAD.itemsize}")),
        bodies.stored.array(),
        of_one_size(middles.view(f"V{middles.shape[1]}")[:, 0]),
        *others,
    )
    _, offsets, data = joined.buffers()
    end = np.frombuffer(offsets, np.int32)[count]
    assert end == total, (end, total)
    return np.frombuffer(data, np.uint8, total)


def _digests(
    columns: dict[str, pa.Array],
    topics: Topics,
    bodies: EncodedBodies,
    properties: EncodedProperties,
    delays: _Delays | None,
    flags: NDArray[np.int64] | None,
    queue_ids: Given | None,
) -> Digests:
    """Return a 64-bit digest of the content of each row: all values that the user gave for it."""
    rows = scatter(bodies.given.hashes.digests())
    rows += topics.per_row([int(name_digest(name)) for name in topics.names], np.uint64)
    rows += properties.digests()
    if flags is not None:
        rows += scatter(flags.astype(np.uint32).astype(np.uint64) * _FLAG_FACTOR)
    if queue_ids is not None:
        numbers = np.where(queue_ids.mask, queue_ids.values + 1, 0).view(np.uint64) << np.uint64(32)
        rows += scatter(numbers * _FLAG_FACTOR)
    if BROKER_NAME in columns:
        texts = Texts.of(columns[BROKER_NAME].cast(pa.string()))
        rows += scatter(texts.hashes.digests() + _BROKER_TERM) * (texts.sizes > 0)
    if delays is not None:
        rows += delays.digests
    return scatter(rows)


def encode_item(flag: int, body: bytes, properties: bytes) -> bytes:
    """Return the item of one message. The caller has checked the sizes."""
    return join_item(flag, (body,), properties)


def join_item(flag: int, body: Sequence[bytes | memoryview], properties: bytes) -> bytes:
    """Return the item of one message, whose body has several parts. The caller has checked the sizes."""
    body_bytes = sum(map(len, body))
    head = _HEAD.pack(ITEM_BYTES + body_bytes + len(properties), 0, 0, flag, body_bytes)
    return b"".join((head, *body, len(properties).to_bytes(ITEM_TAIL.itemsize, "big"), properties))


def find_first_id(items: bytes | memoryview) -> str:
    """Return the id of the first of some items, which `ItemEncoder` has made: it is their first property."""
    _, _, _, _, body_bytes = _HEAD.unpack_from(items)
    begin = _HEAD.size + body_bytes + ITEM_TAIL.itemsize + len(_UNIQUE_BEFORE)
    return bytes(items[begin : begin + ID_CHARS]).decode()


def split_item(item: bytes | memoryview) -> tuple[int, bytes, str]:
    """Return flag, body and properties of a single item."""
    data = bytes(item)
    _, _, _, flag, size = _HEAD.unpack_from(data)
    end = _HEAD.size + size
    return flag, data[_HEAD.size : end], data[end + ITEM_TAIL.itemsize :].decode()
