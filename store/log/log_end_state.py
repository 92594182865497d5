"""The state of `log_end.LogEnd` after a refresh, and the step from one state to the next. Nothing here reads the disk.

`LogEnd` reads the facts from disk, and the functions of this module decide what follows from them. One refresh is:

1. A whole refresh begins with `start_over`, which discards earlier results.
2. `LogEnd` reads the new entries and follows the chain of records. The result is `Facts`. `count_agreeing` says how
   many entries of a queue the validator must confirm.
3. `advance` moves the ends. It also returns `Needs`: what must be read to judge the messages without an entry.
4. `LogEnd` reads that. The result is `Lookups`.
5. `conclude` decides which messages are still without an entry, which queues are pending or have a fault, and how a
   later change of the store is detected.

States are immutable. If a refresh raises, `LogEnd` keeps the state of the refresh before it.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.errors import DamageError, StoreError
from rmq_spark.store.format.record import TRANSACTION_COMMIT, TRANSACTION_MASK, Record
from rmq_spark.store.log.consume_queue import ConsumeQueue, Entries
from rmq_spark.store.log.entry_check import NextEntry, missing_entry_fault, no_queue_error
from rmq_spark.store.log.record_chain import ShutdownState, StoreState
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


@dataclass(frozen=True, slots=True)
class ChangeToken:
    """A cheap fingerprint of the store: the end of the log (physical offset), and the missing entries and folders.

    As long as it holds, nothing has changed: no record was added after the log's end, no missing entry was written, no
    queue that lacked files got a folder, and no writer started or stopped.

    - `refused_ms` is the store time (ms) of a complete record at the end that was considered stale. None if there is
      none.
    - `store` is the store's state, if the result depends on it. It does if messages lack entries, or if there are
      faults or a stale record.
    - `awaited` are the first entries that are missing or not trusted, one per queue.
    - `without_folder` are queues that have a message and no folder.
    """

    end: int
    refused_ms: int | None = None
    store: StoreState | None = None
    awaited: tuple[AwaitedEntry, ...] = ()
    without_folder: frozenset[QueueKey] = frozenset()


@dataclass(frozen=True, slots=True)
class EndState:
    """What is known about the ends of the log and of its queues after a refresh. Positions are physical offsets.

    - `base` is where the next refresh starts: after the last record that has an entry. It cannot start later: when a
      crashed writer restarts, its recovery may still truncate records without an entry.
    - `begin` is where the last whole refresh started to follow the chain of records.
    - `end` is the end of the log.
    - `ends` has the number after the last valid entry of each queue that can be read.
    - `last_offsets` has the physical offset in the last valid entry of each queue.
    - `unreadable` has the queues whose files are wrong, with the error.
    - `faults` has the error of each queue that cannot be read, including those in `unreadable`.
    - `waiting` are the records before `end` that need an entry and have none.
    - `pending` are the queues that have a logged message without an entry, while the entry may still be written.
    - `newest_ms` is the newest store time (ms) of a message before `end`. -1 if there is none.
    - `last_record` is the last record that has an entry, and its header. (0, b"") if there is none.
    - `token` tells whether the store has changed since then. If it is None, the store must be read again.
    """

    base: int = 0
    begin: int = 0
    end: int = 0
    ends: Mapping[QueueKey, int] = field(default_factory=dict)
    last_offsets: Mapping[QueueKey, int] = field(default_factory=dict)
    unreadable: Mapping[QueueKey, tuple[ConsumeQueue, StoreError]] = field(default_factory=dict)
    faults: Mapping[QueueKey, StoreError] = field(default_factory=dict)
    waiting: tuple[Record, ...] = ()
    pending: frozenset[QueueKey] = frozenset()
    newest_ms: int = -1
    last_record: tuple[int, bytes] = (0, b"")
    token: ChangeToken | None = None

    def first_unitless(self) -> int:
        """Return a physical offset below which every message has an entry, except messages of deleted topics."""
        return min(self.base, min((record.physical_offset for record in self.waiting), default=self.end))


@dataclass(frozen=True, slots=True)
class NewEntries:
    """The entries of one queue that a refresh read, and what the validator found.

    - `begin` is the number of the first of `entries`.
    - `agreeing` is the number of entries that `count_agreeing` returned.
    - `confirmed` is how many of these passed all other checks. The queue ends after them.
    - `fault` is damage found at that end, or None.
    """

    begin: int
    entries: Entries
    agreeing: int
    confirmed: int
    fault: DamageError | None = None

    def confirmed_entries(self) -> Entries:
        """Return the entries that passed all checks."""
        return self.entries if self.confirmed == len(self.entries) else self.entries.part(0, self.confirmed)


@dataclass(frozen=True, slots=True)
class ChainFacts:
    """The chain of records as `record_chain.RecordChain` followed it. Sizes are in bytes, store times in ms.

    `physical_offsets` and `sizes` are those of the records that have an entry, also beyond `end`. `unitless` are the
    records before `end` that have none. `refused_ms` is the store time of a stale record at `end`, or None.
    """

    end: int
    newest_ms: int
    physical_offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    unitless: tuple[Record, ...] = ()
    refused_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What a refresh read from disk. `store` is how the last writer left the store.

    `queues` has the files of all queues. `new_entries` has the queues whose entries were read, and `unreadable` the
    queues whose files were found to be wrong.
    """

    store: StoreState
    queues: Mapping[QueueKey, ConsumeQueue]
    new_entries: Mapping[QueueKey, NewEntries]
    unreadable: Mapping[QueueKey, tuple[ConsumeQueue, StoreError]]
    chain: ChainFacts


