"""Units that are due, chain by chain, and new units put at the ends of chains.

A chain is followed from its newest unit back, as RocketMQ does; of many chains, or long ones, whose units lie near each
other in the timer log, the whole span is read instead and compared with what the units say of each other.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.delivery.timer_files import TimerLog, TimerWheel
from rmq_spark.store.format.timer_log import TIMER_UNIT, TIMER_UNIT_BYTES, UnitPlaces, are_units, due_times
from rmq_spark.store.format.timer_wheel import SECOND_MS, TIMER_SLOT, slot_numbers

_SPAN_PER_UNIT = 16  # units read for one that is due before following the chain is cheaper
_SMALL_SPAN_BYTES = 1 << 20
_FEW_CHAINS = 16  # are followed one by one


@dataclass(frozen=True, slots=True)
class ChainedUnits:
    """Units by second, and in each by position, which is the order in which they were taken."""

    times: NDArray[np.int64]  # the second of the wheel, ms
    positions: NDArray[np.int64]
    units: NDArray[np.void]

    def __len__(self) -> int:
        return len(self.times)

    def chosen(self, rows: NDArray[np.bool_] | slice) -> "ChainedUnits":
        """Return some of them."""
        return ChainedUnits(self.times[rows], self.positions[rows], self.units[rows])


def read_chains(log: TimerLog, slots: NDArray[np.void]) -> ChainedUnits:
    """Return the units of the chains of slots, which ascend by second. A chain ends where no unit stands."""
    times = slots["second"].astype(np.int64) * SECOND_MS
    firsts, lasts = slots["first_position"].astype(np.int64), slots["last_position"].astype(np.int64)
    begin, end = int(firsts.min()), int(lasts.max()) + TIMER_UNIT_BYTES
    wanted_count = int(np.maximum(slots["message_count"].astype(np.int64), 1).sum())
    followed = np.ones(len(slots), np.bool_)
    parts = []
    if 0 <= begin < end and end - begin <= _SMALL_SPAN_BYTES + wanted_count * _SPAN_PER_UNIT * TIMER_UNIT_BYTES:
        found, is_whole = _read_span(log, begin, end, times, lasts)
        followed = ~is_whole
        parts.append(found)
    if followed.any():
        parts.append(_follow(log, times[followed], lasts[followed]))
    all_times, positions, units = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.lexsort((positions, all_times))
    return ChainedUnits(all_times[order], positions[order], units[order])


_Columns = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.void]]


def _read_span(
    log: TimerLog, begin: int, end: int, times: NDArray[np.int64], lasts: NDArray[np.int64]
) -> tuple[_Columns, NDArray[np.bool_]]:
    """Return the units in a span of the log that are due at these times, and which chains that gives whole."""
    of_time, places, kept = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, TIMER_UNIT)]
    for positions, units in log.scan(begin, end):
        due = due_times(units)
        numbers = np.minimum(np.searchsorted(times, due), len(times) - 1)
        rows = np.flatnonzero(times[numbers] == due)
        of_time.append(numbers[rows])
        places.append(positions[rows])
        kept.append(units[rows])
    numbers, positions, units = np.concatenate(of_time), np.concatenate(places), np.concatenate(kept)
    order = np.argsort(numbers, kind="stable")  # in each chain by position, as they were read
    numbers, positions, units = numbers[order], positions[order], units[order]
    before = np.full(len(numbers), -1, np.int64)
    before[1:] = np.where(numbers[1:] == numbers[:-1], positions[:-1], -1)
    is_whole = np.zeros(len(times), np.bool_)
    is_whole[numbers] = True
    is_whole[numbers[units["previous_position"] != before]] = False
    heads = np.flatnonzero(np.append(numbers[1:] != numbers[:-1], True)) if len(numbers) else np.zeros(0, np.int64)
    is_whole[numbers[heads[positions[heads] != lasts[numbers[heads]]]]] = False
    chosen = is_whole[numbers]
    return (times[numbers[chosen]], positions[chosen], units[chosen]), is_whole


def _follow(log: TimerLog, times: NDArray[np.int64], lasts: NDArray[np.int64]) -> _Columns:
    """Return the units of chains, followed side by side from their last units."""
    parts: list[_Columns] = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, TIMER_UNIT))]
    positions = lasts
    while len(positions):
        if len(positions) <= _FEW_CHAINS:
            parts += [_walk(log, time, last) for time, last in zip(times.tolist(), positions.tolist(), strict=True)]
            break
        order = np.argsort(positions)
        times, positions = times[order], positions[order]
        units = log.units_at(positions)
        good = are_units(units) & (positions >= 0)
        times, positions, units = times[good], positions[good], units[good]
        parts.append((times, positions, units))
        previous = units["previous_position"].astype(np.int64)
        goes_on = (previous >= 0) & (previous < positions)  # a chain leads back, else it would never end
        times, positions = times[goes_on], previous[goes_on]
    all_times, places, found = (np.concatenate(column) for column in zip(*parts, strict=True))
    return all_times, places, found


def _walk(log: TimerLog, time: int, last: int) -> _Columns:
    positions = np.array(log.walk(last)[::-1], np.int64)
    return np.full(len(positions), time), positions, log.units_at(positions)


def link_units(
    wheel: TimerWheel, times: NDArray[np.int64], places: UnitPlaces, counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.void]]:
    """Return for new units at `places`: the previous position of each, and numbers and contents of slots that change.

    `counts` is what each adds to its slot's count. No two times share a slot.
    """
    numbers = slot_numbers(times)
    order = np.argsort(numbers, kind="stable")
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = numbers[order][1:] != numbers[order][:-1]
    heads = np.flatnonzero(is_first)
    tails = np.append(heads[1:], len(order)) - 1
    positions = places.positions[order]
    changed = numbers[order][heads]
    slots = wheel.slots_at(changed)
    seconds = times[order][heads] // SECOND_MS
    is_live = (slots["second"] == seconds) & (slots["last_position"] >= 0)
    before = np.empty(len(order), np.int64)
    before[1:] = positions[:-1]
    before[heads] = np.where(is_live, slots["last_position"], -1)
    previous = np.empty(len(order), np.int64)
    previous[order] = before
    new = np.zeros(len(heads), TIMER_SLOT)
    new["second"] = seconds
    new["first_position"] = np.where(
        is_live & (slots["first_position"] >= 0), slots["first_position"], positions[heads]
    )
    new["last_position"] = positions[tails]
    new["message_count"] = np.where(is_live, slots["message_count"], 0) + np.add.reduceat(counts[order], heads)
    new["magic"] = np.where(is_live, slots["magic"], 0)
    return previous, changed, new


def relink(wheel: TimerWheel, positions: NDArray[np.int64], units: NDArray[np.void], read_ms: int) -> None:
    """Have the wheel name units that stand in the log already, in the order of the log; those before `read_ms` not.

    Units say their chains themselves, so all that is missing is the last one (TimerWheel#reviseSlot, 5.3).
    """
    times = due_times(units)
    chosen = np.flatnonzero(times >= read_ms)
    if not len(chosen):
        return
    numbers = slot_numbers(times[chosen])
    # Of each slot the last unit of the log, and the first of the same second.
    unique, from_end = np.unique(numbers[::-1], return_index=True)
    lasts = chosen[len(chosen) - 1 - from_end]
    slot_times = times[lasts]
    of_slot = np.searchsorted(unique, numbers)
    same = np.flatnonzero(times[chosen] == slot_times[of_slot])
    firsts = np.full(len(unique), -1, np.int64)
    firsts[of_slot[same][::-1]] = chosen[same][::-1]  # of equal ones numpy keeps the last, which is the first here
    slots = wheel.slots_at(unique).copy()
    is_live = (slots["second"] == slot_times // SECOND_MS) & (slots["first_position"] >= 0)
    slots["message_count"] = np.where(
        is_live, slots["message_count"], np.bincount(of_slot[same], minlength=len(unique))
    )
    slots["first_position"] = np.where(is_live, slots["first_position"], positions[firsts])
    slots["last_position"] = positions[lasts]
    slots["second"] = slot_times // SECOND_MS
    wheel.write_slots(unique, slots)
