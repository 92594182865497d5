"""New messages of `rmq_sys_wheel_timer` taken into timer log and wheel, and both made whole after a crash or a broker.

All of it happens under the store's lock. The order of writes, and what a crash leaves at each step:

1. `master_queue_offset` in the check says up to where the queue is about to be taken. Alone it means nothing.
2. Units. Whoever comes next finds them behind the position that the check names: we by reading on, a broker by reading
   the last two files. Both go on behind the message of the last unit; a torn one is made zero, its message taken again.
3. Slots of the wheel. Those that are missing are made from those units; chains are in the units themselves.
4. Log and wheel are synced; then the check names the new end, for good. A power cut before leaves the old check: what
   is behind the position there is made zero, slots that name it are mended, and the messages are taken again.

Every message gets a unit, an overdue one too: so the last unit alone says how far the queue was taken.
"""

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.delivery.originals import read_originals
from rmq_spark.store.delivery.timer_chains import link_units, relink
from rmq_spark.store.delivery.timer_files import TimerLog, TimerWheel
from rmq_spark.store.format.timer_check import TimerCheck
from rmq_spark.store.format.timer_log import (
    DEFAULT,
    DELETE,
    ROLL,
    TIMER_UNIT,
    TIMER_UNIT_BYTES,
    due_times,
)
from rmq_spark.store.format.timer_properties import TimerRequests
from rmq_spark.store.format.timer_wheel import SECOND_MS, TIMER_SLOT, slot_numbers, wheel_times
from rmq_spark.store.format.whole_records import WholeRecords
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.queues import ConsumeQueue

_LOG = logging.getLogger("rmq_spark")
_BATCH_UNITS = 32_768
_BATCH_BYTES = 16 << 20  # of records


@dataclass(frozen=True, slots=True)
class Mended:
    """What timer log and queue say of each other: where the log ends, and from where on the queue is to be taken.

    Messages from there on whose records are `logged` (physical offsets, ascending) have units already. `is_sure`: no
    message from there on was delivered.
    """

    end: int
    queue_offset: int
    logged: NDArray[np.int64]
    is_sure: bool