@dataclass(frozen=True, slots=True)
class Needs:
    """What must be read from disk before `conclude` can decide.

    - `header_at` is the physical offset of the last record that has an entry. None if it did not change.
    - `queues` are the queues of the messages without an entry, in the order of the log.
    """

    header_at: int | None
    queues: tuple[QueueKey, ...]


@dataclass(frozen=True, slots=True)
class Lookups:
    """What was read because of `Needs`.

    - `header` is the header of the record at `Needs.header_at`.
    - `next_entries` has the entry at the end of each queue in `Needs.queues` that has files and can be read.
    - `possible_topics` are the topics that may exist, of the queues in `Needs.queues` without files.
    """

    header: bytes = b""
    next_entries: Mapping[QueueKey, NextEntry] = field(default_factory=dict)
    possible_topics: Set[str] = frozenset()


def start_over(state: EndState, begin: int) -> EndState:
    """Return the state in which a whole refresh begins. It follows the records from the physical offset `begin`."""
    return EndState(base=begin, begin=begin, end=state.end, faults=state.faults, pending=state.pending)


def count_agreeing(agree: NDArray[np.bool_], entries: Entries, log_end: int, closing: ShutdownState) -> int:
    """Return the number of entries up to the last one whose record is valid.

    A record is valid if its header agrees with the entry, which `agree` tells for each entry, and if it does not extend
    beyond `log_end`. After a crash, count only the entries before the first one without a valid record, because a power
    cut may have lost entries in the middle.
    """
    if not len(entries):
        return 0
    valid = agree & (entries.physical_offsets + entries.sizes <= log_end)
    if valid[-1] and (len(entries) == 1 or closing is not ShutdownState.CRASHED):
        return len(entries)
    last = int(np.flatnonzero(valid)[-1]) + 1 if valid.any() else 0
    if closing is ShutdownState.CRASHED and not valid[:last].all():
        return int(np.argmin(valid))
    return last


def advance(state: EndState, facts: Facts) -> tuple[EndState, Needs]:
    """Return the state with the ends moved over the confirmed entries, and what must be read to conclude the refresh.

    In the returned state, `waiting` has every record that may lack its entry. Only `conclude` changes `last_record`,
    `faults`, `pending` and `token`.
    """
    chain = facts.chain
    unreadable = {key: found for key, found in state.unreadable.items() if key in facts.queues}
    ends, last_offsets, before = dict(state.ends), dict(state.last_offsets), chain.end
    for key in facts.unreadable:
        ends.pop(key, None)
    for key, new in facts.new_entries.items():
        ends[key] = new.begin + new.confirmed
        if new.confirmed:
            last_offsets[key] = int(new.entries.physical_offsets[new.confirmed - 1])
        if new.confirmed < new.agreeing:
            before = min(before, int(new.entries.physical_offsets[new.confirmed]))
    base, header_at = state.base, None
    with_entry = np.flatnonzero(chain.physical_offsets < before)
    if len(with_entry):
        header_at = int(chain.physical_offsets[with_entry[-1]])
        base = max(base, header_at + int(chain.sizes[with_entry[-1]]))
    # This refresh read the records after the old base again, so only earlier ones are kept.
    earlier = tuple(record for record in state.waiting if record.physical_offset < state.base)
    waiting = tuple(filter(needs_entry, earlier + chain.unitless))
    moved = replace(
        state,
        base=base,
        end=chain.end,
        ends=ends,
        last_offsets=last_offsets,
        unreadable={**unreadable, **facts.unreadable},
        waiting=waiting,
        newest_ms=chain.newest_ms,
    )
    return moved, Needs(header_at, tuple(dict.fromkeys(map(queue_of, waiting))))


