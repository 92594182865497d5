"""Messages for an appender: random ones of few lengths, and the messages of a record.

Few lengths, because a new record then often covers a stale one exactly, which is when a reader may be misled.
"""

from random import Random
from typing import Any

from support.appender_log import Message, digest_row

from rmq_spark.store.format.consume_queue_entry import Item, decode_items, encode_items
from rmq_spark.store.format.properties import KEYS, TAGS, encode, parse
from rmq_spark.store.format.record import INNER_BATCH, Record
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage

_TAGS = (None, "", "TagA", "TagB", "标签", "Tag😀")
_SIZES = (0, 10, 10, 100, 100, 100, 700)
_NEW_TOPIC_AFTER = 300  # messages


class MessageMaker:
    """Makes messages for `topics` topics, of which the last has batch consume queues, one topic after the other."""

    def __init__(self, random: Random, topics: int, queues: int, largest_bytes: int) -> None:
        self._random, self._topics, self._queues, self._largest_bytes = random, topics, queues, largest_bytes
        self._count = 0

    def skip_to(self, topics: int) -> None:
        """Go on where that many topics are in use: another life has made them."""
        self._count = max(topics - 1, 0) * _NEW_TOPIC_AFTER

    def make(self) -> SampleMessage:
        """Return the next message."""
        random, self._count = self._random, self._count + 1
        topic = f"topic{random.randrange(min(1 + self._count // _NEW_TOPIC_AFTER, self._topics))}"
        queue_id = random.randrange(self._queues)
        if topic == batch_topic(self._topics) and random.random() < 0.8:
            return self._inner_batch(topic, queue_id)
        size = random.choice((*_SIZES, random.randrange(self._largest_bytes)))
        given: dict[str, Any] = {"tags": random.choice(_TAGS), "keys": random.choice((None, f"k{self._count} k"))}
        return SampleMessage(topic, queue_id, random.randbytes(size), **given)

    def _inner_batch(self, topic: str, queue_id: int) -> SampleMessage:
        count = self._random.randint(1, 6)
        items = [Item(n, self._random.randbytes(10), encode({TAGS: f"i{n}", KEYS: "k"})) for n in range(count)]
        # INNER_BASE is left out: it equals the record's queue offset, which is unknown here.
        properties = {"INNER_NUM": str(count)}
        return SampleMessage(topic, queue_id, encode_items(items), properties=properties, message_count=count)


def batch_topic(topics: int) -> str:
    """Return which of `topics` topics has batch consume queues."""
    return f"topic{topics - 1}"


def queue_of(record: Record) -> QueueKey:
    """Return the queue that a record belongs to."""
    return QueueKey(record.topic.decode(), record.queue_id)


def messages_of(record: Record) -> list[Message]:
    """Return the messages of a record as the history names them."""
    texts = [(record.body, record.properties)]
    if record.sys_flag & INNER_BATCH:
        texts = [(item.body, item.properties) for item in decode_items(record.body)[0]]
    found = []
    for number, (body, text) in enumerate(texts):
        properties = parse(text)
        tags, keys = properties.get(TAGS), properties.get(KEYS)
        digest = digest_row(body, tags, keys, record.physical_offset, record.store_timestamp)
        found.append(Message(queue_of(record), record.queue_offset + number, record.physical_offset, digest))
    return found
