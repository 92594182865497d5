"""Encoder of one message: the values of `Producer.send` -> one commit-log record, without Arrow.

A batch of one row costs `message_encoder` as many calls into Arrow and numpy as a batch of thousands. This encoder
returns the same bytes for usual messages: values of the exact types, no delay, a body that is not compressed. For all
other messages, and for each invalid one, it returns None and changes nothing. Then the caller uses `message_encoder`,
which also raises the errors. So both encoders accept the same messages, with the same errors. The tests compare them.

    header | body | length of the topic, topic | length of the properties, UNIQ_KEY | the other properties
"""

import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.body_codec import BodyRules
from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.message_encoder import EncodedRecords, magic_for, topic_field
from rmq_spark.store.format.message_ids import UniqueIds
from rmq_spark.store.format.properties import KEYS, MAX_PROPERTIES_BYTES, TAGS, UNIQ_KEY
from rmq_spark.store.format.property_encoder import SHARDING_KEY, is_plain_name
from rmq_spark.store.format.queue_router import QueueRouter
from rmq_spark.store.format.record import BLANK_BYTES, BODY_CRC_MASK, RECORD_HEAD
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import check_sent_topic

_HEAD = struct.Struct(">iIIiiqqiq8sq8siqi")  # the fields of RECORD_HEAD
assert _HEAD.size == RECORD_HEAD.itemsize
_OFFSETS = struct.Struct(">qq")  # queue offset and physical offset
_OFFSETS_AT = RECORD_HEAD.fields["queue_offset"][1]  # type: ignore[index]
_TIME = struct.Struct(">q")
_TIME_AT = RECORD_HEAD.fields["store_timestamp"][1]  # type: ignore[index]
_LENGTH_BYTES = 2  # the length field before the properties string
_UNIQUE_BEFORE = f"{UNIQ_KEY}\x01"
_ALL_32_BITS = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class SingleMessage:
    """The values of one message, as `Producer.send` takes them. `keys` is a text or a list of keys."""

    topic: object
    body: object
    tags: object = None
    keys: object = None
    properties: object = None
    sharding_key: object = None
    queue_id: object = None
    flag: object = 0


@dataclass(frozen=True, slots=True)
class PlainMessage:
    """The checked values of a usual message. `texts` are the properties that have an argument of their own.

    `pairs` is the properties string without UNIQ_KEY. `key_hash` is the Java hash of the sharding key, or None.
    """

    topic: str
    body: bytes
    flag: int
    texts: dict[str, str | None]
    pairs: bytes
    key_hash: int | None

    @classmethod
    def of(cls, message: SingleMessage, rules: BodyRules) -> "PlainMessage | None":
        """Return the values of a message. Return None if it is unusual, invalid, or may have to be compressed."""
        topic, body, flag = message.topic, message.body, message.flag
        if type(body) is str:
            body = _utf8(body)
        if type(topic) is not str or type(body) is not bytes or not _is_int32(flag):
            return None
        if len(body) > rules.max_bytes or (rules.compression is not None and len(body) >= rules.compress_over):
            return None
        values = _values(message) if _topic(topic) is not None else None
        if values is None:
            return None
        sharding_key, texts, rest = values
        pairs = "".join(f"{name}\x01{text}\x02" for name, text in texts.items() if text).encode() + rest
        key_hash = None if sharding_key is None else string_hash(sharding_key)
        return cls(topic, body, flag, texts, pairs, key_hash)  # type: ignore[arg-type]  # _is_int32 has checked it


@dataclass(slots=True)
class SingleRecord:
    """A complete record, with the values from which its entries are built.

    Queue offset, physical offset and store time in `data` are 0 until `stamp` is called.
    """

    data: bytearray
    queue: QueueKey
    message_id: str  # UNIQ_KEY
    tags_code: int
    key_hashes: tuple[int, ...]  # java.index_key_hash of each index entry; UNIQ_KEY is before KEYS

    @property
    def key_count(self) -> int:
        """The number of index entries."""
        return len(self.key_hashes)

    def stamp(self, queue_offset: int, physical_offset: int, time_ms: int) -> None:
        """Write queue offset, physical offset and store time (ms) into the record's header."""
        _OFFSETS.pack_into(self.data, _OFFSETS_AT, queue_offset, physical_offset)
        _TIME.pack_into(self.data, _TIME_AT, time_ms)

    def as_batch(self) -> EncodedRecords:
        """Return the record as a batch that shares its memory. Its digest is 0, because `send` needs no digest."""
        return EncodedRecords(
            data=np.frombuffer(self.data, np.uint8),
            sizes=np.array([len(self.data)]),
            queues=(self.queue,),
            queue_numbers=np.zeros(1, np.int32),
            tags_codes=np.array([self.tags_code]),
            key_rows=np.zeros(len(self.key_hashes), np.int64),
            key_hashes=np.array(self.key_hashes, np.int32),
            digest=0,
        )


@dataclass(frozen=True, slots=True)
class _Topic:
    """What records of one topic have in common."""

    magic: int
    field: bytes  # the length of the topic, and the topic
    key_hash: int  # the Java hash of `topic#`


