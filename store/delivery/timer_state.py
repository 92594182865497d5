"""State of the timer: how far it has delivered, who wrote its files last, and the chains of entries.

The state consists of the check (`config/timercheck`), the metadata of the last commit, and `rmq/delivery/timer.json`.
The latter contains what this engine last wrote into the check. If the check has other contents, a broker has written it
later.

A broker records its progress up to a second late. If it is killed while it delivers the messages of a second, it has
not recorded which of them it delivered. So after a broker, it is uncertain which messages were delivered. Each message
that the broker may have delivered is looked up in its own queue before it is delivered (`timer_batch.py`). Only
messages before the end of the log at that time can be copies from the broker. A crash after timer.json was written and
before the check was looks as if a broker had written the check. This is harmless; it only causes the lookup.

A chain is followed from its newest entry back, as RocketMQ does. If the entries of many or long chains are close
together in the timer log, the whole range is read instead, and the chains are checked by the links of the entries.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.delivery.timer_files import TimerLog, TimerWheel
from rmq_spark.store.disk import files
from rmq_spark.store.disk.write import Disk
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format.side_file import encode_side_file, number_of
from rmq_spark.store.format.timer import (
    SECOND_MS,
    TIMER_SLOT,
    TIMER_UNIT,
    TIMER_UNIT_BYTES,
    EntryPlaces,
    TimerCheck,
    are_entries,
    due_times,
    slot_numbers,
)
from rmq_spark.store.log.store_state import SIDE_FOLDER, read_side_file

READ, PART = "timer.read", "timer.part"  # keys of the metadata, for the fields of `Progress`

_SPAN_PER_ENTRY = 16  # reading up to this many entries for each wanted one is faster than following the chains
_SMALL_SPAN_BYTES = 1 << 20
_FEW_CHAINS = 16  # up to this number, chains are followed one by one
_NAME = "timer.json"
_NEXT_STEP = "Remove the file: it is written again when the timer is."


@dataclass(frozen=True, slots=True)
class UncertainWindow:
    """The messages that a broker may have delivered without recording that: those due before `until_ms`.

    If the broker delivered them, their copies are below the physical offset `end`.
    """

    end: int = 0
    until_ms: int = 0

    def covers(self, slot_ms: int) -> bool:
        """Return whether a broker may have delivered messages of this second (ms) without recording that."""
        return slot_ms < self.until_ms


@dataclass(frozen=True, slots=True)
class TimerOwnership:
    """What this engine last wrote into the check, except `master_queue_offset`, with further fields of its own."""

    read_time: int
    log_position: int
    queue_offset: int
    version_counter: int
    version_timestamp: int
    part: int  # the entries of the second `read_time` up to this position were delivered; -1 if none was
    boot: str  # the id of the machine's boot at the time of writing
    doubt: UncertainWindow

    @classmethod
    def of(cls, check: TimerCheck, part: int, boot: str, doubt: UncertainWindow) -> "TimerOwnership":
        """Return the ownership to write together with this check."""
        return cls(
            check.read_time,
            check.log_position,
            check.queue_offset,
            check.version_counter,
            check.version_timestamp,
            part,
            boot,
            doubt,
        )

    def is_of(self, check: TimerCheck | None) -> bool:
        """Return whether `check` is the check that this engine wrote last."""
        return check is not None and self == TimerOwnership.of(check, self.part, self.boot, self.doubt)


class TimerOwnershipFile:
    """The file `rmq/delivery/timer.json`."""

    def __init__(self, root: str, disk: Disk) -> None:
        self._folder, self._disk = files.join(root, SIDE_FOLDER, "delivery"), disk
        self._path = files.join(self._folder, _NAME)

    def read(self) -> TimerOwnership | None:
        """Return the contents of the file, or None if it is missing or damaged, as it may be after a power cut."""
        try:
            return read_side_file(self._path, "how far the timer was taken", _NEXT_STEP, _parse_ownership)
        except DamageError:
            return None

    def write(self, ownership: TimerOwnership) -> None:
        """Replace the file, but not durably. After a power cut the file may be missing or an older one."""
        self._disk.make_folder(self._folder)
        self._disk.replace_unsynced(self._path, encode_side_file(asdict(ownership)))


def _parse_ownership(fields: dict[str, object]) -> TimerOwnership:
    doubt = fields["doubt"]
    if not isinstance(doubt, dict) or not isinstance(fields["boot"], str):
        raise TypeError("doubt or boot")
    return TimerOwnership(
        number_of(fields, "read_time"),
        number_of(fields, "log_position"),
        number_of(fields, "queue_offset"),
        number_of(fields, "version_counter"),
        number_of(fields, "version_timestamp"),
        number_of(fields, "part", least=-1),
        fields["boot"],
        UncertainWindow(number_of(doubt, "end"), number_of(doubt, "until_ms")),
    )


@dataclass(frozen=True, slots=True)
class Progress:
    """How far messages were delivered: all of the seconds before `read_ms`, and a part of the second `read_ms`.

    This part is the entries up to position `part` of the timer log; -1 means none.
    """

    read_ms: int = 0
    part: int = -1

    @classmethod
    def of(cls, check: TimerCheck | None, metadata: Mapping[str, int]) -> "Progress":
        """Return the progress of the check or the progress of the metadata, whichever is later."""
        read_ms, committed_ms = 0 if check is None else check.read_time, metadata.get(READ, 0)
        return cls(committed_ms, metadata.get(PART, -1)) if committed_ms >= read_ms else cls(read_ms)


@dataclass(frozen=True, slots=True)
class TimerState:
    """The state of the timer: the contents of the check and of timer.json, and the progress by check and metadata."""

    check: TimerCheck | None
    ownership: TimerOwnership | None
    progress: Progress

    @property
    def is_ours(self) -> bool:
        """Whether the check is the one that this engine wrote last."""
        return self.ownership is not None and self.ownership.is_of(self.check)

    @property
    def doubt(self) -> UncertainWindow:
        """The messages that a broker may have delivered already, as timer.json records them."""
        return self.ownership.doubt if self.ownership is not None else UncertainWindow()

    @property
    def is_recorded(self) -> bool:
        """Whether check and timer.json record everything that was delivered, so that a broker would continue there."""
        return (
            self.check is not None
            and self.ownership is not None
            and (self.progress == Progress(self.check.read_time, self.ownership.part))
        )


@dataclass(frozen=True, slots=True)
class ChainedEntries:
    """Timer entries, ordered by second and then by position, which is the order in which their messages were taken."""

    times: NDArray[np.int64]  # the seconds for which they wait, in ms
    positions: NDArray[np.int64]  # in the timer log
    entries: NDArray[np.void]

    def __len__(self) -> int:
        return len(self.times)

    def chosen(self, rows: NDArray[np.bool_] | slice) -> "ChainedEntries":
        """Return the entries that `rows`, a mask or a slice, selects."""
        return ChainedEntries(self.times[rows], self.positions[rows], self.entries[rows])


def read_chains(log: TimerLog, slots: NDArray[np.void]) -> ChainedEntries:
    """Return the entries of the chains of `slots`. The slots must ascend by second.

    If a link of a chain leads to bytes that are not an entry, the chain ends there.
    """
    times = slots["second"].astype(np.int64) * SECOND_MS
    firsts, lasts = slots["first_position"].astype(np.int64), slots["last_position"].astype(np.int64)
    begin, end = int(firsts.min()), int(lasts.max()) + TIMER_UNIT_BYTES
    wanted_count = int(np.maximum(slots["message_count"].astype(np.int64), 1).sum())
    followed = np.ones(len(slots), np.bool_)
    parts = []
    if 0 <= begin < end and end - begin <= _SMALL_SPAN_BYTES + wanted_count * _SPAN_PER_ENTRY * TIMER_UNIT_BYTES:
        found, is_complete = _read_span(log, begin, end, times, lasts)
        followed = ~is_complete
        parts.append(found)
    if followed.any():
        parts.append(_follow(log, times[followed], lasts[followed]))
    all_times, positions, entries = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.lexsort((positions, all_times))
    return ChainedEntries(all_times[order], positions[order], entries[order])


_Columns = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.void]]  # times, positions, entries


def _read_span(
    log: TimerLog, begin: int, end: int, times: NDArray[np.int64], lasts: NDArray[np.int64]
) -> tuple[_Columns, NDArray[np.bool_]]:
    """Read [begin, end) of the log. Return (entries of complete chains, for each chain whether it is complete).

    A chain is complete if all of its entries are in this range. `times` are the seconds (ms) of the chains, and `lasts`
    the positions of their last entries.
    """
    chain_parts, position_parts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    entry_parts = [np.zeros(0, TIMER_UNIT)]
    for positions, entries in log.scan(begin, end):
        due = due_times(entries)
        numbers = np.minimum(np.searchsorted(times, due), len(times) - 1)
        rows = np.flatnonzero(times[numbers] == due)
        chain_parts.append(numbers[rows])
        position_parts.append(positions[rows])
        entry_parts.append(entries[rows])
    numbers, positions = np.concatenate(chain_parts), np.concatenate(position_parts)
    entries = np.concatenate(entry_parts)
    order = np.argsort(numbers, kind="stable")  # in each chain by position, as they were read
    numbers, positions, entries = numbers[order], positions[order], entries[order]
    previous = np.full(len(numbers), -1, np.int64)
    previous[1:] = np.where(numbers[1:] == numbers[:-1], positions[:-1], -1)
    is_complete = np.zeros(len(times), np.bool_)
    is_complete[numbers] = True
    is_complete[numbers[entries["previous_position"] != previous]] = False
    newest = np.flatnonzero(np.append(numbers[1:] != numbers[:-1], True)) if len(numbers) else np.zeros(0, np.int64)
    is_complete[numbers[newest[positions[newest] != lasts[numbers[newest]]]]] = False
    chosen = is_complete[numbers]
    return (times[numbers[chosen]], positions[chosen], entries[chosen]), is_complete


def _follow(log: TimerLog, times: NDArray[np.int64], lasts: NDArray[np.int64]) -> _Columns:
    """Return the entries of all chains, which are followed back in parallel from their last entries, at `lasts`."""
    parts: list[_Columns] = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, TIMER_UNIT))]
    positions = lasts
    while len(positions):
        if len(positions) <= _FEW_CHAINS:
            for time, last in zip(times.tolist(), positions.tolist(), strict=True):
                chain = np.array(log.walk(last)[::-1], np.int64)
                parts.append((np.full(len(chain), time), chain, log.units_at(chain)))
            break
        order = np.argsort(positions)
        times, positions = times[order], positions[order]
        entries = log.units_at(positions)
        good = are_entries(entries) & (positions >= 0)
        times, positions, entries = times[good], positions[good], entries[good]
        parts.append((times, positions, entries))
        previous = entries["previous_position"].astype(np.int64)
        continues = (previous >= 0) & (previous < positions)  # a link that leads forward is damage: end the chain
        times, positions = times[continues], previous[continues]
    all_times, all_positions, all_entries = (np.concatenate(column) for column in zip(*parts, strict=True))
    return all_times, all_positions, all_entries


def link_entries(
    wheel: TimerWheel, times: NDArray[np.int64], places: EntryPlaces, counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.void]]:
    """Link new entries, which will be written at `places`, to the chains of the seconds `times`. Writes nothing.

    Returns (position of the previous entry in the chain for each new entry, -1 if none; numbers of the slots that
    change; new contents of these slots). `counts` is how much each entry adds to the message count of its slot. No two
    different times may share a slot.
    """
    numbers = slot_numbers(times)
    order = np.argsort(numbers, kind="stable")
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = numbers[order][1:] != numbers[order][:-1]
    firsts = np.flatnonzero(is_first)
    lasts = np.append(firsts[1:], len(order)) - 1
    positions = places.positions[order]
    changed = numbers[order][firsts]
    slots = wheel.slots_at(changed)
    seconds = times[order][firsts] // SECOND_MS
    is_live = (slots["second"] == seconds) & (slots["last_position"] >= 0)
    links = np.empty(len(order), np.int64)
    links[1:] = positions[:-1]
    links[firsts] = np.where(is_live, slots["last_position"], -1)
    previous = np.empty(len(order), np.int64)
    previous[order] = links
    new = np.zeros(len(firsts), TIMER_SLOT)
    new["second"] = seconds
    new["first_position"] = np.where(
        is_live & (slots["first_position"] >= 0), slots["first_position"], positions[firsts]
    )
    new["last_position"] = positions[lasts]
    new["message_count"] = np.where(is_live, slots["message_count"], 0) + np.add.reduceat(counts[order], firsts)
    new["magic"] = np.where(is_live, slots["magic"], 0)
    return previous, changed, new


def relink(wheel: TimerWheel, positions: NDArray[np.int64], entries: NDArray[np.void], read_ms: int) -> None:
    """Write the slots for entries of the timer log, given in the order of the log, that are due at `read_ms` or later.

    The entries contain the links of their chains, so each slot only needs the last entry (TimerWheel#reviseSlot, 5.3).
    """
    times = due_times(entries)
    chosen = np.flatnonzero(times >= read_ms)
    if not len(chosen):
        return
    numbers = slot_numbers(times[chosen])
    # For each slot, find its last entry in the log, and the first entry of the same second.
    unique, from_end = np.unique(numbers[::-1], return_index=True)
    lasts = chosen[len(chosen) - 1 - from_end]
    slot_times = times[lasts]
    of_slot = np.searchsorted(unique, numbers)
    same = np.flatnonzero(times[chosen] == slot_times[of_slot])
    firsts = np.full(len(unique), -1, np.int64)
    firsts[of_slot[same][::-1]] = chosen[same][::-1]  # for equal slots numpy keeps the last value: the first entry
    slots = wheel.slots_at(unique).copy()
    is_live = (slots["second"] == slot_times // SECOND_MS) & (slots["first_position"] >= 0)
    slots["message_count"] = np.where(
        is_live, slots["message_count"], np.bincount(of_slot[same], minlength=len(unique))
    )
    slots["first_position"] = np.where(is_live, slots["first_position"], positions[firsts])
    slots["last_position"] = positions[lasts]
    slots["second"] = slot_times // SECOND_MS
    wheel.write_slots(unique, slots)
