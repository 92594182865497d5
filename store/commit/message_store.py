"""A store for programs: send one message or many, make topics, ask for bounds, let old messages go, leave in order."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import pyarrow as pa

from rmq_spark.store.commit.arguments import check_limits, check_new_topic, check_topic, message_of, messages_of
from rmq_spark.store.commit.finishing import IntentFinisher
from rmq_spark.store.commit.outbox import Outbox, OutboxSettings
from rmq_spark.store.commit.row_slices import named_topics, split_records
from rmq_spark.store.disk import files
from rmq_spark.store.disk.chance import wall_clock_ms
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.disk.synchronized import Synchronized, synchronized
from rmq_spark.store.errors import NotFoundError, OptionError, RmqError, StoreError
from rmq_spark.store.format.config_json import PERM_READ, PERM_WRITE
from rmq_spark.store.format.encoding import EncodedRecords
from rmq_spark.store.format.properties import UNIQ_KEY, parse
from rmq_spark.store.format.record import Record, decode_record
from rmq_spark.store.log.retention import Expired
from rmq_spark.store.log.section import MAX_SECTION_BYTES, Appended, Section
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.units import QueueBounds

_ROWS_AT_ONCE = 1 << 16

# What `send_many` returns for each row.
SENT = pa.schema(
    [
        ("topic", pa.string()),
        ("queueId", pa.int32()),
        ("queueOffset", pa.int64()),
        ("commitLogOffset", pa.int64()),
        ("storeTimestamp", pa.timestamp("ms", tz="UTC")),
    ]
)


@dataclass(frozen=True, slots=True)
class SendResult:
    """Where a message went, as SendResult of a RocketMQ client says: its ids are those that look-ups take."""

    topic: str
    queue_id: int
    queue_offset: int
    commit_log_offset: int
    message_id: str


class MessageStore(Synchronized):
    """A store opened to append. Several threads may share it, and several processes may open it; no broker may.

    The calls of one object run one at a time: threads gain nothing from sharing it, and lose nothing either.
    Messages are visible, and safe from the death of any process, once the call returns; with `flush="sync"`, or after
    `settle` or `close`, from a power cut too. Use it in `with`, or `close` it: then every call but `close` raises
    StoreError.
    """

    def __init__(self, path: str, settings: WriterSettings, outbox: OutboxSettings, flush: str) -> None:
        super().__init__()
        self.path, self._flush, self._outbox_settings = files.absolute(path), flush, outbox
        disk = Disk()
        finisher = IntentFinisher(self.path, disk, wall_clock_ms)
        self._writer = StoreWriter(self.path, disk, settings, wall_clock_ms, time.sleep, (finisher,))
        self._outbox = Outbox(self.path, outbox)
        self._is_closed = False

    def __enter__(self) -> "MessageStore":
        self._refuse_if_closed()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close. An error of the body stays the error; what fails while closing then is a note to it."""
        try:
            self.close()
        except StoreError as late:
            if error is None:
                raise
            error.add_note(f"when the store at {self.path} was closed after that: {late}")

    @synchronized
    def send(
        self,
        topic: str,
        body: bytes | str,
        *,
        tags: str | None = None,
        keys: str | Sequence[str] | None = None,
        properties: Mapping[str, str] | None = None,
        queue_id: int | None = None,
        sharding_key: str | None = None,
        flag: int = 0,
        delay_level: int | None = None,
        deliver_at_ms: int | None = None,
    ) -> SendResult:
        """Append one message and return where it went; a text is sent as UTF-8.

        With a `delay_level` above 0 it waits as long as that level says, else, with `deliver_at_ms`, until that time
        (since the epoch): where it went is then where it waits. A topic that is not there is made.
        Raises OptionError for what is no message, LockTimeoutError where a broker
        or another writer keeps the store, DiskFullError; nothing was appended then. For many messages `send_many` is
        faster by orders of magnitude.
        """
        row = {
            "topic": topic,
            "body": body,
            "tags": tags,
            "keys": keys,
            "properties": properties,
            "shardingKey": sharding_key,
            "queueId": queue_id,
            "flag": flag,
            "delayLevel": delay_level,
            "deliverTimestamp": deliver_at_ms,
        }
        records, (appended,) = self._append(message_of(row))
        record = decode_record(records.data.tobytes())
        assert isinstance(record, Record)
        return SendResult(
            record.topic.decode(),
            record.queue_id,
            int(appended.queue_offsets[0]),
            int(appended.physical_offsets[0]),
            parse(record.properties)[UNIQ_KEY],
        )

    @synchronized
    def send_many(self, messages: pa.Table | pa.RecordBatch, *, topic: str | None = None) -> pa.Table:
        """Append the rows of a table, in their order, and return where each went, a row for each.

        Given are the columns body, and any of topic, tags, keys, properties, shardingKey, queueId, flag, delayLevel and
        deliverTimestamp; `topic` goes before the column. Returned are topic, queueId, queueOffset, commitLogOffset
        (bytes) and storeTimestamp; of a message that waits, those where it waits.
        Messages of one call go in turns of at most 64 MiB of log, so one that dies in the middle may have appended a
        part of them: a note on the error says how many rows. A Spark sink appends all or nothing. Raises what `send`
        raises; rows count from the first of the call.
        """
        table = messages_of(messages, topic)
        sent = [SENT.empty_table()]
        for batch in table.combine_chunks().to_batches(max_chunksize=_ROWS_AT_ONCE):
            records, parts = self._append(batch, sum(map(len, sent)))
            sent.append(_places(records, parts))
        return pa.concat_tables(sent).combine_chunks()

    @synchronized
    def create_topic(self, topic: str, queues: int = 4, *, perm: int = PERM_READ | PERM_WRITE) -> int:
        """Make a topic with so many queues, if it is not there, and return how many it has.

        `perm` is 6 to read and write, 4 only to read, 2 only to write. Raises OptionError for a name that no broker
        takes, and what `send` raises of the store.
        """
        check_new_topic(topic, queues, perm)
        self._refuse_if_closed()
        with self._writer.section() as section:
            return section.ensure_topic(topic, queues, perm)

    def topics(self) -> list[str]:
        """Return the names of all topics, sorted."""
        self._refuse_if_closed()
        with StoreReader(self.path, commit_log_path=self._outbox_settings.commit_log_path) as reader:
            return reader.topics()

    def bounds(self, topic: str) -> dict[int, QueueBounds]:
        """Return what can be read of each of the topic's queues, by queue id. Raises NotFoundError."""
        check_topic(topic)
        self._refuse_if_closed()
        with StoreReader(self.path, commit_log_path=self._outbox_settings.commit_log_path) as reader:
            reader.refresh()
            return {queue.queue_id: reader.bounds(queue) for queue in reader.queues(topic)}

    @synchronized
    def expire(self, *, max_age_ms: int | None = None, max_bytes: int | None = None) -> Expired:
        """Delete the oldest segments: those whose messages are all older, and those beyond so many bytes of log."""
        check_limits(max_age_ms=max_age_ms, max_bytes=max_bytes)
        self._refuse_if_closed()
        with self._writer.section() as section:
            return section.expire(max_age_ms, max_bytes)

    @synchronized
    def set_retention(self, *, max_age_ms: int | None = None, max_bytes: int | None = None) -> None:
        """Have every writer of ours delete what is older, or beyond so many bytes, from now on; None: nothing is."""
        check_limits(max_age_ms=max_age_ms, max_bytes=max_bytes)
        self._refuse_if_closed()
        self._writer.set_retention(max_age_ms, max_bytes)

    @synchronized
    def settle(self) -> None:
        """Have everything that was appended on disk for good; a broker calls the store cleanly closed then."""
        self._refuse_if_closed()
        with self._writer.section() as section:
            section.settle()

    @synchronized
    def close(self) -> None:
        """Settle, and let go of the store. A second call does nothing; sending is over."""
        if not self._is_closed:
            self._writer.close()
            self._is_closed = True

    def _append(
        self, messages: pa.RecordBatch, rows_before: int | None = None
    ) -> tuple[EncodedRecords, list[Appended]]:
        """Append rows, of which the same call has appended `rows_before`; None: the call has one row, without number.

        Errors say in a note how many rows of the call are in the store nevertheless.
        """
        self._refuse_if_closed()
        appended: list[Appended] = []
        try:
            records = self._outbox.encode(messages, rows_before)
            for part in split_records(records, MAX_SECTION_BYTES):
                with self._writer.section() as section:
                    self._ensure_topics(section, part)
                    appended.append(section.append(part))
                    if self._flush == "sync":
                        section.settle()
        except RmqError as error:
            there = (rows_before or 0) + sum(len(part.queue_offsets) for part in appended)
            if there:
                error.add_note(f"The first {there} rows of the call were appended. Send only the others again.")
            raise
        return records, appended

    def _release_locks(self) -> None:
        self._writer.lock.release()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise StoreError(f'the store at "{self.path}" was closed. Open it again with rmq_spark.open_store.')

    def _ensure_topics(self, section: Section, records: EncodedRecords) -> None:
        """Make topics that are missing; raises where one has fewer queues than it had when rows were encoded."""
        needed = named_topics(records)
        for topic, count in needed.items():
            has = section.write_queues(topic)
            if has is None and not self._outbox_settings.creates_topics:
                raise NotFoundError(f'topic "{topic}" is not in the store any more. Create it first.')
            if has is None:
                has = self._outbox_settings.queue_count
            if has < count:
                self._outbox.forget_topics()
                raise OptionError(
                    f'topic "{topic}" has {has} queues by now, and messages were to go to queue {count - 1}. Nothing '
                    "was appended; send them again."
                )
        section.ensure_topics(needed, self._outbox_settings.queue_count)


def _places(records: EncodedRecords, parts: Sequence[Appended]) -> pa.Table:
    """Return where records went, in the columns of SENT."""
    numbers = records.queue_numbers
    times_ms = [np.full(len(part.queue_offsets), part.store_time_ms) for part in parts]
    columns = [
        pa.array([queue.topic for queue in records.queues], pa.string()).take(pa.array(numbers)),
        pa.array(np.array([queue.queue_id for queue in records.queues], np.int32)[numbers]),
        pa.array(np.concatenate([part.queue_offsets for part in parts])),
        pa.array(np.concatenate([part.physical_offsets for part in parts])),
        pa.array(np.concatenate(times_ms)).cast(SENT.field("storeTimestamp").type),
    ]
    return pa.table(columns, schema=SENT)
