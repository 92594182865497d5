"""Delay levels: which messages in the queues of SCHEDULE_TOPIC_XXXX are due, and the records that deliver them.

Messages of level n wait in queue n - 1, in the order in which they were stored. In these queues, the tags code of a
consume-queue entry is the time at which its message is due. All messages of a level have the same delay, so a scan ends
at the first message that is not due.

| what is found | what is done |
| --- | --- |
| a due time later than now plus the delay, and later than the last message's store time plus the delay | due now (1) |
| the store's last message has a store time more than an hour after now | due times are compared with now only (2) |
| a level that the store's table does not have | a message is due at the time in its entry, whatever that is |
| no record, a damaged record, or an invalid or missing REAL_TOPIC or REAL_QID | skipped for ever, and logged |
| REAL_TOPIC is the topic of half messages | skipped for ever, and logged |
| the offset where delivery resumes is before the first entry, or after the last | resumes at the first, or at the end |
| the offset in the metadata is after the last entry | ignored, and delayOffset.json is used (3) |

(1) When the message was stored, the level had a longer delay or the clock was ahead. (2) The clock was wrong when the
last message was stored. (3) The store was replaced by an older copy.

The properties of a delivered message are byte by byte those of the message that waited, except the CRC of the record.

RocketMQ compares a due time only with the clock, which it reads after the entry. Here the clock is read before the
entry. Meanwhile other processes may store messages, and their clocks may be ahead. So due times are also compared with
the store time of the last message.
Source: ScheduleMessageService#executeOnTimeup, #correctDeliverTimestamp, #correctDelayOffset, #messageTimeup (4.9.8,
5.3).
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.delivery.delay_source import Due, Metadata, Outlook
from rmq_spark.store.delivery.record_lookup import read_originals
from rmq_spark.store.disk import files
from rmq_spark.store.errors import OptionError, StoreChangedError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.consume_queue_entry import BLANK_FILL_OFFSET, BLANK_FILL_SIZE, is_blank_fill
from rmq_spark.store.format.delay_levels import DelayLevels
from rmq_spark.store.format.message_columns import Topics
from rmq_spark.store.format.message_encoder import EncodedRecords
from rmq_spark.store.format.properties import PropertyPairs
from rmq_spark.store.format.property_encoder import UniformPairs
from rmq_spark.store.format.record import BLANK_BYTES
from rmq_spark.store.format.record_batch import WholeRecords
from rmq_spark.store.format.record_rewrite import rebuild_records
from rmq_spark.store.format.timer import REAL_QID, REAL_TOPIC
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.consume_queue import ConsumeQueue, Entries
from rmq_spark.store.log.delay_offsets import DelayOffsetFile
from rmq_spark.store.log.store_state import read_watermark
from rmq_spark.store.log.write_session import WriteSession
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import MAX_DERIVED_TOPIC_CHARS, SCHEDULE_TOPIC, WAITING_TOPICS, check_topic_name

HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"

_LOG = logging.getLogger("rmq_spark")
_FIRST_READ_ENTRIES = 64  # few, because usually few messages are due
_MAX_READ_ENTRIES = 32_768
_AHEAD_ENTRIES = 256  # read after the entry where delivery resumes: more than fit into a page, which may be all zeros
_NEVER_MS = 2**63 - 1
_WRONG_CLOCK_MS = 3_600_000  # a last store time that is further ahead of now is ignored
_MAX_LOGGED_ROWS = 5  # of the messages that are skipped together, this many are logged with a line each
_MAX_QUEUE_ID = 2**31 - 1
_GROWTH_BYTES = MAX_DERIVED_TOPIC_CHARS + 1  # a record grows by at most this if its topic is replaced
_NO_QUEUE = -1


def metadata_key(level: int) -> str:
    """Return the key of a level in the ledger's metadata. The value is the next queue offset to deliver."""
    return f"level.{level}"


@dataclass(slots=True)
class _Level:
    """The state of one level when `prepare` was last called. Messages at the queue offsets [next, end) wait."""

    number: int
    queue: ConsumeQueue
    next: int = 0
    end: int = 0
    is_overstated: bool = False  # True if, by the metadata, more messages were delivered than the queue has
    idle_at: int = -1  # the offset at which `prepare` found that no message waits; -1 if some do


