"""The store reader: reads topics, queues, bounds and ranges, and searches by time and key. It never writes to disk."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

import pyarrow as pa

from rmq_spark.store.backend import ReadBatch, SearchAnswer
from rmq_spark.store.disk import files
from rmq_spark.store.disk.host import is_remote
from rmq_spark.store.errors import (
    DamageError,
    NotFoundError,
    OffsetRangeError,
    OptionError,
    StoreChangedError,
    StoreError,
)
from rmq_spark.store.filter.row_filter import KeyLookup, RowFilter, compile_filter, make_expression
from rmq_spark.store.format.columns import COLUMNS, refuse_unknown_columns
from rmq_spark.store.format.config_json import TopicConfig
from rmq_spark.store.format.consume_queue_entry import QUEUE_UNIT
from rmq_spark.store.format.own_files import StoreSettings
from rmq_spark.store.format.queue_registry import RegisteredQueues
from rmq_spark.store.format.record import Record
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.consume_queue import ConsumeQueue
from rmq_spark.store.log.key_search import (
    IndexFolder,
    MessageSearch,
    last_indexed_place,
    log_reading_instead,
    read_found,
)
from rmq_spark.store.log.log_end import LogEnd
from rmq_spark.store.log.queue_reader import RULES, RangeStatistics, TimeSearch, read_range
from rmq_spark.store.log.queue_registry import (
    MAX_UNIT,
    QueueDoubt,
    find_lost_queues,
    newest_unit,
    read_registry,
    refuse_lost_folder,
    registry_path,
)
from rmq_spark.store.log.rebuild import being_rebuilt, read_rebuild
from rmq_spark.store.log.record_chain import ShutdownState
from rmq_spark.store.log.small_ranges import SmallRanges
from rmq_spark.store.log.store_state import (
    commit_log_folders,
    index_safe_until_ms,
    read_checkpoint,
    read_settings,
    read_store_state,
)
from rmq_spark.store.log.topics import TopicTable, describe_missing_topic
from rmq_spark.store.model import MAX_DECOMPRESSED_BYTES, READ_MODES, QueueBounds, QueueKey, QueueRange, RecordProof
from rmq_spark.store.names import LIGHT_QUEUE_PREFIX, MAX_QUEUES, is_system_topic

_LOG = logging.getLogger("rmq_spark")
_FEW_RECORDS = 2048  # if fewer were appended since the last refresh, they are read one by one to find their queues


class StoreReader:
    """Reads a store in its state at the last `refresh`. Not thread-safe.

    Use it in a `with` statement, or call `close`. After that, every method that reads the store raises StoreError.

    Any number of readers may run beside a broker or one of our writers. Each file is read only when it is first needed,
    so a process that only reads a planned range does not search for the end of the log.
    """

    def __init__(self, path: str, *, commit_log_path: str | None = None, read_mode: str = "auto") -> None:
        if read_mode not in READ_MODES:
            raise OptionError(f'readMode="{read_mode}" is none of: {", ".join(READ_MODES)}.')
        self.path = files.store_folder(path)
        folders = commit_log_folders(self.path, commit_log_path)
        mapped = read_mode == "mmap" or (read_mode == "auto" and not any(map(is_remote, folders)))
        self._log = CommitLog(folders, mapped=mapped)
        self._topics = TopicTable(self.path)
        self._index = IndexFolder(self.path)
        self._search = MessageSearch(self._index, self._log, self._readable, lambda: index_safe_until_ms(self.path))
        self._log_end = LogEnd(
            self._log,
            lambda: read_store_state(self.path),
            lambda: read_checkpoint(self.path),
            self._topics.may_exist,
            lambda: last_indexed_place(self.path),
        )
        self.small_ranges = SmallRanges(self._log, self._queue, lambda: self._log_end.recent)
        self._min_entries: dict[QueueKey, int] = {}
        self._lost: dict[QueueKey, StoreError] = {}  # queues whose files are missing, or cannot be listed
        self._doubt: QueueDoubt | None = None
        self._warned: set[str] = set()  # topics with a logged warning about queues without files
        self._is_refreshed = self._is_closed = False
        self.registry_stamp: tuple[int, int, int] | None = None  # taken before the queues were last listed
        self._is_in_rebuild = False  # whether a repair was rebuilding queues at the last refresh

    def __enter__(self) -> Self:
        self._refuse_if_closed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every file. An unfinished `read` raises StoreError at its next step. A second call does nothing."""
        self._is_closed = True
        self._log.close()
        self._index.close()
        for queue in self._topics.opened():
            queue.run.close()

    def store_id(self) -> str | None:
        """Return the id that our writers gave the store. Return None if only brokers have written to the store."""
        self._refuse_if_closed()
        settings = read_settings(self.path)
        return settings.store_id if isinstance(settings, StoreSettings) else None

    def topics(self) -> list[str]:
        """Return the sorted names of all topics that are in topics.json, have a queue on disk or have a lost queue."""
        self._refuse_if_closed()
        return sorted({*self._topics.topics(), *(key.topic for key in self._faults())})

    def queues(self, topic: str) -> list[QueueKey]:
        """Return the topic's queues, sorted by queue id. Empty queues are included.

        Raises NotFoundError if the store does not have the topic; the message suggests similar names. Also raises
        NotFoundError for a light message queue, which is not supported.
        """
        self._refuse_if_closed()
        if topic.startswith(LIGHT_QUEUE_PREFIX):
            raise NotFoundError(
                f'cannot read topic "{topic}": light message queues ({LIGHT_QUEUE_PREFIX}…) are not supported.'
            )
        found = sorted({*self._topics.queues_of(topic), *(key for key in self._faults() if key.topic == topic)})
        if not found:
            raise NotFoundError(describe_missing_topic(topic, self.topics(), self.path))
        return found

    def topic_configs(self) -> Mapping[str, TopicConfig]:
        """Return the current settings of each topic in topics.json, by name. Return {} if the file does not exist.

        As long as topics.json is unchanged, every call returns the same object.
        """
        self._refuse_if_closed()
        self._topics.look_at_configs()
        return self._topics.configs

    def refresh(self) -> bool:
        """Read the store's state again. Return whether bounds, queues or topics may have changed since the last call.

        If the store is idle, a call costs a few small reads, whatever the number of queues. Raises DamageError if the
        log is damaged, so that its end cannot be found.
        """
        self._refuse_if_closed()
        if self._is_refreshed and not self._lost and self._log_end.is_idle(self._topics.has_folder):
            return False
        self.registry_stamp = files.stamp(registry_path(self.path))
        state = read_store_state(self.path)
        begin = self._log.segments.begin
        self._log.refresh()
        if begin != self._log.segments.begin:
            self._min_entries.clear()  # retention moved the begin of the log, so the queues begin later too
        touched = None
        if self._is_refreshed and not self._lost and not self._log_end.is_rewritten():
            touched = self._log_end.appended(_FEW_RECORDS)
        is_listed, registered = self._list_queues(touched)
        queues = self._topics.queues
        if touched is not None:
            self._log_end.refresh(queues, touched & queues.keys(), whole=False, state=state)
        else:
            # Earlier results stay valid unless the log was rewritten.
            whole = not self._is_refreshed or self._is_in_rebuild or self._log_end.is_rewritten()
            if whole:
                self._min_entries.clear()
            self._log_end.refresh(queues, queues, whole=whole, state=state)
        if is_listed:
            self._find_lost(registered)
        # Read after the files were listed: a repair that began before that may have removed files meanwhile.
        rebuild = read_rebuild(self.path)
        self._is_in_rebuild = rebuild is not None
        self._lost.update({key: being_rebuilt(self.path, key) for key in (rebuild.queues if rebuild else ())})
        for queue in queues.values():
            queue.run.close()
        self._is_refreshed = True
        return True

    def _list_queues(self, touched: set[QueueKey] | None) -> tuple[bool, RegisteredQueues | None]:
        """List topics and queues again if `touched` is None, or if it contains a new queue that has a folder.

        Return whether they were listed, and the registry as read before the listing. The registry is None if it is
        missing or damaged, or if nothing was listed.
        """
        unknown = touched - self._topics.queues.keys() if touched is not None else set()
        if touched is None or any(self._topics.has_folder(key) for key in unknown):
            # Read before the folders are listed, because a live writer creates a queue's file before it registers it.
            registered = read_registry(self.path)
            self._topics.refresh()
            return True, registered
        if unknown:  # their topics may have been deleted; if so, their records do not matter
            self._topics.look_at_configs()
        return False, None

    def _find_lost(self, registered: RegisteredQueues | None) -> None:
        """Find the queues whose files are missing. Call it after the folders were listed.

        Raises DamageError if the folder of all queues is missing although the log has messages.
        """
        queues = self._topics.queues
        # Not in a live store, because a broker creates the folder only after it has logged its first message.
        has_queues = any(queue.layout is QUEUE_UNIT for queue in queues.values())
        if not has_queues and read_store_state(self.path).closing is not ShutdownState.LIVE:
            refuse_lost_folder(self.path, self._log)
        self._doubt = QueueDoubt(self.path, self._log, registered, self._topics.found)
        self._lost = find_lost_queues(
            self.path,
            self._log,
            registered,
            lambda key: newest_unit(queues[key]) if key in queues else MAX_UNIT if self._topics.has_folder(key) else -1,
            self._topics,
        )

    def _faults(self) -> dict[QueueKey, StoreError]:
        """Return the error of each queue that cannot be read."""
        return {**self._log_end.faults, **self._lost}

    @property
    def log_end(self) -> int:
        """The physical offset after the last valid record, as of the last refresh."""
        return self._log_end.end

    def bounds(self, queue: QueueKey) -> QueueBounds:
        """Return the range of queue offsets that can be read, as of the last refresh.

        Raises NotFoundError if the queue is unknown, and DamageError if the queue's end cannot be determined.
        """
        bounds = self._bounds(queue)
        if not bounds.max_offset:
            self._warn_of_missing_files(queue.topic)
        return bounds

    def _bounds(self, queue: QueueKey) -> QueueBounds:
        """Return the same as `bounds`, but do not warn about queues without files. Scans of all topics use this."""
        queue_files = self._queue(queue)
        if queue_files is None:
            self._raise_fault(queue)
            return QueueBounds(0, 0)  # the queue is only in topics.json
        try:
            first, end = self._entry_bounds(queue_files)
        except StoreChangedError:  # retention deleted files of the queue since the last refresh
            self.refresh()
            first, end = self._entry_bounds(queue_files)
        bounds = QueueBounds(queue_files.offset_of(first, end), queue_files.offset_of(end, end))
        if bounds.min_offset > bounds.max_offset:
            path, position = queue_files.run.path_of(first)
            what = f"queue offset of the first entry of {queue}"
            raise DamageError(what, path, position, f"at most {bounds.max_offset}", bounds.min_offset)
        queue_files.run.close()  # a store may have more queues than a process may have open files
        return bounds

    def offset_at_time(self, queue: QueueKey, time_ms: int, rule: str = "lower") -> int:
        """Return the queue offset for a point in time (`time_ms`, ms since the epoch), by one of three rules.

        - "lower": the first message stored at or after `time_ms`. If there is none, the queue's max offset.
        - "upper": the last message stored at or before `time_ms`. If there is none, the first message.
        - "nearest": the answer of RocketMQ 4.9, see `queue_reader.TimeSearch`.

        Return 0 for a queue that is only in topics.json. Raises OptionError if `rule` is none of these.
        """
        if rule not in RULES:
            raise OptionError(f'rule="{rule}" is none of: {", ".join(RULES)}.')
        queue_files = self._queue(queue)
        if queue_files is None:
            return 0
        first, end = self._entry_bounds(queue_files)
        number = TimeSearch(self._log, queue_files, first, end).unit_at(time_ms, rule)
        offset = queue_files.offset_of(number, end)
        queue_files.run.close()
        return offset

    def record_bytes(self, queue: QueueKey, begin: int, end: int) -> int:
        """Return the size in the log (bytes) of the records whose first message has a queue offset in [begin, end)."""
        return self._survey(queue, begin, end).record_bytes() if begin < end else 0

    def offset_within_bytes(self, queue: QueueKey, begin: int, end: int, max_bytes: int) -> int:
        """Return the largest offset <= `end` such that the records from `begin` to it take at most `max_bytes`."""
        return self._survey(queue, begin, end).offset_within_bytes(max_bytes) if begin < end else end

    def wanted_share(self, queue: QueueKey, begin: int, end: int, wanted: RowFilter, samples: int) -> float:
        """Estimate the share (0 to 1) of the messages [begin, end) that pass the filter `wanted`.

        The range must not be empty. For `samples` see `RangeStatistics.wanted_share`.
        """
        return self._survey(queue, begin, end).wanted_share(wanted, samples)

    def proof(self, queue: QueueKey, offset: int) -> RecordProof:
        """Return the physical offset and the store time of the message at queue offset `offset`.

        Raises DamageError if the message's entry does not point to a record.
        """
        queue_files, end = self._readable(queue, offset, offset + 1)
        number = queue_files.unit_of(offset, end)
        entries = queue_files.read(number, number + 1)
        physical_offset = int(entries.physical_offsets[0]) if len(entries) else -1
        record = self._log.record_at(physical_offset) if physical_offset >= 0 else None
        if not isinstance(record, Record):
            path, position = queue_files.run.path_of(number)
            what = f"physical offset in the entry of queue offset {offset} of {queue}"
            raise DamageError(what, path, position, "that of a record", physical_offset)
        queue_files.run.close()
        return RecordProof(physical_offset, record.store_timestamp)

    def find_key(self, topic: str, key: str, begin_ms: int = 0, end_ms: int = 2**63 - 1) -> list[tuple[QueueKey, int]]:
        """Return (queue, queue offset) of each of the topic's messages with this key, sorted.

        A message matches if the key is its UNIQ_KEY or one of its KEYS. For a message in an inner batch, its own keys
        are compared; its own UNIQ_KEY is the msgId that its sender got. Only messages stored in [begin_ms, end_ms] are
        returned.

        If the key index is missing, partial or damaged, the messages that it does not cover are read instead, and a
        warning is logged.
        """
        return self._messages_with(self.queues(topic), KeyLookup(keys=(key,)), begin_ms, end_ms)

    def find_message_id(self, message_id: str, topics: Sequence[str]) -> list[tuple[QueueKey, int]]:
        """Return (queue, queue offset) of each message in these topics with this id, sorted. [] if there is none.

        The id is an offsetMsgId or a UNIQ_KEY. If the key index is incomplete, messages are read instead, as in
        `find_key`.
        """
        self._refuse_if_closed()
        queues = [queue for topic in sorted({*topics} & {*self.topics()}) for queue in self.queues(topic)]
        return self._messages_with(queues, KeyLookup(message_ids=(message_id,)), 0, 2**63 - 1)

    def search(self, ranges: Sequence[QueueRange], sought: KeyLookup) -> SearchAnswer:
        """Return the positions of messages in the ranges that have one of the keys or ids.

        Every range must exist and must not be empty. The index may not cover some parts of the ranges; the answer lists
        these parts as `unknown`, and the caller must read them. The reason is logged.
        """
        self._refuse_if_closed()
        answer = self._search.search(ranges, sought)
        log_reading_instead(answer, self.record_bytes)
        return answer

    def read(
        self,
        queue: QueueKey,
        begin: int,
        end: int,
        columns: Sequence[str],
        *,
        tags: str | None = None,
        sql92: str | None = None,
        check_crc: bool = False,
        max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the messages with queue offsets [begin, end) in order, as batches of these columns.

        If `tags` (such as "A || B") or `sql92` (such as "a > 5") is given, yield only matching messages. A record is
        not read if its entry alone shows that it does not match. A batch has at most 32,768 records and about 16 MiB of
        the log. `end` may be greater than the last result of `bounds` if the queue has grown since: another process may
        have planned the range.

        Raises OptionError for an unknown column or an invalid expression. Raises OffsetRangeError if the queue does not
        have the whole range. Raises DamageError if an entry or record is damaged, and StoreChangedError if files are
        removed during the read. All rows that were yielded before an error are correct.
        """
        wanted = compile_filter(make_expression(tags=tags, sql92=sql92))
        limits = DecodeLimits(check_crc, max_decompressed_bytes)
        for found in self.read_with_progress(queue, begin, end, columns, limits, wanted):
            if found.batch.num_rows:
                yield found.batch

    def read_with_progress(
        self,
        queue: QueueKey,
        begin: int,
        end: int,
        columns: Sequence[str],
        limits: DecodeLimits,
        wanted: RowFilter | None,
    ) -> Iterator[ReadBatch]:
        """Yield the same batches as `read`, each with the queue offset up to which the queue has been searched.

        Empty batches report progress: after a long part without a match, and at the end.
        """
        refuse_unknown_columns(columns, COLUMNS)
        if begin >= end:
            return
        queue_files, entries_end = self._readable(queue, begin, end)
        for found in read_range(self._log, queue_files, begin, end, entries_end, columns, limits, wanted):
            yield found
            self._refuse_if_closed()  # after `close`, another read would open files that nobody closes

    def _queue(self, key: QueueKey) -> ConsumeQueue | None:
        """Return the queue's files, or None if the queue has no folder. Every method that takes a queue calls this.

        Raises NotFoundError if neither topics.json nor the registry nor a folder names the queue.
        """
        self._refuse_if_closed()
        if not isinstance(key, QueueKey):
            raise OptionError(
                f'invalid queue: found {key!r}; expected a QueueKey. Give one that queues("orders") returns, or '
                'QueueKey("orders", 0).'
            )
        found = None if key.broker else self._topics.find(key)
        if found is None and key not in self._faults() and (key.broker or not self._topics.has(key)):
            known = ", ".join(one.id_text for one in self.queues(key.topic))
            raise NotFoundError(f'topic "{key.topic}" has no queue {key.id_text}. Its queues are: {known}.')
        return found

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise StoreError(f'the reader of the store at "{self.path}" was closed. Open another one.')

    def _entry_bounds(self, queue: ConsumeQueue) -> tuple[int, int]:
        """Return the range of entry numbers as of the last refresh. Raises StoreChangedError if files are gone now."""
        self._raise_fault(queue.key)
        end = self._log_end.ends.get(queue.key, queue.run.begin)
        if queue.run.begin > end:
            found = f"its files begin at entry {queue.run.begin}; expected entry {end - 1} or an earlier one"
            raise StoreChangedError(f"cannot read queue {queue.key}: {found}. Plan the read again.")
        if queue.key not in self._min_entries:
            log_begin = self._log.segments.begin
            first = queue.first_from(log_begin, end)
            # If the first segment is gone by now, the queue's first file may have expired with it.
            if not first or log_begin or self._log.is_begin_there():
                queue.refuse_hole_before(first, log_begin)
            queue.refuse_wrong_begin(first, end, log_begin, self._log.record_at)
            self._min_entries[queue.key] = first
        return self._min_entries[queue.key], end

    def _raise_fault(self, key: QueueKey) -> None:
        if not self._is_refreshed:
            self.refresh()
        faults = self._faults()
        if key in faults:
            raise faults[key]

    def _warn_of_missing_files(self, topic: str) -> None:
        """Warn once per topic about queues without files, except queues that are known to have never had a message."""
        config, doubt = self._topics.configs.get(topic), self._doubt
        if config is None or doubt is None or topic in self._warned or is_system_topic(topic):
            return
        self._warned.add(topic)
        count, queues, faults = min(config.read_queue_count, MAX_QUEUES), self._topics.queues, self._faults()
        keys = [QueueKey(topic, queue_id) for queue_id in range(count)]
        without = [key for key in keys if key not in faults and (key not in queues or newest_unit(queues[key]) < 0)]
        named = [str(key.queue_id) for key in without if doubt.is_about(key)]
        if named:
            shown = ", ".join(named[:20]) + (", …" if len(named) > 20 else "")
            _LOG.warning(
                'rmq: %s: topic "%s": queues [%s] have no files: they never had a message, or their files are lost. '
                "Run `rmq check` to find out",
                self.path,
                topic,
                shown,
            )

    def _readable(self, key: QueueKey, begin: int, end: int) -> tuple[ConsumeQueue, int]:
        """Return the queue's files, and the number after an entry such that all entries of [begin, end) are before it.

        All entries below that number are written. Raises OffsetRangeError if the queue does not have the whole range.
        """
        queue = self._queue(key)
        if queue is None:
            self._raise_fault(key)
            raise OffsetRangeError(str(key), begin, end, 0, 0)
        entries_end = queue.end_for(end)
        first = queue.first_from(self._log.segments.begin, entries_end)
        bounds = QueueBounds(queue.offset_of(first, entries_end), queue.offset_of(entries_end, entries_end))
        if begin < bounds.min_offset or end > bounds.max_offset:
            bounds = self.bounds(key)  # for the whole queue, because `entries_end` may only cover the range
            raise OffsetRangeError(str(key), begin, end, bounds.min_offset, bounds.max_offset)
        return queue, entries_end

    def _survey(self, key: QueueKey, begin: int, end: int) -> RangeStatistics:
        queue, entries_end = self._readable(key, begin, end)
        return RangeStatistics(queue, begin, end, entries_end)

    def _messages_with(
        self, queues: Sequence[QueueKey], sought: KeyLookup, begin_ms: int, end_ms: int
    ) -> list[tuple[QueueKey, int]]:
        """Return (queue, queue offset) of the matching messages that were stored in [begin_ms, end_ms], sorted."""
        bounds = {queue: self.bounds(queue) for queue in queues}
        ranges = [QueueRange(queue, one.min_offset, one.max_offset) for queue, one in bounds.items()]
        answer = self.search([part for part in ranges if part.count], sought)
        return read_found(answer, sought, begin_ms, end_ms, self.read)