class SingleEncoder:
    """Encodes one message after another. Not thread-safe.

    `born_host` and `store_host` are host fields of a record, for IPv4. A record and the filler after it must fit into
    a segment of `segment_bytes`.
    """

    def __init__(
        self, born_host: bytes, store_host: bytes, ids: UniqueIds, body_rules: BodyRules, segment_bytes: int
    ) -> None:
        self._born_host, self._store_host, self._ids, self._rules = born_host, store_host, ids, body_rules
        self._max_record_bytes = segment_bytes - BLANK_BYTES

    def encode(self, message: SingleMessage, router: QueueRouter, born_ms: int) -> SingleRecord | None:
        """Return the record of a message, or None if `message_encoder` must encode or refuse it.

        `born_ms` is the current time, in ms since the epoch. Errors of the router's `write_queues` are passed on.
        """
        plain = PlainMessage.of(message, self._rules)
        if plain is None:
            return None
        topic, body, flag, texts, pairs = plain.topic, plain.body, plain.flag, plain.texts, plain.pairs
        queue_id = router.route_one(topic, message.queue_id, plain.key_hash)
        if queue_id is None:
            return None
        known = _topic(topic)
        assert known is not None, topic
        unique_bytes = len(_UNIQUE_BEFORE) + self._ids.width + 1
        size = _HEAD.size + len(body) + len(known.field) + _LENGTH_BYTES + unique_bytes + len(pairs)
        if unique_bytes + len(pairs) > MAX_PROPERTIES_BYTES or size > self._max_record_bytes:
            return None
        if message.queue_id is None and plain.key_hash is None:
            router.advance(topic)
        unique = self._ids.take_one(born_ms)
        head = _HEAD.pack(
            size,
            known.magic,
            zlib.crc32(body) & BODY_CRC_MASK,
            queue_id,
            flag,
            0,
            0,
            0,
            born_ms,
            self._born_host,
            0,
            self._store_host,
            0,
            0,
            len(body),
        )
        length = (unique_bytes + len(pairs)).to_bytes(_LENGTH_BYTES, "big")
        data = bytearray().join((head, body, known.field, length, f"{_UNIQUE_BEFORE}{unique}\x02".encode(), pairs))
        keys = [key for key in (texts[KEYS] or "").split(" ") if key]
        hashes = (
            _index_hash(self._ids.hash_of(unique, known.key_hash)),
            *(_index_hash(_joined_hash(known.key_hash, key)) for key in keys),
        )
        return SingleRecord(data, QueueKey(topic, queue_id), unique, _tags_code(texts[TAGS] or ""), hashes)


def _utf8(text: str) -> bytes | None:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return None


def _is_int32(value: object) -> bool:
    return type(value) is int and -(1 << 31) <= value < 1 << 31


def _values(message: SingleMessage) -> tuple[str | None, dict[str, str | None], bytes] | None:
    """Return the sharding key, the properties that have an argument, and the other pairs of the properties string.

    An argument that is not None hides the property of the same name. Return None if a value is unusual or invalid.
    """
    keys = message.keys
    if type(keys) is list or type(keys) is tuple:
        if not all(type(key) is str for key in keys):
            return None
        keys = " ".join(filter(None, keys))
    texts: dict[str, Any] = {TAGS: message.tags, KEYS: keys, SHARDING_KEY: message.sharding_key}
    pairs: bytes | None = b""
    if message.properties is not None:
        pairs = _plain_pairs(message.properties, texts)
    if pairs is None or not all(text is None or _is_value(text) for text in texts.values()):
        return None
    return texts[SHARDING_KEY], texts, pairs


def _plain_pairs(properties: object, texts: dict[str, Any]) -> bytes | None:
    """Return the pairs of the properties that have no argument, as bytes. Return None if one is unusual or invalid.

    If a property has an argument which is None in `texts`, its value is put there.
    """
    if type(properties) is not dict:
        return None
    pairs: list[str] = []
    for name, value in properties.items():
        if type(name) is not str or not (value is None or _is_value(value)):
            return None
        if name in texts:
            if texts[name] is None:
                texts[name] = value or None
        elif not is_plain_name(name):
            return None
        elif value:
            pairs.append(f"{name}\x01{value}\x02")
    return "".join(pairs).encode()


def _is_value(value: object) -> bool:
    """Say whether a value is a text that a reader can parse back."""
    return type(value) is str and "\x02" not in value and (value.isascii() or _utf8(value) is not None)


@lru_cache(maxsize=1 << 10)
def _topic(name: str) -> _Topic | None:
    """Return what records of a topic have in common. Return None if clients must not send to this topic."""
    try:
        check_sent_topic(name)
        return _Topic(magic_for(name), topic_field(name), string_hash(f"{name}#"))
    except (OptionError, UnicodeEncodeError):
        return None


@lru_cache(maxsize=1 << 10)
def _tags_code(tags: str) -> int:
    return string_hash(tags)


def _joined_hash(before: int, text: str) -> int:
    """Return the Java hash, modulo 2^32, of two texts together. `before` is the hash of the first one."""
    units = len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2
    return before * pow(31, units, 1 << 32) + string_hash(text)


def _index_hash(java_hash: int) -> int:
    """Return the hash in the key index, from a Java hash modulo 2^32."""
    value = java_hash & _ALL_32_BITS
    value = (1 << 32) - value if value >> 31 else value
    return value if value < 1 << 31 else 0  # as java.index_key_hash
