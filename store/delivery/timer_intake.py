"""Intake of new messages into the timer, and recovery of timer log and timer wheel.

New messages are in the queue of the topic `rmq_sys_wheel_timer`. To take a message means to write its entry into the
timer log and to link the entry to the wheel. All of this happens under the store's lock. These are the writes in their
order, and what happens after a crash:

1. `master_queue_offset` in the check: the queue offset up to which messages are about to be taken. After a crash it has
   no effect by itself.
2. Entries of the timer log. After a crash, the next process finds them after the position in the check: this engine
   reads on from that position, and a broker reads the last two files. Both resume after the message of the last entry.
   An entry that was written in part is zeroed, and its message is taken again.
3. Slots of the wheel. Slots that are missing after a crash are rebuilt from the entries, which contain the links of the
   chains.
4. Log and wheel are synced, and then the check durably records the new end. After a power cut before this, the check
   has the old end. Everything after that position in the log is zeroed, slots that refer to it are repaired, and the
   messages are taken again.

Every message gets an entry, even an overdue one. So the last entry determines how far messages were taken.
"""

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.delivery.record_lookup import read_originals
from rmq_spark.store.delivery.timer_files import TimerLog, TimerWheel
from rmq_spark.store.delivery.timer_state import link_entries, relink
from rmq_spark.store.format.record_batch import WholeRecords
from rmq_spark.store.format.timer import (
    DEFAULT,
    DELETE,
    ROLL,
    SECOND_MS,
    TIMER_SLOT,
    TIMER_UNIT,
    TIMER_UNIT_BYTES,
    TimerCheck,
    TimerRequests,
    due_times,
    place_entries,
    slot_numbers,
    wheel_times,
)
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.consume_queue import ConsumeQueue

_LOG = logging.getLogger("rmq_spark")
_BATCH_ENTRIES = 32_768
_BATCH_BYTES = 16 << 20  # bytes of records


@dataclass(frozen=True, slots=True)
class Recovered:
    """The result of a recovery: the `end` of the timer log, and the `queue_offset` at which intake resumes.

    Some messages at or after `queue_offset` may have entries already; `logged` has the physical offsets of their
    records, ascending. If `is_certain`, no message at or after `queue_offset` was delivered.
    """

    end: int
    queue_offset: int
    logged: NDArray[np.int64]
    is_certain: bool


