"""Units of queues held against the records that they should name, block by block of the log.

Each record that gets a unit is looked up in its own queue; which units were met so is kept as ranges, so at the end it
is known which units no record asked for (`loose_units.py`). What does not agree is kept as runs, and judged when all of
the log has been seen (`unit_verdicts.py`): whether a record or its unit is wrong shows only then.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.errors import StoreChangedError, StoreError
from rmq_spark.store.explore.ext_units import ExtUnits
from rmq_spark.store.explore.unmet import NO_QUEUE, NO_UNIT, OTHER_TAGS, OTHER_UNIT, RUNS_AT_MOST, Joined, Step
from rmq_spark.store.format.batch_unit import BATCH_UNIT
from rmq_spark.store.format.filenames import SCHEDULE_TOPIC
from rmq_spark.store.format.record import TRANSACTION_COMMIT, TRANSACTION_MASK
from rmq_spark.store.format.record_columns import RecordColumns
from rmq_spark.store.format.unit_ext import MAX_ADDRESS
from rmq_spark.store.log.queues import ConsumeQueue
from rmq_spark.store.units import QueueKey

_OPEN_QUEUES = 64
_NEAR_UNITS = 64  # of a batch queue, read beside those that should be next


@dataclass(slots=True)
class _Known:
    """What the log has said of a queue so far."""

    next_offset: int
    last_place: int
    unit: int = -1  # of a batch queue: number of the next unit


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
        self._note_steps(key, known, offsets, places, expected, breaks)
        if len(breaks) or key in self.joined.doubled:
            rows_of = {"begin": offsets, "end": offsets + counts, "place": places}
            self.joined.note_doubled(key, rows_of, expected, breaks)
        known.next_offset, known.last_place = int(offsets[-1] + counts[-1]), int(places[-1])
        queue = self._opened(key)
        if queue is None:
            if key not in self._unreadable:
                for piece in np.split(rows, breaks):
                    self.joined.note(key, NO_QUEUE, records, piece)
            return
        try:
            for piece in np.split(rows, breaks):
                if len(piece) and queue.layout is BATCH_UNIT:
                    self._join_batches(queue, known, records, piece)
                elif len(piece):
                    self._join_plain(queue, records, piece)
        except StoreChangedError:
            queue.run.look()  # retention took its first files: their records are on their way out, too

    def _note_steps(
        self,
        key: QueueKey,
        known: _Known,
        offsets: NDArray[np.int64],
        places: NDArray[np.int64],
        expected: NDArray[np.int64],
        breaks: NDArray[np.intp],
    ) -> None:
        """Keep where a queue's records do not follow each other; at 0 it begins anew, its topic was made again."""
        for at in breaks.tolist():
            before = int(places[at - 1]) if at else known.last_place
            if int(offsets[at]) == 0:
                self.joined.lives[key] = int(places[at])
            elif len(self.joined.steps) < RUNS_AT_MOST:
                self.joined.steps.append(Step(key, int(expected[at]), int(offsets[at]), int(places[at]), before))

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
        self.joined.note(queue.key, NO_UNIT, records, outside)
        if not len(inside):
            return
        first, end = int(records.queue_offsets[inside[0]]), int(records.queue_offsets[inside[-1]]) + 1
        units = run.read(first, end)[records.queue_offsets[inside] - first]
        numbers = records.queue_offsets[inside]
        self._compare(queue, records, inside, units, numbers)

    def _join_batches(self, queue: ConsumeQueue, known: _Known, records: RecordColumns, rows: NDArray[np.intp]) -> None:
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
            self.joined.note(queue.key, NO_UNIT, records, rows[~is_there])
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
            same_tags |= self._have_other_tags(queue.key, records, rows, tags, numbers, agrees)
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
                self.joined.note(queue.key, kind, records, rows[wrong], found)

    def _have_other_tags(
        self,
        key: QueueKey,
        records: RecordColumns,
        rows: NDArray[np.intp],
        tags: NDArray[np.int64],
        numbers: NDArray[np.int64],
        agrees: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        """Say which tags codes are right though they are not the hash: addresses, and due times of another table.

        Of units that do not agree with their records none leads anywhere, nor does any where there is no extension.
        """
        good = agrees & (tags <= MAX_ADDRESS) & self._ext.is_there
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
                if len(seen) < RUNS_AT_MOST:
                    seen[int(delays[at])] = count + 1, first
            good[odd] = True
        return good

    def has_records(self, key: QueueKey) -> bool:
        """Say whether the log has a record of a queue that gets a unit."""
        return key in self._known

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


def unreadable_queues(queues: dict[QueueKey, ConsumeQueue]) -> Iterator[tuple[QueueKey, StoreError]]:
    """Yield the queues whose files cannot be read as such, and why."""
    for key, queue in queues.items():
        fault = queue.run.fault()
        if fault is not None:
            yield key, fault