class DelayQueues:
    """The DelaySource of the messages of all delay levels of one store. For one thread at a time.

    `folders` are the folders of the commit log, `offsets` is the store's delayOffset.json, and `levels` returns the
    store's table of delay levels.
    """

    def __init__(
        self,
        root: str,
        folders: tuple[str, ...],
        offsets: DelayOffsetFile,
        levels: Callable[[], DelayLevels],
    ) -> None:
        self._root, self._folder = root, files.join(root, filenames.CONSUME_QUEUE, SCHEDULE_TOPIC)
        self._offsets, self._read_levels = offsets, levels
        self._log = CommitLog(folders, mapped=False)
        self._levels: dict[int, _Level] = {}
        self._delays = levels()
        self._segment_bytes = 0
        self._last_ms = 0  # the store time of the store's last message, if it is known, in ms

    def close(self) -> None:
        """Close the files. Later calls open them again."""
        self._log.close()
        for level in self._levels.values():
            level.queue.run.close()

    def refresh(self, now_ms: int, metadata: Metadata) -> Outlook:
        """Return whether a message is due or an offset must be corrected. Makes a few small reads for each level."""
        self._list_levels()
        offsets = self._offsets.read() if self._levels else {}
        outlook = Outlook()
        for level in self._levels.values():
            begin = _next_offset(level.number, offsets, metadata)
            file_lags = metadata.get(metadata_key(level.number), 0) > offsets.get(level.number, 0)
            found = Outlook(True) if file_lags else self._outlook_of(level, begin, now_ms)
            level.queue.run.close()
            outlook = outlook.joined(found)
        return outlook

    def prepare(self, section: WriteSession, now_ms: int, metadata: Metadata) -> None:
        """Find out where the waiting messages of each level begin and end, and correct delayOffset.json."""
        self._list_levels()
        self._log.refresh()
        self._segment_bytes, self._last_ms = section.segment_bytes, section.last_ms
        offsets, corrected = self._offsets.read() if self._levels else {}, {}
        for level in self._levels.values():
            level.queue.run.refresh()
            level.end = section.next_offset(SCHEDULE_TOPIC, level.queue.key.queue_id)
            recorded = _next_offset(level.number, offsets, metadata)
            level.is_overstated = metadata.get(metadata_key(level.number), 0) > level.end
            # The store is an older copy. The metadata does not apply to messages that were stored in this copy.
            known = _next_offset(level.number, offsets, {}) if level.is_overstated else recorded
            level.next = self._corrected(level, known)
            level.idle_at = level.next if level.next >= level.end else -1
            level.queue.run.close()
            if level.next != offsets.get(level.number, 0):
                corrected[level.number] = level.next
            if level.next < recorded:
                _LOG.error(
                    "rmq: delay level %d: delivery was at queue offset %d, but %s has [%d, %d): it resumes at %d",
                    level.number, recorded, level.queue.key, min(level.next, level.end), level.end, level.next,
                )  # fmt: skip
        if corrected:
            # The messages up to these offsets are committed by now. A crash before this write leaves older offsets in
            # the file, and the right ones in the metadata.
            self._offsets.write(corrected)

    def take(self, now_ms: int, room_bytes: int, room_count: int) -> Due:
        """Return the messages that are due, starting with the level whose first message has been due for longest."""
        firsts = [
            (int(level.queue.read(level.next, level.next + 1).tags_codes[0]), level.number)
            for level in self._levels.values()
            if level.next < level.end
        ]
        records: list[EncodedRecords] = []
        # Correct overstated offsets now. If the queue grew beyond them, messages before them would not be delivered.
        metadata = {metadata_key(level.number): level.next for level in self._levels.values() if level.is_overstated}
        for _, number in sorted(firsts):
            level, begin = self._levels[number], self._levels[number].next
            end = begin
            while room_count > 0 and room_bytes > 0 and end < level.end:
                entries = self._due_entries(level, end, now_ms, room_bytes, room_count, is_first=not records)
                if not len(entries):
                    break
                built = self._build_records(level, entries)
                if built is not None:
                    records.append(built)
                    room_bytes -= len(built.data)
                end += len(entries)
                room_count -= len(entries)
            level.queue.run.close()
            if end > begin:
                metadata[metadata_key(number)] = end
        return Due(tuple(records), metadata)

    def _list_levels(self) -> None:
        """Update the table of delay levels, and list the levels that have a folder. Does not list their files."""
        self._delays = self._read_levels()
        names = {name for name, is_folder in files.list_folder(self._folder) if is_folder and name.isascii()}
        numbers = {int(name) + 1: name for name in names if name.isdigit() and len(name) < 10}
        self._levels = {
            number: self._levels.get(number)
            or _Level(number, ConsumeQueue(QueueKey(SCHEDULE_TOPIC, number - 1), files.join(self._folder, name)))
            for number, name in sorted(numbers.items())
        }

    def _outlook_of(self, level: _Level, begin: int, now_ms: int) -> Outlook:
        """Return the outlook on a level. Reads entries around queue offset `begin`, where delivery resumes."""
        run = level.queue.run
        try:
            if begin >= run.end or begin < run.begin:
                run.refresh()  # files may be new, or retention may have deleted some
            first = max(begin, run.begin)
            before = max(first - 1, run.begin)
            entries = run.read(before, first + _AHEAD_ENTRIES)
        except StoreChangedError:
            run.refresh()
            return Outlook(True)  # the files have changed; `prepare` reads them again
        is_written = level.queue.are_written(entries).tolist()
        at = first - before
        if not any(is_written[at:]):
            is_beyond_end = first > run.end or not all(is_written[:at])  # then `prepare` must correct it to the end
            return Outlook(begin > run.begin and is_beyond_end)
        if not is_written[at]:
            return Outlook(begin != level.idle_at)  # a damaged entry, with messages after it
        physical_offset, size, due_ms = entries[at].tolist()
        if first != begin or (physical_offset, size) == (BLANK_FILL_OFFSET, BLANK_FILL_SIZE):
            return Outlook(True)
        if due_ms < 0:
            due_ms = int(self._due_times(level, level.queue.read(first, first + 1))[0])
        if due_ms > self._latest_due(level, now_ms):
            # Read the watermark after the entry. So it has the store time of the entry's message, or will have it soon.
            watermark = read_watermark(self._root)
            self._last_ms = max(self._last_ms, 0 if watermark is None else watermark.last_ms)
        is_due = due_ms <= now_ms or due_ms > self._latest_due(level, now_ms)
        return Outlook(True) if is_due else Outlook(next_due_ms=due_ms)

    def _corrected(self, level: _Level, known: int) -> int:
        """Return the queue offset where delivery of a level resumes: `known`, moved into the queue if it is outside.

        If messages were deleted from the log before they were delivered, logs how many.
        """
        if known >= level.end:
            return level.end
        first = level.queue.first_from(self._log.segments.begin, level.end)
        if first <= known:
            return known
        run = level.queue.run
        written = run.first_where(run.begin, first, lambda entry: not is_blank_fill(entry))
        lost_from = max(known, written) if written > run.begin else known  # no message precedes `written`
        if first > lost_from:
            _LOG.error(
                "rmq: delay level %d: %d messages of %s that were not delivered are no longer in the log, starting at "
                "queue offset %d: delivery resumes at %d",
                level.number, first - lost_from, level.queue.key, lost_from, first,
            )  # fmt: skip
        return first

    def _due_entries(
        self, level: _Level, begin: int, now_ms: int, room_bytes: int, room_count: int, *, is_first: bool
    ) -> Entries:
        """Return the entries from queue offset `begin` up to the first that is not due, as many as there is room for.

        With `is_first` it returns at least one entry that is due, even if its message is longer than `room_bytes`.
        """
        step, limit = _FIRST_READ_ENTRIES, min(level.end, begin + min(room_count, _MAX_READ_ENTRIES))
        while True:
            end = min(begin + step, limit)
            entries = level.queue.read(begin, end)
            times = self._due_times(level, entries)
            is_early = times > self._latest_due(level, now_ms)
            is_due = (times <= now_ms) | is_early
            count = len(entries) if is_due.all() else int(np.argmin(is_due))
            if count < len(entries) or end >= limit:
                break
            step *= 16
        fitting = int(np.searchsorted(np.cumsum(np.maximum(entries.sizes, 0)), room_bytes, side="right"))
        count = min(count, max(fitting, 1 if is_first else 0))
        self._log_early(level, times[:count][is_early[:count]], now_ms)
        return entries.part(0, count)

    def _latest_due(self, level: _Level, now_ms: int) -> int:
        """Return the latest time (ms) at which a message of a level can be due, if its entry and delay are right."""
        if level.number > len(self._delays):
            return _NEVER_MS
        is_wrong = self._last_ms > now_ms + _WRONG_CLOCK_MS
        return (now_ms if is_wrong else max(now_ms, self._last_ms)) + self._delays.due_after_ms(level.number)

    def _log_early(self, level: _Level, times: NDArray[np.int64], now_ms: int) -> None:
        """Log how many messages are delivered now although the times in their entries are far ahead."""
        if len(times):
            _LOG.warning(
                "rmq: delay level %d: %d messages are delivered now, up to %d s before the time in their entries, "
                "which is further ahead than the level's delay of %d s: the delay was changed, or the clock was%s",
                level.number, len(times), (int(times.max()) - now_ms) // 1000,
                self._delays.due_after_ms(level.number) // 1000,
                f"; the store's last message is {(self._last_ms - now_ms) // 1000} s ahead of the clock"
                if self._last_ms > now_ms + _WRONG_CLOCK_MS
                else "",
            )  # fmt: skip

    def _due_times(self, level: _Level, entries: Entries) -> NDArray[np.int64]:
        """Return when the message of each entry is due, in ms since the epoch."""
        delay_ms, times = self._delays.due_after_ms(level.number), entries.tags_codes
        extended = np.flatnonzero(times < 0)
        if len(extended):
            # A negative value is not a time but an address in consumequeue_ext, which not every broker writes. Use the
            # store time in the record.
            found = read_originals(self._log, entries.physical_offsets[extended], entries.sizes[extended])
            kept = np.flatnonzero(found.is_whole)
            times = times.copy()
            whole = WholeRecords.of(found.data, found.positions[kept], found.ends[kept])
            times[extended[kept]] = whole.field("store_timestamp") + delay_ms
        return times

    def _build_records(self, level: _Level, entries: Entries) -> EncodedRecords | None:
        """Return the records that deliver the messages of these entries, or None if none of them can be delivered."""
        found = read_originals(self._log, entries.physical_offsets, entries.sizes)
        offsets = entries.queue_offsets
        kept = np.flatnonzero(found.is_whole)
        _log_skipped(level, offsets[~found.is_whole], "its entry refers to no complete record")
        if not len(kept):
            return None
        whole = WholeRecords.of(found.data, found.positions[kept], found.ends[kept])
        key = level.queue.key
        is_own = whole.are_of(key.topic, key.queue_id) & (whole.field("queue_offset") == offsets[kept])
        if not is_own.all():
            _log_skipped(level, offsets[kept[~is_own]], "its entry refers to the record of another message")
            kept = kept[is_own]
            if not len(kept):
                return None
            whole = WholeRecords.of(found.data, found.positions[kept], found.ends[kept])
        queues = find_real_queues(whole.pairs(), self._segment_bytes - BLANK_BYTES, whole)
        for reason, rows in queues.refused.items():
            _log_skipped(level, offsets[kept[rows]], reason)
        if not len(queues.rows):
            return None
        chosen = kept[queues.rows]
        return rebuild_records(
            found.data, found.positions[chosen], found.ends[chosen], topics=queues.topics, queue_ids=queues.queue_ids
        )


