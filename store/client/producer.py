"""The producer: it sends messages, sends failed messages back, creates topics and deletes old messages."""

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmq_spark.store.argument_checks import check_limits
from rmq_spark.store.batch_sink import check_send_back
from rmq_spark.store.delivery.send_back import SendBacks, SentBack
from rmq_spark.store.disk import files
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import NotFoundError, OptionError, RmqError, StoreError
from rmq_spark.store.format.config_json import PERM_READ, PERM_WRITE
from rmq_spark.store.format.failed_rows import failed_rows_of, next_times
from rmq_spark.store.format.message_encoder import EncodedRecords
from rmq_spark.store.format.message_table import check_new_topic, check_topic, message_of, messages_of
from rmq_spark.store.format.properties import UNIQ_KEY, parse
from rmq_spark.store.format.record import Record, decode_record
from rmq_spark.store.format.single_message import SingleMessage, SingleRecord
from rmq_spark.store.html_tables import MAX_ROWS, bar_column, box, number_column, table, text_column
from rmq_spark.store.log.open_session import OpenSession
from rmq_spark.store.log.retention import Expired
from rmq_spark.store.log.store_lock import MAX_SESSION_BYTES
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.log.write_session import Appended, WriteSession
from rmq_spark.store.model import QueueBounds
from rmq_spark.store.names import is_system_topic
from rmq_spark.store.send_result import SendResult
from rmq_spark.store.synchronized import Synchronized, synchronized
from rmq_spark.store.transaction.encoded_slices import required_topics, split_records
from rmq_spark.store.transaction.roll_forward import IntentRollForward
from rmq_spark.store.transaction.sink import (
    RecordBuilder,
    RecordBuilderSettings,
)

_ROWS_AT_ONCE = 1 << 16

# The columns of the table that `send_many` returns. The table has one row for each message.
SENT = pa.schema(
    [
        ("topic", pa.string()),
        ("queueId", pa.int32()),
        ("queueOffset", pa.int64()),
        ("commitLogOffset", pa.int64()),
        ("storeTimestamp", pa.timestamp("ms", tz="UTC")),
    ]
)

# The columns of the table that `send_back` returns. The table has one row for each copy. `topic` is the topic in which
# the copy is delivered. `commitLogOffset` is where the copy is stored now; the delivery stores it once more.
SENT_BACK = pa.schema(
    [
        ("topic", pa.string()),
        ("delayLevel", pa.int32()),
        ("reconsumeTimes", pa.int32()),
        ("commitLogOffset", pa.int64()),
        ("storeTimestamp", pa.timestamp("ms", tz="UTC")),
    ]
)