def conclude(state: EndState, needs: Needs, facts: Facts, lookups: Lookups) -> EndState:
    """Return the state after the refresh. `state` and `needs` are the results of `advance` for the same `facts`."""
    is_closed = facts.store.closing is ShutdownState.CLOSED
    waiting, pending, faults = [], set[QueueKey](), dict[QueueKey, StoreError]()
    for record in state.waiting:
        key = queue_of(record)
        if not _is_missing(key, record, state, facts, lookups):
            continue
        waiting.append(record)
        if not is_closed and key not in state.unreadable:
            pending.add(key)
        fault = _fault_of_missing(key, record, facts, lookups) if key not in faults else None
        if fault is not None:
            faults[key] = fault
    pending |= {key for key, new in facts.new_entries.items() if new.confirmed < new.agreeing}
    faults |= {key: new.fault for key, new in facts.new_entries.items() if new.fault is not None}
    faults |= {key: fault for key, (_, fault) in state.unreadable.items()}
    concluded = replace(state, waiting=tuple(waiting), pending=frozenset(pending), faults=faults)
    last_record = state.last_record if needs.header_at is None else (needs.header_at, lookups.header)
    return replace(concluded, last_record=last_record, token=_make_token(concluded, facts))


def _is_missing(key: QueueKey, record: Record, state: EndState, facts: Facts, lookups: Lookups) -> bool:
    """Return whether a record's entry is missing.

    It is not missing if it was written meanwhile, or if the record's topic was deleted.
    """
    if key not in facts.queues:
        # If later messages have entries, this one had an entry until its topic was deleted.
        offsets = facts.chain.physical_offsets
        is_last = not len(offsets) or record.physical_offset >= int(offsets[-1])
        return is_last or key.topic in lookups.possible_topics
    expected = lookups.next_entries.get(key)
    if expected is not None and record.queue_offset < expected.queue_offset:
        return False
    # A record before the queue's last one lost its entry when its topic was deleted and created again.
    return record.physical_offset >= state.last_offsets.get(key, -1)


def _fault_of_missing(key: QueueKey, record: Record, facts: Facts, lookups: Lookups) -> DamageError | None:
    """Return the error if a record's entry is missing and cannot merely be late."""
    expected = lookups.next_entries.get(key)
    if expected is not None:
        return missing_entry_fault(key, record, expected, facts.store.closing)
    is_lost = key not in facts.queues and key.topic in lookups.possible_topics
    return no_queue_error(record, key) if is_lost and facts.store.closing is ShutdownState.CLOSED else None


def _make_token(state: EndState, facts: Facts) -> ChangeToken | None:
    """Return a token of the store's present state. While that is unchanged, another refresh would find nothing new.

    Return None if a refresh should follow at once.
    """
    if not state.pending and not state.faults and facts.chain.refused_ms is None:
        return ChangeToken(state.end)
    late = [key for key in state.pending if key in facts.queues]
    if len(state.pending) > MANY_QUEUES or any(key not in facts.new_entries for key in late):
        return None
    awaited = []
    for key in late:
        new = facts.new_entries[key]
        previous = new.entries.part(new.confirmed, new.confirmed + 1)
        awaited.append(AwaitedEntry(facts.queues[key], state.ends[key], previous))
    without_folder = frozenset(key for key in state.pending if key not in facts.queues)
    return ChangeToken(state.end, facts.chain.refused_ms, facts.store, tuple(awaited), without_folder)


def needs_entry(record: Record) -> bool:
    """Return whether the message gets an entry. Prepared and rolled back messages never do."""
    return record.sys_flag & TRANSACTION_MASK in (0, TRANSACTION_COMMIT)


def queue_of(record: Record) -> QueueKey:
    """Return the queue that a record names."""
    return QueueKey(record.topic.decode("utf-8", "replace"), record.queue_id)