def mend(
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
) -> Mended:
    """Have the wheel name all units from `read_ms` on and the log end behind its last unit (TimerMessageStore#recover).

    `is_ours` says that we wrote the check last, so that all before its position was on disk first. A broker says less,
    so then the file of its position is read, and the one before it; without a wheel (`has_wheel`) all of them.
    """
    base, run = check.log_position, log.run
    if not run.begin <= base <= run.end:  # files are missing: nothing is known
        base, is_ours = run.begin, False
    begin = base
    if not has_wheel:
        begin = run.begin
    elif not is_ours:
        begin = max((base - log.file_bytes) // log.file_bytes * log.file_bytes, run.begin)
    end, logged, last_place = base if is_ours else begin, [], -1
    for positions, units in log.scan(begin, base if is_ours and not is_same_boot else None):
        known = _agreeing(positions, units, base, queue, queue_end)
        positions, units, is_cut = positions[:known], units[:known], known < len(positions)
        relink(wheel, positions, units, read_ms)
        if known:
            end = int(positions[-1]) + TIMER_UNIT_BYTES
            logged.append(units["physical_offset"].astype(np.int64))
            last_place = int(logged[-1][-1])
        if is_cut:
            break
    log.clear_from(end)
    is_short = _mend_stale(log, wheel, end, read_ms)
    queue_offset = check.queue_offset
    if not is_ours:
        behind = _offset_behind(queue, queue_end, last_place)
        if behind is not None:
            queue_offset = min(queue_offset, behind) if check.version_counter else behind
        elif is_short:
            queue_offset = 0
    places = np.concatenate(logged) if logged else np.zeros(0, np.int64)
    return Mended(end, min(queue_offset, queue_end), np.sort(places), is_ours)


def _agreeing(
    positions: NDArray[np.int64], units: NDArray[np.void], base: int, queue: ConsumeQueue, queue_end: int
) -> int:
    """Return how many of the units count: behind `base` those whose records are in the queue, in its order."""
    new = int(np.searchsorted(positions, base))
    if new == len(positions):
        return new
    places = units["physical_offset"][new:].astype(np.int64)
    first = queue.first_from(int(places.min()), queue_end)
    last = queue.first_from(int(places.max()) + 1, queue_end)
    known = queue.read(first, min(last, queue_end))
    if not len(known):
        return new
    at = np.minimum(np.searchsorted(known.physical_offsets, places), len(known) - 1)
    good = (known.physical_offsets[at] == places) & (known.sizes[at] == units["record_size"][new:])
    return new + (int(np.argmin(good)) if not good.all() else len(good))


def _offset_behind(queue: ConsumeQueue, queue_end: int, place: int) -> int | None:
    """Return the queue offset behind the message whose record lies at `place`, None if it is not in the queue."""
    if place < 0:
        return None
    at = queue.first_from(place, queue_end)
    unit = queue.read(at, min(at + 1, queue_end))
    return at + 1 if len(unit) and int(unit.physical_offsets[0]) == place else None


def _mend_stale(log: TimerLog, wheel: TimerWheel, end: int, read_ms: int) -> bool:
    """Have slots that name units behind the log's end name the last ones before it; say whether there were any."""
    slots = wheel.slots_from(read_ms)
    stale = slots[slots["last_position"] >= end].copy()
    if not len(stale):
        return False
    times = stale["second"].astype(np.int64) * SECOND_MS
    lasts, firsts = np.full(len(stale), -1, np.int64), stale["first_position"].astype(np.int64)
    begin = int(firsts.min())
    for positions, units in log.scan(begin, end) if 0 <= begin < end else ():
        due = due_times(units)
        numbers = np.minimum(np.searchsorted(times, due), len(times) - 1)
        rows = np.flatnonzero(times[numbers] == due)
        lasts[numbers[rows]] = positions[rows]  # of equal ones numpy keeps the last
    gone = lasts < 0
    stale["last_position"] = lasts
    stale[gone] = np.zeros(1, TIMER_SLOT)[0]
    numbers = slot_numbers(times)
    order = np.argsort(numbers)
    wheel.write_slots(numbers[order], stale[order])
    return True


@dataclass(slots=True)
class Intake:
    """Takes messages from the queue into timer log and wheel. `end` is the log's. For one thread, under the lock."""

    timer_log: TimerLog
    wheel: TimerWheel
    queue: ConsumeQueue
    log: CommitLog
    end: int
    new_times: list[NDArray[np.int64]]  # seconds (ms) that got messages

    def take(self, begin: int, queue_end: int, logged: NDArray[np.int64], *, read_ms: int, write_ms: int) -> int:
        """Take one batch from queue offset `begin` on; return up to where. Messages that have units are passed over."""
        units = self.queue.read(begin, min(begin + _BATCH_UNITS, queue_end))
        if not len(units):
            return queue_end
        fitting = int(np.searchsorted(np.cumsum(units.sizes), _BATCH_BYTES, side="right"))
        units = units.part(0, max(fitting, 1))
        places, sizes, offsets = units.physical_offsets, units.sizes, units.queue_offsets
        if len(logged):
            new = logged[np.minimum(np.searchsorted(logged, places), len(logged) - 1)] != places
            places, sizes, offsets = places[new], sizes[new], offsets[new]
        if len(places):
            self._put(places, sizes, offsets, read_ms, write_ms)
        return begin + len(units)

    def _put(
        self,
        places: NDArray[np.int64],
        sizes: NDArray[np.int64],
        offsets: NDArray[np.int64],
        read_ms: int,
        write_ms: int,
    ) -> None:
        found = read_originals(self.log, places, sizes)
        whole = found.is_whole
        self._warn("cannot be read", places[~whole])
        places, sizes = places[whole], sizes[whole]
        if not len(places):
            return
        records = WholeRecords.of(found.data, found.positions[whole], found.ends[whole])
        are_its = records.are_of(self.queue.key.topic, 0) & (records.field("queue_offset") == offsets[whole])
        if not are_its.all():
            self._warn("is of another queue, or of another place in it", places[~are_its])
            places, sizes = places[are_its], sizes[are_its]
            if not len(places):
                return
            records = WholeRecords.of(records.data, records.positions[are_its], records.ends[are_its])
        requests = TimerRequests.of(records)
        timed = requests.out_ms >= 0
        self._warn("has no TIMER_OUT_MS", places[~timed])
        if not timed.any():
            return
        times, rolls = wheel_times(requests.out_ms[timed], write_ms, read_ms)
        deletions = requests.are_deletions[timed]
        new = np.zeros(len(times), TIMER_UNIT)
        new["unit_size"] = TIMER_UNIT_BYTES
        new["magic"] = DEFAULT | np.where(rolls, ROLL, 0) | np.where(deletions, DELETE, 0)
        new["write_time"] = write_ms
        new["delay"] = times - write_ms
        new["physical_offset"] = places[timed]
        new["record_size"] = sizes[timed]
        new["topic_hash"] = requests.topic_hashes()[timed]
        at = self.timer_log.place(self.end, len(new))
        new["previous_position"], numbers, slots = link_units(self.wheel, times, at, np.where(deletions, -1, 1))
        self.timer_log.write_units(at, new)
        # From here the messages count as taken. A crash leaves units that no slot names: `mend` has them named.
        self.wheel.write_slots(numbers, slots)
        self.end = at.end
        self.new_times.append(np.unique(times))

    def _warn(self, what: str, places: NDArray[np.int64]) -> None:
        if len(places):
            _LOG.warning(
                "rmq: of the messages in %s, which wait for a time, %d cannot be delivered, the first at physical "
                "offset %d: it %s",
                self.queue.key,
                len(places),
                places[0],
                what,
            )
