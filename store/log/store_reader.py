"""A store opened for reading: topics, queues, bounds, times, ranges. It changes nothing on disk.

The layers below do the work; here they are put together, and names that a user typed meet what is there.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

import pyarrow as pa

from rmq_spark.store.disk import files
from rmq_spark.store.disk.mounts import is_remote
from rmq_spark.store.errors import (
    DamageError,
    NotFoundError,
    OffsetRangeError,
    OptionError,
    StoreChangedError,
    StoreError,
)
from rmq_spark.store.filter.row_filter import RowFilter, compile_filter, make_expression
from rmq_spark.store.format import filenames
from rmq_spark.store.format.columns import COLUMNS
from rmq_spark.store.format.config_json import TopicConfig
from rmq_spark.store.format.queue_registry import RegisteredQueues
from rmq_spark.store.format.queue_unit import QUEUE_UNIT
from rmq_spark.store.format.record import Record
from rmq_spark.store.format.rows import DecodeLimits
from rmq_spark.store.format.sought import Sought
from rmq_spark.store.format.store_settings import StoreSettings
from rmq_spark.store.log.chain import Closing
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.index_reach import IndexFolder, last_indexed_place
from rmq_spark.store.log.left_behind import how_left, index_safe_until_ms, read_checkpoint
from rmq_spark.store.log.lost_queues import MAX_UNIT, QueueDoubt, find_lost_queues, newest_unit, refuse_lost_folder
from rmq_spark.store.log.message_search import MessageSearch, SearchAnswer, Span, log_reading_instead, read_found
from rmq_spark.store.log.queue_registry import read_registry, registry_path
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.log.range_reader import Read, read_range
from rmq_spark.store.log.rebuilding import being_rebuilt, read_rebuild
from rmq_spark.store.log.settings_file import read_settings
from rmq_spark.store.log.store_kind import commit_log_folders
from rmq_spark.store.log.tail import LogTail
from rmq_spark.store.log.time_search import RULES, TimeSearch
from rmq_spark.store.log.topics import MAX_QUEUES, TopicTable, describe_missing_topic
from rmq_spark.store.log.unit_survey import UnitSurvey
from rmq_spark.store.options import MAX_DECOMPRESSED_BYTES, READ_MODES
from rmq_spark.store.units import QueueBounds, QueueKey, RecordProof

_LOG = logging.getLogger("rmq_spark")
_FEW_RECORDS = 2048  # appended since the last look: fewer are walked one by one to learn whose they are


class StoreReader:
    """A store for reading, as of the last `refresh`. One thread at a time.

    Use it in `with`, or `close` it: then whatever looks at the store, but `close`, raises StoreError.

    Any number of them may read beside a writer, of ours or a broker. Nothing is looked at before it is asked
    for: a process that only reads a planned range pays for no log end.
    """

    def __init__(self, path: str, *, commit_log_path: str | None = None, read_mode: str = "auto") -> None:
        if read_mode not in READ_MODES:
            raise OptionError(f'readMode="{read_mode}" is none of: {", ".join(READ_MODES)}.')
        self.path = files.absolute(path)
        folders = commit_log_folders(self.path, commit_log_path)
        mapped = read_mode == "mmap" or (read_mode == "auto" and not any(map(is_remote, folders)))
        self._log = CommitLog(folders, mapped=mapped)
        self._topics = TopicTable(self.path)
        self._index = IndexFolder(self.path)
        self._search = MessageSearch(self._index, self._log, self._readable, lambda: index_safe_until_ms(self.path))
        self._tail = LogTail(
            self._log,
            lambda: how_left(self.path),
            lambda: read_checkpoint(self.path),
            self._topics.may_exist,
            lambda: last_indexed_place(self.path),
        )
        self._min_units: dict[QueueKey, int] = {}
        self._lost: dict[QueueKey, StoreError] = {}  # queues whose files are gone, or cannot be listed
        self._doubt: QueueDoubt | None = None
        self._doubted: set[str] = set()  # topics that were warned of
        self._looked = self._is_closed = False
        self.registry_stamp: tuple[int, int, int] | None = None  # of before the last look at the queues
        self._is_in_rebuild = False  # at the last look a repair made queues anew

    def __enter__(self) -> Self:
        self._refuse_if_closed()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every file. A second call does nothing; reading is over, also of what `read` has yet to yield."""
        self._is_closed = True
        self._log.close()
        self._index.close()
        for queue in self._topics.opened():
            queue.run.close()

    def store_id(self) -> str | None:
        """Return what our writers named the store by, None for one that only brokers have written."""
        self._refuse_if_closed()
        held = read_settings(self.path)
        return held.store_id if isinstance(held, StoreSettings) else None

    def topics(self) -> list[str]:
        """Return the names of all topics, sorted: those of topics.json and those that have a queue on disk."""
        self._refuse_if_closed()
        return sorted({*self._topics.topics(), *(key.topic for key in self._faults())})

    def queues(self, topic: str) -> list[QueueKey]:
        """Return the topic's queues by queue id, empty ones included. Raises NotFoundError, which names others."""
        self._refuse_if_closed()
        if topic.startswith(filenames.LIGHT_QUEUE_PREFIX):
            raise NotFoundError(
                f'topic "{topic}": light message queues ({filenames.LIGHT_QUEUE_PREFIX}…) are not supported.'
            )
        found = sorted({*self._topics.queues_of(topic), *(key for key in self._faults() if key.topic == topic)})
        if not found:
            raise NotFoundError(describe_missing_topic(topic, self.topics(), self.path))
        return found

    def topic_configs(self) -> Mapping[str, TopicConfig]:
        """Return what topics.json says now, by topic, {} without one. It is the same object while the file is."""
        self._refuse_if_closed()
        self._topics.look_at_configs()
        return self._topics.configs

    def refresh(self) -> bool:
        """Look at the disk again; say whether bounds, queues or topics may have moved since the last look.

        An idle store costs a few small reads, whatever the number of queues. Raises DamageError for a log that
        cannot be followed to its end.
        """
        self._refuse_if_closed()
        if self._looked and not self._lost and self._tail.is_idle(self._topics.has_folder):
            return False
        self.registry_stamp = files.stamp(registry_path(self.path))
        left = how_left(self.path)
        begin = self._log.segments.begin
        self._log.look()
        if begin != self._log.segments.begin:
            self._min_units.clear()  # retention moved the log's begin, and with it that of queues
        touched = None
        if self._looked and not self._lost and not self._tail.is_rewritten():
            touched = self._tail.appended(_FEW_RECORDS)
        is_listed, registered = self._list_queues(touched)
        queues = self._topics.queues
        if touched is not None:
            chosen = touched & queues.keys()
            for key in chosen:
                queues[key].run.look()
            self._tail.look(queues, chosen, whole=False, left=left)
        else:
            # What was judged before stays judged unless the log was written anew.
            whole = not self._looked or self._is_in_rebuild or self._tail.is_rewritten()
            if whole:
                self._min_units.clear()
            self._tail.look(queues, queues, whole=whole, left=left)
        if is_listed:
            self._find_lost(registered)
        # After the look: a repair that began before it may have removed files meanwhile.
        rebuild = read_rebuild(self.path)
        self._is_in_rebuild = rebuild is not None
        self._lost.update({key: being_rebuilt(self.path, key) for key in (rebuild.queues if rebuild else ())})
        for queue in queues.values():
            queue.run.close()
        self._looked = True
        return True

    def _list_queues(self, touched: set[QueueKey] | None) -> tuple[bool, RegisteredQueues | None]:
        """List topics and queues again where `touched` has unknown ones, or is None; say so, with the registry then."""
        unknown = touched - self._topics.queues.keys() if touched is not None else set()
        if touched is None or any(self._topics.has_folder(key) for key in unknown):
            registered = read_registry(self.path)  # before the folders: a live writer makes a queue's file first
            self._topics.look()
            return True, registered
        if unknown:  # whose topic may have been deleted: their records say nothing then
            self._topics.look_at_configs()
        return False, None

    def _find_lost(self, registered: RegisteredQueues | None) -> None:
        """Find the queues whose files are gone, after the folders were listed. Raises DamageError if all are."""
        queues = self._topics.queues
        # A broker at work makes the folder after it has logged its first message.
        has_queues = any(queue.layout is QUEUE_UNIT for queue in queues.values())
        if not has_queues and how_left(self.path).closing is not Closing.LIVE:
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
        """Return the queues that cannot be read, and why."""
        return {**self._tail.faults, **self._lost}

    @property
    def log_end(self) -> int:
        """The physical offset behind the last record that is believed, as of the last refresh."""
        return self._tail.end

    def bounds(self, queue: QueueKey) -> QueueBounds:
        """Return what of the queue can be read, as of the last refresh.

        Raises NotFoundError for a queue that is not there and DamageError for one whose end cannot be told.
        """
        held = self._bounds(queue)
        if not held.max_offset:
            self._warn_of_doubt(queue.topic)
        return held

    def _bounds(self, queue: QueueKey) -> QueueBounds:
        """Return what `bounds` does, for a look at all topics: without a warning of queues that have no files."""
        files_of = self._queue(queue)
        if files_of is None:
            self._raise_fault(queue)
            return QueueBounds(0, 0)  # only topics.json knows it
        try:
            first, end = self._unit_bounds(files_of)
        except StoreChangedError:  # retention took its first files since they were listed
            first, end = self._unit_bounds(files_of)
        held = QueueBounds(files_of.offset_of(first, end), files_of.offset_of(end, end))
        if held.min_offset > held.max_offset:
            path, position = files_of.run.path_of(first)
            raise DamageError(f"first unit of {queue}", path, position, f"up to {held.max_offset}", held.min_offset)
        files_of.run.close()  # there may be more queues than a process may have files open
        return held

    def offset_at_time(self, queue: QueueKey, time_ms: int, rule: str = "lower") -> int:
        """Return the queue offset for a moment (ms since the epoch).

        "lower": the first message stored at or after it, the queue's max offset if there is none; "upper": the
        last one stored at or before it; "nearest": as RocketMQ 4.9 answers. See `time_search`.
        """
        if rule not in RULES:
            raise OptionError(f'rule="{rule}" is none of: {", ".join(RULES)}.')
        files_of = self._queue(queue)
        if files_of is None:
            return 0
        first, end = self._unit_bounds(files_of)
        unit = TimeSearch(self._log, files_of, first, end).unit_at(time_ms, rule)
        offset = files_of.offset_of(unit, end)
        files_of.run.close()
        return offset

    def record_bytes(self, queue: QueueKey, begin: int, end: int) -> int:
        """Return the bytes of the records that begin in the queue offsets [begin, end), as they lie in the log."""
        return self._survey(queue, begin, end).record_bytes() if begin < end else 0

    def offset_within_bytes(self, queue: QueueKey, begin: int, end: int, max_bytes: int) -> int:
        """Return the largest offset up to `end` such that the records from `begin` to it take at most `max_bytes`."""
        return self._survey(queue, begin, end).offset_within_bytes(max_bytes) if begin < end else end

    def wanted_share(self, queue: QueueKey, begin: int, end: int, wanted: RowFilter, places: int) -> float:
        """Return about which part of the messages [begin, end), not none, a filter lets by, see `UnitSurvey`."""
        return self._survey(queue, begin, end).wanted_share(wanted, places)

    def proof(self, queue: QueueKey, offset: int) -> RecordProof:
        """Return where the message of a queue offset lies and when it was stored."""
        files_of, end = self._readable(queue, offset, offset + 1)
        unit = files_of.unit_of(offset, end)
        units = files_of.read(unit, unit + 1)
        place = int(units.physical_offsets[0]) if len(units) else -1
        record = self._log.record_at(place) if place >= 0 else None
        if not isinstance(record, Record):
            path, position = files_of.run.path_of(unit)
            raise DamageError(f"unit of queue offset {offset} of {queue}", path, position, "a record", place)
        files_of.run.close()
        return RecordProof(place, record.store_timestamp)

    def find_key(self, topic: str, key: str, begin_ms: int = 0, end_ms: int = 2**63 - 1) -> list[tuple[QueueKey, int]]:
        """Return queue and queue offset of the topic's messages with this key, in order.

        A message counts by any of its KEYS or by its UNIQ_KEY, or those of the inner batch that it is in (the msgId
        that its sender was told), and only if it was stored in [begin_ms, end_ms]. Where the index is missing, partial
        or damaged messages are read instead, and the log says so.
        """
        return self._messages_with(self.queues(topic), Sought(keys=(key,)), begin_ms, end_ms)

    def find_message_id(self, message_id: str, topics: Sequence[str]) -> list[tuple[QueueKey, int]]:
        """Return queue and queue offset of the message with this id, an offsetMsgId or a UNIQ_KEY, in these topics.

        [] for an id that no message there has. Where the index does not tell, as `find_key`.
        """
        self._refuse_if_closed()
        queues = [queue for topic in sorted({*topics} & {*self.topics()}) for queue in self.queues(topic)]
        return self._messages_with(queues, Sought(message_ids=(message_id,)), 0, 2**63 - 1)

    def search(self, spans: Sequence[Span], sought: Sought) -> SearchAnswer:
        """Return where in the spans, which are there and not empty, messages with one of the keys or ids lie.

        What the answer calls unknown is to be read: the index does not tell of it, and the log says why.
        """
        self._refuse_if_closed()
        answer = self._search.search(spans, sought)
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
        """Yield the messages with queue offsets [begin, end) in order, as batches of just these columns.

        With `tags` ("A || B") or `sql92` ("a > 5") only those that match: what their units rule out is not touched.
        A batch has at most 32,768 records and about 16 MiB of the log. The range need not lie within the last
        `bounds`, only within what is there: a plan may have been made elsewhere. Raises OptionError for an
        unknown column or a wrong expression, OffsetRangeError for a range that is not there, DamageError,
        StoreChangedError; all rows yielded before are right.
        """
        wanted = compile_filter(make_expression(tags=tags, sql92=sql92))
        limits = DecodeLimits(check_crc, max_decompressed_bytes)
        for found in self.read_on(queue, begin, end, columns, limits, wanted):
            if found.batch.num_rows:
                yield found.batch

    def read_on(
        self,
        queue: QueueKey,
        begin: int,
        end: int,
        columns: Sequence[str],
        limits: DecodeLimits,
        wanted: RowFilter | None,
    ) -> Iterator[Read]:
        """Yield what `read` yields, with how far it came: also where nothing was wanted for long, and at the end."""
        if isinstance(columns, str):
            raise OptionError(f'columns="{columns}" is a text. Give a list of names, such as ["{columns}"].')
        unknown = [name for name in columns if name not in COLUMNS]
        if unknown:
            raise OptionError(f"no such column: {', '.join(unknown)}. Columns are: {', '.join(COLUMNS)}.")
        if begin >= end:
            return
        files_of, units_end = self._readable(queue, begin, end)
        for found in read_range(self._log, files_of, begin, end, units_end, columns, limits, wanted):
            yield found
            self._refuse_if_closed()  # while the batch was at work: to go on would open files that nobody closes

    def _queue(self, key: QueueKey) -> ConsumeQueue | None:
        """Return the queue's files, None if only topics.json knows it. What asks for a queue comes through here."""
        self._refuse_if_closed()
        if not isinstance(key, QueueKey):
            raise OptionError(
                f'{key!r} is no queue. Give one of those that queues("orders") returns, or QueueKey("orders", 0).'
            )
        found = self._topics.find(key)
        if found is None and key not in self._faults() and not self._topics.has(key):
            known = ", ".join(str(one.queue_id) for one in self.queues(key.topic))
            raise NotFoundError(f'topic "{key.topic}" has no queue {key.queue_id}. Its queues are: {known}.')
        return found

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise StoreError(f'the reader of the store at "{self.path}" was closed. Open another one.')

    def _unit_bounds(self, queue: ConsumeQueue) -> tuple[int, int]:
        """Return first and end unit that can be read, as of the last refresh."""
        self._raise_fault(queue.key)
        end = self._tail.ends.get(queue.key, queue.run.begin)
        if queue.key not in self._min_units:
            first = queue.first_from(self._log.segments.begin, end)
            queue.refuse_hole_before(first, self._log.segments.begin)
            queue.refuse_wrong_begin(first, end, self._log.segments.begin, self._log.record_at)
            self._min_units[queue.key] = first
        return self._min_units[queue.key], end

    def _raise_fault(self, key: QueueKey) -> None:
        if not self._looked:
            self.refresh()
        faults = self._faults()
        if key in faults:
            raise faults[key]

    def _warn_of_doubt(self, topic: str) -> None:
        """Warn, once for each topic, of queues without files of which nothing tells that they never had a message."""
        config, doubt = self._topics.configs.get(topic), self._doubt
        if config is None or doubt is None or topic in self._doubted or filenames.is_system_topic(topic):
            return
        self._doubted.add(topic)
        count, queues, faults = min(config.read_queue_count, MAX_QUEUES), self._topics.queues, self._faults()
        keys = [QueueKey(topic, queue_id) for queue_id in range(count)]
        without = [key for key in keys if key not in faults and (key not in queues or newest_unit(queues[key]) < 0)]
        named = [str(key.queue_id) for key in without if doubt.is_about(key)]
        if named:
            shown = ", ".join(named[:20]) + (", …" if len(named) > 20 else "")
            _LOG.warning(
                'rmq: %s: topic "%s": queues [%s] have no files: they never had a message, or their files are lost; '
                "`rmq check` tells which",
                self.path,
                topic,
                shown,
            )

    def _readable(self, key: QueueKey, begin: int, end: int) -> tuple[ConsumeQueue, int]:
        """Return the queue's files and the number after its last written unit, if it has [begin, end)."""
        queue = self._queue(key)
        if queue is None:
            self._raise_fault(key)
            raise OffsetRangeError(str(key), begin, end, 0, 0)
        units_end = queue.end_for(end)
        first = queue.first_from(self._log.segments.begin, units_end)
        held = QueueBounds(queue.offset_of(first, units_end), queue.offset_of(units_end, units_end))
        if begin < held.min_offset or end > held.max_offset:
            held = self.bounds(key)  # of the whole queue: what was looked at ends where the range does
            raise OffsetRangeError(str(key), begin, end, held.min_offset, held.max_offset)
        return queue, units_end

    def _survey(self, key: QueueKey, begin: int, end: int) -> UnitSurvey:
        queue, units_end = self._readable(key, begin, end)
        return UnitSurvey(queue, begin, end, units_end)

    def _messages_with(
        self, queues: Sequence[QueueKey], sought: Sought, begin_ms: int, end_ms: int
    ) -> list[tuple[QueueKey, int]]:
        """Return what is sought of these queues and was stored in [begin_ms, end_ms], sorted."""
        bounds = {queue: self.bounds(queue) for queue in queues}
        spans = [Span(queue, held.min_offset, held.max_offset) for queue, held in bounds.items()]
        answer = self.search([span for span in spans if span.begin < span.end], sought)
        return read_found(answer, sought, begin_ms, end_ms, self.read)
