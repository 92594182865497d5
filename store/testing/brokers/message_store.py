"""The messages of a broker: a store directory that the engine writes and reads.

Record bytes, consume queues, filters and limits are the engine's own. A broker's answers are thus what a broker of
RocketMQ would read from the same files.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.client.producer import Producer
from rmq_spark.store.errors import DamageError
from rmq_spark.store.filter.row_filter import RowFilter
from rmq_spark.store.format.file_names import CONSUME_QUEUE, queue_folder
from rmq_spark.store.format.index_file import IndexShape
from rmq_spark.store.format.message_columns import Topics
from rmq_spark.store.format.message_table import MESSAGE_TYPES
from rmq_spark.store.format.record import Record, decode_record, encode_record
from rmq_spark.store.format.record_rewrite import rebuild_records
from rmq_spark.store.group.pull import _choose, answer_by_bounds, has_wanted
from rmq_spark.store.group.pull_limits import PullLimits
from rmq_spark.store.group.pull_reader import PullReader
from rmq_spark.store.log.consume_queue import Entries
from rmq_spark.store.log.segments import FileSizes
from rmq_spark.store.log.store_writer import WriterSettings
from rmq_spark.store.model import QueueBounds, QueueKey
from rmq_spark.store.names import AUTO_CREATE_TOPIC
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.transaction.encoded_slices import required_topics
from rmq_spark.store.transaction.sink import RecordBuilderSettings

_TOPICS_JSON = Path("config", "topics.json")
NO_BOUNDS = QueueBounds(0, 0)
# Small files, because tests copy stores. A segment must hold a message of 4 MiB.
_SEGMENT_BYTES = 8 << 20
_INDEX = IndexShape(slot_count=1 << 12, unit_count=1 << 14)
_QUEUE_FILE_BYTES = 20 * 5_000


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a pull in a store: a status, the next offset, and the bytes of records (GetMessageResult)."""

    status: str
    next_offset: int
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Places:
    """Where messages were appended: the queue offset and the physical offset of each."""

    queue_offsets: list[int]
    physical_offsets: list[int]


