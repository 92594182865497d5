"""One message that a test puts into a store, and the record that a broker would write for it.

All fields except the topic have a default, so a test sets only the fields that matter to it. A broker assigns the queue
offset, the physical offset and the store time when it appends the message, so these are arguments of `as_record`.
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
from rmq_spark.store.model import QueueKey

BORN_HOST = Host("10.1.2.3", 54321)
STORE_HOST = Host("127.0.0.1", 10911)
BORN_MS = 1_700_000_000_123  # default born time of messages, ms since the epoch
V1_TOPIC_BYTES = 127  # a topic with more bytes needs a record of version 2


@dataclass(frozen=True, slots=True)
class SampleMessage:
    """A message to store, as a producer sends it to a broker.

    - `properties` is a mapping, or the text of the record's properties as bytes. Bytes are not checked, so that a test
      can write an invalid text. `tags` and `keys` are added to the properties.
    - `body` is stored unchanged. If you set compression bits in `sys_flag`, compress the body yourself.
    - `sys_flag` need not have the bits for IPv6 hosts. They are set according to the hosts.
    - `message_count` above 0 makes the record an inner batch of this many messages, for a topic with batch consume
      queues. `batch_body.encode_items` makes its body.
    - `store_timestamp` is in ms since the epoch. None means 1 ms after the previous message.
    - `version2` is whether the record has version 2. If it is None, the length of the topic decides, as in a broker.
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
        """The queue to which the message is sent."""
        return QueueKey(self.topic, self.queue_id)

    @property
    def has_unit(self) -> bool:
        """Whether the message gets a consume-queue entry. Half messages and rolled back messages do not."""
        return self.sys_flag & TRANSACTION_MASK in (0, TRANSACTION_COMMIT)

    @property
    def properties_text(self) -> bytes:
        """The text of the properties, as it is stored in the record."""
        given = {name: value for name, value in ((TAGS, self.tags), (KEYS, self.keys)) if value is not None}
        if isinstance(self.properties, bytes):
            return self.properties + encode(given)
        return encode({**self.properties, **given})

    @property
    def tags_code(self) -> int:
        """The tags code in the message's consume-queue entry (MessageExtBrokerInner#tagsString2tagsCode)."""
        tags = parse(self.properties_text).get(TAGS)
        return string_hash(tags) if tags else 0

    def as_record(self, queue_offset: int, physical_offset: int, store_timestamp: int) -> Record:
        """Return the record that a broker would write. Its version, lengths, CRC and host bits are right."""
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
