"""Retention: deletes expired commit-log segments, but keeps those with messages that still wait for delivery.

`expire` deletes whole segments of the log, and then the files of queues and of the key index that refer only to them.
No other module deletes messages. This module deletes them only if it is called, or if our settings of the store require
it. Age is measured by the store time of messages, not by the time of files. In a copied store all files are young, and
in an unpacked archive all are old.
Source: MappedFileQueue#deleteExpiredFileByTime, CleanConsumeQueueService, IndexService#deleteExpiredFile (5.3).

`RetentionHold` finds the first message that waits for delivery, in a delay level or in the timer. Delivery reads the
message from the log when it is due, so a message whose segment was deleted cannot be delivered. But a store without
deliveries must not grow forever. So a message that is more than a day overdue is not kept, and the next delivery logs
how many messages are lost. RocketMQ deletes by age alone, because its segments live longer than its messages wait.

The delivery progress is read from the same files that a broker reads. They may be behind the actual deliveries, but are
never ahead. If these files are lost or damaged, it is unknown which messages wait, so nothing is deleted until the
files are fixed. For the same reason, `refuse_lost_waiting_queues` checks that no queue of waiting messages has lost its
files.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.disk import files
from rmq_spark.store.disk.files import OpenFile
from rmq_spark.store.disk.kernel_errors import is_unreadable
from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.config_json import decode_delay_offsets
from rmq_spark.store.format.consume_queue_entry import is_blank_fill
from rmq_spark.store.format.own_files import StoreSettings
from rmq_spark.store.format.record import MAX_RECORD_BYTES, MIN_RECORD_BYTES, Record
from rmq_spark.store.format.timer import (
    BLANK_MAGIC,
    SECOND_MS,
    TIMER_UNIT,
    TIMER_UNIT_BYTES,
    TimerCheck,
    are_entries,
    decode_timer_check,
    due_times,
)
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.consume_queue import ConsumeQueue
from rmq_spark.store.log.entry_check import compare_headers
from rmq_spark.store.log.queue_reader import LOWER, TimeSearch
from rmq_spark.store.log.queue_registration import refuse_lost_queue
from rmq_spark.store.log.queue_registry import has_files, lost_queue
from rmq_spark.store.log.segments import Segment, SegmentRun, list_segments
from rmq_spark.store.log.store_files import StoreFiles
from rmq_spark.store.log.store_state import check_settings
from rmq_spark.store.log.topics import TopicTable
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import SCHEDULE_TOPIC, TIMER_TOPIC, WAITING_TOPICS

_LOG = logging.getLogger("rmq_spark")


@dataclass(frozen=True, slots=True)
class Expired:
    """What retention deleted: the numbers of log segments, queue files and index files, and the segments' size (bytes).

    If segments were kept although they had expired, `held_by` is the path of the file that contains the reason.
    Otherwise it is None. `held_bytes` is the size of these segments. `is_held_for_good` is true if they stay until a
    user fixes a fault.
    """

    segments: int = 0
    queue_files: int = 0
    index_files: int = 0
    size_bytes: int = 0
    held_by: str | None = None
    held_bytes: int = 0
    is_held_for_good: bool = False


@dataclass(frozen=True, slots=True)
class Needed:
    """The lowest physical offset that is still needed, and the path of the file that contains the reason."""

    physical_offset: int
    path: str
    is_stuck: bool = False  # whether it is needed until a user fixes a fault


def expire(
    store: StoreFiles,
    max_age_ms: int | None = None,
    max_bytes: int | None = None,
    needed_from: Callable[[], Needed | None] = lambda: None,
) -> Expired:
    """Delete the oldest segments of the log. Return what was deleted and what was kept.

    A segment is deleted if all of its messages are older than `max_age_ms` (ms), or while the log is larger than
    `max_bytes`. None means no limit. The last segment always stays. `needed_from` returns a physical offset that must
    still be readable, or None; the segment that contains it and all later ones stay too. `needed_from` is called only
    if there is something to delete. If it keeps expired segments, the result names its file.

    If a reader has a deleted file open, it can still read the file. A crash during the call leaves queue files whose
    messages are deleted. The next call deletes these files.
    """
    segments = store.log.segments.segments
    keep = expired = _first_kept(store, segments, max_age_ms, max_bytes)
    needed = needed_from() if keep else None
    if needed is not None:
        keep = min(keep, sum(segment.end <= needed.physical_offset for segment in segments))
    held_bytes = sum(segment.size for segment in segments[keep:expired])
    held = (needed.path, held_bytes, needed.is_stuck) if needed is not None and held_bytes else (None, 0, False)
    if not keep:
        return Expired(0, 0, 0, 0, *held)
    size_bytes = 0
    for segment in segments[:keep]:
        size_bytes += segment.size
        store.disk.remove(segment.path)
    for folder in sorted({files.parent(segment.path) for segment in segments[:keep]}):
        store.disk.sync_folder(folder)
    store.log_writer.close()
    store.log.refresh()
    begin = store.log.segments.begin
    queue_files = _expire_queues(store, begin)
    index_files = store.index.expire(begin)
    store.sync_changes()
    store.queues.forget()
    result = Expired(keep, queue_files, index_files, size_bytes, *held)
    _LOG.info("rmq: retention in %s: the log now begins at %d, %s", store.root, begin, result)
    return result


def _first_kept(store: StoreFiles, segments: tuple[Segment, ...], max_age_ms: int | None, max_bytes: int | None) -> int:
    """Return the index of the first of `segments` that has not expired."""
    # The segment with the last message stays, even if the log ends exactly where the next segment begins.
    last = max((at for at, segment in enumerate(segments) if segment.begin < max(store.watermark.end, 1)), default=0)
    keep = 0
    if max_bytes is not None:
        size = store.watermark.end - (segments[0].begin if segments else 0)
        while keep < last and size > max_bytes:
            size -= segments[keep].size
            keep += 1
    if max_age_ms is not None:
        while keep < last:
            # Store times never decrease, so the first store time in the next segment is an upper bound for this
            # segment.
            following = store.log.record_at(segments[keep + 1].begin)
            if not isinstance(following, Record) or following.store_timestamp + max_age_ms > store.now_ms():
                break
            keep += 1
    return keep


def _expire_queues(store: StoreFiles, log_begin: int) -> int:
    """Delete the first files of each queue, as long as all records of a file are before the log's begin.

    A queue's last file always stays. Return the number of deleted files.
    """
    count = 0
    for queue in TopicTable(store.root).queues.values():
        segments, entry_bytes = queue.run.segments, queue.layout.itemsize
        deleted = 0
        for segment in segments[:-1]:
            last = segment.end // entry_bytes - 1
            entries = queue.run.read(last, last + 1)
            if not len(entries) or int(entries[0]["physical_offset"]) >= log_begin:
                break
            store.disk.remove(segment.path)
            deleted += 1
        if deleted:
            store.disk.sync_folder(queue.run.folder)
        queue.run.close()
        count += deleted
    return count


LATE_MS = 24 * 3_600_000  # a message that is overdue by more than this is not kept
_CACHED_MS = 60_000  # a result stays valid for this time as long as nothing is delivered
_TIMER_LOG, _TIMER_CHECK = "timerlog", "timercheck"
_BLOCK_ENTRIES = 1 << 16
_KEEPS = "Retention deletes nothing before this is fixed: messages may still wait for delivery there."
_FIX_QUEUE = f"{_KEEPS} Run `rmq repair`: it rebuilds the queue from the log."
_FIX_TIMER = (
    f"{_KEEPS} Run `rmq check` to find the fault. Stop all deliveries, and restore timerlog/, timerwheel and "
    "config/timercheck together from a copy. Without a copy move all three away: then all waiting messages are taken "
    "from their queue again, and overdue ones are delivered again."
)


class RetentionHold:
    """Finds the part of the log that deliveries still need, in the store at `root`.

    For one thread that holds the store's lock. `refuse_lost` raises DamageError if a queue that had waiting messages
    has no files.
    """

    def __init__(
        self, root: str, log: CommitLog, now_ms: Callable[[], int], refuse_lost: Callable[[], None] = lambda: None
    ) -> None:
        self._root, self._log, self._now_ms, self._refuse_lost = root, log, now_ms, refuse_lost
        self._offsets_path = files.join(root, filenames.CONFIG, filenames.DELAY_OFFSET_JSON)
        self._check_path = files.join(root, filenames.CONFIG, _TIMER_CHECK)
        self._cached: tuple[object, int, Needed] | None = None  # contents of progress files, time (ms), result

    def needed_from(self) -> Needed | None:
        """Return the physical offset of the first message that waits for delivery and is at most a day overdue.

        Return None if there is no such message. Raises DamageError if queues or timer files are lost or damaged, and
        StoreError if the kernel cannot read files. It is then unknown which messages wait, so nothing may be deleted.
        """
        now_ms = self._now_ms()
        progress = files.read_small(self._offsets_path), files.read_small(self._check_path)
        if self._cached is not None and self._cached[0] == progress and 0 <= now_ms - self._cached[1] < _CACHED_MS:
            return self._cached[2]
        self._refuse_lost()
        found = [Needed(offset, self._offsets_path) for offset in self._in_levels(progress[0], now_ms)]
        found += [Needed(offset, self._check_path) for offset in self._in_timer(progress[1], now_ms)]
        needed = min(found, key=lambda one: one.physical_offset, default=None)
        # New messages have higher physical offsets, so the result stays valid as long as nothing is delivered. None is
        # not cached, because a new message changes it.
        self._cached = None if needed is None else (progress, now_ms, needed)
        return needed

    def _in_levels(self, data: bytes | None, now_ms: int) -> Iterator[int]:
        try:
            offsets = decode_delay_offsets(data).offsets if data else {}
        except ValueError:
            offsets = {}  # unknown progress is treated as 0, which keeps more
        folder = files.join(self._root, filenames.CONSUME_QUEUE, SCHEDULE_TOPIC)
        for name, is_folder in files.list_folder(folder):
            if not (is_folder and name.isascii() and name.isdigit() and len(name) < 10):
                continue
            queue = ConsumeQueue(QueueKey(SCHEDULE_TOPIC, int(name)), files.join(folder, name))
            try:
                yield from self._in_level(queue, offsets.get(int(name) + 1, 0), now_ms)
            except StoreError as error:
                raise _hold_error(error, queue.run.folder, _FIX_QUEUE) from error
            finally:
                queue.run.close()

    def _in_level(self, queue: ConsumeQueue, delivered: int, now_ms: int) -> list[int]:
        """Return the physical offset of the first waiting message of a delay level, in a list.

        Return [] if there is none.

        `delivered` is the next queue offset to deliver. The due time of each message is in its entry.
        """
        for first, entries in self._entries(queue, delivered):
            in_log = np.flatnonzero(entries["physical_offset"] >= self._log.segments.begin)
            due = entries["tags_code"][in_log].astype(np.int64)
            # A negative value is not a due time, but the address of a due time in the queue's extension.
            waits = np.flatnonzero((due < 0) | (due >= now_ms - LATE_MS))
            checked = in_log[: waits[0] + 1] if len(waits) else in_log
            times = self._store_times(queue, first, entries, checked)
            late = checked[: waits[0]] if len(waits) else checked
            _require(queue, first, late, times[: len(late)] <= due[: len(late)], "a time after its message was stored")
            if len(waits):
                return [int(entries["physical_offset"][checked[-1]])]
        return []

    def _entries(self, queue: ConsumeQueue, begin: int) -> Iterator[tuple[int, NDArray[np.void]]]:
        """Yield the written entries of a queue from entry number `begin` on, in blocks, without fill.

        Each element is the number of a block's first entry, and the block. Raises DamageError if the record of an entry
        cannot follow the record of the previous entry.
        """
        if not queue.run.segments:
            return
        queue.refuse_hole_before(queue.run.begin, self._log.segments.begin)
        number, end, floor = max(begin, queue.run.begin), _data_end(queue), 0
        while number < end:
            entries = queue.run.read(number, min(number + _BLOCK_ENTRIES, end))
            offsets, sizes = entries["physical_offset"].astype(np.int64), entries["record_size"].astype(np.int64)
            fills = is_blank_fill(entries)
            fill = len(entries) if fills.all() else int(np.argmin(fills))
            offsets, sizes, entries = offsets[fill:], sizes[fill:], entries[fill:]
            floors = np.concatenate([[floor], offsets + sizes])[:-1]
            wrong = (sizes < MIN_RECORD_BYTES) | (sizes > MAX_RECORD_BYTES) | (offsets < floors)
            wrong |= offsets > self._log.segments.end - sizes
            expected = "the physical offset of a record after the previous one"
            _require(queue, number + fill, np.arange(len(entries)), ~wrong, expected)
            if len(entries):
                yield number + fill, entries
                floor = int(offsets[-1] + sizes[-1])
            number += fill + len(entries)

    def _store_times(
        self, queue: ConsumeQueue, first: int, entries: NDArray[np.void], rows: NDArray[np.intp]
    ) -> NDArray[np.int64]:
        """Return the store times (ms) of the messages of some entries.

        `rows` are the indexes in `entries`, whose first element has entry number `first`. Raises DamageError if an
        entry does not match its record.
        """
        chosen = entries[rows]
        offsets, sizes = chosen["physical_offset"].astype(np.int64), chosen["record_size"].astype(np.int64)
        ids = np.full(len(rows), queue.key.queue_id)
        agree, times = compare_headers(self._log, offsets, sizes, first + rows.astype(np.int64), ids)
        _require(queue, first, rows, agree, "the physical offset of its record")
        return times

    def _in_timer(self, data: bytes | None, now_ms: int) -> Iterator[int]:
        check = decode_timer_check(data) if data else TimerCheck()
        folder = files.join(self._root, filenames.queue_folder(TIMER_TOPIC, 0))
        queue = ConsumeQueue(QueueKey(TIMER_TOPIC, 0), folder)
        try:
            yield from self._in_timer_queue(queue, check, now_ms)
        except StoreError as error:
            raise _hold_error(error, folder, _FIX_QUEUE) from error
        finally:
            queue.run.close()
        try:
            yield from self._in_timer_log(check, now_ms)
        except StoreError as error:
            raise _hold_error(error, files.join(self._root, _TIMER_LOG), _FIX_TIMER) from error

    def _in_timer_queue(self, queue: ConsumeQueue, check: TimerCheck, now_ms: int) -> list[int]:
        """Return the physical offset of the first waiting message that is not in the timer log yet, in a list, or [].

        Entries of the timer's queue contain no due times. So a message is treated as waiting, unless the longest
        possible delay after its store time ended more than a day ago.
        """
        settings = check_settings(self._root) or StoreSettings("")
        begin = end = max(check.queue_offset, queue.run.begin)
        for first, entries in self._entries(queue, begin):
            end = first + len(entries)
        if queue.run.segments and check.queue_offset > _data_end(queue):
            what, expected = "queue offset of the timer beyond the end of its queue", f"at most {_data_end(queue)}"
            raise DamageError(what, self._check_path, 0, expected, check.queue_offset, _FIX_TIMER)
        begin = max(begin, queue.first_from(self._log.segments.begin, end))
        if begin >= end:
            return []
        from_ms = now_ms - LATE_MS - settings.timer_max_delay_ms
        first = TimeSearch(self._log, queue, begin, end).unit_at(from_ms, LOWER)
        entries = queue.run.read(first, min(first + 1, end))
        self._store_times(queue, first, entries, np.arange(len(entries)))
        return [int(offset) for offset in entries["physical_offset"]]

    def _in_timer_log(self, check: TimerCheck, now_ms: int) -> list[int]:
        """Return the physical offset of the oldest timer entry that the timer has not reached, in a list.

        Return [] if none.

        The timer has not reached an entry if its due second is not before the timer's progress. The timer wheel is not
        needed, because it only helps to find entries by their second. So the wheel may be lost. If the timer is ahead
        of the clock, it may have delivered some of the messages that are treated as waiting here.
        """
        folder = files.join(self._root, _TIMER_LOG)
        run = list_segments(folder)
        first = run.segments[0] if run.segments else None
        if check.log_position > run.end:
            what, expected = "the timer log is shorter than in config/timercheck", f"{check.log_position} bytes"
            raise DamageError(what, folder, 0, expected, run.end, _FIX_TIMER)
        if first is not None and first.begin and not self._log.segments.begin:
            what = "the first files of the timer log are missing"
            raise DamageError(what, first.path, 0, "a file that begins at 0", first.begin, _FIX_TIMER)
        begin_ms = max(min(check.read_time, now_ms), now_ms - LATE_MS, 0) // SECOND_MS * SECOND_MS
        for entries in _timer_entries(run, check.log_position):
            waits = np.flatnonzero(due_times(entries) >= begin_ms)
            if len(waits):
                return [int(entries["physical_offset"][waits[0]])]
        return []


def _timer_entries(run: SegmentRun, end: int) -> Iterator[NDArray[np.void]]:
    """Yield the entries of the timer log in blocks. A filler ends each file.

    The log was synced up to position `end`. After `end` a crash may have left half an entry, so nothing there is
    reported as damage. A message that waits there is also in the part of the timer's queue that is not in the timer log
    yet.
    """
    position = run.begin
    while position < run.end:
        segment = run.holding(position)
        if segment is None:
            raise DamageError("a file of the timer log is missing", run.segments[0].path, 0, position, "none")
        count = min((segment.end - position) // TIMER_UNIT_BYTES, _BLOCK_ENTRIES)
        entries = _read_timer_entries(segment, position, count)
        good = are_entries(entries)
        stop = count if good.all() else int(np.argmin(good))
        if stop:
            yield entries[:stop]
        position += stop * TIMER_UNIT_BYTES
        if stop == count and count:
            continue
        filler = _read_timer_entries(segment, position, 1)[0]
        if int(filler["magic"]) != BLANK_MAGIC or int(filler["unit_size"]) != segment.end - position:
            if position >= end:
                return
            raise DamageError("timer log", segment.path, position - segment.begin, "an entry or a filler", "neither")
        position = segment.end


def _read_timer_entries(segment: Segment, position: int, count: int) -> NDArray[np.void]:
    """Return `count` entries at a position of the timer log (bytes). Missing bytes are read as zeros."""
    with OpenFile(segment.path) as file:
        data = file.read(position - segment.begin, count * TIMER_UNIT_BYTES).ljust(count * TIMER_UNIT_BYTES, b"\0")
    return np.frombuffer(data, TIMER_UNIT)


def _data_end(queue: ConsumeQueue) -> int:
    """Return the number after a queue's last entry that has a byte other than zero."""
    size = queue.layout.itemsize
    for segment in reversed(queue.run.segments):
        parts = list(files.data_extents(segment.path, 0, segment.size))
        if parts:
            first, last = ((segment.begin + at) // size for at in parts[-1])
            entries = queue.run.read(first, last + 1)
            return first + int(np.flatnonzero(entries != np.zeros(1, queue.layout))[-1]) + 1
    return queue.run.begin


def _require(queue: ConsumeQueue, first: int, rows: NDArray[np.intp], good: NDArray[np.bool_], expected: str) -> None:
    """Raise DamageError for the first entry that is not `good`.

    `rows` are the indexes of the entries, counted from entry number `first`. `expected` describes a good entry.
    """
    for row in rows[~good][:1].tolist():
        path, position = queue.run.path_of(first + row)
        found = tuple(queue.run.read(first + row, first + row + 1)[0].tolist())
        raise DamageError(f"entry of queue {queue.key}", path, position, expected, found, _FIX_QUEUE)


def _hold_error(error: StoreError, path: str, next_step: str) -> StoreError:
    """Return the error to raise if it is unknown which messages wait. It says that retention deletes nothing.

    An error of the kernel is returned unchanged.
    """
    if is_unreadable(error):
        return error
    if isinstance(error, DamageError):
        next_step = error.next_step if error.next_step.startswith(_KEEPS) else next_step
        return DamageError(error.what, error.path, error.position, error.expected, error.found, next_step)
    return DamageError("messages that wait are unknown", path, 0, "readable files", str(error), next_step)


def refuse_lost_waiting_queues(store: StoreFiles) -> None:
    """Raise DamageError if a queue for waiting messages has lost its files or its entries.

    This is the case if the queue had messages, and now has no files or only files without entries. The topics of these
    queues are never deleted, so the registry is used even if topics.json does not match it. For queues that are not in
    the registry, the part of the log that a broker wrote is searched once.
    """
    registered, end = store.registry.read(), store.watermark.end
    queues = registered.queues if registered else {}
    waiting = {key: offset for key, offset in queues.items() if key.topic in WAITING_TOPICS}
    for key, physical_offset in waiting.items():
        queue = _queue(store, key)
        if physical_offset < end and not has_files(queue):
            raise _lost_error(lost_queue(store.root, key, physical_offset, store.log.segments.begin))
        if 0 <= physical_offset < end and _is_blank(queue) and _is_of(store, key, physical_offset):
            what = f"queue {key} has had messages, and its files have no entries"
            raise DamageError(what, queue.run.folder, 0, "entries", "none", _FIX_QUEUE)
    known = {QueueKey(SCHEDULE_TOPIC, number) for number in range(len(store.levels))} | {QueueKey(TIMER_TOPIC, 0)}
    for key in sorted(known - waiting.keys()):
        if not has_files(_queue(store, key)):
            try:
                refuse_lost_queue(store, key, end)
            except DamageError as error:
                raise _lost_error(error) from error


def _queue(store: StoreFiles, key: QueueKey) -> ConsumeQueue:
    return ConsumeQueue(key, files.join(store.root, filenames.queue_folder(key.topic, key.queue_id)))


def _is_blank(queue: ConsumeQueue) -> bool:
    """Return whether no byte of a queue's files was written."""
    return not queue.run.is_damaged() and not any(
        True for segment in queue.run.segments for _ in files.data_extents(segment.path, 0, segment.size)
    )


def _is_of(store: StoreFiles, key: QueueKey, physical_offset: int) -> bool:
    """Return whether the record at a physical offset belongs to a queue."""
    record = store.log.record_at(physical_offset)
    return isinstance(record, Record) and (record.topic.decode("utf-8", "replace"), record.queue_id) == (
        key.topic,
        key.queue_id,
    )


def _lost_error(error: DamageError) -> DamageError:
    """Return the error for a lost queue, with the advice that retention deletes nothing."""
    step = error.next_step.replace("rmq_spark.repair", "`rmq repair`")
    return DamageError(error.what, error.path, error.position, error.expected, error.found, f"{_KEEPS} {step}")
