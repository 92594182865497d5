"""Units of queues held against the records that they should name, block by block of the log.

Each record that gets a unit is looked up in its own queue; which units were met so is kept as ranges, so at the end it
is known which units no record asked for (`loose_units.py`). What does not agree is kept as runs, and judged when all of
the log has been seen (`unit_verdicts.py`): whether a record or its unit is wrong shows only then.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.errors import StoreChangedError, StoreError
from rmq_spark.store.explore.ext_units import ExtUnits
from rmq_spark.store.explore.finding import NOTE, REPAIRABLE, Finding
from rmq_spark.store.explore.unit_ranges import UnitRanges
from rmq_spark.store.format.batch_unit import BATCH_UNIT
from rmq_spark.store.format.delay_levels import DelayLevels
from rmq_spark.store.format.filenames import CONSUME_QUEUE, SCHEDULE_TOPIC
from rmq_spark.store.format.record import TRANSACTION_COMMIT, TRANSACTION_MASK, Record
from rmq_spark.store.format.record_columns import RecordColumns
from rmq_spark.store.format.tags_code import tags_code_of
from rmq_spark.store.format.unit_ext import MAX_ADDRESS
from rmq_spark.store.log.commit_log import CommitLog
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.units import QueueKey

_OPEN_QUEUES = 64
_RUNS_AT_MOST = 20_000  # kept of what does not agree: bounds memory where all is damaged
_LOOKS, _LOOK_S, _LOOKED_AGAIN = 4, 0.05, 10_000
_NEAR_UNITS = 64  # of a batch queue, read beside those that should be next

NO_QUEUE, NO_UNIT, OTHER_UNIT, OTHER_TAGS = "no queue", "no unit", "another unit", "other tags"


@dataclass(slots=True)
class Unmet:
    """Records one behind the other in a queue whose units are not there, or say something else (`kind`).

    `[begin, end)` are queue offsets, `first` and `last` physical offsets of records.
    """

    key: QueueKey
    kind: str
    begin: int
    end: int
    first: int
    last: int
    count: int
    size: int  # of the first record, in bytes
    found: str = ""


@dataclass(slots=True)
class Step:
    """A record whose queue offset is not the next one of its queue in the log."""

    key: QueueKey
    expected: int
    found: int
    place: int  # physical offset of the record
    before: int  # of the queue's record before it


@dataclass(slots=True)
class _Known:
    """What the log has said of a queue so far."""

    next_offset: int
    last_place: int
    unit: int = -1  # of a batch queue: number of the next unit


@dataclass(slots=True)
class Joined:
    """What came out: units that agree with records, and what does not agree, as of all blocks so far."""

    ranges: UnitRanges = field(default_factory=UnitRanges)
    unmet: list[Unmet] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    unmet_records: int = 0
    lives: dict[QueueKey, int] = field(default_factory=dict)


class UnitJoin:
    """Joins blocks in the order of the log. One thread; `close` it.

    `queues` are those that have a folder; those in `unreadable` are left out: what is wrong with them is told.
    """

    def __init__(
        self, queues: dict[QueueKey, ConsumeQueue], unreadable: set[QueueKey], ext: ExtUnits, log_begin: int
    ) -> None:
        self._queues, self._unreadable, self._ext, self._log_begin = queues, unreadable, ext, log_begin
        self._known: dict[QueueKey, _Known] = {}
        self._open: OrderedDict[QueueKey, ConsumeQueue] = OrderedDict()
        self.joined = Joined()
        self.odd_delays: dict[QueueKey, dict[int, tuple[int, int]]] = {}  # delay (ms) -> how often, first unit

    def close(self) -> None:
        """Close every file."""
        while self._open:
            self._open.popitem()[1].run.close()

    def add(self, records: RecordColumns) -> None:
        """Join one block."""
        gets_unit = np.isin(records.sys_flags & TRANSACTION_MASK, (0, TRANSACTION_COMMIT))
        rows = np.flatnonzero(gets_unit & (records.queue_ids >= 0))
        rows = rows[np.lexsort((rows, records.queue_ids[rows], records.topic_numbers[rows]))]
        topics, queue_ids = records.topic_numbers[rows], records.queue_ids[rows]
        edges = np.flatnonzero((topics[1:] != topics[:-1]) | (queue_ids[1:] != queue_ids[:-1])) + 1
        for chosen in np.split(rows, edges):
            if len(chosen):
                first = chosen[0]
                topic = records.topics[int(records.topic_numbers[first])]
                self._add_queue(QueueKey(topic, int(records.queue_ids[first])), records, chosen)

    def _add_queue(self, key: QueueKey, records: RecordColumns, rows: NDArray[np.intp]) -> None:
        offsets, counts = records.queue_offsets[rows], records.message_counts[rows]
        places = records.places[rows]
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Known(int(offsets[0]), -1)
        expected = np.append(known.next_offset, (offsets + counts)[:-1])
        breaks = np.flatnonzero(offsets != expected)
        for at in breaks.tolist():
            before = int(places[at - 1]) if at else known.last_place
            if int(offsets[at]) == 0:
                self.joined.lives[key] = int(places[at])
            elif len(self.joined.steps) < _RUNS_AT_MOST:
                self.joined.steps.append(Step(key, int(expected[at]), int(offsets[at]), int(places[at]), before))
        known.next_offset, known.last_place = int(offsets[-1] + counts[-1]), int(places[-1])
        queue = self._opened(key)
        if queue is None:
            if key not in self._unreadable:
                for piece in np.split(rows, breaks):
                    self._note(key, NO_QUEUE, records, piece)
            return
        try:
            for piece in np.split(rows, breaks):
                if len(piece) and queue.layout is BATCH_UNIT:
                    self._join_batches(queue, known, records, piece)
                elif len(piece):
                    self._join_plain(queue, records, piece)
        except StoreChangedError:
            queue.run.look()  # retention took its first files: their records are on their way out, too

    def _opened(self, key: QueueKey) -> ConsumeQueue | None:
        queue = self._queues.get(key)
        if queue is None or key in self._unreadable:
            return None
        self._open[key] = queue
        self._open.move_to_end(key)
        if len(self._open) > _OPEN_QUEUES:
            self._open.popitem(last=False)[1].run.close()
        return queue

    def _join_plain(self, queue: ConsumeQueue, records: RecordColumns, rows: NDArray[np.intp]) -> None:
        """Compare the units of records whose queue offsets follow each other."""
        first, end = int(records.queue_offsets[rows[0]]), int(records.queue_offsets[rows[-1]]) + 1
        run = queue.run
        inside = rows[(records.queue_offsets[rows] >= run.begin) & (records.queue_offsets[rows] < run.end)]
        outside = rows[(records.queue_offsets[rows] < run.begin) | (records.queue_offsets[rows] >= run.end)]
        self._note(queue.key, NO_UNIT, records, outside)
        if not len(inside):
            return
        first, end = int(records.queue_offsets[inside[0]]), int(records.queue_offsets[inside[-1]]) + 1
        units = run.read(first, end)[records.queue_offsets[inside] - first]
        numbers = records.queue_offsets[inside]
        self._compare(queue, records, inside, units, numbers)

    def _join_batches(
        self, queue: ConsumeQueue, known: _Known, records: RecordColumns, rows: NDArray[np.intp]
    ) -> None:
        """Compare units that hold their first queue offset: they are looked for near where the last ones were."""
        run = queue.run
        if known.unit < 0:
            known.unit = queue.first_from(int(records.places[rows[0]]), queue.search_written_end())
        begin = max(known.unit, run.begin)
        units = run.read(begin, begin + len(rows))
        numbers = begin + np.arange(len(rows))
        places = records.places[rows]
        if len(units) < len(rows) or (units["physical_offset"] != places).any():
            begin = max(begin - _NEAR_UNITS, run.begin)
            near = run.read(begin, begin + len(rows) + 2 * _NEAR_UNITS)
            order = np.argsort(near["physical_offset"], kind="stable")
            at = np.searchsorted(near["physical_offset"][order].astype(np.int64), places)
            is_there = at < len(order)
            at = order[np.minimum(at, max(len(order) - 1, 0))] if len(order) else np.zeros(len(rows), np.intp)
            if len(near):
                is_there &= near["physical_offset"][at] == places
            else:
                is_there[:] = False
            self._note(queue.key, NO_UNIT, records, rows[~is_there])
            rows, units, numbers = rows[is_there], near[at[is_there]], begin + at[is_there]
        if len(rows):
            known.unit = int(numbers[-1]) + 1
            self._compare(queue, records, rows, units, numbers)

    def _compare(
        self,
        queue: ConsumeQueue,
        records: RecordColumns,
        rows: NDArray[np.intp],
        units: NDArray[np.void],
        numbers: NDArray[np.int64],
    ) -> None:
        agrees = (units["physical_offset"] == records.places[rows]) & (units["record_size"] == records.sizes[rows])
        if queue.layout is BATCH_UNIT:
            agrees &= (units["base_offset"] == records.queue_offsets[rows]) & (
                units["message_count"] == records.message_counts[rows]
            )
            agrees &= units["store_timestamp"] == records.store_times[rows]
        self.joined.ranges.add(queue.key, numbers[agrees])
        tags = units["tags_code"].astype(np.int64)
        same_tags = tags == records.tags_codes[rows]
        if not same_tags.all():
            same_tags |= self._have_other_tags(queue.key, records, rows, tags, numbers)
        written = units["record_size"] != 0
        written |= units["physical_offset"] != 0
        for kind, wrong in (
            (NO_UNIT, ~agrees & ~written),
            (OTHER_UNIT, ~agrees & written),
            (OTHER_TAGS, agrees & ~same_tags),
        ):
            if wrong.any():
                at = int(np.argmax(wrong))
                unit = units[at]
                found = f"({int(unit['physical_offset'])}, {int(unit['record_size'])}, {int(unit['tags_code'])})"
                self._note(queue.key, kind, records, rows[wrong], found)

    def _have_other_tags(
        self,
        key: QueueKey,
        records: RecordColumns,
        rows: NDArray[np.intp],
        tags: NDArray[np.int64],
        numbers: NDArray[np.int64],
    ) -> NDArray[np.bool_]:
        """Say which tags codes are right though they are not the hash: addresses, and due times of another table."""
        good = tags <= MAX_ADDRESS
        if good.any():
            good[good] = self._ext.agree(
                key, tags[good], records.tags_codes[rows[good]], records.store_times[rows[good]]
            )
        if key.topic == SCHEDULE_TOPIC:
            delays = tags - records.store_times[rows]
            odd = np.flatnonzero((tags != records.tags_codes[rows]) & (delays >= 0))
            for at in odd.tolist():
                seen = self.odd_delays.setdefault(key, {})
                count, first = seen.get(int(delays[at]), (0, int(numbers[at])))
                if len(seen) < _RUNS_AT_MOST:
                    seen[int(delays[at])] = count + 1, first
            good[odd] = True
        return good

    def _note(
        self, key: QueueKey, kind: str, records: RecordColumns, rows: NDArray[np.intp], found: str = ""
    ) -> None:
        """Keep records whose units do not agree, as one run where the last one ends."""
        if not len(rows):
            return
        self.joined.unmet_records += len(rows)
        offsets = records.queue_offsets[rows]
        ends = offsets + records.message_counts[rows]
        for piece in np.split(np.arange(len(rows)), np.flatnonzero(offsets[1:] != ends[:-1]) + 1):
            first, last = rows[piece[0]], rows[piece[-1]]
            runs = self.joined.unmet
            before = runs[-1] if runs else None
            if (
                before is not None
                and (before.key, before.kind) == (key, kind)
                and before.end == int(offsets[piece[0]])
            ):
                before.end, before.last = int(ends[piece[-1]]), int(records.places[last])
                before.count += len(piece)
            elif len(runs) < _RUNS_AT_MOST:
                runs.append(
                    Unmet(
                        key,
                        kind,
                        int(offsets[piece[0]]),
                        int(ends[piece[-1]]),
                        int(records.places[first]),
                        int(records.places[last]),
                        len(piece),
                        int(records.sizes[first]),
                        found,
                    )
                )

    def bounds_of(self, key: QueueKey) -> tuple[int, int] | None:
        """Return the least and the next queue offset of a queue, as log and units say; None if it has no files."""
        queue, known = self._queues.get(key), self._known.get(key)
        if queue is None or key in self._unreadable:
            return None if known is None else (0, known.next_offset)
        end = queue.written_end(self.joined.ranges.end(key) or queue.search_written_end())
        first = self.joined.ranges.begin(key)
        begin = queue.offset_of(end if first is None else first, end)
        held = begin, max(queue.offset_of(end, end), known.next_offset if known is not None else 0)
        queue.run.close()
        return held

    def odd_times(self) -> Iterator[Finding]:
        """Yield units of SCHEDULE_TOPIC_XXXX that are due at a time by no delay that their level has otherwise."""
        for key, delays in self.odd_delays.items():
            queue = self._queues[key]
            for delay_ms, (count, number) in delays.items():
                path, position = queue.run.path_of(number)
                is_single = count == 1 and self.joined.ranges.end(key) - (self.joined.ranges.begin(key) or 0) > 1
                yield Finding(
                    REPAIRABLE if is_single else NOTE,
                    CONSUME_QUEUE,
                    f"{count} messages of delay level {key.queue_id + 1} are due after {delay_ms} ms, which is not "
                    "the level's delay: another table of levels, or a damaged unit",
                    path,
                    position,
                    topic=key.topic,
                    queue_id=key.queue_id,
                    messages=count,
                    next_step="rmq_spark.repair makes the queue anew from the log." if is_single else "",
                    action="rebuild" if is_single else "leave",
                )

    def look_again(self, log: CommitLog, levels: DelayLevels, sleep: Callable[[float], None]) -> None:
        """Leave out of what does not agree what does by now: units of a live writer that were about to come."""
        for attempt in range(_LOOKS):
            if not self.joined.unmet:
                return
            sleep(_LOOK_S * 2**attempt)
            self.joined.unmet = [run for run in self.joined.unmet if not self._agrees_now(run, log, levels)]

    def _agrees_now(self, unmet: Unmet, log: CommitLog, levels: DelayLevels) -> bool:
        queue = self._queues.get(unmet.key)
        if queue is None or queue.layout is BATCH_UNIT or unmet.count > _LOOKED_AGAIN:
            return False
        queue.run.look()
        try:
            units = queue.read(unmet.begin, unmet.end)
        except StoreError:
            return unmet.last < log.segments.begin
        finally:
            queue.run.close()
        if len(units) < unmet.end - unmet.begin:
            return False
        for at in range(len(units)):
            record = log.record_at(int(units.physical_offsets[at]))
            told = (int(units.sizes[at]), int(units.queue_offsets[at]), unmet.key.topic, unmet.key.queue_id)
            if not isinstance(record, Record) or told != (
                record.total_size,
                record.queue_offset,
                record.topic.decode("utf-8", "replace"),
                record.queue_id,
            ):
                return False
            if unmet.key.topic != SCHEDULE_TOPIC and int(units.tags_codes[at]) != tags_code_of(record, levels):
                return False
        self.joined.ranges.add(unmet.key, units.queue_offsets)
        return True


def unreadable_queues(queues: dict[QueueKey, ConsumeQueue]) -> Iterator[tuple[QueueKey, StoreError]]:
    """Yield the queues whose files cannot be read as such, and why."""
    for key, queue in queues.items():
        fault = queue.run.fault()
        if fault is not None:
            yield key, fault