def recover(
    log: TimerLog,
    wheel: TimerWheel,
    queue: ConsumeQueue,
    queue_end: int,
    check: TimerCheck,
    *,
    read_ms: int,
    has_wheel: bool,
    is_ours: bool,
    is_same_boot: bool,
) -> Recovered:
    """Enter the timer log's entries due at `read_ms` or later into the wheel, and zero the log after its last entry.

    If this engine wrote the check last (`is_ours`), everything before its position in the log was made durable earlier,
    so reading starts there. A broker guarantees less, so after a broker the file of this position and the file before
    it are read. If there was no wheel (`has_wheel`), all files are read. Source: TimerMessageStore#recover (5.3).
    """
    base, run = check.log_position, log.run
    if not run.begin <= base <= run.end:  # files are missing, so nothing is certain
        base, is_ours = run.begin, False
    begin = base
    if not has_wheel:
        begin = run.begin
    elif not is_ours:
        begin = max((base - log.file_bytes) // log.file_bytes * log.file_bytes, run.begin)
    end, logged, last_offset = base if is_ours else begin, [], -1
    for positions, entries in log.scan(begin, base if is_ours and not is_same_boot else None):
        count = _agreeing(positions, entries, base, queue, queue_end)
        positions, entries, is_cut = positions[:count], entries[:count], count < len(positions)
        relink(wheel, positions, entries, read_ms)
        if count:
            end = int(positions[-1]) + TIMER_UNIT_BYTES
            logged.append(entries["physical_offset"].astype(np.int64))
            last_offset = int(logged[-1][-1])
        if is_cut:
            break
    log.clear_from(end)
    had_stale = _repair_stale_slots(log, wheel, end, read_ms)
    queue_offset = check.queue_offset
    if not is_ours:
        following = _offset_after(queue, queue_end, last_offset)
        if following is not None:
            queue_offset = min(queue_offset, following) if check.version_counter else following
        elif had_stale:
            queue_offset = 0
    physical_offsets = np.concatenate(logged) if logged else np.zeros(0, np.int64)
    return Recovered(end, min(queue_offset, queue_end), np.sort(physical_offsets), is_ours)


def _agreeing(
    positions: NDArray[np.int64], entries: NDArray[np.void], base: int, queue: ConsumeQueue, queue_end: int
) -> int:
    """Return how many of the entries are valid, counted from the first one.

    Entries before position `base` are valid. From `base` an entry is valid if its record is in the queue; the first
    invalid one ends the count.
    """
    new = int(np.searchsorted(positions, base))
    if new == len(positions):
        return new
    physical_offsets = entries["physical_offset"][new:].astype(np.int64)
    first = queue.first_from(int(physical_offsets.min()), queue_end)
    last = queue.first_from(int(physical_offsets.max()) + 1, queue_end)
    queued = queue.read(first, min(last, queue_end))
    if not len(queued):
        return new
    at = np.minimum(np.searchsorted(queued.physical_offsets, physical_offsets), len(queued) - 1)
    good = (queued.physical_offsets[at] == physical_offsets) & (queued.sizes[at] == entries["record_size"][new:])
    return new + (int(np.argmin(good)) if not good.all() else len(good))


def _offset_after(queue: ConsumeQueue, queue_end: int, physical_offset: int) -> int | None:
    """Return the queue offset after the message with the record at `physical_offset`.

    Returns None if the queue has no such message.
    """
    if physical_offset < 0:
        return None
    at = queue.first_from(physical_offset, queue_end)
    entry = queue.read(at, min(at + 1, queue_end))
    return at + 1 if len(entry) and int(entry.physical_offsets[0]) == physical_offset else None


def _repair_stale_slots(log: TimerLog, wheel: TimerWheel, end: int, read_ms: int) -> bool:
    """Repair the slots that refer to entries at or after `end`, the end of the log. Return whether there were any.

    Each of them gets the last entry of its second before `end`. If there is none, the slot is emptied.
    """
    slots = wheel.slots_from(read_ms)
    stale = slots[slots["last_position"] >= end].copy()
    if not len(stale):
        return False
    times = stale["second"].astype(np.int64) * SECOND_MS
    lasts, firsts = np.full(len(stale), -1, np.int64), stale["first_position"].astype(np.int64)
    begin = int(firsts.min())
    for positions, entries in log.scan(begin, end) if 0 <= begin < end else ():
        due = due_times(entries)
        numbers = np.minimum(np.searchsorted(times, due), len(times) - 1)
        rows = np.flatnonzero(times[numbers] == due)
        lasts[numbers[rows]] = positions[rows]  # if a number occurs several times, numpy keeps the last position
    gone = lasts < 0
    stale["last_position"] = lasts
    stale[gone] = np.zeros(1, TIMER_SLOT)[0]
    numbers = slot_numbers(times)
    order = np.argsort(numbers)
    wheel.write_slots(numbers[order], stale[order])
    return True


@dataclass(slots=True)
class Intake:
    """Takes messages from the queue into timer log and timer wheel. `end` is the end of the timer log.

    Not thread-safe. The caller must hold the store's lock.
    """

    timer_log: TimerLog
    wheel: TimerWheel
    queue: ConsumeQueue
    log: CommitLog
    end: int
    new_times: list[NDArray[np.int64]]  # for each batch, the seconds (in ms) that got messages

    def take(self, begin: int, queue_end: int, logged: NDArray[np.int64], *, read_ms: int, write_ms: int) -> int:
        """Take one batch of messages, from queue offset `begin`, and return the queue offset after it.

        Skips messages that have entries already: those whose physical offsets are in `logged`.
        """
        queued = self.queue.read(begin, min(begin + _BATCH_ENTRIES, queue_end))
        if not len(queued):
            return queue_end
        fitting = int(np.searchsorted(np.cumsum(queued.sizes), _BATCH_BYTES, side="right"))
        queued = queued.part(0, max(fitting, 1))
        physical_offsets, sizes, offsets = queued.physical_offsets, queued.sizes, queued.queue_offsets
        if len(logged):
            at = np.minimum(np.searchsorted(logged, physical_offsets), len(logged) - 1)
            new = logged[at] != physical_offsets
            physical_offsets, sizes, offsets = physical_offsets[new], sizes[new], offsets[new]
        if len(physical_offsets):
            self._write(physical_offsets, sizes, offsets, read_ms, write_ms)
        return begin + len(queued)

    def _write(
        self,
        physical_offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
        offsets: NDArray[np.int64],
        read_ms: int,
        write_ms: int,
    ) -> None:
        """Write the entries of messages, and then the slots that refer to these entries."""
        found = read_originals(self.log, physical_offsets, sizes)
        whole = found.is_whole
        self._log_undeliverable("cannot be read", physical_offsets[~whole])
        physical_offsets, sizes = physical_offsets[whole], sizes[whole]
        if not len(physical_offsets):
            return
        records = WholeRecords.of(found.data, found.positions[whole], found.ends[whole])
        is_own = records.are_of(self.queue.key.topic, 0) & (records.field("queue_offset") == offsets[whole])
        if not is_own.all():
            self._log_undeliverable("belongs to another queue or queue offset", physical_offsets[~is_own])
            physical_offsets, sizes = physical_offsets[is_own], sizes[is_own]
            if not len(physical_offsets):
                return
            records = WholeRecords.of(records.data, records.positions[is_own], records.ends[is_own])
        requests = TimerRequests.of(records)
        timed = requests.out_ms >= 0
        self._log_undeliverable("has no TIMER_OUT_MS", physical_offsets[~timed])
        if not timed.any():
            return
        times, rolls = wheel_times(requests.out_ms[timed], write_ms, read_ms)
        deletions = requests.are_deletions[timed]
        new = np.zeros(len(times), TIMER_UNIT)
        new["unit_size"] = TIMER_UNIT_BYTES
        new["magic"] = DEFAULT | np.where(rolls, ROLL, 0) | np.where(deletions, DELETE, 0)
        new["write_time"] = write_ms
        new["delay"] = times - write_ms
        new["physical_offset"] = physical_offsets[timed]
        new["record_size"] = sizes[timed]
        new["topic_hash"] = requests.topic_hashes()[timed]
        at = place_entries(self.end, len(new), self.timer_log.file_bytes)
        new["previous_position"], numbers, slots = link_entries(self.wheel, times, at, np.where(deletions, -1, 1))
        self.timer_log.write_entries(at, new)
        # Now the messages are taken. After a crash here, no slot refers to the entries, and `recover` enters them.
        self.wheel.write_slots(numbers, slots)
        self.end = at.end
        self.new_times.append(np.unique(times))

    def _log_undeliverable(self, reason: str, physical_offsets: NDArray[np.int64]) -> None:
        if len(physical_offsets):
            _LOG.warning(
                "rmq: %d messages of %s, which wait for a time, cannot be delivered, the first one at physical offset "
                "%d: it %s",
                len(physical_offsets),
                self.queue.key,
                physical_offsets[0],
                reason,
            )