class Producer(Synchronized):
    """A store that is open for appending messages.

    Several threads may share one producer: its methods run one at a time. Several processes may open producers for the
    same store, but no broker may run on it at the same time. When a call returns, readers see the message, and the
    message survives the death of any process. It survives a power cut after `settle` or `close`, or immediately with
    `flush="sync"`. Use the producer in `with`, or call `close`. After that every other method raises StoreError. A
    notebook displays a producer as a table of the store's topics.
    """

    def __init__(self, path: str, settings: WriterSettings, builder: RecordBuilderSettings, flush: str) -> None:
        super().__init__()
        self.path, self._flush, self._builder_settings = files.store_folder(path), flush, builder
        disk = Disk()
        finisher = IntentRollForward(self.path, disk, wall_clock_ms)
        self._writer = StoreWriter(self.path, disk, settings, wall_clock_ms, time.sleep, (finisher,))
        self._open_session = OpenSession(self._writer)
        # Also at the end of the interpreter, and if the producer is garbage-collected.
        weakref.finalize(self, self._open_session.end_at_last)
        self._record_builder = RecordBuilder(self.path, builder)
        self._is_closed = False

    def __enter__(self) -> "Producer":
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the producer. If the body of `with` raised an error and closing fails differently, it gets a note."""
        try:
            self.close()
        except StoreError as late:
            if error is None:
                raise
            if str(late) != str(error):
                error.add_note(f"closing the store at {self.path} after that failed too: {late}")

    def __repr__(self) -> str:
        # Without topics, because a debugger or a log line must not read from the disk.
        return f"<Producer of the store at {self.path}: {'closed' if self._is_closed else 'open'}>"

    def _repr_html_(self) -> str:
        facts = {"producer": "closed" if self._is_closed else "open", "flush": self._flush}
        try:
            with StoreReader(self.path, commit_log_path=self._builder_settings.commit_log_path) as reader:
                reader.refresh()
                topics = [topic for topic in reader.topics() if not is_system_topic(topic)]
                rows = [_topic_row(reader, topic) for topic in topics[:MAX_ROWS]]
        except StoreError as error:  # an object must show itself, whatever became of its store
            return box("RocketMQ store", self.path, {**facts, "problem": str(error)})
        names, queues, messages, problems = zip(*rows, strict=True) if rows else ((), (), (), ())
        columns = [text_column("topic", names), number_column("queues", queues)]
        columns += [number_column("messages", messages), bar_column(messages)]
        if any(problems):
            columns.append(text_column("problem", problems, is_long=True))
        more = f"… and {len(topics) - MAX_ROWS:,} more: topics() has all" if len(topics) > MAX_ROWS else ""
        return box("RocketMQ store", self.path, facts, table(columns, more) if rows else "")

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
        """Append one message and return where it was stored. A body of type str is sent as UTF-8.

        With a `delay_level` above 0, the message is delivered after the delay of that level. Otherwise, with
        `deliver_at_ms`, it is delivered at that time (ms since the epoch). The result for a delayed message is the
        position where it waits for its delivery. If the topic does not exist, it is created.

        Raises OptionError if the message is invalid, LockTimeoutError while a broker or another writer holds the store,
        and DiskFullError if the disk is full. After these errors nothing was appended. For many messages, `send_many`
        is faster by orders of magnitude.
        """
        if delay_level is None and deliver_at_ms is None:
            self._check_open()
            message = SingleMessage(topic, body, tags, keys, properties, sharding_key, queue_id, flag)
            single = self._record_builder.encode_one(message)
            if single is not None:
                return self._append_one(single)
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
        """Append each row of a table as a message, in order, and return where each message was stored.

        The column body is required. The columns topic, tags, keys, properties, shardingKey, queueId, flag, delayLevel
        and deliverTimestamp are optional. The argument `topic` replaces the column topic. The returned table has one
        row for each message, in the same order, with the columns topic, queueId, queueOffset, commitLogOffset (bytes)
        and storeTimestamp. For a delayed message these describe the position where it waits for its delivery.

        Raises the errors of `send`. Row numbers in errors begin at 0. The rows are appended in parts of up to 64 MiB of
        log. So if the call fails, some rows may already be appended, and a note on the error says how many. (A Spark
        sink appends all rows or none.)
        """
        table = messages_of(messages, topic)
        sent = [SENT.empty_table()]
        for batch in table.combine_chunks().to_batches(max_chunksize=_ROWS_AT_ONCE):
            records, parts = self._append(batch, sum(map(len, sent)))
            sent.append(_positions(records, parts))
        return pa.concat_tables(sent).combine_chunks()

    @synchronized
    def send_back(
        self,
        rows: pa.Table | pa.RecordBatch | list[dict[str, object]],
        group: str,
        delay_level: int = 0,
        max_reconsume_times: int | None = None,
        *,
        expired_original: str = "error",
    ) -> pa.Table:
        """Send back messages that the consumer group `group` failed to consume, and return where their copies are.

        `rows` are rows as the data source returns them. The columns commitLogOffset, queueId, queueOffset,
        reconsumeTimes and physicalTopic (or topic) are required, because they identify the message. The columns
        delayLevel and error are optional. If delayLevel is missing, `delay_level` is used. The returned table has one
        row for each copy, with the columns of `SENT_BACK`.

        A copy is delivered in the topic %RETRY%group after the delay of its level. Level 0 means the level
        3 + reconsumeTimes. A copy is stored in %DLQ%group instead if its level is below 0, or if its message has
        already been retried `max_reconsume_times` times. None means the group's own limit, which is 16 by default. If a
        message has expired, its copy is built from its row with `expired_original="resend"`.

        Raises OptionError if a row is not from this store or the group has no retry queues, NotFoundError if a message
        has expired and `expired_original` is "error", and the errors of `send_many`. If the rows need more than 64 MiB
        and the call fails, some of them may already be sent back, and a note on the error says how many. A second call
        with the same rows sends them back a second time.
        """
        terms = check_send_back(group, delay_level, max_reconsume_times, expired_original)
        batch = failed_rows_of(rows)
        self._check_open()
        numbers = np.zeros((3, batch.num_rows), np.int64)  # level, physical offset, store time
        are_dead = np.zeros(batch.num_rows, np.bool_)
        done = 0
        with SendBacks(self.path, terms, commit_log_path=self._builder_settings.commit_log_path) as sending:
            try:
                for sent in sending.prepare(batch, delay_level):
                    are_dead[sent.rows] = sent.decisions.are_dead
                    numbers[0, sent.rows] = sent.decisions.levels
                    for rows_of_part, offsets, time_ms in self._append_back(sending, sent):
                        numbers[1, rows_of_part], numbers[2, rows_of_part] = offsets, time_ms
                        done += len(rows_of_part)
            except RmqError as error:
                if done:
                    error.add_note(f"{done} rows of the call were sent back before that. Send only the others again.")
                raise
            topics = pa.array([sending.topics.retry, sending.topics.dead]).take(pa.array(are_dead.astype(np.int8)))
        times = next_times(batch.column("reconsumeTimes").cast(pa.int64()).to_numpy())
        columns = [topics, *map(pa.array, (numbers[0], times, numbers[1], numbers[2]))]
        return pa.table([one.cast(field.type) for one, field in zip(columns, SENT_BACK, strict=True)], schema=SENT_BACK)

    @synchronized
    def create_topic(self, topic: str, queues: int = 4, *, perm: int = PERM_READ | PERM_WRITE) -> int:
        """Create a topic if it does not exist, and return the number of its queues.

        `perm` is 6 if clients may read and write, 4 if they may only read, and 2 if they may only write. An existing
        topic is not changed. Raises OptionError if a broker would refuse the name, and the errors of `send` that
        concern the store.
        """
        check_new_topic(topic, queues, perm)
        self._check_open()
        with self._section() as session:
            return session.ensure_topic(topic, queues, perm)

    def topics(self) -> list[str]:
        """Return the names of all topics, sorted."""
        self._check_open()
        with StoreReader(self.path, commit_log_path=self._builder_settings.commit_log_path) as reader:
            return reader.topics()

    def bounds(self, topic: str) -> dict[int, QueueBounds]:
        """Return for each queue id of the topic the range of queue offsets that can be read.

        Raises NotFoundError if the topic does not exist.
        """
        check_topic(topic)
        self._check_open()
        with StoreReader(self.path, commit_log_path=self._builder_settings.commit_log_path) as reader:
            reader.refresh()
            return {queue.queue_id: reader.bounds(queue) for queue in reader.queues(topic)}

    @synchronized
    def expire(self, *, max_age_ms: int | None = None, max_bytes: int | None = None) -> Expired:
        """Delete the oldest segments of the commit log, and return what was deleted.

        With `max_age_ms`, a segment is deleted if all of its messages are older than that. With `max_bytes`, segments
        are deleted until the log has at most that size. The last segment always stays, and so do segments with messages
        that wait for delivery.
        """
        check_limits(max_age_ms=max_age_ms, max_bytes=max_bytes)
        self._check_open()
        with self._section() as session:
            return session.expire(max_age_ms, max_bytes)

    @synchronized
    def set_retention(self, *, max_age_ms: int | None = None, max_bytes: int | None = None) -> None:
        """Set the limits by which every rmq-spark writer deletes old messages of this store. None removes a limit."""
        check_limits(max_age_ms=max_age_ms, max_bytes=max_bytes)
        self._check_open()
        self._open_session.end()
        self._writer.set_retention(max_age_ms, max_bytes)

    @synchronized
    def settle(self) -> None:
        """Make all appended messages durable, and mark the store as cleanly shut down.

        A broker that starts next then does not assume a crash.
        """
        self._check_open()
        with self._section() as session:
            session.settle()

    @synchronized
    def close(self) -> None:
        """Make all appended messages durable, mark the store as cleanly shut down, and release the store.

        A second call does nothing.
        """
        if not self._is_closed:
            self._open_session.end()
            self._writer.close()
            self._is_closed = True

    def _append_one(self, record: SingleRecord) -> SendResult:
        """Append one message, in the session that stays open between such appends unless each one is synced."""
        if self._flush == "sync":
            batch = record.as_batch()
            with self._section() as session:
                self._ensure_topics(session, batch)
                appended = session.append(batch)
                session.settle()
            queue_offset, physical_offset = int(appended.queue_offsets[0]), int(appended.physical_offsets[0])
        else:
            stamp = self._record_builder.topics_stamp
            queue_offset, physical_offset = self._open_session.append(record, stamp, self._ensure_topic)
        return SendResult(record.queue.topic, record.queue.queue_id, queue_offset, physical_offset, record.message_id)

    def _ensure_topic(self, session: WriteSession, record: SingleRecord) -> None:
        self._ensure_topics(session, record.as_batch())

    def _section(self) -> AbstractContextManager[WriteSession]:
        """Return a write session of its own."""
        self._open_session.end()
        return self._writer.section()

    def _append(
        self, messages: pa.RecordBatch, rows_before: int | None = None
    ) -> tuple[EncodedRecords, list[Appended]]:
        """Append messages. Return their encoded records, and for each part of them where it was appended.

        `rows_before` is the number of rows that the same call of `send_many` has appended before, and None for `send`.
        If some rows of that call were appended, an error gets a note with their number.
        """
        self._check_open()
        appended: list[Appended] = []
        try:
            records = self._record_builder.encode(messages, rows_before)
            for part in split_records(records, MAX_SESSION_BYTES):
                with self._section() as session:
                    self._ensure_topics(session, part)
                    appended.append(session.append(part))
                    if self._flush == "sync":
                        session.settle()
        except RmqError as error:
            done = (rows_before or 0) + sum(len(part.queue_offsets) for part in appended)
            if done:
                error.add_note(f"The first {done} rows of the call were appended. Send only the others again.")
            raise
        return records, appended

    def _append_back(
        self, sending: SendBacks, sent: SentBack
    ) -> Iterator[tuple[NDArray[np.intp], NDArray[np.int64], int]]:
        """Append the copies of some rows, in one or more write sessions.

        Yields for each session the numbers of its rows, the physical offsets of their copies, and the store time in ms.
        """
        first = 0
        for part in split_records(sent.records, MAX_SESSION_BYTES):
            numbers = sent.rows[first : first + len(part)]
            dead = sent.decisions.are_dead[first : first + len(part)]
            first += len(part)
            with self._section() as session:
                sending.topics.ensure(session, retry=not dead.all(), dead=bool(dead.any()))
                appended = session.append(part)
                if self._flush == "sync":
                    session.settle()
            yield numbers, appended.physical_offsets, appended.store_time_ms

    def _release_locks(self) -> None:
        self._open_session.release()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError(f'the store at "{self.path}" was closed. Open it again with rmq_spark.open_store.')

    def _ensure_topics(self, session: WriteSession, records: EncodedRecords) -> None:
        """Create missing topics. Raises OptionError if a topic has fewer queues now than when the rows were encoded.

        Raises NotFoundError if a topic is missing and the producer may not create topics.
        """
        needed = required_topics(records)
        for topic, count in needed.items():
            found = session.write_queues(topic)
            if found is None and not self._builder_settings.creates_topics:
                raise NotFoundError(f'topic "{topic}" is not in the store any more. Create it first.')
            if found is None:
                found = self._builder_settings.queue_count
            if found < count:
                self._record_builder.forget_topics()
                raise OptionError(
                    f'topic "{topic}" has {found} queues now, and messages were encoded for queue {count - 1}. Nothing '
                    "was appended; send them again."
                )
        session.ensure_topics(needed, self._builder_settings.queue_count)


def _topic_row(reader: StoreReader, topic: str) -> tuple[str, int, int, str]:
    """Return a topic, its queues, the messages in those that can be read, and why others cannot, or ""."""
    queues = reader.queues(topic)
    messages, problems = 0, []
    for queue in queues:
        try:
            bounds = reader.bounds(queue)
        except StoreError as error:
            problems.append(str(error))
        else:
            messages += bounds.max_offset - bounds.min_offset
    others = f" {len(problems)} queues cannot be read." if len(problems) > 1 else ""
    return topic, len(queues), messages, problems[0] + others if problems else ""


def _positions(records: EncodedRecords, parts: Sequence[Appended]) -> pa.Table:
    """Return a table with the position of each record, with the columns of SENT."""
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
