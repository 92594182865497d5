"""A store for programs: send one message or many, make topics, ask for bounds, let old messages go, leave in order."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import pyarrow as pa

from rmq_spark.store.commit.finishing import IntentFinisher
from rmq_spark.store.commit.outbox import Outbox, OutboxSettings
from rmq_spark.store.commit.row_slices import split_records
from rmq_spark.store.disk import files
from rmq_spark.store.disk.chance import wall_clock_ms
from rmq_spark.store.disk.changing import Disk
from rmq_spark.store.errors import NotFoundError, OptionError, StoreError
from rmq_spark.store.format.config_json import PERM_READ, PERM_WRITE
from rmq_spark.store.format.encoding import MESSAGE_COLUMNS, EncodedRecords
from rmq_spark.store.format.properties import UNIQ_KEY, parse
from rmq_spark.store.format.record import Record, decode_record
from rmq_spark.store.log.retention import Expired
from rmq_spark.store.log.section import MAX_SECTION_BYTES, Appended, Section
from rmq_spark.store.log.store_reader import StoreReader
from rmq_spark.store.log.store_writer import StoreWriter, WriterSettings
from rmq_spark.store.units import QueueBounds

FLUSHES = ("async", "sync")
COMPRESSIONS = ("none", "zlib", "lz4", "zstd")
_MIN_SEGMENT_BYTES = 1024  # a record without a body takes a tenth of it

SENT = pa.schema(
    [
        ("topic", pa.string()),
        ("queueId", pa.int32()),
        ("queueOffset", pa.int64()),
        ("commitLogOffset", pa.int64()),
        ("storeTimestamp", pa.timestamp("ms", tz="UTC")),
    ]
)
_MESSAGE_TYPES = {
    "topic": pa.string(),
    "body": pa.binary(),
    "tags": pa.string(),
    "keys": pa.string(),
    "properties": pa.map_(pa.string(), pa.string()),
    "shardingKey": pa.string(),
    "queueId": pa.int32(),
    "flag": pa.int32(),
}
assert tuple(_MESSAGE_TYPES) == MESSAGE_COLUMNS


@dataclass(frozen=True, slots=True)
class SendResult:
    """Where a message went, as SendResult of a RocketMQ client says: its ids are those that look-ups take."""

    topic: str
    queue_id: int
    queue_offset: int
    commit_log_offset: int
    message_id: str


def check_arguments(
    queues: object, compression: str | None, compress_over: object, lock_timeout_ms: object, segment_bytes: object
) -> str | None:
    """Return the name of a compression, None for none. Raises OptionError for what `open_store` cannot take."""
    least = {"queues": 1, "compress_over": 0, "lock_timeout_ms": 0, "segment_bytes": _MIN_SEGMENT_BYTES}
    given = {"queues": queues, "compress_over": compress_over, "lock_timeout_ms": lock_timeout_ms}
    for name, value in {**given, "segment_bytes": segment_bytes}.items():
        _check_number(name, value, least[name])
    if compression not in (None, *COMPRESSIONS):
        raise OptionError(f"compression={compression!r} is none of: {', '.join(COMPRESSIONS)}.")
    return None if compression == "none" else compression


def _check_number(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise OptionError(f"{name}={value!r} is no whole number from {least} on. Times are ms, sizes are bytes.")


def _check_limits(**limits: int | None) -> None:
    for name, value in limits.items():
        if value is not None:
            _check_number(name, value, 0)


class MessageStore:
    """A store opened to append. One thread at a time; any number of processes, of ours, at once; no broker.

    Messages are visible, and safe from the death of any process, once the call returns; with `flush="sync"`, or after
    `settle` or `close`, from a power cut too. Use it in `with`, or `close` it.
    """

    def __init__(self, path: str, settings: WriterSettings, outbox: OutboxSettings, flush: str) -> None:
        if flush not in FLUSHES:
            raise OptionError(f'flush="{flush}" is none of: {", ".join(FLUSHES)}.')
        self.path, self._flush, self._outbox_settings = files.absolute(path), flush, outbox
        disk = Disk()
        finisher = IntentFinisher(self.path, disk, wall_clock_ms)
        self._writer = StoreWriter(self.path, disk, settings, wall_clock_ms, time.sleep, (finisher,))
        self._outbox = Outbox(self.path, outbox)
        self._is_closed = False

    def __enter__(self) -> "MessageStore":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def send(
        self,
        topic: str,
        body: bytes | str,
        *,
        tags: str | None = None,
        keys: str | None = None,
        properties: Mapping[str, str] | None = None,
        queue_id: int | None = None,
        sharding_key: str | None = None,
        flag: int = 0,
    ) -> SendResult:
        """Append one message and return where it went; a text is sent as UTF-8.

        A topic that is not there is made. Raises OptionError for what is no message, LockTimeoutError where a broker
        or another writer keeps the store, DiskFullError; nothing was appended then. For many messages `send_many` is
        faster by orders of magnitude.
        """
        row = {
            "topic": topic,
            "body": body.encode() if isinstance(body, str) else body,
            "tags": tags,
            "keys": keys,
            "properties": None if properties is None else list(properties.items()),
            "shardingKey": sharding_key,
            "queueId": queue_id,
            "flag": flag,
        }
        schema = pa.schema(list(_MESSAGE_TYPES.items()))
        try:
            message = pa.RecordBatch.from_pylist([row], schema=schema)
        except (pa.ArrowException, TypeError, OverflowError) as error:
            kinds = ", ".join(f"{name} {kind}" for name, kind in _MESSAGE_TYPES.items())
            raise OptionError(f"no message: {error}. Types are: {kinds}. Nothing was appended.") from None
        records, (appended,) = self._append(message)
        record = decode_record(records.data.tobytes())
        assert isinstance(record, Record)
        return SendResult(
            topic,
            record.queue_id,
            int(appended.queue_offsets[0]),
            int(appended.physical_offsets[0]),
            parse(record.properties)[UNIQ_KEY],
        )

    def send_many(self, messages: pa.Table | pa.RecordBatch, *, topic: str | None = None) -> pa.Table:
        """Append the rows of a table, in their order, and return where each went: columns `SENT`, a row for each.

        Columns: body, and any of topic, tags, keys, properties, shardingKey, queueId, flag; `topic` goes before the
        column. Messages of one call go in turns of at most 64 MiB of log, so one that dies in the middle may have
        appended a part of them; a Spark sink appends all or nothing. Raises what `send` raises.
        """
        if not isinstance(messages, pa.Table | pa.RecordBatch):
            raise OptionError(
                f"send_many takes a pyarrow Table or RecordBatch, not {type(messages).__name__}. For a list of dicts: "
                "pyarrow.Table.from_pylist(rows)."
            )
        table = pa.Table.from_batches([messages]) if isinstance(messages, pa.RecordBatch) else messages
        if topic is not None:
            table = table.drop_columns(["topic"]) if "topic" in table.column_names else table
            table = table.append_column("topic", pa.repeat(pa.scalar(topic), len(table)))
        unknown = set(table.column_names) - set(MESSAGE_COLUMNS)
        missing = {"topic", "body"} - set(table.column_names)
        if unknown or missing:
            wrong = f"no such column: {', '.join(sorted(unknown))}" if unknown else f"no {' and no '.join(missing)}"
            raise OptionError(f"{wrong}. Columns are: {', '.join(MESSAGE_COLUMNS)}; body and topic are required.")
        table = _typed(table)
        sent = [SENT.empty_table()]
        for batch in table.combine_chunks().to_batches(max_chunksize=1 << 16):
            records, parts = self._append(batch)
            numbers = records.queue_numbers
            sent.append(
                pa.table(
                    [
                        pa.array([queue.topic for queue in records.queues], pa.string()).take(pa.array(numbers)),
                        pa.array(np.array([queue.queue_id for queue in records.queues], np.int32)[numbers]),
                        pa.array(np.concatenate([part.queue_offsets for part in parts])),
                        pa.array(np.concatenate([part.physical_offsets for part in parts])),
                        pa.array(
                            np.concatenate([np.full(len(part.queue_offsets), part.store_time_ms) for part in parts])
                        ).cast(SENT.field("storeTimestamp").type),
                    ],
                    schema=SENT,
                )
            )
        return pa.concat_tables(sent).combine_chunks()

    def create_topic(self, topic: str, queues: int = 4, *, perm: int = PERM_READ | PERM_WRITE) -> int:
        """Make a topic with so many queues, if it is not there, and return how many it has.

        `perm` is 6 to read and write, 4 only to read, 2 only to write. Raises OptionError for a name that no broker
        takes.
        """
        with self._writer.section() as section:
            return section.ensure_topic(topic, queues, perm)

    def topics(self) -> list[str]:
        """Return the names of all topics, sorted."""
        with StoreReader(self.path, commit_log_path=self._outbox_settings.commit_log_path) as reader:
            return reader.topics()

    def bounds(self, topic: str) -> dict[int, QueueBounds]:
        """Return what can be read of each of the topic's queues, by queue id. Raises NotFoundError."""
        with StoreReader(self.path, commit_log_path=self._outbox_settings.commit_log_path) as reader:
            reader.refresh()
            return {queue.queue_id: reader.bounds(queue) for queue in reader.queues(topic)}

    def expire(self, *, max_age_ms: int | None = None, max_bytes: int | None = None) -> Expired:
        """Delete the oldest segments: those whose messages are all older, and those beyond so many bytes of log."""
        _check_limits(max_age_ms=max_age_ms, max_bytes=max_bytes)
        with self._writer.section() as section:
            return section.expire(max_age_ms, max_bytes)

    def set_retention(self, *, max_age_ms: int | None = None, max_bytes: int | None = None) -> None:
        """Have every writer of ours delete what is older, or beyond so many bytes, from now on; None: nothing is."""
        _check_limits(max_age_ms=max_age_ms, max_bytes=max_bytes)
        self._writer.set_retention(max_age_ms, max_bytes)

    def settle(self) -> None:
        """Have everything that was appended on disk for good; a broker calls the store cleanly closed then."""
        with self._writer.section() as section:
            section.settle()

    def close(self) -> None:
        """Settle, and let go of the store. A second call does nothing; sending is over."""
        if not self._is_closed:
            self._writer.close()
            self._is_closed = True

    def _append(self, messages: pa.RecordBatch) -> tuple[EncodedRecords, list[Appended]]:
        if self._is_closed:
            raise StoreError(f'the store at "{self.path}" was closed. Open it again to append.')
        records = self._outbox.encode(messages)
        appended: list[Appended] = []
        for part in split_records(records, MAX_SECTION_BYTES):
            with self._writer.section() as section:
                self._ensure_topics(section, part)
                appended.append(section.append(part))
                if self._flush == "sync":
                    section.settle()
        return records, appended

    def _ensure_topics(self, section: Section, records: EncodedRecords) -> None:
        """Make topics that are missing; raises where one has fewer queues than it had when rows were encoded."""
        needed: dict[str, int] = {}
        for queue in records.queues:
            needed[queue.topic] = max(needed.get(queue.topic, 0), queue.queue_id + 1)
        for topic, count in needed.items():
            if section.write_queues(topic) is None and not self._outbox_settings.creates_topics:
                raise NotFoundError(f'topic "{topic}" is not in the store any more. Create it first.')
            has = section.ensure_topic(topic, self._outbox_settings.queue_count)
            if has < count:
                self._outbox.forget_topics()
                raise OptionError(
                    f'topic "{topic}" has {has} queues by now, and messages were to go to queue {count - 1}. Nothing '
                    "was appended; send them again."
                )


def _typed(table: pa.Table) -> pa.Table:
    """Return the table with the types that messages have, keys as a list included. Raises OptionError."""
    fields = []
    for name in table.column_names:
        kind = table.schema.field(name).type
        is_list = name == "keys" and pa.types.is_list(kind)
        fields.append((name, pa.list_(pa.string()) if is_list else _MESSAGE_TYPES[name]))
    try:
        return table.cast(pa.schema(fields))
    except (pa.ArrowException, ValueError) as error:
        kinds = ", ".join(f"{name} {kind}" for name, kind in _MESSAGE_TYPES.items())
        raise OptionError(f"no messages: {error}. Types are: {kinds}. Nothing was appended.") from None