def _next_offset(level: int, offsets: Mapping[int, int], metadata: Metadata) -> int:
    """Return the next queue offset to deliver: the larger one of `offsets` (delayOffset.json) and metadata."""
    return max(offsets.get(level, 0), metadata.get(metadata_key(level), 0), 0)


def _log_skipped(level: _Level, offsets: NDArray[np.int64], reason: str) -> None:
    """Log which messages of a level are skipped for ever, and why."""
    for offset in offsets[:_MAX_LOGGED_ROWS].tolist():
        _LOG.error(
            "rmq: delay level %d: skipped the message at queue offset %d of %s: %s",
            level.number, offset, level.queue.key, reason,
        )  # fmt: skip
    if len(offsets) > _MAX_LOGGED_ROWS:
        _LOG.error("rmq: delay level %d: skipped %d more messages", level.number, len(offsets) - _MAX_LOGGED_ROWS)


@dataclass(frozen=True, slots=True)
class RealQueues:
    """The numbers of the messages that can be delivered (`rows`, ascending), and the queue to which each one goes.

    `refused` has the numbers of the other messages, by the reason why they cannot be delivered.
    """

    rows: NDArray[np.int64]
    topics: Topics  # of `rows`
    queue_ids: NDArray[np.int64]  # of `rows`
    refused: Mapping[str, NDArray[np.int64]]


