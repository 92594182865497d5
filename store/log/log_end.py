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

`LogEnd` does all the reading. What follows from the bytes is decided in `log_end_state`, which reads nothing.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.errors import DamageError, StoreChangedError, StoreError
from rmq_spark.store.format.checkpoint import Checkpoint
from rmq_spark.store.format.record import (
    BLANK_BYTES,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    RECORD_HEAD,
    Blank,
    Record,
)
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.consume_queue import ConsumeQueue, Entries, EntryTable
from rmq_spark.store.log.entry_check import EntryValidator, compare_headers, read_next_entry
from rmq_spark.store.log.log_end_state import (
    AwaitedEntry,
    ChainFacts,
    ChangeToken,
    EndState,
    Facts,
    Lookups,
    Needs,
    NewEntries,
    advance,
    conclude,
    count_agreeing,
    needs_entry,
    queue_of,
    start_over,
)
from rmq_spark.store.log.record_chain import RecordChain, ShutdownState, StoreState
from rmq_spark.store.model import QueueKey

_RECENT_ENTRIES = 1 << 16  # kept after a refresh
_FEW_ENTRIES = 64


class LogEnd:
    """The ends of the log and of its queues as of the last `refresh`. Not thread-safe.

    A refresh is cheap if little was appended since the last one. If a refresh raises, all results stay those of the
    refresh before it.
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
        self._state = EndState()
        self.recent = EntryTable({})  # the entries that the last refresh confirmed, unless they are many

    @property
    def begin(self) -> int:
        """The physical offset from which the last whole refresh followed the chain of records."""
        return self._state.begin

    @property
    def end(self) -> int:
        """The physical offset of the log's end."""
        return self._state.end

    @property
    def ends(self) -> Mapping[QueueKey, int]:
        """The number after the last valid entry of each queue that can be read."""
        return self._state.ends

    @property
    def faults(self) -> Mapping[QueueKey, StoreError]:
        """The error of each queue that cannot be read."""
        return self._state.faults

    @property
    def pending(self) -> Set[QueueKey]:
        """The queues that have a logged message without an entry, while the entry may still be written."""
        return self._state.pending

    @property
    def newest_ms(self) -> int:
        """The newest store time (ms) of a message before the end. -1 if there is no message."""
        return self._state.newest_ms

    @property
    def last_record(self) -> tuple[int, bytes]:
        """The physical offset and the header of the last record that has an entry. (0, b"") if there is none."""
        return self._state.last_record

    def first_unitless(self) -> int:
        """Return a physical offset below which every message has an entry, except messages of deleted topics.

        It is at or below the first message whose entry is missing or not trusted.
        """
        return self._state.first_unitless()

    def is_idle(self, has_folder: Callable[[QueueKey], bool]) -> bool:
        """Return whether nothing has changed since the last refresh. Costs a few small reads.

        `has_folder` returns whether a queue has a folder on disk now.
        """
        token = self._state.token
        return token is not None and self._holds(token, has_folder) and not self.is_rewritten()

    def _holds(self, token: ChangeToken, has_folder: Callable[[QueueKey], bool]) -> bool:
        """Return whether nothing has changed. If something changes during this call, the next call returns False."""
        if not self._log.is_begin_there() or self._has_log_grown(token):
            return False
        if token.store is None:
            return True
        try:
            return (
                self._read_state() == token.store
                and not any(map(_has_changed, token.awaited))
                and not any(map(has_folder, token.without_folder))
            )
        except StoreError:
            return False  # the refresh raises or records the same error

    def _has_log_grown(self, token: ChangeToken) -> bool:
        """Return whether a complete record is at the token's end, or a filler that the next segment follows."""
        magic = int.from_bytes(self._log.bytes_at(token.end, BLANK_BYTES)[4:], "big")
        if magic not in (MAGIC_V1, MAGIC_V2, MAGIC_BLANK):
            return False
        found = self._log.record_at(token.end)
        if isinstance(found, Blank):
            segment = self._log.segments.holding(token.end)
            return segment is None or self._log.has_file_at(segment.end)
        return isinstance(found, Record) and found.crc_matches and found.store_timestamp != token.refused_ms

    def appended(self, at_most: int) -> set[QueueKey] | None:
        """Return the queues of the records that were appended since the last refresh.

        Queues that are pending or have a fault are included. Return None if `at_most` records or more were appended.
        """
        found, physical_offset = {*self.pending, *self.faults}, self._state.base
        for _ in range(at_most):
            record = self._log.queue_at(physical_offset)
            if record is None:
                return found
            if isinstance(record, Blank):
                segment = self._log.segments.holding(physical_offset)
                if segment is None or self._log.segments.holding(segment.end) is None:
                    return found
                physical_offset = segment.end
            else:
                found.add(record[0])
                physical_offset += record[1]
        return None

    def is_rewritten(self) -> bool:
        """Return whether the next refresh must be whole, because earlier results are not valid any more.

        They are not valid if the last record was overwritten, if files that could not be read have changed, or if the
        log begins after the physical offset from which the next refresh would read.
        """
        if self._state.base < self._log.segments.begin:
            return True  # also if the log was empty, so that there is no last record
        physical_offset, header = self._state.last_record
        if header and self._log.bytes_at(physical_offset, RECORD_HEAD.itemsize) != header:
            return True
        for queue, fault in self._state.unreadable.values():
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
        state = state or self._read_state()
        self._state = replace(self._state, token=None)  # so that a refresh follows if this one raises
        self.recent = EntryTable({})
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
        self, queues: Mapping[QueueKey, ConsumeQueue], among: list[QueueKey], store: StoreState, *, whole: bool
    ) -> None:
        state = start_over(self._state, self._live_begin(store.closing)) if whole else self._state
        entries, unreadable = self._read_new_entries(queues, among, state, whole=whole)
        agree, chained = self._chain(state, entries, store)
        chain = ChainFacts(
            chained.end,
            chained.newest_ms(),
            chained.physical_offsets,
            chained.sizes,
            tuple(chained.unitless),
            chained.refused_ms,
        )
        new_entries = self._validate(queues, entries, agree, chained, store.closing, whole=whole)
        facts = Facts(store, queues, new_entries, unreadable, chain)
        moved, needs = advance(state, facts)
        self._state = conclude(moved, needs, facts, self._look_up(moved, needs, facts))
        if sum(new.confirmed for new in new_entries.values()) <= _RECENT_ENTRIES:
            self.recent = EntryTable({key: (new.begin, new.confirmed_entries()) for key, new in new_entries.items()})

    def _read_new_entries(
        self, queues: Mapping[QueueKey, ConsumeQueue], among: list[QueueKey], state: EndState, *, whole: bool
    ) -> tuple[dict[QueueKey, tuple[int, Entries]], dict[QueueKey, tuple[ConsumeQueue, StoreError]]]:
        """Return the entries that this refresh must check, by queue, each with the number of the first entry.

        Also return the queues whose files cannot be read, with the error.
        """
        found, unreadable = {}, {}
        for key in among:
            queue = queues[key]
            known = state.ends.get(key)
            if not whole and known is not None:
                new = _read_few_new(queue, known, state.last_offsets.get(key))
                if new is not None:
                    found[key] = known, new
                    continue
            queue.run.refresh()
            fault = queue.run.fault()
            if fault is not None:
                unreadable[key] = queue, fault
                continue
            if whole or known is None or _is_recreated(queue, known, state.last_offsets.get(key)):
                end = queue.search_written_end()
                begin = queue.first_from(state.base, end)
            else:
                begin, end = known, queue.written_end(known)
            found[key] = begin, queue.read(begin, end)
            queue.run.close()  # a store may have more queues than a process may have open files
        return found, unreadable

    def _validate(
        self,
        queues: Mapping[QueueKey, ConsumeQueue],
        new_entries: Mapping[QueueKey, tuple[int, Entries]],
        agree: Mapping[QueueKey, NDArray[np.bool_]],
        chained: RecordChain,
        closing: ShutdownState,
        *,
        whole: bool,
    ) -> dict[QueueKey, NewEntries]:
        """Confirm the entries of each queue, and find damage after them. `agree` is the result of `_chain`."""
        found = {}
        unnamed = _messages_by_topic(chained.unitless) if closing is ShutdownState.CLOSED else {}
        agreeing_of = {
            key: count_agreeing(agree[key], entries, chained.end, closing) for key, (_, entries) in new_entries.items()
        }
        good = self._validator.find_good(
            {
                key: entries.part(agreeing_of[key] - 1, agreeing_of[key])
                for key, (_, entries) in new_entries.items()
                if agreeing_of[key] and entries.message_counts is None
            },
            closing,
        )
        for key, (begin, entries) in new_entries.items():
            agreeing = agreeing_of[key]
            confirmed = agreeing if key in good else self._validator.confirm(key, entries, agreeing, closing)
            fault = None
            if closing is ShutdownState.CLOSED:
                rest = entries.part(confirmed, len(entries))
                fault = self._validator.fault_after_end(
                    queues, key, begin + confirmed, rest, agreeing - confirmed, chained, unnamed.get(key.topic, {})
                )
            if whole and not len(entries) and closing is not ShutdownState.LIVE:
                fault = self._validator.fault_of_older_end(queues[key], begin)
            found[key] = NewEntries(begin, entries, agreeing, confirmed, fault)
        return found

    def _look_up(self, moved: EndState, needs: Needs, facts: Facts) -> Lookups:
        """Read what `conclude` needs."""
        header = b"" if needs.header_at is None else self._log.bytes_at(needs.header_at, RECORD_HEAD.itemsize)
        next_entries = {
            key: read_next_entry(facts.queues[key], moved.ends[key], facts.store.closing)
            for key in needs.queues
            if key in facts.queues and key in moved.ends
        }
        topics = {key.topic for key in needs.queues if key not in facts.queues}
        return Lookups(header, next_entries, frozenset(filter(self._may_exist, topics)))

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

    def _chain(
        self, state: EndState, new_entries: Mapping[QueueKey, tuple[int, Entries]], store: StoreState
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
        chained = RecordChain(
            self._log, physical_offsets[chosen], sizes[chosen], times[agree], state.base, state.newest_ms
        )
        chained.settle(store, self._checkpoint, self._last_indexed)
        flags = np.zeros(len(physical_offsets), np.bool_)
        flags[chosen] = True
        flags_of_queues = np.split(flags, np.cumsum(lengths)[:-1]) if keys else []
        return dict(zip(keys, flags_of_queues, strict=True)), chained


def _has_changed(awaited: AwaitedEntry) -> bool:
    """Return whether the entry differs now from what the last refresh read."""
    queue, number = awaited.queue, awaited.number
    if number >= queue.run.end:
        queue.run.refresh()  # the entry's file may have been created since then
    current = queue.read(number, number + queue.is_written(number))
    queue.run.close()
    return not current.equals(awaited.previous)


def _read_few_new(queue: ConsumeQueue, known: int, last_offset: int | None) -> Entries | None:
    """Return the written entries from number `known` on, with one read and without listing the queue's files.

    The arguments are those of `_is_recreated`. Returns None if the files must be listed: a file may have been added, or
    the queue created again.
    """
    if last_offset is None or queue.are_batches or not queue.run.has_around(known):
        return None
    try:
        before = queue.read(known - 1, min(known + _FEW_ENTRIES, queue.run.end))
    except StoreChangedError:
        return None
    finally:
        queue.run.close()  # a store may have more queues than a process may have open files
    unwritten = np.flatnonzero(before.sizes <= 0)
    if not len(unwritten) or int(before.physical_offsets[0]) != last_offset:
        return None
    return before.part(1, int(unwritten[0]))


def _is_recreated(queue: ConsumeQueue, known: int, last_offset: int | None) -> bool:
    """Return whether the queue's topic was deleted and created again since the last refresh.

    `known` is the queue's end as of the last refresh, and `last_offset` the physical offset in its last entry. It is
    None if the queue had no entry.
    """
    if last_offset is None or known <= queue.run.begin:
        return False
    last = queue.read(known - 1, known).physical_offsets
    return not len(last) or int(last[0]) != last_offset


def _messages_by_topic(records: Iterable[Record]) -> dict[str, dict[int, Record]]:
    """Return the records that need an entry, by topic, and for each topic by physical offset."""
    found: dict[str, dict[int, Record]] = {}
    for record in filter(needs_entry, records):
        found.setdefault(queue_of(record).topic, {})[record.physical_offset] = record
    return found
