"""Messages that are only counted: for simulations of clusters with many brokers and queues.

A pull from such a store answers records that are made when they are asked for. All records of a topic have one body.
"""

from collections.abc import Sequence

from rmq_spark.store.filter.row_filter import RowFilter
from rmq_spark.store.format.record import encode_record
from rmq_spark.store.group.pull import answer_by_bounds
from rmq_spark.store.group.pull_limits import PullLimits
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.pull_result import GetMessageStatus
from rmq_spark.store.testing.brokers.message_store import NO_BOUNDS, Found, Places
from rmq_spark.store.testing.sample_message import SampleMessage

STORE_MS = 1_700_000_000_000  # the store time of the message with queue offset 0; each later one is 1 ms younger
_QUEUE_ID, _QUEUE_OFFSET, _PHYSICAL_OFFSET, _STORE_TIME = slice(12, 16), slice(20, 28), slice(28, 36), slice(56, 64)
_QUEUE_BYTES = 1 << 36  # the physical offsets of each queue id begin at a multiple of it


class LightStore:
    """Bounds of queues by queue, and records on demand. Filters are not applied: every message passes."""

    def __init__(self) -> None:
        self._bounds: dict[QueueKey, QueueBounds] = {}
        self._templates: dict[str, bytes] = {}

    def close(self) -> None:
        """Do nothing."""

    def set_topic(self, topic: str, queue_count: int) -> None:
        """Do nothing: every queue exists."""

    def delete_topic(self, topic: str) -> None:
        """Forget the messages of a topic."""
        self._bounds = {queue: bounds for queue, bounds in self._bounds.items() if queue.topic != topic}

    def append(self, messages: Sequence[SampleMessage]) -> Places:
        """Count messages, and return their queue offsets. Bodies and properties are lost."""
        offsets = []
        for message in messages:
            offsets.append(self.bounds(message.queue).max_offset)
            self.advance(message.queue, 1)
        return Places(offsets, offsets)

    def note_change(self) -> None:
        """Do nothing: messages are visible when they were counted."""

    def advance(self, queue: QueueKey, count: int) -> None:
        """Let `count` messages arrive in a queue."""
        bounds = self.bounds(queue)
        self._bounds[queue] = QueueBounds(bounds.min_offset, bounds.max_offset + count)

    def expire(self, queue: QueueKey, before: int, *, keeps_minimum: bool = False) -> None:
        """Expire the messages of a queue before a queue offset."""
        assert not keeps_minimum
        self._bounds[queue] = QueueBounds(before, self.bounds(queue).max_offset)

    def bounds(self, queue: QueueKey) -> QueueBounds:
        """Return the queue offsets of a queue."""
        return self._bounds.get(queue, NO_BOUNDS)

    def get(
        self, queue: QueueKey, offset: int, max_messages: int, limits: PullLimits, wanted: RowFilter | None
    ) -> Found:
        """Return what a pull from `offset` finds. The limits of bytes do not matter, because records are small."""
        bounds = self.bounds(queue)
        outside = answer_by_bounds(bounds, offset)
        if outside is not None:
            return Found(outside.status, outside.next_begin_offset)
        end = min(offset + min(max(max_messages, 1), limits.max_count_in_memory), bounds.max_offset)
        body = b"".join(self._record(queue, number) for number in range(offset, end))
        return Found(GetMessageStatus.FOUND, end, body)

    def has_wanted(self, queue: QueueKey, begin: int, end: int, wanted: RowFilter | None) -> bool:
        """Say that every message passes every filter."""
        return True

    def store_time(self, queue: QueueKey, offset: int) -> int:
        """Return the store time (ms) of a message, or -1 if it does not exist."""
        bounds = self.bounds(queue)
        return STORE_MS + offset if bounds.min_offset <= offset < bounds.max_offset else -1

    def last_store_time(self, queue: QueueKey) -> int:
        """Return the store time (ms) of the last message of a queue, or 0 if there is none."""
        return max(self.store_time(queue, self.bounds(queue).max_offset - 1), 0)

    def offset_at_time(self, queue: QueueKey, time_ms: int, rule: str) -> int:
        """Return the queue offset for a point in time."""
        bounds = self.bounds(queue)
        last = {"lower": bounds.max_offset, "upper": bounds.max_offset - 1, "nearest": bounds.max_offset - 1}[rule]
        return max(min(time_ms - STORE_MS, last), bounds.min_offset)

    def record_at(self, physical_offset: int) -> bytes | None:
        """Return None: records have no place in a log."""
        return None

    def records_with_key(self, topic: str, key: str, begin_ms: int, end_ms: int) -> list[bytes]:
        """Return no record: messages have no keys."""
        return []

    def _record(self, queue: QueueKey, offset: int) -> bytes:
        if queue.topic not in self._templates:
            message = SampleMessage(queue.topic, body=b"light", tags="A")
            self._templates[queue.topic] = encode_record(message.as_record(0, 0, 0))
        record = bytearray(self._templates[queue.topic])
        record[_QUEUE_ID] = queue.queue_id.to_bytes(4, "big")
        record[_QUEUE_OFFSET] = offset.to_bytes(8, "big")
        record[_PHYSICAL_OFFSET] = (queue.queue_id * _QUEUE_BYTES + offset * len(record)).to_bytes(8, "big")
        record[_STORE_TIME] = (STORE_MS + offset).to_bytes(8, "big")
        return bytes(record)