def find_real_queues(
    pairs: UniformPairs | PropertyPairs, max_bytes: int, records: WholeRecords | None = None
) -> RealQueues:
    """Return the queues to which waiting messages with these properties go, from REAL_TOPIC and REAL_QID.

    Refuses messages that a broker could not deliver either, or would put back into the waiting queue: those whose topic
    or queue id is missing or invalid. If `records`, the waiting messages, are given, it also refuses a message whose
    record would be longer than `max_bytes` with the name of its own topic.
    """
    names = pairs.column(REAL_TOPIC).dictionary_encode()
    texts = pairs.column(REAL_QID).dictionary_encode()
    topic_numbers = pc.fill_null(names.indices, _NO_QUEUE).to_numpy().astype(np.int64)
    distinct = names.dictionary.to_pylist()
    reasons = np.array([*(_refusal(name) for name in distinct), f"it has no property {REAL_TOPIC}"], object)
    ids = np.array([*(_parse_queue_id(text) for text in texts.dictionary.to_pylist()), _NO_QUEUE], np.int64)
    queue_ids = ids[pc.fill_null(texts.indices, _NO_QUEUE).to_numpy()]
    reason = reasons[topic_numbers]
    reason[(reason == "") & (queue_ids == _NO_QUEUE)] = f"its property {REAL_QID} is missing or not a queue id"
    if records is not None:
        sizes = records.ends - records.positions
        for row in np.flatnonzero((reason == "") & (sizes + _GROWTH_BYTES > max_bytes)).tolist():
            old_bytes = int(records.topic_ends[row] - records.topic_begins[row])
            if int(sizes[row]) - old_bytes + len(distinct[topic_numbers[row]].encode()) + 1 > max_bytes:
                reason[row] = "with the name of its own topic it is longer than a segment"
    rows = np.flatnonzero(reason == "")
    used, numbers = np.unique(topic_numbers[rows], return_inverse=True)
    kept = tuple(distinct[number] for number in used.tolist())
    topics = Topics(kept or ("",), numbers.astype(np.int64) if len(kept) != 1 else None)
    refused = {str(text): np.flatnonzero(reason == text) for text in dict.fromkeys(reason.tolist()) if text}
    return RealQueues(rows, topics, queue_ids[rows], refused)


def _refusal(topic: str) -> str:
    """Return the reason why no message can be delivered to a topic, or "" if messages can be delivered."""
    if topic == HALF_TOPIC:
        return f"its own topic is {HALF_TOPIC}, which is discarded as a broker does"
    if topic in WAITING_TOPICS:
        return f"its own topic is {topic}, where it would wait for ever"
    try:
        check_topic_name(topic)
    except OptionError as error:
        return f"its property {REAL_TOPIC} is not a valid topic: {error}"
    return ""


def _parse_queue_id(text: str) -> int:
    """Return the queue id in a text, parsed as by Java's Integer#parseInt, or -1 if the text is not a queue id."""
    digits = text.removeprefix("+")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 20) or int(digits) > _MAX_QUEUE_ID:
        return _NO_QUEUE
    return int(digits)