class RecordReader(PullReader):
    """A PullReader that returns the bytes of records, and can pretend that records were deleted.

    Records before the physical offset `gone_before` count as deleted while their consume-queue entries still exist.
    """

    gone_before = 0

    @property
    def segment_bytes(self) -> int:
        """The unit in which records count as deleted: with `gone_before`, single bytes instead of segments."""
        return 1 if self.gone_before else super().segment_bytes

    def are_gone(self, physical_offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Say for each physical offset whether its record counts as deleted."""
        return physical_offsets < self.gone_before if self.gone_before else super().are_gone(physical_offsets)

    def bytes_of(self, entries: Entries) -> bytes:
        """Return the records of the entries, one after the other."""
        parts = []
        if len(entries):
            for stretch in self._log.stretches(entries.physical_offsets, entries.sizes):
                ends = stretch.positions + entries.sizes[stretch.first : stretch.last]
                parts += [
                    stretch.buffer[begin:end].tobytes()
                    for begin, end in zip(stretch.positions.tolist(), ends.tolist(), strict=True)
                ]
                stretch.check()
        return b"".join(parts)

    def entry_at(self, queue: QueueKey, offset: int) -> Entries:
        """Return the consume-queue entry of one message."""
        files_of, end = self._readable(queue, offset, offset + 1)
        number = files_of.unit_of(offset, end)
        entries = files_of.read(number, number + 1)
        files_of.run.close()
        return entries

    def record_bytes_at(self, physical_offset: int) -> bytes | None:
        """Return the bytes of the record at a physical offset, or None if there is none."""
        record = self._log.record_at(physical_offset)
        return encode_record(record) if isinstance(record, Record) else None

    def store_time_at(self, physical_offset: int) -> int:
        """Return the store time (ms) of the record at a physical offset, or -1 if there is none."""
        record = self._log.record_at(physical_offset)
        return record.store_timestamp if isinstance(record, Record) else -1


class MessageStore:
    """The messages of a broker in the directory `path`. Only for the loop's thread."""

    def __init__(self, path: Path, segment_bytes: int = _SEGMENT_BYTES) -> None:
        self.path = path
        self._sizes = FileSizes(segment_bytes, _QUEUE_FILE_BYTES, index=_INDEX)
        self._producers: dict[tuple[str | None, int], Producer] = {}
        self._is_changed = False
        self._minimum: dict[QueueKey, int] = {}  # expired before this queue offset
        self._gone: dict[QueueKey, int] = {}  # records are gone before this queue offset, entries are not
        self._bounds: dict[QueueKey, QueueBounds] = {}
        self._deleted: set[str] = set()  # topics that were deleted at some time
        self._last_times: dict[QueueKey, tuple[int, int]] = {}
        # A broker's topics.json is never empty. The engine takes an empty one for a lost one.
        self._wanted: dict[str, int] = {AUTO_CREATE_TOPIC: 8}  # queue counts of topics that are not written yet
        self._queue_counts: dict[str, int] = {}  # of topics that are written, as far as they are known
        self.producer()
        self._reader = RecordReader(str(path))
        self._reader.refresh()

    def close(self) -> None:
        """Close all files, and mark the store as cleanly shut down."""
        self.producer()
        for producer in self._producers.values():
            producer.close()
        self._producers.clear()
        self._reader.close()

    def copy_to(self, path: Path) -> Path:
        """Copy the store's files as they are now."""
        self.producer().settle()
        return Path(shutil.copytree(self.path, path))

    def producer(self, compression: str | None = None, compress_over: int = 4096) -> Producer:
        """Return a producer of this store, which compresses bodies of at least `compress_over` bytes if asked to.

        Call `note_change` after using it.
        """
        key = compression, compress_over
        if key not in self._producers:
            builder = RecordBuilderSettings(compression=compression, compress_over=compress_over, sizes=self._sizes)
            settings = WriterSettings("tests' broker", sizes=self._sizes)
            self._producers[key] = Producer(str(self.path), settings, builder, "async")
        if self._wanted:
            self._write_topics(self._producers[key])
        return self._producers[key]

    def note_change(self) -> None:
        """Read the store again before the next answer."""
        self._is_changed = True

    def set_topic(self, topic: str, queue_count: int) -> None:
        """Create a topic, or give it this number of queues. Queues that exist stay.

        The files are written before the next message and when the store is closed, for all topics together.
        """
        self._wanted[topic] = queue_count

    def delete_topic(self, topic: str) -> None:
        """Delete a topic with its queues, as a broker does: the records stay in the log."""
        if topic not in self._queue_counts and topic not in self._wanted:
            return
        self.close()
        file = self.path / _TOPICS_JSON
        whole = json.loads(file.read_text())
        if whole["topicConfigTable"].pop(topic, None) is not None:
            self._replace(file, json.dumps(whole))
        shutil.rmtree(self.path / CONSUME_QUEUE / topic, ignore_errors=True)
        self._deleted.add(topic)
        del self._queue_counts[topic]
        for known in (self._minimum, self._gone, self._last_times):
            for queue in [queue for queue in known if queue.topic == topic]:
                del known[queue]
        self._reader = RecordReader(str(self.path))
        self._bounds.clear()
        self.note_change()

    def expire(self, queue: QueueKey, before: int, *, keeps_minimum: bool = False) -> None:
        """Expire the messages of a queue before a queue offset.

        With `keeps_minimum` their entries stay, as for a while after retention ran: the minimum is the old one, and
        pulls find entries whose records are gone.
        """
        bounds = self.bounds(queue)
        assert bounds.min_offset <= before <= bounds.max_offset, (bounds, before)
        (self._gone if keeps_minimum else self._minimum)[queue] = before

    def expire_log(self, max_bytes: int) -> None:
        """Delete the oldest segments of the log by the engine's retention, until it has at most `max_bytes`."""
        self.producer().expire(max_bytes=max_bytes)
        self.note_change()

    def bounds(self, queue: QueueKey) -> QueueBounds:
        """Return the queue offsets of a queue. [0, 0) if the store does not know it."""
        self._refresh()
        if queue not in self._bounds:
            self._bounds[queue] = self._read_bounds(queue) if self._has(queue) else NO_BOUNDS
        bounds = self._bounds[queue]
        return QueueBounds(max(bounds.min_offset, self._minimum.get(queue, 0)), bounds.max_offset)

    def get(
        self, queue: QueueKey, offset: int, max_messages: int, limits: PullLimits, wanted: RowFilter | None
    ) -> Found:
        """Return what a pull from `offset` finds (DefaultMessageStore#getMessage)."""
        outside = answer_by_bounds(self.bounds(queue), offset)
        if outside is not None:
            return Found(outside.status, outside.next_begin_offset)
        max_messages = min(max_messages, self.bounds(queue).max_offset - offset)
        self._reader.gone_before = self._gone_before(queue)
        try:
            answer, entries = _choose(self._reader, queue, offset, max(max_messages, 1), limits, None, wanted)
            return Found(answer.status, answer.next_begin_offset, self._reader.bytes_of(entries))
        finally:
            self._reader.gone_before = 0

    def has_wanted(self, queue: QueueKey, begin: int, end: int, wanted: RowFilter | None) -> bool:
        """Say whether a message of [begin, end) passes a filter (PullRequestHoldService#notifyMessageArriving)."""
        self._refresh()
        return has_wanted(self._reader, queue, begin, end, None, wanted)

    def store_time(self, queue: QueueKey, offset: int) -> int:
        """Return the store time (ms) of a message. -1 if it does not exist or its record is gone."""
        bounds = self.bounds(queue)
        if not max(bounds.min_offset, self._gone.get(queue, 0)) <= offset < bounds.max_offset:
            return -1
        return self._reader.proof(queue, offset).store_time_ms

    def last_store_time(self, queue: QueueKey) -> int:
        """Return the store time (ms) of the last message of a queue. 0 if it never had one, -1 if it has expired."""
        end = self.bounds(queue).max_offset
        if end and self._gone.get(queue, 0) >= end:
            return -1  # CommitLog#pickupStoreTimestamp
        if self._last_times.get(queue, (-1, 0))[0] != end:
            self._last_times[queue] = end, self.store_time(queue, end - 1) if end else 0
        return self._last_times[queue][1]

    def offset_at_time(self, queue: QueueKey, time_ms: int, rule: str) -> int:
        """Return the queue offset for a point in time, by a rule of `StoreReader.offset_at_time`."""
        bounds = self.bounds(queue)
        if bounds.max_offset == 0:
            return 0
        return max(self._reader.offset_at_time(queue, time_ms, rule), bounds.min_offset)

    def record_at(self, physical_offset: int) -> bytes | None:
        """Return the record at a physical offset. None if there is none, or if its message has expired."""
        self._refresh()
        try:
            data = self._reader.record_bytes_at(physical_offset)
        except DamageError:
            return None
        if data is None:
            return None
        record = decode_record(data)
        assert isinstance(record, Record), record
        queue = QueueKey(record.topic.decode(), record.queue_id)
        first = max(self.bounds(queue).min_offset, self._gone.get(queue, 0))
        return data if record.queue_offset >= first else None

    def records_with_key(self, topic: str, key: str, begin_ms: int, end_ms: int) -> list[bytes]:
        """Return the records of a topic with a key or UNIQ_KEY that were stored in a time, the newest first.

        As in a broker's index, their times are rounded down to whole seconds after the first of them, and records with
        another key of the same hash are among them: "Aa" and "BB" in a key have the same hash.
        """
        self._refresh()
        if topic not in self._reader.topics():
            return []
        keys = {key, key.replace("Aa", "BB"), key.replace("BB", "Aa")}
        found = {place for one in keys for place in self._reader.find_key(topic, one)}
        entries = [self._reader.entry_at(queue, offset) for queue, offset in found]
        entries.sort(key=lambda one: -int(one.physical_offsets[0]))
        records = [self._reader.bytes_of(one) for one in entries]
        times = [int.from_bytes(record[56:64], "big") for record in records]
        base = min(times, default=0)
        rounded = [time - (time - base) % 1000 for time in times]
        return [record for record, time in zip(records, rounded, strict=True) if begin_ms <= time <= end_ms]

    def append(self, messages: Sequence[SampleMessage]) -> Places:
        """Append messages as they are, in one piece of the log, and return where they are.

        They are visible after `note_change`. Their topics must exist, except RocketMQ's own.
        """
        if not messages:
            return Places([], [])
        producer = self.producer()
        for queue in {message.queue for message in messages}:
            self.bounds(queue)  # remembered until `note_change`
        data = [encode_record(message.as_record(0, 0, 0)) for message in messages]
        ends = np.cumsum([len(one) for one in data])
        topics = list(dict.fromkeys(message.topic for message in messages))
        records = rebuild_records(
            np.frombuffer(b"".join(data), np.uint8),
            ends - np.diff(ends, prepend=0),
            ends,
            topics=Topics(tuple(topics), np.array([topics.index(message.topic) for message in messages])),
            queue_ids=np.array([message.queue_id for message in messages]),
        )
        with producer._section() as session:
            needed = required_topics(records)
            session.ensure_topics(needed, needed)
            appended = session.append(records)
        return Places(appended.queue_offsets.tolist(), appended.physical_offsets.tolist())

    def find_original(self, physical_offset: int) -> Record | None:
        """Return the record at a physical offset. None if there is none, or if its message has expired."""
        data = self.record_at(physical_offset)
        record = None if data is None else decode_record(data)
        return record if isinstance(record, Record) else None

    def send_back(self, original: Record, group: str, delay_level: int, max_reconsume_times: int | None) -> None:
        """Store the copy of a message that a group sends back, by the engine's own rules."""
        row = {
            "physicalTopic": original.topic.decode(),
            "queueId": original.queue_id,
            "queueOffset": original.queue_offset,
            "commitLogOffset": original.physical_offset,
            "reconsumeTimes": original.reconsume_times,
        }
        self.producer().send_back([row], group, delay_level, max_reconsume_times)

    def send(self, rows: Sequence[dict[str, Any]], **compression: Any) -> list[tuple[QueueKey, int]]:
        """Append rows with the columns of `Producer.send_many`, and return the queue and queue offset of each."""
        names = dict.fromkeys(name for row in rows for name in row)
        table = pa.table({name: _column(name, [row.get(name) for row in rows]) for name in names})
        sent = self.producer(**compression).send_many(table)
        self.note_change()
        places = zip(*(sent.column(name).to_pylist() for name in ("topic", "queueId", "queueOffset")), strict=True)
        return [(QueueKey(topic, queue_id), offset) for topic, queue_id, offset in places]

    def _has(self, queue: QueueKey) -> bool:
        if queue.topic not in self._reader.topics():
            return False
        return queue in self._reader.queues(queue.topic)

    def _read_bounds(self, queue: QueueKey) -> QueueBounds:
        """Return the bounds of a queue of the store.

        If its topic was deleted and created again, and it has no message yet, the engine takes its files for lost.
        """
        try:
            return self._reader.bounds(queue)
        except DamageError:
            if queue.topic in self._deleted and not (self.path / queue_folder(queue.topic, queue.queue_id)).exists():
                return NO_BOUNDS
            raise

    def _gone_before(self, queue: QueueKey) -> int:
        offset = self._gone.get(queue, 0)
        bounds = self.bounds(queue)
        if not offset:
            return 0
        if offset < bounds.max_offset:
            return int(self._reader.entry_at(queue, offset).physical_offsets[0])
        return self._reader.log_end

    def _write_topics(self, producer: Producer) -> None:
        """Create the wanted topics, and give those that exist other queue counts if these are wanted."""
        wanted, self._wanted = self._wanted, {}
        with producer._section() as session:
            self._queue_counts |= session.ensure_topics(wanted.keys() - self._queue_counts.keys(), wanted)
        changed = {topic: count for topic, count in wanted.items() if self._queue_counts[topic] != count}
        if changed:
            file = self.path / _TOPICS_JSON
            whole = json.loads(file.read_text())
            for topic, count in changed.items():
                whole["topicConfigTable"][topic] |= {"readQueueNums": count, "writeQueueNums": count}
            self._replace(file, json.dumps(whole))
            self._queue_counts |= changed
        self.note_change()

    def _replace(self, file: Path, text: str) -> None:
        new = file.with_suffix(".new")
        new.write_text(text)
        os.replace(new, file)

    def _refresh(self) -> None:
        if self._is_changed:
            self._is_changed = False
            self._reader.refresh()
            self._bounds.clear()


_TYPES: dict[str, pa.DataType] = MESSAGE_TYPES | {"deliverTimestamp": pa.int64()}


def _column(name: str, values: list[Any]) -> pa.Array:
    if name == "properties":
        values = [None if one is None else list(one.items()) for one in values]
    return pa.array(values, _TYPES[name])
