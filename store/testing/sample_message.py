"""One message that a test wants in a store, and the record that it becomes.

Everything has a default, so that a test names only what it is about. What a broker decides when it appends
(queue offset, physical offset) is not in here: `as_record` takes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rmq_spark.store.format.java import Host, encode_host, string_hash
from rmq_spark.store.format.properties import KEYS, TAGS, encode, parse
from rmq_spark.store.format.record import (
    BORN_HOST_V6,
    INNER_BATCH,
    MAGIC_V1,
    MAGIC_V2,
    NEED_UNWRAP,
    STORE_HOST_V6,
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    Record,
    body_crc,
    record_size,
)
from rmq_spark.store.units import QueueKey

BORN_HOST = Host("10.1.2.3", 54321)
STORE_HOST = Host("127.0.0.1", 10911)
BORN_MS = 1_700_000_000_123  # what a message is born at unless it says otherwise, ms since the epoch
V1_TOPIC_BYTES = 127  # longer topics need a record of version 2


@dataclass(frozen=True, slots=True)
class SampleMessage:
    """A message as a broker is asked to store it.

    `tags` and `keys` are added to `properties` where given; `properties` is a mapping, or the text as it is to
    stand in the record (bytes, not checked: for odd ones). `body` is stored as it is; who sets compression bits in
    `sys_flag` compresses it. The host bits of `sys_flag` follow from the hosts. `message_count` above 0 makes the
    record an inner batch of that many messages (`body` from `batch_body.encode_items`), which belongs into a topic
    with batch consume queues. `store_timestamp` None: one ms after the message before it. `version2` None: as a
    broker chooses, by the topic's length.
    """

    topic: str
    queue_id: int = 0
    body: bytes = b""
    tags: str | None = None
    keys: str | None = None
    properties: Mapping[str, str] | bytes = field(default_factory=dict)
    flag: int = 0
    sys_flag: int = 0
    born_timestamp: int = BORN_MS
    born_host: Host = BORN_HOST
    store_timestamp: int | None = None
    store_host: Host = STORE_HOST
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0
    message_count: int = 0
    version2: bool | None = None

    @property
    def queue(self) -> QueueKey:
        """Return the queue that the message goes to."""
        return QueueKey(self.topic, self.queue_id)

    @property
    def has_unit(self) -> bool:
        """Say whether a queue names the message: prepared and rolled back transactions have no unit."""
        return self.sys_flag & TRANSACTION_MASK in (0, TRANSACTION_COMMIT)

    @property
    def properties_text(self) -> bytes:
        """Return the properties as they stand in the record."""
        given = {name: value for name, value in ((TAGS, self.tags), (KEYS, self.keys)) if value is not None}
        if isinstance(self.properties, bytes):
            return self.properties + encode(given)
        return encode({**self.properties, **given})

    @property
    def tags_code(self) -> int:
        """Return the tags code of the message's unit (MessageExtBrokerInner#tagsString2tagsCode)."""
        tags = parse(self.properties_text).get(TAGS)
        return string_hash(tags) if tags else 0

    def as_record(self, queue_offset: int, physical_offset: int, store_timestamp: int) -> Record:
        """Return the record that a broker writes: version, lengths, CRC and host bits are right."""
        topic = self.topic.encode()
        born, stored = encode_host(self.born_host), encode_host(self.store_host)
        sys_flag = self.sys_flag & ~(BORN_HOST_V6 | STORE_HOST_V6)
        sys_flag |= BORN_HOST_V6 if len(born) == 20 else 0
        sys_flag |= STORE_HOST_V6 if len(stored) == 20 else 0
        sys_flag |= INNER_BATCH | NEED_UNWRAP if self.message_count else 0
        version2 = len(topic) > V1_TOPIC_BYTES if self.version2 is None else self.version2
        record = Record(
            total_size=0,
            magic=MAGIC_V2 if version2 else MAGIC_V1,
            body_crc=body_crc(self.body),
            queue_id=self.queue_id,
            flag=self.flag,
            queue_offset=queue_offset if self.has_unit else 0,
            physical_offset=physical_offset,
            sys_flag=sys_flag,
            born_timestamp=self.born_timestamp,
            born_host=born,
            store_timestamp=store_timestamp,
            store_host=stored,
            reconsume_times=self.reconsume_times,
            prepared_transaction_offset=self.prepared_transaction_offset,
            body=self.body,
            topic=topic,
            properties=self.properties_text,
        )
        return replace(record, total_size=record_size(record))
