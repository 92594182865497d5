"""The units of one queue as numbers: which records it holds, in which order, under which queue offsets.

Two kinds on disk, one shape here. In a consume queue (20-byte units) a unit's number is its queue offset. In a
batch consume queue (46 bytes, 5.x) a unit holds one or several messages and names the offset of the first.

Source: ConsumeQueue, BatchConsumeQueue (5.3).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.errors import DamageError
from rmq_spark.store.format import batch_unit
from rmq_spark.store.format.batch_unit import BATCH_UNIT
from rmq_spark.store.format.queue_unit import QUEUE_UNIT, is_blank_fill
from rmq_spark.store.format.record import Record
from rmq_spark.store.log.unit_run import UnitRun
from rmq_spark.store.units import QueueKey

_CHUNK_UNITS = 1 << 16
_RECOVERED_FILES = 3  # at which a broker looks when it starts


@dataclass(frozen=True, slots=True)
class Units:
    """Units of one queue in order, as int64 arrays: where the record lies and what it holds."""

    physical_offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    tags_codes: NDArray[np.int64]
    queue_offsets: NDArray[np.int64]  # of the record's first message
    message_counts: NDArray[np.int64] | None  # None: one message a record

    def __len__(self) -> int:
        return len(self.sizes)

    def equals(self, other: "Units") -> bool:
        """Say whether these are the same units."""
        return all(np.array_equal(getattr(self, one.name), getattr(other, one.name)) for one in fields(self))

    def part(self, begin: int, end: int) -> "Units":
        """Return the units [begin, end) of these."""
        return self.take(slice(begin, end))

    def take(self, chosen: slice | NDArray[np.intp] | NDArray[np.bool_]) -> "Units":
        """Return some of these units, in order: a slice, their numbers, or a mask."""
        counts = self.message_counts
        return Units(
            self.physical_offsets[chosen],
            self.sizes[chosen],
            self.tags_codes[chosen],
            self.queue_offsets[chosen],
            None if counts is None else counts[chosen],
        )

    @classmethod
    def joined(cls, parts: "Sequence[Units]") -> "Units":
        """Return the units of several parts, at least one, in one; all of one kind of queue."""
        if len(parts) == 1:
            return parts[0]
        counts = [part.message_counts for part in parts if part.message_counts is not None]
        return cls(
            np.concatenate([part.physical_offsets for part in parts]),
            np.concatenate([part.sizes for part in parts]),
            np.concatenate([part.tags_codes for part in parts]),
            np.concatenate([part.queue_offsets for part in parts]),
            np.concatenate(counts) if counts else None,
        )


class ConsumeQueue:
    """The plain queue. One thread at a time; see UnitRun for what is kept open."""

    layout = QUEUE_UNIT
    are_batches = False  # whether a unit may hold several messages

    def __init__(self, key: QueueKey, folder: str) -> None:
        self.key = key
        self.run = UnitRun(folder, self.layout)

    def read(self, begin: int, end: int) -> Units:
        """Return the units [begin, end), unit numbers; those past the last file are left out."""
        raw = self.run.read(begin, end)
        return Units(
            raw["physical_offset"].astype(np.int64),
            raw["record_size"].astype(np.int64),
            raw["tags_code"].astype(np.int64),
            np.arange(begin, begin + len(raw)),
            None,
        )

    def are_written(self, units: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return for each unit whether somebody has written it; the fill before a queue's first message counts."""
        written: NDArray[np.bool_] = units["record_size"] > 0
        return written

    def is_written(self, number: int) -> bool:
        """Say whether the unit of a number has room in a file and somebody has written it."""
        return bool(self.are_written(self.run.read(number, number + 1)).any())

    def written_end(self, known: int) -> int:
        """Return the number after the last written unit, given that all before `known` are written.

        What stands there may be stale or half written: nothing is compared with records.
        """
        step = 64
        while known < self.run.end:
            until = min(known + step, self.run.end)
            unwritten = np.flatnonzero(~self.are_written(self.run.read(known, until)))
            if len(unwritten):
                return known + int(unwritten[0])
            known, step = until, min(step * 8, _CHUNK_UNITS)
        return known

    def search_written_end(self) -> int:
        """Return the same for a queue of which nothing is known, by binary search.

        A power cut may leave a file that was not filled before one that has units, or that is only there: the queue
        ends in the first such file, of the last three (ConsumeQueue#recover, 4.9 and 5.3).
        """
        end = self.run.first_where(self.run.begin, self.run.end, lambda unit: not self.are_written(unit))
        for segment in self.run.segments[-_RECOVERED_FILES:]:
            first, until = -(-segment.begin // self.layout.itemsize), segment.end // self.layout.itemsize
            if first < until < end and not self.are_written(self.run.read(until - 1, until)).all():
                return self.run.first_where(first, until, lambda unit: not self.are_written(unit))
        return end

    def last_place(self) -> int:
        """Return the physical offset of the record that the last written unit names, -1 without units."""
        end = self.search_written_end()
        last = self.read(max(end - 1, self.run.begin), end).physical_offsets
        self.run.close()
        return int(last[-1]) if len(last) else -1

    def refuse_hole_before(self, first: int, log_begin: int) -> None:
        """Raise DamageError unless what stands before the first readable unit is fill or has expired with the log.

        Where the log has lost nothing yet (`log_begin` 0), neither has the queue.
        """
        if first == self.run.begin:
            if first and not log_begin and self.layout is QUEUE_UNIT:
                raise DamageError(f"first file of queue {self.key}", self.run.folder, 0, "0" * 20, "it is missing")
            return
        before = self.run.read(first - 1, first)
        place, size = int(before["physical_offset"][0]), int(before["record_size"][0])
        if not is_blank_fill(before)[0] and not (size > 0 and 0 <= place < log_begin):
            path, position = self.run.path_of(first - 1)
            expected = f"fill, or a record before physical offset {log_begin}"
            raise DamageError(
                f"the last unit before those of queue {self.key}", path, position, expected, (place, size)
            )

    def refuse_wrong_begin(self, first: int, end: int, log_begin: int, record_at: Callable[[int], object]) -> None:
        """Raise DamageError if the first readable unit, if there is one, begins at no offset that its queue may have.

        `record_at` gives the record at a physical offset. A plain queue's units have their offsets from where they are.
        """

    def end_for(self, offset: int) -> int:
        """Return a number after written units that reaches up to `offset`, or all there is of them."""
        return offset if offset > self.run.begin and self.is_written(offset - 1) else self.search_written_end()

    def first_from(self, physical_offset: int, end: int) -> int:
        """Return the first unit in [begin, end) whose record lies at or after `physical_offset`.

        Fill counts as lying before everything. Source: ConsumeQueue#correctMinOffset (5.3).
        """

        def reached(unit: Any) -> bool:
            return bool(unit["physical_offset"] >= physical_offset and not is_blank_fill(unit))

        first = self.run.read(self.run.begin, min(self.run.begin + 1, end))
        if len(first) and reached(first[0]):
            return self.run.begin  # nothing expired: the usual case needs no search
        return self.run.first_where(self.run.begin, end, reached)

    def offset_of(self, unit: int, end: int) -> int:
        """Return the queue offset at which unit number `unit` begins; `end` is the number after the last."""
        return unit

    def unit_of(self, offset: int, end: int) -> int:
        """Return the number of the unit that holds a queue offset below the queue's end."""
        return offset

    def offset_behind(self, units: Units, unit: int) -> int:
        """Return the queue offset behind units of this queue, some of those before number `unit`."""
        return unit


class BatchConsumeQueue(ConsumeQueue):
    """The queue of a topic with `queue.type=BatchCQ`: a unit may hold many messages."""

    layout = BATCH_UNIT
    are_batches = True

    def read(self, begin: int, end: int) -> Units:
        """Return the units [begin, end), unit numbers; those past the last file are left out."""
        raw = self.run.read(begin, end)
        return Units(
            raw["physical_offset"].astype(np.int64),
            raw["record_size"].astype(np.int64),
            raw["tags_code"].astype(np.int64),
            raw["base_offset"].astype(np.int64),
            raw["message_count"].astype(np.int64),
        )

    def are_written(self, units: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return for each unit whether somebody has written it whole."""
        return batch_unit.is_written(units)

    def refuse_wrong_begin(self, first: int, end: int, log_begin: int, record_at: Callable[[int], object]) -> None:
        """Raise DamageError if the first unit of [first, end) does not begin at its record's queue offset."""
        units = self.read(first, min(first + 1, end))
        record = record_at(int(units.physical_offsets[0])) if len(units) else None
        if not isinstance(record, Record):
            return
        # Where the log has lost nothing yet, neither has the queue.
        base, expected = int(units.queue_offsets[0]), record.queue_offset if log_begin else 0
        if base != expected:
            path, position = self.run.path_of(first)
            raise DamageError(f"base offset of the first unit of {self.key}", path, position, expected, base)

    def end_for(self, offset: int) -> int:
        """Return the number after the last written unit: where an offset lies must be searched for anyway."""
        return self.search_written_end()

    def offset_of(self, unit: int, end: int) -> int:
        """Return the queue offset of the unit's first message; of `end`, the offset after the last message."""
        if unit < end:
            return int(self.run.read(unit, unit + 1)[0]["base_offset"])
        if unit <= self.run.begin:
            return 0
        last = self.run.read(unit - 1, unit)[0]
        return int(last["base_offset"]) + int(last["message_count"])

    def unit_of(self, offset: int, end: int) -> int:
        """Return the number of the unit that holds a queue offset below the queue's end."""

        def beyond(unit: Any) -> bool:
            return bool(unit["base_offset"] > offset)

        return max(self.run.first_where(self.run.begin, end, beyond) - 1, self.run.begin)

    def offset_behind(self, units: Units, unit: int) -> int:
        """Return the queue offset behind units of this queue, the last of which has the number before `unit`."""
        assert units.message_counts is not None
        return int(units.queue_offsets[-1] + units.message_counts[-1])
