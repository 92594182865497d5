"""Finds the end of the valid log and of each queue, without recovery and without a lock.

A broker keeps these ends only in memory. On disk, intact records and entries may follow the end, because a broker that
recovers moves its positions back and leaves the bytes. So a reader trusts an entry only under two conditions:

1. The record at its physical offset has the same queue id, queue offset, physical offset and size.
2. That record belongs to the chain of records, in which each record ends where the next one begins. The chain leads
   from a position that is certainly valid to the end of the log. It is built from the physical offsets and sizes in the
   entries, as columns. Only a record without an entry is decoded individually.

Sizes may match by accident, so that the chain continues into older bytes. Then their store times show this
(`RecordChain._cut_stale`). For readers, a queue ends where its entries end: only a writer's recovery adds missing
entries.

`ChangeToken` is a cheap fingerprint of the store. As long as it holds, nothing has changed: no record was added after
the log's end, no missing entry was written, no queue that lacked files got a folder, and no writer started or stopped.
Checking the token costs a few small reads, whatever the number of queues.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.format.checkpoint import Checkpoint
from rmq_spark.store.format.record import (
    BLANK_BYTES,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    RECORD_HEAD,
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    Blank,
    Record,
    Torn,
)
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.consume_queue import ConsumeQueue, Entries
from rmq_spark.store.log.entry_check import EntryValidator, compare_headers, no_queue_error
from rmq_spark.store.log.record_chain import RecordChain, ShutdownState, StoreState
from rmq_spark.store.model import QueueKey

MANY_QUEUES = 64  # if more queues lack an entry, checking each of them costs as much as a refresh


@dataclass(frozen=True, slots=True)
class AwaitedEntry:
    """The first entry of a queue that is missing or not trusted.

    `previous` is what the last refresh read at entry number `number`; it may be empty.
    """

    queue: ConsumeQueue
    number: int
    previous: Entries

    def has_changed(self) -> bool:
        """Return whether the entry differs from `previous` now."""
        if self.number >= self.queue.run.end:
            self.queue.run.refresh()  # the entry's file may have been created since then
        current = self.queue.read(self.number, self.number + self.queue.is_written(self.number))
        self.queue.run.close()
        return not current.equals(self.previous)


@dataclass(frozen=True, slots=True)
class ChangeToken:
    """The end of the log (physical offset), and the missing entries and folders as of the last refresh.

    - `refused_ms` is the store time (ms) of a complete record at the end that was considered stale. None if there is
      none.
    - `state` is the store's state, if the result depends on it. It does if messages lack entries, or if there are
      faults or a stale record.
    - `awaited` are the first entries that are missing or not trusted, one per queue.
    - `without_folder` are queues that have a message and no folder.
    """

    end: int
    refused_ms: int | None = None
    state: StoreState | None = None
    awaited: tuple[AwaitedEntry, ...] = ()
    without_folder: frozenset[QueueKey] = frozenset()

    def holds(self, log: CommitLog, state: Callable[[], StoreState], has_folder: Callable[[QueueKey], bool]) -> bool:
        """Return whether nothing has changed. If something changes during this call, the next call returns False.

        `state` returns the store's state now, and `has_folder` whether a queue has a folder now.
        """
        if not log.is_begin_there() or self._has_log_grown(log):
            return False
        if self.state is None:
            return True
        try:
            return (
                state() == self.state
                and not any(entry.has_changed() for entry in self.awaited)
                and not any(has_folder(key) for key in self.without_folder)
            )
        except StoreError:
            return False  # the refresh raises or records the same error

    def _has_log_grown(self, log: CommitLog) -> bool:
        """Return whether the log now has a complete record at `end`, or a filler that the next segment follows."""
        magic = int.from_bytes(log.bytes_at(self.end, BLANK_BYTES)[4:], "big")
        if magic not in (MAGIC_V1, MAGIC_V2, MAGIC_BLANK):
            return False
        found = log.record_at(self.end)
        if isinstance(found, Blank):
            segment = log.segments.holding(self.end)
            return segment is None or log.has_file_at(segment.end)
        return isinstance(found, Record) and found.crc_matches and found.store_timestamp != self.refused_ms


class LogEnd:
    """The ends of the log and of its queues as of the last `refresh`. Not thread-safe.

    `end` is the physical offset of the log's end. `ends` has the number after the last valid entry of each queue.
    `faults` has the error of each queue that cannot be read. A refresh is cheap if little was appended since the last
    one.
    """

    def __init__(
        self,
        log: CommitLog,
        state: Callable[[], StoreState],
        checkpoint: Callable[[], Checkpoint],
        may_exist: Callable[[str], bool],
        last_indexed: Callable[[], int],
    ) -> None:
        self._log, self._read_state, self._checkpoint = log, state, checkpoint
        self._may_exist, self._last_indexed = may_exist, last_indexed
        self._validator = EntryValidator(log, checkpoint, last_indexed)
        self.begin = 0  # physical offset from which the last whole refresh followed the chain of records
        self.end = 0
        self.ends: dict[QueueKey, int] = {}
        self._last_offsets: dict[QueueKey, int] = {}  # physical offset in each queue's last valid entry
        self.faults: dict[QueueKey, StoreError] = {}
        self._unreadable: dict[QueueKey, tuple[ConsumeQueue, StoreError]] = {}  # queues whose files are wrong
        self.pending: set[QueueKey] = set()  # queues with a logged message that has no entry yet
        # The next refresh starts here, after the last record that has an entry. It cannot start later: when a crashed
        # writer restarts, its recovery may still truncate records without an entry.
        self._base = 0
        self._newest_ms = -1  # newest store time (ms)
        self._last_record: tuple[int, bytes] = (0, b"")
        self._waiting: list[Record] = []  # records that had no entry at the last refresh
        self._token: ChangeToken | None = None  # if None, the store may have changed and must be read again

    def is_idle(self, has_folder: Callable[[QueueKey], bool]) -> bool:
        """Return whether nothing has changed since the last refresh. Costs a few small reads.

        `has_folder` returns whether a queue has a folder on disk now.
        """
        return (
            self._token is not None
            and self._token.holds(self._log, self._read_state, has_folder)
            and not self.is_rewritten()
        )

    def appended(self, at_most: int) -> set[QueueKey] | None:
        """Return the queues of the records that were appended since the last refresh.

        Queues that are pending or have a fault are included. Return None if `at_most` records or more were appended.
        """
        found, physical_offset = self.pending | self.faults.keys(), self._base
        for _ in range(at_most):
            record = self._log.record_at(physical_offset)
            if isinstance(record, Blank):
                segment = self._log.segments.holding(physical_offset)
                if segment is None or self._log.segments.holding(segment.end) is None:
                    return found
                physical_offset = segment.end
            elif isinstance(record, Torn):
                return found
            else:
                found.add(QueueKey(record.topic.decode("utf-8", "replace"), record.queue_id))
                physical_offset += record.total_size
        return None

    @property
    def newest_ms(self) -> int:
        """The newest store time (ms) of a message before the end. -1 if there is no message."""
        return self._newest_ms

    @property
    def last_record(self) -> tuple[int, bytes]:
        """The physical offset and the header of the last record that has an entry. (0, b"") if there is none."""
        return self._last_record

    def first_unitless(self) -> int:
        """Return a physical offset below which every message has an entry, except messages of deleted topics.

        It is at or below the first message whose entry is missing or not trusted.
        """
        return min(self._base, min((record.physical_offset for record in self._waiting), default=self.end))

    def is_rewritten(self) -> bool:
        """Return whether the next refresh must be whole, because earlier results are not valid any more.

        They are not valid if the last record was overwritten, or if files that could not be read have changed.
        """
        physical_offset, header = self._last_record
        if header and self._log.bytes_at(physical_offset, RECORD_HEAD.itemsize) != header:
            return True
        for queue, fault in self._unreadable.values():
            queue.run.refresh()
            if str(queue.run.fault()) != str(fault):
                return True
        return False

    def refresh(
        self,
        queues: Mapping[QueueKey, ConsumeQueue],
        among: Iterable[QueueKey],
        *,
        whole: bool,
        state: StoreState | None = None,
    ) -> None:
        """Find the end of the log, and the ends of the queues `among`. `queues` has the files of all queues.

        If `whole` is true, start at the last segment with a record and discard earlier results. Otherwise start at the
        last end.

        `state` is the store's state before its files were listed. A writer may have added files and shut down the store
        cleanly since then. So a file that is not in the list must not be reported as lost. Raises DamageError if the
        log is damaged.
        """
        state, self._token = state or self._read_state(), None
        try:
            self._refresh(queues, list(among), state, whole=whole)
            if not self.faults or self._read_state() == state:
                return
        except DamageError:
            if self._read_state() == state:
                raise
        # A writer started during the refresh. So an entry that seemed to be missing from an idle store may only be
        # late.
        self._refresh(queues, list(among), replace(state, closing=ShutdownState.LIVE), whole=whole)

    def _refresh(
        self, queues: Mapping[QueueKey, ConsumeQueue], among: list[QueueKey], state: StoreState, *, whole: bool
    ) -> None:
        if whole:
            self._base, self.ends, self._last_record = self._live_begin(state.closing), {}, (0, b"")
            self._waiting, self._newest_ms, self._last_offsets, self.begin = [], -1, {}, self._base
        base = self._base
        new_entries = self._read_new_entries(queues, among, whole=whole)
        flags, chained = self._chain(base, new_entries, state)
        self.end = chained.end
        unnamed = _messages_by_topic(chained.unitless) if state.closing is ShutdownState.CLOSED else {}
        unconfirmed: dict[QueueKey, int] = {}
        damaged: dict[QueueKey, DamageError] = {}
        for key, (begin, entries) in new_entries.items():
            valid = flags[key] & (entries.physical_offsets + entries.sizes <= self.end)
            last = int(np.flatnonzero(valid)[-1]) + 1 if valid.any() else 0
            if state.closing is ShutdownState.CRASHED and not valid[:last].all():
                last = int(np.argmin(valid))  # a power cut lost entries in the middle, so the queue ends before them
            confirmed = self._validator.confirm(key, entries, last, state.closing)
            self.ends[key] = begin + confirmed
            if confirmed:
                self._last_offsets[key] = int(entries.physical_offsets[confirmed - 1])
            if confirmed < last:
                unconfirmed[key] = int(entries.physical_offsets[confirmed])
            fault = None
            if state.closing is ShutdownState.CLOSED:
                rest = entries.part(confirmed, len(entries))
                fault = self._validator.fault_after_end(
                    queues, key, begin + confirmed, rest, last - confirmed, chained, unnamed.get(key.topic, {})
                )
            if whole and not len(entries) and state.closing is not ShutdownState.LIVE:
                fault = self._validator.fault_of_older_end(queues[key], begin)
            if fault is not None:
                damaged[key] = fault
        self._remember(chained, min(unconfirmed.values(), default=chained.end))
        self._newest_ms = chained.newest_ms()
        # The next refresh reads the records after the last entry again, so only earlier ones are kept.
        self._waiting = [record for record in self._waiting if record.physical_offset < base] + chained.unitless
        self._check_waiting(chained, queues, state.closing)
        self.pending |= unconfirmed.keys()
        self.faults.update(damaged)
        self.faults.update({key: fault for key, (_, fault) in self._unreadable.items()})
        self._token = self._make_token(queues, new_entries, chained, state)

    def _make_token(
        self,
        queues: Mapping[QueueKey, ConsumeQueue],
        new_entries: Mapping[QueueKey, tuple[int, Entries]],
        chained: RecordChain,
        state: StoreState,
    ) -> ChangeToken | None:
        """Return a token of the store's present state. While that is unchanged, another refresh would find nothing new.

        Return None if a refresh should follow at once.
        """
        if not self.pending and not self.faults and chained.refused_ms is None:
            return ChangeToken(self.end)
        waiting = self.pending & queues.keys()
        if len(self.pending) > MANY_QUEUES or not waiting <= new_entries.keys():
            return None
        awaited = []
        for key in waiting:
            begin, entries = new_entries[key]
            at = self.ends[key] - begin
            awaited.append(AwaitedEntry(queues[key], self.ends[key], entries.part(at, at + 1)))
        without_folder = frozenset(self.pending - queues.keys())
        return ChangeToken(self.end, chained.refused_ms, state, tuple(awaited), without_folder)

    def _read_new_entries(
        self, queues: Mapping[QueueKey, ConsumeQueue], among: list[QueueKey], *, whole: bool
    ) -> dict[QueueKey, tuple[int, Entries]]:
        """Return the entries that this refresh must check, by queue, each with the number of the first entry.

        Queues whose files cannot be read are left out.
        """
        if whole:
            self._unreadable = {}
        for gone in self._unreadable.keys() - queues.keys():
            del self._unreadable[gone]
        found = {}
        for key in among:
            queue = queues[key]
            fault = queue.run.fault()
            if fault is not None:
                self._unreadable[key] = queue, fault
                self.ends.pop(key, None)
                continue
            known = self.ends.get(key)
            if whole or known is None or self._is_recreated(queue, known):
                end = queue.search_written_end()
                begin = queue.first_from(self._base, end)
            else:
                begin, end = known, queue.written_end(known)
            found[key] = begin, queue.read(begin, end)
            queue.run.close()  # a store may have more queues than a process may have open files
        return found

    def _live_begin(self, closing: ShutdownState) -> int:
        """Return the physical offset where a segment begins, such that all records before it are certainly valid.

        It is the last segment with a record. After a crash it is the last segment whose first record is not newer than
        the checkpoint (CommitLog#recoverAbnormally, 5.3), because a power cut may have torn later records.
        """
        flushed_ms = self._checkpoint().min_timestamp if closing is ShutdownState.CRASHED else None
        for segment in reversed(self._log.segments.segments):
            record = self._log.record_at(segment.begin)
            if isinstance(record, Record) and (flushed_ms is None or record.store_timestamp <= flushed_ms):
                return segment.begin
        return self._log.segments.begin

    def _is_recreated(self, queue: ConsumeQueue, known: int) -> bool:
        """Return whether the queue's topic was deleted and created again since the last refresh.

        `known` is the queue's end as of the last refresh.
        """
        expected = self._last_offsets.get(queue.key)
        if expected is None or known <= queue.run.begin:
            return False
        last = queue.read(known - 1, known).physical_offsets
        return not len(last) or int(last[0]) != expected

    def _chain(
        self, base: int, new_entries: Mapping[QueueKey, tuple[int, Entries]], state: StoreState
    ) -> tuple[dict[QueueKey, NDArray[np.bool_]], RecordChain]:
        """Compare all entries with their records, and follow the chain of the records that agree.

        Return for each queue which of its entries agree, and the chain.
        """
        keys = list(new_entries)
        parts = [new_entries[key][1] for key in keys]
        lengths = [len(part) for part in parts]
        physical_offsets = np.concatenate([np.zeros(0, np.int64), *(part.physical_offsets for part in parts)])
        sizes = np.concatenate([np.zeros(0, np.int64), *(part.sizes for part in parts)])
        offsets = np.concatenate([np.zeros(0, np.int64), *(part.queue_offsets for part in parts)])
        queue_ids = np.repeat(np.array([key.queue_id for key in keys], np.int64), lengths)
        order = np.argsort(physical_offsets, kind="stable")
        agree, times = compare_headers(
            self._log, physical_offsets[order], sizes[order], offsets[order], queue_ids[order]
        )
        chosen = order[agree]
        chained = RecordChain(self._log, physical_offsets[chosen], sizes[chosen], times[agree], base, self._newest_ms)
        chained.settle(state, self._checkpoint, self._last_indexed)
        flags = np.zeros(len(physical_offsets), np.bool_)
        flags[chosen] = True
        flags_of_queues = np.split(flags, np.cumsum(lengths)[:-1]) if keys else []
        return dict(zip(keys, flags_of_queues, strict=True)), chained

    def _check_waiting(
        self, chained: RecordChain, queues: Mapping[QueueKey, ConsumeQueue], closing: ShutdownState
    ) -> None:
        """Set `pending` and `faults` for the queues of the messages without an entry.

        Such a queue is pending, unless the store was shut down cleanly. It has a fault if the entry cannot merely be
        late.
        """
        self.faults, self.pending = {}, set()
        last_offset = int(chained.physical_offsets[-1]) if len(chained.physical_offsets) else -1
        waiting = []
        for record in self._waiting:
            if not _needs_entry(record):
                continue
            key = QueueKey(record.topic.decode("utf-8", "replace"), record.queue_id)
            queue = queues.get(key)
            if queue is None and record.physical_offset < last_offset and not self._may_exist(key.topic):
                continue  # later messages have entries, so this one had an entry until its topic was deleted
            if queue is None and closing is ShutdownState.CLOSED and self._may_exist(key.topic):
                self.faults.setdefault(key, no_queue_error(record, key))
            end = self.ends.get(key)
            if queue is not None and end is not None and record.queue_offset < queue.offset_of(end, end):
                continue  # its entry was written meanwhile
            if queue is not None and record.physical_offset < self._last_offsets.get(key, -1):
                continue  # earlier than the queue's last record, so its topic was deleted and created again
            waiting.append(record)
            if closing is not ShutdownState.CLOSED and key not in self._unreadable:
                self.pending.add(key)
            if queue is not None and end is not None and key not in self.faults:
                fault = self._validator.fault(queue, end, record, closing)
                if fault is not None:
                    self.faults[key] = fault
        self._waiting = waiting

    def _remember(self, chained: RecordChain, before: int) -> None:
        """Set where the next refresh starts: after the last record with an entry below physical offset `before`.

        Keep that record's header, so that the next refresh detects whether the log was rewritten.
        """
        live = np.flatnonzero(chained.physical_offsets < min(before, chained.end))
        if len(live):
            last = int(chained.physical_offsets[live[-1]])
            self._last_record = last, self._log.bytes_at(last, RECORD_HEAD.itemsize)
            self._base = max(self._base, last + int(chained.sizes[live[-1]]))


def _needs_entry(record: Record) -> bool:
    """Return whether the message gets an entry. Prepared and rolled back messages never do."""
    return record.sys_flag & TRANSACTION_MASK in (0, TRANSACTION_COMMIT)


def _messages_by_topic(records: Iterable[Record]) -> dict[str, dict[int, Record]]:
    """Return the records that need an entry, by topic, and for each topic by physical offset."""
    found: dict[str, dict[int, Record]] = {}
    for record in filter(_needs_entry, records):
        found.setdefault(record.topic.decode("utf-8", "replace"), {})[record.physical_offset] = record
    return found
