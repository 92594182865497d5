"""Records made again one by one: the slow twin of `store/format/record_rewrite.py`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rmq_spark.store.format.java import index_key_hash, string_hash
from rmq_spark.store.format.properties import KEYS, TAGS, UNIQ_KEY, parse
from rmq_spark.store.format.record import MAGIC_V1, MAGIC_V2, Record, decode_record, encode_record, record_size
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import V1_TOPIC_BYTES


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A rebuilt record: its bytes, its queue, the tags code of its entry, its hashes for the key index."""

    data: bytes
    queue: QueueKey
    tags_code: int
    key_hashes: tuple[int, ...]


def rebuild_one(
    record: bytes, topic: str, queue_id: int, properties: bytes | None = None, reconsume_times: int | None = None
) -> Rebuilt:
    """Return one record made again. Raises ValueError for a part that no record has room for."""
    found = decode_record(record)
    assert isinstance(found, Record), found
    made = replace(
        found,
        magic=MAGIC_V2 if len(topic.encode()) > V1_TOPIC_BYTES else MAGIC_V1,
        topic=topic.encode(),
        queue_id=queue_id,
        queue_offset=0,
        physical_offset=0,
        store_timestamp=0,
        prepared_transaction_offset=0,
        properties=_without_crc(found.properties) if properties is None else properties,
        reconsume_times=found.reconsume_times if reconsume_times is None else reconsume_times,
    )
    named = parse(made.properties)
    keys: Sequence[str] = [key for key in named.get(KEYS, "").split(" ") if key]
    if UNIQ_KEY in named:
        keys = [named[UNIQ_KEY], *keys]
    return Rebuilt(
        encode_record(replace(made, total_size=record_size(made))),
        QueueKey(topic, queue_id),
        string_hash(named[TAGS]) if TAGS in named else 0,
        tuple(index_key_hash(f"{topic}#{key}") for key in keys),
    )


def _without_crc(text: bytes) -> bytes:
    """Return a text of properties as it is, or where the CRC of a record is in it the pairs that are not that."""
    if b"__CRC32#\x01" not in text:
        return text
    parts = [part.partition(b"\x01") for part in text.split(b"\x02")]
    kept = [(name, value) for name, _, value in parts if name and value and name != b"__CRC32#"]
    return b"".join(name + b"\x01" + value + b"\x02" for name, value in kept)
